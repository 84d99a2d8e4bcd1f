"""Regions of activation checkpointing: which ops of a model run inside `torch.utils.checkpoint`, noted while traced.

The trace flattens such a region: its ops stand in the graph like any others. `Regions` marks them with the number of
their region, so that `passes.differentiate` computes them again in backward and saves nothing inside. Of nested regions
the outermost counts.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from autopar3d.private import set_grad, set_grad_unseen, tree_leaves

_KEY = "autopar3d_region"


def traced_region(node: Node) -> int | None:
    """The number of the region that a node of an exported graph was traced in."""
    return (node.meta.get("custom") or {}).get(_KEY)


class Regions(TorchFunctionMode):
    """Entered around a model's forward while it is traced: marks the nodes that are made inside of a region.

    A region is told by its call of `checkpoint` on the stack, whatever name the model took that function under.

    Attributes:
        selective: whether a region was given a `context_fn`, which says what to save.
        hidden: what autograd recorded inside of reentrant regions, which hide it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.selective = False
        self.hidden: list[Any] = []
        self._frames: dict[FrameType, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = _outermost(_CHECKPOINT, sys._getframe(1))
        if frame is None:
            return func(*args, **(kwargs or {}))
        if func is set_grad:
            caller = sys._getframe(1).f_back  # no_grad's __enter__ or __exit__
            if caller is not None and caller.f_back is not None and caller.f_back.f_code is _REENTRANT:
                return self._switch(caller.f_back, caller.f_code.co_name == "__enter__")
            if args[0] == torch.is_grad_enabled():
                # In the hooks of a region around this one: autograd has switched recording off, unseen.
                return set_grad_unseen(args[0])
        mode = get_proxy_mode()
        nodes: Any = mode.tracer.graph.nodes if mode is not None else []
        before = len(nodes)
        output = func(*args, **(kwargs or {}))
        for node in itertools.islice(reversed(nodes), len(nodes) - before):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: self._number(frame)}
        return output

    def _number(self, frame: FrameType) -> int:
        # Holding the frames keeps their identities apart.
        if frame not in self._frames:
            self._frames[frame] = len(self._frames)
            chosen = frame.f_locals.get("context_fn")
            self.selective |= getattr(chosen, "__name__", None) != "noop_context_fn"
        return self._frames[frame]

    def _switch(self, frame: FrameType, entering: bool) -> None:
        """The no_grad of a reentrant region: its ops take gradients, which its backward gets by running them anew.

        Like in eager, they take none where no argument of the region does.
        """
        if not any(isinstance(a, Tensor) and a.requires_grad for a in frame.f_locals["args"]):
            set_grad(not entering)
            return
        if not entering:
            self.hidden += [t.grad_fn for t in tree_leaves(frame.f_locals["outputs"]) if isinstance(t, Tensor)]
        set_grad_unseen(entering)


def _outermost(code: CodeType, frame: FrameType | None) -> FrameType | None:
    found = None
    while frame is not None:
        if frame.f_code is code:
            found = frame
        frame = frame.f_back
    return found


def _code(function: Any) -> CodeType:
    found: CodeType = inspect.unwrap(function).__code__
    return found


_CHECKPOINT, _REENTRANT = _code(checkpoint), _code(CheckpointFunction.forward)
