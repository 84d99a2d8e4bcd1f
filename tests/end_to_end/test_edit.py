"""forward_graph and backward_graph are what runs: edit a node, and the next step is another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

import autopar3d
from autopar3d import ParallelModule
from autopar3d.ranks.launch import Pool

from .cases import Sizes, case

torch.set_num_threads(1)
aten = torch.ops.aten


def nodes(graph: GraphModule, target: object) -> list[Node]:
    return [n for n in graph.graph.nodes if n.target is target]


def double(graph: GraphModule, node: Node) -> None:
    """Let every reader of a node have twice its value."""
    with graph.graph.inserting_after(node):
        twice = graph.graph.call_function(aten.mul.Tensor, (node, 2.0))
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    graph.recompile()


def losses(grid: Sizes, simulate: bool) -> list[float]:
    """Before an edit of the forward, after it, and after its undoing."""
    make, (args, kwargs) = case("mlp")
    par: ParallelModule = (autopar3d.simulate if simulate else autopar3d.compile)(make(), grid, args, kwargs)
    found = [par(*args, **kwargs).item()]
    forward = par.forward_graph
    (gelu,) = nodes(forward, aten.gelu.default)
    double(forward, gelu)
    found.append(par(*args, **kwargs).item())
    (twice,) = [n for n in gelu.users if n.args == (gelu, 2.0)]
    twice.replace_all_uses_with(gelu)
    forward.graph.erase_node(twice)
    forward.recompile()
    found.append(par(*args, **kwargs).item())
    return found


def doubled_gelu() -> float:
    """The loss of the edited program, from the plain model."""
    make, (args, kwargs) = case("mlp")
    model = make()
    with torch.no_grad():
        model.down.weight.mul_(2)
    return model(*args, **kwargs).item()


def test_an_edited_forward_changes_the_loss() -> None:
    before, after, undone = losses((2, 2, 2), simulate=True)
    assert after != before == undone
    assert after == pytest.approx(doubled_gelu(), rel=1e-12)


def test_on_real_ranks(ranks: Pool) -> None:
    for before, after, undone in ranks.run(losses, (1, 2, 2), False, ranks=4):
        assert after != before == undone
        assert after == pytest.approx(doubled_gelu(), rel=1e-12)


def test_an_edited_backward_changes_the_gradients() -> None:
    make, (args, kwargs) = case("mlp")
    par = autopar3d.simulate(make(), (2, 2, 2), args, kwargs)
    par(*args, **kwargs).backward()
    before = {name: p.grad.clone() for name, p in par.named_parameters() if p.grad is not None}
    par.zero_grad()
    backward = par.backward_graph
    assert backward is not None
    (gelu,) = nodes(backward, aten.gelu_backward.default)
    double(backward, gelu)
    par(*args, **kwargs).backward()
    after = {name: p.grad for name, p in par.named_parameters() if p.grad is not None}
    # Only what lies behind the gelu, seen from the loss.
    torch.testing.assert_close(after["up.weight"], 2 * before["up.weight"])
    assert torch.equal(after["down.weight"], before["down.weight"])


def test_an_edit_is_not_another_modules() -> None:
    make, (args, kwargs) = case("mlp")
    one, other = (autopar3d.simulate(make(), (2, 1, 1), args, kwargs) for _ in range(2))
    (gelu,) = nodes(one.forward_graph, aten.gelu.default)
    double(one.forward_graph, gelu)
    assert one(*args, **kwargs).item() != other(*args, **kwargs).item()
    assert not dist.is_initialized()
