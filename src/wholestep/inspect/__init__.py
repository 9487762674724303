"""Show a person what happened to a step: a page, tables, drawings of its graph, and what is different in two graphs."""

from wholestep.inspect.differences import ChangeCause, GraphChange, GraphCost, GraphDiff, diff
from wholestep.inspect.drawing import draw
from wholestep.inspect.memory_over_time import StepMemoryTimeline, memory_timeline
from wholestep.inspect.node_table import NodeRow, ShownNodes, show
from wholestep.inspect.report_page.write import report

__all__ = [
    "ChangeCause",
    "GraphChange",
    "GraphCost",
    "GraphDiff",
    "NodeRow",
    "ShownNodes",
    "StepMemoryTimeline",
    "diff",
    "draw",
    "memory_timeline",
    "report",
    "show",
]
