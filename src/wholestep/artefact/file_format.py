"""The file of a saved step: one safetensors file whose tensors are texts, so that any reader of the format sees them.

    __metadata__     format, version, and a SHA-256 of the contents: damage is seen before anything is read
    step             JSON: versions, options, and each graph without its nodes: where inputs lie, changes, guards, facts
    graph.0, ..      JSON of each StepGraph (`ir/io/serialize.py`)
    kernels          Inductor's cache artefacts, if they were asked for: they contain pickles, and are read only with
                     `trust_kernels=True`

Nothing here is unpickled, evaluated or imported. A reader checks the hash, the format, the version, the versions of
torch, Python and wholestep, and the form of every part, in this order.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

import wholestep
from wholestep.artefact.saved_graph import SavedGraph
from wholestep.artefact.slots_as_json import rows, table, text, wrong
from wholestep.errors import ArtefactError, GraphFormatError, OptionError, called
from wholestep.ir.io.serialize import refuse_bare_number
from wholestep.ir.io.tensor_file import from_bytes, metadata_of, to_bytes

FORMAT = "wholestep.step"
VERSION = 1
_AGAIN = "save the step again with ws.compile(...).save(path), on this version."
_HEAD = frozenset({"versions", "name", "options", "graphs"})


@dataclass(frozen=True)
class SavedStep:
    """A saved step: its graphs in the order of capture, and how they were to run."""

    name: str
    options: Mapping[str, Any]
    """`lower`, `lower_options`, `cuda_graph`, as JSON."""
    graphs: Sequence[SavedGraph]
    kernels: bytes = b""


def versions() -> dict[str, str]:
    """What a saved step depends on beside its code."""
    return {
        "wholestep": wholestep.__version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "triton": _triton(),
        "machine": platform.machine(),
    }


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def write_saved(step: SavedStep) -> bytes:
    """The contents of the file."""
    head = {
        "versions": versions(),
        "name": step.name,
        "options": step.options,
        "graphs": [graph.to_json() for graph in step.graphs],
    }
    parts = {"step": json.dumps(head).encode()}
    parts |= {f"graph.{i}": graph.graph.encode() for i, graph in enumerate(step.graphs)}
    if step.kernels:
        parts["kernels"] = step.kernels
    tensors = {name: torch.from_numpy(numpy.frombuffer(raw, numpy.uint8).copy()) for name, raw in parts.items()}
    return to_bytes(tensors, {"format": FORMAT, "version": str(VERSION), "sha256": _hash(parts)})


def write_file(path: str | os.PathLike[str], contents: bytes) -> None:
    """Write a file whole or not at all: other processes see the old one or the new one."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"a step cannot be saved to {called(path)}.", fix="give the path of a file.")
    target = Path(path)
    if not target.parent.is_dir():
        raise ArtefactError(f"{target} cannot be written: there is no folder {target.parent}.", fix="make it first.")
    part = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(contents)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def read_saved(raw: bytes, name: str) -> SavedStep:
    """The step in the contents of a file, which messages call `name`; anything else raises ArtefactError."""
    try:
        return _read(raw, name)
    except ArtefactError as error:
        raise ArtefactError(f"{name}: {error.what}", fix=error.fix or _AGAIN) from error
    except GraphFormatError as error:
        raise ArtefactError(f"{name} is not a saved step, or is damaged: {error.what}", fix=_AGAIN) from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ArtefactError(f"{name} is not a saved step, or is damaged ({what}).", fix=_AGAIN) from error


def _read(raw: bytes, name: str) -> SavedStep:
    tensors = from_bytes(raw, name)
    meta = metadata_of(raw)
    if meta.get("format") != FORMAT:
        raise ArtefactError("this file of tensors is not a saved step.")
    if meta.get("version") != str(VERSION):
        raise ArtefactError(f"version {meta.get('version')!r} of the format; this wholestep reads version {VERSION}.")
    if not all(tensor.dtype is torch.uint8 and tensor.dim() == 1 for tensor in tensors.values()):
        raise ArtefactError("a part of it is not text.")
    parts = {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}
    if meta.get("sha256") != _hash(parts):
        raise ArtefactError("its contents are not what was written: the file is damaged.")
    head = table(_json(parts["step"]))
    if set(head) != _HEAD:
        raise wrong(sorted(head), "the head of a saved step")
    check_versions(table(head["versions"]))
    graphs = rows(head["graphs"])
    if set(parts) - {"kernels"} != {"step", *(f"graph.{i}" for i in range(len(graphs)))} or not graphs:
        raise ArtefactError("it does not have the graphs that it lists.")
    saved = [SavedGraph.read(graph, parts[f"graph.{i}"].decode()) for i, graph in enumerate(graphs)]
    return SavedStep(text(head["name"]), table(head["options"]), saved, parts.get("kernels", b""))


def check_versions(before: Mapping[str, Any]) -> None:
    """Raise for a file of another torch, Python, triton, wholestep or kind of machine."""
    now = versions()
    for what in {**now, **before}:
        if before.get(what) != now.get(what):
            raise ArtefactError(
                f"it was saved with {what} {before.get(what)!s:.40}, and this is {what} {now.get(what)}."
            )


def _hash(parts: Mapping[str, bytes]) -> str:
    found = hashlib.sha256()
    for name in sorted(parts):
        found.update(f"{name} {len(parts[name])} ".encode())
        found.update(parts[name])
    return found.hexdigest()


def _json(raw: bytes) -> Any:
    return json.loads(raw.decode(), parse_float=refuse_bare_number, parse_constant=refuse_bare_number)
