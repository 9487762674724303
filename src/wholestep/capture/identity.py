"""Parameters that the user's code tells apart by identity: keys of dicts, members of sets, `id(p)`.

The step sees fakes. A dict or set that has the real tensors as keys would not have them, without an error where the
code asks `p in frozen` or `id(p) in skipped`. So while a step is traced

    {p: ..}, {p}        hold the fakes, in the same order
    id(p)               in the user's functions is that of the real tensor
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wholestep.capture.plain import assign_contents, copy_of

Undo = Callable[[], None]


def swap_keys(container: Any, stand_in: Callable[[Tensor], Tensor]) -> Undo | None:
    """Put fakes in the place of the tensors among the keys of a dict or set; what puts them back, if any changed."""
    if not isinstance(container, dict | set) or not any(isinstance(key, Tensor) for key in container):
        return None
    before = copy_of(container)
    keys = {id(key): stand_in(key) if isinstance(key, Tensor) else key for key in before}
    if all(keys[id(key)] is key for key in before):
        return None
    if isinstance(before, dict):
        assign_contents(container, {keys[id(key)]: value for key, value in before.items()})
    else:
        assign_contents(container, {keys[id(key)] for key in before})
    return lambda: assign_contents(container, before)


def swap_id(namespaces: list[dict[str, Any]], real: Callable[[Any], Any]) -> Undo:
    """Let `id` in the global namespaces of the user's functions be that of the real tensor; what takes it out."""

    def identity(value: Any, /) -> int:
        return builtins.id(real(value))

    for namespace in namespaces:
        namespace["id"] = identity

    def undo() -> None:
        for namespace in namespaces:
            del namespace["id"]

    return undo
