"""The one typed key that wholestep keeps in `node.meta`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from wholestep.errors import Location
from wholestep.torch_private.operators import OpOverload

KEY = "wholestep"


@dataclass(frozen=True)
class NodeMeta:
    """What wholestep knows about a node beyond torch's `val`."""

    module_path: str = ""
    """The module whose forward (or whose backward) made this node, as the user would reach it."""
    location: Location | None = None
    phase: str = "forward"
    """forward, backward, update (work on gradients outside of an optimizer: clipping), optimizer or epilogue."""
    in_place: OpOverload | None = None
    """The mutating operator that eager ran here; re-inplacing may turn the node back into it."""
    recompute: bool = False
    """Made again in the backward: by activation checkpointing, or a parameter that is gathered a second time."""
    parameter: str = ""
    """The parameter that a collective gathers or whose gradient it reduces."""
    move: int = 0
    """Runs in the next iteration, with all nodes of the same number; 0: in its own (`passes.crossing`)."""
    generation: int = 0
    """Number of the forward or backward that a parameter was gathered for; gathers of two are apart on purpose."""
    begins: bool = False
    """A part of the step begins here: no compiled call reaches over it."""


def node_meta(node: fx.Node) -> NodeMeta:
    """The wholestep metadata of a node; an empty one if it has none."""
    found = node.meta.get(KEY)
    return found if isinstance(found, NodeMeta) else NodeMeta()


def set_node_meta(node: fx.Node, meta: NodeMeta) -> None:
    """Attach metadata to a node."""
    node.meta[KEY] = meta


def update_node_meta(node: fx.Node, **changes: object) -> None:
    """Change some fields of a node's metadata."""
    set_node_meta(node, replace(node_meta(node), **changes))  # type: ignore[arg-type]
