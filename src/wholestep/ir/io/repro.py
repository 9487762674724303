"""The text of `repro.py`: a program that rebuilds one graph and its inputs and runs them, with torch and nothing else.

    class Graph(torch.nn.Module)     the graph's code; constants and modules of torch.nn are made in `__init__`
    make_inputs()                    small tensors as literals, others from inputs.json and inputs.safetensors beside it
    run(), main()                    what to do with them: print the outputs, or the lines `check`

Devices that the machine does not have become the CPU, or what `--device` says; the seed, and RNG states where a run
recorded them, are set before the graph runs. What has no form as text (a module that is not of torch.nn, a function
without source) becomes a line that says so when it is reached; `Repro.missing` names it.
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
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from wholestep.ir.graph_walks import copy_graph_module
from wholestep.ir.readable import clean
from wholestep.ir.tensor_copies import copy_tensor, extent_of, shared
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.operators import OpOverload, module_that_registers, op_name, operator_namespace

_INLINE = 32
"""Tensors of up to this many elements are literals in the text."""
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_DEVICE = re.compile(r"(?<![\w.])device\(type='([a-z]+)'(?:, index=(\d+))?\)")
_STANDARD = frozenset({"torch", "device", "inf", "nan", "NoneType"})

_HEAD = '''"""{title}

python repro.py [--device cuda] [--seed 0]{flags}

{note}
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os

import torch
from torch import device
{imports}
inf, nan, NoneType = math.inf, math.nan, type(None)
DEVICE = None


def device_for(name):
    """The device of this run for one of the recorded run."""
    if DEVICE is not None and (name.split(":")[0] != "cpu" or not {has_accelerator}):
        return torch.device(DEVICE)
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError):
        return torch.device("cpu")
'''

_MISSING = '''
def missing(what):
    """Stands for what could not be written."""
    raise SystemExit(f"put {what} here: it has no form as text")
'''

_FILES = '''
class Files:
    """inputs.json and inputs.safetensors, which lie beside this program."""

    def __init__(self, made_up=False):
        here = os.path.dirname(os.path.abspath(__file__))
        with open(os.path.join(here, "inputs.json"), encoding="utf-8") as file:
            self.document = json.load(file)
        self.made_up = made_up
        self.memory = self.read(os.path.join(here, "inputs.safetensors"))
        self.placed = {}

    def read(self, path):
        """Tensors of a safetensors file as flat bytes."""
        if not os.path.exists(path):
            return {}
        with open(path, "rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = torch.frombuffer(bytearray(file.read() + b"\\0"), dtype=torch.uint8)
        head.pop("__metadata__", None)
        return {name: data[slice(*entry["data_offsets"])].clone() for name, entry in head.items()}

    def input(self, place):
        """One input: its saved value, or a random one of the same layout."""
        record = self.document["inputs"][place]
        if record["kind"] != "tensor":
            value = record.get("value")
            return float.fromhex(value["float"]) if isinstance(value, dict) else value
        shape, dtype = record.get("shape", []), getattr(torch, record["dtype"])
        stride, start, where = record.get("stride", []), record.get("start", 0), device_for(record["device"])
        if record.get("memory") in self.memory and not self.made_up:
            # Inputs that share memory share it here too.
            flat = self.memory[record["memory"]].view(dtype)
            flat = self.placed.setdefault((record["memory"], where), flat.to(where))
        else:
            start, flat = 0, self.random(record, shape, stride, dtype).to(where)
        made = flat.as_strided(shape, stride, start)
        floats = dtype.is_floating_point or dtype.is_complex
        return made.requires_grad_() if record.get("requires_grad") and floats else made

    def random(self, record, shape, stride, dtype):
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride))
        if dtype.is_floating_point or dtype.is_complex:
            wide = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
            return torch.rand(extent, dtype=wide).to(dtype)
        low, high = record.get("low"), record.get("high")
        low = 0 if low is None else low
        return torch.randint(low, (max(low, 1) if high is None else high) + 1, (extent,)).to(dtype)

    def constant(self, name):
        """A tensor that the graph holds."""
        record = next(record for record in self.document["constants"] if record["name"] == name)
        shape, stride = record.get("shape", []), record.get("stride", [])
        values = self.memory["constant." + name].view(getattr(torch, record["dtype"])).reshape(shape)
        if values.stride() != tuple(stride) and 0 not in stride:
            values = torch.empty_strided(shape, stride, dtype=values.dtype).copy_(values)
        return values.to(device_for(record["device"]))
'''

_SEED_OF_FILES = '''
def set_random_state(seed):
    """The given seed; without one the recorded seed, and the recorded RNG states where there are any."""
    files = Files()
    torch.manual_seed(files.document["seed"] if seed is None else seed)
    for name, state in files.memory.items() if seed is None else ():
        if name == "random.cpu":
            torch.set_rng_state(state)
        elif name.startswith("random.cuda") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, name.removeprefix("random."))
'''

_SEED = '''
def set_random_state(seed):
    """The given seed; without one the recorded seed."""
    torch.manual_seed({seed} if seed is None else seed)
'''

_TAIL = '''
def make_inputs(made_up=False):
    """The inputs in the order of the graph's placeholders."""
{files}    return [
{values}
    ]


def prepare(seed=None, made_up=False):
    """The graph, its inputs, and the random generators as they were."""
    set_random_state(seed)
    module, inputs = Graph(), make_inputs(made_up)
    set_random_state(seed)
    return module, inputs


def run(seed=None, made_up=False):
    """Run the graph; its outputs."""
    module, inputs = prepare(seed, made_up)
    with torch.no_grad():
        return module(*inputs)


def main():
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="run here instead of on the recorded device")
    parser.add_argument("--seed", type=int, help="instead of the recorded state of the random generators")
{made_up}    options = parser.parse_args()
    DEVICE = options.device
{check}


if __name__ == "__main__":
    main()
'''

_MADE_UP = (
    '    parser.add_argument("--made-up", action="store_true", help="random inputs although values were saved")\n'
)

_PRINT_OUTPUTS = """
outputs = run(options.seed{made_up})
for i, value in enumerate(outputs if isinstance(outputs, (tuple, list)) else [outputs]):
    if isinstance(value, torch.Tensor):
        total = value.detach().to(torch.complex128 if value.is_complex() else torch.float64).sum().item()
        print(f"output {{i}}: {{value.dtype}} {{list(value.shape)}} stride {{list(value.stride())}} sum {{total!r}}")
    else:
        print(f"output {{i}}: {{value!r}}")
"""


@dataclass(frozen=True)
class Repro:
    """A program, and the names of what it could not be given."""

    text: str
    missing: tuple[str, ...]


def repro_script(
    gm: fx.GraphModule,
    title: str,
    inputs: Sequence[Any] | None = None,
    *,
    seed: int = 0,
    check: str = "",
    setup: str = "",
    note: str = "",
) -> Repro:
    """The program of a graph.

    `inputs`: values that may become literals; None where only a run will know them (then all come from the files).
    `check`: lines that use `module` and `inputs`; without any, the outputs are printed. `setup`: lines at the top.
    `seed`: what a program without files seeds the generators with. `note`: goes into the docstring.
    """
    script = _Script()
    classes = _class_of(gm, "Graph", "", script)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    values = [f"        {each},  # {name}" for each, name in zip(_inputs(inputs, names, script), names, strict=True)]
    made_up = ", options.made_up" if script.uses_files else ""
    lines = f"module, inputs = prepare(options.seed{made_up})\n{check.strip()}" if check else ""
    tail = _TAIL.format(
        files="    files = Files(made_up)\n" if any("files." in value for value in values) else "",
        values="\n".join(values),
        made_up=_MADE_UP if script.uses_files else "",
        check=textwrap.indent(lines or _PRINT_OUTPUTS.format(made_up=made_up).strip(), "    "),
    )
    beside = "Values that are not in this text are in inputs.json and inputs.safetensors in this folder."
    head = _HEAD.format(
        title=_in_docstring(f"{title}\n\nWritten by wholestep with torch {torch.__version__}."),
        flags=" [--made-up]" if script.uses_files else "",
        note=_in_docstring("\n".join(filter(None, [beside if script.uses_files else "", note])))
        or "All is in this text.",
        imports="".join(f"{line}\n" for line in script.imports),
        has_accelerator=bool(script.devices - {"cpu", "meta"}),
    )
    seeding = _SEED_OF_FILES if script.uses_files else _SEED.format(seed=seed)
    parts = [
        head,
        setup,
        _MISSING if script.missing else "",
        _FILES if script.uses_files else "",
        seeding,
        classes,
        tail,
    ]
    text = "\n\n\n".join(part.strip("\n") for part in parts if part.strip())
    return Repro(re.sub(r"\n{4,}", "\n\n\n", text) + "\n", tuple(script.missing))


def _in_docstring(text: str) -> str:
    return "\n".join(clean(line) for line in text.split("\n")).replace("\\", "/").replace('"""', "'''").strip('"')


@dataclass
class _Script:
    """The parts of a program while it is written."""

    imports: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    uses_files: bool = False

    def from_files(self, expression: str) -> str:
        """An expression that reads the files."""
        self.uses_files = True
        return expression

    def value(self, value: Any, name: str, stored: str) -> str:
        """The expression of an input or a constant; `stored` is the one for a tensor that is too large for the text."""
        if isinstance(value, Tensor):
            return self._tensor(value, name, stored)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            value = value.node.hint
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, torch.Generator):
            return f"torch.Generator(device_for({str(value.device)!r})).manual_seed({value.initial_seed()})"
        if value is None or isinstance(value, bool | int | float | str | complex):
            return repr(value)
        if isinstance(value, list | tuple) and not any(isinstance(item, Tensor) for item in value):
            items = [self.value(item, f"{name}_{i}", "") for i, item in enumerate(value)]
            return f"[{', '.join(items)}]" if isinstance(value, list) else f"({''.join(f'{item}, ' for item in items)})"
        return self.lacks(f"{name}, a {type(value).__qualname__}")

    def lacks(self, what: str) -> str:
        """An expression that says what has no form as text."""
        self.missing.append(what)
        return f"missing({what!r})"

    def _tensor(self, tensor: Tensor, name: str, stored: str) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return self.lacks(f"{name}, a tensor of {tensor.dtype} and {tensor.layout}")
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return self.lacks(f"the value of {name}")
        text = _literal(tensor) if tensor.is_contiguous() else _strided_literal(tensor)
        if not text:
            return self.from_files(stored)
        if tensor.device.type != "cpu":
            self.devices.add(tensor.device.type)
            text += f".to(device_for({str(tensor.device)!r}))"
        return text + (".requires_grad_()" if tensor.requires_grad else "")


def _inputs(inputs: Sequence[Any] | None, names: list[str], script: _Script) -> list[str]:
    stored = [f"files.input({place})" for place in range(len(names))]
    if inputs is None or len(inputs) != len(names):
        return [script.from_files(each) for each in stored]
    overlapping = {place for group in shared(inputs) for place in group}
    return [
        script.from_files(text) if place in overlapping else script.value(value, f"input_{place}", text)
        for place, (value, text) in enumerate(zip(inputs, stored, strict=True))
    ]


def constants_of(gm: fx.GraphModule) -> dict[str, Tensor]:
    """Tensors with data that a graph, its nested graphs and its modules hold, by path."""
    found: dict[str, Tensor] = {}
    for target, value in _attributes(gm).items():
        if isinstance(value, fx.GraphModule):
            found |= {f"{target}.{name}": each for name, each in constants_of(value).items()}
        elif isinstance(value, nn.Module):
            found |= {f"{target}.{name}": each for name, each in _tensors_of(value)}
        elif isinstance(value, Tensor):
            found[target] = value
    return {
        name: each
        for name, each in found.items()
        if not (isinstance(each, FakeTensor) or each.is_meta or each.layout is not torch.strided)
    }


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def importable(function: Any) -> str | None:
    """`module:qualname` of a function that another process can import; None if there is no such name."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not path or module == "__main__" or "<" in path:
        return None
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is function else None


def _class_of(gm: fx.GraphModule, name: str, path: str, script: _Script) -> str:
    """A graph as a class, after the classes of graphs that it holds. `path`: where the outermost graph holds it."""
    copy = copy_graph_module(gm)
    copy.graph.set_codegen(CodeGen())
    for node in copy.graph.nodes:
        node.type = None  # an annotation of the user's may name anything
    code = copy.graph.python_code("self")
    source = code.src[code.src.index("def forward(") :]
    script.devices |= {match[0] for match in _DEVICE.findall(source)}
    values = (node.meta.get("val") for node in gm.graph.nodes)
    script.devices |= {value.device.type for value in values if isinstance(value, Tensor)}
    source = _DEVICE.sub(lambda m: f"device_for({m[1] + (':' + m[2] if m[2] else '')!r})", source)
    for given, value in code.globals.items():
        if given not in _STANDARD and re.search(rf"\b{re.escape(given)}\b", source):
            # In a class, Python renames names that begin with two underscores.
            global_name = f"global{given.rstrip('_')}" if given.startswith("__") else given
            source = re.sub(rf"\b{re.escape(given)}\b", global_name, source)
            script.imports.update(dict.fromkeys(_global(global_name, value, script)))
    lines, missing = registering(gm)
    script.imports.update(dict.fromkeys(lines))
    script.missing += missing
    before: list[str] = []
    lines = ["super().__init__()"]
    for target, value in _attributes(gm).items():
        lines += _attribute(target, value, name, path, script, before)
    if any("files." in line for line in lines):
        lines.insert(1, "files = Files()")
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
    """Lines that register operators which torch does not have, and what of that has no form as text."""
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
                value = getattr(value, part, None)
            found[str(node.target)] = value
    return found


def _attribute(target: str, value: Any, owner: str, path: str, script: _Script, before: list[str]) -> list[str]:
    *parents, last = target.split(".")
    whole = f"{path}.{target}" if path else target
    lines: list[str] = []
    holder = "self"
    for part in parents:
        lines.append(_set(holder, part, f"getattr({holder}, {part!r}, None) or torch.nn.Module()"))
        holder = _get(holder, part)
    if not isinstance(value, nn.Module):
        return [*lines, _set(holder, last, _as_constant(value, whole, script))]
    lines.append(_set(holder, last, _module(value, f"{owner}_{target}", whole, script, before)))
    made = _get(holder, last)
    if not isinstance(value, fx.GraphModule):
        for name, tensor in _tensors_of(value):
            full = f"{whole}.{name}"
            lines.append(
                f"{made}.get_{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'}({name!r})"
                f".data = {script.value(tensor.detach(), full, f'files.constant({full!r})')}"
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


def _as_constant(value: Any, path: str, script: _Script) -> str:
    stored = f"files.constant({path!r})"
    if isinstance(value, nn.Parameter):
        return f"torch.nn.Parameter({script.value(value.detach(), path, stored)}, requires_grad={value.requires_grad})"
    return script.value(value, path, stored)


def _module(module: nn.Module, name: str, path: str, script: _Script, before: list[str]) -> str:
    if isinstance(module, fx.GraphModule):
        called = re.sub(r"\W", "_", name)
        before.append(_class_of(module, called, path, script))
        return f"{called}()"
    kind = type(module)
    if isinstance(module, nn.Sequential) and kind is nn.Sequential:
        return f"torch.nn.Sequential({', '.join(_module(child, name, path, script, before) for child in module)})"
    plain = repr(module)
    if getattr(nn, kind.__name__, None) is kind and not list(module.children()) and "\n" not in plain:
        return f"torch.nn.{plain}"
    return script.lacks(f"{name}, a {kind.__module__}.{kind.__qualname__}")


def _global(name: str, value: Any, script: _Script) -> list[str]:
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
        return [f"{name} = None  # {script.lacks(f'{name}, a {type(value).__qualname__}')}"]
    source = source_of(value)
    if source is not None:
        own = value.__name__
        return [source, *([f"{name} = {own}"] if own != name else [])]
    if isinstance(value, OpOverload):
        return [f"{name} = torch.ops.{op_name(value).replace('::', '.')}"]
    return [f"def {name}(*args, **kwargs):\n    {script.lacks(f'the function {name}')}"]


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
    """A small tensor as an expression that makes the same bits; "" where it is too large or text would lose some."""
    kind = str(tensor.dtype)
    if tensor.numel() > _INLINE or tensor.is_complex():
        return ""
    if kind.startswith(("torch.float8", "torch.uint16", "torch.uint32", "torch.uint64", "torch.float4")):
        return ""
    flat = tensor.detach().cpu().contiguous()
    data = re.sub(r"\b(nan|inf)\b", r'float("\1")', repr(flat.tolist()))
    text = f"torch.tensor({data}, dtype={kind})"
    if flat.numel() == 0 and tensor.dim() != 1:
        text = f"torch.empty({list(tensor.shape)}, dtype={kind})"
    return text


def _strided_literal(tensor: Tensor) -> str:
    """A tensor with a layout of its own: the memory that it spans, and the view of it."""
    own = copy_tensor(tensor.detach().resolve_conj().resolve_neg())
    memory = _literal(own.as_strided((extent_of(own),), (1,)))
    return f"{memory}.as_strided({list(own.shape)}, {list(own.stride())})" if memory else ""
