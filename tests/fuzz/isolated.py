"""Programs in processes of their own: one that crashes or hangs is named, and none disturbs the next."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from fuzz.grammar import write_program
from fuzz.outcome import Outcome, run_program
from fuzz.shrink import shrink

_fork = multiprocessing.get_context("fork")


def _work(pipe: Connection, run: Callable[[Any], Outcome], items: Sequence[Any]) -> None:
    for index, item in enumerate(items):
        pipe.send(("started", index))
        try:
            outcome = run(item)
        except Exception as error:  # of the fuzzer itself: named, never taken for a success
            outcome = Outcome("fuzzer error", f"{type(error).__name__}: {error}", traceback.format_exc()[-2000:])
        pipe.send(("done", outcome))
    pipe.send(("finished", len(items)))


def run_in_batch(
    run: Callable[[Any], Outcome], items: Sequence[Any], seconds: float
) -> Iterator[tuple[int, Outcome, float]]:
    """Run all items in a forked process, in a new one after a crash or a hang. Yields index, outcome, seconds."""
    done = 0
    while done < len(items):
        reader, writer = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_work, args=(writer, run, items[done:]), daemon=True)
        process.start()
        writer.close()
        base, started = done, time.monotonic()
        try:
            while done < len(items):
                if not reader.poll(seconds):
                    process.kill()
                    yield done, Outcome("hang", f"more than {seconds:g} s"), time.monotonic() - started
                    done += 1
                    break
                try:
                    word, value = reader.recv()
                except EOFError:
                    process.join()
                    yield done, Outcome("crash", f"exit code {process.exitcode}"), time.monotonic() - started
                    done += 1
                    break
                if word == "started":
                    started = time.monotonic()
                    assert base + value == done
                elif word == "done":
                    yield done, value, time.monotonic() - started
                    done += 1
        finally:  # also where the caller takes no more
            reader.close()
            process.kill()
            process.join()


def run_alone(source: str, lower: str = "eager", seconds: float = 40.0) -> Outcome:
    """One program in a fresh process."""
    return next(
        outcome for _, outcome, _ in run_in_batch(lambda item: run_program(item, lower=lower), [source], seconds)
    )


def shrink_alone(source: str, wanted: Outcome, seconds: float = 120.0) -> str:
    """Shrink in a process of its own; a failure that ends the process is tried in a new one each time."""
    if wanted.kind in ("hang", "crash"):
        return shrink(source, wanted, run_alone, seconds)

    def run(text: str) -> Outcome:
        return Outcome("shrunk", shrink(text, wanted, run_program, seconds))

    outcome = next(each for _, each, _ in run_in_batch(run, [source], seconds + 60))
    return outcome.key if outcome.kind == "shrunk" else source


def warm_up() -> None:
    """Let the parent do once what every forked process would do again at its first capture.

    Its objects are frozen then: a search for what a trace left behind is a walk over everything that Python has, and
    costs as much as the trace where torch is all of it.
    """
    for seed in (1, 2):
        run_program(write_program(seed)[0])
    gc.collect()
    gc.freeze()
