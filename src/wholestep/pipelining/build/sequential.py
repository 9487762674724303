"""A chain of modules with a cut between every two."""

from __future__ import annotations

import copy
from typing import Any

import torch

from wholestep.pipelining.build.markers import pipe_split


class PipeSequential(torch.nn.Sequential):
    """`torch.nn.Sequential`, each module a stage of its own."""

    @staticmethod
    def from_sequential(sequential_instance: torch.nn.Sequential) -> PipeSequential:
        """The same modules, cut between them.

        A module that is there twice gets a second object with the same parameters, so that each place has a name.
        """
        seen: set[int] = set()
        modules: list[torch.nn.Module] = []
        for module in sequential_instance:
            modules.append(copy.copy(module) if id(module) in seen else module)
            seen.add(id(module))
        return PipeSequential(*modules)

    def forward(self, input: Any) -> Any:
        """Run the modules one after the other."""
        for place, module in enumerate(self):
            if place > 0:
                pipe_split()
            input = module(input)
        return input
