"""Train and eval mode: the model is captured in both, and a stage has a graph for each.

So dropout, batch norm, attention and the user's own `if self.training` follow `train()` and `eval()`. Both graphs must
send the same values across every cut. They are matched node by node:

    training      x  add_(batches, 1)  batch_norm(.., True)   dropout(.., True)   linear
    evaluation    x                    batch_norm(.., False)  dropout(.., False)  linear

A mode that cannot be captured or matched is left out; a stage that is switched to it raises with the reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.errors import WholestepError
from wholestep.ir.meta import location_of_node, module_call
from wholestep.pipelining.build.capture import CapturedModel
from wholestep.pipelining.build.split_points import is_split


@dataclass(frozen=True)
class ModePrograms:
    """The captured modes of a model, its current mode first. Keys: "train", "eval", or "given" for a mixture."""

    main: str
    programs: Mapping[str, CapturedModel]
    missing: Mapping[str, str]
    """The reason why a mode was not captured."""


def capture_modes(module: torch.nn.Module, capture: Callable[[], CapturedModel]) -> ModePrograms:
    """Capture a module in its current mode, and after `train()` and `eval()`. Its flags are restored."""
    given = {submodule: submodule.training for submodule in module.modules()}
    programs = {"given": capture()}
    main, missing = "given", {}
    with _flags_restored(given):
        for mode in ("train", "eval"):
            module.train(mode == "train")
            if {submodule: submodule.training for submodule in module.modules()} == given:
                main = mode
                programs = {mode: programs.pop("given"), **programs}
                continue
            try:
                programs[mode] = capture()
            except WholestepError as error:
                missing[mode] = error.what if error.location is None else f"{error.what.rstrip('.')} ({error.location})"
    return ModePrograms(main, programs, missing)


@contextmanager
def _flags_restored(flags: Mapping[torch.nn.Module, bool]) -> Iterator[None]:
    try:
        yield
    finally:
        for submodule, flag in flags.items():
            submodule.training = flag


class MismatchError(Exception):
    """Two modes cannot share stages; the message is the reason."""


def match_nodes(main: CapturedModel, other: CapturedModel) -> dict[fx.Node, fx.Node]:
    """Map the nodes of another mode to the equivalent nodes of the main one."""
    if main.out_spec != other.out_spec:
        raise MismatchError("the model returns a different structure")
    a, b = list(main.graph.nodes), list(other.graph.nodes)
    tokens_a, tokens_b = [_token(node) for node in a], [_token(node) for node in b]
    if tokens_a == tokens_b:
        return dict(zip(b, a, strict=True))
    found: dict[fx.Node, fx.Node] = {}
    for i, j, size in difflib.SequenceMatcher(None, tokens_a, tokens_b, autojunk=False).get_matching_blocks():
        found.update(zip(b[j : j + size], a[i : i + size], strict=True))
    return found


def _token(node: fx.Node) -> tuple[str, ...]:
    """The key by which nodes are matched: operator, module call and the user's line."""
    if node.op == "output":
        return ("output",)
    line = location_of_node(node, user_only=True)
    return (node.op, str(node.target), module_call(node), "" if line is None else f"{line.file}:{line.line}")


def shared_names(main: CapturedModel, other: CapturedModel, matched: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, str]:
    """Names for the values of another mode: those of the main one where the nodes match."""
    names: dict[fx.Node, str] = {}
    taken = {node.name for node in main.graph.nodes}
    for node in other.graph.nodes:
        if node in matched:
            names[node] = matched[node].name
        else:
            name = node.name
            while name in taken:
                name += "_other"
            taken.add(name)
            names[node] = name
    found = set(names.values())
    for ours, theirs in zip(main.outputs, other.outputs, strict=True):
        if isinstance(ours, fx.Node) != isinstance(theirs, fx.Node) or (
            not isinstance(ours, fx.Node) and ours != theirs
        ):
            raise MismatchError("the model returns a different constant")
        if isinstance(ours, fx.Node) and names[theirs] != ours.name:
            if ours.name in found or theirs in matched:
                raise MismatchError(f"the model returns a different value than {ours.name}")
            names[theirs] = ours.name
            found.add(ours.name)
    return names


def stages_like(
    main: Mapping[fx.Node, int], other: CapturedModel, matched: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, int]:
    """The stages of another mode: those of the matching nodes, and for unmatched nodes that of the previous node."""
    stage = 0
    found: dict[fx.Node, int] = {}
    for node in other.graph.nodes:
        if node.op == "call_function" and not is_split(node):
            stage = max(stage, main.get(matched[node], stage)) if node in matched else stage
            found[node] = stage
    return found
