"""A compiled step is saved to one file and runs in another process, or for other objects, without being traced."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep import step as stages
from wholestep.artefact.code_table import code_of
from wholestep.errors import ArtefactError

HELPER = "def scaled(x):\n    return x * 2.0\n"
STEP = """
import torch
from torch import nn
import torch.nn.functional as F
import NAME_helper

class Net(nn.Module):
    slope = 0.1

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)
        self.p = 0.5

    def forward(self, x):
        return self.out(F.leaky_relu(NAME_helper.scaled(self.fc(x)), self.slope)) * self.p

def train_step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.detach(), "n": 3}

def make(width=8):
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
"""
EAGER = {"lower": "eager"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Two files of a user's, `train` and its helper, imported anew at each call."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = "of_a_user"
    (tmp_path / f"{name}_helper.py").write_text(HELPER)
    (tmp_path / f"{name}.py").write_text(STEP.replace("NAME", name))

    def load() -> ModuleType:
        importlib.invalidate_caches()
        for each in (f"{name}_helper", name):
            sys.modules.pop(each, None)
        return importlib.import_module(name)

    yield load
    for each in (f"{name}_helper", name):
        sys.modules.pop(each, None)


def run(step: Callable[..., Any], model: nn.Module, optimizer: Any, calls: int = 3) -> list[torch.Tensor]:
    """The losses of some calls, and the parameters after them."""
    torch.manual_seed(1)
    batches = [torch.randn(8, 4) for _ in range(calls)]
    return [*(step(model, optimizer, batch)["loss"] for batch in batches), *(p.detach() for p in model.parameters())]


def save(train: ModuleType, path: Path, **options: Any) -> list[torch.Tensor]:
    """Compile, run and save the step; returns what it computed."""
    step = ws.compile(train.train_step, **{**EAGER, **options})
    found = run(step, *train.make())
    step.save(path)
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_a_loaded_step_has_the_bits_of_the_saved_one_and_is_not_traced(project: Any, tmp_path: Path) -> None:
    train = project()
    expected = save(train, tmp_path / "step.ws")
    train = project()
    with mock.patch.object(stages, "trace_step", side_effect=AssertionError("traced")):
        for fn in (train.train_step, None, ws.compile(train.train_step)):
            step: Any = ws.load(tmp_path / "step.ws", fn)
            assert equal(run(step, *train.make()), expected)
            assert len(step.graphs) == 2


def test_a_step_is_saved_in_one_process_and_runs_in_another(project: Any, tmp_path: Path) -> None:
    program = """
        import os, sys, torch
        import wholestep as ws
        ws.capture(lambda x: x + 1, torch.ones(2))  # imports, once for both
        saves = os.fork() == 0
        if not saves:
            assert os.wait()[1] == 0
        sys.path.insert(0, sys.argv[1])
        import of_a_user
        path, model, optimizer = sys.argv[1] + "/step.ws", *of_a_user.make()
        step = ws.compile(of_a_user.train_step, lower="eager") if saves else ws.load(path, of_a_user.train_step)
        torch.manual_seed(1)
        batches = [torch.randn(8, 4) for _ in range(3)]
        losses = [step(model, optimizer, batch)["loss"] for batch in batches]
        if saves:
            step.save(path)
        name = "saved" if saves else "loaded"
        torch.save([*losses, *(p.detach() for p in model.parameters())], f"{sys.argv[1]}/{name}.pt")
    """
    source = Path(ws.__file__).parent.parent
    # Not in this process: packages that tests import replace functions of torch.
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(source)})
    assert equal(torch.load(tmp_path / "loaded.pt"), torch.load(tmp_path / "saved.pt"))


def _other_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(self.out(self.fc(x)))


def _set(name: str, value: Any) -> Callable[[Any, Any, Any], None]:
    return lambda train, model, optimizer: setattr(model, name, value)


CHANGES: dict[str, tuple[str, Callable[[Any, nn.Module, Any], object]]] = {
    "a value of the model": ("model.p is float", _set("p", 0.7)),
    "a shape": ("input model.fc.weight", lambda t, m, o: setattr(m, "fc", nn.Linear(4, 8, bias=True).double())),
    "a class attribute": ("slope", lambda t, m, o: setattr(t.Net, "slope", 0.2)),
    "a method": ("the code of of_a_user.Net", lambda t, m, o: setattr(t.Net, "forward", _other_forward)),
    "a method of the object": ("model.forward", lambda t, m, o: setattr(m, "forward", m.fc.forward)),
    "a hook": ("<lambda> is new", lambda t, m, o: m.register_forward_hook(lambda *args: None)),
    "a hook of a parameter": ("<lambda> is new", lambda t, m, o: m.fc.weight.register_hook(lambda grad: None)),
    "a frozen parameter": ("model.fc.weight", lambda t, m, o: m.fc.weight.requires_grad_(False)),
    "evaluation": ("model.training", lambda t, m, o: m.eval()),
    "an option of the optimizer": ("weight_decay", lambda t, m, o: o.param_groups[0].update(amsgrad=True)),
    "another submodule": ("torch.nn.modules", lambda t, m, o: m.add_module("out", nn.Sequential(nn.Linear(8, 1)))),
    "a helper": ("scaled", lambda t, m, o: setattr(t.of_a_user_helper, "scaled", lambda x: x)),
    "a function of torch": ("relu", lambda t, m, o: setattr(t.F, "leaky_relu", lambda x, slope: x)),
    "a mode": ("deterministic", lambda t, m, o: torch.use_deterministic_algorithms(True)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_from_the_capture_is_named(change: str, project: Any, tmp_path: Path) -> None:
    save(project(), tmp_path / "step.ws")
    train = project()
    model, optimizer = train.make()
    step = ws.load(tmp_path / "step.ws", train.train_step)
    named, make = CHANGES[change]
    before = torch.nn.functional.leaky_relu
    try:
        make(train, model, optimizer)
        kept = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ArtefactError) as error:
            step(model, optimizer, torch.ones(8, 4))
        assert equal(kept, list(model.parameters()))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.nn.functional.leaky_relu = before
    assert named in str(error.value) or change in ("an option of the optimizer", "a function of torch"), error.value


def test_another_shape_of_the_batch_is_named(project: Any, tmp_path: Path) -> None:
    save(project(), tmp_path / "step.ws")
    train = project()
    step = ws.load(tmp_path / "step.ws", train.train_step)
    with pytest.raises(ArtefactError, match=r"argument batch is float32 \[3, 4\]"):
        step(*train.make(), torch.ones(3, 4))
    with pytest.raises(ArtefactError, match="structure of the arguments"):
        step(*train.make(), {"x": torch.ones(8, 4)})


def test_variables_of_a_step_are_given_by_name_where_its_function_is_not(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    scale = 3.0

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = ws.compile(step, lower="eager")
    expected = [compiled(torch.ones(2, 4)) for _ in range(3)]
    compiled.save(tmp_path / "step.ws")
    model, optimizer = made()
    loaded = ws.load(tmp_path / "step.ws", model=model, optimizer=optimizer)
    assert equal([loaded(torch.ones(2, 4)) for _ in range(3)], expected)
    with pytest.raises(ArtefactError, match="optimizer does not exist here"):
        ws.load(tmp_path / "step.ws", model=made()[0])(torch.ones(2, 4))


def test_a_memory_budget_and_what_passes_did_travel_with_the_graph(project: Any, tmp_path: Path) -> None:
    expected = save(project(), tmp_path / "step.ws", memory_budget=0.0)
    train = project()
    step: Any = ws.load(tmp_path / "step.ws", train.train_step)
    assert equal(run(step, *train.make()), expected)
    assert step.last.memory is not None
    assert step.last.memory.recomputed is not None


def test_a_scheduler_and_prints_of_a_step_are_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def with_list(losses: list[float]) -> Callable[..., Any]:
        def step(model: nn.Module, optimizer: Any, scheduler: Any, batch: torch.Tensor) -> Any:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print("stepped")
            losses.append(loss.item())
            return loss.detach(), scheduler.get_last_lr()[0]

        return step

    def made() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    losses, again = list[float](), list[float]()
    compiled = ws.compile(with_list(losses), lower="eager")
    expected = [compiled(*objects, torch.ones(2, 4)) for objects in [made()] for _ in range(3)]
    compiled.save(tmp_path / "step.ws")
    loaded = ws.load(tmp_path / "step.ws", with_list(again))
    assert [loaded(*objects, torch.ones(2, 4)) for objects in [made()] for _ in range(3)] == expected
    assert again == losses
    assert capsys.readouterr().out == "stepped\n" * 6


class Odd:
    """A result that is no container."""


def test_what_has_no_form_in_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    def reads_a_file(x: torch.Tensor) -> torch.Tensor:
        return x * len(Path(__file__).read_text())

    def vary(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for fn, options, named in (
        (reads_a_file, {}, "test_saved_steps.py"),
        (vary, {"dynamic": {"x": {0: ws.Dim(min=2)}}}, "sizes that vary"),
    ):
        step = ws.compile(fn, lower="eager", **options)
        with pytest.raises(ArtefactError, match="no graph yet"):
            step.save(tmp_path / "step.ws")
        step(torch.ones(4))
        with pytest.raises(ArtefactError, match=named):
            step.save(tmp_path / "step.ws")
        assert not (tmp_path / "step.ws").exists()


def test_process_state_that_a_step_reads_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_folder(x: torch.Tensor) -> torch.Tensor:
        return x * len(os.getcwd())

    def in_thread(x: torch.Tensor) -> torch.Tensor:
        return x * len(threading.current_thread().name)

    monkeypatch.chdir(tmp_path)
    for step in (in_folder, in_thread):
        compiled = ws.compile(step, **EAGER)
        compiled(torch.ones(2))
        if step is in_thread:
            with pytest.raises(ArtefactError, match=r"result of threading\.current_thread"):
                compiled.save("step.ws")
        else:
            compiled.save("step.ws")
            assert torch.equal(ws.load("step.ws", step)(torch.ones(2)), step(torch.ones(2)))
            monkeypatch.chdir("/")
            with pytest.raises(ArtefactError, match=r"result of os.getcwd\(\) is str '/'"):
                ws.load(tmp_path / "step.ws", step)(torch.ones(2))


class Scale:
    def __init__(self) -> None:
        self.factor = 2.0


class OtherScale(Scale):
    pass


SCALE = Scale()


def scales(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(x) * sum(vars(SCALE).values())


@pytest.mark.parametrize("what", ["library", "class", "builtin", "attributes", "code"])
def test_code_that_changes_after_a_load_is_seen(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ws.compile(scales, **EAGER)
    compiled(torch.ones(2))
    compiled.save(tmp_path / "step.ws")
    loaded = ws.load(tmp_path / "step.ws", scales)
    assert torch.equal(loaded(torch.ones(2)), torch.full((2,), 2.0))
    if what == "library":
        monkeypatch.setattr(torch.nn.functional, "relu", torch.sin)
    elif what == "class":
        monkeypatch.setattr(SCALE, "__class__", OtherScale)
    elif what == "builtin":
        monkeypatch.setitem(globals(), "sum", max)
    elif what == "attributes":
        monkeypatch.setitem(vars(SCALE), "offset", 1.0)
    else:
        monkeypatch.setattr(scales, "__code__", (lambda x: x * 5).__code__)
    with pytest.raises(ArtefactError):
        loaded(torch.ones(2))


@pytest.mark.compiles
def test_inductor_compiles_the_regions_of_a_loaded_step(project: Any, tmp_path: Path) -> None:
    options = {"lower": "inductor", "lower_options": {"min_aten_ops": 2, "config": {"cpp.simdlen": None}}}
    expected = save(project(), tmp_path / "step.ws", **options)
    train = project()
    step: Any = ws.load(tmp_path / "step.ws", train.train_step)
    assert equal(run(step, *train.make()), expected)
    assert step.lowering.regions


def test_settings_that_name_programs_need_trust(project: Any, tmp_path: Path) -> None:
    train = project()
    step = ws.compile(train.train_step, lower_options={"config": {"cpp.cxx": (None, "evil")}})
    step.options = stages.replace(step.options, lower="eager")
    run(step, *train.make())
    step.save(tmp_path / "step.ws")
    with pytest.raises(ArtefactError, match=r"cpp\.cxx"):
        ws.load(tmp_path / "step.ws", train.train_step)


def test_code_is_the_same_in_processes_that_made_other_optimizers_or_replaced_torch_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class First(torch.optim.Adam):  # the first instance of a class wraps the `step` that it inherits
        pass

    before = code_of([First])
    First([nn.Parameter(torch.ones(1))])
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: None)
    assert code_of([First]) == before
    monkeypatch.setattr(torch.nn.functional, "relu", lambda x: x)
    assert code_of([First]) != before
