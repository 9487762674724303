"""The options of `ws.compile`: written out in its signature, checked with sentences, resolved once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
import torch

import wholestep as ws
from cases.parts import train_step
from wholestep.api import CompileOptions
from wholestep.api import compile as compile_step
from wholestep.errors import OptionError, PipelineError
from wholestep.passes import fuse_loss, overlap_communication
from wholestep.step import ResolvedOptions, Shared, for_step, resolve

NAMES = [field.name for field in fields(ws.Options)]


def resolved(**given: Any) -> ResolvedOptions:
    """What the stages of a step read."""
    return resolve(ws.Options(**given))


def names_of(options: ResolvedOptions) -> list[str]:
    return [bound.name for bound in options.passes]


def a_plan() -> Any:
    """A plan without a mesh: options only ask whether there is one."""
    return object.__new__(ws.Replicate)


def test_every_option_is_a_keyword_of_compile_with_a_type_and_a_default() -> None:
    parameters = dict(inspect.signature(ws.compile).parameters)
    assert parameters.pop("fn").default is None
    assert parameters.pop("unknown").kind is inspect.Parameter.VAR_KEYWORD
    assert list(parameters) == NAMES
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters.values())
    hints = get_type_hints(compile_step)
    assert {name: hints[name] for name in NAMES} == get_type_hints(CompileOptions)
    defaults = ws.Options()
    plain = [field.name for field in fields(ws.Options) if field.name not in ("lower", "passes", "lower_options")]
    assert {name: parameters[name].default for name in plain} == {name: getattr(defaults, name) for name in plain}


def test_every_option_is_documented_in_the_docstring_of_compile() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(compile_step) or "", re.MULTILINE)
    assert documented == ["fn", *NAMES, "OptionError"]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("lowr", "lower"), ("max_recompile", "max_recompiles"), ("pases", "passes"), ("memory_buget", "memory_budget")],
)
def test_a_misspelt_option_says_which_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"no option '{wrong}'.*\n.*did you mean '{meant}'"):
        ws.compile(train_step, **{wrong: 1})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"lower": "tvm"},
            r"lower='tvm' is not a value that lower= takes.\n  fix   use \"inductor\", \"eager\" or \"debug\"",
        ),
        ({"lower": "inducter"}, 'did you mean "inductor"'),
        ({"lower_options": {"min_aten_op": 3}}, "did you mean 'min_aten_ops'"),
        ({"passes": "automatic"}, 'did you mean "auto"'),
        ({"passes": ["schedule_comm_waits"]}, "did you mean 'schedule_comm_wait'"),
        ({"disable_passes": ["reinplace_tail"]}, "no pass runs"),
        ({"dump_passes": 3}, "the path of a folder"),
        ({"name": 3}, "what messages call this step"),
        ({"passes": "fuse_loss"}, r"write a list: passes=\[\"fuse_loss\"\]"),
        ({"passes": [train_step]}, "the function train_step is not a pass"),
        ({"parallel": "ddp"}, "whole like DDP"),
        ({"lower_options": {"max_autotune": True}}, "Settings of Inductor go to"),
    ],
)
def test_a_wrong_value_says_what_to_write(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        ws.compile(train_step, **given)


def test_an_option_that_resembles_none_lists_all() -> None:
    with pytest.raises(OptionError, match="the options are assume, cache, check_first, cuda_graph"):
        ws.compile(train_step, qqq=1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("habit", "instead"),
    [
        ({"mode": "max-autotune"}, "lower_options="),
        ({"fullgraph": True}, "always captured as one graph"),
        ({"backend": "inductor"}, 'lower="inductor"'),
        ({"options": {"max_autotune": True}}, "lower_options="),
        ({"disable": True}, "the function itself"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_of_torch_compile_says_what_to_write_here(habit: dict[str, Any], instead: str) -> None:
    with pytest.raises(OptionError) as caught:
        ws.compile(train_step, **habit)
    assert instead in caught.value.fix


@pytest.mark.parametrize(
    "options",
    [{"lower": "tvm"}, {"cuda_graph": "maybe"}, {"verify": 9}, {"hooks": "maybe"}, {"passes": "all"}, {"dynamic": 3},
     {"memory_budget": "much"}, {"policy": 3, "memory_budget": 0.5}, {"policy": {}}, {"max_recompiles": -1},
     {"lower_options": {"shed": -1}}, {"lower_options": {"config": 3}}],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_is_told_in_sentences(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        ws.compile(train_step, **options)
    assert caught.value.what.endswith(".")
    assert len(caught.value.what.split()) > 3
    assert caught.value.fix.endswith(".")


WRONG_ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "compile": (lambda: ws.compile(3), "ws.compile got an object of type int, which cannot be called"),  # type: ignore[call-overload]
    "capture": (lambda: ws.capture(torch.ones(2)), "ws.capture got an object of type Tensor"),  # type: ignore[arg-type]
    "build": (lambda: ws.build(train_step), "ws.build got the function train_step"),  # type: ignore[arg-type]
    "load": (lambda: ws.load(None), "ws.load got None"),  # type: ignore[arg-type]
    "run_passes": (lambda: ws.passes.run_passes(train_step, []), "run_passes got the function train_step"),
    "apply_rules": (lambda: ws.passes.apply_rules(train_step, []), "apply_rules got the function train_step"),  # type: ignore[arg-type]
    "pipeline": (lambda: ws.pipelining.pipeline(train_step, (1,)), "pipeline got the function train_step"),  # type: ignore[arg-type]
    "draw": (lambda: ws.inspect.draw(torch.nn.Linear, "step.svg"), "draw got the class Linear"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_public_function_says_what_it_got_and_what_to_give_it(name: str) -> None:
    wrong, text = WRONG_ARGUMENTS[name]
    with pytest.raises((OptionError, PipelineError), match=f"{text}.*\n  fix   (pass|build|give) "):
        wrong()


def test_a_dimension_that_no_tensor_has_is_refused() -> None:
    step = ws.compile(lambda x: x + 1, dynamic={"x": {7: ws.Dim(min=1, max=9)}}, lower="eager")
    with pytest.raises(ws.errors.DynamicShapeError, match="dimension 7 of 'x', and no tensor there has so many"):
        step(torch.ones(2, 4))


@pytest.mark.parametrize("text", ["3kB", "3KB", "3 kb", "3000"])
def test_bytes_are_read_in_any_case(text: str) -> None:
    budget = resolved(memory_budget=text).memory_budget
    assert budget is not None
    assert budget.most == 3000


def test_auto_rewrites_compiled_steps_and_no_others_where_nothing_communicates() -> None:
    assert resolved().passes == ()
    assert names_of(resolved(lower="inductor")) == ["fuse_loss"]
    assert resolved(lower="inductor", disable_passes=["fuse_loss"]).passes == ()


def test_auto_hides_communication_where_a_plan_is_given() -> None:
    options = resolved(parallel=a_plan(), lower="inductor")
    assert names_of(options) == ["fuse_loss", "overlap_communication"]
    assert options == resolved(
        parallel=options.parallel, lower="inductor", passes=[fuse_loss(), overlap_communication()]
    )


def test_a_memory_budget_in_bytes_is_the_limit_of_the_schedule() -> None:
    for budget, limit in (("1GiB", {"peak_bytes": 2**30}), (0.5, {}), (None, {})):
        options = resolved(parallel=a_plan(), lower="inductor", memory_budget=budget)
        *_, bound = (for_step(each, options, Shared.of(options)) for each in options.passes)
        assert bound.options == limit


@pytest.mark.parametrize(
    "asked", [{"lower": "eager"}, {"lower": "debug"}, {"lower": "inductor", "lower_options": {"exact": True}}], ids=str
)
def test_auto_runs_exact_passes_only_where_the_bits_of_eager_are_asked_for(asked: dict[str, Any]) -> None:
    options = resolved(parallel=a_plan(), **asked)
    assert names_of(options) == ["overlap_communication"]
    assert {bound.graph_pass.numerics_with(bound.args, bound.options) for bound in options.passes} == {"exact"}


def test_passes_none_is_none_also_with_a_plan() -> None:
    assert resolved(parallel=a_plan(), lower="inductor", passes=None).passes == ()


def test_a_default_pass_may_be_disabled_although_auto_leaves_it_out_itself() -> None:
    assert resolved(disable_passes=["schedule_comm_wait"]).passes == ()
    assert resolved(parallel=a_plan(), disable_passes=["overlap_communication"]).passes == ()
    with pytest.raises(OptionError, match="disable_passes names 'reinplace_tail'"):
        resolved(disable_passes=["reinplace_tail"])


def test_options_with_disabled_passes_can_be_copied() -> None:
    options = resolved(passes="default", disable_passes=["bucket_all_gather"])
    assert "bucket_all_gather" not in names_of(options)
    assert replace(options, verify=2).passes == options.passes


def test_none_is_the_lowering_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_LOWER", "debug")
    assert ws.compile(train_step).options.lower == "debug"
    assert ws.compile(train_step, lower="eager").options.lower == "eager"


def scaled(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x * 2 + y + bias).sum(0)


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 3), (None, 2)])
def test_dynamic_true_is_the_first_dimension_of_every_batch_tensor(dynamic: bool | None, graphs: int) -> None:
    step = ws.compile(scaled, dynamic=dynamic)
    for size in (4, 7, 9):
        x, y, bias = torch.randn(size, 3), torch.randn(size, 1), torch.randn(1)
        assert torch.equal(step(x, y, bias), scaled(x, y, bias))
    assert len(step.graphs) == graphs


def test_dynamic_true_captures_again_where_sizes_that_were_equal_differ() -> None:
    def sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum()

    step = ws.compile(sums, dynamic=True)
    for n, m in ((4, 4), (5, 5), (5, 3), (6, 2)):
        x, y = torch.randn(n), torch.randn(m)
        assert torch.equal(step(x, y), sums(x, y))
    assert len(step.graphs) == 2


def test_dynamic_true_refuses_a_step_that_needs_one_size_and_says_what_to_write() -> None:
    def only_four(x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 2).sum()

    with pytest.raises(ws.errors.DynamicShapeError, match="a mapping names some"):
        ws.compile(only_four, dynamic=True)(torch.ones(4, 2))
