"""What the repository shows works: the demo agrees with eager, and the example of each error page raises that error."""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import demo
import wholestep as ws
from pages import as_torchrun_starts_it
from ranks import run_ranks
from wholestep.errors import all_error_types

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "errors"
SMALL = "--steps 4 --layers 1 --heads 2 --width 16 --context 8 --batch 2"
NOT_RAISED_THEMSELVES = {"WS-ERROR", "WS-CAPTURE"}
ON_RANKS = {"WS-DESYNC", "WS-MESH", "WS-PEER-FAILED", "WS-PENDING", "WS-PLAN", "WS-SHARD-OPT", "WS-STAGE", "WS-WRAPPED"}
CODES = [cls.code for cls in all_error_types() if cls.__module__.startswith("wholestep.")]


@pytest.mark.parametrize("compiled_steps", [0, pytest.param(3, marks=[pytest.mark.compiles, pytest.mark.long])])
def test_the_demo_ends_with_two_equal_runs(compiled_steps, capsys):
    assert demo.main(f"{SMALL} --sample 5 --device cpu --compiled-steps {compiled_steps}".split()) == 0
    shown = capsys.readouterr().out
    assert "equal to the bit" in shown
    assert ("subgraph_0" in shown) == bool(compiled_steps)


def demo_on_two_ranks(arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "examples" / "demo_ranks.py"), *arguments.split()]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True, timeout=120, check=False)


def test_the_demo_on_two_ranks_ends_with_equal_runs_and_shows_them_once():
    done = demo_on_two_ranks(f"{SMALL} --shard-steps 3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal to the bit") >= 2
    assert done.stdout.count("training ") == done.stdout.count("capture time") == 2  # one rank shows both pairs


@pytest.mark.long  # three more processes; the demo that ends well, above, runs always
def test_the_demo_on_two_ranks_fails_with_the_error_of_a_rank():
    done = demo_on_two_ranks(f"{SMALL} --heads 3")
    assert done.returncode != 0
    assert "RuntimeError: shape" in done.stderr


def run_example(code: str) -> None:
    text = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    example = re.search(r"## Example\n\n```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    name = f"<example of {code}>"
    linecache.cache[name] = (len(example[1]), None, example[1].splitlines(keepends=True), name)
    exec(compile(example[1], name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("code", sorted(set(CODES) - NOT_RAISED_THEMSELVES - ON_RANKS))
def test_the_example_of_an_error_page_raises_that_error(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a file
    with pytest.raises((ws.WholestepError, RuntimeError), match=re.escape(f"[{code}]")):
        run_example(code)


@pytest.mark.parametrize("code", sorted(ON_RANKS))
def test_the_example_of_a_page_about_ranks_raises_that_error_on_two_ranks(code):
    def rank_code(rank: int) -> str:
        with as_torchrun_starts_it(), pytest.raises((ws.WholestepError, RuntimeError)) as caught:
            run_example(code)
        return str(caught.value)

    messages = run_ranks(rank_code, 2, deadline=60)
    assert any(message.startswith(f"[{code}]") for message in messages), messages
