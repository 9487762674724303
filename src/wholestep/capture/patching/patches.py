"""The functions that are replaced in torch and Python while one step is traced.

| replaced | by | because |
|---|---|---|
| `nn.Module.__call__` | the same, recording the module's path | nodes say which module made them |
| `torch._fused_*_` | the same with scalars by name | its parser would turn a learning rate into a constant |
| `torch.batch_norm` | likewise for momentum | cumulative averages change it each step |
| `math.sqrt` and friends | the same for symbolic scalars | `float(x)` would turn a number into a constant |
| `torch.get_rng_state`, `set_rng_state`, `manual_seed` | nodes of the graph | checkpointing replays random draws |
| lists of foreach types | also FakeTensor | the trace takes the path eager takes |
| DTensor's shape propagation | the same, not recorded | it runs operators that are not part of the step |
| `nn.Module.__getattr__` | the same, gathering sharded parameters | a forward uses them unsharded |
| DTensor's split of a tensor into chunks | a node that reads its rank at run time | all ranks have the same graph |
| `FakeTensor.tolist` | a symbolic scalar per element | torch's unbinds the tensor |
| the two halves of `clip_grad_norm_` | the same over shards, one all-reduce | the norm is over all shards |
| `gc.collect` | nothing | `leftover_fakes` tells objects of the trace by their GC generation |
| the hooks that transformers adds in a forward | another trace, after adding them | eager's first call adds them, too |
| `torch.set_anomaly_enabled` | a refusal | it branches on the values of gradients |
| optimizers, schedulers, scalers | the same, detecting unknown ones | some are found only when called |
| functions of `torch.jit.script` | the Python functions as written | TorchScript bypasses all dispatch modes |
| the handler of SIGINT | `Interrupts`, which delays it | an exception in some callbacks of C++ ends the process |

Replaced functions act only on the thread that traces; other threads get the originals.
"""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

from wholestep.capture.graph.recorder import Recorder
from wholestep.capture.objects.objects_found_by_calls import (
    INSTALL_OUTPUT_HOOKS,
    CallHost,
    detect_calls,
    detect_module_call,
    install_before_trace,
    output_hooks_module,
)
from wholestep.capture.objects.user_code import is_user_code
from wholestep.capture.scalars.symbolic_scalars import ScalarNode, scalar_of
from wholestep.errors import (
    CapturedTensorError,
    ItemError,
    ParameterDataError,
    RandomStateError,
    SideEffectError,
    UnsupportedError,
)
from wholestep.ir.captured_step import NamesReplaced
from wholestep.ir.graph_functions import get_rng_state, manual_seed, number_tensor, set_rng_state
from wholestep.ir.io.node_values import hint_of
from wholestep.ir.meta import is_users_code, user_location
from wholestep.parallel.reducing import scale_by_norm, total_norm
from wholestep.parallel.session import Session
from wholestep.torch_private.distributed import PROPAGATE_SHAPES, sharding_function, sharding_propagator
from wholestep.torch_private.fake_tensors import FakeTensor, version_reads
from wholestep.torch_private.modules_and_optimizers import (
    CLIP_MODULE,
    MODULE_APPLY,
    RNN_WEIGHTS_CHANGED,
    SCALE_BY_NORM,
    TOTAL_NORM,
    adafactor_module,
    python_function_of,
    validate_distributions,
)
from wholestep.torch_private.operators import AMP_UPDATE_SCALE, FUSED_OPTIMIZER_FUNCTIONS, foreach_type_lists

_MATH = {
    name: name
    for name in ("sqrt", "exp", "log", "log2", "cos", "sin", "tan", "cosh", "sinh", "tanh", "floor", "ceil", "trunc")
} | {"pow": "float_pow"}


class PatchHost(CallHost, Protocol):
    """What the patches need from the capture."""

    module_path: str
    recorder: Recorder
    session: Session | None
    interrupts: Interrupts

    def path_of_module(self, module: nn.Module) -> str: ...

    def tolist(self, tensor: Tensor) -> Any: ...


@contextmanager
def patched(host: PatchHost) -> Iterator[None]:
    """All replacements, for the current thread, until the block ends."""
    thread = threading.get_ident()
    with ExitStack() as stack:
        stack.callback(setattr, NamesReplaced, "now", False)
        NamesReplaced.now = True

        def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
            missing = object()
            before = vars(owner).get(name, missing)
            original = getattr(owner, name, None)

            def only_here(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == thread:
                    return replacement(original, *args, **kwargs)
                assert original is not None
                return original(*args, **kwargs)

            setattr(owner, name, only_here)
            NamesReplaced.note(stack, owner, name, original)
            stack.callback(lambda: delattr(owner, name) if before is missing else setattr(owner, name, before))

        patch(nn.Module, "__call__", lambda original, *a, **k: _call_module(host, original, *a, **k))
        detect_calls(host, patch, stack, is_here=lambda: threading.get_ident() == thread)
        if host.session is not None:
            _patch_parallel(host.session, patch)
        for name in FUSED_OPTIMIZER_FUNCTIONS:
            patch(torch, name, lambda original, *a, **k: _with_named_scalars(host, original, (), a, k))
        patch(torch, "batch_norm", lambda original, *a, **k: _with_named_scalars(host, original, _BATCH_NORM, a, k))
        patch(
            torch, AMP_UPDATE_SCALE, lambda original, *a, **k: _with_named_scalars(host, original, _UPDATE_SCALE, a, k)
        )
        for name in _MATH:
            patch(math, name, lambda original, *a, _name=name, **k: _math(_name, original, *a, **k))
        for name in ("isnan", "isinf", "isfinite"):
            patch(math, name, partial(_is_special, name))
        patch(batchnorm, "float", lambda original, value: _float(value))
        for name, method in (("min", "sym_min"), ("max", "sym_max")):
            patch(adafactor_module(), name, lambda original, a, b, _m=method: _extremum(_m, a, b))
        patch(nn.Module, MODULE_APPLY, _refuse_module_change)
        patch(nn.Module, "register_parameter", _refuse_module_change)
        patch(nn.Module, "__setattr__", _set_attribute)
        patch(nn.RNNBase, RNN_WEIGHTS_CHANGED, lambda original, module: False)
        patch(torch.jit.ScriptFunction, "__call__", _as_written)
        patch(torch, "set_anomaly_enabled", _refuse_anomaly)
        stack.enter_context(version_reads(_refuse_version))
        patch(FakeTensor, "tolist", lambda original, tensor: host.tolist(tensor))
        patch(torch, "from_numpy", _refuse_array)
        patch(torch, "save", _refuse_file)
        patch(gc, "collect", lambda original, *a, **k: 0)
        patch(torch, "tensor", partial(_tensor_of_numbers, host))
        patch(torch, "as_tensor", partial(_tensor_of_numbers, host))
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            patch(kind, "__repr__", _text_of_size)
            patch(kind, "__str__", _text_of_size)
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None and hasattr(masking, "is_tracing"):
            patch(masking, "is_tracing", _causal_mask_is_traced)
        if (hooks := output_hooks_module()) is not None:
            patch(hooks, INSTALL_OUTPUT_HOOKS, partial(install_before_trace, host.world.modules))
        before = validate_distributions(False)
        stack.callback(validate_distributions, before)
        if (propagator := sharding_propagator()) is not None:
            patch(propagator, PROPAGATE_SHAPES, lambda original, *a: _not_recorded(host, original, *a))
        _patch_rng(host, patch)
        for types in foreach_type_lists():
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        yield


_UPDATE_SCALE = (
    "self",
    "growth_tracker",
    "found_inf",
    "scale_growth_factor",
    "scale_backoff_factor",
    "growth_interval",
)
_BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


def _refuse_module_change(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise ParameterDataError(
        f"the step converts or replaces parameters of a {type(module).__name__}.",
        fix="convert the module outside of the step; to change values, write into parameters under torch.no_grad().",
        location=user_location(),
    )


def _set_attribute(original: Any, module: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, nn.Parameter) and value is not vars(module).get("_parameters", {}).get(name):
        _refuse_module_change(original, module)
    original(module, name, value)


def _as_written(original: Any, scripted: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the Python function of a TorchScript function: TorchScript bypasses all dispatch modes."""
    return (python_function_of(scripted) or partial(original, scripted))(*args, **kwargs)


def _refuse_array(original: Any, array: Any) -> Any:
    raise CapturedTensorError(
        f"torch.from_numpy reads an array of shape {array.shape} that the graph would not see change.",
        fix="make the tensor outside of the step and pass it as an argument.",
        location=user_location(),
    )


def _text_of_size(original: Any, size: Any) -> str:
    asker = sys._getframe(2)
    if scalar_of(size) is None and hint_of(size) is None and is_users_code(asker.f_code):
        raise ItemError(
            "the text of a size that the values of a tensor decide is needed while the step is captured.",
            fix="return the size from the step and print it outside.",
            location=user_location(),
        )
    return str(original(size))


def _refuse_version(tensor: Tensor) -> None:
    if is_user_code(sys._getframe(2).f_code):
        raise ItemError(
            f"the step asks how often a tensor of shape {tuple(tensor.shape)} was written (its version counter), and a "
            "replay counts otherwise.",
            fix="ask outside of the step.",
            location=user_location(),
        )


def _refuse_file(original: Any, *args: Any, **kwargs: Any) -> None:
    raise SideEffectError(
        "the step writes a file with torch.save, which a replay would not repeat.",
        fix="save checkpoints outside of the step.",
        location=user_location(),
    )


def _refuse_anomaly(original: Any, mode: bool, check_nan: bool = True) -> None:
    if mode and check_nan:
        raise UnsupportedError(
            "the step checks for NaN in its backward (detect_anomaly), which raises for some values of tensors.",
            fix="put torch.autograd.detect_anomaly() around the call: that call then runs in eager.",
            location=user_location(),
        )
    original(mode, check_nan)


def _not_recorded(host: PatchHost, original: Any, *args: Any) -> Any:
    values = host.recorder.values
    before, values.paused = values.paused, True
    try:
        return original(*args)
    finally:
        values.paused = before


def _call_module(host: PatchHost, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    host.interrupts.check()
    detect_module_call(host, module)
    before = host.module_path
    host.module_path = host.path_of_module(module)
    if isinstance(module, nn.RNNBase) and module.dropout and module.training and next(module.parameters()).is_cuda:
        raise UnsupportedError(
            f"{host.module_path} has dropout between its layers, whose random state cuDNN keeps to itself.",
            fix="use dropout=0 in the RNN and nn.Dropout between single-layer RNNs.",
            location=user_location(),
        )
    try:
        if host.session is not None:
            return host.session.call(original, module, args, kwargs)
        return original(module, *args, **kwargs)
    finally:
        host.module_path = before


def _patch_parallel(session: Session, patch: Callable[..., None]) -> None:
    patch(nn.Module, "__getattr__", lambda original, module, name: session.attribute(original(module, name)))
    patch(CLIP_MODULE, TOTAL_NORM, partial(total_norm, session.collectives))
    patch(CLIP_MODULE, SCALE_BY_NORM, scale_by_norm)
    patch(*sharding_function(), session.own_chunk)
    if session.wrappers is not None:
        patch(DistributedDataParallel, "forward", session.wrapped_forward)


def _with_named_scalars(
    host: PatchHost, original: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call with the values of symbolic scalars; the recorder puts the scalars themselves into the node, by name."""
    scalars: dict[str, ScalarNode] = {}
    plain: list[Any] = []
    for i, arg in enumerate(args):
        scalar = scalar_of(arg)
        if scalar is not None and i < len(names) and scalar.hint is not None:
            scalars[names[i]] = scalar
            arg = scalar.hint
        plain.append(arg)
    for name, arg in list(kwargs.items()):
        scalar = scalar_of(arg)
        if scalar is not None and scalar.hint is not None:
            scalars[name] = scalar
            kwargs[name] = scalar.hint
    if not scalars:
        return original(*plain, **kwargs)
    recorder = host.recorder
    recorder.named_scalars, recorder.used_scalars = scalars, set()
    try:
        result = original(*plain, **kwargs)
    finally:
        recorder.named_scalars = {}
    for scalar in scalars.values():
        if id(scalar) not in recorder.used_scalars:
            scalar.specialise("an operator that takes the number under another name")
    return result


def _math(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    args = tuple(a.item() if isinstance(a, FakeTensor) else a for a in args)
    scalars = [scalar_of(a) for a in args]
    first = next((s for s in scalars if s is not None), None)
    if first is None or kwargs or len(args) > 2:
        return original(*args, **kwargs)
    operands = [s or first.wrap_float(float(a)) for s, a in zip(scalars, args, strict=True)]
    return getattr(operands[0], _MATH[name])(*operands[1:]).as_python()


def _is_special(name: str, original: Any, number: Any) -> Any:
    """`math.isnan(loss.item())` and the like as comparisons, which a branch may decide."""
    scalar = scalar_of(number.item() if isinstance(number, FakeTensor) else number)
    if scalar is None or not scalar.is_deferred:
        return original(number)
    if name == "isnan":
        return bool(scalar.apply("ne", scalar).as_python())
    is_infinite = scalar.apply("eq", math.inf).as_python() or scalar.apply("eq", -math.inf).as_python()
    return is_infinite if name == "isinf" else not (is_infinite or scalar.apply("ne", scalar).as_python())


def _tensor_of_numbers(host: PatchHost, original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.tensor(lr)`, `torch.tensor([lr, 1.0])`: a tensor of symbolic scalars instead of a constant."""
    kinds = _kinds_of_numbers(data)
    if not kinds or args or set(kwargs) - {"dtype", "device", "requires_grad"}:
        return original(data, *args, **kwargs)
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if float in kinds else torch.int64)
    if scalar_of(data) is not None:
        return torch.full((), data, **{**kwargs, "dtype": dtype})
    made = torch.empty(_shape_of(data), dtype=dtype, device=kwargs.get("device"))
    node = host.recorder.emit_function(number_tensor, (_as_arguments(data), dtype, made.device), made)
    host.recorder.values.register_result(made, node)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _kinds_of_numbers(data: Any) -> set[type]:
    """The types in nested lists of numbers of which at least one is symbolic; else nothing."""
    kinds: set[type] = set()
    symbolic = False
    stack = [data]
    while stack:
        item = stack.pop()
        scalar = scalar_of(item)
        if scalar is not None:
            symbolic = True
            kinds.add(scalar.kind)
        elif type(item) in (list, tuple):
            stack.extend(item)
        elif type(item) in (int, float):
            kinds.add(type(item))
        else:
            return set()
    return kinds if symbolic else set()


def _shape_of(data: Any) -> tuple[int, ...]:
    return (len(data), *_shape_of(data[0])) if type(data) in (list, tuple) else ()


def _as_arguments(data: Any) -> Any:
    if type(data) in (list, tuple):
        return [_as_arguments(item) for item in data]
    scalar = scalar_of(data)
    return data if scalar is None else scalar.fx_arg()


def _causal_mask_is_traced(original: Any, tensor: Any = None) -> bool:
    """Hugging Face skips a test of the mask for fakes, and then computes other bits than eager. Let it run the test."""
    return False


def _float(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        value = value.item()
    scalar = scalar_of(value)
    return scalar.sym_float().as_python() if scalar is not None else float(value)


def _extremum(method: str, a: Any, b: Any) -> Any:
    """Python's min and max of numbers, one of which may be known only when the step runs."""
    for this, other in ((a, b), (b, a)):
        scalar = scalar_of(this)
        if scalar is not None:
            second = scalar_of(other) or scalar.wrap_float(float(other))
            first, last = (scalar, second) if this is a else (second, scalar)
            return getattr(first, method)(last).as_python()
    return min(a, b) if method == "sym_min" else max(a, b)


def _patch_rng(host: PatchHost, patch: Callable[..., None]) -> None:
    def get_state(device: str) -> Tensor:
        state = torch.empty(_state_size(device), dtype=torch.uint8, device="cpu")
        node = host.recorder.emit_function(get_rng_state, (device,), state)
        host.recorder.values.register_result(state, node)
        host.recorder.random_devices[device] = None
        return state

    def set_state(state: Tensor, device: str) -> None:
        host.recorder.emit_function(set_rng_state, (host.recorder.node_of(state), device), None)
        host.recorder.random_devices[device] = None

    def seed(original: Any, value: int) -> Any:
        if not isinstance(value, int):
            raise RandomStateError(
                "the step seeds the generator with a value that is not a plain int.",
                fix="seed outside of the step.",
                location=user_location(),
            )
        host.recorder.emit_function(manual_seed, (int(value),), None)
        return torch.default_generator

    for owner in (torch, torch.random):
        patch(owner, "get_rng_state", lambda original: get_state("cpu"))
        patch(owner, "set_rng_state", lambda original, new_state: set_state(new_state, "cpu"))
        patch(owner, "manual_seed", seed)
    patch(torch.cuda, "get_rng_state", lambda original, device="cuda": get_state(_cuda(device)))
    patch(
        torch.cuda,
        "set_rng_state",
        lambda original, new_state, device="cuda": set_state(new_state, _cuda(device)),
    )


def _cuda(device: Any) -> str:
    resolved = torch.device("cuda", device) if type(device) is int else torch.device(device)
    index: int | None = resolved.index
    return f"cuda:{torch.cuda.current_device() if index is None else index}"


def _state_size(device: str) -> int:
    if device == "cpu":
        return int(torch.default_generator.get_state().numel())
    torch.cuda.init()  # type: ignore[no-untyped-call]  # as in eager; before it there are no generators
    return int(torch.cuda.default_generators[torch.device(device).index].get_state().numel())


class Interrupts:
    """Delays Ctrl-C during one trace on the main thread until it can be raised: between operators.

    Python runs signal handlers between any two bytecodes, also in Python that C++ calls. A KeyboardInterrupt that is
    raised in some of those callbacks ends the process (`error_already_set`), and one while the user's objects are
    restored leaves fakes in them. So the first SIGINT is recorded and passed to the previous handler at the next safe
    point: before an operator is recorded, before a module is called, or after everything is restored. A second one is
    passed on at once, in case the step never reaches an operator; but not while objects are replaced or restored. Other
    threads get no signals, and change nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._frame: FrameType | None = None
        self._waiting = False
        self._shielded = True

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._arrived)
        return self

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._waiting and not self._shielded:
            self._hand_on(frame)
            return
        self._waiting = True

    def check(self) -> None:
        """A safe point: pass on a SIGINT that arrived."""
        if self._waiting and not self._shielded:
            self._hand_on(None)

    def allow(self) -> None:
        """User code runs from now on."""
        self._shielded = False

    def shield(self) -> None:
        """Objects are restored from now on: nothing is passed on before the end."""
        self._shielded = True

    def _hand_on(self, frame: FrameType | None) -> None:
        self._waiting = False
        self._before(signal.SIGINT, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        if signal.getsignal(signal.SIGINT) == self._arrived:  # unless the step set a handler of its own
            signal.signal(signal.SIGINT, self._before)
        if self._waiting:
            self._hand_on(None)
