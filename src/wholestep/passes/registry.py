"""Passes by name: ours, and those of other packages by the entry point `wholestep.passes`.

ws.compile(step, passes="default")
ws.compile(step, passes=[ws.passes.comm_fusion_with_concat(bucket_size_mb=25), "my_pass"])
ws.compile(step, passes="default", disable_passes=["schedule_comm_wait"])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from wholestep.errors import OptionError
from wholestep.passes.comm_fusion import bucket_all_gather, bucket_reduce_scatter, comm_fusion_with_concat
from wholestep.passes.common_subexpressions import merge_common_subexpressions
from wholestep.passes.contract import BoundPass, GraphPass
from wholestep.passes.iter_move import overlap_optimizer_with_next_forward
from wholestep.passes.library import remove_dead_collectives, remove_duplicate_collectives
from wholestep.passes.remove_copy_from_optimizer import remove_copy_from_optimizer
from wholestep.passes.schedule_comm_wait import schedule_comm_wait

GROUP = "wholestep.passes"
DEFAULT: tuple[GraphPass, ...] = (
    comm_fusion_with_concat,
    bucket_reduce_scatter,
    bucket_all_gather,
    schedule_comm_wait,
)
"""What `passes="default"` runs: communication in buckets, waited for as late as possible."""


def known_passes() -> dict[str, GraphPass]:
    """Every pass that can be given by name. Entry points are loaded when they are asked for."""
    ours = (
        *DEFAULT,
        remove_copy_from_optimizer,
        merge_common_subexpressions,
        remove_duplicate_collectives,
        remove_dead_collectives,
        overlap_optimizer_with_next_forward,
    )
    return {each.name: each for each in ours}


def resolve(passes: Any, disabled: Sequence[str] = ()) -> tuple[BoundPass, ...]:
    """The passes to run, from what the user wrote."""
    if passes is None:
        chosen: Iterable[Any] = ()
    elif isinstance(passes, str):
        if passes != "default":
            raise OptionError(f"passes={passes!r}", fix='use "default", None, or a list of passes and names.')
        chosen = DEFAULT
    elif isinstance(passes, Iterable):
        chosen = passes
    else:
        raise OptionError(f"passes={passes!r}", fix='use "default", None, or a list of passes and names.')
    found = [_bound(each) for each in chosen]
    names = {each.name for each in found}
    unknown = [name for name in disabled if name not in names]
    if unknown:
        raise OptionError(
            f"disable_passes names {unknown[0]!r}, which would not run.", fix=f"the passes are {sorted(names)}."
        )
    return tuple(each for each in found if each.name not in disabled)


def _bound(given: Any) -> BoundPass:
    if isinstance(given, BoundPass):
        return given
    if isinstance(given, GraphPass):
        return BoundPass(given)
    if isinstance(given, str):
        return _bound(_named(given))
    raise OptionError(
        f"{given!r} is no pass.",
        fix="declare the function with @ws.passes.graph_optimization_pass(...), or give the name of a pass.",
    )


def _named(name: str) -> GraphPass | BoundPass:
    ours = known_passes()
    if name in ours:
        return ours[name]
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name in others:
        loaded = others[name].load()
        if not isinstance(loaded, GraphPass | BoundPass):
            raise OptionError(
                f"the entry point {GROUP}:{name} is a {type(loaded).__name__}, not a pass.",
                fix="let it name a function that is declared with graph_optimization_pass.",
            )
        return loaded
    near = get_close_matches(name, [*ours, *others], 1)
    raise OptionError(
        f"passes: there is no pass {name!r}.",
        fix=f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted([*ours, *others]))}.",
    )
