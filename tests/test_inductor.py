"""backend="inductor": the same results, and starts, waits and products in the order of the graph."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import autopar3d
from autopar3d.errors import PlanError
from autopar3d.ranks.launch import Pool
from autopar3d.running.inductor import compile_graph
from autopar3d.timelines.timing import is_heavy, is_start, is_wait

X, Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 16)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def order_in_graph(graph: GraphModule) -> list[str]:
    found = []
    for node in graph.graph.nodes:
        if is_start(node) or is_wait(node):
            found.append(node.target._schema.name.split("::")[1])
        elif is_heavy(node):
            found.append("product")
    return found


def order_in_code(code: str) -> list[str]:
    found = []
    for line in code.split("def call(")[1].splitlines():
        if match := re.search(r"torch\.ops\._c10d_functional\.(\w+)\.default\(", line):
            if "assert_" not in line:
                found.append(match[1].removesuffix("_"))
        elif re.search(r"extern_kernels\.\w*mm\(", line):
            found.append("product")
    return found


def orders(graph: GraphModule) -> tuple[list[str], list[str]]:
    """Of starts, waits and products: in the graph, and in what inductor makes of it."""
    values = [
        torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in graph.graph.nodes if n.op == "placeholder"
    ]
    return order_in_graph(graph), order_in_code(compile_graph(graph, values)[1])


def _train() -> dict[str, Any]:
    results = []
    call = {"example_inputs": X, "example_kwargs": {"targets": (Y,)}, "loss_fn": loss_fn, "scheme": "3d"}
    for backend in ("eager", "inductor"):
        par = autopar3d.compile(model(), (2, 1, 2), backend=backend, **call)
        losses = []
        optimizer = torch.optim.SGD(par.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = par(X, targets=(Y,))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append([*losses, *(p.grad.full_tensor() for p in par.parameters())])
    found = [orders(graph) for graph in (par.forward_graph, par.backward_graph)]
    # An edited graph is what runs: the loss comes out with the other sign.
    out = par.forward_graph.graph.output_node()
    with par.forward_graph.graph.inserting_before(out):
        other = par.forward_graph.graph.call_function(torch.ops.aten.neg.default, (out.args[0][0],))
        other.meta = dict(out.args[0][0].meta)
    out.args = ((other, *out.args[0][1:]),)
    par.forward_graph.recompile()
    negative = par(X, targets=(Y,)).item() < 0
    close = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True)]
    return {"close": close, "orders": found, "edited": negative}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_results_and_order(ranks: Pool) -> None:
    for found in ranks.run(_train, ranks=4, timeout=550):
        assert len(found["close"]) == 8 and all(found["close"])
        assert found["edited"]
        for graph, code in found["orders"]:
            assert graph == code and "product" in graph and "wait_tensor" in graph


class Recomputed(nn.Module):
    """The same model, computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def _accumulated(backend: str, lanes: int) -> tuple[list[Tensor], list[tuple[list[str], list[str]]]]:
    """Losses and gradients of two micro-batches that are reduced once, and the orders of the graphs that ran."""
    par = autopar3d.compile(
        Recomputed(), (2, 1, 1), X, {"targets": (Y,)}, loss_fn=loss_fn, scheme="zero3", lanes=lanes, backend=backend
    )
    losses = []
    for last in (False, True):
        with nullcontext() if last else par.no_sync():
            losses.append(par(X, targets=(Y + last,)))
            losses[-1].backward()
    deferred = par._prepared.deferred()
    grads = [p.grad.full_tensor() for p in par.parameters()]
    ran = (par.forward_graph, deferred.local, deferred.reduce) if backend == "inductor" else ()
    return [*(loss.detach() for loss in losses), *grads], [orders(graph) for graph in ran]


def _lanes_and_all() -> dict[str, Any]:
    (eager, _), (ours, found) = _accumulated("eager", 1), _accumulated("inductor", 2)
    close = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(eager, ours, strict=True)]
    return {"close": close, "orders": found}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lanes_regions_and_accumulation(ranks: Pool) -> None:
    """What changes graphs, all at once: a checkpointed region, two lanes, and backward in two (`no_sync`)."""
    for found in ranks.run(_lanes_and_all, ranks=2, timeout=550):
        assert len(found["close"]) == 2 + 6 and all(found["close"])
        for graph, code in found["orders"]:
            assert code == graph
        forward, local, reduce = (graph for graph, _ in found["orders"])
        # Two linears in two lanes; backward has those that are computed again, and two products for each but the first.
        assert forward.count("product") == 4 and local.count("product") > 6
        assert "wait_tensor" in forward and "reduce_scatter_tensor" in "".join(reduce)


def test_unknown_backend() -> None:
    with pytest.raises(PlanError, match="backend='fast' is not known; choose 'eager' or 'inductor'"):
        autopar3d.compile(model(), (1, 1, 1), X, backend="fast")
