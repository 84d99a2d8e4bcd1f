"""Does a grid learn as one device does? A character-level GPT, some 200 steps, in float32 and in bfloat16.

    python examples/benchmarks/learning_curve.py             # (2,2,2) on eight local gloo ranks: a few minutes
    python examples/benchmarks/learning_curve.py --simulate  # all ranks in this process

Writes docs/learning_curve.png and, with the numbers, docs/learning_curve.md. The model, the text, the batches and the
training loop are those of examples/train_gpt.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).resolve().parents[1]
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

import autopar3d  # noqa: E402
from autopar3d.ranks.launch import Pool  # noqa: E402

DTYPES = ("float32", "bfloat16")
MARKS = (1, 10, 25, 50, 100, 150, 200, 300, 500)

PAGE = """# Learning on a grid and on one device

A character-level GPT ({layers} layers, hidden {hidden}, {heads} heads, batch {batch} of {seq} characters) on the text
that ships with Python; {steps} steps of AdamW at {lr:g} with gradients clipped at norm 1; the same weights and batches
for all. The grid is {grid}, {where}. Made on {date} with torch {torch} by

    {command}

That is a smaller model than the default of `examples/train_gpt.py` (hidden 128, 64 characters), at a higher rate than
its 0.001: more is learned in as many seconds.

![loss curves](learning_curve.png)

{table}

{summary}

In float32 the two differ in the order in which sums are rounded, which training amplifies. In bfloat16 rounding is
{ratio} times coarser, and a loss between 2 and 4 is itself a multiple of 1/64: single steps differ by up to three of
these, now up, now down.
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2,2,2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--folder", type=Path, default=EXAMPLES.parent / "docs", help="where to write")
    options = parser.parse_args()
    options.grid = tuple(map(int, options.grid.split(",")))
    options.device = "cpu"
    return options


def on_grid(options: argparse.Namespace) -> list[float]:
    """The losses of one run; what every rank does."""
    import train_gpt

    text, vocab = train_gpt.encode()
    make = autopar3d.simulate if options.simulate else autopar3d.compile
    par = make(train_gpt.make_model(vocab, options), options.grid, next(train_gpt.batches(text, options)))
    return train_gpt.train(par, text, options, report=False)[0]


def alone(options: argparse.Namespace) -> list[float]:
    import train_gpt

    text, vocab = train_gpt.encode()
    return train_gpt.train(train_gpt.make_model(vocab, options), text, options, report=False)[0]


def with_dtype(options: argparse.Namespace, dtype: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "dtype": dtype})


def run(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Losses by dtype and by "grid" or "one device"."""
    found: dict[str, dict[str, list[float]]] = {}
    ranks = options.grid[0] * options.grid[1] * options.grid[2]
    with Pool(ranks, preload=["autopar3d"]) as pool:
        for dtype in DTYPES:
            own = with_dtype(options, dtype)
            start = time.perf_counter()
            grid = on_grid(own) if options.simulate else pool.run(on_grid, own, timeout=3600)[0]
            seconds = time.perf_counter() - start
            found[dtype] = {"grid": grid, "one device": alone(own)}
            print(
                f"{dtype}: last loss {grid[-1]:.4f}, one device {found[dtype]['one device'][-1]:.4f}, {seconds:.0f} s"
            )
    return found


def plot(found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(DTYPES), figsize=(10, 5.5), sharex=True, sharey="row", height_ratios=(3, 1), layout="constrained"
    )
    for column, dtype in enumerate(DTYPES):
        grid, one = found[dtype]["grid"], found[dtype]["one device"]
        steps = range(1, len(one) + 1)
        top, bottom = axes[0][column], axes[1][column]
        top.plot(steps, one, color="tab:orange", linewidth=4, alpha=0.45, label="one device")
        top.plot(steps, grid, color="tab:blue", linewidth=1, label="grid ({},{},{})".format(*options.grid))
        top.set_title(dtype)
        top.legend()
        # A difference of nothing has no logarithm; the floor is below float32's resolution of a loss.
        bottom.semilogy(
            steps, [max(abs(a - b), 1e-8) for a, b in zip(grid, one, strict=True)], color="tab:gray", linewidth=1
        )
        bottom.set(xlabel="step", ylim=(5e-9, 1))
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("|difference|")
    figure.savefig(options.folder / "learning_curve.png", dpi=110)


def write(found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    marks = [m for m in MARKS if m <= options.steps]
    header = ["", *(f"step {m}" for m in marks), "mean of the last 20"]
    rows: list[list[str]] = []
    lines = []
    for dtype in DTYPES:
        for who, losses in found[dtype].items():
            tail = losses[-20:]
            numbers = [losses[m - 1] for m in marks] + [sum(tail) / len(tail)]
            rows.append([f"{dtype}, {who}", *(f"{x:.4f}" for x in numbers)])
        pairs = list(zip(found[dtype]["grid"], found[dtype]["one device"], strict=True))
        worst = max(abs(a - b) for a, b in pairs)
        tail = pairs[-20:]
        drift = abs(sum(a for a, _ in tail) - sum(b for _, b in tail)) / len(tail)
        lines.append(
            f"{dtype}: no step's loss differs by more than {worst:.1e}, the mean of the last 20 by {drift:.1e}."
        )
    table = "\n".join("| " + " | ".join(r) + " |" for r in [header, ["---"] * len(header), *rows])
    given: dict[str, Any] = vars(options) | {"grid": "({},{},{})".format(*options.grid)}
    page = PAGE.format(
        **given,
        where="simulated in one process" if options.simulate else "on local gloo ranks",
        date=date.today(),
        torch=torch.__version__,
        command="python examples/benchmarks/learning_curve.py" + " --simulate" * options.simulate,
        table=table,
        summary="\n".join(lines).strip(),
        ratio=2**16,
    )
    (options.folder / "learning_curve.md").write_text(page)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    found = run(options)
    plot(found, options)
    write(found, options)
    print(f"written to {options.folder / 'learning_curve.png'} and .md")


if __name__ == "__main__":
    main()
