"""Which nodes Inductor can have, and why not the others.

A reason is for the person who reads `ws.lower.explain`: it says what the node does that keeps it outside.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import is_communication, is_data_dependent, may_write
from wholestep.ir.graphs import tensors_in
from wholestep.ir.mutable import call_on_copies
from wholestep.lower.draw_order import why_not_drawn
from wholestep.lower.foreach import is_foreach
from wholestep.lower.in_place import changes_memory
from wholestep.lower.scalars import can_take_numbers
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload, op_name

_PLAIN_LAYOUT = torch.strided


_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default)
_WHOLE_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg)


def is_number(node: fx.Node) -> bool:
    """Whether a node stands for a Python number (or a size) rather than a tensor."""
    val = node.meta.get("val")
    return isinstance(val, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool) or is_size(node)


def is_changing(node: fx.Node) -> bool:
    """Whether a node stands for a number that may differ from call to call: a learning rate, a step count."""
    return is_number(node) and not is_size(node)


def is_size(node: fx.Node) -> bool:
    """Whether a node stands for a whole number that follows from the sizes of tensors."""
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool) or node.target in _SIZES:
        return True
    # Captured steps note of a size what it was when they were traced.
    sources = node.all_input_nodes if node.target in _WHOLE_ARITHMETIC else []
    return bool(sources) and all(map(is_size, sources))


def is_generator(node: fx.Node) -> bool:
    """Whether a node stands for a random generator, which has no shape."""
    return "val" not in node.meta and any(user.kwargs.get("generator") is node for user in node.users)


def why_not(node: fx.Node) -> str:
    """Why a node stays outside of every region; "" if Inductor can have it."""
    target = node.target
    if node.op == "get_attr":
        return "a constant of the graph, handed to regions"
    if node.op != "call_function":
        return f"a {node.op} node, not an operator"
    if is_number(node):
        return "a number, computed by Python" if is_changing(node) else ""
    if target is operator.getitem:
        return _why_not_part(node)
    if target is call_on_copies:
        return f"{node.args[0]} writes into what it is given, and has no other form"
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
        return "one number: a call is cheaper than a kernel"
    if may_write(target) and changes_memory(target):
        return changes_memory(target)
    if is_data_dependent(target):
        return "its result depends on the contents of a tensor"
    if name.startswith("aten::mkldnn_rnn_layer"):
        return "torch does not know the size of its workspace before it runs"
    if any(map(is_generator, node.all_input_nodes)):
        return "draws from a generator of the user's own"
    if why_not_drawn(node):
        return why_not_drawn(node)
    if target.namespace not in ("aten", "prims"):
        return f"an operator of {target.namespace}, which Inductor does not know"
    if "val" in node.meta and not _all_plain(node.meta["val"]):
        return "complex, sparse or quantized values"
    if any(not _all_plain(source.meta.get("val")) for source in node.all_input_nodes):
        return "reads complex, sparse or quantized values"
    if is_foreach(target) and is_tiny(node):
        return "works on single numbers: one call is cheaper than a kernel each"
    numbers = [source for source in node.all_input_nodes if is_changing(source)]
    if numbers and not (can_take_numbers(node) and _is_floating(node.meta.get("val"))):
        return f"takes {numbers[0].name}, a number that may change from call to call"
    return ""


def _why_not_part(node: fx.Node) -> str:
    source = node.args[0]
    if isinstance(source, fx.Node) and source.op == "call_function":
        return why_not(source)
    return "" if isinstance(source, fx.Node) else "an element of a Python object"


def _all_plain(val: Any) -> bool:
    if isinstance(val, list | tuple):
        return all(_all_plain(item) for item in val)
    if not isinstance(val, Tensor):
        return True
    if not isinstance(val, FakeTensor) and type(val) is not Tensor and not isinstance(val, torch.nn.Parameter):
        return False
    return val.layout is _PLAIN_LAYOUT and not val.dtype.is_complex and not val.is_quantized


def _is_floating(val: Any) -> bool:
    """Whether kernels turn a number into floating point, as the tensor of numbers has it."""
    if isinstance(val, list | tuple):
        return all(_is_floating(item) for item in val)
    return isinstance(val, Tensor) and (val.is_floating_point() or val.dtype == torch.bool)


def is_tiny(node: fx.Node) -> bool:
    """Whether a node reads tensors, all of a single element."""
    vals = [val for source in node.all_input_nodes if isinstance(val := source.meta.get("val"), Tensor)]
    return bool(vals) and all(val.dim() == 0 for val in vals)


def is_on_gpu(node: fx.Node) -> bool:
    """Whether a node makes a tensor that is not on the CPU."""
    return any(val.device.type not in ("cpu", "meta") for val in tensors_in(node.meta.get("val")))


def touches_cpu(node: fx.Node) -> bool:
    """Whether a node reads or makes tensors on the CPU (single elements, which kernels take as numbers, aside)."""
    read = [val for source in node.all_input_nodes for val in tensors_in(source.meta.get("val")) if val.dim() > 0]
    return any(val.device.type == "cpu" for val in (*read, *tensors_in(node.meta.get("val"))))


def operators_of(node: fx.Node) -> int:
    """For how many operators a node counts when a region must have some number to be worth a compiled call."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return 0
    val = node.meta.get("val")
    return len(val) if is_foreach(node.target) and isinstance(val, list | tuple) else 1
