"""`ws.check` with compiled regions: rounding is told from faults, against float64 where a reference can be made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import wholestep as ws
from cases.parts import adamw, mlp, train_step
from harness import batch_of, device, differences, frame
from selection import each_now

pytestmark = pytest.mark.compiles
aten = torch.ops.aten


def network(dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(dropout), nn.BatchNorm1d(32), nn.Linear(32, 4))


def unchanged(watch: dict[str, Any], x: Tensor, check: Any) -> Any:
    before = frame("before", None, watch, (x,))
    report = check()
    assert differences(before, frame("after", None, watch, (x,))) == []
    return report


def test_compiled_regions_are_within_rounding_and_no_farther_from_float64() -> None:
    model = network()
    optimizer = adamw(model)
    x = batch_of(device(), 0, 20, 6)
    report = unchanged(
        {"model": model, "optimizer": optimizer}, x, lambda: ws.check(train_step, model, optimizer, x, lower="inductor")
    )
    assert report.ok, str(report)
    assert not report.exact
    assert report.numerics == "reassociates"
    assert report.reference == ""
    assert report["RNG"].status is ws.debug.Status.EQUAL
    assert report["parameters"].worst.distance is not None
    assert report.lowering is not None
    assert report.lowering.regions
    text = str(report)
    assert "x eager's distance from float64" in text
    assert "regions" in text
    assert "outside" in text
    assert text.splitlines()[-1] == "ok: within rounding"


@pytest.mark.long  # regions without autocast, above, are compared in the same way
def test_autocast_is_compared_with_float64() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = network()
    report = ws.check(step, model, adamw(model), batch_of(device(), 0, 20, 6), lower="inductor", steps=2)
    assert report.ok, str(report)
    assert report.reference == ""


@pytest.mark.long  # autocast, above, is another dtype that the step asks for
def test_a_requested_dtype_is_float64_in_the_reference() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x.to(torch.float32)).float().square().mean()
        loss.backward()
        return loss * torch.ones((), dtype=torch.float32)

    report = ws.check(step, network(), batch_of(device(), 0, 20, 6), lower="inductor", steps=1)
    assert report.ok, str(report)
    assert report.reference == ""


def test_a_step_without_a_float64_form_says_why_and_is_judged_by_noise() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        if loss.dtype is torch.float64:
            raise RuntimeError("only float32")
        return loss

    model = network()
    report = ws.check(step, model, batch_of(device(), 0, 20, 6), lower="inductor", steps=2)
    assert report.ok, str(report)
    assert report.reference == "in float64 the step raises RuntimeError"
    assert "no reference" in str(report)
    assert model[0].weight.dtype is torch.float32


@pytest.mark.long  # what shares memory is read as it is, also without a compiler
def test_tensors_that_share_memory_are_not_converted_for_a_reference() -> None:
    flat = torch.randn(10)
    one, other = flat[:5], flat[5:]

    def step(x: Tensor) -> Tensor:
        return (one * x + other.exp()).sum()

    report = ws.check(step, batch_of(device(), 0, 5), lower="inductor", steps=1)
    assert report.ok
    assert one.data_ptr() == flat.data_ptr()


def test_first_calls_are_checked_within_rounding_and_the_compiled_results_stay() -> None:
    model = network()
    optimizer = adamw(model)
    step = ws.compile(train_step, lower="inductor", check_first=3)
    losses = [float(step(model, optimizer, batch_of(device(), 0, 20, 6)).detach()) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert len(step.graphs) == 2


@ws.passes.graph_optimization_pass(numerics="reassociates")
def slightly_more(gm: fx.GraphModule) -> None:
    """A fault in the third digit, in a pass that may only round."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.gelu.default):
        with gm.graph.inserting_after(node):
            more = gm.graph.call_function(aten.mul.Tensor, (node, 1.01))
        more.meta.update(node.meta)
        node.replace_all_uses_with(more, delete_user_cb=lambda user, more=more: user is not more)


def test_an_error_in_the_third_digit_is_not_rounding() -> None:
    model = mlp(device())
    report = ws.check(
        train_step, model, adamw(model), batch_of(device(), 0, 5, 6), lower="inductor", passes=[slightly_more]
    )
    assert not report.ok, str(report)
    assert report.first_difference is not None
    assert report.first_difference.pass_name == "slightly_more"


@pytest.mark.parametrize("lower", each_now(["eager", "inductor"], "eager"))
def test_a_small_hugging_face_language_model_passes(lower: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50, n_positions=16, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(50, (2, 12))

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"model": model, "optimizer": optimizer}
    report = unchanged(watch, tokens, lambda: ws.check(step, tokens, lower=lower, steps=2))
    assert report.ok, str(report)
    assert report.exact or lower == "inductor"


def test_a_float64_run_of_another_computation_is_not_used() -> None:
    from wholestep.debug.check.report import Observation, Status, Tolerance, findings
    from wholestep.ir.user_objects.reachable import Part

    def seen(value: Tensor) -> Observation:
        return Observation({"p": (Part.PARAMETERS, value)})

    value = torch.randn(50)
    eager, noise, wrong = seen(value), seen(value * (1 + 1e-7)), seen(value + 0.05)
    elsewhere, nearby = seen(value.double() - 0.05), seen(value.double())
    for reference in (elsewhere, nearby):
        [found] = findings(eager, wrong, Tolerance("reassociates", 1e-7, noise, reference))
        assert found.status is Status.DIFFERENT
    flipped = seen(torch.where(torch.arange(50) == 3, -value, value))  # Adam on a gradient that is rounding alone
    [found] = findings(eager, flipped, Tolerance("reassociates", 1e-7, flipped, seen(flipped.values["p"][1].double())))
    assert found.status is Status.ROUNDING
    assert found.distance is not None
