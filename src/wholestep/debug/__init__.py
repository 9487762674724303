"""Find the node that is wrong: minimise a failing graph, compare two versions, bisect the stages of a step."""

from wholestep.debug.bisect import Found, bisect
from wholestep.debug.check.report import CheckReport, CheckRow, Finding, FirstDifference, Status
from wholestep.debug.compare import Comparison, Difference, compare
from wholestep.debug.minifier.minify import Minified, minifier, minify

__all__ = [
    "CheckReport",
    "CheckRow",
    "Comparison",
    "Difference",
    "Finding",
    "FirstDifference",
    "Found",
    "Minified",
    "Status",
    "bisect",
    "compare",
    "minifier",
    "minify",
]
