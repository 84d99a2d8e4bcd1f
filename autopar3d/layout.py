"""Layouts: which grid axes shard which part of a tensor, and over which axes it is still a partial sum.

Each dim is a row of *factors*, outermost first. A plain dim has one. A dim that came from flattening `(batch, seq)` has
two, and a fused q/k/v weight's rows are `(3, heads, head_dim)`, sharded on the heads inside the outer 3. A factor lists
the axes that shard it, outer first, as in JAX's PartitionSpec and Shardy (arXiv 2104.13478 and openxla/shardy).

Ownership is by nested chunks, as DTensor's: 5 rows over (x, y) of size 2 are 3 + 2, then 2 + 1 and 1 + 1. The *valid*
lengths may differ by rank; a local buffer is padded at its end to the ceiling, so that every rank has one shape.

Text form, which `str` writes and `Layout.parse` reads:

    [xy, -, z] +{x}      dim 0 over x then y, dim 1 whole, dim 2 over z; still a partial sum over x
    [(4:x 8:y), 16:z]    dim 0 is 4 * 8, the 4 sharded by x and the 8 by y
    [(3 h:y d), k:zx]    names instead of sizes, where `sizes={"h": 12, "d": 64}` says what they are
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .errors import LayoutError
from .grid import ALL_AXES, AXES, Grid


class Factor(NamedTuple):
    """Part of a dim. `size` is 0 for a dim's only factor: it is then the whole dim, whatever its length."""

    size: int
    axes: tuple[str, ...]


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Layout:
    """Where the pieces of one tensor live on a grid. Frozen, hashable, independent of the tensor's lengths.

    Args:
        dims: per tensor dim its factors, outermost first.
        partial: axes over which the ranks' values must still be summed.

    Raises:
        LayoutError: an axis is used twice or does not exist, or a factored dim has a factor without a size.
    """

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        used = [a for dim in self.dims for f in dim for a in f.axes] + sorted(self.partial)
        for axis in used:
            if axis not in ALL_AXES:
                raise LayoutError(f"layout {self}: there is no grid axis {axis!r}; the axes are {', '.join(AXES)}")
            if used.count(axis) > 1:
                raise LayoutError(f"layout {self}: axis {axis} is used {used.count(axis)} times; once is possible")
        for i, dim in enumerate(self.dims):
            if not dim or (len(dim) > 1 and any(f.size < 1 for f in dim)):
                raise LayoutError(f"layout {self}: dim {i} has several factors, so each needs a size")

    # -- making ------------------------------------------------------------------------------------------------------

    @classmethod
    def replicated(cls, ndim: int) -> Layout:
        return cls(((Factor(0, ()),),) * ndim)

    @classmethod
    def of(cls, *dims: str | Sequence[str], partial: Iterable[str] = ()) -> Layout:
        """`Layout.of("xy", "", "z")`: the axes of each (unfactored) dim."""
        return cls(tuple((Factor(0, tuple(d)),) for d in dims), frozenset(partial))

    @classmethod
    def from_factors(cls, dims: Sequence[Sequence[Factor]], grid: Grid, partial: Iterable[str] = ()) -> Layout:
        """The canonical layout with these factors: neighbours that make one nested-chunk cut are merged.

        `(4:x 8)` is `32:x`, and `(2:x 16:y)` with x of size 2 is `32:xy`; `(4:x 8:y)` stays as it is.
        """
        return cls(tuple(_merge(dim, grid) for dim in dims), frozenset(partial))

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int] | None = None) -> Layout:
        """Read the text form. `sizes` gives the lengths of factors that the text names instead of numbering.

        Raises:
            LayoutError: not a layout, or a name in a factored dim has no size.
        """
        match = re.fullmatch(r"\s*\[(.*)\]\s*(?:\+\{([a-z, ]*)\})?\s*", text)
        if not match:
            raise LayoutError(f"{text!r} is not a layout; one looks like '[xy, -, z] +{{x}}' or '[(4:x 8:y), z]'")
        dims = [_parse_dim(d.strip(), sizes or {}, text) for d in match[1].split(",")] if match[1].strip() else []
        return cls(tuple(dims), frozenset(re.findall("[a-z]", match[2] or "")))

    def __str__(self) -> str:
        body = "[" + ", ".join(_dim_text(d) for d in self.dims) + "]"
        return body + (f" +{{{','.join(sorted(self.partial))}}}" if self.partial else "")

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        return tuple(a for dim in self.dims for f in dim for a in f.axes)

    @property
    def is_plain(self) -> bool:
        """No dim has more than one factor."""
        return all(len(d) == 1 for d in self.dims)

    def replicated_axes(self, grid: Grid) -> tuple[str, ...]:
        return tuple(a for a in grid.axes if a not in self.sharding_axes and a not in self.partial)

    def factors(self, shape: Sequence[int]) -> tuple[Dim, ...]:
        """The dims' factors with every size filled in for a tensor of this global shape.

        Raises:
            LayoutError: the shape has another rank, or a dim's factors do not multiply to its length.
        """
        if len(shape) != self.ndim:
            raise LayoutError(f"layout {self} is for {self.ndim} dims; the tensor has shape {tuple(shape)}")
        out: list[Dim] = []
        for i, (dim, n) in enumerate(zip(self.dims, shape, strict=True)):
            if len(dim) == 1:
                if dim[0].size not in (0, n):
                    raise LayoutError(f"layout {self}: dim {i} is {dim[0].size} long; the tensor has {tuple(shape)}")
                out.append((Factor(int(n), dim[0].axes),))
            elif math.prod(f.size for f in dim) == n:
                out.append(dim)
            else:
                product = " * ".join(str(f.size) for f in dim)
                raise LayoutError(f"layout {self}: dim {i} is {product}, but shape {tuple(shape)} has {n} there")
        return tuple(out)

    def check(self, shape: Sequence[int], grid: Grid) -> None:
        """Raise LayoutError unless a tensor of this shape can be stored so: inner factors must divide evenly.

        The outermost factor of a dim may be cut unevenly only when it is the dim's only factor: the pads of an
        uneven factor inside a packed dim would lie between other factors' elements.
        """
        for i, dim in enumerate(self.factors(shape)):
            for f in dim:
                n = grid.extent(f.axes)
                if len(dim) > 1 and f.size % n:
                    raise LayoutError(
                        f"layout {self}: dim {i} of shape {tuple(shape)} has a factor {f.size} over axes "
                        f"{''.join(f.axes)} of size {n}: {f.size} % {n} = {f.size % n}; use axes that divide it"
                    )

    def is_even(self, shape: Sequence[int], grid: Grid) -> bool:
        return all(f.size % grid.extent(f.axes) == 0 for dim in self.factors(shape) for f in dim)

    def local_shape(self, shape: Sequence[int], grid: Grid) -> tuple[int, ...]:
        """Shape of every rank's (padded) buffer."""
        return tuple(math.prod(_ceil(f, grid) for f in dim) for dim in self.factors(shape))

    def global_shape(self, local: Sequence[int], grid: Grid) -> tuple[int, ...]:
        """Inverse of `local_shape` for even layouts."""
        return tuple(n * math.prod(grid.extent(f.axes) for f in d) for n, d in zip(local, self.dims, strict=True))

    def valid_shape(self, shape: Sequence[int], grid: Grid, index: int) -> tuple[int, ...]:
        """Shape of the part that the device at `index` really owns."""
        coords = grid.coordinates(index)
        return tuple(math.prod(_chunk(f, grid, coords)[1] for f in dim) for dim in self.factors(shape))

    # -- moving data (reference semantics; the emitted graphs move data with collectives) ------------------------------

    def shard(self, tensor: torch.Tensor, grid: Grid, index: int, *, pad: bool = False) -> torch.Tensor:
        """The piece of a global tensor owned by the device at `index` (partial: whole on coordinate 0, else zeros)."""
        factors, coords = self.factors(tensor.shape), grid.coordinates(index)
        piece = tensor.reshape([f.size for dim in factors for f in dim])
        for i, f in enumerate(f for dim in factors for f in dim):
            piece = piece.narrow(i, *_chunk(f, grid, coords))
        piece = piece.reshape(self.valid_shape(tensor.shape, grid, index))
        if any(coords[a] for a in self.partial):
            piece = torch.zeros_like(piece)
        if pad:
            target = self.local_shape(tensor.shape, grid)
            widths = [w for n, t in zip(reversed(piece.shape), reversed(target), strict=True) for w in (0, t - n)]
            piece = torch.nn.functional.pad(piece, widths)
        return piece

    def assemble(self, pieces: Sequence[torch.Tensor], shape: Sequence[int], grid: Grid) -> torch.Tensor:
        """The global tensor from every device's piece (padded or not), in grid order; partial sums are added."""
        factors = self.factors(shape)
        out = pieces[0].new_zeros([f.size for dim in factors for f in dim])
        replicated = [a for a in self.replicated_axes(grid)]
        for index, piece in enumerate(pieces):
            coords = grid.coordinates(index)
            if any(coords[a] for a in replicated):
                continue
            view, flat = out, [f for dim in factors for f in dim]
            for i, f in enumerate(flat):
                view = view.narrow(i, *_chunk(f, grid, coords))
            for i, n in enumerate(self.valid_shape(shape, grid, index)):
                piece = piece.narrow(i, 0, n)
            view += piece.reshape(view.shape)
        return out.reshape(tuple(shape))


def _ceil(factor: Factor, grid: Grid) -> int:
    n = factor.size
    for axis in factor.axes:
        n = -(-n // grid.axis_size(axis))
    return n


def _chunk(factor: Factor, grid: Grid, coords: Mapping[str, int]) -> tuple[int, int]:
    """(start, length) of the nested chunk at these coordinates."""
    start, length = 0, factor.size
    for axis in factor.axes:
        step = -(-length // grid.axis_size(axis))
        offset = min(coords[axis] * step, length)
        start, length = start + offset, min(step, length - offset)
    return start, length


def _merge(dim: Sequence[Factor], grid: Grid) -> Dim:
    merged: list[Factor] = []
    for f in dim:
        if f.size == 1 and not f.axes and len(dim) > 1:
            continue
        if merged:
            last = merged[-1]
            if not f.axes or grid.extent(last.axes) == last.size:
                merged[-1] = Factor(last.size * f.size, last.axes + f.axes)
                continue
        merged.append(f)
    if len(merged) <= 1:
        return (Factor(0, merged[0].axes if merged else ()),)
    return tuple(merged)


def _parse_dim(text: str, sizes: Mapping[str, int], whole: str) -> Dim:
    if text.startswith("(") and text.endswith(")"):
        factors = []
        for part in text[1:-1].split():
            name, _, axes = part.partition(":")
            size = int(name) if name.isdigit() else sizes.get(name)
            if size is None:
                raise LayoutError(f"layout {whole!r}: give the size of factor {name!r}, as in sizes={{{name!r}: 12}}")
            factors.append(Factor(size, () if axes == "-" else tuple(axes)))
        return tuple(factors) if len(factors) > 1 else (Factor(0, factors[0].axes),) if factors else ()
    if re.fullmatch(r"-|[a-z]+|\w+:[a-z]+|\w+:-?", text):
        axes = text.rpartition(":")[2]
        return (Factor(0, () if axes in ("-", "") else tuple(axes)),)
    raise LayoutError(f"layout {whole!r}: cannot read the dim {text!r}; write '-', 'xy', 'name:xy' or '(4:x 8:y)'")


def _dim_text(dim: Dim) -> str:
    if len(dim) == 1:
        return "".join(dim[0].axes) or "-"
    return "(" + " ".join(f"{f.size}:{''.join(f.axes)}" if f.axes else str(f.size) for f in dim) + ")"


def ordered_assignments(axes: Sequence[str], places: int) -> Iterable[tuple[tuple[str, ...], ...]]:
    """All ways to put axes into ordered lists at `places` places, each axis at most once; unused axes are left out.

    For three axes and four places (a linear's batch, sequence, in, out) there are 193.
    """
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            yield from _distribute(chosen, places)


def _distribute(chosen: tuple[str, ...], places: int) -> Iterable[tuple[tuple[str, ...], ...]]:
    # Cutting one sequence of axes into `places` consecutive runs meets every ordered assignment exactly once.
    for cuts in itertools.combinations_with_replacement(range(len(chosen) + 1), places - 1):
        bounds = (0, *cuts, len(chosen))
        yield tuple(chosen[bounds[i] : bounds[i + 1]] for i in range(places))
