"""Passes by name: ours, and those of other packages by the entry point `wholestep.passes`.

ws.compile(step)                                 passes="auto": fuse_loss; overlap_communication where it communicates
ws.compile(step, passes="default")
ws.compile(step, passes=[ws.passes.comm_fusion_with_concat(bucket_size_mb=25), "my_pass"])
ws.compile(step, passes=["default", "overlap_optimizer_with_next_forward"])
ws.compile(step, passes="default", disable_passes=["schedule_comm_wait"])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from wholestep.errors import OptionError, called, did_you_mean, invalid_value
from wholestep.passes.collective_matmul import collective_matmul
from wholestep.passes.comm_fusion import bucket_all_gather, bucket_reduce_scatter, comm_fusion_with_concat
from wholestep.passes.common_subexpressions import merge_common_subexpressions
from wholestep.passes.engine.contract import BoundPass, GraphPass
from wholestep.passes.functionalize_optimizer import functionalize_optimizer, remove_copy_from_optimizer
from wholestep.passes.iter_move import iter_move_grads_and_optimizers, overlap_optimizer_with_next_forward
from wholestep.passes.loss.chunk_head import chunk_head
from wholestep.passes.loss.fuse_loss import fuse_loss
from wholestep.passes.overlap_communication import overlap_communication
from wholestep.passes.redundant_collectives import remove_dead_collectives, remove_duplicate_collectives
from wholestep.passes.reinplace_tail import reinplace_tail
from wholestep.passes.schedule_comm_wait import schedule_comm_wait

GROUP = "wholestep.passes"
DEFAULT: tuple[GraphPass, ...] = (
    comm_fusion_with_concat,
    bucket_reduce_scatter,
    bucket_all_gather,
    schedule_comm_wait,
)
"""The passes of `passes="default"`: communication in buckets, with waits as late as possible."""


_BY_NAME: tuple[GraphPass, ...] = (
    *DEFAULT,
    functionalize_optimizer,
    remove_copy_from_optimizer,
    merge_common_subexpressions,
    remove_duplicate_collectives,
    remove_dead_collectives,
    collective_matmul,
    chunk_head,
    fuse_loss,
    overlap_communication,
    overlap_optimizer_with_next_forward,
    reinplace_tail,
)
_TAKEN = {each.name: each for each in (*_BY_NAME, iter_move_grads_and_optimizers)}
"""Names that no other package may use."""


def known_passes() -> dict[str, GraphPass]:
    """Every pass of ours that has a name. Entry points are loaded when they are first used."""
    return {each.name: each for each in _BY_NAME}


AUTOMATIC: tuple[GraphPass, ...] = (fuse_loss, overlap_communication)
"""The passes of `passes="auto"`."""


def automatic(*, communicates: bool, exact: bool) -> tuple[BoundPass, ...]:
    """The passes of `passes="auto"`: rewrites that are faster compiled, and `overlap_communication` if the step
    communicates.

    `exact`: every bit is kept, so nothing is rewritten and no reductions are packed into buckets.
    """
    rewrites = () if exact else (fuse_loss(),)
    if not communicates:
        return rewrites
    return (*rewrites, overlap_communication(bucket="exact") if exact else overlap_communication())


def resolve(passes: Any, disabled: Sequence[str] = ()) -> tuple[BoundPass, ...]:
    """The passes to run, from what the user wrote."""
    if passes is None:
        chosen: Iterable[Any] = ()
    elif isinstance(passes, str) and passes == "default":
        chosen = DEFAULT
    elif isinstance(passes, Iterable) and not isinstance(passes, str):
        chosen = passes
    elif isinstance(passes, str) and (passes in known_passes() or entry_points(group=GROUP, name=passes)):
        raise OptionError(f"passes={passes!r} is the name of one pass.", fix=f'write a list: passes=["{passes}"].')
    else:
        raise invalid_value(
            "passes", passes, 'use "auto", "default", None, or a list of passes and names, "default" among them.'
        )
    given = [part for each in chosen for part in (DEFAULT if each == "default" else (each,))]
    found = [_bound(each) for each in given]
    names = [
        {bound.name, each} if isinstance(each, str) else {bound.name} for each, bound in zip(given, found, strict=True)
    ]
    """The names of each pass: an entry point may have another name than its pass."""
    all_names = set().union(*names)
    unknown = [name for name in disabled if name not in all_names]
    if unknown:
        raise OptionError(
            f"disable_passes names {unknown[0]!r}, which would not run.",
            fix=did_you_mean(
                unknown[0],
                all_names,
                f"the passes that run are {', '.join(sorted(all_names))}."
                if all_names
                else "leave it out: no pass runs.",
            ),
        )
    return tuple(bound for bound, called in zip(found, names, strict=True) if called.isdisjoint(disabled))


def _bound(given: Any) -> BoundPass:
    if isinstance(given, BoundPass):
        return given
    if isinstance(given, GraphPass):
        return BoundPass(given)
    if isinstance(given, str):
        return _bound(_named(given))
    raise OptionError(
        f"{called(given)} is not a pass.",
        fix="declare the function with @ws.passes.graph_optimization_pass(...), or give the name of a pass.",
    )


def _named(name: str) -> GraphPass | BoundPass:
    ours = known_passes()
    others: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        others.setdefault(point.name, []).append(point)
    if name in others:
        return _loaded(name, others[name])
    if name in ours:
        return ours[name]
    if name == iter_move_grads_and_optimizers.name:
        raise OptionError(
            f"passes: {name} has to know what to move, and where to.",
            fix=f'give ws.passes.{name}("all_reduce_default", "mm_default") with names of nodes of the graph; or use '
            f"{overlap_optimizer_with_next_forward.name}, which finds both by itself.",
        )
    known = [*ours, *others]
    raise OptionError(
        f"passes: there is no pass {name!r}.",
        fix=did_you_mean(name, known, f"the passes are {', '.join(sorted(known))}."),
    )


def _loaded(name: str, points: list[EntryPoint]) -> GraphPass | BoundPass:
    """The pass under a name that exactly one distribution offers."""
    if name in _TAKEN:
        raise OptionError(
            f"the name {name!r} is that of a pass of wholestep and of an entry point of {_sources(points)}.",
            fix=f"give the pass itself, ws.passes.{name} for ours; the distribution has to rename its entry point.",
        )
    if len(points) > 1:
        raise OptionError(
            f"the pass {name!r} is offered by {_sources(points)}.",
            fix="import the pass that you mean and give it instead of its name, or uninstall the other distribution.",
        )
    (point,) = points
    what = f"the entry point {GROUP}:{name} = {point.value!r} of {_sources(points)}"
    try:
        loaded = point.load()
    except Exception as error:
        raise OptionError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}",
            fix="install what it needs, or leave the pass out; if its own modules are missing, report it there.",
        ) from error
    if not isinstance(loaded, GraphPass | BoundPass):
        raise OptionError(
            f"{what} is a {type(loaded).__name__}, not a pass.",
            fix="let it name a function that is declared with graph_optimization_pass.",
        )
    its_pass = loaded if isinstance(loaded, GraphPass) else loaded.graph_pass
    if _TAKEN.get(its_pass.name, its_pass) is not its_pass:
        raise OptionError(
            f"{what} is a pass that calls itself {its_pass.name!r}, which is one of wholestep.",
            fix="rules of order go by names: its function has to be called something else.",
        )
    return loaded


def _sources(points: Iterable[EntryPoint]) -> str:
    """The distributions that offer some entry points, as a person would install them."""
    found = [point.dist for point in points]
    return " and ".join("an unknown distribution" if d is None else f"{d.name} {d.version}" for d in found)
