"""The multi-rank harness itself: results in order, failures with their rank, and no wait without an end."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import RanksFailed, run_ranks


def test_results_come_back_in_the_order_of_ranks() -> None:
    def code(rank: int, shift: int) -> dict[str, object]:
        time.sleep(0.05 * (2 - rank))
        total = torch.tensor([float(rank + shift)])
        dist.all_reduce(total)
        return {"rank": rank, "size": dist.get_world_size(), "total": total, "threads": torch.get_num_threads()}

    results = run_ranks(code, 3, 10, deadline=30)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(result["total"].item() == 33.0 for result in results)
    assert {(result["size"], result["threads"]) for result in results} == {(3, 1)}


def test_a_result_larger_than_a_pipe_arrives() -> None:
    results = run_ranks(lambda rank: torch.full((300_000,), rank), 2, deadline=30)
    assert [int(result.sum()) for result in results] == [0, 300_000]


def test_ranks_can_train_after_the_test_has_trained() -> None:
    torch.ones(3, requires_grad=True).sum().backward()

    def code(rank: int) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        (x * rank).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [int(grad.sum()) for grad in run_ranks(code, 2, deadline=30)] == [0, 3]


def test_an_exception_names_its_rank_and_keeps_its_traceback_and_the_results_of_others() -> None:
    def code(rank: int) -> int:
        if rank == 1:
            raise ValueError("only here")
        return rank

    with pytest.raises(RanksFailed, match="rank 1 raised") as caught:
        run_ranks(code, 3, deadline=30)
    assert "ValueError: only here" in caught.value.failures[1]
    assert "test_ranks.py" in caught.value.failures[1]
    assert caught.value.results == {0: 0, 2: 2}


def test_a_rank_that_raises_ends_a_collective_that_its_peer_waits_in() -> None:
    def code(rank: int) -> None:
        if rank == 0:
            raise ValueError("not coming")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(code, 2, deadline=60)
    assert set(caught.value.failures) == {0, 1}
    assert "did not return" not in caught.value.failures[1]


def test_a_hanging_rank_is_killed_at_the_deadline_and_says_where_it_was() -> None:
    def stuck(rank: int) -> int:
        if rank == 1:
            time.sleep(600)
        return os.getpid()

    with pytest.raises(RanksFailed, match=r"rank 1 did not return within 2 s") as caught:
        run_ranks(stuck, 2, deadline=2)
    assert " in stuck" in caught.value.failures[1]
    with pytest.raises(ProcessLookupError):
        os.kill(caught.value.results[0], 0)


def test_a_rank_that_is_killed_is_reported_by_its_signal() -> None:
    def code(rank: int) -> int:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    with pytest.raises(RanksFailed, match=r"rank 0 died without returning \(signal SIGKILL\)") as caught:
        run_ranks(code, 2, deadline=30)
    assert caught.value.results == {1: 1}


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match="rank 0 raised"):
        run_ranks(lambda rank: lambda: rank, 1, deadline=30)


def test_forking_a_process_with_threads_is_silent_only_about_that() -> None:
    def warn(rank: int) -> None:
        text = "This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the child."
        warnings.warn(text, DeprecationWarning, stacklevel=1)  # the words of Python 3.12
        warnings.warn("something else", DeprecationWarning, stacklevel=1)

    with pytest.raises(RanksFailed, match="DeprecationWarning: something else"):
        run_ranks(warn, 1, deadline=30)


def crash_in_a_foreign_thread() -> None:
    libc = ctypes.CDLL("libc.so.6")
    thread = ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.strlen, ctypes.c_void_p), None)
    time.sleep(20)


def test_ranks_start_again_after_a_crash_in_a_thread_that_is_not_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "CRASHES", [])

    def code(rank: int) -> int:
        if rank == 1 and not (tmp_path / "crashed").exists():
            (tmp_path / "crashed").touch()
            crash_in_a_foreign_thread()
        return rank

    assert run_ranks(code, 2, deadline=30) == [0, 1]
    assert "rank 1 died without returning (signal SIGSEGV)" in ranks.CRASHES.pop()
    assert not ranks.CRASHES  # nothing is left for the end of the test run to print


def test_ranks_start_again_after_an_abort_inside_of_an_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "CRASHES", [])

    def code(rank: int) -> int:
        if (tmp_path / "aborted").exists():
            return rank
        (tmp_path / "aborted").touch()
        with torch.library._scoped_library("ws_tests_abort", "DEF") as library:
            library.define("abort(Tensor x) -> Tensor")
            library.impl("abort", lambda x: os.abort(), "CPU")
            torch.ops.ws_tests_abort.abort.default(torch.ones(1))
        raise AssertionError("a rank that aborts does not come here")

    assert run_ranks(code, 1, deadline=30) == [0]
    assert "rank 0 died without returning (signal SIGABRT)" in ranks.CRASHES.pop()
    assert not ranks.CRASHES


def test_an_abort_elsewhere_is_a_failure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CRASHES", [])
    with pytest.raises(RanksFailed, match="SIGABRT"):
        run_ranks(lambda rank: os.abort(), 1, deadline=30)
    assert not ranks.CRASHES


def test_a_second_crash_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CRASHES", [])
    with pytest.raises(RanksFailed, match="rank 0 died without returning"):
        run_ranks(lambda rank: crash_in_a_foreign_thread(), 1, deadline=30)
    assert "rank 0 died" in ranks.CRASHES.pop()
    assert not ranks.CRASHES


def test_a_crash_in_a_thread_of_pythons_is_a_failure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CRASHES", [])
    with pytest.raises(RanksFailed, match="Current thread"):
        run_ranks(lambda rank: ctypes.string_at(0), 1, deadline=30)
    assert not ranks.CRASHES
