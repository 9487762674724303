"""The user's own say in what is lowered: predicates that are called with nodes, and believed only if they answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from wholestep.errors import LowerError, OptionError
from wholestep.ir.meta import node_meta

NodePredicate = Callable[[fx.Node], bool]
SubgraphPredicate = Callable[[list[fx.Node]], bool]


def any_node(node: fx.Node) -> bool:
    """The predicate that refuses nothing."""
    return True


def any_subgraph(nodes: list[fx.Node]) -> bool:
    """The predicate that refuses nothing."""
    return True


def check_callable(**given: Any) -> None:
    """Predicates and dumpers are functions."""
    for name, value in given.items():
        if not callable(value):
            raise OptionError(f"{name}={value!r} cannot be called.", fix="give a function, or leave it out.")


def accepts_node(predicate: NodePredicate, node: fx.Node) -> bool:
    """What a predicate says of a node."""
    return _ask(predicate, node, "node_predicate", node, f"for {node.name}")


def accepts_subgraph(predicate: SubgraphPredicate, nodes: list[fx.Node]) -> bool:
    """What a predicate says of the nodes of a region."""
    where = f"for the {len(nodes)} nodes from {nodes[0].name} to {nodes[-1].name}"
    return _ask(predicate, list(nodes), "subgraph_predicate", nodes[0], where)


def _ask(predicate: Callable[[Any], bool], argument: Any, name: str, node: fx.Node, where: str) -> bool:
    try:
        answer = predicate(argument)
    except Exception as error:
        raise LowerError(
            f"{name} raised {type(error).__name__} {where}: {error}",
            fix=f"let {name} return True or False for every node it is asked about.",
            node=node.format_node() or node.name,
            location=node_meta(node).location,
        ) from error
    if not isinstance(answer, bool):
        raise LowerError(
            f"{name} returned {answer!r} {where}.",
            fix=f"let {name} return True or False.",
            node=node.format_node() or node.name,
            location=node_meta(node).location,
        )
    return answer
