"""The decisions of a plan, as plain data: what `passes.propagate` returns and `passes.rewrite` carries out."""

from __future__ import annotations

from dataclasses import dataclass, field

from .grid import Grid
from .hardware import Hardware
from .redistribute import State
from .strategies import Strategy


@dataclass(frozen=True)
class Decisions:
    """A strategy per op and a placement per stored value.

    Args:
        grid, hardware: what was planned for.
        strategies: op node name -> strategy.
        storage: placeholder name -> placement in which a parameter, buffer, constant or input arrives.
        copies: value name -> placement of the copy its readers share, where it has several readers.
        results: per flat result (see `Program.results`) the placement in which it leaves.
        cost: the minimised objective, in seconds.
        exact: whether it is proven minimal.
        whole: names of values and ops kept whole -> why.
    """

    grid: Grid
    hardware: Hardware
    strategies: dict[str, Strategy]
    storage: dict[str, State]
    copies: dict[str, State]
    results: tuple[State | None, ...]
    cost: float = 0.0
    exact: bool = True
    whole: dict[str, str] = field(default_factory=dict)
