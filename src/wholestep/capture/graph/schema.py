"""What an operator does to its arguments, read once from its schema: which it writes, which it aliases, and which
functional operator computes the same values.

    add_.Tensor(a!, b)             writes {0}     functional add.Tensor
    _foreach_mul_.Scalar(a![], s)  writes {0}     functional _foreach_mul.Scalar
    select.int(a, d, i)            view of {0}
    native_batch_norm(..)          writes {3, 4} although its schema does not say so
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from wholestep.ir.effects import is_custom_operator, write_condition, written_positions
from wholestep.torch_private.operators import OpOverload, find_overloads, op_name, overload_name, schema_of

aten = torch.ops.aten

_FUNCTIONAL_BY_HAND: dict[str, tuple[str, str]] = {
    "aten::native_batch_norm": ("_native_batch_norm_legit_functional", "default"),
    "aten::_native_batch_norm_legit": ("_native_batch_norm_legit_functional", "default"),
    "aten::_batch_norm_with_update": ("_batch_norm_with_update_functional", "default"),
}

_METADATA_WRITES = frozenset(
    {"resize_", "resize_as_", "set_", "set", "resize", "_resize_output_", "unsafe_set_", "requires_grad_"}
)


@dataclass(frozen=True)
class OpFacts:
    """What the tracer needs to know of one operator overload."""

    names: tuple[str, ...]
    """Argument names in schema order."""
    keyword_only: frozenset[str]
    """Arguments that cannot be given by position."""
    writes: tuple[int, ...]
    """Schema positions of the arguments whose contents change."""
    writes_if: str
    """Name of a boolean argument that must be true for `writes` to hold ("" for always)."""
    is_view: bool
    """The result shares memory with the first argument and nothing is written."""
    is_inplace_view: bool
    """Changes size or stride of its first argument, not its contents (`t_`, `unsqueeze_`)."""
    replaces_storage: bool
    """`set_`, `resize_`: the tensor gets other memory."""
    is_random: bool
    is_custom: bool
    """An operator of `torch.library`."""
    functional: OpOverload | None
    """Computes the written values out of place, as extra results after its own."""
    lost_defaults: tuple[tuple[str, object], ...]
    """Arguments that have a default here and none in the functional operator."""
    out_names: tuple[str, ...]
    """`out=` arguments: written, never read, and absent from the functional operator."""
    fresh_results: int
    """How many leading results of the operator do not alias a written argument."""


@cache
def op_facts(op: OpOverload) -> OpFacts:
    """The facts of one overload."""
    schema = schema_of(op)
    names = tuple(arg.name for arg in schema.arguments)
    qualified = op_name(op).split(".")[0]
    base = qualified.split("::")[1]
    tags = op.tags
    inplace_view = torch.Tag.inplace_view in tags
    writes = written_positions(op)
    aliasing = [r for r in schema.returns if r.alias_info is not None]
    functional = _functional_variant(op) if writes and not inplace_view else None
    return OpFacts(
        names=names,
        keyword_only=frozenset(arg.name for arg in schema.arguments if arg.kwarg_only),
        writes=() if inplace_view else writes,
        writes_if=write_condition(op),
        is_view=not writes and bool(aliasing),
        is_inplace_view=inplace_view and base not in _METADATA_WRITES,
        replaces_storage=base in _METADATA_WRITES,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_custom=is_custom_operator(op),
        functional=functional,
        lost_defaults=_lost_defaults(op, functional) if functional is not None else (),
        out_names=tuple(a.name for a in schema.arguments if a.is_out),
        fresh_results=sum(1 for r in schema.returns if r.alias_info is None),
    )


def _functional_variant(op: OpOverload) -> OpOverload | None:
    """The overload that returns what `op` writes: same arguments, nothing mutated."""
    qualified, _, overload = op_name(op).partition(".")
    namespace, base = qualified.split("::")
    if is_custom_operator(op):
        return None  # another kernel, whatever its name says
    if qualified in _FUNCTIONAL_BY_HAND:
        name, overload = _FUNCTIONAL_BY_HAND[qualified]
        return next((o for o in find_overloads("aten", name) if overload_name(o) == overload), None)
    written = sum(1 for a in schema_of(op).arguments if a.alias_info is not None and a.alias_info.is_write)
    fresh = sum(1 for r in schema_of(op).returns if r.alias_info is None)
    candidates: list[OpOverload] = []
    for name in (base.removesuffix("_"), base.removesuffix("_") + "_functional", base):
        candidates += find_overloads(namespace, name)
    wanted = [(a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out]
    exact = [o for o in candidates if o is not op and _is_functional(o, wanted, fresh + written)]
    same_name = [o for o in exact if overload_name(o) == (overload or "default")]
    found = same_name or exact
    return found[0] if found else None


def _lost_defaults(op: OpOverload, functional: OpOverload) -> tuple[tuple[str, object], ...]:
    required = {a.name for a in schema_of(functional).arguments if not a.has_default_value()}
    return tuple(
        (a.name, a.default_value) for a in schema_of(op).arguments if a.has_default_value() and a.name in required
    )


def view_variant(op: OpOverload) -> OpOverload | None:
    """`transpose.int` for `transpose_`: the operator that returns the view which `op` turns its argument into."""
    qualified = op_name(op).split(".")[0]
    namespace, base = qualified.split("::")
    wanted = [(a.name, str(a.type)) for a in schema_of(op).arguments]
    for candidate in find_overloads(namespace, base.removesuffix("_")):
        arguments = schema_of(candidate).arguments
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        if not writes and [(a.name, str(a.type)) for a in arguments] == wanted:
            return candidate
    return None


def _is_functional(op: OpOverload, wanted: list[tuple[str, str]], results: int) -> bool:
    schema = schema_of(op)
    if any(a.alias_info is not None for a in schema.arguments) or any(r.alias_info is not None for r in schema.returns):
        return False
    return [(a.name, str(a.type)) for a in schema.arguments] == wanted and len(schema.returns) == results


def bind(facts: OpFacts, args: tuple[object, ...], kwargs: dict[str, object], position: int) -> object:
    """The argument at a schema position, wherever the caller put it."""
    if position < len(args):
        return args[position]
    return kwargs.get(facts.names[position])
