"""State that several stages use: copied (REPLICATE), sent on as a value (TRANSMIT), or refused.

    transmit w, used in stages 0 and 2      stage 0   sent = alias(get_attr w)
                                            stage 2   mm(h, sent)                the gradient comes back along it

A buffer that the forward writes has one home: the stage that writes it. Later stages are sent what it holds then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError, PipelineStateError
from wholestep.ir.origin import location_of_node
from wholestep.pipelining.build.staged import Staged
from wholestep.pipelining.build.state import ModelState
from wholestep.pipelining.build.writes import writes_by_storage


class MultiUseParameterConfig(Enum):
    """What happens to a parameter that several stages use."""

    TRANSMIT = 1
    """It lives in the first of them; its value is sent on and its gradient comes back."""
    REPLICATE = 2
    """Each of them has a copy; the gradients are summed before the optimizer steps."""


MultiUseParamSpec = str | MultiUseParameterConfig | Mapping[str, str | MultiUseParameterConfig]


@dataclass(frozen=True)
class SharedParameter:
    """One parameter that several stages use."""

    names: tuple[str, ...]
    """Its names in the model; more than one if it is tied."""
    stages: tuple[int, ...]
    """The stages that use it. Copied, they all hold it; transmitted, the first does."""
    mode: MultiUseParameterConfig


class SharingRule:
    """What was asked for, by name."""

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
        """What happens to the tensor with this key."""
        return self._named.get(key, self._default)

    def is_named(self, key: str) -> bool:
        """Whether the tensor was named on its own."""
        return key in self._named


def settle_state(
    modes: Sequence[Staged], state: ModelState, rule: SharingRule
) -> tuple[dict[str, tuple[int, ...]], tuple[SharedParameter, ...]]:
    """Edit the graphs so that all state is where it may be: the stages of each tensor, and the shared parameters."""
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


def _stages_of_state(staged: Staged, state: ModelState) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for node in staged.graph.nodes:
        if node.op == "get_attr":
            uses = {min(stage, staged.count - 1) for stage in staged.users(node)}
            found.setdefault(state.key(str(node.target)), set()).update(uses)
    return found


def _written_state(staged: Staged, state: ModelState) -> dict[str, dict[int, fx.Node]]:
    """For each tensor that is written, directly or through a view, the stages that do."""
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
        f"stage {stage} writes {key}, which stage {others} uses too; no order of microbatches on several ranks "
        "would keep it equal.",
        fix="move the cut so that one stage writes it and no earlier one uses it",
        node=node.format_node() or node.name,
        location=location_of_node(node, user_only=True),
    )


def _send_on(modes: Sequence[Staged], state: ModelState, key: str, home: int, op: Any) -> None:
    """Let the home of a tensor return its value, and later stages use that."""
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
    raise PipelineError(
        f"{value!r} does not say what happens to a shared parameter.", fix='write "replicate" or "transmit"'
    )
