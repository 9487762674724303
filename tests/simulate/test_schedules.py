"""Lists of actions: text form, torch's CSV, torch's schedule objects, and validation."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torchs

from wholestep.errors import OptionError, ScheduleError
from wholestep.simulate import pipeline
from wholestep.simulate.pipeline import Schedule, named_schedule, parse, schedule_of, simulate
from wholestep.torch_private import pipelining as compat

LISTED = [name for name in pipeline.NAMES if name not in ("GPipe", "1F1B")]


def torchs_object(name: str, ranks: int, microbatches: int, each: int = 2) -> object:
    return compat.schedule_class(name)(compat.stage_infos(ranks, each), microbatches)


@pytest.mark.parametrize(
    "text",
    "2F0 0I11 1W3 3B2 0SEND_F1 1RECV_F1 1SEND_B0 0RECV_B0 0UNSHARD 2RESHARD 1REDUCE_GRAD "
    "(1F4;1B0)OVERLAP_F_B (0SEND_F1;0RECV_B0)EXCHANGE (0SEND_F1)AWAIT".split(),
)
def test_an_action_round_trips_through_its_text(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", ["F0", "2X0", "2F", "0UNSHARD3", "2F0 ;", "()OVERLAP_F_B", "(0UNSHARD)AWAIT", "2F-1"])
def test_text_that_is_not_an_action_is_refused(text):
    with pytest.raises(ScheduleError, match="not an action"):
        parse(text)


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_lists_are_those_that_torch_runs(name, ranks, microbatches):
    theirs = schedule_of(torchs_object(name, ranks, microbatches))
    assert named_schedule(name, ranks, microbatches, sharded=True).ranks == theirs.ranks


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_a_csv_of_torchs_is_read(name, form, tmp_path):
    made = torchs_object(name, 4, 8)
    made._dump_csv(str(tmp_path / "plan.csv"), form)
    ours = Schedule.read_csv(tmp_path / "plan.csv")
    assert ours.communicates is (form == "compute_comms")
    assert simulate(ours).spans == simulate(name, ranks=4, microbatches=8).spans


@pytest.mark.parametrize("name", LISTED)
def test_torch_reads_our_csv(name, tmp_path):
    named_schedule(name, 4, 8).write_csv(tmp_path / "plan.csv")
    runtime = torchs._PipelineScheduleRuntime(compat.stage_infos(4, 2), 8)
    runtime._load_csv(str(tmp_path / "plan.csv"), "compute_comms")
    assert schedule_of(runtime).ranks == named_schedule(name, 4, 8).ranks


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ForwardOnly"])
def test_the_csv_of_a_loop_round_trips(name):
    made = named_schedule(name, 3, 5)
    assert Schedule.from_csv(made.to_csv(), name) == made


def test_a_schedule_object_with_one_stage_per_rank_is_recognised_by_its_loop():
    for cls, name in ((torchs.ScheduleGPipe, "GPipe"), (torchs.Schedule1F1B, "1F1B")):
        (stage,) = compat.stage_infos(4, 1)
        assert schedule_of(cls(stage, 6)) == named_schedule(name, 4, 6)


def test_an_unknown_loop_is_refused():
    class Mine(torchs.ScheduleGPipe):
        def _step_microbatches(self, *args, **kwargs):
            raise NotImplementedError

    (stage,) = compat.stage_infos(4, 1)
    with pytest.raises(ScheduleError, match="Mine is a loop whose actions are not known"):
        schedule_of(Mine(stage, 6))


def test_a_subclass_that_inherits_the_loop_is_recognised():
    class Mine(torchs.Schedule1F1B):
        pass

    (stage,) = compat.stage_infos(4, 1)
    assert schedule_of(Mine(stage, 6)) == named_schedule("1F1B", 4, 6)


def test_a_compute_only_schedule_gets_receives_where_torch_puts_them_or_late():
    plain = Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    late = pipeline.with_communication(plain, "late")
    assert [str(a) for a in late.ranks[1]] == ("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1".split())
    torch_places = pipeline.with_communication(plain)
    first = [str(a) for a in torch_places.ranks[0]]
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD".split()
    assert simulate(late).makespan == simulate(torch_places).makespan == 9


def test_lists_may_be_text_and_empty_steps_are_dropped():
    assert simulate([["0F0", "", None, "0B0"], ["1F0", "1B0"]]).makespan == 6


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ([["0F0", "0F0"]], "0F0 is in schedule twice"),
        ([["0F0"], ["0F1"]], "stage 0 is on ranks 0 and 1"),
        ([["0F0", "0B0", "0I0", "0W0"]], "both 0I0 and 0B0 are scheduled|both 0W0 and 0B0 are scheduled"),
        ([["0F0"], ["2F0"]], "no rank has stage 1 of 3"),
        ([[], []], "has no actions"),
        ([["0F0", "0SEND_F0"]], "the other end on no rank"),
        ([["0F0", "1F0", "0SEND_F0"]], "the other end on the same rank"),
        ({1: ["0F0"]}, "lists ranks"),
        ([["0F0", "0SEND_F0", "0SEND_F0"], ["1RECV_F0", "1F0"]], "0SEND_F0 is in schedule twice"),
    ],
)
def test_contradictory_lists_are_refused(lists, says):
    with pytest.raises(ScheduleError, match=says):
        Schedule.of(lists)


def test_unknown_names_and_impossible_sizes_are_refused():
    with pytest.raises(OptionError, match="no schedule 'PipeDream'"):
        named_schedule("PipeDream", 2, 4)
    with pytest.raises(ScheduleError, match="2 microbatches for 4 stages"):
        named_schedule("1F1B", 4, 2)
    with pytest.raises(ScheduleError, match="torch has no DualPipeV"):
        named_schedule("DualPipeV", 4, 2)
    with pytest.raises(OptionError, match="one stage per rank"):
        named_schedule("GPipe", 4, 4, 2)
    with pytest.raises(OptionError, match="ranks and microbatches are missing"):
        simulate("GPipe")
    with pytest.raises(OptionError, match="no pipeline"):
        named_schedule("GPipe", 0, 4)
