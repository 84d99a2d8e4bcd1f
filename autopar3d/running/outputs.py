"""What `outputs=` asks for, applied to a traced program."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import PlanError
from ..program import Program, Result
from ..step import Options


def with_outputs(program: Program, options: Options) -> tuple[Program, Options]:
    """The program without the outputs that "loss" leaves out, and the options with every output by its path.

    What is left out is not computed and comes back as None. A dict's keys are paths as the plan lists them
    (`['logits']`, `[1]`, `.parts['out']`), or the same in words (`logits`,
    `parts.out`), from the end where that is one output only (`out`).

    Raises:
        PlanError: no output has such a name, or "loss" is asked of a program without a scalar output.
    """
    outputs = [r for r in program.results if r.kind == "output"]
    if isinstance(options.outputs, str):
        wishes = {r.name: options.outputs for r in outputs}
    else:
        wishes = {_path(key, outputs): wish for key, wish in options.outputs.items()}
        options = dataclasses.replace(options, outputs=wishes)
    dropped = {name for name, wish in wishes.items() if wish == "loss" and not _is_loss(program, name)}
    if not dropped:
        return program, options
    if len(dropped) == sum(r.node is not None for r in outputs):
        raise PlanError('outputs="loss" needs a scalar among the outputs; this model returns none')
    return _without(program, dropped), options


def _path(key: str, outputs: list[Result]) -> str:
    words = _words(key)
    for fits in (
        lambda name: name == key,
        lambda name: _words(name) == words,
        lambda name: words and _words(name)[-len(words) :] == words,
    ):
        found = [r.name for r in outputs if fits(r.name)]
        if len(found) == 1:
            return found[0]
    names = ", ".join(repr(r.name) for r in outputs if r.node is not None)
    raise PlanError(f"outputs= names {key!r}; the model's outputs are {names}")


def _words(path: str) -> list[str]:
    return re.findall(r"\w+", path)


def _is_loss(program: Program, name: str) -> bool:
    nodes = {n.name: n for n in program.graph.graph.nodes}
    node = next(r.node for r in program.results if r.kind == "output" and r.name == name)
    if node is None:
        return True  # a Python constant costs nothing
    val = nodes[node].meta["val"]
    return bool(val.dim() == 0 and val.is_floating_point())


def _without(program: Program, dropped: set[str]) -> Program:
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in program.graph.graph.nodes:
        if node.op != "output":
            copied[node] = graph.node_copy(node, copied.__getitem__)
    new = {node.name: copy for node, copy in copied.items()}
    results = []
    for r in program.results:
        if r.kind == "output" and r.name in dropped:
            results.append(dataclasses.replace(r, node=None, value=None))
        else:
            results.append(r if r.node is None else dataclasses.replace(r, node=new[r.node].name))
    graph.output(tuple(new[r.node] for r in program.results if r.node is not None and r.name not in dropped))
    # Placeholders stay, read or not.
    graph.eliminate_dead_code(lambda node: node.op != "call_function" or node.is_impure())
    return dataclasses.replace(
        program,
        graph=GraphModule(torch.nn.Module(), graph),
        arguments=tuple(dataclasses.replace(a, node=new[a.node].name) for a in program.arguments),
        results=tuple(results),
        constants={new[name].name: value for name, value in program.constants.items()},
    )
