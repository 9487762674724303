"""A flat graph with a stage for each node, and the edits that make each stage self-contained.

Between cutting and routing there is still one graph; these edits only move, copy or add nodes:

    getitem    h = getitem(lstm, 0) after a cut         moves to the stage of lstm: tuples do not cross a cut
    sizes      view(h, [s0, 8]) in stage 2              s0 is read from a tensor that stage 2 has (`localize_sizes`)
    state      a tied weight that is transmitted        stage 0 returns it as a value (model_state.py)
    writes     h.add_(1) in stage 1                     stage 1 works on its own copy of h

Symbolic sizes do not cross a cut:

    stage 0   s = sym_size(x, 0)                 stage 2   s_2 = sym_size(h, 0)        h is an input of stage 2
    stage 2   view(h, [s, 8])                              view(h, [s_2, 8])

If no input of a stage has the size, the size is recomputed there, and the tensor that has it is sent along.

A stage that writes to a received tensor works on a copy:

    stage 0   h = linear(x, w); v = h[0]          stage 1   c = clone(h); u = c[0]
    stage 1   h.add_(1); y = v * 2                          c.add_(1);    y = u * 2

A received tensor is a leaf of autograd, which must not be written in place. And two tensors that alias before a cut do
not alias after it: so views of the copy are recomputed. Later stages receive the copy.

Which values require a gradient: operators run once on fake tensors under autograd.

Rules about operators would have to know that `zeros_like(h)` requires no gradient, and that `h.add_(w)` makes `h`
require one. Layers repeat: an operator runs once for all nodes with the same shapes and requires_grad flags.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.ir.effects import written_inputs
from wholestep.ir.io.node_values import hint_of
from wholestep.pipelining.build.capture import CapturedModel
from wholestep.pipelining.build.context_regions import (
    FUNCTION_BEGIN,
    REGIONS_KEY,
    ContextRegion,
    is_function_mark,
    marked_tensors,
    regions_of,
)
from wholestep.torch_private.fake_tensors import FakeTensorMode, fake_tensor, new_fake_mode, storage_key
from wholestep.torch_private.fx_graphs import pytree

NO_STAGE = ("placeholder", "get_attr", "output")


class StagedGraph:
    """A captured model and the stage of each of its operators."""

    def __init__(self, program: CapturedModel, stage_of: Mapping[fx.Node, int], names: Mapping[fx.Node, str]) -> None:
        self.program = program
        self.graph = program.graph
        self.stage_of = dict(stage_of)
        self.names = dict(names)
        """The name of each value in the routing table, the same in every mode of the model."""
        self._keep_functions_whole()
        self._keep_getitems_with_tuples()
        left = {stage: i for i, stage in enumerate(sorted(set(self.stage_of.values())))}
        self.stage_of = {node: left[stage] for node, stage in self.stage_of.items()}
        self.count = max(len(left), 1)
        self._storage: dict[fx.Node, Any] = {}

    def made_at(self, node: fx.Node) -> int:
        """The first stage that can use a node."""
        return self.stage_of.get(node, 0)

    def nodes(self, stage: int) -> list[fx.Node]:
        """The nodes of a stage, in order."""
        return [node for node in self.graph.nodes if self.stage_of.get(node) == stage]

    def users(self, node: fx.Node) -> dict[int, list[fx.Node]]:
        """The users of a node by stage. The output of the model counts as stage `count`."""
        found: dict[int, list[fx.Node]] = {}
        for user in node.users:
            found.setdefault(self.stage_of.get(user, self.count), []).append(user)
        return found

    def storage(self, node: fx.Node) -> Any:
        """A key for the storage of a node's tensor, which views share; None if it is not a tensor."""
        if node not in self._storage:
            value = node.meta.get("val")
            self._storage[node] = storage_of(value)
        return self._storage[node]

    def own_storage(self, node: fx.Node, key: Any) -> None:
        """Declare that a node has its own storage although its recorded value does not."""
        self._storage[node] = key

    def first(self, stage: int) -> fx.Node:
        """The first node of a stage."""
        found: fx.Node = next(node for node in self.graph.nodes if self.stage_of.get(node) == stage)
        return found

    def last(self, stage: int) -> fx.Node:
        """The last node of a stage."""
        found: fx.Node = next(node for node in reversed(self.graph.nodes) if self.stage_of.get(node) == stage)
        return found

    def add(
        self, stage: int, target: Any, args: tuple[Any, ...], name: str, like: fx.Node, *, at_end: bool = False
    ) -> fx.Node:
        """Add a node at the start or the end of a stage, with the metadata of another, outside all regions."""
        graph = self.graph
        with graph.inserting_after(self.last(stage)) if at_end else graph.inserting_before(self.first(stage)):
            node = graph.call_function(target, args)
        node.meta["val"] = like.meta.get("val")
        self._adopt(node, stage, name)
        return node

    def copy_into(self, stage: int, node: fx.Node, argument: Callable[[fx.Node], fx.Node], name: str) -> fx.Node:
        """Copy a node to the start of a stage, after its arguments."""
        with self.graph.inserting_before(self.first_work(stage, [argument(arg) for arg in node.all_input_nodes])):
            copied = self.graph.node_copy(node, argument)
        copied.meta.pop(REGIONS_KEY, None)
        self._adopt(copied, stage, name)
        return copied

    def first_work(self, stage: int, after: list[fx.Node]) -> fx.Node:
        """The first node of a stage that comes after all of the given nodes."""
        waiting = {node for node in after if self.stage_of.get(node) == stage}
        found = None
        for node in self.graph.nodes:
            if self.stage_of.get(node) != stage:
                continue
            if node in waiting:
                waiting.discard(node)
                found = None
            elif not waiting and found is None:
                found = node
        return found or self.last(stage).next

    def use_instead(self, node: fx.Node, new: fx.Node, stages: range) -> None:
        """Replace a node by another for its users in some stages; stage `count` is the output of the model."""
        for stage, users in self.users(node).items():
            if stage in stages:
                for user in users:
                    if user is not new:
                        user.replace_input_with(node, new)

    def _adopt(self, node: fx.Node, stage: int, name: str) -> None:
        self.stage_of[node] = stage
        taken = set(self.names.values())
        while name in taken:
            name += "_"
        self.names[node] = name

    def _keep_functions_whole(self) -> None:
        """A `torch.autograd.Function` is not cut: all of it belongs to the stage of its end."""
        end: dict[int, int] = {}
        for node in reversed(self.graph.nodes):
            if node in self.stage_of:
                for region in regions_of(node):
                    if region.kind == "function":
                        stage = end.setdefault(region.number, self.stage_of[node])
                        self.stage_of[node] = max(self.stage_of[node], stage)

    def _keep_getitems_with_tuples(self) -> None:
        """Tuples and lists do not cross a cut: a `getitem` belongs to the stage that computes the tuple."""
        for node in list(self.graph.nodes):
            if node.target is not operator.getitem or node not in self.stage_of:
                continue
            source = node.args[0]
            is_tuple = source in self.stage_of and not isinstance(source.meta.get("val"), torch.Tensor)
            if is_tuple and self.stage_of[source] != self.stage_of[node]:
                self.stage_of[node] = self.stage_of[source]
                source.append(node)


def storage_of(value: Any) -> int | None:
    """A key for the storage of a recorded tensor, which views share; None if it is not a strided tensor."""
    return storage_key(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def is_number(node: fx.Node) -> bool:
    """True if a node computes a scalar: a size, or arithmetic with sizes."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def localize_sizes(staged: StagedGraph) -> None:
    """Make every stage compute the sizes that it uses."""
    numbers = [node for node in staged.graph.nodes if is_number(node) and node in staged.stage_of]
    if not numbers:
        return
    arriving = _arriving(staged)
    made: dict[tuple[fx.Node, int], fx.Node] = {}

    def here(node: fx.Node, stage: int) -> fx.Node:
        """The node that a stage uses in place of a size; tensors are unchanged."""
        if not is_number(node) or staged.stage_of.get(node) == stage:
            return node
        if (node, stage) not in made:
            made[node, stage] = _read_again(staged, node, stage, arriving) or staged.copy_into(
                stage, node, lambda arg: here(arg, stage), f"{staged.names[node]}_stage{stage}"
            )
        return made[node, stage]

    for node in numbers:
        for stage, users in sorted(staged.users(node).items()):
            local = here(node, min(stage, staged.count - 1))  # the last stage computes the output of the model
            for user in users:
                user.replace_input_with(node, local)


def _read_again(
    staged: StagedGraph, node: fx.Node, stage: int, arriving: dict[int, dict[str, tuple[fx.Node, int]]]
) -> fx.Node | None:
    found = arriving[stage].get(str(node.meta["val"]))
    if found is None:
        return None
    tensor, dim = found
    target: Any = torch.ops.aten.sym_size.int
    return staged.add(stage, target, (tensor, dim), f"{staged.names[node]}_stage{stage}", node)


def _arriving(staged: StagedGraph) -> dict[int, dict[str, tuple[fx.Node, int]]]:
    """For each stage, the tensors from earlier stages that it uses and that have a symbolic size."""
    found: dict[int, dict[str, tuple[fx.Node, int]]] = {stage: {} for stage in range(staged.count)}
    for node in staged.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        shape: tuple[Any, ...] = tuple(value.shape)
        sizes = [(dim, size) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]
        if not sizes:
            continue
        for stage in staged.users(node):
            if staged.made_at(node) < stage < staged.count:
                for dim, size in sizes:
                    found[stage].setdefault(str(size), (node, dim))
    return found


def example_value(value: Any, mode: FakeTensorMode) -> Any:
    """A recorded value with the concrete sizes of the example; tensors are new fake tensors of the given mode."""
    if isinstance(value, list | tuple):
        return type(value)(example_value(item, mode) for item in value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value
        shape, stride = _numbers(value.shape), _numbers(value.stride())
        return fake_tensor(mode, shape, stride, value.dtype, value.device)
    return hint_of(value)


def example_bytes(value: Any) -> int:
    """The bytes of a recorded value, with the sizes of the example."""
    if isinstance(value, list | tuple):
        return sum(example_bytes(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return 0
    count = 1
    for size in _numbers(value.shape):
        count *= size
    return count * value.element_size()


def _numbers(sizes: Any) -> list[int]:
    """Sizes as integers; a data-dependent size counts as 1."""
    found = [hint_of(size) for size in sizes]
    return [1 if number is None else int(number) for number in found]


def writes_by_storage(staged: StagedGraph) -> dict[Any, dict[int, fx.Node]]:
    """For each storage that is written, the stages that write it, with one node each."""
    found: dict[Any, dict[int, fx.Node]] = {}
    for node in staged.graph.nodes:
        if node in staged.stage_of:
            for written in written_inputs(node):
                key = staged.storage(written)
                if key is not None:
                    found.setdefault(key, {}).setdefault(staged.stage_of[node], node)
    return found


def copy_before_writing(staged: StagedGraph) -> None:
    """Make each stage that writes to a received tensor, or to a view of it, work on its own copy."""
    if staged.count == 1:
        return
    written = writes_by_storage(staged)
    if not written:
        return
    state = {staged.storage(node) for node in staged.graph.nodes if node.op == "get_attr"}
    members: dict[Any, list[fx.Node]] = {}
    for node in staged.graph.nodes:
        if (key := staged.storage(node)) in written and key not in state:
            members.setdefault(key, []).append(node)
    for key, nodes in members.items():
        base = nodes[0]
        for stage in sorted(written[key]):
            if staged.made_at(base) < stage:
                nodes = _copy_storage(staged, key, nodes, stage)
                base = nodes[0]


def _copy_storage(staged: StagedGraph, key: Any, members: list[fx.Node], stage: int) -> list[fx.Node]:
    """Give a stage its own copy of a storage; returns the nodes that alias the copy from there on."""
    base = members[0]
    own = staged.add(stage, torch.ops.aten.clone.default, (base,), f"{staged.names[base]}_stage{stage}", base)
    staged.own_storage(own, (key, stage))
    behind = range(stage, staged.count + 1)
    staged.use_instead(base, own, behind)
    own.args = (base,)
    local = {base: own}

    def here(node: fx.Node) -> fx.Node:
        if node in local:
            return local[node]
        value = node.meta.get("val")
        parts = value if isinstance(value, list | tuple) else [value]
        if node.op != "call_function" or all(storage_of(part) != key for part in parts):
            return node
        if written_inputs(node):
            raise PipelineError(
                f"stage {stage} writes to a tensor that {node.name} resizes in an earlier stage.",
                fix="cut elsewhere, or write out of place",
                node=node.format_node() or node.name,
            )
        local[node] = staged.copy_into(stage, node, here, f"{staged.names.get(node, node.name)}_stage{stage}")
        staged.own_storage(local[node], (key, stage))
        return local[node]

    for view in members[1:]:
        if staged.made_at(view) < stage and any(user >= stage for user in staged.users(view)):
            staged.use_instead(view, here(view), behind)
        elif staged.made_at(view) >= stage:
            staged.own_storage(view, (key, stage))
    copies = [node for node in local.values() if staged.storage(node) is not None]
    return [*copies, *(view for view in members[1:] if staged.made_at(view) >= stage)]


def find_differentiable(
    graph: fx.Graph, requires_grad: Callable[[fx.Node], bool], submodules: Mapping[str, Any]
) -> set[fx.Node]:
    """The nodes whose tensors require a gradient at the end of the graph."""
    return _GradPropagation(requires_grad, submodules).run(graph)


class _GradFlags(NamedTuple):
    """The requires_grad flags after an operator."""

    results: Any
    """The structure of the results, with a flag for each tensor."""
    written: tuple[bool, ...]
    """A flag for each argument that it writes."""


class _GradPropagation:
    def __init__(self, requires_grad: Callable[[fx.Node], bool], submodules: Mapping[str, Any]) -> None:
        self._requires_grad = requires_grad
        self._submodules = submodules
        self._mode = new_fake_mode(None)
        self._flags: dict[fx.Node, Any] = {}
        self._geometry: dict[fx.Node, Any] = {}
        self._sharing: dict[Any, list[fx.Node]] = {}
        self._known: dict[Any, _GradFlags] = {}
        self._functions: dict[Any, bool] = {}

    def run(self, graph: fx.Graph) -> set[fx.Node]:
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op in ("placeholder", "get_attr"):
                can = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
                self._flags[node] = can and self._requires_grad(node)
            elif node.target is operator.getitem and isinstance(self._flags[node.args[0]], list | tuple):
                self._flags[node] = self._flags[node.args[0]][node.args[1]]
            elif is_function_mark(node):
                self._function(node)
            elif node.op == "call_function":
                self._call(node)
        return {node for node, flag in self._flags.items() if flag is True}

    def _function(self, node: fx.Node) -> None:
        """The results of a `torch.autograd.Function` require a gradient if an input does."""
        self._flags[node] = False
        number = node.args[0]
        if node.target is FUNCTION_BEGIN:
            enabled = next((r.settings[0] for r in reversed(regions_of(node)) if r.kind == "grad"), True)
            self._functions[number] = enabled and any(self._flags[arg] is True for arg in marked_tensors(node))
            return
        for result in marked_tensors(node):
            value = result.meta.get("val")
            can = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            self._flags[result] = can and self._functions[number]

    def _call(self, node: fx.Node) -> None:
        written = written_inputs(node)
        key = self._key(node)
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = self._ask(node, written)
        self._flags[node] = answer.results
        for argument, flag in zip(written, answer.written, strict=True):
            self._flags[argument] = flag
            if flag:
                for other in self._sharing_with(argument):
                    if other in self._flags:
                        self._flags[other] = True

    def _sharing_with(self, node: fx.Node) -> list[fx.Node]:
        """All tensors that share storage with this one."""
        if not self._sharing:
            for each in node.graph.nodes:
                self._sharing.setdefault(storage_of(each.meta.get("val")), []).append(each)
        memory = storage_of(node.meta.get("val"))
        return [] if memory is None else self._sharing[memory]

    def _key(self, node: fx.Node) -> Any:
        def described(arg: fx.Node) -> Any:
            return _Unquoted(f"{self._describe(arg)}{self._flags.get(arg)}")

        args = fx.map_arg((node.args, node.kwargs), described)
        modes = [str(region) for region in regions_of(node) if region.kind in ("autocast", "grad")]
        return f"{node.target} {args} {modes}"

    def _describe(self, node: fx.Node) -> str:
        found = self._geometry.get(node)
        if found is None:
            found = self._geometry[node] = _geometry(node)
        return str(found)

    def _ask(self, node: fx.Node, written: list[fx.Node]) -> _GradFlags:
        made: dict[fx.Node, Any] = {}

        def operand(arg: fx.Node) -> Any:
            if arg not in made:
                value = example_value(arg.meta.get("val"), self._mode)
                if value is None:
                    value = self._submodules.get(str(arg.target))
                made[arg] = pytree.tree_map(_require, value, self._flags[arg]) if self._any(arg) else value
                if arg in written:
                    made[arg] = made[arg].clone()  # a leaf cannot be written in place
            return made[arg]

        with torch.enable_grad(), self._mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
            with _inside(regions_of(node)):
                try:
                    results = node.target(*args, **kwargs)  # type: ignore[operator]
                except Exception:
                    # An operator that only export can trace: assume that its results depend on all inputs.
                    given = any(self._any(arg) for arg in node.all_input_nodes) and torch.is_grad_enabled()
                    results = pytree.tree_map(lambda v: _require(v, given), example_value(node.meta["val"], self._mode))
        return _GradFlags(pytree.tree_map(_flag, results), tuple(_flag(made[argument]) for argument in written))

    def _any(self, node: fx.Node) -> bool:
        return any(flag is True for flag in pytree.tree_leaves(self._flags.get(node)))


class _Unquoted(str):
    """A string whose repr has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _geometry(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}{value.device}"
    if isinstance(value, list | tuple):
        return str([f"{tuple(item.shape)}{item.dtype}" for item in value if isinstance(item, torch.Tensor)])
    return f"{node.target}" if value is None else f"{value}"


def _require(value: Any, flag: Any) -> Any:
    can = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.requires_grad_(True) if can and flag is True else value


def _flag(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@contextmanager
def _inside(regions: tuple[ContextRegion, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for region in regions:
            if region.kind in ("autocast", "grad"):
                stack.enter_context(region.enter())
        yield
