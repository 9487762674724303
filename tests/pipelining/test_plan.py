"""Choosing a schedule for a model, and refusing one before any rank starts."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import wholestep as ws
from wholestep.errors import OptionError, ScheduleError
from wholestep.pipelining.planning.stage_costs import StageCosts, estimate_costs, measure_costs
from wholestep.simulate.machine import Machine
from wholestep.simulate.pipeline import Network, named_schedule, with_communication
from wholestep.torch_private import pipelining as compat

MIB = 2**20


class Blocks(nn.Module):
    def __init__(self, depth: int = 8, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def cut(stages: int, depth: int = 8, batch: int = 16, width: int = 32) -> ws.pipelining.Pipe:
    begin = {f"blocks.{i * depth // stages}": ws.pipelining.SplitPoint.BEGINNING for i in range(1, stages)}
    return ws.pipelining.pipeline(Blocks(depth, width), (torch.randn(batch, width),), split_spec=begin)


@pytest.fixture(scope="module")
def pipes() -> dict[int, ws.pipelining.Pipe]:
    return {stages: cut(stages) for stages in (4, 8)}


@pytest.fixture(scope="module")
def plan(pipes) -> ws.pipelining.Plan:
    return ws.pipelining.plan(Blocks(), 4, cut=pipes.__getitem__, stages_per_rank=(1, 2), microbatches=(4, 8, 16))


def test_costs_are_matmul_flops_and_the_bytes_that_autograd_saves(pipes):
    machine = Machine(flops=1e9, memory=1e30, launch=0.0)
    costs = estimate_costs(pipes[4], machine)
    rows, width, blocks = 16, 32, 2
    product = 2 * rows * width * 4 * width / 1e9
    inner = costs[1]
    assert inner.forward == pytest.approx(blocks * 2 * product)
    assert inner.backward_input == pytest.approx(blocks * 2 * product)
    assert inner.backward_weight == pytest.approx(blocks * 2 * product)
    assert costs[0].backward_input == 0  # the model's input requires no gradient: the whole backward is W
    assert inner.parameter_bytes == blocks * 4 * (2 * 4 * width * width + 5 * width)
    saved = 4 * rows * (width + 4 * width + 4 * width)  # input, before and after GELU
    assert inner.activation_bytes == blocks * saved
    assert inner.arriving_bytes == inner.arriving_back_bytes == 4 * rows * width
    assert (costs[0].arriving_bytes, costs[-1].arriving_back_bytes) == (0, 0)


def test_a_plan_ranks_all_choices_by_time(plan):
    found = {(each.schedule, each.stages, each.microbatches) for each in plan.choices}
    assert ("1F1B", 4, 16) in found
    assert ("ZBVZeroBubble", 8, 16) in found
    assert all(each.fits for each in plan.choices)
    times = [each.seconds_per_microbatch for each in plan.choices]
    assert times == sorted(times)
    assert plan.best is plan.choices[0]
    assert "DualPipeV, 8 stages, 4 microbatches" in plan.left_out  # torch needs as many microbatches as stages
    assert len(found) + len(plan.left_out) == 3 * (3 + 5)


def test_choices_that_do_not_fit_come_last_and_are_never_best(plan, pipes):
    needs = sorted({each.peak_bytes for each in plan.choices})
    memory = needs[len(needs) // 2]
    tight = ws.pipelining.plan(
        Blocks(), 4, memory, cut=pipes.__getitem__, stages_per_rank=(1, 2), microbatches=(4, 8, 16)
    )
    fits = [each.fits for each in tight.choices]
    assert fits == sorted(fits, reverse=True)
    assert {each.fits for each in tight.choices} == {True, False}
    assert all((each.peak_bytes <= memory) is each.fits for each in tight.choices)
    none = ws.pipelining.plan(pipes[4], 4, 1, microbatches=(4,))
    with pytest.raises(ScheduleError, match="no schedule fits"):
        _ = none.best


def test_a_batch_is_divided_among_microbatches_and_small_operators_cost_their_launch(pipes):
    big, small = (Machine(launch=launch) for launch in (0.0, 1.0))
    for machine in (big, small):
        plan = ws.pipelining.plan(pipes[4], 4, batch=64, machine=machine, schedules=["1F1B"], microbatches=(4, 16))
        few, many = sorted(plan.choices, key=lambda each: each.microbatches)
        assert (many.seconds < few.seconds) is (machine is big)  # with launches of a second, fewer is better


def test_more_microbatches_than_rows_are_left_out(pipes):
    plan = ws.pipelining.plan(pipes[4], 4, batch=8, schedules=["GPipe"], microbatches=(8, 16))
    assert [each.microbatches for each in plan.choices] == [8]
    assert plan.left_out == {"GPipe, 4 stages, 16 microbatches": "the batch has 8 rows."}


def test_a_plan_without_a_possible_schedule_says_why(pipes):
    plan = ws.pipelining.plan(pipes[4], 4, batch=8, schedules=["GPipe"], microbatches=(16,))
    assert str(plan) == "no schedule is possible\n  GPipe, 4 stages, 16 microbatches: the batch has 8 rows."
    with pytest.raises(ScheduleError, match=r"no schedule is possible\. GPipe, .*: the batch has 8 rows\."):
        _ = plan.best


def test_a_model_is_cut_by_the_plan_itself():
    plan = ws.pipelining.plan(
        Blocks(),
        2,
        mb_args=(torch.randn(4, 32),),
        stages_per_rank=(1, 2),
        microbatches=(4,),
        schedules=["1F1B", "LoopedBFS"],
    )
    assert {(each.schedule, each.stages) for each in plan.choices} == {("1F1B", 2), ("LoopedBFS", 4)}


def test_custom_costs_are_used(pipes):
    own = [StageCosts(1.0, 1.0, 1.0, 10, 0, 100, 0, 0)] * 4
    fast = Machine(launch=0.0, link=float("1e30"))
    plan = ws.pipelining.plan(pipes[4], 4, costs=lambda pipe: own, machine=fast, schedules=["1F1B"], microbatches=(8,))
    assert plan.best.seconds == pytest.approx((8 + 3) * 3)
    assert plan.best.peak_bytes == 10 * 4 + 4 * 100


def test_measuring_costs_does_not_change_the_model():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            h = nn.functional.dropout(self.norm(self.first(x)))
            ws.pipelining.pipe_split()
            return self.last(h)

    model, x = Normed(), torch.randn(4, 8)
    pipe = ws.pipelining.pipeline(model, (x,))
    state, generator = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    costs = measure_costs(pipe, (x,))
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in state.items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(each.grad is None for each in model.parameters())
    assert all(each.forward > 0 and each.backward_input + each.backward_weight > 0 for each in costs)
    plan = ws.pipelining.plan(pipe, 2, costs="measured", mb_args=(x,), schedules=["GPipe"], microbatches=(2,))
    assert plan.best.seconds > 0
    with pytest.raises(OptionError, match="costs='guessed'"):
        ws.pipelining.plan(pipe, 2, costs="guessed")


def test_the_table_has_a_row_per_choice_as_text_and_for_rich(plan):
    import rich.console

    lines = str(plan).splitlines()
    assert len(lines) == 1 + len(plan.choices)
    assert lines[0].split()[:3] == ["schedule", "stages", "microbatches"]
    out = io.StringIO()
    rich.console.Console(file=out, width=160).print(plan)
    assert out.getvalue().count("ZBVZeroBubble") == str(plan).count("ZBVZeroBubble") > 0


def test_stages_that_cannot_be_divided_among_ranks_are_refused(pipes):
    with pytest.raises(OptionError, match="4 stages cannot be divided evenly among 3 ranks"):
        ws.pipelining.plan(pipes[4], 3)
    with pytest.raises(OptionError, match="ranks=0"):
        ws.pipelining.plan(pipes[4], 0)
    for model, how in ((Blocks(), "estimated"), (pipes[4], "measured")):
        with pytest.raises(OptionError, match="requires a microbatch"):
            ws.pipelining.plan(model, 4, costs=how)


def test_a_check_returns_the_timeline_of_names_lists_and_torchs_objects(pipes):
    named = pipes[4].check("GPipe", microbatches=6)
    (stage,) = compat.stage_infos(4, 1)
    assert pipes[4].check(ScheduleGPipe(stage, 6)).spans == named.spans
    assert pipes[4].check(named_schedule("GPipe", 4, 6)).spans == named.spans
    listed = [[str(action) for action in rank] for rank in named_schedule("GPipe", 4, 6).ranks]
    assert pipes[4].check(listed).makespan == named.makespan
    assert pipes[8].check("ZBVZeroBubble", microbatches=8).schedule.stages == 8
    assert len(pipes[8].check("Interleaved1F1B", ranks=2, microbatches=4).schedule.ranks) == 2


def test_a_check_does_not_guess_the_number_of_ranks(pipes):
    with pytest.raises(OptionError, match=r"8 stages on different numbers of ranks.\n.*one of 1, 2, 4, 8"):
        pipes[8].check("Interleaved1F1B")
    with pytest.raises(ScheduleError, match="8 stages cannot be divided evenly among 3 ranks"):
        pipes[8].check("interleaved1f1b", ranks=3)
    with pytest.raises(OptionError, match="no schedule '2F2B'"):
        pipes[8].check("2F2B")
    assert len(pipes[4].check("1f1b").schedule.ranks) == 4


def test_memory_may_be_a_string(pipes):
    assert pipes[4].check("1F1B", memory="16GB").deadlock is None
    with pytest.raises(ScheduleError, match="MiB on rank 0"):
        pipes[4].check("1F1B", memory="1KiB")
    with pytest.raises(OptionError, match="memory='much'"):
        pipes[4].check("1F1B", memory="much")
    found = ws.pipelining.plan(pipes[4], 4, "16GB", schedules=("1F1B",), microbatches=(4,))
    assert [choice.fits for choice in found.choices] == [True]


def test_a_check_refuses_a_deadlock_and_names_the_blocked_ranks(pipes):
    by_hand = with_communication(named_schedule("1F1B", 4, 8).compute_only(), "late")
    assert pipes[4].check(by_hand).deadlock is None
    with pytest.raises(ScheduleError, match="rank 0 is blocked at 0SEND_F3, waiting for 1RECV_F3 of rank 1") as caught:
        pipes[4].check(by_hand, network=Network(blocking_sends=True))
    assert caught.value.timeline.deadlock is not None


def test_a_check_refuses_a_schedule_that_does_not_fit(pipes):
    needed = max(pipes[4].check("1F1B", microbatches=8).peak_bytes)
    assert pipes[4].check("1F1B", microbatches=8, memory=needed)
    with pytest.raises(ScheduleError, match=r"1F1B needs .* MiB on rank 0, .* 4 activations are alive"):
        pipes[4].check("1F1B", microbatches=8, memory=needed - 1)


def test_a_check_refuses_a_schedule_for_another_number_of_stages(pipes):
    with pytest.raises(ScheduleError, match="GPipe has 3 stages, the pipe has 4"):
        pipes[4].check("GPipe", ranks=3, microbatches=4)
