"""Run a graph node by node, on copies, with a callback for every value; other ranks are simulated.

No object of the user is written: inputs are copied, RNG states and constants of the graph are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.debug.minifier.trial import copies_of
from wholestep.ir.effects import is_communication
from wholestep.passes.engine.replay import PretendRanks
from wholestep.torch_private.autograd import below_autograd
from wholestep.torch_private.guard_checks import cuda_is_initialized
from wholestep.torch_private.operators import OpOverload, op_name

SEED = 20261115
_EMPTY = frozenset(
    f"aten::{name}" for name in "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)

Look = Callable[[fx.Node, Any], bool]
"""Gets a node and its value; False ends the run."""

Note = Callable[[fx.Node], None]


class NodeRaised(Exception):  # noqa: N818 (it carries an error)
    """An operator raised."""

    def __init__(self, node: fx.Node, error: Exception) -> None:
        super().__init__(f"{node.name} raised {type(error).__name__}: {error}")
        self.node = node
        self.error = error


class _Enough(Exception):  # noqa: N818 (not an error)
    """The callback ended the run."""


def run_nodes(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    look: Look,
    left: list[Any] | None = None,
    note: Note | None = None,
) -> Any:
    """Run a graph and call `look` with every value; the results, or None if `look` ended the run.

    `left` is filled with the copies of the inputs as the run left them. `note` is called with each node before it runs.
    """
    pretends = any(node.op == "call_function" and is_communication(node.target) for node in gm.graph.nodes)
    runner = (_SimulatedRanksRunner if pretends else _PlainRunner)(gm)
    runner.extra_traceback = False
    runner.look, runner.note = look, note
    own = copies_of([_on_cpu(value) if pretends else value for value in inputs])
    if left is not None:
        left[:] = own
    with _put_back(gm), torch.random.fork_rng(_cuda_devices()), below_autograd():
        torch.manual_seed(SEED)
        try:
            return runner.run(*own, enable_io_processing=False)
        except _Enough:
            return None


def _is_empty(target: Any) -> bool:
    """True if an operator returns uninitialised memory."""
    return isinstance(target, OpOverload) and op_name(target).split(".")[0] in _EMPTY


class _Looking(fx.Interpreter):
    look: Look
    note: Note | None

    def run_node(self, n: fx.Node) -> Any:
        if self.note is not None:
            self.note(n)
        try:
            value = super().run_node(n)
        except _Enough:
            raise
        except Exception as error:
            raise NodeRaised(n, error) from error
        if n.op == "call_function" and _is_empty(n.target):
            value.zero_()  # uninitialised memory differs from run to run
        if n.op != "output" and not self.look(n, value):
            raise _Enough
        return value


class _PlainRunner(_Looking):
    """Collectives, if any, are real."""


class _SimulatedRanksRunner(_Looking, PretendRanks):
    """Collectives are simulated: no other process takes part."""


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if cuda_is_initialized() else []


@contextmanager
def _put_back(gm: fx.GraphModule) -> Iterator[None]:
    kept = [(tensor, tensor.detach().clone()) for tensor in (*gm.parameters(), *gm.buffers()) if not tensor.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content in kept:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
