"""`autopar3d plan`, `check` and `simulate`."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import autopar3d
from autopar3d.private import tree_map_only

from .source import Made, load

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_SHOWN = 10

T = TypeVar("T")


def plan(options: argparse.Namespace) -> int:
    """Print the plan, or write it."""
    found = _asked(autopar3d.plan, options)
    if options.save:
        found.save(options.save)
    if options.html:
        found.to_html(options.html)
    print(json.dumps(found.to_dict(), indent=1) if options.json else found)
    return 0


def check(options: argparse.Namespace) -> int:
    """Print what would go wrong or be slow; 1 when something would go wrong."""
    found = _asked(autopar3d.check, options)
    print(found)
    return 0 if found.ok else 1


def simulate(options: argparse.Namespace) -> int:
    """Train on the grid, simulated, and on one device; 1 when they differ."""
    from autopar3d import testing
    from autopar3d.errors import PlanError, TraceError

    first = load(options.source)()
    double = options.dtype == "float64"
    if double:
        first = _double(first)
    if any(p.is_meta for p in first.model.parameters()):
        raise PlanError(f"{options.source} makes its model on meta; simulate needs values: make a small one on the CPU")
    for module in first.model.modules():
        # A grid draws other masks than one device.
        if isinstance(module, _DROPOUT):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    models = [first.model, copy.deepcopy(first.model)]  # `make` need not seed
    more: dict[str, Any] = _shared(options)
    if options.world_size is not None:
        more["world_size"] = options.world_size
    try:
        found = testing.trains_like_one_device(
            lambda: models.pop(),
            first.args,
            _grid(options),
            example_kwargs=first.kwargs,
            loss_fn=first.loss_fn,
            steps=options.steps,
            **more,
        )
    except TraceError as error:
        if not double:
            raise
        raise TraceError(
            f"{error}\nsimulate runs the model in float64, which a model that names a dtype itself, as .float() does, "
            "may not bear; --dtype own leaves it as it is"
        ) from error
    worst = found.worst
    if options.json:
        failures = [str(f) for f in found.failures]
        print(json.dumps({"grid": found.grid.shape, "tolerance": found.tol, "worst": worst, "differ": failures}))
    else:
        print(f"{options.steps} steps of AdamW on grid {found.grid}, all ranks simulated, beside one device")
        print("largest difference, relative:")
        for kind, value in worst.items():
            print(f"  {kind:9}  {value:.1e}")
        for failure in found.failures[:_SHOWN]:
            print(f"differs by more than {found.tol:g}: {failure}")
        if len(found.failures) > _SHOWN:
            print(f"and {len(found.failures) - _SHOWN} more of {len(found.differences)} tensors")
        if found.failures and found.module.random_state()["step"]:
            print(
                "the model draws random numbers (dropout in a function, as F.dropout or attention's), and a grid draws "
                "others than one device does: only without them can the two be compared"
            )
        if not found.failures:
            print(f"all {len(found.differences)} tensors agree within {found.tol:g}")
    return 1 if found.failures else 0


def _double(made: Made) -> Made:
    """In float64, where rounding is out of the question: AdamW turns a gradient of almost nothing into a whole step,
    so in float32 two right results may differ."""
    args, kwargs = tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, (made.args, dict(made.kwargs))
    )
    return replace(made, model=made.model.double(), args=args, kwargs=kwargs)


def _asked(call: Callable[..., T], options: argparse.Namespace) -> T:
    """`plan` or `check` of the model that the command line names."""
    made = load(options.source)()
    more = _shared(options)
    if options.mixed_precision is not None:
        more["mixed_precision"] = getattr(torch, options.mixed_precision)
    world = options.world_size
    return call(made.model, _grid(options), made.args, made.kwargs, loss_fn=made.loss_fn, world_size=world, **more)


def _grid(options: argparse.Namespace) -> Any:
    """`--grid` and `--replicas` together."""
    from autopar3d.errors import GridError

    if options.replicas is None:
        return options.grid
    if options.grid == "auto":
        raise GridError("--replicas goes with the sizes of a grid; --grid auto tries all numbers of replicas itself")
    return autopar3d.Grid(*options.grid, replicas=options.replicas)


def _shared(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "scheme": options.scheme,
        "inputs": options.inputs,
        "outputs": options.outputs,
        "regather": options.regather,
        "hardware": options.hardware,
        "overlap": {"auto": "auto", "on": True, "off": False}[options.overlap],
        "lanes": "auto" if options.lanes == "auto" else int(options.lanes),
        "memory_budget": options.memory_budget,
        "strict": options.strict,
        "seed": options.seed,
    }
