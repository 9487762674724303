"""The end of the graph: `copy_` into every input whose memory the step wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from wholestep.capture.objects.swapped_state import Tracked
from wholestep.errors import AliasError
from wholestep.ir.meta import NodeMeta, set_node_meta
from wholestep.torch_private.dtensor import local_of
from wholestep.torch_private.fake_tensors import storage_key

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture


def add_write_backs(capture: Capture) -> list[tuple[fx.Node, fx.Node]]:
    """Add the copies to the graph; the inputs with the values that they take."""
    found: list[tuple[fx.Node, fx.Node]] = []
    written: list[Tracked] = []
    for node in [n for n in capture.graph.nodes if n.op == "placeholder"]:
        fake = node.meta.get("val")
        tracked = capture.table.by_fake.get(id(fake)) if isinstance(fake, Tensor) else None
        if tracked is not None and capture.recorder.values.is_written(fake):
            found.append((node, capture.recorder.node_of(fake)))
            written.append(tracked)
    _refuse_shared_memory(capture.table.tracked.values(), written)
    copies = []
    for target, value in found:
        if value is target:
            continue
        copy = capture.graph.call_function(torch.ops.aten.copy_.default, (target, value))
        copy.meta["val"] = target.meta["val"]
        set_node_meta(copy, NodeMeta(phase="epilogue"))
        copies.append((target, value))
    return copies


def _refuse_shared_memory(tracked: Iterable[Tracked], written: list[Tracked]) -> None:
    """Two inputs over the same memory, one of them written: the graph would not see the other change."""
    by_storage: dict[int, list[Tracked]] = {}
    for item in tracked:
        if local_of(item.real).numel():
            by_storage.setdefault(storage_key(local_of(item.real)), []).append(item)
    for item in written:
        for other in by_storage.get(storage_key(local_of(item.real)), ()):
            if other is not item and _overlap(local_of(item.real), local_of(other.real)):
                raise AliasError(
                    f"{item.slot.path} and {other.slot.path} share memory, and the step writes to the first.",
                    fix="clone() one of them, or tie them as one parameter.",
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    return a0 < b1 and b0 < a1


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte in the storage, and the one after the last."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + length * tensor.element_size()
