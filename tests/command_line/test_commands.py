"""The commands: what they print for people and for machines, their exit codes, and errors without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from simulate.sharded_steps import fully_sharded
from wholestep.command_line import doctor
from wholestep.command_line.app import main

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
import wholestep as ws

weight = torch.ones(4)


@ws.compile(dynamic=False)
def train_step(x):
    loss = (x * weight).sum()
    weight.add_(loss, alpha=0.1)
    return loss


for size in (2, 2, 3):
    train_step(torch.ones(size, 4))
print("arguments", sys.argv[1:])
if "--fail" in sys.argv:
    raise RuntimeError("out of luck")
if "--refuse" in sys.argv:
    ws.compile(lambda x: torch.from_numpy((x * 2).numpy()), name="reading")(torch.ones(1))
if "--exit" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script and two graphs."""
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "a.json").write_text(fully_sharded(layers=3, rows=64, width=64).to_json())
    (folder / "b.json").write_text(fully_sharded(layers=3, rows=128, width=64).to_json())
    return folder


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def data(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def wholestep(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """Run a command in the folder of the files."""
    monkeypatch.chdir(files)

    def run(*arguments: str) -> Said:
        code = main(arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err or "--fail" in arguments
        return Said(code, said.out, said.err)

    return run


def test_a_script_runs_unchanged_and_its_steps_are_summed_up(wholestep: Any, files: Path) -> None:
    said = wholestep("run", "--out", "out", "train.py", "--epochs", "3", "--out")
    assert said.code == 0
    assert said.out.startswith("arguments ['--epochs', '3', '--out']\n")
    for word in ("train_step: 3 calls, 2 graphs", "captured again", "size mismatch", "operator by operator"):
        assert word in said.out
    assert {path.name for path in (files / "out").iterdir()} == {
        "train_step-1.json",
        "train_step-2.json",
        "train_step.html",
    }
    again = wholestep("diff", "out/train_step-1.json", "out/train_step-2.json")
    assert again.code == 1
    assert "input: batch" in again.out or "[2, 4]" in again.out


def test_a_module_runs_as_python_m_runs_it(wholestep: Any, files: Path) -> None:
    (files / "trained").mkdir()
    (files / "trained" / "__main__.py").write_text(SCRIPT + "\nprint(__name__, __package__)")
    said = wholestep("run", "--no-files", "-m", "trained", "--epochs", "3")
    assert said.code == 0
    assert said.out.startswith("arguments ['--epochs', '3']\n__main__ trained\n")
    assert "train_step: 3 calls" in said.out


def test_the_exit_code_and_the_errors_of_a_script_are_its_own(wholestep: Any) -> None:
    assert wholestep("run", "--no-files", "train.py", "--exit").code == 7
    said = wholestep("run", "--no-files", "train.py", "--fail")
    assert said.code == 1
    assert said.err.startswith("Traceback (most recent call last):\n")
    assert said.err.endswith("RuntimeError: out of luck\n")
    assert "runpy" not in said.err
    assert "run_script" not in said.err
    assert "train_step: 3 calls" in said.out, "the summary is there all the same"


def test_a_refused_step_is_one_clean_block(wholestep: Any) -> None:
    said = wholestep("run", "--no-files", "train.py", "--refuse")
    assert said.code == 1
    assert said.err.startswith("[WS-")
    assert "train.py:" in said.err
    assert "python -m wholestep explain WS-" in said.err


def test_a_run_says_the_same_to_machines(wholestep: Any) -> None:
    said = wholestep("run", "--no-files", "--json", "--lower", "eager", "train.py", "--exit")
    assert said.data["exit_code"] == 7
    [step] = said.data["steps"]
    assert (step["name"], step["calls"], step["graphs"], step["lower"]) == ("train_step", 3, 2, "eager")
    assert step["nodes"] > 3
    assert step["files"] == []


def test_a_script_without_a_step_says_so(wholestep: Any, files: Path) -> None:
    (files / "plain.py").write_text("print('hello')")
    assert "compiled no step" in wholestep("run", "--no-files", "plain.py").out
    assert wholestep("run", "nowhere.py").code == 2


def test_check_runs_first_calls_beside_eager(wholestep: Any) -> None:
    said = wholestep("check", "--calls", "2", "train.py")
    assert said.code == 0
    assert "agrees with eager" in said.out
    assert wholestep("check", "--json", "train.py").data["steps"] == [
        {"step": "train_step", "calls": 3, "checked": 3, "why_not": ""}
    ]


def test_check_verifies_a_graph_in_a_file(wholestep: Any, files: Path) -> None:
    assert wholestep("check", "a.json").code == 0
    broken = json.loads((files / "a.json").read_text())
    broken["signature"]["write_backs"] = broken["signature"]["write_backs"][1:]
    (files / "broken.json").write_text(json.dumps(broken))
    said = wholestep("check", "broken.json")
    assert said.code == 1
    assert "[WS-VERIFY]" in said.err
    assert wholestep("check", "--json", "a.json").data["ok"]


def test_nodes_are_shown_by_module_phase_and_operator(wholestep: Any) -> None:
    said = wholestep("show", "a.json")
    assert said.out.startswith("StepGraph: ")
    assert "predicted ms" in said.out
    found = wholestep("show", "a.json", "--op", "mm")
    assert found.code == 0
    assert "aten.mm " in found.out
    data = wholestep("show", "a.json", "--op", "mm", "--json").data
    assert len(data["nodes"]) == 9
    assert wholestep("show", "a.json", "--op", "conv*").code == 1
    wrong = wholestep("show", "a.json", "--phase", "sideways")
    assert wrong.code == 2
    assert "[WS-OPTION]" in wrong.err
    assert "def step(" in wholestep("show", "a.json", "--code").out
    assert "at peak" in wholestep("show", "a.json", "--memory").out
    assert wholestep("show", "a.json", "--memory", "--json").data["peak_bytes"] > 0


def test_graphs_are_compared_with_an_exit_code(wholestep: Any) -> None:
    assert wholestep("diff", "a.json", "a.json").code == 0
    said = wholestep("diff", "a.json", "b.json", "--json")
    assert said.code == 1
    assert said.data["causes"][0]["kind"] == "input"


def test_a_step_is_simulated_on_a_machine_by_name_or_from_a_file(wholestep: Any, files: Path) -> None:
    (files / "own.json").write_text(ws.simulate.H200.to_json())
    slow = wholestep("simulate", "a.json", "--machine", "h100", "--group", "0=64x64", "--json").data
    fast = wholestep("simulate", "a.json", "--machine", "own.json", "--json").data
    assert (slow["machine"], fast["machine"]) == ("H100", "H200")
    assert slow["exposed_us"] > fast["exposed_us"] > 0
    said = wholestep("simulate", "a.json", "--machine", "h100").out
    assert "longest exposed" in said
    name = slow["exposed"][0]["name"]
    assert name in wholestep("simulate", "a.json", "--machine", "h100", "--explain", name).out
    for wrong in (("--machine", "abacus"), ("--group", "0=x")):
        assert wholestep("simulate", "a.json", *wrong).code == 2


def test_a_trace_and_a_page_are_written(wholestep: Any, files: Path) -> None:
    assert wholestep("trace", "a.json", "--machine", "h100").code == 0
    assert json.loads((files / "a.trace.json").read_text())["traceEvents"]
    assert wholestep("report", "a.json", "-o", "page.html", "--json").data["page"] == "page.html"
    assert "<html" in (files / "page.html").read_text()[:500]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "train.py"], "[WS-FORMAT] train.py: the text"),
        (["show", "train.py"], "to run a script: wholestep run train.py"),
        (["report", "a.json", "-o", "a.json/page.html"], "wholestep: a.json"),
        (["trace", "a.json", "-o", "nowhere/trace.json"], "wholestep: nowhere/trace.json: No such file"),
        (["run", "."], "is a folder without a __main__.py"),
        (["show", "nowhere.json"], "does not exist"),
        (["show"], "Missing argument"),
        (["show", "a.json", "--colour"], "No such option"),
        (["explian"], "Did you mean 'explain'?"),
    ],
)
def test_wrong_usage_is_explained(wholestep: Any, arguments: Sequence[str], words: str) -> None:
    said = wholestep(*arguments)
    assert said.code == 2
    assert words in " ".join(said.err.split())


def test_errors_are_data_for_machines_and_the_version_is_printed(wholestep: Any) -> None:
    assert "aten." in wholestep("show", "a.json", "--code", "--json").data["code"]
    assert wholestep("simulate", "a.json", "--explain", "mm", "--json").data["error"]["code"] == "WS-OPTION"
    assert wholestep("show", "train.py", "--json").data["error"]["code"] == "WS-FORMAT"
    assert wholestep("--version").out == f"wholestep {ws.__version__}\n"


def test_the_folder_of_prepared_graphs_is_listed_and_emptied(wholestep: Any, files: Path) -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2

    ws.compile(step, lower="eager", cache=files / "kept")(torch.ones(2))
    said = wholestep("cache", "--folder", "kept")
    assert said.code == 0
    assert "1 graph" in said.out
    assert wholestep("cache", "--folder", "kept", "--json").data["entries"] == 1
    assert "1 graph deleted" in wholestep("cache", "--folder", "kept", "--clear").out
    assert wholestep("cache", "--folder", "kept", "--json").data["entries"] == 0


def test_doctor_says_what_is_there_and_what_will_not_work(wholestep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = wholestep("doctor")
    assert said.code == 0
    for word in ("torch", "CPU", "C++", "gloo", "wholestep can run here"):
        assert word in said.out
    there = doctor._version
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda name: "2.9.1" if name == "torch" else there(name))
    worse = wholestep("doctor", "--json")
    assert worse.code == 1
    examined = {each["what"]: each for each in worse.data["examined"]}
    assert "too old" in examined["torch"]["meaning"]
    assert 'lower="eager"' in examined["C++"]["meaning"]


@pytest.mark.parametrize("command", "run check report show diff simulate trace cache doctor explain".split())
def test_every_command_has_help_with_an_example(wholestep: Any, command: str) -> None:
    said = wholestep(command, "--help")
    assert said.code == 0
    assert "Example: wholestep" in said.out
    assert "--json" in said.out
    assert command in wholestep("--help").out


def test_the_console_script_and_the_module_are_the_same_command(tmp_path: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"wholestep": "wholestep.command_line.app:main"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    complete = {"_WHOLESTEP_COMPLETE": "complete_bash", "COMP_WORDS": "wholestep expl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "wholestep"],
        env=environment | complete,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["explain"], done.stderr


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("wholestep simulate a.json --machine h", ["h100", "h200"]),
        ("wholestep show a.json --phase b", ["backward"]),
        ("wholestep explain WS-IT", ["WS-ITER-MOVE", "WS-ITEM"]),
    ],
)
def test_values_are_completed(
    typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("_WHOLESTEP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert main([]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(completed)


def test_help_loads_neither_torch_nor_the_packages_of_a_step() -> None:
    code = (
        "import sys, wholestep.command_line.app as app\n"
        "assert app.main(['--help']) == 0\n"
        "print([n for n in sys.modules if n == 'torch' or n.startswith(('wholestep.ir', 'wholestep.step'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
