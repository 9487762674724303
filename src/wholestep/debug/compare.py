"""Two versions of a graph side by side: the first node whose value differs beyond what the contract allows.

    ws.debug.compare(before, after, inputs)              graph modules or StepGraphs, one value for each placeholder
    ws.debug.compare(train_step, compiled, call)         a function or compiled steps, the arguments of a call

Graphs of one step, before and after passes, have node names in common (`by_name`): a region of a lowered graph returns
values under the names that they had, and a node that a pass replaced one for one by the same operator corresponds to
its replacement. Captures of two functions have not: one additional operator renumbers all that follow. Their nodes are
aligned as the lines of two texts are (`by_order`): by operator, constant arguments, shape and module. No object of the
user is changed: all runs are on copies.

Run a graph node by node, on copies, with a callback for every value; other ranks are simulated.

No object of the user is written: inputs are copied, RNG states and constants of the graph are restored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.debug.minifier.trial import copies_of, copy_of
from wholestep.debug.step_versions import Version, two_versions
from wholestep.debug.value_distance import Gap, eps_of, gap_between
from wholestep.errors import Location, invalid_value
from wholestep.ir.effects import is_communication
from wholestep.ir.graph_walks import reachable
from wholestep.ir.meta import location_of_node, node_meta
from wholestep.ir.readable import describe_value, format_node, html_in_notebooks
from wholestep.passes.engine.contract import NUMERICS, Numerics, is_numerics
from wholestep.passes.engine.pretend_ranks import PretendRanks
from wholestep.passes.engine.replay import nudged
from wholestep.torch_private.autograd import below_autograd
from wholestep.torch_private.guard_checks import cuda_is_initialized
from wholestep.torch_private.operators import OpOverload, op_name

SEED = 20261115
_EMPTY = frozenset(
    f"aten::{name}" for name in "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)

Visit = Callable[[fx.Node, Any], bool]
"""Gets a node and its value; False ends the run."""

Note = Callable[[fx.Node], None]


class NodeRaised(Exception):  # noqa: N818 (it carries an error)
    """An operator raised."""

    def __init__(self, node: fx.Node, error: Exception) -> None:
        super().__init__(f"{node.name} raised {type(error).__name__}: {error}")
        self.node = node
        self.error = error


class _Enough(Exception):  # noqa: N818 (not an error)
    """The callback ended the run."""


def run_nodes(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    visit: Visit,
    left: list[Any] | None = None,
    note: Note | None = None,
) -> Any:
    """Run a graph and call `visit` with every value; the results, or None if `visit` ended the run.

    `left` is filled with the copies of the inputs as the run left them. `note` is called with each node before it runs.
    """
    pretends = any(node.op == "call_function" and is_communication(node.target) for node in gm.graph.nodes)
    runner = (_SimulatedRanksRunner if pretends else _PlainRunner)(gm)
    runner.extra_traceback = False
    runner.visit, runner.note = visit, note
    own = copies_of([_on_cpu(value) if pretends else value for value in inputs])
    if left is not None:
        left[:] = own
    with _put_back(gm), torch.random.fork_rng(_cuda_devices()), below_autograd():
        torch.manual_seed(SEED)
        try:
            return runner.run(*own, enable_io_processing=False)
        except _Enough:
            return None


def _is_empty(target: Any) -> bool:
    """True if an operator returns uninitialised memory."""
    return isinstance(target, OpOverload) and op_name(target).split(".")[0] in _EMPTY


class _Looking(fx.Interpreter):
    visit: Visit
    note: Note | None

    def run_node(self, n: fx.Node) -> Any:
        if self.note is not None:
            self.note(n)
        try:
            value = super().run_node(n)
        except _Enough:
            raise
        except Exception as error:
            raise NodeRaised(n, error) from error
        if n.op == "call_function" and _is_empty(n.target):
            value.zero_()  # uninitialised memory differs from run to run
        if n.op != "output" and not self.visit(n, value):
            raise _Enough
        return value


class _PlainRunner(_Looking):
    """Collectives, if any, are real."""


class _SimulatedRanksRunner(_Looking, PretendRanks):
    """Collectives are simulated: no other process takes part."""


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if cuda_is_initialized() else []


@contextmanager
def _put_back(gm: fx.GraphModule) -> Iterator[None]:
    kept = [(tensor, tensor.detach().clone()) for tensor in (*gm.parameters(), *gm.buffers()) if not tensor.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content in kept:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)


_SHOWN = 4


@dataclass(frozen=True)
class Difference:
    """A node of the second version that differs from its counterpart."""

    node: str
    counterpart: str
    """What the first version calls it."""
    gap: Gap
    text: str
    """The node as Python."""
    location: Location | None = None
    made_from: tuple[str, ...] = ()
    """The nodes that it reads."""
    new: tuple[str, ...] = ()
    """Nodes without a counterpart between it and values that were compared: the fault may be in one of them."""

    @property
    def max_ulps(self) -> int | None:
        """The largest difference in units of the last place."""
        return self.gap.ulps


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; falsy if nothing differs."""

    first: Difference | None
    compared: int
    """How many nodes were compared."""
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    numerics: Numerics
    """The contract: exact, reassociates, or approximates(bound), which single nodes are held to like reassociates."""
    labels: tuple[str, str]

    _repr_html_ = html_in_notebooks

    def __bool__(self) -> bool:
        return self.first is not None

    def __str__(self) -> str:
        a, b = self.labels
        alone = f"{len(self.only_in_a)} nodes only in {a}, {len(self.only_in_b)} only in {b}"
        head = f"{self.compared} nodes compared ({self.numerics}), {alone}"
        if self.first is None:
            return f"{head}: no difference"
        found = self.first
        lines = [head, f"first difference: {found.node}", f"  {found.text}", f"  {found.gap}"]
        lines += [f"  at {found.location}"] if found.location is not None else []
        lines += [f"  reads {name}" for name in found.made_from[:_SHOWN]]
        lines += [f"  made by {name}, which is new" for name in found.new[:_SHOWN]]
        return "\n".join(lines)


def compare(
    step_a: Any,
    step_b: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    numerics: Numerics | None = None,
    quiet: bool = False,
) -> Comparison:
    """Run two versions node by node and print the first that differs; returns what was found.

    `numerics`: what is allowed; by default the contract of passes that only one of the two went through, and
    "reassociates" for compiled regions.
    """
    if numerics is not None and not is_numerics(numerics):
        raise invalid_value("numerics", numerics, f"use {NUMERICS}, or None.")
    a, b = two_versions(step_a, step_b, tuple(args), kwargs or {})
    found = compare_versions(a, b, numerics or a.contract_with(b))
    if not quiet:
        print(found)
    return found


def compare_versions(a: Version, b: Version, numerics: Numerics, note: Note | None = None) -> Comparison:
    """The first difference of two graphs that take the same inputs. `note` hears of the nodes of the second one."""
    pairs = (by_name if a.has_names_of(b) else by_order)(a.gm.graph, b.gm.graph)
    wanted = set(pairs.values())
    first = _seen(a, a.inputs, wanted)
    values = first.values
    # Reassociated sums may change as much as rounding errors of the inputs do.
    nudge = _seen(a, nudged(list(a.inputs)), wanted) if numerics != "exact" else _Seen({}, {}, {})
    noise = nudge.values
    seen: list[Difference] = []
    compared = 0
    left: list[Any] = []

    def visit(node: fx.Node, value: Any) -> bool:
        nonlocal compared
        name = pairs.get(node.name)
        if name is None or node.op == "placeholder" or value is None or values.get(name) is None:
            return True  # no counterpart; or an operator on lists that updates them in place, and returns nothing
        compared += 1
        gap = gap_between(values[name], value, noise.get(name), numerics, first.eps.get(name, 0.0))
        if gap is not None:
            seen.append(_difference(node, name, gap, pairs))
        return gap is None

    try:
        run_nodes(b.gm, b.inputs, visit, left, note)
        seen += _state_apart(first, nudge.left, b, left, numerics) if not seen else []
    except NodeRaised as raised:
        gap = Gap("raised", text=f"raised {type(raised.error).__name__}: {raised.error}")
        seen.append(_difference(raised.node, pairs.get(raised.node.name, ""), gap, pairs))
    in_b = {node.name for node in b.gm.graph.nodes if node.op not in ("placeholder", "output")}
    in_a = [node.name for node in a.gm.graph.nodes if node.op not in ("placeholder", "output")]
    return Comparison(
        seen[0] if seen else None,
        compared,
        tuple(name for name in in_a if name not in wanted),
        tuple(name for name in in_b if name not in pairs),
        numerics,
        (a.label, b.label),
    )


@dataclass(frozen=True)
class _Seen:
    """Values by name, as they were computed, and the inputs after the run; partial if the graph raises."""

    values: dict[str, Any]
    left: dict[str, Any]
    eps: dict[str, float]
    """The rounding error of the coarsest dtype on the way to a value."""


def _seen(version: Version, inputs: Sequence[Any], wanted: set[str]) -> _Seen:
    found: dict[str, Any] = {}
    left: list[Any] = []
    eps: dict[str, float] = {}

    def visit(node: fx.Node, value: Any) -> bool:
        eps[node.name] = max([eps_of(value), *(eps.get(source.name, 0.0) for source in node.all_input_nodes)])
        if node.name in wanted:
            found[node.name] = copy_of(value)
        return True

    try:
        run_nodes(version.gm, inputs, visit, left)
    except NodeRaised:
        return _Seen(found, {}, eps)
    names = [node.name for node in version.gm.graph.find_nodes(op="placeholder")]
    return _Seen(found, dict(zip(names, left, strict=True)), eps)


def _state_apart(
    before: _Seen, noise: dict[str, Any], b: Version, left: list[Any], numerics: Numerics
) -> list[Difference]:
    """Inputs that the two versions leave with different contents: a compiled region writes without a node."""
    coarsest = max(before.eps.values(), default=0.0)  # which node wrote an input is not tracked
    for node, value in zip(b.gm.graph.find_nodes(op="placeholder"), left, strict=True):
        if node.name in before.left:
            gap = gap_between(before.left[node.name], value, noise.get(node.name), numerics, coarsest)
            if gap is not None:
                return [_difference(node, node.name, gap, {})]
    return []


def _difference(node: fx.Node, counterpart: str, gap: Gap, pairs: dict[str, str]) -> Difference:
    def unpaired(node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if source.name not in pairs]

    new = [source.name for source in reachable(unpaired(node), unpaired)]
    return Difference(
        node.name,
        counterpart,
        gap,
        format_node(node),
        location_of_node(node),
        tuple(format_node(source) for source in node.all_input_nodes),
        tuple(reversed(new)),
    )


_MOST_ALIGNED = 5000
"""Alignment is quadratic; larger graphs correspond by name."""


def by_name(a: fx.Graph, b: fx.Graph) -> dict[str, str]:
    """Names of the second graph to those of the first: the same, or the only ones of their kind that were replaced."""
    there = {node.name: node for node in a.nodes if node.op != "output"}
    here = {node.name: node for node in b.nodes if node.op != "output"}
    pairs = {name: name for name in here if name in there}
    lost, new = defaultdict[Any, list[str]](list), defaultdict[Any, list[str]](list)
    for nodes, kinds, others in ((there, lost, here), (here, new, there)):
        for name, node in nodes.items():
            if name not in others and node.op != "placeholder":
                kinds[node.op, node.target].append(name)
    for kind, names in new.items():
        if len(names) == len(lost[kind]):
            pairs.update(zip(names, lost[kind], strict=True))
    return pairs


def by_order(a: fx.Graph, b: fx.Graph) -> dict[str, str]:
    """Names of the second graph to those of the first, by what nodes are; inputs by their names."""
    if max(len(a.nodes), len(b.nodes)) > _MOST_ALIGNED:
        return by_name(a, b)
    there, here = _calls(a), _calls(b)
    pairs = {node.name: node.name for node in b.nodes if node.op == "placeholder"}
    matcher = SequenceMatcher(None, [_key(node) for node in there], [_key(node) for node in here], autojunk=False)
    for tag, start, stop, first, last in matcher.get_opcodes():
        if tag == "equal" or (tag == "replace" and stop - start == last - first):
            for old, new in zip(there[start:stop], here[first:last], strict=True):
                # The same operator with another constant argument corresponds.
                if _kind(old) == _kind(new):
                    pairs[new.name] = old.name
    return pairs


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _kind(node: fx.Node) -> tuple[str, ...]:
    meta = node_meta(node)
    return node.op, str(node.target), describe_value(node.meta.get("val")), meta.module_path, meta.phase


def _key(node: fx.Node) -> tuple[str, ...]:
    numbers = fx.map_arg((node.args, node.kwargs), lambda source: None)
    return *_kind(node), repr(numbers)
