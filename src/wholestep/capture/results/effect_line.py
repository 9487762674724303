"""The user's line of an effect that is only seen after the trace: a list that grew, a generator that moved.

Such a refusal says what changed and carries an `Effect`: how to see it. The step is then traced once more, with a check
after each line of user code; the first line after which the effect is there caused it. Only refusals pay for it.

    def train_step(x):
        self.losses.append(x.sum())     <- before this line the list had 3 elements, and now 4
        loss = model(x).mean()
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from wholestep.capture.objects.user_code import is_user_code
from wholestep.errors import Location, WholestepError
from wholestep.ir.meta import location_of
from wholestep.ir.user_objects.plain_contents import CONTAINERS, ArrayCopy, copy_of, same_contents, same_plain
from wholestep.torch_private.fake_tensors import without_functions_and_modes

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture


@dataclass(frozen=True)
class Effect:
    """How to detect an effect: what `read` returns then differs from what it returned before the step."""

    read: Callable[[Capture], Any]
    same: Callable[[Any, Any], bool] = same_plain


def contents_effect(container: Any) -> Effect:
    """The contents of a list, dict, set or deque change."""
    return Effect(lambda capture: copy_of(container), lambda before, now: same_contents(before, now))


def value_effect(read: Callable[[], Any]) -> Effect:
    """A place holds another value, or a container with other contents."""

    def read_both(capture: Capture) -> Any:
        value = read()
        return value, copy_of(value) if type(value) in CONTAINERS else None

    def same(before: Any, now: Any) -> bool:
        if not same_plain(now[0], before[0]):
            return False
        return before[1] is None or now[1] is None or same_contents(before[1], now[1])

    return Effect(read_both, same)


def array_effect(array: Any) -> Effect:
    """The contents of an array change."""
    return Effect(lambda capture: ArrayCopy(array, ""), lambda before, now: bool(before.is_same()))


class LineWatch:
    """Finds the line of user code after which an effect is there."""

    def __init__(self, effect: Effect, capture: Capture) -> None:
        self._effect = effect
        self._capture = capture
        self._before: Any = None
        self._begun = False
        self._now: Location | None = None
        """The line that is running."""
        self.found: Location | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check after each line that this thread runs in the block."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.found is not None or not is_user_code(frame.f_code):
            return None
        if not self._begun:
            self._begun, self._before = True, self._read()
        self._check()
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.found is None and event in ("line", "return"):
            self._check()
            self._now = location_of(frame if event == "line" else _user_frame(frame.f_back))
        return None if self.found is not None else self._line

    def _check(self) -> None:
        if self._now is not None and not self._effect.same(self._before, self._read()):
            self.found = self._now

    def _read(self) -> Any:
        with without_functions_and_modes():  # the state of a generator is a tensor, and none of the trace
            return self._effect.read(self._capture)


def with_line_of_effect(error: WholestepError, capture: Capture) -> WholestepError:
    """The error with the line of its effect, if a second trace, which `capture` runs, finds it."""
    effect = error.effect
    if not isinstance(effect, Effect):
        return error
    watch = LineWatch(effect, capture)
    capture.line_watch = watch
    # The second trace fails like the first one, whose error is raised in any case; what it prints was printed.
    with (
        contextlib.suppress(Exception),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        contextvars.copy_context().run(capture.run)
    if watch.found is None:
        return error
    return error.at(location_of_line(watch.found))


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return frame


def location_of_line(location: Location) -> Location:
    """A location with its text."""
    return replace(location, text=linecache.getline(location.file, location.line).strip())
