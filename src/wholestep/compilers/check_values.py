"""Compare one real value with the metadata of its node: dtype, device, size, stride, offset, contiguity, numbers.

    Difference("stride", "(4, 1)", "(1, 4)")

Strides count where a dimension has more than one element; sizes and numbers may be symbolic (`symbol_values`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholestep.compilers.symbol_values import SymbolValues
from wholestep.torch_private.pytrees import pytree

_NUMBERS = (int, float, bool)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Difference:
    """What metadata says and what a run found. `which`: the place of the value where a node has several.

    `expected` is empty where the value itself is what is wrong, and not what is said of it.
    """

    what: str
    expected: str
    found: str
    which: str = ""

    def __str__(self) -> str:
        place = f"output {self.which}: " if self.which else ""
        return f"{place}{self.what} is {self.found}{f', metadata says {self.expected}' if self.expected else ''}"


def differences(
    wanted: Any,
    found: Any,
    symbols: SymbolValues,
    *,
    shifts: Sequence[int] | None = (0,),
    plain_numbers: bool = True,
    skip: Collection[int] = (),
) -> Iterator[Difference]:
    """All differences between the metadata and the value of a node.

    `shifts`: how much further into its memory the value may start than metadata says; None where it is not
    compared. `plain_numbers`: whether numbers that are not symbolic are promises; a StepGraph has those of its first
    run. `skip`: places of values not to look at.
    """
    wanted_leaves, found_leaves = pytree.tree_leaves(wanted), pytree.tree_leaves(found)
    if len(wanted_leaves) != len(found_leaves):
        yield Difference("number of values", str(len(wanted_leaves)), str(len(found_leaves)))
        return
    for i, (one, other) in enumerate(zip(wanted_leaves, found_leaves, strict=True)):
        if i in skip or (isinstance(one, _NUMBERS) and not plain_numbers):
            continue
        which = str(i) if len(wanted_leaves) > 1 else ""
        for difference in _of_leaf(one, other, symbols, shifts):
            yield Difference(difference.what, difference.expected, difference.found, which)


def _of_leaf(wanted: Any, found: Any, symbols: SymbolValues, shifts: Sequence[int] | None) -> Iterator[Difference]:
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        yield from _of_tensor(wanted, found, symbols, shifts)
    elif isinstance(wanted, Tensor) and found is None and wanted.shape == (0,):
        return  # the token that orders effects: an empty tensor when traced, None when run
    elif isinstance(wanted, Tensor) or isinstance(found, Tensor):
        yield Difference("kind", type(wanted).__name__, type(found).__name__)
    elif isinstance(wanted, (*_NUMBERS, *_SYMBOLIC)) and isinstance(found, _NUMBERS):
        yield from _of_number("value", wanted, found, symbols)


def _of_number(what: str, wanted: Any, found: Any, symbols: SymbolValues) -> Iterator[Difference]:
    expected = symbols.expected(wanted, found)
    if expected is not None and expected != found and not (expected != expected and found != found):
        yield Difference(what, _shown(wanted, expected), str(found))
    elif reason := symbols.out_of_range(wanted, found):
        yield Difference(f"range of {what}", reason, str(found))


def _of_tensor(
    wanted: Tensor, found: Tensor, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[Difference]:
    for what in ("dtype", "device", "layout"):
        one, other = getattr(wanted, what), getattr(found, what)
        if one != other and not (what == "device" and _same_device(one, other)):
            yield Difference(what, str(one), str(other))
    if wanted.dim() != found.dim():
        yield Difference("number of dimensions", str(wanted.dim()), str(found.dim()))
        return
    size = [symbols.expected(one, other) for one, other in zip(wanted.shape, found.shape, strict=True)]
    if any(one is not None and one != other for one, other in zip(size, found.shape, strict=True)):
        yield Difference("size", _shown(tuple(wanted.shape), tuple(size)), str(tuple(found.shape)))
        return
    for one, other in zip(wanted.shape, found.shape, strict=True):
        if reason := symbols.out_of_range(one, other):
            yield Difference("range of size", reason, str(other))
    if wanted.layout is not torch.strided or found.layout is not torch.strided:
        return
    if found.numel() > 0:
        yield from _of_memory(wanted, found, symbols, shifts)


def _of_memory(
    wanted: Tensor, found: Tensor, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[Difference]:
    stride = [symbols.expected(one, other) for one, other in zip(wanted.stride(), found.stride(), strict=True)]
    pairs = zip(found.shape, stride, found.stride(), strict=True)
    if any(size > 1 and one is not None and one != other for size, one, other in pairs):
        yield Difference("stride", _shown(wanted.stride(), tuple(stride)), str(found.stride()))
        filled = [other if one is None else one for one, other in zip(stride, found.stride(), strict=True)]
        if is_contiguous(found.shape, filled) != found.is_contiguous():
            yield Difference("contiguity", *("contiguous", "not contiguous")[:: -1 if found.is_contiguous() else 1])
    if shifts is None:
        return
    starts = [int(found.storage_offset()) - shift for shift in shifts]
    offset = symbols.expected(wanted.storage_offset(), starts[0])
    if offset is not None and offset not in starts:
        yield Difference("offset", _shown(wanted.storage_offset(), offset), str(starts[0]))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether memory of these sizes and strides is one block in order; dimensions of one element do not count."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def _same_device(one: torch.device, other: torch.device) -> bool:
    """`cuda` and `cuda:0` are the same where only one of them has a number."""
    numbers: set[int | None] = {one.index, other.index}
    return one.type == other.type and None in numbers


def _shown(wanted: Any, value: Any) -> str:
    text = str(wanted)
    return text if text == str(value) or value is None else f"{text} = {value}"
