"""The result of comparing two graphs: what causes the differences, how many nodes follow, and what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from wholestep.errors import Location
from wholestep.ir.readable import html_in_notebooks
from wholestep.ir.step_graph import shown

_MOST = 20


class ChangeCause(StrEnum):
    """What a difference is."""

    INPUT = "input"
    OUTPUT = "output"
    STATE = "state"
    """What a step writes, creates or removes."""
    COLLECTIVE = "collective"
    REDUCE_OP = "reduce op"
    BUCKET = "bucket"
    ORDER = "order"
    ATTENTION = "attention"
    RECOMPUTE = "recompute"
    DTYPE = "dtype"
    IN_PLACE = "in place"
    FUSION = "fusion"
    CONSTANT = "constant"
    SHAPE = "shape"
    EDGE = "edge"
    OPERATORS = "operators"
    LOWERING = "lowering"


@dataclass(frozen=True)
class GraphChange:
    """One cause of differences."""

    kind: ChangeCause
    text: str
    nodes_a: tuple[str, ...] = ()
    """Nodes of the first graph that it is about."""
    nodes_b: tuple[str, ...] = ()
    module_path: str = ""
    phase: str = ""
    location: Location | None = None
    times: int = 1
    """In how many modules the same was found."""
    follows: int = 0
    """How many other nodes differ because of it."""
    us: float = 0.0
    """Predicted microseconds of the second graph beyond those of the first, with what follows."""

    def __str__(self) -> str:
        where = [self.module_path and f"{self.module_path}{f' ({self.times} modules)' if self.times > 1 else ''}"]
        where += [self.phase, str(self.location or "")]
        lines = [f"{self.kind}: {self.text}"]
        at = ", ".join(part for part in where if part)
        lines += [f"    {at}"] if at else []
        cost = f"{self.us / 1e3:+.3f} ms predicted" if abs(self.us) >= 0.5 else ""
        more = (
            f"{self.follows} node{' behind it differs' if self.follows == 1 else 's behind it differ'}"
            if self.follows
            else ""
        )
        tail = ", ".join(part for part in (more, cost) if part)
        return "\n".join([*lines, *([f"    {tail}"] if tail else [])])


@dataclass(frozen=True)
class GraphCost:
    """What one graph is predicted to need."""

    nodes: int
    step_us: float
    exposed_us: float
    peak_bytes: int
    collectives: int


@dataclass(frozen=True)
class GraphDiff:
    """The result of `ws.inspect.diff`; falsy where the graphs do the same."""

    labels: tuple[str, str]
    causes: tuple[GraphChange, ...]
    """The most important first."""
    pairs: int
    """Nodes that correspond."""
    equal: int
    """Those of them that are equal, with all that they are computed from."""
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    cost_a: GraphCost
    cost_b: GraphCost
    guards_a: tuple[str, ...] = ()
    """Conditions under which only the first graph may run."""
    guards_b: tuple[str, ...] = ()
    machine: str = ""

    _repr_html_ = html_in_notebooks

    def __bool__(self) -> bool:
        return bool(self.causes)

    def of(self, kind: ChangeCause | str) -> tuple[GraphChange, ...]:
        """The causes of one kind."""
        return tuple(cause for cause in self.causes if cause.kind == kind)

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {**asdict(self), "different": bool(self)}

    def __str__(self) -> str:
        a, b = self.labels
        alone = f"{len(self.only_in_a)} only in {a}, {len(self.only_in_b)} only in {b}"
        lines = [
            f"{self.cost_a.nodes} and {self.cost_b.nodes} nodes: {self.pairs} correspond ({self.equal} equal), {alone}"
        ]
        if not self:
            return "\n".join([*lines, "no difference"])
        lines.append(f"predicted{f' on {self.machine}' if self.machine else ''}: {self._costs()}")
        for title, guards in ((a, self.guards_a), (b, self.guards_b)):
            lines += [f"only {title} needs: {text}" for text in guards[:3]]
            lines += [f"only {title} needs {len(guards) - 3} other conditions"] if len(guards) > 3 else []
        for number, cause in enumerate(self.causes[:_MOST], 1):
            lines.append(f"{number:>2}. {cause}")
        rest = self.causes[_MOST:]
        lines += [f"and {len(rest)} other causes"] if rest else []
        return "\n".join(lines)

    def _costs(self) -> str:
        x, y = self.cost_a, self.cost_b
        change = f" ({y.step_us / x.step_us - 1:+.1%})" if x.step_us else ""
        found = [f"step {x.step_us / 1e3:.3f} -> {y.step_us / 1e3:.3f} ms{change}"]
        if x.collectives or y.collectives:
            found.append(f"exposed {x.exposed_us / 1e3:.3f} -> {y.exposed_us / 1e3:.3f} ms")
        found.append(f"peak {shown(x.peak_bytes)} -> {shown(y.peak_bytes)}")
        return ", ".join(found)
