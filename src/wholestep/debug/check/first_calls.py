"""`ws.compile(check_first=N)`: the first N calls of a step run in eager as well, and stop before anything wrong stays.

The check stands in the place of the step's method that runs a call, and takes itself away after N calls: later calls
pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wholestep.capture.trace import is_tracing
from wholestep.debug.check.location import locate
from wholestep.debug.check.loop import first_of, report_of
from wholestep.debug.check.report import error_of
from wholestep.debug.check.side_by_side import Compared, StepCall, compare_call

_LAST = "last_train_step"
_METHOD = "_run"


class FirstCalls:
    """Stands in for `CompiledStep._run` until enough calls were equal."""

    def __init__(self, step: Any, count: int) -> None:
        self._step = step
        self._left = count

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self._step
        if is_tracing():
            return fn(*args, **kwargs)  # a compiled step inside of another is a part of it
        last = not step._has_own_last and kwargs.get(_LAST)
        named = kwargs if step._has_own_last else {key: value for key, value in kwargs.items() if key != _LAST}

        def refuse(compared: Compared) -> None:
            first = locate(step, args, named, first_of(compared.different))
            raise error_of(report_of(step, [compared], 1, first))

        compared = compare_call(step, StepCall(fn, args, named), in_double=False, on_difference=refuse)
        self._left -= 1
        if self._left == 0:
            vars(step).pop(_METHOD, None)
        if last:
            step.flush()
        return compared.result

    @classmethod
    def stand_in(cls, step: Any, count: int) -> None:
        """Put a check in the place of a step's method."""
        vars(step)[_METHOD] = cls(step, count)
