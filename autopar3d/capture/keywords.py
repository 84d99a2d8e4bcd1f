"""Parameters, buffers and modules called by a keyword, as `nn.ModuleDict({"in": ...})` allows.

torch writes such a name into Python code, which then does not compile, when it makes an exported program functional.
"""

from __future__ import annotations

import keyword

from torch.export import ExportedProgram


def hide_keywords(program: ExportedProgram) -> dict[str, str]:
    """Rename a fresh program's state where a name has a keyword in it; the old names by the new ones."""
    renamed = {new: old for old in (*program.state_dict, *program.constants) if (new := _plain(old)) != old}
    for held in (program.state_dict, program.constants):
        for name in [name for name in held if _plain(name) != name]:
            held[_plain(name)] = held.pop(name)
    _rename(program, {old: new for new, old in renamed.items()})
    return renamed


def show_keywords(program: ExportedProgram, renamed: dict[str, str]) -> None:
    """Give a program's state its names back, as far as its signature goes."""
    for name in [name for name in program.constants if name in renamed]:
        program.constants[renamed[name]] = program.constants.pop(name)
    _rename(program, renamed)


def _plain(name: str) -> str:
    return ".".join(f"{part}_keyword" if keyword.iskeyword(part) else part for part in name.split("."))


def _rename(program: ExportedProgram, names: dict[str, str]) -> None:
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        if spec.target is not None:
            spec.target = names.get(spec.target, spec.target)
