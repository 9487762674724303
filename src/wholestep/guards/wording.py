"""How guards tell of values that changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wholestep.ir.user_objects.plain_values import PLAIN, same_plain
from wholestep.ir.user_objects.slots import ABSENT


def was_and_is(path: str, before: Any, now: Any) -> str:
    """That there is another value now."""
    return f"{path} was {_brief(before)} and is {_brief(now)}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value)[:80] if isinstance(value, PLAIN) or value is ABSENT else f"a {type(value).__name__}"


def is_other_number(now: Any, before: Any) -> bool:
    """Whether both are numbers of a type, and differ."""
    return type(now) is type(before) and type(now) in (int, float) and not same_plain(now, before)
