"""Random steps that communicate, for property tests: equal collectives are likely, write-backs and views happen."""

from __future__ import annotations

import operator

import torch
from hypothesis import strategies as st
from torch import fx

from ir.collectives import Build, comm
from ir.step_graphs import aten
from wholestep.ir import StepGraph

KINDS = ("gather", "scatter", "reduce", "coalesced", "wait", "wait", "cast", "view", "neg", "add", "dropout")


@st.composite
def communicating_steps(draw: st.DrawFn) -> StepGraph:
    """A StepGraph in normal form; some of its waits have no users."""
    build = Build()
    inputs = [build.input(name, 4, 2) for name in ("p", "q")]
    values, pending = list(inputs), []
    pick = st.integers(0, 1 << 20)
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(KINDS))
        value = values[draw(pick) % len(values)]
        again, group = draw(st.booleans()), draw(st.sampled_from("01"))
        if kind == "gather":
            pending.append(build.gather(value, group, recompute=again))
        elif kind == "scatter" and value.meta["val"].shape[0] % 2 == 0:
            pending.append(build.scatter(value, draw(st.sampled_from(["sum", "avg"])), group))
        elif kind == "reduce":
            pending.append(build.reduce(value, draw(st.sampled_from(["sum", "avg"])), group))
        elif kind == "coalesced":
            started = build.call(comm.all_reduce_coalesced.default, [value, inputs[0]], "sum", group)
            pending += [_part(build, started, i) for i in range(2)]
        elif kind == "wait" and pending:
            values.append(build.wait(pending.pop(draw(pick) % len(pending))))
        elif kind == "cast":
            values.append(build.call(aten._to_copy.default, value, dtype=torch.float64))
        elif kind == "view":
            values.append(build.call(aten.slice.Tensor, value, 0, 0, 2))
        elif kind == "neg":
            values.append(build.call(aten.neg.default, value))
        elif kind == "add":
            values.append(build.call(aten.add.Tensor, value, value))
        elif kind == "dropout":
            values.append(build.call(aten.bernoulli.default, build.call(aten.sigmoid.default, value)))
    values += [build.wait(started) for started in pending]
    made = values[2:] or [build.call(aten.neg.default, inputs[0])]
    for target in inputs:
        if draw(st.booleans()):
            fitting = [v for v in made if v.meta["val"].shape == (4, 2) and _is_own(v)]
            if fitting:
                build.write_back(target, fitting[draw(pick) % len(fitting)])
    written = {write.target for write in build.write_backs}
    free = [v for v in made if _root(v).name not in written]
    results = draw(st.lists(st.sampled_from(free), max_size=4)) if free else []
    return build.finish(*results)


def _part(build: Build, started: fx.Node, index: int) -> fx.Node:
    node = build.graph.call_function(operator.getitem, (started, index))
    node.meta["val"] = started.meta["val"][index]
    return node


def _root(node: fx.Node) -> fx.Node:
    while node.target is aten.slice.Tensor:
        node = node.all_input_nodes[0]
    return node


def _is_own(node: fx.Node) -> bool:
    return _root(node).op != "placeholder"
