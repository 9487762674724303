"""Pytrees: torch's nested containers of tensors. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from torch.utils import _pytree as _pytree

pytree = _pytree
"""torch's Python pytree module, in whose registry users and Hugging Face register their containers. 2.11, 2.13."""


def pytree_children(tree: object) -> list[object] | None:
    """The children of a registered pytree node, one level down; None for a leaf. 2.11, 2.13."""
    if pytree.tree_is_leaf(tree):
        return None
    children, _ = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    return children
