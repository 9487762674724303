"""Rewrite one operator at a time: a rule is an operator with a function that returns what replaces a node of it.

    @rewrite_rule(aten.t.default)
    def transposed_twice(node, self):                       the arguments of the operator, by their names in its schema
        return self.args[0] if calls(self, aten.t.default) else None            None: this node does not match

    apply_rules(gm.graph, [transposed_twice])               how many nodes were replaced

    before                           after
    a = t(w)                         y = mm(x, w)
    b = t(a)
    y = mm(x, b)

Arguments are found by name, whether they were passed by position or by keyword, and with the defaults of the schema. A
rule that builds nodes calls `node.graph.call_function`; they are inserted before the node, get its metadata (line,
module, phase; not `val`), and the replacement takes its name, so write-backs of a signature stay valid. The replacement
of a node with several results is a sequence of nodes. Nodes are visited once, in graph order: a rule sees the replaced
inputs of its node, and not the nodes that rules have built. Inputs that only replaced nodes used are erased.

Cost: the nodes of these operators. Whether a rewrite is right is for the rule to know, and for `verify` to check.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import fx

from wholestep.errors import OptionError, called
from wholestep.ir.call_arguments import argument
from wholestep.ir.effects import is_needed
from wholestep.ir.graph_walks import erase_unread
from wholestep.torch_private.operators import OpOverload, schema_of

Replacement = fx.Node | Sequence[fx.Node] | None


@dataclass(frozen=True)
class RewriteRule:
    """A function from a node of some operators, and some of its arguments, to what replaces it."""

    operators: tuple[OpOverload, ...]
    function: Callable[..., Replacement]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def __call__(self, node: fx.Node) -> Replacement:
        """What replaces a node; None if the rule does not match."""
        return self.function(node, *(argument(node, name) for name in self.arguments))


def rewrite_rule(*operators: OpOverload) -> Callable[[Callable[..., Replacement]], RewriteRule]:
    """Declare a rule for some operators. The function takes the node, then arguments by their names in the schema."""
    for each in operators:
        if not isinstance(each, OpOverload):
            raise OptionError(
                f"rewrite_rule takes operators, not {each!r}.", fix="name an overload: torch.ops.aten.mul.Tensor."
            )

    def declare(function: Callable[..., Replacement]) -> RewriteRule:
        _, *wanted = inspect.signature(function).parameters
        for each in operators:
            names = [known.name for known in schema_of(each).arguments]
            unknown = [name for name in wanted if name not in names]
            if unknown:
                raise OptionError(
                    f"the rule {function.__name__} takes {unknown[0]!r}, which is not an argument of {each}.",
                    fix=f"the arguments of {each} are {', '.join(names)}.",
                )
        return RewriteRule(operators, function, tuple(wanted))

    return declare


def calls(value: Any, *operators: OpOverload) -> TypeGuard[fx.Node]:
    """Whether a value is a node that calls one of some operators."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in operators


def apply_rules(graph: fx.Graph, rules: Iterable[RewriteRule]) -> int:
    """Replace every node that a rule matches, by the first rule that does; returns how many."""
    if not isinstance(graph, fx.Graph):
        raise OptionError(f"apply_rules got {called(graph)}.", fix="give an fx.Graph: gm.graph, or sg.gm.graph.")
    by_operator: dict[Any, list[RewriteRule]] = {}
    for rule in rules:
        for each in rule.operators:
            by_operator.setdefault(each, []).append(rule)
    sources: list[fx.Node] = []
    count = 0
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in by_operator]:
        for rule in by_operator[node.target]:
            before = node.prev
            with graph.inserting_before(node):
                found = rule(node)
            built = _between(before, node)
            if found is not None:
                sources += node.all_input_nodes
                replace_node(node, found, built)
                count += 1
                break
            for unused in reversed(built):  # built before the rule found out that it does not match
                graph.erase_node(unused)
    erase_unread(graph, sources, lambda node: not is_needed(node))
    return count


def replace_node(node: fx.Node, by: fx.Node | Sequence[fx.Node], built: Iterable[fx.Node] = ()) -> None:
    """Replace a node, or each `getitem` of a node with several results, and erase it.

    `built`: new nodes, which get the metadata of the node that they do not have; one that replaces it gets its name.
    """
    built = list(built)
    known = {key: value for key, value in node.meta.items() if key != "val"}
    for each in built:
        each.meta = {**known, **each.meta}
    if isinstance(by, fx.Node):
        _take_over(node, by, built)
        return
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.name} uses all results of {node.name}"
        index: Any = user.args[1]
        _take_over(user, by[index], built)
    node.graph.erase_node(node)


def _take_over(node: fx.Node, by: fx.Node, built: Sequence[fx.Node]) -> None:
    node.replace_all_uses_with(by)
    name = node.name
    node.graph.erase_node(node)
    if by in built:
        by.name = name


def _between(before: fx.Node, node: fx.Node) -> list[fx.Node]:
    """The nodes after `before` and before `node`."""
    found: list[fx.Node] = []
    each = before.next
    while each is not node:
        found.append(each)
        each = each.next
    return found
