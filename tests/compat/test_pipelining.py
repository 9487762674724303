"""What torch's tests of `test_pipe`, `test_stage`, `test_schedule` and `test_unflatten` ask for, by changed imports."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from wholestep.compat.pipelining import (
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)
from wholestep.compat.pipelining._IR import PP_SUBMOD_PREFIX, LossWrapper, PipeSequential, get_submod_name
from wholestep.compat.pipelining._utils import PipeInfo
from wholestep.compat.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleInterleaved1F1B,
    get_schedule_class,
)
from wholestep.compat.pipelining.stage import PipelineStage, Stage
from wholestep.errors import PipelineError, StageError

WIDTH, BATCH = 6, 8


class ExampleCode(nn.Module):
    """Parameters that the code reads itself, one of them in two stages, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mm_param1 = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.mm_param2 = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.lin1, self.lin2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cval", torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(torch.mm(x, self.mm_param1) + y)
        x = self.lin1(x)
        pipe_split()
        x = torch.relu(x) + self.cval
        pipe_split()
        return self.lin2(torch.mm(x, self.mm_param2)) + y


class Layers(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def halves(model: nn.Module, x: Tensor) -> Pipe:
    return pipeline(model, mb_args=(x[:2],), split_spec={"layers.2": SplitPoint.BEGINNING})


def test_a_pipe_has_the_stages_and_the_names_of_its_model() -> None:
    torch.manual_seed(0)
    model, x, y = ExampleCode(), torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    pipe = pipeline(model, mb_args=(x, y))
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x, y)[0], model(x, y))
    old = {name for name, _ in model.named_parameters()}
    new = {name for i in range(3) for name, _ in pipe.get_stage_module(i).named_parameters()}
    assert old == new
    assert get_submod_name(1) == f"{PP_SUBMOD_PREFIX}_1"
    assert isinstance(pipe.info(), PipeInfo)


def test_an_unflattened_stage_keeps_the_structure_of_its_modules() -> None:
    model, x = Layers(), torch.randn(BATCH, WIDTH)
    pipe = halves(model, x)
    names = [sorted(pipe.get_stage_module(i).state_dict()) for i in range(2)]
    assert names[0] == ["layers.0.0.bias", "layers.0.0.weight", "layers.1.0.bias", "layers.1.0.weight"]
    assert {name for part in names for name in part} == set(model.state_dict())
    assert pipe.get_stage_module(1).get_submodule("layers.3.0").weight is model.layers[3][0].weight


@pytest.mark.parametrize("prefix", ["", "split_gm."])
def test_a_pipe_tells_the_models_name_of_what_is_in_a_stage(prefix: str) -> None:
    pipe = halves(Layers(), torch.randn(BATCH, WIDTH))
    assert pipe.remap_qualname(f"{prefix}submod_pp_1.layers.3.0.weight") == "layers.3.0.weight"
    assert pipe.remap_qualname(f"{prefix}submod_pp_0.layers.0.0") == "layers.0.0"
    for wrong in ("submod_pp_0.layers.3.0.weight", "submod_pp_7.layers", "submod_pp_0", "nothing"):
        with pytest.raises(PipelineError, match="no module or tensor named"):
            pipe.remap_qualname(f"{prefix}{wrong}")


def test_schedules_are_found_by_name() -> None:
    assert get_schedule_class("1F1B") is Schedule1F1B
    assert get_schedule_class("gpipe") is ScheduleGPipe
    assert issubclass(ScheduleGPipe, PipelineScheduleSingle)
    assert issubclass(ScheduleInterleaved1F1B, PipelineScheduleMulti)
    with pytest.raises(ValueError, match="Unknown schedule name"):
        get_schedule_class("sideways")


def test_wrappers_of_losses_and_sequences_are_those_of_the_ir() -> None:
    class WithLoss(LossWrapper):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.loss_fn(self.module(x), target)

    sequence = PipeSequential.from_sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    x = torch.randn(BATCH, WIDTH)
    pipe = pipeline(sequence, mb_args=(x,))
    assert pipe.num_stages == 2
    assert WithLoss(sequence, nn.functional.mse_loss)(x, x).shape == ()


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    return (result - target).square().mean()


def train(rank: int, kind: str) -> dict[str, Any]:
    """One step of a schedule of torch over stages that were built by torch's keywords."""
    torch.manual_seed(0)
    model, x, target = Layers(), torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    reference = copy.deepcopy(model)
    loss_of(reference(x), target).backward()
    pipe = halves(model, x)
    module = pipe.get_stage_module(rank)
    stage = build_stage(
        stage_module=module, stage_index=rank, pipe_info=pipe.info(), device=torch.device("cpu"), group=None
    )
    assert isinstance(stage, Stage)
    assert isinstance(stage, PipelineStage)
    steps = get_schedule_class(kind)(stage, n_microbatches=4, loss_fn=loss_of)
    if rank == 0:
        steps.step(x)
    else:
        steps.step(target=target)
    names = [stage.remap_qualname(name) for name, _ in stage.submod.named_parameters()]
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad)
    with pytest.raises(StageError, match="no module or tensor named"):
        stage.remap_qualname("layers.9.weight")
    return {"names": names, "modules": stage.remap_qualname("submod.layers")}


@pytest.mark.parametrize("kind", ["GPipe", "1F1B"])
def test_stages_built_by_torchs_keywords_train_under_torchs_schedules(kind: str) -> None:
    first, second = run_ranks(train, 2, kind)
    assert first["names"] == ["layers.0.0.weight", "layers.0.0.bias", "layers.1.0.weight", "layers.1.0.bias"]
    assert second["names"][0] == "layers.2.0.weight"
    assert first["modules"] == "layers"


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Any:
        return self.module(*args)


def names_in_a_wrapper(rank: int) -> str:
    pipe = halves(Layers(), torch.randn(BATCH, WIDTH))
    wrapped = Wrapped(pipe.get_stage_module(rank))
    stage = build_stage(wrapped, stage_index=rank, pipe_info=pipe.info(), device="cpu")
    return stage.remap_qualname(f"module.layers.{2 * rank}.0.bias")


def test_a_stage_tells_the_models_names_of_a_wrapped_module() -> None:
    assert run_ranks(names_in_a_wrapper, 2) == ["layers.0.0.bias", "layers.2.0.bias"]
