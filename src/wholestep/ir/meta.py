"""The metadata of a node: the one typed key in `node.meta`, and where a node comes from (line, module path, phase).

wholestep's capture records the origin of a node in `NodeMeta`. Graphs of dynamo, AOTAutograd and export have a
`stack_trace` and an `nn_module_stack` instead (`fwd_nn_module_stack` on nodes of the backward). This is the one place
that answers where a node, a frame, an exception or a function comes from.

Which line of the user's code is running: the nearest frame that is neither torch's nor ours. Where that is in an
installed package (a trainer, a metric), the line has the one that called it (`called_from`), and errors show the user's
first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import linecache
import os
import re
import sys
import sysconfig
import warnings
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx

import wholestep
from wholestep.errors import Location
from wholestep.torch_private.operators import OpOverload

KEY = "wholestep"


@dataclass(frozen=True)
class NodeMeta:
    """What wholestep knows about a node beyond torch's `val`."""

    module_path: str = ""
    """The module whose forward (or whose backward) made this node, as the user would reach it."""
    location: Location | None = None
    phase: str = "forward"
    """forward, backward, update (work on gradients outside of an optimizer: clipping), optimizer or epilogue."""
    in_place: OpOverload | None = None
    """The mutating operator that eager ran here; re-inplacing may turn the node back into it."""
    recompute: bool = False
    """Recomputed in the backward: by activation checkpointing, or a parameter that is gathered a second time."""
    parameter: str = ""
    """The parameter that a collective gathers or whose gradient it reduces."""
    move: int = 0
    """Runs in the next iteration, with all nodes of the same number; 0: in its own (`passes.crossing`)."""
    generation: int = 0
    """Number of the forward or backward that a parameter was gathered for; gathers of two are not merged."""
    begins: bool = False
    """A part of the step begins here: no compiled call reaches over it."""
    starts_backward: bool = False
    """The gradient that a backward starts from, computed with the forward (`passes.loss`)."""


def node_meta(node: fx.Node) -> NodeMeta:
    """The wholestep metadata of a node; an empty one if it has none."""
    found = node.meta.get(KEY)
    return found if isinstance(found, NodeMeta) else NodeMeta()


def set_node_meta(node: fx.Node, meta: NodeMeta) -> None:
    """Attach metadata to a node."""
    node.meta[KEY] = meta


def update_node_meta(node: fx.Node, **changes: object) -> None:
    """Change some fields of a node's metadata."""
    set_node_meta(node, replace(node_meta(node), **changes))  # type: ignore[arg-type]


_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n(?P<text>[^\n]*)', re.MULTILINE
)
_FOREIGN = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, wholestep.__file__))
_FOREIGN_FILES = (contextlib.__file__, copy.__file__, "<frozen", "<string>")
_PATHS = sysconfig.get_paths()
_PACKAGES = tuple(_PATHS[name] + os.sep for name in ("purelib", "platlib"))
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STANDARD = tuple(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib"))
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def location_of_node(node: fx.Node, *, user_only: bool = False) -> Location | None:
    """The line of code that a node was traced from: the innermost frame outside of torch and wholestep.

    Where all frames are inside of them, the innermost one; None under `user_only`.
    """
    recorded = node_meta(node).location
    if recorded is not None:
        return recorded
    trace = node.meta.get("stack_trace")
    frames = list(_FRAME.finditer(trace)) if isinstance(trace, str) else []
    own = [frame for frame in frames if not frame["file"].startswith(_FOREIGN)]
    if not own and (user_only or not frames):
        return None
    found = (own or frames)[-1]
    callers = [frame for frame in own if not is_library_file(frame["file"])]
    caller = callers[-1] if callers and callers[-1] is not found else None
    return _traced(found, None if caller is None else _traced(caller))


def _traced(frame: re.Match[str], called_from: Location | None = None) -> Location:
    return Location(frame["file"], int(frame["line"]), frame["function"], frame["text"].strip(), called_from)


def nearest_location(node: fx.Node | None) -> Location | None:
    """The line of a node, or of the nearest producer that has one, with its source text."""
    queue = [] if node is None else [node]
    seen = set(queue)
    for each in queue:
        found = location_of_node(each)
        if found is not None:
            return replace(found, text=found.text or linecache.getline(found.file, found.line).strip())
        new = [source for source in each.all_input_nodes if source not in seen]
        seen.update(new)
        queue += new
    return None


def module_path(node: fx.Node) -> str:
    """The module whose forward (or whose backward) a node belongs to, `layers.0.attn`; "" where it is not recorded."""
    if node_meta(node).module_path:
        return node_meta(node).module_path
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if isinstance(stack, dict) and stack:
            path, _ = list(stack.values())[-1]
            path = str(path)
            return "" if re.fullmatch(r"L\['\w+'\]", path) else plain_path(path)
    return ""


def module_call(node: fx.Node) -> str:
    """The innermost module call that a node was traced in, as export names it: a second call of a module differs."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack))) if stack else ""


def plain_path(source: str) -> str:
    """`L['self']._modules['layers']._modules['0'].weight` and `L['model'].layers.0.weight` as `layers.0.weight`."""
    text = re.sub(r"^L\['\w+'\](?=\.)|^L\['self'\]|^L__self__|^self\b", "", source)
    text = re.sub(r"\._(modules|parameters|buffers)(?=\[)", "", text)
    parts = [next(part for part in match.groups() if part is not None) for match in _STEP.finditer(text)]
    return ".".join(parts) if parts else text.strip(".")


def phase(node: fx.Node) -> str:
    """forward, backward, update, optimizer or epilogue."""
    if KEY in node.meta:
        return node_meta(node).phase
    is_backward = "fwd_nn_module_stack" in node.meta or node.meta.get("partitioner_tag") == "is_backward"
    return "backward" if is_backward else "forward"


_is_user_code: dict[CodeType, bool] = {}


def is_users_code(code: CodeType) -> bool:
    """Whether code is neither torch's nor ours."""
    known = _is_user_code.get(code)
    if known is None:
        name = code.co_filename
        known = _is_user_code[code] = not (name.startswith(_FOREIGN) or name.startswith(_FOREIGN_FILES))
    return known


def user_frame(depth: int = 1) -> FrameType | None:
    """The nearest frame of the user's code above the caller."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if is_users_code(frame.f_code):
            return frame
        frame = frame.f_back
    return None


def asked_by(file: str) -> bool:
    """Whether the running line of user code is in a file with that ending."""
    frame = user_frame(2)
    return frame is not None and frame.f_code.co_filename.replace(os.sep, "/").endswith(file)


def is_installed_file(file: str) -> bool:
    """Whether a file is one of an installed package."""
    return file.startswith(_PACKAGES) or any(folder in file for folder in _PACKAGE_FOLDERS)


def is_library_file(file: str) -> bool:
    """Whether a file belongs to an installed package or to Python: no code that the user wrote for this program."""
    return file.startswith(("<frozen", *_STANDARD)) or is_installed_file(file)


def location_of(frame: FrameType | None, *, with_text: bool = False) -> Location | None:
    """The location a frame stands at; with the user's line that called it, where it is in an installed package."""
    if frame is None:
        return None
    caller = _frame_of_the_user(frame)
    if caller is None or caller is frame:
        return _standing_at(frame, with_text)
    if not is_installed_file(frame.f_code.co_filename):  # the standard library: the line that called it says more
        frame = _frame_of_installed(frame, caller)
        if frame is caller:
            return _standing_at(caller, with_text)
    return _standing_at(frame, with_text, _standing_at(caller, with_text=True))


def _standing_at(frame: FrameType, with_text: bool, called_from: Location | None = None) -> Location:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip() if with_text else ""
    return Location(code.co_filename, frame.f_lineno, code.co_name, text, called_from)


def _frame_of_the_user(frame: FrameType) -> FrameType | None:
    """The nearest frame, this one or above, of code that is in no package at all."""
    above: FrameType | None = frame
    while above is not None and not _is_own_code(above.f_code):
        above = above.f_back
    return above


def _frame_of_installed(frame: FrameType, last: FrameType) -> FrameType:
    """The nearest frame of an installed package that is neither torch nor wholestep, up to `last`."""
    while frame is not last and not (is_users_code(frame.f_code) and is_installed_file(frame.f_code.co_filename)):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


_own_code: dict[CodeType, bool] = {}


def _is_own_code(code: CodeType) -> bool:
    known = _own_code.get(code)
    if known is None:
        known = _own_code[code] = is_users_code(code) and not is_library_file(code.co_filename)
    return known


def user_location(*, with_text: bool = True) -> Location | None:
    """The line of the user's code that is running now."""
    return location_of(user_frame(2), with_text=with_text)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that is running now, however deep in the library."""
    frame = user_frame(2)
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, seen)


def location_of_exception(error: BaseException, besides: tuple[str, ...] = ()) -> Location | None:
    """The deepest line of the user's code in a traceback. `besides`: folders of code that is not the user's."""
    foreign = (*_FOREIGN, *_FOREIGN_FILES, *besides)
    found: Location | None = None
    users: Location | None = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        name = code.co_filename
        if not name.startswith(foreign):
            text = linecache.getline(name, trace.tb_lineno).strip()
            found = Location(name, trace.tb_lineno, code.co_name, text)
            users = users if is_library_file(name) else found
        trace = trace.tb_next
    if found is None or users is None or users is found:
        return found
    return replace(found, called_from=users) if is_installed_file(found.file) else users


def location_of_function(fn: Any) -> Location | None:
    """The first line of a function of the user's, also of one behind `functools.partial` or a callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    fn = fn if inspect.isroutine(fn) or not callable(fn) else type(fn).__call__
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return Location(code.co_filename, code.co_firstlineno, code.co_name, text)
