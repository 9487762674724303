"""Capture a model for pipelining: `torch.export`, then one flat graph with state under the user's names.

    exported                                             flat
    p_fc_weight, x                                       x
    body = get_attr submod_1                             linear(x, get_attr fc.weight)      regions: (autocast,)
    y = wrap_with_autocast("cpu", .., body, x, ..)[0]

Export traces on fake tensors: it allocates no memory, and a model on the meta device or under a fake mode can be cut.
The module is not changed. The batch dimension (dim 0) is dynamic if the model allows it, so that a smaller last
microbatch runs through the same graph. The result of an in-place operator is the tensor that it wrote, so its users
read that tensor. If export fails, the error has the user's line, the reason, and the split by modules that still works.

`split_modules`: cut a model between submodules without capturing it, for chains of modules that export cannot trace.

    model(x) == head(block2(block1(embed(x))))       split_modules(model, [["embed", "block1"], ["block2", "head"]])

The chain is found by running the model once on the example: each submodule must be called once, with exactly the result
of the previous one.

Train and eval mode: the model is captured in both, and a stage has a graph for each.

So dropout, batch norm, attention and the user's own `if self.training` follow `train()` and `eval()`. Both graphs must
send the same values across every cut. They are matched node by node:

    training      x  add_(batches, 1)  batch_norm(.., True)   dropout(.., True)   linear
    evaluation    x                    batch_norm(.., False)  dropout(.., False)  linear

A mode that cannot be captured or matched is left out; a stage that is switched to it raises with the reason.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineCaptureError, PipelineError, WholestepError
from wholestep.ir.early_values import KnownDraws
from wholestep.ir.effects import returned_position
from wholestep.ir.meta import location_of_exception, location_of_node, module_call
from wholestep.pipelining.build.call_form import Call, CallForm, export_call
from wholestep.pipelining.build.context_regions import (
    FUNCTION_BEGIN,
    FUNCTION_END,
    REGION_BEGIN,
    REGION_END,
    REGIONS_KEY,
    ContextRegion,
    RegionMarks,
    is_function_mark,
)
from wholestep.pipelining.build.split_points import is_split
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.operators import OpOverload
from wholestep.torch_private.pipelining import checks_of_export, quiet_torch, region_operators


class ModuleStage(torch.nn.Module):
    """Submodules that run one after the other, under their names in the model."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(inner for name in names for inner in _called(model, name))
        for name in self.names:
            attach_module(self, name, model.get_submodule(name))
        self.training = model.training

    def forward(self, *values: Any) -> Any:
        """Run the submodules."""
        for name in self.names:
            result = self.get_submodule(name)(*values)
            values = result if isinstance(result, tuple) else (result,)
        return values[0] if len(values) == 1 else values


def split_modules(
    module: torch.nn.Module,
    stages: int | Sequence[Sequence[str]],
    mb_args: Sequence[Any] = (),
    mb_kwargs: dict[str, Any] | None = None,
) -> list[ModuleStage]:
    """Cut a model between its submodules: names for each stage, or a number of stages with equal counts of submodules.

    With `mb_args` the model runs once, to verify that it is a chain of the submodules. The stages share the parameters
    of the model and run under torch's own `PipelineStage`.
    """
    chain = find_chain(module, (tuple(mb_args), dict(mb_kwargs or {}))) if mb_args or mb_kwargs else None
    if isinstance(stages, int):
        if chain is None:
            raise PipelineError(
                f"{type(module).__name__} is not a chain of submodules on this example, or no example was given.",
                fix="pass mb_args, or name the submodules of each stage",
            )
        if not 1 <= stages <= len(chain):
            raise PipelineError(f"{len(chain)} submodules cannot be cut into {stages} stages.", fix="ask for fewer")
        stages = [chain[i * len(chain) // stages : (i + 1) * len(chain) // stages] for i in range(stages)]
    named = [name for names in stages for name in names]
    if chain is not None and list(chain) != named and not _covers(chain, named):
        raise PipelineError(
            f"the model calls {', '.join(chain)}, in this order; the stages name {', '.join(named)}.",
            fix="name every submodule once, in the order of the calls",
        )
    return [ModuleStage(module, names) for names in stages]


def find_chain(module: torch.nn.Module, call: Call) -> tuple[str, ...] | None:
    """The submodules whose calls, one after the other, are the model; None if it is not such a chain.

    Runs the model once, without gradients, with its mode and random state restored. A model that cannot run here (meta
    tensors) has no chain.
    """
    names = _candidates(module)
    calls: list[tuple[str, list[Any], list[Any]]] = []

    def record(name: str) -> Any:
        def hook(submodule: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            calls.append((name, [*args, *kwargs.values()], _values(result)))

        return hook

    handles = [module.get_submodule(name).register_forward_hook(record(name), with_kwargs=True) for name in names]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            result = module(*call[0], **call[1])
    except Exception:
        return None
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    before = [*call[0], *call[1].values()]
    for _, given, returned in calls:
        if not _same(given, before):
            return None
        before = returned
    return tuple(name for name, _, _ in calls) if calls and _same(_values(result), before) else None


def _candidates(module: torch.nn.Module) -> list[str]:
    """The submodules that may be called: children, with ModuleList and Sequential replaced by theirs."""
    found: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.Sequential):
            found += [f"{name}.{inner}" for inner in _candidates(child)]
        else:
            found.append(name)
    return found


def _called(module: torch.nn.Module, name: str) -> list[str]:
    """The submodules that are called for a name: for a ModuleList, which cannot be called, its members."""
    named = module.get_submodule(name)
    return [f"{name}.{inner}" for inner in _candidates(named)] if isinstance(named, torch.nn.ModuleList) else [name]


def _covers(chain: Sequence[str], named: Sequence[str]) -> bool:
    """True if each name is a submodule of the chain or a container of the next ones."""
    at = 0
    for name in named:
        start = at
        while at < len(chain) and (chain[at] == name or chain[at].startswith(name + ".")):
            at += 1
        if at == start:
            return False
    return at == len(chain)


def _values(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def attach_module(root: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Add a module under a dotted name, creating empty modules for missing prefixes."""
    *path, last = name.split(".")
    for atom in path:
        if not hasattr(root, atom):
            root.add_module(atom, torch.nn.Module())
        root = getattr(root, atom)
    root.add_module(last, module)


@dataclass(frozen=True)
class CapturedModel:
    """A model, in one mode, as a flat graph."""

    graph: fx.Graph
    """Placeholders are the tensors of the call; get_attr nodes refer to parameters, buffers, constants, submodules."""
    out_spec: Any
    constants: Mapping[str, Any]
    """Tensors and submodules that the graph reads and that are not attributes of the module."""

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The flat results of the model: nodes and constants."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]


def capture(
    module: torch.nn.Module, form: CallForm, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> CapturedModel:
    """Export a module in its current mode on an example call."""
    marks = RegionMarks()
    call = export_call(form, args, kwargs)
    try:
        if dynamic_shapes is not None:
            exported = _export(module, call, dynamic_shapes, marks)
        else:
            exported = _export_dynamic(module, call, _dynamic_batch(form, args, kwargs), marks)
    except Exception as error:
        raise capture_error(module, call, error) from error
    flattener = Flattener(exported, marks.regions)
    graph = flattener.flatten()
    return CapturedModel(graph, exported.call_spec.out_spec, {**exported.constants, **flattener.submodules})


def _export(module: torch.nn.Module, call: Call, shapes: Any, marks: RegionMarks) -> torch.export.ExportedProgram:
    marks.regions.clear()
    args, kwargs = pytree.tree_map_only(torch.Tensor, _detached, call)
    with quiet_torch(), marks.recording(), KnownDraws():
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another object: export marks dynamic dimensions on the tensors it is given."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _export_dynamic(
    module: torch.nn.Module, call: Call, shapes: Any, marks: RegionMarks
) -> torch.export.ExportedProgram:
    """Export with a dynamic batch dimension; if that fails, with the static shapes of the example."""
    if shapes is None:
        return _export(module, call, None, marks)
    try:
        return _export(module, call, shapes, marks)
    except Exception as about_symbols:
        try:
            return _export(module, call, None, marks)
        except Exception as error:
            raise error from about_symbols


def _dynamic_batch(form: CallForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Dynamic shapes with dim 0 of every tensor AUTO; None if no tensor has a batch dimension."""
    found = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] < 2:
            return None
        found.append(value)
        return {0: torch.export.Dim.AUTO}

    shapes = pytree.tree_map(leaf, dict(form.signature.bind(*args, **kwargs).arguments))
    return shapes if found else None


class Flattener:
    """Copies an exported program into one graph."""

    def __init__(self, exported: torch.export.ExportedProgram, checkpoints: Mapping[int, ContextRegion]) -> None:
        self.graph = fx.Graph()
        self.submodules: dict[str, torch.nn.Module] = {}
        """Bodies of higher-order operators that stay in the graph (`torch.cond`), by get_attr target."""
        self._exported = exported
        self._checkpoints = checkpoints
        self._checks = checks_of_export()
        self._autocast, self._grad = region_operators()
        self._stack: list[ContextRegion] = []
        self._blocks = len(checkpoints)
        self._state = {
            spec.arg.name: str(spec.target)
            for spec in exported.graph_signature.input_specs
            if spec.target is not None and hasattr(spec.arg, "name")
        }

    def flatten(self) -> fx.Graph:
        """The flat graph."""
        results = self._body(self._exported.graph_module, None)
        self.graph.output(results)
        drop_unused(self.graph)
        return self.graph

    def _body(self, gm: fx.GraphModule, operands: list[Any] | None) -> Any:
        """Copy the nodes of a graph; `operands` are its inputs, None for the top level."""
        new: dict[fx.Node, Any] = {}
        given = iter(operands or ())
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                new[node] = self._input(node) if operands is None else next(given)
            elif node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            elif node.op == "get_attr":
                new[node] = (gm, node)  # resolved by its user
            elif node.target in (REGION_BEGIN, REGION_END):
                self._mark(node)
            elif is_function_mark(node):
                self._function_mark(node, new)
            elif node.target in (self._autocast, self._grad):
                new[node] = self._block(node, new)
            elif node.target is operator.getitem and isinstance(new[node.args[0]], tuple):
                new[node] = new[node.args[0]][node.args[1]]
            elif node.target not in self._checks:
                new[node] = self._copy(node, new)
        raise AssertionError("the graph has no output")

    def _input(self, node: fx.Node) -> fx.Node | None:
        if node.name in self._state:
            new = self.graph.create_node("get_attr", self._state[node.name], name=node.name)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            new = self.graph.placeholder(node.name)
        else:
            return None  # a non-tensor leaf of the call
        new.meta = dict(node.meta)
        return new

    def _mark(self, node: fx.Node) -> None:
        region = self._checkpoints[node.args[0]]  # type: ignore[index]
        if node.target is REGION_BEGIN:
            self._stack.append(region)
        else:
            assert self._stack.pop() is region, "regions overlap"

    def _function_mark(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> None:
        """Markers of functions stay in the graph: the tensors they refer to count as used."""
        region = self._checkpoints[node.args[0]]  # type: ignore[index]
        if node.target is FUNCTION_BEGIN:
            self._stack.append(region)
        self._copy(node, new)
        if node.target is FUNCTION_END:
            assert self._stack.pop() is region, "regions overlap"

    def _block(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
        settings = 4 if node.target is self._autocast else 1
        gm, body = new[node.args[settings]]  # type: ignore[index]
        operands = [fx.map_arg(arg, new.__getitem__) for arg in node.args[settings + 1 :]]
        kind: Any = "autocast" if settings == 4 else "grad"
        self._stack.append(ContextRegion(kind, tuple(node.args[:settings]), self._blocks))
        self._blocks += 1
        results = self._body(getattr(gm, str(body.target)), operands)
        self._stack.pop()
        return tuple(results)

    def _copy(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> Any:
        copied = self.graph.node_copy(node, lambda arg: self._lookup(arg, new))
        if self._stack:
            copied.meta[REGIONS_KEY] = tuple(self._stack)
        return written_argument(copied) or copied

    def _lookup(self, arg: fx.Node, new: Mapping[fx.Node, Any]) -> Any:
        found = new[arg]
        if not isinstance(found, tuple):
            return found
        gm, node = found
        name = f"{node.target}"
        while self.submodules.get(name, getattr(gm, str(node.target))) is not getattr(gm, str(node.target)):
            name += "_"
        self.submodules[name] = getattr(gm, str(node.target))
        return self.graph.get_attr(name)


def written_argument(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator writes and returns, if that is all it returns."""
    if not isinstance(node.target, OpOverload):
        return None
    written = returned_position(node.target)
    argument = node.args[written] if written is not None and written < len(node.args) else None
    same = isinstance(argument, fx.Node) and _same_layout(node.meta.get("val"), argument.meta.get("val"))
    return argument if same else None  # type: ignore[return-value]


def _same_layout(a: Any, b: Any) -> bool:
    """True if two fake tensors have the same layout: `t_()` and `resize_()` change that of their argument."""
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.dtype == b.dtype and str((a.shape, a.stride())) == str((b.shape, b.stride()))


def drop_unused(graph: fx.Graph) -> None:
    """Erase state without users, and arithmetic on sizes that only the asserts of export used."""
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        is_number = isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | bool | float)
        unused = node.op == "get_attr" or (node.op == "call_function" and is_number)
        if unused and not node.users:
            graph.erase_node(node)


def capture_error(module: torch.nn.Module, call: Call, error: Exception) -> PipelineCaptureError:
    """The error for a model that export cannot capture."""
    chain = find_chain(module, call)
    location = location_of_exception(error, besides=("<",))  # "<": code that torch or dataclasses generated
    fix = "write the line with tensor operators (torch.where, torch.cond)"
    if "not a known type" in str(error) or "pytree" in str(error):
        fix = "return and take tensors in tuples, lists and dictionaries (transformers: config.use_cache = False)"
    if "data-dependent" in str(error) and location is not None and "drop" in location.text:
        fix += "; a branch on torch.rand is captured where its probability is 0 (layerdrop=0.0)"
    if chain is None:
        fix += ", or write the stages as modules: torch.distributed.pipelining.PipelineStage runs them"
    else:
        shown = ", ".join(map(repr, chain if len(chain) <= 6 else (*chain[:3], "...", *chain[-2:])))
        fix += f". Without capturing, the model can be cut between its submodules: split_modules(model, ...) of {shown}"
    return PipelineCaptureError(
        f"torch.export cannot turn {type(module).__name__} into one graph: {_first_lines(error)}",
        fix=fix,
        location=location,
    )


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}" if lines else type(error).__name__


@dataclass(frozen=True)
class ModePrograms:
    """The captured modes of a model, its current mode first. Keys: "train", "eval", or "given" for a mixture."""

    main: str
    programs: Mapping[str, CapturedModel]
    missing: Mapping[str, str]
    """The reason why a mode was not captured."""


def capture_modes(module: torch.nn.Module, capture: Callable[[], CapturedModel]) -> ModePrograms:
    """Capture a module in its current mode, and after `train()` and `eval()`. Its flags are restored."""
    given = {submodule: submodule.training for submodule in module.modules()}
    programs = {"given": capture()}
    main, missing = "given", {}
    with _flags_restored(given):
        for mode in ("train", "eval"):
            module.train(mode == "train")
            if {submodule: submodule.training for submodule in module.modules()} == given:
                main = mode
                programs = {mode: programs.pop("given"), **programs}
                continue
            try:
                programs[mode] = capture()
            except WholestepError as error:
                missing[mode] = error.what if error.location is None else f"{error.what.rstrip('.')} ({error.location})"
    return ModePrograms(main, programs, missing)


@contextmanager
def _flags_restored(flags: Mapping[torch.nn.Module, bool]) -> Iterator[None]:
    try:
        yield
    finally:
        for submodule, flag in flags.items():
            submodule.training = flag


class MismatchError(Exception):
    """Two modes cannot share stages; the message is the reason."""


def match_nodes(main: CapturedModel, other: CapturedModel) -> dict[fx.Node, fx.Node]:
    """Map the nodes of another mode to the equivalent nodes of the main one."""
    if main.out_spec != other.out_spec:
        raise MismatchError("the model returns a different structure")
    a, b = list(main.graph.nodes), list(other.graph.nodes)
    tokens_a, tokens_b = [_token(node) for node in a], [_token(node) for node in b]
    if tokens_a == tokens_b:
        return dict(zip(b, a, strict=True))
    found: dict[fx.Node, fx.Node] = {}
    for i, j, size in difflib.SequenceMatcher(None, tokens_a, tokens_b, autojunk=False).get_matching_blocks():
        found.update(zip(b[j : j + size], a[i : i + size], strict=True))
    return found


def _token(node: fx.Node) -> tuple[str, ...]:
    """The key by which nodes are matched: operator, module call and the user's line."""
    if node.op == "output":
        return ("output",)
    line = location_of_node(node, user_only=True)
    return (node.op, str(node.target), module_call(node), "" if line is None else f"{line.file}:{line.line}")


def shared_names(main: CapturedModel, other: CapturedModel, matched: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, str]:
    """Names for the values of another mode: those of the main one where the nodes match."""
    names: dict[fx.Node, str] = {}
    taken = {node.name for node in main.graph.nodes}
    for node in other.graph.nodes:
        if node in matched:
            names[node] = matched[node].name
        else:
            name = node.name
            while name in taken:
                name += "_other"
            taken.add(name)
            names[node] = name
    found = set(names.values())
    for ours, theirs in zip(main.outputs, other.outputs, strict=True):
        if isinstance(ours, fx.Node) != isinstance(theirs, fx.Node) or (
            not isinstance(ours, fx.Node) and ours != theirs
        ):
            raise MismatchError("the model returns a different constant")
        if isinstance(ours, fx.Node) and names[theirs] != ours.name:
            if ours.name in found or theirs in matched:
                raise MismatchError(f"the model returns a different value than {ours.name}")
            names[theirs] = ours.name
            found.add(ours.name)
    return names


def stages_like(
    main: Mapping[fx.Node, int], other: CapturedModel, matched: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, int]:
    """The stages of another mode: those of the matching nodes, and for unmatched nodes that of the previous node."""
    stage = 0
    found: dict[fx.Node, int] = {}
    for node in other.graph.nodes:
        if node.op == "call_function" and not is_split(node):
            stage = max(stage, main.get(matched[node], stage)) if node in matched else stage
            found[node] = stage
    return found
