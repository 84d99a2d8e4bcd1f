"""`check`: everything that would go wrong, or be slow, on a grid; found in one process before anything is launched."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import api
from .compiler import device_of
from .errors import AutoPar3DError
from .grid import Grid, GridLike
from .hardware import Hardware, resolve
from .plan import Plan
from .private import tree_leaves
from .reports.tables import WIDTH, byte_text, second_text
from .running.initialize import initial_values

_WAITING = 0.25  # of the step, from which on communication is worth a word
_LATENCY = 0.5  # of an axis's communication
_WORK = 1.02  # times the even share of FLOPs
_GAP = 0.05  # between the plan's cost and its bound
_FILLED = 200_000_000  # elements of a meta model that are made to see what nothing initialises


@dataclass(frozen=True)
class Advice:
    """What `check` found, in sentences.

    Args:
        problems: what would be an error, or wrong.
        slow: what costs time or memory that another grid, or other sizes, would not.
        notes: what else to know.
        plan: the plan; None where there can be none.
    """

    problems: tuple[str, ...]
    slow: tuple[str, ...]
    notes: tuple[str, ...]
    plan: Plan | None

    @property
    def ok(self) -> bool:
        """Whether nothing would go wrong."""
        return not self.problems

    def __str__(self) -> str:
        fill = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).fill
        lines = [fill(f"{kind}: {text}") for kind, texts in self._kinds() for text in texts]
        count = len(self.problems)
        verdict = "Nothing would go wrong" if self.ok else f"{count} problem{'s' if count > 1 else ''}"
        if self.ok and not self.slow:
            verdict += ", and nothing is slow for a reason that a grid could change"
        return "\n".join([*lines, f"{verdict}."])

    def _kinds(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("WRONG", self.problems), ("SLOW", self.slow), ("Note", self.notes)]


def check(
    model: nn.Module,
    grid: GridLike,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    world_size: int | None = None,
    run: bool = True,
    **options: Any,
) -> Advice:
    """Look at everything that `compile` on this grid would refuse, get wrong, or be slow at; raises nothing of it.

    Args:
        model, grid, example_inputs, example_kwargs, loss_fn, options: as for `plan`.
        world_size: number of ranks that will be started.
        run: also run the model once, to see whether its graph computes the same. It takes a copy of the model, so
            it is left out for models on meta.
    """
    problems: list[str] = []
    inputs = dict(example_inputs=example_inputs, example_kwargs=example_kwargs, loss_fn=loss_fn)
    made: Plan | None = None
    # What is wrong with the grid, with the options and with the model is told together.
    for place, size, more in (grid, world_size, options), ((1, 1, 1), None, options), ((1, 1, 1), None, {}):
        try:
            made = api.plan(model, place, world_size=size, **inputs, **more)
            break
        except AutoPar3DError as error:
            text = f"{type(error).__name__}: {error}"
            problems += [] if text in problems else [text]
    if made is not None and not problems:
        problems += _values(model, inputs, run=run, options=options)
    if made is None or problems:
        return Advice(tuple(problems), (), (), made if not problems else None)
    hardware = resolve(options.get("hardware"), device_of(model))
    return Advice((), tuple(_slow(made, hardware)), tuple(_notes(made)), made)


def _values(model: nn.Module, inputs: Mapping[str, Any], *, run: bool, options: Mapping[str, Any]) -> list[str]:
    """What only shows when there are values."""
    tensors = [*model.parameters(), *model.buffers()]
    given = [t for t in tree_leaves((inputs["example_inputs"], inputs["example_kwargs"])) if isinstance(t, Tensor)]
    if any(t.is_meta for t in tensors):
        if sum(t.numel() for t in tensors) > _FILLED:
            return []
        empty = [name for name, _, written in initial_values(model, torch.device("cpu"), 0) if not written]
        advice = "load a checkpoint before the first call, or give the module that holds them a reset_parameters()"
        return [f"nothing initialises {', '.join(empty)} of this meta model: {advice}"] if empty else []
    if not run or any(t.is_meta for t in given):
        return []
    precision = {k: v for k, v in options.items() if k in ("mixed_precision", "seed")}
    try:
        api.simulate(model, (1, 1, 1), check=True, **inputs, **precision)
    except AutoPar3DError as error:
        return [f"{type(error).__name__}: {error}"]
    return []


# -- slow ------------------------------------------------------------------------------------------------------------


def _slow(plan: Plan, hardware: Hardware) -> list[str]:
    found = []
    if plan.without_rule:
        ops = ", ".join(f"{op} ({n}x)" for op, n in plan.without_rule.items())
        found.append(
            f"no rule for {ops}: gathered and computed whole on every rank; a rule is one line (docs/adding-an-op.md)"
        )
    if plan.whole:
        reasons = [f"{name} ({why})" for name, why in plan.whole.items()]
        found.append(
            f"kept whole on some axes, so not 1/{plan.devices} of the memory: {_some(reasons)}; sizes that the "
            "axes divide, or axes of other sizes, change that"
        )
    if plan.ideal_flops and plan.flops > _WORK * plan.ideal_flops:
        heavy = [r for r in plan.repeated if not r.free]
        where = _some([f"{r.op} over {r.axes} ({r.why})" for r in heavy]) if heavy else "padding"
        found.append(
            f"each rank does {plan.flops / plan.ideal_flops:.2f} times its share of the FLOPs ({plan.flops:.3g} for "
            f"{plan.ideal_flops:.3g}): {where}"
        )
    return [*found, *_communication(plan, hardware)]


def _communication(plan: Plan, hardware: Hardware) -> list[str]:
    grid = Grid(*plan.grid, replicas=plan.replicas)
    waiting = sum(plan.exposed.values())
    found = []
    if plan.seconds and waiting > _WAITING * plan.seconds:
        worst = max(plan.exposed, key=lambda a: plan.exposed[a])
        moved = sum(b for (a, _), b in plan.bytes.items() if a == worst)
        crosses = hardware.link(worst, grid) is not hardware.node and hardware.network != hardware.node
        place = f"between nodes of {hardware.node_size}" if crosses else "inside a node"
        found.append(
            f"{waiting / plan.seconds:.0%} of the predicted step ({second_text(waiting)} of "
            f"{second_text(plan.seconds)} on {hardware.name}) waits for communication, most for axis {worst} of size "
            f"{grid.axis_size(worst)} ({second_text(plan.exposed[worst])}; {byte_text(moved)} a rank, {place}); a "
            'larger batch gives it more compute to hide behind, and grid="auto" tries all other grids'
        )
    for axis, calls in sorted(plan.calls.items()):
        took, latency = plan.communication.get(axis, 0.0), calls * hardware.link(axis, grid).latency
        if took > _LATENCY * waiting > 0.0 and latency > _LATENCY * took and waiting > _WAITING * plan.seconds:
            found.append(
                f"axis {axis} pays latency, not bytes: {calls} collectives of {latency / calls * 1e6:.0f} us are "
                f"{latency / took:.0%} of its {second_text(took)}; the model is small for {grid.size} devices"
            )
    return found


def _notes(plan: Plan) -> list[str]:
    kept = {k: v for k, v in plan.memory.items() if k in ("parameters", "gradients", "optimizer", "activations")}
    each = ", ".join(f"{name} {byte_text(n)}" for name, n in kept.items())
    found = [f"a rank needs {byte_text(sum(kept.values()))}: {each} (optimizer: AdamW)", *plan.notes]
    if not plan.exact and plan.bound > 0.0 and plan.objective > (1.0 + _GAP) * plan.bound:
        gap = math.ceil(100.0 * (plan.objective / plan.bound - 1.0))
        found.append(f"the plan may cost up to {gap}% more than the best one: the graph is too entangled to be sure")
    return found


def _some(texts: Sequence[str], most: int = 6) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more
