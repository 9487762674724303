"""What the user forces to be kept or to be computed again.

policy={"model.blocks.*.mlp": "recompute", torch.ops.aten.mm: "save", "aten.addmm.default": "save"}
policy=lambda node: "save" if node.target is torch.ops.aten.mm.default else None
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from wholestep._torch_compat import OpOverload, OpOverloadPacket, packet_of
from wholestep.errors import OptionError
from wholestep.ir.meta import node_meta

Policy = Callable[[fx.Node], str | None]
_WORDS = ("save", "recompute")
_FIX = 'use {"model.blocks.*": "recompute", torch.ops.aten.mm: "save"}, or a function of a node.'


def policy_of(given: Any) -> Policy:
    """The policy that a user's option means; the last rule that fits a node counts."""
    if given is None:
        return lambda node: None
    if isinstance(given, Mapping):
        rules = [(_rule(key), _word(word)) for key, word in given.items()]
        return lambda node: next((word for fits, word in reversed(rules) if fits(node)), None)
    if callable(given):
        return lambda node: _answer(given(node))
    raise OptionError(f"policy={given!r}", fix=_FIX)


def _word(word: Any) -> str:
    if word not in _WORDS:
        raise OptionError(f"policy says {word!r}.", fix='use "save" or "recompute".')
    return str(word)


def _answer(word: Any) -> str | None:
    return None if word is None else _word(word)


def _rule(key: Any) -> Callable[[fx.Node], bool]:
    if isinstance(key, OpOverload):
        return lambda node: node.target is key
    if isinstance(key, OpOverloadPacket):
        return lambda node: isinstance(node.target, OpOverload) and packet_of(node.target) is key
    if isinstance(key, str) and key:
        return lambda node: _names(node, key)
    raise OptionError(f"policy has {key!r}.", fix=_FIX)


def _names(node: fx.Node, pattern: str) -> bool:
    path = node_meta(node).module_path
    if fnmatchcase(path, pattern) or fnmatchcase(path, pattern + ".*"):
        return True
    target = str(node.target) if isinstance(node.target, OpOverload) else ""
    return bool(target) and (fnmatchcase(target, pattern) or target.rsplit(".", 1)[0] == pattern)
