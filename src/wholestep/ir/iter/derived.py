"""The graphs of other iterations, made from the main one.

setup      the first iteration: nothing is pending, what moved is left out
cleanup    the last iteration: what is pending first, and at the end what would have been left for the next one
single     the only iteration: the graph as if nothing had moved
running    main or cleanup, with nodes that say which moves are done: what is done must not be done again
flush      only what one move left pending: takes state and carried values, needs nothing of the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from wholestep.ir.iter.graph import IterGraph, copy_nodes, find_output
from wholestep.ir.iter.moves import Move


def setup_graph(main: IterGraph) -> fx.Graph:
    """The graph of a first iteration; its output is that of the main graph."""
    return _without(main, set(main.cross_iter_inputs) | _moved(main))


def cleanup_graph(main: IterGraph) -> fx.Graph:
    """The graph of a last iteration; its output is the user's result alone."""
    return _completed(main, set())


def single_graph(main: IterGraph) -> fx.Graph:
    """The graph of an iteration that is the first and the last one."""
    return _completed(main, set(main.cross_iter_inputs) | _moved(main))


def running_graph(version: fx.Graph, main: IterGraph, ran: Callable[[int], None]) -> fx.Graph:
    """A copy of the main or the cleanup graph that calls `ran` with the number of each move that is done."""
    last = {move.nodes[-1].name: number for number, move in enumerate(main.moves)}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in version.nodes:
        copy_nodes([node], graph, env)
        if node.name in last:
            graph.call_function(ran, (last[node.name],))
    return graph


def flush_graph(move: Move, results: Iterable[fx.Node] = ()) -> fx.Graph:
    """What one move left pending. Inputs: the move's `state`, then what it is `given`; returns some of its nodes."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = [*move.state, *move.given]
    moved = set(move.nodes)
    constants = dict.fromkeys(n for node in move.nodes for n in node.all_input_nodes if n not in moved)
    copy_nodes([*inputs, *(n for n in constants if n.op == "get_attr"), *move.nodes], graph, env)
    graph.output(tuple(env[node] for node in results))
    return graph


def _moved(main: IterGraph) -> set[fx.Node]:
    return {node for move in main.moves for node in move.nodes}


def _without(main: IterGraph, left_out: set[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    copy_nodes((node for node in main.nodes if node not in left_out), graph, {})
    return graph


def _completed(main: IterGraph, left_out: set[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    output = find_output(main)
    copy_nodes((node for node in main.nodes if node not in left_out and node is not output), graph, env)
    own = dict(env)
    for cross, value in zip(main.cross_iter_inputs, main.cross_iter_values, strict=True):
        own[cross] = env[value]
    for move in main.moves:
        copy_nodes(move.nodes, graph, own)
    result = main.user_result
    if main.late_results:
        result = tuple(main.late_results.get(i, value) for i, value in enumerate(result))
    made = graph.output(fx.map_arg(result, lambda n: own[n]))
    made.meta = dict(output.meta)
    return graph
