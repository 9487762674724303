"""Parts of the grammar that fail at present, each with the reason. The aim is that there are none."""

from __future__ import annotations

SWITCHED_OFF: dict[str, str] = {
    "optimizer:own deepcopy": "a deep copy of a fake tensor stays in optimizer state",
    "feature:deep_copy_in_step": "the same, in the step itself",
    "feature:cached_function": "a fake tensor stays in functools.lru_cache",
    "home:function_attribute": "attributes of functions are read once",
    "home:array_item": "elements of NumPy arrays are read once",
    "home:buffer_item": "Python operations on a number from .item() of a buffer raise errors of Python",
}
