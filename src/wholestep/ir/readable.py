"""A StepGraph as Python text for people: what goes in, what each line came from, what is written back.

# StepGraph: 31 nodes (forward 5, backward 9, optimizer 7, epilogue 2); inputs: 2 parameter, 1 batch
def step(
    fc_weight,  # parameter        model.fc.weight    f32[4, 8]
    x,          # batch            batch['x']         f32[2, 8]
):
    # forward model.fc  (train.py:12)
    t = aten.t.default(fc_weight)  # f32[8, 4]  train.py:12
    ...
    # epilogue
    copy_ = aten.copy_.default(fc_weight, sub)  # model.fc.weight
    return (loss,)  # out0: result
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import Location
from wholestep.ir.io.arguments import describe_target
from wholestep.ir.io.result_tree import render
from wholestep.ir.meta import NodeMeta, node_meta
from wholestep.ir.signature import Signature, StateChange, TensorSpec
from wholestep.torch_private.operators import OpOverload

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "complex32": "c32",
    "complex64": "c64",
    "complex128": "c128",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "b8",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
    "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2fnuz": "f8e5m2fnuz",
}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def readable(gm: fx.GraphModule, signature: Signature) -> str:
    """The text of a step."""
    writer = _Writer(signature)
    nodes = list(gm.graph.nodes)
    lines = [_header(nodes, signature), *_inputs(nodes, signature)]
    for node in nodes:
        if node.op != "placeholder":
            lines += writer.lines(node)
    lines += _afterwards(signature)
    return "\n".join(lines) + "\n"


def summary(gm: fx.GraphModule, signature: Signature) -> str:
    """A step in a few lines: how many nodes, what they are, which state it reads and writes, what it returns."""
    nodes = list(gm.graph.nodes)
    operators = Counter(_target_text(node.target) for node in nodes if node.op == "call_function")
    lines = _header(nodes, signature).removeprefix("# ").split("; ")
    lines = [lines[0], *(f"  {line}" for line in lines[1:])]
    common = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in operators.most_common(_COMMON))
    more = f" and {len(operators) - _COMMON} others" if len(operators) > _COMMON else ""
    lines += [f"  operators: {common}{more}"] if common else []
    for kind in dict.fromkeys(spec.kind for spec in signature.inputs):
        specs = [spec for spec in signature.inputs if spec.kind is kind]
        shown = ", ".join(f"{clean(s.path)} {'' if s.tensor is None else _spec(s.tensor)}".rstrip() for s in specs[:2])
        lines.append(f"  {kind.value}: {shown}" + (f" and {len(specs) - 2} others" if len(specs) > 2 else ""))
    paths = {spec.name: spec.path for spec in signature.inputs}
    written = [clean(paths.get(write.target, write.target)) for write in signature.write_backs]
    more = f" and {len(written) - 2} others" if len(written) > 2 else ""
    lines += [f"  writes: {', '.join(written[:2])}{more}"] if written else []
    changes = Counter(f"{change.kind.value} {change.slot.value}" for change in signature.state_changes)
    lines += [f"  afterwards: {', '.join(f'{count} {what}' for what, count in changes.items())}"] if changes else []
    lines += [f"  returns {clean(render(signature.result))}"] if signature.result is not None else []
    return "\n".join([*lines, "  print_readable() prints the whole graph"])


_COMMON = 8


def format_node(node: fx.Node) -> str:
    """One node as a line of Python, for messages."""
    return "".join(_Writer(Signature()).statement(node))


def call_of(node: fx.Node) -> tuple[str, str]:
    """What a node calls and its arguments as text; `$2` stands for the third node of `all_input_nodes`."""
    number = {source: f"${i}" for i, source in enumerate(node.all_input_nodes)}
    return call_text(node.op, node.target, node.args, node.kwargs, number.__getitem__)


def call_text(
    op: str,
    target: Any,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    name: Callable[[fx.Node], str] = attrgetter("name"),
) -> tuple[str, str]:
    """What is called, and with which arguments. `name`: what nodes among the arguments are called."""
    shown = [_argument(arg, name) for arg in args]
    shown += [f"{key}={_argument(arg, name)}" for key, arg in kwargs.items()]
    return _target_text(target) if op == "call_function" else f"{op} {target}", ", ".join(shown)


def describe_value(value: Any) -> str:
    """What a node computes: `f32[2, 8]`, `(f32[2], i64[])`, `float`."""
    if isinstance(value, Tensor):
        return _tensor(str(value.dtype).removeprefix("torch."), value.shape)
    if isinstance(value, tuple | list):
        shown = ", ".join(describe_value(item) for item in value[:4])
        more = f", .. {len(value)} in all" if len(value) > 4 else ""
        return f"({shown}{more})" if isinstance(value, tuple) else f"[{shown}{more}]"
    if isinstance(value, _SYMBOLIC):
        return {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}[type(value)] + f" {value}"
    return "" if value is None else type(value).__name__


class _Writer:
    """Formats nodes one after the other and remembers where the last one came from."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._paths = {spec.name: spec.path for spec in signature.inputs}
        self._written = {(write.target, write.value) for write in signature.write_backs}
        self._group: tuple[str, str] | None = None
        self._targets: dict[Any, str] = {}
        self._files: dict[str, str] = {}

    def lines(self, node: fx.Node) -> list[str]:
        """The lines of one node, with a comment before the first node of a module or phase."""
        if node.op == "output":
            return [f"    {self._return(node)}"]
        meta = node_meta(node)
        if self._is_write_back(node):
            lines = [] if self._group == ("epilogue", "") else ["    # epilogue"]
            self._group = ("epilogue", "")
            statement, _ = self.statement(node)
            return [*lines, f"    {statement}  # {clean(self._paths.get(str(node.args[0]), ''))}"]
        group = (meta.phase, meta.module_path)
        lines = []
        if group != self._group:
            self._group = group
            lines.append(f"    # {self._group_title(meta)}")
        statement, comment = self.statement(node)
        return [*lines, f"    {statement}{comment}"]

    def statement(self, node: fx.Node) -> tuple[str, str]:
        """A node as `name = op(args)` and the comment behind it."""
        if node.op == "call_function":
            name = self._target(node.target)
            args = [_argument(arg) for arg in node.args]
            if node.kwargs:
                args += [f"{key}={_argument(arg)}" for key, arg in node.kwargs.items()]
            text = f"{node.name} = {name}({', '.join(args)})"
        elif node.op == "get_attr":
            text = f"{node.name} = self.{node.target}"
        elif node.op == "placeholder":
            text = f"{node.name} = <input>"
        elif node.op == "output":
            text = f"return {_argument(node.args[0] if node.args else None)}"
        else:
            args = ", ".join(_argument(arg) for arg in node.args)  # type: ignore[assignment]
            text = f"{node.name} = <{node.op} {node.target}>({args})"
        what = describe_value(node.meta.get("val"))
        where = self._where(node_meta(node).location)
        comment = "  ".join(part for part in (what, where) if part)
        return text, f"  # {comment}" if comment else ""

    def _is_write_back(self, node: fx.Node) -> bool:
        return (
            node.target is torch.ops.aten.copy_.default
            and len(node.args) >= 2
            and (str(node.args[0]), str(node.args[1])) in self._written
        )

    def _return(self, node: fx.Node) -> str:
        values = node.args[0] if node.args else ()
        outputs = self._signature.outputs
        kinds = ", ".join(f"out{i}: {clean(spec.path or spec.kind.value)}" for i, spec in enumerate(outputs[:8]))
        more = f", .. {len(outputs)} in all" if len(outputs) > 8 else ""
        return f"return {_argument(values)}" + (f"  # {kinds}{more}" if kinds else "")

    def _group_title(self, meta: NodeMeta) -> str:
        title = f"{meta.phase} {clean(meta.module_path)}".rstrip()
        where = self._where(meta.location)
        return f"{title}  ({where})" if where else title

    def _where(self, location: Location | None) -> str:
        if location is None:
            return ""
        name = self._files.get(location.file)
        if name is None:
            name = self._files[location.file] = clean(os.path.basename(location.file))
        return f"{name}:{location.line}"

    def _target(self, target: Any) -> str:
        name = self._targets.get(target)
        if name is None:
            name = self._targets[target] = _target_text(target)
        return name


def _target_text(target: Any) -> str:
    name = str(target) if isinstance(target, OpOverload) else describe_target(target)
    return name.removeprefix("_operator.").removeprefix("builtins.")


def _argument(value: Any, name: Callable[[fx.Node], str] = attrgetter("name")) -> str:
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, list):
        return f"[{', '.join(_argument(item, name) for item in value)}]"
    if isinstance(value, tuple):
        items = ", ".join(_argument(item, name) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(item, name)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_argument(value.start, name)}, {_argument(value.stop, name)}, {_argument(value.step, name)})"
    if isinstance(value, OpOverload | torch.device):
        return str(value)
    return repr(value)


def _header(nodes: list[fx.Node], signature: Signature) -> str:
    written = len(signature.write_backs)
    phases = Counter(node_meta(node).phase for node in nodes if node.op == "call_function")
    if not phases["epilogue"] and written:
        # Not every maker of graphs labels its epilogue.
        phases["forward"] -= written
        phases["epilogue"] = written
    kinds = Counter(spec.kind.value for spec in signature.inputs)
    by_phase = ", ".join(f"{phase} {count}" for phase, count in phases.items() if count > 0)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    text = f"# StepGraph: {len(nodes)} nodes" + (f" ({by_phase})" if by_phase else "")
    text += f"; inputs: {by_kind}" if by_kind else ""
    text += f"; draws random numbers on {', '.join(map(clean, signature.rng))}" if signature.rng else ""
    groups = [f"{spec.name!r} is {spec.axis or 'a group'} of {spec.size or '?'}" for spec in signature.groups]
    return text + (f"; groups: {clean(', '.join(groups))}" if groups else "")


def _inputs(nodes: list[fx.Node], signature: Signature) -> list[str]:
    specs = {spec.name: spec for spec in signature.inputs}
    rows: list[tuple[str, str, str, str]] = []
    for node in nodes:
        if node.op == "placeholder":
            spec = specs.get(node.name)
            value = describe_value(node.meta.get("val"))
            if spec is not None and spec.tensor is not None:
                value = _spec(spec.tensor)
            rows.append((f"{node.name},", spec.kind.value if spec else "?", clean(spec.path) if spec else "", value))
    if not rows:
        return ["def step():"]
    name, kind, path = (max(len(row[i]) for row in rows) for i in range(3))
    body = [f"    {r[0]:<{name}}  # {r[1]:<{kind}}  {r[2]:<{min(path, 60)}}  {r[3]}".rstrip() for r in rows]
    return ["def step(", *body, "):"]


def _afterwards(signature: Signature) -> list[str]:
    lines: list[str] = []
    if signature.result is not None:
        lines.append(f"# returns {clean(render(signature.result))}")
    if signature.state_changes:
        lines.append("# afterwards")
        lines += [f"#   {clean(_change(change))}" for change in signature.state_changes]
    lines += [f"# also calls {clean(call)}" for call in signature.host_calls]
    return lines


def _change(change: StateChange) -> str:
    condition = f"  unless out{change.unless}" if change.unless is not None else ""
    if change.output is not None:
        value = f" = out{change.output}"
    else:
        value = f" = {change.constant!r}" if change.kind.value == "constant" else ""
    return f"{change.path}{value}  ({change.kind.value} {change.slot.value}){condition}"


def _spec(spec: TensorSpec) -> str:
    return _tensor(spec.dtype, spec.shape)


def _tensor(dtype: str, shape: Any) -> str:
    return f"{_SHORT.get(dtype, dtype)}[{', '.join(map(str, shape))}]"


def clean(text: str) -> str:
    """Text of the user's that cannot break a line or a terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def html_in_notebooks(value: Any) -> str:
    """The `_repr_html_` of a class: `_repr_html_ = html_in_notebooks`.

    `wholestep.inspect.notebooks` knows how each class is shown. It is found by its name when something is displayed:
    nothing here imports it.
    """
    found: str = import_module("wholestep.inspect.notebooks").html_of(value)
    return found
