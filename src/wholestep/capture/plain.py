"""Plain values inside of containers that a step may read, in a form that can be compared at each call.

{"norm": 1.0, "mask": <tensor>, "model": <module>}   ->   (dict, (("norm", 1.0), ("mask", <id>), ("model", <id>)))
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
LARGE = 256
_DEPTH = 4


def skeleton(value: Any, depth: int = 0) -> Any:
    """A value that is equal for equal contents; objects count by identity, large containers by identity and length."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, list | tuple | dict):
        if len(value) > LARGE or depth > _DEPTH:
            return (id(value), len(value))
        if isinstance(value, dict):
            return (type(value), tuple((key, skeleton(item, depth + 1)) for key, item in value.items()))
        return (type(value), tuple(skeleton(item, depth + 1) for item in value))
    return id(value)
