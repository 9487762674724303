"""Which nodes may be part of a region, and why the others may not.

    why_not         what Inductor cannot compile, or is not worth compiling
    why_not_exact   under `exact=True`: what Inductor does not compute bitwise as eager does
    predicates      what the user refuses

Reasons are for readers of `ws.lower.explain`: they say what the node does that keeps it outside.

Two kinds of operators are bitwise equal: those that only move values, and those whose result IEEE 754 prescribes (sums,
products, quotients, comparisons, roundings), as long as nothing is contracted and each result is rounded to its own
dtype. Others have kernels of their own in eager: exponentials and roots of vector libraries, fused multiply-adds in
`lerp`, `addcmul` and `add` with an `alpha`, the order of a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import LowerError, OptionError
from wholestep.ir.call_arguments import argument
from wholestep.ir.effects import (
    changes_layout,
    is_communication,
    is_data_dependent,
    may_write,
    shared_inputs,
    writes_into_out,
)
from wholestep.ir.graph_functions import CHECKS, call_on_copies
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import hint_of
from wholestep.ir.meta import node_meta
from wholestep.lower.decompositions import is_foreach, why_not_random
from wholestep.lower.scalar_inputs import accepts_scalar_inputs
from wholestep.torch_private.fake_tensors import FakeTensor, has_symbolic_sizes
from wholestep.torch_private.inductor import keeps_roundings
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload, op_name, plain_name

_PLAIN_LAYOUT = torch.strided


_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default)
_WHOLE_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg)


def is_number(node: fx.Node) -> bool:
    """True if a node is a Python scalar (or a size) rather than a tensor."""
    val = node.meta.get("val")
    return isinstance(val, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool) or is_size(node)


def is_changing(node: fx.Node) -> bool:
    """True if a node is a scalar that may differ from call to call: a learning rate, a step count."""
    return is_number(node) and not is_size(node)


def is_size(node: fx.Node) -> bool:
    """True if a node is an integer that follows from the sizes of tensors."""
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool) or node.target in _SIZES:
        return True
    # The metadata of captured steps has the value that a size had at trace time.
    sources = node.all_input_nodes if node.target in _WHOLE_ARITHMETIC else []
    return bool(sources) and all(map(is_size, sources))


def is_generator(node: fx.Node) -> bool:
    """True if a node is a `torch.Generator`, which has no metadata."""
    return "val" not in node.meta and any(user.kwargs.get("generator") is node for user in node.users)


def why_not(node: fx.Node) -> str:
    """Why a node stays outside of every region; "" if Inductor can compile it."""
    target = node.target
    if node.op == "get_attr":
        return "a constant of the graph, an input of regions"
    if node.op != "call_function":
        return f"a {node.op} node, not an operator"
    if target in CHECKS:
        return "checks what the graph takes for granted, before anything is written"
    if is_number(node):
        return "a scalar, computed by Python" if is_changing(node) else _why_not_sized(node)
    if target is operator.getitem:
        return _why_not_part(node)
    if target is call_on_copies:
        return f"{node.args[0]} writes into its arguments, and has no functional form"
    if isinstance(target, HigherOrderOperator):
        return f"{getattr(target, '__name__', target)} calls graphs of its own"
    if not isinstance(target, OpOverload):
        return f"{getattr(target, '__name__', target)} is a Python function; make_fx shows its operators"
    return _why_not_operator(node, target)


def _why_not_operator(node: fx.Node, target: OpOverload) -> str:
    name = op_name(target)
    if is_communication(target):
        return "communicates between ranks"
    if name.startswith("aten::_fused_"):
        return "a fused optimizer: one call for all parameters already"
    if name == "aten::_amp_update_scale":
        return "one scalar: a call is cheaper than a kernel"
    if may_write(target) and why_not_write(target):
        return why_not_write(target)
    if is_data_dependent(target):
        return "its result depends on the contents of a tensor"
    if name.startswith("aten::mkldnn_rnn_layer"):
        return "torch does not know the size of its workspace before it runs"
    if any(map(is_generator, node.all_input_nodes)):
        return "a random op with its own generator"
    if why_not_random(node):
        return why_not_random(node)
    if target.namespace not in ("aten", "prims"):
        return f"an operator of {target.namespace}, which Inductor does not know"
    if "val" in node.meta and not _all_plain(node.meta["val"]):
        return "complex, sparse or quantized values"
    if any(not _all_plain(source.meta.get("val")) for source in node.all_input_nodes):
        return "reads complex, sparse or quantized values"
    if _why_not_sized(node):
        return _why_not_sized(node)
    if is_foreach(target) and is_tiny(node):
        return "works on 0-dim tensors: one call is cheaper than a kernel each"
    scalars = [source for source in node.all_input_nodes if is_changing(source)]
    if scalars and not (accepts_scalar_inputs(node) and _is_floating(node.meta.get("val"))):
        return f"takes {scalars[0].name}, a scalar that may change from call to call"
    return ""


def why_not_write(op: OpOverload) -> str:
    """Why an operator that writes cannot be part of a region; "" if it can."""
    if changes_layout(op):
        return "changes the shape or the memory of a tensor that others hold"
    if writes_into_out(op):
        return "writes its result into an argument (out=)"
    return ""


def _why_not_part(node: fx.Node) -> str:
    source = node.args[0]
    if isinstance(source, fx.Node) and source.op == "call_function":
        return why_not(source)
    return "" if isinstance(source, fx.Node) else "an element of a Python object"


def _why_not_sized(node: fx.Node) -> str:
    sized = next((each for each in (node, *node.all_input_nodes) if has_data_size(each.meta.get("val"))), None)
    return "" if sized is None else f"{sized.name} has a size that the contents of a tensor decide"


def has_data_size(val: Any) -> bool:
    """True if a value is, or has, a size without a hint: only a run decides it."""
    if isinstance(val, list | tuple):
        return any(map(has_data_size, val))
    if isinstance(val, Tensor):
        return has_symbolic_sizes(val) and any(hint_of(size) is None for size in val.shape)
    return isinstance(val, torch.SymInt | torch.SymBool | torch.SymFloat) and hint_of(val) is None


def _all_plain(val: Any) -> bool:
    if isinstance(val, list | tuple):
        return all(_all_plain(item) for item in val)
    if not isinstance(val, Tensor):
        return True
    if not isinstance(val, FakeTensor) and type(val) is not Tensor and not isinstance(val, torch.nn.Parameter):
        return False
    return val.layout is _PLAIN_LAYOUT and not val.dtype.is_complex and not val.is_quantized


def _is_floating(val: Any) -> bool:
    """True if kernels convert scalars to floating point, as the tensor of packed scalars has them."""
    if isinstance(val, list | tuple):
        return all(_is_floating(item) for item in val)
    return isinstance(val, Tensor) and (val.is_floating_point() or val.dtype == torch.bool)


def is_tiny(node: fx.Node) -> bool:
    """True if a node reads tensors, all of them 0-dim."""
    vals = [val for source in node.all_input_nodes if isinstance(val := source.meta.get("val"), Tensor)]
    return bool(vals) and all(val.dim() == 0 for val in vals)


def is_on_gpu(node: fx.Node) -> bool:
    """True if a node computes a tensor that is not on the CPU."""
    return any(val.device.type not in ("cpu", "meta") for val in tensors_in(node.meta.get("val")))


def touches_cpu(node: fx.Node) -> bool:
    """True if a node reads or computes tensors on the CPU (except for 0-dim inputs, which kernels take as scalars)."""
    read = [val for source in node.all_input_nodes for val in tensors_in(source.meta.get("val")) if val.dim() > 0]
    return any(val.device.type == "cpu" for val in (*read, *tensors_in(node.meta.get("val"))))


def operators_of(node: fx.Node) -> int:
    """How many operators a node counts for in `min_aten_ops`."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return 0
    val = node.meta.get("val")
    return len(val) if is_foreach(node.target) and isinstance(val, list | tuple) else 1


NodePredicate = Callable[[fx.Node], bool]
SubgraphPredicate = Callable[[list[fx.Node]], bool]


def any_node(node: fx.Node) -> bool:
    """The predicate that refuses nothing."""
    return True


def any_subgraph(nodes: list[fx.Node]) -> bool:
    """The predicate that refuses nothing."""
    return True


def check_callable(**given: Any) -> None:
    """Raise if a predicate or dumper is not callable."""
    for name, value in given.items():
        if not callable(value):
            raise OptionError(f"{name}={value!r} cannot be called.", fix="give a function, or leave it out.")


def accepts_node(predicate: NodePredicate, node: fx.Node) -> bool:
    """The answer of a predicate for a node; raises if it is not a bool."""
    return _ask(predicate, node, "node_predicate", node, f"for {node.name}")


def accepts_subgraph(predicate: SubgraphPredicate, nodes: list[fx.Node]) -> bool:
    """The answer of a predicate for the nodes of a region; raises if it is not a bool."""
    where = f"for the {len(nodes)} nodes from {nodes[0].name} to {nodes[-1].name}"
    return _ask(predicate, list(nodes), "subgraph_predicate", nodes[0], where)


def _ask(predicate: Callable[[Any], bool], argument: Any, name: str, node: fx.Node, where: str) -> bool:
    try:
        answer = predicate(argument)
    except Exception as error:
        raise LowerError(
            f"{name} raised {type(error).__name__} {where}: {error}",
            fix=f"let {name} return True or False for every node it is asked about.",
            node=node.format_node() or node.name,
            location=node_meta(node).location,
        ) from error
    if not isinstance(answer, bool):
        raise LowerError(
            f"{name} returned {answer!r} {where}.",
            fix=f"let {name} return True or False.",
            node=node.format_node() or node.name,
            location=node_meta(node).location,
        )
    return answer


EXACT_SETTINGS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "pattern_matcher": False,
    "joint_graph_constant_folding": False,
    "fallback_random": True,
}
"""Inductor settings for `exact=True`; those that the installed torch does not have are left out."""

_PRESCRIBED = frozenset(
    "add sub rsub mul div neg abs reciprocal square maximum minimum clamp clamp_min clamp_max relu threshold_backward "
    "hardtanh leaky_relu eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
    "bitwise_not bitwise_xor isnan isinf sign floor ceil trunc native_dropout_backward".split()
)
_MOVING = frozenset(
    "where masked_fill fill full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full empty_like "
    "arange scalar_tensor clone copy _to_copy cat stack slice_scatter select_scatter embedding gather index_select "
    "constant_pad_nd flip repeat tril triu".split()
)
_ROUNDED = (torch.bfloat16, torch.float16)


def why_not_exact(node: fx.Node) -> str:
    """Why the compiled form of a node may not be bitwise equal to eager; "" if it is."""
    target = node.target
    if is_number(node) or target is operator.getitem or not isinstance(target, OpOverload):
        return ""
    name = plain_name(target).removeprefix("_foreach_").removesuffix("_")
    if not keeps_roundings() and _low_precisions(node):
        return "this version of torch skips roundings to lower precision (exact=True)"
    if _rounds_to_single(node):
        return "rounds float64 to float32, which C++ compilers may skip (exact=True)"
    if name not in _PRESCRIBED and name not in _MOVING and not _is_view(node):
        return "compiled, it may round differently (exact=True)"
    if argument(node, "alpha", 1) != 1:
        return "a fused multiply-add in eager (exact=True)"
    if argument(node, "rounding_mode", None) is not None:
        return "a division that rounds (exact=True)"
    if name == "div" and _divides_by_number_on_gpu(node):
        return "multiplies by the inverse of a scalar in eager (exact=True)"
    if name in _PRESCRIBED and any(not _fits(value, node) for value in _numbers(node)):
        return "has a scalar that its dtype cannot represent (exact=True)"
    return ""


def _is_view(node: fx.Node) -> bool:
    tensors = [source for source in node.all_input_nodes if not is_number(source)]
    return len(tensors) == 1 and shared_inputs(node) == tensors


def _numbers(node: fx.Node) -> list[Any]:
    """The scalars that a node computes with; those that change from call to call are nodes."""
    found: list[Any] = []
    stack = [*node.args, *node.kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, list | tuple):
            stack += value
        elif type(value) in (int, float) or (isinstance(value, fx.Node) and is_number(value)):
            found.append(value)
    return found


def _fits(value: Any, node: fx.Node) -> bool:
    """True if a scalar is exact in the dtype of the results; eager uses float32 beside lower precisions."""
    low = _low_precisions(node)
    if not low:
        return True
    return not isinstance(value, fx.Node) and all(torch.tensor(value, dtype=dtype).item() == value for dtype in low)


def _rounds_to_single(node: fx.Node) -> bool:
    """True if a float64 becomes a float32: in scalar code (Inductor's for float64 without AVX-512) compilers drop the
    rounding where the value is widened again."""
    before = {val.dtype for each in node.all_input_nodes for val in tensors_in(each.meta.get("val"))}
    after = {val.dtype for val in tensors_in(node.meta.get("val"))}
    return torch.float64 in before and torch.float32 in after


def _low_precisions(node: fx.Node) -> set[torch.dtype]:
    values = [val for each in (node, *node.all_input_nodes) for val in tensors_in(each.meta.get("val"))]
    return {val.dtype for val in values if val.dtype in _ROUNDED}


def _divides_by_number_on_gpu(node: fx.Node) -> bool:
    on_gpu = any(val.device.type != "cpu" for val in tensors_in(node.meta.get("val")))
    return on_gpu and (bool(_numbers(node)) or any(_is_host_number(source) for source in node.all_input_nodes))


def _is_host_number(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.dim() == 0 and val.device.type == "cpu"
