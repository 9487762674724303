"""What leaves capture, as frozen data: the graph of a step and how its inputs, state and results are found in the
user's objects (`CapturedStep`), what it assumed of these objects (`GuardSpecs`) and of sizes (`DynamicSizesSpec`).

`guards/` builds its checks from it, `runtime/` reads inputs and applies changes by it. Guard specs hold the user's
objects and the values that those had at capture, never the batch of that call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Protocol

import sympy
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from wholestep.errors import DynamicShapeError, OptionError
from wholestep.ir.deferred import DeferredNumber, DeferredSources, HostLeaf, ReplayedCall
from wholestep.ir.early_values import Recipe
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.slots import BatchSlot, GradSlot, ModuleSlot, Slot, in_users_objects
from wholestep.torch_private.symbolic_shapes import ShapeEnv, shape_guards

SizeCondition = tuple[str, Callable[[dict[str, int]], bool]]
"""A condition on the sizes of a call: its text, and its check by the names of symbols."""


@dataclass(frozen=True)
class Dim:
    """A dimension of a batch tensor that may differ from call to call, between `min` and `max` (both included)."""

    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if self.min < 1 or (self.max is not None and self.max < self.min):
            raise OptionError(f"Dim(min={self.min}, max={self.max}) is empty or below 1.", fix="use 1 <= min <= max.")


@dataclass(frozen=True)
class AutomaticDim(Dim):
    """A dimension that was found to vary. A size outside of it is not an error: such a call gets its own graph."""

    min: int = 2


@dataclass(frozen=True)
class AutomaticSizes:
    """`dynamic=` of a capture whose dimensions were found to vary: by batch leaf and dimension."""

    dims: Mapping[int, Mapping[int, Dim]]


@dataclass(frozen=True)
class DynamicSizesSpec:
    """The symbolic sizes of one captured graph."""

    dims: Mapping[int, Mapping[int, Dim]] = field(default_factory=dict)
    """By batch leaf and dimension, the declared range."""
    sources: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """By name of a symbol, the (batch leaf, dimension) places that have this size."""
    env: ShapeEnv | None = None
    """What torch assumed of the symbols. Lowering compares sizes as well and adds to it."""

    def assumed(self) -> list[SizeCondition]:
        """Conditions on the symbols that the trace, and what ran since, relied on."""
        if self.env is None:
            return []
        found: list[SizeCondition] = []
        for expression in shape_guards(self.env):
            free = sorted(expression.free_symbols, key=str)
            if free and not _only_excludes_one(expression):
                found.append((str(expression), _check_of(expression, free)))
        return found


def out_of_range(path: str, dim: int, size: int, declared: Dim) -> DynamicShapeError:
    """A call came with a size that the user excluded."""
    top = "any" if declared.max is None else declared.max
    return DynamicShapeError(
        f"{path} has size {size} in dimension {dim}, outside of the declared {declared.min} to {top}.",
        fix="declare a wider ws.Dim, or pad the batch.",
    )


def _only_excludes_one(expression: Any) -> bool:
    """`Ne(s0, 1)`: the trace assumed no broadcasting over a declared dim, which holds for size 1 too."""
    return isinstance(expression, sympy.Ne) and sympy.Integer(1) in expression.args


def _check_of(expression: Any, free: Sequence[Any]) -> Callable[[dict[str, int]], bool]:
    def check(sizes: dict[str, int]) -> bool:
        return bool(expression.subs({symbol: sizes[str(symbol)] for symbol in free}))

    return check


@dataclass(frozen=True)
class HostCall:
    """`scheduler.step()` inside of the step: Python that the runtime repeats after the graph."""

    scheduler: Any
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[HostLeaf] = field(default_factory=list)
    """Numbers that it leaves, which are read right after it."""


@dataclass(frozen=True, eq=False)
class Change:
    """A slot that is created, rebound, removed or set to a constant after the graph ran."""

    kind: ChangeKind
    slot: Slot
    output: int | None = None
    constant: Any = None
    unless: int | None = None
    deferred: DeferredNumber | None = None
    """What the slot takes, where that is known only after the graph ran."""
    after_calls: bool = False
    """The step set it after a `scheduler.step()`, which must still find what was there before."""

    @property
    def is_late(self) -> bool:
        """Whether it is made after the calls that follow the graph."""
        if self.after_calls:
            return True
        return self.deferred is not None and any(isinstance(leaf, HostLeaf) for leaf in self.deferred.leaves)


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """One captured call of a step."""

    step_graph: StepGraph
    inputs: Sequence[Slot]
    """One per placeholder."""
    changes: Sequence[Change]
    result_leaves: Sequence[tuple[str, Any]]
    """Leaves of the user's result: ("output", i), ("attached", i) for one that requires grad in
    eager, ("detached", i) for one that does not, ("value", object) or ("deferred", DeferredNumber)."""
    rebuild_result: Callable[[list[Any]], Any] | None
    """None where the result is a single leaf."""
    host_calls: Sequence[HostCall]
    stepped: Sequence[Optimizer]
    """Optimizers whose step() is in the graph."""
    guards: GuardSpecs
    deferred: DeferredSources = field(default_factory=DeferredSources)
    effects: Sequence[ReplayedCall] = ()
    """Calls of the step's Python that are made after each run, in its order."""
    items_taken: Mapping[int, fx.Node] = field(default_factory=dict)
    """Tensors whose values Python takes and which are known only when the graph runs, by the number of the item in the
    trace: for the comparison of two traces of one call."""
    compare_scalars: bool = False
    """Whether code that is not torch's may have told scalar inputs from plain numbers: a second trace has to agree."""
    clock_readings: tuple[Any, ...] = ()
    """What user code read from clocks: a second trace in which they are later has to agree."""
    seconds: float = 0.0

    @property
    def runs_once(self) -> bool:
        """Whether the graph makes optimizer state that is there in the next call, which then has its own graph."""
        made = (change for change in self.changes if change.kind is ChangeKind.CREATED)
        return any(change.slot.kind is InputKind.OPTIMIZER_STATE for change in made)

    def unread_gradients(self) -> list[Change]:
        """Changes of gradients that the graph does not read and that no condition can prevent."""
        read = {id(slot.param) for slot in map(in_users_objects, self.inputs) if isinstance(slot, GradSlot)}
        found = []
        for change in self.changes:
            slot = in_users_objects(change.slot)
            if isinstance(slot, GradSlot) and change.unless is None and id(slot.param) not in read:
                found.append(change)
        return found

    def late_outputs(self) -> tuple[int, ...]:
        """Outputs that only become gradients which the graph itself does not read: they may come late."""
        held = [(kind, value) for kind, value in self.result_leaves if kind not in ("value", "deferred")]
        shown = {value[0] if kind == "sharded" else value for kind, value in held}
        users: dict[int, list[Change]] = {}
        for change in self.changes:
            for output in {change.output, change.unless} - {None}:
                users.setdefault(output, []).append(change)  # type: ignore[arg-type]
        unread = set(map(id, self.unread_gradients()))
        alone = (output for output, changes in users.items() if len(changes) == 1 and id(changes[0]) in unread)
        return tuple(sorted(output for output in alone if output not in shown))


@dataclass(frozen=True)
class ArgumentSpec:
    """The arguments of a call."""

    structure: Any
    """Equal for arguments that are nested alike."""
    paths: Sequence[str]
    """What each leaf is called."""
    slots: Sequence[Slot | None]
    """By leaf, where a tensor was found first: among the arguments, or in the user's objects. None: no tensor."""
    constants: Mapping[int, Any]
    """Non-tensor leaves that the graph assumes."""

    @property
    def found_elsewhere(self) -> list[tuple[int, Slot]]:
        """Tensors among the arguments that are state of the user's objects as well."""
        return [(i, s) for i, s in enumerate(self.slots) if s is not None and not isinstance(s, BatchSlot)]


@dataclass(frozen=True)
class ParamGroupSpec:
    """A param group: its parameters, the names of its options, and those options that are constants of the graph."""

    params: Sequence[Tensor]
    options: frozenset[str]
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class ScalarCondition:
    """The graph is right only while an expression of scalar inputs has one value."""

    text: str
    leaves: Sequence[Any]
    """Slots, and items of tensors (`ItemLeaf`), that the expression is computed from."""
    holds: Callable[[Callable[[Any], Any], dict[int, Any]], bool]
    """Takes what gives the value of a leaf, and a memo that conditions share."""


@dataclass(frozen=True, eq=False)
class ObjectLink:
    """One step from an object to another, by which an object that the step calls is reached."""

    parent: Any
    child: Any
    path: str
    """Of the child."""
    read: Callable[[], Any] | None
    """What the link leads to now; None where it has no name (an iterator's list)."""

    def holds(self) -> bool:
        """Whether the link still leads to the same object."""
        if self.read is None:
            return any(found is self.child for found in gc.get_referents(self.parent))
        try:
            return self.read() is self.child
        except (AttributeError, KeyError, IndexError, ValueError, TypeError):
            return False


@dataclass(frozen=True, eq=False)
class TensorAttributesSpec:
    """Python attributes that user code put on one tensor."""

    slot: Slot
    real: Tensor | None
    """None for a tensor of the batch."""
    before: Mapping[str, Any]
    set_by_step: frozenset[str]
    """Attributes whose value the step sets or that are inputs: only their type is under a guard."""


@dataclass(frozen=True, eq=False)
class WrittenContainer:
    """A list or dict that outlives the step and that the step writes: its identity is guarded, not its contents."""

    container: Any
    path: str
    places: Sequence[Slot]
    keys: Sequence[Any] | int | None
    """What it held where the step read the contents as a whole: its keys or its length."""


class FileRead(Protocol):
    """A file as the step read it."""

    path: str

    def is_same(self) -> bool:
        """Whether it still is."""


class NamesReplaced:
    """Whether a capture, in whatever thread, has put functions of its own in the place of those of Python and torch."""

    now = False
    originals: ClassVar[dict[tuple[int, str], Any]] = {}
    """What stood there, by the identity of the module or class and the name: code that is only found while a step is
    traced (a method of another package) is guarded by these."""

    stand_ins: ClassVar[dict[int, tuple[Any, Any]]] = {}
    """What stands there during a capture, by its identity, with what it stands for: modules that are imported then may
    take it."""

    @classmethod
    def note(cls, stack: ExitStack, owner: Any, name: str, real: Any) -> None:
        """A name was replaced, until the stack ends."""
        key, stand_in = (id(owner), name), vars(owner).get(name)
        if stand_in is not None and real is not None:
            cls.stand_ins[id(stand_in)] = stand_in, real
        if key not in cls.originals:
            cls.originals[key] = real
            stack.callback(cls.originals.pop, key)


@dataclass(frozen=True)
class CallResult:
    """The result of a function that reads process state: the working directory, a seed, the level of a logger."""

    name: str
    call: Callable[[], Any]
    result: Any


@dataclass(frozen=True)
class GuardSpecs:
    """All assumptions of one captured graph."""

    arguments: ArgumentSpec
    sizes: DynamicSizesSpec = field(default_factory=DynamicSizesSpec)
    modules: Sequence[tuple[nn.Module, str]] = ()
    parameters: Sequence[tuple[Tensor, Slot]] = ()
    module_tensors: Sequence[tuple[ModuleSlot, Tensor]] = ()
    """Parameters and buffers by the places in modules where they lie."""
    loose_parameters: Sequence[tuple[Slot, Tensor]] = ()
    """Parameters that lie outside of modules (in a list, in a param group)."""
    optimizers: Mapping[Optimizer, str] = field(default_factory=dict)
    param_groups: Mapping[Optimizer, Sequence[ParamGroupSpec]] = field(default_factory=dict)
    reads_param_groups: bool = False
    """Whether code of the user's reads options of param groups: it can tell `1` from `1.0`."""
    scalers: Mapping[Any, str] = field(default_factory=dict)
    nested_state: Sequence[tuple[Slot, Any]] = ()
    """Lists and dicts in optimizer state, and their structure."""
    same_tensors: Sequence[tuple[Slot, Slot]] = ()
    """Places that hold one tensor: in optimizer state, gradients, arguments, attributes."""
    tensor_attributes: Sequence[TensorAttributesSpec] = ()
    variables: Sequence[tuple[str, Slot, Any]] = ()
    """Closure variables, globals, class attributes: path, place, value."""
    rebound_variables: Mapping[str, tuple[Slot, Any]] = field(default_factory=dict)
    """Variables that the step itself rebinds, and what kind of value they held."""
    volatile: Mapping[int, set[str]] = field(default_factory=dict)
    """By identity of an object, the attributes that the step itself sets."""
    kinds: Sequence[tuple[Mapping[str, Any], str, str, Any]] = ()
    """Attributes that the step sets and may have read: where they are, and what kind of value they held."""
    reads: Sequence[tuple[Any, str, Mapping[str, Any]]] = ()
    """Plain objects, their paths, and the attributes that the step read with the values they had."""
    class_reads: Sequence[tuple[Any, str, Mapping[str, Any]]] = ()
    """The same for plain values that the step read from the classes of such objects."""
    containers: Sequence[tuple[Any, str]] = ()
    """Lists and dicts that the step may have read."""
    optimizer_containers: Sequence[Any] = ()
    """Param groups and their lists, which may lie in `containers` and have guards of their own."""
    written: Sequence[WrittenContainer] = ()
    """Lists and dicts that the step writes."""
    arrays: Sequence[tuple[Any, str]] = ()
    """NumPy arrays and the like that the step may have read."""
    lru_caches: Sequence[tuple[Any, str]] = ()
    """Functions with `functools.lru_cache` that the step called."""
    links: Sequence[ObjectLink] = ()
    classes: Mapping[type, str] = field(default_factory=dict)
    classes_set_by_step: frozenset[type] = frozenset()
    functions: Sequence[tuple[FunctionType, str, frozenset[str]]] = ()
    """Functions of the user's, and the names of their attributes."""
    types: Sequence[tuple[Any, str, type]] = ()
    """Objects of the user's with their paths and classes: `obj.__class__` can be set."""
    codes: Sequence[tuple[FunctionType, CodeType]] = ()
    """Functions of the user's with their code: `f.__code__` can be set."""
    weak: Sequence[tuple[Any, str]] = ()
    """Weak references to objects that were there."""
    libraries: Sequence[tuple[ModuleType | type, Mapping[str, Any]]] = ()
    """Modules of Python and of libraries, with what user code names of them: it can be replaced."""
    whole_reads: Sequence[tuple[Any, str, Set[str]]] = ()
    """Plain objects that the step read as a whole (`vars(h)`), and the names of their attributes."""
    abstract_classes: Sequence[type] = ()
    """Abstract base classes that user code names: other classes can be registered with them."""
    builtin_names: Sequence[tuple[dict[str, Any], frozenset[str]]] = ()
    """Global namespaces, and names in user code that they do not have: those of builtins."""
    thread_locals: Sequence[tuple[Any, str]] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    whole_environment: Mapping[Any, Any] | None = None
    call_results: Sequence[CallResult] = ()
    """Results of functions that read process state."""
    files: Sequence[FileRead] = ()
    lifted: frozenset[str] = frozenset()
    """Paths of the scalars that are inputs because they changed between two calls."""
    scalar_types: Sequence[tuple[Slot, type]] = ()
    """Where those scalars lie, and of which type they are."""
    conditions: Sequence[ScalarCondition] = ()
    items: Recipe | None = None
    """Computes the scalars inside of state tensors that conditions depend on."""
    placeholder_slots: Mapping[fx.Node, Slot] = field(default_factory=dict)


def constants_of(specs: GuardSpecs) -> Iterable[tuple[str, Any]]:
    """Plain values that the graph assumes, by path: arguments, variables, attributes."""
    for i, value in specs.arguments.constants.items():
        yield specs.arguments.paths[i], value
    for path, _, value in specs.variables:
        yield path, value
    for _, path, values in (*specs.reads, *specs.class_reads):
        for name, value in values.items():
            yield f"{path}.{name}", value
