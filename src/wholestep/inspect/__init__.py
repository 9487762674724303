"""Show a person what happened to a step: drawings of its graph."""

from wholestep.inspect.drawing import draw

__all__ = ["draw"]
