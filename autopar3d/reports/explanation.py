"""What `plan.explain(name)` answers: the strategies of one op, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .tables import byte_text, second_text, table

_SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}


@dataclass(frozen=True)
class Collected:
    """A collective that a strategy causes. `of`: the value that is moved; `shared`: others read the moved copy too."""

    of: str
    kind: str
    axis: str
    phase: str
    bytes: float
    seconds: float
    shared: bool


@dataclass(frozen=True)
class Choice:
    """One strategy of the op, and the best plan with it. Seconds and bytes per rank, forward and backward.

    Args:
        strategy: axes per factor; `chosen`: whether it is the plan's.
        total: the objective of the best plan with it; `extra`: by how much that exceeds the chosen one's.
        compute: seconds of the op's computation; `inside`: of the collectives within the op itself.
        collectives: for its operands and results.
        memory: bytes of its operands and results while it runs.
        changes: what else would differ: (name, as planned, as it would be), for parameters and heavy ops;
        others: how many more ops and copies would.
    """

    strategy: str
    chosen: bool
    total: float
    extra: float
    compute: float
    inside: float
    collectives: tuple[Collected, ...]
    memory: float
    changes: tuple[tuple[str, str, str], ...]
    others: int

    @property
    def communication(self) -> float:
        """Seconds of its collectives, one after the other."""
        return self.inside + math.fsum(c.seconds for c in self.collectives)

    def costs(self) -> tuple[float, ...]:
        """What tells it from others in cost, to nine digits."""
        return tuple(float(f"{n:.9g}") for n in (self.total, self.compute, self.communication, self.memory))


@dataclass(frozen=True)
class Explanation:
    """`plan.explain(name)`: every strategy of one op, the cheapest first."""

    op: str
    module: str
    target: str
    choices: tuple[Choice, ...]

    @property
    def chosen(self) -> Choice:
        return next(c for c in self.choices if c.chosen)

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = 12) -> str:
        """The cheapest strategies as a table of at most so many lines; those of equal costs, as they are when axes of
        one size change places, share a line."""
        groups: dict[tuple[float, ...], list[Choice]] = {}
        for c in self.choices:
            groups.setdefault(c.costs(), []).append(c)
        kept = list(groups.values())
        shown = kept[:most] + [g for g in kept[most:] if any(c.chosen for c in g)]
        rows = [
            (
                c.strategy + (" *" if c.chosen else "") + (f" and {len(g) - 1} alike" if len(g) > 1 else ""),
                second_text(c.total),
                "+" + second_text(c.extra) if c.extra > 0 else "0",
                second_text(c.compute),
                _sent(c),
                byte_text(c.memory),
                _summary(c),
            )
            for g in shown
            for c in [next((c for c in g if c.chosen), g[0])]
        ]
        header = ("strategy", "best plan", "extra", "compute", "collectives", "memory", "would change elsewhere")
        title = f"{self.module or '(model)'}: {self.op} ({self.target}), {len(self.choices)} strategies, * is planned"
        lines = [table(title, header, rows, wrap=(0, 4, 6), right=(1, 2, 3, 5), folding=False)]
        left = len(self.choices) - sum(map(len, shown))
        if left:
            worst = self.choices[-1]
            lines.append(f"{left} more, up to {worst.strategy} at +{second_text(worst.extra)}.")
        lines.append("Collectives: seconds by kind and axis; (shared) with other readers of the same copy.")
        return "\n".join(line.rstrip() for line in "\n".join(lines).split("\n"))


def _sent(choice: Choice) -> str:
    parts: dict[str, float] = {}
    for c in choice.collectives:
        key = f"{_SHORT[c.kind]} {c.axis}" + (" (shared)" if c.shared else "")
        parts[key] = parts.get(key, 0.0) + c.seconds
    if choice.inside:
        parts["inside"] = choice.inside
    return ", ".join(f"{k} {second_text(s)}" for k, s in parts.items()) or "-"


def _summary(choice: Choice) -> str:
    if not choice.changes:
        return f"{choice.others} light ops" if choice.others else "-"
    first = "; ".join(f"{name}: {before} -> {after}" for name, before, after in choice.changes[:2])
    more = len(choice.changes) - 2 + choice.others
    return first + (f"; {more} more" if more > 0 else "")
