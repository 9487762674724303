"""Process-wide settings that the step itself switches while it is traced.

with torch.backends.mkldnn.flags(enabled=False):     kernels read such a setting when they run: a replay would
    h = conv(x)                                      run them under the settings of its own time. Refused.
with sdpa_kernel(SDPBackend.MATH): ...               resolved by tracing, which records another operator: captured
torch.set_default_dtype(torch.float64)               left changed at the end: a replay would not repeat it. Refused.
"""

from __future__ import annotations

import torch

from wholestep.errors import SideEffectError, UnsupportedError
from wholestep.ir.user_location import user_location
from wholestep.torch_private.modes import MODES, kernel_modes, read_modes, read_old_precision, same_mode, set_modes


class ProcessSettings:
    """The settings when the trace began."""

    def __init__(self) -> None:
        self._before = read_modes()
        self._old_precision = read_old_precision()
        self._kernel_modes = kernel_modes(cuda=torch.cuda.is_available())
        self._getters = tuple(mode.get for mode in self._kernel_modes)
        self._for_kernels = read_modes(self._getters)

    def check_operator(self) -> None:
        """Refuse an operator that is to run under other settings than the step began with."""
        now = read_modes(self._getters)
        if now == self._for_kernels:
            return
        for mode, before, value in zip(self._kernel_modes, self._for_kernels, now, strict=True):
            if not same_mode(before, value):
                raise UnsupportedError(
                    f"the step sets {mode.name} to {value} (it was {before}), and its operators would be replayed "
                    "under what is set at the time.",
                    fix="set it before the step and leave it.",
                    location=user_location(),
                )

    def refuse_left_changed(self) -> None:
        """Refuse a step that ends under other settings than it began with."""
        for mode, before, now in zip(MODES, self._before, read_modes(), strict=True):
            if not same_mode(before, now) and not mode.set_by_torch:
                raise SideEffectError(
                    f"the step leaves {mode.name} at {now} (it was {before}), which a replay would not repeat.",
                    fix="set it outside of the step, or set it back at the end.",
                )

    def restore(self) -> None:
        """Set back what the step, or an exception in it, left changed."""
        set_modes(self._before, self._old_precision)
