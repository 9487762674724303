"""A graph and its inputs as a folder that runs by itself: `repro.py` needs torch and nothing of ours.

    repro.py             class Repro(torch.nn.Module), make_inputs(), and what to look at under `if __name__ ...`
    repro.safetensors    tensors that are too large for the text

What cannot be written (a module that is not of torch.nn, a function without source) becomes a line that says so when it
is reached; `write_repro` returns their names.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import keyword
import math
import re
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.ir.io.tensor_file import can_write, write_tensors
from wholestep.ir.memory import copy_tensor, extent_of, shared, spanned
from wholestep.torch_private.dumps import module_that_registers, operator_namespace
from wholestep.torch_private.operators import OpOverload, op_name

_INLINE = 32
"""Tensors of up to so many elements are part of the text."""
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")

_READER = '''
def read_tensors(path):
    """A safetensors file."""
    raw = Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data, found = json.loads(raw[8 : 8 + length]), raw[8 + length :], {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype, (start, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
        flat = torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8) if end > start else torch.empty(0)
        found[name] = (flat.view(dtype) if end > start else flat.to(dtype)).reshape(entry["shape"])
    return found


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
TENSORS = read_tensors(Path(__file__).with_name("repro.safetensors"))
'''

_PLACE = '''
def place(device):
    """A device, or the CPU where this machine does not have it."""
    kind = torch.device(device).type
    there = kind == "cpu" or (hasattr(torch, kind) and getattr(torch, kind).is_available())
    return device if there else "cpu"
'''

_MISSING = '''
def missing(what):
    """Stands for what could not be written."""
    raise SystemExit(f"put {what} here: it has no form as text")
'''


@dataclass
class _Text:
    """The parts of a script while it is written."""

    imports: dict[str, None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def value(self, value: Any, name: str) -> str:
        """The expression of an input or a constant."""
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            value = value.node.hint
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, torch.Generator):
            return f"torch.Generator(place({str(value.device)!r})).manual_seed({value.initial_seed()})"
        if value is None or isinstance(value, bool | int | float | str | complex):
            return repr(value)
        if isinstance(value, list | tuple):
            items = [self.value(item, f"{name}_{i}") for i, item in enumerate(value)]
            return f"[{', '.join(items)}]" if isinstance(value, list) else f"({''.join(f'{item}, ' for item in items)})"
        return self.lacks(f"{name}, a {type(value).__qualname__}")

    def lacks(self, what: str) -> str:
        self.missing.append(what)
        return f"missing({what!r})"

    def _tensor(self, tensor: Tensor, name: str) -> str:
        if not can_write(tensor):
            return self.lacks(f"{name}, a tensor of {tensor.dtype} and {tensor.layout}")
        text = self._stored(tensor, name) if tensor.is_contiguous() else self._strided(tensor, name)
        if tensor.device.type != "cpu":
            text += f".to(place({str(tensor.device)!r}))"
        return text + (".requires_grad_()" if tensor.requires_grad else "")

    def _stored(self, tensor: Tensor, name: str) -> str:
        text = _literal(tensor) if tensor.numel() <= _INLINE else ""
        if not text:
            self.tensors[name] = tensor
            text = f"TENSORS[{name!r}]"
        return text

    def _strided(self, tensor: Tensor, name: str) -> str:
        """A tensor with other strides than its elements in order would have: the memory that it spans, and the view."""
        own = copy_tensor(tensor.detach().resolve_conj().resolve_neg())
        memory = own.as_strided((extent_of(own),), (1,))
        return f"{self._stored(memory, name)}.as_strided({list(own.shape)}, {list(own.stride())})"


def write_repro(
    folder: str | Path,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    title: str = "A graph and its inputs.",
    check: str = "print(module(*inputs))",
    setup: str = "",
    name: str = "repro.py",
) -> tuple[Path, tuple[str, ...]]:
    """Write a folder with a script that makes `module` and `inputs` and then runs the lines `check`.

    `setup` goes to the top of the script. Returns the path of the script and what had to be left out.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = _Text()
    classes = _class_of(gm, "Repro", text)
    memory, views = _shared_inputs(inputs, text)
    values = "\n".join(
        f"        {views.get(i) or text.value(value, f'input_{i}')},  # {_placeholder(gm, i)}"
        for i, value in enumerate(inputs)
    )
    body = f"""
def make_inputs():
{memory}    return [
{values}
    ]


if __name__ == "__main__":
    module, inputs = Repro(), make_inputs()
{textwrap.indent(check.strip(), "    ")}
"""
    helpers = [_READER if text.tensors else "", _PLACE if "place(" in classes + body else ""]
    helpers.append(_MISSING if text.missing else "")
    needed = ["import json", "from pathlib import Path"] if text.tensors else []
    # Functions of the user's come with annotations, of which nothing else is known.
    head = "\n".join(["from __future__ import annotations", "", *needed, "", "import torch", *text.imports])
    doc = '"""' + title.replace("\\", "\\\\").replace('"""', "'''").strip() + '\n"""'
    parts = [doc, head, setup.strip(), *(helper.strip() for helper in helpers), classes.strip(), body.strip()]
    path = folder / name
    if text.tensors:
        write_tensors(path.with_suffix(".safetensors"), text.tensors)
    path.write_text(re.sub(r"\n{4,}", "\n\n\n", "\n\n\n".join(filter(None, parts))) + "\n", encoding="utf-8")
    return path, tuple(text.missing)


def _shared_inputs(inputs: Sequence[Any], text: _Text) -> tuple[str, dict[int, str]]:
    """Lines that make memory which several inputs share, and their views of it by place."""
    lines, views = "", dict[int, str]()
    for number, group in enumerate(shared(inputs)):
        tensors = [inputs[i] for i in group]
        if all(can_write(tensor) for tensor in tensors):
            memory, first = spanned(tensors)
            lines += f"    memory_{number} = {text.value(memory, f'memory_{number}')}\n"
            for i, tensor in zip(group, tensors, strict=True):
                start = int(tensor.storage_offset()) - first
                view = f"memory_{number}.as_strided({list(tensor.shape)}, {list(tensor.stride())}, {start})"
                views[i] = view + (".requires_grad_()" if tensor.requires_grad else "")
    return lines, views


def importable(function: Any) -> str | None:
    """`module:qualname` of a function that another process can import; None if there is no such name."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not path or module == "__main__" or "<" in path:
        return None
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is function else None


def _placeholder(gm: fx.GraphModule, place: int) -> str:
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    return names[place] if place < len(names) else ""


def _class_of(gm: fx.GraphModule, name: str, text: _Text) -> str:
    code = gm.graph.python_code("self")
    source = code.src[code.src.index("def forward(") :]
    for given, value in code.globals.items():
        if re.search(rf"\b{re.escape(given)}\b", source):
            # In a class, Python gives names that begin with two underscores another one.
            global_name = f"global{given.rstrip('_')}" if given.startswith("__") else given
            source = re.sub(rf"\b{re.escape(given)}\b", global_name, source)
            text.imports.update(dict.fromkeys(_global(global_name, value, text)))
    lines, missing = registering(gm)
    text.imports.update(dict.fromkeys(lines))
    text.missing += missing
    before: list[str] = []
    lines = ["super().__init__()"]
    for target, value in _attributes(gm).items():
        lines += _attribute(target, value, name, text, before)
    return "\n\n\n".join(
        [
            *before,
            f"class {name}(torch.nn.Module):\n    def __init__(self):\n"
            + textwrap.indent("\n".join(lines), " " * 8)
            + "\n\n"
            + textwrap.indent(source.strip(), "    "),
        ]
    )


def registering(gm: fx.GraphModule) -> tuple[list[str], list[str]]:
    """Lines that make operators known which torch does not have, and what of that has no form as text."""
    lines, missing = [], []
    for op in {node.target: None for node in gm.graph.nodes if isinstance(node.target, OpOverload)}:
        module = module_that_registers(op)
        if module is None:
            missing.append(f"what registers the operator {op_name(op)}")
            lines.append(f"# put {missing[-1]} here: it has no form as text")
        elif module:
            lines.append(f"import {module}  # registers {op_name(op)}")
    return lines, missing


def _attributes(gm: fx.GraphModule) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value: Any = gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            found[str(node.target)] = value
    return found


def _attribute(target: str, value: Any, owner: str, text: _Text, before: list[str]) -> list[str]:
    *path, last = target.split(".")
    lines: list[str] = []
    holder = "self"
    for part in path:
        lines.append(_set(holder, part, f"getattr({holder}, {part!r}, None) or torch.nn.Module()"))
        holder = _get(holder, part)
    if not isinstance(value, nn.Module):
        return [*lines, _set(holder, last, _as_constant(value, target, text))]
    lines.append(_set(holder, last, _module(value, f"{owner}_{target}", text, before)))
    made = _get(holder, last)
    if not isinstance(value, fx.GraphModule):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            lines.append(
                f"{made}.get_{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'}({name!r})"
                f".data = {text.value(tensor.detach(), f'{target}.{name}')}"
            )
        lines.append(f"{made}.train({value.training})")
    return lines


def _set(holder: str, name: str, value: str) -> str:
    """A line that sets an attribute; modules in a list have numbers for names."""
    return f"{holder}.{name} = {value}" if _is_name(name) else f"setattr({holder}, {name!r}, {value})"


def _get(holder: str, name: str) -> str:
    return f"{holder}.{name}" if _is_name(name) else f"getattr({holder}, {name!r})"


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _as_constant(value: Any, target: str, text: _Text) -> str:
    if isinstance(value, nn.Parameter):
        return f"torch.nn.Parameter({text.value(value.detach(), target)}, requires_grad={value.requires_grad})"
    return text.value(value, target)


def _module(module: nn.Module, name: str, text: _Text, before: list[str]) -> str:
    if isinstance(module, fx.GraphModule):
        called = re.sub(r"\W", "_", name)
        before.append(_class_of(module, called, text))
        return f"{called}()"
    kind = type(module)
    if isinstance(module, nn.Sequential) and kind is nn.Sequential:
        return f"torch.nn.Sequential({', '.join(_module(child, name, text, before) for child in module)})"
    plain = repr(module)
    if getattr(nn, kind.__name__, None) is kind and not list(module.children()) and "\n" not in plain:
        return f"torch.nn.{plain}"
    return text.lacks(f"{name}, a {kind.__module__}.{kind.__qualname__}")


def _global(name: str, value: Any, text: _Text) -> list[str]:
    if name == "torch":
        return []
    if isinstance(value, float):
        return [f'{name} = float("{value}")']
    if isinstance(value, types.ModuleType):
        return [f"import {value.__name__} as {name}"]
    if value is type(None):
        return [f"{name} = type(None)"]
    found = importable(value)
    if found is not None:
        module, path = found.split(":")
        first, *rest = path.split(".")
        lines = [f"from {module} import {first} as {name}"]
        return [*lines, f"{name} = {name}.{'.'.join(rest)}"] if rest else lines
    if isinstance(value, torch.Size | torch.dtype | torch.device):
        return [f"{name} = torch.{value!r}" if isinstance(value, torch.Size) else f"{name} = {value!r}"]
    if isinstance(value, torch.nn.Module) or not callable(value):
        return [f"{name} = None  # {text.lacks(f'{name}, a {type(value).__qualname__}')}"]
    source = source_of(value)
    if source is not None:
        own = value.__name__
        return [source, *([f"{name} = {own}"] if own != name else [])]
    if isinstance(value, OpOverload):
        return [f"{name} = torch.ops.{op_name(value).replace('::', '.')}"]
    return [f"def {name}(*args, **kwargs):\n    {text.lacks(f'the function {name}')}"]


def source_of(function: Any) -> str | None:
    """The text of a plain function that needs only modules and namespaces of operators from around it, or None."""
    if not inspect.isfunction(function) or function.__closure__ or function.__name__ == "<lambda>":
        return None
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(each is None or isinstance(each, bool | int | float | str) for each in given):
        return None
    lines = [_line_for(name, function.__globals__) for name in sorted(_globals_of(function.__code__))]
    if None in lines:
        return None
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None
    return "\n".join([*filter(None, lines), source.rstrip()]) if source.startswith("def ") else None


def _globals_of(code: types.CodeType) -> set[str]:
    """The global names that a function reads or writes, in functions inside of it too."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in _GLOBAL}
    return found.union(*(_globals_of(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _line_for(name: str, around: dict[str, Any]) -> str | None:
    """The line that makes a global name known; "" if none is needed, None if there is none."""
    if name not in around:
        return "" if hasattr(builtins, name) else None
    value = around[name]
    namespace = operator_namespace(value)
    if namespace is not None:
        return f"{name} = torch.ops.{namespace}"
    if not isinstance(value, types.ModuleType) or value.__name__ == "__main__":
        return None
    return "" if value is torch and name == "torch" else f"import {value.__name__} as {name}"


def _literal(tensor: Tensor) -> str:
    """A small tensor as an expression that makes the same bits; "" where text would lose some."""
    kind = str(tensor.dtype)
    if tensor.is_complex() or kind.startswith(("torch.float8", "torch.uint16", "torch.uint32", "torch.uint64")):
        return ""
    flat = tensor.detach().cpu().contiguous()
    data = re.sub(r"\b(nan|inf)\b", r'float("\1")', repr(flat.tolist()))
    text = f"torch.tensor({data}, dtype={kind})"
    if flat.numel() == 0 and tensor.dim() != 1:
        text = f"torch.empty({list(tensor.shape)}, dtype={kind})"
    return text
