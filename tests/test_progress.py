"""What is said while a step is captured and compiled: by a fake clock, on a terminal (a pty) and elsewhere."""

from __future__ import annotations

import io
import os
import pty
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws
from ranks import run_ranks
from wholestep.progress import Progress
from wholestep.step import Shared


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(clock: Clock, stream: TextIO, **options: Any) -> Progress:
    return Progress("train_step", clock=clock, stream=stream, ticks=False, **options)


def at(clock: Clock, progress: Progress, seconds: float) -> None:
    clock.now = 100.0 + seconds
    progress.tick()


def test_elsewhere_than_on_a_terminal_there_is_one_line_at_the_start_and_one_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = told(clock, stream)
    with progress.compiling(2):
        at(clock, progress, 0.9)
        assert not stream.getvalue()
        with progress.region(1, 1, 1241, 0, 1241):
            for seconds in (1.0, 5.0, 12.0):
                at(clock, progress, seconds)
        clock.now += 32
    assert stream.getvalue().splitlines() == [
        "wholestep: compiling train_step, call 2: region 1 of 1, 1,241 operators, 1 s",
        "wholestep: compiled train_step, call 2, 44 s",
    ]


def test_what_takes_less_than_a_second_says_nothing() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = told(clock, stream)
    with progress.compiling(1):
        at(clock, progress, 0.99)
    clock.now += 5
    progress.tick()
    assert not stream.getvalue()


@pytest.mark.parametrize("option", [{"wanted": False}, {"speaks": lambda: False}], ids=["off", "another rank"])
def test_it_is_quiet_by_option_and_where_another_rank_speaks(option: dict[str, Any]) -> None:
    clock, stream = Clock(), io.StringIO()
    progress = told(clock, stream, **option)
    with progress.compiling(1):
        at(clock, progress, 30.0)
    assert not stream.getvalue()


def test_a_compilation_that_fails_says_so() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = told(clock, stream)

    def fail() -> None:
        with progress.compiling(1):
            at(clock, progress, 2.0)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert stream.getvalue().splitlines()[-1] == "wholestep: did not compile train_step, call 1, 2 s"


def read_all(fd: int) -> str:
    os.set_blocking(fd, False)
    found = b""
    while True:
        try:
            found += os.read(fd, 65536)
        except BlockingIOError:
            return found.decode()


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 120))
    with os.fdopen(follower, "w") as stream:
        yield stream, leader
    os.close(leader)


def test_on_a_terminal_one_line_is_written_over_itself_with_a_bar_that_grows(terminal: tuple[TextIO, int]) -> None:
    stream, leader = terminal
    clock = Clock()
    progress = told(clock, stream)
    with progress.compiling(2):
        at(clock, progress, 1.5)
        with progress.region(1, 2, 300, 0, 600):
            at(clock, progress, 3.0)
        with progress.region(2, 2, 300, 300, 600):
            at(clock, progress, 9.0)
    lines = read_all(leader).split("\r\x1b[K")
    assert lines[0] == ""
    assert lines[1].startswith("wholestep: compiling train_step, call 2: capture, 2 s  [")
    assert lines[2].startswith("wholestep: compiling train_step, call 2: region 1 of 2, 300 operators, 3 s  [")
    assert lines[4].strip() == "wholestep: compiled train_step, call 2, 9 s"
    bars = [line.count("#") for line in lines[1:4]]
    assert bars == sorted(bars)
    assert len({len(line.partition("[")[2]) for line in lines[1:4]}) == 1
    assert all("\n" not in line for line in lines[1:4])


def test_a_long_line_does_not_wrap(terminal: tuple[TextIO, int]) -> None:
    stream, leader = terminal
    clock = Clock()
    progress = Progress("step_" * 40, clock=clock, stream=stream, ticks=False)
    with progress.compiling(1):
        at(clock, progress, 2.0)
        line = read_all(leader).removeprefix("\r\x1b[K")
    assert len(line) == 119
    assert ".., 2 s  [#" in line


def test_a_budget_says_how_many_compilations_are_left() -> None:
    """Of those that follow each there are never more than was said."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    said: list[str] = []

    class Listening(Progress):
        def stage(self, stage: str, detail: Any = str, done: Any = None, *, prefix: str = "") -> None:
            said.append(detail())

    compiled = ws.compile(step, lower="eager", memory_budget=0.3)
    compiled._shared.progress = Listening("step")
    compiled(torch.randn(64, 16))
    plans = [text for text in said if "memory budget, plan" in text]
    left = [int(text.split("at most ")[1].split()[0]) for text in plans]
    assert plans
    assert plans[0].startswith("memory budget, plan 1 (at most ")
    assert all(bound >= len(plans) - number for number, bound in enumerate(left, 1))
    assert any(text.startswith("capture, ") for text in said)


def test_a_step_speaks_while_it_compiles_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wholestep.progress.FIRST", 0.05)
    before = threading.active_count()

    def train_step(x: Tensor) -> Tensor:
        time.sleep(0.3)
        return x + 1

    for option, says in ((True, True), (None, False), (False, False)):  # WHOLESTEP_PROGRESS is 0 in tests
        ws.compile(train_step, lower="eager", name="train_step", progress=option)(torch.ones(2))
        lines = capsys.readouterr().err.splitlines()
        assert bool(lines) is says
        if says:
            assert lines[0].startswith("wholestep: compiling train_step, call 1: capture, ")
            assert lines[-1].startswith("wholestep: compiled train_step, call 1, ")
            assert len(lines) == 2
    assert threading.active_count() == before


def test_the_environment_decides_where_the_option_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("0", False), ("off", False), ("1", True), ("", True)):
        monkeypatch.setenv("WHOLESTEP_PROGRESS", value)
        assert Shared.of(ws.Options(), "step").progress.wanted is wanted
    monkeypatch.setenv("WHOLESTEP_PROGRESS", "0")
    assert Shared.of(ws.Options(progress=True), "step").progress.wanted


def test_of_several_ranks_one_speaks() -> None:
    """In call 3 only rank 1 has a new batch, and rank 0 waits for it."""

    def code(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Linear(3, 2)

        def step(x: Tensor) -> Tensor:
            time.sleep(1.6 if x.shape[0] == 4 else 0.0)
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        compiled = ws.compile(step, lower="eager", parallel=ws.Replicate(mesh), dynamic=False)
        asked: list[bool] = []
        speaks = compiled._shared.progress._speaks

        def ask() -> bool:
            asked.append(speaks())
            return False

        compiled._shared.progress = Progress("step", speaks=ask)
        compiled(torch.ones(2, 3))
        compiled(torch.ones(2, 3))
        asked.clear()
        compiled(torch.ones(2 if rank == 0 else 4, 3))
        return [any(asked), bool(asked)]

    first, second = run_ranks(code, 2, deadline=60)
    assert first == [False, False]
    assert second == [True, True]
