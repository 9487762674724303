"""Process-wide state around a trace: random generators and settings.

A trace must not advance generators, and the graph must be able to repeat its random numbers. Settings that the step
itself switches are resolved by tracing, or refused:

    with torch.backends.mkldnn.flags(enabled=False):     kernels read such a setting when they run: a replay would
        h = conv(x)                                      run them under the settings of its own time. Refused.
    with sdpa_kernel(SDPBackend.MATH): ...               resolved by tracing, which records another operator: captured
    torch.set_default_dtype(torch.float64)               left changed at the end: a replay would not repeat it. Refused.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

from wholestep.capture.objects.discover import World
from wholestep.capture.objects.user_code import is_user_code
from wholestep.capture.results.effect_line import Effect, location_of_line
from wholestep.errors import Location, RandomStateError, SideEffectError, UnsupportedError
from wholestep.ir.meta import location_of, user_location
from wholestep.torch_private.guard_checks import cuda_is_initialized, generator_key
from wholestep.torch_private.modes import MODES, kernel_modes, read_modes, read_old_precision, same_mode, set_modes

_BY_NAME = frozenset({"getattr", "methodcaller"})
_SETTERS = frozenset({"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"})


def default_generators() -> dict[int, tuple[torch.Generator, str]]:
    """torch's own generators by identity, with their names."""
    found = {generator_key(torch.default_generator): (torch.default_generator, "torch.default_generator")}
    if cuda_is_initialized():
        for i, generator in enumerate(torch.cuda.default_generators):
            found[generator_key(generator)] = (generator, f"torch.cuda.default_generators[{i}]")
    return found


class RandomState:
    """The state of all random generators before a trace, which must not advance them."""

    def __init__(self, world: World) -> None:
        self._generators = list(world.generators.values())
        self._defaults = [(g, name, g.initial_seed(), g.get_state()) for g, name in default_generators().values()]
        self._objects = [(o, path, _object_state(o)) for o, path in world.random_objects]
        self._states = [g.get_state() for g, _ in self._generators]
        self._while_tracing = [_advanced(g) for g, _ in self._generators]
        """Their states while the step is traced: other than before, so that setting the former state is seen."""
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._known = default_generators() | world.generators
        self._may_set = _names_setters(world)
        self._set: tuple[str, Location | None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See the block set generators, also to the state that they have. Those methods are C code, so a profile
        function sees them; only where user code names one of them, because it is called for each call of Python.

        A profiler that is active sees the block too if it is a function; cProfile pauses; any other one cannot be
        started again from here."""
        if not self._may_set:
            yield
            return
        active: Any = sys.getprofile()
        if active is not None and not callable(active) and not hasattr(active, "enable"):
            raise UnsupportedError(
                f"a profiler written in C ({type(active).__name__}) is active while a step is captured that names "
                "methods of random generators: capture needs its place to see them set.",
                fix="call the step before the profiler starts.",
            )
        sys.setprofile(self._see if not callable(active) else partial(self._see_and_call, active))
        try:
            yield
        finally:
            if active is None or callable(active):
                sys.setprofile(active)
            else:
                active.enable()

    def _see_and_call(self, active: Any, frame: FrameType, event: str, function: Any) -> None:
        self._see(frame, event, function)
        active(frame, event, function)

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in _SETTERS and self._set is None:
            generator = getattr(function, "__self__", None)
            if isinstance(generator, torch.Generator) and is_user_code(frame.f_code):
                known, where = self._known.get(generator_key(generator)), location_of(frame)
                if known is not None:
                    self._set = known[1], where and location_of_line(where)

    def check_untouched(self) -> None:
        if self._set is not None:
            raise _seeds(*self._set)
        if random.getstate() != self._python or not _same_numpy(self._numpy, _numpy_state()):
            raise RandomStateError(
                "the step draws from Python's or numpy's random generator; every replay would use the same numbers.",
                fix="draw with torch, or pass the random number as an argument.",
            ).seen_by(Effect(lambda capture: (random.getstate(), _numpy_state()), _same_generators))
        for obj, path, known in self._objects:
            if _object_state(obj)[0] != known[0]:
                raise RandomStateError(
                    f"the step draws from {path}; every replay would use the same numbers.",
                    fix="draw with torch, or pass the random number as an argument.",
                ).seen_by(Effect(lambda capture, obj=obj: _object_state(obj)[0], operator.eq))  # type: ignore[misc]
        moved = [
            (generator, path)
            for (generator, path), state in zip(self._generators, self._while_tracing, strict=True)
            if not torch.equal(generator.get_state(), state)
        ]
        # Another thread may draw from a default generator meanwhile; only a new seed comes from the step.
        moved += [(generator, path) for generator, path, seed, _ in self._defaults if generator.initial_seed() != seed]
        if moved:
            generator, path = moved[0]
            raise _seeds(path).seen_by(
                Effect(lambda capture: (generator.initial_seed(), generator.get_state().tolist()), operator.eq)
            )

    def restore(self) -> None:
        for (generator, _), state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        for generator, _, seed, state in self._defaults:
            if generator.initial_seed() != seed:
                generator.set_state(state)
        for obj, _, known in self._objects:
            if _object_state(obj)[0] != known[0]:
                _set_object_state(obj, known)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _names_setters(world: World) -> bool:
    names = {name for _, code in world.codes.values() if is_user_code(code) for name in code.co_names}
    return "default_generator" in names or (bool(world.generators) and not names.isdisjoint(_SETTERS | _BY_NAME))


def _seeds(path: str, location: Location | None = None) -> RandomStateError:
    return RandomStateError(
        f"the step seeds {path}, or sets its state, in a way that the graph does not record.",
        fix="seed outside of the step (torch.manual_seed inside of it is recorded).",
        location=location,
    )


def _advanced(generator: torch.Generator) -> torch.Tensor:
    """The state of a generator of the user's after it was advanced; torch's own, which other threads use, are not."""
    if generator_key(generator) not in default_generators():
        torch.rand(1, generator=generator, device=generator.device)
    return generator.get_state()


def _object_state(obj: Any) -> tuple[Any, Any]:
    """A value to compare, and a value to restore."""
    if isinstance(obj, random.SystemRandom):
        return None, None  # SystemRandom: refused where it is used, no state to restore
    if isinstance(obj, random.Random):
        return obj.getstate(), obj.getstate()
    bits = _bit_generator(obj)
    return repr(bits.state), copy.deepcopy(bits.state)


def _bit_generator(obj: Any) -> Any:
    """What keeps the state of a generator of NumPy."""
    return getattr(obj, "bit_generator", None) or getattr(obj, "_bit_generator", obj)


def _set_object_state(obj: Any, state: Any) -> None:
    if isinstance(obj, random.Random):
        obj.setstate(state[1])
    else:
        _bit_generator(obj).state = state[1]


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _same_generators(before: Any, now: Any) -> bool:
    return bool(before[0] == now[0]) and _same_numpy(before[1], now[1])


def _same_numpy(before: Any, now: Any) -> bool:
    if before is None or now is None:
        return True
    return bool((before[1] == now[1]).all()) and before[2:] == now[2:]


class ProcessSettings:
    """The settings when the trace began."""

    def __init__(self) -> None:
        self._before = read_modes()
        self._old_precision = read_old_precision()
        self._kernel_modes = kernel_modes(cuda=torch.cuda.is_available())
        self._getters = tuple(mode.get for mode in self._kernel_modes)
        self._for_kernels = read_modes(self._getters)

    def check_operator(self) -> None:
        """Refuse an operator that is to run under other settings than the step began with."""
        now = read_modes(self._getters)
        if now == self._for_kernels:
            return
        for mode, before, value in zip(self._kernel_modes, self._for_kernels, now, strict=True):
            if not same_mode(before, value):
                raise UnsupportedError(
                    f"the step sets {mode.name} to {value} (it was {before}), and its operators would be replayed "
                    "under what is set at the time.",
                    fix="set it before the step and leave it.",
                    location=user_location(),
                ).seen_by(Effect(lambda capture, get=mode.get: get(), same_mode))  # type: ignore[misc]

    def refuse_left_changed(self) -> None:
        """Refuse a step that ends under other settings than it began with."""
        for mode, before, now in zip(MODES, self._before, read_modes(), strict=True):
            if not same_mode(before, now) and not mode.set_by_torch:
                raise SideEffectError(
                    f"the step leaves {mode.name} at {now} (it was {before}), which a replay would not repeat.",
                    fix="set it outside of the step, or set it back at the end.",
                ).seen_by(Effect(lambda capture, get=mode.get: get(), same_mode))  # type: ignore[misc]

    def restore(self) -> None:
        """Restore what the step, or an exception in it, left changed."""
        set_modes(self._before, self._old_precision)
