from __future__ import annotations

import math
import operator
import os

import pytest
import torch

from wholestep.errors import GraphFormatError
from wholestep.ir.graph_functions import call_on_copies, get_rng_state
from wholestep.ir.io.arguments import PYTHON_FUNCTIONS, TargetReader, target_name

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.add.Tensor, "aten::add.Tensor"),
        (aten.mm.default, "aten::mm"),
        (aten.__and__.Tensor, "aten::__and__.Tensor"),
        (torch.ops.prim.device.default, "prim::device"),
        (torch.ops.prims.convert_element_type.default, "prims::convert_element_type"),
        (operator.getitem, "operator.getitem"),
        (math.sqrt, "math.sqrt"),
        (max, "builtins.max"),
        (torch.sym_max, "torch.sym_max"),
        (get_rng_state, "wholestep.ir.rng.get_rng_state"),
        (call_on_copies, "wholestep.ir.mutable.call_on_copies"),
    ],
)
def test_a_target_is_found_again_by_its_name(target: object, name: str) -> None:
    assert target_name(target) == name
    assert TargetReader().read(name) is target


@pytest.mark.parametrize("name", ["rnn.packed_weights", "shards.own_chunk", "number_tensor.number_tensor"])
def test_functions_of_older_files_are_found_where_they_are_now(name: str) -> None:
    found = TargetReader().read(f"wholestep.ir.{name}")
    assert target_name(found) == f"wholestep.ir.graph_functions.{name.partition('.')[2]}"


def test_every_listed_python_function_has_a_name_that_leads_back_to_it() -> None:
    for function in PYTHON_FUNCTIONS.values():
        assert TargetReader().read(target_name(function)) is function


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "builtins.__import__",
        "builtins.getattr",
        "operator.attrgetter",
        "operator.methodcaller",
        "torch.load",
        "torch.ops.load_library",
        "aten::__class__",
        "aten::add.__class__",
        "aten::add.__call__",
        "aten::no_such_op",
        "aten::add.no_such_overload",
        "aten::save",
        "aten::from_file",
        "aten::from_file.out",
        "prim::PythonOp",
        "prim::rpc_sync",
        "aten::add.Tensor; import os",
        "aten::add.Tensor\n",
        "load_library::x",
        "",
        "::",
        "x" * 10_000,
    ],
)
def test_a_name_that_is_not_on_the_list_is_refused(name: str) -> None:
    with pytest.raises(GraphFormatError):
        TargetReader().read(name)


def test_the_refusal_names_the_operator_and_how_to_allow_it() -> None:
    with pytest.raises(GraphFormatError, match=r"mylib::myop.*(\n.*)*allow_ops"):
        TargetReader().read("mylib::myop")


def test_custom_operators_are_read_once_the_caller_allows_them() -> None:
    library = torch.library.Library("wholestep_test_targets", "DEF")
    library.define("double(Tensor x) -> Tensor")
    op = torch.ops.wholestep_test_targets.double.default
    name = target_name(op)
    assert name == "wholestep_test_targets::double"
    with pytest.raises(GraphFormatError):
        TargetReader().read(name)
    assert TargetReader(["wholestep_test_targets::*"]).read(name) is op
    assert TargetReader(["wholestep_test_targets::double"]).read(name) is op
    assert TargetReader("wholestep_test_targets::double").read(name) is op
    with pytest.raises(GraphFormatError):
        TargetReader(["wholestep_test_targets::triple"]).read(name)


@pytest.mark.parametrize("entry", ["mylib", "*", "*::*", "my lib::*", "mylib::*;"])
def test_allow_ops_takes_only_operators_and_namespaces(entry: str) -> None:
    with pytest.raises(GraphFormatError, match="allow_ops"):
        TargetReader([entry])


@pytest.mark.parametrize("target", [os.system, lambda x: x, torch.cond, torch.nn.functional.relu, [], None])
def test_a_function_that_is_not_on_the_list_has_no_name(target: object) -> None:
    with pytest.raises(GraphFormatError, match="no name in the file format"):
        target_name(target)
