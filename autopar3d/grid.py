"""The grid of devices: three named axes, and which ranks form a group along each; replicas of it, as a fourth.

A `Grid` needs no process group: planning and simulation use its sizes only. `Grid.of` accepts what users pass as
`grid=`: a `Grid`, three integers, or a `DeviceMesh`, 3-D or with the replicas as its first dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Union

from .errors import GridError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("x", "y", "z")
LANE = "lane"  # see `LaneGrid`
# The axis of the replicas. Its role is fixed: outermost over the batch, and parameters are whole over it.
REPLICAS = "r"
ALL_AXES = (REPLICAS, *AXES)

GridLike = Union["Grid", Sequence[int], "DeviceMesh", str]


@dataclass(frozen=True)
class Grid:
    """`x * y * z` devices. Rank `i` sits at coordinates `(ix, iy, iz)` with `i = (ix * y + iy) * z + iz`.

    Ranks that differ only in z are neighbours, so z is the axis that lies inside a node first.

    With `replicas` there are so many such grids, one after the other in rank order, which share the batch: axis r is
    the outermost, cuts the batch first, and never a parameter; gradients are all-reduced over it.

    Args:
        x, y, z: axis sizes, each at least 1. Cubes are not required.
        ranks: the global ranks in grid order, when they are not 0, 1, 2, ... (taken from a DeviceMesh).
        replicas: number of copies of the model.

    Raises:
        GridError: an axis is not a positive integer.
    """

    x: int
    y: int
    z: int
    ranks: tuple[int, ...] = ()
    replicas: int = field(default=1, kw_only=True)

    lanes = 1  # see `LaneGrid`

    def __post_init__(self) -> None:
        for name, size in zip(("replicas", *AXES), (self.replicas, *self.sizes), strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                what = "replicas is" if name == "replicas" else f"axis {name} has size"
                raise GridError(
                    f"grid {self}: {what} {size!r}; "
                    "every axis needs a whole number of at least 1, and their product must be the world size"
                )
        if self.ranks and len(self.ranks) != self.size:
            raise GridError(f"grid {self} has {self.size} places but {len(self.ranks)} ranks were given")

    @classmethod
    def of(cls, grid: GridLike) -> Grid:
        """Read any accepted form of `grid=`.

        Raises:
            GridError: not three sizes, an axis below 1, or a mesh that is not 3-D or 4-D.
        """
        if isinstance(grid, Grid):
            return grid
        if isinstance(grid, str):
            raise GridError(f'grid={grid!r} is not known; pass three sizes (x, y, z), or "auto"')
        mesh: Any = getattr(grid, "mesh", None)
        if mesh is not None:
            if mesh.ndim not in (3, 4):
                raise GridError(
                    f"grid= got a DeviceMesh of shape {tuple(mesh.shape)}; it needs exactly 3 dimensions, or 4 with "
                    "the replicas first"
                )
            ranks = tuple(int(r) for r in mesh.flatten().tolist())
            ordered = ranks == tuple(range(len(ranks)))
            replicas, x, y, z = (int(s) for s in (1, 1, *mesh.shape)[-4:])
            return cls(x, y, z, () if ordered else ranks, replicas=replicas)
        try:
            sizes: tuple[Any, ...] = tuple(grid)  # type: ignore[arg-type]
        except TypeError:
            sizes = (grid,)
        if len(sizes) != 3:
            raise GridError(
                f"grid {sizes} has {len(sizes)} entries; a grid is three sizes (x, y, z), "
                "for instance (4, 2, 1): use 1 for an axis you do not need"
                + ("; replicas are asked for by Grid(x, y, z, replicas=r)" if len(sizes) == 4 else "")
            )
        # numpy's and torch's whole numbers too
        x, y, z = (int(s) if isinstance(s, Integral) and not isinstance(s, bool) else s for s in sizes)
        return cls(x, y, z)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.x, self.y, self.z)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of its DeviceMesh: the three sizes, after the number of replicas where there are several."""
        return self.sizes if self.replicas == 1 else (self.replicas, *self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dims of its DeviceMesh."""
        return AXES if self.replicas == 1 else ALL_AXES

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.x * self.y * self.z * self.replicas

    @property
    def one_replica(self) -> Grid:
        """The three axes alone."""
        return self if self.replicas == 1 else Grid(*self.sizes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes with more than one place; the others never shard or communicate."""
        return tuple(a for a in self.names if self.axis_size(a) > 1)

    def axis_size(self, axis: str) -> int:
        return self._by_axis[axis]

    @cached_property
    def _by_axis(self) -> dict[str, int]:
        return dict(zip(ALL_AXES, (self.replicas, *self.sizes), strict=True))

    def extent(self, axes: Sequence[str]) -> int:
        """Number of places along several axes together."""
        sizes, places = self._by_axis, 1
        for a in axes:
            places *= sizes[a]
        return places

    def coordinates(self, index: int) -> dict[str, int]:
        """Coordinates of the device at position `index` (not the global rank, when `ranks` reorders)."""
        found = {}
        for axis in reversed(self.names):
            index, found[axis] = divmod(index, self.axis_size(axis))
        return {a: found[a] for a in self.names}

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Positions that form a group along `axis`, each in coordinate order; every position is in one group."""
        others = [a for a in self.names if a != axis]
        found = []
        for place in itertools.product(*(range(self.axis_size(a)) for a in others)):
            fixed = dict(zip(others, place, strict=True))
            found.append(tuple(self.index({**fixed, axis: i}) for i in range(self.axis_size(axis))))
        return found

    def index(self, coordinates: dict[str, int]) -> int:
        found = 0
        for axis in self.names:
            found = found * self.axis_size(axis) + coordinates[axis]
        return found

    def alias(self, axis: str) -> str:
        """The group name that stands in emitted graphs: the same on every rank, and for `plan` and `simulate`.

        (torch numbers the groups of a DeviceMesh differently on each rank, which would make graphs differ.)
        """
        suffix = "" if not self.ranks else "_" + "_".join(map(str, self.ranks))
        return f"ap3d_{axis}_{'x'.join(map(str, self.shape))}{suffix}"

    def in_lane(self, lane: int) -> Grid:
        """The grid as the program of one lane names it; see `LaneGrid`."""
        return self

    def check_world(self, world_size: int) -> None:
        """Raise GridError when the grid does not have exactly `world_size` places."""
        check_size(world_size)
        if self.size != world_size:
            legal = ", ".join(str(g) for g in factorisations(world_size))
            product = "*".join(map(str, self.shape))
            raise GridError(
                f"grid {self} needs {product} = {self.size} ranks but the "
                f"world size is {world_size}; start {self.size} ranks, or use one of: {legal}"
            )

    def __str__(self) -> str:
        more = f", replicas={self.replicas}" if self.replicas != 1 else ""
        return f"({self.x}, {self.y}, {self.z}{more})"

    def __repr__(self) -> str:
        more = f", replicas={self.replicas}" if self.replicas != 1 else ""
        return f"Grid(x={self.x}, y={self.y}, z={self.z}{more})"


@dataclass(frozen=True)
class LaneGrid(Grid):
    """A grid whose ranks each go through their part of the batch in several lanes.

    The lanes of a rank are one more axis, `LANE`: layouts and routes treat it as the others, but its "ranks" are
    copies of the ops in one local program, so that its collectives are local ops and its index is a constant.

    Args:
        lanes: how many.
        lane: the one in whose name groups are looked up.
    """

    lanes: int = 2
    lane: int = 0

    @cached_property
    def _by_axis(self) -> dict[str, int]:
        return {**dict(zip(ALL_AXES, (self.replicas, *self.sizes), strict=True)), LANE: self.lanes}

    def alias(self, axis: str) -> str:
        return f"{LANE}_{self.lane}_{self.lanes}" if axis == LANE else super().alias(axis)

    def in_lane(self, lane: int) -> Grid:
        return replace(self, lane=lane)


def check_size(world_size: Any) -> None:
    """Raise GridError for what is no number of devices."""
    if isinstance(world_size, bool) or not isinstance(world_size, Integral) or int(world_size) < 1:
        raise GridError(f"world_size={world_size!r}: it is the number of devices, a whole number of at least 1")


def factorisations(world_size: int) -> Iterator[tuple[int, int, int]]:
    """All ordered grids of `world_size` devices."""
    for x in range(1, world_size + 1):
        if world_size % x == 0:
            for y in range(1, world_size // x + 1):
                if (world_size // x) % y == 0:
                    yield (x, y, world_size // x // y)
