"""backend="inductor": the same results, and starts, waits and products in the order of the graph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

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


def _train() -> dict[str, Any]:
    results, orders = [], []
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
    for graph in (par.forward_graph, par.backward_graph):
        values = [
            torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype)
            for n in graph.graph.nodes
            if n.op == "placeholder"
        ]
        _, code = compile_graph(graph, values)
        orders.append((order_in_graph(graph), order_in_code(code)))
    # An edited graph is what runs: the loss comes out with the other sign.
    out = par.forward_graph.graph.output_node()
    with par.forward_graph.graph.inserting_before(out):
        other = par.forward_graph.graph.call_function(torch.ops.aten.neg.default, (out.args[0][0],))
        other.meta = dict(out.args[0][0].meta)
    out.args = ((other, *out.args[0][1:]),)
    par.forward_graph.recompile()
    negative = par(X, targets=(Y,)).item() < 0
    close = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True)]
    return {"close": close, "orders": orders, "edited": negative}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_results_and_order(ranks: Pool) -> None:
    for found in ranks.run(_train, ranks=4, timeout=550):
        assert len(found["close"]) == 8 and all(found["close"])
        assert found["edited"]
        for graph, code in found["orders"]:
            assert graph == code and "product" in graph and "wait_tensor" in graph


def test_unknown_backend() -> None:
    with pytest.raises(PlanError, match="backend='fast' is not known; choose 'eager' or 'inductor'"):
        autopar3d.compile(model(), (1, 1, 1), X, backend="fast")
