"""Where a model is cut: markers in the user's code, split specs, policies by parameter size, and `PipeSequential`.

`pipe_split()` is an operator without inputs or results. Eager does nothing there; export records it as a node. A stage
is the run of nodes between two markers, in the order of the trace, so in-place writes, random ops and regions keep
their order. Consecutive markers are one cut; markers before the first or after the last operator are ignored.

    pipeline(model, (x,), split_policy=split_into_equal_size(4))
    pipeline(model, (x,), split_policy=split_on_size_threshold(100_000_000))

These policies are PiPPy's. A parameter counts wherever it is used. `pipeline(..., stages=4)` also considers time, the
bytes that cross a cut and activations.
"""

from __future__ import annotations

import copy
import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Flag
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from wholestep.errors import NoSuchModuleError, OptionError, PipelineError, invalid_value
from wholestep.pipelining.build.context_regions import is_function_mark
from wholestep.torch_private.modules_and_optimizers import forward_hooks
from wholestep.torch_private.pipelining import define_marker, torchs_markers

SPLIT = define_marker("wholestep::pipe_split", "() -> ()")


def pipe_split() -> None:
    """End a stage here and begin the next. Nothing happens when the model runs in eager.

    >>> def forward(self, x):
    >>>     x = self.first(x)
    >>>     pipe_split()
    >>>     return self.second(x)
    """
    SPLIT()


def is_split(node: fx.Node) -> bool:
    """True for a split marker: ours, torch's, or the Python functions that a split policy may insert."""
    return node.op == "call_function" and (node.target in (SPLIT, pipe_split) or node.target in torchs_markers())


class SplitPoint(Flag):
    """Where to cut at a submodule: before it runs, after it, or both (`BEGINNING | END`)."""

    BEGINNING = 1
    END = 2


_Point = SplitPoint


class PipeSplitWrapper(torch.nn.Module):
    """A module with a cut before or after it, as in PiPPy. The names of its state contain `mod`."""

    SplitPoint = SplitPoint

    def __init__(self, mod: torch.nn.Module, split_point: _Point = SplitPoint.BEGINNING) -> None:
        super().__init__()
        self.mod = mod
        self.split_point = split_point

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with its markers."""
        if _Point.BEGINNING in self.split_point:
            pipe_split()
        result = self.mod(*args, **kwargs)
        if _Point.END in self.split_point:
            pipe_split()
        return result


class SplitAnnotations:
    """The hooks that `annotate_split_points` registered; `undo()` removes them. Also a context manager."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = list(handles)

    def undo(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> SplitAnnotations:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.undo()


def annotate_split_points(mod: torch.nn.Module, spec: Mapping[str, Any]) -> SplitAnnotations:
    """Cut before or after submodules: `{"layers.2": SplitPoint.BEGINNING}`. Hooks are registered on the module itself.

    A value may also be `BEGINNING | END` or a tuple of both. The result's `undo()` removes the hooks.
    """
    found = {name: (_submodule(mod, name), _points(name, point)) for name, point in spec.items()}
    handles: list[RemovableHandle] = []
    for submodule, points in found.values():
        if SplitPoint.BEGINNING in points:
            handles.append(submodule.register_forward_pre_hook(_split_before))
        if SplitPoint.END in points:
            handles.append(submodule.register_forward_hook(_split_after))
    return SplitAnnotations(handles)


@contextmanager
def every_one_called(mod: torch.nn.Module, spec: Iterable[str]) -> Iterator[None]:
    """Raise afterwards if a submodule named by a spec was not called: nothing was cut there."""
    called: set[torch.nn.Module] = set()
    handles = [mod.get_submodule(name).register_forward_pre_hook(lambda each, _: called.add(each)) for name in spec]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for name in spec:
        submodule = mod.get_submodule(name)
        if submodule not in called:
            inside = [f"{name}.{child}" for child, _ in submodule.named_children()]
            also = f", such as {inside[-1]!r}" if inside else ""
            raise PipelineError(
                f"split_spec names {name!r}, which the model does not call: there is nothing to cut before or after.",
                fix=f"name a submodule that is called{also}.",
            )


def split_points(module: torch.nn.Module) -> SplitPoint:
    """The split points that `annotate_split_points` set on a module."""
    before, after = (hooks.values() for hooks in forward_hooks(module))
    points = SplitPoint.BEGINNING if _split_before in before else SplitPoint(0)
    return points | SplitPoint.END if _split_after in after else points


def _split_before(module: torch.nn.Module, args: Any) -> None:
    pipe_split()


def _split_after(module: torch.nn.Module, args: Any, result: Any) -> None:
    pipe_split()


def _submodule(mod: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return mod.get_submodule(name)
    except AttributeError as error:
        atoms = name.split(".")
        prefixes = [".".join(atoms[: i + 1]) for i in range(len(atoms))]
        known = dict(mod.named_modules(remove_duplicate=False))
        missing = next((prefix for prefix in prefixes if prefix not in known), name)
        near = ", ".join(repr(other) for other in difflib.get_close_matches(name, known, n=3))
        raise NoSuchModuleError(
            f"Specified target {name} referenced nonexistent module {missing}.",
            fix=f"name a submodule of the model{f', such as {near}' if near else ''}.",
        ) from error


def _points(name: str, given: Any) -> SplitPoint:
    parts = given if isinstance(given, tuple | list | set | frozenset) else (given,)
    points = SplitPoint(0)
    for part in parts:
        if getattr(part, "name", None) in ("BEGINNING", "END"):  # also torch's own SplitPoint
            part = SplitPoint[part.name]
        if not isinstance(part, SplitPoint):
            raise PipelineError(
                f"Unknown split point type: {name} has {part!r}, not a SplitPoint.",
                fix="SplitPoint.BEGINNING, SplitPoint.END, or both with |.",
            )
        points |= part
    return points


def is_work(node: fx.Node) -> bool:
    """True if a node computes; markers, inputs, state and `getitem` do not."""
    return node.op == "call_function" and node.target is not operator.getitem and not is_function_mark(node)


def stages_by_marks(graph: fx.Graph, is_work: Callable[[fx.Node], bool] = is_work) -> dict[fx.Node, int]:
    """The stage of every node except placeholders, state, markers and the output."""
    stage, waiting, seen_work = 0, False, False
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if is_split(node):
            waiting = seen_work
            continue
        if is_work(node):
            stage, waiting, seen_work = stage + waiting, False, True
        found[node] = stage
    return found


Policy = Callable[[fx.GraphModule], fx.GraphModule]


def split_on_size_threshold(threshold: int) -> Policy:
    """Begin a new stage wherever the parameters of the current one would exceed `threshold` elements."""
    if threshold < 1:
        raise invalid_value("threshold", threshold, "use a number of elements above 0.")
    return lambda module: _marked(module, lambda sizes: places_by_threshold(sizes, threshold))


def split_into_equal_size(nstages: int) -> Policy:
    """Cut into `nstages` stages with parameters of equal size, as far as the order of the operators allows."""
    if nstages < 1:
        raise invalid_value("nstages", nstages, "use a number of stages above 0.")
    return lambda module: _marked(module, lambda sizes: places_of_equal_size(sizes, nstages))


def places_by_threshold(sizes: Sequence[int], threshold: int) -> list[int]:
    """The indices of the operators that begin a stage."""
    found, held = [], 0
    for place, size in enumerate(sizes):
        if held and size and held + size > threshold:
            found.append(place)
            held = 0
        held += size
    return found


def places_of_equal_size(sizes: Sequence[int], stages: int) -> list[int]:
    """The indices of the operators that begin a stage; the largest stage is as small as possible."""
    with_size = [place for place, size in enumerate(sizes) if size]
    if len(with_size) < stages:
        raise OptionError(
            f"{len(with_size)} operators have parameters: they cannot be cut into {stages} stages of equal size.",
            fix="use fewer stages, or stages= of pipeline, which considers all operators.",
        )
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(places_by_threshold(sizes, middle)) < stages:
            high = middle
        else:
            low = middle + 1
    found = places_by_threshold(sizes, high)
    rest = [place for place in with_size[1:] if place not in found]
    return sorted([*found, *rest[len(rest) - (stages - 1 - len(found)) :]])


def _marked(module: fx.GraphModule, choose: Callable[[Sequence[int]], Sequence[int]]) -> fx.GraphModule:
    nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
    for place in choose([_size(module, node) for node in nodes]):
        with module.graph.inserting_before(nodes[place]):
            module.graph.call_function(pipe_split)
    module.recompile()
    return module


def _size(module: fx.GraphModule, node: fx.Node) -> int:
    """The number of elements of the parameters that an operator reads."""
    if node.op == "call_module":
        return sum(parameter.numel() for parameter in module.get_submodule(str(node.target)).parameters())
    read = [_attribute(module, str(given.target)) for given in node.all_input_nodes if given.op == "get_attr"]
    return sum(value.numel() for value in read if isinstance(value, torch.nn.Parameter))


def _attribute(module: torch.nn.Module, name: str) -> object:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last, None)


class PipeSequential(torch.nn.Sequential):
    """A `torch.nn.Sequential` with a cut between every two modules."""

    @staticmethod
    def from_sequential(sequential_instance: torch.nn.Sequential) -> PipeSequential:
        """The same modules, with cuts between them.

        A module that occurs twice gets a second object with the same parameters, so that each occurrence has a name.
        """
        seen: set[int] = set()
        modules: list[torch.nn.Module] = []
        for module in sequential_instance:
            modules.append(copy.copy(module) if id(module) in seen else module)
            seen.add(id(module))
        return PipeSequential(*modules)

    def forward(self, input: Any) -> Any:
        """Run the modules one after the other."""
        for place, module in enumerate(self):
            if place > 0:
                pipe_split()
            input = module(input)
        return input
