"""The parameters and buffers of a model: all their names, the stages that hold them, and those that several stages use.

The union of the stages' state dicts is the model's: a tied weight has all its names in each stage that holds it,
buffers keep their persistence, and state that no operator uses is held by the stage of its module.

State that several stages use is copied (REPLICATE), sent as a value (TRANSMIT), or refused:

    transmit w, used in stages 0 and 2      stage 0   sent = alias(get_attr w)
                                            stage 2   mm(h, sent)                the gradient is sent back

A buffer that the forward writes is held by the stage that writes it; later stages are sent its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError, PipelineStateError
from wholestep.ir.meta import location_of_node
from wholestep.pipelining.build.staged_graph import StagedGraph, writes_by_storage
from wholestep.torch_private.modules_and_optimizers import is_non_persistent


@dataclass(frozen=True)
class StateEntry:
    """One name of one tensor (or submodule) that graphs read."""

    name: str
    value: Any
    is_parameter: bool
    persistent: bool


class ModelState:
    """The parameters, buffers and constants that the graphs of a model may read by name."""

    def __init__(self, module: torch.nn.Module, constants: Iterable[Mapping[str, Any]] = ()) -> None:
        self.entries: dict[str, StateEntry] = {}
        for path, submodule in module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
                self._add(StateEntry(prefix + name, parameter, True, True))
            for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
                self._add(StateEntry(prefix + name, buffer, False, not is_non_persistent(submodule, name)))
        self.in_model = tuple(self.entries)
        for table in constants:
            for name, value in table.items():
                self._add(StateEntry(name, value, False, False))
        self._names: dict[int, list[str]] = {}
        for name, entry in self.entries.items():
            self._names.setdefault(id(entry.value), []).append(name)

    def _add(self, entry: StateEntry) -> None:
        self.entries.setdefault(entry.name, entry)

    def names(self, name: str) -> tuple[str, ...]:
        """All names of the tensor with this name, in the model's order."""
        return tuple(self._names[id(self.entries[name].value)])

    def key(self, name: str) -> str:
        """The first name of a tensor, which identifies it."""
        return self.names(name)[0]


def place_state(state: ModelState, used: Mapping[str, Sequence[int]]) -> list[list[StateEntry]]:
    """The entries of each stage, in the model's order. `used` has the stages of each key that graphs read."""
    stages = 1 + max((stage for row in used.values() for stage in row), default=0)
    homes = dict(used)
    by_module: dict[str, int] = {}
    for name in state.in_model:
        for prefix in _prefixes(name):
            for stage in used.get(state.key(name), ())[:1]:
                by_module.setdefault(prefix, stage)
    for name in state.in_model:
        if state.key(name) not in homes:
            near = next((by_module[prefix] for prefix in _prefixes(name) if prefix in by_module), 0)
            homes[state.key(name)] = (near,)
    found: list[list[StateEntry]] = [[] for _ in range(stages)]
    for name, entry in state.entries.items():
        for stage in homes.get(state.key(name), ()):
            found[stage].append(entry)
    return found


def _prefixes(name: str) -> list[str]:
    """The modules around a tensor: `a.b`, `a` and the root for `a.b.weight`."""
    path = name.split(".")[:-1]
    return [".".join(path[:length]) for length in range(len(path), -1, -1)]


def attach(root: torch.nn.Module, entry: StateEntry) -> None:
    """Set a tensor or submodule by its dotted name, creating empty modules for missing prefixes."""
    *path, last = entry.name.split(".")
    for atom in path:
        if atom not in root._modules:
            root.add_module(atom, torch.nn.Module())
        root = root.get_submodule(atom)
    if isinstance(entry.value, torch.nn.Module):
        root.add_module(last, entry.value)
    elif entry.is_parameter:
        root.register_parameter(last, entry.value)
    else:
        root.register_buffer(last, entry.value, persistent=entry.persistent)


class MultiUseParameterConfig(Enum):
    """How several stages use one parameter."""

    TRANSMIT = 1
    """The first stage holds it, sends its value and receives its gradient."""
    REPLICATE = 2
    """Each stage holds a copy; the gradients are summed before the optimizer steps."""


MultiUseParamSpec = str | MultiUseParameterConfig | Mapping[str, str | MultiUseParameterConfig]


@dataclass(frozen=True)
class SharedParameter:
    """One parameter that several stages use."""

    names: tuple[str, ...]
    """Its names in the model; more than one if it is tied."""
    stages: tuple[int, ...]
    """The stages that use it. Replicated, all of them hold it; transmitted, the first does."""
    mode: MultiUseParameterConfig


class SharingRule:
    """The requested mode of each shared tensor."""

    def __init__(self, spec: MultiUseParamSpec | None, state: ModelState) -> None:
        named = spec if isinstance(spec, Mapping) else {}
        unknown = [name for name in named if name not in state.in_model]
        if unknown:
            raise PipelineError(
                f"multi_use_params names {unknown[0]!r}, which the model does not have.",
                fix="use names of model.named_parameters()",
            )
        default = None if isinstance(spec, Mapping) else spec
        self._default = _config(default or MultiUseParameterConfig.REPLICATE)
        self._named = {state.key(name): _config(value) for name, value in named.items()}

    def of(self, key: str) -> MultiUseParameterConfig:
        """The mode of the tensor with this key."""
        return self._named.get(key, self._default)

    def is_named(self, key: str) -> bool:
        """True if the tensor was named explicitly."""
        return key in self._named


def settle_state(
    modes: Sequence[StagedGraph], state: ModelState, rule: SharingRule
) -> tuple[dict[str, tuple[int, ...]], tuple[SharedParameter, ...]]:
    """Edit the graphs so that each stage reads only state that it holds; returns the stages of each tensor, and the
    shared parameters."""
    stages = [_stages_of_state(staged, state) for staged in modes]
    written = [_written_state(staged, state) for staged in modes]
    used: dict[str, tuple[int, ...]] = {}
    shared: list[SharedParameter] = []
    for key in dict.fromkeys(key for table in stages for key in table):
        all_stages = tuple(sorted(set().union(*(table.get(key, set()) for table in stages))))
        writers: dict[int, fx.Node] = {}
        for table in written:
            writers |= table.get(key, {})
        parameter = state.entries[key].is_parameter
        if writers and len(all_stages) > 1:
            _check_one_early_writer(key, writers, all_stages)
            _send_on(modes, state, key, all_stages[0], torch.ops.aten.clone.default)
            used[key] = all_stages[:1]
            continue
        config = rule.of(key)
        send = config is MultiUseParameterConfig.TRANSMIT and (parameter or rule.is_named(key))
        if parameter and len(all_stages) > 1:
            shared.append(SharedParameter(_in_model(state, key), all_stages, config))
        if send and len(all_stages) > 1:
            _send_on(modes, state, key, all_stages[0], torch.ops.aten.alias.default)
        used[key] = all_stages[:1] if send else all_stages
    return used, tuple(shared)


def _stages_of_state(staged: StagedGraph, state: ModelState) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for node in staged.graph.nodes:
        if node.op == "get_attr":
            uses = {min(stage, staged.count - 1) for stage in staged.users(node)}
            found.setdefault(state.key(str(node.target)), set()).update(uses)
    return found


def _written_state(staged: StagedGraph, state: ModelState) -> dict[str, dict[int, fx.Node]]:
    """For each tensor that is written, directly or through a view, the stages that write it."""
    written = writes_by_storage(staged)
    if not written:
        return {}
    found: dict[str, dict[int, fx.Node]] = {}
    for node in staged.graph.nodes:
        if node.op == "get_attr" and staged.storage(node) in written:
            found.setdefault(state.key(str(node.target)), {}).update(written[staged.storage(node)])
    return found


def _check_one_early_writer(key: str, writers: Mapping[int, fx.Node], stages: Sequence[int]) -> None:
    if list(writers) == [stages[0]]:
        return
    stage, node = max(writers.items())
    others = ", ".join(str(other) for other in stages if other != stage)
    raise PipelineStateError(
        f"stage {stage} writes {key}, which stage {others} uses too: the stages of different microbatches would "
        "see other values than the model.",
        fix="move the cut so that one stage writes it and no earlier one uses it",
        node=node.format_node() or node.name,
        location=location_of_node(node, user_only=True),
    )


def _send_on(modes: Sequence[StagedGraph], state: ModelState, key: str, home: int, op: Any) -> None:
    """Make the stage that holds a tensor return its value, and later stages use that value."""
    for staged in modes:
        nodes = [n for n in staged.graph.nodes if n.op == "get_attr" and state.key(str(n.target)) == key]
        late = [n for n in nodes if any(stage > home for stage in staged.users(n))]
        if not late:
            continue
        name = "sent_" + key.replace(".", "_")
        sent = staged.add(home, op, (nodes[0],), name, nodes[0], at_end=True)
        staged.own_storage(sent, ("sent", key))
        for node in late:
            staged.use_instead(node, sent, range(home + 1, staged.count + 1))


def _in_model(state: ModelState, key: str) -> tuple[str, ...]:
    return tuple(name for name in state.names(key) if name in state.in_model)


def _config(value: Any) -> MultiUseParameterConfig:
    if isinstance(value, str) and value.upper() in MultiUseParameterConfig.__members__:
        return MultiUseParameterConfig[value.upper()]
    name = getattr(value, "name", None)
    if name in MultiUseParameterConfig.__members__:  # also torch's own
        return MultiUseParameterConfig[str(name)]
    raise PipelineError(f"{value!r} is not a mode for shared parameters.", fix='write "replicate" or "transmit"')
