"""One training step as one FX graph with a typed signature.

placeholders     one per `signature.inputs`, in order
body             functional: nothing is written
epilogue         copy_(placeholder, value), one per `signature.write_backs`
output           one flat tuple, an entry per `signature.outputs`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol, TextIO

from torch import fx
from torch.fx.graph import CodeGen

from wholestep.ir.fingerprint import fingerprint
from wholestep.ir.graphs import copy_graph
from wholestep.ir.groups import rebind_groups, renamed_groups
from wholestep.ir.io.serialize import read_step_graph, write_step_graph
from wholestep.ir.memory_report import MemoryReport
from wholestep.ir.readable import readable
from wholestep.ir.signature import Signature
from wholestep.torch_private.fx_graphs import has_plain_codegen, lazy_graph_module


class GraphBinding(Protocol):
    """The link from a captured graph to the user's objects."""

    def rebound(self, step_graph: StepGraph) -> GraphBinding:
        """The same for another version of the graph, with the same inputs and outputs."""


class StepGraph:
    """A step: its graph (`gm`) and what every input and output is (`signature`)."""

    def __init__(self, gm: fx.GraphModule, signature: Signature) -> None:
        self.gm = gm
        self.signature = signature
        self.memory: MemoryReport | None = None
        """With a memory budget: what was planned, and what the first run needed."""
        self.binding: GraphBinding | None = None
        """How the graph is bound to the user's objects (`step.Binding`); None where it was read from a file."""
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
        """A copy to rewrite, bound to the same objects."""
        gm = lazy_graph_module(self.gm, copy_graph(self.gm.graph), type(self.gm).__name__)
        gm.meta.update(self.gm.meta)
        made = StepGraph(gm, self.signature)
        made.memory = self.memory
        made.binding = None if self.binding is None else self.binding.rebound(made)
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

    def __repr__(self) -> str:
        signature = self.signature
        return (
            f"StepGraph({self.num_nodes} nodes, {len(signature.inputs)} inputs, {len(signature.outputs)} outputs, "
            f"{len(signature.write_backs)} write-backs)"
        )
