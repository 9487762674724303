"""What capture found out (`CapturedStep`) as JSON; `record_reader.py` reads it.

    graph            the StepGraph in its own format (`ir/io/serialize.py`)
    slots            where inputs and changes lie                                    (slots_as_json.py)
    numbers          expressions of scalars, one row each: conditions and deferred numbers are computed from them
    recipe           nodes whose values guards need before the graph runs
    changes, result, calls, effects, guards      the fields of `CapturedStep`, with slots and numbers by index

Values that guards compare are not in the file as values: they are read from the objects of the new process, after their
text was found to be that of the capture (`assumed_objects.py`).
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy

from wholestep.artefact.addresses import AddressWriter, Walk, class_name
from wholestep.artefact.slots_as_json import PlaceWriter
from wholestep.capture.effects.containers import RECORDED_TYPES
from wholestep.capture.python_reads.outside_reads import STATE_READS
from wholestep.capture.scalars.symbolic_scalars import ScalarGuard, ScalarNode
from wholestep.errors import ArtefactError
from wholestep.ir.captured_step import (
    CapturedStep,
    Change,
    GuardSpecs,
    HostCall,
    ScalarCondition,
)
from wholestep.ir.deferred import (
    DeferredNumber,
    FilledLeaf,
    FreshContainer,
    HostLeaf,
    ItemLeaf,
    ReplayedCall,
    SizeLeaf,
)
from wholestep.ir.io.arguments import ArgumentWriter, target_name
from wholestep.ir.io.tensor_file import write_constant
from wholestep.ir.iter.moves import marked_moves
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.slots import MappingSlot, Slot
from wholestep.torch_private.distributed import STATE_OF_FULLY_SHARD
from wholestep.torch_private.fx_graphs import pytree

KINDS = {"int": int, "float": float, "bool": bool, "float64": numpy.float64}
CONTAINERS: dict[str, type] = {"list": list, "dict": dict, "set": set, "deque": deque, "OrderedDict": OrderedDict}
OUTPUT_LEAVES = ("output", "attached", "detached")
DEEPEST = 100


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
        if kind in OUTPUT_LEAVES:
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
            return [
                "named",
                f"{type(tree).__module__}:{type(tree).__qualname__}",
                [self._tree_of(item) for item in tree],
            ]
        if type(tree) in pytree.SUPPORTED_NODES:
            children, context = pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)
            name = f"{type(tree).__module__}:{type(tree).__qualname__}"
            return ["node", name, self._places.value(context, name), [self._tree_of(child) for child in children]]
        raise ArtefactError(
            f"the result is a {class_name(tree)}, which has no form in a file.", fix="return a tuple, list or dict."
        )

    def _host_call(self, call: HostCall) -> list[Any]:
        args = [self._places.value(arg, f"an argument of {call.path}.step()") for arg in call.args]
        kwargs = {
            key: self._places.value(arg, f"an argument of {call.path}.step()") for key, arg in call.kwargs.items()
        }
        leaves = [self._leaf(leaf) for leaf in call.leaves]
        return [self._places.at(call.scheduler, call.path), call.path, args, kwargs, leaves]

    def _effect(self, call: ReplayedCall) -> list[Any]:
        if call.once:
            raise ArtefactError(
                f"{call.text} shows a clock that capture read.", fix="take the time outside of the step."
            )
        function = call.function
        holder = getattr(function, "__self__", None)
        name = function.__name__ if hasattr(function, "__name__") else class_name(function)
        if isinstance(holder, logging.Logger) and name in LOGGING:
            target: Any = ["logger", holder.name, name]
        elif function is print:
            target = ["print"]
        elif type(holder) in RECORDED_TYPES and name in WRITES:
            target = ["method", self._places.at(holder, call.text), name]
        else:
            raise ArtefactError(
                f"the call of {call.text} cannot be saved: it runs Python of the user's after each step."
            )
        made: dict[int, int] = {}
        args = [self._template(arg, made, call.text) for arg in call.args]
        return [
            call.text,
            target,
            args,
            {key: self._template(arg, made, call.text) for key, arg in call.kwargs.items()},
        ]

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
        if CONTAINERS.get(kind.__name__) is not kind:
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
            "containers": [
                [at(container, path), path] for container, path in specs.containers if STATE_OF_FULLY_SHARD not in path
            ],
            "written": [
                [at(w.container, w.path), w.path, [slot(s) for s in w.places], _form_of_keys(w.keys)]
                for w in specs.written
            ],
            "arrays": [[at(array, path), path] for array, path in specs.arrays],
            "links": [[at(link.parent, link.path), at(link.child, link.path), link.path] for link in specs.links],
            "classes": [[at(cls, path), path, cls in specs.classes_set_by_step] for cls, path in specs.classes.items()],
            "functions": [[at(fn, path), path] for fn, path, _ in specs.functions],
            "thread_locals": [[at(local, path), path] for local, path in specs.thread_locals],
            "environment": sorted(specs.environment),
            "call_results": sorted({each.name for each in specs.call_results}),
            "whole_reads": [[at(obj, path), path] for obj, path, _ in specs.whole_reads],
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
    kept = path not in specs.rebound_variables and path not in specs.lifted
    return kept and STATE_OF_FULLY_SHARD not in path


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
    elif specs.whole_environment is not None:
        why = "all environment variables, which the step reads"
    elif specs.files:
        why = f"the file {specs.files[0].path}, which the step reads"
    elif unknown := [each.name for each in specs.call_results if each.name not in STATE_READS]:
        why = f"the result of {unknown[0]}, which the step reads"
    elif captured.clock_readings:
        why = "a clock, which the step reads"
    elif marked_moves(captured.step_graph.gm.graph):
        why = "updates that a pass moved into the next iteration"
    if why:
        raise ArtefactError(f"the step cannot be saved: it depends on {why}.", fix="take that out of the step.")


LOGGING = frozenset({"debug", "info", "warning", "error", "critical", "log", "exception"})


WRITES = frozenset(
    "append extend insert update add pop clear remove discard setdefault popitem appendleft extendleft popleft rotate "
    "reverse sort move_to_end subtract difference_update intersection_update symmetric_difference_update __setitem__ "
    "__delitem__ __iadd__ __imul__ __ior__ __iand__ __isub__ __ixor__".split()
)
"""Methods of lists, dicts and the like that a file may name: calls that a step makes after each run."""
