"""Private names of torch that the pipelining room uses, each with what it is for. Tried on 2.11 and 2.13."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx


def define_marker(name: str, schema: str) -> Any:
    """An operator that does nothing and that export keeps as a node, with its place among the others.

    `BackendSelect` is the key for operators without tensor inputs, the one that torch's own `pipe_split` uses.
    """
    namespace, short = name.split("::")
    torch.library.define(name, schema)

    def nothing(*args: Any) -> None:
        return None

    torch.library.impl(name, "BackendSelect")(nothing)
    torch.library.register_fake(name)(nothing)
    op = getattr(getattr(torch.ops, namespace), short).default
    fx.node.has_side_effect(op)
    return op


def torchs_markers() -> tuple[Any, ...]:
    """torch's own split marks, if its pipelining was imported: the operator (`pippy::_pipe_split`) and the function."""
    module = sys.modules.get("torch.distributed.pipelining._IR")
    return () if module is None else (module.aten_pipe_split_alias, module.pipe_split)
