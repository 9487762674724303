"""Inputs of the graph under construction: a placeholder for each slot that the step reads, and tensor constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from wholestep.capture.graph.recorder import Recorder
from wholestep.capture.objects.discover import World
from wholestep.capture.objects.swapped_state import StateTable, Tracked
from wholestep.capture.python_reads.process_state import default_generators
from wholestep.errors import CapturedTensorError, RandomStateError, UnsupportedError
from wholestep.ir.meta import user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.slots import GeneratorSlot, Slot
from wholestep.torch_private.fake_tensors import is_zero_tensor, without_modes
from wholestep.torch_private.guard_checks import generator_key


class Inputs:
    """The placeholders, in the order in which they were created."""

    def __init__(self, recorder: Recorder, world: World, table: StateTable) -> None:
        self._recorder = recorder
        self._graph = recorder.nodes.graph
        self._world = world
        self._table = table
        self.slot_of: dict[fx.Node, Slot] = {}
        self.constants: dict[str, Tensor] = {}
        self._lifted: dict[int, Tensor] = {}
        self._numbers: dict[int, fx.Node] = {}
        self._generators: dict[int, fx.Node] = {}
        self._last: fx.Node | None = None

    def tensor(self, tracked: Tracked) -> None:
        """Make a tracked tensor an input."""
        self._recorder.values.register_input(tracked.input, self._placeholder(tracked.slot))

    def number(self, slot: Slot, value: Any) -> fx.Node:
        """The placeholder for a scalar input."""
        if id(slot) not in self._numbers:
            node = self._placeholder(slot)
            node.meta["val"] = value
            self._numbers[id(slot)] = node
        return self._numbers[id(slot)]

    def lift(self, tensor: Tensor) -> Tensor:
        """Make a real tensor that user code holds an input, if a later call can find it again."""
        known = self._lifted.get(id(tensor))
        if known is not None:
            return known
        tracked = self._table.tracked.get(id(tensor))
        if tracked is None:
            tracked = self._table.track_input(tensor, self._found(tensor))
            self.tensor(tracked)
        elif id(tensor) in self._world.tensors:
            self._table.note_same(self._world.tensors[id(tensor)][1], tracked)
        self._lifted[id(tensor)] = tracked.fake
        return tracked.fake

    def is_lifted(self, tensor: Tensor) -> bool:
        """Whether user code worked on this real tensor itself, so that its writes raised the version of it."""
        return id(tensor) in self._lifted

    def release(self) -> None:
        """Drop the references to fakes."""
        self._lifted = {}

    def _found(self, tensor: Tensor) -> Slot:
        """The slot where a later call finds a tensor."""
        found = self._world.tensors.get(id(tensor))
        if found is None and is_zero_tensor(tensor):
            raise UnsupportedError(
                "forward-mode differentiation made a tensor of zeros that no operator of the step made.",
                fix="use another form of the derivative: torch.func.hessian(f) is jacfwd(jacrev(f)); of a function "
                "with one result, jacfwd(grad(f)) and jacrev(grad(f)) are the same.",
                location=user_location(),
            )
        if found is None:
            raise CapturedTensorError(
                f"the step reads a tensor of shape {tuple(tensor.shape)} that is not reachable from its arguments, "
                "closure, globals or modules, so a later call could not find it again.",
                fix="pass it as an argument, or keep it as a buffer or attribute of a module.",
                location=user_location(),
            )
        if tensor.requires_grad:
            raise CapturedTensorError(
                f"{found[1].path} requires grad and lies where capture cannot replace it by a fake tensor.",
                fix="make it a parameter of a module, or pass it as an argument.",
                location=user_location(),
            )
        return found[1]

    def constant(self, tensor: Tensor) -> fx.Node:
        """Store tensor data that the step's code contains (`torch.tensor([1.0])`) with the graph."""
        name = f"_constant{len(self.constants)}"
        with without_modes():
            self.constants[name] = tensor.detach().clone()
        node = self._graph.create_node("get_attr", name)
        node.meta["constant"] = self.constants[name]
        return node

    def generator(self, generator: torch.Generator) -> fx.Node:
        """The placeholder for a generator that the step passes to a random operator."""
        key = generator_key(generator)
        known = self._generators.get(key)
        if known is None:
            generator, path = self._world.generators.get(key) or default_generators().get(key, (generator, ""))
            if not path:
                raise RandomStateError(
                    "the step draws from a generator that a later call could not find again.",
                    fix="pass the generator as an argument or keep it in a variable that the step names.",
                    location=user_location(),
                )
            known = self._placeholder(GeneratorSlot(InputKind.RNG_STATE, path, None, generator))
            self._generators[key] = known
        return known

    def _placeholder(self, slot: Slot) -> fx.Node:
        """A new placeholder after the existing ones."""
        first = next(iter(self._graph.nodes), None)
        if self._last is not None:
            point = self._graph.inserting_after(self._last)
        elif first is not None:
            point = self._graph.inserting_before(first)
        else:
            point = self._graph.inserting_before()
        with point:
            node = self._graph.placeholder(_identifier(slot.path))
        self._last = node
        self.slot_of[node] = slot
        return node


def _identifier(path: str) -> str:
    name = "".join(c if c.isalnum() else "_" for c in path).strip("_")
    while "__" in name:
        name = name.replace("__", "_")
    return name if name and not name[0].isdigit() else f"input_{name}"
