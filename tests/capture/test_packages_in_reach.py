"""Installed packages that a step leads to: what is guarded of them, and what their code makes the search look into."""

from __future__ import annotations

import sys
import sysconfig
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

import wholestep as ws
from harness import marked_line
from wholestep.artefact.addresses import Walk
from wholestep.capture.objects.discover import discover
from wholestep.capture.objects.discover_sources import imported_modules
from wholestep.ir.meta import location_of_node


class Config:
    scale = 2.0


def reads_dicts() -> Any:
    return vars(Config)["scale"]


def names_submodules(model: torch.nn.Module) -> int:
    return len(list(model.modules()))


def looks_up(name: str) -> Any:
    return sys.modules[name]


def installed(fn: FunctionType) -> Any:
    """The function as one of an installed package."""
    file = sysconfig.get_paths()["purelib"] + "/a_package/a_file.py"
    code: CodeType = fn.__code__.replace(co_filename=file)
    return FunctionType(code, fn.__globals__, fn.__name__)


def test_vars_in_a_package_opens_the_classes_of_its_own_module_only() -> None:
    by_program, by_package = discover(reads_dicts, []), discover(installed(reads_dicts), [])
    other = type("Other", (), {"__module__": "another_package"})
    assert [by_program.sees_dict_of(cls) for cls in (Config, other)] == [True, True]
    assert [by_package.sees_dict_of(cls) for cls in (Config, other)] == [True, False]


def test_submodules_of_a_model_are_not_python_modules_looked_up_by_name() -> None:
    assert not imported_modules(globals(), names_submodules.__code__)
    assert __name__ in imported_modules(globals(), looks_up.__code__)


def branches(x: Any) -> Any:
    return x if x.mm(x).sum() > 0 else -x


def sorts(x: Any) -> Any:
    return sorted([x.mm(x).sum(), x.mean()], key=lambda t: float(t * 2))


def leaves(x: Any) -> Any:
    return torch.linalg.eigvals(x).numpy()


BRANCHES, SORTS, LEAVES = installed(branches), installed(sorts), installed(leaves)


@pytest.mark.parametrize("of_package", [BRANCHES, SORTS, LEAVES], ids=["branch", "sort", "numpy"])
def test_a_refusal_in_a_package_names_the_line_that_called_it_and_that_of_the_package(of_package: Any) -> None:
    def step(x: Any) -> Any:
        y = x * 2
        return of_package(y)  # <- here

    with pytest.raises(ws.errors.CaptureError) as caught:
        ws.compile(step, lower="eager")(torch.eye(2))
    where = caught.value.location
    assert where is not None
    assert where.inside is not None
    assert (where.file, where.line) == (__file__, marked_line(step))
    assert (where.inside.file, where.inside.function) == (of_package.__code__.co_filename, of_package.__name__)
    again = caught.value.at(where)
    assert str(again) == str(caught.value)


def test_a_node_of_a_package_has_its_line_and_that_which_called_it() -> None:
    graph = ws.capture(lambda x: DOUBLE(x), torch.ones(2)).gm.graph
    (node,) = (node for node in graph.nodes if node.op == "call_function" and "mul" in str(node.target))
    where = location_of_node(node)
    assert where is not None
    assert where.called_from is not None
    assert (where.function, where.called_from.file) == ("doubles", __file__)


def doubles(x: Any) -> Any:
    return x * 2


DOUBLE = installed(doubles)


def test_a_capture_that_nobody_saves_does_not_walk_all_objects_for_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def walked(*given: Any) -> None:
        raise AssertionError("walked")

    monkeypatch.setattr(Walk, "__init__", walked)
    step = ws.compile(lambda x: x * Config.scale, lower="eager")
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
