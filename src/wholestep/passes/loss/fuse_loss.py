"""Compute a loss and the gradient of its logits in fewer passes over them: log-probabilities are never stored.

    before                                                  after
    logp = _log_softmax(x, 1)                               m = amax(x, 1);  e = exp(x - m);  s = sum(e, 1)
    loss, n = nll_loss_forward(logp, y)                     loss = sum(log(s) - (gather(x, y) - m)) / n
    g = nll_loss_backward(1, logp, y, n)                    d = e * (1 / n / s)
    d = _log_softmax_backward_data(g, logp)                 d = scatter_add(d, y, -1 / n)

The gradient of the logits is `g - softmax * sum(g)`. A graph of the whole step shows what `g` is made of
(`loss_gradient.py`): one element per row for labels, one value per row for label smoothing, a tensor for soft targets.
So `sum(g)` is known per row, no tensor of zeros is written and read around one element, and the element is added last:
after casts to a half type, sums with other gradients (z-loss) and the zeros around shifted logits. Where no log-softmax
is (a loss written with `logsumexp`), only the last is done.

Needs: contiguous logits of static size.  Numerics: approximates(2): `x - m` and sums are in float32 as in the
operators, `exp(x - m) / s` stands for `exp(x - m - log(s))`, and half types are rounded once at the end instead of
after each operator.  Legal because it is the same function of the logits, with ignored labels, class weights and rows
of infinities. Who reads log-probabilities otherwise (the user, an unknown operator) keeps the rewrite away.  Cost: the
readers of each log-softmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.errors import invalid_value
from wholestep.ir.call_arguments import argument
from wholestep.passes.engine.contract import approximates, graph_optimization_pass
from wholestep.passes.loss.class_rows import (
    PERMUTATIONS,
    VIEWS,
    ClassRows,
    NodeBuilder,
    is_packed,
    readers_through_views,
    rows_of,
    shape_of,
    value_of,
    without_views,
)
from wholestep.passes.loss.loss_gradient import (
    NLL_BACKWARD,
    NLL_FORWARD,
    SCATTERS,
    Term,
    is_one_element_per_row,
    terms_of,
)

aten = torch.ops.aten
_LOG_SOFTMAX = aten._log_softmax.default
_BACKWARD = aten._log_softmax_backward_data.default
_POINTWISE = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten.exp.default, aten.sub.Tensor})
"""Readers that recompute a log-probability from the logits where they need it."""
_HALF = (torch.float16, torch.bfloat16)
LEAST_ELEMENTS = 1 << 16
"""Smaller logits stay in the cache, where another pass over them costs next to nothing."""


@dataclass(frozen=True)
class Finish:
    """Where the elements of a gradient are added: behind operators that treat the rest of it the same without them."""

    path: tuple[fx.Node, ...]
    """Views, a cast, sums with other gradients, zeros around a part: in order."""

    @property
    def casts(self) -> torch.dtype | None:
        """The dtype that the gradient is cast to on the way."""
        found = [node.meta["val"].dtype for node in self.path if node.target is aten._to_copy.default]
        return found[-1] if found else None


@dataclass(frozen=True)
class GradientPlan:
    """A gradient of logits, what it is made of, and where its elements are added."""

    node: fx.Node
    terms: tuple[Term, ...]
    finish: Finish


@dataclass(frozen=True)
class LossPlan:
    """A log-softmax with its readers."""

    node: fx.Node
    rows: ClassRows
    losses: tuple[fx.Node, ...]
    """`nll_loss` forwards."""
    gathers: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    """Sums over the classes."""
    pointwise: tuple[fx.Node, ...]
    gradients: tuple[GradientPlan, ...]


@dataclass(frozen=True)
class ElementPlan:
    """Elements that are scattered into zeros and added to a gradient."""

    node: fx.Node
    rows: ClassRows
    finish: Finish


def _check(*, devices: Iterable[str] = ("cpu",), least_elements: int = LEAST_ELEMENTS) -> None:
    if isinstance(devices, str) or not all(isinstance(each, str) for each in devices):
        raise invalid_value("devices", devices, 'give device types: ("cpu",) or ("cpu", "cuda").')
    if type(least_elements) is not int or least_elements < 0:
        raise invalid_value("least_elements", least_elements, "give a number of elements, 0 or more.")


@graph_optimization_pass(
    numerics=approximates(2),
    check=_check,
    only_for=[_LOG_SOFTMAX, *SCATTERS],
    allow_rerun=True,
)
def fuse_loss(gm: fx.GraphModule, *, devices: Iterable[str] = ("cpu",), least_elements: int = LEAST_ELEMENTS) -> None:
    """Compute losses and the gradients of their logits without storing log-probabilities.

    `devices`: where. Only on the CPU was it measured. `least_elements`: the smallest logits that are rewritten.
    """
    chosen = frozenset(devices)
    plans = plan_losses(gm.graph, chosen, least_elements)
    known: dict[tuple[fx.Node, int], RowStatistics] = {}
    for plan in plans:
        apply_loss(plan, known)
    for late in plan_elements(gm.graph, chosen, least_elements):
        apply_elements(late)


def plan_losses(graph: fx.Graph, devices: frozenset[str], least: int = LEAST_ELEMENTS) -> list[LossPlan]:
    """The log-softmaxes that need not be stored, in graph order."""
    nodes = graph.find_nodes(op="call_function", target=_LOG_SOFTMAX)
    taken: set[fx.Node] = set()
    found = [_plan_loss(node, taken) for node in nodes if _is_worth_it(node, devices, least)]
    return [plan for plan in found if plan is not None]


def _is_worth_it(node: fx.Node, devices: frozenset[str], least: int) -> bool:
    val = node.meta["val"]
    return val.device.type in devices and val.numel() >= least


def _plan_loss(node: fx.Node, taken: set[fx.Node]) -> LossPlan | None:
    """`taken`: operators behind the gradients of other losses, which these carry their elements over."""
    logits, dim = node.args[0], node.args[1]
    assert isinstance(dim, int)
    rows = rows_of(logits, dim)
    if rows is None or rows_of(node, dim) != rows or node.meta["val"].dtype is torch.float64:
        return None
    kinds: dict[str, list[fx.Node]] = {"loss": [], "gather": [], "sum": [], "pointwise": [], "gradient": []}
    for reader, source, seen in readers_through_views(node, rows):
        kind = _kind_of(reader, source, node, seen)
        if kind == "unknown":
            return None
        if kind:
            kinds[kind].append(reader)
    gradients = tuple(_plan_gradient(each, rows, taken) for each in dict.fromkeys(kinds["gradient"]))
    if not gradients or not is_packed(node):
        return None
    if not is_packed(logits):
        # Only where a gradient is made contiguous later have its readers the layout that they had.
        others = (*kinds["gather"], *kinds["sum"], *kinds["pointwise"])
        if others or not all(gradient.finish.path for gradient in gradients):
            return None
    for gradient in gradients:
        taken.update(gradient.finish.path)
    parts = {kind: tuple(dict.fromkeys(found)) for kind, found in kinds.items()}
    return LossPlan(node, rows, parts["loss"], parts["gather"], parts["sum"], parts["pointwise"], gradients)


def _kind_of(reader: fx.Node, source: fx.Node, logp: fx.Node, seen: ClassRows | None) -> str:
    """What a reader of log-probabilities is; "" for one that a gradient replaces."""
    target = reader.target
    if seen is None or reader.op != "call_function":
        return "unknown"
    if target in NLL_FORWARD:
        return "loss" if _is_readable_loss(reader, seen) else "unknown"
    if target in NLL_BACKWARD:
        return "" if reader.args[1] is source and reader.args[0] is not source else "unknown"
    if source is not logp:
        return "unknown"
    if target is _BACKWARD:
        return "gradient" if reader.args[1] is logp and reader.args[0] is not logp else "unknown"
    if target is aten.gather.default:
        _, dim, index = reader.args[:3]
        others = [size for i, size in enumerate(shape_of(index)) if i != seen.dim]
        whole = [size for i, size in enumerate(seen.shape) if i != seen.dim]
        return "gather" if isinstance(dim, int) and dim % len(seen.shape) == seen.dim and others == whole else "unknown"
    if target is aten.sum.dim_IntList:
        dims = reader.args[1]
        over = [d % len(seen.shape) for d in dims] if isinstance(dims, list | tuple) else []  # type: ignore[operator]
        return "sum" if over == [seen.dim] and not reader.kwargs else "pointwise"
    return "pointwise" if target in _POINTWISE else "unknown"


def _is_readable_loss(node: fx.Node, rows: ClassRows) -> bool:
    """Whether a loss has one label per row, and only its values are read."""
    labels = shape_of(argument(node, "target"))
    counts = [user for user in node.users if user.args[1:] == (1,)]
    dims = 1 + (node.target is aten.nll_loss2d_forward.default) * 2
    if rows.dim != 1 or len(labels) != dims or argument(node, "target").meta["val"].dtype is not torch.int64:
        return False
    return argument(node, "reduction") != 0 or all(user.target in NLL_BACKWARD for c in counts for user in c.users)


def _plan_gradient(node: fx.Node, rows: ClassRows, taken: set[fx.Node]) -> GradientPlan:
    given = node.args[0]
    assert isinstance(given, fx.Node)
    terms = terms_of(given, rows)
    places = {term.place for term in terms if term.kind in ("label", "element")}
    logits = node.args[1].args[0]  # type: ignore[union-attr]
    finish = finish_of(node, rows, packed=is_packed(logits), one_place=len(places) == 1, taken=taken)
    return GradientPlan(node, tuple(terms), finish)


def finish_of(node: fx.Node, rows: ClassRows, *, one_place: bool, taken: set[fx.Node], packed: bool = True) -> Finish:
    """How far elements can be carried behind a gradient. `one_place`: there is one element per row, so that its final
    value is known, and may be rounded with the rest. `packed`: the gradient will be contiguous."""
    path: list[fx.Node] = []
    useful, cast = 0, False
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.op != "call_function" or not user.args or shape_of(user) == () or user in taken:
            break
        seen: ClassRows | None = None
        if user.target in PERMUTATIONS:
            seen, packed = rows.permuted(user), False
        elif user.target is aten.clone.default and user.kwargs.get("memory_format") is torch.contiguous_format:
            seen, packed = rows, True
        elif user.target is aten._to_copy.default and not cast and one_place and _narrows(user, node):
            seen, cast = rows, True
        elif packed and user.target in VIEWS:
            seen = rows.seen_as(shape_of(user))
        elif packed and not cast and _is_sum_with_another(user, node):
            seen = rows
        elif packed and not cast and user.target is aten.slice_backward.default and user.args[2] != rows.dim:
            seen = ClassRows(shape_of(user), rows.dim)
        if seen is None or (packed and not is_packed(user)):
            break
        path.append(user)
        useful = len(path) if packed and user.target not in VIEWS else useful
        node, rows = user, seen
    return Finish(tuple(path[:useful]))


def _narrows(cast: fx.Node, source: fx.Node) -> bool:
    have, want = value_of(source), value_of(cast)
    return have is not None and want is not None and have.device == want.device and want.dtype in _HALF


def _is_sum_with_another(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node adds another tensor of the same form to one."""
    if node.target is not aten.add.Tensor or node.kwargs or node.args[0] is node.args[1]:
        return False
    vals = [value_of(each) for each in (*node.args[:2], node)]
    return len({None if val is None else (val.shape, val.dtype) for val in vals}) == 1 and None not in vals


def plan_elements(graph: fx.Graph, devices: frozenset[str], least: int = LEAST_ELEMENTS) -> list[ElementPlan]:
    """Elements that are scattered into zeros and only then added to something, in graph order."""
    found, taken = [], set[fx.Node]()
    for target in SCATTERS:
        for node in graph.find_nodes(op="call_function", target=target):
            dim = node.args[1]
            rows = rows_of(node, dim) if isinstance(dim, int) else None
            if (
                rows is None
                or not is_packed(node)
                or not _is_worth_it(node, devices, least)
                or not is_one_element_per_row(node, rows)
            ):
                continue
            finish = finish_of(node, rows, one_place=True, taken=taken)
            if any(each.target is aten.add.Tensor for each in finish.path):
                found.append(ElementPlan(node, rows, finish))
                taken.update(finish.path)
    return found


@dataclass
class Elements:
    """Elements to add to a gradient: one per row, in the shape of row values."""

    index: fx.Node
    value: fx.Node
    """What is added."""
    rest: fx.Node | None
    """What the gradient has at these places without them; None if that is not known yet, and then nothing."""


@dataclass
class RowStatistics:
    """What is known of each row of some logits, in float32 for half types."""

    logits: fx.Node
    dtype: torch.dtype
    rows: ClassRows
    highest: fx.Node
    shifted: fx.Node
    """The logits minus the highest of their row."""
    exponentials: fx.Node
    total: fx.Node
    log_total: fx.Node
    labels: dict[Any, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    """For labels with an ignored class: their index, and which are counted."""

    @classmethod
    def of(cls, plan: LossPlan) -> RowStatistics:
        """Compute them where the log-softmax is."""
        logits, rows = plan.node.args[0], plan.rows
        assert isinstance(logits, fx.Node)
        have = logits.meta["val"].dtype
        build = NodeBuilder(plan.node)
        dtype = torch.float32 if have in _HALF else have
        wide = build.cast(logits, have, dtype)
        highest = build(aten.amax.default, wide, [rows.dim], True)
        shifted = build(aten.sub.Tensor, wide, highest)
        exponentials = build(aten.exp.default, shifted)
        total = build(aten.sum.dim_IntList, exponentials, [rows.dim], True)
        log_total = build(aten.log.default, total)
        return cls(wide, dtype, rows, highest, shifted, exponentials, total, log_total)

    def is_rounded_on_the_way(self) -> bool:
        """Whether the logits are half types: recomputing an exponential is then cheaper than storing it."""
        source, _ = without_views(self.logits, self.rows)
        return source.target is aten._to_copy.default and source.args[0].meta["val"].dtype in _HALF  # type: ignore[union-attr]

    def labels_of(self, node: fx.Node, build: NodeBuilder) -> tuple[fx.Node, fx.Node]:
        """The index of each label (0 for an ignored one), and whether it is counted, as row values."""
        labels, ignored = argument(node, "target"), argument(node, "ignore_index")
        if (labels, ignored) not in self.labels:
            given = build.row_value(labels, self.rows)
            counts = build(aten.ne.Scalar, given, ignored)
            index = build(aten.mul.Tensor, given, counts)
            self.labels[labels, ignored] = index, counts
        return self.labels[labels, ignored]

    def weights_of(self, node: fx.Node, build: NodeBuilder) -> fx.Node:
        """The weight of each row: that of the class of its label, 0 for an ignored one."""
        index, counts = self.labels_of(node, build)
        weight = argument(node, "weight")
        if weight is None:
            return build(aten._to_copy.default, counts, dtype=self.dtype)
        chosen = build(aten.index.Tensor, build.cast(weight, weight.meta["val"].dtype, self.dtype), [index])
        return build(aten.where.self, counts, chosen, build(aten.zeros_like.default, chosen))

    def at(self, index: fx.Node, build: NodeBuilder) -> fx.Node:
        """The shifted logits of one element per row."""
        return build(aten.sub.Tensor, build(aten.gather.default, self.logits, self.rows.dim, index), self.highest)


def apply_loss(plan: LossPlan, known: dict[tuple[fx.Node, int], RowStatistics]) -> list[fx.Node]:
    """Replace a log-softmax and all its readers; returns the gradients. `known`: of the logits that have been met."""
    key = (plan.node.args[0], plan.rows.dim)
    if key not in known:
        known[key] = RowStatistics.of(plan)  # type: ignore[index]
    rows = known[key]  # type: ignore[index]
    for node in plan.losses:
        _replace_loss(node, rows, plan.node.meta["val"].dtype)
    for node in plan.gathers:
        build = NodeBuilder(node)
        chosen = rows.at(node.args[2], build)  # type: ignore[arg-type]
        _replace(node, build, build(aten.sub.Tensor, chosen, rows.log_total), rows.dtype)
    for node in plan.sums:
        build = NodeBuilder(node)
        keep = len(node.args) > 2 and bool(node.args[2])
        total = build(aten.sum.dim_IntList, rows.shifted, [rows.rows.dim], True)
        result = build(aten.sub.Tensor, total, build(aten.mul.Scalar, rows.log_total, rows.rows.classes))
        _replace(node, build, result if keep else build(aten.squeeze.dim, result, rows.rows.dim), rows.dtype)
    if plan.pointwise:
        build = NodeBuilder(plan.node)
        logp = build(aten.sub.Tensor, rows.shifted, rows.log_total)
        logp = build.cast(logp, rows.dtype, plan.node.meta["val"].dtype)
        for node in plan.pointwise:
            node.replace_input_with(plan.node, logp)
    return [_replace_gradient(gradient, rows) for gradient in plan.gradients]


def _replace(node: fx.Node, build: NodeBuilder, result: fx.Node, dtype: torch.dtype) -> None:
    node.replace_all_uses_with(build.cast(result, dtype, node.meta["val"].dtype))


def _replace_loss(node: fx.Node, rows: RowStatistics, dtype: torch.dtype) -> None:
    """The results of an `nll_loss` forward from row values."""
    build = NodeBuilder(node)
    index, _ = rows.labels_of(node, build)
    weights = rows.weights_of(node, build)
    each = build(aten.sub.Tensor, rows.log_total, rows.at(index, build))
    # An ignored label says nothing about its row, which may be infinite.
    counted = build(aten.ne.Scalar, weights, 0)
    each = build(aten.where.self, counted, build(aten.mul.Tensor, each, weights), build(aten.zeros_like.default, each))
    reduction = argument(node, "reduction")
    total = build(aten.sum.default, weights)
    if reduction == 0:
        result = build(aten.view.default, each, list(shape_of(argument(node, "target"))))
    else:
        result = build(aten.sum.default, each)
        result = build(aten.div.Tensor, result, total) if reduction == 1 else result
    for user in list(node.users):
        value = build.cast((result, total)[user.args[1]], rows.dtype, dtype)  # type: ignore[index]
        user.replace_all_uses_with(value)


def _replace_gradient(plan: GradientPlan, rows: RowStatistics) -> fx.Node:
    """A gradient of logits from row values, with its elements added last."""
    build = NodeBuilder(plan.node)
    adds: dict[tuple[Any, ...], Elements] = {}
    sums: list[fx.Node] = []
    spread: list[tuple[str, fx.Node]] = []
    for term in plan.terms:
        if term.kind in ("label", "element"):
            index, value = _elements(term, rows, build)
            sums.append(value)
            known = adds.get(term.place)
            value = value if known is None else build(aten.add.Tensor, known.value, value)
            adds[term.place] = Elements(index, value, None)
            continue
        value = build.cast(term.node, term.node.meta["val"].dtype, rows.dtype)
        value = value if term.factor == 1.0 else build(aten.mul.Scalar, value, term.factor)
        spread.append((term.kind, value))
        if term.kind == "row":
            sums.append(build(aten.mul.Scalar, value, rows.rows.classes))
        else:
            sums.append(build(aten.sum.dim_IntList, value, [rows.rows.dim], True))
    total = sums[0]
    for each in sums[1:]:
        total = build(aten.add.Tensor, total, each)
    scale = build(aten.neg.default, total)
    stored = not rows.is_rounded_on_the_way() and plan.finish.casts is None
    if stored:
        scale = build(aten.div.Tensor, scale, rows.total)
        result = build(aten.mul.Tensor, rows.exponentials, scale)
    else:
        logp = build(aten.sub.Tensor, rows.shifted, rows.log_total)
        result = build(aten.mul.Tensor, build(aten.exp.default, logp), scale)
    for _, value in spread:
        result = build(aten.add.Tensor, result, value)
    final = plan.node.meta["val"].dtype if plan.finish.casts is None else plan.finish.casts
    if final is not rows.dtype and len(adds) == 1:
        (only,) = adds.values()
        only.rest = _without_elements(rows, only.index, scale, spread, stored, build)
    finish = plan.finish
    if plan.node.meta["val"].dtype is not rows.dtype:
        finish = Finish(())  # the gradient itself is rounded
    return finish_gradient(plan.node, result, list(adds.values()), rows.rows, rows.dtype, finish)


def _elements(term: Term, rows: RowStatistics, build: NodeBuilder) -> tuple[fx.Node, fx.Node]:
    """Where the elements of a term are, and what they are."""
    node = term.node
    if term.kind == "element":
        index, value = (build.row_value(node.args[i], rows.rows) for i in (2, 3))  # type: ignore[arg-type]
        value = build.cast(value, node.meta["val"].dtype, rows.dtype)
        return index, value if term.factor == 1.0 else build(aten.mul.Scalar, value, term.factor)
    index, counts = rows.labels_of(node, build)
    given = argument(node, "grad_output")
    scale = build.cast(build.row_value(given, rows.rows), given.meta["val"].dtype, rows.dtype)
    if argument(node, "reduction") == 1:
        count = argument(node, "total_weight")
        scale = build(aten.div.Tensor, scale, build(aten._to_copy.default, count, dtype=rows.dtype))
    value = build(aten.mul.Tensor, rows.weights_of(node, build), build(aten.mul.Scalar, scale, -term.factor))
    return index, build(aten.where.self, counts, value, build(aten.zeros_like.default, value))


def _without_elements(
    rows: RowStatistics,
    index: fx.Node,
    scale: fx.Node,
    spread: list[tuple[str, fx.Node]],
    stored: bool,
    build: NodeBuilder,
) -> fx.Node:
    """A gradient at one element per row, without what is added there."""
    shifted = rows.at(index, build)
    power = shifted if stored else build(aten.sub.Tensor, shifted, rows.log_total)
    result = build(aten.mul.Tensor, build(aten.exp.default, power), scale)
    for kind, value in spread:
        here = value if kind == "row" else build(aten.gather.default, value, rows.rows.dim, index)
        result = build(aten.add.Tensor, result, here)
    return result


def apply_elements(plan: ElementPlan) -> fx.Node:
    """Add elements to a gradient instead of to zeros; returns it."""
    node = plan.node
    index, value = node.args[2], node.args[3]
    assert isinstance(index, fx.Node)
    assert isinstance(value, fx.Node)
    return finish_gradient(node, None, [Elements(index, value, None)], plan.rows, node.meta["val"].dtype, plan.finish)


def finish_gradient(
    node: fx.Node,
    result: fx.Node | None,
    adds: list[Elements],
    rows: ClassRows,
    dtype: torch.dtype,
    finish: Finish,
) -> fx.Node:
    """Replace a gradient, or what it is after some operators, by `result` after them with its elements added last.
    Returns what it is then.

    `result`: None for nothing but the elements, which some operator on the way adds to something.
    """
    end = finish.path[-1] if finish.path else node
    build = NodeBuilder(end)
    source = node
    for step in finish.path:
        if step.target in PERMUTATIONS:
            rows = rows.permuted(step)
            result = None if result is None else build(step.target, result, *step.args[1:])
            for each in adds:
                _map(each, lambda value, by=step: build(by.target, value, *by.args[1:]))
        elif step.target is aten.clone.default:
            result = None if result is None else build(step.target, result, memory_format=torch.contiguous_format)
            for each in adds:
                _map(each, lambda value: build(aten.clone.default, value, memory_format=torch.contiguous_format))
        elif step.target in VIEWS:
            rows = rows.seen_as(shape_of(step)) or rows
            result = None if result is None else build(aten.view.default, result, list(rows.shape))
            for each in adds:
                _map(each, lambda value, rows=rows: build(aten.view.default, value, rows.row_shape))
        elif step.target is aten.add.Tensor:
            other = step.args[1] if step.args[0] is source else step.args[0]
            assert isinstance(other, fx.Node)
            result = other if result is None else build(aten.add.Tensor, result, other)
            for each in adds:
                here = build(aten.gather.default, other, rows.dim, each.index)
                each.rest = here if each.rest is None else build(aten.add.Tensor, each.rest, here)
        elif step.target is aten.slice_backward.default:
            sizes, *where = step.args[1:]
            result = None if result is None else build(step.target, result, sizes, *where)
            rows = ClassRows(shape_of(step), rows.dim)
            for each in adds:
                _map(each, lambda value, r=rows.row_shape, w=where: build(aten.slice_backward.default, value, r, *w))
        source = step
    assert result is not None
    want = end.meta["val"].dtype
    if want is dtype:
        for each in adds:
            result = build(aten.scatter_add.default, result, rows.dim, each.index, each.value)
    elif len(adds) == 1:
        (only,) = adds
        assert only.rest is not None
        final = build.cast(build(aten.add.Tensor, only.rest, only.value), dtype, want)
        result = build(aten.scatter.src, build.cast(result, dtype, want), rows.dim, only.index, final)
    else:
        for each in adds:
            result = build(aten.scatter_add.default, result, rows.dim, each.index, each.value)
        result = build.cast(result, dtype, want)
    end.replace_all_uses_with(result)
    return result


def _map(elements: Elements, change: Any) -> None:
    elements.index, elements.value = change(elements.index), change(elements.value)
    elements.rest = None if elements.rest is None else change(elements.rest)
