"""The process groups that a graph communicates in, and other names for them.

    rank 0 of a 2x2 mesh    all_gather_into_tensor(w, 2, '1')    groups  GroupSpec('1', axis='dp', size=2)
    rank 1                  all_gather_into_tensor(w, 2, '2')    groups  GroupSpec('2', axis='dp', size=2)

torch numbers the groups that a process knows, so equal programs name the same axis differently on different ranks. What
ranks compare is the number of a group in the order of first appearance, with its axis and size.
A group is whatever an operator's schema calls `group_name`, in every namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from wholestep.ir.call_arguments import argument, argument_position, find_argument, operator_of
from wholestep.ir.signature import GroupSpec
from wholestep.torch_private.distributed import process_group_size


def group_of(node: fx.Node) -> str | None:
    """The name of the process group that a node communicates in; None for nodes that do not communicate."""
    op = operator_of(node)
    if op is None or argument_position(op, "group_name") is None:
        return None
    found = argument(node, "group_name")
    return found if isinstance(found, str) else getattr(found, "group_name", None)


def group_size(node: fx.Node) -> int:
    """How many ranks a node communicates with, itself included; 1 if that is unknown."""
    name = group_of(node)
    stated = argument(node, "group_size") if name is not None else None
    if type(stated) is int:
        return stated
    if name is None:
        return 1
    pieces = argument(node, "output_split_sizes")  # of an all-to-all: one for each rank
    return process_group_size(name) or (len(pieces) if isinstance(pieces, list | tuple) else 1)


def group_table(gm: fx.GraphModule, axis_of: Mapping[str, str] | None = None) -> tuple[GroupSpec, ...]:
    """The groups of a graph in the order of first appearance; `axis_of` knows the mesh axes of some names."""
    sizes: dict[str, int] = {}
    for node in gm.graph.nodes:
        name = group_of(node)
        if name is not None:
            stated = argument(node, "group_size")
            sizes[name] = sizes.get(name, 0) or (stated if type(stated) is int else 0)
    axes = axis_of or {}
    return tuple(GroupSpec(name, axes.get(name, ""), process_group_size(name) or size) for name, size in sizes.items())


def rebind_groups(gm: fx.GraphModule, names: Mapping[str, str]) -> int:
    """Let a graph that was captured on another rank use this rank's names; returns how many nodes changed."""
    changed = 0
    for node in gm.graph.nodes:
        old = group_of(node)
        if old is not None and names.get(old, old) != old:
            where = find_argument(node, "group_name")
            if isinstance(where, int):
                node.update_arg(where, names[old])
            elif where is not None:
                node.update_kwarg(where, names[old])
            changed += 1
    if changed:
        gm.recompile()
    return changed


def renamed_groups(groups: Iterable[GroupSpec], names: Mapping[str, str]) -> tuple[GroupSpec, ...]:
    """The table that belongs to a graph after `rebind_groups`."""
    return tuple(GroupSpec(names.get(spec.name, spec.name), spec.axis, spec.size) for spec in groups)


class GroupNumbers:
    """Numbers the groups of one graph in the order of first use, which is the same on all ranks; with axis and size."""

    def __init__(self, groups: Iterable[GroupSpec] = ()) -> None:
        self._specs = {spec.name: spec for spec in groups}
        self._numbers: dict[str, int] = {}

    def write(self, name: str) -> list[int | str]:
        """Number, axis and size of a group."""
        spec = self.spec(name)
        return [self._numbers.setdefault(name, len(self._numbers)), spec.axis, spec.size]

    def spec(self, name: str) -> GroupSpec:
        """The entry of a group in the table."""
        return self._specs.get(name) or GroupSpec(name)


def replace_group(node: fx.Node, by: object) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a node with its group replaced; the node stays as it is."""
    args: list[Any] = list(node.args)
    kwargs: dict[str, Any] = dict(node.kwargs)
    where = find_argument(node, "group_name")
    if isinstance(where, int):
        args[where] = by
    elif where is not None:
        kwargs[where] = by
    return args, kwargs
