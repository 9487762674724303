"""What a captured graph assumes of the objects that it is bound to, as text by path: taken at the capture, and compared
with what another process has before the graph is bound there.

    model.fc                    torch.nn.modules.linear.Linear
    model.fc.weight             float32 [4, 4] [4, 1] cpu, requires grad, no gradient, Parameter
    model.dropout.p             float 0x1.999999999999ap-4
    optimizer.param_groups[0]   params: model.fc.weight, model.fc.bias
    batch                       float32 [8, 4] [4, 1] cpu

The guards of a graph read these values from the objects when they are made, so they hold from then on; that the values
are those of the capture is what this comparison adds. An object whose contents count (a module, a plain object that the
step read) has lines of its own; any other counts by its class, as a guard counts it by identity.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from wholestep.artefact.addresses import class_name, name_of
from wholestep.artefact.code_table import digest, function_digest
from wholestep.ir.captured_step import CapturedStep, GuardSpecs
from wholestep.ir.user_objects.plain_contents import NESTS, is_array, is_large, own_dict
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot, ComputedSlot, Slot
from wholestep.torch_private.aot import behind_dynamo
from wholestep.torch_private.autograd import HOOK_ATTRIBUTES
from wholestep.torch_private.distributed import STATE_OF_FULLY_SHARD, describe_placement, is_dtensor, local_of, spec_of
from wholestep.torch_private.modes import MODES, read_modes, same_mode
from wholestep.torch_private.modules_and_optimizers import (
    MODULE_INTERNALS,
    OPTIMIZER_INTERNALS,
    SCALER_SETTINGS,
    SCALER_TENSORS,
    hook_registries,
)

_DEEPEST = 20
_LONGEST = 200

Snapshot = dict[str, str]


def text_of(value: Any, *, numbers: bool = True, depth: int = 0) -> str:
    """A value as text that is equal for values that eager could not tell apart. `numbers`: by value, not by type."""
    if value is ABSENT:
        return "absent"
    if isinstance(value, Tensor):
        return tensor_text(value)
    if isinstance(value, Enum):
        return f"{class_name(value)}.{value.name} {value.value!r}"
    if type(value) in (int, float) and not numbers:
        return type(value).__name__
    if isinstance(value, float):
        return f"float {value.hex()}"
    if isinstance(value, str | bytes) and len(value) > _LONGEST:
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        return f"{type(value).__name__} {hashlib.sha256(raw).hexdigest()}"
    if value is None or isinstance(value, int | complex | str | bytes | torch.dtype | torch.device | torch.Size):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.layout | torch.memory_format | range | slice):
        return repr(value)
    if depth > _DEEPEST:
        return class_name(value)
    if isinstance(value, dict):
        items = [
            f"{text_of(k, depth=depth + 1)}: {text_of(v, numbers=numbers, depth=depth + 1)}"
            for k, v in dict.items(value)
        ]
        return _short(f"{class_name(value)} {{{', '.join(items)}}}")
    if isinstance(value, NESTS):
        return _short(
            f"{class_name(value)} [{', '.join(text_of(item, numbers=numbers, depth=depth + 1) for item in value)}]"
        )
    if isinstance(value, set | frozenset):
        return _short(f"{class_name(value)} {sorted(text_of(item, depth=depth + 1) for item in value)}")
    if is_array(value):
        return "a large array" if is_large(value) else _array_text(value)
    if isinstance(value, FunctionType):
        value = behind_dynamo(value)
        return f"function {value.__module__}.{value.__qualname__} {function_digest(value)}"
    if isinstance(value, MethodType):
        return f"method {text_of(value.__func__)} of {class_name(value.__self__)}"
    if isinstance(value, type | BuiltinFunctionType):
        return f"{class_name(value)} {name_of(value) or value.__name__}"
    return class_name(value)


def _short(text: str) -> str:
    return text if len(text) <= 10 * _LONGEST else f"{text[:_LONGEST]}... {digest(text)}"


def _array_text(value: Any) -> str:
    raw = value.tobytes() if hasattr(value, "tobytes") and not _holds_objects(value) else repr(value).encode()
    form = f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', len(value))}"
    return f"{class_name(value)} {form} {hashlib.sha256(raw).hexdigest()}"


def _holds_objects(value: Any) -> bool:
    return bool(getattr(getattr(value, "dtype", None), "hasobject", False))


def tensor_text(tensor: Tensor, dynamic: Sequence[int] = ()) -> str:
    """The metadata of a tensor: what a graph is made for."""
    if is_dtensor(tensor):
        placed = describe_placement(spec_of(tensor))
        local = list(local_of(tensor).shape)
        return f"DTensor {tensor.dtype} {placed}, here {local}{', requires grad' if tensor.requires_grad else ''}"
    if tensor.layout is not torch.strided:
        form = f"{list(tensor.shape)} {tensor.layout}"
    elif dynamic:
        form = f"{[None if d in dynamic else size for d, size in enumerate(tensor.shape)]} contiguous"
    else:
        form = f"{list(tensor.shape)} {list(tensor.stride())}"
    extra = [
        f"{type(tensor).__name__}",
        *(["requires grad"] if tensor.requires_grad else []),
        *(["conjugated"] if tensor.is_conj() else []),
        *(["negated"] if tensor.is_neg() else []),
        *(["inference"] if tensor.is_inference() else []),
    ]
    return f"{str(tensor.dtype).removeprefix('torch.')} {form} {tensor.device}, {', '.join(extra)}"


def structure_text(structure: Any) -> str:
    """The tree structure of arguments (`call_tree.leaves_of`) as text."""
    if structure is None:
        return "*"
    if isinstance(structure, tuple):
        kind = f"{structure[0].__module__}.{structure[0].__qualname__}"
        if len(structure) == 3:
            items = [f"{text_of(k)}: {structure_text(v)}" for k, v in zip(structure[1], structure[2], strict=True)]
        else:
            rest = structure[1]
            items = [structure_text(v) for v in rest] if isinstance(rest, list) else [structure_text(rest)]
        return f"{kind}({', '.join(items)})"
    return repr(structure)


def snapshot_of(captured: CapturedStep, leaves: Sequence[Any], structure: Any) -> Snapshot:
    """All that guards take from the objects that a graph is bound to. `leaves`: the arguments of a call."""
    found: Snapshot = {}
    for path, text in (
        *_of_objects(captured),
        *_of_python(captured.guards),
        *call_lines(captured, leaves, structure),
        *_of_process(captured.guards),
    ):
        if STATE_OF_FULLY_SHARD in path:
            continue
        if found.setdefault(path, text) != text:
            found[path] = f"{found[path]}; {text}"
    return found


def call_lines(captured: CapturedStep, leaves: Sequence[Any], structure: Any) -> Iterator[tuple[str, str]]:
    """What the graph assumes of the arguments of a call."""
    specs = captured.guards
    yield "the structure of the arguments", structure_text(structure)
    dynamic, first = specs.sizes.dims, dict[int, str]()
    for i, (leaf, path) in enumerate(zip(leaves, specs.arguments.paths, strict=True)):
        if isinstance(leaf, Tensor):
            same = first.setdefault(id(leaf), path)
            slot = specs.arguments.slots[i]
            grad = ", with a gradient" if leaf.requires_grad and leaf.is_leaf and leaf.grad is not None else ""
            yield f"argument {path}", tensor_text(leaf, tuple(dynamic.get(i, ()))) + grad
            if same != path:
                yield f"argument {path}", f"is {same}"
            if slot is not None and not isinstance(slot, BatchSlot):
                yield f"argument {path}", f"is {slot.path}" if slot.get() is leaf else f"is not {slot.path}"
        elif path in specs.lifted:
            yield f"argument {path}", type(leaf).__name__
        else:
            yield f"argument {path}", text_of(leaf)


def _of_objects(captured: CapturedStep) -> Iterator[tuple[str, str]]:
    specs = captured.guards
    names: dict[int, str] = {}
    for module, path in specs.modules:
        yield path, class_name(module)
        volatile = specs.volatile.get(id(module), set())
        for key, value in list(vars(module).items()):
            if key not in MODULE_INTERNALS and key not in volatile and f"{path}.{key}" not in specs.lifted:
                yield f"{path}.{key}", text_of(value)
        yield f"{path}: submodules", ", ".join(f"{k} {class_name(v)}" for k, v in module._modules.items())
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                yield f"{path}.{key}", "None" if tensor is None else _shared(tensor, f"{path}.{key}", names)
    for tensor, slot in specs.parameters:
        where = names.setdefault(id(tensor), slot.path)
        yield f"{where}.grad", "None" if tensor.grad is None else "set"
        yield where, f"{tensor_text(tensor)}{_hooks_on(tensor)}"
    for number, hooks in enumerate(hook_registries([m for m, _ in specs.modules], list(specs.optimizers))):
        if hooks:
            yield f"hooks[{number}]", ", ".join(text_of(hook) for hook in hooks.values())
    yield from _of_inputs(captured)
    yield from _of_optimizers(specs, names)
    for own in specs.tensor_attributes:
        if own.real is not None:
            for key, value in vars(own.real).items():
                yield f"{own.slot.path}.{key}", class_name(value) if key in own.set_by_step else text_of(value)
    for slot, real in specs.loose_parameters:
        yield f"{slot.path}: object", "the same" if slot.get() is real else "another"
    for slot, other in specs.same_tensors:
        if not isinstance(other, BatchSlot):
            yield f"{slot.path} and {other.path}", "one" if slot.get() is other.get() else "two"


def _shared(tensor: Tensor, path: str, names: dict[int, str]) -> str:
    first = names.setdefault(id(tensor), path)
    return tensor_text(tensor) if first == path else f"is {first}"


def _hooks_on(tensor: Tensor) -> str:
    hooks = [hook for get in HOOK_ATTRIBUTES for hook in (get(tensor) or {}).values()]
    return f", hooks: {', '.join(map(text_of, hooks))}" if hooks else ""


def _of_inputs(captured: CapturedStep) -> Iterator[tuple[str, str]]:
    for slot in captured.inputs:
        if not isinstance(slot, BatchSlot | ComputedSlot):
            value = _held(slot)
            yield f"input {slot.path}", text_of(value, numbers=False)
    for slot, kind in captured.guards.scalar_types:
        if not isinstance(slot, BatchSlot | ComputedSlot):
            yield f"{slot.path}: type", kind.__name__ if type(_held(slot)) is kind else class_name(_held(slot))


def _held(slot: Slot) -> Any:
    """What a slot holds now."""
    try:
        return slot.get()
    except (LookupError, AttributeError, TypeError, ValueError):
        return ABSENT


def _of_optimizers(specs: GuardSpecs, names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    for optimizer, path in specs.optimizers.items():
        yield path, class_name(optimizer)
        own = not type(optimizer).__module__.startswith("torch.")
        for g, (group, spec) in enumerate(zip(optimizer.param_groups, specs.param_groups[optimizer], strict=False)):
            where = f"{path}.param_groups[{g}]"
            yield f"{where}.params", ", ".join(names.get(id(p), "?") for p in group["params"])
            yield f"{where}: options", ", ".join(sorted(map(str, group)))
            for key in spec.constants:
                yield f"{where}.{key}", text_of(group.get(key, ABSENT))
            if own or specs.reads_param_groups:
                yield f"{where}: types", ", ".join(type(value).__name__ for value in group.values())
        yield f"{path}: number of param groups", str(len(optimizer.param_groups))
        owners = [
            f"{names.get(id(owner), '?')} ({len(entries) if isinstance(entries, dict) else 1})"
            for owner, entries in optimizer.state.items()
        ]
        yield f"{path}.state", ", ".join(owners) or "empty"
        skip = (OPTIMIZER_INTERNALS - {"defaults"}) | specs.volatile.get(id(optimizer), set())
        for key, value in vars(optimizer).items():
            if key not in skip and (own or not key.startswith("_")) and f"{path}.{key}" not in specs.lifted:
                yield f"{path}.{key}", "" if key in ("step", "defaults") else text_of(value)
    for slot, _ in specs.nested_state:
        yield f"{slot.path}: structure", text_of(_held(slot), numbers=False)
    for scaler, path in specs.scalers.items():
        yield path, class_name(scaler)
        unused = ", ".join(name for name in SCALER_TENSORS if vars(scaler).get(name) is None)
        yield f"{path}: settings", f"{[text_of(vars(scaler).get(name)) for name in SCALER_SETTINGS]} without {unused}"


def _of_python(specs: GuardSpecs) -> Iterator[tuple[str, str]]:
    for path, slot, _ in specs.variables:
        if path not in specs.rebound_variables and path not in specs.lifted:
            yield f"variable {path}", text_of(_held(slot))
    for path, (slot, _) in specs.rebound_variables.items():
        yield f"variable {path}: kind", kind_text(_held(slot))
    for attributes, key, path, _ in specs.kinds:
        yield f"{path}: kind", kind_text(attributes.get(key, ABSENT))
    for obj, path, values in specs.reads:
        yield f"object {path}", class_name(obj)
        for name in values:
            yield f"object {path}.{name}", text_of(own_dict(obj).get(name, ABSENT))
    for _, path, names in specs.whole_reads:
        yield f"object {path}: attributes", ", ".join(sorted(map(str, names)))
    for obj, path, values in specs.class_reads:
        for name in values:
            yield f"the class of {path}: {name}", text_of(inspect.getattr_static(type(obj), name, ABSENT))
    written = {id(each.container) for each in specs.written}
    for container, path in specs.containers:
        if id(container) not in written:
            yield f"contents of {path}", text_of(container)
    for each in specs.written:
        held = all(slot.get() is each.container for slot in each.places)
        keys = "" if each.keys is None else _keys_text(each.container, each.keys)
        yield f"{each.path}: keys", f"{class_name(each.container)} {'' if held else 'elsewhere'} {keys}"
    for array, path in specs.arrays:
        yield f"contents of {path}", text_of(array)
    for cls, path in specs.classes.items():
        yield f"class {path}", ", ".join(sorted(name for name in vars(cls) if not name.startswith("__")))
    for fn, path, _ in specs.functions:
        defaults = [text_of(value) for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())]
        yield f"function {path}", f"{', '.join(sorted(vars(fn)))} ({', '.join(defaults)})"
    for local, path in specs.thread_locals:
        yield path, ", ".join(sorted(vars(local)))


def kind_text(value: Any) -> str:
    """`plain_contents.kind_of` as text."""
    if value is ABSENT or value is None:
        return str(value)
    return "a tensor" if isinstance(value, Tensor) else class_name(value)


def _keys_text(container: Any, like: Any) -> str:
    return str(len(container)) if isinstance(like, int) else ", ".join(map(text_of, container))


def _of_process(specs: GuardSpecs) -> Iterator[tuple[str, str]]:
    for mode, value in zip(MODES, read_modes(), strict=True):
        yield mode.name, "unset" if same_mode(value, "none") else str(value)
    for each in specs.call_results:
        yield f"result of {each.name}", text_of(each.result)
    for name in specs.environment:
        yield f"environment variable {name}", repr(os.environ.get(name))
    for file in specs.files:
        yield f"file {file.path}", file_text(file.path)


def file_text(path: str) -> str:
    """The contents of a file as a hash."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return "absent"


def differences(before: Snapshot, now: Snapshot, without_step: bool = False) -> Iterator[str]:
    """What differs, in the order of the capture. `without_step`: variables of a function that is not there do not
    count."""
    for path in {**before, **now}:
        old, new = before.get(path, "absent"), now.get(path, "absent")
        if old != new and not (without_step and path not in now and path.startswith(_OF_FUNCTIONS)):
            yield f"{path} is {new[:_LONGEST]}; the step was captured with {old[:_LONGEST]}"


_OF_FUNCTIONS = ("variable ", "function ", "contents of ", "class ", "object ")
