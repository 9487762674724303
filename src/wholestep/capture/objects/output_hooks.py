"""Hooks that a model of transformers adds to its own layers in its first forward with `output_hidden_states=True`.

    trace 1    the forward is about to add hooks: the trace ends, and they are added to the user's model
    trace 2    the hooks are there before the step begins, as in the second call of eager

They stay, as in eager, and do nothing in a forward that asks for no such output. A capture that fails removes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from types import ModuleType
from typing import Any

from torch import nn

from wholestep.capture.objects.called import EarlierTraces, TraceAgain
from wholestep.torch_private.modules_and_optimizers import forward_hooks

INSTALL_OUTPUT_HOOKS = "install_all_output_capturing_hooks"
_INSTALLED = "_output_capturing_hooks_installed"


def output_hooks_module() -> ModuleType | None:
    """The module of transformers that installs such hooks, if it is loaded. 5.22."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return module if hasattr(module, INSTALL_OUTPUT_HOOKS) else None


def install_before_trace(
    known: Container[nn.Module], original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Ends the trace that is about to install hooks in a model that outlives the step."""
    if model in known:
        raise InstallsHooks(model, original)
    original(model, *args, **kwargs)


class InstallsHooks(TraceAgain):
    """Ends a trace: its forward would add hooks to a model."""

    def __init__(self, model: nn.Module, install: Callable[[nn.Module], None]) -> None:
        super().__init__(f"{type(model).__name__} adds hooks to its layers")
        self._model, self._install = model, install

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        """Install them. Returns the function that removes them."""
        before = [(module, set(forward_hooks(module)), _INSTALLED in vars(module)) for module in self._model.modules()]
        self._install(self._model)

        def remove() -> None:
            for module, hooks, installed in before:
                for added in set(forward_hooks(module)) - hooks:
                    del forward_hooks(module)[added]
                if not installed:
                    vars(module).pop(_INSTALLED, None)

        return remove
