"""SVG, Perfetto traces and recordings of timelines."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

from ranks import run_ranks
from wholestep.errors import ScheduleError
from wholestep.simulate import pipeline
from wholestep.simulate.pipeline import Network, Recorder, Times, simulate

SVG = "{http://www.w3.org/2000/svg}"


def blocks(picture: str) -> dict[str, tuple[float, float, float]]:
    """What each block of a picture says, and where it is: left, top, width."""
    found = {}
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        if box is not None:
            found[group.find(f"{SVG}title").text] = tuple(float(box.get(k)) for k in ("x", "y", "width"))
    return found


def test_a_picture_has_a_block_per_action_at_its_time_in_the_lane_of_its_rank():
    timeline = simulate("1F1B", Times(F=1, B=2), ranks=2, microbatches=2)
    found = blocks(pipeline.svg(timeline))
    assert len(found) == len(timeline.spans) == 8
    first, second = found["0F0 on rank 0: 0 to 1"], found["1B0 on rank 1: 2 to 4"]
    unit = first[2]
    assert second[0] - first[0] == pytest.approx(2 * unit, abs=0.02)
    assert second[2] == pytest.approx(2 * unit, abs=0.02)
    assert second[1] > first[1]


def test_two_timelines_are_drawn_below_each_other_on_one_axis():
    fast, slow = (simulate("GPipe", Times(F=f, B=2), ranks=2, microbatches=2) for f in (1, 3))
    found = blocks(pipeline.svg(fast, slow, titles=("predicted", "measured <slow>")))
    first, second = found["0F0 on rank 0: 0 to 1"], found["0F0 on rank 0: 0 to 3"]
    assert first[0] == second[0]
    assert second[2] == pytest.approx(3 * first[2], abs=0.02)
    assert second[1] > first[1]


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_every_schedule_can_be_drawn_and_traced(name, tmp_path):
    timeline = simulate(name, Times(F=0.5, send=0.1), ranks=2, microbatches=4)
    pipeline.write_svg(tmp_path / "picture.svg", timeline)
    ET.parse(tmp_path / "picture.svg")
    pipeline.write_perfetto(tmp_path / "trace.json", timeline)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_deadlock_can_be_drawn():
    stuck = simulate([["0F0", "0B1", "0F1", "0B0"]])
    assert "then a deadlock" in pipeline.svg(stuck)


def test_a_trace_has_rows_of_ranks_and_links_arrows_and_counts():
    timeline = simulate("1F1B", Times(F=1, B=2, send=1), ranks=2, microbatches=2, network=Network())
    events = pipeline.perfetto(timeline, titles=("predicted",))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["predicted", "rank 0", "rank 1", "rank 0 to rank 1", "rank 1 to rank 0"]
    of_ranks = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (of_ranks["0F1"]["ts"], of_ranks["0F1"]["dur"]) == (1e6, 1e6)
    assert len(of_ranks) == 8 + 4
    begun, ended = ([event["id"] for event in events if event["ph"] == kind] for kind in "sf")
    assert sorted(begun) == sorted(ended)
    assert len(begun) == 4
    alive = [event["args"]["alive"] for event in events if event["ph"] == "C" and event["name"].endswith("rank 0")]
    assert max(alive) == timeline.peak_activations[0] == 2
    assert alive[-1] == 0


def recorded(rank: int, names: tuple[str, ...]) -> dict[str, str]:
    """Two steps of each schedule on this rank; the recordings as texts."""
    texts = {}
    for name in names:
        single = name in ("GPipe", "1F1B")
        own = [rank] if single else [rank, 2 + rank]
        stages = [PipelineStage(nn.Linear(4, 4), index, 2 * len(own), torch.device("cpu")) for index in own]
        made = torchs.get_schedule_class(name)(stages[0] if single else stages, 4, nn.functional.mse_loss)
        given = (torch.randn(8, 4),) if rank == 0 else ()
        target = torch.randn(8, 4) if 2 * len(own) - 1 in own else None
        made.step(*given, target=target)
        recorder = Recorder(*stages)
        for _ in range(2):
            with recorder:
                made.step(*given, target=target)
        assert not any("_one_chunk" in attribute for stage in stages for attribute in vars(stage))
        texts[name] = recorder.to_json()
    return texts


def test_a_recording_has_every_action_once_per_step_in_an_order_the_schedule_allows():
    names = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    texts = run_ranks(recorded, 2, names)
    for name in names:
        records = [record for rank in texts for record in pipeline.read_json(rank[name])]
        predicted = simulate(name, pipeline.times_of(records), ranks=2, microbatches=4)
        for step in range(2):
            measured = pipeline.timeline_of(records, predicted.schedule, step)
            for theirs, ours in zip(measured.of_rank, predicted.schedule.compute_only().ranks, strict=True):
                assert [span.action for span in theirs] == list(ours)
            assert predicted.makespan > 0
            assert set(blocks(pipeline.svg(predicted, measured)))


def test_a_recorder_restores_the_methods_of_a_stage():
    class Stage:
        stage_index, device = 3, "cpu"

        def forward_one_chunk(self, chunk):
            return chunk

        def backward_one_chunk(self, chunk, loss=None, full_backward=True):
            return loss

        def backward_weight_one_chunk(self, chunk):
            return None

    stage = Stage()
    stage.forward_one_chunk = own = lambda chunk: -chunk  # type: ignore[method-assign]
    recorder = Recorder(stage)
    with recorder:
        assert stage.forward_one_chunk(5) == -5
        assert stage.backward_one_chunk(5, 7, False) == 7
        stage.backward_one_chunk(6, full_backward=True)
        stage.backward_weight_one_chunk(5)
    assert stage.forward_one_chunk is own
    assert "backward_one_chunk" not in vars(stage)
    assert [(r.stage, r.kind, r.microbatch) for r in recorder.records] == [
        (3, "F", 5), (3, "I", 5), (3, "B", 6), (3, "W", 5),
    ]  # fmt: skip


def test_text_that_is_not_a_recording_is_refused():
    with pytest.raises(ScheduleError, match="not a pipeline recording"):
        pipeline.read_json('{"version": 99}')
    with pytest.raises(ScheduleError, match="no records of step 2"):
        pipeline.timeline_of([], pipeline.named_schedule("GPipe", 2, 2), 2)
