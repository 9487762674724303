"""Memory of a step as columns: every storage with its bytes, its kind, the node that makes it, and when it lives.

The graph of a step is functional: an update makes a new tensor, which the epilogue copies. A step runs with updates in
place, so its memory is that of the re-inplaced graph (`ir.reinplace`); `node` says which node of the report's graph
each of its places is.

    kind                what
    parameter, ..       inputs of the step, alive all the time
    communicated        what collectives gather, reduce or receive
    saved               made in the forward and read after it: activations that the backward needs
    gradient            made in the backward and read by clipping or the optimizer, or left in `.grad`
    optimizer_state     state that this step creates
    temporary           everything else
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from wholestep.ir.effects import find_storages, main_device
from wholestep.ir.meta import phase
from wholestep.ir.reinplace import reinplaced
from wholestep.ir.signature import InputKind, Signature
from wholestep.ir.step_graph import StepGraph
from wholestep.simulate.step_index import ISSUE, Integers, StepIndex, index_step, lifetimes, makers, memory_of

SAVED, GRADIENT, TEMPORARY, COMMUNICATED, CONSTANT = "saved", "gradient", "temporary", "communicated", "constant"
STATE = str(InputKind.OPTIMIZER_STATE)
_AFTER_BACKWARD = ("update", "optimizer", "epilogue")


@dataclass(frozen=True, eq=False)
class StepMemory:
    """What is alive in a step, place by place of the graph with updates in place."""

    index: StepIndex
    signature: Signature | None
    live: Integers
    """Bytes while each place runs."""
    input_bytes: int
    kinds: list[str]
    """Of each storage."""
    first: Integers
    last: Integers

    @property
    def peak(self) -> int:
        """The most bytes alive."""
        return int(self.live.max()) if len(self.live) else 0

    @property
    def peak_place(self) -> int:
        """The first place with that many."""
        return int(self.live.argmax()) if len(self.live) else -1

    def by_kind_at(self, place: int) -> dict[str, int]:
        """The bytes that are alive at a place, by kind, most first."""
        found: dict[str, int] = {}
        for storage in ((self.first <= place) & (self.last >= place)).nonzero()[0].tolist():
            kind = self.kinds[storage]
            found[kind] = found.get(kind, 0) + int(self.index.sizes[storage])
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def columns(self, number: dict[str, int]) -> dict[str, Any]:
        """For a page. `number`: of each node of the report's graph, by name."""
        node, latest = [], 0
        for each in self.index.nodes:
            latest = number.get(each.name, latest)
            node.append(latest)
        made_by = makers(self.index)
        names = list(dict.fromkeys(self.kinds))
        at = {name: i for i, name in enumerate(names)}
        kept = [s for s, size in enumerate(self.index.sizes.tolist()) if size]
        paths = {} if self.signature is None else {spec.name: spec.path for spec in self.signature.inputs}
        maker = [self.index.nodes[made_by[s]].name if s in made_by else "" for s in kept]
        return {
            "node": node,
            "bytes": self.index.sizes[kept].tolist(),
            "kind": [at[self.kinds[s]] for s in kept],
            "maker": [number.get(name, -1) for name in maker],
            "first": self.first[kept].tolist(),
            "last": self.last[kept].tolist(),
            "kinds": names,
            "paths": {str(number[name]): path for name, path in paths.items() if name in number},
            "peak": self.peak,
            "peak_place": self.peak_place,
        }


def step_memory(given: StepGraph | fx.GraphModule) -> StepMemory:
    """The memory of a step; of a bare graph module, as it is."""
    graph = reinplaced(given).graph if isinstance(given, StepGraph) else given.graph
    signature = given.signature if isinstance(given, StepGraph) else None
    index = index_step(graph)
    live, input_bytes = memory_of(index)
    first, last = lifetimes(index)
    kinds = _kinds(index, signature, first.tolist(), last.tolist())
    inputs = list(index.persistent)
    first[inputs], last[inputs] = 0, len(index) - 1  # the caller holds them all the time
    return StepMemory(index, signature, live, input_bytes, kinds, first, last)


def _kinds(index: StepIndex, signature: Signature | None, first: list[int], last: list[int]) -> list[str]:
    inputs = {} if signature is None else {spec.name: str(spec.kind) for spec in signature.inputs}
    left = _left_behind(index, signature)
    phases = [phase(node) for node in index.nodes]
    made_by = makers(index)
    found = []
    for storage in range(len(index.sizes)):
        maker = made_by.get(storage, -1)
        node = index.nodes[maker] if maker >= 0 else None
        if storage in index.persistent:
            name = node.name if node is not None else ""
            found.append(inputs.get(name, "input" if node is None or node.op == "placeholder" else CONSTANT))
        elif storage in left:
            found.append(left[storage])
        elif maker >= 0 and index.kind[maker] == ISSUE:
            found.append(COMMUNICATED)
        else:
            found.append(_kind_of_made(phases[first[storage]], phases[last[storage]]))
    return found


def _kind_of_made(made: str, read_last: str) -> str:
    """The kind of what the graph makes, by the phases in which it is made and read last."""
    if made == "forward" and read_last != "forward":
        return SAVED
    return GRADIENT if made == "backward" and read_last in _AFTER_BACKWARD else TEMPORARY


def _left_behind(index: StepIndex, signature: Signature | None) -> dict[int, str]:
    """The storages of gradients and optimizer state that the step leaves in the user's objects."""
    if signature is None or not index.nodes:
        return {}
    values = index.nodes[-1].args[0] if index.nodes[-1].args else ()
    outputs = list(values) if isinstance(values, list | tuple) else [values]
    if all(change.output is None for change in signature.state_changes):
        return {}
    storages = find_storages(index.graph, main_device(index.graph)).seen_by  # numbered as in the index
    found: dict[int, str] = {}
    for change in signature.state_changes:
        if change.output is None or change.output >= len(outputs):
            continue
        value = outputs[change.output]
        if isinstance(value, fx.Node):
            found.update(dict.fromkeys(storages.get(value, ()), str(change.slot)))
    return found
