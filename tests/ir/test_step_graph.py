from __future__ import annotations

import io

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from ir.step_graphs import chain, sgd_step
from wholestep.ir import Signature, StepGraph


def test_it_takes_flat_inputs_whatever_code_generator_the_graph_had() -> None:
    gm = make_fx(lambda pair: (pair["a"] + pair["b"],))({"a": torch.ones(2), "b": torch.ones(2)})
    step = StepGraph(gm, Signature())
    assert type(step.gm.graph._codegen) is CodeGen
    assert torch.equal(step.gm(torch.ones(2), torch.ones(2))[0], torch.full((2,), 2.0))


def test_print_readable_prints_and_returns_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    step = sgd_step()
    text = step.print_readable()
    assert capsys.readouterr().out == text + "\n"
    file = io.StringIO()
    assert step.print_readable(file=file) == text
    assert file.getvalue() == text + "\n"
    assert step.print_readable(print_output=False) == text
    assert capsys.readouterr().out == ""


def test_repr_is_one_line_of_counts() -> None:
    assert repr(sgd_step()) == "StepGraph(19 nodes, 4 inputs, 1 outputs, 2 write-backs)"
    assert chain(5).num_nodes == 7
