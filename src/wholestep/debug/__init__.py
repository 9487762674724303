"""Find the node that is wrong: make a failing graph small, compare two versions, search the way of a step."""

from wholestep.debug.bisect import bisect
from wholestep.debug.compare import Comparison, Difference, compare
from wholestep.debug.found import Found
from wholestep.debug.functorch_minifier import minifier
from wholestep.debug.minify import Minified, minify

__all__ = ["Comparison", "Difference", "Found", "Minified", "bisect", "compare", "minifier", "minify"]
