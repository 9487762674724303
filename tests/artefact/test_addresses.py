"""Names that code uses are read off its bytes as `dis` reads them, and deprecated names of torch are not asked."""

from __future__ import annotations

import argparse
import ast
import dis
import inspect
import warnings
from collections.abc import Iterator
from types import CodeType, ModuleType

import pytest
import torch.distributed
import torch.nn.functional

from wholestep.artefact.addresses import names_used
from wholestep.artefact.code_table import _namespace


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@pytest.mark.parametrize("module", [argparse, ast, torch.nn.functional])
def test_names_in_code_are_those_that_dis_finds(module: ModuleType) -> None:
    names = "LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "IMPORT_NAME"
    every = list(codes(compile(inspect.getsource(module), "module.py", "exec")))
    assert len(every) > 50
    for code in every:
        for name in names:
            found = {each.argval for each in dis.get_instructions(code) if each.opname == name}
            assert names_used(code, frozenset({dis.opmap[name]})) == found


def test_names_behind_more_than_255_others_are_found() -> None:
    code = compile("\n".join(f"name{i}" for i in range(600)), "long.py", "exec")
    assert len(names_used(code, frozenset({dis.opmap["LOAD_NAME"]}))) == 600


def test_the_names_of_torch_distributed_are_hashed_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _namespace(torch.distributed)
