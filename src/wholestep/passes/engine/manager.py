"""Run passes on a graph: order is checked before, everything else after each one, and a failed pass is rolled back.

After a pass: dead code is removed (never a live wait), new nodes get metadata, the signature follows renamed
write-backs, and the verifier checks the result. If anything is wrong the graph is restored to what it was before.

`ModuleState`: what a graph module holds besides its graph (parameters, buffers, modules, plain attributes).

A pass may return another module, whose graph reads constants of its own, or set attributes and then fail.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress, filterfalse, repeat
from operator import attrgetter, is_, is_not, not_
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassResult

from wholestep.errors import IterMoveError, OptionError, PassError, PassOrderError, VerifyError, WholestepError, called
from wholestep.ir.effects import is_needed
from wholestep.ir.graph_walks import collector_paused, erase_unread
from wholestep.ir.iter.graph import IterGraph, single_graph
from wholestep.ir.iter.graph_module import IterGraphModule
from wholestep.ir.meta import NodeMeta, node_meta, set_node_meta
from wholestep.ir.propagate_metadata import fill_values, has_same_layout
from wholestep.ir.signature import Signature, WriteBack
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.verify import complain_about, verify, verify_bare
from wholestep.passes.engine.contract import (
    BoundPass,
    GraphPass,
    Promises,
    applied_contracts,
    check_normal_form,
    check_order,
    note_applied,
)
from wholestep.passes.engine.dump import PassDump, current_dump
from wholestep.passes.engine.record import note_changed, note_unchanged
from wholestep.passes.engine.replay import Replay
from wholestep.passes.engine.torch_functions import replace_torch_functions
from wholestep.progress import SILENT, Progress
from wholestep.torch_private.fx_graphs import NodeParts, NodeTable, codegen_of

log = logging.getLogger("wholestep.passes")

_COPY = torch.ops.aten.copy_.default
_ABSENT = object()
_KEPT = ("val", "wholestep")
"""Metadata that a pass may write and a rollback restores."""


def is_graph(value: Any) -> bool:
    """Whether a pass runs on a value at once."""
    return isinstance(value, fx.GraphModule | StepGraph | IterGraphModule)


def run_passes(
    step_graph: StepGraph | fx.GraphModule,
    passes: str | Iterable[GraphPass | BoundPass | str],
    *,
    level: int = 1,
    dump: PassDump | None = None,
    progress: Progress = SILENT,
) -> None:
    """Run passes in order on a StepGraph or a graph module, each verified at a level. Names and "default" are fine."""
    from wholestep.passes.engine.registry import resolve  # it imports our passes, which import this module

    if not isinstance(step_graph, StepGraph | fx.GraphModule | IterGraphModule):
        raise OptionError(
            f"run_passes got {called(step_graph)}.",
            fix="give a graph: run_passes(ws.capture(train_step, batch), passes); a compiled step runs passes=.",
        )
    dump = current_dump() if dump is None else dump
    saved: _Saved | None = None
    found = resolve(passes)
    for number, bound in enumerate(found):
        text = f"pass {number + 1} of {len(found)}, {bound.name}"
        progress.stage("passes", partial(str, text), partial(float, number / len(found)))
        bound.check()
        own = level if bound.verify is None else bound.verify
        application = _Application(bound.graph_pass, step_graph, own, dump, saved)
        application.run(bound.args, bound.options or {}, bound.allow_rerun)
        saved = application.still_true


def apply_pass(
    graph_pass: GraphPass,
    graph: Any,
    args: Sequence[Any],
    options: dict[str, Any],
    *,
    allow_rerun: bool = False,
    level: int = 1,
    dump: PassDump | None = None,
) -> Any:
    """Run one pass on a StepGraph, a bare graph module or an IterGraphModule; returns what it returns."""
    application = _Application(graph_pass, graph, level, current_dump() if dump is None else dump)
    return application.run(args, options, allow_rerun)


def _graph_of(result: Any, step_graph: StepGraph | None) -> Any:
    """The graph that a pass returned, if any; other results, which would be ignored, are refused."""
    if isinstance(result, PassResult):
        result = result.graph_module
    if isinstance(result, fx.GraphModule | IterGraphModule) or result is step_graph:
        return result
    if isinstance(result, fx.Graph | nn.Module | StepGraph):
        raise VerifyError(
            f"the pass returned {called(result)}, which nothing would use.",
            fix="edit the graph that the pass is given and return None, or return a GraphModule or IterGraphModule.",
        )
    return result


class _Application:
    def __init__(
        self, graph_pass: GraphPass, graph: Any, level: int, dump: PassDump | None, saved: _Saved | None = None
    ) -> None:
        self._pass = graph_pass
        self._step_graph = graph if isinstance(graph, StepGraph) else None
        self._given = graph.gm if isinstance(graph, StepGraph) else graph
        self._iterates = isinstance(graph, IterGraphModule)
        main: Any = self._given.main_gm if self._iterates else self._given
        self._gm: fx.GraphModule = main
        self._level = level
        self._dump = dump
        self.still_true = saved
        """The current graph, if it is known: from before the pass, and after it if the pass changed nothing."""

    def run(self, args: Sequence[Any], options: dict[str, Any], allow_rerun: bool) -> Any:
        with collector_paused():
            return self._run(args, options, allow_rerun)

    def _run(self, args: Sequence[Any], options: dict[str, Any], allow_rerun: bool) -> Any:
        name, gm, numerics = self._pass.name, self._gm, self._pass.numerics_with(args, options)
        check_order(self._pass.contract, applied_contracts(gm), allow_rerun=allow_rerun)
        if self._step_graph is not None:
            check_normal_form(self._pass.contract)
        if self._is_about_nothing():
            note_applied(gm, self._pass.contract)
            note_unchanged(gm, name, str(numerics), self._level)
            if self.still_true is not None:
                self.still_true.follow_meta()
            return None
        started = time.perf_counter()
        saved = self.still_true or _Saved(gm, self._step_graph)
        replay = None
        if self._level >= 3 and numerics != "changes":
            replay = Replay(self._whole(), name, numerics=numerics)
        returned = False
        try:
            result = self._pass.function(self._given, *args, **options)
            returned = True
            result = self._adopted(_graph_of(result, self._step_graph))
            self.still_true = saved if saved.is_current() else None
            if self.still_true is None or self._level >= 2:
                self.still_true = None
                try:
                    changes = self._tidy(gm, saved)
                    if self._level >= 1 and not self._iterates:
                        saved.promises.check(gm, numerics, changes.rewired)
                    self._check(changes.affected() if self._level == 1 else ())
                except IterMoveError as error:  # a fault of the pass, not of its arguments
                    raise VerifyError(error.what, fix=error.fix, node=error.node, location=error.location) from error
            if replay is not None:
                replay.compare(self._whole(), numerics)
        except Exception as error:
            if self._dump is not None:
                self._dump.write_failure(name, saved.graph_module(), gm, self._signature(), error)
            saved.restore()
            if self._iterates:
                self._given.recompile()
            if isinstance(error, VerifyError) and self._step_graph is None:
                self._check_before(error)
            if isinstance(error, IterMoveError | OptionError | PassError | PassOrderError):
                raise  # bad arguments, an unsuitable graph, or a nested pass: raised as it is
            if returned and isinstance(error, WholestepError):
                raise self._broken(error) from None  # all that the author of the pass needs is in it
            raise self._raised(error) from error
        seconds = time.perf_counter() - started
        note_applied(gm, self._pass.contract)
        if self.still_true is not None:
            note_unchanged(gm, name, str(numerics), self._level, seconds)
            self.still_true.follow_meta()
        else:
            note_changed(gm, name, str(numerics), self._level, seconds, saved.table)
        log.info("%s: %d nodes, %.3f s", name, len(gm.graph.nodes), seconds)
        if self._dump is not None:
            self._dump.write(name, saved.graph_module(), gm, self._signature(), seconds)
        return result

    def _adopted(self, result: Any) -> Any:
        """Adopt the graph that a pass returned, if it is another one; moves of an IterGraphModule become marks."""
        gm = self._gm
        if not isinstance(result, fx.GraphModule | IterGraphModule) or result is gm or result is self._given:
            return result
        if self._iterates:
            raise VerifyError("the pass returned another graph module.", fix="edit an IterGraphModule itself.")
        made = result.marked() if isinstance(result, IterGraphModule) else result
        adopt(gm, made)
        gm.graph = made.graph
        if made is result:
            return gm
        gm.meta.update(made.meta)
        return result

    def _is_about_nothing(self) -> bool:
        """Whether the graph has none of the operators that the pass works on (torch.fx keeps an index of them)."""
        about, graph = self._pass.contract.only_for, self._gm.graph
        if not about or self._iterates or self._dump is not None or self._level >= 2:
            return False
        return not any(graph.find_nodes(op="call_function", target=op, sort=False) for op in about)

    def _tidy(self, gm: fx.GraphModule, saved: _Saved) -> _Changes:
        """Remove dead code and complete the metadata of nodes; returns what the pass changed."""
        if isinstance(gm.graph, IterGraph):
            gm.graph.lint()
            gm.graph.eliminate_dead_code(is_needed)
        else:
            drop_dead_code(gm.graph)
        if self._step_graph is not None:
            replace_torch_functions(gm)
        changes = saved.changes()
        changes.filled = fill_values(gm, functools.partial(complain_about, gm), changes.without("val"))
        _inherit_meta(changes.without("wholestep"))
        self._given.recompile()
        return changes

    def _whole(self) -> fx.GraphModule:
        """The graph of a whole iteration: of an IterGraphModule the graph without its moves."""
        graph = self._gm.graph
        return fx.GraphModule(self._gm, single_graph(graph)) if isinstance(graph, IterGraph) else self._gm

    def _signature(self) -> Signature | None:
        return None if self._step_graph is None else self._step_graph.signature

    def _check(self, changed: Collection[fx.Node]) -> None:
        if self._step_graph is not None:
            graph = self._step_graph
            graph.signature = _renamed_write_backs(graph)
            verify(graph, min(self._level, 2), changed)
            return
        if isinstance(self._gm.graph, IterGraph):
            self._gm.graph.check_moves()
        verify_bare(self._whole(), self._level, changed)

    def _check_before(self, error: VerifyError) -> None:
        """A graph from elsewhere may have been wrong before: then it is not the fault of the pass."""
        try:
            verify_bare(self._whole(), 2)
        except VerifyError as earlier:
            what = f"before {self._pass.name} ran, the graph broke a rule already: {earlier.what}"
            location = earlier.location
            raise VerifyError(
                what, fix=earlier.fix, node=earlier.node, location=location, around=earlier.around
            ) from error

    def _broken(self, error: WholestepError) -> PassError:
        """The error for the author of a pass about the graph that it left."""
        name = self._pass.name
        return PassError(
            f"{name} left a graph that breaks a rule: {error.what}",
            fix=f"this is a fault of the pass; leave it out ({name}) and report it. {error.fix}".strip(),
            node=error.node,
            location=error.location,
            around=error.around,
        )

    def _raised(self, error: Exception) -> PassError:
        name, what = self._pass.name, error.what if isinstance(error, WholestepError) else str(error)
        return PassError(
            f"{name} raised {type(error).__name__}: {what}",
            fix=f"this is a fault of the pass or of its options; the graph is as it was before {name}. The exception "
            "itself is the cause of this one (__cause__).",
            location=error.location if isinstance(error, WholestepError) else None,
        )


class _Saved:
    """A snapshot of a graph to restore: what each node was, in order. Nodes are recreated only if needed."""

    def __init__(self, gm: fx.GraphModule, step_graph: StepGraph | None) -> None:
        self._gm = gm
        self._meta = dict(gm.meta)
        self._step_graph = step_graph
        self._moved = gm.graph.moved if isinstance(gm.graph, IterGraph) else None
        self._codegen = codegen_of(gm.graph)
        """The codegen for pytrees, if `make_fx` made the graph."""
        self._signature = None if step_graph is None else step_graph.signature
        self._nodes: list[fx.Node] = list(gm.graph.nodes)
        self.table = NodeTable(self._nodes)
        self._known = [list(each) for each in _known(self._nodes)]
        self._attributes = ModuleState(gm)
        self.promises = Promises(gm.graph, self.table, self._signature)

    def follow_meta(self) -> None:
        """Take the record of applied passes on the graph module, which grew; all else is the same."""
        self._meta = dict(self._gm.meta)

    def graph_module(self) -> fx.GraphModule:
        return fx.GraphModule(self._gm, self._graph())

    def is_current(self) -> bool:
        """Whether nothing was changed: the same nodes in the same order with the same arguments and metadata."""
        nodes: list[fx.Node] = list(self._gm.graph.nodes)
        if nodes != self._nodes:
            return False
        same_known = (map(is_, now, before) for now, before in zip(_known(nodes), self._known, strict=True))
        return self.table.is_current() and all(map(all, same_known))

    def changes(self) -> _Changes:
        """The differences from the snapshot."""
        return _Changes(list(self._gm.graph.nodes), self.table, self._known)

    def _graph(self) -> fx.Graph:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node, parts, *known_values in zip(self._nodes, self.table, *self._known, strict=True):
            op, target, args, kwargs, name, kind = parts
            new_args, new_kwargs = fx.map_arg((args, kwargs), made.__getitem__)
            new = graph.create_node(op, target, new_args, new_kwargs, name, kind)
            known = {k: value for k, value in zip(_KEPT, known_values, strict=True) if value is not _ABSENT}
            other = {key: value for key, value in node.meta.items() if key not in _KEPT}
            new.name, new.meta = name, {**other, **known}
            made[node] = new
        graph.set_codegen(self._codegen)
        return graph if self._moved is None else IterGraph.of_copies(graph, self._moved, made)

    def restore(self) -> None:
        self._attributes.restore()
        self._gm.graph = self._graph()
        self._gm.meta = self._meta
        if self._step_graph is not None and self._signature is not None:
            self._step_graph.signature = self._signature


class _Changes:
    """The changes that a pass made to a graph: new and changed nodes, found without Python code for the others."""

    def __init__(self, nodes: list[fx.Node], table: NodeTable, known: list[list[Any]]) -> None:
        self._table = table
        self._nodes = nodes
        self._stay = set(nodes)
        self._new = list(filterfalse(table.place.__contains__, nodes))
        self._was = known
        self._is = [list(each) for each in _known(table.nodes)]
        self.filled: list[fx.Node] = []
        """Nodes whose `val` was computed after the pass, and is therefore right."""

    def without(self, key: str) -> list[fx.Node]:
        """The nodes that have no metadata of a key, in order."""
        lacking = compress(self._table.nodes, map(is_, self._is[_KEPT.index(key)], repeat(_ABSENT)))
        found = {node for node in lacking if node in self._stay}
        found.update(node for node in self._new if key not in node.meta)
        return [node for node in self._nodes if node in found] if found else []

    @cached_property
    def rewired(self) -> list[fx.Node]:
        """Old nodes with another target or other arguments."""
        return [node for node in self._table.changed() if node in self._stay]

    def affected(self) -> list[fx.Node]:
        """The nodes whose metadata may be out of date: new, with other arguments or `val`, or reading such nodes."""
        found = dict.fromkeys(self._new)
        found.update((node, None) for node in self.rewired if not _reads_alike(node, self._table.parts(node)))
        for node in compress(self._table.nodes, map(is_not, self._is[0], self._was[0])):
            if node in self._stay:
                found.update(dict.fromkeys((node, *node.users)))
        for node in self.filled:
            found.pop(node, None)
        return list(found)


def _reads_alike(node: fx.Node, was: NodeParts) -> bool:
    """True if a node differs only in arguments that were replaced by nodes with equal metadata."""
    args = node.args
    if node.target is not was.target or len(args) != len(was.args) or node.kwargs != was.kwargs:
        return False
    return all(now is old or _says_the_same(now, old) for now, old in zip(args, was.args, strict=True))


def _says_the_same(now: Any, old: Any) -> bool:
    if isinstance(now, fx.Node) and isinstance(old, fx.Node):
        return now is old or has_same_layout(now.meta.get("val"), old.meta.get("val"))
    if isinstance(now, list | tuple) and isinstance(old, list | tuple):
        return len(now) == len(old) and all(map(_says_the_same, now, old))
    return type(now) is type(old) and bool(now == old)


def _known(nodes: list[fx.Node]) -> list[Iterable[Any]]:
    """The metadata of nodes, key by key. No Python code runs per node."""
    metas = list(map(attrgetter("meta"), nodes))
    return [map(dict.get, metas, repeat(key), repeat(_ABSENT)) for key in _KEPT]


def drop_dead_code(graph: fx.Graph) -> None:
    """Erase nodes that nothing uses and that have no effect."""
    nodes = list(graph.nodes)
    unused = list(compress(nodes, map(not_, map(attrgetter("users"), nodes))))
    erase_unread(graph, unused, lambda node: not is_needed(node))


def _renamed_write_backs(graph: StepGraph) -> Signature:
    """The signature with the new names of the values that the `copy_` nodes write back."""
    found: list[WriteBack] = []
    for node in reversed(graph.gm.graph.nodes):
        if node.op == "output":
            continue
        target = node.args[0] if node.target is _COPY else None
        if not isinstance(target, fx.Node) or target.op != "placeholder":
            break
        found.append(WriteBack(target.name, str(node.args[1])))
    lost = {write.target for write in graph.signature.write_backs} - {write.target for write in found}
    if lost:
        return graph.signature  # the verifier names it
    return replace(graph.signature, write_backs=tuple(reversed(found)))


def _inherit_meta(nodes: Iterable[fx.Node]) -> None:
    """Give new nodes the module and line of the nodes that they are computed from."""
    for node in nodes:
        if node.op == "call_function":
            sources = [node_meta(source) for source in node.all_input_nodes if source.op != "placeholder"]
            set_node_meta(node, replace(sources[-1], in_place=None) if sources else NodeMeta())


_TABLES = ("_parameters", "_buffers", "_modules")
_OF_TORCH = frozenset({"_graph", "_code", "meta"})
"""Kept by the pass manager itself, or computed anew from the graph."""


class ModuleState:
    """Which objects a graph module had under which names. Their contents are not copied."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        held = vars(gm)
        self._tables: dict[str, dict[str, Any]] = {name: dict(held[name]) for name in _TABLES}
        self._plain = {name: value for name, value in held.items() if name not in _TABLES and name not in _OF_TORCH}

    def restore(self) -> None:
        """Restore the attributes of the module."""
        held = vars(self._gm)
        for name, content in self._tables.items():
            held[name].clear()
            held[name].update(content)
        for name in [name for name in held if name not in self._plain and name not in (*_TABLES, *_OF_TORCH)]:
            del held[name]
        held.update(self._plain)


def adopt(gm: fx.GraphModule, made: fx.GraphModule) -> None:
    """Copy to a graph module what the graph of another one reads: constants, buffers, modules."""
    for node in made.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            _set(gm, str(node.target).split("."), made)


def _set(into: nn.Module, path: list[str], source: Any) -> None:
    *outer, name = path
    for step in outer:
        source = getattr(source, step)
        if not isinstance(into._modules.get(step), nn.Module):
            into.add_module(step, nn.Module())
        into = into.get_submodule(step)
    value = getattr(source, name)
    if getattr(into, name, None) is value:
        return
    if hasattr(into, name):
        delattr(into, name)
    if isinstance(source, nn.Module) and name in source._buffers:
        into.register_buffer(name, value, persistent=name not in source._non_persistent_buffers_set)
    else:
        setattr(into, name, value)
