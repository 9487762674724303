"""Flattening what is passed to and returned from a step.

torch's pytrees, plus mappings that wrap a dict without being registered (Hugging Face's BatchEncoding is a UserDict).
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from wholestep.torch_private.fx_graphs import pytree


@dataclass(frozen=True)
class Flat:
    """Leaves of a tree with their paths, and how to build it again."""

    leaves: list[Any]
    paths: list[str]
    rebuild: Callable[[list[Any]], Any]
    is_leaf: bool
    """The tree is a single leaf."""


def name_leaves(fn: Callable[..., Any], flat: Flat, positional: int) -> list[str]:
    """Paths that start with the name of the argument: `batch['x']` instead of `[0][2]['x']`."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for i in range(positional):
        if i < len(parameters) and parameters[i].kind is not inspect.Parameter.VAR_POSITIONAL:
            names.append(parameters[i].name)
        else:
            names.append(f"arg{i}")
    renamed: list[str] = []
    for path in flat.paths:
        if path.startswith("[0]["):
            index, _, rest = path[4:].partition("]")
            renamed.append(names[int(index)] + rest)
        else:
            key, _, rest = path[4:].partition("]")
            renamed.append(key.strip("'\"") + rest)
    return renamed


def same_objects(now: Collection[Any], before: list[Any]) -> bool:
    """Whether two collections hold the very same objects in the same order."""
    return len(now) == len(before) and all(map(is_, now, before))


def same_trees(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Whether `leaves_of` returned the same objects in the same structure."""
    return bool(before[1] == now[1]) and same_objects(before[0], now[0])


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The leaves that `flatten` gives, and a value that is equal for trees of the same structure; much cheaper."""
    leaves: list[Any] = []
    return leaves, _structure(tree, leaves)


_LEAF, _DICT, _SEQUENCE, _USER_DICT, _REGISTERED = range(5)
_form_of: dict[type, int] = {dict: _DICT, tuple: _SEQUENCE, list: _SEQUENCE, torch.Size: _LEAF, Tensor: _LEAF}


def _structure(tree: Any, leaves: list[Any]) -> Any:
    kind = type(tree)
    form = _form_of.get(kind)
    if form is None:
        form = _find_form(tree)
    if form == _LEAF:
        leaves.append(tree)
        return None
    if form == _DICT:
        return (dict, tuple(tree), [_structure(v, leaves) for v in tree.values()])
    if form == _SEQUENCE:
        return (kind, [_structure(v, leaves) for v in tree])
    if form == _USER_DICT:
        return (kind, _structure(tree.data, leaves))
    found, spec = pytree.tree_flatten(tree, is_leaf=_is_size)
    leaves.extend(found)
    return spec


def _find_form(tree: Any) -> int:
    kind = type(tree)
    named = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if isinstance(tree, UserDict):
        form = _USER_DICT
    elif named or kind in pytree.SUPPORTED_NODES:
        form = _REGISTERED
    else:
        if isinstance(tree, Tensor | torch.nn.Module | torch.optim.Optimizer):
            _form_of[kind] = _LEAF  # other classes may yet be registered as trees
        return _LEAF
    _form_of[kind] = form
    return form


class _Wrapped:
    """A UserDict on its way through a pytree: its data travels, the rest of the object is copied when rebuilt."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wrapped) and type(self.original) is type(other.original)

    def __hash__(self) -> int:
        return hash(type(self.original))


def flatten(tree: Any, root: str = "") -> Flat:
    """Leaves, paths such as `batch['x'][0]`, and the inverse."""
    wrapped: list[_Wrapped] = []
    plain = _unwrap(tree, wrapped)
    with_paths, spec = pytree.tree_flatten_with_path(plain, is_leaf=_is_size)
    leaves = [leaf for _, leaf in with_paths]
    paths = [root + pytree.keystr(path) for path, _ in with_paths]

    def rebuild(new: list[Any]) -> Any:
        return _rewrap(pytree.tree_unflatten(new, spec))

    plain_rebuild = lambda new: pytree.tree_unflatten(new, spec)  # noqa: E731
    return Flat(leaves, paths, rebuild if wrapped else plain_rebuild, spec.is_leaf())


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


class _Node(dict):  # type: ignore[type-arg]
    """The data of one wrapped mapping, marked with the object it came from."""

    wrapper: _Wrapped


def _flatten_node(node: _Node) -> tuple[list[Any], Any]:
    return list(node.values()), (node.wrapper, tuple(node.keys()))


def _flatten_node_with_keys(node: _Node) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.MappingKey(k), v) for k, v in node.items()], (node.wrapper, tuple(node.keys()))


def _unflatten_node(values: Any, context: Any) -> _Node:
    wrapper, keys = context
    node = _Node(zip(keys, values, strict=True))
    node.wrapper = wrapper
    return node


pytree.register_pytree_node(
    _Node, _flatten_node, _unflatten_node, flatten_with_keys_fn=_flatten_node_with_keys, serialized_type_name=None
)


def _unwrap(tree: Any, found: list[_Wrapped]) -> Any:
    if isinstance(tree, UserDict):
        wrapper = _Wrapped(tree)
        found.append(wrapper)
        node = _Node({k: _unwrap(v, found) for k, v in tree.data.items()})
        node.wrapper = wrapper
        return node
    if type(tree) is dict:
        return {k: _unwrap(v, found) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_unwrap(v, found) for v in tree)
    return tree


def _rewrap(tree: Any) -> Any:
    if isinstance(tree, _Node):
        rebuilt = copy.copy(tree.wrapper.original)
        rebuilt.data = {k: _rewrap(v) for k, v in tree.items()}
        return rebuilt
    if type(tree) is dict:
        return {k: _rewrap(v) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_rewrap(v) for v in tree)
    return tree
