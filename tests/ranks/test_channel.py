"""The failure channel: whatever happens to one rank, the others leave their collective within seconds and say why."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from ranks import RanksFailed
from ranks import run_ranks as run_unmet_ranks
from wholestep.errors import DesyncError, Location, PeerFailedError
from wholestep.ir.meta import NodeMeta, set_node_meta
from wholestep.ranks.channel import Channel
from wholestep.ranks.peers import StoreClient
from wholestep.runtime.python_program import program
from wholestep.torch_private.distributed import gloo_addresses

ops = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def no_channel() -> None:
    """Ranks are forked from a process that has none."""
    assert Channel.current() is None


def run_ranks(fn: Callable[..., Any], size: int, *args: object, deadline: float) -> list[Any]:
    """Ranks that begin together: one that fails at once would otherwise end the connecting of another."""

    def code(rank: int) -> object:
        dist.barrier()
        return fn(rank, *args)

    return run_unmet_ranks(code, size, deadline=deadline)


def reduce(group: str = "0") -> torch.Tensor:
    result: torch.Tensor = ops.wait_tensor(ops.all_reduce(torch.ones(4), "sum", group))
    return result


def channel() -> Channel:
    found = Channel.current()
    assert found is not None
    return found


@contextmanager
def tcp_group(rank: int, size: int, port: int) -> Iterator[None]:
    """A default group over a TCPStore that rank 0 hosts, in place of the harness's."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def one_fails(rank: int) -> None:
    """A step in which rank 1 raises and the others wait for it."""
    with channel().running("step", 1):
        if rank == 1:
            raise ZeroDivisionError("own")
        reduce()


def error_of(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except BaseException as error:
        return error
    return None


def test_there_is_no_channel_without_a_group_or_with_one_rank():
    assert Channel.current() is None
    assert run_ranks(lambda rank: Channel.current(), 1, deadline=30) == [None]


def test_there_is_no_channel_with_a_fake_group():
    def code(rank: int) -> bool:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        return Channel.current() is None

    assert run_ranks(code, 1, deadline=30) == [True]


def test_all_steps_of_a_process_share_one_channel_and_a_new_group_gets_a_new_one(tmp_path: Path):
    def code(rank: int) -> list[bool]:
        first = channel()
        same = channel() is first
        with first.running("step", 1):
            reduce()
        dist.destroy_process_group()
        none = Channel.current() is None
        dist.init_process_group("gloo", f"file://{tmp_path}/again", rank=rank, world_size=2)
        second = channel()
        with second.running("step", 1):
            reduce()
        first.watchdog.join(5)
        return [same, none, second is not first, not first.watchdog.is_alive(), second.watchdog.is_alive()]

    assert run_ranks(code, 2, deadline=30) == [[True] * 5] * 2


def test_a_recreated_group_does_not_see_old_failures(tmp_path: Path):
    def code(rank: int) -> str:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.destroy_process_group()
        for attempt in range(2):
            dist.init_process_group("gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=2)
            dist.barrier()
            assert error_of(lambda: one_fails(rank)) is not None
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("2", store), rank=rank, world_size=2)
        with channel().running("step", 1):
            return str(reduce().tolist())

    assert run_ranks(code, 2, deadline=60) == ["[2.0, 2.0, 2.0, 2.0]"] * 2


def test_a_rank_that_raises_takes_the_others_out_of_their_wait():
    def code(rank: int) -> object:
        with channel().running("train_step", 7):
            if rank == 1:
                raise ValueError("the loss is\nnot a number")
            reduce()
        return "came through"

    def outcome(rank: int) -> tuple[str, str, object]:
        error = error_of(lambda: code(rank))
        again = error_of(lambda: code(0))
        return type(error).__name__, str(error), (type(again).__name__, str(again), getattr(error, "rank", None))

    first, second, third = run_ranks(outcome, 3, deadline=30)
    assert second[:2] == ("ValueError", "the loss is\nnot a number")
    for kind, text, (again, later, failed) in (first, third):
        assert (kind, again, failed) == ("PeerFailedError", "PeerFailedError", 1)
        assert "Rank 1 raised in call 7 of train_step:\n    ValueError: the loss is\n    not a number" in text
        assert "process groups of this rank were aborted" in later
    assert "This rank raised in call 7" in second[2][1]


def test_a_rank_that_raises_takes_out_ranks_that_wait_in_groups_it_is_not_in():
    """0 waits for 1 in their row; 3 raises, 2 waits for 3; 1 waits for no rank."""

    def code(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        row = mesh["tp"].get_group().group_name
        reduce(row)
        channel()
        dist.barrier()

        def step() -> None:
            with channel().running("step", 2):
                if rank == 3:
                    raise KeyError("gone")
                if rank == 1:
                    end = time.monotonic() + 20
                    while channel().peer_failure() is None and time.monotonic() < end:
                        time.sleep(0.05)
                else:
                    reduce(row)

        return str(error_of(step))

    texts = run_ranks(code, 4, deadline=40)
    assert all("Rank 3 raised in call 2 of step:\n    KeyError: 'gone'" in text for text in texts[:3])
    assert texts[3] == "'gone'"


def test_a_killed_rank_is_named_with_step_call_and_node():
    graph = fx.Graph()
    x = graph.placeholder("x")
    started = graph.call_function(ops.all_reduce.default, (x, "sum", "0"))
    waited = graph.call_function(ops.wait_tensor.default, (started,))
    set_node_meta(waited, NodeMeta(module_path="model.head", location=Location("train.py", 12)))
    graph.output((waited,))
    run = program(fx.GraphModule({}, graph))

    def code(rank: int) -> str:
        def step() -> None:
            for call in range(1, 4):
                with channel().running("step", call):
                    if rank == 2 and call == 3:
                        time.sleep(0.3)
                        os.kill(os.getpid(), signal.SIGKILL)
                    run(torch.ones(2))

        error = error_of(step)
        assert isinstance(error, PeerFailedError)
        return f"{error.rank} {error.call} {error}"

    with pytest.raises(RanksFailed, match=r"rank 2 died without returning \(signal SIGKILL\)") as caught:
        run_ranks(code, 3, deadline=40)
    assert set(caught.value.results) == {0, 1}, str(caught.value)
    for text in caught.value.results.values():
        assert text.startswith("2 3 ")
        assert "Rank 2 died or hangs" in text
        assert "call 3 of step" in text
        assert "wait_tensor" in text
        assert "model.head, train.py:12" in text


def test_when_the_rank_that_hosts_the_store_is_killed_the_others_name_it():
    def code(rank: int, port: int) -> str:
        with tcp_group(rank, 3, port):
            channel()
            dist.barrier()

            def step() -> None:
                with channel().running("step", 1):
                    if rank == 0:
                        time.sleep(0.5)
                        os.kill(os.getpid(), signal.SIGKILL)
                    reduce()

            return str(error_of(step))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(code, 3, free_port(), deadline=40)
    assert set(caught.value.results) == {1, 2}
    for text in caught.value.results.values():
        assert "WS-PEER-FAILED" in text
        assert "most likely rank 0 died" in text


def test_the_channel_works_over_a_tcp_store():
    def code(rank: int, port: int) -> str:
        with tcp_group(rank, 2, port):
            text = str(error_of(lambda: one_fails(rank)))
            if rank == 0:
                time.sleep(1)  # the others read the store that this rank hosts
            return text

    first, second = run_ranks(code, 2, free_port(), deadline=30)
    # It raised, and then aborted its process groups: either is what the other one reads, depending on when it looks.
    assert (
        "Rank 1 raised in call 1 of step" in first or "Rank 1 has aborted its process groups in call 1 of step" in first
    )
    assert "ZeroDivisionError: own" in first
    assert second == "own"


def test_a_stopped_rank_counts_as_dead_after_the_deadline_even_if_no_connection_closes():
    """What NCCL does: the connection of a dead peer stays, and the wait with it."""

    def code(rank: int) -> str:
        here = channel()
        here.deadline = 3.0
        pids: list[object] = [None, None]
        dist.all_gather_object(pids, os.getpid())

        def step() -> None:
            with here.running("step", 1):
                if rank == 1:
                    time.sleep(1)  # the others are told where it is
                    os.kill(os.getpid(), signal.SIGSTOP)
                reduce()

        text = str(error_of(step))
        if rank == 0:
            os.kill(int(str(pids[1])), signal.SIGCONT)
        return text

    texts = run_ranks(code, 2, deadline=40)
    assert "Rank 1 died or hangs (is running call 1 of step; last heartbeat" in texts[0]
    assert "WS-PEER-FAILED" in texts[1]


def test_a_rank_that_left_is_named_by_one_that_waits_for_it():
    def code(rank: int) -> str:
        here = channel()
        with here.running("step", 1):
            reduce()
        if rank == 1:
            here.close()
            return ""

        def step() -> None:
            with here.running("step", 2):
                reduce()

        return str(error_of(step))

    assert (
        "Rank 1 has ended or destroyed its process group (last: call 1 of step)" in run_ranks(code, 2, deadline=40)[0]
    )


def test_an_error_while_compiling_breaks_nothing():
    def code(rank: int) -> list[str]:
        here = channel()

        def compile_() -> None:
            with here.compiling("step", 1):
                raise ValueError("cannot capture")

        def alone() -> None:
            with here.running("step", 1):  # only a cache hit comes here while others compile
                reduce()

        texts = [str(error_of(compile_ if rank == 1 else alone)) if rank < 2 else ""]
        if rank == 2:
            time.sleep(2)
            texts = [str(error_of(alone))]
        return texts

    first, second, third = run_ranks(code, 3, deadline=40)
    assert "Rank 1 raised while compiling call 1 of step:\n    ValueError: cannot capture" in first[0]
    assert second == ["cannot capture"]
    assert "Rank 1 raised while compiling" in third[0]


def test_all_ranks_can_go_on_after_all_failed_to_compile():
    def code(rank: int) -> list[float]:
        here = channel()
        with pytest.raises(ValueError, match="cannot"), here.compiling("step", 1):
            raise ValueError("cannot capture")
        time.sleep(0.5)
        with here.running("other", 1):
            return list(reduce().tolist())

    assert run_ranks(code, 2, deadline=30) == [[2.0] * 4] * 2


def test_an_error_of_the_rank_itself_is_raised_unchanged_and_posted_once():
    def code(rank: int) -> object:
        here = channel()
        error = error_of(lambda: one_fails(rank))
        if rank == 1:
            here.fail(error or ValueError(), "step", 1)
        return type(error).__name__, len(here.watchdog.failures)

    assert run_ranks(code, 2, deadline=30) == [("PeerFailedError", 1), ("ZeroDivisionError", 1)]


def test_groups_of_a_broken_rank_can_be_destroyed_and_recreated(tmp_path: Path):
    def code(rank: int) -> list[float]:
        error_of(lambda: one_fails(rank))
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{tmp_path}/again", rank=rank, world_size=2)
        with channel().running("step", 1):
            return list(reduce().tolist())

    assert run_ranks(code, 2, deadline=30) == [[2.0] * 4] * 2


def test_other_connections_of_the_process_are_left_alone():
    def code(rank: int) -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as server:
            dist.barrier()
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
            assert error_of(lambda: one_fails(rank)) is not None
            assert gloo_addresses(channel().watchdog._store._client)
            ours.sendall(b"still here")
            return theirs.recv(10)

    assert run_ranks(code, 2, deadline=30) == [b"still here"] * 2


def test_an_error_after_the_step_destroyed_its_own_group_is_raised_unchanged(tmp_path: Path):
    def code(rank: int) -> str:
        here = channel()

        def step() -> None:
            with here.running("step", 1):
                dist.destroy_process_group()
                here.watchdog.join(10)
                raise RuntimeError("connection lost")

        text = str(error_of(step))
        dist.init_process_group("gloo", f"file://{tmp_path}/again", rank=rank, world_size=2)
        return text

    assert run_ranks(code, 2, deadline=30) == ["connection lost"] * 2


def test_the_flight_recorder_is_written_where_it_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_rank_"))

    def code(rank: int) -> str:
        return str(error_of(lambda: one_fails(rank)))

    text = run_ranks(code, 2, deadline=30)[0]
    assert f"Flight recorder: {tmp_path}/trace_rank_0" in text
    entries = pickle.loads((tmp_path / "trace_rank_0").read_bytes())
    assert entries["pg_config"] is not None


def test_a_forked_child_does_not_use_the_channel_of_its_parent():
    def code(rank: int) -> int:
        channel()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"none" if Channel.current() is None else b"some")
            os._exit(0)
        os.waitpid(child, 0)
        return int(os.read(read, 4) == b"none")

    assert run_ranks(code, 2, deadline=30) == [1, 1]


def test_a_call_costs_no_operation_of_the_store():
    def code(rank: int) -> list[str]:
        here = channel()
        used: list[str] = []

        def noted(name: str, method: Any) -> Any:
            def call(*args: Any, **keywords: Any) -> Any:
                if threading.current_thread() is threading.main_thread():
                    used.append(name)
                return method(*args, **keywords)

            return call

        for name, method in list(vars(StoreClient).items()):
            if callable(method) and not name.startswith("_"):
                setattr(StoreClient, name, noted(name, method))
        for number in range(200):
            with here.running("step", number):
                pass
        dist.barrier()
        assert threading.active_count() >= 2
        return used

    assert run_ranks(code, 2, deadline=30) == [[], []]


def test_both_errors_are_runtime_errors():
    assert issubclass(PeerFailedError, RuntimeError)
    assert issubclass(DesyncError, RuntimeError)
