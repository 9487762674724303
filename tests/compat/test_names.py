"""Every public name of the modules that `compat` stands for exists there, and takes the arguments that theirs takes."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from typing import Any

import pytest

MODULES = {
    "functorch.compile": "wholestep.compat.functorch",
    "torch.distributed.pipelining": "wholestep.compat.pipelining",
    "torch.distributed.pipelining._IR": "wholestep.compat.pipelining._IR",
    "torch.distributed.pipelining._backward": "wholestep.compat.pipelining._backward",
    "torch.distributed.pipelining._utils": "wholestep.compat.pipelining._utils",
    "torch.distributed.pipelining.microbatch": "wholestep.compat.pipelining.microbatch",
    "torch.distributed.pipelining.schedules": "wholestep.compat.pipelining.schedules",
    "torch.distributed.pipelining.stage": "wholestep.compat.pipelining.stage",
    "torch.fx.passes.infra.partitioner": "wholestep.compat.fx.partitioner",
    "torch.fx.passes.split_module": "wholestep.compat.fx.split_module",
}
"""Theirs to ours."""

NOT_TAKEN = {
    # A pipe is built by `pipeline` or `Pipe.from_tracing`, in torch too; its constructor is not called by users.
    "Pipe": {"split_gm", "num_stages", "has_loss_and_backward", "loss_spec"},
}
"""Arguments that ours do not take, by name, and why."""


def public_names(module: str) -> list[str]:
    """`__all__`; without one, what the module defines, underscored names of private modules aside."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return sorted(found.__all__)
    defined = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and not inspect.ismodule(value) and getattr(value, "__module__", module) == module
    ]
    return sorted(defined) if module != "functorch.compile" else sorted(n for n in dir(found) if not n.startswith("_"))


ALL = [(module, name) for module in MODULES for name in public_names(module)]


@pytest.mark.parametrize(("module", "name"), ALL, ids=lambda part: str(part))
def test_a_public_name_of_theirs_is_ours_and_takes_every_argument_of_theirs(module: str, name: str) -> None:
    theirs = getattr(importlib.import_module(module), name)
    ours = getattr(importlib.import_module(MODULES[module]), name)
    if ours is theirs or not callable(theirs):
        return
    assert callable(ours)
    missing = set(parameters(theirs)) - set(parameters(ours)) - NOT_TAKEN.get(name, set())
    assert not missing or takes_anything(ours), f"{name} does not take {sorted(missing)}"
    if inspect.isclass(theirs) and not issubclass(theirs, Enum):
        methods = {name for name, value in vars(theirs).items() if not name.startswith("_") and is_behaviour(value)}
        assert methods <= set(dir(ours)), sorted(methods - set(dir(ours)))
    elif inspect.isclass(theirs):
        assert set(theirs.__members__) <= set(ours.__members__)


@pytest.mark.parametrize("module", MODULES)
def test_a_name_that_theirs_only_imports_is_found_by_the_changed_prefix_too(module: str) -> None:
    theirs, ours = importlib.import_module(module), importlib.import_module(MODULES[module])
    names = [name for name, value in vars(theirs).items() if not name.startswith("__") and not inspect.ismodule(value)]
    assert [name for name in names if not hasattr(ours, name)] == []


def test_submodules_are_ours_and_not_torchs() -> None:
    package = importlib.import_module("wholestep.compat.pipelining")
    for name in ("_IR", "_backward", "_utils", "microbatch", "schedules", "stage"):
        with pytest.raises(AttributeError):  # so that `from package import name` imports it
            package.__getattr__(name)


SPMD = {
    "api": "compile Override COMPILED_OBJECT_KEY",
    "data_parallel": "DataParallelStyle",
    "gm_transformation": "GraphModuleTransformation",
    "graph_optimization": "enable_graph_optimization_dump graph_optimization_pass CommBlock get_comm_block "
    "get_all_comm_blocks comm_fusion_with_concat schedule_comm_wait remove_copy_from_optimizer AdamArgs "
    "ForeachAddBlock FusedAdamBlock get_fused_optimizer_block get_all_fused_optimizer_blocks split_fused_optimizer "
    "iter_move_grads_and_optimizers find_all_descendants",
    "graph_utils": "OP CommType get_node_tensor_metadata get_output find_node is_leaf_subgraph clone_subgraph "
    "rebuild_graph dump_graphs_to_files",
    "iter_graph_module": "IterGraph IterGraphModule",
    "parallel_mode": "ParallelMode DataParallel DTensorExpandMode",
    "partial_lower": "partial_lower",
}
"""Public names of `torch.distributed._spmd` in torch 2.3, its last release; the strategies of `data_parallel`, which
are about a graph that is sharded after it was traced, are not among them."""


@pytest.mark.parametrize("module", SPMD)
def test_public_names_of_spmd_are_there(module: str) -> None:
    ours = importlib.import_module(f"wholestep.compat.spmd.{module}")
    assert [name for name in SPMD[module].split() if not hasattr(ours, name)] == []


def is_behaviour(value: Any) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod)


def parameters(function: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind not in kinds]


def takes_anything(function: Any) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("module", [theirs for theirs in MODULES if theirs.startswith("torch.distributed.pipelining.")])
def test_private_names_of_torchs_modules_are_found_by_the_changed_prefix_too(module: str) -> None:
    theirs, ours = importlib.import_module(module), importlib.import_module(MODULES[module])
    private = [name for name in vars(theirs) if name.startswith("_") and not name.startswith("__")]
    assert all(hasattr(ours, name) for name in private)
    assert set(private) <= set(dir(ours))
    with pytest.raises(AttributeError, match="has 'no_such_name'"):
        _ = ours.no_such_name
