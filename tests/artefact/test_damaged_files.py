"""Damaged, foreign and hostile files: each is refused with WS-ARTEFACT or read whole; none runs anything."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.artefact import file_format as format_of_files
from wholestep.artefact.file_format import read_saved
from wholestep.errors import ArtefactError, WholestepError
from wholestep.ir.io.tensor_file import from_bytes, metadata_of, to_bytes
from wholestep.step import StepCall, bound_graph

FORBIDDEN = ("pickle.", "os.system", "os.exec", "os.posix_spawn", "subprocess.", "import", "shutil.", "socket.")
_watching: list[str] | None = None


def _watch(event: str, args: Any) -> None:
    if _watching is not None and event.startswith(FORBIDDEN):
        _watching.append(f"{event} {str(args)[:100]}")


sys.addaudithook(_watch)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Fail if something is imported, unpickled or started."""
    global _watching
    _watching = []
    try:
        yield
        found = _watching
    finally:
        _watching = None
    assert not found


SEEN: list[Any] = []


def step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> dict[str, Any]:
    """A step with a little of everything that a file describes."""
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    SEEN.append(loss)
    return {"loss": loss.detach(), "value": loss.item() * 2, "pair": (batch.sum(), None)}


def arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.randn(4, 2)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file."""
    path = tmp_path_factory.mktemp("saved") / "step.ws"
    compiled, call = ws.compile(step, lower="eager"), arguments()
    compiled(*call)
    compiled(*call)
    compiled.save(path)
    SEEN.clear()
    return path.read_bytes()


def state(call: tuple[Any, ...]) -> list[Any]:
    model, optimizer, batch = call
    return [*(t.clone() for t in model.state_dict().values()), batch.clone(), len(optimizer.state), len(SEEN)]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


def bind_all(raw: bytes) -> int:
    """Read a file and bind its graphs to a call; returns how many fitted."""
    call = arguments()
    before = state(call)
    fitted = 0
    for graph in read_saved(raw, "a file").graphs:
        try:
            bound_graph(graph, StepCall.of(step, call, {}), step)
            fitted += 1
        except WholestepError:
            continue
        finally:
            assert same(before, state(call))
    return fitted


def signed(parts: dict[str, bytes]) -> bytes:
    """A file of these parts with a hash that is right."""
    meta = {"format": format_of_files.FORMAT, "version": "1", "sha256": format_of_files._hash(parts)}
    tensors = {name: torch.frombuffer(bytearray(part), dtype=torch.uint8) for name, part in parts.items() if part}
    return to_bytes(tensors, meta)


def parts_of(raw: bytes) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in from_bytes(raw, "a file").items()}


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Bytes that were changed, lost, doubled or mixed up."""
    at, length = rng.randrange(len(raw)), rng.choice((1, 1, 4, 60))
    rest = raw[at + length :]
    kind = rng.randrange(5)
    if kind == 0:
        return raw[:at] + bytes(rng.randrange(256) for _ in range(length)) + rest
    if kind == 1:
        return raw[:at]
    if kind == 2:
        return raw[:at] + rest
    if kind == 3:
        return raw[:at] + raw[at : at + length] * 2 + rest
    other = rng.randrange(len(raw))
    return raw[:at] + raw[other : other + length] + rest


STRANGE = (None, True, -1, 0, 1, 2**70, "", "os:system", "builtins:eval", "__class__", [], {}, {"at": 0}, {"at": 9999})


def places(data: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in a document: a container and a key or index."""
    for key, item in data.items() if isinstance(data, dict) else enumerate(data):
        found.append((data, key))
        if isinstance(item, dict | list):
            places(item, found)
    return found


def edited(raw: bytes, rng: random.Random) -> bytes:
    """A document of the right form in which some places hold something else, signed anew."""
    parts = parts_of(raw)
    name = rng.choice(["step", "step", "step", "graph.0", "graph.1"])
    document = json.loads(parts[name])
    every = places(document, [])
    for _ in range(rng.choice((1, 1, 2, 5))):
        holder, key = rng.choice(every)
        try:
            kind = rng.randrange(4)
            if kind == 0:
                holder[key] = rng.choice(STRANGE)
            elif kind == 1:
                other, where = rng.choice(every)
                holder[key] = json.loads(json.dumps(other[where]))
            elif kind == 2 and isinstance(holder[key], int):
                holder[key] += rng.choice((-1, 1, 7))
            else:
                del holder[key]
        except (LookupError, RecursionError):  # an earlier edit removed the place
            continue
    parts[name] = json.dumps(document).encode()
    return signed(parts)


def hold(raw: bytes, count: int, seed: int) -> int:
    """Read `count` mutated files; returns how many of them could be used."""
    rng = random.Random(seed)
    assert bind_all(raw) == 1  # and imports what reading needs
    used = 0
    with nothing_runs():
        for number in range(count):
            mutated = edited(raw, rng) if number % 16 == 0 else damaged(raw, rng)
            with suppress(ArtefactError):
                used += bind_all(mutated)
    return used


def test_no_mutated_file_runs_anything_or_changes_the_objects(raw: bytes) -> None:
    hold(raw, 1000, seed=0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_none_of_100_000_mutated_files_does(seed: int, raw: bytes) -> None:
    importlib.import_module("torch._inductor.sizevars")  # torch imports it where a first symbolic size meets a guard
    hold(raw, 10_000, seed)


def test_foreign_files_are_refused_with_what_they_are(tmp_path: Path, raw: bytes) -> None:
    foreign = {
        "empty": b"",
        "text": b"hello",
        "pickle": torch.serialization.pickle.dumps({"a": 1}),
        "tensors": to_bytes({"x": torch.ones(3)}),
        "truncated": raw[: len(raw) // 2],
    }
    for name, contents in foreign.items():
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(ArtefactError, match=r"not a saved step|is damaged"):
            ws.load(tmp_path / name)
    with pytest.raises(ArtefactError, match="cannot be read"):
        ws.load(tmp_path / "absent")


def test_a_file_of_another_version_says_which(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    now = format_of_files.versions()
    monkeypatch.setattr(format_of_files, "versions", lambda: {**now, "torch": "9.9"})
    with pytest.raises(ArtefactError, match=r"saved with torch .*, and this is torch 9\.9"):
        read_saved(raw, "a file")
    monkeypatch.setattr(format_of_files, "VERSION", 2)
    with pytest.raises(ArtefactError, match="version '1' of the format; this wholestep reads version 2"):
        read_saved(raw, "a file")


@pytest.mark.parametrize(
    "target",
    [["function", "os.system"], ["function", "eval"], ["logger", "root", "__class__"], ["named", "os:system"]],
)
def test_a_file_cannot_name_a_function_to_call(target: list[str], raw: bytes) -> None:
    parts = parts_of(raw)
    document = json.loads(parts["step"])
    for graph in document["graphs"]:
        assert graph["step"]["effects"]
        graph["step"]["effects"][0][1] = target
    parts["step"] = json.dumps(document).encode()
    saved = read_saved(signed(parts), "a file")
    call = arguments()
    with pytest.raises(ArtefactError, match="a call that a file may make"):
        bound_graph(saved.graphs[0], StepCall.of(step, call, {}), step)


def test_a_file_leads_through_no_library(raw: bytes) -> None:
    parts = parts_of(raw)
    document = json.loads(parts["step"])
    table = document["graphs"][0]["step"]["addresses"]
    number = len(table)
    table += [["module", -1, "os", "builtins.module"], ["vars", number, None, "builtins.dict"]]
    document["graphs"][0]["step"]["guards"]["containers"].append([number + 1, "os"])
    parts["step"] = json.dumps(document).encode()
    call = arguments()
    with pytest.raises(ArtefactError, match="does not exist here"):
        bound_graph(read_saved(signed(parts), "a file").graphs[0], StepCall.of(step, call, {}), step)


def test_metadata_of_the_file_says_its_format(raw: bytes) -> None:
    assert metadata_of(raw)["format"] == "wholestep.step"
