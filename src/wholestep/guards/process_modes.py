"""Guard on the modes and settings of the process that decide what eager would compute (`torch_private.modes`)."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.guards.guard import Call, Guard
from wholestep.torch_private.modes import MODES, read_modes, same_mode


class SameModes(Guard):
    """The process is in the modes of the capture."""

    def __init__(self) -> None:
        self._before = read_modes()

    def holds(self, call: Call) -> bool:
        now = read_modes()
        if now == self._before:
            return True
        if not all(map(same_mode, self._before, now)):
            return False
        self._before = now  # another spelling of the same
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for mode, before, now in zip(MODES, self._before, read_modes(), strict=True):
            if not same_mode(before, now):
                yield f"{mode.name} is {now}, and was {before} at the capture"
