"""`cache=`: a second process binds what the first prepared; whatever changed in between is traced anew."""

from __future__ import annotations

import importlib
import logging
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import wholestep as ws
from selection import each_now
from wholestep.artefact import disk_cache

NAME = "cached_by_a_user"
HELPER = """
import enum

class Mode(enum.Enum):
    FACTOR = 2.0

def deeper(x):
    return x + 0.25

def activation(x):
    return deeper(x).tanh()

def scaled(x, by=Mode.FACTOR, offset=0.125):
    return x * by.value + offset

LIMIT = 1.0
"""
STEP = f"""
import torch
from torch import nn
import torch.nn.functional as F
import {NAME}_helper as helper
from {NAME}_helper import scaled

CONFIG = {{"smooth": 0.5, "names": ["a"]}}

class Net(nn.Module):
    slope = 0.1

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)
        self.p = 0.5
        self.act = helper.activation

    def forward(self, x):
        return self.out(F.leaky_relu(self.act(scaled(self.fc(x))), self.slope)) * self.p * CONFIG["smooth"]

def train_step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), helper.LIMIT)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
"""


class Project:
    """Two files of a user's, imported anew as another process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.write()

    def write(self, old: str = "", new: str = "", *, helper: bool = False) -> None:
        """The files, one of them with an edit."""
        assert not old or old in (HELPER if helper else STEP)
        (self.folder / f"{NAME}_helper.py").write_text(HELPER.replace(old, new) if helper and old else HELPER)
        (self.folder / f"{NAME}.py").write_text(STEP if helper or not old else STEP.replace(old, new))

    def train(self) -> ModuleType:
        importlib.invalidate_caches()
        for each in (f"{NAME}_helper", NAME):
            sys.modules.pop(each, None)
        return importlib.import_module(NAME)

    def traces(
        self, train: ModuleType | None = None, change: Callable[..., object] | None = None, **options: Any
    ) -> int:
        """How many of two graphs were traced; what came out is that of eager."""
        train = train or self.train()
        found = []
        for compiled in (False, True):
            model, optimizer = train.make()
            if change is not None:
                change(train, model, optimizer)
            step: Any = train.train_step
            if compiled:
                step = ws.compile(step, **{"lower": "eager", "cache": self.cache, **options})
            found.append([*(step(model, optimizer, torch.ones(8, 4)) for _ in range(3)), *model.parameters()])
        assert all(map(torch.equal, *found))
        return sum(entry.captured.seconds > 0 for entry in step._entries)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Project(tmp_path)
    for each in (f"{NAME}_helper", NAME):
        sys.modules.pop(each, None)


def test_the_second_process_traces_nothing_and_has_the_bits_of_eager(project: Project) -> None:
    assert project.traces() == 2
    assert project.traces() == 0
    assert len(ws.cache.ls(project.cache)) == 2


EDITS = {
    "a helper in another file": ("x * by.value", "x / by.value", True),
    "a default argument of it": ("offset=0.125", "offset=0.5", True),
    "a value of an enumeration": ("FACTOR = 2.0", "FACTOR = 3.0", True),
    "what a function in an attribute calls": ("x + 0.25", "x - 0.25", True),
    "a value of another file": ("LIMIT = 1.0", "LIMIT = 0.5", True),
    "a forward": ("self.out(F.", "1.5 * self.out(F.", False),
    "a value of a config": ('"smooth": 0.5', '"smooth": 0.25', False),
    "a class attribute": ("slope = 0.1", "slope = 0.2", False),
    "an attribute": ("self.p = 0.5", "self.p = 0.7", False),
    "an option of the optimizer": ("lr=0.1", "lr=0.1, amsgrad=True", False),
    "a width": ("8", "16", False),
    "the step": ("loss.backward()", "(2 * loss).backward()", False),
}
_LATER = ("a value of a config", "a width", "a default argument of it", "an attribute")
EDITED_NOW = [name for name in EDITS if name not in _LATER]


@pytest.mark.parametrize("edit", each_now(EDITS, *EDITED_NOW))
def test_an_edit_is_a_miss(edit: str, project: Project) -> None:
    assert project.traces() == 2
    old, new, helper = EDITS[edit]
    project.write(old, new, helper=helper)
    assert project.traces() == 2
    project.write()
    assert project.traces() == 0


def test_a_comment_is_no_miss(project: Project) -> None:
    assert project.traces() == 2
    project.write("loss.backward()", "loss.backward()  # the backward")
    assert project.traces() == 0


LIVE: dict[str, Callable[[Any, Any, Any], object]] = {
    "a monkeypatched function of torch": lambda t, m, o: setattr(t.F, "leaky_relu", lambda x, slope: x.relu()),
    "a monkeypatched helper": lambda t, m, o: setattr(t, "scaled", lambda x: x * 4),
    "a monkeypatched method": lambda t, m, o: setattr(t.Net, "forward", lambda self, x: self.out(self.fc(x))),
    "a method of the object": lambda t, m, o: setattr(m, "forward", lambda x: m.out(m.fc(x)) * 3),
    "a hook": lambda t, m, o: m.fc.register_forward_hook(lambda module, args, out: out * 2),
    "a hook of a parameter": lambda t, m, o: m.fc.weight.register_hook(lambda grad: grad * 2),
    "a class attribute": lambda t, m, o: setattr(t.Net, "slope", 0.3),
    "a mode": lambda t, m, o: torch.use_deterministic_algorithms(True),
    "a frozen weight": lambda t, m, o: m.fc.weight.requires_grad_(False),
}
LIVE_NOW = ("a monkeypatched function of torch", "a method of the object", "a hook", "a class attribute", "a mode")


@pytest.mark.parametrize("change", each_now(LIVE, *LIVE_NOW))
def test_a_change_in_the_process_is_a_miss_and_so_is_its_absence(
    change: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "leaky_relu", torch.nn.functional.leaky_relu)
    before = torch.nn.functional.leaky_relu
    try:
        assert project.traces() == 2
        assert project.traces(change=LIVE[change]) == 2
        assert project.traces(change=LIVE[change]) == 0
        torch.nn.functional.leaky_relu = before
        torch.use_deterministic_algorithms(False)
        assert project.traces() == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_options_and_shapes_have_their_own_graphs(project: Project) -> None:
    assert project.traces() == 2
    assert project.traces(memory_budget=0.0) == 2
    assert project.traces(memory_budget=0.0) == 0
    train = project.train()
    step: Any = ws.compile(train.train_step, lower="eager", cache=project.cache)
    step(*train.make(), torch.ones(3, 4))
    assert step.capture_seconds > 0


def test_why_a_graph_was_not_used_is_in_the_log(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    project.traces()
    caplog.set_level(logging.INFO, "wholestep.cache")
    project.traces(change=lambda train, model, optimizer: model.eval())
    assert "miss: model.training is bool False; the step was captured with bool True" in caplog.text
    project.traces(parallel=None, check_first=1)
    assert "not used: check_first=" in caplog.text


def test_a_damaged_entry_is_deleted_and_traced_again(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    project.traces()
    for entry in ws.cache.ls(project.cache):
        raw = bytearray(entry.path.read_bytes())
        raw[len(raw) // 2] ^= 1
        entry.path.write_bytes(bytes(raw))
    assert project.traces() == 2
    assert "the file is damaged" in caplog.text
    assert project.traces() == 0


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    project: Project, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.cache.write_text("a file where the folder should be")
    assert project.traces() == 2
    assert "is not stored" in caplog.text
    project.cache.unlink()

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    caplog.clear()
    monkeypatch.setattr(Path, "write_bytes", full)
    assert project.traces() == 2
    assert "No space left" in caplog.text
    assert not list(project.cache.rglob("*.ws*"))


def test_a_read_only_folder_is_read(project: Project) -> None:
    project.traces()
    folders = [project.cache, *(path for path in project.cache.iterdir() if path.is_dir())]
    for folder in folders:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert project.traces() == 0
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)


def test_the_least_recently_used_graphs_are_deleted(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.traces()
    held = ws.cache.stats(project.cache)
    assert (held.entries, held.steps) == (2, 1)
    for age, entry in enumerate(ws.cache.ls(project.cache)):
        os.utime(entry.path, (1000 - age, 1000 - age))
    newest = ws.cache.ls(project.cache)[0].path
    monkeypatch.setenv("WHOLESTEP_CACHE_LIMIT", f"{held.bytes + 2000}B")
    train = project.train()
    step: Any = ws.compile(train.train_step, lower="eager", cache=project.cache)
    step(*train.make(), torch.ones(3, 4))
    left = [entry.path for entry in ws.cache.ls(project.cache)]
    assert newest in left
    assert len(left) == 2
    assert ws.cache.stats(project.cache).bytes <= held.bytes + 2000
    assert ws.cache.clear(project.cache) == 2
    assert ws.cache.ls(project.cache) == []


def test_the_environment_names_the_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", str(project.cache))
    assert project.traces(cache=None) == 2
    assert project.traces(cache=None) == 0
    assert project.traces(cache=False) == 2
    assert ws.cache.stats().entries == 2


def test_processes_at_once_do_not_disturb_each_other(project: Project) -> None:
    program = f"""
        import os, sys, torch
        import wholestep as ws
        ws.capture(lambda x: x + 1, torch.ones(2))  # imports, once for all
        children = []
        for _ in range(3):
            children.append(os.fork())
            if not children[-1]:
                break
        else:
            sys.exit(any(os.waitpid(child, 0)[1] for child in children))
        sys.path.insert(0, {str(project.folder)!r})
        import {NAME} as train
        step = ws.compile(train.train_step, lower="eager", cache={str(project.cache)!r})
        model, optimizer = train.make()
        for _ in range(3):
            loss = step(model, optimizer, torch.ones(8, 4))
        os.write(1, f"{{loss.item()}}\\n".encode())  # a line of each, whole
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(ws.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True, timeout=120)
    first, *others = done.stdout.splitlines()
    assert others == [first] * 2
    assert len(ws.cache.ls(project.cache)) == 2
    assert project.traces() == 0
    assert not list(project.cache.rglob("*.part"))


def test_a_step_that_has_no_form_in_a_file_runs_without_the_cache(tmp_path: Path) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * len(Path(__file__).read_text())

    step = ws.compile(reads, lower="eager", cache=tmp_path)
    assert torch.equal(step(torch.ones(2)), reads(torch.ones(2)))
    assert disk_cache.entries(tmp_path) == []
