from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx

from ir.step_graphs import aten, chain, dynamic_step, find, sgd_step, with_everything
from wholestep.errors import Location
from wholestep.ir import GroupSpec, NodeMeta, Signature, StepGraph, node_digests, set_node_meta
from wholestep.ir.graph_functions import get_rng_state


@pytest.mark.parametrize("make", [sgd_step, with_everything, dynamic_step])
def test_equal_steps_have_equal_fingerprints(make: Callable[[], StepGraph]) -> None:
    assert make().fingerprint() == make().fingerprint()
    assert len(make().fingerprint()) == 64


@pytest.mark.parametrize("make", [sgd_step, with_everything, dynamic_step])
def test_a_round_trip_through_json_keeps_it(make: Callable[[], StepGraph]) -> None:
    step = make()
    again = StepGraph.from_json(step.to_json())
    assert again.fingerprint() == step.fingerprint()
    assert node_digests(again.gm) == node_digests(step.gm)


def test_names_and_lines_do_not_matter() -> None:
    step, other = sgd_step(), sgd_step()
    renamed = {}
    for node in other.gm.graph.nodes:
        if node.op == "call_function":
            old = node.name
            node._rename(f"other_{old}")
            renamed[old] = node.name
            set_node_meta(node, NodeMeta("elsewhere", Location("/tmp/other.py", 1)))
    writes = tuple(replace(w, value=renamed[w.value]) for w in other.signature.write_backs)
    other.signature = replace(other.signature, write_backs=writes, guards=("other text",))
    assert other.fingerprint() == step.fingerprint()


@pytest.mark.long  # test_compiled_step.py compares the fingerprint of a captured step with that of another process
def test_another_process_with_another_hash_seed_computes_the_same() -> None:
    code = "from ir.step_graphs import with_everything; print(with_everything().fingerprint())"
    path = os.pathsep.join(p for p in sys.path if p)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.strip()
    assert found == with_everything().fingerprint()


def _swap_operands(step: StepGraph) -> None:
    node = find(step, aten.sub.Tensor)
    node.args = (node.args[1], node.args[0])


def _other_scalar(step: StepGraph) -> None:
    node = find(step, aten.mul.Tensor)
    node.args = (node.args[0], 0.25)


def _int_for_float(step: StepGraph) -> None:
    node = find(step, aten.pow.Tensor_Scalar)
    node.args = (node.args[0], 2.0)


def _other_op(step: StepGraph) -> None:
    find(step, aten.sub.Tensor).target = aten.add.Tensor


def _more_kwargs(step: StepGraph) -> None:
    find(step, aten.add.Tensor).kwargs = {"alpha": 2}


def _other_shape(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = node.meta["val"].new_empty(3, 2)


def _other_stride(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = torch.empty_strided((2, 3), (1, 2))


def _other_dtype(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = torch.empty(2, 3, dtype=torch.float64)


def _other_path(step: StepGraph) -> None:
    first, *rest = step.signature.inputs
    step.signature = replace(step.signature, inputs=(replace(first, path="model.other"), *rest))


def _other_write(step: StepGraph) -> None:
    first, second = step.signature.write_backs
    step.signature = replace(step.signature, write_backs=(replace(first, value=second.value), second))


def _other_result(step: StepGraph) -> None:
    step.signature = replace(step.signature, result={"output": 0})


@pytest.mark.parametrize(
    "change",
    [
        _swap_operands,
        _other_scalar,
        _int_for_float,
        _other_op,
        _more_kwargs,
        _other_shape,
        _other_stride,
        _other_dtype,
        _other_path,
        _other_write,
        _other_result,
    ],
)
def test_any_change_of_what_is_computed_changes_it(change: Callable[[StepGraph], None]) -> None:
    step = sgd_step()
    before = step.fingerprint()
    change(step)
    assert step.fingerprint() != before


def test_the_bytes_of_a_constant_matter() -> None:
    step = with_everything()
    before = step.fingerprint()
    step.gm._tensor_constant0[0] = 2.0
    assert step.fingerprint() != before


def _all_reduce(
    reduce_op: str = "sum", groups: Sequence[str] = "00", device: str = "cuda:0", swap: bool = False
) -> fx.GraphModule:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    value = torch.empty(2, device="meta")
    c10d = torch.ops._c10d_functional
    for node, group in zip((b, a) if swap else (a, b), groups, strict=True):
        reduced = graph.call_function(c10d.all_reduce.default, (node, reduce_op, group))
        graph.call_function(c10d.wait_tensor.default, (reduced,))
    graph.call_function(aten.zeros.default, ([2],), {"device": torch.device(device)})
    graph.call_function(get_rng_state, (device,))
    graph.output(())
    for node in graph.nodes:
        node.meta["val"] = value
    return fx.GraphModule({}, graph)


def test_reduce_op_group_and_operands_of_collectives_matter() -> None:
    digests = node_digests(_all_reduce())
    assert digests != node_digests(_all_reduce(reduce_op="max"))
    assert digests != node_digests(_all_reduce(swap=True))


def test_groups_are_known_by_the_order_in_which_they_appear_not_by_name() -> None:
    assert node_digests(_all_reduce(groups="00")) == node_digests(_all_reduce(groups="22"))
    assert node_digests(_all_reduce(groups="01")) == node_digests(_all_reduce(groups="21"))
    assert node_digests(_all_reduce(groups="00")) != node_digests(_all_reduce(groups="01"))


def test_axis_and_size_of_a_group_matter() -> None:
    def of(*groups: GroupSpec) -> tuple[str, list[str]]:
        step = StepGraph(_all_reduce(groups="12"), Signature(groups=groups))
        return step.fingerprint(), node_digests(step.gm, groups)

    dp, tp = GroupSpec("1", "dp", 2), GroupSpec("2", "tp", 2)
    first, digests = of(dp, tp)
    assert of(tp, dp) == (first, digests), "the order of the table is not that of the graph after every pass"
    for groups in [(replace(dp, axis="pp"), tp), (replace(dp, size=4), tp), (dp, replace(tp, size=4)), (dp,)]:
        other, theirs = of(*groups)
        assert other != first
        assert theirs != digests


def test_the_number_of_a_ranks_device_does_not_matter() -> None:
    assert node_digests(_all_reduce(device="cuda:0")) == node_digests(_all_reduce(device="cuda:3"))
    assert node_digests(_all_reduce(device="cuda:0")) != node_digests(_all_reduce(device="cpu"))


def test_node_digests_show_where_two_steps_first_differ() -> None:
    one, other = sgd_step(), sgd_step()
    _other_scalar(other)
    pairs = zip(node_digests(one.gm), node_digests(other.gm), strict=True)
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    assert list(other.gm.graph.nodes)[first] is find(other, aten.mul.Tensor)


def test_values_of_hyper_parameters_do_not_matter() -> None:
    step = chain(3)
    number = step.gm.graph.nodes.__iter__().__next__()
    number.meta["val"] = 0.1
    before = node_digests(step.gm)
    number.meta["val"] = 0.2
    assert node_digests(step.gm) == before
