"""What is different in two graphs, and what causes it."""

from wholestep.inspect.differences.compare_graphs import diff
from wholestep.inspect.differences.graph_diff import ChangeCause, GraphChange, GraphCost, GraphDiff

__all__ = ["ChangeCause", "GraphChange", "GraphCost", "GraphDiff", "diff"]
