"""What a user may ask of a memory budget: its size, and which values are saved or recomputed.

memory_budget=12_000_000_000, "12GiB", or a fraction
policy={"model.blocks.*.mlp": "recompute", torch.ops.aten.mm: "save", "aten.addmm.default": "save"}
policy=lambda node: "save" if node.target is torch.ops.aten.mm.default else None
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from torch import fx

from wholestep.errors import OptionError, invalid_value
from wholestep.ir.meta import node_meta
from wholestep.ir.step_graph import bytes_in
from wholestep.torch_private.operators import OpOverload, OpOverloadPacket, packet_of

_FIX = 'use bytes (12_000_000_000), a text ("12GiB", "800MB"), or a fraction from 0.0 to 1.0.'


@dataclass(frozen=True)
class Budget:
    """One of the two is set."""

    most: int | None = None
    """Bytes of peak memory."""
    fraction: float | None = None
    """0.0: the smallest peak that can be reached; 1.0: the peak without recomputation."""

    @classmethod
    def of(cls, given: Any) -> Budget | None:
        """Read what the user wrote; None stays None."""
        if given is None or isinstance(given, Budget):
            return given
        if isinstance(given, str):
            return cls(most=bytes_in(given, "memory_budget", _FIX))
        if isinstance(given, np.integer | np.floating):
            given = given.item()
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise invalid_value("memory_budget", given, _FIX)
        if isinstance(given, float) and 0.0 <= given <= 1.0:
            return cls(fraction=given)
        if not 1 < given < 2**63 or given != int(given):
            raise invalid_value("memory_budget", given, _FIX)
        return cls(most=int(given))


_WORDS = ("save", "recompute")
_POLICY_FIX = 'use {"model.blocks.*": "recompute", torch.ops.aten.mm: "save"}, or a function of a node.'


@dataclass(frozen=True)
class Rule:
    """One line of a policy."""

    shown: str
    fits: Callable[[fx.Node], bool]
    word: str
    is_pattern: bool = False
    """A string, which is expected to match something."""


class Policy:
    """Says of a node "save", "recompute", or None. The last rule that matches counts."""

    def __init__(self, rules: list[Rule], function: Callable[[fx.Node], Any] | None = None) -> None:
        self.rules = rules
        self._function = function

    @property
    def is_empty(self) -> bool:
        """True if there are no rules and no function."""
        return not self.rules and self._function is None

    def __call__(self, node: fx.Node) -> str | None:
        if self._function is not None:
            return _answer(self._function, node)
        rule = self.rule_for(node)
        return None if rule is None else rule.word

    def rule_for(self, node: fx.Node) -> Rule | None:
        """The rule that decides about a node."""
        return next((rule for rule in reversed(self.rules) if rule.fits(node)), None)


def policy_of(given: Any) -> Policy:
    """The policy that a user's option means."""
    if given is None:
        return Policy([])
    if isinstance(given, Mapping):
        return Policy([_rule(key, _word(word)) for key, word in given.items()])
    if callable(given):
        return Policy([], given)
    raise invalid_value("policy", given, _POLICY_FIX)


def _word(word: Any) -> str:
    if word not in _WORDS:
        raise OptionError(f"policy= decides {word!r} for some nodes.", fix='use "save" or "recompute".')
    return str(word)


def _answer(function: Callable[[fx.Node], Any], node: fx.Node) -> str | None:
    try:
        word = function(node)
    except Exception as error:
        raise OptionError(
            f"the function given as policy= raised {type(error).__name__}: {error}",
            node=f"{node.name} = {node.target}, in module {node_meta(node).module_path!r}",
            location=node_meta(node).location,
            fix='return "save", "recompute" or None for every node of the forward.',
        ) from error
    return None if word is None else _word(word)


def _rule(key: Any, word: str) -> Rule:
    if isinstance(key, OpOverload):
        return Rule(str(key), lambda node: node.target is key, word)
    if isinstance(key, OpOverloadPacket):
        return Rule(str(key), lambda node: isinstance(node.target, OpOverload) and packet_of(node.target) is key, word)
    if isinstance(key, str) and key:
        return Rule(repr(key), lambda node: _names(node, key), word, is_pattern=True)
    raise OptionError(f"policy= has the key {key!r}, which names no module or operator.", fix=_POLICY_FIX)


def _names(node: fx.Node, pattern: str) -> bool:
    path = node_meta(node).module_path
    if fnmatchcase(path, pattern) or fnmatchcase(path, pattern + ".*"):
        return True
    target = str(node.target) if isinstance(node.target, OpOverload) else ""
    return bool(target) and (fnmatchcase(target, pattern) or target.rsplit(".", 1)[0] == pattern)
