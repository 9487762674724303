"""What the tests of `torch.distributed._spmd` asked for, with the prefix of the imports changed; without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from cases.parts import train_step
from wholestep.compat.spmd.api import COMPILED_OBJECT_KEY, Override, compile
from wholestep.compat.spmd.data_parallel import DataParallelStyle
from wholestep.compat.spmd.gm_transformation import GraphModuleTransformation
from wholestep.compat.spmd.graph_optimization import (
    comm_fusion_with_concat,
    get_all_comm_blocks,
    graph_optimization_pass,
    iter_move_grads_and_optimizers,
    remove_copy_from_optimizer,
    schedule_comm_wait,
)
from wholestep.compat.spmd.graph_utils import OP, dump_graphs_to_files, find_node, get_node_tensor_metadata
from wholestep.compat.spmd.iter_graph_module import IterGraphModule
from wholestep.compat.spmd.parallel_mode import DataParallel, DTensorExpandMode, ParallelMode
from wholestep.compat.spmd.partial_lower import MIN_ATEN_OPS_TO_LOWER, partial_lower
from wholestep.errors import OptionError
from wholestep.ir.effects import is_collective
from wholestep.passes import applied_passes, disable_graph_optimization_dump

aten = torch.ops.aten


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


alone = pytest.mark.usefixtures("two_ranks")
pytestmark = pytest.mark.fake_group


def trained(optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any, Tensor]:
    """A model whose optimizer has its state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    made = optimizer(model.parameters(), lr=0.1, **options)
    train_step(model, made, torch.randn(4, 6))
    return model, made, torch.randn(4, 6)


def collectives(step: Any) -> list[Any]:
    return [node.target for node in step._compiled_obj.step.last.gm.graph.nodes if is_collective(node.target)]


def test_graphs_are_dumped_to_files() -> None:
    folder = Path(dump_graphs_to_files({"one": "first graph"}))
    assert dump_graphs_to_files({"two": "second graph"}, str(folder)) == str(folder)
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "one.graph": "first graph",
        "two.graph": "second graph",
    }
    for file in list(folder.iterdir()):
        file.unlink()
    folder.rmdir()


def test_metadata_of_a_node_is_found_or_missed() -> None:
    graph = make_fx(lambda x: x.sin() + 1)(torch.randn(2, 3)).graph
    node = find_node(graph, lambda n: n.op == OP.CALL_FUNCTION)[0]
    found = get_node_tensor_metadata(node)
    assert found is not None
    assert found.shape == (2, 3)
    del node.meta["tensor_meta"]
    again = get_node_tensor_metadata(node)  # from the value
    assert again is not None
    assert (again.shape, again.dtype, again.stride) == (found.shape, found.dtype, found.stride)
    node.meta.clear()
    assert get_node_tensor_metadata(node, is_required=False) is None
    with pytest.raises(RuntimeError, match="Callsite expects that tensor_meta exists"):
        get_node_tensor_metadata(node)


@alone
def test_the_graph_is_transformed_once_and_kept() -> None:
    seen: list[fx.GraphModule] = []

    def optimization(gm: fx.GraphModule) -> fx.GraphModule:
        seen.append(gm)
        return gm

    step = compile(gm_transformation=optimization)(train_step)
    arguments = trained(torch.optim.Adam)
    step(*arguments)
    gm = step.__dict__[COMPILED_OBJECT_KEY].gm
    step(*arguments)
    assert len(seen) == 1
    assert step.__dict__[COMPILED_OBJECT_KEY].gm is gm
    assert step.__name__ == "train_step"
    assert len(collectives(step)) == 4


@alone
def test_data_parallel_styles_are_plans() -> None:
    for style, wanted in (("replicate", "all_reduce"), ("fully_shard", "reduce_scatter_tensor")):
        step = compile(parallel_mode=DataParallel(style))(train_step)
        step(*trained())
        assert any(wanted in str(target) for target in collectives(step))
    assert DataParallel("default").parallel_style is DataParallelStyle.DEFAULT
    with pytest.raises(RuntimeError, match="Unknown parallel style: sideways"):
        DataParallel("sideways")


@alone
def test_passes_of_a_mode_run_on_its_graph() -> None:
    def passes(gm: fx.GraphModule) -> fx.GraphModule:
        comm_fusion_with_concat(gm, 100)
        schedule_comm_wait(gm)
        return gm

    for mode in (DataParallel("replicate", custom_passes=passes), DTensorExpandMode(custom_passes=passes)):
        step = compile(parallel_mode=mode)(train_step)
        step(*trained())
        assert len(collectives(step)) == 1


@alone
def test_a_mode_of_ones_own_gets_the_graph_of_one_device() -> None:
    class Twice(ParallelMode):
        """Adds every gradient to itself: what two ranks with one batch would do."""

        def partition(self, gm: fx.GraphModule, model: Any, optimizer: Any, params_and_buffers: Any,
                      named_states: Any, args: Any, kwargs: Any) -> fx.GraphModule:  # fmt: skip
            assert isinstance(model, nn.Module)
            assert set(params_and_buffers) == {name for name, _ in model.named_parameters()}
            assert args[0] is model
            assert not any(is_collective(node.target) for node in gm.graph.nodes)
            (relu,) = find_node(gm.graph, lambda n: n.target is aten.relu.default)
            with gm.graph.inserting_after(relu):
                doubled = gm.graph.call_function(torch.add, (relu, relu))
            relu.replace_all_uses_with(doubled, lambda user: user is not doubled)
            return gm

        def transform_and_compile(self, gm: fx.GraphModule) -> IterGraphModule:
            return IterGraphModule(gm)

    step = compile(parallel_mode=Twice())(train_step)
    step(*trained())
    assert isinstance(step._compiled_obj.gm, IterGraphModule)
    assert any(node.target is aten.add.Tensor for node in step._compiled_obj.step.last.gm.graph.nodes)


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("cannot be traced")


torch.library.define("compat_spmd::anchor", "(Tensor x) -> Tensor")
torch.library.define("compat_spmd::anchor_backward", "(Tensor x) -> Tensor")
for _name in ("anchor", "anchor_backward"):
    torch.library.impl(f"compat_spmd::{_name}", "CompositeExplicitAutograd")(lambda x: x.clone())
    torch.library.register_fake(f"compat_spmd::{_name}")(lambda x: torch.empty_like(x))
ANCHORS = [torch.ops.compat_spmd.anchor.default, torch.ops.compat_spmd.anchor_backward.default]


class Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.compat_spmd.anchor(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.compat_spmd.anchor_backward(gradient)


class Anchored(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Anchor.apply(x)


class Replaces(Override):
    """Replaces what cannot be traced by an operator, and that by an addition."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.targets: list[Any] = []
        self.states: list[int] = []

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.paths.append(fqn)
        return Anchored() if isinstance(orig_submodule, DataDependent) else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        self.states.append(len(flat_state))
        for node in list(gm.graph.nodes):
            if node.target in ANCHORS:
                self.targets.append(node.target)
                with gm.graph.inserting_before(node):
                    new = gm.graph.call_function(torch.add, args=(*node.args, *node.args))
                node.replace_all_uses_with(new)
        gm.graph.lint()
        gm.graph.eliminate_dead_code()
        return gm


@alone
def test_submodules_are_replaced_and_their_operators_transformed() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), DataDependent())
            self.hole = DataDependent()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.hole(self.first(x)))

    override, model = Replaces(), Nested()
    step = compile(module_override=[override])(train_step)
    loss = step(model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4, 6))
    assert override.paths == ["first", "second", "second.0", "second.1", "hole"]
    assert override.targets == [ANCHORS[0], ANCHORS[0], ANCHORS[1], ANCHORS[1]]
    assert override.states == [4]
    assert [tensor.shape for tensor in step._compiled_obj.flat_state] == [p.shape for p in model.parameters()]
    assert torch.isfinite(loss)
    assert not any(node.target in ANCHORS for node in step._compiled_obj.step.last.gm.graph.nodes)


@alone
def test_states_that_an_override_would_add_are_refused() -> None:
    class Adds(Replaces):
        def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
            flat_state.append(torch.zeros(1))
            return gm

    with pytest.raises(OptionError, match="changed the number of states"):
        compile(module_override=[Adds()])(train_step)(*trained())


def test_a_step_without_a_model_or_without_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match="find nn"):
        compile()(lambda x: x)(torch.ones(1))
    with pytest.raises(OptionError, match="without a process group"):
        compile()(train_step)(*trained())


@alone
def test_updates_that_a_transformation_moves_are_pending_until_the_last_step() -> None:
    def moves(gm: fx.GraphModule) -> IterGraphModule:
        iterating = IterGraphModule(gm)
        comm_fusion_with_concat(iterating, 100)
        schedule_comm_wait(iterating)
        remove_copy_from_optimizer(iterating)
        (block,) = get_all_comm_blocks(iterating, "all_reduce")
        first = next(n for n in iterating.graph.nodes if n.op == "call_function")
        iter_move_grads_and_optimizers(iterating, block.comm_node.name, first.name)
        return iterating

    model, optimizer, batch = trained(torch.optim.Adam, foreach=True)
    step = compile(gm_transformation=moves)(train_step)
    made: list[bool] = []
    for last in (False, False, True):
        step(model, optimizer, batch, last_train_step=last)
        made.append(step._compiled_obj.step.has_pending)
    assert made == [True, True, False]
    assert step._compiled_obj.gm.graph.has_moves
    assert "iter_move_grads_and_optimizers" in applied_passes(step._compiled_obj.step.last.gm)


@alone
def test_a_transformation_ends_after_its_iterations() -> None:
    step = compile(gm_transformation=GraphModuleTransformation(3, enable_graph_optimization=True))(train_step)
    arguments = trained(torch.optim.Adam)
    for _ in range(3):
        step(*arguments)
    assert not step._compiled_obj.step.has_pending
    assert len(collectives(step)) == 1


@alone
def test_a_transformation_dumps_its_graphs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wholestep.passes")
    try:
        step = compile(gm_transformation=GraphModuleTransformation(dump_graphs=True))(train_step)
        step(*trained())
    finally:
        disable_graph_optimization_dump()
    folder = Path(next(r.getMessage() for r in caplog.records if "graphs are in" in r.getMessage()).split(" in ")[1])
    names = {file.name for file in folder.glob("*.graph")}
    assert names >= {"before_transformation_gm.graph", "iter_graph_main_gm.graph", "iter_graph_cleanup_gm.graph"}


@graph_optimization_pass(prerequisites=[], apply_after=[])
def opens(gm: IterGraphModule) -> None:
    """Nothing."""


@graph_optimization_pass(prerequisites=[opens], apply_after=[])
def builds_on_it(gm: IterGraphModule) -> None:
    """Nothing."""


def test_the_order_of_passes_is_kept_by_each_graph() -> None:
    def graph() -> IterGraphModule:
        return IterGraphModule(make_fx(lambda x: x.sin())(torch.ones(2)))

    one = graph()
    opens(one)
    builds_on_it(one)
    with pytest.raises(AssertionError, match="are the prerequisites of"):
        builds_on_it(graph())
    with pytest.raises(AssertionError, match="Cannot apply"):
        opens(one)


@pytest.mark.compiles
def test_an_iter_graph_module_hands_its_graphs_to_inductor() -> None:
    def adds(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(MIN_ATEN_OPS_TO_LOWER):
            x = torch.tanh(x * w) + x
        return x

    inputs = torch.randn(4), torch.randn(4)
    gm = make_fx(adds, tracing_mode="fake")(*inputs)
    iterating = IterGraphModule(gm, enable_inductor=True)
    for _ in range(2):
        torch.testing.assert_close(iterating(*inputs), adds(*inputs))
    assert any("subgraph" in str(n.target) for _, ran in iterating._lowered.values() for n in ran.graph.nodes)
    assert not any("subgraph" in str(node.target) for node in iterating.graph.nodes)


@pytest.mark.compiles
@alone
def test_a_transformation_with_inductor_compiles_the_step() -> None:
    step = compile(gm_transformation=GraphModuleTransformation(enable_inductor=True))(train_step)
    other = compile()(train_step)
    losses = [
        [float(each(*arguments).detach()) for _ in range(3)] for each in (step, other) if (arguments := trained())
    ]
    torch.testing.assert_close(losses[0], losses[1])
    assert step._compiled_obj.step.lowering is not None
    assert partial_lower.__name__ == "partial_lower"
