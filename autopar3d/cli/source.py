"""The user's `make()`: finding it, calling it, and reading what it returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar3d.errors import AutoPar3DError

if TYPE_CHECKING:
    from torch import Tensor, nn

_FORMS = "model, (model, args), (model, args, kwargs) or (model, args, kwargs, loss_fn)"


class MakeError(AutoPar3DError):
    """The source does not name a function that makes a model. Says what was looked for, and where."""


@dataclass(frozen=True)
class Made:
    """What `make()` returned."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Tensor] | None = None


def load(source: str) -> Callable[[], Made]:
    """The function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names; each call makes the model anew.

    Raises:
        MakeError: there is none; or, when called, it raised or returned something else.
    """
    where, colon, name = source.rpartition(":")
    if not colon or not where.strip(".") or not name.isidentifier():
        raise MakeError(f"{source!r} names no function: give FILE.py:FUNCTION, as in examples/gpt.py:make")
    module = _run(where, lambda: _module(where))
    make = getattr(module, name, None)
    if not callable(make):
        known = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        listed = f"it has {', '.join(known)}" if known else "it has none"
        raise MakeError(f"{where} has no function {name!r}; {listed}")
    return lambda: _made(source, _run(source, make))


def _module(where: str) -> Any:
    if Path(where).is_dir() and os.sep in where:
        raise MakeError(
            f"{where} is a folder; the model comes from a file in it, as in {Path(where) / 'model.py'}:make"
        )
    if not where.endswith(".py"):
        sys.path[:0] = [""]
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
                raise
            raise MakeError(f"there is no module {where!r} ({error}); a file is given as path/to/{where}.py") from error
    path = Path(where).resolve()
    if not path.is_file():
        raise MakeError(f"there is no file {where}")
    # As if it were run as a script: it may import what lies beside it.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _run(what: str, call: Callable[[], Any]) -> Any:
    """The call's result; what the user's code raises is told with the user's line."""
    try:
        return call()
    except (AutoPar3DError, OSError):
        raise
    except (Exception, SystemExit) as error:  # a script that ends itself, as argparse does
        own = str(Path(__file__).parent)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((own, "<frozen"))]
        line = f" at {frames[0].filename}:{frames[0].lineno} (`{frames[0].line}`)" if frames else ""
        raise MakeError(f"{what} raised {type(error).__name__}: {error}{line}") from error


def _made(source: str, value: Any) -> Made:
    from torch import Tensor, nn

    parts: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 4:
        got = ", ".join(type(p).__name__ for p in parts)
        raise MakeError(f"{source} returned ({got}); it must return {_FORMS}")
    parts += [None] * (4 - len(parts))
    model, args, kwargs, loss_fn = parts
    kwargs = {} if kwargs is None else kwargs
    if isinstance(args, Tensor):
        args = (args,)
    elif isinstance(args, Mapping) and isinstance(kwargs, Mapping):  # a batch, as a HuggingFace model is called with it
        kwargs = {**args, **kwargs}
        args = ()
    elif args is None:
        args = ()
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise MakeError(
            f"{source} returned args of type {type(args).__name__} and kwargs of type {type(kwargs).__name__}; "
            "args is a tuple of the call's positional arguments, kwargs a dict"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise MakeError(f"{source} returned a loss_fn of type {type(loss_fn).__name__}; it is a function, or None")
    if not args and not kwargs:
        raise MakeError(
            f"{source} returned a model and no inputs. Layouts depend on shapes: return (model, args), with args the "
            "tuple of a call's positional arguments, of global shape; meta tensors do"
        )
    return Made(model, tuple(args), dict(kwargs), loss_fn)
