"""From a model to stages: capture, cut, route, build modules."""
