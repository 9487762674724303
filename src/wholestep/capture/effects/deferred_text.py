"""Text of numbers and tensors that are known only when the graph ran: filled in after each run.

    f"loss {loss.item():.3f}"        the f-string holds a mark; print, logging, lists and results fill it in
    "%.3f" % loss.item()             the same, where the format is written in the code (`FormatText`)
    print(loss), f"{tensor}"         the tensor as eager shows it

Formatting must return a `str` at once, so it returns a placeholder in private-use characters, a mark. Concatenation and
join preserve marks. Code that needs the text itself (its length, a comparison, a key) is refused: by the class
`DeferredText`, and where Python has built a plain `str` of several pieces by a second trace, in which text is plain.
"""

from __future__ import annotations

import dis
import gc
import re
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from wholestep.capture.objects.objects_found_by_calls import EarlierTraces, TraceAgain
from wholestep.capture.scalars.python_scalars import symbolic_scalar
from wholestep.capture.scalars.symbolic_scalars import ScalarNode, scalar_of
from wholestep.errors import ItemError, Location, WholestepError
from wholestep.ir.deferred import DeferredNumber, ShownLeaf
from wholestep.ir.meta import user_location

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_OPEN, _CLOSE = "\ue0d7", "\ue0d8"
_MARK = re.compile(f"{_OPEN}([0-9]+)_*{_CLOSE}")
_WIDTH = 40
"""Characters of a mark: longer than the text of a number, so that padding it is noticed."""


class _Piece:
    """One mark: a function of numbers, shown tensors and plain values that gives a text."""

    def __init__(self, function: Callable[..., str], args: tuple[Any, ...], line: Location | None) -> None:
        self.function = function
        self.args = args
        self.line = line
        self.is_used = False


class Texts:
    """The marks of one trace."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._pieces: list[_Piece] = []
        self._shown = 0

    def mark(self, function: Callable[..., str], *args: Any) -> str:
        """A text that stands for `function(*args)` after the run. Arguments: numbers of the graph (`ScalarNode`), shown
        tensors, other marks and plain values."""
        self._pieces.append(_Piece(function, args, user_location()))
        number = str(len(self._pieces) - 1)
        made = DeferredText(f"{_OPEN}{number}{'_' * (_WIDTH - 2 - len(number))}{_CLOSE}")
        made.texts = self
        return made

    def of_tensor(self, function: Callable[..., str], tensor: Tensor, *rest: Any) -> str:
        """The text of a tensor."""
        self._shown += 1
        return self.mark(function, ShownLeaf(self._capture.effects.shown(tensor), self._shown), *rest)

    def deferred(self, text: str) -> DeferredNumber:
        """A text with marks as something that the runtime evaluates."""
        leaves: list[Any] = []
        pieces = self._parts(text, leaves)
        trial = _evaluate(pieces, _trial_of, {})

        def evaluate(leaf: Callable[[Any], Any], memo: dict[int, Any]) -> str:
            return _evaluate(pieces, leaf, memo)

        return DeferredNumber("a text", tuple(dict.fromkeys(leaves)), evaluate, trial)

    def _parts(self, text: str, leaves: list[Any]) -> list[Any]:
        found: list[Any] = []
        at = 0
        for match in _MARK.finditer(text):
            found.append(str.__getitem__(text, slice(at, match.start())))
            at = match.end()
            piece = self._pieces[int(match.group(1))]
            piece.is_used = True
            found.append((piece.function, [self._argument(arg, leaves) for arg in piece.args]))
        found.append(str.__getitem__(text, slice(at, None)))
        broken = [part for part in found if isinstance(part, str) and (_OPEN in part or _CLOSE in part)]
        if broken:
            raise needs_text("a part of a text", self._pieces[-1].line)
        return found

    def _argument(self, arg: Any, leaves: list[Any]) -> Any:
        if isinstance(arg, ScalarNode):
            leaves += arg.leaves()
        elif isinstance(arg, ShownLeaf):
            leaves.append(arg)
        elif has_mark(arg):
            return _Text(self._parts(arg, leaves))
        elif type(arg) is tuple:
            return _Arguments([self._argument(item, leaves) for item in arg])
        return arg

    def refuse_unused(self) -> None:
        """Raise if a mark reached no place that a replay fills in: how the step used it is not known."""
        for piece in self._pieces:
            if not piece.is_used:
                raise ItemError(
                    "the text of a value that is known only when the step ran is used where a replay does not fill it "
                    "in.",
                    fix="use it in print, logging, tqdm or the result, keep it in an attribute, list or dict; or make "
                    "it outside of the step.",
                    location=piece.line,
                )

    def forget_inner(self, text: str) -> None:
        """A mark that became a part of another one counts as used with it."""
        for match in _MARK.finditer(text):
            self._pieces[int(match.group(1))].is_used = True


class _Text:
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


class _Arguments:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


def _evaluate(parts: list[Any], leaf: Callable[[Any], Any], memo: dict[int, Any]) -> str:
    made = []
    for part in parts:
        if isinstance(part, str):
            made.append(part)
        else:
            function, args = part
            made.append(function(*(_value(arg, leaf, memo) for arg in args)))
    return "".join(made)


def _value(arg: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    if isinstance(arg, ScalarNode):
        return arg.trial if leaf is _trial_of else arg.evaluate(leaf, memo)
    if isinstance(arg, ShownLeaf):
        return leaf(arg)
    if isinstance(arg, _Text):
        return _evaluate(arg.parts, leaf, memo)
    if isinstance(arg, _Arguments):
        return tuple(_value(item, leaf, memo) for item in arg.items)
    return arg


class _TrialTensor:
    """Stands for a shown tensor when two traces are compared."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"<tensor {self._number}>"

    def __format__(self, spec: str) -> str:
        return f"<tensor {self._number}:{spec}>"

    def __float__(self) -> float:
        return float(self._number)


def _trial_of(leaf: Any) -> Any:
    assert isinstance(leaf, ShownLeaf), "numbers have their own trial value"
    return _TrialTensor(leaf.number)


def has_mark(value: Any) -> bool:
    """Whether a value is a text that is filled in after the run."""
    return isinstance(value, str) and str.__contains__(value, _OPEN)


def needs_text(why: str, location: Location | None = None) -> ItemError:
    """The error for code that needs the text itself."""
    return ItemError(
        f"{why} needs the text of a value that is known only when the step ran.",
        fix="return the tensor from the step and make the text outside. (Such a text may be printed, logged, returned "
        "and kept; it is filled in after the run.)",
        location=location or user_location(),
    )


class DeferredText(str):
    """A mark. It may be concatenated with other text; operations that need the text itself are deferred or refused."""

    texts: Texts

    def __format__(self, spec: str) -> str:
        return self._later(format, spec) if spec else self

    def __str__(self) -> str:
        return self

    def _later(self, function: Callable[..., str], *args: Any) -> str:
        self.texts.forget_inner(self)
        return self.texts.mark(function, self, *args)


def _put_off(name: str) -> Callable[..., str]:
    function: Callable[..., str] = getattr(str, name)

    def method(self: DeferredText, *args: Any) -> str:
        return self._later(function, *args)

    return method


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: DeferredText, *args: Any, **kwargs: Any) -> NoReturn:
        raise needs_text({"__len__": "len()", "__hash__": "a key"}.get(name, name.strip("_")))

    return method


_LATER = "ljust rjust center zfill strip lstrip rstrip upper lower title capitalize swapcase replace".split()
_KEPT = ("__new__", "__init__", "__format__", "__str__", "__add__", "__class__", "__doc__", "__dir__", "join")
for _name in _LATER:
    setattr(DeferredText, _name, _put_off(_name))
for _name, _method in list(vars(str).items()):
    _is_ours = _name in _LATER or _name in _KEPT or (_name.startswith("__") and hasattr(object, _name))
    if callable(_method) and (not _is_ours or _name in ("__eq__", "__ne__", "__hash__", "__lt__", "__le__")):
        setattr(DeferredText, _name, _refused(_name))


class FormatText(str):
    """A text with `%` in the code of a function: its `%` makes text that is filled in after the run."""

    texts: Texts

    @property
    def wholestep_real(self) -> str:
        """The text itself."""
        return str.__str__(self)

    def __mod__(self, values: Any) -> Any:
        items = values if type(values) is tuple else (values,)
        texts = self.texts
        if not any(_is_unknown(item) for item in items):
            return str.__mod__(self, values)
        for item in items:
            if has_mark(item):
                texts.forget_inner(item)
        kinds = [kind for kind in _CONVERSION.findall(self) if kind != "%"]
        kinds = kinds if len(kinds) == len(items) else ["s"] * len(items)
        given = tuple(_as_argument(texts, item, kind) for item, kind in zip(items, kinds, strict=True))
        return texts.mark(_formatted, str.__str__(self), given)


def _formatted(text: str, values: tuple[Any, ...]) -> str:
    return text % values


def _is_unknown(value: Any) -> bool:
    scalar = scalar_of(value)
    return (scalar is not None and scalar.is_deferred) or isinstance(value, Tensor) or has_mark(value)


_CONVERSION = re.compile(r"%[#0\- +]*[0-9]*(?:\.[0-9]+)?([diouxXeEfFgGcrsa%])")


def _as_argument(texts: Texts, value: Any, kind: str) -> Any:
    if isinstance(value, Tensor) and kind not in "rsa":
        value = symbolic_scalar(value.detach().item())
    scalar = scalar_of(value)
    if scalar is not None:
        return scalar if scalar.is_deferred else scalar.specialise("text")
    if isinstance(value, Tensor):
        texts._shown += 1
        return ShownLeaf(texts._capture.effects.shown(value), texts._shown)
    return value


class NeedsFormatText(TraceAgain):
    """Ends a trace: a function formats with a text of its own, `"%.3f" % loss.item()`."""

    def __init__(self, codes: list[CodeType], refusal: WholestepError) -> None:
        super().__init__("% of a number that is not known yet")
        self.codes = codes
        self.refusal = refusal

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        earlier.formats += [code for code in self.codes if code not in earlier.formats]
        return lambda: None


_CALLERS = 8
_REMAINDER = (6, 19)
"""Arguments of BINARY_OP for `%` and `%=`."""


def formats_with_own_text(frame: FrameType) -> list[CodeType]:
    """The code of a frame that is about to evaluate `text % ..`, if the text may be written in it; and the code of its
    callers, one of which may have made the function."""
    code = frame.f_code
    raw = code.co_code
    at = frame.f_lasti
    is_remainder = at >= 0 and _opname(raw[at]) == "BINARY_OP" and raw[at + 1] in _REMAINDER
    if not is_remainder or not any(_is_format(const) for const in code.co_consts):
        return []
    found = [code]
    caller = frame.f_back
    while caller is not None and len(found) < _CALLERS:
        if any(found[-1] is const for const in caller.f_code.co_consts):
            found.append(caller.f_code)
        caller = caller.f_back
    return found


def _opname(code: int) -> str:
    return dis.opname[code]


def _is_format(const: Any) -> bool:
    return type(const) is str and "%" in const


def swap_formats(texts: Texts, codes: list[CodeType]) -> Callable[[], None]:
    """Replace the string constants in the code of functions by `FormatText`; returns the undo function."""
    before: list[tuple[FunctionType, CodeType]] = []
    if codes and gc.get_freeze_count():
        gc.unfreeze()  # frozen objects are hidden from the search
    holders = gc.get_referrers(*codes) if codes else []
    for function in [each for each in holders if isinstance(each, FunctionType) and each.__code__ in codes]:
        before.append((function, function.__code__))
        function.__code__ = _with_formats(function.__code__, texts, set(codes))

    def undo() -> None:
        for function, code in reversed(before):
            function.__code__ = code

    return undo


def _with_formats(code: CodeType, texts: Texts, codes: set[CodeType]) -> CodeType:
    consts: list[Any] = []
    for const in code.co_consts:
        if code in codes and _is_format(const):
            made = FormatText(const)
            made.texts = texts
            consts.append(made)
        elif isinstance(const, CodeType):
            consts.append(_with_formats(const, texts, codes))
        else:
            consts.append(const)
    return code.replace(co_consts=tuple(consts))
