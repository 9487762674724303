"""What an operator writes, shares and communicates, read from its schema once per operator."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from wholestep.ir.mutable import call_on_copies
from wholestep.torch_private.operators import OpOverload, op_name, schema_of

COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "c10d_functional"})

_TORCH_NAMESPACES = COLLECTIVE_NAMESPACES | frozenset(
    "aten prims prim rngprims debugprims quantized quantized_decomposed inductor profiler c10d c10d_prims symm_mem "
    "_c10d_functional_autograd _dtensor bucketing mkl mkldnn onednn mkldnn_prims sparse static_runtime".split()
)
"""Operators of torch itself, which do nothing but what their schema says."""

_HIDDEN_WRITES = {
    # Update running statistics (arguments 3 and 4) when `training` (argument 5) is true; the schema does not say so.
    "aten::native_batch_norm": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
}

_HIDDEN_VIEWS = frozenset({"aten::_unsafe_view"})
"""Share memory with their first argument although the schema promises a new tensor."""

_IN_PLACE_OPERATORS = frozenset(
    "setitem delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
)
_IN_PLACE_METHODS = tuple(f"__{name}__" for name in sorted(_IN_PLACE_OPERATORS))
_COPIES = frozenset({"aten::_to_copy", "aten::clone", "aten::constant_pad_nd", "aten::contiguous", "aten::detach_copy"})
_MEASURES = frozenset({"aten::sym_size", "aten::sym_numel", "aten::sym_stride", "aten::sym_storage_offset"})
_POINT_TO_POINT = ("::isend", "::irecv", "::batch_p2p_ops")


def writes(node: fx.Node) -> bool:
    """Whether running the node changes the contents of one of its arguments."""
    target = node.target
    if not isinstance(target, OpOverload):
        return node.op != "output" and _writes_by_name(node)
    if _schema_writes(target):
        return True
    training = _HIDDEN_WRITES.get(op_name(target))
    return training is not None and len(node.args) > training and bool(node.args[training]) and bool(node.args[3])


def _writes_by_name(node: fx.Node) -> bool:
    """Whether what is no operator says by its name that it works in place: methods, functions and modules of torch."""
    if node.op == "call_method":
        name = str(node.target)
        return name.startswith(_IN_PLACE_METHODS) if name.startswith("__") else name.endswith("_")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if getattr(node.target, "__module__", "") == "_operator":
            return name in _IN_PLACE_OPERATORS
        return node.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_module" and node.graph.owning_module is not None:
        return getattr(node.graph.owning_module.get_submodule(str(node.target)), "inplace", False) is True
    return False


def is_arithmetic(target: Any) -> bool:
    """Whether a target is a function of Python's `operator` or `math` that changes none of its arguments."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    return module == "math" or (module == "_operator" and name not in _IN_PLACE_OPERATORS)


def is_custom_operator(target: Any) -> bool:
    """Whether a target is an operator of `torch.library`: its kernel may have effects that its schema does not tell, so
    it runs as often as in eager and in the same order."""
    return isinstance(target, OpOverload) and target.namespace not in _TORCH_NAMESPACES


def calls_custom_operator(node: fx.Node) -> bool:
    """Whether a node runs the kernel of a custom operator, perhaps on copies."""
    target = node.args[0] if node.target is call_on_copies else node.target
    return is_custom_operator(target)


def may_write(target: Any) -> bool:
    """Whether a node with this target can change the contents of an argument."""
    return isinstance(target, OpOverload) and (_schema_writes(target) or op_name(target) in _HIDDEN_WRITES)


def may_share(target: Any) -> bool:
    """Whether the result of a node with this target can share memory with an argument."""
    return target is operator.getitem or (isinstance(target, OpOverload) and bool(_shared_positions(target)))


def is_view_of_first(op: OpOverload) -> bool:
    """Whether a schema says that results share memory with the first argument, and with no other."""
    return not _schema_writes(op) and [position for position, _ in _shared_positions(op)] == [0]


def shared_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result of a node may share without writing to it (views, parts of lists)."""
    target = node.target
    if target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(target, OpOverload):
        return []
    positions = _shared_positions(target)
    if not positions:
        return []
    found: list[fx.Node] = []
    for position, name in positions:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, fx.Node)]
    return found


@lru_cache(maxsize=4096)
def returns_tensors(op: OpOverload) -> bool:
    """Whether an operator has a tensor, or a list of tensors, among its results."""
    return any("Tensor" in str(result.type) for result in schema_of(op).returns)


def keeps_elements(node: fx.Node) -> bool:
    """Whether a result holds only elements of one input, moved, cast or padded: nothing is computed, nothing drawn."""
    if not isinstance(node.target, OpOverload) or writes(node):
        return False
    return op_name(node.target) in _COPIES or len(shared_inputs(node)) == 1


def is_measure(target: Any) -> bool:
    """Whether a target only asks a tensor for its geometry, which is known before its contents are."""
    return isinstance(target, OpOverload) and op_name(target).split(".")[0] in _MEASURES


def is_point_to_point(target: Any) -> bool:
    """Whether a target sends to, or receives from, single peers: that is no collective, and no two are the same."""
    return isinstance(target, OpOverload) and _is_communication(target) and op_name(target).endswith(_POINT_TO_POINT)


def sharing_with_outputs(graph: fx.Graph) -> set[fx.Node]:
    """What leaves the graph, and everything that it is a view of."""
    found: set[fx.Node] = set()
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += shared_inputs(node)
    return found


def is_needed(node: fx.Node) -> bool:
    """What dead-code elimination must leave: effects, random draws, and collectives that are waited for."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if calls_custom_operator(node):
        return True
    return node.is_impure() or (not isinstance(target, OpOverload) and _writes_by_name(node))


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention whose dropout is 0 does not."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(schema_of(target).arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def is_communication(target: Any) -> bool:
    """Whether a target starts a collective or waits for one."""
    return isinstance(target, OpOverload) and _is_communication(target)


def is_wait(target: Any) -> bool:
    """Whether a target waits for a collective."""
    return isinstance(target, OpOverload) and _is_communication(target) and "wait_tensor" in op_name(target)


def is_collective(target: Any) -> bool:
    """Whether a target starts a collective whose result must be waited on."""
    return isinstance(target, OpOverload) and _is_communication(target) and "wait_tensor" not in op_name(target)


@lru_cache(maxsize=4096)
def _is_communication(op: OpOverload) -> bool:
    return op.namespace in COLLECTIVE_NAMESPACES


@lru_cache(maxsize=4096)
def _schema_writes(op: OpOverload) -> bool:
    return bool(schema_of(op).is_mutable)


@lru_cache(maxsize=4096)
def _shared_positions(op: OpOverload) -> tuple[tuple[int, str], ...]:
    schema = schema_of(op)
    if op_name(op) in _HIDDEN_VIEWS:
        return ((0, schema.arguments[0].name),)
    sets = [result.alias_info.before_set for result in schema.returns if result.alias_info is not None]
    shared: set[str] = set().union(*sets)
    # Of a list (`Tensor(a)[]`) the schema only tells that it is annotated: it may share with any annotated argument.
    is_list = not all(sets)
    return tuple(
        (i, a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and (is_list or a.alias_info.before_set & shared)
    )


def is_data_dependent(target: Any) -> bool:
    """Whether the value or the shape of a result depends on the contents of the arguments."""
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags


@lru_cache(maxsize=4096)
def written_positions(op: OpOverload) -> tuple[int, ...]:
    """Schema positions of the arguments whose contents an operator changes, said by its schema or not."""
    if op_name(op) in _HIDDEN_WRITES:
        return (3, 4)
    arguments = schema_of(op).arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def write_condition(op: OpOverload) -> str:
    """The boolean argument that must be true for an operator to write ("" where it always does)."""
    return "training" if op_name(op) in _HIDDEN_WRITES else ""
