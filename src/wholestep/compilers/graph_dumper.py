"""`graph_dumper_aot` and `debug_compile`: write graphs to folders from which they can be run again, then run them.

    torch.compile(model, backend=graph_dumper_aot("name", "folder"))

    folder/name/name_joint_0, name_forward_0, name_backward_0, name_forward_1 ...      each a dump (`ir/io/dump.py`)
    folder/name/index.json                                                             a list of them, for programs

Numbers count the graphs that one dumper has seen; forward, backward and joint graph of one trace have the same. Inputs
that are parameters or buffers carry the name that the user's module gives them. Inputs have no data while AOTAutograd
compiles, so values, ranges of integers and RNG states are added at the first run, before the graph runs: a graph that
crashes has left everything that is needed to reproduce the crash.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from wholestep.compilers.run_unchanged import Compiled, Compiler, boxed, graph_module, nop
from wholestep.errors import DumpError, OptionError
from wholestep.ir.io.dump import GraphDump, new_folder, read_json, write_atomically
from wholestep.ir.meta import plain_path
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.aot import aot_simplified, default_partition, graph_being_compiled
from wholestep.torch_private.symbolic_shapes import dynamo_source, input_source

INDEX_FORMAT = "wholestep.graph_index"
INDEX_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)


def graph_dumper_aot(current_name: str, folder_name: str, dump_example_input: bool = False) -> GraphDumper:
    """A `torch.compile` backend that dumps the forward, backward and joint graphs, and runs them unchanged.

    `dump_example_input`: save the values of the inputs too, not only their layout.
    """
    return GraphDumper(current_name, folder_name, dump_example_input)


class GraphDumper:
    """The dumper of one name: a backend; `hooks` are the callbacks for AOTAutograd."""

    def __init__(self, name: str, folder: str | Path, keep_values: bool = False) -> None:
        if not _NAME.fullmatch(name) or ".." in name:
            raise OptionError(f"{name!r} cannot be the name of a folder.", fix="use letters, digits, _, - and dots.")
        self.name = name
        self.folder = Path(folder) / name
        self._save_values = keep_values
        self._index: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._numbers = 0
        self.__name__ = f"graph_dumper_{name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphDumper:
        """The same dumper: there is one index for each folder. Lightning copies the arguments of `torch.compile`."""
        return self

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: dump what AOTAutograd builds from a graph of dynamo."""
        traced = _DumpedTrace(self, _names_of_inputs(gm))
        return aot_simplified(
            gm,
            list(example_inputs),
            fw_compiler=traced.fw_compiler,
            bw_compiler=traced.bw_compiler,
            inference_compiler=traced.inference_compiler,
            partition_fn=traced.partition_fn,
        )

    def hooks(self, module: nn.Module | None = None) -> dict[str, Callable[..., Any]]:
        """The hooks for one `aot_function` or `aot_module`: `aot_module(module, **dumper.hooks(module))`."""
        names = [] if module is None else [n for n, _ in (*module.named_parameters(), *module.named_buffers())]
        traced = _DumpedTrace(self, names)
        return {
            "fw_compiler": traced.fw_compiler,
            "bw_compiler": traced.bw_compiler,
            "inference_compiler": traced.inference_compiler,
            "partition_fn": traced.partition_fn,
        }

    def number(self) -> int:
        """The number of the next trace."""
        with self._lock:
            self._numbers += 1
            return self._numbers - 1

    def dump(
        self, gm: fx.GraphModule, inputs: Sequence[Any], kind: str, number: int, names: dict[str, str]
    ) -> GraphDump:
        """Write one graph and enter it into the index."""
        title = f"{self.name}_{kind}_{number}"
        found = GraphDump(self.folder / title, gm, inputs, title, names)
        with self._lock:
            known = {node.name for node in gm.graph.nodes}
            entry = {
                "folder": title,
                "kind": kind,
                "graph": number,
                "nodes": len(gm.graph.nodes),
                "names": {node: name for node, name in names.items() if node in known},
            }
            self._index.append(entry)
            document = {"format": INDEX_FORMAT, "version": INDEX_VERSION, "graphs": self._index}
            write_atomically(self.folder / "index.json", json.dumps(document, indent=1) + "\n")
        return found

    @property
    def saves_values(self) -> bool:
        """True if the values of inputs are written."""
        return self._save_values


class _DumpedTrace:
    """One trace: its graphs have one number, and corresponding placeholders have the same user name in all of them."""

    def __init__(self, dumper: GraphDumper, inputs: list[str]) -> None:
        self._dumper = dumper
        self._inputs = inputs
        """Names of the first inputs of the joint graph."""
        self._number: int | None = None
        self._names: dict[str, str] = {}
        self._joint: GraphDump | None = None

    def partition_fn(self, joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        """Dump the joint graph, then partition it as torch does by default."""
        self._number = self._dumper.number()
        self._name(joint)
        self._joint = self._dumper.dump(joint, _flat(inputs), "joint", self._number, self._names)
        return default_partition(joint, inputs, **settings)

    def fw_compiler(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Dump the forward of a training graph."""
        return self._run(gm, inputs, "forward")

    def inference_compiler(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Dump a graph that has no backward."""
        self._number = self._dumper.number()
        self._name(gm)
        return self._run(gm, inputs, "forward")

    def bw_compiler(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Dump the backward."""
        return self._run(gm, inputs, "backward")

    def _name(self, gm: fx.GraphModule) -> None:
        """Names of placeholders. AOTAutograd numbers the inputs of its caller; some may be missing or added."""
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            number = input_source(node)
            number = place if number is None else number
            if isinstance(number, str):
                self._names[node.name] = number
            elif 0 <= number < len(self._inputs) and self._inputs[number]:
                self._names[node.name] = self._inputs[number]

    def _run(self, gm: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Compiled:
        if self._number is None:  # the caller has its own partitioner
            self._number = self._dumper.number()
            self._name(gm)
        dump = self._dumper.dump(gm, inputs, kind, self._number, self._names)

        def run(*args: Any) -> Any:
            if not dump.complete:
                (dump.add_values if self._dumper.saves_values else dump.add_ranges)(args)
                if self._joint is not None:
                    self._joint.take_ranges(dump)
            return gm(*args)

        return boxed(run)


def read_index(folder: str | Path) -> list[Path]:
    """The folders that an index lists, all inside of `folder`; `read_dump` reads them."""
    parent = Path(folder)
    listed = read_json(parent / "index.json", INDEX_FORMAT, INDEX_VERSION).get("graphs")
    found = []
    for entry in listed if isinstance(listed, list) else [None]:
        name = entry.get("folder") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name or (parent / name).is_symlink():
            raise DumpError(f"index.json names a folder outside of its own: {str(name)[:60]!r}.")
        found.append(parent / name)
    return found


def _names_of_inputs(gm: Any) -> list[str]:
    """The user's names of the inputs of a dynamo graph: parameters that it holds come first, then placeholders."""
    held = [name for name, _ in (*gm.named_parameters(), *gm.named_buffers())]
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    return [plain_path(name) for name in held] + [plain_path(dynamo_source(node)) for node in placeholders]


def _flat(inputs: Any) -> list[Any]:
    if isinstance(inputs, tuple | list) and len(inputs) == 2 and all(isinstance(each, tuple | list) for each in inputs):
        return [*inputs[0], *inputs[1]]
    return list(inputs)


log = logging.getLogger("wholestep.compilers")

FOLDER = "wholestep_dumps"


def debug_compile(
    fx_g: fx.GraphModule | StepGraph,
    inps: Sequence[Any] = (),
    *,
    folder: str | Path = FOLDER,
    name: str = "",
    compiler: Compiler = nop,
) -> Compiled:
    """Dump the graph into a new folder under `folder`, print where, and run what `compiler` returns for it.

    `name` starts the folder's name; by default it is AOTAutograd's name of the graph (`model__0_forward_1`).
    """
    gm = graph_module(fx_g)
    title = name or graph_being_compiled() or "graph"
    names = {spec.name: spec.path for spec in fx_g.signature.inputs} if isinstance(fx_g, StepGraph) else {}
    dump = GraphDump(new_folder(Path(folder), title), gm, inps, title, names)
    print(f"wholestep: {title} is in {dump.folder}; run it with: python {dump.folder / 'repro.py'}")
    compiled = compiler(gm, inps)

    def run(*args: Any) -> Any:
        if not dump.complete:
            dump.add_values(args)
        return compiled(list(args))

    return boxed(run)
