"""Rows of "Python around the tensors" on numbers that change between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from docs.rows.page import row, same_function


class Config(dict[str, Any]):
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@row("a number in a list, deque or dict")
def numbers_in_containers() -> None:
    cfg: Any = Config(loss={"w": 1.0}, scale=1.0)
    weights = [1.0, 2]

    def step(x: Tensor) -> Tensor:
        return x * cfg.loss["w"] * cfg.scale + sum(weights)

    def batch(i: int) -> Tensor:
        cfg["loss"]["w"], cfg.scale, weights[1] = 0.5**i, 0.3 * i, i
        return torch.ones(3)

    same_function(step, batch, steps=6, graphs=2)
