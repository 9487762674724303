"""Environment variables and files that a step reads are read again at each call; what it writes there is refused."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wholestep as ws
from capture.followed import assert_follows, assert_refused

ENVIRONMENT: dict[str, Callable[[], Any]] = {
    "item": lambda: float(os.environ["USERS_SCALE"]),
    "get": lambda: float(os.environ.get("USERS_SCALE", "1.0")),
    "getenv": lambda: float(os.getenv("USERS_SCALE", "1.0")),
    "in": lambda: 2.0 if "USERS_OTHER" in os.environ else 1.0,
    "absent": lambda: float(os.environ.get("USERS_OTHER", "1.0")),
    "copy": lambda: float(dict(os.environ)["USERS_SCALE"]),
    "items": lambda: sum(float(v) for k, v in os.environ.items() if k.startswith("USERS_")),
    "bytes": lambda: float(os.environ.copy()["USERS_SCALE"]),
}


@pytest.mark.parametrize("how", ENVIRONMENT)
def test_an_environment_variable_is_used_as_it_is_at_each_call(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        monkeypatch.setenv("USERS_SCALE", "1.0")
        monkeypatch.delenv("USERS_OTHER", raising=False)

        def change(i: int) -> None:
            monkeypatch.setenv("USERS_SCALE", str(i + 2.0))
            if i >= 2:
                monkeypatch.setenv("USERS_OTHER", str(i + 3.0))

        return ENVIRONMENT[how], change

    assert_follows(make)


def test_another_environment_variable_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERS_SCALE", "2.0")
    step = ws.compile(lambda x: x * float(os.environ["USERS_SCALE"]))
    for i in range(3):
        monkeypatch.setenv("USERS_OTHER", str(i))
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert len(step.graphs) == 1


def test_setting_an_environment_variable_is_refused_with_the_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        os.environ["USERS_SET"] = "1"  # <- here
        return x * 2

    assert_refused(step, ws.errors.SideEffectError, "USERS_SET", step)
    assert "USERS_SET" not in os.environ


def read_text(path: Path) -> float:
    return float(path.read_text())


def read_with_open(path: Path) -> float:
    with open(path) as file:
        return float(file.readline())


def read_json(path: Path) -> float:
    with path.open() as file:
        return float(json.load(file))


def read_array(path: Path) -> float:
    return float(np.loadtxt(path))


def read_bytes(path: Path) -> float:
    return float(path.read_bytes())


def read_size(path: Path) -> float:
    return float(path.stat().st_size)


def read_if_there(path: Path) -> float:
    other = path.with_suffix(".other")
    return 2.0 if os.path.exists(other) else 1.0


def count_entries(path: Path) -> float:
    return float(len(os.listdir(path.parent)))


def read_tensor(path: Path) -> Any:
    return torch.load(path.with_suffix(".pt")).item()


FILES = [read_text, read_with_open, read_json, read_array, read_bytes, read_size, read_if_there, count_entries]


@pytest.mark.parametrize("read", FILES, ids=lambda read: read.__name__)
def test_a_file_is_read_again_when_it_changed(read: Callable[[Path], Any], tmp_path: Path) -> None:
    def make() -> Any:
        path = tmp_path / "scale.txt"
        other = path.with_suffix(".other")
        other.unlink(missing_ok=True)
        path.write_text("1.0")

        def change(i: int) -> None:
            path.write_text(f"{i + 2}.0" + "0" * (i // 2))
            if i == 3:
                other.touch()

        return lambda: read(path), change

    assert_follows(make)


def test_a_file_of_the_same_size_written_at_once_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "scale.txt"
    path.write_text("1.0")
    step = ws.compile(lambda x: x * float(path.read_text()))
    assert torch.equal(step(torch.ones(2)), torch.ones(2))
    before = path.stat()
    path.write_text("2.0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))


def test_a_file_that_did_not_change_needs_no_new_graph(tmp_path: Path) -> None:
    path = tmp_path / "scale.txt"
    path.write_text("2.0")
    step = ws.compile(lambda x: x * float(path.read_text()))
    for _ in range(4):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert len(step.graphs) == 1


def write_with_open(path: Path) -> None:
    with open(path, "w") as file:  # <- here
        file.write("x")


def append(path: Path) -> None:
    with path.open("a") as file:  # <- here
        file.write("x")


def write_text(path: Path) -> None:
    path.write_text("x")  # <- here


def save_array(path: Path) -> None:
    np.save(path, np.ones(2))  # <- here


def dump_json(path: Path) -> None:
    json.dump([1], path.open("w"))  # <- here


WRITES = [write_with_open, append, write_text, save_array, dump_json]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writing_a_file_is_refused_with_the_line(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "out.txt"

    def step(x: torch.Tensor) -> torch.Tensor:
        write(path)
        return x * 2

    assert_refused(step, ws.errors.SideEffectError, "writing", write)
    assert list(tmp_path.iterdir()) == []


def test_another_process_is_refused_with_the_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * len(subprocess.run(["true"], check=True, capture_output=True).stdout)  # <- here

    assert_refused(step, ws.errors.SideEffectError, "process", step)
    assert subprocess.run(["true"], check=False).returncode == 0


def start_a_thread(x: torch.Tensor) -> torch.Tensor:
    thread = threading.Thread(target=x.mul_, args=(2,))
    thread.start()  # <- here
    thread.join()
    return x * 2


def give_work_to_a_pool(x: torch.Tensor) -> torch.Tensor:
    return POOL.submit(x.mul, 2).result()  # <- here


def map_over_a_pool(x: torch.Tensor) -> torch.Tensor:
    return sum(POOL.map(x.mul, [1, 2]))  # <- here


POOL = ThreadPoolExecutor(1)


@pytest.mark.parametrize("step", [start_a_thread, give_work_to_a_pool, map_over_a_pool], ids=lambda s: s.__name__)
def test_another_thread_is_refused_with_the_line(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_refused(step, ws.errors.SideEffectError, "thread", step)
    assert step(torch.ones(3)).shape == (3,)


def test_setting_the_umask_is_refused_with_the_line() -> None:
    before = os.umask(0o22)
    os.umask(before)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * os.umask(0o77)  # <- here

    assert_refused(step, ws.errors.SideEffectError, "umask", step)
    assert os.umask(before) == before
