"""Show a person what happened to a step: a page, and drawings of its graph."""

from wholestep.inspect.drawing import draw
from wholestep.inspect.report_page.write import report

__all__ = ["draw", "report"]
