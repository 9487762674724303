"""What wholestep relies on in `torch_private/symbolic_shapes.py`."""

from __future__ import annotations

import sys
from typing import Any

import sympy
import torch
from torch import fx

from torch_private.contract_table import contracts_of
from wholestep.torch_private import symbolic_shapes as own
from wholestep.torch_private.fake_tensors import new_fake, new_fake_mode

of = contracts_of("symbolic_shapes")


@of("symbolic_functions", "sympy_function_names")
def expressions_of_sizes_are_made_of_these_functions() -> None:
    env = own.ShapeEnv()
    size = own.new_symbol(env, 8, 2, None)
    made = {
        "FloorDiv": size // 3,
        "PythonMod": (size - 5) % 3,
        "IntTrueDiv": size / 3,
        "Max": torch.sym_max(size, 3),
        "OpaqueUnaryFn_sqrt": torch.sym_sqrt(size),
        "ToFloat": torch.sym_float(size),
    }
    functions = own.symbolic_functions()
    for name, value in made.items():
        assert own.sympy_function_names(value.node.expr) in (name, "Mod")
        assert functions[own.sympy_function_names(value.node.expr)] is type(value.node.expr)
    assert len(functions) > 35


@of("ShapeEnv", "new_symbol", "symbol_range", "highest_value", "symbol_in", "expression_of", "size_at_capture")
def a_size_is_a_symbol_with_a_value_and_a_range() -> None:
    env = own.ShapeEnv()
    size = own.new_symbol(env, 8, 4, 16)
    symbol = own.symbol_in(size)
    assert own.symbol_range(env, symbol) == (4, 16)
    assert own.symbol_range(env, own.symbol_in(own.new_symbol(env, 9, 0, None))) == (2, 2**31)
    assert own.symbol_range(env, sympy.Symbol("stranger")) == (None, None)
    assert own.highest_value(env, symbol) == 8
    assert own.symbol_in(size + 1) is None
    assert own.symbol_in(3) is None
    assert own.expression_of(size + 1) == symbol + 1
    assert own.expression_of(3) is None
    assert own.size_at_capture(size * 2) == 16
    assert own.size_at_capture(7) == 7


@of("fixed_symbols", "shape_guards", "fix_symbol", "known_answer", "is_condition", "new_size")
def conditions_are_recorded_and_may_fix_a_symbol() -> None:
    env = own.ShapeEnv()
    size = own.new_symbol(env, 8, 2, None)
    other = own.new_symbol(env, 9, 2, 16)
    assert bool(size > 5)
    assert [str(each) for each in own.shape_guards(env)] == [str(own.symbol_in(size) > 5)]
    assert all(map(own.is_condition, own.shape_guards(env)))
    assert not own.is_condition(own.symbol_in(size))
    assert own.fixed_symbols(env) == []
    assert bool(size == 8)
    assert [value for _, value in own.fixed_symbols(env)] == [8]
    assert own.known_answer(env, own.symbol_in(other) >= 2) == sympy.true
    assert own.known_answer(env, own.symbol_in(other) >= 10) is None
    expression = own.symbol_in(other) + 3
    assert own.expression_of(own.new_size(env, expression)) == expression
    assert type(own.new_size(env, own.symbol_in(other) > 3)) is torch.SymBool
    assert type(own.new_size(env, sympy.Float(0.5) * own.symbol_in(other))) is torch.SymFloat
    symbol = own.symbol_in(other)
    own.fix_symbol(env, symbol, 9)
    assert (str(symbol), 9) in own.fixed_symbols(env)


@of("new_data_size", "data_symbols", "largest_size", "size_assertions")
def a_size_that_data_decides_has_no_value_but_a_bound() -> None:
    env = own.ShapeEnv()
    size = own.new_data_size(env)
    assert own.data_symbols(env, size.node.expr + 1) == [size.node.expr]
    assert own.data_symbols(env, own.new_symbol(env, 8, 2, None).node.expr) == []
    assert own.size_at_capture(size) is None
    assert own.largest_size(size) is None
    torch._check(size <= 12, lambda: "at most a dozen")
    assert own.largest_size(size) == 12
    torch._check(size % 3 == 0, lambda: "divisible by 3")
    assert any("Mod" in str(condition) for condition, _ in own.size_assertions(env))
    assert all(isinstance(message, str) for _, message in own.size_assertions(env))


@of("register_symbol")
def a_symbol_from_a_file_works_as_one_of_a_trace() -> None:
    env = own.ShapeEnv()
    s, f = sympy.Symbol("s7", integer=True, positive=True), sympy.Symbol("zf1", real=True)
    own.register_symbol(env, s, 8, 2, None)
    own.register_symbol(env, f, 0.5, None, None)
    assert own.symbol_range(env, s) == (2, None)
    size = env.create_symintnode(s, hint=8)
    assert own.size_at_capture(size + 1) == 9
    assert bool(size < 10)
    assert own.symbol_range(env, f) == (None, None)
    assert float(env.create_symfloatnode(f, hint=0.5)) == 0.5


@of("SIZE_FILES")
def the_value_of_a_size_is_read_through_these_files() -> None:
    env = own.ShapeEnv()
    size = own.new_symbol(env, 8, 2, None)
    files = list[str]()

    def at_call(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name in ("evaluate_expr", "guard_int", "guard_bool"):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(at_call)
    try:
        assert int(size) == 8
    finally:
        sys.setprofile(before)
    assert files
    assert set(files) <= own.SIZE_FILES


@of("symbols_in", "shape_env_of", "shapes_by_python", "shape_env_of_trace", "symbols_by_value")
def fakes_carry_the_symbols_of_their_sizes() -> None:
    env = own.ShapeEnv()
    mode = new_fake_mode(env)
    size = own.new_symbol(env, 8, 2, None)
    fake = new_fake(mode, torch.zeros(2), (size, 3))
    assert own.symbols_in(fake) == own.symbols_in(size) == {own.symbol_in(size)}
    assert own.symbols_in(torch.zeros(2)) == set()
    assert own.shape_env_of(fake) is own.shape_env_of(size) is env
    assert own.shape_env_of(torch.zeros(2)) is None
    assert own.shape_env_of_trace() is None
    with mode, own.shapes_by_python():
        assert own.shape_env_of_trace() is env
        assert own.symbols_in(torch.ops.aten.cat.default([fake, fake])) == {own.symbol_in(size)}
    assert own.shape_guards(env) == []
    other = new_fake_mode(own.ShapeEnv()).from_tensor(torch.zeros(7, 5))
    assert own.symbols_by_value(own.shape_env_of(other)).get(7) == own.symbol_in(other.shape[0])


@of("dynamo_source", "input_source")
def placeholders_say_where_their_values_come_from() -> None:
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

    module, sources, inputs = torch.nn.Linear(2, 2), list[str](), list[Any]()

    def compiler(gm: fx.GraphModule, _: Any) -> Any:
        inputs.append([own.input_source(node) for node in gm.graph.find_nodes(op="placeholder")])
        return make_boxed_func(gm.forward)

    def backend(gm: fx.GraphModule, example: Any) -> Any:
        sources.extend(own.dynamo_source(node) for node in gm.graph.find_nodes(op="placeholder"))
        return aot_module_simplified(gm, example, fw_compiler=compiler, bw_compiler=compiler)

    torch.compile(module, backend=backend)(torch.ones(1, 2)).sum().backward()
    assert any("weight" in each for each in sources)
    assert any(each.startswith("L[") for each in sources)
    forward, backward = inputs
    assert sorted(forward, key=str) == [0, 1, 2]
    assert -1 in backward
    plain = fx.Graph().placeholder("x")
    assert own.dynamo_source(plain) == "x"
    assert own.input_source(plain) is None
