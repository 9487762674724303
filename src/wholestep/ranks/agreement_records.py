"""What ranks write to the store when they agree on a graph: hashes first, the nodes as text only if hashes differ.

A rank that captured a graph for a call writes a record of it and waits for the records of the others. A rank that
already has a graph for that call runs it without reading the store; if others ask, its watchdog writes its record
(`Answers`).

    agree/<step>/<call>/count      how many records there are
    agree/<step>/<call>/verdict    "go", or the failure; the first rank that writes it decides for all
    agree/<step>/<call>/record/r   what rank r runs: hashes
    agree/<step>/<call>/detail/r   its graph line by line, if records differ
    agree/<step>/<call>/asked      counter: the first rank to raise it posts the event that asks for records
    agree/<step>/<call>/done       how many ranks have read everything; the last one deletes all these keys
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from wholestep.ir.collectives import communication
from wholestep.ir.fingerprint import fingerprint, node_digests
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.signature import InputKind, Signature
from wholestep.ranks.peers import StoreClient
from wholestep.ranks.shared_scalars import canonical

_SHORT = 16
_TEXT = 400
_TEXT_OF_REFUSAL = 4000

Line = tuple[str, str]
"""A digest and the text that it is the digest of."""


@dataclass(frozen=True)
class RankScalars:
    """Python values of one rank at the call for which it agrees on a graph, as text by path."""

    shared: Mapping[str, str] = field(default_factory=dict)
    """Values that must be the same on all ranks of the plan."""
    axis_groups: Sequence[str] = ()
    """One label per mesh axis of the plan; ranks with a common label share scalars."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Values that capture burned in as constants: they may explain why graphs differ."""
    update: Sequence[str] = ()
    """The constants with which the graph changes state after the reduction of gradients (`update_constants`)."""

    def hashes(self) -> tuple[str, str]:
        """Hashes of the paths and of the values in `shared`."""
        values = [(path, canonical(text)) for path, text in sorted(self.shared.items())]
        return _hash(repr([path for path, _ in values]))[:_SHORT], _hash(repr(values))[:_SHORT]

    def update_hash(self) -> str:
        """Hash of `update`."""
        return _hash(repr(list(self.update)))[:_SHORT]


class GraphDigest:
    """The hashes of one graph, which must not change afterwards."""

    def __init__(
        self, gm: fx.GraphModule, signature: Signature, ragged: bool | str, scalars: RankScalars | None = None
    ) -> None:
        self._gm = gm
        self._signature = signature
        self._communication = communication(gm, signature)
        self.fingerprint = fingerprint(gm, signature)
        """Hash of everything that the graph computes."""
        self.communication = _hash("\n".join(each.digest for each in self._communication))
        """Hash of its collectives only, in order."""
        self.communication_id = int(self.communication[:15], 16) if self._communication else 0
        """The same as an integer, for the running hash of a rank; 0 for a graph without collectives."""
        self.ragged = ragged
        """Shape key: graphs of two ranks must be equal as a whole if their keys are equal. False is the key of graphs
        that must all be equal, True that of graphs of which only the communication must be equal."""
        self.scalars = scalars or RankScalars()

    def communications(self) -> list[Line]:
        """One line per collective."""
        return [(each.digest[:_SHORT], each.text[:_TEXT]) for each in self._communication]

    def nodes(self) -> list[Line]:
        """One line per node, then the signature."""
        digests = node_digests(self._gm, self._signature.groups)
        lines = [(d[:_SHORT], _text(n)) for d, n in zip(digests, self._gm.graph.nodes, strict=True)]
        return lines + [(_hash(text)[:_SHORT], text[:_TEXT]) for text in _signature_lines(self._signature)]


class TextDigest:
    """Digest of lines of text, for an agreement on something other than a graph."""

    def __init__(self, lines: list[str], subject: str = "graph") -> None:
        self.subject = subject
        """What the lines describe, for messages."""
        self._lines: list[Line] = [(_hash(line)[:_SHORT], line[:_TEXT]) for line in lines]
        self.fingerprint = self.communication = _hash("\n".join(lines))
        self.ragged: bool | str = False
        self.scalars = RankScalars()

    def communications(self) -> list[Line]:
        """All lines."""
        return self._lines

    def nodes(self) -> list[Line]:
        """All lines."""
        return self._lines


class RefusedDigest(TextDigest):
    """Stands for the graph of a rank that could not capture one and would run the plain function."""

    def __init__(self, text: str) -> None:
        super().__init__([text], "refusal")
        self.refused = text


def local_shapes(signature: Signature) -> str:
    """Shape key of a rank: a hash of the shapes of its batch and of its shards."""
    local = (InputKind.BATCH, InputKind.PARAMETER)
    shapes = [spec.tensor.shape for spec in signature.inputs if spec.tensor is not None and spec.kind in local]
    return _hash(repr(shapes))[:_SHORT]


def digest_of(
    gm: fx.GraphModule, signature: Signature, ragged: bool | str, scalars: RankScalars | None = None
) -> GraphDigest:
    """The digest of a graph. Walks the graph three times."""
    return GraphDigest(gm, signature, ragged, scalars)


def first_difference(left: list[Line], right: list[Line]) -> tuple[int, str, str] | None:
    """The index of the first line that differs, and the text of each side there."""
    for index in range(max(len(left), len(right))):
        a = left[index] if index < len(left) else None
        b = right[index] if index < len(right) else None
        if a is None or b is None or a[0] != b[0]:
            end = "nothing more"
            return index, a[1] if a else end, b[1] if b else end
    return None


def _text(node: fx.Node) -> str:
    path = node_meta(node).module_path
    return (f"{format_node(node)}, {path}" if path else format_node(node))[:_TEXT]


def _signature_lines(signature: Signature) -> Iterator[str]:
    """The parts of a signature that must be equal on all ranks; names of nodes and devices need not be."""
    for spec in signature.inputs:
        yield f"input {spec.path or spec.name} ({spec.kind.value})"
    for output in signature.outputs:
        yield f"output {output.path or output.kind.value}"
    yield f"{len(signature.write_backs)} write-backs"
    for change in signature.state_changes:
        yield f"state change {asdict(change)}"
    for call in signature.host_calls:
        yield f"host call {call}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_MAX_CALLS = 1024
_MAX_QUESTIONS = 256

Call = tuple[str, int]


@dataclass(frozen=True)
class RoundKeys:
    """The store keys of one round of agreement: one call of one step."""

    step: str
    call: int

    def of(self, name: str) -> str:
        """A key that all ranks use."""
        return f"agree/{self.step}/{self.call}/{name}"

    def record(self, rank: int) -> str:
        """The key of the record of a rank."""
        return self.of(f"record/{rank}")

    def detail(self, rank: int) -> str:
        """The key of the lines of its graph."""
        return self.of(f"detail/{rank}")

    def all(self, ranks: Iterable[int]) -> list[str]:
        """All keys of the round."""
        each = [key for rank in ranks for key in (self.record(rank), self.detail(rank))]
        return [*each, *(self.of(name) for name in ("count", "verdict", "asked", "done"))]


def record_of(digest: GraphDigest | TextDigest) -> dict[str, Any]:
    """The record of a rank that runs a graph for the first time."""
    record: dict[str, Any] = {
        "fingerprint": digest.fingerprint,
        "communication": digest.communication,
        "ragged": digest.ragged,
    }
    if isinstance(digest, RefusedDigest):
        record["refused"] = digest.refused[:_TEXT_OF_REFUSAL]
    scalars = digest.scalars
    if scalars.shared:
        names, values = scalars.hashes()
        record |= {"names": names, "values": values}
    if scalars.axis_groups:
        record |= {"update": scalars.update_hash(), "axis_groups": list(scalars.axis_groups)}
    return record


def detail_of(digest: GraphDigest | TextDigest, by_nodes: bool) -> dict[str, Any]:
    """The full description of what a rank runs: its graph (or only its collectives) line by line, and its scalars."""
    lines = digest.nodes() if by_nodes else digest.communications()
    scalars = digest.scalars
    return {
        "lines": lines,
        "shared": dict(scalars.shared),
        "read": dict(scalars.read),
        "update": [(line, line) for line in scalars.update],
    }


def known_record_of(digest: GraphDigest | TextDigest) -> dict[str, Any]:
    """The record of a rank that chose a graph which has run before."""
    record = record_of(digest)
    # Its scalars are those of the call for which it agreed; later calls are compared by hash (`ScalarHistory`).
    return {key: value for key, value in record.items() if key not in ("names", "values")}


def answer_of(digest: GraphDigest) -> dict[str, Any]:
    """The record of a rank that has run its graph before, and may already wait in its first collective."""
    return known_record_of(digest) | {"answered": True}


class Answers:
    """The latest calls of this rank, and the unanswered questions of other ranks about them. Used by the watchdog."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.ran: deque[tuple[str, int, GraphDigest | None]] = deque(maxlen=_MAX_CALLS)
        """Written by the thread that runs steps: the calls that it has begun, the current one included."""
        self.agreed: deque[Call] = deque(maxlen=_MAX_CALLS)
        """Written by the thread that runs steps: the calls for which it wrote a record itself."""
        self._records: dict[Call, None] = {}
        self._details: dict[Call, bool] = {}
        """By call, whether whole graphs are compared (True) or only their collectives."""

    def ask(self, event: dict[str, Any]) -> None:
        """Record a question of another rank."""
        call = (str(event["step"]), int(event["call"]))
        if event["kind"] == "question":
            _remember(self._records, call, None)
        elif event["rank"] == self._rank:
            _remember(self._details, call, bool(event.get("nodes")))

    def give(self, store: StoreClient) -> None:
        """Answer the questions about calls that this rank has begun."""
        if not self._records and not self._details:
            return
        ran = {(step, call): digest for step, call, digest in list(self.ran)}
        agreed = set(self.agreed)
        for call in [call for call in self._records if call in ran or call in agreed]:
            del self._records[call]
            digest = ran.get(call)
            if digest is not None and call not in agreed:
                keys = RoundKeys(*call)
                store.write(keys.record(self._rank), answer_of(digest))
                store.count(keys.of("count"), 1)
        for call in [call for call in self._details if call in ran]:
            by_nodes = self._details.pop(call)
            digest = ran[call]
            if digest is not None:
                store.write(RoundKeys(*call).detail(self._rank), detail_of(digest, by_nodes))


def _remember(questions: dict[Call, Any], call: Call, what: Any) -> None:
    questions[call] = what
    if len(questions) > _MAX_QUESTIONS:
        del questions[next(iter(questions))]
