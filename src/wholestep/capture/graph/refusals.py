"""Errors for operators and hooks that a replay could not repeat as eager runs them, with what to do instead.

Hooks run while a step is traced and never again, so their Python side is lost: they are refused by default.
`hooks="trace"` captures what they compute instead. Hooks that torch itself installs to compute weights
(`weight_norm`, `spectral_norm`) do nothing but tensor arithmetic and are always traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wholestep.capture.graph.data_sizes import takes_no_symbols
from wholestep.capture.objects.discover import World
from wholestep.capture.objects.swapped_state import Tracked
from wholestep.capture.results.effect_line import contents_effect
from wholestep.errors import (
    AliasError,
    DataShapeError,
    HookError,
    Location,
    OverlapError,
    SideEffectError,
    UnsupportedError,
    WholestepError,
)
from wholestep.ir.io.node_values import size_hint
from wholestep.ir.meta import location_of_exception, user_location
from wholestep.ir.user_objects.plain_contents import same_contents
from wholestep.torch_private.autograd import hook_dicts, post_accumulate_hooks, tensor_hooks
from wholestep.torch_private.distributed import is_dtensor
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.modules_and_optimizers import (
    global_module_hooks,
    hook_registries,
    module_hooks,
    optimizer_step_hooks,
    weight_computing_hooks,
)
from wholestep.torch_private.operators import schema_of

_BRANCHES_IN_BACKWARD = frozenset({torch.ops.aten.prod, torch.ops.aten.cumprod})


def refuse_branching_backward(func: Any, args: tuple[Any, ...]) -> None:
    """`prod` and `cumprod`: their backward branches on the data, and takes another branch for fake tensors."""
    if func.overloadpacket in _BRANCHES_IN_BACKWARD and torch.is_grad_enabled() and args[0].requires_grad:
        raise UnsupportedError(
            f"the backward of {func} looks for zeros in its input and branches on them.",
            fix="use exp(sum(log(x))), or detach the input.",
            location=user_location(),
        )


def refuse_shards(tracked: Iterable[Tracked]) -> None:
    """Refuse the shards of a plan that the step is not compiled with."""
    for each in tracked:
        if is_dtensor(each.real):
            raise UnsupportedError(
                f"{each.slot.path} is a shard of a tensor (a DTensor), and this step has no plan.",
                fix="compile the step with the parallel= plan that the model was sharded by; for a model that "
                "something else sharded, start from the plain model.",
            )


def higher_order(func: Any) -> UnsupportedError:
    """The error for an operator that takes functions."""
    return UnsupportedError(
        f"the higher-order operator {func} is not captured.",
        fix="call the plain implementation instead (for flex_attention: scaled_dot_product_attention).",
        location=user_location(),
    )


def opaque_view(does: str, tensor: Tensor) -> AliasError:
    """The error for a view whose elements only the kernel of the operator knows."""
    return AliasError(
        f"the step {does} a tensor of shape {tuple(tensor.shape)} that a custom operator returned, and that shares "
        "memory with an input of the operator.",
        fix="clone() what the operator returns, or let the operator return a new tensor.",
        location=user_location(),
    )


def refuse_overlap(func: Any, tensor: Tensor) -> None:
    reach = 0
    sizes = ((size_hint(step), size_hint(size, 2)) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in sorted(each for each in sizes if each[1] > 1):
        overlaps = stride <= reach
        reach += stride * (size - 1)
        if overlaps:
            raise OverlapError(
                f"{func} writes through a view whose elements share memory (shape {tuple(tensor.shape)}, "
                f"strides {tuple(tensor.stride())}).",
                fix="write to a .clone() or .contiguous() of the expanded tensor.",
                location=user_location(),
            )


def refuse_shifted_overlap(func: Any, written: list[Tensor], args: list[Any]) -> None:
    """`x[1:].add_(x[:-1])`: elements are read and written at once; eager refuses it for element-wise operators."""
    if torch.Tag.pointwise not in func.tags and func is not torch.ops.aten.copy_.default:
        return
    for target in written:
        for other in args:
            if not isinstance(other, Tensor) or other is target or storage_key(other) != storage_key(target):
                continue
            same = other.storage_offset() == target.storage_offset() and other.stride() == target.stride()
            if not same and _extents_meet(target, other):
                raise OverlapError(
                    f"{func} reads and writes overlapping parts of one tensor.",
                    fix="clone() the part that is read.",
                    location=user_location(),
                )


def _extents_meet(a: Tensor, b: Tensor) -> bool:
    """Whether two dense views of one storage share elements; strided views that interleave count as disjoint."""
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    first, second = int(a.storage_offset()), int(b.storage_offset())
    return first < second + int(b.numel()) and second < first + int(a.numel())


_FIXED_FORMS = {
    "_pack_padded_sequence": "run the RNN over the padded batch and mask its outputs.",
    "linalg_lstsq": "use torch.linalg.pinv(a) @ b, or call it outside of the step.",
}


def data_shape(func: Any) -> DataShapeError:
    """The error for an operator whose result size depends on data."""
    name = func.name().rpartition(":")[2]
    advice = (fix for start, fix in _FIXED_FORMS.items() if name.lstrip("_").startswith(start.lstrip("_")))
    otherwise = (
        "use a form of fixed shape: torch.where or a mask multiplied in, instead of boolean indexing or nonzero."
    )
    return DataShapeError(
        f"the shape of the result of {func} depends on the values of a tensor.",
        fix=next(advice, otherwise),
        location=user_location(),
    )


def unsupported(func: Any, error: BaseException) -> UnsupportedError:
    return UnsupportedError(
        f"{func} cannot be computed without data: {str(error).splitlines()[0]}",
        fix="call it outside of the step."
        if getattr(func, "namespace", "") == "aten"
        else "give it a fake kernel with torch.library.register_fake.",
        location=user_location(),
    )


_PURE = weight_computing_hooks()


def refuse_hooks(world: World, parameters: list[Tracked], ours: frozenset[int] = frozenset()) -> None:
    """Raise with a list of all hooks that would only run while tracing; `ours` are the plan's, by identity."""
    found: list[str] = [f"every module: {_name(hook)}" for hook in global_module_hooks()]
    for module, path in world.modules.items():
        hooks = (hook for hook in module_hooks(module) if id(hook) not in ours)
        found += [f"{path}: {_name(hook)}" for hook in hooks if not _is_pure(hook)]
    for tracked in parameters:
        found += [f"{tracked.slot.path}: {_name(hook)}" for hook in tensor_hooks(tracked.real)]
    for optimizer, path in world.optimizers.items():
        found += [f"{path}: {_name(hook)}" for hook in optimizer_step_hooks(optimizer)]
    if found:
        raise HookError(
            f"{len(found)} hook(s) would run while the step is captured and never again:\n          "
            + "\n          ".join(found),
            fix='remove them, or pass hooks="trace" to capture what they compute (their Python effects, such as '
            "appending to a list, then happen once).",
        )


class HooksOfStep:
    """Hooks that the step itself puts on the user's tensors, or adds and removes elsewhere: a replay does neither.

    Hooks of modules and optimizers are attributes, which are compared like others.
    """

    def __init__(self, parameters: Sequence[Tracked]) -> None:
        found = [(hooks, "all modules or optimizers") for hooks in hook_registries([], [])]
        self._parameters = parameters
        found += [(hooks, tracked.slot.path) for tracked in parameters for hooks in hook_dicts(tracked.real)]
        self._before = [(hooks, dict(hooks), path) for hooks, path in found]
        self._put: list[tuple[Tensor, RemovableHandle, Location | None]] = []

    def trace(self) -> None:
        """Copy the hooks of parameters to their fakes."""
        for tracked in self._parameters:
            after = post_accumulate_hooks(tracked.real)
            for hook in tensor_hooks(tracked.real):
                fake: Any = tracked.fake
                if any(hook is late for late in after):
                    fake.register_post_accumulate_grad_hook(hook)
                else:
                    fake.register_hook(hook)

    def put(self, tensor: Tensor, handle: RemovableHandle) -> None:
        """The step puts a hook on a tensor."""
        if is_dtensor(tensor):
            raise HookError(
                f"the step registers a hook on a sharded parameter of shape {tuple(tensor.shape)}, whose gradient is "
                "reduced after the backward: autograd calls the hook without one.",
                fix="change .grad after the backward, or register the hook on an activation.",
                location=user_location(),
            )
        self._put.append((tensor, handle, user_location()))

    def check(self, by_fake: Mapping[int, Tracked]) -> None:
        """Raise if the step leaves other hooks on the user's tensors, or on all modules, than it found."""
        for tensor, handle, location in self._put:
            tracked, hooks = by_fake.get(id(tensor)), handle.hooks_dict_ref()
            if tracked is not None and hooks is not None and handle.id in hooks:
                raise SideEffectError(
                    f"the step registers a hook on {tracked.slot.path} and leaves it there: each call would add one.",
                    fix="register it before the step, or remove it in the step (handle.remove()).",
                    location=location,
                )
        for hooks, before, path in self._before:
            if not same_contents(before, hooks):
                raise SideEffectError(
                    f"the step adds or removes a hook of {path}, which a replay would not repeat.",
                    fix="do it outside of the step.",
                ).seen_by(contents_effect(hooks))

    def restore(self) -> None:
        """Put hooks back that the step removed, and remove those that it added."""
        for hooks, before, _ in self._before:
            if not same_contents(before, hooks):
                hooks.clear()
                hooks.update(before)


def _is_pure(hook: Any) -> bool:
    """Whether a hook is known to do tensor arithmetic only."""
    library = (getattr(hook, "__module__", "") or "").startswith("transformers.")
    return isinstance(hook, _PURE) or (library and hook.__name__ == "make_inputs_require_grads")


def _name(hook: Any) -> str:
    name = getattr(hook, "__qualname__", None) or type(hook).__name__
    code = getattr(hook, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def refuse_returned_number(func: Any) -> None:
    """Refuse a custom operator that returns a number: the trace has that of its fake kernel."""
    if not all("Tensor" in str(returned.type) for returned in schema_of(func).returns):
        raise UnsupportedError(
            f"{func} returns a number, which only its kernel knows: a replay would use that of its fake kernel.",
            fix="return a tensor, and call .item() on it in the step.",
            location=user_location(),
        )


def refusal_of(error: RuntimeError) -> WholestepError | None:
    """The error to raise in place of one of torch's that fake tensors cause."""
    location, text = location_of_exception(error), str(error)
    if "symbolic sizes/strides" in text:
        return takes_no_symbols(location)
    if "Creating a new Tensor subclass" in text:
        return UnsupportedError(
            "the step makes a tensor of a subclass (as_subclass); tensor subclasses are not captured.",
            fix="work on plain tensors in the step.",
            location=location,
        )
    if "mixed torch.Tensor and DTensor" in text:
        return sharded_with_plain(location)
    return None


def sharded_with_plain(location: Location | None) -> UnsupportedError:
    """The error for an operator on a sharded parameter and a plain tensor."""
    return UnsupportedError(
        "an operator got a sharded parameter together with a plain tensor. Outside of a module's forward a parameter "
        "is what this rank has of it.",
        fix="move the computation into the forward of a module, where parameters are whole; or take the whole of it: "
        "parameter.full_tensor().",
        location=location,
    )


def refuse_attribute_of_a_tensor(error: AttributeError, tracked: Tracked | None) -> None:
    """Refuse an attribute that the user put on a tensor and that its fake does not have."""
    if tracked is not None and error.name in vars(tracked.real):
        raise UnsupportedError(
            f"the step reads {tracked.slot.path}.{error.name}, an attribute that was put on a tensor.",
            fix="keep it in optimizer.state, or in an attribute of a module.",
            location=location_of_exception(error),
        ) from error
