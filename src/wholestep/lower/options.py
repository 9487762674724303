"""`LowerOptions`: how regions are formed and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from wholestep.errors import OptionError, did_you_mean, invalid_value
from wholestep.lower.regions import MIN_ATEN_OPS
from wholestep.torch_private.inductor import inductor_settings, unknown_inductor_settings


@dataclass(frozen=True)
class LowerOptions:
    """Checked when they are given."""

    min_aten_ops: int = MIN_ATEN_OPS
    """The smallest region, in operators: fewer are not worth a compiled call."""
    strict: bool = False
    """Raise if a region does not compile, instead of running it operator by operator with a warning."""
    remat: bool = True
    """Recompute in the backward what is cheaper to recompute than to save, as torch.compile does."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings for all regions (names of `torch._inductor.config`)."""
    region_config: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Settings for single regions, by number."""
    exact: bool = False
    """Bitwise equal to eager: regions have only operators that Inductor computes so."""
    repeat: str = "auto"
    """Compile what is repeated in a region (layers, their backward, their updates) once: "auto" where the compile time
    saved is worth the fusion lost, "share" wherever there is something, "inline" never."""
    shed: int = 0
    """Bytes to save fewer for the backward than `remat` does, by recomputing pointwise values as well. Not together
    with a memory budget, which chooses this itself."""

    @classmethod
    def of(cls, given: Any, name: str) -> LowerOptions:
        """Options, or a dict of them. `name`: what the user calls the argument."""
        if isinstance(given, LowerOptions):
            return given
        known = sorted(each.name for each in fields(cls))
        fix = f"use a dict with some of {', '.join(known)}."
        if given is not None and not isinstance(given, Mapping):
            raise invalid_value(name, given, fix)
        for key in given or {}:
            if key not in known:
                fix += ' Settings of Inductor go to "config": {"config": {"max_autotune": True}}.'
                raise OptionError(f"{name}= has no option {key!r}.", fix=did_you_mean(str(key), known, fix))
        return cls(**(given or {}))

    def with_eagers_random_numbers(self) -> LowerOptions:
        """Random ops of regions use eager's generators (on a GPU Inductor has its own), unless the user set
        otherwise."""
        return replace(self, config={"fallback_random": True, **self.config})

    def __post_init__(self) -> None:
        if type(self.min_aten_ops) is not int or self.min_aten_ops < 0:
            raise invalid_value("min_aten_ops", self.min_aten_ops, "use an integer, 0 or more.")
        if type(self.shed) is not int or self.shed < 0:
            raise invalid_value("shed", self.shed, "use a number of bytes, 0 or more.")
        if self.repeat not in ("auto", "share", "inline"):
            raise invalid_value("repeat", self.repeat, 'use "auto", "share" or "inline".')
        for name in ("strict", "remat", "exact"):
            if not isinstance(getattr(self, name), bool):
                raise invalid_value(name, getattr(self, name), "use True or False.")
        if self.shed and not self.remat:
            raise OptionError(
                f"shed={self.shed} is given together with remat=False.",
                fix="leave out one: `shed` goes further than `remat`.",
            )
        _check_settings("config", self.config)
        if not isinstance(self.region_config, Mapping):
            raise invalid_value("region_config", self.region_config, 'use {0: {"max_autotune": True}}.')
        for number, settings in self.region_config.items():
            if type(number) is not int or number < 0:
                raise OptionError(
                    f"region_config has the key {number!r}, which is not the number of a region.",
                    fix="use the numbers of regions: 0, 1, ...",
                )
            _check_settings(f"region_config[{number}]", settings)


def _check_settings(name: str, settings: Any) -> None:
    if not isinstance(settings, Mapping):
        raise invalid_value(name, settings, 'use a dict of Inductor settings: {"max_autotune": True}.')
    unknown = unknown_inductor_settings(settings)
    if unknown:
        otherwise = 'use names of torch._inductor.config, such as "max_autotune" or "cpp.simdlen".'
        raise OptionError(
            f"{name} has {', '.join(map(repr, unknown))}, which Inductor does not know.",
            fix=did_you_mean(str(unknown[0]), inductor_settings(), otherwise),
        )
