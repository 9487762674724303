"""One training step as one FX graph with a typed signature.

placeholders     one per `signature.inputs`, in order
body             functional: nothing is written
epilogue         copy_(placeholder, value), one per `signature.write_backs`
output           one flat tuple, an entry per `signature.outputs`

The result of a memory budget (`step.last.memory`), and amounts of memory as users write and read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO

from torch import fx
from torch.fx.graph import CodeGen

from wholestep.errors import invalid_value
from wholestep.ir.fingerprint import fingerprint
from wholestep.ir.graph_walks import copy_graph
from wholestep.ir.groups import rebind_groups, renamed_groups
from wholestep.ir.io.serialize import read_step_graph, write_step_graph
from wholestep.ir.readable import html_in_notebooks, readable, summary
from wholestep.ir.signature import Signature
from wholestep.torch_private.fx_graphs import has_plain_codegen, lazy_graph_module

_MOST_ROWS = 12


@dataclass(frozen=True)
class SavedTensor:
    """A forward value that lives until the backward."""

    name: str
    """The node that computes it."""
    bytes: int
    module_path: str


@dataclass
class MemoryReport:
    """Peaks are bytes on one device: parameters, state and batch of the step, and all that it allocates."""

    device: str
    budget: int
    """The largest allowed peak."""
    planned_peak: int
    """The expected peak: the executable graph simulated node by node, with the measured memory of compiled calls."""
    smallest_peak: int
    """The lowest peak of all candidates that were built or estimated."""
    peak_without: int
    """Peak without recomputation; an estimate unless the budget is a fraction."""
    saved: tuple[SavedTensor, ...]
    """What is saved for the backward, largest first."""
    recomputed: tuple[str, ...]
    """Forward nodes that the backward recomputes."""
    plans_tried: int
    """Candidates that were built."""
    shed: int | None = None
    """Compiled steps whose budget allows it use the compiler's own cut, with (at least) this many fewer bytes saved;
    names are then those of the compiled region. None: the graph itself says what is recomputed."""
    measured_peak: int | None = None
    """Peak of the first call of this graph; None before it, or if a profiler ran."""

    _repr_html_ = html_in_notebooks

    @property
    def saved_bytes(self) -> int:
        """Of all tensors in `saved`."""
        return sum(tensor.bytes for tensor in self.saved)

    def __str__(self) -> str:
        measured = "not yet" if self.measured_peak is None else shown(self.measured_peak)
        lines = [
            f"memory on {self.device}: budget {shown(self.budget)}, planned {shown(self.planned_peak)}, "
            f"measured {measured}",
            f"  without recomputation {shown(self.peak_without)}, smallest {shown(self.smallest_peak)}",
            f"  {len(self.recomputed)} nodes recomputed, {len(self.saved)} tensors saved ({shown(self.saved_bytes)}):",
        ]
        lines += [f"    {shown(t.bytes):>12}  {t.name}  {t.module_path}".rstrip() for t in self.saved[:_MOST_ROWS]]
        if len(self.saved) > _MOST_ROWS:
            rest = self.saved[_MOST_ROWS:]
            lines.append(f"    {shown(sum(t.bytes for t in rest)):>12}  in {len(rest)} others")
        return "\n".join(lines)


def shown(count: float) -> str:
    """Bytes as text with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)})
_UNITS.update({f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)})
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", re.IGNORECASE)
_FIX = 'use bytes (12_000_000_000) or a text ("12GiB", "800MB").'


def as_bytes(given: Any, name: str) -> float | None:
    """Bytes, from a number or a text such as "12GiB"; None stays None. `name`: the option, for its error."""
    if given is None:
        return None
    if isinstance(given, str):
        return bytes_in(given, name, _FIX)
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise invalid_value(name, given, _FIX)
    return given


def bytes_in(text: str, name: str, fix: str) -> int:
    """The bytes that a text names."""
    match = _TEXT.fullmatch(text)
    unit = match[2].upper().replace("I", "i") if match is not None else ""
    count = float(match[1]) * _UNITS[unit] if match is not None and unit in _UNITS else 0.0
    if not 1 < count < 2**63:  # "0.5" is not a fraction
        raise invalid_value(name, text, fix)
    return int(count)


class StepGraph:
    """A step: its graph (`gm`) and what every input and output is (`signature`)."""

    _repr_html_ = html_in_notebooks

    def __init__(self, gm: fx.GraphModule, signature: Signature) -> None:
        self.gm = gm
        self.signature = signature
        self.memory: MemoryReport | None = None
        """With a memory budget: what was planned, and what the first run needed."""
        if not has_plain_codegen(gm.graph):
            gm.graph.set_codegen(CodeGen())
            gm.recompile()

    @property
    def num_nodes(self) -> int:
        """How many nodes the graph has, with placeholders and output."""
        return len(self.gm.graph.nodes)

    def print_readable(self, file: TextIO | None = None, *, print_output: bool = True) -> str:
        """The step as Python text with module paths and the user's lines; also printed, to `file` or to stdout."""
        text = readable(self.gm, self.signature)
        if print_output:
            print(text, file=file)
        return text

    def copy(self) -> StepGraph:
        """A copy to rewrite."""
        gm = lazy_graph_module(self.gm, copy_graph(self.gm.graph), type(self.gm).__name__)
        gm.meta.update(self.gm.meta)
        made = StepGraph(gm, self.signature)
        made.memory = self.memory
        return made

    def to_json(self) -> str:
        """The step as versioned JSON, readable with `from_json`."""
        return write_step_graph(self.gm, self.signature)

    @classmethod
    def from_json(cls, text: str, *, allow_ops: Iterable[str] = ()) -> StepGraph:
        """Read what `to_json` wrote.

        Operators outside torch's own namespaces are refused unless `allow_ops` names them ("mylib::op", "mylib::*").
        """
        return cls(*read_step_graph(text, allow_ops=allow_ops))

    def rebind_groups(self, names: Mapping[str, str]) -> None:
        """Call process groups by other names, in graph and signature: `{name in the file: name on this rank}`."""
        rebind_groups(self.gm, names)
        self.signature = replace(self.signature, groups=renamed_groups(self.signature.groups, names))

    def verify(self, level: int = 1) -> None:
        """Raise VerifyError unless the graph obeys the rules of its normal form (level 2: metadata too)."""
        from wholestep.ir.verify import verify

        verify(self, level)

    def fingerprint(self) -> str:
        """A hash of what the step computes: equal for equal steps, in every process, whatever nodes are called."""
        return fingerprint(self.gm, self.signature)

    def __str__(self) -> str:
        return summary(self.gm, self.signature)

    def __repr__(self) -> str:
        signature = self.signature
        return (
            f"StepGraph({self.num_nodes} nodes, {len(signature.inputs)} inputs, {len(signature.outputs)} outputs, "
            f"{len(signature.write_backs)} write-backs)"
        )
