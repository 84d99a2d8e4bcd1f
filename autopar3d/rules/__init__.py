"""The table of rules: one family of ops a file. Adding an op touches one place (docs/adding-an-op.md)."""

from __future__ import annotations

from . import (  # noqa: F401  (importing fills the table)
    attention,
    batch_norm,
    complex,
    conv,
    create,
    ctc,
    embedding,
    index,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    random,
    reduce,
    softmax,
    views,
)
from .core import (
    RULES,
    Dims,
    Exchange,
    LocalOp,
    OpRule,
    OpSpec,
    argument,
    check_spec,
    operands,
    refine,
    results,
    whole_spec,
)
from .pointwise import is_pointwise, rule_for

__all__ = [
    "RULES",
    "Dims",
    "Exchange",
    "LocalOp",
    "OpRule",
    "OpSpec",
    "argument",
    "check_spec",
    "is_pointwise",
    "operands",
    "refine",
    "results",
    "rule_for",
    "whole_spec",
]
