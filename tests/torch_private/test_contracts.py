"""Each definition of `torch_private/` has contracts that run its private names as wholestep uses them.

One test per definition, so that a new release of torch shows by name what changed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from torch_private.contract_table import CONTRACTS, definitions, lines_that_run, never_run, that_need_contracts

for _path in sorted((Path(__file__).parent / "contracts").glob("*.py")):
    importlib.import_module(f"torch_private.contracts.{_path.stem}")

NOT_HERE = {
    "abort_nccl: _group_start": "needs NCCL",
    "abort_nccl: _group_end": "needs NCCL",
    "sharded_groups: _fsdp_param_group": "torch 2.11",
}
"""Names whose statements do not run on the CPU with every torch."""


def test_contracts_are_of_definitions_that_exist() -> None:
    assert CONTRACTS.keys() <= definitions().keys()


def test_there_are_contracts_for_all_files() -> None:
    needed = that_need_contracts()
    assert len(needed) > 180
    assert {key.split(".")[0] for key in needed} == {key.split(".")[0] for key in CONTRACTS}


def keys() -> list[Any]:
    """Those that compile run last: the contracts of `distributed` fork ranks."""
    found = sorted(that_need_contracts().keys() | CONTRACTS.keys())
    compiles = {key: key.startswith(("aot.", "inductor.")) for key in found}
    return [pytest.param(key, marks=pytest.mark.compiles) if compiles[key] else key for key in found]


@pytest.mark.parametrize("key", keys())
def test_torch_keeps_the_contract(key: str) -> None:
    names = ", ".join(sorted(that_need_contracts().get(key, ()))) or "no private name"
    assert CONTRACTS[key], f"{key} ({names}) has no contract"
    for check in CONTRACTS[key]:
        try:
            lines_that_run(check)
        except Exception as error:
            error.add_note(f"so {key} is not what wholestep relies on; it uses {names}")
            raise
    assert [name for name in never_run(key) if name not in NOT_HERE] == []
