"""Does a model train on a grid as it does on one device? Loss, outputs, gradients, buffers and parameters, compared.

`assert_trains_like_one_device` is for tests; `trains_like_one_device` gives the same comparison without raising.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar3d.private import tree_leaves, tree_map_only

from . import api
from .capture.pytrees import flatten_output, register_caches
from .grid import Grid, GridLike
from .module import ParallelModule
from .plan import Plan

KINDS = ("loss", "output", "gradient", "buffer", "parameter")

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_COARSE = 2e-2  # bfloat16 and float16
# AdamW divides a gradient by its own size: at torch's 1e-8 an element whose gradient is only rounding (some 1e-7 of a
# clipped one, in float32) moves by a whole lr in either direction, on any two devices.
_EPSILONS = {torch.float64: 1e-8}
_COARSE_EPSILON = 1e-4


@dataclass(frozen=True)
class Difference:
    """How far one tensor t is from its one-device reference r.

    Args:
        kind: "loss", "output", "gradient", "buffer" or "parameter".
        name: of a loss its step; of an output its path; else the name in the model.
        error: `max|t - r|`; nan where the two cannot be compared, and `note` says why.
        scale: `max(max|r|, s)`, with s the model's largest gradient for gradients and 1 for the rest.
        layout: how the grid stores it, "" where it does not say.
    """

    kind: str
    name: str
    error: float
    scale: float
    layout: str = ""
    note: str = ""

    @property
    def relative(self) -> float:
        return self.error / self.scale if self.error else 0.0

    def __str__(self) -> str:
        where = f" {self.layout}" if self.layout else ""
        what = self.note or f"off by {self.error:.2e}, {self.relative:.2e} of {self.scale:.3g}"
        return f"{self.kind} {self.name}{where}: {what}"


@dataclass(frozen=True)
class Comparison:
    """A model trained on a grid beside one device.

    Args:
        grid: where it ran.
        tol: allowed `Difference.relative`.
        differences: one per tensor.
        module: the parallel module, trained.
    """

    grid: Grid
    tol: float
    differences: tuple[Difference, ...]
    module: ParallelModule

    @property
    def plan(self) -> Plan:
        return self.module.plan

    @property
    def worst(self) -> dict[str, float]:
        """The largest relative difference of each kind."""
        found: dict[str, float] = {}
        for kind in KINDS:
            values = [d.relative for d in self.differences if d.kind == kind]
            if values:
                found[kind] = max(values, key=lambda v: (v != v, v))  # nan is the worst
        return found

    @property
    def failures(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if d.note or not d.relative <= self.tol)

    def __str__(self) -> str:
        worst = ", ".join(f"{kind} {value:.1e}" for kind, value in self.worst.items())
        lines = [f"on grid {self.grid} beside one device (tolerance {self.tol:g}): {worst}"]
        return "\n  ".join([*lines, *map(str, self.failures)])


def assert_trains_like_one_device(
    make_model: Callable[[], nn.Module],
    example_inputs: Any,
    grid: GridLike,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    steps: int = 5,
    lr: float = 1e-3,
    tol: float | None = None,
    simulate: bool = True,
    **options: Any,
) -> Comparison:
    """Train a model on a grid and on one device, and raise AssertionError where they differ.

    Both take `steps` steps of AdamW (eps 1e-8 for a float64 model, else 1e-4) with gradients clipped at norm 1.
    Compared are the loss of every step, the outputs and every gradient (before clipping) of the first, and buffers and
    parameters after the last. A tensor t equals its reference r when `max|t - r| <= tol * max(max|r|, s)`, with s the
    largest gradient of the model for gradients, and 1 for the rest.

    Args:
        make_model: builds the model, the same weights at every call: seed it.
        example_inputs, example_kwargs, loss_fn: as `autopar3d.compile` takes them.
        tol: 1e-10 for a float64 model, 1e-5 for float32, 2e-2 for less, unless given.
        simulate: all ranks in this process; False compiles for the ranks of the present process group, and every
            rank calls this.
        options: more for `autopar3d.compile` or `autopar3d.simulate`.

    Raises:
        AssertionError: tensors differ; the message lists each with its layout.
        ValueError: `make_model` does not give the same weights twice.
    """
    found = trains_like_one_device(
        make_model,
        example_inputs,
        grid,
        example_kwargs=example_kwargs,
        loss_fn=loss_fn,
        steps=steps,
        lr=lr,
        tol=tol,
        simulate=simulate,
        **options,
    )
    if found.failures:
        raise AssertionError(f"{len(found.failures)} of {len(found.differences)} tensors differ {found}")
    return found


def trains_like_one_device(
    make_model: Callable[[], nn.Module],
    example_inputs: Any,
    grid: GridLike,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    steps: int = 5,
    lr: float = 1e-3,
    tol: float | None = None,
    simulate: bool = True,
    **options: Any,
) -> Comparison:
    """As `assert_trains_like_one_device`, but differences are only reported.

    Raises:
        ValueError: `make_model` does not give the same weights twice.
    """
    register_caches()
    args = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    args = () if example_inputs is None else tuple(args)
    kwargs = dict(example_kwargs or {})
    alone, model = make_model(), make_model()
    _check_seeded(alone, model)
    make = api.simulate if simulate else api.compile
    par = make(model, grid, args, kwargs, loss_fn=loss_fn, **options)
    del model
    # After the parallel module has taken its tensors: a model built twice shares nothing with itself.
    there = _train(par, par, args, kwargs, steps, lr)
    here = _train(alone, _with_loss(alone, loss_fn), args, kwargs, steps, lr)
    if tol is None:
        tol = _TOLERANCES.get(_dtype(alone), _COARSE)
    return Comparison(Grid.of(grid), tol, tuple(_differences(there, here, _layouts(par))), par)


def _check_seeded(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        if isinstance(tensor, Tensor) and not torch.equal(tensor, other.state_dict()[name]):
            raise ValueError(
                f"make_model() gave two models that differ in {name}; seed it, as in "
                "lambda: (torch.manual_seed(0), Model())[1]"
            )


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _with_loss(model: nn.Module, loss_fn: Callable[..., Tensor] | None) -> Callable[..., Any]:
    if loss_fn is None:
        return model

    def call(*args: Any, targets: Sequence[Any] = (), **kwargs: Any) -> Tensor:
        return loss_fn(model(*args, **kwargs), *targets)

    return call


# -- training --------------------------------------------------------------------------------------------------------

Tensors = dict[tuple[str, str], "Tensor | None"]  # by (kind, name)


def _train(model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, steps: int, lr: float) -> Tensors:
    """All that is compared, as full tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=_EPSILONS.get(_dtype(model), _COARSE_EPSILON))
    # Own leaves: two runs must not add to one .grad.
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs))
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    seen: Tensors = {}
    for step in range(steps):
        optimizer.zero_grad()
        outputs, _ = flatten_output(call(*args, **kwargs))
        tensors = [(path, leaf) for path, leaf in outputs if isinstance(leaf, Tensor)]
        loss = _loss([leaf for _, leaf in tensors])
        loss.backward()
        seen["loss", f"of step {step}"] = _full(loss)
        if step == 0:
            seen.update({("output", path): _full(leaf) for path, leaf in tensors})
            seen.update({("gradient", name): _full(p.grad) for name, p in model.named_parameters()})
            seen.update({("gradient", f"of input {i}"): _full(t.grad) for i, t in enumerate(given)})
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seen.update({("buffer", name): _full(b) for name, b in model.named_buffers()})
    seen.update({("parameter", name): _full(p) for name, p in model.named_parameters()})
    return seen


def _loss(outputs: list[Tensor]) -> Tensor:
    """The scalar among the outputs, or else one made of all."""
    floating = [t for t in outputs if t.is_floating_point()]
    scalars = [t for t in floating if t.dim() == 0]
    if scalars:
        return scalars[0]
    return torch.stack([t.square().mean() for t in floating if t.requires_grad]).sum()


def _full(tensor: Tensor | None) -> Tensor | None:
    """A copy of its own, whole on every rank."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# -- comparing -------------------------------------------------------------------------------------------------------


def _layouts(par: ParallelModule) -> dict[tuple[str, str], str]:
    """By (kind, name), for the tensors that have a layout."""
    step = par._prepared.step
    found: dict[tuple[str, str], str] = {}
    for argument, layout in zip(step.program.arguments, step.argument_layouts, strict=True):
        if argument.kind in ("parameter", "buffer"):
            kinds = ("gradient", "parameter") if argument.kind == "parameter" else ("buffer",)
            found.update({(kind, name): str(layout) for kind in kinds for name in argument.names})
    results = [r for r in step.program.results if r.node is not None]
    for result, layout in zip(results, step.local.results, strict=True):
        if result.kind == "output":
            found["output", result.name] = str(layout)
    return found


def _differences(there: Tensors, here: Tensors, layouts: Mapping[tuple[str, str], str]) -> list[Difference]:
    gradients = [t for (kind, _), t in here.items() if kind == "gradient" and t is not None]
    largest = max((_largest(t) for t in gradients), default=1.0)
    found = []
    for key in [*here, *(k for k in there if k not in here)]:
        kind, name = key
        layout = layouts.get(key, "")
        if key not in here or key not in there:
            note = "only on the grid" if key in there else "only on one device"
            found.append(Difference(kind, name, float("nan"), 1.0, layout, note))
            continue
        found.append(_difference(kind, name, there[key], here[key], largest, layout))
    return found


def _difference(kind: str, name: str, t: Tensor | None, r: Tensor | None, largest: float, layout: str) -> Difference:
    floor = largest if kind == "gradient" else 1.0
    if t is None or r is None:
        # No gradient and a gradient of zeros say the same: nothing depends on it.
        other = r if t is None else t
        if other is None or not other.any():
            return Difference(kind, name, 0.0, floor, layout)
        note = f"none on {'the grid' if t is None else 'one device'}, up to {_largest(other):.2e} on the other"
        return Difference(kind, name, float("nan"), floor, layout, note)
    if t.shape != r.shape or t.dtype != r.dtype:
        note = f"{t.dtype} {tuple(t.shape)} on the grid, {r.dtype} {tuple(r.shape)} on one device"
        return Difference(kind, name, float("nan"), floor, layout, note)
    if not r.is_floating_point():
        wrong = int((t != r).sum())
        return Difference(kind, name, float(wrong), floor, layout, f"{wrong} of {r.numel()} differ" if wrong else "")
    # Where one device has an infinity or no number, so must the grid.
    same = (t == r) | (t.isnan() & r.isnan())
    wide = torch.complex128 if r.is_complex() else torch.float64
    error = _largest(torch.where(same, torch.zeros([], dtype=wide), t.to(wide) - r.to(wide)))
    return Difference(kind, name, error, max(_largest(r[r.isfinite()]), floor), layout)


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0
