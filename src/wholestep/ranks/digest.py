"""What a rank shows the other ranks of a graph: two hashes at once, its nodes as text only where hashes differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torch import fx

from wholestep.ir.collectives import communication
from wholestep.ir.fingerprint import fingerprint, node_digests
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.signature import InputKind, Signature
from wholestep.ranks.shared_scalars import normal

_SHORT = 16
_TEXT = 400

Line = tuple[str, str]
"""A digest and what it stands for."""


@dataclass(frozen=True)
class RankScalars:
    """Python values of one rank at the call for which it agrees on a graph, as text by path."""

    shared: Mapping[str, str] = field(default_factory=dict)
    """Those that must be the same on all ranks of the plan."""
    teams: Sequence[str] = ()
    """A word for each mesh axis of the plan: ranks that have one in common share scalars."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Those that the capture took for constants: they may tell why graphs differ."""
    update: Sequence[str] = ()
    """The constants by which the graph changes state behind the reduction of gradients (`update_constants`)."""

    def hashes(self) -> tuple[str, str]:
        """Of the paths, and of the values of what is shared."""
        values = [(path, normal(text)) for path, text in sorted(self.shared.items())]
        return _hash(repr([path for path, _ in values]))[:_SHORT], _hash(repr(values))[:_SHORT]

    def update_hash(self) -> str:
        """Of the constants."""
        return _hash(repr(list(self.update)))[:_SHORT]


class GraphDigest:
    """The hashes of one graph. The graph must not change afterwards."""

    def __init__(
        self, gm: fx.GraphModule, signature: Signature, ragged: bool | str, scalars: RankScalars | None = None
    ) -> None:
        self._gm = gm
        self._signature = signature
        self._communication = communication(gm, signature)
        self.fingerprint = fingerprint(gm, signature)
        """Of everything that the graph computes."""
        self.communication = _hash("\n".join(each.digest for each in self._communication))
        """Of its collectives only, in order."""
        self.number = int(self.communication[:15], 16) if self._communication else 0
        """What it communicates, for the trail of a rank; 0 if nothing."""
        self.ragged = ragged
        """Which graphs must be the same as a whole: all (False), none (True), or those with the same word here. Of
        the others only the communication has to be the same."""
        self.scalars = scalars or RankScalars()

    def communications(self) -> list[Line]:
        """One line per collective."""
        return [(each.digest[:_SHORT], each.text[:_TEXT]) for each in self._communication]

    def nodes(self) -> list[Line]:
        """One line per node, then the signature."""
        digests = node_digests(self._gm, self._signature.groups)
        lines = [(d[:_SHORT], _text(n)) for d, n in zip(digests, self._gm.graph.nodes, strict=True)]
        return lines + [(_hash(text)[:_SHORT], text[:_TEXT]) for text in _signature_lines(self._signature)]


class LinesDigest:
    """What ranks must have in common that is no graph: lines of text."""

    def __init__(self, lines: list[str], subject: str = "graph") -> None:
        self.subject = subject
        """What the lines are about, for messages."""
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


def local_shapes(signature: Signature) -> str:
    """A word for the shapes that a rank has: of its batch and of its shards."""
    local = (InputKind.BATCH, InputKind.PARAMETER)
    shapes = [spec.tensor.shape for spec in signature.inputs if spec.tensor is not None and spec.kind in local]
    return _hash(repr(shapes))[:_SHORT]


def digest_of(
    gm: fx.GraphModule, signature: Signature, ragged: bool | str, scalars: RankScalars | None = None
) -> GraphDigest:
    """What this rank shows of a graph. Costs three walks."""
    return GraphDigest(gm, signature, ragged, scalars)


def first_difference(left: list[Line], right: list[Line]) -> tuple[int, str, str] | None:
    """The number of the first line that differs, and what each side has there."""
    for number in range(max(len(left), len(right))):
        a = left[number] if number < len(left) else None
        b = right[number] if number < len(right) else None
        if a is None or b is None or a[0] != b[0]:
            end = "nothing more"
            return number, a[1] if a else end, b[1] if b else end
    return None


def _text(node: fx.Node) -> str:
    path = node_meta(node).module_path
    return (f"{format_node(node)}, {path}" if path else format_node(node))[:_TEXT]


def _signature_lines(signature: Signature) -> Iterator[str]:
    """The parts of a signature that ranks must share. Names of nodes and devices of ranks are not."""
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
