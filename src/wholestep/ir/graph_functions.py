"""Python functions that graphs call where torch has no operator.

call_on_copies    a mutating operator without a functional variant, called on copies so that the graph stays functional
own_chunk         this rank's part of a tensor that all ranks have whole. A slice would have the rank's number in
                  it, and ranks that run the same program would seem to run different ones
number_tensor     a tensor of Python scalars some of which are inputs of the graph: `torch.tensor([lr, 0.5, k])`
packed_weights    cuDNN wants all weights of an RNN as one chunk of memory. In eager, torch sees that they already
                  are (nn.RNNBase packed them) and passes that chunk. Fakes have no memory, so capture records a
                  call of this function, which finds the chunk at replay
get_rng_state     read and set the default random generator of a device, so that a replay draws what eager would draw
set_rng_state
manual_seed
check_assumed     raises where a branch of user code would go another way than the graph assumes
check_size        raises where the sizes that data decides are not those that the graph is for

    eager    mylib.update_(p, g)                              writes p
    graph    new = call_on_copies(mylib.update_.default, (0,), p, g)
             p1 = new[0]                                      what p would have become; p itself is untouched

The result of `call_on_copies` is one flat tuple: what the operator returns (without the results that are the written
arguments themselves), then the new value of each written argument, lists flattened, None left out. What it returns
shares memory with no argument: an operator that returns its input, or a view of it, is called like this with nothing
mutated.

    state = get_rng_state('cpu')         before the forward of a checkpointed block
    ...
    set_rng_state(state, 'cpu')          before its recomputation in the backward

A state is the uint8 CPU tensor that torch itself uses. Dead-code elimination must keep all three functions: what a
later draw returns depends on where they stand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from wholestep.errors import AssumedError, DataShapeError, UnsupportedError
from wholestep.torch_private.distributed import process_group_rank
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.operators import OpOverload, argument_names, bound_argument, schema_of


def own_chunk(tensor: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """The chunk of this rank along a dimension, of `size` chunks as `torch.chunk` cuts them; empty if there is none."""
    length = tensor.shape[dim]
    each = -(-length // size)
    start = min(process_group_rank(group_name) * each, length)
    return tensor.narrow(dim, start, min(each, length - start)).clone()


def number_tensor(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor of nested lists of numbers, made at each run."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def packed_weights(weights: Sequence[Tensor]) -> Tensor:
    """The chunk that holds all weights one after the other."""
    first = weights[0]
    storage = first.untyped_storage()
    if any(w.untyped_storage().data_ptr() != storage.data_ptr() for w in weights):
        raise UnsupportedError(
            "the weights of an RNN on CUDA are not one chunk of memory.",
            fix="call flatten_parameters() on the module after moving or replacing its weights.",
        )
    chunk = torch.empty(0, dtype=first.dtype, device=first.device)
    return chunk.set_(storage)


def call_on_copies(op: OpOverload, mutated: Sequence[int], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Call `op` with copies in place of the arguments at the schema positions `mutated`."""
    positional, named = list(args), dict(kwargs)
    copies: dict[int, Tensor] = {}
    new: list[Tensor] = []
    for position in mutated:
        copied = _copy(bound_argument(op, position, args, kwargs), copies)
        new += _tensors(copied)
        if position < len(positional):
            positional[position] = copied
        elif (name := argument_names(op)[position]) in named:
            named[name] = copied
    returned = op(*positional, **named)
    own = _own_results(op, tuple(mutated), returned)
    taken = {storage_key(t) for t in _all_tensors([positional, list(named.values())])}
    return (*(_copied_if_in(taken, result) for result in own), *new)


def split_results(
    op: OpOverload, mutated: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any], flat: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `call_on_copies` returned (values, or the nodes that stand for them) as (own results, new values)."""
    written = sum(len(_tensors(bound_argument(op, position, args, kwargs))) for position in mutated)
    cut = len(flat) - written
    return tuple(flat[:cut]), tuple(flat[cut:])


@lru_cache(maxsize=1024)
def returns_written(op: OpOverload, mutated: tuple[int, ...]) -> tuple[bool, ...]:
    """For each result of `op`: whether it is one of the written arguments rather than something new."""
    schema = schema_of(op)
    written: set[str] = set()
    for position in mutated:
        info = schema.arguments[position].alias_info
        if info is not None:
            written |= info.before_set
    # Of a list (`Tensor(a!)[]`) the schema only tells that it is written, not which argument it is.
    return tuple(
        r.alias_info is not None and (r.alias_info.is_write or bool(r.alias_info.before_set & written))
        for r in schema.returns
    )


def _own_results(op: OpOverload, mutated: tuple[int, ...], returned: Any) -> list[Any]:
    aliases = returns_written(op, mutated)
    if not aliases:
        return []
    results = (returned,) if len(aliases) == 1 else returned
    own: list[Any] = []
    for result, is_written in zip(results, aliases, strict=True):
        if is_written:
            continue
        if isinstance(result, list | tuple):
            own.extend(result)
        else:
            own.append(result)
    return own


def _copied_if_in(taken: set[int], result: Any) -> Any:
    return copy_with_strides(result) if isinstance(result, Tensor) and storage_key(result) in taken else result


def _all_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _all_tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _copy(value: Any, copies: dict[int, Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return [_copy(item, copies) for item in value]
    if value is None:
        return None
    if id(value) not in copies:
        copies[id(value)] = copy_with_strides(value)
    return copies[id(value)]


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for item in value if item is not None]
    return [] if value is None else [value]


def copy_with_strides(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also where they overlap or leave gaps (there the memory between is copied too)."""
    if tensor.is_contiguous() or _is_dense(tensor):
        return tensor.clone(memory_format=torch.preserve_format)
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


@has_side_effect
def get_rng_state(device: str) -> Tensor:
    """A copy of the state of the default generator of `device` ("cpu", "cuda:0")."""
    where = torch.device(device)
    if where.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(where).get_rng_state(where)
    return state


@has_side_effect
def set_rng_state(state: Tensor, device: str) -> None:
    """Put the default generator of `device` into `state`."""
    where = torch.device(device)
    if where.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(where).set_rng_state(state, where)


@has_side_effect
def manual_seed(seed: int) -> None:
    """Seed the generators of all devices, as `torch.manual_seed` does."""
    torch.manual_seed(seed)


def divide_sizes(above: float, below: float) -> float:
    """A quotient of sizes as C++ computes it: by zero, it is infinite or NaN."""
    if below != 0:
        return above / below
    return math.nan if above == 0 or above != above else math.copysign(math.inf, above)


@has_side_effect
def check_size(holds: bool, what: str) -> None:
    """Raise if the sizes that the data of this run decided are not such as the graph was captured for."""
    if not holds:
        raise DataShapeError(
            f"the sizes that this batch decides are not those that the step was captured for: {what}.",
            fix="nothing was written. Say what always holds with torch._check(..), or leave such a batch out.",
        )


@has_side_effect
def check_assumed(value: Any, expected: bool, branch: str, *operands: Any) -> None:
    """Raise if a branch of the user's code, which the graph assumes to go one way, goes the other in this run."""
    if bool(value) is expected:
        return
    told = [each.item() if isinstance(each, Tensor) else each for each in operands]
    values = f" for {', '.join(f'{each:.6g}' for each in told)}" if told else ""
    raise AssumedError(
        f"the graph assumes that the condition of a branch is {expected}, and in this call it is {not expected}"
        f"{values} ({branch}).",
        fix="nothing was written: state is as before the call. Leave this batch out, run the plain function for it, or "
        "take the branch out of the step.",
    )


CHECKS = frozenset({check_size, check_assumed})
"""Functions that raise before anything is written: a graph writes to its inputs only after the last of them."""

SIDE_EFFECTS = frozenset({get_rng_state, set_rng_state, manual_seed})
"""The functions here, none of which may run when a graph is only looked at."""
