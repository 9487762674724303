"""Find the node that is wrong: make a failing graph small, compare two versions, search the way of a step."""

from wholestep.debug.bisect import bisect
from wholestep.debug.check.findings import Finding, Status
from wholestep.debug.check.location import FirstDifference
from wholestep.debug.check.report import CheckReport, CheckRow
from wholestep.debug.compare import Comparison, Difference, compare
from wholestep.debug.found import Found
from wholestep.debug.minifier.functorch_minifier import minifier
from wholestep.debug.minifier.minify import Minified, minify

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
