"""What wholestep relies on in `torch_private/guard_checks.py`."""

from __future__ import annotations

from typing import Any

import torch

from torch_private.contract_table import contracts_of
from wholestep.torch_private import guard_checks

of = contracts_of("guard_checks")


@of("generator_key")
def python_objects_of_one_generator_have_one_key() -> None:
    mine = torch.Generator()
    assert guard_checks.generator_key(mine) == guard_checks.generator_key(mine)
    assert guard_checks.generator_key(mine) != guard_checks.generator_key(torch.default_generator)
    seen = list[int]()

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(guard_checks.generator_key(kwargs["generator"]))
            return func(*args, **kwargs)

    with Watching():
        torch.rand(2, generator=mine)
    assert seen == [guard_checks.generator_key(mine)]


@of("cuda_is_initialized")
def asking_does_not_initialise_cuda() -> None:
    assert guard_checks.cuda_is_initialized() in (torch.cuda.is_initialized(), False)


@of("DictWatch")
def the_version_of_a_dict_changes_with_each_write_and_no_read() -> None:
    first, second = {"a": 1}, {i: i for i in range(100)}
    watch = guard_checks.DictWatch([first, second])
    assert first["a"] + len(second) == 101
    assert watch.unchanged()
    second[5] = 6
    assert not watch.unchanged()
    watch = guard_checks.DictWatch([first, second])
    del first["a"]
    assert not watch.unchanged()


@of("TensorChecks")
def one_call_compares_the_metadata_of_many_tensors() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(4, 5)
    checks = guard_checks.TensorChecks([x, y], [frozenset(), frozenset({0})], ["x", "y"])
    assert checks.hold([torch.ones(2, 3), torch.ones(7, 5)])
    others = {
        "size": torch.zeros(3, 3),
        "stride": torch.zeros(3, 2).t(),
        "dtype": torch.zeros(2, 3, dtype=torch.float64),
        "requires_grad": torch.zeros(2, 3, requires_grad=True),
        "class": torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    }
    for what, other in others.items():
        assert not checks.hold([other, y]), what
    assert "x" in checks.explain([others["size"], y])
