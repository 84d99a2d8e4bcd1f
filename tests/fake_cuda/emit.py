"""Emit the graphs of models for CUDA and print what they hold, as JSON. A script: see tests/test_cuda_graphs.py.

python tests/fake_cuda/emit.py GUARD.so gpt llama ...
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def load_guard(library: str) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    lib = Path(spec.origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(lib / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)


def emit(name: str) -> dict[str, Any]:
    """Per graph of a rank on (2,2,2): the ops, and the devices of its values and arguments."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    from autopar3d import Grid
    from autopar3d.hardware import resolve
    from autopar3d.schedule import scheduled
    from autopar3d.skeleton import Skeleton
    from autopar3d.step import Options, build_step
    from tests.models import MODELS

    cuda = torch.device("cuda", 0)
    make, inputs = MODELS[name]
    skeleton = Skeleton(make(torch.float32).to("meta"), cuda)
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), inputs(torch.float32))
    if "input_ids" in kwargs:
        kwargs["use_cache"] = False  # HuggingFace's caches make an empty tensor on the GPU itself, which is not there
    program = skeleton.trace(args, kwargs, skeleton.modes(), {})
    runs = scheduled(build_step(program, Grid(2, 2, 2), resolve(None, cuda), Options())).runs
    found = {}
    for kind in ("forward", "backward", "inference"):
        nodes = list(getattr(runs, kind).graph.nodes)
        leaves = [leaf for n in nodes for leaf in tree_leaves((n.meta.get("val"), n.args, n.kwargs))]
        # A number may stay on the CPU: CUDA ops take it as it is.
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
        devices = {x.device for x in tensors} | {x for x in leaves if isinstance(x, torch.device)}
        found[kind] = {
            "ops": sorted({str(n.target) for n in nodes if n.op == "call_function"}),
            "devices": sorted({d.type for d in devices}),
        }
    return found


if __name__ == "__main__":
    load_guard(sys.argv[1])
    print(json.dumps({name: emit(name) for name in sys.argv[2:]}))
