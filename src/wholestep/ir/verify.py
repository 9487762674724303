"""What is true of every StepGraph between capture and lowering, checked in one walk over the graph.

    level 0   nothing
    level 1   the graph is well formed and functional, its epilogue and outputs are those of the signature, nothing is
              read after it was written, every collective is waited on before it is used, values are known
              and, given the nodes that a pass changed, their shapes, strides, dtypes and devices are what the operators
              give for what their inputs say (propagate_metadata.py)
    level 2   also: the same for all nodes

A fault raises VerifyError with the node, the user's line and the nodes around it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, lru_cache
from itertools import chain, compress, repeat
from operator import attrgetter, lt, not_
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from wholestep.errors import VerifyError
from wholestep.ir.effects import (
    is_collective,
    is_communication,
    is_measure,
    is_wait,
    may_share,
    may_write,
    returns_tensors,
    shared_inputs,
    writes,
)
from wholestep.ir.graph_functions import call_on_copies, get_rng_state
from wholestep.ir.graph_walks import epilogue, reachable
from wholestep.ir.meta import node_meta
from wholestep.ir.propagate_metadata import propagate, propagate_changed
from wholestep.ir.readable import describe_value, format_node
from wholestep.ir.signature import Signature, TensorSpec
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.fake_tensors import has_symbolic_sizes
from wholestep.torch_private.fx_graphs import NODE_SOURCES, call_targets
from wholestep.torch_private.operators import OpOverload

_COPY = torch.ops.aten.copy_.default
_OPS = frozenset({"placeholder", "get_attr", "call_function", "output"})
_AROUND = 2


def verify(step_graph: StepGraph, level: int = 1, changed: Collection[fx.Node] = ()) -> None:
    """Raise VerifyError if the graph breaks a rule. `changed`: the nodes whose metadata is checked at level 1, too."""
    if level <= 0:
        return
    graph = _Graph(step_graph.gm, step_graph.signature)
    for rule in RULES:
        rule(graph)
    if level >= 2:
        propagate(step_graph.gm, graph.fail)
    else:
        propagate_changed(step_graph.gm, changed, graph.metadata_does_not_fit)


def verify_bare(gm: fx.GraphModule, level: int = 1, changed: Collection[fx.Node] = ()) -> None:
    """Raise VerifyError if a graph without a signature is malformed or uses a collective before its wait.

    `changed`: the nodes whose metadata is checked at level 1, too.
    """
    if level <= 0:
        return
    graph = _Graph(gm, Signature(), is_bare=True)  # no StepGraph: that takes flat inputs, and would change the module
    for rule in (linted, collectives_waited):
        rule(graph)
    if level == 1:
        propagate_changed(gm, changed, graph.metadata_does_not_fit)
    elif _calls_operators(graph) and all("val" in node.meta for node in graph.inputs):
        propagate(gm, graph.fail)


def complain_about(gm: fx.GraphModule, node: fx.Node, what: str) -> NoReturn:
    """Raise VerifyError about a node whose metadata cannot be computed."""
    _Graph(gm, Signature(), is_bare=True).metadata_does_not_fit(node, what)


class _Graph:
    """A step's nodes by position, and how to complain about one."""

    def __init__(self, gm: fx.GraphModule, signature: Signature, *, is_bare: bool = False) -> None:
        self.gm = gm
        self.signature = signature
        self.is_bare = is_bare
        """Whether others made it: no StepGraph, and not in normal form."""
        self.nodes: list[fx.Node] = list(gm.graph.nodes)
        self.sources: list[dict[fx.Node, None]] = list(map(NODE_SOURCES, self.nodes))
        """What each node reads, made once for all rules."""
        self.ops: list[str] = list(map(attrgetter("op"), self.nodes))
        self.inputs = list(compress(self.nodes, map("placeholder".__eq__, self.ops)))
        self.epilogue = epilogue(gm.graph)

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """Where each node is."""
        return dict(zip(self.nodes, range(len(self.nodes)), strict=True))

    def results(self) -> tuple[Any, ...]:
        """The values of the output node."""
        last = self.nodes[-1] if self.nodes else None
        if last is None or last.op != "output" or not last.args or not isinstance(last.args[0], tuple | list):
            self.fail(last, "the graph does not end in an output node with one flat tuple.")
        return tuple(last.args[0])

    def fail(self, node: fx.Node | None, what: str, fix: str = "") -> NoReturn:
        """Raise VerifyError about a node."""
        if node is None:
            raise VerifyError(what, fix=fix)
        around: list[str] = []
        if node in self.nodes:
            position = self.nodes.index(node)
            start = max(0, position - _AROUND)
            for i, near in enumerate(self.nodes[start : position + _AROUND + 1], start):
                around.append(("> " if i == position else "  ") + _clip(format_node(near)))
        raise VerifyError(
            what, fix=fix, node=_clip(format_node(node)), location=node_meta(node).location, around=around
        )

    def metadata_does_not_fit(self, node: fx.Node, what: str) -> NoReturn:
        """Raise VerifyError about a node that does not fit its inputs."""
        self.fail(
            node,
            what,
            fix="what takes the place of a node needs its shape, strides, dtype and device: insert the view or cast "
            "that is missing. Where another shape or dtype is meant, delete `val` of the node and of what follows from "
            "it, and they are recomputed.",
        )


def well_formed(graph: _Graph) -> None:
    """torch.fx's own lint, and only the kinds of nodes a StepGraph has."""
    if not _calls_operators(graph):
        node = next(node for node in graph.nodes if node.op not in _OPS)
        graph.fail(node, f"a StepGraph has no {node.op} nodes.", fix="call torch operators only.")
    linted(graph)


def _calls_operators(graph: _Graph) -> bool:
    """Whether a graph has no nodes that call methods or modules."""
    return _OPS.issuperset(graph.ops)


def linted(graph: _Graph) -> None:
    """torch.fx's own lint."""
    if _calls_operators(graph) and _is_sound(graph):
        return
    try:
        graph.gm.graph.lint()
    except (RuntimeError, AssertionError, ValueError, AttributeError) as error:
        graph.fail(_node_named_in(graph, str(error)), f"torch.fx finds the graph malformed: {error}")


def _is_sound(graph: _Graph) -> bool:
    """Whether lint has nothing to say, found out without Python code for each node."""
    nodes, sources = graph.nodes, graph.sources
    read: list[Any] = list(map(graph.place.get, chain.from_iterable(sources)))
    readers = chain.from_iterable(map(repeat, range(len(nodes)), map(len, sources)))
    if None in read or not all(map(lt, read, readers)):  # something from elsewhere, or from further down
        return False
    owners = set(map(id, map(attrgetter("graph"), nodes)))
    if len(set(map(attrgetter("name"), nodes))) != len(nodes) or owners != {id(graph.gm.graph)}:
        return False
    targets = list(map(attrgetter("target"), nodes))
    called = compress(targets, map("call_function".__eq__, graph.ops))
    attributes = compress(targets, map("get_attr".__eq__, graph.ops))
    return all(map(callable, called)) and all(_has_attribute(graph.gm, path) for path in set(attributes))


def _has_attribute(module: Any, path: Any) -> bool:
    for name in path.split(".") if isinstance(path, str) else [""]:
        module = getattr(module, name, None)
    return module is not None


def inputs_match(graph: _Graph) -> None:
    """Placeholders are the signature's inputs, in order, with the same dtype and shape."""
    specs = graph.signature.inputs
    if len(graph.inputs) != len(specs):
        graph.fail(
            graph.inputs[-1] if graph.inputs else None,
            f"the graph has {len(graph.inputs)} placeholders, the signature {len(specs)} inputs.",
        )
    for position, (node, spec) in enumerate(zip(graph.inputs, specs, strict=True)):
        if graph.nodes[position] is not node:
            graph.fail(node, f"placeholder {node.name} comes after other nodes.")
        if node.name != spec.name:
            graph.fail(node, f"placeholder {position} is {node.name}, the signature calls it {spec.name}.")
        _check_spec(graph, node, spec.tensor, f"input {spec.path}")


def outputs_match(graph: _Graph) -> None:
    """The output node has one value per output of the signature, and state changes name existing ones."""
    results, specs = graph.results(), graph.signature.outputs
    if len(results) != len(specs):
        graph.fail(graph.nodes[-1], f"the graph has {len(results)} outputs, the signature {len(specs)}.")
    for number, (value, spec) in enumerate(zip(results, specs, strict=True)):
        if isinstance(value, list | tuple | dict):
            graph.fail(graph.nodes[-1], f"output {number} is a {type(value).__name__}; outputs are flat.")
        if isinstance(value, fx.Node):
            _check_spec(graph, value, spec.tensor, f"output {number} ({spec.path})")
    for change in graph.signature.state_changes:
        for index in (change.output, change.unless):
            if index is not None and not 0 <= index < len(specs):
                graph.fail(graph.nodes[-1], f"the state change of {change.path} names output {index} of {len(specs)}.")


def epilogue_matches(graph: _Graph) -> None:
    """The `copy_` nodes before the output are the signature's write-backs, and each placeholder has at most one."""
    expected = {(write.target, write.value) for write in graph.signature.write_backs}
    written: set[fx.Node] = set()
    for node in graph.epilogue:
        if len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
            graph.fail(node, f"{node.name} does not say what is written where.")
        target, value = _written(node), node.args[1]
        if target in written:
            graph.fail(node, f"{target.name} is written twice in the epilogue.")
        written.add(target)
        if (target.name, str(value)) not in expected:
            graph.fail(node, f"the signature has no write-back of {value} into {target.name}.")
        for user in node.users:
            if user.op != "output":
                graph.fail(user, f"{user.name} uses the result of the epilogue's {node.name}.")
    if len(graph.epilogue) != len(graph.signature.write_backs):
        done = {(str(node.args[0]), str(node.args[1])) for node in graph.epilogue}
        missing = next(
            (write for write in graph.signature.write_backs if (write.target, write.value) not in done), None
        )
        what = f"copy_({missing.target}, {missing.value})" if missing else "a write-back that is listed twice"
        graph.fail(graph.nodes[-1], f"the epilogue right before the output lacks {what}.")


def functional(graph: _Graph) -> None:
    """Nothing but the epilogue writes into a tensor."""
    epilogue = set(graph.epilogue)
    all_nodes = graph.gm.graph
    for target in filter(may_write, call_targets(all_nodes)):
        for node in all_nodes.find_nodes(op="call_function", target=target, sort=False):
            if node not in epilogue and writes(node):
                graph.fail(
                    node,
                    f"{node.name} writes into one of its arguments outside of the epilogue.",
                    fix="use the functional operator and write back at the end of the graph.",
                )


def nothing_read_after_write(graph: _Graph) -> None:
    """No value read after a write shares memory with what was written.

    A placeholder among the outputs is the user's own tensor and means its contents after the step.
    """
    written_at = {_written(node): i for i, node in enumerate(graph.epilogue)}
    if not written_at:
        return
    epilogue = set(graph.epilogue)

    def views(node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if may_share(user.target) and user not in epilogue and node in shared_inputs(user):
                yield user

    shares: dict[Any, list[fx.Node]] = {}
    for root in written_at:
        for node in reachable([root], views):
            shares.setdefault(node, []).append(root)
    for i, node in enumerate(graph.epilogue):
        value = node.args[1]
        for root in shares.get(value, ()) if isinstance(value, fx.Node) else ():
            if written_at[root] < i or (root is node.args[0] and value is not root):
                graph.fail(
                    node,
                    f"{node.name} reads {value}, which shares memory with {root.name} after that was written.",
                    fix=f"write {root.name} later, or copy the value before.",
                )
    for number, value in enumerate(graph.results()):
        if isinstance(value, fx.Node) and value.op == "placeholder":
            continue
        for root in shares.get(value, ()) if isinstance(value, fx.Node) else ():
            graph.fail(
                graph.nodes[-1],
                f"output {number} is {value}, which shares memory with {root.name} after that was written.",
                fix="return the value that is written (or the copy_ node) for the new contents, a clone for the old.",
            )


def collectives_waited(graph: _Graph) -> None:
    """The result of a collective reaches other nodes only through `wait_tensor` (views of it may come before), and
    nothing else is waited on."""
    pending: dict[fx.Node, tuple[fx.Node, int | None]] = {}
    open_: dict[tuple[fx.Node, int | None], None] = {}
    for node in _around_collectives(graph):
        sources = NODE_SOURCES(node)
        if is_collective(node.target):
            _forbid_pending(graph, node, pending)
            value = node.meta.get("val")
            if isinstance(value, list | tuple):
                open_.update(dict.fromkeys((node, i) for i in range(len(value))))
            else:
                open_[node, None] = None
            pending[node] = (node, None)
        elif is_wait(node.target):
            source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
            if graph.is_bare and isinstance(source, fx.Node) and is_wait(source.target):
                continue  # to wait again for what has arrived is nothing, and `make_fx` writes it
            if graph.is_bare and _comes_from_outside(source):
                continue  # a backward that waits for what the forward started
            if not (isinstance(source, fx.Node) and source in pending):
                graph.fail(
                    node,
                    f"{node.name} waits on {source}, which no collective made.",
                    fix=f"use {source} itself, or wait on the result of the collective.",
                )
            key = pending[source]
            open_.pop(key if key in open_ else (key[0], None), None)  # to wait for a part of a tensor is to wait for it
        elif not pending.keys().isdisjoint(sources):
            if is_measure(node.target):
                continue
            if graph.is_bare and node.op == "output":
                for source in pending.keys() & sources.keys():  # another node waits
                    open_.pop(pending[source], None)
                    open_.pop((pending[source][0], None), None)
                continue
            shared = [source for source in shared_inputs(node) if source in pending]
            # Sizes may be read too, but nothing else that is under way.
            if shared and node.op == "call_function" and len(shared) == len(pending.keys() & sources.keys()):
                root = pending[shared[0]]
                is_part = node.target is operator.getitem and root[1] is None and type(node.args[1]) is int
                pending[node] = (root[0], node.args[1]) if is_part else root  # type: ignore[assignment]
                continue
            _forbid_pending(graph, node, pending)
    for collective, part in open_:
        which = "" if part is None else f"result {part} of "
        graph.fail(
            collective, f"{which}the collective {collective.name} is never waited on.", fix="add its wait_tensor."
        )


def _around_collectives(graph: _Graph) -> list[fx.Node]:
    """In order: collectives, waits, and what may read a result before its wait."""
    all_nodes = graph.gm.graph
    communicating = [
        node
        for target in filter(is_communication, call_targets(all_nodes))
        for node in all_nodes.find_nodes(op="call_function", target=target, sort=False)
    ]
    started = [node for node in communicating if is_collective(node.target)]
    readers = (user for view in reachable(started, _views) for user in view.users)
    return sorted({*communicating, *readers}, key=graph.place.__getitem__)


def _views(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if not is_communication(user.target) and may_share(user.target))


def values_known(graph: _Graph) -> None:
    """Every node that makes a tensor has its metadata in `val`."""
    tensors = {spec.name for spec in graph.signature.inputs if spec.tensor is not None}
    metas = map(attrgetter("meta"), graph.nodes)
    for node in compress(graph.nodes, map(not_, map(dict.__contains__, metas, repeat("val")))):
        if _makes_tensors(node, tensors):
            graph.fail(node, f"{node.name} has no `val`: its shape and dtype are unknown.")


RULES: tuple[Callable[[_Graph], None], ...] = (
    well_formed,
    inputs_match,
    outputs_match,
    epilogue_matches,
    functional,
    nothing_read_after_write,
    collectives_waited,
    values_known,
)
"""Level 1, in the order in which the rules may rely on each other."""


def _written(node: fx.Node) -> fx.Node:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    return target


def _comes_from_outside(source: Any) -> bool:
    """Whether a value is an input, or a view of one."""
    while isinstance(source, fx.Node) and source.op != "placeholder":
        source = next(iter(shared_inputs(source)), None)
    return isinstance(source, fx.Node)


def _forbid_pending(graph: _Graph, node: fx.Node, pending: dict[fx.Node, tuple[fx.Node, int | None]]) -> None:
    for source in node.all_input_nodes:
        if source in pending:
            graph.fail(
                node,
                f"{node.name} uses {source.name}, a result of the collective {pending[source][0].name}, "
                "which was not waited on.",
                fix=f"use the wait_tensor of {source.name}.",
            )


def _makes_tensors(node: fx.Node, tensors: set[str]) -> bool:
    if node.op == "placeholder":
        return node.name in tensors
    if node.op == "get_attr":
        return True
    if isinstance(node.target, OpOverload):
        return returns_tensors(node.target)
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _holds_tensor(source.meta.get("val"))
    return node.target in (get_rng_state, call_on_copies)


def _holds_tensor(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value)


def _check_spec(graph: _Graph, node: fx.Node, spec: TensorSpec | None, what: str) -> None:
    value = node.meta.get("val")
    if spec is None or value is None:
        return
    if isinstance(value, Tensor):
        shapes: tuple[Any, Any] = (value.shape, spec.shape)
        if has_symbolic_sizes(value):
            shapes = tuple(map(str, value.shape)), tuple(map(str, spec.shape))
        if _dtype_name(value.dtype) == spec.dtype and shapes[0] == shapes[1]:
            return
    found, expected = describe_value(value), f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"
    graph.fail(node, f"{what} is {found}, the signature says {expected}.")


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _node_named_in(graph: _Graph, message: str) -> fx.Node | None:
    words = set(message.replace("'", " ").replace('"', " ").replace(",", " ").split())
    return next((node for node in graph.nodes if node.name in words), None)


def _clip(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + " .."
