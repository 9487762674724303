"""Settings of the whole suite: one thread, the same hypothesis examples on every run."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import ranks
from wholestep.capture.results import global_state

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WHOLESTEP_LOWER", "eager")  # bit for bit, and no compiler; tests/lower asks for Inductor itself
os.environ.setdefault("WHOLESTEP_PROGRESS", "0")  # what is said while a test compiles belongs to no test
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compiling processes beside pytest's own
if (
    "ATEN_CPU_CAPABILITY" in os.environ
):  # Inductor's cache does not know it, and would load code of another instruction set
    _cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache))

_COMPILES = ("lower", "compilers")  # packages whose tests compile with Inductor in their own process
_COMPILES_ON_RANKS = "test_parity_ranks.py"
_TEST_FILES: set[str] = set()
"""Names of the modules with tests in them that were imported."""
_CRASH = "crash of a thread that is not Python's"

torch.set_num_threads(1)
# Python's collector begins at 700 new objects, of which a capture makes hundreds of thousands: a tenth of all time.
# No test relies on when it runs: those that ask whether something is freed collect first.
gc.set_threshold(20_000, 10, 10)

slow_by_nature = [HealthCheck.too_slow, HealthCheck.data_too_large]
common = settings(deadline=None, database=None, suppress_health_check=slow_by_nature)
settings.register_profile("ci", common, derandomize=True, max_examples=25)
settings.register_profile("search", common, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def fresh_random_state() -> None:
    """No test sees the random numbers that another one left."""
    torch.manual_seed(0)


class _Frozen:
    """Whether Python's objects are frozen. `gc.get_freeze_count()` would count a million of them, at each test."""

    now = False
    freeze, unfreeze = staticmethod(gc.freeze), staticmethod(gc.unfreeze)


def _freeze() -> None:
    _Frozen.freeze()
    _Frozen.now = True


def _unfreeze() -> None:
    _Frozen.unfreeze()
    _Frozen.now = False


gc.freeze, gc.unfreeze = _freeze, _unfreeze


@pytest.fixture(autouse=True, scope="module")
def what_earlier_files_left_is_frozen() -> None:
    """Python's collector looks at no object that was there before this file: a capture collects twice, and would walk
    over the modules that earlier tests imported and what they left in caches of torch."""
    if _Frozen.now:
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def what_the_last_test_unfroze_is_frozen() -> None:
    """A search for what a trace left behind may unfreeze all objects: a second for each collection from then on."""
    if not _Frozen.now:
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def only_this_file_is_the_users_program(request: pytest.FixtureRequest) -> Iterator[None]:
    """A capture notes what all modules of the user hold; the other test files are no part of the program."""
    known = global_state.NOT_THE_USERS
    added = _TEST_FILES - known - {request.module.__name__}
    known |= added
    yield
    known -= added


def pytest_collection_finish() -> None:
    """What was imported stays: full collections of Python's garbage need not look at a million objects of it again."""
    _TEST_FILES.update(name for name in sys.modules if name.startswith("tests.") and ".test_" in name)
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that leave something behind in their process, from which no rank must be forked any more, run last.

    A worker of xdist runs its share in this order, with `--dist load`.
    """
    for item in items:
        if item.path.parent.name in _COMPILES and item.path.name != _COMPILES_ON_RANKS:
            item.add_marker("compiles")
    items.sort(key=_leaves_something_behind)


def _leaves_something_behind(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("compiles", "fake_group"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a compiler these tests would fail one by one, deep inside of Inductor."""
    if item.get_closest_marker("compiles") and not _has_compiler():
        pytest.fail(
            "Inductor needs a C++ compiler, and there is none: install g++ (or set CXX), or select other tests "
            "(make unit ARGS='-m \"not compiles\"').",
            pytrace=False,
        )


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Give crashes after which ranks were started again to the report, which also travels from a worker of xdist."""
    report: Any = yield
    report.user_properties += [(_CRASH, text) for text in ranks.CRASHES]
    ranks.CRASHES.clear()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print them: nothing is passed over in silence."""
    for report in (each for kind in terminalreporter.stats.values() for each in kind):
        for name, text in getattr(report, "user_properties", ()):
            if name == _CRASH:
                terminalreporter.section(f"{report.nodeid}: ranks were started again after a crash")
                terminalreporter.line(text)
