"""What a page advises: each rule says why, and the line of code that it gives is one that works."""

from __future__ import annotations

import ast
from dataclasses import fields, replace

import pytest

import wholestep as ws
from wholestep.inspect.report_page.advice import Facts, advice
from wholestep.options import Options
from wholestep.passes.engine.registry import resolve

NOTHING = Facts(
    name="train_step",
    lower="inductor",
    step_us=1000.0,
    exposed_us=0.0,
    worst="",
    worst_reason="",
    collectives=0,
    passes=(),
    peak=2**30,
    saved=0,
    saved_example="",
    has_budget=False,
    recompiles=(),
    outside=(),
    optimizer_nodes=0,
    measured=True,
)
EXPOSED = replace(NOTHING, exposed_us=300.0, worst="all_reduce_1: the link is busy", worst_reason="link", collectives=4)
SIZES = ("call 2: size of batch is 8 instead of 4", "call 3: size of batch is 16 instead of 4")
OVERLAPPED = replace(EXPOSED, passes=("overlap_communication",))
RULES = {
    "Hide communication behind computation": EXPOSED,
    "The link is busy: communicate less": OVERLAPPED,
    "Start communication in the step before": replace(OVERLAPPED, worst_reason="start"),
    "Communication is exposed": replace(OVERLAPPED, worst_reason="memory"),
    "One graph for all sizes": replace(NOTHING, recompiles=SIZES),
    "Compile it": replace(NOTHING, lower="eager"),
    "See what was not compiled": replace(NOTHING, outside=(("a custom operator", 200.0), ("a scalar", 1.0))),
    "Train in less memory": replace(NOTHING, saved=2**29, saved_example="gelu (model.mlp, train.py:4)"),
    "Use the fused optimizer": replace(NOTHING, lower="eager", optimizer_nodes=900),
    "Measure it": replace(NOTHING, measured=False),
}


@pytest.mark.parametrize("title", RULES)
def test_a_rule_applies_to_its_facts_and_to_no_others(title: str) -> None:
    (found,) = [each for each in advice(RULES[title]) if each.title == title]
    assert found.text.endswith(".")
    assert title not in {each.title for each in advice(NOTHING)}


def test_with_nothing_to_gain_there_is_the_check_against_eager() -> None:
    assert [each.title for each in advice(NOTHING)] == ["Check it against eager"]


@pytest.mark.parametrize("title", RULES)
def test_the_code_of_an_advice_names_what_exists(title: str) -> None:
    (found,) = [each for each in advice(RULES[title]) if each.title == title]
    for call in (node for node in ast.walk(ast.parse(found.code)) if isinstance(node, ast.Call)):
        written = ast.unparse(call.func)
        if written.startswith("ws.") and "(" not in written:
            value: object = ws
            for name in written.split(".")[1:]:
                value = getattr(value, name)
        if written == "ws.compile":
            options = {word.arg: word.value for word in call.keywords}
            assert set(options) <= {each.name for each in fields(Options)}
            if isinstance(options.get("passes"), ast.List):
                assert resolve(ast.literal_eval(options["passes"]))
        elif written.startswith("train_step."):
            assert hasattr(ws.CompiledStep, call.func.attr)  # type: ignore[attr-defined]


def test_a_budget_is_between_the_peak_and_the_peak_without_saved_activations() -> None:
    (found,) = [each for each in advice(RULES["Train in less memory"]) if each.title == "Train in less memory"]
    assert 'memory_budget="768MiB"' in found.code
    large = replace(RULES["Train in less memory"], peak=16 * 2**30, saved=8 * 2**30)
    assert any('memory_budget="12.0GiB"' in each.code for each in advice(large))
