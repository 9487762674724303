"""What wholestep relies on in `torch_private/modes.py`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from torch_private.contract_table import contracts_of
from wholestep.torch_private import modes

of = contracts_of("modes")


def _other(mode: modes.Mode) -> Any:
    """Another value than a mode has; itself where another one might not be available on this machine."""
    now = mode.get()
    if isinstance(now, bool):
        return not now
    if isinstance(now, torch.dtype):
        return torch.float64 if "default" in mode.name else torch.float16
    return (
        {"ieee": "tf32", "none": "tf32"}.get(now, now)
        if isinstance(now, str) and "fp32_precision" in mode.name
        else now
    )


@of("Mode", "MODES", "read_modes", "same_mode", "read_old_precision", "set_modes", "kernel_modes")
def each_mode_that_is_set_is_read_and_restored() -> None:
    before, old = modes.read_modes(), modes.read_old_precision()
    changed = set[str]()
    try:
        for mode in modes.MODES:
            other = _other(mode)
            if mode.set is None or modes.same_mode(other, mode.get()) or mode.name.startswith("torch.autograd"):
                continue
            try:
                mode.set(other)
            except RuntimeError as error:
                assert "not supported" in str(error), mode.name  # noqa: PT017 (by this machine)
                continue
            assert mode.get() == other, mode.name
            changed.add(mode.name)
            modes.set_modes(before, old)
            assert all(map(modes.same_mode, before, modes.read_modes())), mode.name
    finally:
        modes.set_modes(before, old)
    assert len(changed) >= 20
    assert {mode.by_kernels for mode in modes.kernel_modes(False)} == {"any"}
    assert len(modes.kernel_modes(True)) > len(modes.kernel_modes(False))
    assert len(old) == 3


PUBLIC: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.is_grad_enabled()": torch.no_grad,
    "torch.is_inference_mode_enabled()": torch.inference_mode,
    "the default device (torch.set_default_device)": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "torch.autograd.forward_ad.dual_level": forward_ad.dual_level,
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.flags(enabled=False),
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.flags(enabled=False),
    "torch.backends.cuda.enable_math_sdp": lambda: torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.FLASH_ATTENTION
    ),
    "torch.utils.checkpoint.set_checkpoint_early_stop": lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False),
    "torch.autograd.graph.disable_saved_tensors_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"),
}
"""What users write, by the mode that must see it."""


@of("MODES", "DeviceContext")
def what_users_write_changes_the_mode_of_its_name() -> None:
    known = {mode.name: mode.get for mode in modes.MODES}
    for name, context in PUBLIC.items():
        before = known[name]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with context():
                assert known[name]() != before, name
        assert known[name]() == before, name
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert known["torch.use_deterministic_algorithms"]()
        assert known["torch.use_deterministic_algorithms(warn_only=)"]()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.device("meta"):
        assert isinstance(torch._C._get_function_stack_at(0), DeviceContext)


class _Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Function(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@of("mode_that_needs_eager")
def modes_that_act_on_every_operator_are_named() -> None:
    assert modes.mode_that_needs_eager() is None
    contexts: dict[str, AbstractContextManager[Any]] = {
        "detect_anomaly": torch.autograd.set_detect_anomaly(True),
        "the dispatch mode _Dispatch": _Dispatch(),
        "the function mode _Function": _Function(),
        "saved_tensors_hooks": torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        "DisableTorchFunction": torch._C.DisableTorchFunction(),
        "parametrize.cached": parametrize.cached(),
    }
    for name, context in contexts.items():
        with context:
            assert name in str(modes.mode_that_needs_eager())
    with torch.device("cpu"):
        assert modes.mode_that_needs_eager() is None
    seen = list[str | None]()

    def traced(x: Tensor) -> Tensor:
        seen.append(modes.mode_that_needs_eager())
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert seen == ["torch.jit.trace"]


@of("import_what_keeps_print")
def export_keeps_functions_that_it_copies() -> None:
    modes.import_what_keeps_print()
    assert "torch.export._trace" in sys.modules


@of("autocast_caches_casts", "AutocastBlock")
def the_cast_of_a_weight_is_the_same_in_one_block_of_autocast() -> None:
    assert not modes.autocast_caches_casts()
    block = modes.AutocastBlock()
    assert not block.enter()
    with torch.autocast("cpu", torch.bfloat16):
        assert modes.autocast_caches_casts()
        assert [block.enter(), block.enter()] == [False, True]
    with torch.autocast("cpu", torch.bfloat16):
        assert [block.enter(), block.enter()] == [False, True]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert not modes.autocast_caches_casts()
        assert [block.enter(), block.enter()] == [False, False]
    assert not block.enter()
