from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from wholestep.errors import GraphFormatError
from wholestep.ir.io.result_tree import check, describe, describe_leaf, render

Point = namedtuple("Point", ["x", "y"])
A, B = torch.zeros(1), torch.ones(1)


def number_of(leaf: object) -> int | None:
    return next((i for i, tensor in enumerate((A, B)) if tensor is leaf), None)


@pytest.mark.parametrize(
    ("tree", "description", "text"),
    [
        (A, {"output": 0}, "out0"),
        (None, {"value": None}, "None"),
        ((B,), {"tuple": [{"output": 1}]}, "(out1,)"),
        ((), {"tuple": []}, "()"),
        ([A, 2], {"list": [{"output": 0}, {"value": 2}]}, "[out0, 2]"),
        ({"loss": A, "n": 3}, {"dict": [["loss", {"output": 0}], ["n", {"value": 3}]]}, "{'loss': out0, 'n': 3}"),
        (
            Point(A, "b"),
            {"node": f"{__name__}.Point", "children": [{"output": 0}, {"value": "b"}]},
            "Point(out0, 'b')",
        ),
        (
            OrderedDict(a=(A, B)),
            {
                "node": "collections.OrderedDict",
                "keys": ["a"],
                "children": [{"tuple": [{"output": 0}, {"output": 1}]}],
            },
            "OrderedDict(a=(out0, out1))",
        ),
        (Path("x"), {"object": f"pathlib.{type(Path('x')).__name__}"}, f"<pathlib.{type(Path('x')).__name__}>"),
    ],
)
def test_a_result_is_described_and_shown(tree: object, description: dict[str, Any], text: str) -> None:
    assert describe(tree, number_of) == description
    assert render(description) == text
    check(json.loads(json.dumps(description)), outputs=2)


def test_a_stand_in_for_a_leaf_can_bring_its_own_description() -> None:
    tree = {"a": B, "n": A}
    described = describe(tree, lambda leaf: describe_leaf(5) if leaf is A else number_of(leaf))
    assert render(described) == "{'a': out1, 'n': 5}"


def test_a_hugging_face_output_keeps_its_keys() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    described = describe(outputs.CausalLMOutput(loss=A, logits=B), number_of)
    assert described["keys"] == ["loss", "logits"]
    assert render(described) == "CausalLMOutput(loss=out0, logits=out1)"


@pytest.mark.parametrize(
    "description",
    [
        3,
        {},
        {"output": 2},
        {"output": -1},
        {"output": True},
        {"value": []},
        {"tuple": {"output": 0}},
        {"dict": [["a"]]},
        {"dict": [[["a"], {"output": 0}]]},
        {"node": "x"},
        {"node": "x", "children": [{"output": 0}], "keys": []},
        {"output": 0, "value": 1},
        {"unknown": 1},
    ],
)
def test_a_damaged_description_is_refused(description: object) -> None:
    with pytest.raises(GraphFormatError):
        check(description, outputs=2)


def test_a_description_that_never_ends_is_refused() -> None:
    description: dict[str, Any] = {"output": 0}
    for _ in range(200):
        description = {"tuple": [description]}
    with pytest.raises(GraphFormatError):
        check(description, outputs=1)
