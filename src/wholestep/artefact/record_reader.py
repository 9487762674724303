"""A record of `record_writer.py` as a `CapturedStep`, bound to the objects of this process.

Any JSON can come in: a part that is not of the form, type or range expected is an ArtefactError before anything is
changed. Calls that follow the graph are those of a short list (`print`, loggers, methods of lists and dicts); classes
are found by name among those that are loaded. Values that guards compare are read from the objects
(`assumed_objects.py` says whether they are those of the capture).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.artefact.addresses import Addresses, class_name, named
from wholestep.artefact.record_writer import CONTAINERS, DEEPEST, KINDS, LOGGING, OUTPUT_LEAVES, WRITES
from wholestep.artefact.slots_as_json import PlaceReader, rows, table, text, whole, wrong
from wholestep.capture.effects.containers import RECORDED_TYPES
from wholestep.capture.python_reads.outside_reads import STATE_READS
from wholestep.capture.scalars.symbolic_scalars import ScalarGuard, ScalarNode, is_scalar_method
from wholestep.errors import ArtefactError
from wholestep.ir.captured_step import (
    ArgumentSpec,
    CallResult,
    CapturedStep,
    Change,
    DynamicSizesSpec,
    GuardSpecs,
    HostCall,
    ObjectLink,
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
from wholestep.ir.io.arguments import ArgumentReader, TargetReader, check_identifier
from wholestep.ir.io.tensor_file import read_constant
from wholestep.ir.iter.moves import IterationFacts, note_iteration_facts
from wholestep.ir.signature import ChangeKind
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.plain_contents import PLAIN, kind_of, own_dict, structure_of
from wholestep.ir.user_objects.plain_contents import leaves as leaves_of_nest
from wholestep.ir.user_objects.slots import ABSENT, ModuleSlot, Slot
from wholestep.ir.user_objects.wrapper_tensors import WrapperForm
from wholestep.torch_private.fx_graphs import pytree


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
        if not all(isinstance(leaf, (*PLAIN, WrapperForm)) for _, leaf in leaves_of_nest(value)):
            raise wrong(class_name(value), "a constant")
        if type(after_calls) is not bool:
            raise wrong(after_calls, "true or false")
        number = None if deferred is None else self._deferred(deferred)
        place = self._places.slot(slot)
        return Change(
            ChangeKind(text(kind)),
            place,
            self._maybe_output(output),
            value,
            self._maybe_output(unless),
            number,
            after_calls,
        )

    def _result_leaf(self, data: Any) -> tuple[str, Any]:
        kind, value = rows(data)
        if kind in OUTPUT_LEAVES:
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
        if depth > DEEPEST:
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
            node = next(
                (n for c, n in pytree.SUPPORTED_NODES.items() if f"{c.__module__}:{c.__qualname__}" == name), None
            )
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
        if kind == "logger" and len(name) == 2 and name[1] in LOGGING:
            function: Callable[..., Any] = getattr(logging.getLogger(text(name[0])), name[1])
        elif kind == "print" and not name:
            function = print
        elif kind == "method" and len(name) == 2 and name[1] in WRITES:
            container = self._places.at(name[0], *RECORDED_TYPES)
            if type(container) not in RECORDED_TYPES:
                raise wrong(class_name(container), "a container")
            function = getattr(container, name[1])
        else:
            raise wrong(name, "a call that a file may make")
        made: list[Any] = []
        values = [self._template(arg, made, 0) for arg in rows(args)]
        return ReplayedCall(
            text(what), function, values, {k: self._template(v, made, 0) for k, v in table(kwargs).items()}
        )

    def _template(self, data: Any, made: list[Any], depth: int) -> Any:
        kind, *rest = rows(data)
        if depth > DEEPEST:
            raise wrong(kind, "an argument")
        if kind == "value":
            return self._places.value(rest[0])
        if kind == "again":
            return made[whole(rest[0], len(made))]
        if kind == "leaf":
            made.append(FilledLeaf(*self._result_leaf(rest[0])))
            return made[-1]
        if kind != "tuple" and kind not in CONTAINERS:
            raise wrong(kind, "an argument")
        keys = None if rest[0] is None else [self._places.value(key) for key in rows(rest[0])]
        items: list[Any] = []
        container = FreshContainer(() if kind == "tuple" else CONTAINERS[kind](), keys, items)
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
            if kind not in KINDS or (method and not is_scalar_method(method, len(operands))):
                raise wrong(method, "an operation on numbers")
            if leaf is None and not method and type(value) not in KINDS.values():
                raise wrong(hint, "a number")
            found = None if leaf is None else self._leaves[whole(leaf)]
            made = ScalarNode(None, KINDS[kind], value, text(key), method=text(method), args=operands, leaf=found)  # type: ignore[arg-type]
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
        """A node that a leaf is read from. One that was removed from the graph gets a placeholder of its own."""
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
        optimizers = {
            at(number, Optimizer): (text(path), rows(keys)) for number, path, keys in rows(data["optimizers"], 3)
        }
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
            links=[self._link(row) for row in rows(data["links"], 3)],
            classes={at(number, type): text(path) for number, path, _ in self._there(data["classes"], 3)},
            classes_set_by_step=frozenset(
                at(number, type) for number, _, is_set in self._there(data["classes"], 3) if is_set
            ),
            functions=[
                (fn := at(number), text(path), frozenset(vars(fn)))
                for number, path in self._there(data["functions"], 2)
            ],
            thread_locals=[(at(number), text(path)) for number, path in self._there(data["thread_locals"], 2)],
            environment=_environment(rows(data["environment"])),
            call_results=[_call_result(text(name)) for name in rows(data.get("call_results", []))],
            whole_reads=[
                (obj := at(number), text(path), frozenset(own_dict(obj)))
                for number, path in self._there(data.get("whole_reads", []), 2)
            ],
            lifted=frozenset(map(text, rows(data["lifted"]))),
            scalar_types=[(slot(s), KINDS[kind]) for s, kind in rows(data["scalar_types"], 2)],
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

    def _link(self, row: list[Any]) -> ObjectLink:
        parent, child, path = row
        found = self._places.at(child)
        return ObjectLink(self._places.at(parent), found, text(path), self._places.addresses.reader(child))

    def _condition(self, row: list[Any], places: PlaceReader) -> ScalarCondition:
        what, number, expected, why = row
        value = places.value(expected)
        if type(value) not in KINDS.values():
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


def _call_result(name: str) -> CallResult:
    if name not in STATE_READS:
        raise wrong(name, "a function that reads process state")
    return CallResult(name, STATE_READS[name], STATE_READS[name]())


def _environment(names: list[Any]) -> dict[str, str | None]:
    return {text(name): os.environ.get(name) for name in names}


def _groups(optimizer: Optimizer, keys: list[Any]) -> list[ParamGroupSpec]:
    """The param groups as they are; more or fewer of them are seen by the comparison of texts."""
    found = []
    for group, names in zip(optimizer.param_groups, keys, strict=False):
        constants = {text(name): group[name] for name in rows(names) if name in group}
        found.append(ParamGroupSpec(tuple(group["params"]), frozenset(group), constants))
    return found
