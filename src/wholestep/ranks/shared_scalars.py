"""Shared scalars: the scalar inputs that must be the same on all ranks, and their values at a call.

A scalar that only scales the loss of a rank (`loss / tokens_of_this_rank`) may differ: gradients are reduced after it.
One that changes parameters or optimizer state after the reduction (a learning rate, a decay) may not: replicas would
diverge, or shards of one tensor would be updated by different rules.

    loss = mul(sum, tokens)            tokens meets a tensor that depends on the batch: may differ
    grad = wait(all_reduce(...))       the same on all ranks from here on
    p' = add(p, grad, alpha=neg(lr))   lr meets a tensor that all ranks share, and reaches `p`: must be the same

Compared are the options of optimizers, the settings of gradient scalers, every other scalar input of the graph that
the rule above finds, and scalar tensors among them (a learning rate that is a tensor, a loss scale).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.effects import communicates
from wholestep.ir.graph_walks import reachable
from wholestep.ir.groups import group_of
from wholestep.ir.signature import InputKind, Signature
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.slots import HyperSlot, Slot
from wholestep.torch_private.modules_and_optimizers import SCALER_NUMBERS, SCALER_SETTINGS
from wholestep.torch_private.operators import OpOverload, schema_of

SAMPLED_EVERY = 64
"""Calls between two reads of a scalar on an accelerator: each read synchronises with the device."""

_STATE = (InputKind.PARAMETER, InputKind.OPTIMIZER_STATE, InputKind.SCALER_STATE)
_HYPER = (InputKind.HYPER_PARAMETER, InputKind.SCALER_STATE)
_PADS = (torch.ops.aten.constant_pad_nd.default,)
_PLAIN = (int, float, complex, bool, str, type(None))

Named = dict[str, str]
"""Values by path, as text."""


class SharedScalars:
    """The scalars of one captured graph that all ranks must share."""

    def __init__(
        self,
        captured: CapturedStep,
        data_groups: Iterable[str],
        per_rank: Iterable[str] = (),
        samples: dict[str, float] | None = None,
        pending: Iterable[int] = (),
        constants: Named | None = None,
    ) -> None:
        """`data_groups`: process groups over which data is distributed. `per_rank`: patterns of paths that may differ.
        `samples`: the last values read from an accelerator, shared between the graphs of a step. `pending`: indices of
        inputs whose update may still be in flight when the graph starts. `constants`: values that capture burned in as
        constants; the graph of another rank may have them as inputs."""
        self.constants = constants or {}
        self._excluded = tuple(per_rank)
        self._samples = {} if samples is None else samples
        self._groups = [self._options(o, path, captured) for o, path in captured.guards.optimizers.items()]
        self._scalers = [self._settings(s, path) for s, path in captured.guards.scalers.items()]
        indices = self._other_scalar_inputs(captured, data_groups)
        self._paths = [captured.inputs[i].path for i in indices]
        self._pick: Callable[[list[Any]], tuple[Any, ...]] = _picker(indices)
        skipped = set(pending)
        specs = captured.step_graph.signature.inputs
        tensors = [
            (i, spec)
            for i, spec in enumerate(specs)
            if i not in skipped and spec.kind in _HYPER and spec.tensor is not None and self._compares(spec.path)
        ]
        scalar = [(i, spec) for i, spec in tensors if spec.tensor is not None and spec.tensor.shape in ((), (1,))]
        self._on_host = [(i, s.path) for i, s in scalar if s.tensor is not None and s.tensor.device.startswith("cpu")]
        host = {i for i, _ in self._on_host}
        self._on_device = [(i, spec.path) for i, spec in scalar if i not in host]

    def read(self, state: list[Any], call: int) -> tuple[Any, ...]:
        """The current values, in a form that is cheap to build and to compare. `state`: the inputs of the graph."""
        values = [*self._pick(state)]
        for optimizer, getters, _ in self._groups:
            values += [get(group) for get, group in zip(getters, optimizer.param_groups, strict=True)]
        for attributes, keys, _ in self._scalers:
            values.append(tuple(map(attributes.get, keys)))
        for i, _ in self._on_host:
            values.append(state[i].item())
        for i, path in self._on_device:
            if call % SAMPLED_EVERY == 0:
                self._samples[path] = state[i].item()
            values.append(self._samples.get(path))
        return tuple(values)

    def named(self, values: tuple[Any, ...]) -> Named:
        """The values of a `read`, by path."""
        found: Named = {}
        rest = iter(values)
        for path in self._paths:
            found |= _flat(path, next(rest))
        for _, getters, names in self._groups:
            for paths in names[: len(getters)]:
                for path, value in zip(paths, next(rest), strict=True):
                    found |= _flat(path, value)
        for _, _, paths in self._scalers:
            for path, value in zip(paths, next(rest), strict=True):
                found |= _flat(path, value)
        for _, path in self._on_host:
            found |= _flat(path, next(rest))
        for _, path in self._on_device:
            value = next(rest)
            found |= {} if value is None else _flat(path, value)
        return {path: text for path, text in found.items() if self._compares(path)}

    def _compares(self, path: str) -> bool:
        return not any(fnmatchcase(path, pattern) or path == pattern for pattern in self._excluded)

    def _options(
        self, optimizer: Optimizer, path: str, captured: CapturedStep
    ) -> tuple[Optimizer, list[Any], list[Any]]:
        lifted = {s.key for s in captured.inputs if isinstance(s, HyperSlot) and s.optimizer is optimizer}
        getters, names = [], []
        for g, group in enumerate(optimizer.param_groups):
            known = {*optimizer.defaults, *lifted}
            keys = [key for key, value in group.items() if key in known and key != "params" and _is_plain(value)]
            getters.append(_getter(keys, group))
            names.append([f"{path}.param_groups[{g}].{key}" for key in keys])
        return optimizer, getters, names

    def _settings(self, scaler: Any, path: str) -> tuple[dict[str, Any], list[str], list[str]]:
        attributes = vars(scaler)
        keys = [k for k in (*SCALER_NUMBERS, *SCALER_SETTINGS) if _is_plain(attributes.get(k))]
        return attributes, keys, [f"{path}.{key}" for key in keys]

    def _other_scalar_inputs(self, captured: CapturedStep, data_groups: Iterable[str]) -> list[int]:
        graph = captured.step_graph
        scalars = [i for i, spec in enumerate(graph.signature.inputs) if _may_be_shared(spec, captured.inputs[i])]
        return shared_inputs(graph, scalars, frozenset(data_groups)) if scalars else []


def shared_inputs(graph: StepGraph, scalars: list[int], data_groups: frozenset[str]) -> list[int]:
    """Of the scalar inputs at the indices `scalars`, those that change state after the reduction of gradients.

    Walks the graph twice.
    """
    kinds = {spec.name: spec.kind for spec in graph.signature.inputs}
    bit = {graph.signature.inputs[i].name: 1 << n for n, i in enumerate(scalars)}
    local = _depends_on_batch(graph, data_groups)
    scalar: dict[fx.Node, int] = {}
    """For each scalar value, the inputs that it was computed from."""
    reached: dict[fx.Node, int] = {}
    """For each value, the inputs that were combined with a tensor that is equal on all ranks, and entered the value."""
    for node in graph.gm.graph.nodes:
        if node.op == "placeholder" or _reduces(node, data_groups):
            scalar[node], reached[node] = bit.get(node.name, 0), 0
            continue
        inputs = node.all_input_nodes
        scalars_in = _union(scalar[n] for n in inputs)
        reached[node] = _union(reached[n] for n in inputs)
        if _is_scalar(node):
            scalar[node] = scalars_in
        else:
            scalar[node] = 0
            reached[node] |= 0 if node in local else scalars_in
    by_name = {node.name: node for node in reached}
    written = _union(reached[n] | scalar[n] for n in _state_values(graph.gm, graph.signature, kinds, by_name))
    return [i for n, i in enumerate(scalars) if written >> n & 1]


def update_constants(graph: StepGraph, data_groups: Iterable[str]) -> list[str]:
    """The constants with which state is changed after the reduction of gradients, in order, without sizes.

    Two graphs for different shapes (the last batch of a rank, a shorter shard) must have the same constants; otherwise
    they train by different rules.
    """
    groups = frozenset(data_groups)
    local = _depends_on_batch(graph, groups)
    by_name = {node.name: node for node in graph.gm.graph.nodes}
    kinds = {spec.name: spec.kind for spec in graph.signature.inputs}

    def local_sources(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if not _reduces(node, groups)]

    values = local_sources(_state_values(graph.gm, graph.signature, kinds, by_name))
    behind = reachable(values, lambda node: local_sources(node.all_input_nodes))
    chosen = (node for node in graph.gm.graph.nodes if node in behind and node not in local)
    found = ((node, _constants(node)) for node in chosen if node.op == "call_function" and node.target not in _PADS)
    return [f"{node.target}({', '.join(constants)})" for node, constants in found if constants]


def _constants(node: fx.Node) -> list[str]:
    """The Python scalars among the arguments of a node that are values, not dimensions, sizes or indices."""
    arguments: list[Any] = [*node.args, *node.kwargs.values()]
    if isinstance(node.target, OpOverload):
        by_index = [a.type for a in schema_of(node.target).arguments]
        by_name = {a.name: a.type for a in schema_of(node.target).arguments}
        types = [*by_index[: len(node.args)], *(by_name[name] for name in node.kwargs)]
        arguments = [value for value, kind in zip(arguments, types, strict=True) if not _is_size(kind)]
    found: list[str] = []
    for value in arguments:
        items = value if isinstance(value, list | tuple) else [value]
        found += [canonical(str(item)) for item in items if isinstance(item, bool | int | float | complex)]
    return found


def _is_size(kind: Any) -> bool:
    return str(kind) in ("int", "List[int]", "Optional[int]", "Optional[List[int]]", "SymInt", "List[SymInt]")


def _depends_on_batch(graph: StepGraph, data_groups: frozenset[str]) -> set[fx.Node]:
    """Nodes whose values differ between ranks because their batches do, up to the reductions."""
    specs = {spec.name: spec for spec in graph.signature.inputs}
    found: set[fx.Node] = set()
    for node in graph.gm.graph.nodes:
        if node.op == "placeholder":
            spec = specs.get(node.name)
            depends = spec is not None and spec.kind is InputKind.BATCH and spec.tensor is not None
        else:
            depends = not _reduces(node, data_groups) and any(n in found for n in node.all_input_nodes)
        if depends:
            found.add(node)
    return found


def _reduces(node: fx.Node, data_groups: frozenset[str]) -> bool:
    return communicates(node) and group_of(node) in data_groups


def _state_values(
    gm: fx.GraphModule, signature: Signature, kinds: Mapping[str, InputKind], by_name: Mapping[str, fx.Node]
) -> Iterator[fx.Node]:
    for write in signature.write_backs:
        if kinds.get(write.target) in _STATE and write.value in by_name:
            yield by_name[write.value]
    outputs: Any = next(iter(reversed(gm.graph.nodes))).args[0]
    for change in signature.state_changes:
        value = None if change.output is None else outputs[change.output]
        if change.slot in _STATE and isinstance(value, fx.Node):
            yield value


def canonical(text: str) -> str:
    """One text for 1, 1.0 and True: ranks may have read their options from files of different formats."""
    text = {"True": "1.0", "False": "0.0"}.get(text, text)
    try:
        return repr(float(text))
    except ValueError:
        return text


def differing(left: Named, right: Named) -> list[str]:
    """Paths that both sides have and whose values differ."""
    return [path for path in left if path in right and canonical(left[path]) != canonical(right[path])]


def _may_be_shared(spec: Any, slot: Slot) -> bool:
    """Whether an input is a scalar that is neither an option of an optimizer nor a setting of a scaler."""
    if spec.tensor is not None or spec.kind is InputKind.RNG_STATE:
        return False
    if isinstance(slot, HyperSlot):
        return False
    return spec.path.rpartition(".")[2] not in SCALER_NUMBERS


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is not None and not isinstance(value, Tensor | list | tuple)


def _union(bits: Iterable[int]) -> int:
    found = 0
    for each in bits:
        found |= each
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)


def _flat(path: str, value: Any) -> Named:
    if isinstance(value, list | tuple):
        return {f"{path}[{i}]": _text(item) for i, item in enumerate(value)}
    return {path: _text(value)}


def _text(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str) else str(value)


def _picker(indices: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        only = indices[0]
        return lambda values: (values[only],)
    return itemgetter(*indices)


def _getter(keys: list[str], group: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(keys) > 1 and not any(isinstance(group[key], list) for key in keys):
        return itemgetter(*keys)
    # A list is copied: it may be changed in place, and would then be compared with itself.
    return lambda now: tuple(tuple(now[key]) if isinstance(now[key], list) else now[key] for key in keys)
