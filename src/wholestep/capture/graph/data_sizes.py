"""Data-dependent sizes (`x[mask].shape[0]`): unbacked symbols, and the branches that torch and user code take on them.

    keep = labels != -100
    y = logits[keep]               y has u0 rows; the graph reads u0 = sym_size(y, 0) at each run
    y.mean() + y.shape[0] / 8      u0 is a value of the graph
    if y.shape[0] == 0: ..         a branch: no graph is right for both outcomes

While a step is traced, torch's own code branches on sizes too, and many of these branches only choose between
equivalent implementations ("is it contiguous?", "is there anything to drop?"). They go the way of a size of 2 or more:

    below the recorder   by the shape rule of an operator that is recorded as one node. The outcome does not matter:
                         at run time its kernel decides again
    above it             by an operator that is decomposed into its parts. If a size of 0 or 1 would take the other
                         branch, the graph checks at run time that there is none. (Formulas of autograd, and a few
                         functions, only branch to save work: `_SHORTCUTS`)

Branches of user code, and those whose outcome is not the same for all such sizes (`u0 > 5`), are refused with the line.
With assume=True the branch goes the way of the traced call, and the graph checks that (`decisions`); the same holds for
a size that is needed as a number: `for expert in hit.nonzero()`.
What torch (or `torch._check`) assumes of the sizes is checked at run time, before the step writes anything.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import sympy
import torch

from wholestep.capture.patching.conversions import ask_by_stand_in
from wholestep.errors import ControlFlowError, DataShapeError, Location
from wholestep.ir.meta import is_users_code, user_location
from wholestep.torch_private.autograd import current_autograd_node
from wholestep.torch_private.symbolic_shapes import (
    SIZE_FILES,
    ShapeEnv,
    data_symbols,
    fix_symbol,
    highest_value,
    is_condition,
    known_answer,
)

_CONVERSIONS = frozenset({"__bool__", "__int__", "__index__", "__float__", "__eq__", "__ne__", "wrapper", "inner"})
_SHORTCUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout cdist linear matmul "
    "__matmul__ __rmatmul__ bmm".split()
)
"""Functions that branch only to save work: for 0 or 1 elements both branches return the same."""
_ORDINARY = (2, 3, 4, 7, 16, 61, 1000)
_MOST_CONSTANTS = 12


class DataSizeEnv(ShapeEnv):
    """A ShapeEnv that decides torch's branches on data-dependent sizes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.below_recorder = False
        """Whether what runs is recorded as one node already, or not at all."""
        self.decide: Callable[[Any], bool | None] | None = None
        """Which way a branch of user code goes; None if that is refused."""
        self.assume: Callable[[Any], int | None] | None = None
        """The value that a size has in this call, if the graph may be for this value alone; None if that is refused."""
        self.conditions: list[tuple[Any, str]] = []
        """Conditions on sizes that the graph has to check, each with what it is for."""

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
        """A new size. (The list of sizes that no operator binds yet is for traces of torch's own.)"""
        made = super().create_unbacked_symint(*args, **kwargs)
        self.pending_fresh_unbacked_symbols.clear()
        return made

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of an expression of sizes; for those that data decides, that of ordinary sizes."""
        has_fallback = kwargs.get("fallback_value") is not None or len(args) > 4
        if not has_fallback and data_symbols(self, args[0]) and known_answer(self, args[0]) is None:
            return self._answer(args[0])
        return super().evaluate_expr(*args, **kwargs)

    def _answer(self, expression: Any) -> Any:
        if not is_condition(expression) and self.assume is not None:
            value = self.assume(expression)
            if value is not None:
                if expression.is_Symbol:
                    fix_symbol(self, expression, value)
                return sympy.Integer(value)
        asker, from_python = _asking_frame(sys._getframe(1))
        if from_python and is_users_code(asker.f_code):
            refusal = _asked_by_user(expression)
            ask_by_stand_in(asker, refusal)
            decided = self.decide(expression) if self.decide is not None and is_condition(expression) else None
            if decided is None:
                raise refusal
            return sympy.true if decided else sympy.false
        found = _answers(self, expression, 2) if is_condition(expression) else set()
        if len(found) != 1:
            raise needs_number(expression)
        answer = found.pop()
        if not self.below_recorder and current_autograd_node() is None and _function_of(asker) not in _SHORTCUTS:
            self._check_small_sizes(expression, answer)
        return sympy.true if answer else sympy.false

    def _check_small_sizes(self, expression: Any, answer: bool) -> None:
        """An operator that is recorded as its parts has others for a size of 0 or 1."""
        if _answers(self, expression, 0) != {answer}:
            holds = expression if answer else sympy.Not(expression)
            self.conditions.append((holds, "torch computes this in another way for such a size"))


def _answers(env: ShapeEnv, expression: Any, least: int) -> set[bool]:
    """What an expression gives for sizes from `least` on."""
    symbols = sorted(expression.free_symbols, key=str)
    constants = sorted({abs(int(n)) for n in expression.atoms(sympy.Integer)})[:_MOST_CONSTANTS]
    near = {a // b + d for a in constants for b in (1, *constants) if b for d in (-1, 0, 1)}
    sizes = sorted(n for n in {*_ORDINARY, *near, least} if n >= least)
    tops = [highest_value(env, symbol) for symbol in symbols]
    found: set[bool] = set()
    steps = itertools.product(range(len(sizes)), (0, 1, 3))
    for i, step in steps:
        values = [sizes[(i + k * step) % len(sizes)] for k in range(len(symbols))]
        if all(top is None or value <= max(top, least) for value, top in zip(values, tops, strict=True)):
            found.add(bool(expression.xreplace(dict(zip(symbols, map(sympy.Integer, values), strict=True)))))
    return found


def _asking_frame(frame: FrameType) -> tuple[FrameType, bool]:
    """The Python code that asks for the value of a size, or that called the operator in C++ which does (False)."""
    found, from_python = _above(frame), False
    while _is_conversion(found):
        found, from_python = _above(found), True
    return found, from_python


def _above(frame: FrameType) -> FrameType:
    """The next frame outside of torch's code between the caller and the ShapeEnv."""
    above = frame.f_back
    while above is not None and (above.f_code.co_filename in SIZE_FILES or above.f_code.co_name == "evaluate_expr"):
        above = above.f_back
    assert above is not None
    return above


def _function_of(frame: FrameType) -> str:
    """The name of the function of torch's that the frame is in, or that it calls."""
    called = frame.f_locals.get("func") if frame.f_code.co_name == "__torch_function__" else None
    return str(getattr(called, "__name__", frame.f_code.co_name))


def _is_conversion(frame: FrameType) -> bool:
    return frame.f_code.co_filename == torch.__file__ and frame.f_code.co_name in _CONVERSIONS


def _asked_by_user(expression: Any) -> ControlFlowError | DataShapeError:
    if not is_condition(expression):
        return needs_number(expression)
    return ControlFlowError(
        f"Python branches on {expression}, where {_named(expression)} a size that the values of a tensor decide.",
        fix="leave the branch out where an empty tensor does no harm (index_add of no rows adds nothing), use "
        "torch.sym_max(n, 1) instead of max(n, 1), say what always holds with torch._check(n > 0); or compile with "
        "assume=True, where the branch only checks.",
        location=user_location(),
    )


def _named(expression: Any) -> str:
    names = sorted(map(str, expression.free_symbols))
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are each'}"


def needs_number(expression: Any) -> DataShapeError:
    """A size that data decides is needed as a plain number."""
    return DataShapeError(
        f"the value of {expression} is needed while the step is captured, and the values of a tensor decide "
        f"{' and '.join(sorted(map(str, expression.free_symbols)))}.",
        fix="compute with the size as it is (x.shape[0] instead of int(..) or range(..)); say what always holds of it "
        "with torch._check(x.shape[0] <= limit); use a form of fixed shape: a mask multiplied in, torch.where; or "
        "compile with assume=True, where this size is nearly always the same.",
        location=user_location(),
    )


def takes_no_symbols(location: Location | None) -> DataShapeError:
    """Code in C++ asks a tensor for plain sizes."""
    return DataShapeError(
        "an operator needs plain sizes of a tensor, and a symbol stands for one of them: the values of a tensor decide "
        "it, or dynamic= declares it.",
        fix="use a form of fixed shape: a mask multiplied in, torch.where. Under FullyShard, use parameters in the "
        "forward of the module that has them, where they are whole.",
        location=location,
    )


def unknown_size(expression: Any) -> DataShapeError:
    """A size that no recorded operator made."""
    return DataShapeError(
        f"the size {expression} depends on the values of a tensor, and no recorded operator has a result of this size.",
        fix="compute the size from the shape of a tensor (x.shape[0]) instead of from its values.",
        location=user_location(),
    )


def assumption_text(holds: Any, why: str, location: Location | None) -> str:
    """What the error of a condition says, if it does not hold at run time."""
    what = str(holds) if str(holds) in why else f"{holds}: {why}"
    return what if location is None else f"{what} (at {location})"
