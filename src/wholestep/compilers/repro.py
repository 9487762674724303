"""The text of `repro.py`: a program that runs one graph on its recorded inputs, with torch and nothing else.

It holds the graph's code. Inputs come from the files beside it, or are made up like them; devices that the machine does
not have become the CPU, or what `--device` says; seed and states of random generators are set as they were.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from wholestep.compilers.boxed import attribute_of, copy_graph_module
from wholestep.ir.io.repro import importable, registering, source_of
from wholestep.ir.readable import clean

_DEVICE = re.compile(r"(?<![\w.])device\(type='([a-z]+)'(?:, index=(\d+))?\)")
_STANDARD = frozenset({"torch", "device", "inf", "nan", "NoneType"})

_HEAD = '''"""{title}, written by wholestep with torch {version}.

python repro.py [--device cuda] [--seed 0] [--made-up]

Inputs are those of inputs.json and inputs.safetensors in this folder.{note}
Imports of libraries that define operators belong at the top, where they are not there already.
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
HERE = os.path.dirname(os.path.abspath(__file__))
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

_TAIL = '''

def read_safetensors(path):
    """Tensors of a file as flat bytes."""
    if not os.path.exists(path):
        return {}
    with open(path, "rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = torch.frombuffer(bytearray(file.read() + b"\\0"), dtype=torch.uint8)
    head.pop("__metadata__", None)
    return {name: data[slice(*entry["data_offsets"])].clone() for name, entry in head.items()}


def number(value):
    """A number as inputs.json writes it: floats in hexadecimal."""
    return float.fromhex(value["float"]) if isinstance(value, dict) else value


def make(record, memory, made_up=False):
    """One input: its value if that was kept, one like it otherwise."""
    if record["kind"] != "tensor":
        return number(record.get("value"))
    shape, dtype = record.get("shape", []), getattr(torch, record["dtype"])
    stride, start = record.get("stride", []), record.get("start", 0)
    if record.get("memory") in memory and not made_up:
        flat = memory[record["memory"]].view(dtype)
    else:
        start = 0
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride))
        if dtype.is_floating_point or dtype.is_complex:
            wide = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
            flat = torch.rand(extent, dtype=wide).to(dtype)
        else:
            low, high = record.get("low"), record.get("high")
            low = 0 if low is None else low
            flat = torch.randint(low, (max(low, 1) if high is None else high) + 1, (extent,)).to(dtype)
    return flat.to(device_for(record["device"])).as_strided(shape, stride, start)


def load(seed=None, made_up=False):
    """The graph, its inputs, and the state of random generators as it was."""
    with open(os.path.join(HERE, "inputs.json"), encoding="utf-8") as file:
        document = json.load(file)
    memory = read_safetensors(os.path.join(HERE, "inputs.safetensors"))
    torch.manual_seed(document["seed"] if seed is None else seed)
    inputs = [make(record, memory, made_up) for record in document["inputs"]]
    graph = Graph()
    for record in document["constants"]:
        *path, name = record["name"].split(".")
        owner = graph
        for atom in path:
            if not hasattr(owner, atom):
                setattr(owner, atom, torch.nn.Module())
            owner = getattr(owner, atom)
        flat = memory["constant." + record["name"]].view(getattr(torch, record["dtype"]))
        owner.register_buffer(name, flat.reshape(record.get("shape", [])).to(device_for(record["device"])))
    if seed is None:
        for name, state in memory.items():
            if name == "random.cpu":
                torch.set_rng_state(state)
            elif name.startswith("random.cuda") and torch.cuda.is_available():
                torch.cuda.set_rng_state(state, name.removeprefix("random."))
    return graph, inputs


def run(seed=None, made_up=False):
    """Run the graph; its outputs."""
    graph, inputs = load(seed, made_up)
    with torch.no_grad():
        return graph(*inputs)


def main():
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="run here instead of on the recorded device")
    parser.add_argument("--seed", type=int, help="instead of the recorded state of the random generators")
    parser.add_argument("--made-up", action="store_true", help="make inputs up although values were kept")
    options = parser.parse_args()
    DEVICE = options.device
    outputs = run(options.seed, options.made_up)
    for i, value in enumerate(outputs if isinstance(outputs, (tuple, list)) else [outputs]):
        if isinstance(value, torch.Tensor):
            total = value.detach().to(torch.complex128 if value.is_complex() else torch.float64).sum().item()
            print(f"output {i}: {value.dtype} {list(value.shape)} stride {list(value.stride())} sum {total!r}")
        else:
            print(f"output {i}: {value!r}")


if __name__ == "__main__":
    main()
'''


def repro_text(gm: fx.GraphModule, title: str, no_json: str = "") -> str:
    """The program. `no_json`: why there is no graph.json, if there is none."""
    classes = _classes(gm, "Graph")
    sources = "\n".join(each.source for each in classes)
    known = {name: value for each in classes for name, value in each.names.items()}
    used = [_import(name, value) for name, value in known.items() if re.search(rf"\b{name}\b", sources)]
    imports = "\n".join(sorted([*filter(None, used), *registering(gm)[0]]))
    devices = {device for each in classes for device in each.devices}
    note = f"\nThere is no graph.json: {clean(no_json)}" if no_json else ""
    head = _HEAD.format(
        title=clean(title).replace('"', "'").replace("\\", "/"),
        version=torch.__version__,
        note=note.replace('"""', "'''").replace("\\", "/"),
        imports=imports + "\n" if imports else "",
        has_accelerator=bool(devices - {"cpu", "meta"}),
    )
    return "\n\n".join([head.rstrip("\n"), *(f"\n{each.source}" for each in classes)]) + "\n" + _TAIL


@dataclass(frozen=True)
class _Class:
    """A graph as a class of the program."""

    source: str
    names: dict[str, Any]
    devices: frozenset[str]


def _classes(gm: fx.GraphModule, name: str) -> list[_Class]:
    """A graph after those that it holds: bodies of higher-order operators such as `cond`."""
    held = {str(node.target): attribute_of(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr")}
    graphs = {target: value for target, value in held.items() if isinstance(value, fx.GraphModule)}
    found: list[_Class] = []
    lines = []
    for number, (target, value) in enumerate(graphs.items()):
        found += _classes(value, f"{name}_{number}")
        lines.append(f"        self.add_module({target!r}, {name}_{number}())")
    copy = copy_graph_module(gm)
    copy.graph.set_codegen(CodeGen())
    code = copy.graph.python_code(root_module="self")
    devices = {match[0] for match in _DEVICE.findall(code.src)}
    devices |= {str(v.device.type) for v in (n.meta.get("val") for n in gm.graph.nodes) if isinstance(v, torch.Tensor)}
    source = _DEVICE.sub(lambda m: f"device_for({m[1] + (':' + m[2] if m[2] else '')!r})", code.src)
    body = [f"    {line}".rstrip() for line in source.strip("\n").splitlines()]
    start = ["    def __init__(self):", "        super().__init__()", *lines, ""] if lines else []
    text = "\n".join([f"class {name}(torch.nn.Module):", *start, *body])
    names = {}
    for known, value in code.globals.items():
        # In a class, Python gives names that begin with two underscores another one.
        names[own := f"global{known.rstrip('_')}" if known.startswith("__") else known] = value
        text = re.sub(rf"\b{known}\b", own, text) if own != known else text
    return [*found, _Class(text, names, frozenset(devices))]


def _import(name: str, value: Any) -> str:
    """The line that makes a name of the graph's code known."""
    if name in _STANDARD:
        return ""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    source = source_of(value)
    if source is not None and importable(value) is None:
        return source if own == name else f"{source}\n\n\n{name} = {value.__name__}\n"
    if not module or not own or "<" in own or module == "builtins":
        return ""
    first, *rest = own.split(".")
    return f"from {module} import {first} as {name}" if not rest else f"import {module}; {name} = {module}.{own}"
