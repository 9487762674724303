"""What a pass promises, said where it is defined and checked whenever it runs.

    @graph_optimization_pass(prerequisites=[comm_fusion_with_concat], numerics="exact")
    def schedule_comm_wait(gm: fx.GraphModule) -> None: ...

    schedule_comm_wait(gm)                          runs, as PyTorch's `_spmd` passes did
    comm_fusion_with_concat(bucket_size_mb=25)      no graph: binds options, for `ws.compile(passes=[...])`

Which passes ran is kept on each graph (`applied_passes`), never in the process: another graph starts anew.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, overload

from torch import fx, nn

from wholestep.errors import OptionError, PassOrderError, invalid_value

Numerics = Literal["exact", "reassociates", "changes"]
_NUMERICS = ("exact", "reassociates", "changes")
HISTORY = "wholestep_passes"


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
    only_for: tuple[Any, ...] = ()
    """Operators that the pass is about: a graph without any of them is left alone."""
    ends_normal_form: bool = False
    """Writes where a StepGraph may not: for graph modules only, after all other passes."""


class GraphPass:
    """A function on graphs with its contract."""

    def __init__(
        self, function: Callable[..., Any], contract: Contract, check: Callable[..., None] | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.contract = contract
        self._signature = inspect.signature(function)
        self._check = check

    @property
    def name(self) -> str:
        """What messages, options and dumps call it."""
        return self.contract.name

    def __call__(self, *args: Any, allow_rerun: bool = False, **options: Any) -> Any:
        """With a graph first: run, verified at level `verify` (1). Otherwise: the pass with its options bound."""
        from wholestep.passes.engine.manager import apply_pass, is_graph

        level = None if "verify" in self._signature.parameters else options.pop("verify", None)
        first = next(iter(self._signature.parameters), "")
        if not args and is_graph(options.get(first)):
            args = (options.pop(first),)
        if args and is_graph(args[0]):
            self.check_options(args[1:], options, whole=True)
            level = 1 if level is None else level
            return apply_pass(self, args[0], args[1:], options, allow_rerun=allow_rerun, level=level)
        for given in (*args[:1], options.get(first)):
            if isinstance(given, fx.Graph | nn.Module):
                raise self._no_graph(given)  # binding it as an option would do nothing, and say nothing
        self.check_options(args, options)
        return BoundPass(self, args, options, allow_rerun, level)

    def check_options(self, args: tuple[Any, ...], options: dict[str, Any], *, whole: bool = False) -> None:
        """Raise OptionError if the pass does not take these, or (`whole`) needs more."""
        _, *names = self._signature.parameters
        bind = self._signature.bind if whole else self._signature.bind_partial
        try:
            given = bind(None, *args, **options)
        except TypeError as error:
            raise OptionError(
                f"{self.name}: {error}.", fix=f"its options are {', '.join(names)}." if names else "it has no options."
            ) from error
        if self._check is not None:
            given.apply_defaults()
            self._check(*given.args[1:], **given.kwargs)

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
    verify: int | None = None
    """Level at which it is verified; None: that of the other passes."""

    def check(self) -> None:
        """Raise OptionError if an option is missing or wrong."""
        self.graph_pass.check_options(self.args, self.options or {}, whole=True)

    @property
    def name(self) -> str:
        """The name of the pass."""
        return self.graph_pass.name

    def __call__(self, gm: Any) -> Any:
        """Run on a graph."""
        from wholestep.passes.engine.manager import is_graph

        if not is_graph(gm):
            raise self.graph_pass._no_graph(gm)
        level = {} if self.verify is None else {"verify": self.verify}
        return self.graph_pass(gm, *self.args, allow_rerun=self.allow_rerun, **level, **(self.options or {}))

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in (self.options or {}).items())]
        return f"{self.name}({', '.join(given)})"


@overload
def graph_optimization_pass(prerequisites: Callable[..., Any], /) -> GraphPass: ...


@overload
def graph_optimization_pass(
    prerequisites: Iterable[Any] | str = (),
    apply_after: Iterable[Any] | str = (),
    *,
    numerics: Numerics = "exact",
    allow_rerun: bool = False,
    ends_normal_form: bool = False,
    only_for: Iterable[Any] = (),
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Any]], GraphPass]: ...


def graph_optimization_pass(
    prerequisites: Any = (),
    apply_after: Iterable[Any] | str = (),
    *,
    numerics: Numerics = "exact",
    allow_rerun: bool = False,
    ends_normal_form: bool = False,
    only_for: Iterable[Any] = (),
    check: Callable[..., None] | None = None,
) -> Any:
    """Declare a pass. Prerequisites and `apply_after` are passes or their names, one or several.

    `check` takes the options and raises if one of them is wrong, as soon as they are given.
    """
    if numerics not in _NUMERICS:
        raise invalid_value("numerics", numerics, f"use one of {', '.join(_NUMERICS)}.")
    if inspect.isfunction(prerequisites):
        return graph_optimization_pass()(prerequisites)  # written without ()
    before, after = _names(prerequisites), _names(apply_after)

    def declare(function: Callable[..., Any]) -> GraphPass:
        name = getattr(function, "__name__", type(function).__name__)
        return GraphPass(
            function, Contract(name, before, after, numerics, allow_rerun, tuple(only_for), ends_normal_form), check
        )

    return declare


def _names(given: Any) -> tuple[str, ...]:
    return (_name(given),) if isinstance(given, str | GraphPass) else tuple(map(_name, given))


def _name(given: Any) -> str:
    return given if isinstance(given, str) else str(getattr(given, "name", getattr(given, "__name__", given)))


def applied_passes(gm: fx.GraphModule) -> tuple[str, ...]:
    """The passes that ran on a graph, in order."""
    return tuple(contract.name for contract in applied_contracts(gm))


def applied_contracts(gm: fx.GraphModule) -> tuple[Contract, ...]:
    """What the passes that ran on a graph promise: names alone would mix up two passes that are called the same."""
    found: tuple[Contract, ...] = gm.meta.get(HISTORY, ())
    return found


def note_applied(gm: fx.GraphModule, contract: Contract) -> None:
    """A pass ran on a graph."""
    gm.meta[HISTORY] = (*applied_contracts(gm), contract)


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
            f"Cannot apply {name} twice: it already ran on this graph.",
            fix=f"leave it out, or say {name}(gm, ..., allow_rerun=True).",
        )


def check_list(passes: Iterable[BoundPass]) -> None:
    """Raise what a new graph would raise: wrong options, or an order that cannot be."""
    history: tuple[Contract, ...] = ()
    for bound in passes:
        bound.check()
        check_order(bound.graph_pass.contract, history, allow_rerun=bound.allow_rerun)
        check_normal_form(bound.graph_pass.contract)
        history = (*history, bound.graph_pass.contract)


def check_normal_form(contract: Contract) -> None:
    """Raise OptionError if a pass is not for StepGraphs."""
    if contract.ends_normal_form:
        raise OptionError(
            f"{contract.name} ends the normal form of a StepGraph, which everything after the passes relies on.",
            fix=f"leave it out: ws.compile updates in place by itself. For the graph alone: {contract.name}(step.gm).",
        )
