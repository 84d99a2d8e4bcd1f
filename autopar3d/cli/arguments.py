"""What can be asked for on the command line. Nothing heavy is imported here, so `--help` is quick."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SOURCE = """\
where the model comes from: FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION. FUNCTION is called without arguments and
returns model, (model, args), (model, args, kwargs) or (model, args, kwargs, loss_fn); a large model may be made on the
meta device"""

_EPILOG = """\
examples:
  autopar3d plan examples/gpt.py:make --grid 4,4,4 --hardware h100
  autopar3d plan examples/gpt.py:make --grid auto --world-size 64 --json
  autopar3d check examples/gpt.py:make --grid 2,2,2 --world-size 8
  autopar3d simulate examples/gpt.py:make --grid 2,2,2
  autopar3d doctor

exit codes: 0 done; 1 it failed, or something is wrong; 2 the command line is"""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What a command line asks for; it has `run(options) -> exit code`, and ends the process where it is wrong."""
    top = parser()
    options, more = top.parse_known_args(words)
    if more and not options.takes_more:
        top.error(f"unrecognized arguments: {' '.join(more)}")
    options.more = more
    return options


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from autopar3d import __version__

    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="autopar3d",
        description="Parallelize PyTorch models over a 3-D grid of devices.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    top.add_argument("--version", action="version", version=f"autopar3d {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, **more: Any) -> argparse.ArgumentParser:
        description = f"{text[0].upper()}{text[1:]}."
        made: argparse.ArgumentParser = commands.add_parser(
            name, parents=[shared], help=text, description=description, **more
        )
        made.set_defaults(run=run, takes_more=False)
        return made

    plan = command("plan", _plan, "print what went where and what it costs; needs no devices")
    _model_arguments(plan)
    _precision(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON instead; Plan.load reads it")
    plan.add_argument("--html", type=_file, metavar="FILE", help="write the plan as a page, with pictures, to FILE")
    plan.add_argument("--save", type=_file, metavar="FILE", help="write the plan, as JSON, to FILE")

    check = command("check", _check, "say what would go wrong, or be slow, on a grid; needs no devices")
    _model_arguments(check)
    _precision(check)

    simulate = command("simulate", _simulate, "train on all ranks of a grid in this process, beside one device")
    _model_arguments(simulate)
    simulate.add_argument("--steps", type=_count, default=3, metavar="N", help="steps of AdamW (default: 3)")
    dtypes = "float64 (default: differences are then real) or own, the model's"
    simulate.add_argument("--dtype", default="float64", choices=["float64", "own"], help=dtypes)
    simulate.add_argument("--json", action="store_true", help="print the result as JSON instead")

    calibrate = command("calibrate", _calibrate, "measure this machine and save a profile, which --hardware takes")
    calibrate.add_argument("path", type=_file, metavar="FILE", help="where to save the profile")
    calibrate.add_argument(
        "--grid", type=_grid, default=(2, 2, 2), metavar="X,Y,Z", help="axes to measure (default: 2,2,2)"
    )
    calibrate.add_argument("--node-size", type=_count, metavar="N", help="devices per node (default: torchrun's)")

    # All its arguments, --help among them, are the script's.
    train = command("train", _train, "train the bundled example on local CPU ranks, beside one device", add_help=False)
    train.set_defaults(takes_more=True)

    doctor = command("doctor", _doctor, "look at versions, backends and devices, and try a collective on each axis")
    doctor.add_argument(
        "--grid", type=_grid, default=(2, 2, 2), metavar="X,Y,Z", help="local ranks to try (default: 2,2,2)"
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON instead")
    return top


def _model_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("source", metavar="SOURCE", help=_SOURCE)
    to.add_argument("--grid", type=_grid, required=True, metavar="X,Y,Z", help="sizes of the axes, or auto")
    to.add_argument(
        "--replicas", type=_count, metavar="R", help="so many grids that share the batch; --grid auto tries all"
    )
    to.add_argument("--world-size", type=_count, metavar="N", help="number of devices: for --grid auto, else checked")
    to.add_argument(
        "--hardware", metavar="NAME", help="profile: a100, h100, v100, cpu, bandwidth, or a file of calibrate"
    )
    to.add_argument("--scheme", default="auto", help="auto (default), 3d, 2d, 1d, zero3 or zero3x1d")
    to.add_argument("--regather", default="all", help="all (default), weights, none or auto")
    to.add_argument("--memory-budget", type=_bytes, metavar="BYTES", help="most that a device may need, as in 80e9")
    to.add_argument("--inputs", default="global", help="global (default) or sharded")
    to.add_argument("--outputs", default="auto", help="auto (default), global, sharded or loss")
    to.add_argument(
        "--overlap", default="auto", choices=["auto", "on", "off"], help="order for overlap (default: auto)"
    )
    to.add_argument("--lanes", default="1", choices=["1", "2", "auto"], help="parts of the batch (default: 1)")
    to.add_argument("--strict", action="store_true", help="fail when something is kept whole or has no rule")
    to.add_argument("--seed", type=int, default=0, help="of dropout and of meta models (default: 0)")


def _precision(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--mixed-precision", choices=["bfloat16", "float16"], help="compute in it; parameters stay as they are"
    )


def _bytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as 80e9 is")
    return value


def _grid(text: str) -> tuple[int, int, int] | str:
    if text == "auto":
        return text
    try:
        x, y, z = (int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a grid: give three sizes, as in 4,2,1, or auto") from None
    return x, y, z


def _file(text: str) -> str:
    """A file to write: told before the minutes that what goes into it may take."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return text


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _plan(options: argparse.Namespace) -> int:
    from .planning import plan

    return plan(options)


def _check(options: argparse.Namespace) -> int:
    from .planning import check

    return check(options)


def _simulate(options: argparse.Namespace) -> int:
    from .planning import simulate

    return simulate(options)


def _train(options: argparse.Namespace) -> int:
    from .training import train

    return train(options)


def _calibrate(options: argparse.Namespace) -> int:
    from .training import calibrate

    return calibrate(options)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor(options)
