"""One test for each special case that the effects-and-alias analysis knows of a single node."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from wholestep.ir.effects import (
    aliased_inputs,
    calls_custom_operator,
    changes_layout,
    communicates,
    draws,
    functional_variant,
    is_collective,
    is_communication,
    is_custom_operator,
    is_data_dependent,
    is_measure,
    is_needed,
    is_new_element,
    is_point_to_point,
    is_view_of_first,
    is_wait,
    keeps_elements,
    may_share,
    operator_facts,
    order_kind,
    reads_contents,
    returned_position,
    returns_tensors,
    shared_inputs,
    stored_in,
    view_variant,
    write_condition,
    writes,
    writes_into_out,
    written_inputs,
    written_positions,
)
from wholestep.ir.effects.nodes import COLLECTIVE, EFFECT, RANDOM
from wholestep.ir.graph_functions import call_on_copies, get_rng_state, set_rng_state

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def call(target: Any, *args: object, **kwargs: object) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)  # type: ignore[arg-type]


@pytest.fixture
def graph() -> fx.Graph:
    return fx.Graph()


@pytest.fixture
def x(graph: fx.Graph) -> fx.Node:
    return graph.placeholder("x")


@pytest.fixture
def y(graph: fx.Graph) -> fx.Node:
    return graph.placeholder("y")


@pytest.fixture(scope="module")
def custom() -> Iterator[Any]:
    """Operators of torch.library: one that writes (with a functional operator of its name), one that draws."""
    library = torch.library.Library("effects_test", "DEF")
    library.define("update_(Tensor(a!) p, Tensor g) -> ()")
    library.define("update(Tensor p, Tensor g) -> Tensor")
    library.define("noise(Tensor p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.define("exchange(Tensor p, str group_name) -> Tensor")
    yield torch.ops.effects_test
    library._destroy()


class TestWrites:
    @pytest.mark.parametrize("op", [aten.add_.Tensor, aten.copy_.default, aten.add.out, aten._foreach_add_.Scalar])
    def test_operators_that_declare_it_write(self, op: Any) -> None:
        assert writes(call(op, 1, 2))

    @pytest.mark.parametrize("op", [aten.add.Tensor, aten.view.default, aten._foreach_add.Scalar, operator.add, max])
    def test_functional_operators_do_not_write(self, op: Any) -> None:
        assert not writes(call(op, 1, 2))

    def test_written_inputs_are_found_by_position_by_keyword_and_in_lists(
        self, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert written_inputs(graph.call_function(aten.add_.Tensor, (x, y))) == [x]
        assert written_inputs(graph.call_function(aten.add_.Tensor, (), {"self": x, "other": y})) == [x]
        assert written_inputs(graph.call_function(aten._foreach_add_.Scalar, ([x, y], 1))) == [x, y]
        assert written_inputs(graph.call_function(aten.add.out, (x, x), {"out": y})) == [y]

    @pytest.mark.parametrize(
        "op", [aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default]
    )
    def test_batch_norm_writes_its_statistics_when_training_although_its_schema_does_not_say_so(
        self, op: Any, graph: fx.Graph, x: fx.Node
    ) -> None:
        mean, var = graph.placeholder("mean"), graph.placeholder("var")
        training = graph.call_function(op, (x, None, None, mean, var, True, 0.1, 1e-5))
        assert writes(training)
        assert written_inputs(training) == [mean, var]
        assert not writes(graph.call_function(op, (x, None, None, mean, var, False, 0.1, 1e-5)))
        assert not writes(graph.call_function(op, (x, None, None, None, None, True, 0.1, 1e-5)))
        by_name = {"running_mean": mean, "running_var": var, "training": True}
        assert written_inputs(graph.call_function(op, (x, None, None), by_name)) == [mean, var]
        assert write_condition(op) == "training"
        assert written_positions(op) == (3, 4)

    @pytest.mark.parametrize("op", [aten.batch_norm.default, aten.instance_norm.default])
    def test_norms_before_decomposition_write_their_statistics_if_told(
        self, op: Any, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert written_inputs(graph.call_function(op, (x, None, None, x, y, True, 0.1, 1e-5, False))) == [x, y]
        assert written_inputs(graph.call_function(op, (x, None, None, x, y, False, 0.1, 1e-5, False))) == []

    def test_operators_of_synchronized_batch_norm_always_write_their_statistics(
        self, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        op = aten.batch_norm_gather_stats_with_counts.default
        assert written_inputs(graph.call_function(op, (x, x, x, x, y, 0.1, 1e-5, x))) == [x, y]
        assert written_inputs(graph.call_function(aten.batch_norm_update_stats.default, (x, x, y, 0.1))) == [x, y]

    @pytest.mark.parametrize("name", ["add_", "__iadd__", "__setitem__", "normal_"])
    def test_methods_that_say_so_by_name_write_the_tensor(
        self, name: str, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        node = graph.call_method(name, (x, y))
        assert writes(node)
        assert written_inputs(node) == [x]

    @pytest.mark.parametrize("name", ["add", "__add__", "__getitem__", "size"])
    def test_other_methods_do_not_write(self, name: str, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        assert not writes(graph.call_method(name, (x, y)))

    @pytest.mark.parametrize(
        "function", [operator.iadd, operator.setitem, operator.delitem, torch.relu_, nn.init.ones_]
    )
    def test_functions_that_say_so_by_name_write_their_first_argument(
        self, function: Any, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert written_inputs(graph.call_function(function, (x, y))) == [x]

    @pytest.mark.parametrize("function", [operator.and_, operator.not_, operator.is_, operator.getitem])
    def test_names_of_python_operators_that_end_in_an_underscore_do_not_write(
        self, function: Any, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert not writes(graph.call_function(function, (x, y)))

    def test_functions_on_lists_write_every_tensor_of_the_list(self, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        assert written_inputs(graph.call_function(torch._foreach_add_, ([x, y], 1))) == [x, y]

    def test_functions_write_where_an_argument_says_so(self, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        assert written_inputs(graph.call_function(functional.relu6, (x, True))) == [x]
        assert written_inputs(graph.call_function(functional.relu6, (), {"inplace": True, "input": x})) == [x]
        assert not writes(graph.call_function(functional.relu6, (x, False)))
        assert written_inputs(graph.call_function(_unknown, (x,), {"inplace": True})) == [x]
        assert written_inputs(graph.call_function(torch.add, (x, x), {"out": y})) == [y]
        assert written_inputs(graph.call_function(torch.sort, (x,), {"out": (x, y)})) == [x, y]

    @pytest.mark.parametrize("function", [functional.batch_norm, torch.batch_norm, torch.native_batch_norm])
    def test_batch_norm_as_a_function_writes_its_statistics_in_training(
        self, function: Any, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        first = (x, x, y, None, None) if function is functional.batch_norm else (x, None, None, x, y)
        assert written_inputs(graph.call_function(function, (*first, True, 0.1, 1e-5))) == [x, y]
        assert not writes(graph.call_function(function, (*first, False, 0.1, 1e-5)))

    def test_instance_norm_as_a_function_writes_its_statistics_unless_it_uses_them(
        self, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert written_inputs(graph.call_function(functional.instance_norm, (x, x, y))) == [x, y]
        assert not writes(graph.call_function(functional.instance_norm, (x, x, y, None, None, False)))

    def test_embeddings_with_a_largest_norm_write_their_weight(self, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        assert written_inputs(graph.call_function(functional.embedding, (x, y, None, 1.0))) == [y]
        assert not writes(graph.call_function(functional.embedding, (x, y)))

    def test_modules_write_if_one_inside_of_them_works_in_place(self) -> None:
        def called(module: nn.Module) -> fx.Node:
            graph = fx.Graph()
            node = graph.call_module("child", (graph.placeholder("x"),))
            owner = nn.Module()
            owner.child = module
            graph.output(node)
            return next(n for n in fx.GraphModule(owner, graph).graph.nodes if n.op == "call_module")

        assert writes(called(nn.ReLU(inplace=True)))
        assert writes(called(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))))
        assert writes(called(fx.symbolic_trace(lambda x: x.add_(1))))
        assert not writes(called(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        assert written_inputs(called(nn.ReLU(inplace=True)))[0].name == "x"

    def test_a_module_that_the_graph_does_not_have_writes_nothing(self, graph: fx.Graph, x: fx.Node) -> None:
        assert not writes(graph.create_node("call_module", "missing.child", (x,)))

    def test_an_operator_that_is_called_on_copies_writes_nothing(
        self, custom: Any, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert not writes(graph.call_function(call_on_copies, (custom.update_.default, (0,), x, y)))

    def test_the_result_of_an_in_place_operator_is_the_argument_it_wrote(self) -> None:
        assert returned_position(aten.add_.Tensor) == 0
        assert returned_position(aten.add.out) is None  # passed by keyword
        assert returned_position(aten._foreach_add_.Scalar) is None  # returns nothing
        assert returned_position(aten.native_batch_norm.default) is None  # returns something new
        assert returned_position(aten.add.Tensor) is None

    def test_operators_that_change_a_layout_or_write_into_out_are_told_apart(self) -> None:
        for op in (aten.t_.default, aten.resize_.default, aten.set_.source_Tensor, aten.detach_.default):
            assert changes_layout(op)
        assert not changes_layout(aten.add_.Tensor)
        assert writes_into_out(aten.add.out)
        assert not writes_into_out(aten.add_.Tensor)


class TestAliases:
    def test_views_share_memory_with_what_they_show(self, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        for op in (aten.t.default, aten.detach.default, aten.split.Tensor, aten._unsafe_view.default, operator.getitem):
            assert shared_inputs(graph.call_function(op, (x, 1))) == [x]
            assert may_share(op)
        assert shared_inputs(graph.call_function(aten.view.default, (), {"self": x, "size": [1]})) == [x]
        for op in (aten.add.Tensor, aten.clone.default, aten.cat.default, max):
            assert shared_inputs(graph.call_function(op, (x, y))) == []
            assert not may_share(op)

    def test_results_of_in_place_operators_share_what_they_wrote(self, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        assert shared_inputs(graph.call_function(aten.add_.Tensor, (x, y))) == [x]
        assert not is_view_of_first(aten.add_.Tensor)
        assert is_view_of_first(aten.select.int)

    def test_an_unsafe_split_keeps_the_whole_alive_but_counts_as_new_tensors(self, graph: fx.Graph, x: fx.Node) -> None:
        node = graph.call_function(aten.unsafe_split.Tensor, (x, 2))
        assert shared_inputs(node) == []
        assert stored_in(node) == [x]
        assert aliased_inputs(node) == [x]

    def test_elements_of_new_lists_share_nothing_and_parts_of_a_split_do(self, graph: fx.Graph, x: fx.Node) -> None:
        new = graph.call_function(aten._foreach_add.Scalar, ([x, x], 1))
        nested = graph.call_function(operator.getitem, (graph.call_function(operator.getitem, (new, 0)), 0))
        assert is_new_element(graph.call_function(operator.getitem, (new, 0)))
        assert is_new_element(nested)
        split = graph.call_function(aten.split.Tensor, (x, 2))
        assert not is_new_element(graph.call_function(operator.getitem, (split, 0)))
        assert not is_new_element(new)
        assert not is_new_element(graph.call_function(operator.getitem, ([x, x], 0)))

    def test_operators_that_may_copy_keep_alive_what_the_recorded_values_share(self) -> None:
        graph = fx.Graph()
        x, val = graph.placeholder("x"), torch.empty(2, 3)
        x.meta["val"] = val
        same, copied = (graph.call_function(aten.contiguous.default, (x,)) for _ in range(2))
        same.meta["val"], copied.meta["val"] = val.contiguous(), val.t().contiguous()
        assert stored_in(same) == [x]
        assert stored_in(copied) == []
        assert shared_inputs(copied) == [x]

    def test_dropout_that_draws_nothing_returns_its_argument(self, graph: fx.Graph, x: fx.Node) -> None:
        assert aliased_inputs(graph.call_function(aten.dropout.default, (x, 0.5, False))) == [x]
        assert aliased_inputs(graph.call_function(aten.dropout.default, (x, 0.5, True))) == []
        assert aliased_inputs(graph.call_function(aten.native_dropout.default, (x, 0.5, False))) == []
        value = torch.ones(2)
        assert aten.dropout.default(value, 0.5, False).data_ptr() == value.data_ptr()
        assert aten.native_dropout.default(value, 0.5, False)[0].data_ptr() != value.data_ptr()

    def test_operators_with_nothing_to_compute_may_return_an_argument(self, graph: fx.Graph, x: fx.Node) -> None:
        assert aliased_inputs(graph.call_function(aten.einsum.default, ("i->i", [x]))) == [x]
        assert aliased_inputs(graph.call_function(torch.einsum, ("i->i", x))) == [x]
        assert shared_inputs(graph.call_function(aten.einsum.default, ("i->i", [x]))) == []

    @pytest.mark.parametrize("name", ["view", "reshape", "to", "contiguous", "__getitem__", "squeeze_", "float"])
    def test_methods_that_may_return_a_view_alias_the_tensor(self, name: str, graph: fx.Graph, x: fx.Node) -> None:
        expected = [] if name == "__getitem__" else [x]
        assert aliased_inputs(graph.call_method(name, (x, 1))) == expected

    def test_functions_of_torch_alias_only_if_they_may_return_views(
        self, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert aliased_inputs(graph.call_function(torch.reshape, (x, (1,)))) == [x]
        assert aliased_inputs(graph.call_function(torch.add, (x, y))) == []
        assert aliased_inputs(graph.call_function(torch.add, (x, x), {"out": y})) == [x, y]
        assert aliased_inputs(graph.call_function(getattr, (x, "data"))) == [x]
        assert aliased_inputs(graph.call_function(operator.add, (x, y))) == []

    def test_unknown_functions_and_modules_may_return_any_argument(
        self, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert aliased_inputs(graph.call_function(_unknown, (x, y))) == [x, y]
        assert aliased_inputs(graph.create_node("call_module", "child", (x, y))) == [x, y]

    def test_functions_of_this_package_return_tensors_of_their_own(
        self, custom: Any, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        assert aliased_inputs(graph.call_function(call_on_copies, (custom.update_.default, (0,), x, y))) == []

    def test_views_and_sizes_read_no_contents(self, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        for node in (
            graph.call_function(aten.view.default, (x, [-1])),
            graph.call_function(aten.sym_size.int, (x, 0)),
            graph.call_function(torch.transpose, (x, 0, 1)),
            graph.call_method("size", (x,)),
            graph.call_function(operator.getitem, (x, 0)),
            graph.call_function(getattr, (x, "shape")),
        ):
            assert not reads_contents(node)
        for node in (
            graph.call_function(aten.reshape.default, (x, [-1])),  # may copy
            graph.call_function(operator.getitem, (x, y)),  # the index is a tensor
            graph.call_function(getattr, (x, "data")),
            graph.call_method("reshape", (x, -1)),
            graph.call_function(torch.add, (x, y)),
        ):
            assert reads_contents(node)

    def test_copies_casts_and_views_keep_elements(self, graph: fx.Graph, x: fx.Node, y: fx.Node) -> None:
        for op in (aten.clone.default, aten._to_copy.default, aten.view.default, aten.constant_pad_nd.default):
            assert keeps_elements(graph.call_function(op, (x, [1])))
        for op in (aten.add.Tensor, aten.add_.Tensor, operator.getitem):
            assert not keeps_elements(graph.call_function(op, (x, y)))


class TestDraws:
    @pytest.mark.parametrize(
        ("op", "args"),
        [
            (aten.rand.default, ([2],)),
            (aten.native_dropout.default, (None, 0.5, True)),
            (aten.native_dropout.default, (None, 0.5, None)),
            (aten.scaled_dot_product_attention.default, (None, None, None, None, 0.1)),
            (aten.lstm.input, (None, [], [], True, 1, 0.5, True, False, False)),
            (torch.rand, (2,)),
            (functional.dropout, (None, 0.5)),
            (functional.scaled_dot_product_attention, (None, None, None, None, 0.1)),
            (get_rng_state, ("cpu",)),
            (set_rng_state, (None, "cpu")),
        ],
    )
    def test_operators_and_functions_that_ask_the_generator_draw(self, op: Any, args: tuple[Any, ...]) -> None:
        assert draws(call(op, *args))
        assert order_kind(call(op, *args)) == RANDOM

    @pytest.mark.parametrize(
        ("op", "args"),
        [
            (aten.native_dropout.default, (None, 0.5, False)),
            (aten.scaled_dot_product_attention.default, (None, None, None)),
            (aten.scaled_dot_product_attention.default, (None, None, None, None, 0)),
            (aten.lstm.input, (None, [], [], True, 1, 0.0, True, False, False)),
            (aten.rrelu_with_noise.default, (None, None)),
            (functional.dropout, (None, 0.5, False)),
            (torch.dropout, (None, 0.5, False)),
            (functional.scaled_dot_product_attention, (None, None, None)),
            (aten.add.Tensor, (None, None)),
            (torch.add, (None, None)),
        ],
    )
    def test_what_is_not_training_or_has_no_dropout_draws_nothing(self, op: Any, args: tuple[Any, ...]) -> None:
        assert not draws(call(op, *args))
        assert order_kind(call(op, *args)) == ""

    def test_methods_draw_by_name(self, graph: fx.Graph, x: fx.Node) -> None:
        assert draws(graph.call_method("normal_", (x,)))
        assert not draws(graph.call_method("add_", (x, 1)))
        assert not draws(x)

    def test_an_operator_that_is_called_on_copies_still_draws(self, custom: Any, graph: fx.Graph, x: fx.Node) -> None:
        node = graph.call_function(call_on_copies, (custom.noise.default, (), x))
        assert draws(node)
        assert order_kind(node) == RANDOM


class TestCommunication:
    def test_collectives_and_waits_are_known_by_their_target(self) -> None:
        assert is_collective(c10d.all_reduce.default)
        assert is_collective(c10d.all_gather_into_tensor_coalesced.default)
        assert not is_collective(c10d.wait_tensor.default)
        assert is_wait(c10d.wait_tensor.default)
        assert not is_wait(c10d.all_reduce.default)
        assert not is_collective(aten.add.Tensor)
        assert not is_collective("all_reduce")
        assert is_communication(c10d.wait_tensor.default)

    def test_a_node_communicates_if_its_operator_has_a_group_in_any_namespace_also_on_copies(
        self, custom: Any, graph: fx.Graph, x: fx.Node
    ) -> None:
        assert communicates(graph.call_function(c10d.all_reduce.default, (x, "sum", "0")))
        assert communicates(graph.call_function(custom.exchange.default, (x, "0")))
        on_copies = graph.call_function(call_on_copies, (custom.exchange.default, (), x, "0"))
        assert communicates(on_copies)
        assert order_kind(on_copies) == COLLECTIVE
        assert not communicates(graph.call_function(c10d.wait_tensor.default, (x,)))
        assert not communicates(graph.call_function(_with_group, (x, "0")))

    @pytest.mark.skipif(not hasattr(c10d, "isend"), reason="this torch has no point-to-point operators")
    def test_point_to_point_messages_are_no_collectives_of_all_ranks(self, graph: fx.Graph, x: fx.Node) -> None:
        assert is_point_to_point(c10d.isend.default)
        assert not communicates(graph.call_function(c10d.isend.default, (x, 1, 0, "0")))

    def test_sizes_are_known_before_a_result_is_there(self) -> None:
        assert is_measure(aten.sym_size.int)
        assert not is_measure(aten.view.default)


class TestOrderAndNeed:
    def test_asserts_waits_and_profiler_marks_have_no_order(self, graph: fx.Graph, x: fx.Node) -> None:
        for node in (
            graph.call_function(aten._assert_async.msg, (x, "no")),
            graph.call_function(torch._assert, (x, "no")),
            graph.call_function(c10d.wait_tensor.default, (x,)),
            graph.call_function(torch.ops.profiler._record_function_enter_new.default, ("name",)),
        ):
            assert order_kind(node) == ""

    def test_prints_have_an_order_and_writes_are_ordered_by_their_memory(self, graph: fx.Graph, x: fx.Node) -> None:
        assert order_kind(graph.call_function(print, (x,))) == EFFECT
        assert order_kind(graph.call_function(aten.add_.Tensor, (x, 1))) == ""
        assert order_kind(graph.call_function(operator.iadd, (x, 1))) == ""

    def test_effects_draws_and_custom_operators_are_needed_without_users(
        self, custom: Any, graph: fx.Graph, x: fx.Node, y: fx.Node
    ) -> None:
        for node in (
            x,
            graph.call_function(aten.rand.default, ([2],)),
            graph.call_function(custom.update.default, (x, y)),
            graph.call_function(call_on_copies, (custom.update_.default, (0,), x, y)),
            graph.call_function(set_rng_state, (x, "cpu")),
            graph.call_function(aten.add_.Tensor, (x, y)),
            graph.call_method("add_", (x, y)),
            graph.call_function(operator.setitem, (x, 0, y)),
        ):
            assert is_needed(node)
        for target in (aten.add.Tensor, operator.getitem, torch.add):
            assert not is_needed(graph.call_function(target, (x, y)))

    def test_operators_of_torch_library_are_custom(self, custom: Any, graph: fx.Graph, x: fx.Node) -> None:
        assert is_custom_operator(custom.update.default)
        assert not is_custom_operator(aten.add.Tensor)
        assert calls_custom_operator(graph.call_function(call_on_copies, (custom.update.default, (), x, x)))
        assert not calls_custom_operator(x)

    def test_what_depends_on_data_is_known(self) -> None:
        assert is_data_dependent(aten._local_scalar_dense.default)
        assert is_data_dependent(aten.nonzero.default)
        assert not is_data_dependent(aten.add.Tensor)

    def test_results_that_are_tensors_are_known(self) -> None:
        assert returns_tensors(aten.split.Tensor)
        assert not returns_tensors(aten.sym_size.int)
        assert not returns_tensors(aten._assert_async.msg)


class TestFunctionalVariants:
    @pytest.mark.parametrize(
        ("op", "functional"),
        [
            (aten.add_.Tensor, aten.add.Tensor),
            (aten._foreach_mul_.Scalar, aten._foreach_mul.Scalar),
            (aten._fused_adam_.default, aten._fused_adam.default),
            (aten.add.out, aten.add.Tensor),
            (aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default),
            (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default),
            (aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default),
        ],
    )
    def test_operators_that_write_have_one_that_returns_the_new_values(self, op: Any, functional: Any) -> None:
        assert functional_variant(op) is functional

    def test_an_operator_of_torch_library_has_none_whatever_its_name_says(self, custom: Any) -> None:
        assert functional_variant(custom.update_.default) is None

    def test_an_in_place_view_has_the_operator_that_returns_the_view(self) -> None:
        assert view_variant(aten.transpose_.default) is aten.transpose.int
        assert view_variant(aten.t_.default) is aten.t.default

    def test_facts_tell_in_place_views_from_new_storage_and_from_writes(self) -> None:
        assert operator_facts(aten.t_.default).is_inplace_view
        assert operator_facts(aten.t_.default).writes == ()
        resized = operator_facts(aten.resize_.default)
        assert resized.replaces_storage
        assert not resized.is_inplace_view
        assert operator_facts(aten.select.int).is_view
        assert not operator_facts(aten.add_.Tensor).is_view
        assert operator_facts(aten.add_.Tensor).writes == (0,)
        assert operator_facts(aten.native_batch_norm.default).writes_if == "training"
        assert operator_facts(aten.native_batch_norm.default).fresh_results == 3
        assert operator_facts(aten.add.out).out_names == ("out",)
        assert operator_facts(aten.bernoulli_.float).is_random

    def test_a_default_that_the_functional_variant_does_not_have_is_known(self) -> None:
        facts = operator_facts(aten.bernoulli_.float)
        assert facts.functional is aten.bernoulli.p
        assert dict(facts.lost_defaults) == {"p": 0.5}


def _unknown(*tensors: Any, inplace: bool = False) -> Any:
    return tensors[0]


def _with_group(tensor: Any, group_name: str) -> Any:
    return tensor
