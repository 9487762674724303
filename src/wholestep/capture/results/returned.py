"""What the step returned: outputs of the graph in the places of tensors and numbers, and objects as they are."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep.capture.python_reads.clocks import refuse_clocks
from wholestep.capture.python_reads.python_state import holds_tensor
from wholestep.capture.python_reads.stand_ins import real_of
from wholestep.capture.results.bindings import Bindings
from wholestep.capture.scalars.host_scalars import HostNumber
from wholestep.capture.scalars.scalars import ScalarNode, scalar_of
from wholestep.errors import ItemError, UnsupportedError
from wholestep.ir.io.result_tree import describe, describe_leaf
from wholestep.ir.known_values import ItemLeaf
from wholestep.ir.signature import OutputKind
from wholestep.ir.user_objects.call_tree import Flat
from wholestep.torch_private.dtensor import is_dtensor, local_of, spec_of
from wholestep.torch_private.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture


def returned_leaves(capture: Capture, bindings: Bindings, result: Flat) -> list[tuple[str, Any]]:
    """How the runtime gets each leaf of the result: see `Captured.result_leaves`."""
    return [_leaf(capture, bindings, leaf, path) for leaf, path in zip(result.leaves, result.paths, strict=True)]


def describe_result(result: Flat, leaves: list[tuple[str, Any]]) -> Any:
    """The tree of the result for the signature."""
    return describe(result.rebuild([_Found(leaf) for leaf in leaves]), _output_of)


def _leaf(capture: Capture, bindings: Bindings, leaf: Any, path: str) -> tuple[str, Any]:
    def output(node: Any) -> int:
        return bindings.output(OutputKind.RESULT, f"result{path}", node)

    refuse_clocks(leaf, f"result{path}")
    leaf = real_of(leaf)
    if is_dtensor(leaf):
        return "sharded", (output(capture.recorder.node_of(local_of(leaf))), spec_of(leaf))
    if isinstance(leaf, Tensor):
        node, fake = _tensor(capture, leaf)
        if fake.is_floating_point() and not fake.requires_grad:
            return "detached", output(node)
        return "attached" if fake.requires_grad and not fake.is_leaf else "output", output(node)
    scalar = scalar_of(leaf)
    if scalar is not None:
        return "output", output(_number(scalar, path))
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        node = capture.shape_arg(leaf)
        return ("output", output(node)) if isinstance(node, fx.Node) else ("value", node)
    if isinstance(leaf, HostNumber):
        return "host", leaf
    if isinstance(leaf, GeneratorType) or _hides_tensor(leaf):
        raise UnsupportedError(
            f"result{path} is a {type(leaf).__name__} with tensors inside, which the graph cannot rebuild.",
            fix="return a dict, tuple or list; or register the class with torch.utils._pytree.register_dataclass.",
        )
    return "value", leaf


def _tensor(capture: Capture, leaf: Tensor) -> tuple[fx.Node, Tensor]:
    """The node that holds a returned tensor, and the fake that stands for it."""
    tracked = capture.table.by_fake.get(id(leaf))
    if not isinstance(leaf, FakeTensor):
        tracked = capture.table.tracked.get(id(leaf))
        leaf = capture.lift(leaf)
    if tracked is None:
        return capture.recorder.node_of(leaf), leaf
    return next(node for node in capture.inputs.slot_of if node.meta.get("val") is tracked.input), leaf


def _number(scalar: ScalarNode, path: str) -> Any:
    for leaf in scalar.leaves():
        if isinstance(leaf, ItemLeaf) and not leaf.known:
            raise ItemError(
                f"result{path} is a number taken out of a tensor.",
                fix="return the tensor from the step and read its value outside.",
            )
    return scalar.fx_arg()


def _hides_tensor(value: Any) -> bool:
    """Whether an object that is no tree holds tensors of the trace in its attributes."""
    if isinstance(value, torch.nn.Module | Optimizer | type):
        return False
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return holds_tensor(list(value))
    return any(holds_tensor(v) for v in getattr(value, "__dict__", {}).values())


class _Found:
    """A leaf of the result on its way into the description."""

    def __init__(self, found: tuple[str, Any]) -> None:
        self.found = found


def _output_of(value: Any) -> int | dict[str, Any] | None:
    if not isinstance(value, _Found):
        return None
    kind, found = value.found
    if kind == "sharded":
        return int(found[0])
    return int(found) if kind in ("output", "attached", "detached") else describe_leaf(found)
