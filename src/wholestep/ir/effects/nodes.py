"""What running one node does besides computing its value: what it writes, aliases, draws and communicates.

Operators are judged by their schema, Python functions and methods by name, modules by what is inside of them.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from wholestep.ir.call_arguments import argument, argument_at, nodes_in, operator_of
from wholestep.ir.effects.targets import (
    SOMETIMES_VIEWS,
    aliased_by_python,
    drawn_by_python,
    is_arithmetic,
    is_collective,
    is_custom_operator,
    is_point_to_point,
    is_unsafe_split,
    is_wait,
    may_draw,
    may_write,
    moves_elements,
    only_checks,
    reads_layout_only,
    shared_positions,
    write_condition,
    writes_by_name,
    written_by_python,
    written_positions,
)
from wholestep.ir.groups import group_of
from wholestep.torch_private.fx_graphs import ASSERTIONS
from wholestep.torch_private.operators import OpOverload, bound_argument, may_copy, plain_name, shares_storage

RANDOM, COLLECTIVE, EFFECT = "random", "collective", "effect"
"""Kinds of effects that keep their order among themselves."""

_DROPOUTS = frozenset({"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})
"""Return their argument where they draw nothing; their schemas do not say it."""

_FACTS = frozenset("shape dtype device ndim is_cuda requires_grad T mT".split())
"""Attributes of a tensor that tell something else than its contents."""


def writes(node: fx.Node) -> bool:
    """Whether running the node changes the contents of one of its arguments."""
    target = node.target
    if isinstance(target, OpOverload):
        return bool(written_positions(target)) and _condition_holds(node, target)
    if node.op == "call_module":
        return module_writes(submodule_of(node))
    if node.op not in ("call_function", "call_method") or is_arithmetic(target):
        return False
    return writes_by_name(node) or bool(written_by_python(node))


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose contents running the node changes, in the order of the arguments."""
    target = node.target
    if isinstance(target, OpOverload):
        positions = written_positions(target)
        if not positions or not _condition_holds(node, target):
            return []
        return [each for position in positions for each in nodes_in(argument_at(node, position))]
    if node.op in ("call_function", "call_method"):
        return written_by_python(node)
    return list(node.all_input_nodes) if writes(node) else []


def _condition_holds(node: fx.Node, op: OpOverload) -> bool:
    """Whether an operator that writes under a condition does: the flag is set, and there is something to write."""
    condition = write_condition(op)
    if not condition:
        return True
    return bool(argument(node, condition)) and any(argument_at(node, i) is not None for i in written_positions(op))


def submodule_of(node: fx.Node) -> nn.Module | None:
    """The module that a `call_module` or `get_attr` node names, if its graph is a module's and has it."""
    value: Any = node.graph.owning_module
    for atom in str(node.target).split("."):
        value = getattr(value, atom, None)
    return value if isinstance(value, nn.Module) else None


def module_writes(module: nn.Module | None) -> bool:
    """Whether calling a module may change its arguments: a module inside of it works in place, or a graph writes."""
    for part in module.modules() if module is not None else ():
        if getattr(part, "inplace", False) is True:
            return True
        if isinstance(part, fx.GraphModule) and any(map(writes, part.graph.nodes)):
            return True
    return False


def shared_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result of an operator shares by its schema: views, elements of lists, tensors that
    it writes and returns. Functions that are no operators share nothing: `aliased_inputs` knows them."""
    target = node.target
    if target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(target, OpOverload):
        return []
    found: list[fx.Node] = []
    for position in shared_positions(target):
        value = bound_argument(target, position, node.args, node.kwargs)
        if isinstance(value, fx.Node):
            found.append(value)
        else:
            found += nodes_in(value)
    return found


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result may share, of nodes of every kind: more than `shared_inputs` says.

    Unknown functions and modules may return any argument. `dropout` that draws nothing returns its argument, and
    `einsum` one that there is nothing to compute of.
    """
    target = node.target
    if isinstance(target, OpOverload):
        if plain_name(target) in SOMETIMES_VIEWS:
            return node.all_input_nodes
        if plain_name(target) in _DROPOUTS:
            return [] if draws(node) else node.all_input_nodes[:1]
        return node.all_input_nodes[:1] if is_unsafe_split(target) else shared_inputs(node)
    if target is operator.getitem:
        return shared_inputs(node)
    if node.op in ("call_function", "call_method"):
        return aliased_by_python(node)
    return list(node.all_input_nodes) if node.op == "call_module" else []


def stored_in(node: fx.Node) -> list[fx.Node]:
    """The inputs whose storage the result keeps alive. Where an operator may copy, the recorded values decide.

    Waiting gives the memory that the collective has filled, although the schema promises a new tensor."""
    if node.op != "call_function":
        return []
    if is_unsafe_split(node.target) or is_wait(node.target):
        return node.all_input_nodes[:1]
    shared = shared_inputs(node)
    if shared and isinstance(node.target, OpOverload) and may_copy(node.target):
        return [source for source in shared if shares_storage(node.meta.get("val"), source.meta.get("val"))]
    return shared


def is_new_element(node: fx.Node) -> bool:
    """Whether a node takes one of several new tensors that an operator made: it shares memory with no other element."""
    source: Any = node
    while isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    if source is node or not isinstance(source, fx.Node):
        return False
    return not shared_inputs(source) and not writes(source)


def reads_contents(node: fx.Node) -> bool:
    """Whether a node reads what its inputs hold: not if it takes an element by a constant, a view or a size."""
    target = node.target
    if target is operator.getitem:
        return len(node.all_input_nodes) > 1
    if target is getattr:
        return node.args[1] not in _FACTS
    return not reads_layout_only(target)


def keeps_elements(node: fx.Node) -> bool:
    """Whether a result holds only elements of one input, moved, cast or padded: nothing is computed, nothing drawn."""
    if not isinstance(node.target, OpOverload) or writes(node):
        return False
    return moves_elements(node.target) or len(shared_inputs(node)) == 1


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers: not in eval mode, and attention and RNNs not without dropout."""
    op = operator_of(node)
    if op is None:
        return node.op in ("call_function", "call_method") and drawn_by_python(node)
    if not may_draw(op):
        return False
    if argument(node, "train") is False or argument(node, "training") is False:
        return False
    return not any(_is_zero(argument(node, name)) for name in ("dropout_p", "dropout"))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def calls_custom_operator(node: fx.Node) -> bool:
    """Whether a node runs the kernel of a custom operator, perhaps on copies."""
    return is_custom_operator(operator_of(node))


def communicates(node: fx.Node) -> bool:
    """Whether a node starts a collective: all ranks of its group must come to it in the same order."""
    return group_of(node) is not None and not is_point_to_point(node.target)


def is_needed(node: fx.Node) -> bool:
    """Whether dead-code elimination must leave a node: effects, random draws, collectives that are waited for."""
    if node.op in ("placeholder", "output"):
        return True
    if may_draw(node.target) or calls_custom_operator(node) or node.is_impure():
        return True
    return not isinstance(node.target, OpOverload) and writes(node)


def order_kind(node: fx.Node) -> str:
    """The kind of effects with which a node keeps its order (RANDOM, COLLECTIVE, EFFECT); "" if it has none.

    Writes are ordered by the memory that they go to, modules by what is inside of them (`GraphEffects`).
    """
    op = operator_of(node)
    if op is not None and (is_collective(op) or communicates(node)):
        return COLLECTIVE
    if draws(node):
        return RANDOM
    if may_write(node.target) or may_draw(op):
        return ""
    if isinstance(node.target, OpOverload):
        return EFFECT if node.is_impure() and not is_wait(node.target) and not only_checks(node.target) else ""
    if node.op != "call_function" or written_by_python(node):
        return ""
    is_effect = node.target is print or (node.is_impure() and node.target not in ASSERTIONS)
    return EFFECT if is_effect else ""
