"""One captured graph as data, and how it is bound to a call without tracing.

    SavedGraph.of(captured, fn, facts)     after the capture: to be written to a file
    saved.bind(fn, call)                   in another process: CapturedStep on its objects, or why it does not fit

`CaptureFacts` are taken when a graph is captured, before it first runs: what lies in the objects then, and the code.
They are compared with those of the call that the graph is to be bound to. Whatever differs is a reason not to bind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wholestep.artefact import assumed_objects, code_table
from wholestep.artefact.addresses import Addresses, Given, Walk
from wholestep.artefact.assumed_objects import Snapshot, snapshot_of
from wholestep.artefact.code_table import FUNCTIONS, code_of
from wholestep.artefact.record_reader import read_step
from wholestep.artefact.record_writer import write_step
from wholestep.artefact.shards import ThisRank, write_shard
from wholestep.artefact.slots_as_json import rows, table, text, whole, wrong
from wholestep.capture.objects.discover import discover
from wholestep.capture.results.changed_python import classes_of
from wholestep.errors import ArtefactError, GraphFormatError
from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.io.arguments import TargetReader
from wholestep.ir.io.serialize import RecordReader, write_record
from wholestep.ir.step_graph import MemoryReport, StepGraph

_KEY_CLASSES = {"NoneType": type(None), "str": str, "int": int, "bool": bool}


class Code:
    """The code that some objects run, as a table: both are made when the table is first asked for, because frameworks
    lead to tens of thousands of objects and functions, and few steps are saved."""

    def __init__(self, roots: Callable[[], Sequence[Any]] = tuple, table: dict[str, str] | None = None) -> None:
        self._roots = roots
        self._table = table

    @classmethod
    def of_step(cls, fn: Callable[..., Any], arguments: Mapping[int, Any], *others: Any) -> Code:
        """What the function of a step reaches by name, and other functions."""
        return cls(lambda: [fn, *others, *_with_code(Walk(fn, arguments))])

    @classmethod
    def of_objects(cls, captured: CapturedStep) -> Code:
        """The classes of modules, optimizers and what lies in them."""
        specs = captured.guards
        roots = [*(module for module, _ in specs.modules), *specs.optimizers, *specs.scalers]
        return cls(lambda: _with_code(Walk(None, dict(enumerate(roots)))))

    @property
    def table(self) -> dict[str, str]:
        """Hashes by name."""
        if self._table is None:
            self._table, self._roots = code_of(self._roots()), tuple
        return self._table


def _with_code(walk: Walk) -> list[Any]:
    """Functions that objects hold (attributes, hooks), and the classes of all objects."""
    classes = {type(value) for value in walk.objects}
    held = [value for value in walk.objects if isinstance(value, FUNCTIONS)]
    return [*held, *sorted(classes, key=lambda each: f"{each.__module__}.{each.__qualname__}")]


@dataclass(frozen=True)
class CaptureFacts:
    """What was true when a graph was captured."""

    snapshot: Snapshot
    step: Code
    """The code that the function of the step reaches by name."""
    objects: Code
    """The code of the classes of what it works on."""
    refusal: str = ""
    """Why they could not be taken."""

    @classmethod
    def of(cls, captured: CapturedStep, fn: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> CaptureFacts:
        """Taken now, but for the code. Objects of the user's that cannot be read make a refusal: a capture does not
        fail for it."""
        try:
            snapshot = snapshot_of(captured, leaves, structure)
        except Exception as error:  # a class of the user's may raise anything where its objects are read
            return cls({}, Code(), Code(), f"{type(error).__name__}: {error}")
        return cls(snapshot, Code.of_step(fn, captured.guards.arguments.constants), Code.of_objects(captured))


class OtherObjectsError(ArtefactError):
    """A call whose objects or code are not those of a saved graph."""

    reasons: Sequence[str] = ()

    @classmethod
    def of(cls, reasons: Sequence[str], what: str) -> OtherObjectsError:
        shown = "\n    ".join(reasons[:8])
        more = f"\n    and {len(reasons) - 8} more" if len(reasons) > 8 else ""
        made = cls(
            f"{what}:\n    {shown}{more}",
            fix="give objects of the same structure, or capture the step with ws.compile and save it again.",
        )
        made.reasons = reasons
        return made


@dataclass(frozen=True)
class SavedGraph:
    """A captured graph as data."""

    document: dict[str, Any]
    facts: CaptureFacts
    memory: Any = None
    """The report of a memory budget, as JSON."""

    @classmethod
    def of(cls, captured: CapturedStep, fn: Callable[..., Any], facts: CaptureFacts) -> SavedGraph:
        """A graph with all its passes, and the facts of its capture. ArtefactError names what cannot be saved."""
        if facts.refusal:
            raise ArtefactError(f"the step cannot be saved: its objects could not be read ({facts.refusal}).")
        try:
            _ = facts.step.table, facts.objects.table
        except Exception as error:  # as above
            raise ArtefactError(f"the step cannot be saved: its objects could not be read ({error}).") from error
        walk = Walk(fn, captured.guards.arguments.constants)
        try:
            document = write_step(captured, walk, write_shard)
        except GraphFormatError as error:
            raise ArtefactError(f"the graph cannot be saved: {error.what}", fix=error.fix, node=error.node) from error
        report = captured.step_graph.memory
        return cls(document, facts, None if report is None else write_record(report))

    def to_json(self) -> dict[str, Any]:
        """All of it but the graph, which is text of its own."""
        rest = {key: value for key, value in self.document.items() if key != "graph"}
        facts = [self.facts.snapshot, self.facts.step.table, self.facts.objects.table]
        return {"step": rest, "facts": facts, "memory": self.memory}

    @property
    def graph(self) -> str:
        """The text of the graph."""
        return text(self.document["graph"])

    @classmethod
    def read(cls, data: Any, graph: str) -> SavedGraph:
        """What `to_json` gave. The form of facts is checked here, that of the step where it is bound."""
        found = table(data)
        if set(found) != {"step", "facts", "memory"}:
            raise wrong(data, "a saved graph")
        facts = rows(found["facts"])
        if len(facts) != 3 or not all(isinstance(value, str) for each in facts for value in table(each).values()):
            raise wrong(facts, "the facts of a capture")
        step = table(found["step"])
        _check_addresses(step.get("addresses"))
        values, of_step, of_objects = facts
        found_facts = CaptureFacts(values, Code(table=of_step), Code(table=of_objects))
        return cls(step | {"graph": graph}, found_facts, found["memory"])

    def step_graph(self, allow_ops: Sequence[str] = ()) -> StepGraph:
        """The graph alone; read each time, because lowering writes into what hangs on it."""
        try:
            found = StepGraph.from_json(self.graph, allow_ops=allow_ops)
            if self.memory is not None:
                found.memory = RecordReader(TargetReader()).read(MemoryReport, self.memory, "memory")
            return found
        except GraphFormatError as error:
            raise ArtefactError(f"the graph of the file cannot be used: {error.what}", fix=error.fix) from error

    def bind(
        self,
        fn: Callable[..., Any] | Given,
        leaves: Sequence[Any],
        structure: Any,
        *,
        rank: ThisRank,
        allow_ops: Sequence[str] = (),
    ) -> CapturedStep:
        """The step on the objects of a call; OtherObjectsError says what differs. Nothing of the user's is changed."""
        before = self.facts
        arguments = self._arguments(leaves)
        if not isinstance(fn, Given):
            now = Code.of_step(fn, arguments).table
            refuse(code_table.differences(before.step.table, now), "the code is not that of the capture")
        key = "the structure of the arguments"
        calls = ({key: before.snapshot.get(key, "")}, {key: assumed_objects.structure_text(structure)})
        refuse(assumed_objects.differences(*calls), "the call is not that of the capture")
        addresses = Addresses(self.document["addresses"], fn, arguments)
        graph = self.step_graph(allow_ops)
        rank.rebind(graph)
        captured = read_step(self.document, addresses, leaves, structure, shards=rank.spec, graph=graph)
        different = [
            *code_table.differences(before.objects.table, Code.of_objects(captured).table),
            *assumed_objects.differences(
                before.snapshot, snapshot_of(captured, leaves, structure), isinstance(fn, Given)
            ),
        ]
        refuse(different, "the objects of this call are not those of the capture")
        return captured if isinstance(fn, Given) else with_guards_on_code(captured, fn, leaves)

    def _arguments(self, leaves: Sequence[Any]) -> dict[int, Any]:
        numbers = [whole(i) for i in rows(table(self.document.get("guards")).get("constants"))]
        return {i: leaves[i] for i in numbers if i < len(leaves)}


def with_guards_on_code(captured: CapturedStep, fn: Callable[..., Any], leaves: Sequence[Any]) -> CapturedStep:
    """The step with guards on what the code of its function is made of, which is not in the file: it was just compared.

    Classes of objects, code of functions, builtins, names of libraries and registries may change in later calls.
    """
    specs = captured.guards
    world = discover(fn, zip(specs.arguments.paths, leaves, strict=True), hooks=True)
    sources = world.sources
    weak = [(reference, path) for reference, path in sources.weak.values() if reference() is not None]
    weakly_held = {id(reference()) for reference, _ in weak}
    types = classes_of(world) | {id(obj): (obj, path, type(obj)) for obj, path in world.holders.values()}
    guards = replace(
        specs,
        types=[each for each in types.values() if id(each[0]) not in weakly_held],
        codes=list(world.codes.values()),
        weak=weak,
        libraries=list(sources.libraries.values()),
        abstract_classes=list(sources.abstract_classes.values()),
        builtin_names=[(namespace, frozenset(names)) for namespace, names in world.builtin_names.values()],
    )
    return replace(captured, guards=guards)


def refuse(reasons: Iterable[str], what: str) -> None:
    """Raise OtherObjectsError if there are reasons."""
    found = list(reasons)
    if found:
        raise OtherObjectsError.of(found, what)


def _check_addresses(data: Any) -> None:
    for number, (kind, parent, key, cls) in enumerate(rows(data, 4)):
        text(kind), text(cls)
        if type(parent) is not int or not -1 <= parent < number:
            raise wrong(parent, "an earlier address")
        if type(key) not in _KEY_CLASSES.values():
            raise wrong(key, "the key of an address")
