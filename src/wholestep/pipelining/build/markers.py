"""Marks in the user's code that say where one stage ends and the next begins.

`pipe_split()` is an operator without inputs or results. Eager does nothing there; export keeps it as a node.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Flag
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from wholestep.errors import NoSuchModuleError, PipelineError
from wholestep.torch_private.pipelining import define_marker, hooks_around, torchs_markers

SPLIT = define_marker("wholestep::pipe_split", "() -> ()")


def pipe_split() -> None:
    """End a stage here and begin the next. Nothing happens when the model runs in eager.

    >>> def forward(self, x):
    >>>     x = self.first(x)
    >>>     pipe_split()
    >>>     return self.second(x)
    """
    SPLIT()


def is_split(node: fx.Node) -> bool:
    """Whether a node marks the end of a stage: ours, torch's, or the plain functions that a split policy may insert."""
    return node.op == "call_function" and (node.target in (SPLIT, pipe_split) or node.target in torchs_markers())


class SplitPoint(Flag):
    """Where to cut at a submodule: before it runs, after it, or both (`BEGINNING | END`)."""

    BEGINNING = 1
    END = 2


_Point = SplitPoint


class PipeSplitWrapper(torch.nn.Module):
    """A module with a cut before it, or after it, as in PiPPy. Names of its state have `mod` in them."""

    SplitPoint = SplitPoint

    def __init__(self, mod: torch.nn.Module, split_point: _Point = SplitPoint.BEGINNING) -> None:
        super().__init__()
        self.mod = mod
        self.split_point = split_point

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with its marks."""
        if _Point.BEGINNING in self.split_point:
            pipe_split()
        result = self.mod(*args, **kwargs)
        if _Point.END in self.split_point:
            pipe_split()
        return result


class SplitAnnotations:
    """The marks that `annotate_split_points` put on a module; `undo()` takes them off. Also a context manager."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = list(handles)

    def undo(self) -> None:
        """Take the marks off; the module is as it was."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> SplitAnnotations:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.undo()


def annotate_split_points(mod: torch.nn.Module, spec: Mapping[str, Any]) -> SplitAnnotations:
    """Cut before or after submodules: `{"layers.2": SplitPoint.BEGINNING}`. Hooks are put on the module itself.

    A value may also be `BEGINNING | END` or a tuple of both. The result's `undo()` takes the hooks off again.
    """
    found = {name: (_submodule(mod, name), _points(name, point)) for name, point in spec.items()}
    handles: list[RemovableHandle] = []
    for submodule, points in found.values():
        if SplitPoint.BEGINNING in points:
            handles.append(submodule.register_forward_pre_hook(_split_before))
        if SplitPoint.END in points:
            handles.append(submodule.register_forward_hook(_split_after))
    return SplitAnnotations(handles)


@contextmanager
def every_one_called(mod: torch.nn.Module, spec: Iterable[str]) -> Iterator[None]:
    """Raise afterwards if a submodule that a spec names was not called: nothing was cut there."""
    called: set[torch.nn.Module] = set()
    handles = [mod.get_submodule(name).register_forward_pre_hook(lambda each, _: called.add(each)) for name in spec]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for name in spec:
        submodule = mod.get_submodule(name)
        if submodule not in called:
            inside = [f"{name}.{child}" for child, _ in submodule.named_children()]
            also = f", such as {inside[-1]!r}" if inside else ""
            raise PipelineError(
                f"split_spec names {name!r}, which the model does not call: there is nothing to cut before or after.",
                fix=f"name a submodule that is called{also}.",
            )


def split_points(module: torch.nn.Module) -> SplitPoint:
    """The marks that `annotate_split_points` put on a module."""
    before, after = hooks_around(module)
    points = SplitPoint.BEGINNING if _split_before in before else SplitPoint(0)
    return points | SplitPoint.END if _split_after in after else points


def _split_before(module: torch.nn.Module, args: Any) -> None:
    pipe_split()


def _split_after(module: torch.nn.Module, args: Any, result: Any) -> None:
    pipe_split()


def _submodule(mod: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return mod.get_submodule(name)
    except AttributeError as error:
        atoms = name.split(".")
        prefixes = [".".join(atoms[: i + 1]) for i in range(len(atoms))]
        known = dict(mod.named_modules(remove_duplicate=False))
        missing = next((prefix for prefix in prefixes if prefix not in known), name)
        near = ", ".join(repr(other) for other in difflib.get_close_matches(name, known, n=3))
        raise NoSuchModuleError(
            f"Specified target {name} referenced nonexistent module {missing}.",
            fix=f"name a submodule of the model{f', such as {near}' if near else ''}.",
        ) from error


def _points(name: str, given: Any) -> SplitPoint:
    parts = given if isinstance(given, tuple | list | set | frozenset) else (given,)
    points = SplitPoint(0)
    for part in parts:
        if getattr(part, "name", None) in ("BEGINNING", "END"):  # also torch's own SplitPoint
            part = SplitPoint[part.name]
        if not isinstance(part, SplitPoint):
            raise PipelineError(
                f"Unknown split point type: {name} has {part!r}, not a SplitPoint.",
                fix="SplitPoint.BEGINNING, SplitPoint.END, or both with |.",
            )
        points |= part
    return points
