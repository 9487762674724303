"""Do the same thing twice from one seed, in eager and as a graph, and compare every bit that the user can reach.

make(device) -> Run            fresh objects: the step, its arguments, what to watch
play(run, step, steps)         call it, freeze results and state after every call
assert_parity(case, device)    eager and ws.compile, bit for bit, and no more graphs than the case allows
assert_same_story(make, story) the same for a story: calls mixed with what else users do between steps
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import wholestep as ws
from wholestep.ir.user_objects.wrapper_tensors import inner_tensors, is_wrapper

SEED = 1234


def device() -> torch.device:
    """The device of a test that does not say otherwise; tests/gpu passes its own."""
    return torch.device("cpu")


@dataclass
class Run:
    """A training step with fresh objects around it. `after` is what the user does between two calls."""

    step: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    watch: dict[str, Any]
    keywords: Callable[[int], dict[str, Any]] = field(default=lambda i: {})
    after: Callable[[int, Any], None] = field(default=lambda i, result: None)


@dataclass(frozen=True)
class Case:
    """One feature. `graphs` is the most graphs it may need: one that creates optimizer state and one for ever after."""

    name: str
    make: Callable[[torch.device], Run]
    steps: int = 10
    graphs: int | None = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")


def case(make: Callable[..., Run], *args: Any, **fields: Any) -> Case:
    """The case of a function `make(device, *args)`, named after it."""
    described = [str(arg).replace("torch.", "") for arg in args]
    name = fields.pop("name", "-".join([make.__name__, *described]))
    return Case(name, lambda where: make(where, *args), **fields)


def cases_on(kind: str, *groups: list[Case]) -> list[Any]:
    """pytest parameters for the cases that exist on a kind of device."""
    return [pytest.param(each, id=each.name) for group in groups for each in group if kind in each.devices]


@dataclass(frozen=True)
class Bits:
    """A tensor's value to the last bit, NaN and signed zero included."""

    dtype: torch.dtype
    shape: torch.Size
    device: str
    bits: bytes
    value: torch.Tensor = field(compare=False, repr=False)


def bits_of(tensor: torch.Tensor) -> Bits:
    """Freeze a tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Bits(tensor.dtype, tensor.shape, tensor.device.type, raw, plain)


def freeze(value: Any, path: str = "") -> dict[str, Any]:
    """Everything under a value as a flat map from the path a person would write to bits, or to (type, text)."""
    found: dict[str, Any] = {}
    _freeze(value, path, found)
    return found


def _freeze(value: Any, path: str, found: dict[str, Any]) -> None:
    if is_wrapper(value):
        found[path] = type(value).__name__
        for name, inner in inner_tensors(value).items():
            _freeze(inner, f"{path}.{name}", found)
    elif isinstance(value, torch.Tensor):
        found[path] = bits_of(value)
    elif isinstance(value, nn.Module):
        _freeze_module(value, path, found)
    elif isinstance(value, torch.Generator):
        found[f"{path}.generator"] = bits_of(value.get_state())
    elif isinstance(value, Mapping):
        found[f"{path}.keys"] = (type(value).__name__, sorted(map(repr, value)))
        for key in value:
            _freeze(value[key], f"{path}[{key!r}]", found)
    elif isinstance(value, list | tuple):
        found[f"{path}.len"] = (type(value).__name__, len(value))
        for index, item in enumerate(value):
            _freeze(item, f"{path}[{index}]", found)
    elif hasattr(value, "state_dict"):
        _freeze(value.state_dict(), path, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found[f"{path}.type"] = type(value).__name__
        for each in dataclasses.fields(value):
            _freeze(getattr(value, each.name), f"{path}.{each.name}", found)
    else:
        found[path] = (type(value).__name__, repr(value))


def _freeze_module(module: nn.Module, path: str, found: dict[str, Any]) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        _freeze(parameter, f"{path}.{name}", found)
        found[f"{path}.{name}.requires_grad"] = parameter.requires_grad
        found[f"{path}.{name}.grad"] = None if parameter.grad is None else bits_of(parameter.grad)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        _freeze(buffer, f"{path}.{name}", found)
    for name, child in module.named_modules():
        found[f"{path}.{name}.training"] = child.training


def random_state() -> dict[str, Any]:
    """The default generators of every device in use."""
    found = {"rng.cpu": bits_of(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["rng.cuda"] = bits_of(torch.cuda.get_rng_state())
    return found


def data_leaves(arguments: Any) -> list[torch.Tensor]:
    """The tensors that a call was given: a step may write to its batch."""
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def bare_gradients(value: Any) -> list[torch.Tensor | None]:
    """The gradients of parameters that are watched outside of any module."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf.grad for leaf in leaves if leaf.is_leaf and leaf.requires_grad]


@dataclass(frozen=True)
class Frame:
    """What the user can see after one call."""

    label: str
    seen: dict[str, Any]


def frame(label: str, result: Any, watch: Mapping[str, Any], arguments: Any = ()) -> Frame:
    """Freeze a result and all the state around it."""
    seen = freeze(result, "result") | freeze(data_leaves(arguments), "batch") | random_state()
    for name, value in watch.items():
        seen |= freeze(value, name) | freeze(bare_gradients(value), f"{name}.grad")
    return Frame(label, seen)


def play(run: Run, step: Callable[..., Any], steps: int) -> list[Frame]:
    """Call a step and freeze what is seen after every call."""
    frames = []
    for i in range(steps):
        arguments, keywords = run.arguments(i), run.keywords(i)
        result = step(*arguments, **keywords)
        frames.append(frame(f"call {i + 1}", result, run.watch, (arguments, keywords)))
        run.after(i, result)
    return frames


def differences(expected: Frame, actual: Frame) -> list[str]:
    """One line for each path whose value differs."""
    lines = []
    for path in [*expected.seen, *(p for p in actual.seen if p not in expected.seen)]:
        want, got = expected.seen.get(path, "absent"), actual.seen.get(path, "absent")
        if want == got:
            continue
        if isinstance(want, Bits) and isinstance(got, Bits) and want.shape == got.shape and want.dtype == got.dtype:
            apart = (want.value.to(torch.complex128) - got.value.to(torch.complex128)).abs()
            lines.append(f"{path}: {int((apart != 0).sum())} of {apart.numel()} differ, by at most {apart.max():.3g}")
        else:
            lines.append(f"{path}: eager has {_short(want)}, wholestep {_short(got)}")
    return lines


def _short(value: Any) -> str:
    if isinstance(value, Bits):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)


def assert_frames_equal(expected: list[Frame], actual: list[Frame]) -> None:
    """Fail at the first call after which anything differs, and name what."""
    for want, got in zip(expected, actual, strict=True):
        lines = differences(want, got)
        if lines:
            more = f"\n  and {len(lines) - 12} more" if len(lines) > 12 else ""
            pytest.fail(f"after {want.label}, of {len(expected)}:\n  " + "\n  ".join(lines[:12]) + more)


def reasons(step: Any) -> str:
    """Why a step was captured more than once, for a failing assertion."""
    return "\n".join(f"  {reason}" for reason in step.recompiles)


def assert_parity(each: Case, where: torch.device) -> Any:
    """Eager and wholestep agree after every call, and the steady state needs no new graph. Returns the step."""
    torch.manual_seed(SEED)
    run = each.make(where)
    expected = play(run, run.step, each.steps)
    torch.manual_seed(SEED)
    run = each.make(where)
    step = ws.compile(run.step, **each.options)
    actual = play(run, step, each.steps)
    assert_frames_equal(expected, actual)
    assert step.last in step.graphs
    if each.graphs is not None:
        assert len(step.graphs) <= each.graphs, f"{len(step.graphs)} graphs, allowed {each.graphs}:\n{reasons(step)}"
    return step


def assert_parity_or_refusal(each: Case, where: torch.device) -> None:
    """Either equal to eager or refused with a code: never silently different."""
    with contextlib.suppress(ws.errors.CaptureError):
        assert_parity(each, where)


class Story:
    """What a user does around a step: call it, look at the state, change something, call again."""

    def __init__(self, run: Run, step: Callable[..., Any]) -> None:
        self.run = run
        self.step = step
        self.frames: list[Frame] = []
        self.calls = 0

    def call(self, times: int = 1) -> Any:
        """Call the step and freeze what is seen after it."""
        return self._call(self.step, times)

    def call_eager(self, times: int = 1) -> Any:
        """Call the step in eager, on either side."""
        return self._call(self.run.step, times)

    def look(self, **seen: Any) -> None:
        """Freeze the state, and whatever else is given."""
        self.frames.append(frame(f"look {len(self.frames) + 1}", None, {**self.run.watch, **seen}))

    def _call(self, step: Callable[..., Any], times: int) -> Any:
        result = None
        for _ in range(times):
            arguments, keywords = self.run.arguments(self.calls), self.run.keywords(self.calls)
            result = step(*arguments, **keywords)
            self.frames.append(frame(f"call {self.calls + 1}", result, self.run.watch, (arguments, keywords)))
            self.run.after(self.calls, result)
            self.calls += 1
        return result


def assert_same_story(make: Callable[[torch.device], Run], story: Callable[[Story], None], **options: Any) -> Any:
    """A story told in eager and with a compiled step has the same bits at every point. Returns the compiled step."""
    torch.manual_seed(SEED)
    run = make(device())
    eager = Story(run, run.step)
    story(eager)
    torch.manual_seed(SEED)
    run = make(device())
    compiled = Story(run, ws.compile(run.step, **options))
    story(compiled)
    assert_frames_equal(eager.frames, compiled.frames)
    return compiled.step


def marked_line(function: Callable[..., Any], marker: str = "# <- here") -> int:
    """The line of a function that carries a marker comment."""
    lines, first = inspect.getsourcelines(function)
    return next(first + offset for offset, line in enumerate(lines) if marker in line)


def batch_of(where: torch.device, i: int, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The i-th random batch: the same on every device and every run, drawn from no shared generator."""
    generator = torch.Generator().manual_seed(1000 + i)
    return torch.randn(*sizes, generator=generator, dtype=torch.float32).to(where, dtype)


def tokens_of(where: torch.device, i: int, *sizes: int, vocabulary: int) -> torch.Tensor:
    """The i-th batch of random token ids."""
    generator = torch.Generator().manual_seed(2000 + i)
    return torch.randint(vocabulary, sizes, generator=generator).to(where)
