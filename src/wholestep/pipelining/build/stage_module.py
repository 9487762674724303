"""The module of one stage: a graph for each mode, and the state that they read under the names of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError, PipelineModeError
from wholestep.pipelining.build.device import change_device, same_device
from wholestep.pipelining.build.state import Entry, attach


@dataclass(frozen=True)
class StageCode:
    """What a stage runs in one mode."""

    graph: fx.Graph
    blocks: Mapping[str, torch.nn.Module]
    """The modules of autocast, no_grad and checkpoint blocks that the graph calls."""


@dataclass(frozen=True)
class StageAbout:
    """Which stage a module is, and what it takes and returns."""

    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    missing: Mapping[str, str]
    """Modes without a graph, and why."""


class StageModule(fx.GraphModule):
    """A stage: takes the values `about.inputs`, returns a tuple of `about.outputs`, or the tensor if it is only one.

    `train()` and `eval()` change the graph. State is that of the model: the same tensors, the same names.
    """

    def __init__(
        self,
        about: StageAbout,
        codes: Mapping[str, StageCode],
        main: str,
        entries: Sequence[Entry],
        flags: Mapping[str, bool],
        device: torch.device,
    ) -> None:
        super().__init__(torch.nn.Module(), fx.Graph(), class_name=f"Stage{about.index}")
        self._about = about  # the user's names are attributes here too: ours begin with an underscore
        self._codes = dict(codes)
        self._mode = main
        self._device = device
        for entry in entries:
            attach(self, entry)
        for path, module in self.named_modules():
            module.training = flags.get(path, flags[""])
        self._use(main)

    def train(self, mode: bool = True) -> StageModule:
        """Run the graph of training, or with False that of evaluation."""
        super().train(mode)
        wanted = "train" if mode else "eval"
        if wanted != self._mode:
            self._mode = wanted
            if wanted in self._codes:
                self._use(wanted)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> StageModule:
        """Behind `to()`, `cuda()` and `to_empty()`: constants of the graphs move with the state."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._follow(fn(torch.empty(0, device=self._device)).device)
        return self

    def _follow(self, device: torch.device) -> None:
        if same_device(device, self._device):
            return
        for code in self._codes.values():
            holder = torch.nn.Module()
            for name, block in code.blocks.items():
                holder.add_module(name, block)
            change_device(holder, code.graph, self._device, device)
        self._device = device
        self.recompile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._mode not in self._codes:
            shown = {"train": "training", "eval": "evaluation"}[self._mode]
            raise PipelineModeError(
                f"stage {self._about.index} has no graph for {shown}: {self._about.missing[self._mode]}.",
                fix=f"make another pipe with the model in {shown}; where that is refused too, its error says why",
            )
        return super().__call__(*args, **kwargs)

    def _use(self, mode: str) -> None:
        for code in self._codes.values():
            for name in code.blocks:
                self._modules.pop(name, None)
        for name, block in self._codes[mode].blocks.items():
            self.add_module(name, block)
        self.graph = self._codes[mode].graph

    def __reduce__(self) -> Any:
        raise PipelineError(
            f"stage {self._about.index} cannot be pickled: a pickle would run code when it is read, and lose a mode.",
            fix="wholestep.pipelining.save_stage(stage, folder) writes JSON and tensors",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StageModule:
        new = StageModule.__new__(StageModule)
        memo[id(self)] = new
        kept = {key: value for key, value in vars(self).items() if key not in ("_graph", "_code", "_codes", "_modules")}
        fx.GraphModule.__init__(new, torch.nn.Module(), fx.Graph(), class_name=type(self).__name__)
        blocks = {name for code in self._codes.values() for name in code.blocks}
        new.__dict__.update(copy.deepcopy(kept, memo))
        new._modules = {
            name: copy.deepcopy(module, memo) for name, module in self._modules.items() if name not in blocks
        }
        new._codes = {
            mode: StageCode(copy.deepcopy(code.graph), copy.deepcopy(dict(code.blocks), memo))
            for mode, code in self._codes.items()
        }
        new._use(self._mode if self._mode in new._codes else next(iter(new._codes)))
        return new


def follow_device(stage: StageModule, device: torch.device | str) -> None:
    """Move the constants of a stage whose state is there already."""
    stage._follow(torch.device(device))


def codes_of(stage: StageModule) -> Mapping[str, StageCode]:
    """The graphs of a stage, by mode."""
    return stage._codes


def about(stage: StageModule) -> StageAbout:
    """Which stage a module is."""
    return stage._about
