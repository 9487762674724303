"""Compile the forward and backward of a function or module, once for each shape of its inputs.

torch's `aot_function` traces at the first call and replays that trace on whatever comes later; here a call whose inputs
differ in shape, stride, dtype, device, aliasing or requires_grad, whose other arguments differ, or that runs in another
grad mode, autocast or train/eval state is traced on its own. Tied parameters of a module are one input.

With `dynamic=True` sizes are symbols, and a trace is reused for all sizes that meet its assumptions (`AssumedSizes`):
sizes and ints that were equal have one symbol (torch's duck shaping), 0 and 1 are constants, guards are conditions on
symbols. Strides follow from sizes where a tensor is dense; one that is not has the same sizes and strides at each call.

`aot_function` and `aot_module` are `aot` with the arguments of functorch's functions of these names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.compilers.run_unchanged import Compiler
from wholestep.errors import UnsupportedError
from wholestep.torch_private.aot import aot_function as torchs_aot_function
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.symbolic_shapes import shape_env_of_trace, shape_guards, symbols_by_value

TORCHS = (
    "aot_module_simplified",
    "config",
    "default_partition",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "pythonkey_decompose",
)
"""Names of `functorch.compile` that are torch's own here too."""


def aot(fn: Callable[..., Any], **settings: Any) -> Any:
    """`fn` with `fw_compiler`, `bw_compiler` and the other settings of torch's `aot_function`; a module stays one."""
    return AOTModule(fn, settings) if isinstance(fn, nn.Module) else AOTFunction(fn, settings)


class AOTFunction:
    """A function and its compiled traces."""

    def __init__(self, fn: Callable[..., Any], settings: dict[str, Any], state: Callable[[], Hashable] = tuple) -> None:
        update_wrapper(self, fn)
        self.fn = fn
        self.settings = settings
        self._state = state
        self._compiled: dict[Hashable, list[_Trace]] = {}
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        dynamic = bool(self.settings.get("dynamic"))
        key = (self._state(), *_modes(), str(spec), *_shapes_of(leaves, dynamic))
        traces = self._compiled.setdefault(key, [])
        for trace in traces:
            if trace.fits(leaves):
                return trace(*args, **kwargs)
        trace = _Trace(self.fn, self.settings)
        result = trace(*args, **kwargs)
        trace.remember(leaves if dynamic else None)
        traces.append(trace)
        return result

    @property
    def graphs(self) -> int:
        """How many times the function was traced."""
        return sum(len(traces) for traces in self._compiled.values())


class _Trace:
    """One trace of torch's `aot_function`, which turns a tuple of results into a list; here it stays a tuple."""

    def __init__(self, fn: Callable[..., Any], settings: dict[str, Any]) -> None:
        self._fn = fn
        self._returned: type | None = None
        self._env: Any = None
        self._assumed: AssumedSizes | None = None
        self._compiled = torchs_aot_function(self._noting, **settings)

    def _noting(self, *args: Any, **kwargs: Any) -> Any:
        self._env = shape_env_of_trace()
        result = self._fn(*args, **kwargs)
        self._returned = type(result)
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._compiled(*args, **kwargs)
        return tuple(result) if type(result) is list and self._returned is tuple else result

    def remember(self, leaves: list[Any] | None) -> None:
        """Record what the trace assumed of the sizes of these inputs; None: only what the key has."""
        if leaves is not None and self._env is not None:
            self._assumed = AssumedSizes(self._env, leaves)
        self._env = None

    def fits(self, leaves: list[Any]) -> bool:
        """True if inputs of the same key may be given to this trace."""
        return self._assumed is None or self._assumed.hold_for(leaves)


class AOTModule(nn.Module):
    """A module whose forward and backward are compiled; its parameters are those of `orig_module`."""

    def __init__(self, module: nn.Module, settings: dict[str, Any]) -> None:
        super().__init__()
        self.orig_module = module
        state = dict(self._state())
        self.compiled = AOTFunction(
            self._call, {"num_params_buffers": len(state), **settings}, lambda: _training(module)
        )

    def _state(self) -> list[tuple[str, Tensor]]:
        return [*self.orig_module.named_parameters(), *self.orig_module.named_buffers()]

    def _call(self, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(state)
        result = torch.func.functional_call(self.orig_module, state, args, kwargs)
        # After the call, the dictionary of functional_call has what the module holds under these names.
        for name, value in given.items():
            if state[name] is not value:
                raise UnsupportedError(
                    f"the module replaces its {name!r} by a new tensor, which a compiled forward cannot do.",
                    fix=f"write into the old one: self.{name}.copy_(...); or use torch.compile with a ws_ backend.",
                )
        return result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.compiled(dict(self._state()), args, kwargs)


def _training(module: nn.Module) -> Hashable:
    return tuple(each.training for each in module.modules())


def _modes() -> tuple[Hashable, ...]:
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _shapes_of(leaves: list[Any], dynamic: bool) -> tuple[Hashable, ...]:
    first: dict[int, int] = {}
    found: list[Hashable] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            found.append(_plain(leaf, dynamic))
            continue
        geometry: tuple[Hashable, ...] = (leaf.dtype, leaf.device, leaf.requires_grad, type(leaf))
        if leaf.layout is torch.strided:
            geometry += pattern_of(leaf) if dynamic else (tuple(leaf.shape), leaf.stride())
            # Two inputs that share memory, or are one tensor, are traced as such.
            geometry += (leaf.storage_offset(), first.setdefault(storage_key(leaf), place))
            geometry += (first.setdefault(-id(leaf), place),)
        else:
            geometry += (tuple(leaf.shape), leaf.layout)
        found.append(geometry)
    return tuple(found)


def _plain(value: Any, dynamic: bool) -> Hashable:
    """The key of a non-tensor leaf. 0.0 equals -0.0, and NaN does not equal itself: floats are compared as text."""
    if isinstance(value, float):
        return type(value), repr(value)
    if dynamic and type(value) is int and value not in (0, 1):
        return int, value < 0
    return type(value), value if isinstance(value, Hashable) else id(value)


def pattern_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """What two tensors must have in common for one trace: where sizes are 0 or 1, and the order of dense strides."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    dense, step = True, 1
    for dim in order:
        dense = dense and tensor.stride(dim) == step
        step *= tensor.shape[dim]
    if not dense or not tensor.numel():
        return tuple(tensor.shape), tensor.stride()
    return tuple(size if size == 1 else -1 for size in tensor.shape), tuple(order)


class AssumedSizes:
    """The sizes of one traced call, and the conditions on them."""

    def __init__(self, env: Any, leaves: Sequence[Any]) -> None:
        self._env = env
        self._traced = _numbers(leaves)
        self._held: tuple[int, list[int]] = (-1, [])

    def hold_for(self, leaves: Sequence[Any]) -> bool:
        """True if equal sizes are equal again, 0 and 1 are where they were, and all guards are true."""
        guards, sizes = shape_guards(self._env), _numbers(leaves)
        # Compiling the backward may add guards.
        if self._held != (len(guards), sizes):
            if not self._check(guards, sizes):
                return False
            self._held = len(guards), sizes
        return True

    def _check(self, guards: list[Any], sizes: list[int]) -> bool:
        now: dict[int, int] = {}
        for before, after in zip(self._traced, sizes, strict=True):
            if now.setdefault(before, after) != after or ((before in (0, 1) or after in (0, 1)) and before != after):
                return False
        symbols = symbols_by_value(self._env)
        values = {symbol: now[value] for value, symbol in symbols.items() if value in now}
        # A guard on other symbols cannot be evaluated, and counts as false.
        return all(guard.subs(values) == True for guard in guards)  # noqa: E712 (sympy's true)


def _numbers(leaves: Sequence[Any]) -> list[int]:
    found: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found += leaf.shape
        elif type(leaf) is int:
            found.append(abs(leaf))  # a negative int is minus a symbol
    return found


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] | None = None,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    **settings: Any,
) -> AOTFunction:
    """`fn` with its forward and backward compiled, once for each kind of call.

    `partition_fn` None is torch's `default_partition`. `dynamic`: sizes are symbols. `settings`: those of torch's
    `aot_function` that are for experts (`enable_log`, `disable_functionalization`).
    """
    given: dict[str, Any] = {
        "fw_compiler": fw_compiler,
        "bw_compiler": bw_compiler,
        "decompositions": decompositions,
        "keep_inference_input_mutations": keep_inference_input_mutations,
        "inference_compiler": inference_compiler,
        "dynamic": dynamic,
    }
    if num_params_buffers:
        given["num_params_buffers"] = num_params_buffers
    if partition_fn is not None:
        given["partition_fn"] = partition_fn
    return AOTFunction(fn, {**given, **settings})


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> AOTModule:
    """A module with its forward and backward compiled; the other arguments are those of `aot_function`."""
    return AOTModule(mod, aot_function(mod, *args, **kwargs).settings)
