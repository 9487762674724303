"""Random programs of fixed seeds, and what the fuzzer promises about itself. `make fuzz` runs many more."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fuzz.grammar import ALL, write_program
from fuzz.isolated import run_in_batch
from fuzz.outcome import Outcome, run_program
from fuzz.shrink import shrink
from fuzz.switched_off import SWITCHED_OFF

FOUND = sorted((Path(__file__).parent / "found").glob("*.py"))
_SIZE = 10


@pytest.mark.parametrize("first", range(0, 100, _SIZE))
def test_random_programs_do_what_eager_does_or_are_refused_with_their_line(first: int) -> None:
    failed = []
    for seed in range(first, first + _SIZE):
        source, _ = write_program(seed)
        outcome = run_program(source, seconds=120)
        if outcome.failed:
            failed.append(f"seed {seed} (python -m fuzz --show {seed}): {outcome}\n{outcome.detail}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("file", FOUND, ids=[file.stem for file in FOUND])
def test_programs_that_once_failed_do_what_eager_does_or_are_refused(file: Path) -> None:
    outcome = run_program(file.read_text(), seconds=120)
    assert not outcome.failed, f"{outcome}\n{outcome.detail}"


def test_a_seed_is_a_program() -> None:
    assert [write_program(seed, {}) for seed in range(40)] == [write_program(seed, {}) for seed in range(40)]
    assert len({write_program(seed, {})[0] for seed in range(40)}) == 40


def test_every_part_of_the_grammar_is_used() -> None:
    seen = {name for seed in range(3000) for name in write_program(seed, {})[1]}
    assert seen >= ALL
    assert set(SWITCHED_OFF) <= ALL


def test_parts_that_are_switched_off_do_not_appear() -> None:
    off = {"home:slots": "", "wrapper:lookahead": "", "feature:dropout": "", "write:rows": ""}
    assert not {name for seed in range(300) for name in write_program(seed, off)[1]} & set(off)


_SMALL = """
import torch
state = {setup}
def step(x):
{body}
def arguments(i):
    return (torch.ones(2),)
def keywords(i):
    return {{}}
def between(i):
    {between}
"""


def _small(body: str, setup: str = "1.0", between: str = "pass") -> str:
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    return _SMALL.format(setup=setup, body=lines, between=between)


def test_a_difference_is_found_where_eager_and_the_graph_part() -> None:
    """`is_fx_tracing` apart, a step can ask whether wholestep traces it: the surest way to differ."""
    source = _small("from wholestep.capture.trace import is_tracing\nreturn x * (2 if is_tracing() else 3)")
    outcome = run_program(source)
    assert (outcome.kind, outcome.key) == ("difference", "in result")


def test_python_state_is_compared() -> None:
    body = "from wholestep.capture.trace import is_tracing\nif not is_tracing():\n    state['a'] = state['a'] + 1"
    outcome = run_program(_small(body, "{'a': 0}"))
    assert (outcome.kind, outcome.key) == ("difference", "in Python state")


def test_an_error_without_a_code_is_a_failure() -> None:
    source = _small("from wholestep.capture.trace import is_tracing\nassert not is_tracing(), 'tracing'\nreturn x")
    assert run_program(source).kind == "error without a code"


def test_a_refusal_with_its_line_is_not_a_failure() -> None:
    outcome = run_program(_small("return x * float((x * 2).numpy()[0])"))
    assert (outcome.kind, outcome.code, outcome.failed) == ("refused", "WS-ITEM", False)


def test_the_exception_of_eager_is_expected_of_the_graph_too() -> None:
    outcome = run_program(
        _small("if state > 3:\n    raise ValueError('too large')\nreturn x * state", between="global state; state += 1")
    )
    assert (outcome.kind, outcome.graphs > 0) == ("raised", True)


def test_a_program_that_hangs_or_crashes_is_named_and_the_next_one_runs() -> None:
    def run(item: str) -> Outcome:
        if item == "hangs":
            time.sleep(600)
        if item == "crashes":
            os._exit(3)
        return Outcome("equal")

    seen = list(run_in_batch(run, ["good", "hangs", "crashes", "good"], seconds=2.0))
    assert [outcome.kind for _, outcome, _ in seen] == ["equal", "hang", "crash", "equal"]
    assert [index for index, _, _ in seen] == [0, 1, 2, 3]


def test_shrinking_keeps_only_what_the_failure_needs() -> None:
    def run(source: str) -> Outcome:
        return Outcome("difference", "x") if "h.sort()" in source and "def step" in source else Outcome("equal")

    source = (
        "import torch\nimport math\ndef step(x):\n    h = x + 1\n    if x:\n        y = h.sort()[0] * 3\n    return h\n"
    )
    assert shrink(source, run(source), run).split() == ["def", "step(x):", "y", "=", "h.sort()"]
