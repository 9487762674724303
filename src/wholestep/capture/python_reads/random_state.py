"""Random generators around a trace: it must not move them, and what it draws must be something the graph can replay."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch

from wholestep.capture.objects.discover import World
from wholestep.errors import RandomStateError
from wholestep.torch_private.guard_checks import cuda_is_initialized, generator_key


def default_generators() -> dict[int, tuple[torch.Generator, str]]:
    """torch's own generators by identity, with their names."""
    found = {generator_key(torch.default_generator): (torch.default_generator, "torch.default_generator")}
    if cuda_is_initialized():
        for i, generator in enumerate(torch.cuda.default_generators):
            found[generator_key(generator)] = (generator, f"torch.cuda.default_generators[{i}]")
    return found


class RandomState:
    """Generators as they were; a trace must not move them."""

    def __init__(self, world: World) -> None:
        self._generators = [g for g, _ in world.generators.values()]
        self._defaults = [(g, g.initial_seed(), g.get_state()) for g, _ in default_generators().values()]
        self._objects = [(o, path, _object_state(o)) for o, path in world.random_objects]
        self._states = [g.get_state() for g in self._generators]
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def check_untouched(self) -> None:
        if random.getstate() != self._python or not _same_numpy(self._numpy, _numpy_state()):
            raise RandomStateError(
                "the step draws from Python's or numpy's random generator; every replay would use the same numbers.",
                fix="draw with torch, or pass the random number as an argument.",
            )
        for obj, path, known in self._objects:
            if _object_state(obj)[0] != known[0]:
                raise RandomStateError(
                    f"the step draws from {path}; every replay would use the same numbers.",
                    fix="draw with torch, or pass the random number as an argument.",
                )
        moved = [g for g, s in zip(self._generators, self._states, strict=True) if not torch.equal(g.get_state(), s)]
        # Another thread may draw from a default generator meanwhile; only a new seed comes from the step.
        moved += [g for g, seed, _ in self._defaults if g.initial_seed() != seed]
        if moved:
            raise RandomStateError(
                f"the step seeds or moves {moved[0]} in a way that the graph does not record.",
                fix="seed outside of the step (torch.manual_seed inside of it is recorded).",
            )

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        for generator, seed, state in self._defaults:
            if generator.initial_seed() != seed:
                generator.set_state(state)
        for obj, _, known in self._objects:
            if _object_state(obj)[0] != known[0]:
                _set_object_state(obj, known)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _object_state(obj: Any) -> tuple[Any, Any]:
    """Something to compare, and something to put back."""
    if isinstance(obj, random.SystemRandom):
        return None, None  # draws from the system: refused where it does, nothing to put back
    if isinstance(obj, random.Random):
        return obj.getstate(), obj.getstate()
    return repr(obj.bit_generator.state), copy.deepcopy(obj.bit_generator.state)


def _set_object_state(obj: Any, state: Any) -> None:
    if isinstance(obj, random.Random):
        obj.setstate(state[1])
    else:
        obj.bit_generator.state = state[1]


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _same_numpy(before: Any, now: Any) -> bool:
    if before is None or now is None:
        return True
    return bool((before[1] == now[1]).all()) and before[2:] == now[2:]
