"""What a page on an error says to write instead runs: put into the example of the page, it raises nothing.

A fix is a fragment. `PLACES` says where in the example it goes: from one text up to another, both of the example. The
example itself is run by tests/test_examples.py, which sees it raise.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import textwrap
from typing import Any, NamedTuple

import pytest

from pages import DOCS, blocks_of

CALL = "train_step(model, optimizer, torch.randn(8, 4))"
BATCH = "batch = torch.randn(8, 4)\n"


class Place(NamedTuple):
    """Where a fix goes: it replaces the example from `start` up to `end` (to its end, without one)."""

    start: str
    end: str = ""
    indent: int = 0
    before: str = ""
    """Lines right before it."""
    others: tuple[tuple[str, str], ...] = ()
    """What else is another text in the program then."""
    raises: type[Exception] | None = None


PLACES: dict[str, list[Place]] = {
    "WS-ALIAS": [
        Place("def train_step(", "    loss = model", others=(("batch, batch[:4])", "batch)"),)),
    ],
    "WS-ASSUMED": [
        Place(
            'train_step(model, optimizer, torch.full((8, 4), float("inf")))',
            before="batch = torch.full((8, 4), torch.inf)\n",
        )._replace(raises=FloatingPointError)
    ],
    "WS-CAPTURED-TENSOR": [
        Place(
            CALL,
            before="loader = [torch.randn(8, 4)] * 2\n",
            others=(
                ("optimizer, batch):", "optimizer, batch, given):"),
                ("* torch.from_numpy(weights)).", "* given)."),
            ),
        )
    ],
    "WS-CLOCK": [
        Place(
            CALL,
            before=BATCH,
            others=(
                ("    started = time.perf_counter()  # WS-CLOCK\n", ""),
                ("return loss, time.perf_counter() - started", "return loss"),
            ),
        )
    ],
    "WS-CONTROL-FLOW": [Place("    if loss > 1.0:", "    loss.backward()", 4)],
    "WS-DATA-SHAPE": [Place("    large = errors", "    loss.backward()", 4)] * 2,
    "WS-HOOK": [
        Place(
            "    loss.backward()",
            "\n\ntrain_step",
            others=(("model.weight.register_hook(lambda grad: norms.append(grad.norm()))\n", ""),),
        )
    ],
    "WS-ITEM": [Place("    return names[", before="", others=(("names = [", BATCH + "names = ["),))],
    "WS-OPT-CLOSURE": [Place("@ws.compile", before=BATCH)],
    "WS-PARAM-DATA": [Place("    model.weight.data =", "    return loss", 4)],
    "WS-SIDE-EFFECT": [
        Place(
            CALL,
            before=BATCH + "losses = []\n",
            others=(
                ("    model.losses.append(loss.detach())\n", ""),
                ("return loss, len(model.losses)", "return loss"),
            ),
        ),
        Place(
            CALL,
            before="batches = iter([torch.randn(8, 4)])\n",
            others=(
                ("    model.losses.append(loss.detach())\n", ""),
                ("return loss, len(model.losses)", "return loss"),
            ),
        ),
    ],
    "WS-UNSUPPORTED": [Place("@ws.compile", "@ws.compile")],
}


def example_and_fixes(code: str) -> tuple[str, list[str]]:
    text = (DOCS / "errors" / f"{code}.md").read_text(encoding="utf-8")
    example, *fixes = (block.code for block in blocks_of(text))
    return example, fixes


def mended(example: str, fix: str, place: Place) -> str:
    """The example with the fix in its place."""
    assert place.start in example, place.start
    head, tail = example[: example.index(place.start)], example[example.index(place.start) :]
    tail = tail[tail.index(place.end) :] if place.end else ""
    program = head + place.before + textwrap.indent(fix, " " * place.indent) + tail
    for old, new in place.others:
        assert old in program, old
        program = program.replace(old, new)
    return re.sub(r"  # WS-.*", "", program)


@pytest.mark.parametrize("code", sorted(PLACES))
def test_what_a_page_says_to_write_instead_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_LOWER", "eager")
    example, fixes = example_and_fixes(code)
    assert len(fixes) == len(PLACES[code])
    for number, (fix, place) in enumerate(zip(fixes, PLACES[code], strict=True)):
        program, name = mended(example, fix, place), f"<{code} mended {number}>"
        linecache.cache[name] = (len(program), None, program.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {"__name__": "example"}
        with pytest.raises(place.raises) if place.raises else contextlib.nullcontext():
            exec(compile(program, name, "exec", dont_inherit=True), namespace)


def test_every_page_with_a_fix_in_python_is_run() -> None:
    pages = {path.stem: len(list(blocks_of(path.read_text()))) for path in (DOCS / "errors").glob("WS-*.md")}
    assert {code for code, blocks in pages.items() if blocks > 1} == set(PLACES)
