"""Operators of `torch.library`: each call is one node, whatever the operator returns.

    the operator returns                      recorded
    new tensors, or nothing                   the call
    its input, and its schema says so         the call; the result is the input
    a view of its input, by its schema        the call; what it returns can be read, not written to
    its input or a view of it, and its        `call_on_copies`, which returns new memory; what it returns can be read,
    schema says nothing                       not written to

Where the schema says nothing the fake kernel may be an approximation: the real one may return an alias where the fake
one does, or a new tensor. Reading the result of the call is right in both cases. A write through it would be right in
one of them, so `Values` refuses it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from wholestep.capture.graph.tensor_values import OPAQUE, Value
from wholestep.errors import AliasError
from wholestep.ir.effects import OperatorFacts, is_view_of_first
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.meta import user_location
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.operators import has_autograd_kernel

if TYPE_CHECKING:
    from wholestep.capture.graph.recorder import Recorder


class CustomOperators:
    """Records custom operators that do not write to their arguments."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nodes = recorder.nodes
        self._values = recorder.values

    def record(
        self,
        func: Any,
        facts: OperatorFacts,
        fake_args: list[Any],
        fake_kwargs: dict[str, Any],
        node_args: list[Any],
        node_kwargs: dict[str, Any],
        out: Any,
    ) -> Any:
        """Record a call whose fake result is `out`. Returns what the step gets."""
        inputs = list(tensors_in([fake_args, list(fake_kwargs.values())]))
        results = list(tensors_in(out))
        sources = [self._source(result, inputs, declared=facts.is_view) for result in results]
        shared = [(result, source) for result, source in zip(results, sources, strict=True) if source is not None]
        if not shared or (facts.is_view and all(result is source for result, source in shared)):
            node = self._nodes.create(func, tuple(node_args), node_kwargs, out)
            self._recorder.register_outputs(node, out)
            return out
        if is_view_of_first(func):
            node = self._nodes.create(func, tuple(node_args), node_kwargs, out)
            parts = list(self._parts(node, out))
        else:
            node = self._nodes.create(call_on_copies, (func, (), *node_args), node_kwargs, tuple(results))
            parts = list(self._parts(node, tuple(results)))
        stand_ins: dict[int, Tensor] = {}
        for got, result, source in zip(parts, results, sources, strict=True):
            if source is None:
                self._recorder.register_outputs(got, result)
                continue
            if result is source and facts.is_view:
                continue
            seen = self._alias(func, result) if self._values.knows(result) else result
            stand_ins[id(result)] = seen
            got.meta["val"] = seen
            parent = self._values.value(source)
            self._values.add_view(seen, Value(seen, got, parent.base, parent, OPAQUE))
        return _replaced(out, stand_ins)

    def _parts(self, node: fx.Node, out: Any) -> Iterator[fx.Node]:
        """One node per tensor of a result."""
        if isinstance(out, Tensor):
            yield node
        elif isinstance(out, list | tuple):
            for i, item in enumerate(out):
                yield from self._parts(self._nodes.create(operator.getitem, (node, i), {}, item), item)

    def _source(self, result: Tensor, inputs: list[Tensor], *, declared: bool) -> Tensor | None:
        """The input that shares memory with a result, by the fake kernel or by the schema."""
        if result.layout is not torch.strided:
            return None
        for source in inputs:
            if source is result or storage_key(source) == storage_key(result):
                return source
        return inputs[0] if declared and inputs else None

    def _alias(self, func: Any, source: Tensor) -> Tensor:
        """A new tensor over the memory of an input that a fake kernel returned."""
        if source.requires_grad and not has_autograd_kernel(func):
            raise AliasError(
                f"{func} returns an input that requires grad, and its schema does not say so.",
                fix="return a new tensor (x.clone()), or declare it: (Tensor(a) x) -> Tensor(a).",
                location=user_location(),
            )
        return torch.ops.aten.alias.default(source)  # type: ignore[no-any-return]


def _replaced(out: Any, stand_ins: dict[int, Tensor]) -> Any:
    if isinstance(out, list | tuple):
        return type(out)(_replaced(item, stand_ins) for item in out)
    return stand_ins.get(id(out), out)
