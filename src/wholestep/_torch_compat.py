"""Every private torch name that wholestep uses, what it is for, and the versions it was tried on (2.11 and 2.13).

Nothing else in the package may touch a name of torch that starts with an underscore.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import sympy
import torch
from torch import Tensor, fx
from torch._C._dynamo.guards import TensorGuards as _TensorGuards
from torch._C._dynamo.guards import dict_version as _dict_version
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses import fake_tensor as _fake_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.fx.graph import CodeGen
from torch.utils import _pytree as _pytree
from torch.utils._mode_utils import no_dispatch as _no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy import functions as _sympy_functions
from torch.utils._sympy.numbers import int_oo as _int_oo
from torch.utils._sympy.value_ranges import ValueRanges as _ValueRanges

from wholestep._torch_compat_fake_rules import RULES as _FAKE_RULES

# OpOverload: the type of a resolved operator such as `torch.ops.aten.add.Tensor`. 2.11, 2.13.
# OpOverloadPacket: what `torch.ops.aten.add` is; the JSON reader accepts no other object there. 2.11, 2.13.
# HigherOrderOperator: the type of operators that take functions (`cond`, `auto_functionalized`). 2.11, 2.13.

pytree = _pytree
"""torch's own trees of tensors: the registry that users and Hugging Face register with. 2.11, 2.13."""

FakeTensor = _fake_tensor.FakeTensor
"""The tensor without data that capture runs the user's code on. 2.11, 2.13."""


class FakeTensorMode(_fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]
    """Computes FakeTensors, by our rules where torch's will not do. 2.11, 2.13."""

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """What an operator gives, for fake tensors."""
        rule = _FAKE_RULES.get(func)
        if rule is not None:
            with self:
                found = rule(*args, **(kwargs or {}))
            if found is not None:
                return found
        return super().dispatch(func, types, args, kwargs or {})


DataDependentOutputException = _fake_tensor.DataDependentOutputException
DynamicOutputShapeException = _fake_tensor.DynamicOutputShapeException
UnsupportedOperatorException = _fake_tensor.UnsupportedOperatorException
"""Raised by FakeTensorMode where a result depends on values, or an operator has no fake kernel. 2.11, 2.13."""


def without_modes() -> AbstractContextManager[Any]:
    """Run on real tensors inside a dispatch mode (`_disable_current_modes`). 2.11, 2.13."""
    return _disable_current_modes()


def below_autograd() -> AbstractContextManager[Any]:
    """Run kernels as autograd runs them: nothing is recorded, grad mode is not touched. 2.11, 2.13.

    Some kernels look at the grad mode (oneDNN's LSTM keeps its workspace only where it is on): `no_grad` would not do.
    """
    return torch._C._AutoDispatchBelowAutograd()


def find_overloads(namespace: str, name: str) -> list[OpOverload]:
    """All overloads of `namespace::name`; none if there is no such operator."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]


def schema_of(op: OpOverload) -> Any:
    """The schema of an operator (`OpOverload._schema`). 2.11, 2.13."""
    return op._schema


def op_name(op: OpOverload) -> str:
    """`aten::add.Tensor`, or `aten::mm` for a default overload (`OpOverload.name`, which has no types). 2.11, 2.13."""
    return str(op.name())  # type: ignore[no-untyped-call]


def plain_name(op: OpOverload) -> str:
    """The name without its overload, and for torch's own operators without `aten::`: `add_` of `aten::add_.Tensor`."""
    return op_name(op).removeprefix("aten::").partition(".")[0]


def kernel_call(op: OpOverload) -> Callable[..., Any]:
    """What calling an operator calls, without the Python frame around it (`OpOverload._op`). 2.11, 2.13."""
    found: Callable[..., Any] = op._op
    return found


def overload_name(op: OpOverload) -> str:
    """`Tensor` of `aten.add.Tensor` (`OpOverload._overloadname`). 2.11, 2.13."""
    return op._overloadname


def process_group_size(name: str) -> int:
    """How many ranks the process group of this name has; 0 if this process has none of that name. 2.13."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return int(resolve(name).size())
    except RuntimeError:
        return 0


def has_autograd_kernel(op: OpOverload) -> bool:
    """Whether an operator of torch.library has a backward of its own (or is a custom_op, whose results never are its
    inputs for autograd). 2.11, 2.13."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), "Autograd"))


def gradient_leaves(functions: Sequence[Any]) -> list[Tensor]:
    """The tensors into which a backward from some functions of autograd accumulates (`AccumulateGrad.variable`).
    2.11, 2.13."""
    found: list[Tensor] = []
    stack, seen = [f for f in functions if f is not None], set()
    while stack:
        function = stack.pop()
        if function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            found.append(function.variable)
        stack += [after for after, _ in function.next_functions if after is not None]
    return found


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor, equal for all its views (`UntypedStorage._cdata`). 2.11, 2.13."""
    return int(tensor.untyped_storage()._cdata)


def new_fake(mode: _fake_tensor.FakeTensorMode, like: Tensor, sizes: Sequence[Any] | None = None) -> Tensor:
    """A FakeTensor with the geometry of `like` and memory of its own, or contiguous with other `sizes`. 2.11, 2.13.

    Much cheaper than `FakeTensorMode.from_tensor`, which also handles subclasses and views of inputs.
    """
    if sizes is None:
        elem = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    else:
        elem = torch.empty(tuple(sizes), dtype=like.dtype, device="meta")
    return FakeTensor(mode, elem, like.device)


def generator_key(generator: torch.Generator) -> int:
    """Identity of a generator; dispatch hands out a new Python object each time (`Generator._cdata`). 2.11, 2.13."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def cuda_is_initialized() -> bool:
    """Whether this process uses CUDA (`torch.cuda.is_initialized`, which has no types). 2.11, 2.13."""
    initialized: Any = torch.cuda.is_initialized
    return bool(initialized())


def held_by_torch(tensor: Tensor) -> int:
    """References to a tensor's Python object that C++ has (`Tensor._use_count`): one if torch holds the tensor too.

    Before torch 2.12 none, unless Python has none.
    """
    return _COUNTED if tensor._use_count() > 1 else 0  # type: ignore[attr-defined]


def _counted() -> int:
    tensor, holder = torch.zeros(1), torch.zeros(1, requires_grad=True)
    before = sys.getrefcount(tensor)
    holder.grad = tensor
    return sys.getrefcount(tensor) - before


_COUNTED = _counted()


def mark_parameter(tensor: Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true (`Tensor._is_param`). 2.11, 2.13."""
    tensor._is_param = True


def current_autograd_node() -> Any:
    """The autograd node whose backward runs on this thread, or None. 2.11, 2.13."""
    return torch._C._current_autograd_node()


def is_accumulating_gradient() -> bool:
    """Whether autograd is storing a gradient into a leaf's `.grad` on this thread. 2.11, 2.13."""
    node = current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def autograd_sequence_number() -> int:
    """How many autograd nodes were made; relates a backward node to the line of its forward. 2.11, 2.13."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_sequence_number(node: Any) -> int:
    """The number an autograd node was given when it was made. 2.11, 2.13."""
    return int(node._sequence_nr())


class DictWatch:
    """Whether some dicts were written since, by their version (Dynamo's `dict_version`). 2.11, 2.13.

    About 40 ns a dict, whatever it holds; a write of the same value counts as a change.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._versions = list(map(_dict_version, self._dicts))

    def unchanged(self) -> bool:
        """Whether no dict was written since the watch began."""
        return list(map(_dict_version, self._dicts)) == self._versions


class TensorChecks:
    """Type, dtype, device, sizes, strides and requires_grad of many tensors, compared in one C++ call.

    Dynamo's `TensorGuards`: about 20 ns a tensor, where the same in Python costs 300. 2.11, 2.13.
    """

    def __init__(self, tensors: Sequence[Tensor], dynamic_dims: Sequence[frozenset[int]], names: Sequence[str]) -> None:
        sizes = [_static(t.shape, dims) for t, dims in zip(tensors, dynamic_dims, strict=True)]
        strides = [
            [None] * t.dim() if dims else list(t.stride()) for t, dims in zip(tensors, dynamic_dims, strict=True)
        ]
        self._names = list(names)
        guards: Any = _TensorGuards
        self._guards = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all tensors still look as they did."""
        return bool(self._guards.check(*tensors))

    def explain(self, tensors: Sequence[Tensor]) -> str:
        """Why `hold` is false."""
        return str(self._guards.check_verbose(*tensors, tensor_check_names=self._names))


if TYPE_CHECKING:

    class DispatchMode:
        """TorchDispatchMode, which has no types: sees every operator below autograd. 2.11, 2.13."""

        def __enter__(self) -> Self: ...

        def __exit__(self, *error: object) -> None: ...
else:
    DispatchMode = TorchDispatchMode


def _static(sizes: Sequence[int], dynamic: frozenset[int]) -> list[int | None]:
    return [None if dim in dynamic else size for dim, size in enumerate(sizes)]


def fake_tensor(
    mode: _fake_tensor.FakeTensorMode,
    shape: Sequence[Any],
    stride: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    offset: Any = 0,
    requires_grad: bool = False,
) -> Tensor:
    """A FakeTensor of exactly this geometry, made without running the mode (12 us instead of 50). 2.11, 2.13."""
    with torch._C.DisableTorchFunction(), _no_dispatch():
        if isinstance(offset, int) and offset == 0:
            elem = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
        else:
            extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            elem = torch.empty((extent,), dtype=dtype, device="meta").as_strided(tuple(shape), tuple(stride), offset)
        fake = FakeTensor(mode, elem, device)
    return fake.requires_grad_(True) if requires_grad else fake


def symbolic_functions() -> dict[str, type]:
    """The sympy functions that symbolic shapes are written with (`torch.utils._sympy.functions`). 2.11, 2.13."""
    names = (
        "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt LShift RShift Max Min "
        "PowByNatural FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt "
        "RoundToInt RoundDecimal ToFloat Identity BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor"
    ).split()
    unary = "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2".split()
    names += [f"OpaqueUnaryFn_{name}" for name in unary]
    return {name: getattr(_sympy_functions, name) for name in names if hasattr(_sympy_functions, name)}


def symbol_range(env: ShapeEnv, symbol: Any) -> tuple[int | None, int | None]:
    """The range a ShapeEnv knows for an integer symbol; None where it is unbounded. 2.11, 2.13."""
    found = env.var_to_range.get(symbol)
    if found is None or not found.is_int:
        return None, None
    lower = None if found.lower == -_int_oo else int(found.lower)
    upper = None if found.upper == _int_oo else int(found.upper)
    return lower, upper


def register_symbol(env: ShapeEnv, symbol: Any, hint: int | float | None, lower: int | None, upper: int | None) -> None:
    """Make a symbol read from a file known to a ShapeEnv, under its own name. 2.11, 2.13."""
    if hint is not None:
        env.backed_var_to_val[symbol] = sympy.Integer(hint) if symbol.is_integer else sympy.Float(hint)
    env.var_to_sources[symbol] = []
    if symbol.is_integer:
        env.var_to_range[symbol] = _ValueRanges(
            -_int_oo if lower is None else lower, _int_oo if upper is None else upper
        )
    else:
        env.var_to_range[symbol] = _ValueRanges(-sympy.oo, sympy.oo)


def pytree_children(tree: object) -> list[object] | None:
    """The children of a registered pytree node, one level down; None for a leaf. 2.11, 2.13."""
    if pytree.tree_is_leaf(tree):
        return None
    children, _ = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    return children


def foreach_type_lists() -> list[list[Any]]:
    """The lists of tensor types for which torch picks foreach and fused kernels by default. 2.11, 2.13.

    FakeTensor joins them while a step is traced, so that the trace takes the path eager takes.
    """
    from torch.optim import optimizer as _optimizer
    from torch.utils import _foreach_utils

    lists: list[Any] = [_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
    return lists


MODULE_APPLY = "_apply"
"""The method of nn.Module behind `.to()`, `.half()`, `.cuda()`. 2.11, 2.13."""

RNN_WEIGHTS_CHANGED = "_weights_have_changed"
"""The method of nn.RNNBase that re-packs weights; fakes in place of weights would look like a change. 2.11, 2.13."""

SCALER_TENSORS = ("_scale", "_growth_tracker")
SCALER_NUMBERS = ("_growth_factor", "_backoff_factor", "_growth_interval")
SCALER_SETTINGS = ("_enabled", "_init_scale")
SCALER_STEP = "_maybe_opt_step"
"""Where a GradScaler keeps its state, its numbers and its settings, and the method that branches on inf. 2.11, 2.13."""

AMP_UPDATE_SCALE = "_amp_update_scale_"
"""The function of `torch` behind GradScaler.update; takes its factors as plain numbers. 2.11, 2.13."""

FUSED_OPTIMIZER_FUNCTIONS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""Functions of `torch` that take hyper-parameters as plain floats; wrapped while tracing. 2.11, 2.13."""


def sharding_propagator() -> Any | None:
    """The class that works out global shapes for DTensor, by running operators; None if DTensor is not in use. 2.13."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    return None if module is None else module.ShardingPropagator


PROPAGATE_SHAPES = "_propagate_tensor_meta_non_cached"
"""The method of that class that runs an operator. 2.13."""


def validate_distributions(value: bool) -> bool:
    """Whether `torch.distributions` check their arguments, which branches on data; returns what it was. 2.11, 2.13."""
    before = bool(torch.distributions.Distribution._validate_args)
    torch.distributions.Distribution.set_default_validate_args(value)
    return before


def adafactor_module() -> Any:
    """The module of torch's Adafactor, whose `min` and `max` compare numbers that a graph does not know. 2.11, 2.13."""
    from torch.optim import _adafactor

    return _adafactor


SWITCHES: tuple[Any, ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._len_torch_function_stack,
)
"""Which attention kernels are allowed, and how many function modes (a default device is one) are on. 2.11, 2.13."""


def error_in_backward(message: str) -> Any:
    """A function that returns its argument with a backward that raises (`DelayedError`). 2.11, 2.13."""
    return torch._C._functions.DelayedError(message, 1)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer stepped; without it they warn about their order. 2.11, 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def optimizer_step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Hooks around `optimizer.step` and the global ones. 2.11, 2.13."""
    from torch.optim import optimizer as _optimizer

    found: list[Any] = []
    for hooks in (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),  # absent where __init__ of Optimizer was not called
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        _optimizer._global_optimizer_pre_hooks,
        _optimizer._global_optimizer_post_hooks,
    ):
        found.extend(hooks.values())
    return found


def weight_computing_hooks() -> tuple[type, ...]:
    """Hooks that torch installs to compute a weight from others: pure arithmetic. 2.11, 2.13."""
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    return WeightNorm, SpectralNorm


def module_hooks(module: torch.nn.Module) -> list[Any]:
    """Forward and backward hooks of one module. 2.11, 2.13."""
    found: list[Any] = []
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        found.extend(hooks.values())
    return found


def hook_registries(modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The live dictionaries that hold hooks, to see at each call whether any was added. 2.11, 2.13."""
    from torch.nn.modules import module as _module
    from torch.optim import optimizer as _optimizer

    found: list[Any] = [
        _module._global_forward_pre_hooks,
        _module._global_forward_hooks,
        _module._global_backward_hooks,
        _module._global_backward_pre_hooks,
        _optimizer._global_optimizer_pre_hooks,
        _optimizer._global_optimizer_post_hooks,
    ]
    for m in modules:
        found += [m._forward_pre_hooks, m._forward_hooks, m._backward_hooks, m._backward_pre_hooks]
    for o in optimizers:
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        found += [getattr(o, name, {}) for name in names]  # absent where __init__ of Optimizer was not called
    return found


NODE_PARTS = attrgetter("op", "target", "_args", "_kwargs", "name", "type")
NODE_ARGUMENTS = attrgetter("_args")
NODE_SOURCES = attrgetter("_input_nodes")
"""What a node is, as one tuple, its arguments, and what it reads (the keys of a dict), without the cost of the
properties `args`, `kwargs` and `all_input_nodes`: verifier and pass manager look at every node of 50,000. Tried on
2.11 and 2.13."""


def call_targets(graph: fx.Graph) -> list[Any]:
    """What the `call_function` nodes of a graph call, each once, out of the table behind `find_nodes`. 2.11, 2.13."""
    table = graph._find_nodes_lookup_table.table
    return [target for (op, target), nodes in table.items() if op == "call_function" and nodes]


HOOK_ATTRIBUTES = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))
"""Read the hook dictionaries of a tensor; None where it never had a hook. 2.11, 2.13."""


def global_module_hooks() -> list[Any]:
    """Hooks registered for every module of the process. 2.11, 2.13."""
    from torch.nn.modules import module as _module

    found: list[Any] = []
    for hooks in (
        _module._global_forward_pre_hooks,
        _module._global_forward_hooks,
        _module._global_backward_hooks,
        _module._global_backward_pre_hooks,
    ):
        found.extend(hooks.values())
    return found


def tensor_hooks(tensor: Tensor) -> list[Any]:
    """Gradient hooks and post-accumulate hooks of one tensor. 2.11, 2.13."""
    found: list[Any] = list((tensor._backward_hooks or {}).values())
    found.extend((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())
    return found


def post_accumulate_hooks(tensor: Tensor) -> list[Any]:
    """Only the hooks that run after `.grad` was accumulated. 2.11, 2.13."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def new_symbol(env: ShapeEnv, hint: int, low: int, high: int | None) -> torch.SymInt:
    """A symbolic size with a known value, taken to be at least 2 (see `capture.shapes`). 2.11, 2.13."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.value_ranges import ValueRanges

    source = ConstantSource(f"wholestep_dim{len(env.var_to_range)}")
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    made: Any = env.create_symintnode(symbol, hint=hint, source=source)
    top = high if high is not None else 2**31
    env.var_to_range[made.node.expr] = ValueRanges(max(low, 2), max(top, 2))
    return made  # type: ignore[no-any-return]


def fixed_symbols(env: ShapeEnv) -> list[tuple[str, int]]:
    """Symbols that the trace found to have one value only. 2.11, 2.13."""
    return [(str(symbol), int(value)) for symbol, value in env.replacements.items() if value.is_Integer]


def shape_guards(env: ShapeEnv) -> list[Any]:
    """The sympy conditions that a trace relied on. 2.11, 2.13."""
    return [guard.expr for guard in env.guards]


def sympy_function_names(expression: Any) -> str:
    """The name of the outermost operation of a size expression."""
    return type(expression).__name__


def has_plain_codegen(graph: fx.Graph) -> bool:
    """Whether a graph takes flat positional inputs (`Graph._codegen`, which `make_fx` replaces). 2.11, 2.13."""
    return type(graph._codegen) is CodeGen


def codegen_of(graph: fx.Graph) -> CodeGen:
    """What flattens a graph's inputs and rebuilds its outputs (`Graph._codegen`). 2.11, 2.13."""
    return graph._codegen


_MOST_FAKE_RULES = 30_000  # some 30 MB; the largest captures that were seen need 5,000


def new_fake_mode(env: ShapeEnv | None) -> FakeTensorMode:
    """A mode for one capture. 2.11, 2.13.

    torch remembers for the whole process what each operator returned for each shape (`FakeTensorMode.cache`) and never
    forgets: it is emptied where captures of ever new shapes have filled it.
    """
    if len(FakeTensorMode.cache) > _MOST_FAKE_RULES:
        FakeTensorMode.cache_clear()
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=False)


def written_function(scripted: Any) -> Callable[..., Any] | None:
    """The Python function that `torch.jit.script` was given (`_torchdynamo_inline`); None for others. 2.11, 2.13."""
    return getattr(scripted, "_torchdynamo_inline", None)


# Sharded tensors.


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, without importing torch.distributed for those who do not use it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> Any:
    """What this rank has of a DTensor (`DTensor._local_tensor`; `to_local` makes a view); else the tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def spec_of(tensor: Any) -> Any:
    """Mesh, placements and global shape of a DTensor (`DTensor._spec`). 2.11, 2.13."""
    return tensor._spec


def dtensor_over(local: Tensor, spec: Any, requires_grad: bool = False) -> Tensor:
    """A DTensor whose local part is this very tensor; `from_local` would put a view between. 2.11, 2.13."""
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    made: Tensor = make(local, spec, requires_grad=requires_grad)
    return made


def respec(spec: Any, placements: Sequence[Any]) -> Any:
    """The same global tensor with other placements (`DTensorSpec`). 2.11, 2.13."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def describe_placement(spec: Any) -> str:
    """How a DTensor lies on its mesh, in words that are the same on all ranks. 2.11, 2.13."""
    names = spec.mesh.mesh_dim_names or [f"axis{i}" for i in range(spec.mesh.ndim)]
    axes = ", ".join(f"{name}={spec.mesh.size(i)}" for i, name in enumerate(names))
    return f"{', '.join(map(str, spec.placements))} of {list(spec.shape)} over {axes}"


def graph_task() -> int:
    """A number that is the same within one run of the autograd engine; -1 outside. 2.11, 2.13."""
    return int(torch._C._current_graph_task_id())


CLIP_MODULE = sys.modules["torch.nn.utils.clip_grad"]
TOTAL_NORM, SCALE_BY_NORM = "_get_total_norm", "_clip_grads_with_norm_"
# The two halves of `clip_grad_norm_`. 2.11, 2.13.

SCALER_UNSCALE = "_unscale_grads_"
# GradScaler's loop over gradients; returns found_inf per device. 2.11, 2.13.


def forward_hook_registries(module: Any) -> list[dict[int, Any]]:
    """Where a module keeps its forward pre-hooks and forward hooks. 2.11, 2.13."""
    return [module._forward_pre_hooks, module._forward_hooks]


def is_fsdp_hook(hook: Any) -> bool:
    """Whether a forward hook is one of `fully_shard`'s (a method of its `FSDPState`). 2.11, 2.13."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return isinstance(getattr(hook, "__self__", None), FSDPState)


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store
# Store: what `torch.distributed.Store` is; torch does not export it for type checkers. 2.11, 2.13.


def store_under(prefix: str, store: Store) -> Store:
    """A store whose keys begin with a prefix (`torch.distributed.PrefixStore`, not exported for types). 2.11, 2.13."""
    made: Store = torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return made


def own_client(store: Store) -> Store:
    """A client of the same store that shares no lock with the given one (`Store.clone`, without types). 2.11, 2.13."""
    made: Store = store.clone()  # type: ignore[attr-defined]
    return made


def default_group() -> Any | None:
    """The default process group, or None (`GroupMember.WORLD`). 2.11, 2.13."""
    if not torch.distributed.is_available():
        return None
    return torch.distributed.GroupMember.WORLD


def default_store() -> Any:
    """The store of the default process group (`_get_default_store`). 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def group_names() -> dict[Any, str]:
    """Every process group that this rank is in, with its name (`_world.pg_names`). 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return dict(distributed_c10d._world.pg_names)


def is_gloo(group: Any) -> bool:
    """Whether a group runs collectives of the CPU by gloo (`ProcessGroup._get_backend`). 2.11, 2.13."""
    kind = getattr(torch.distributed, "ProcessGroupGloo", None)
    cpu = torch.device("cpu")
    return kind is not None and cpu in group._device_types and isinstance(group._get_backend(cpu), kind)


def uses_accelerator(group: Any) -> bool:
    """Whether a group has a backend for another device than the CPU that is not gloo. 2.11, 2.13."""
    kind = getattr(torch.distributed, "ProcessGroupGloo", None)
    backends = [group._get_backend(device) for device in group._device_types if device.type != "cpu"]
    return any(kind is None or not isinstance(backend, kind) for backend in backends)


def abort_nccl() -> None:
    """Abort the NCCL communicators of every group, as `_abort_process_group` does, but keep the groups. 2.11, 2.13.

    All within one NCCL group: else the aborts of several communicators can wait for each other (pytorch issue 119797).
    """
    backends = _nccl_backends()
    if not backends:
        return
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _nccl_backends() -> list[Any]:
    kind = getattr(torch.distributed, "ProcessGroupNCCL", None)
    cuda = torch.device("cuda")
    backends = [group._get_backend(cuda) for group in group_names() if cuda in group._device_types]
    return [backend for backend in backends if kind is not None and isinstance(backend, kind)]


def flight_recording() -> bytes | None:
    """What torch's flight recorder holds, as its own tools read it; None where it is off. 2.11, 2.13.

    NCCL has a recorder of its own (`_dump_nccl_trace`); the other one (`_dump_fr_trace`) records gloo.
    """
    if int(os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"))) <= 0:
        return None
    name = "_dump_nccl_trace" if _nccl_backends() else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    return None if dump is None else bytes(dump())


def flight_recording_prefix() -> str:
    """Where torch itself writes such a file; the rank follows. 2.11, 2.13."""
    default = "/tmp/nccl_trace_rank_"
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE", os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default))


# Work across iterations.


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place (`Tensor._version`); 0 for inference tensors. 2.11, 2.13."""
    return 0 if tensor.is_inference() else int(tensor._version)


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in, whatever it has: no data, no elements (`UntypedStorage._cdata`). 2.11, 2.13."""
    return int(tensor.untyped_storage()._cdata)


def _global_pre_hooks() -> tuple[dict[Any, Any], dict[Any, Any]]:
    from torch.nn.modules import module as _module
    from torch.optim import optimizer as _optimizer

    return _module._global_forward_pre_hooks, _optimizer._global_optimizer_pre_hooks


GLOBAL_PRE_HOOKS = _global_pre_hooks()
"""The hooks before every forward of a module, and before every `step` of an optimizer, of the process. 2.11, 2.13."""

WATCHED_METHODS: tuple[tuple[type, str], ...] = (
    (torch.nn.Module, "_apply"),
    (torch.nn.Module, "_named_members"),
    (torch.nn.Module, "train"),
    (torch.optim.Optimizer, "__getstate__"),
)
"""What casts and moves go through (`half`, `to`), `parameters` and `buffers`, `eval`, and a copy of an optimizer.
2.11, 2.13."""

no_torch_function = torch._C._disabled_torch_function_impl
"""For tensor classes that only want `__torch_dispatch__`. 2.11, 2.13."""


def lazy_graph_module(root: Any, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph module that makes its Python code when it is first called or looked at, not at each rewrite. 2.11, 2.13.

    (`torch.fx._lazy_graph_module._LazyGraphModule`.) Code is a tenth of a capture, and the runtime never calls it.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    made: fx.GraphModule = _LazyGraphModule(root, graph, name)
    return made


def process_group_rank(name: str) -> int:
    """This rank's place in a process group; 0 if there is no such group here (`_resolve_process_group`). 2.11, 2.13."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return int(resolve(name).rank())
    except RuntimeError:
        return 0


def sharding_function() -> tuple[Any, str]:
    """Where DTensor cuts this rank's chunk out of a whole tensor: the class and the method's name. 2.11, 2.13."""
    from torch.distributed.tensor import Shard

    return Shard, "_replicate_to_shard"


# Cutting graphs.


SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled
ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST: Any = torch.amp.autocast_mode._exit_autocast
"""The functions that graphs call to change grad mode and autocast for all nodes that follow. 2.11, 2.13."""
MODE_SWITCHES = frozenset({SET_GRAD_ENABLED, ENTER_AUTOCAST, EXIT_AUTOCAST})


ASSERTIONS = frozenset({torch._assert, torch._assert_async})
"""Python functions that only check: FX counts them as side effects. 2.11, 2.13."""


def name_of_target(target: Any) -> str:
    """What FX calls a node with this target, before it makes the name unique (`Graph._target_to_str`). 2.11, 2.13."""
    return _NAMING._target_to_str(target)


_NAMING = fx.Graph()


class GraphWriter:
    """Appends nodes to a new graph as `Graph.create_node` does, without looking through each argument. 2.11, 2.13.

    (`_graph_namespace`, `_insert`, `_find_nodes_lookup_table`, `_len`.) 5 us a node, where `create_node` takes 16: it
    flattens all arguments to warn of symbolic numbers. Only for graphs that no module owns yet, and nodes that are
    copies of legal ones.
    """

    __slots__ = ("_append", "_index", "_namespace", "graph")

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._namespace = self.graph._graph_namespace
        self._append: Any = self.graph._insert
        self._index = self.graph._find_nodes_lookup_table.insert

    def add(self, op: str, target: Any, args: Any, kwargs: Any, name: str, type_expr: Any, meta: Any) -> fx.Node:
        """A node at the end of the graph. `name` is made unique; `meta` is the node's own from now on."""
        graph = self.graph
        unique = self._namespace.create_name(name, None)
        node = fx.Node(graph, unique, op, target, args, kwargs, type_expr)
        if meta is not None:
            node.meta = meta
        self._namespace._obj_to_name[node] = unique
        self._append(node)
        self._index(node)
        graph._len += 1
        return node


def light_graph_module(graph: fx.Graph, training: bool) -> fx.GraphModule:
    """An empty graph module that owns `graph`, without a class and code of its own until it is called. 2.11, 2.13.

    What `GraphModule({}, graph)` is, at a third of its time and memory: `GraphModule` makes a class for each instance,
    which is needed only to hold the generated `forward`. Attributes are the caller's to assign.
    """
    cls, template = _light_class()
    module: fx.GraphModule = object.__new__(cls)
    state = module.__dict__
    for key, value in template:
        # In the order of `GraphModule.__init__`, so that instances share the keys of their dictionaries.
        state[key] = value() if isinstance(value, type) else value
    state["_graph"] = graph
    state["training"] = training
    graph.owning_module = module
    return module


@lru_cache(maxsize=1)
def _light_class() -> tuple[type[fx.GraphModule], list[tuple[str, Any]]]:
    from torch.fx._lazy_graph_module import _LazyGraphModule

    class Forward:
        """`forward` of a module that was not compiled: who asks for it (torch.compile does) gets the compiled one."""

        def __get__(self, module: Any, cls: Any) -> Any:
            if module is None:
                return LightGraphModule._lazy_forward
            module.real_recompile()
            return module.forward

    class LightGraphModule(_LazyGraphModule):
        __jit_unused_properties__ = [*_LazyGraphModule.__jit_unused_properties__, "code"]  # noqa: RUF012
        forward = Forward()
        ws_compiled = False  # read by dynamo, which may not look into `_needs_recompile`

        @classmethod
        def recompile(cls) -> None:  # type: ignore[override]
            cls.forward, cls.ws_compiled = Forward(), False

        def _real_recompile(self) -> Any:
            if type(self) is LightGraphModule:
                # The name that torch gives to such classes: copies are then made from the class below it.
                own = type("GraphModuleImpl", (LightGraphModule,), {"__module__": __name__})
                own.__name__ = "GraphModule"
                object.__setattr__(self, "__class__", own)
            code = super()._real_recompile()
            type(self).ws_compiled = True
            for child in self.children():
                # Whoever runs this one runs them; dynamo cannot go through a module that is not compiled.
                if isinstance(child, LightGraphModule):
                    child.real_recompile()
            return code

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # Before the hooks: torch's lazy modules compile in `forward`, and then run their hooks a second time.
            if not self.ws_compiled:
                self.real_recompile()
                return self(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    LightGraphModule.__name__ = "GraphModule"
    containers = (dict, set, list)
    state = vars(_LazyGraphModule({}, fx.Graph()))
    template = [(k, type(v) if isinstance(v, containers) else v) for k, v in state.items()]
    return LightGraphModule, template


def mark_impure(module: torch.nn.Module) -> None:
    """Let dead-code elimination keep calls of a module whose results are not used (`_is_impure`). 2.11, 2.13."""
    module._is_impure = True  # type: ignore[assignment]


def is_marked_impure(module: object) -> bool:
    """Whether calls of a module are kept although their results are not used (`_is_impure`). 2.11, 2.13."""
    return bool(getattr(module, "_is_impure", False))


def is_non_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer stays out of the state dict (`Module._non_persistent_buffers_set`). 2.11, 2.13."""
    return name in module._non_persistent_buffers_set


def keep_calling_convention(m: fx.GraphModule, module: fx.GraphModule) -> None:
    """Let a module with the placeholders of `m` take and return its trees (`_codegen`, `_in_spec`). 2.11, 2.13."""
    codegen = m.graph._codegen
    if type(codegen) is CodeGen:
        return
    module.graph.set_codegen(copy.copy(codegen))
    for spec in ("_in_spec", "_out_spec"):
        if spec in vars(m):
            setattr(module, spec, getattr(m, spec))


def copy_codegen(old: fx.Graph, new: fx.Graph) -> None:
    """Let a graph with the same placeholders and output take and return the same trees. 2.11, 2.13."""
    new.set_codegen(copy.copy(old._codegen))


# Inductor. Imported when asked for: it takes two seconds.


@contextmanager
def _torchs_own_warnings_ignored() -> Iterator[None]:
    """Inductor warns about parts of torch that it uses itself; where warnings are errors it would fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def decomposed(
    function: Callable[..., Any], inputs: list[Any], mode: Any, *, settings: dict[str, Any], functionalize: bool
) -> fx.GraphModule:
    """Trace a function on fake inputs in the operators Inductor compiles (its own table). Tried on 2.11 and 2.13.

    `settings` of Inductor: some decide on decompositions, and `emulate_precision_casts` marks nodes in the trace.
    `functionalize`: writes become values, as in AOT; views stay views (their copying forms do not take symbolic sizes).
    """
    with _torchs_own_warnings_ignored():
        import torch._inductor.lowering  # that of max pooling looks it up, and does not import it
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        with config.patch(settings), mode, torch.no_grad():
            if functionalize:
                function = torch.func.functionalize(function, remove="mutations")
            traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
    found: fx.GraphModule = traced
    return found


def keeps_roundings() -> bool:
    """Whether `emulate_precision_casts` holds on the CPU too: before 2.13 kernels reused values as they were before
    they were rounded (pytorch#185337)."""
    return _is_at_least(2, 13)


def keeps_order_of_draws() -> bool:
    """Whether Inductor moves nothing that draws past something else that does. 2.11 does (`reorder_for_locality`, and
    its scheduler where memory is drawn into), and draws `randn_like` of a transposed tensor row by row."""
    return _is_at_least(2, 13)


def _is_at_least(*version: int) -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= version


def compile_inductor(
    gm: fx.GraphModule, inputs: list[Any], settings: dict[str, Any], part: str = "", given_away: Sequence[int] = ()
) -> Callable[[list[Any]], Any]:
    """Compile a decomposed graph of tensors; the result takes one list, which it empties. Tried on 2.11 and 2.13.

    `part`: "forward" or "backward" of a training step. `given_away`: inputs of a backward whose memory it may use
    (torch calls them donated; Inductor finds them in the tracing context).
    """
    output = next(iter(reversed(gm.graph.nodes)))
    # Strides of results are those that the trace says: others rely on them.
    # Only of tensors: the gradient of an input without one is None.
    output.meta["user_visible_output_idxs"] = [i for i, v in enumerate(output.args[0]) if isinstance(v, fx.Node)]
    mode = next((value.fake_mode for value in inputs if isinstance(value, _fake_tensor.FakeTensor)), None)
    with _torchs_own_warnings_ignored():
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        context: Any = TracingContext(mode)
        if given_away:
            context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(given_away), static_input_indices=[])
        _name_inputs_for_the_cache(gm, given_away)
        patched = config.patch({"triton.cudagraphs": False, **settings})
        with patched, _some_shape_env(mode), tracing(context), torch.no_grad():
            compiled: Any = compile_fx_inner(gm, inputs, is_inference=not part, is_backward=part == "backward")
    return compiled  # type: ignore[no-any-return]


def _name_inputs_for_the_cache(gm: fx.GraphModule, given_away: Sequence[int]) -> None:
    """Inductor's cache on disk knows graphs by their text. Which inputs are given away is not in it, nor that strides
    of all results are fixed: a graph of torch.compile may read the same. So the names of our inputs say it."""
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.name = node.target = f"ws_given_{i}" if i in given_away else f"ws_{i}"
    gm.recompile()


@contextmanager
def _some_shape_env(mode: Any) -> Iterator[None]:
    """Inductor's cache wants to note conditions on sizes; without a place for them it does not cache."""
    if mode is None or mode.shape_env is not None:
        yield
        return
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        mode.shape_env = None


def improve_joint(gm: fx.GraphModule, inputs: list[Any], settings: dict[str, Any]) -> fx.GraphModule:
    """Inductor's rewrites of a graph before it is cut in forward and backward: patterns, constants, its own random
    numbers. Tried on 2.11 and 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

        mode = next((value.fake_mode for value in inputs if isinstance(value, _fake_tensor.FakeTensor)), None)
        with config.patch(settings), tracing(TracingContext(mode)), V.set_fake_mode(mode), torch.no_grad():
            improved: fx.GraphModule = joint_graph_passes(gm)
    return improved


def min_cut(joint: fx.GraphModule, forward_outputs: int, inputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's choice of what to keep for the backward and what to compute again. The joint graph has `inputs`
    placeholders called primals_*, then tangents_*; its first outputs are the forward's. Tried on 2.11 and 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        with _draws_kept_apart(joint):
            forward, backward = min_cut_rematerialization_partition(
                joint, None, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=list(range(inputs))
            )
    return forward, backward


@contextmanager
def _draws_kept_apart(gm: fx.GraphModule) -> Iterator[None]:
    """torch's partitioner makes one of nodes that compute the same, and knows most random operators by name: not
    `randn_like`, nor those of libraries. Tell it those of a graph (`compile_utils.rand_ops`). 2.11, 2.13."""
    from torch._functorch.compile_utils import rand_ops

    called = [node.target for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
    drawing = {op.overloadpacket for op in called if torch.Tag.nondeterministic_seeded in op.tags}
    missing = [packet for packet in drawing if packet not in rand_ops]
    rand_ops.extend(missing)
    try:
        yield
    finally:
        for packet in missing:
            rand_ops.remove(packet)


is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler is recording: then calls are worth a name."""


@lru_cache(maxsize=4096)
def may_copy(op: OpOverload) -> bool:
    """Whether the result of an operator that is said to share memory can be a copy: those that are made of others
    (`reshape`, `contiguous`, `to`). `OpOverload._can_decompose` looks at the same key. 2.11, 2.13."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), "CompositeImplicitAutograd"))


def shares_storage(a: Any, b: Any) -> bool:
    """Whether two tensors, which may be fake, are views of the same memory. 2.11, 2.13."""
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def symbol_in(size: Any) -> Any:
    """The symbol that a size is, if it is nothing but a symbol; None otherwise (`SymInt.node`). 2.11, 2.13."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if getattr(expression, "is_Symbol", False) else None


def expression_of(size: Any) -> Any:
    """The sympy expression of a symbolic size; None of a number (`SymInt.node`). 2.11, 2.13."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def symbols_in(val: Any) -> set[Any]:
    """The symbols in a size, or in the sizes and strides of a tensor. 2.11, 2.13."""
    if isinstance(val, torch.Tensor):
        items: list[Any] = [*val.shape, *(val.stride() if val.layout is torch.strided else ())]
    else:
        items = [val]
    sizes = [item for item in items if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return set().union(*(getattr(size.node.expr, "free_symbols", ()) for size in sizes))


def shape_env_of(val: Any) -> ShapeEnv | None:
    """The environment that the symbols of a fake value belong to. 2.11, 2.13."""
    if isinstance(val, torch.SymInt):
        found: ShapeEnv | None = val.node.shape_env
        return found
    return val.fake_mode.shape_env if isinstance(val, _fake_tensor.FakeTensor) else None


def unknown_inductor_settings(settings: Iterable[Any]) -> list[Any]:
    """The names that `torch._inductor.config` does not have. Imports Inductor only if there are any. 2.11, 2.13."""
    names = list(settings)
    if not names:
        return []
    with _torchs_own_warnings_ignored():
        from torch._inductor import config

        known = config.get_config_copy()
    return [name for name in names if name not in known]


# AOT compilers. functorch and Inductor are imported when asked for.


def mark_boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell AOTAutograd that a compiled function takes one list (`_boxed_call`). 2.11, 2.13."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def aot_function(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """torch's `aot_function`: trace forward and backward at the first call, and never again. 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._functorch.aot_autograd import aot_function as torchs

        found: Callable[..., Any] = torchs(function, **settings)
    return found


def aot_backend(**settings: Any) -> Callable[..., Any]:
    """A `torch.compile` backend that hands forward and backward to compilers (`aot_autograd`). 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._dynamo.backends.common import aot_autograd

    backend: Callable[..., Any] = aot_autograd(**settings)
    return backend


def default_partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph where eager would: all that the forward made and the backward reads is kept. 2.11, 2.13."""
    from torch._functorch.partitioners import default_partition as torchs

    forward, backward = torchs(joint, inputs, **settings)
    return forward, backward


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph so that little is kept and cheap work is done again in the backward. 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        with _draws_kept_apart(joint):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **settings)
    return forward, backward


def decompositions_of(operators: Iterable[Any]) -> dict[OpOverload, Callable[..., Any]]:
    """torch's decompositions of some operators (`torch._decomp.get_decompositions`). 2.11, 2.13."""
    from torch._decomp import get_decompositions

    found: Any = get_decompositions(list(operators))
    return dict(found)


def inductor_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """What Inductor wants decomposed, with random numbers left as eager draws them. 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

        with config.patch(fallback_random=True):
            return dict(select_decomp_table())


@contextmanager
def jit_without_autocast() -> Iterator[None]:
    """Script a graph that has its casts as nodes: TorchScript must add none of its own. 2.11, 2.13."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        with _torchs_own_warnings_ignored():
            yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def jit_remove_mutation(graph: Any) -> None:
    """Let TorchScript turn writes into values where it can (`_jit_pass_remove_mutation`). 2.11, 2.13."""
    torch._C._jit_pass_remove_mutation(graph)


def packet_of(op: OpOverload) -> Any:
    """All overloads of an operator as one function (`OpOverload.overloadpacket`). 2.11, 2.13."""
    return op.overloadpacket


def graph_being_compiled() -> str:
    """AOTAutograd's name of the graph that it is compiling, "" outside of it (`get_aot_graph_name`). 2.11, 2.13."""
    from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name, graph_being_compiled

    return str(get_aot_graph_name()) if graph_being_compiled else ""


def aot_simplified(gm: Any, inputs: list[Any], **settings: Any) -> Callable[..., Any]:
    """AOTAutograd for a graph of dynamo's (`aot_module_simplified`). 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._functorch.aot_autograd import aot_module_simplified

        found: Callable[..., Any] = aot_module_simplified(gm, inputs, **settings)
    return found


def dynamo_source(node: fx.Node) -> str:
    """How dynamo reaches an input of its graph, `L['self']._modules['fc']._parameters['weight']`; else the node's name
    (`_dynamo_source`, `grapharg`). 2.11, 2.13."""
    source = getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    return str(name() if callable(name) else name) if name is not None else node.name


def input_source(node: fx.Node) -> int | str | None:
    """Which input of its caller a placeholder of AOTAutograd is: a place, a parameter's name, or -1 for none of them
    (a tangent). None where the graph does not say (`desc`, from 2.9 on). 2.11, 2.13."""
    described = node.meta.get("desc")
    if described is None:
        return None
    found = getattr(described, "idx", getattr(described, "target", -1))
    plain = type(described).__name__ in ("PlainAOTInput", "ParamAOTInput", "BufferAOTInput")
    return found if plain and isinstance(found, int | str) else -1


def shapes_by_python() -> Any:
    """While this is on, operators find the shapes of results by torch's Python kernels where there are some: those in
    C++ ask for sizes as numbers, which fixes a size that varies (`torch._C._EnablePythonDispatcher`). 2.11, 2.13."""
    return torch._C._EnablePythonDispatcher()


def why_unreadable(tensor: torch.Tensor) -> str:
    """What a tensor is if its memory is not what it stands for, so that compiled code may not read it: fake, wrapped by
    a function transform, with a tangent, or a view that is read with the other sign (`z.conj().imag`). 2.11, 2.13."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__name__}"
    if is_transformed(tensor):
        return "a tensor of torch.func"
    if tensor.is_neg():
        return "a negated view (resolve_neg() makes it plain)"
    forward_ad: Any = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "a dual tensor of forward-mode autograd"
    return ""


def is_unmade_zero(tensor: torch.Tensor) -> bool:
    """Whether a tensor only says that it is zero and has no memory, as forward-mode autograd makes them. 2.11, 2.13."""
    return bool(tensor._is_zerotensor())


is_dynamo_tracing = torch.compiler.is_dynamo_compiling
"""Whether this code is not running: Dynamo reads it, because a caller is under torch.compile. 2.11, 2.13."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that Dynamo must not look into (`torch._disable_dynamo` imports Dynamo late). 2.11, 2.13."""
    return function(*args)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of `torch.vmap` or another transform of torch.func. 2.11, 2.13."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
