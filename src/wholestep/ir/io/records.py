"""Frozen dataclasses as JSON, driven by their type hints: a field added to a signature is written and read at once.

    InputSpec(name="x", kind=InputKind.BATCH, ..)    {"name": "x", "kind": "batch", ..}

Fields that have their default are left out; keys that a dataclass does not have are refused.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import read_float, shown
from wholestep.ir.io.targets import TargetReader, target_name
from wholestep.torch_private.operators import OpOverload

T = TypeVar("T")


def write_record(value: Any) -> Any:
    """A dataclass, or anything that one holds, as JSON."""
    if dataclasses.is_dataclass(value):
        plain: dict[str, Any] = {}
        kind: Any = type(value)
        for name, default in _defaults(kind).items():
            content = getattr(value, name)
            if default is dataclasses.MISSING or content != default or type(content) is not type(default):
                plain[name] = write_record(content)
        return plain
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, str | int | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [write_record(item) for item in value]
    if isinstance(value, dict):
        return {str(key): write_record(item) for key, item in value.items()}
    if isinstance(value, OpOverload):
        return {"op": target_name(value)}
    raise GraphFormatError(f"a value of type {type(value).__name__} has no form in the file.")


class RecordReader:
    """Reads dataclasses; `where` in messages says which part of the file is wrong."""

    def __init__(self, targets: TargetReader) -> None:
        self._targets = targets

    def read(self, cls: type[T], data: Any, where: str) -> T:
        """An instance of the dataclass `cls`."""
        if not isinstance(data, dict):
            raise GraphFormatError(f"{where}: expected an object, found {shown(data)}.")
        kind: Any = cls
        hints, defaults = _hints(kind), _defaults(kind)
        for key in data:
            if key not in hints:
                raise GraphFormatError(f"{where}: unknown key {shown(key)}.")
        for name, default in defaults.items():
            if default is dataclasses.MISSING and name not in data:
                raise GraphFormatError(f"{where}: the key {name!r} is missing.")
        return cls(**{key: self._value(hints[key], item, f"{where}.{key}") for key, item in data.items()})

    def _value(self, hint: Any, data: Any, where: str) -> Any:
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self._union(typing.get_args(hint), data, where)
        if origin is tuple:
            return self._tuple(typing.get_args(hint), data, where)
        if origin is list and isinstance(data, list):
            return [self._value(typing.get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
        if origin is dict and isinstance(data, dict):
            item = typing.get_args(hint)[1]
            return {key: self._value(item, value, f"{where}[{shown(key)}]") for key, value in data.items()}
        if hint in (int, str, bool, type(None)) and type(data) is hint:
            return data
        if hint is float and isinstance(data, dict) and set(data) == {"float"}:
            return read_float(data["float"])
        if hint is OpOverload and isinstance(data, dict) and isinstance(data.get("op"), str):
            return self._targets.read_op(data["op"])
        if isinstance(hint, type) and issubclass(hint, Enum) and data in [member.value for member in hint]:
            return hint(data)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.read(hint, data, where)
        if hint in (object, Any):
            return _free(data)
        raise GraphFormatError(f"{where}: {shown(data)} is not of the kind expected there.")

    def _union(self, choices: tuple[Any, ...], data: Any, where: str) -> Any:
        if data is None and type(None) in choices:
            return None
        others = [choice for choice in choices if choice is not type(None)]
        if len(others) == 1:
            return self._value(others[0], data, where)
        for choice in others:
            try:
                return self._value(choice, data, where)
            except GraphFormatError:
                continue
        raise GraphFormatError(f"{where}: {shown(data)} is not of a kind expected there.")

    def _tuple(self, items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
        if isinstance(data, list):
            if len(items) == 2 and items[1] is Ellipsis:
                return tuple(self._value(items[0], item, f"{where}[{i}]") for i, item in enumerate(data))
            if len(items) == len(data):
                return tuple(
                    self._value(h, d, f"{where}[{i}]") for i, (h, d) in enumerate(zip(items, data, strict=True))
                )
        raise GraphFormatError(f"{where}: {shown(data)} is not a list of the length expected there.")


def _free(data: Any) -> Any:
    """Data of no fixed type: JSON itself, with exact floats."""
    if isinstance(data, dict):
        if set(data) == {"float"}:
            return read_float(data["float"])
        return {key: _free(item) for key, item in data.items()}
    return [_free(item) for item in data] if isinstance(data, list) else data


@lru_cache(maxsize=64)
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@lru_cache(maxsize=64)
def _defaults(cls: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        made = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        found[spec.name] = made
    return found
