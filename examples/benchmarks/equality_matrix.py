"""Train every model of the test suite on every grid beside one device, and write the differences to docs/equality.md.

    python examples/benchmarks/equality_matrix.py                       # all: about an hour on two cores
    python examples/benchmarks/equality_matrix.py --models mlp,gpt --grids 2,2,2/8,1,1 --write /tmp/some.md

Six grids run on local gloo ranks, three are simulated. What is compared, and with what tolerance, is said in
`autopar3d.testing.assert_trains_like_one_device`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the models and the grids are those of the tests

from autopar3d.ranks.launch import Pool  # noqa: E402
from tests.end_to_end.cases import GLOO_GRIDS, SIMULATED_GRIDS, Sizes  # noqa: E402
from tests.models import MODELS  # noqa: E402

KINDS = ("loss", "output", "gradient", "buffer", "parameter")
HEADER = ["model", "dtype", "grid", "ranks", *KINDS, "tensors", "seconds", ""]

INTRODUCTION = """# Equality with one device

Every model of `tests/models.py`, trained for {steps} steps of AdamW with gradients clipped at norm 1, on a grid and on
one device. The numbers are the largest `max|t - r| / max(max|r|, s)` over all tensors t with reference r: the loss of
every step, the outputs and every gradient of the first, buffers and parameters after the last; s is the model's largest
gradient for gradients, and 1 for the rest. They must not exceed 1e-10 in float64 and 1e-5 in float32.

HuggingFace's GPT-2, Llama and T5 compute parts (norms, softmax, the loss) in float32 whatever the model's dtype. In the
float64 rows these are computed in float64 too, so that a wrong term cannot hide behind rounding.

AdamW divides a gradient by its own size. In float32, where a gradient is rounding alone (the bias of an attention key
has none in exact arithmetic), so would be the step; the float32 rows therefore take AdamW's eps at 1e-4.

Made on {date} with torch {torch} by

    {command}
"""


def on_ranks(name: str, grid: Sizes, steps: int) -> dict[str, Any]:
    """What each rank runs."""
    from autopar3d.testing import trains_like_one_device
    from tests.end_to_end.cases import case

    make, (args, kwargs) = case(name)
    return summary(trains_like_one_device(make, args, grid, example_kwargs=kwargs, steps=steps, simulate=False))


def in_process(name: str, grid: Sizes, steps: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    from autopar3d.testing import trains_like_one_device
    from tests.end_to_end.cases import case

    make, (args, kwargs) = case(name, dtype)
    return summary(trains_like_one_device(make, args, grid, example_kwargs=kwargs, steps=steps))


def summary(found: Any) -> dict[str, Any]:
    return {"worst": found.worst, "failures": [str(d) for d in found.failures], "count": len(found.differences)}


def worst_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One summary of those of all ranks."""
    worst = {kind: max(r["worst"][kind] for r in ranks) for kind in ranks[0]["worst"]}
    failures = [f"rank {i}: {f}" for i, r in enumerate(ranks) for f in r["failures"]]
    return {"worst": worst, "failures": failures, "count": ranks[0]["count"]}


def row(name: str, dtype: str, grid: Sizes, where: str, found: dict[str, Any], seconds: float) -> list[str]:
    numbers = [f"{found['worst'][kind]:.1e}" if kind in found["worst"] else "-" for kind in KINDS]
    word = "ok" if not found["failures"] else "FAILED"
    return [name, dtype, "({},{},{})".format(*grid), where, *numbers, str(found["count"]), f"{seconds:.0f}", word]


def table(rows: list[list[str]]) -> str:
    widths = [max(len(r[i]) for r in [HEADER, *rows]) for i in range(len(HEADER))]
    lines = [[c.ljust(w) for c, w in zip(r, widths, strict=True)] for r in [HEADER, *rows]]
    lines.insert(1, ["-" * w for w in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--grids", help="as in 2,2,2/8,1,1; up to 8 ranks run on gloo, more are simulated")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--simulate", action="store_true", help="simulate all grids: minutes instead of an hour")
    parser.add_argument("--no-single", action="store_true", help="leave out the float32 rows")
    parser.add_argument("--write", type=Path, default=ROOT / "docs" / "equality.md")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    grids = [*GLOO_GRIDS, *SIMULATED_GRIDS]
    if options.grids:
        grids = [tuple(map(int, g.split(","))) for g in options.grids.split("/")]
    given = [a for i, a in enumerate(sys.argv[1:]) if "--write" not in sys.argv[i : i + 2]]
    command = " ".join(["python examples/benchmarks/equality_matrix.py", *given])
    opening = INTRODUCTION.format(steps=options.steps, date=date.today(), torch=torch.__version__, command=command)
    rows: list[list[str]] = []
    problems: list[str] = []

    def add(name: str, dtype: str, grid: Sizes, where: str, run: Any) -> None:
        start = time.perf_counter()
        try:
            found = run()
        except Exception as error:  # the other cells are wanted all the same
            found = {"worst": {}, "failures": [f"{type(error).__name__}: {error}"], "count": 0}
        rows.append(row(name, dtype, grid, where, found, time.perf_counter() - start))
        print(" ".join(rows[-1]), flush=True)
        if "own" not in found:
            problems.extend(f"{name} on {grid}: {f}" for f in found["failures"])
        listed = "\n".join(f"- {p}" for p in problems) or "None."
        options.write.write_text(f"{opening}\n{table(rows)}\n\n## Tensors that differ\n\n{listed}\n")

    with Pool(8, preload=["autopar3d"]) as pool:

        def on_gloo(name: str, grid: Sizes) -> dict[str, Any]:
            count = math.prod(grid)
            return worst_of(pool.run(on_ranks, name, grid, options.steps, ranks=count, timeout=1200))

        for name in options.models.split(","):
            for grid in grids:
                simulated = options.simulate or grid in SIMULATED_GRIDS or math.prod(grid) > 8
                where = f"{math.prod(grid)} {'simulated' if simulated else 'gloo'}"
                if simulated:
                    add(name, "float64", grid, where, partial(in_process, name, grid, options.steps))
                else:
                    add(name, "float64", grid, where, partial(on_gloo, name, grid))
            if not options.no_single:
                add(
                    name,
                    "float32",
                    (2, 2, 2),
                    "8 simulated",
                    partial(in_process, name, (2, 2, 2), options.steps, torch.float32),
                )
    print(f"{len(problems)} problems; written to {options.write}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
