"""What capture found out (`CapturedStep`) as JSON, and back, bound to the objects of another process.

    graph            the StepGraph in its own format (`ir/io/serialize.py`)
    slots            where inputs and changes lie                                    (places.py)
    numbers          expressions of scalars, one row each: conditions and deferred numbers are computed from them
    recipe           nodes whose values guards need before the graph runs
    changes, result, calls, effects, guards      the fields of `CapturedStep`, with slots and numbers by index

Values that guards compare are not in the file as values: they are read from the objects of the new process, after their
text was found to be that of the capture (`snapshot.py`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.artefact.addresses import Addresses, AddressWriter, Walk, class_name, named
from wholestep.artefact.places import PlaceReader, PlaceWriter, rows, table, text, whole, wrong
from wholestep.capture.scalars.symbolic_scalars import ScalarGuard, ScalarNode, is_scalar_method
from wholestep.errors import ArtefactError
from wholestep.ir.captured_step import (
    ArgumentSpec,
    CapturedStep,
    Change,
    DynamicSizesSpec,
    GuardSpecs,
    HostCall,
    ParamGroupSpec,
    ScalarCondition,
    TensorAttributesSpec,
    WrittenContainer,
)
from wholestep.ir.deferred import (
    DeferredNumber,
    DeferredSources,
    FilledLeaf,
    FreshContainer,
    HostLeaf,
    ItemLeaf,
    ReplayedCall,
    ShownTensor,
    SizeLeaf,
)
from wholestep.ir.early_values import Recipe
from wholestep.ir.io.arguments import ArgumentReader, ArgumentWriter, TargetReader, check_identifier, target_name
from wholestep.ir.io.tensor_file import read_constant, write_constant
from wholestep.ir.iter.moves import IterationFacts, marked_moves, note_iteration_facts
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.plain_contents import PLAIN, kind_of, own_dict, structure_of
from wholestep.ir.user_objects.slots import ABSENT, MappingSlot, ModuleSlot, Slot
from wholestep.torch_private.fx_graphs import pytree

_KINDS = {"int": int, "float": float, "bool": bool}
_CONTAINERS: dict[str, type] = {"list": list, "dict": dict, "set": set, "deque": deque, "OrderedDict": OrderedDict}
_OUTPUT_LEAVES = ("output", "attached", "detached")
_DEEPEST = 100


def write_step(captured: CapturedStep, walk: Walk, shards: Callable[[Any], Any]) -> dict[str, Any]:
    """A captured step as JSON without its snapshot; ArtefactError names what has no form in a file."""
    return _StepWriter(captured, walk, shards).write()


class _StepWriter:
    def __init__(self, captured: CapturedStep, walk: Walk, shards: Callable[[Any], Any]) -> None:
        self._captured = captured
        self._addresses = AddressWriter(walk)
        self._places = PlaceWriter(self._addresses, shards)
        self._numbers: list[Any] = []
        self._number_of: dict[int, int] = {}
        self._leaves: list[Any] = []
        self._leaf_of: dict[int, int] = {}

    def write(self) -> dict[str, Any]:
        captured, places = self._captured, self._places
        _refuse(captured)
        document = {
            "graph": captured.step_graph.to_json(),
            "inputs": [places.slot(slot) for slot in captured.inputs],
            "changes": [self._change(change) for change in captured.changes],
            "result": [self._result_leaf(kind, value, "the result") for kind, value in captured.result_leaves],
            "tree": None if captured.rebuild_result is None else self._tree(captured),
            "calls": [self._host_call(call) for call in captured.host_calls],
            "stepped": [places.at(optimizer, "an optimizer") for optimizer in captured.stepped],
            "effects": [self._effect(call) for call in captured.effects],
            "outputs": [[self._leaf(leaf), output] for leaf, output in captured.deferred.outputs.items()],
            "before": [places.slot(slot) for slot in captured.deferred.before],
            "recipe": self._recipe(captured.guards),
            "guards": self._guards(captured.guards),
        }
        return document | {
            "numbers": self._numbers,
            "leaves": self._leaves,
            "slots": places.slots,
            "addresses": self._addresses.table,
        }

    def _change(self, change: Change) -> list[Any]:
        deferred = None if change.deferred is None else self._deferred(change.deferred, change.slot.path)
        constant = self._places.value(change.constant, change.slot.path)
        slot = self._places.slot(change.slot)
        return [str(change.kind), slot, change.output, constant, change.unless, deferred, change.after_calls]

    def _result_leaf(self, kind: str, value: Any, what: str) -> list[Any]:
        if kind in _OUTPUT_LEAVES:
            return [kind, int(value)]
        if kind == "deferred":
            return [kind, self._deferred(value, what)]
        if kind == "shown":
            return [kind, [value.output, value.grad_fn, value.requires_grad, value.is_parameter]]
        if kind == "value":
            return [kind, self._places.value(value, what)]
        raise ArtefactError(f"{what} has a {kind} tensor, which has no form in a file.", fix="return a plain tensor.")

    def _tree(self, captured: CapturedStep) -> Any:
        assert captured.rebuild_result is not None
        stand_ins = [_LeafNumber(i) for i in range(len(captured.result_leaves))]
        return self._tree_of(captured.rebuild_result(list(stand_ins)))

    def _tree_of(self, tree: Any) -> Any:
        if isinstance(tree, _LeafNumber):
            return tree.number
        if type(tree) in (tuple, list):
            return [type(tree).__name__, [self._tree_of(item) for item in tree]]
        if type(tree) is dict:
            return ["dict", [[self._places.value(key, "a key"), self._tree_of(v)] for key, v in tree.items()]]
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            self._addresses.write(type(tree), f"the class of the result, {class_name(tree)}")
            return ["named", f"{type(tree).__module__}:{type(tree).__qualname__}", [self._tree_of(item) for item in tree]]
        if type(tree) in pytree.SUPPORTED_NODES:
            children, context = pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)
            name = f"{type(tree).__module__}:{type(tree).__qualname__}"
            return ["node", name, self._places.value(context, name), [self._tree_of(child) for child in children]]
        raise ArtefactError(
            f"the result is a {class_name(tree)}, which has no form in a file.", fix="return a tuple, list or dict."
        )

    def _host_call(self, call: HostCall) -> list[Any]:
        args = [self._places.value(arg, f"an argument of {call.path}.step()") for arg in call.args]
        kwargs = {key: self._places.value(arg, f"an argument of {call.path}.step()") for key, arg in call.kwargs.items()}
        leaves = [self._leaf(leaf) for leaf in call.leaves]
        return [self._places.at(call.scheduler, call.path), call.path, args, kwargs, leaves]

    def _effect(self, call: ReplayedCall) -> list[Any]:
        if call.once:
            raise ArtefactError(f"{call.text} shows a clock that capture read.", fix="take the time outside of the step.")
        function = call.function
        holder = getattr(function, "__self__", None)
        name = function.__name__ if hasattr(function, "__name__") else class_name(function)
        if isinstance(holder, logging.Logger) and name in _LOGGING:
            target: Any = ["logger", holder.name, name]
        elif (found := _EFFECT_NAMES.get(_key(function))) is not None:
            target = ["function", found]
        else:
            raise ArtefactError(f"the call of {call.text} cannot be saved: it runs Python of the user's after each step.")
        made: dict[int, int] = {}
        args = [self._template(arg, made, call.text) for arg in call.args]
        return [call.text, target, args, {key: self._template(arg, made, call.text) for key, arg in call.kwargs.items()}]

    def _template(self, value: Any, made: dict[int, int], what: str) -> Any:
        if not isinstance(value, FilledLeaf | FreshContainer):
            return ["value", self._places.value(value, f"an argument of {what}")]
        if id(value) in made:
            return ["again", made[id(value)]]
        made[id(value)] = len(made)
        if isinstance(value, FilledLeaf):
            return ["leaf", self._result_leaf(value.kind, value.value, what)]
        kind = type(value.empty)
        items = [self._template(item, made, what) for item in value.items]
        if kind is tuple:
            return ["tuple", None, items]
        if _CONTAINERS.get(kind.__name__) is not kind:
            raise ArtefactError(f"{what} gets a {class_name(value.empty)}, which has no form in a file.")
        keys = None if value.keys is None else [self._places.value(key, what) for key in value.keys]
        return [kind.__name__, keys, items]

    def _deferred(self, number: DeferredNumber, what: str) -> int:
        node = getattr(number.evaluate, "__self__", None)
        if not isinstance(node, ScalarNode):
            raise ArtefactError(
                f"{what} gets a text of a value that is known only after the run, which has no form in a file.",
                fix="return the value, and make the text outside of the step.",
            )
        return self._scalar(node)

    def _scalar(self, node: ScalarNode) -> int:
        stack = [node]
        while stack:
            each = stack[-1]
            if id(each) not in self._number_of:
                missing = [a for a in each.args if id(a) not in self._number_of]
                if missing:
                    stack += missing
                    continue
                leaf = None if each.leaf is None else self._leaf(each.leaf)
                hint = self._places.value(each.hint if each.leaf is None and not each.method else None, each.key)
                args = [self._number_of[id(a)] for a in each.args]
                self._number_of[id(each)] = len(self._numbers)
                self._numbers.append([each.kind.__name__, each.key, each.method, args, leaf, hint])
            stack.pop()
        return self._number_of[id(node)]

    def _leaf(self, leaf: Any) -> int:
        if id(leaf) not in self._leaf_of:
            data = self._write_leaf(leaf)
            self._leaf_of[id(leaf)] = len(self._leaves)
            self._leaves.append(data)
        return self._leaf_of[id(leaf)]

    def _write_leaf(self, leaf: Any) -> list[Any]:
        if isinstance(leaf, Slot):
            return ["slot", self._places.slot(leaf)]
        if isinstance(leaf, ItemLeaf):
            return ["item", leaf.node.name, leaf.known, leaf.index]
        if isinstance(leaf, SizeLeaf):
            return ["size", leaf.node.name]
        if isinstance(leaf, HostLeaf):
            return ["host", leaf.path, self._places.slot(_slot_of(leaf))]
        raise ArtefactError("the step prints a tensor, which has no form in a file.", fix="print a number of it.")

    def _recipe(self, specs: GuardSpecs) -> Any:
        if specs.items is None:
            return None
        write = ArgumentWriter()
        found: list[Any] = []
        for node, op, target, args, kwargs in specs.items.steps():
            if op == "placeholder":
                found.append([node.name, op, self._places.slot(specs.placeholder_slots[node])])
            elif op == "get_attr":
                found.append([node.name, op, write_constant(target, target.device)])
            else:
                named_args = {key: write.write(arg) for key, arg in kwargs.items()}
                found.append([node.name, op, target_name(target), [write.write(arg) for arg in args], named_args])
        return found

    def _guards(self, specs: GuardSpecs) -> dict[str, Any]:
        at, slot = self._places.at, self._places.slot
        arguments = specs.arguments
        return {
            "paths": list(arguments.paths),
            "argument_slots": [None if s is None else slot(s) for s in arguments.slots],
            "constants": sorted(arguments.constants),
            "modules": [[at(module, path), path] for module, path in specs.modules],
            "parameters": [[at(tensor, s.path), slot(s)] for tensor, s in specs.parameters],
            "module_tensors": [slot(s) for s, _ in specs.module_tensors],
            "loose_parameters": [slot(s) for s, _ in specs.loose_parameters],
            "optimizers": [
                [at(o, path), path, [sorted(map(str, group.constants)) for group in specs.param_groups[o]]]
                for o, path in specs.optimizers.items()
            ],
            "reads_param_groups": specs.reads_param_groups,
            "scalers": [[at(scaler, path), path] for scaler, path in specs.scalers.items()],
            "nested_state": [slot(s) for s, _ in specs.nested_state],
            "same_tensors": [[slot(one), slot(other)] for one, other in specs.same_tensors],
            "tensor_attributes": [
                [slot(own.slot), None if own.real is None else at(own.real, own.slot.path), sorted(own.set_by_step)]
                for own in specs.tensor_attributes
                if own.before or own.set_by_step
            ],
            "variables": [[path, slot(s)] for path, s, _ in specs.variables if _is_saved(specs, path)],
            "rebound": [[path, slot(s)] for path, (s, _) in specs.rebound_variables.items()],
            "volatile": self._volatile(specs),
            "kinds": [[at(mapping, path), key, path] for mapping, key, path, _ in specs.kinds],
            "reads": [[at(obj, path), path, sorted(values)] for obj, path, values in specs.reads],
            "class_reads": [[at(obj, path), path, sorted(values)] for obj, path, values in specs.class_reads if values],
            "containers": [[at(container, path), path] for container, path in specs.containers],
            "written": [
                [at(w.container, w.path), w.path, [slot(s) for s in w.places], _form_of_keys(w.keys)] for w in specs.written
            ],
            "arrays": [[at(array, path), path] for array, path in specs.arrays],
            "classes": [[at(cls, path), path, cls in specs.classes_set_by_step] for cls, path in specs.classes.items()],
            "functions": [[at(fn, path), path] for fn, path, _ in specs.functions],
            "thread_locals": [[at(local, path), path] for local, path in specs.thread_locals],
            "environment": sorted(specs.environment),
            "lifted": sorted(specs.lifted),
            "scalar_types": [[slot(s), kind.__name__] for s, kind in specs.scalar_types],
            "conditions": [self._condition(condition) for condition in specs.conditions],
        }

    def _volatile(self, specs: GuardSpecs) -> list[Any]:
        found = []
        for owner, path in (*specs.modules, *specs.optimizers.items()):
            if id(owner) in specs.volatile:
                found.append([self._places.at(owner, path), sorted(specs.volatile[id(owner)])])
        return found

    def _condition(self, condition: ScalarCondition) -> list[Any]:
        guard = getattr(condition.holds, "__self__", None)
        if not isinstance(guard, ScalarGuard):
            raise ArtefactError(f"the condition {condition.text} has no form in a file.")
        expected = self._places.value(guard.expected, condition.text)
        return [condition.text, self._scalar(guard.expression), expected, guard.why]


class _LeafNumber:
    """Stands for a leaf of the result while its tree is written."""

    def __init__(self, number: int) -> None:
        self.number = number


def _is_saved(specs: GuardSpecs, path: str) -> bool:
    return path not in specs.rebound_variables and path not in specs.lifted


def _form_of_keys(keys: Any) -> str:
    return "none" if keys is None else "length" if isinstance(keys, int) else "keys"


def _slot_of(leaf: HostLeaf) -> Slot:
    """The slot that a number lies in after a scheduler stepped."""
    if leaf.slot is not None:
        return leaf.slot
    owner = getattr(leaf.read, "__self__", None)
    if isinstance(owner, Slot):
        return owner
    read = leaf.read
    if isinstance(read, functools.partial) and isinstance(getattr(read.func, "__self__", None), dict):
        return MappingSlot(InputKind.HYPER_PARAMETER, leaf.path, None, read.func.__self__, read.args[0])  # type: ignore[attr-defined]
    raise ArtefactError(f"{leaf.path} cannot be saved: it is read by Python of the user's.")


def _refuse(captured: CapturedStep) -> None:
    """Raise for what has no form in a file."""
    specs = captured.guards
    why = ""
    if specs.sizes.dims or specs.sizes.env is not None:
        why = "sizes that vary from call to call (dynamic=, or sizes that data decides)"
    elif specs.links:
        why = f"{specs.links[-1].path}, which the step calls and which is not reached from its arguments and variables"
    elif specs.whole_environment is not None:
        why = "all environment variables, which the step reads"
    elif specs.files:
        why = f"the file {specs.files[0].path}, which the step reads"
    elif captured.clock_readings:
        why = "a clock, which the step reads"
    elif marked_moves(captured.step_graph.gm.graph):
        why = "updates that a pass moved into the next iteration"
    if why:
        raise ArtefactError(f"the step cannot be saved: it depends on {why}.", fix="take that out of the step.")


_LOGGING = frozenset({"debug", "info", "warning", "error", "critical", "log", "exception"})


def _key(function: Any) -> Any:
    try:
        hash(function)
    except TypeError:
        return None
    return function


def _effect_functions() -> dict[str, Any]:
    found: dict[str, Any] = {"print": print}
    names = "append extend insert update add pop clear remove discard setdefault popitem appendleft extendleft reverse sort"
    for kind in (list, dict, set, deque):
        for name in (*names.split(), "__setitem__", "__delitem__", "__iadd__", "__ior__"):
            if hasattr(kind, name):
                found[f"{kind.__name__}.{name}"] = getattr(kind, name)
    return found


_EFFECTS = _effect_functions()
"""Functions that a file may name: calls that a step makes after each run."""
_EFFECT_NAMES = {function: name for name, function in _EFFECTS.items()}


def read_step(
    document: Any,
    addresses: Addresses,
    leaves: Sequence[Any],
    structure: Any,
    *,
    shards: Callable[[Any], Any],
    allow_ops: Sequence[str] = (),
    graph: StepGraph | None = None,
) -> CapturedStep:
    """The step of a file, bound to the objects at `addresses`. `leaves`: the arguments of a call.

    `graph`: the graph, where it was read before.
    """
    try:
        return _StepReader(table(document), addresses, leaves, structure, shards, allow_ops).read(graph)
    except ArtefactError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtefactError(f"the file is damaged: {type(error).__name__}: {str(error)[:200]}.") from error


class _StepReader:
    def __init__(
        self,
        document: dict[str, Any],
        addresses: Addresses,
        leaves: Sequence[Any],
        structure: Any,
        shards: Callable[[Any], Any],
        allow_ops: Sequence[str],
    ) -> None:
        self._document = document
        self._places = PlaceReader(addresses, document["slots"], shards)
        self._call_leaves = leaves
        self._structure = structure
        self._allow_ops = allow_ops
        self._nodes: dict[str, fx.Node] = {}
        self._outputs = 0
        self._leaves: list[Any] = []
        self._numbers: list[ScalarNode] = []

    def read(self, graph: StepGraph | None) -> CapturedStep:
        data, places = self._document, self._places
        graph = graph or StepGraph.from_json(text(data["graph"]), allow_ops=self._allow_ops)
        self._outputs = len(graph.signature.outputs)
        inputs = tuple(places.slot(number) for number in rows(data["inputs"]))
        if len(inputs) != len(graph.signature.inputs):
            raise wrong(len(inputs), "the number of inputs of the graph")
        self._nodes = {node.name: node for node in graph.gm.graph.nodes}
        recipe, slot_of = self._recipe(data["recipe"])
        self._read_numbers()
        result = tuple(self._result_leaf(leaf) for leaf in rows(data["result"], 2))
        placeholders = graph.gm.graph.find_nodes(op="placeholder")
        captured = CapturedStep(
            step_graph=graph,
            inputs=inputs,
            changes=tuple(self._change(change) for change in rows(data["changes"], 7)),
            result_leaves=result,
            rebuild_result=self._rebuild(data["tree"], len(result)),
            host_calls=tuple(self._host_call(call) for call in rows(data["calls"], 5)),
            stepped=tuple(places.at(number, Optimizer) for number in rows(data["stepped"])),
            effects=tuple(self._effect(call) for call in rows(data["effects"], 4)),
            deferred=DeferredSources(
                {self._leaves[whole(leaf)]: self._output(output) for leaf, output in rows(data["outputs"], 2)},
                tuple(places.slot(number) for number in rows(data["before"])),
            ),
            guards=self._guards(table(data["guards"]), recipe, dict(zip(placeholders, inputs, strict=True)) | slot_of),
        )
        facts = IterationFacts(captured.late_outputs(), graph.signature.creates_optimizer_state)
        note_iteration_facts(graph.gm, facts)
        return captured

    def _output(self, data: Any) -> int:
        return whole(data, self._outputs)

    def _maybe_output(self, data: Any) -> int | None:
        return None if data is None else self._output(data)

    def _change(self, data: list[Any]) -> Change:
        kind, slot, output, constant, unless, deferred, after_calls = data
        value = self._places.value(constant)
        if not isinstance(value, PLAIN) and not (
            isinstance(value, tuple | list) and all(isinstance(item, PLAIN) for item in value)
        ):
            raise wrong(class_name(value), "a constant")
        if type(after_calls) is not bool:
            raise wrong(after_calls, "true or false")
        number = None if deferred is None else self._deferred(deferred)
        place = self._places.slot(slot)
        return Change(
            ChangeKind(text(kind)), place, self._maybe_output(output), value, self._maybe_output(unless), number, after_calls
        )

    def _result_leaf(self, data: Any) -> tuple[str, Any]:
        kind, value = rows(data)
        if kind in _OUTPUT_LEAVES:
            return kind, self._output(value)
        if kind == "deferred":
            return kind, self._deferred(value)
        if kind == "value":
            return kind, self._places.value(value)
        if kind == "shown":
            output, grad_fn, requires_grad, is_parameter = rows(value)
            if grad_fn:
                check_identifier(grad_fn, "the name of an autograd function")
            return kind, ShownTensor(self._output(output), text(grad_fn), bool(requires_grad), bool(is_parameter))
        raise wrong(kind, "a leaf of a result")

    def _rebuild(self, tree: Any, count: int) -> Callable[[list[Any]], Any] | None:
        if tree is None:
            if count != 1:
                raise wrong(tree, "the tree of a result")
            return None
        return self._builder(tree, count, 0)

    def _builder(self, tree: Any, count: int, depth: int) -> Callable[[list[Any]], Any]:
        if depth > _DEEPEST:
            raise wrong(tree, "a tree of a result")
        if type(tree) is int:
            number = whole(tree, count)
            return lambda leaves: leaves[number]
        kind, *rest = rows(tree)
        if kind in ("tuple", "list"):
            items = [self._builder(item, count, depth + 1) for item in rows(rest[0])]
            make: type = tuple if kind == "tuple" else list
            return lambda leaves: make(item(leaves) for item in items)
        if kind == "dict":
            pairs = [(self._places.value(key), self._builder(v, count, depth + 1)) for key, v in rows(rest[0], 2)]
            return lambda leaves: {key: item(leaves) for key, item in pairs}
        if kind == "named":
            cls: Any = named(text(rest[0]))
            if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
                raise wrong(rest[0], "a named tuple of this process")
            items = [self._builder(item, count, depth + 1) for item in rows(rest[1])]
            return lambda leaves: cls(*(item(leaves) for item in items))
        if kind == "node":
            name, context = text(rest[0]), self._places.value(rest[1])
            node = next((n for c, n in pytree.SUPPORTED_NODES.items() if f"{c.__module__}:{c.__qualname__}" == name), None)
            if node is None:
                raise wrong(name, "a pytree class of this process")
            items = [self._builder(item, count, depth + 1) for item in rows(rest[2])]
            return lambda leaves: node.unflatten_fn([item(leaves) for item in items], context)
        raise wrong(kind, "a tree of a result")

    def _host_call(self, data: list[Any]) -> HostCall:
        scheduler, path, args, kwargs, leaves = data
        values = tuple(self._places.value(arg) for arg in rows(args))
        named_values = {key: self._places.value(arg) for key, arg in table(kwargs).items()}
        found = [self._leaves[whole(leaf)] for leaf in rows(leaves)]
        return HostCall(self._places.at(scheduler, LRScheduler), text(path), values, named_values, found)

    def _effect(self, data: list[Any]) -> ReplayedCall:
        what, target, args, kwargs = data
        kind, *name = rows(target)
        if kind == "logger" and len(name) == 2 and name[1] in _LOGGING:
            function: Callable[..., Any] = getattr(logging.getLogger(text(name[0])), name[1])
        elif kind == "function" and len(name) == 1 and name[0] in _EFFECTS:
            function = _EFFECTS[name[0]]
        else:
            raise wrong(name, "a call that a file may make")
        made: list[Any] = []
        values = [self._template(arg, made, 0) for arg in rows(args)]
        return ReplayedCall(text(what), function, values, {k: self._template(v, made, 0) for k, v in table(kwargs).items()})

    def _template(self, data: Any, made: list[Any], depth: int) -> Any:
        kind, *rest = rows(data)
        if depth > _DEEPEST:
            raise wrong(kind, "an argument")
        if kind == "value":
            return self._places.value(rest[0])
        if kind == "again":
            return made[whole(rest[0], len(made))]
        if kind == "leaf":
            made.append(FilledLeaf(*self._result_leaf(rest[0])))
            return made[-1]
        if kind != "tuple" and kind not in _CONTAINERS:
            raise wrong(kind, "an argument")
        keys = None if rest[0] is None else [self._places.value(key) for key in rows(rest[0])]
        items: list[Any] = []
        container = FreshContainer(() if kind == "tuple" else _CONTAINERS[kind](), keys, items)
        made.append(container)
        items += [self._template(item, made, depth + 1) for item in rows(rest[1])]
        if (keys is None) != (kind not in ("dict", "OrderedDict")) or (keys is not None and len(keys) != len(items)):
            raise wrong(keys, "the keys of a dict")
        return container

    def _recipe(self, data: Any) -> tuple[Recipe | None, dict[fx.Node, Slot]]:
        if data is None:
            return None, {}
        graph, nodes = fx.Graph(), dict[str, fx.Node]()
        targets = TargetReader(self._allow_ops)
        arguments, slots = ArgumentReader(nodes, targets), dict[fx.Node, Slot]()
        for name, op, what, *rest in rows(data):
            check_identifier(name, "the name of a node")
            if op == "placeholder":
                node = graph.create_node(op, name, name=name)
                slots[node] = self._places.slot(what)
            elif op == "get_attr":
                node = graph.create_node(op, name, name=name)
                node.meta["constant"] = read_constant(what, name)
            elif op == "call_function":
                args, kwargs = arguments.read(rows(rest[0])), arguments.read_kwargs(table(rest[1]))
                node = graph.create_node(op, targets.read(text(what)), tuple(args), kwargs, name=name)
            else:
                raise wrong(op, "a node of a recipe")
            nodes[name] = node
        self._nodes = self._nodes | nodes
        return Recipe(list(nodes.values())), slots

    def _read_numbers(self) -> None:
        self._leaves = [self._leaf(leaf) for leaf in rows(self._document["leaves"])]
        for number, (kind, key, method, args, leaf, hint) in enumerate(rows(self._document["numbers"], 6)):
            operands = tuple(self._numbers[whole(arg, number)] for arg in rows(args))
            value = self._places.value(hint)
            if kind not in _KINDS or (method and not is_scalar_method(method, len(operands))):
                raise wrong(method, "an operation on numbers")
            if leaf is None and not method and type(value) not in _KINDS.values():
                raise wrong(hint, "a number")
            found = None if leaf is None else self._leaves[whole(leaf)]
            made = ScalarNode(None, _KINDS[kind], value, text(key), method=text(method), args=operands, leaf=found)  # type: ignore[arg-type]
            self._numbers.append(made)

    def _leaf(self, data: Any) -> Any:
        kind, *rest = rows(data)
        if kind == "slot":
            return self._places.slot(rest[0])
        if kind == "item":
            index = None if rest[2] is None else whole(rest[2])
            return ItemLeaf(self._node(rest[0]), bool(rest[1]), index)
        if kind == "size":
            return SizeLeaf(self._node(rest[0]))
        if kind == "host":
            slot = self._places.slot(rest[1])
            return HostLeaf(text(rest[0]), slot.get, 0, slot)
        raise wrong(kind, "a leaf of an expression")

    def _node(self, name: Any) -> fx.Node:
        """A node that a leaf is read from. One that is no more in the graph stands for itself only."""
        found = self._nodes.get(text(name))
        if found is None:
            check_identifier(name, "the name of a node")
            found = self._nodes[name] = fx.Graph().create_node("placeholder", name, name=name)
        return found

    def _deferred(self, number: Any) -> DeferredNumber:
        return self._numbers[whole(number)].deferred()

    def _guards(self, data: dict[str, Any], recipe: Recipe | None, slot_of: Mapping[fx.Node, Slot]) -> GuardSpecs:
        at, slot, places = self._places.at, self._places.slot, self._places
        paths = [text(path) for path in rows(data["paths"])]
        leaves = self._call_leaves
        optimizers = {at(number, Optimizer): (text(path), rows(keys)) for number, path, keys in rows(data["optimizers"], 3)}
        parameters = [(at(number, Tensor), slot(s)) for number, s in rows(data["parameters"], 2)]
        variables = [(text(path), s) for path, number in rows(data["variables"], 2) if (s := self._slot_there(number))]
        rebound = {text(path): slot(s) for path, s in rows(data["rebound"], 2)}
        module_slots = [slot(s) for s in rows(data["module_tensors"])]
        if not all(isinstance(s, ModuleSlot) for s in module_slots):
            raise wrong("module_tensors", "slots of modules")
        if len(rows(data["argument_slots"])) != len(paths):
            raise wrong("argument_slots", "a slot for each argument")
        constants = {whole(i, len(paths)): None for i in rows(data["constants"])}
        return GuardSpecs(
            arguments=ArgumentSpec(
                self._structure,
                paths,
                [None if s is None else slot(s) for s in data["argument_slots"]],
                {i: leaves[i] if i < len(leaves) else ABSENT for i in constants},
            ),
            sizes=DynamicSizesSpec(),
            modules=[(at(number, nn.Module), text(path)) for number, path in rows(data["modules"], 2)],
            parameters=parameters,
            module_tensors=[(s, s.get()) for s in module_slots],  # type: ignore[misc]
            loose_parameters=[(slot(s), slot(s).get()) for s in rows(data["loose_parameters"])],
            optimizers={optimizer: path for optimizer, (path, _) in optimizers.items()},
            param_groups={optimizer: _groups(optimizer, keys) for optimizer, (_, keys) in optimizers.items()},
            reads_param_groups=data["reads_param_groups"] is True,
            scalers={at(number): text(path) for number, path in rows(data["scalers"], 2)},
            nested_state=[(slot(s), _structure_now(slot(s))) for s in rows(data["nested_state"])],
            same_tensors=[(slot(one), slot(other)) for one, other in rows(data["same_tensors"], 2)],
            tensor_attributes=[self._tensor_attributes(row) for row in rows(data["tensor_attributes"], 3)],
            variables=[(path, s, _value_now(s)) for path, s in variables],
            rebound_variables={path: (s, kind_of(_value_now(s))) for path, s in rebound.items()},
            volatile={id(at(number)): set(map(text, rows(names))) for number, names in rows(data["volatile"], 2)},
            kinds=[
                (mapping := at(number, dict), text(key), text(path), kind_of(mapping.get(key, ABSENT)))
                for number, key, path in rows(data["kinds"], 3)
            ],
            reads=[self._reads(row, own_dict) for row in self._there(data["reads"], 3)],
            class_reads=[self._reads(row, _class_values) for row in self._there(data["class_reads"], 3)],
            containers=[(at(number), text(path)) for number, path in self._there(data["containers"], 2)],
            written=[self._written(row) for row in self._there(data["written"], 4)],
            arrays=[(at(number), text(path)) for number, path in self._there(data["arrays"], 2)],
            classes={at(number, type): text(path) for number, path, _ in self._there(data["classes"], 3)},
            classes_set_by_step=frozenset(at(number, type) for number, _, is_set in self._there(data["classes"], 3) if is_set),
            functions=[(fn := at(number), text(path), frozenset(vars(fn))) for number, path in self._there(data["functions"], 2)],
            thread_locals=[(at(number), text(path)) for number, path in self._there(data["thread_locals"], 2)],
            environment=_environment(rows(data["environment"])),
            lifted=frozenset(map(text, rows(data["lifted"]))),
            scalar_types=[(slot(s), _KINDS[kind]) for s, kind in rows(data["scalar_types"], 2)],
            conditions=[self._condition(row, places) for row in rows(data["conditions"], 4)],
            items=recipe,
            placeholder_slots=slot_of,
        )

    def _there(self, data: Any, width: int) -> list[Any]:
        """Rows about objects; without those that only the function of the step reaches, where it was not given."""
        return [row for row in rows(data, width) if not self._places.addresses.is_not_given(whole(row[0]))]

    def _slot_there(self, number: Any) -> Slot | None:
        return None if self._places.is_not_given(number) else self._places.slot(number)

    def _tensor_attributes(self, row: list[Any]) -> TensorAttributesSpec:
        number, real, names = row
        place = self._places.slot(number)
        tensor = None if real is None else self._places.at(real, Tensor)
        before = dict(vars(tensor)) if tensor is not None else dict(vars(self._call_leaves[place.index]))  # type: ignore[attr-defined]
        return TensorAttributesSpec(place, tensor, before, frozenset(map(text, rows(names))))

    def _reads(self, row: list[Any], values: Callable[[Any], Mapping[str, Any]]) -> tuple[Any, str, dict[str, Any]]:
        number, path, names = row
        obj = self._places.at(number)
        found = values(obj)
        return obj, text(path), {text(name): found.get(name, ABSENT) for name in rows(names)}

    def _written(self, row: list[Any]) -> WrittenContainer:
        number, path, places, keys = row
        container = self._places.at(number)
        held = None if keys == "none" else len(container) if keys == "length" else list(container)
        return WrittenContainer(container, text(path), [self._places.slot(s) for s in rows(places)], held)

    def _condition(self, row: list[Any], places: PlaceReader) -> ScalarCondition:
        what, number, expected, why = row
        value = places.value(expected)
        if type(value) not in _KINDS.values():
            raise wrong(expected, "a number")
        guard = ScalarGuard(self._numbers[whole(number)], value, text(why))
        return ScalarCondition(text(what), tuple(guard.expression.leaves()), guard.holds)


class _ClassValues(dict[str, Any]):
    """What `getattr` reads of an object for a name that lies in its class."""

    def __init__(self, obj: Any) -> None:
        super().__init__()
        self._obj = obj

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._obj, name, default)


def _class_values(obj: Any) -> Mapping[str, Any]:
    return _ClassValues(obj)


def _value_now(slot: Slot) -> Any:
    try:
        return slot.get()
    except (LookupError, AttributeError, ValueError):
        return ABSENT


def _structure_now(slot: Slot) -> Any:
    return structure_of(_value_now(slot))


def _environment(names: list[Any]) -> dict[str, str | None]:
    return {text(name): os.environ.get(name) for name in names}


def _groups(optimizer: Optimizer, keys: list[Any]) -> list[ParamGroupSpec]:
    """The param groups as they are; more or fewer of them are seen by the comparison of texts."""
    found = []
    for group, names in zip(optimizer.param_groups, keys, strict=False):
        constants = {text(name): group[name] for name in rows(names) if name in group}
        found.append(ParamGroupSpec(tuple(group["params"]), frozenset(group), constants))
    return found
