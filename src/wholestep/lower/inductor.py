"""Hand a region to Inductor. Regions that are the same (repeated layers) are compiled once per process; across
processes Inductor's own cache on disk knows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from wholestep.lower.compiled import Compiled
from wholestep.lower.retrace import Retraced
from wholestep.torch_private.inductor import compile_inductor, improve_joint
from wholestep.torch_private.symbolic_shapes import shape_env_of, symbols_in

log = logging.getLogger("wholestep.lower")


CompileRegion = Callable[[Retraced, Mapping[str, Any]], Compiled]


def compile_whole(retraced: Retraced, config: Mapping[str, Any]) -> Compiled:
    """A region as one call."""
    improved = improve_joint(retraced.gm, retraced.inputs, dict(config))
    return compile_inductor(improved, retraced.inputs, dict(config))


@dataclass
class RegionCache:
    """Compiled regions by what they compute."""

    _known: dict[Any, tuple[Compiled, list[Any]]] = field(default_factory=dict)
    """With the constants of each region: keys hold their ids, which nobody else may get."""
    hits: int = 0
    conditions_before: dict[Any, int] = field(default_factory=dict)
    """How many conditions on sizes there were before the first region with the same symbols was compiled."""

    def compile(self, retraced: Retraced, config: Mapping[str, Any], how: CompileRegion) -> Compiled:
        """The compiled form of a region, or of one that is the same and was compiled the same way."""
        settings = tuple(sorted((name, repr(value)) for name, value in config.items()))
        key = (how, *region_key(retraced), settings)
        found = self._known.get(key)
        if found is not None:
            self.hits += 1
            return found[0]
        constants = [_attribute(retraced.gm, str(n.target)) for n in retraced.gm.graph.find_nodes(op="get_attr")]
        compiled = how(retraced, config)
        self._known[key] = (compiled, constants)
        return compiled


def region_key(retraced: Retraced) -> tuple[Any, ...]:
    """Equal for regions that compute the same from tensors that look the same."""
    number: dict[fx.Node, int] = {}
    lines: list[Any] = [_looks(value) for value in retraced.inputs]
    # `s0` of another trace is another size, with other limits.
    lines.append(next((shape_env_of(value) for value in retraced.inputs if symbols_in(value)), None))
    for node in retraced.gm.graph.nodes:
        number[node] = len(number)
        if node.op == "get_attr":
            lines.append(("get_attr", id(_attribute(retraced.gm, str(node.target)))))
            continue
        target = node.target if node.op == "call_function" else node.op
        lines.append((target, _form(node.args, number), _form(dict(node.kwargs), number)))
    return tuple(lines)


def _looks(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return (type(value), str(value))
    return (str(value.dtype), str(value.device), tuple(map(str, value.shape)), tuple(map(str, value.stride())))


def _form(value: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_form(item, number) for item in value))
    if isinstance(value, dict):
        return tuple((key, _form(item, number)) for key, item in value.items())
    return (type(value).__name__, repr(value))


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name)
    return found
