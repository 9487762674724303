"""`torch.fx.passes.infra.partitioner`: the class and its list of partitions, on `partition_by_support`.

    partitioner = CapabilityBasedPartitioner(gm, MySupport(), allows_single_node_partition=True)
    partitions = partitioner.propose_partitions()      the last of the graph first, as torch lists them
    fused = partitioner.fuse_partitions(partitions)

There are never more partitions than torch finds, and random draws, writes and collectives keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx
from torch.fx.passes.operator_support import OperatorSupportBase

from wholestep.compat import forwarded_names
from wholestep.partition.by_support import fuse_by_partitions as fuse_by_partitions
from wholestep.partition.by_support import partition_by_support
from wholestep.torch_private.fx_graphs import qualified_name

_NOT_COMPUTE = frozenset({"torch.ops.aten.view", "_operator.getitem"})


class ProposedPartition:
    """Nodes that are to run together: `Partition` of torch's module. It may be edited before it is fused."""

    def __init__(
        self,
        id: int | None = None,
        nodes: Iterable[fx.Node] | None = None,
        node_orders: Iterable[int] | None = None,
    ) -> None:
        self.id = id
        found = list(nodes or ())
        orders: list[int | None] = [None] * len(found) if node_orders is None else list(node_orders)
        if len(orders) != len(found):
            raise AssertionError("nodes and node_orders must have the same length")
        self.nodes: dict[fx.Node, int | None] = dict(zip(found, orders, strict=True))

    def add_node(self, node: fx.Node, node_order: int | None = None) -> None:
        """Put a node into the partition."""
        self.nodes[node] = node_order

    def remove_node(self, node: fx.Node) -> None:
        """Take a node out of the partition."""
        del self.nodes[node]

    def size(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    def __repr__(self) -> str:
        return str(self.nodes)


Partition = ProposedPartition


class CapabilityBasedPartitioner:
    """Gathers the nodes that a backend supports; see `wholestep.partition.partition_by_support`."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        self.graph_module = graph_module
        self.operator_support = operator_support
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = list(non_compute_ops or ())
        self.allowed_single_node_partition_ops = list(allowed_single_node_partition_ops or ())
        self.skip_horizontal_fusion = skip_horizontal_fusion

    def propose_partitions(self) -> list[ProposedPartition]:
        """The partitions, the last of the graph first; those with less than two nodes that compute are left out."""
        modules = dict(self.graph_module.named_modules())
        found = partition_by_support(
            self.graph_module,
            lambda node: bool(self.operator_support.is_node_supported(modules, node)),
            skip_horizontal_fusion=self.skip_horizontal_fusion,
        )
        order = {node: i for i, node in enumerate(reversed(self.graph_module.graph.nodes))}
        lists = sorted((partition.nodes for partition in found), key=lambda nodes: min(map(order.__getitem__, nodes)))
        proposed = [ProposedPartition(i, nodes, map(order.__getitem__, nodes)) for i, nodes in enumerate(lists)]
        return [each for each in proposed if self.allows_single_node_partition or self._computes_enough(each)]

    def _computes_enough(self, partition: ProposedPartition) -> bool:
        names = [qualified_name(node.target) for node in partition.nodes if node.op == "call_function"]
        free = _NOT_COMPUTE.union(self.non_compute_ops)
        alone = self.allowed_single_node_partition_ops
        return sum((name not in free) + (name in alone) for name in names) > 1

    def fuse_partitions(self, partitions: list[ProposedPartition], prefix: str = "fused_") -> fx.GraphModule:
        """Put each partition into a submodule, `prefix` and its place in the list."""
        return fuse_by_partitions(self.graph_module, [list(partition.nodes) for partition in partitions], prefix)

    def remove_bookend_non_compute_ops(self, partitions: list[ProposedPartition]) -> None:
        """Take nodes of `non_compute_ops` out of partitions where nothing that computes is before, or behind, them."""
        for partition in partitions:
            nodes = list(partition.nodes)
            begin = self._outer(nodes, backwards=False)
            end = self._outer(nodes[::-1], backwards=True)
            for node in begin | end:
                partition.remove_node(node)

    def _outer(self, nodes: Sequence[fx.Node], *, backwards: bool) -> set[fx.Node]:
        """Of nodes in graph order (or against it) those at the border that do not compute."""
        inside, found = set(nodes), set[fx.Node]()
        for node in nodes:
            near = node.users if backwards else node.all_input_nodes
            if self._is_free(node) and all(other not in inside or other in found for other in near):
                found.add(node)
        return found

    def _is_free(self, node: fx.Node) -> bool:
        return node.op == "call_function" and qualified_name(node.target) in self.non_compute_ops

    def partition_and_fuse(self, prefix: str = "fused_") -> fx.GraphModule:
        """`propose_partitions`, then `fuse_partitions`."""
        return self.fuse_partitions(self.propose_partitions(), prefix)


__getattr__, __dir__ = forwarded_names("torch.fx.passes.infra.partitioner", globals())
