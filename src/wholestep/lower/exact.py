"""Which operators Inductor computes to the last bit as eager does, and the settings under which it does.

Two kinds do: those that only move values, and those whose result IEEE 754 prescribes (sums, products, quotients,
comparisons, roundings), as long as nothing is contracted and each result is rounded to its own dtype. Others have
kernels of their own in eager: exponentials and roots of vector libraries, fused multiply-adds in `lerp`, `addcmul` and
`add` with an `alpha`, the order of a sum. They stay outside.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.call_arguments import argument
from wholestep.ir.effects import shared_inputs
from wholestep.ir.graphs import tensors_in
from wholestep.lower.support import is_number
from wholestep.torch_private.inductor import keeps_roundings
from wholestep.torch_private.operators import OpOverload, plain_name

SETTINGS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "pattern_matcher": False,
    "joint_graph_constant_folding": False,
    "fallback_random": True,
}
"""Of Inductor; those that the installed torch does not know are left out."""

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
    """Why the compiled form of a node might differ from eager in the last bit; "" if it does not."""
    target = node.target
    if is_number(node) or target is operator.getitem or not isinstance(target, OpOverload):
        return ""
    name = plain_name(target).removeprefix("_foreach_").removesuffix("_")
    if not keeps_roundings() and _low_precisions(node):
        return "this version of torch leaves roundings to lower precision out (exact=True)"
    if _rounds_to_single(node):
        return "rounds float64 to float32, which C++ may leave out (exact=True)"
    if name not in _PRESCRIBED and name not in _MOVING and not _is_view(node):
        return "compiled, it may round differently (exact=True)"
    if argument(node, "alpha", 1) != 1:
        return "multiplies and adds with one rounding in eager (exact=True)"
    if argument(node, "rounding_mode", None) is not None:
        return "a division that rounds (exact=True)"
    if name == "div" and _divides_by_number_on_gpu(node):
        return "multiplies by the inverse of a number in eager (exact=True)"
    if name in _PRESCRIBED and any(not _fits(value, node) for value in _numbers(node)):
        return "has a number that its dtype cannot hold (exact=True)"
    return ""


def _is_view(node: fx.Node) -> bool:
    tensors = [source for source in node.all_input_nodes if not is_number(source)]
    return len(tensors) == 1 and shared_inputs(node) == tensors


def _numbers(node: fx.Node) -> list[Any]:
    """The numbers that a node computes with, those that change from call to call as nodes."""
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
    """Whether a number is the same in the dtype of the results; eager keeps it in float32 beside lower precisions."""
    low = _low_precisions(node)
    if not low:
        return True
    return not isinstance(value, fx.Node) and all(torch.tensor(value, dtype=dtype).item() == value for dtype in low)


def _rounds_to_single(node: fx.Node) -> bool:
    """Whether a float64 becomes a float32: in scalar code (Inductor's for float64 without AVX-512) compilers drop the
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
