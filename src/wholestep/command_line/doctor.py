"""`wholestep doctor`: what is installed, which devices and compilers there are, and what will not work and why."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from wholestep.command_line.screen import console, say, say_json, table

State = Literal["ok", "note", "wrong"]
_MARKS = {"ok": "ok", "note": "note", "wrong": "WRONG"}
_TORCH = ((2, 11), (2, 15))
"""The first and the last minor version of torch that this was tried on."""
_NEEDED = ("numpy", "safetensors", "scipy", "rich", "typer")
_FRAMEWORKS = ("accelerate", "transformers", "lightning")
_VARIABLES = ("WHOLESTEP_LOWER", "WHOLESTEP_PROGRESS", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "CXX", "RANK")


@dataclass(frozen=True)
class Examined:
    """One thing that was looked at."""

    part: str
    what: str
    found: str
    state: State = "ok"
    meaning: str = ""
    """What does not work because of it, and what to do."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print JSON for machines")] = False) -> None:
    """Say what is installed, which devices and compilers there are, and what will not work and why.

    Exit code 1 if something that everything needs is missing.

    Example: wholestep doctor
    """
    found = list(examine())
    wrong = [each for each in found if each.state == "wrong"]
    if as_json:
        say_json({"ok": not wrong, "examined": [asdict(each) for each in found]})
    else:
        rows = [(_MARKS[e.state], e.part, e.what, e.found) for e in found]
        console().print(table(("", "part", "what", "found"), rows))
        remarks = [each for each in found if each.meaning]
        if remarks:
            say()
        for each in remarks:
            say(f"{_MARKS[each.state]}  {each.what}: {each.meaning}", "red" if each.state == "wrong" else "yellow")
        say()
        say("something that wholestep needs is missing" if wrong else "wholestep can run here", "bold")
    raise typer.Exit(1 if wrong else 0)


def examine() -> Iterator[Examined]:
    """Everything, in order."""
    import wholestep

    yield Examined("versions", "wholestep", wholestep.__version__)
    yield Examined("versions", "Python", f"{platform.python_version()} at {sys.executable}")
    yield from _versions()
    if find_spec("torch") is not None:
        yield from _devices()
        yield from _compilers()
        yield from _communication()
    yield from _tools()
    for name in _VARIABLES:
        if name in os.environ:
            yield Examined("environment", name, os.environ[name])


def _versions() -> Iterator[Examined]:
    found = _version("torch")
    if found is None:
        yield Examined("versions", "torch", "missing", "wrong", "pip install torch: everything is built on it.")
    else:
        numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
        low, high = _TORCH
        tried = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        if numbers < low:
            yield Examined("versions", "torch", found, "wrong", f"it is too old: use {tried}.")
        elif numbers > high:
            yield Examined("versions", "torch", found, "note", f"it is newer than what this was tried on ({tried}).")
        else:
            yield Examined("versions", "torch", found)
    for name in _NEEDED:
        there = _version(name)
        fix = f"pip install {name}: a dependency of wholestep."
        yield Examined("versions", name, there or "missing", "ok" if there else "wrong", "" if there else fix)
    others = ", ".join(f"{name} {there}" for name in _FRAMEWORKS if (there := _version(name)))
    yield Examined("versions", "frameworks", others or "none of accelerate, transformers, lightning")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Examined]:
    import torch

    cores = os.cpu_count() or 1
    yield Examined("devices", "CPU", f"{cores} cores, {torch.get_num_threads()} threads of torch, {_capability()}")
    if torch.version.cuda is None:
        without = "this torch is built for the CPU: CUDA devices, one CUDA graph per step and NCCL are not available."
        yield Examined("devices", "CUDA", "not in this torch", "note", without)
        return
    if not torch.cuda.is_available():
        why = "no device, or its driver is older than CUDA " + str(torch.version.cuda)
        yield Examined(
            "devices", "CUDA", f"torch is built for {torch.version.cuda}", "note", f"no GPU can be used: {why}."
        )
        return
    for i in range(torch.cuda.device_count()):
        name, memory = torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory
        yield Examined("devices", f"cuda:{i}", f"{name}, {memory / 2**30:.0f} GiB")


def _capability() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _compilers() -> Iterator[Examined]:
    import torch

    named = os.environ.get("CXX")
    found = next((path for name in (named, "g++", "clang++") if name and (path := shutil.which(name))), None)
    if found is None:
        meaning = (
            'lower="inductor" cannot compile for the CPU: install g++ (or set CXX), or use lower="eager", which needs '
            "no compiler."
        )
        yield Examined("compilers", "C++", "missing", "note", meaning)
    else:
        yield Examined("compilers", "C++", f"{found} {_first_line(found, '--version')}")
    if torch.cuda.is_available():
        there = find_spec("triton") is not None
        meaning = "" if there else 'lower="inductor" cannot compile for CUDA: pip install triton, or use lower="eager".'
        yield Examined("compilers", "triton", _version("triton") or "missing", "ok" if there else "note", meaning)


def _communication() -> Iterator[Examined]:
    import torch.distributed as dist

    if not dist.is_available():
        meaning = "parallel= and pipelines need torch.distributed, which this build of torch lacks."
        yield Examined("ranks", "torch.distributed", "missing", "note", meaning)
        return
    backends = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    yield Examined("ranks", "torch.distributed", ", ".join(backends) or "no backend")


def _tools() -> Iterator[Examined]:
    there = shutil.which("dot")
    meaning = "" if there else "drawings are written as SVG and DOT; PNG needs graphviz."
    yield Examined("tools", "graphviz", there or "missing", "ok" if there else "note", meaning)


def _first_line(command: str, option: str) -> str:
    try:
        done = subprocess.run([command, option], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(does not run: {error})"
    return done.stdout.splitlines()[0] if done.stdout else ""
