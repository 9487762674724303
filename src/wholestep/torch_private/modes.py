"""Process-wide settings of torch that change what eager computes: deterministic algorithms, TF32, autocast, ...

Most public getters are properties written in Python (200 ns and more each). A guard reads all modes at every call, so
these are the functions of `torch._C` behind them. 2.11, 2.13; names that a version does not have are left out.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint
from torch.autograd import forward_ad as _forward_ad
from torch.nn.utils import parametrize as _parametrize
from torch.utils._device import DeviceContext

_C: Any = torch._C


@dataclass(frozen=True)
class Mode:
    """One mode or setting of the process."""

    name: str
    """As the user writes it."""
    get: Callable[[], Any]
    set: Callable[[Any], Any] | None = None
    """None if only a context manager can set it."""
    set_by_torch: bool = False
    """Whether torch itself changes it at first use (the order of SDPA backends, on Hopper)."""
    by_kernels: str = ""
    """The device type whose kernels read it at run time ("any" for all); "" if tracing resolves it."""


def _c_mode(name: str, getter: str, setter: str = "", by_kernels: str = "") -> list[Mode]:
    get = getattr(_C, getter, None)
    set_ = getattr(_C, setter or getter.replace("_get_", "_set_"), None)
    return [] if get is None else [Mode(name, get, set_, by_kernels=by_kernels)]


def _fp32(name: str, backend: str, op: str, device: str) -> list[Mode]:
    if not hasattr(_C, "_get_fp32_precision_getter"):
        return []
    get = partial(_C._get_fp32_precision_getter, backend, op)
    return [Mode(name, get, partial(_C._set_fp32_precision_setter, backend, op), by_kernels=device)]


def _set_deterministic(value: bool) -> None:
    _C._set_deterministic_algorithms(value, warn_only=_C._get_deterministic_algorithms_warn_only())


def _set_warn_only(value: bool) -> None:
    _C._set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=value)


def _set_reduction(setter: str) -> Callable[[Any], None]:
    """Setter of a setting that is one flag (2.11) or two (2.13)."""
    function = getattr(_C, setter)
    return lambda value: function(*value) if isinstance(value, tuple) else function(value)


def _in_module(module: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    values = vars(module)
    return partial(operator.getitem, values, name), partial(operator.setitem, values, name)


def _default_device() -> Any:
    """The devices of `torch.set_default_device` and `with torch.device(..)`; other function modes unchanged."""
    if not (n := _C._len_torch_function_stack()):
        return None
    modes = [_C._get_function_stack_at(i) for i in range(n)]
    return [str(mode.device) if isinstance(mode, DeviceContext) else mode for mode in modes]


_SMALLEST_NORMAL = 2.2250738585072014e-308


def _flushes_denormals() -> bool:
    """torch has no getter, but Python's own arithmetic runs under the same flag of the CPU."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def _autocast_devices() -> Any:
    """Devices for which autocast is enabled, with their dtypes. Costs one call if there are none."""
    if not _C._is_any_autocast_enabled():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d))


def _set_autocast_devices(value: Any) -> None:
    wanted = dict(value)
    for device in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device) != (device in wanted):
            torch.set_autocast_enabled(device, device in wanted)
        if device in wanted:
            torch.set_autocast_dtype(device, wanted[device])


def _autocast_dtypes() -> list[Mode]:
    """The dtype of `torch.autocast(device)` without a dtype."""
    return [
        Mode(
            f"torch.get_autocast_dtype({device!r})",
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )
        for device in ("cpu", "cuda")
    ]


def _opt_einsum() -> list[Mode]:
    backend: Any = torch.backends.opt_einsum
    if not backend.is_available():
        return []
    return [
        Mode(f"torch.backends.opt_einsum.{name}", partial(getattr, backend, name), partial(setattr, backend, name))
        for name in ("enabled", "strategy")
    ]


def _gpu_libraries() -> list[Mode]:
    if not _C._has_cuda:
        return []  # these return enums, which are slow to create
    return [
        *_c_mode("torch.backends.cuda.preferred_linalg_library", "_get_linalg_preferred_backend", "", "cuda"),
        *_c_mode("torch.backends.cuda.preferred_blas_library", "_get_blas_preferred_backend", "", "cuda"),
        *_c_mode("torch.backends.cuda.preferred_rocm_fa_library", "_get_rocm_fa_preferred_backend"),
    ]


_MATMUL = "torch.backends.cuda.matmul"
_CUDNN = "torch.backends.cudnn"
_MKLDNN = "torch.backends.mkldnn"

MODES: tuple[Mode, ...] = (
    Mode("torch.is_grad_enabled()", torch.is_grad_enabled, _C._set_grad_enabled),
    Mode("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled),
    Mode("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype, by_kernels="any"),
    Mode("the default device (torch.set_default_device)", _default_device),
    Mode("autocast", _autocast_devices, _set_autocast_devices),
    *_autocast_dtypes(),
    Mode("torch.is_autocast_cache_enabled()", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Mode("torch.use_deterministic_algorithms", _C._get_deterministic_algorithms, _set_deterministic, by_kernels="any"),
    Mode(
        "torch.use_deterministic_algorithms(warn_only=)",
        _C._get_deterministic_algorithms_warn_only,
        _set_warn_only,
        by_kernels="any",
    ),
    *_c_mode(
        "torch.utils.deterministic.fill_uninitialized_memory",
        "_get_deterministic_fill_uninitialized_memory",
        "",
        "any",
    ),
    # Precision of float32 products, as set by torch.set_float32_matmul_precision and the allow_tf32 flags.
    *_fp32(f"{_MATMUL}.fp32_precision (torch.set_float32_matmul_precision, allow_tf32)", "cuda", "matmul", "cuda"),
    *_fp32(f"{_CUDNN}.conv.fp32_precision (allow_tf32)", "cuda", "conv", "cuda"),
    *_fp32(f"{_CUDNN}.rnn.fp32_precision (allow_tf32)", "cuda", "rnn", "cuda"),
    *_fp32(f"{_MKLDNN}.matmul.fp32_precision (torch.set_float32_matmul_precision)", "mkldnn", "matmul", "any"),
    *_fp32(f"{_MKLDNN}.conv.fp32_precision", "mkldnn", "conv", "any"),
    *_fp32(f"{_MKLDNN}.rnn.fp32_precision", "mkldnn", "rnn", "any"),
    Mode(
        f"{_MATMUL}.allow_fp16_reduced_precision_reduction",
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _set_reduction("_set_cublas_allow_fp16_reduced_precision_reduction"),
        by_kernels="cuda",
    ),
    Mode(
        f"{_MATMUL}.allow_bf16_reduced_precision_reduction",
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _set_reduction("_set_cublas_allow_bf16_reduced_precision_reduction"),
        by_kernels="cuda",
    ),
    *_c_mode(f"{_MATMUL}.allow_fp16_accumulation", "_get_cublas_allow_fp16_accumulation", "", "cuda"),
    *_c_mode(
        "torch.backends.cpu fp16 reduced-precision reduction",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "",
        "any",
    ),
    *_c_mode(f"{_CUDNN}.enabled", "_get_cudnn_enabled", "", "cuda"),
    *_c_mode(f"{_CUDNN}.benchmark", "_get_cudnn_benchmark", "", "cuda"),
    *_c_mode(f"{_CUDNN}.deterministic", "_get_cudnn_deterministic", "", "cuda"),
    *_c_mode(f"{_CUDNN}.depthwise_kernel", "_get_cudnn_depthwise_kernel", "", "cuda"),
    *_c_mode("torch.backends.miopen.immediate", "_get_miopen_immediate", "", "cuda"),
    *_c_mode(f"{_MKLDNN}.enabled", "_get_mkldnn_enabled", "", "any"),
    *_c_mode(f"{_MKLDNN}.deterministic", "_get_mkldnn_deterministic", "", "any"),
    *_c_mode("torch.backends.nnpack", "_get_nnpack_enabled", "", "any"),
    *_c_mode("torch.backends.quantized.engine", "_get_qengine", "", "any"),
    *_gpu_libraries(),
    # Which attention kernels are enabled, and in what order they are tried.
    *_c_mode("torch.backends.cuda.enable_flash_sdp", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    *_c_mode("torch.backends.cuda FlashAttention 3", "_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    *_c_mode(
        "torch.backends.cuda.enable_mem_efficient_sdp", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"
    ),
    *_c_mode("torch.backends.cuda.enable_math_sdp", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    *_c_mode("torch.backends.cuda.enable_cudnn_sdp", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    *_c_mode("the overrideable SDPA backend", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    *_c_mode("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp", "_get_math_sdp_allow_fp16_bf16_reduction"),
    *(
        replace(mode, set_by_torch=True)
        for mode in _c_mode("the priority of SDPA backends (sdpa_kernel(set_priority=True))", "_get_sdp_priority_order")
    ),
    Mode("torch.backends.mha.set_fastpath_enabled", *_in_module(torch.backends.mha, "_is_fastpath_enabled")),
    *_opt_einsum(),
    Mode("torch.set_flush_denormal", _flushes_denormals, torch.set_flush_denormal, by_kernels="any"),
    Mode(
        "torch.sparse.check_sparse_tensor_invariants",
        _C._check_sparse_tensor_invariants,
        _C._set_check_sparse_tensor_invariants,
    ),
    Mode("torch.utils.checkpoint.set_checkpoint_early_stop", *_in_module(_checkpoint, "_enable_checkpoint_early_stop")),
    Mode("torch.autograd.forward_ad.dual_level", *_in_module(_forward_ad, "_current_level")),
    Mode("torch.autograd.graph.disable_saved_tensors_hooks", _C._autograd._saved_tensors_hooks_is_enabled),
)
"""All modes except those for which a call runs in eager (`mode_that_needs_eager`).

Left out, because no result depends on it: the number of threads (operators read it at run time, and a compiled region
sums in the order that it was compiled for), autograd's multithreading, printing, warnings, `torch.__future__` (a step
that converts modules is refused).
"""

_GETTERS = tuple(mode.get for mode in MODES)


def read_modes(getters: tuple[Callable[[], Any], ...] = _GETTERS) -> tuple[Any, ...]:
    """The values of all modes, in the order of `MODES`."""
    return tuple(map(operator.call, getters))


def same_mode(before: Any, now: Any) -> bool:
    """Whether two values of a mode mean the same: precision "none" is unset, which is IEEE."""
    return bool(before == now) or (before in _IEEE and now in _IEEE)


_IEEE = ("none", "ieee")


_OLD_PRECISION = (
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
)


def read_old_precision() -> list[Any]:
    """The precision of float32 by the older interface; None after a use of the newer one, which disables it."""
    found = []
    for getter, _ in _OLD_PRECISION:
        try:
            found.append(getattr(_C, getter)())
        except RuntimeError:
            found.append(None)
    return found


def set_modes(values: tuple[Any, ...], old_precision: list[Any]) -> None:
    """Restore all modes that differ; the older interface first, because it raises after a use of the newer one."""
    if all(map(same_mode, values, read_modes())):
        return
    for (_, setter), before, now in zip(_OLD_PRECISION, old_precision, read_old_precision(), strict=True):
        if before is not None and before != now:
            getattr(_C, setter)(before)
    for mode, before, now in zip(MODES, values, read_modes(), strict=True):
        if mode.set is not None and not same_mode(before, now):
            mode.set(before)


def kernel_modes(cuda: bool) -> tuple[Mode, ...]:
    """Settings that kernels read at run time: a replay runs under the settings of the process at that moment."""
    return tuple(m for m in MODES if m.by_kernels == "any" or (cuda and m.by_kernels == "cuda"))


_stack_of_dispatch_modes = _C._len_torch_dispatch_stack
_stack_of_function_modes = _C._len_torch_function_stack
_saved_tensor_hooks = _C._autograd._top_saved_tensors_default_hooks
_functions_off = _C._is_torch_function_all_disabled
_jit_trace = _C._get_tracing_state
_parametrizations = vars(_parametrize)


def mode_that_needs_eager() -> str | None:
    """The name of an active mode that acts on every operator of the eager step, which a replay would ignore; else None.

    Read at every call: seven calls into C if no mode is active.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return "torch.autograd.detect_anomaly"
    if _stack_of_dispatch_modes():
        return f"the dispatch mode {type(_C._get_dispatch_stack_at(_stack_of_dispatch_modes() - 1)).__name__}"
    if n := _stack_of_function_modes():
        for mode in (_C._get_function_stack_at(i) for i in range(n)):
            if not isinstance(mode, DeviceContext):
                return f"the function mode {type(mode).__name__}"
    if _saved_tensor_hooks(True) is not None:
        return "torch.autograd.graph.saved_tensors_hooks"
    if _functions_off():
        return "torch._C.DisableTorchFunction"
    if _jit_trace() is not None:
        return "torch.jit.trace"
    if _parametrizations["_cache_enabled"]:
        return "torch.nn.utils.parametrize.cached"
    return None


def import_what_keeps_print() -> None:
    """Import `torch.export._trace`, which keeps `print` and the methods of loggers as they are at that time and copies
    them in each export: it must not meet functions that a capture put in their place. 2.11, 2.13."""
    importlib.import_module("torch.export._trace")


def autocast_caches_casts() -> bool:
    """Whether casts of weights are kept until the end of the `torch.autocast` block around the caller
    (`_is_any_autocast_enabled`). 2.11, 2.13."""
    return bool(_C._is_any_autocast_enabled()) and torch.is_autocast_cache_enabled()


class AutocastBlock:
    """Tells whether two moments are in one `torch.autocast` block: whether the cast of a weight is still cached.

    The cast of a leaf is one function of autograd as long as it is in the cache. About 10 us a call. 2.11, 2.13.
    """

    def __init__(self) -> None:
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._casts: dict[str, object] = {}

    def enter(self) -> bool:
        """Whether this is the block of the last call of `enter`."""
        casts: dict[str, object] = {}
        for device, _ in _autocast_devices():
            if device not in self._weights:
                self._weights[device] = torch.nn.Parameter(torch.zeros(1, 1, device=device, dtype=torch.float32))
            weight = self._weights[device]
            with torch.enable_grad():
                product: Any = torch.mm(weight, weight)
            casts[device] = product.grad_fn.next_functions[0][0]
        before, self._casts = self._casts, casts
        return any(before.get(device) is cast for device, cast in casts.items())
