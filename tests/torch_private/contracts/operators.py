"""What wholestep relies on in `torch_private/operators.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _has_foreach_support

from torch_private.contract_table import contracts_of
from wholestep.torch_private import operators

of = contracts_of("operators")
aten = torch.ops.aten


@of("HigherOrderOperator", "OpOverload", "OpOverloadPacket", "packet_of", "find_overloads", "operator_namespace")
def operators_have_three_types_and_their_namespaces_one() -> None:
    assert type(aten.add.Tensor) is operators.OpOverload
    assert type(aten.add) is operators.OpOverloadPacket
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)
    assert operators.packet_of(aten.add.Tensor) is aten.add
    assert aten.add.Tensor in operators.find_overloads("aten", "add")
    assert operators.find_overloads("aten", "no_such_operator") == []
    assert operators.operator_namespace(aten) == "aten"
    assert operators.operator_namespace(torch.nn) is None


@of("schema_of", "op_name", "plain_name", "overload_name", "argument_names", "named_arguments", "bound_argument")
def a_schema_says_names_arguments_and_writes() -> None:
    op = aten.add_.Tensor
    assert operators.op_name(op) == "aten::add_.Tensor"
    assert operators.op_name(aten.mm.default) == "aten::mm"
    assert operators.plain_name(op) == "add_"
    assert operators.overload_name(op) == "Tensor"
    schema = operators.schema_of(op)
    assert [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments] == [
        True,
        False,
        False,
    ]
    assert [argument.kwarg_only for argument in schema.arguments] == [False, False, True]
    assert operators.argument_names(op) == ("self", "other", "alpha")
    assert operators.named_arguments(op, (1, 2), {"alpha": 3}) == {"self": 1, "other": 2, "alpha": 3}
    assert operators.bound_argument(op, 2, (1, 2), {"alpha": 3}) == 3
    assert schema.is_mutable
    assert not operators.schema_of(aten.mm.default).is_mutable


@of("kernel_call")
def the_function_behind_an_operator_takes_the_same_arguments() -> None:
    x = torch.tensor([1.0, 2.0])
    assert operators.kernel_call(aten.add.Tensor)(x, x, alpha=2).tolist() == [3, 6]


@of("has_autograd_kernel", "module_that_registers")
def an_operator_of_a_library_is_told_from_one_of_torch() -> None:
    if not hasattr(torch.ops.wholestep_contract, "doubled"):

        @torch.library.custom_op("wholestep_contract::doubled", mutates_args=())
        def doubled(x: Tensor) -> Tensor:
            return x * 2

    mine = torch.ops.wholestep_contract.doubled.default
    assert operators.has_autograd_kernel(mine)
    assert operators.module_that_registers(mine) == __name__
    assert operators.module_that_registers(aten.add.Tensor) == ""


@of("foreach_type_lists")
def optimizers_take_foreach_kernels_for_types_in_these_lists() -> None:
    class Stranger(nn.Parameter):
        pass

    weight = Stranger(torch.ones(2))

    def kernels() -> tuple[bool, bool]:
        fused, _ = _default_to_fused_or_foreach([weight], differentiable=False, use_fused=True)
        return fused, _has_foreach_support([weight], weight.device)

    assert kernels() == (False, False)
    for types in operators.foreach_type_lists():
        types.append(Stranger)
    try:
        assert kernels() == (True, True)
    finally:
        for types in operators.foreach_type_lists():
            types.remove(Stranger)


@of("AMP_UPDATE_SCALE")
def a_scaler_is_updated_with_python_floats() -> None:
    scale, growth, found = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32), torch.tensor(1.0)
    getattr(torch, operators.AMP_UPDATE_SCALE)(scale, growth, found, 2.0, 0.5, 1)
    assert scale.item() == 2


@of("FUSED_OPTIMIZER_FUNCTIONS")
def fused_optimizers_are_functions_of_torch() -> None:
    originals = {name: getattr(torch, name) for name in operators.FUSED_OPTIMIZER_FUNCTIONS}
    for name in originals:
        called = list[str]()

        def watched(*args: Any, _called: list[str] = called, _name: str = name, **kwargs: Any) -> Any:
            _called.append(_name)
            return originals[_name](*args, **kwargs)

        made = {"_fused_adam_": torch.optim.Adam, "_fused_adamw_": torch.optim.AdamW, "_fused_sgd_": torch.optim.SGD}
        kind = made.get(name, torch.optim.Adagrad)
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        setattr(torch, name, watched)
        try:
            kind([weight], lr=0.1, fused=True).step()
        finally:
            setattr(torch, name, originals[name])
        assert called == [name]


@of("may_copy")
def composite_operators_may_copy() -> None:
    assert operators.may_copy(aten.reshape.default)
    assert operators.may_copy(aten.contiguous.default)
    assert not operators.may_copy(aten.view.default)
    assert not operators.may_copy(torch.ops.prim.device.default)


@of("shares_storage")
def views_share_storage_also_without_data() -> None:
    x = torch.zeros(4, device="meta")
    assert operators.shares_storage(x, x[1:])
    assert not operators.shares_storage(x, torch.zeros(4, device="meta"))
    assert not operators.shares_storage(x, 3)
