"""`cache=` of `ws.compile`: before a step is traced, a graph of an earlier process is looked up and bound.

    stored = StoredGraphs.of(call, options)      those under the key of the call: a hash of what decides its graph
    stored.find(call, options, shared)           one that fits: bound, checked by facts and guards, lowered
    stored.add(name, fn, entry)                  after a capture

A hit traces nothing. Anything uncertain is a miss; the reason is in the log `wholestep.cache`.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from wholestep.artefact.addresses import class_name
from wholestep.artefact.assumed_objects import structure_text, tensor_text, text_of
from wholestep.artefact.code_table import digest
from wholestep.artefact.disk_cache import DiskCache
from wholestep.artefact.file_format import versions
from wholestep.artefact.saved_graph import Code, OtherObjectsError, SavedGraph
from wholestep.errors import ArtefactError, WholestepError
from wholestep.options import Options, cache_folder, cache_limit
from wholestep.step import (
    Executable,
    ResolvedOptions,
    Shared,
    StepCall,
    bound_graph,
    compile_step,
    within_budget,
)

log = logging.getLogger("wholestep.cache")

_WITHOUT_EFFECT = frozenset({"cache", "progress", "name", "max_recompiles", "verify", "on_refusal", "given", "passes"})
"""Options that do not change the graph. (`passes` counts by what it became.)"""


@dataclass(frozen=True)
class StoredGraphs:
    """The graphs of earlier processes under the key of a call."""

    cache: DiskCache | None
    key: str = ""

    @classmethod
    def of(cls, call: StepCall, options: ResolvedOptions) -> StoredGraphs:
        """Those for a call; none where the step is not cached."""
        folder = cache_folder(options.cache)
        if folder is None:
            return cls(None)
        why = _why_not(options)
        if why:
            log.info("not used: %s", why)
            return cls(None)
        try:
            return cls(DiskCache(folder, cache_limit()), _key_of(call, options))
        except Exception as error:  # a class of the user's may raise anything where its objects are read
            log.warning("not used: the objects of the step cannot be read (%s: %s)", type(error).__name__, error)
            return cls(None)

    def find(self, call: StepCall, options: ResolvedOptions, shared: Shared) -> Executable | None:
        """An executable of a graph that fits a call; None if there is none, with the reason in the log."""
        reasons: list[str] = []
        for saved in () if self.cache is None else self.cache.find(self.key):
            try:
                graph = bound_graph(saved, call, call.fn)
                state = graph.gather.read(call.leaves)
                if state is None or not graph.guards.hold(call.leaves, call.structure, state):
                    reasons.append(graph.guards.why_not(call.leaves, call.structure, state))
                    continue
                entry = compile_step(graph, within_budget(graph, options), shared)
                entry.facts = saved.facts
                log.info("hit: %d nodes bound without a trace", graph.num_nodes)
                return entry
            except OtherObjectsError as error:
                reasons.append("; ".join(error.reasons[:3]))
            except WholestepError as error:
                reasons.append(error.what)
        if self.cache is not None:
            log.info("miss: %s", "; ".join(reasons[:3]) if reasons else "no graph for this code and these options")
        return None

    def add(self, name: str, fn: Callable[..., Any], entry: Executable) -> None:
        """Store the graph of a capture; one that has no form in a file is left out."""
        if self.cache is None or entry.facts is None:
            return
        try:
            self.cache.store(self.key, name, SavedGraph.of(entry.captured, fn, entry.facts))
        except ArtefactError as error:
            log.info("%s is not stored: %s", name, error.what)


def _key_of(call: StepCall, options: ResolvedOptions) -> str:
    """A hash of all that decides the graph of a call and is known before it is looked up."""
    given = {i: leaf for i, leaf in enumerate(call.leaves) if not isinstance(leaf, Tensor)}
    functions = [bound.graph_pass for bound in options.passes]
    code = Code.of_step(call.fn, given, *functions, options.policy).table
    leaves = [tensor_text(leaf) if isinstance(leaf, Tensor) else class_name(leaf) for leaf in call.leaves]
    parts = (repr(sorted(code.items())), repr(leaves), structure_text(call.structure), _options_text(options))
    return digest(*parts, repr(sorted(versions().items())), _devices())


def _why_not(options: ResolvedOptions) -> str:
    if options.parallel is not None:
        return "the step has a plan for several ranks"
    if options.check_first or options.dump_passes is not None or options.lower == "debug":
        return 'check_first=, dump_passes= and lower="debug" want to see each stage'
    return ""


def _options_text(options: ResolvedOptions) -> str:
    found = {f.name: getattr(options, f.name) for f in fields(Options) if f.name not in _WITHOUT_EFFECT}
    policy = found.pop("policy")
    passes = [f"{each.name} {text_of(dict(each.options or {}))}" for each in options.passes]
    shown = policy if not callable(policy) else class_name(policy)
    return f"{sorted((name, repr(value)) for name, value in found.items())} {shown!r} {passes}"


def _devices() -> str:
    """What kernels are chosen and compiled for."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()} {names}"
