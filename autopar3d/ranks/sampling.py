"""Which samples a rank reads, when each rank passes its own part of the batch."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import StateError
from ..grid import Grid
from ..layout import Layout


def data_place(layouts: Mapping[str, Layout], grid: Grid, index: int) -> tuple[int, int]:
    """(number of this rank's part of the batch, number of parts).

    Args:
        layouts: of the inputs, by path; their first dim is the batch.
        index: the rank's position in the grid.

    Raises:
        StateError: the inputs' batches are cut by different axes.
    """
    cuts = {path: tuple(a for f in layout.dims[0] for a in f.axes) for path, layout in layouts.items() if layout.dims}
    if len(set(cuts.values())) > 1:
        listed = ", ".join(f"{path} by {''.join(axes) or 'no axis'}" for path, axes in cuts.items())
        raise StateError(
            f"the inputs' first dims are cut differently on grid {grid}: {listed}; there is no one part of the batch "
            "for a rank, so give each input its part by par.input_layouts[path].shard(tensor, grid, rank), or pass the "
            'whole batch with inputs="global"'
        )
    coordinates = grid.coordinates(index)
    place, parts = 0, 1
    for axis in next(iter(cuts.values()), ()):
        place, parts = place * grid.axis_size(axis) + coordinates[axis], parts * grid.axis_size(axis)
    return place, parts
