"""Modules that a step imports: what they take of Python and torch is Python's and torch's own after the capture."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import wholestep as ws

SOURCE = """
from builtins import print
from os import getcwd, mkdir
from time import perf_counter
from torch import tensor
from warnings import warn


class Clock:
    read = perf_counter

    def since(self, start, now=perf_counter):
        return now() - start


def scale():
    return len(getcwd())
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_in_a_step.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_in_a_step", raising=False)
    return "imported_in_a_step"


def test_a_module_that_the_step_imports_keeps_no_replacement(name: str, tmp_path: Path) -> None:
    step = ws.compile(lambda x: x * importlib.import_module(name).scale(), lower="eager")
    assert step(torch.ones(())).item() == len(os.getcwd())
    module = sys.modules[name]
    assert (module.mkdir, module.getcwd, module.perf_counter) == (os.mkdir, os.getcwd, time.perf_counter)
    assert (module.tensor, module.print) == (torch.tensor, print)
    assert module.Clock.read is time.perf_counter
    assert module.Clock.since.__defaults__ == (time.perf_counter,)
    module.mkdir(tmp_path / "made")
    assert (tmp_path / "made").is_dir()


def test_what_it_reads_of_the_process_is_still_read_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ws.compile(lambda x: x * importlib.import_module(name).scale(), lower="eager")
    for i in range(3):
        folder = tmp_path / ("f" * (i + 1))
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert step(torch.ones(())).item() == len(os.getcwd())
