"""No fake tensor of a trace may survive it outside of our records.

User code that runs while it is traced may keep what it computes: in a cache of its class, of a module, of
`functools.lru_cache`. A replay would not fill that cache, and eager would find a tensor without data in it for the rest
of the process. After each trace:

    captured     the reference count of each fake is compared with our records (nodes of the graph, inputs). A higher
                 one means that something else holds the fake: search for the holder
    failed       the exception holds frames, and those hold fakes: search if an object with a fake in it that was made
                 in the trace has more references than other objects made in the trace explain
    search       objects made in the trace are in Python's youngest generation, because the collector is paused. An
                 older list, dict, object, cell or cache that refers to a young object with a fake in it is the holder
    found        entries of `lru_cache`s are removed without an error. From any other holder the entry is removed too,
                 and the step is refused with the name of the holder
"""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from wholestep.capture.results.global_state import GlobalState, Leftover, attributes_of
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import Location, SideEffectError
from wholestep.ir.meta import node_meta
from wholestep.ir.user_objects.plain_contents import PLAIN
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import FakeTensor, FakeTensorMode, held_by_torch

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture
    from wholestep.ir.step_graph import StepGraph

Fakes = list[tuple[weakref.ref[Tensor], fx.Node]]
"""The fakes of a trace with their nodes."""

_LRU_CACHE = type(functools.lru_cache(len))
_DEPTH = 6
_MOST = 10_000


class Leftovers:
    """Created before a trace; finds and removes what the trace left behind."""

    def __init__(self) -> None:
        gc.collect(0)  # what is young afterwards was made by the trace
        self._globals = GlobalState()
        self._collections = _collections()
        self._made: set[int] | None = None
        self.cleared: list[Any] = []
        """The `lru_cache`s that were emptied."""

    def clean_up(self, capture: Capture) -> None:
        """After a trace that failed: remove what it left, without an error beside the one that is raised."""
        traced = _Traced(capture.fake_mode)
        self._globals.put_back(traced.identities)
        self._clear_users_caches(traced)
        self._clear_called_caches(traced, capture)
        if self._collections != _collections() or _held_by_older_objects(traced):
            self._clear_caches(traced)
            for holder, child in self._edges(traced):
                _take_out(holder, child)

    def refuse(self, capture: Capture, step_graph: StepGraph, fakes: Fakes, context: Context) -> None:
        """After a trace: remove what survives, and refuse the step if that was more than `lru_cache` entries."""
        traced = _Traced(capture.fake_mode)
        lines = {id(fake()): node_meta(node).location for fake, node in fakes}
        found = self._globals.put_back(traced.identities, context)
        _release_weakly_held(capture, step_graph, fakes)
        found += self._clear_called_caches(traced, capture)
        records = _records(capture, step_graph)

        def some_survive() -> bool:
            return _some_survive(fakes, records) or any(number() is not None for number in capture.scalars.given)

        if some_survive():
            self._clear_users_caches(traced)
        if some_survive():
            self._collect()  # recomputation (checkpoint) leaves cycles
        if some_survive():
            found += self._search(traced, some_survive)
        capture.erased.clear()  # not before: the counts include what these hold
        if found:
            raise _refusal(found, lines)

    def _clear_users_caches(self, traced: _Traced) -> None:
        for cache in self._globals.caches:
            self._clear(cache, traced)

    def _clear_called_caches(self, traced: _Traced, capture: Capture) -> list[Leftover]:
        """A number in a cache came from one that changes: eager would use it again where a replay computes another."""
        found = []
        for cache, path, before in capture.world.sources.lru_caches.values():
            if cache.cache_info() != before:
                if any(isinstance(held, _SYMBOLS) for held in gc.get_referents(cache)):
                    found.append(Leftover(f"the cache of {path}", ()))
                self._clear(cache, traced)
        return found

    def _clear(self, cache: Any, traced: _Traced) -> None:
        if _cache_holds(cache, traced):
            cache.cache_clear()
            self.cleared.append(cache)

    def _search(self, traced: _Traced, still: Callable[[], bool]) -> list[Leftover]:
        with _nothing_frozen():
            self._clear_caches(traced)
            if not still():
                return []
            found = []
            for holder, child in list(self._edges(traced)):
                where = _place(holder, child)
                _take_out(holder, child)
                found.append(Leftover(where, traced.identities(child)))
            return found

    def _clear_caches(self, traced: _Traced) -> None:
        young = self._young()
        for cache in [each for each in gc.get_objects() if type(each) is _LRU_CACHE]:
            if young is not None and young.isdisjoint(map(id, gc.get_referents(cache))):
                continue  # nothing was added
            self._clear(cache, traced)

    def _collect(self) -> None:
        self._made = self._young()
        gc.collect(0)
        self._collections = _collections()

    def _young(self) -> set[int] | None:
        """What was made in the trace; None if another thread collected garbage meanwhile, which makes all older."""
        if self._collections != _collections():
            return None
        if self._made is not None:
            return self._made
        return set(map(id, gc.get_objects(generation=0)))

    def _edges(self, traced: _Traced) -> Iterator[tuple[Any, Any]]:
        """Older objects that refer to one made in the trace with a traced value in it."""
        young = self._young()
        if young is None:
            return
        for objects in (gc.get_objects(generation=1), gc.get_objects(generation=2), _module_dicts()):
            kinds = {kind for kind in set(map(type, objects)) if _may_hold(kind)}
            for chunk in _chunks([each for each in objects if type(each) in kinds]):
                if young.isdisjoint(map(id, gc.get_referents(*chunk))):
                    continue
                for holder in chunk:
                    if id(holder) in young:
                        continue
                    for child in gc.get_referents(holder):
                        if id(child) in young and traced.in_value(child):
                            yield from _within(holder, child, traced)


def _held_by_older_objects(traced: _Traced) -> bool:
    """Whether something beside the objects made in the trace refers to one of them that has a traced value in it.

    A search of the older objects takes a second in a large process; this looks at the young ones only.
    """
    young = gc.get_objects(generation=0)
    among_themselves = Counter(map(id, gc.get_referents(*young)))
    counts = list(map(sys.getrefcount, young))
    for i, held in enumerate(young):
        others = counts[i] - _COUNTED_HERE - among_themselves[id(held)]
        if others > 0 and isinstance(held, Tensor):
            others -= held_by_torch(held)
        if others > 0 and (traced.in_value(held) or (type(held) is _LRU_CACHE and _cache_holds(held, traced))):
            return True
    return False


_COUNTED_HERE = next(map(sys.getrefcount, [[]]))
"""The references to an object that is counted in a list."""


def _within(holder: Any, child: Any, traced: _Traced) -> Iterator[tuple[Any, Any]]:
    """The edge itself, or those in a dict that it leads to.

    The collector does not track a dict of plain values, such as an empty one. With the first tensor in it the collector
    begins to track it, as a young object.
    """
    if type(child) not in (dict, defaultdict, OrderedDict):
        yield holder, child
        return
    for key, value in list(child.items()):
        if traced.in_value(value):
            yield from _within(child, value, traced)
        elif traced.in_value(key):
            yield child, key


class _Traced:
    """Recognises the values of one trace."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._searched: dict[int, tuple[Any, int]] = {}
        """Objects without a traced value in them, and how deep they were: large ones are met often."""

    def is_one(self, value: Any) -> bool:
        """Whether a value is a fake tensor of the trace, or one of its symbolic scalars."""
        if type(value) is FakeTensor:
            return value.fake_mode is self._mode
        return issubclass(type(value), _SYMBOLS) and scalar_of(value) is not None

    def in_value(self, value: Any) -> bool:
        """Whether a traced value is, or lies in, this one."""
        return self._holds(value, 0)

    def _holds(self, value: Any, depth: int) -> bool:
        if self.is_one(value):
            return True
        parts = self._parts(value, depth)
        if not parts:
            return False
        searched = self._searched.get(id(value))
        if searched is not None and searched[1] <= depth:
            return False
        if any(self._holds(each, depth + 1) for each in parts):
            return True
        self._searched[id(value)] = (value, depth)
        return False

    def identities(self, value: Any) -> tuple[int, ...]:
        """The traced values in this one."""
        return tuple(self._found(value, 0))

    def _found(self, value: Any, depth: int) -> Iterator[int]:
        if self.is_one(value):
            yield id(value)
            return
        for each in self._parts(value, depth):
            yield from self._found(each, depth + 1)

    def _parts(self, value: Any, depth: int) -> list[Any]:
        kind = type(value)
        if depth > _DEPTH or issubclass(kind, _NOTHING_INSIDE):
            return []
        return list(vars(value).values() if issubclass(kind, Tensor) else _parts(value))


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NOTHING_INSIDE = (*PLAIN, ModuleType, type, CodeType, FrameType, torch.nn.Module, fx.Graph, fx.Node, FakeTensorMode)


def _parts(value: Any) -> Iterable[Any]:
    """What a value consists of, as far as user code would put tensors there."""
    kind = type(value)
    if kind is dict or issubclass(kind, dict):
        return () if len(value) > _MOST else (*dict.keys(value), *dict.values(value))
    if issubclass(kind, list | tuple | set | frozenset) or kind.__name__ == "deque":
        return () if len(value) > _MOST else value
    if kind is CellType:
        return _contents(value)
    if kind is FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*defaults, *(c for cell in value.__closure__ or () for c in _contents(cell)), *vars(value).values())
    if kind is MethodType:
        return (value.__self__,)
    if kind is functools.partial:
        return (*value.args, *value.keywords.values())
    if _is_ours(kind):
        return ()
    attributes = attributes_of(value)
    return () if attributes is None else attributes.values()


def _is_ours(kind: type) -> bool:
    module: Any = kind.__module__  # some classes have a property there
    return isinstance(module, str) and module.partition(".")[0] == "wholestep"


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _release_weakly_held(capture: Capture, step_graph: StepGraph, fakes: Fakes) -> None:
    """Replace fakes in our records by aliases where something else holds weak references to them.

    A weak cache then drops them, as it would drop the tensors of an eager call.
    """
    aliases: dict[int, Tensor] = {}
    for reference, _ in fakes:
        fake = reference()
        if type(fake) is FakeTensor and weakref.getweakrefcount(fake) > 1:
            aliases[id(fake)] = fake.detach().requires_grad_(fake.requires_grad)
    fake = None
    if not aliases:
        return
    for node in (*step_graph.gm.graph.nodes, *capture.erased):
        val = node.meta.get("val")
        if isinstance(val, Tensor):
            node.meta["val"] = aliases.get(id(val), val)
        elif isinstance(val, list | tuple):
            node.meta["val"] = type(val)(aliases.get(id(each), each) for each in val)
    for tracked in capture.table.tracked.values():
        tracked.fake = aliases.get(id(tracked.fake), tracked.fake)


def _records(capture: Capture, step_graph: StepGraph) -> Counter[int]:
    """How many references to each fake are ours."""
    counts: Counter[int] = Counter()
    nodes = {id(n): n for n in step_graph.gm.graph.nodes} | {id(n): n for n in capture.erased}
    for node in nodes.values():
        _count(node.meta.get("val"), counts)
    whole: dict[int, Tensor] = {}
    for tracked in capture.table.tracked.values():
        counts[id(tracked.fake)] += 1
        whole |= {id(each): each for each in (tracked.fake, tracked.fake.grad) if each is not None}
    for each in whole.values():
        if local_of(each) is not each:
            counts[id(local_of(each))] += 1
    return counts


def _count(value: Any, counts: Counter[int]) -> None:
    if isinstance(value, Tensor):
        counts[id(value)] += 1
    elif isinstance(value, list | tuple):
        for item in value:
            _count(item, counts)


def _some_survive(fakes: Fakes, records: Counter[int]) -> bool:
    """Whether a fake has more references than our records explain."""
    for reference, _ in fakes:
        fake = reference()
        # The variable and the argument are two.
        if fake is not None and sys.getrefcount(fake) - 2 - held_by_torch(fake) > records[id(fake)]:
            return True
    return False


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


@contextmanager
def _nothing_frozen() -> Iterator[None]:
    """`gc.freeze()` hides objects from a search."""
    if not gc.get_freeze_count():
        yield
        return
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()


def _module_dicts() -> list[Any]:
    """The globals of all modules, where the collector does not show them because they are frozen."""
    if not gc.get_freeze_count():
        return []
    return [vars(module) for module in list(sys.modules.values()) if type(module) is ModuleType]


def _chunks(objects: list[Any], size: int = 500) -> Iterator[list[Any]]:
    for start in range(0, len(objects), size):
        yield objects[start : start + size]


_IMMUTABLE = frozenset(
    {tuple, frozenset, FunctionType, type, CodeType, FrameType, ModuleType, property, staticmethod, classmethod}
    | {type(len), type(str.join), type(list.__add__), type(int.real)}
)


def _may_hold(kind: type) -> bool:
    """Whether user code may store a reference to a newer object in objects of a type."""
    return kind not in _IMMUTABLE and not _is_ours(kind) and not issubclass(kind, Tensor)


def _cache_holds(cache: Any, traced: _Traced) -> bool:
    """Whether an `lru_cache` has a traced value among its keys or results."""
    own = (vars(cache), cache.__wrapped__)
    return any(traced.in_value(part) for part in gc.get_referents(cache) if not any(part is each for each in own))


def _take_out(holder: Any, child: Any) -> None:
    """Remove every reference from a holder to an object."""
    if isinstance(holder, dict):
        owner = _owner(holder)
        for key in [k for k, v in dict.items(holder) if v is child or k is child]:
            _unset(holder, key, owner)
    elif isinstance(holder, list):
        holder[:] = [item for item in holder if item is not child]
    elif isinstance(holder, set):
        holder.discard(child)
    elif type(holder).__name__ == "deque":
        kept = [item for item in holder if item is not child]
        holder.clear()
        holder.extend(kept)
    elif type(holder) is CellType:
        holder.cell_contents = None
    elif type(holder) is _LRU_CACHE:
        holder.cache_clear()
    elif (attributes := attributes_of(holder)) is not None:
        for name in [n for n, v in attributes.items() if v is child]:
            _unset(attributes, name, holder)


def _unset(mapping: dict[Any, Any], key: Any, owner: Any) -> None:
    """Delete an entry, or set an attribute to None whose class sets it from the beginning."""
    if isinstance(owner, type):
        setattr(owner, key, None)
    elif owner is not None and isinstance(key, str) and key in _set_by_init(type(owner)):
        mapping[key] = None
    else:
        del mapping[key]


def _set_by_init(cls: type) -> set[str]:
    codes = (getattr(vars(base).get("__init__"), "__code__", None) for base in cls.__mro__)
    return {name for code in codes if code is not None for name in code.co_names}


def _owner(mapping: dict[Any, Any]) -> Any:
    """The object, class or module whose attributes are in a dict."""
    for referrer in gc.get_referrers(mapping):
        if isinstance(referrer, type | ModuleType) or attributes_of(referrer) is mapping:
            return referrer
    return None


def _place(holder: Any, child: Any) -> str:
    """The name of the holder, as far as one can be found by going from holder to holder."""
    steps: list[str] = []
    young = set(map(id, gc.get_objects(generation=0)))  # among them our own lists and copies
    for _ in range(_DEPTH):
        name, last = _named(holder, child)
        steps.append(name)
        if last:
            break
        referrers = [r for r in gc.get_referrers(holder) if id(r) not in young and _may_name(r)]
        if not referrers:
            break
        holder, child = next((r for r in referrers if _named(r, holder)[1]), referrers[0]), holder
    return "".join(reversed(steps))


def _may_name(value: Any) -> bool:
    kind = type(value)
    return not _is_ours(kind) and kind not in (FrameType, GeneratorType) and not kind.__name__.endswith("_iterator")


def _named(holder: Any, child: Any) -> tuple[str, bool]:
    """How a holder leads to an object, and whether the name begins here."""
    if isinstance(holder, dict):
        key = next((k for k, v in dict.items(holder) if v is child), child)
        owner = _owner(holder)
        if isinstance(owner, ModuleType):
            return f"{owner.__name__}.{key}", True
        if isinstance(owner, type):
            return f"{owner.__module__}.{owner.__qualname__}.{key}", True
        if owner is not None:
            return f"the attribute {key} of a {type(owner).__qualname__}", True
        return f"[{key!r}]" if isinstance(key, (*PLAIN, tuple)) and not isinstance(key, Tensor) else "[..]", False
    if isinstance(holder, type):
        name = next((n for n, v in vars(holder).items() if v is child), "..")
        return f"{holder.__module__}.{holder.__qualname__}.{name}", True
    if isinstance(holder, FunctionType):
        return f"a default argument or variable of {holder.__module__}.{holder.__qualname__}", True
    if isinstance(holder, list | tuple) or type(holder).__name__ == "deque":
        index = next((i for i, item in enumerate(holder) if item is child), "..")
        return f"[{index}]", False
    if isinstance(holder, GeneratorType):
        return f"the generator {holder.__qualname__}", True
    attributes = attributes_of(holder)
    if attributes is not None and not isinstance(holder, ModuleType):
        name = next((n for n, v in attributes.items() if v is child), "..")
        return f"the attribute {name} of a {type(holder).__qualname__}", True
    return ("" if type(holder) is CellType else f"a {type(holder).__qualname__}"), False


def _refusal(found: list[Leftover], lines: dict[int, Location | None]) -> SideEffectError:
    places = list(dict.fromkeys(each.where for each in found))
    more = f" (and in {len(places) - 1} more places)" if len(places) > 1 else ""
    return SideEffectError(
        f"the step keeps a tensor or number that it computed in {places[0]}{more}, which a replay would not repeat.",
        fix="compute it before the step (then the step only reads it), keep it as a buffer or attribute of a module "
        "that the step is given, or return it from the step. The entry was removed.",
        location=_made_at(found, lines),
    )


def _made_at(found: list[Leftover], lines: dict[int, Location | None]) -> Location | None:
    """The line that computed one of the tensors."""
    for each in found:
        for identity in each.tensors:
            location = lines.get(identity)
            if location is not None:
                return replace(location, text=linecache.getline(location.file, location.line).strip())
    return None
