"""Show a person what happened to a step: a page, drawings of its graph, and what is different in two graphs."""

from wholestep.inspect.differences import ChangeCause, GraphChange, GraphCost, GraphDiff, diff
from wholestep.inspect.drawing import draw
from wholestep.inspect.report_page.write import report

__all__ = ["ChangeCause", "GraphChange", "GraphCost", "GraphDiff", "diff", "draw", "report"]
