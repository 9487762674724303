"""What a graph's gradient with respect to log-probabilities is made of: a sum of terms, read off the operators.

    nll_loss_backward(g, logp, labels, weight, mean, ..)      one element per row: at its label
    scatter_add(zeros, 1, index, g)                           one element per row: the backward of `gather`
    expand(g, [256, 512])                                     one value for a whole row: label smoothing
    mul(g, targets)                                           a whole tensor: soft targets

Why it matters: the gradient of the logits is `g - softmax * sum(g)`. Of the first three `sum(g)` is known per row
without a pass over the classes, and an element per row is added where the result lies, instead of a tensor of zeros
around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.ir.call_arguments import argument
from wholestep.passes.loss.class_rows import VIEWS, ClassRows, shape_of, value_of

aten = torch.ops.aten
NLL_FORWARD = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
NLL_BACKWARD = frozenset({aten.nll_loss_backward.default, aten.nll_loss2d_backward.default})
SCATTERS = frozenset({aten.scatter_add.default, aten.scatter.src})
_ZEROS = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default})
_SCALED = frozenset({aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor})
_MOST_TERMS = 16


@dataclass(frozen=True)
class Term:
    """One term of a gradient, times a Python number."""

    kind: str
    """label (of `nll_loss`), element (of a scatter), row or dense."""
    node: fx.Node
    rows: ClassRows
    factor: float = 1.0

    @property
    def place(self) -> tuple[Any, ...]:
        """What decides which elements the term is: equal for terms at the same elements."""
        if self.kind == "label":
            return (argument(self.node, "target"), argument(self.node, "ignore_index"))
        return (argument(self.node, "index"),)


def terms_of(node: fx.Node, rows: ClassRows, factor: float = 1.0) -> list[Term]:
    """The terms of a gradient, from its last operator on; a single dense one if nothing is known."""
    found = _terms(node, rows, factor, 0)
    return found if len(found) <= _MOST_TERMS else [Term("dense", node, rows, factor)]


def _terms(node: fx.Node, rows: ClassRows, factor: float, depth: int) -> list[Term]:
    target = node.target
    dense = [Term("dense", node, rows, factor)]
    if depth > _MOST_TERMS or node.op != "call_function":
        return dense
    source = node.args[0] if node.args else None
    if target in NLL_BACKWARD:
        return [Term("label", node, rows, factor)]
    if is_one_element_per_row(node, rows):
        return [Term("element", node, rows, factor)]
    if not isinstance(source, fx.Node):
        return dense
    if target in VIEWS:
        seen = rows.seen_as(shape_of(source))
        inner = [] if seen is None else _terms(source, seen, factor, depth + 1)
        return inner if inner and all(term.kind in ("label", "element") for term in inner) else dense
    if target is aten.expand.default:
        # One value per row, or one for all: it broadcasts along the classes.
        shape = shape_of(source)
        at = rows.dim - len(rows.shape) + len(shape)
        return [Term("row", source, rows, factor)] if at < 0 or shape[at] == 1 else dense
    if target is aten.neg.default:
        return _terms(source, rows, -factor, depth + 1)
    if target in _SCALED and isinstance(node.args[1], int | float):
        number = float(node.args[1])
        divides = target in (aten.div.Scalar, aten.div.Tensor)
        if divides and number == 0.0:
            return dense
        return _terms(source, rows, factor / number if divides else factor * number, depth + 1)
    if target is not aten.add.Tensor or node.kwargs or not isinstance(other := node.args[1], fx.Node):
        return dense
    if not shape_of(source) == shape_of(other) == rows.shape:
        return dense
    return _terms(source, rows, factor, depth + 1) + _terms(other, rows, factor, depth + 1)


def is_one_element_per_row(node: fx.Node, rows: ClassRows) -> bool:
    """Whether a node is zero but for one element per row, which it scatters there."""
    if node.target not in SCATTERS or shape_of(node) != rows.shape:
        return False
    zeros, dim, index, source = node.args[:4]
    if not (isinstance(zeros, fx.Node) and isinstance(dim, int) and dim % len(rows.shape) == rows.dim):
        return False
    return is_zero(zeros) and list(shape_of(index)) == list(shape_of(source)) == rows.row_shape


def is_zero(node: fx.Node) -> bool:
    """Whether a node is a new tensor of zeros."""
    if node.target is aten.full.default or node.target is aten.full_like.default:
        return len(node.args) > 1 and isinstance(node.args[1], int | float) and node.args[1] == 0
    return node.target in _ZEROS and value_of(node) is not None
