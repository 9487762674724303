"""Coins that Inductor throws by eager's own kernel, in a result of their own.

    graph     bernoulli.p(like, p)
    region    wholestep.bernoulli(like, p)      the same kernel, which Inductor only calls

Inductor's own way draws into memory that a fused kernel made, and its scheduler may put readers of the draw into that
same kernel, before the draw (seen on torch 2.13: Bert with dropout and a mask became nan).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_NAME = "wholestep::bernoulli"

torch.library.define(_NAME, "(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _bernoulli(like: Tensor, p: float) -> Tensor:
    drawn: Tensor = torch.ops.aten.bernoulli.p(like, p)
    return drawn


torch.library.impl(_NAME, "CompositeExplicitAutograd", _bernoulli)
torch.library.register_fake(_NAME, _bernoulli)


def throw_opaque_coins(gm: fx.GraphModule) -> None:
    """Let the coins of a graph be thrown by the operator that Inductor only calls."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        node.target = torch.ops.wholestep.bernoulli.default
    gm.recompile()
