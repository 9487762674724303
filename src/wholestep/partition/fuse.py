"""Put each partition of supported nodes into a submodule of its own, in place.

    before                                      after
    a = x * 2;  b = sin(a)                      fused_0 = self.fused_0(x)
    c = report(b)                               c = report(fused_0)
    d = c + 1                                   fused_1 = self.fused_1(c)

A submodule takes what its nodes use from outside, in order of first use, and returns what others use: one value as it
is, several as a tuple that `getitem` nodes take apart. Cost: each node is moved once and copied once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from wholestep.errors import PartitionError
from wholestep.ir.meta import node_meta, set_node_meta
from wholestep.partition.by_support import SupportedPartitions
from wholestep.partition.graphs import is_body
from wholestep.torch_private.fx_graphs import lazy_graph_module, mark_impure


def fuse_partitions(gm: fx.GraphModule, partitions: SupportedPartitions, prefix: str = "fused_") -> fx.GraphModule:
    """Edit `gm` so that each partition is one `call_module` node, called `prefix` and a count; returns `gm`.

    Nodes come in the order of their groups, within a group in the order that they had.
    """
    taken = next((name for i in range(len(partitions)) if hasattr(gm, name := f"{prefix}{i}")), None)
    if taken is not None:
        raise PartitionError(f"the module has an attribute {taken} already.", fix="choose another prefix.")
    if any(node.graph is not gm.graph for part in partitions for node in part.nodes[:1]):
        raise PartitionError("the partitions are of another graph.", fix="partition this graph, and do not copy it.")
    _reorder(gm.graph, partitions)
    for count, partition in enumerate(partitions):
        _fuse(gm, partition.nodes, f"{prefix}{count}")
    gm.recompile()
    return gm


def _reorder(graph: fx.Graph, partitions: SupportedPartitions) -> None:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    output = graph.output_node()
    for node in sorted(nodes, key=partitions):  # stable: equal groups keep their order
        output.prepend(node)


def _fuse(gm: fx.GraphModule, nodes: Sequence[fx.Node], name: str) -> None:
    inside = set(nodes)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph, inputs = _subgraph(nodes, outputs)
    module = lazy_graph_module(gm, graph, name)
    module.train(gm.training)
    if not outputs:
        mark_impure(module)
    gm.add_submodule(name, module)
    with gm.graph.inserting_after(nodes[-1]):
        call = gm.graph.create_node("call_module", name, tuple(inputs), {}, name=name)
    set_node_meta(call, node_meta(nodes[-1]))
    if len(outputs) == 1:
        call.meta = dict(outputs[0].meta)
        outputs[0].replace_all_uses_with(call)
    else:
        if all("val" in node.meta for node in outputs):
            call.meta["val"] = tuple(node.meta["val"] for node in outputs)
        after = call
        for i, node in enumerate(outputs):
            with gm.graph.inserting_after(after):
                after = gm.graph.call_function(operator.getitem, (call, i))
            after.meta = dict(node.meta)
            node.replace_all_uses_with(after, delete_user_cb=lambda user: user not in inside)
    bodies = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if is_body(used))
    for node in reversed(nodes):
        gm.graph.erase_node(node)
    for body in bodies:
        if not body.users:
            gm.graph.erase_node(body)


def _subgraph(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of copies, and the nodes outside that its placeholders stand for. Bodies of `cond` and the like are got
    inside: no operator takes them as values."""
    inside = set(nodes)
    used = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside))
    bodies = [node for node in used if is_body(node)]
    inputs = [node for node in used if node not in bodies]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    for node in (*bodies, *nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = tuple(copies[node] for node in outputs)
    graph.output(results[0] if len(results) == 1 else results)
    return graph, inputs
