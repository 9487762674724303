"""Torch's ways to all of a model or an optimizer that have no hooks: watched while something is pending.

    model.parameters(), buffers()     AveragedModel, parameters_to_vector, an average or a log that is kept by hand
    model.half(), model.to(...)       a pending update belongs to the tensors that were there before
    model.eval()                      whatever methods of the model read then
    copy.deepcopy(optimizer)          and pickling it

Four methods of `nn.Module` and `Optimizer` are replaced by ones that ask first and then call what was there. They are
put back before any compiled step or capture runs, and as soon as nothing is pending. A tensor that somebody already
holds, or reaches by an attribute, is read without any of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from wholestep.torch_private.modules_and_optimizers import WATCHED_METHODS

Ask = Callable[[Any], None]

_replaced: list[tuple[type, str, Any, Any]] = []
"""Class, name, what stood there and what stands there now: of the process, as the classes are."""


def watch(ask_module: Callable[[nn.Module], None], ask_optimizer: Callable[[Optimizer], None]) -> None:
    """From now on ask before somebody gets to parameters by one of these ways."""
    if _replaced:
        return
    for owner, name in WATCHED_METHODS:
        original = owner.__dict__[name]
        ask: Ask = ask_module if owner is nn.Module else ask_optimizer
        asking = _asks_first(original, ask, only_eval=name == "train")
        setattr(owner, name, asking)
        _replaced.append((owner, name, original, asking))


def unwatch() -> None:
    """Put back what was there, unless somebody else has put something in its place since."""
    for owner, name, original, asking in _replaced:
        if owner.__dict__.get(name) is asking:
            setattr(owner, name, original)
    _replaced.clear()


def _asks_first(original: Callable[..., Any], ask: Ask, only_eval: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def asking(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not only_eval or not (args[0] if args else kwargs.get("mode", True)):
            ask(self)
        return original(self, *args, **kwargs)

    return asking
