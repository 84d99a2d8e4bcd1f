"""Graphs for CUDA, made on a machine without: traced with fake CUDA tensors, they hold nothing that only a CPU runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from autopar3d import Grid
from autopar3d.hardware import resolve
from autopar3d.schedule import scheduled
from autopar3d.skeleton import Skeleton
from autopar3d.step import Options, build_step
from tests.models import MODELS

CUDA = torch.device("cuda", 0)


@lru_cache(maxsize=None)
def graphs(name: str) -> dict[str, GraphModule]:
    """As a rank with a GPU would emit them, on (2,2,2)."""
    make, inputs = MODELS[name]
    args, kwargs = inputs(torch.float32)
    skeleton = Skeleton(make(torch.float32).to("meta"), CUDA)
    meta = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
    program = skeleton.trace(*meta, skeleton.modes(), {})
    step = scheduled(build_step(program, Grid(2, 2, 2), resolve(None, CUDA), Options()))
    assert step.runs.backward is not None
    return {"forward": step.runs.forward, "backward": step.runs.backward, "inference": step.runs.inference}


def values(graph: GraphModule) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for node in graph.graph.nodes:
        found += [(node.name, t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_no_op_is_for_the_cpu_only(name: str) -> None:
    for graph in graphs(name).values():
        targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        assert [t for t in targets if "_for_cpu" in t or "mkldnn" in t or "mkl" in t] == []
        for node in graph.graph.nodes:
            places = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, torch.device)]
            assert all(p.type == "cuda" for p in places), node.format_node()


@pytest.mark.parametrize("name", MODELS)
def test_every_value_lives_on_the_gpu(name: str) -> None:
    for graph in graphs(name).values():
        assert {(n, t.device.type) for n, t in values(graph) if t.device.type != "cuda"} == set()


def test_attention_is_a_fused_kernel() -> None:
    targets = {str(n.target) for n in graphs("gpt")["forward"].graph.nodes}
    assert any("_flash_attention" in t or "_efficient_attention" in t or "_cudnn_attention" in t for t in targets)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_every_op_has_a_cuda_kernel(name: str) -> None:
    """The dispatcher knows, without a GPU, whether an op has a CUDA kernel, or is made of others that do."""
    for graph in graphs(name).values():
        missing = {str(n.target) for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
        assert {t for t in missing if not _known(t)} == set()


def _known(target: str) -> bool:
    name, _, overload = target.rpartition(".")
    namespace, _, op = name.partition(".")
    full = f"{namespace}::{op}" + ("" if overload == "default" else f".{overload}")
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(has(full, key) for key in keys)
