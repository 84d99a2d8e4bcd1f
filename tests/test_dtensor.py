"""Every layout in which the planner may store a parameter is carried exactly by a DTensor, on real ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar3d.errors import LayoutError
from autopar3d.grid import AXES, Grid
from autopar3d.layout import Layout
from autopar3d.passes.propagate import storages
from autopar3d.ranks.launch import Pool
from autopar3d.running.dtensor import from_placements, is_exact, placements, to_dtensor, to_local
from autopar3d.search.factors import ValueShape
from autopar3d.testing import grids, layouts

# Per tensor its dims as atoms; (3, 4, 4) are the rows of a fused q/k/v weight.
EVEN = (((16,), (32,)), ((24,),), ((8,), (12,), (16,)), ((48,), (8,)), ((3, 4, 4), (8,)))
UNEVEN = ((5,), (7, 3))


def test_axes_in_mesh_order_are_shards() -> None:
    assert placements(Layout.of("xy", "z"), Grid(2, 2, 2)) == (Shard(0), Shard(0), Shard(1))


def test_an_axis_inside_a_later_one_is_a_strided_shard() -> None:
    grid = Grid(2, 3, 4)
    assert placements(Layout.of("zx", "y"), grid) == (_StridedShard(0, split_factor=4), Shard(1), Shard(0))
    assert placements(Layout.of("zyx"), grid) == (
        _StridedShard(0, split_factor=12),
        _StridedShard(0, split_factor=4),
        Shard(0),
    )


def test_partial_and_replicated_axes() -> None:
    assert placements(Layout.of("y", partial="x"), Grid(2, 2, 2)) == (Partial("sum"), Shard(0), Replicate())
    assert not is_exact(Layout.of("y", partial="x"), (4,), Grid(2, 2, 2))


def test_packed_dims_are_refused() -> None:
    packed = Layout.parse("[(3 4:y 2)]")
    assert not is_exact(packed, (24,), Grid(2, 2, 2))
    with pytest.raises(LayoutError, match="part of a dim"):
        placements(packed, Grid(2, 2, 2))


def test_uneven_dims_are_exact_in_mesh_order_only() -> None:
    grid = Grid(2, 2, 2)
    assert is_exact(Layout.of("xz"), (5,), grid)
    assert not is_exact(Layout.of("zx"), (5,), grid)
    assert is_exact(Layout.of("zx"), (5,), Grid(2, 2, 1))  # z does not shard


def test_placements_that_no_layout_says() -> None:
    grid = Grid(2, 2, 2)
    for bad in (
        (_StridedShard(0, split_factor=3), Shard(0), Replicate()),
        (Partial("max"), Replicate(), Replicate()),
        (Shard(0),),
    ):
        with pytest.raises(LayoutError):
            from_placements(bad, grid, 1)


@settings(deadline=None)
@given(st.data())
def test_placements_invert(data: Any) -> None:
    grid = data.draw(grids(16))
    layout = data.draw(layouts((16, 32, 6), grid, uneven=True))
    if layout.is_plain:
        assert from_placements(placements(layout, grid), grid, 3) == layout


# -- on real ranks -------------------------------------------------------------------------------------------


def _shape(dims: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(torch.tensor(d).prod().item() for d in dims)  # type: ignore[misc]


def _cases(grid: Grid) -> list[tuple[str, tuple[int, ...], list[Layout]]]:
    """(name, shape, stored layouts): all that the planner may choose, and the uneven ones in mesh order."""
    found = []
    for dims in EVEN:
        value = ValueShape(dims, torch.float64)
        shape = _shape(dims)
        found.append((f"{dims}", shape, [value.layout(s, grid) for s in storages(value, grid)]))
    for shape in UNEVEN:
        found.append((f"{shape}", shape, [u for u in _all_plain(len(shape), grid) if is_exact(u, shape, grid)]))
    return found


def _all_plain(ndim: int, grid: Grid) -> list[Layout]:
    from autopar3d.layout import ordered_assignments

    return [Layout.of(*lists) for lists in ordered_assignments(grid.axes, ndim)]


def _tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _mesh(grid: Grid) -> Any:
    import logging

    from torch.distributed.device_mesh import init_device_mesh

    # It recommends flattened meshes, once per placement and rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return init_device_mesh("cpu", grid.sizes, mesh_dim_names=AXES)


def _copies() -> list[tuple[str, tuple[int, ...], int]]:
    """(name, shape, copies) of each tensor: a copy for each of its layouts on the grid that has most."""
    return [(n, s, len(o)) for n, s, o in _cases(Grid(2, 2, 2))]


def _state(grid: Grid, mesh: Any, fill: bool, offset: int = 0) -> dict[str, DTensor]:
    """The copies of every tensor, each in the next of its layouts."""
    rank = dist.get_rank()
    found = {}
    for number, ((name, shape, options), (_, _, copies)) in enumerate(zip(_cases(grid), _copies(), strict=True)):
        for i in range(copies):
            layout = options[(i + offset) % len(options)]
            assert is_exact(layout, shape, grid), f"{layout} of {shape}"
            full = _tensor(shape, 100 * number + i)
            local = layout.shard(full if fill else torch.full_like(full, torch.nan), grid, rank, pad=True)
            found[f"{name}.{i}"] = to_dtensor(local, layout, shape, grid, mesh)
    return found


def _wrong(state: dict[str, DTensor], grid: Grid) -> list[str]:
    """Tensors whose pieces are not those of the values saved."""
    wrong = []
    for number, (name, shape, copies) in enumerate(_copies()):
        for i in range(copies):
            tensor = state[f"{name}.{i}"]
            layout = from_placements(tensor.placements, grid, len(shape))
            piece = layout.shard(_tensor(shape, 100 * number + i), grid, dist.get_rank())
            if not torch.equal(tensor.to_local(), piece):
                wrong.append(f"{name} as {layout}")
    return wrong


def _wrong_whole(state: dict[str, DTensor]) -> list[str]:
    """Tensors whose `full_tensor` is not the value saved."""
    wrong = []
    for number, (name, shape, copies) in enumerate(_copies()):
        for i in range(copies):
            tensor = state[f"{name}.{i}"]
            if not torch.equal(tensor.full_tensor(), _tensor(shape, 100 * number + i)):
                wrong.append(f"{name} as {tensor.placements}")
    return wrong


def _save_and_train(sizes: tuple[int, int, int], folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    grid = Grid(*sizes)
    mesh = _mesh(grid)
    state = _state(grid, mesh, fill=True)
    report: dict[str, Any] = {"full_tensor": _wrong_whole(state)}
    for layout, shape in [(options[-1], s) for _, s, options in _cases(grid)]:  # pads are restored
        local = layout.shard(_tensor(shape, 0), grid, dist.get_rank(), pad=True)
        again = to_local(to_dtensor(local, layout, shape, grid, mesh), layout, grid)
        assert torch.equal(again, local)
    dcp.save({n: t for n, t in state.items()}, checkpoint_id=folder)
    report["train"] = _train(grid, mesh)
    return report


def _load(sizes: tuple[int, int, int], folder: str, offset: int) -> list[str]:
    import torch.distributed.checkpoint as dcp

    grid = Grid(*sizes)
    state = _state(grid, _mesh(grid), fill=False, offset=offset)
    dcp.load({n: t for n, t in state.items()}, checkpoint_id=folder)
    return _wrong(state, grid)


def _train(grid: Grid, mesh: Any) -> list[str]:
    """Two AdamW steps with clipping on DTensors and on plain tensors: where they differ."""
    rank = dist.get_rank()
    # Few: DTensor takes a third of a second for each op on each new pair of shape and placements.
    kinds = [(shape, options[-1]) for _, shape, options in _cases(grid)[:6:2] + _cases(grid)[-1:]]
    fulls = [_tensor(shape, k) for k, (shape, _) in enumerate(kinds)]
    plain = [torch.nn.Parameter(t.clone()) for t in fulls]
    ours = [
        torch.nn.Parameter(to_dtensor(layout.shard(t, grid, rank).clone(), layout, shape, grid, mesh))
        for t, (shape, layout) in zip(fulls, kinds, strict=True)
    ]
    optimizers = [torch.optim.AdamW(ps, lr=0.1) for ps in (plain, ours)]
    wrong = []
    for step in range(2):
        for k, (shape, layout) in enumerate(kinds):
            grad = _tensor(shape, 1000 * step + k)
            plain[k].grad = grad
            ours[k].grad = to_dtensor(layout.shard(grad, grid, rank).clone(), layout, shape, grid, mesh)
        norms = [torch.nn.utils.clip_grad_norm_(ps, 1.0) for ps in (plain, ours)]
        norm = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
        if not torch.allclose(norm, norms[0], rtol=1e-12):
            wrong.append(f"norm {norm} instead of {norms[0]}")
        for optimizer in optimizers:
            optimizer.step()
    for (shape, layout), a, b in zip(kinds, plain, ours, strict=True):
        if not torch.allclose(b.full_tensor(), a, rtol=1e-12, atol=1e-12):  # type: ignore[attr-defined]
            wrong.append(f"{layout} of {shape} after two steps")
    return wrong


def test_stored_layouts_are_carried_exactly(ranks: Pool) -> None:
    """full_tensor, clipping and AdamW on one grid; saved there, loaded on others in other layouts."""
    with tempfile.TemporaryDirectory() as folder:
        for report in ranks.run(_save_and_train, (2, 2, 2), folder, ranks=8):
            assert report == {"full_tensor": [], "train": []}
        for sizes, offset in (((2, 1, 4), 1), ((1, 2, 3), 0)):
            for wrong in ranks.run(_load, sizes, folder, offset, ranks=Grid(*sizes).size):
                assert wrong == []


def _gradients() -> list[bool]:
    """Gradients are DTensors that share the description of their parameter, and are those of `from_local`."""
    import autopar3d

    torch.manual_seed(0)
    par = autopar3d.compile(torch.nn.Linear(8, 12), (2, 1, 2), torch.randn(4, 8), scheme="3d")
    par(torch.ones(4, 8)).sum().backward()
    expected = [torch.full((12, 8), 4.0), torch.full((12,), 4.0)]
    found = []
    for p, full in zip(par.parameters(), expected, strict=True):
        assert isinstance(p.grad, DTensor) and isinstance(p, DTensor)
        found += [p.grad._spec is p._spec, torch.equal(p.grad.full_tensor(), full), not p.grad.requires_grad]
    return found


def test_gradients_share_the_description_of_their_parameter(ranks: Pool) -> None:
    assert ranks.run(_gradients, ranks=4) == [[True] * 6] * 4
