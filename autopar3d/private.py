"""The parts of torch that this library needs and that have no public name, each with its reason.

Everything else imports them from here, so that a new torch is checked against one page. (`dtensor` has one more, the
placement that only it may know.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

# A graph names its groups, the same on every rank; the names that a DeviceMesh gives differ by rank.
from torch._C._distributed_c10d import _register_process_group as register_process_group
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch._C._distributed_c10d import _unregister_process_group as unregister_process_group

# How vmap puts its dim into a tensor and takes it out again, as a mode of torch functions sees it.
from torch._functorch.predispatch import _add_batch_dim as add_batch_dim
from torch._functorch.predispatch import _remove_batch_dim as remove_batch_dim

# What stands in a graph for an op; torch names it publicly only by instances.
from torch._ops import HigherOrderOperator, OpOverload

# Tensors without values that remember a device: what export leaves in `meta["val"]`, and what graphs are traced on.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import GroupName

# Where ranks that can no longer talk in collectives leave word for each other.
from torch.distributed.distributed_c10d import _get_default_store as get_default_store

# A DeviceMesh makes its groups with torch's default timeout, whatever `init_process_group` was given.
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

# The only pytrees that torch.export's own specs are made of.
from torch.utils import _pytree as pytree

# Ranks that are threads of one process meet at their collectives through it (`lockstep.run_threads`).
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# What torch.no_grad() and its like call, as a mode of torch functions sees it.
set_grad = torch._C._set_grad_enabled

TreeSpec = pytree.TreeSpec
keystr = pytree.keystr
tree_flatten_with_path = pytree.tree_flatten_with_path
tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten


def assert_async(condition: Tensor, message: str) -> None:
    """torch's own check of values on a device, which does not make the host wait for them."""
    torch._assert_async(condition, message)


def set_grad_unseen(mode: bool) -> None:
    """Let autograd record or not, without the tracer noting the change."""
    with torch._C.DisableTorchFunction():
        set_grad(mode)


def forget_meshes() -> None:
    """Drop DTensor's memory of what it did on a mesh. It finds an equal mesh of a later process group in it, and would
    use the groups of the earlier one, which are gone."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def distribution_checks() -> bool:
    """Whether torch.distributions look at their arguments' values, which only has a public setter."""
    return torch.distributions.Distribution._validate_args


def hooks_of(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """The functions given to `tensor.register_hook`, in their order."""
    return tuple((tensor._backward_hooks or {}).values())


def post_accumulate_hooks_of(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """The functions given to `tensor.register_post_accumulate_grad_hook`, in their order."""
    return tuple((tensor._post_accumulate_grad_hooks or {}).values())


def saved_tensors_are_hooked() -> bool:
    """Whether `saved_tensors_hooks` are on in this thread. There is no public way to ask."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keeps_graph() -> bool:
    """Inside a backward: whether it was called with `retain_graph=True`, so that it may be called once more."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[no-any-return, attr-defined, unused-ignore]


def inside_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is at work: it would see a module of ours as one function."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined, unused-ignore]


def inductor() -> tuple[Any, Callable[..., Any], Callable[[], Any], Callable[[], Any]]:
    """Inductor below dynamo and AOTAutograd, for which emitted graphs are what these would give it.

    Imported when it is asked for, as that takes seconds.

    Returns:
        its config, its compiler of one graph, the table of the decompositions that it expects, and what enters a
        context in which it does not fuse what waits for different collectives.
    """
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.ir import _WaitKernel
    from torch._inductor.virtualized import V

    def waits(scheduler: Any, node: Any) -> set[str]:
        return {name for name in node.ancestors if isinstance(scheduler.name_to_node[name].node, _WaitKernel)}

    class Apart(InductorChoices):  # type: ignore[misc, unused-ignore]
        """Of two kernels that need nothing of each other, fused ones begin when both could: the first would wait for
        what only the second needs."""

        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            return waits(scheduler, node1) == waits(scheduler, node2) and InductorChoices.can_fuse_horizontal(
                scheduler, node1, node2, shared_data_score
            )

    return config, compile_fx_inner, select_decomp_table, lambda: V.set_choices_handler(Apart())


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "GroupName",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "add_batch_dim",
    "assert_async",
    "distribution_checks",
    "forget_meshes",
    "get_default_store",
    "hooks_of",
    "inductor",
    "inside_transform",
    "keeps_graph",
    "keystr",
    "post_accumulate_hooks_of",
    "pytree",
    "register_process_group",
    "remove_batch_dim",
    "resolve_process_group",
    "saved_tensors_are_hooked",
    "set_grad",
    "set_grad_unseen",
    "set_group_timeout",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "unregister_process_group",
]
