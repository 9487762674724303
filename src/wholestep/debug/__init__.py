"""Find the node that is wrong: make a failing graph small, compare two versions, search the way of a step."""

from wholestep.debug.minify import Minified, minify

__all__ = ["Minified", "minify"]
