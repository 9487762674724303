"""Say where a policy does nothing: a pattern that names nothing, a wish that cannot be granted."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from difflib import get_close_matches

from torch import fx

from wholestep.errors import MemoryPolicyWarning
from wholestep.ir.meta import node_meta
from wholestep.remat.outline import Outline
from wholestep.remat.policy import Rule
from wholestep.torch_private.operators import OpOverload

_FAR = 0.4


def check_policy(outline: Outline) -> None:
    """Warn about what a policy says in vain. A graph without a backward has nothing to decide."""
    if not any(outline.needed):
        return
    forward = [node for i, node in enumerate(outline.nodes) if outline.forward[i]]
    for rule in outline.policy.rules:
        if rule.is_pattern and not any(map(rule.fits, forward)):
            warnings.warn(MemoryPolicyWarning(_names_nothing(rule, forward)), stacklevel=2)
    for shown, refused in _refused(outline):
        node = outline.nodes[refused[0]]
        warnings.warn(
            MemoryPolicyWarning(
                f'policy= {shown} says "recompute", which is done nowhere: {node.name} ({node.target}) and '
                f"{len(refused) - 1} other nodes would have another result or effect the second time (random numbers, "
                "writes, sizes that depend on data, calls that cannot be looked into)."
            ),
            stacklevel=2,
        )


def _names_nothing(rule: Rule, forward: list[fx.Node]) -> str:
    near = get_close_matches(rule.shown.strip("'\""), sorted(_known(forward)), 3, _FAR)
    hint = f" Near to it: {', '.join(map(repr, near))}." if near else ""
    return f"policy= {rule.shown} names no module and no operator of the forward.{hint}"


def _known(forward: Iterable[fx.Node]) -> set[str]:
    """Module paths, with those above, and operators."""
    found: set[str] = set()
    for node in forward:
        parts = node_meta(node).module_path.split(".")
        found.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        if isinstance(node.target, OpOverload):
            found.add(str(node.target).rsplit(".", 1)[0])
    return found - {""}


def _refused(outline: Outline) -> Iterable[tuple[str, list[int]]]:
    """Rules (or the function) whose every wish to compute again is refused, with the nodes."""
    wishes: dict[str, list[int]] = {}
    for i, word in outline.asked.items():
        if word == "recompute":
            rule = outline.policy.rule_for(outline.nodes[i])
            wishes.setdefault("function" if rule is None else rule.shown, []).append(i)
    for shown, places in wishes.items():
        real = [i for i in places if not (outline.is_view(i) and not outline.is_element(i))] or places
        if outline.never.issuperset(real):
            yield shown, real
