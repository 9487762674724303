"""What a pass promises, said where it is defined and checked whenever it runs.

    @graph_optimization_pass(prerequisites=[comm_fusion_with_concat], numerics="exact")
    def schedule_comm_wait(gm: fx.GraphModule) -> None: ...

    schedule_comm_wait(gm)                          runs, as PyTorch's `_spmd` passes did
    comm_fusion_with_concat(bucket_size_mb=25)      no graph: binds options, for `ws.compile(passes=[...])`

Which passes ran is kept on each graph (`applied_passes`), never in the process: another graph starts anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn

from wholestep.errors import OptionError, PassOrderError

Numerics = Literal["exact", "reassociates", "changes"]
_NUMERICS = ("exact", "reassociates", "changes")
_HISTORY = "wholestep_passes"


@dataclass(frozen=True)
class Contract:
    """What must have run, what must not have, and what becomes of the numbers."""

    name: str
    prerequisites: tuple[str, ...] = ()
    """Passes that must have run on the same graph."""
    apply_after: tuple[str, ...] = ()
    """Passes that must have run before, if they are used at all."""
    numerics: Numerics = "exact"
    """`exact`: the same bits; `reassociates`: the same sums in another order; `changes`: anything else."""
    allow_rerun: bool = False


class GraphPass:
    """A function on graphs with its contract."""

    def __init__(self, function: Callable[..., Any], contract: Contract) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.contract = contract

    @property
    def name(self) -> str:
        """What messages, options and dumps call it."""
        return self.contract.name

    def __call__(self, *args: Any, allow_rerun: bool = False, **options: Any) -> Any:
        """With a graph first: run. Otherwise: the pass with its options bound."""
        from wholestep.passes.manager import apply_pass, is_graph

        if args and is_graph(args[0]):
            return apply_pass(self, args[0], args[1:], options, allow_rerun=allow_rerun)
        if args and isinstance(args[0], fx.Graph | nn.Module):
            raise self._no_graph(args[0])  # binding it as an option would do nothing, and say nothing
        return BoundPass(self, args, options, allow_rerun)

    def _no_graph(self, given: Any) -> OptionError:
        return OptionError(
            f"{self.name} got a {type(given).__name__}.",
            fix="give an fx.GraphModule, an IterGraphModule or a StepGraph; for an fx.Graph the module that owns it.",
        )

    def __repr__(self) -> str:
        return f"<pass {self.name}>"


@dataclass(frozen=True)
class BoundPass:
    """A pass with its options, waiting for a graph."""

    graph_pass: GraphPass
    args: tuple[Any, ...] = ()
    options: Any = None
    allow_rerun: bool = False

    @property
    def name(self) -> str:
        """The name of the pass."""
        return self.graph_pass.name

    def __call__(self, gm: Any) -> Any:
        """Run on a graph."""
        from wholestep.passes.manager import is_graph

        if not is_graph(gm):
            raise self.graph_pass._no_graph(gm)
        return self.graph_pass(gm, *self.args, allow_rerun=self.allow_rerun, **(self.options or {}))

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in (self.options or {}).items())]
        return f"{self.name}({', '.join(given)})"


def graph_optimization_pass(
    prerequisites: Iterable[Any] = (),
    apply_after: Iterable[Any] = (),
    *,
    numerics: Numerics = "exact",
    allow_rerun: bool = False,
) -> Callable[[Callable[..., Any]], GraphPass]:
    """Declare a pass. Prerequisites and `apply_after` are passes or their names."""
    if numerics not in _NUMERICS:
        raise OptionError(f"numerics={numerics!r}", fix=f"use one of {', '.join(_NUMERICS)}.")
    before, after = tuple(map(_name, prerequisites)), tuple(map(_name, apply_after))

    def declare(function: Callable[..., Any]) -> GraphPass:
        name = getattr(function, "__name__", type(function).__name__)
        return GraphPass(function, Contract(name, before, after, numerics, allow_rerun))

    return declare


def _name(given: Any) -> str:
    return given if isinstance(given, str) else str(getattr(given, "name", getattr(given, "__name__", given)))


def applied_passes(gm: fx.GraphModule) -> tuple[str, ...]:
    """The passes that ran on a graph, in order."""
    return tuple(contract.name for contract in applied_contracts(gm))


def applied_contracts(gm: fx.GraphModule) -> tuple[Contract, ...]:
    """What the passes that ran on a graph promise: names alone would mix up two passes that are called the same."""
    found: tuple[Contract, ...] = gm.meta.get(_HISTORY, ())
    return found


def note_applied(gm: fx.GraphModule, contract: Contract) -> None:
    """A pass ran on a graph."""
    gm.meta[_HISTORY] = (*applied_contracts(gm), contract)


def check_order(contract: Contract, history: tuple[Contract, ...], *, allow_rerun: bool = False) -> None:
    """Raise PassOrderError if a pass may not run now on a graph with that history."""
    name = contract.name
    applied = [done.name for done in history]
    missing = [needed for needed in contract.prerequisites if needed not in applied]
    if missing:
        raise PassOrderError(
            f"{', '.join(missing)} are the prerequisites of {name} and did not run on this graph.",
            fix=f"apply {', '.join(missing)} first; so far: {', '.join(applied) or 'nothing'}.",
        )
    late = [done.name for done in history if name in done.apply_after]
    if late:
        raise PassOrderError(
            f"{', '.join(late)} must be applied after {name}, and already ran on this graph.",
            fix=f"apply {name} before {', '.join(late)}.",
        )
    if name in applied and not (contract.allow_rerun or allow_rerun):
        raise PassOrderError(
            f"{name} already ran on this graph.", fix=f"leave it out, or say {name}(gm, ..., allow_rerun=True)."
        )
