"""Predicates by which what a search found is made small: a pass or a region that is wrong on a smaller graph too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep.debug.compare import compare_versions
from wholestep.debug.judge import judge_meta
from wholestep.debug.minifier.case import Case, Edit, apply_edit
from wholestep.debug.minifier.trial import copy_of
from wholestep.debug.runs import run_nodes
from wholestep.debug.versions import Version
from wholestep.errors import WholestepError
from wholestep.ir.graphs import copy_graph
from wholestep.ir.io.repro import importable
from wholestep.lower.options import LowerOptions
from wholestep.lower.partial_lower import partial_lower
from wholestep.passes.engine.contract import BoundPass
from wholestep.passes.engine.manager import apply_pass

_RUN_PASS = """
gm = torch.fx.symbolic_trace(module)
print("before", gm(*make_inputs()))
{call})
gm.recompile()
print("after ", gm(*make_inputs()))
"""

_COMPILE = """
print("eager   ", module(*make_inputs()))
print("compiled", torch.compile(module)(*make_inputs()))
"""


def _is_literal(text: str) -> bool:
    return "<" not in text and " object at " not in text


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    made = fx.GraphModule(gm, copy_graph(gm.graph))
    made.meta.update(gm.meta)
    return made


class PassIsWrong:
    """A pass changes what a graph computes, breaks a rule, or raises: whichever it did on the whole graph."""

    def __init__(self, bound: BoundPass, kind: str, level: int) -> None:
        self._bound = bound
        self._kind = kind
        self._level = level

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> bool:
        """Whether the pass is wrong on this graph too."""
        after, bound = _copy(gm), self._bound
        by_value = self._kind in ("value", "died")
        level = 0 if by_value else self._level
        try:
            apply_pass(bound.graph_pass, after, bound.args, bound.options or {}, allow_rerun=True, level=level)
        except WholestepError:
            return not by_value
        if not by_value:
            return False
        numerics = bound.graph_pass.contract.numerics
        found = compare_versions(Version("before", gm, tuple(inputs)), Version("after", after, tuple(inputs)), numerics)
        return found.first is not None and found.first.gap.kind != "raised"

    def script(self) -> tuple[str, str]:
        """Lines of a script that shows it, where the pass can be imported."""
        bound = self._bound
        found = importable(bound.graph_pass)
        given = [*map(repr, bound.args), *(f"{key}={value!r}" for key, value in (bound.options or {}).items())]
        if found is None or self._kind != "value" or not all(map(_is_literal, given)):
            return "", f"print(module(*inputs))  # {bound.name} is wrong on this graph"
        module, path = found.split(":")
        call = ", ".join([f"{path}.function(gm", *given])
        return f"from {module} import {path.split('.')[0]}", _RUN_PASS.format(call=call)


class MetaIsWrong:
    """Some node gives another shape or dtype than its metadata say, or raises."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> bool:
        """Whether this graph does too."""
        found = judge_meta(gm, inputs)
        return bool(found["wrong"]) and found["kind"] == self._kind


class LowersWrong:
    """A graph computes something else when it is compiled."""

    def __init__(self, options: LowerOptions) -> None:
        self._options = LowerOptions(1, True, options.remat, options.config)

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> bool:
        """Whether this graph does."""
        lowered = partial_lower(_copy(gm), options=self._options)
        versions = Version("graph", gm, tuple(inputs)), Version("lowered", lowered, tuple(inputs))
        with torch.no_grad():  # regions run compiled only where nobody wants gradients
            return compare_versions(*versions, "reassociates").first is not None

    def script(self) -> tuple[str, str]:
        """Lines of a script that shows it, with torch alone."""
        return "", _COMPILE


def region_case(gm: fx.GraphModule, inputs: Sequence[Any], inside: list[str], outside: list[str]) -> Case:
    """A region of a graph by itself, with the values that it is given."""
    known = {node.name for node in gm.graph.nodes}
    wanted = {name for name in inside if name in known}
    values: dict[str, Any] = {}

    def look(node: fx.Node, value: Any) -> bool:
        if node.name in wanted and node.op != "placeholder":
            values[node.name] = copy_of(value)
        return True

    run_nodes(gm, inputs, look)
    ends = tuple(name for name in outside if name in known)
    return apply_edit(Case(gm, tuple(inputs)), Edit(outputs=ends, given=tuple(values)), values)
