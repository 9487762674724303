"""The contract of a pass: declared where the pass is defined, and checked whenever it runs.

    @graph_optimization_pass(prerequisites=[comm_fusion_with_concat], numerics="exact")
    def schedule_comm_wait(gm: fx.GraphModule) -> None: ...

    schedule_comm_wait(gm)                          runs, as PyTorch's `_spmd` passes did
    comm_fusion_with_concat(bucket_size_mb=25)      no graph: binds options, for `ws.compile(passes=[...])`

The passes that ran are recorded on each graph (`applied_passes`), never in the process: another graph starts anew.

`Promises` compares the graph before and after a pass, without running anything:

    collectives      reduce op, root and group are unchanged; groups exist
    write-backs      no further input is written, none receives the value of another
    edges            two nodes have not exchanged their inputs (numerics="exact")

A pass that only moves, merges and splits leaves these unchanged, so a correct pass raises nothing: new nodes are not
judged, and equal expressions may replace each other. Values are compared at level 3 (`replay`). Cost: the nodes that
changed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, overload

import torch
from torch import fx, nn

from wholestep.errors import OptionError, PassOrderError, VerifyError, called, invalid_value
from wholestep.ir.collectives import comm_block
from wholestep.ir.effects import is_collective, is_wait
from wholestep.ir.graph_walks import epilogue
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.signature import Signature
from wholestep.passes.plain_collectives import arguments_by_position
from wholestep.torch_private.distributed import process_group_size
from wholestep.torch_private.fx_graphs import NODE_SOURCES, NodeParts, NodeTable, call_targets
from wholestep.torch_private.operators import OpOverload, argument_names, op_name


@dataclass(frozen=True)
class Approximates:
    """`approximates(2)`: every result is at most twice as far from float64 as it was before the pass."""

    bound: float

    def __post_init__(self) -> None:
        if not 1 <= self.bound < math.inf:
            raise invalid_value("approximates", self.bound, "give a factor, 1 or more.")

    def __str__(self) -> str:
        return f"approximates({self.bound:g})"

    __repr__ = __str__


approximates = Approximates
Numerics = Literal["exact", "reassociates", "changes"] | Approximates
NUMERICS = '"exact", "reassociates", approximates(bound) or "changes"'
HISTORY = "wholestep_passes"


def is_numerics(given: Any) -> bool:
    """Whether a value is one of the contracts on numerics."""
    return isinstance(given, Approximates) or (isinstance(given, str) and given in ("exact", "reassociates", "changes"))


def weakest(promises: Iterable[Numerics]) -> Numerics:
    """What several passes promise together: the least strict of their contracts."""
    given = list(promises)
    factors = [each.bound for each in given if isinstance(each, Approximates)]
    if factors and "changes" not in given:
        return Approximates(math.prod(factors))  # the second pass starts from what the first one left
    return next((each for each in ("changes", "reassociates") if each in given), "exact")


@dataclass(frozen=True)
class Contract:
    """What must have run, what must not have run, and the effect on numerics."""

    name: str
    prerequisites: tuple[str, ...] = ()
    """Passes that must have run on the same graph."""
    apply_after: tuple[str, ...] = ()
    """Passes that must have run before, if they are used at all."""
    numerics: Numerics = "exact"
    """`exact`: the same bits; `reassociates`: the same sums in another order; `approximates(bound)`: at most
    `bound` times as far from float64 as before; `changes`: anything else."""
    allow_rerun: bool = False
    only_for: tuple[Any, ...] = ()
    """Operators that the pass works on: a graph without any of them is left alone."""
    ends_normal_form: bool = False
    """Whether it writes where a StepGraph may not: for graph modules only, after all other passes."""


class GraphPass:
    """A function on graphs with its contract."""

    def __init__(
        self,
        function: Callable[..., Any],
        contract: Contract,
        check: Callable[..., None] | None = None,
        exact_if: Callable[..., bool] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.contract = contract
        self._signature = inspect.signature(function)
        self._check = check
        self._exact_if = exact_if

    def numerics_with(self, args: Sequence[Any], options: Mapping[str, Any]) -> Numerics:
        """The effect on numerics with some options."""
        if self._exact_if is None:
            return self.contract.numerics
        given = self._signature.bind_partial(None, *args, **options)
        _, *names = given.arguments
        exact = self._exact_if(**{name: given.arguments[name] for name in names})
        return "exact" if exact else self.contract.numerics

    @property
    def name(self) -> str:
        """The name in messages, options and dumps."""
        return self.contract.name

    def __call__(self, *args: Any, allow_rerun: bool = False, **options: Any) -> Any:
        """With a graph as first argument: run, verified at level `verify` (1). Otherwise: bind options."""
        from wholestep.passes.engine.manager import apply_pass, is_graph

        level = None if "verify" in self._signature.parameters else options.pop("verify", None)
        first = next(iter(self._signature.parameters), "")
        if not args and is_graph(options.get(first)):
            args = (options.pop(first),)
        if args and is_graph(args[0]):
            self.check_options(args[1:], options, whole=True)
            level = 1 if level is None else level
            return apply_pass(self, args[0], args[1:], options, allow_rerun=allow_rerun, level=level)
        for given in (*args[:1], options.get(first)):
            if isinstance(given, fx.Graph | nn.Module):
                raise self._no_graph(given)  # binding it as an option would be a silent no-op
        self.check_options(args, options)
        return BoundPass(self, args, options, allow_rerun, level)

    def check_options(self, args: tuple[Any, ...], options: dict[str, Any], *, whole: bool = False) -> None:
        """Raise OptionError if the pass does not take these options, or (`whole`) needs more."""
        _, *names = self._signature.parameters
        bind = self._signature.bind if whole else self._signature.bind_partial
        try:
            given = bind(None, *args, **options)
        except TypeError as error:
            fix = f"its options are {', '.join(names)}." if names else "it has no options."
            if args and not whole:
                fix = f"{called(args[0])} is not a graph, which would be its first argument; {fix}"
            raise OptionError(f"{self.name}: {error}.", fix=fix) from error
        if self._check is not None:
            given.apply_defaults()
            self._check(*given.args[1:], **given.kwargs)

    def _no_graph(self, given: Any) -> OptionError:
        return OptionError(
            f"{self.name} got {called(given)}.",
            fix="give an fx.GraphModule, an IterGraphModule or a StepGraph; for an fx.Graph the module that owns it.",
        )

    def __repr__(self) -> str:
        return f"<pass {self.name}>"


@dataclass(frozen=True)
class BoundPass:
    """A pass with its options, to be run on a graph."""

    graph_pass: GraphPass
    args: tuple[Any, ...] = ()
    options: Any = None
    allow_rerun: bool = False
    verify: int | None = None
    """Verification level; None: that of the other passes."""

    def check(self) -> None:
        """Raise OptionError if an option is missing or wrong."""
        self.graph_pass.check_options(self.args, self.options or {}, whole=True)

    @property
    def name(self) -> str:
        """The name of the pass."""
        return self.graph_pass.name

    def __call__(self, gm: Any) -> Any:
        """Run on a graph."""
        from wholestep.passes.engine.manager import is_graph

        if not is_graph(gm):
            raise self.graph_pass._no_graph(gm)
        level = {} if self.verify is None else {"verify": self.verify}
        return self.graph_pass(gm, *self.args, allow_rerun=self.allow_rerun, **level, **(self.options or {}))

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in (self.options or {}).items())]
        return f"{self.name}({', '.join(given)})"


@overload
def graph_optimization_pass(prerequisites: Callable[..., Any], /) -> GraphPass: ...


@overload
def graph_optimization_pass(
    prerequisites: Iterable[Any] | str = (),
    apply_after: Iterable[Any] | str = (),
    *,
    numerics: Numerics = "exact",
    allow_rerun: bool = False,
    ends_normal_form: bool = False,
    only_for: Iterable[Any] = (),
    check: Callable[..., None] | None = None,
    exact_if: Callable[..., bool] | None = None,
) -> Callable[[Callable[..., Any]], GraphPass]: ...


def graph_optimization_pass(
    prerequisites: Any = (),
    apply_after: Iterable[Any] | str = (),
    *,
    numerics: Numerics = "exact",
    allow_rerun: bool = False,
    ends_normal_form: bool = False,
    only_for: Iterable[Any] = (),
    check: Callable[..., None] | None = None,
    exact_if: Callable[..., bool] | None = None,
) -> Any:
    """Declare a pass. Prerequisites and `apply_after` are passes or their names, one or several.

    `check` takes the options and raises if one of them is wrong, when they are bound. `exact_if` takes those that were
    given, and says whether with them the pass keeps every bit.
    """
    if not is_numerics(numerics):
        raise invalid_value("numerics", numerics, f"use {NUMERICS}.")
    if inspect.isfunction(prerequisites):
        return graph_optimization_pass()(prerequisites)  # written without ()
    before, after = _names(prerequisites), _names(apply_after)

    def declare(function: Callable[..., Any]) -> GraphPass:
        name = getattr(function, "__name__", type(function).__name__)
        return GraphPass(
            function,
            Contract(name, before, after, numerics, allow_rerun, tuple(only_for), ends_normal_form),
            check,
            exact_if,
        )

    return declare


def _names(given: Any) -> tuple[str, ...]:
    return (_name(given),) if isinstance(given, str | GraphPass) else tuple(map(_name, given))


def _name(given: Any) -> str:
    return given if isinstance(given, str) else str(getattr(given, "name", getattr(given, "__name__", given)))


def applied_passes(gm: fx.GraphModule) -> tuple[str, ...]:
    """The passes that ran on a graph, in order."""
    return tuple(contract.name for contract in applied_contracts(gm))


def applied_contracts(gm: fx.GraphModule) -> tuple[Contract, ...]:
    """The contracts of the passes that ran on a graph: two passes may have the same name."""
    found: tuple[Contract, ...] = gm.meta.get(HISTORY, ())
    return found


def note_applied(gm: fx.GraphModule, contract: Contract) -> None:
    """Record that a pass ran on a graph."""
    gm.meta[HISTORY] = (*applied_contracts(gm), contract)


def check_order(contract: Contract, history: tuple[Contract, ...], *, allow_rerun: bool = False) -> None:
    """Raise PassOrderError if a pass may not run now on a graph with that history."""
    name = contract.name
    applied = [done.name for done in history]
    missing = [needed for needed in contract.prerequisites if needed not in applied]
    if missing:
        raise PassOrderError(
            f"{', '.join(missing)} are the prerequisites of {name} and did not run on this graph.",
            fix=f"apply {', '.join(missing)} first; so far: {', '.join(applied) or 'nothing'}.",
        )
    late = [done.name for done in history if name in done.apply_after]
    if late:
        raise PassOrderError(
            f"{', '.join(late)} must be applied after {name}, and already ran on this graph.",
            fix=f"apply {name} before {', '.join(late)}.",
        )
    if name in applied and not (contract.allow_rerun or allow_rerun):
        raise PassOrderError(
            f"Cannot apply {name} twice: it already ran on this graph.",
            fix=f"leave it out, or say {name}(gm, ..., allow_rerun=True).",
        )


def check_list(passes: Iterable[BoundPass]) -> None:
    """Raise the errors that any graph would raise: wrong options, or an impossible order."""
    history: tuple[Contract, ...] = ()
    for bound in passes:
        bound.check()
        check_order(bound.graph_pass.contract, history, allow_rerun=bound.allow_rerun)
        check_normal_form(bound.graph_pass.contract)
        history = (*history, bound.graph_pass.contract)


def check_normal_form(contract: Contract) -> None:
    """Raise OptionError if a pass is not for StepGraphs."""
    if contract.ends_normal_form:
        raise OptionError(
            f"{contract.name} ends the normal form of a StepGraph, which everything after the passes relies on.",
            fix=f"leave it out: ws.compile updates in place by itself. For the graph alone: {contract.name}(step.gm).",
        )


_COPY = torch.ops.aten.copy_.default
_MANY = 10_000

Key = tuple[str, ...]
Turned = dict[fx.Node, tuple[fx.Node, fx.Node]]


class Promises:
    """The nodes of a graph before a pass, with their arguments."""

    def __init__(self, graph: fx.Graph, table: NodeTable, signature: Signature | None) -> None:
        self._table, self._signature = table, signature
        self._before = _collectives(graph)

    def check(self, gm: fx.GraphModule, numerics: Numerics, rewired: Iterable[fx.Node]) -> None:
        """Raise VerifyError for the first change that breaks the promises. `rewired`: nodes with other arguments."""
        found = _collectives(gm.graph)
        self._groups_exist(found)
        self._writes_are_known(gm.graph)
        if numerics == "changes":
            return
        self._collectives_are_the_same(found)
        changed = [node for node in rewired if not is_collective(node.target)]
        if not changed:
            return
        stay = set(gm.graph.nodes)
        turned = _turned(changed, self._table, stay)
        self._waits_are_read(turned)
        self._write_backs_stay(changed)
        if numerics == "exact":
            self._edges_are_not_swapped(turned)

    def _groups_exist(self, found: dict[fx.Node, Key]) -> None:
        known = {key[2] for key in self._before.values()}
        known.update(spec.name for spec in (self._signature.groups if self._signature is not None else ()))
        for node, (_, _, group, _) in found.items():
            if group not in known and not process_group_size(group):
                _fail(node, f"{node.name} communicates in the group {group!r}, which does not exist.")

    def _collectives_are_the_same(self, found: dict[fx.Node, Key]) -> None:
        for node, key in found.items():
            before = self._before.get(node, key)
            if before != key and not (_is_average(before, key) and self._rescaled(node)):
                _fail(node, f"{node.name} was {_said(before)} before the pass and is {_said(key)} now.")
        was, now = Counter(self._before.values()), Counter(found.values())
        for key in now - was:
            # A new collective and a removed one that differ only in what they do to the values.
            lost = [k for k in was - now if (k[0], k[2]) == (key[0], key[2]) and not _is_average(k, key)]
            new = [node for node, its in found.items() if its == key and node not in self._before]
            if lost and new:
                _fail(new[0], f"{new[0].name} is {_said(key)}; the pass has removed {_said(lost[0])}.")

    def _rescaled(self, node: fx.Node) -> bool:
        """Whether a new node reads a collective or is read by it: a sum may be divided there."""
        users = [user for wait in comm_block(node).waits for user in wait.users]
        return any(near not in self._table.place for near in (*node.all_input_nodes, *users))

    def _writes_are_known(self, graph: fx.Graph) -> None:
        if self._signature is None:
            return
        known = {write.target for write in self._signature.write_backs}
        for node in epilogue(graph):
            if str(node.args[0]) not in known:
                _fail(node, f"{node.args[0]} is written now, and the step does not write it.")

    def _waits_are_read(self, turned: Turned) -> None:
        for node, (old, new) in turned.items():
            if is_wait(old.target) and is_wait(new.target) and not self._same_expression(old, new):
                _fail(node, f"{node.name} reads {new.name} instead of {old.name}, the result of another collective.")

    def _write_backs_stay(self, changed: Iterable[fx.Node]) -> None:
        copies = [node for node in changed if node.target is _COPY and len(node.args) > 1]
        if not copies:
            return
        values = {
            parts.args[1]: parts.name
            for parts in self._table
            if parts.target is _COPY and len(parts.args) > 1 and isinstance(parts.args[1], fx.Node)
        }
        for node in copies:
            new, old = node.args[1], self._table.parts(node).args[1]
            if not isinstance(new, fx.Node) or not isinstance(old, fx.Node):
                continue
            others = values.get(new, node.name) != node.name
            if others and not self._same_expression(old, new) and not self._made_from(old, new):
                _fail(node, f"{node.args[0]} gets {new.name}, which {values[new]} writes, instead of {old.name}.")

    def _edges_are_not_swapped(self, turned: Turned) -> None:
        by_pair = {pair: node for node, pair in turned.items()}
        for (old, new), node in by_pair.items():
            other = by_pair.get((new, old))
            if other is None or {node, other} & {*node.all_input_nodes, *other.all_input_nodes}:
                continue  # a chain: the same terms in another order
            if not self._same_expression(old, new):
                _fail(
                    node, f"{node.name} reads {new.name} instead of {old.name}, and {other.name} the other way round."
                )

    def _made_from(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether one node was only another form (views, casts) of the other."""
        return other in self._alone(one) or one in self._alone(other)

    def _alone(self, node: fx.Node) -> list[fx.Node]:
        """The input of a node that has a single one, the input of that, and so on."""
        found: list[fx.Node] = []
        table = self._table
        while node in table.place and len(sources := _sources(table.parts(node))) == 1 and len(found) < _MANY:
            node = next(iter(sources))
            found.append(node)
        return found

    def _same_expression(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes of the graph before were the same operators on the same inputs."""
        stack, seen = [(one, other)], set[tuple[fx.Node, fx.Node]]()
        while stack:
            pair = stack.pop()
            if pair in seen or pair[0] is pair[1]:
                continue
            seen.add(pair)
            if len(seen) > _MANY:
                return True  # too large to decide: accepted
            if not all(map(self._table.place.__contains__, pair)):
                return False
            left, right = map(self._table.parts, pair)
            if left.op in ("placeholder", "get_attr") or left[:2] != right[:2]:
                return False
            mine, theirs = list(_sources(left)), list(_sources(right))
            if len(mine) != len(theirs) or _form(left) != _form(right):
                return False
            stack += zip(mine, theirs, strict=True)
        return True


def _turned(changed: Iterable[fx.Node], was: NodeTable, stay: set[fx.Node]) -> Turned:
    """Nodes that read one other old node in the place of one that still exists."""
    found = {}
    for node in changed:
        new = NODE_SOURCES(node)
        if not all(map(was.place.__contains__, new)):
            continue  # it reads a new node
        old = _sources(was.parts(node))
        gone, come = [n for n in old if n not in new], [n for n in new if n not in old]
        if len(gone) == len(come) == 1 and gone[0] in stay:
            found[node] = (gone[0], come[0])
    return found


def _sources(parts: NodeParts) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    fx.map_arg((parts.args, parts.kwargs), lambda node: found.setdefault(node))
    return found


def _form(parts: NodeParts) -> str:
    """Arguments with nodes left out."""
    return str(fx.map_arg((parts.args, parts.kwargs), lambda node: None))


def _collectives(graph: fx.Graph) -> dict[fx.Node, Key]:
    """For each collective: operator, first scalar, group, and its other scalars. Other nodes cost nothing."""
    found: dict[fx.Node, Key] = {}
    for target in filter(is_collective, call_targets(graph)):
        known: dict[Any, Key] = {}
        for node in graph.find_nodes(op="call_function", target=target, sort=False):
            args, kwargs = node.args, node.kwargs
            same = args[1:] if not kwargs and not any(isinstance(arg, list) for arg in args[1:]) else node
            if same not in known:
                known[same] = _key(target, args, dict(kwargs))
            if known[same][2]:
                found[node] = known[same]
    return found


def _key(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    given = dict(zip(argument_names(op), arguments_by_position(op, args, kwargs), strict=False))
    group = given.pop("group_name", "")
    scalars = [str(value) for value in given.values() if isinstance(value, str | int)]
    named = group if isinstance(group, str) else str(getattr(group, "group_name", ""))
    return op_name(op), scalars[0] if scalars else "", named, " ".join(scalars[1:])


def _is_average(one: Key, other: Key) -> bool:
    """Whether two collectives differ only in the division by the number of ranks."""
    return {one[1], other[1]} == {"sum", "avg"} and (one[0], *one[2:]) == (other[0], *other[2:])


def _said(key: Key) -> str:
    return f"{key[0].split('::')[-1]}({', '.join(filter(None, (key[1], key[3], f'group {key[2]}')))})"


def _fail(node: fx.Node, what: str) -> NoReturn:
    raise VerifyError(what, node=format_node(node), location=node_meta(node).location)
