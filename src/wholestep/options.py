"""Options of `ws.compile` as the user wrote them: plain data, frozen, checked as far as that needs no other package.

The docstring of `ws.compile` says what each of them means. `step.resolve` reads names of passes, budgets and plans.
The environment variables that wholestep reads, all of them, only set the default of an option:

    WHOLESTEP_LOWER       inductor (the default) or eager: `lower=` of `ws.compile`
    WHOLESTEP_PROGRESS    0 or 1 (the default): `progress=` of `ws.compile`
    WHOLESTEP_CACHE       0 (the default), 1 for the folder of the user, or a folder: `cache=` of `ws.compile`
    WHOLESTEP_CACHE_LIMIT how much that folder may hold: "2GiB" (the default)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wholestep.errors import OptionError, did_you_mean, invalid_value
from wholestep.ir.captured_step import AutomaticSizes
from wholestep.ir.captured_step import Dim as Dim
from wholestep.ir.step_graph import bytes_in

LOWER = "WHOLESTEP_LOWER"
PROGRESS = "WHOLESTEP_PROGRESS"
CACHE = "WHOLESTEP_CACHE"
CACHE_LIMIT = "WHOLESTEP_CACHE_LIMIT"
_LOWERINGS = ("inductor", "eager", "debug")
_OF_TORCH_COMPILE = {
    "backend": 'there is one graph of the whole step, and lower= says how it runs: lower="inductor" compiles it, '
    'lower="eager" runs it operator by operator. ws.lower.partial_lower compiles a part of a graph.',
    "fullgraph": "leave it out: a step is always captured as one graph, or refused with the line that prevents it.",
    "mode": 'what the modes of torch.compile choose are options here: "reduce-overhead" is cuda_graph=True, and '
    '"max-autotune" is lower_options={"config": {"max_autotune": True}}.',
    "options": 'settings of Inductor go to lower_options={"config": {...}}.',
    "disable": "call the function itself instead of ws.compile(function).",
    "recompile_limit": "write max_recompiles=.",
}
"""Arguments of `torch.compile`, and what to write here instead."""


def default_lower() -> str:
    """How steps run where `lower=` does not say."""
    return os.environ.get(LOWER, "") or "inductor"


def default_progress() -> bool:
    """Whether steps say what they compile where `progress=` does not say."""
    return os.environ.get(PROGRESS, "") not in ("0", "false", "no", "off")


def default_cache() -> str | bool:
    """Whether and where prepared graphs are stored, where `cache=` does not say."""
    found = os.environ.get(CACHE, "")
    return False if found in ("", "0", "false", "no", "off") else "auto" if found in ("1", "auto") else found


def cache_folder(given: str | bool | os.PathLike[str] | None) -> Path | None:
    """The folder of prepared graphs that `cache=` asks for; None for no cache."""
    chosen = default_cache() if given is None else given
    if chosen is False:
        return None
    if chosen is True or chosen == "auto":
        return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "wholestep"
    return Path(chosen)


def cache_limit() -> int:
    """How many bytes of prepared graphs a folder may hold."""
    return bytes_in(os.environ.get(CACHE_LIMIT, "") or "2GiB", CACHE_LIMIT, 'use a text such as "2GiB".')


@dataclass(frozen=True)
class Options:
    """How a step is captured, rewritten and run: the keywords of `ws.compile`."""

    lower: str = field(default_factory=default_lower)
    lower_options: Any = None
    cuda_graph: bool | str = "auto"
    memory_budget: Any = None
    policy: Any = None
    passes: Any = "auto"
    disable_passes: Sequence[str] = ()
    dump_passes: str | os.PathLike[str] | None = None
    parallel: Any = None
    dynamic: bool | Mapping[str, Mapping[int, Dim]] | AutomaticSizes | None = None
    verify: int = 1
    check_first: int = 0
    max_recompiles: int = 8
    hooks: str = "auto"
    assume: bool = False
    on_refusal: str = "raise"
    progress: bool | None = None
    cache: str | bool | os.PathLike[str] | None = None
    name: str = ""
    """What messages call this step; its function's name by default."""

    def __post_init__(self) -> None:
        if self.lower not in _LOWERINGS:
            raise invalid_value(
                "lower",
                self.lower,
                f'use "inductor", "eager" or "debug" (also in {LOWER}). For another compiler, ws.capture(train_step, '
                "...) returns the graph of the step; its gm is a plain torch.fx.GraphModule.",
            )
        if self.cuda_graph not in (True, False, "auto"):
            raise invalid_value("cuda_graph", self.cuda_graph, 'use True, False or "auto".')
        if self.policy is not None and self.memory_budget is None:
            raise OptionError(
                "policy= is given without memory_budget=.",
                fix="give a budget too; memory_budget=1.0 is the widest.",
            )
        if self.verify not in (0, 1, 2, 3):
            raise invalid_value("verify", self.verify, "use 0, 1, 2 or 3.")
        self._check_checking()
        if type(self.max_recompiles) is not int or self.max_recompiles < 0:
            raise invalid_value("max_recompiles", self.max_recompiles, "use a whole number, 0 or more.")
        if self.hooks not in ("auto", "refuse", "trace"):
            raise invalid_value("hooks", self.hooks, 'use "auto", "refuse" or "trace".')
        if type(self.assume) is not bool:
            raise invalid_value("assume", self.assume, "use True or False.")
        if self.assume and self.parallel is not None:
            raise OptionError(
                "assume=True cannot be used with parallel=: an assumption that fails on one rank would leave its state "
                "behind that of the others.",
                fix="take such branches out of the step: return the value, all-reduce it and decide outside.",
            )
        if self.on_refusal not in ("raise", "eager"):
            raise invalid_value("on_refusal", self.on_refusal, 'use "raise" or "eager".')
        if self.progress not in (True, False, None):
            raise invalid_value("progress", self.progress, f"use True, False or None (then {PROGRESS} decides).")
        if self.cache not in (True, False, None) and not isinstance(self.cache, str | os.PathLike):
            raise invalid_value("cache", self.cache, f'use "auto", False, a folder, or None (then {CACHE} decides).')
        if self.dump_passes is not None and not isinstance(self.dump_passes, str | os.PathLike):
            raise invalid_value("dump_passes", self.dump_passes, "use the path of a folder.")
        if not isinstance(self.name, str):
            raise invalid_value("name", self.name, "use a text: what messages call this step.")
        _check_dynamic(self.dynamic)

    def _check_checking(self) -> None:
        if type(self.check_first) is not int or self.check_first < 0:
            raise invalid_value("check_first", self.check_first, "use a whole number, 0 or more.")
        if self.check_first and self.parallel is not None:
            raise OptionError(
                "check_first= cannot be used with parallel=: the function in eager does not communicate, so it is no "
                "reference.",
                fix="check the step without the plan; ws.debug.compare(train_step, step, args) compares on all ranks.",
            )

    @classmethod
    def of(cls, **given: Any) -> Options:
        """Options from keyword arguments, `lower=None` among them; an unknown name gets the name that was meant."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise OptionError(f"ws.compile has no option {name!r}.", fix=_instead_of(name, known))
        if given.get("lower", "") is None:
            del given["lower"]
        return cls(**given)


def _instead_of(name: str, known: list[str]) -> str:
    """What to write instead of an option that does not exist."""
    if name in _OF_TORCH_COMPILE:
        return _OF_TORCH_COMPILE[name]
    return did_you_mean(name, known, f"the options are {', '.join(sorted(known))}.")


def _check_dynamic(dynamic: Any) -> None:
    if dynamic is None or isinstance(dynamic, bool | AutomaticSizes):
        return
    good = isinstance(dynamic, Mapping) and all(
        isinstance(path, str)
        and isinstance(dims, Mapping)
        and all(isinstance(d, int) and isinstance(dim, Dim) for d, dim in dims.items())
        for path, dims in dynamic.items()
    )
    if not good:
        raise invalid_value(
            "dynamic",
            dynamic,
            'use {"batch": {0: ws.Dim(min=1, max=64)}} (path, then dimension to range), True for the first dimension '
            "of every batch tensor, False for none, or None for those that are found to vary.",
        )
