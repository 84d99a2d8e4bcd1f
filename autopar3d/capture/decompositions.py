"""What is taken apart when a model is traced: see `decompositions`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import default_decompositions
from torch.fx import Graph, Node

from autopar3d.private import OpOverload
from autopar3d.rules import rule_for


def decompositions(graph: Graph) -> dict[Any, Callable[..., Any]]:
    """The table with which an exported graph is made functional.

    Composite ops without a rule are taken apart (`multiply`, `tensordot`, an LSTM). What has a rule, and what
    autograd treats whole, stays whole.
    """
    # torch 2.13 loses the dropout of a recurrent layer when it takes one apart. Of packed sequences those stay whole,
    # and are refused later.
    dropping = {n.target for n in graph.nodes if n.op == "call_function" and _drops(n)}
    table = {op: parts for op, parts in _composite().items() if op not in dropping and rule_for(op) is None}
    table |= _UNCHECKED
    table |= {op: functools.partial(_recurrent, op, _composite()[op]) for op in dropping & _RECURRENT}
    # This one changes its running statistics without saying so in its schema: export would lose the change.
    norm = torch.ops.aten.instance_norm.default
    if any(call.args[3] is not None for call in graph.find_nodes(op="call_function", target=norm)):
        table[norm] = _instance_norm
    return table


@functools.cache
def _composite() -> dict[Any, Callable[..., Any]]:
    """torch's composite ops on tensors, and what each is made of."""
    table = default_decompositions()
    ops = [op for op in table if isinstance(op, OpOverload) and op._can_decompose()]
    tensors = [op for op in ops if all("Tensor" in str(r.type) for r in op._schema.returns)]
    return {op: table[op] for op in tensors if op.namespace == "aten"}


def _drops(node: Node) -> bool:
    names = [a.name for a in node.target._schema.arguments] if hasattr(node.target, "_schema") else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "num_layers" in names and bool(given.get("dropout")) and bool(given.get("train"))


# torch's own parts check the result on the host, which a graph cannot; a singular matrix gives inf or nan instead.
_UNCHECKED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.linalg_inv.default: lambda a: torch.linalg.inv_ex(a)[0],
    torch.ops.aten.linalg_cholesky.default: lambda a, upper=False: torch.linalg.cholesky_ex(a, upper=upper)[0],
    torch.ops.aten.linalg_solve.default: lambda a, b, left=True: torch.linalg.solve_ex(a, b, left=left)[0],
    torch.ops.aten.linalg_lu_factor.default: lambda a, pivot=True: torch.linalg.lu_factor_ex(a, pivot=pivot)[:2],
}

_RECURRENT = {torch.ops.aten.lstm.input, torch.ops.aten.gru.input}
_RECURRENT |= {torch.ops.aten.rnn_tanh.input, torch.ops.aten.rnn_relu.input}


def _recurrent(
    op: Any,
    parts: Callable[..., Any],
    x: Tensor,
    hx: Any,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """A recurrent layer, taken apart: one of several with dropout between them, into these and the dropouts."""
    how = (train, bidirectional, batch_first)
    if num_layers == 1 or not dropout or not train:
        return parts(x, hx, params, has_biases, num_layers, 0.0, *how)
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    width, each = 2 if bidirectional else 1, len(params) // num_layers
    last: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        if layer:
            x = torch.nn.functional.dropout(x, dropout, train)
        own = [s[layer * width : (layer + 1) * width] for s in states]
        begin = own if isinstance(hx, (list, tuple)) else own[0]
        x, *ends = op(x, begin, params[layer * each : (layer + 1) * each], has_biases, 1, 0.0, *how)
        last.append(tuple(ends))
    return x, *(torch.cat(ends) for ends in zip(*last, strict=True))


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if not use_input_stats:
        return torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, momentum, eps)
    if mean is not None and var is not None:
        instances = x.detach().flatten(2)
        mean.mul_(1 - momentum).add_(momentum * instances.mean((0, 2)))
        var.mul_(1 - momentum).add_(momentum * instances.var(2).mean(0))
    return torch.nn.functional.group_norm(x, x.shape[1], weight, bias, eps)
