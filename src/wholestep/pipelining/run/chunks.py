"""Cuts the arguments of a batch into microbatches, by torch's own function, with two differences.

`None` or `Replicate` in a spec gives every microbatch the whole value, as in PiPPy. And a spec belongs to the argument
of its name, in whatever order keywords and dictionaries are written; torch goes by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks as _split

from wholestep.errors import PipelineInputError
from wholestep.torch_private.pipelining import WholeValue, quiet_masks
from wholestep.torch_private.pytrees import pytree


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The positional and the keyword arguments of each microbatch.

    Specs have the structure of the arguments, with a `TensorChunkSpec(dim)`, None or `Replicate` at each value. Without
    one, tensors are cut along their first dimension and other values given whole.
    """
    named = dict(kwargs or {})
    positional = None if args_chunk_spec is None else _fitted(args_chunk_spec, args, "args_chunk_spec")
    by_name = None if kwargs_chunk_spec is None else _fitted(dict(kwargs_chunk_spec), named, "kwargs_chunk_spec")
    with quiet_masks():
        return _split(args, named, chunks, positional, by_name)


def _fitted(spec: Any, values: Any, name: str) -> Any:
    """A spec in the order of the values, with torch's word for a whole value in the place of None."""
    if _is_whole(spec):
        return pytree.tree_map(lambda leaf: WholeValue, values)
    if isinstance(values, Mapping):
        if not isinstance(spec, Mapping) or set(spec) != set(values):
            raise _misfit(spec, values, name)
        return type(values)({key: _fitted(spec[key], value, f"{name}[{key!r}]") for key, value in values.items()})  # type: ignore[call-arg]
    if isinstance(values, tuple | list):
        if not isinstance(spec, tuple | list) or len(spec) != len(values):
            raise _misfit(spec, values, name)
        fitted = [
            _fitted(each, value, f"{name}[{i}]") for i, (each, value) in enumerate(zip(spec, values, strict=True))
        ]
        return type(values)(*fitted) if hasattr(values, "_fields") else type(values)(fitted)
    if isinstance(spec, Mapping | tuple | list):
        raise _misfit(spec, values, name)
    return spec


def _is_whole(spec: Any) -> bool:
    """Whether every microbatch gets a value as a whole: None, or `Replicate`, the class or one of it."""
    return spec is None or spec is WholeValue or isinstance(spec, WholeValue)


def _misfit(spec: Any, values: Any, name: str) -> PipelineInputError:
    wanted = pytree.tree_map(lambda leaf: _Plain(0) if hasattr(leaf, "shape") else None, values)
    return PipelineInputError(
        f"{name} is {_shown(spec)}, which is not the structure of the arguments.",
        fix=f"write for example {_shown(wanted)}",
    )


def _shown(spec: Any) -> str:
    return repr(pytree.tree_map_only(TensorChunkSpec, lambda each: _Plain(each.split_dim), spec))


class _Plain:
    """How a chunk spec is written."""

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self._dim})"
