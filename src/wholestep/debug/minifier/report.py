"""The script that shows a failure: the graph, its inputs, and a last line that says whether it happened again."""

from __future__ import annotations

from pathlib import Path

import torch

from wholestep.debug.minifier.case import Case
from wholestep.debug.minifier.failure import HANG, RAISED, SIGNAL, Outcome
from wholestep.debug.minifier.trial import Predicate
from wholestep.ir.io.repro import importable, source_of, write_repro

_RAISES = """
try:
    result = module(*inputs)
except {name} as error:
    print("REPRODUCED:", type(error).__name__, str(error).splitlines()[0])
else:
    raise SystemExit("NOT REPRODUCED: the graph returned")
"""

_ASKS = """
module = torch.fx.symbolic_trace(module)
if not {name}(module, inputs):
    raise SystemExit("NOT REPRODUCED")
print("REPRODUCED")
"""


_NO_PREDICATE = "the predicate, which is a lambda, or needs more than modules from around it"
_UNASKED = """
print(module(*inputs))
print("NOT ASKED: put the predicate here; it has no form as text")
"""


def write_case(
    folder: Path, case: Case, failure: Outcome, predicate: Predicate | None, *, title: str = "", check: str = ""
) -> tuple[Path, tuple[str, ...]]:
    """Write `repro.py`; returns its path and what could not be written."""
    setup, lines = _predicate(predicate) if predicate is not None else ("", "")
    if not check:
        check = lines or _check(failure)
    title = title or f"The smallest graph that fails as the whole one did: {failure}"
    seeded = f"torch.manual_seed(0)\n{check.strip()}"
    note = f"{title}\n\nWritten by wholestep with torch {torch.__version__}."
    path, left_out = write_repro(folder, case.gm, case.inputs, title=note, check=seeded, setup=setup)
    return path, (*left_out, *([_NO_PREDICATE] if check == _UNASKED else []))


def _check(failure: Outcome) -> str:
    if failure.kind == RAISED:
        module, _, name = failure.type.rpartition(".")
        known = module in ("builtins", "torch") or module.startswith("torch.")
        shown = name if module == "builtins" else failure.type
        return _RAISES.format(name=shown if known and "<" not in shown else "Exception")
    ends = {SIGNAL: f"dies: {failure.message}", HANG: "does not end"}.get(failure.kind, "")
    return "print(module(*inputs))" + (f"  # {ends}" if ends else "")


def _predicate(predicate: Predicate) -> tuple[str, str]:
    """Lines that define the predicate, and lines that ask it."""
    script = getattr(predicate, "script", None)
    if script is not None:
        setup, check = script()
        return str(setup), str(check)
    ask = _ASKS
    found = importable(predicate)
    if found is not None:
        module, path = found.split(":")
        first, *_ = path.split(".")
        return f"from {module} import {first}", ask.format(name=path)
    source = source_of(predicate)
    if source is not None:
        return source, ask.format(name=predicate.__name__)
    return "", _UNASKED
