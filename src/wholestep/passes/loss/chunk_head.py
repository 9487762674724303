"""Compute the product of a head, its loss and their backward in chunks of tokens: the logits never exist whole.

    before                                 after: for each chunk c of n tokens, one behind the other
    x = mm(h, w)                           x_c = mm(h_c, w)
    p = _log_softmax(x, 1)                 p_c = _log_softmax(x_c, 1)
    loss, count = nll_loss_forward(p, y)   loss_c = nll_loss_forward(p_c, y_c, sum)
    g = nll_loss_backward(1, p, y, ..)     g_c = nll_loss_backward(1, p_c, y_c, .., count)
    d = _log_softmax_backward_data(g, p)   d_c = _log_softmax_backward_data(g_c, p_c)
    dw = mm(d.t(), h)                      dw = dw + mm(d_c.t(), h_c)
    dh = mm(d, w.t())                      dh_c = mm(d_c, w.t())
                                           loss = (loss_0 + loss_1 ..) / count;  dh = cat(dh_0, dh_1, ..)

The gradient of a chunk is computed right behind its logits, and both die with it. For that the gradient of the loss has
to be known before the loss is: it is 1, times what does not depend on the logits (a loss scale, the number of labels).
The backward then begins at `dh` (`NodeMeta.starts_backward`).

Needs: static sizes; cross entropy of labels (mean or sum; weights, an ignored label) of a product that nothing else
reads.  Numerics: approximates(4): sums over tokens are sums of sums, those of half types added in float32.  Legal
because each row of the logits has its own loss and gradient.  Cost: the gradient of the weight is read and written once
per chunk.  `fuse_loss` comes after this pass, and sees one loss per chunk; behind it nothing is left to cut.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from wholestep.errors import invalid_value
from wholestep.ir.call_arguments import argument
from wholestep.ir.meta import node_meta, update_node_meta
from wholestep.passes.common_subexpressions import is_pure
from wholestep.passes.engine.contract import approximates, graph_optimization_pass
from wholestep.passes.loss.class_rows import PERMUTATIONS, VIEWS, ClassRows, NodeBuilder, shape_of, value_of

aten = torch.ops.aten
_LOG_SOFTMAX = aten._log_softmax.default
_CAST = aten._to_copy.default
_HALF = (torch.float16, torch.bfloat16)
_SUM = 2
"""`reduction` of `nll_loss`: 1 is the mean."""
_MOST_NODES = 64


@dataclass(frozen=True)
class GradientReader:
    """A reader of the gradient of the logits: a product with it, or its sum over the tokens."""

    kind: str
    """weight (mm(d.t(), h)), tokens (mm(d, w)) or bias (sum(d, [0]))."""
    node: fx.Node


@dataclass(frozen=True)
class HeadPlan:
    """A head with its loss, and everything between its product and the products of its backward."""

    product: fx.Node
    casts: tuple[fx.Node, ...]
    """Of the logits, in order."""
    log_softmax: fx.Node
    loss: fx.Node
    loss_backward: fx.Node
    gradient: fx.Node
    """Of the logits."""
    gradient_casts: tuple[fx.Node, ...]
    readers: tuple[GradientReader, ...]
    scale: tuple[fx.Node, ...]
    """The gradient of the loss, from `ones_like(loss)` on, in order."""

    @property
    def tokens(self) -> int:
        """Rows of the logits."""
        return shape_of(self.product)[0]


def _check(*, chunks: int = 4, least_elements: int = 0) -> None:
    if type(chunks) is not int or chunks < 2:
        raise invalid_value("chunks", chunks, "give a number of chunks, 2 or more.")
    if type(least_elements) is not int or least_elements < 0:
        raise invalid_value("least_elements", least_elements, "give a number of elements, 0 or more.")


@graph_optimization_pass(numerics=approximates(4), check=_check, only_for=[_LOG_SOFTMAX])
def chunk_head(gm: fx.GraphModule, *, chunks: int = 4, least_elements: int = 0) -> None:
    """Compute heads and their losses in chunks of tokens.

    `chunks`: how many. `least_elements`: the smallest logits that are cut.
    """
    for plan in plan_heads(gm.graph, least_elements):
        apply_chunks(plan, chunks)


def plan_heads(graph: fx.Graph, least: int = 0) -> list[HeadPlan]:
    """The heads that can be computed in chunks, in graph order."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = [_plan_head(node, place) for node in graph.find_nodes(op="call_function", target=_LOG_SOFTMAX)]
    return [plan for plan in found if plan is not None and plan.product.meta["val"].numel() >= least]


def _plan_head(node: fx.Node, place: dict[fx.Node, int]) -> HeadPlan | None:
    behind = _product_behind(node)
    if behind is None:
        return None
    product, casts = behind
    rows = ClassRows(shape_of(product), 1)
    readers = list(node.users)
    losses = [each for each in readers if each.target is aten.nll_loss_forward.default]
    backwards = [each for each in readers if each.target is aten.nll_loss_backward.default]
    gradients = [each for each in readers if each.target is aten._log_softmax_backward_data.default]
    if (len(losses), len(backwards), len(gradients), len(readers)) != (1, 1, 1, 3) or shape_of(node) != rows.shape:
        return None
    (loss,), (backward,), (gradient,) = losses, backwards, gradients
    if argument(loss, "reduction") not in (1, _SUM) or gradient.args[0] is not backward or len(backward.users) != 1:
        return None
    if any(argument(loss, name) is not argument(backward, name) for name in ("target", "weight")):
        return None
    scale = _scale_of(backward, loss)
    found = _readers_of(gradient, rows, place, place[loss])
    if scale is None or found is None:
        return None
    return HeadPlan(product, casts, node, loss, backward, gradient, found[0], found[1], scale)


def _product_behind(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The product whose result a log-softmax reads through views and casts, and nothing else does; and the casts."""
    casts: list[fx.Node] = []
    source = node.args[0]
    while isinstance(source, fx.Node) and len(source.users) == 1 and (source.target in VIEWS or source.target is _CAST):
        casts += [source] if source.target is _CAST else []
        source = source.args[0]
    val = value_of(source)
    if not isinstance(source, fx.Node) or len(source.users) != 1 or val is None or source.kwargs:
        return None
    if source.target not in (aten.mm.default, aten.addmm.default) or any(type(size) is not int for size in val.shape):
        return None
    return (source, tuple(reversed(casts))) if ClassRows(tuple(val.shape), 1).seen_as(shape_of(node)) else None


def _scale_of(backward: fx.Node, loss: fx.Node) -> tuple[fx.Node, ...] | None:
    """The chain from `ones_like(loss)` to the gradient that a loss is given; None if the step does more with it."""
    chain: list[fx.Node] = []
    count = argument(backward, "total_weight")
    if not isinstance(count, fx.Node) or count.target is not operator.getitem or count.args != (loss, 1):
        return None
    node: Any = argument(backward, "grad_output")
    while isinstance(node, fx.Node) and len(chain) < _MOST_NODES and len(node.users) == 1 and is_pure(node):
        chain.append(node)
        if node.target is aten.ones_like.default:
            return tuple(reversed(chain))
        # Of several inputs one is the gradient so far; the others exist before the loss.
        late = [each for each in node.all_input_nodes if _is_late(each)]
        if len(late) != 1:
            return None
        node = late[0]
    return None


def _is_late(node: fx.Node) -> bool:
    return node_meta(node).phase == "backward" or node.target is aten.ones_like.default


def _readers_of(
    gradient: fx.Node, rows: ClassRows, place: dict[fx.Node, int], anchor: int
) -> tuple[tuple[fx.Node, ...], tuple[GradientReader, ...]] | None:
    """The casts of a gradient, and what reads it behind them; None if that needs all tokens at once."""
    casts: list[fx.Node] = []
    found: list[GradientReader] = []
    stack = [gradient]
    while stack:
        source = stack.pop()
        for user in source.users:
            if user.target in VIEWS and rows.seen_as(shape_of(user)) is not None:
                stack.append(user)
            elif user.target is _CAST and source.users == {user: None} and len(stack) == 0:
                casts.append(user)
                stack.append(user)
            elif (reader := _reader(user, source, rows, place, anchor)) is not None:
                found += reader
            else:
                return None
    tokens = [each for each in found if each.kind == "tokens"]
    return (tuple(casts), tuple(found)) if found and len(tokens) <= 1 else None


def _reader(
    user: fx.Node, source: fx.Node, rows: ClassRows, place: dict[fx.Node, int], anchor: int
) -> list[GradientReader] | None:
    if shape_of(source) != rows.shape:
        return None
    if user.target is aten.mm.default and user.args[0] is source and user.args[1] is not source:
        return [GradientReader("tokens", user)] if _exists_at(user.args[1], place, anchor) else None
    if user.target is aten.sum.dim_IntList and list(user.args[1]) == [0] and not user.kwargs:  # type: ignore[arg-type]
        return [GradientReader("bias", user)]
    if user.target in PERMUTATIONS and shape_of(user) == rows.shape[::-1]:
        products = list(user.users)
        good = all(
            each.target is aten.mm.default and each.args[0] is user and _exists_at(each.args[1], place, anchor)
            for each in products
        )
        return [GradientReader("weight", each) for each in products] if good else None
    return None


def _exists_at(node: Any, place: dict[fx.Node, int], anchor: int) -> bool:
    """Whether a value exists at a place of the graph, or can be computed there by a view of one that does."""
    while isinstance(node, fx.Node) and place[node] > anchor and (node.target in VIEWS or node.target in PERMUTATIONS):
        node = node.args[0]
    return isinstance(node, fx.Node) and place[node] < anchor


def apply_chunks(plan: HeadPlan, chunks: int) -> None:
    """Replace a head, its loss and their backward by as many of each as there are chunks."""
    code = _ChunkCode(plan)
    bounds = [plan.tokens * i // chunks for i in range(chunks + 1)]
    for start, end in pairwise(sorted(set(bounds))):
        code.add(start, end)
    code.finish()


class _ChunkCode:
    """Builds the nodes of all chunks before the loss."""

    def __init__(self, plan: HeadPlan) -> None:
        self._plan = plan
        forward = replace(node_meta(plan.loss), phase="forward")
        self._build = NodeBuilder(plan.loss, forward)
        self._known: dict[fx.Node, fx.Node] = {}
        self._place = {node: i for i, node in enumerate(plan.loss.graph.nodes)}
        self._losses: list[fx.Node] = []
        self._parts: dict[fx.Node, list[fx.Node]] = {reader.node: [] for reader in plan.readers}
        self._dtype: torch.dtype = plan.log_softmax.meta["val"].dtype
        self._labels = argument(plan.loss, "target")
        self._count = self._counted()
        self._scale = self._here(plan.scale[-1])

    def _counted(self) -> fx.Node:
        """The sum of the weights of all labels."""
        build, ignored = self._build, argument(self._plan.loss, "ignore_index")
        counts = build(aten.ne.Scalar, self._labels, ignored)
        weight = argument(self._plan.loss, "weight")
        wide = torch.float32 if self._dtype in _HALF else self._dtype
        each = build(_CAST, counts, dtype=wide)
        if weight is not None:
            index = build(aten.mul.Tensor, self._labels, counts)
            each = build(aten.mul.Tensor, build(aten.index.Tensor, weight, [index]), each)
        return build.cast(build(aten.sum.default, each), wide, self._dtype)

    def _here(self, node: Any) -> Any:
        """A value that exists before the loss: the node, or a copy of it and of what it is computed from."""
        if not isinstance(node, fx.Node) or (self._place.get(node, 0) < self._place[self._plan.loss]):
            return node
        if node not in self._known:
            if node.target is aten.ones_like.default:
                val = node.meta["val"]
                self._known[node] = self._build(aten.full.default, [], 1.0, dtype=val.dtype, device=val.device)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self._here)
                self._known[node] = self._build(node.target, *args, **kwargs)
        return self._known[node]

    def add(self, start: int, end: int) -> None:
        """The nodes of the tokens from `start` to `end`."""
        plan, build = self._plan, self._build
        *bias, hidden, weight = plan.product.args
        logits = build(plan.product.target, *bias, build(aten.slice.Tensor, hidden, 0, start, end), weight)
        for cast in plan.casts:
            logits = build(_CAST, logits, **cast.kwargs)
        log_softmax = build(_LOG_SOFTMAX, logits, 1, *plan.log_softmax.args[2:])
        labels = build(aten.slice.Tensor, self._labels, 0, start, end)
        class_weight, ignored = argument(plan.loss, "weight"), argument(plan.loss, "ignore_index")
        both = build(aten.nll_loss_forward.default, log_softmax, labels, class_weight, _SUM, ignored)
        self._losses.append(build(operator.getitem, both, 0))
        how = argument(plan.loss, "reduction")
        back = aten.nll_loss_backward.default
        gradient = build(back, self._scale, log_softmax, labels, class_weight, how, ignored, self._count)
        gradient = build(plan.gradient.target, gradient, log_softmax, 1, *plan.gradient.args[3:])
        for cast in plan.gradient_casts:
            gradient = build(_CAST, gradient, **cast.kwargs)
        for reader in plan.readers:
            self._parts[reader.node].append(self._part(reader, gradient, start, end))

    def _part(self, reader: GradientReader, gradient: fx.Node, start: int, end: int) -> fx.Node:
        build, node = self._build, reader.node
        if reader.kind == "tokens":
            return build(aten.mm.default, gradient, self._here(node.args[1]))
        if reader.kind == "bias":
            part = build(aten.sum.dim_IntList, gradient, *node.args[1:])
        else:
            hidden = build(aten.slice.Tensor, self._here(node.args[1]), 0, start, end)
            part = build(aten.mm.default, build(aten.t.default, gradient), hidden)
        part = build.cast(part, node.meta["val"].dtype, self._wide(node))
        parts = self._parts[node]
        return build(aten.add.Tensor, parts[-1], part) if parts else part

    @staticmethod
    def _wide(node: fx.Node) -> torch.dtype:
        dtype: torch.dtype = node.meta["val"].dtype
        return torch.float32 if dtype in _HALF else dtype

    def finish(self) -> None:
        """Replace what the chunks compute together."""
        plan, build = self._plan, self._build
        loss = self._losses[0]
        for each in self._losses[1:]:
            loss = build(aten.add.Tensor, loss, each)
        if argument(plan.loss, "reduction") != _SUM:
            loss = build(aten.div.Tensor, loss, self._count)
        for reader in plan.readers:
            parts = self._parts[reader.node]
            if reader.kind == "tokens":
                result = build(aten.cat.default, parts)
                update_node_meta(result, starts_backward=True)
            else:
                result = build.cast(parts[-1], self._wide(reader.node), reader.node.meta["val"].dtype)
            reader.node.replace_all_uses_with(result)
        for user in list(plan.loss.users):
            user.replace_all_uses_with((loss, self._count)[user.args[1]])  # type: ignore[index]
