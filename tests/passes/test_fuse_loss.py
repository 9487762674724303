"""Losses of many kinds, recognised in captured steps: parity with eager and with float64, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from selection import each_now
from wholestep.errors import PassError
from wholestep.options import Options
from wholestep.passes import approximates, fuse_loss
from wholestep.passes.engine.replay import InFloat64
from wholestep.passes.loss.fuse_loss import RowStatistics, plan_elements, plan_losses
from wholestep.step import resolve

CLASSES, WIDTH = 19, 8
LABELS = torch.tensor([[0, 18, 3, -100, 7, 7], [1, -100, -100, 5, 18, 0]])
KNOWN = LABELS.clamp(min=0)
WEIGHT = torch.linspace(0.0, 2.0, CLASSES)
SOFT = torch.linspace(0.1, 1.0, 12 * CLASSES).view(12, CLASSES).softmax(-1)
Loss = Callable[..., Tensor]


def entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), **options)


def shifted_as_transformers_do(logits: Tensor, labels: Tensor) -> Tensor:
    moved = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, CLASSES), moved.view(-1), ignore_index=-100)


def picked(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, labels[..., None])[..., 0]


def confident(logits: Tensor, labels: Tensor) -> Tensor:
    logp = F.log_softmax(logits, -1)
    return -picked(logp, labels).mean() + 0.1 * (logp.exp() * logp).sum(-1).mean()


@dataclass(frozen=True)
class Case:
    """A loss with its targets."""

    name: str
    loss: Loss
    targets: tuple[Tensor, ...] = (LABELS,)


CASES = [
    Case("mean", entropy),
    Case("sum", lambda x, y: entropy(x, y, reduction="sum") / 7),
    Case("none", lambda x, y: (entropy(x, y, reduction="none") * 0.5).sum() / 12),
    Case("smoothing", lambda x, y: entropy(x, y, label_smoothing=0.1)),
    Case("weights", lambda x, y, w: entropy(x, y, weight=w), (LABELS, WEIGHT)),
    Case("weights, smoothing", lambda x, y, w: entropy(x, y, weight=w, label_smoothing=0.1), (LABELS, WEIGHT)),
    Case("another ignored class", lambda x, y: entropy(x, y, ignore_index=3), (KNOWN,)),
    Case("soft targets", lambda x, t: F.cross_entropy(x.view(-1, CLASSES).float(), t), (SOFT,)),
    Case("kl", lambda x, t: F.kl_div(F.log_softmax(x.view(-1, CLASSES).float(), -1), t, reduction="sum"), (SOFT,)),
    Case("transformers", shifted_as_transformers_do),
    Case("shifted logits", lambda x, y: entropy(x[:, :-1], y[:, 1:])),
    Case("classes in the middle", lambda x, y: F.cross_entropy(x.transpose(1, 2), y)),
    Case("by hand", lambda x, y: -picked(x.log_softmax(-1), y).mean(), (KNOWN,)),
    Case("z-loss", lambda x, y: entropy(x, y) + 1e-2 * x.logsumexp(-1).square().mean()),
    Case("two targets", lambda x, y: 0.3 * entropy(x, y) + 0.7 * entropy(x, y.flip(0))),
    Case("confidence", confident, (KNOWN,)),
]
FLOAT, AUTOCAST, BF16 = "float32", "autocast", "bfloat16"


def captured(loss: Loss, targets: tuple[Tensor, ...], kind: str = FLOAT) -> ws.StepGraph:
    """A head with a loss and an update. Weights go in as they are, so that logits may be extreme."""
    dtype = torch.bfloat16 if kind == BF16 else torch.float32
    model = nn.Linear(WIDTH, CLASSES, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == AUTOCAST):
            found = loss(model(x), *targets)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    given = [t.to(dtype) if t.is_floating_point() else t for t in targets]
    return ws.capture(step, model, optimizer, torch.randn(2, 6, WIDTH, dtype=dtype), *given)


def names(graph: ws.StepGraph) -> str:
    return " ".join(str(node.target) for node in graph.gm.graph.nodes)


def fused(graph: ws.StepGraph, **options: Any) -> ws.StepGraph:
    ws.passes.run_passes(graph, [fuse_loss(least_elements=0, **options)], level=3)
    return graph


def inputs_of(graph: ws.StepGraph, targets: tuple[Tensor, ...], scale: float) -> list[Any]:
    """A weight whose logits are of a size, and the batch; the learning rate."""
    torch.manual_seed(1)
    found: list[Any] = []
    left = list(targets)
    for node in graph.gm.graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        if not isinstance(val, Tensor):
            found.append(0.5)
        elif val.dim() == 3 or tuple(val.shape) == (CLASSES, WIDTH):
            found.append((torch.randn(val.shape) * scale).to(val.dtype))
        else:
            found.append(left.pop(0).to(val.dtype))
    return found


def run(gm: Any, inputs: list[Any], interpreter: Any = None) -> list[Tensor]:
    own = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    result = gm(*own) if interpreter is None else interpreter(gm).run(*own)
    return [result[0] if isinstance(result, tuple | list) else result, *(v for v in own if isinstance(v, Tensor))]


def check_against_float64(case: Case, kind: str, scale: float) -> None:
    graph = captured(case.loss, case.targets, kind)
    inputs = inputs_of(graph, case.targets, scale)
    wide = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs]
    reference, before = run(graph.gm, wide, InFloat64), run(graph.gm, inputs)
    fused(graph)
    assert "_log_softmax" not in names(graph), "the rewrite took place"
    for exact, was, now in zip(reference, before, run(graph.gm, inputs), strict=True):
        assert now.dtype is was.dtype
        rounding = torch.finfo(was.dtype).eps * float(exact.abs().max()) if was.is_floating_point() else 0.0
        error_before, error_now = (float((value.double() - exact).abs().max()) for value in (was, now))
        assert error_now <= 2 * error_before + 4 * rounding, (case.name, kind, scale)


@pytest.mark.parametrize("case", each_now(CASES, *(case.name for case in CASES)), ids=lambda case: case.name)
def test_a_loss_is_as_close_to_float64_as_before(case: Case) -> None:
    for kind in (FLOAT, AUTOCAST, BF16):
        check_against_float64(case, kind, 1.0)


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_and_extreme_logits_are_as_close_to_float64_as_before(case: Case, scale: float) -> None:
    for kind in (FLOAT, AUTOCAST, BF16):
        check_against_float64(case, kind, scale)


def test_extreme_logits_give_finite_losses_and_gradients() -> None:
    graph = fused(captured(entropy, (LABELS,)))
    inputs = inputs_of(graph, (LABELS,), 1e4)
    assert all(bool(value.isfinite().all()) for value in run(graph.gm, inputs))


@pytest.mark.parametrize("row", ["minus infinity", "infinity", "nan", "all ignored", "one class masked"])
def test_odd_rows_give_what_eager_gives(row: str) -> None:
    labels = torch.full_like(LABELS, -100) if row == "all ignored" else LABELS
    value = {"minus infinity": -torch.inf, "infinity": torch.inf, "nan": torch.nan, "one class masked": -torch.inf}

    def masked(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return entropy(logits.masked_fill(mask, value.get(row, 0.0)), labels)

    mask = torch.zeros(2, 6, CLASSES, dtype=torch.bool)
    if row == "one class masked":
        mask[..., 9] = True
    elif row != "all ignored":
        mask[0, 1] = True
    graph = captured(masked, (labels, mask))
    inputs = inputs_of(graph, (labels, mask), 1.0)
    inputs = [mask if isinstance(v, Tensor) and v.dtype is torch.bool else v for v in inputs]
    before = run(graph.gm, inputs)
    fused(graph)
    assert "_log_softmax" not in names(graph)
    for was, now in zip(before, run(graph.gm, inputs), strict=True):
        torch.testing.assert_close(now, was, equal_nan=True)


def test_a_loss_that_is_written_with_logsumexp_has_its_elements_added_last() -> None:
    graph = captured(lambda x, y: (x.logsumexp(-1) - picked(x, y)).mean(), (KNOWN,))
    (plan,) = plan_elements(graph.gm.graph, frozenset({"cpu"}), 0)
    assert [node.target for node in plan.finish.path] == [torch.ops.aten.add.Tensor]
    fused(graph)
    assert "new_zeros" not in names(graph)


def test_the_plan_says_what_a_gradient_is_made_of() -> None:
    graph = captured(lambda x, y: entropy(x, y, label_smoothing=0.1), (LABELS,), AUTOCAST)
    (plan,) = plan_losses(graph.gm.graph, frozenset({"cpu"}), 0)
    (gradient,) = plan.gradients
    assert sorted(term.kind for term in gradient.terms) == ["label", "row"]
    assert gradient.finish.casts is torch.bfloat16
    assert plan.rows.row_shape == [12, 1]


@pytest.mark.parametrize("reason", ["returned", "small", "device", "float64", "no gradient"])
def test_what_is_not_rewritten(reason: str) -> None:
    if reason == "returned":
        graph = ws.capture(lambda x, y: _with_log_probabilities(x, y), torch.randn(12, CLASSES), KNOWN.view(-1))
    elif reason == "no gradient":
        graph = ws.capture(entropy, torch.randn(12, CLASSES), KNOWN)
    elif reason == "float64":
        graph = captured(lambda x, y: entropy(x.double(), y), (LABELS,))
    else:
        graph = captured(entropy, (LABELS,))
    options: dict[str, Any] = {"small": {"least_elements": 1000}, "device": {"devices": ("cuda",)}}.get(reason, {})
    ws.passes.run_passes(graph, [fuse_loss(**{"least_elements": 0, **options})])
    assert "_log_softmax" in names(graph)


def _with_log_probabilities(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    logp = F.log_softmax(x, -1)
    F.nll_loss(logp, labels).backward()
    return logp.detach(), x.grad


def test_a_wrong_gradient_is_seen_by_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay at level 3 would have found a factor, a wrong row or a forgotten label."""
    monkeypatch.setattr(RowStatistics, "labels_of", _labels_times_two)
    with pytest.raises(PassError, match="has other values"):
        fused(captured(entropy, (KNOWN,)))


def _labels_times_two(self: Any, node: Any, build: Any) -> Any:
    given = build.row_value(node.args[1] if "forward" in str(node.target) else node.args[2], self.rows)
    counts = build(torch.ops.aten.ne.Scalar, given, -100)
    return build(torch.ops.aten.mul.Tensor, build(torch.ops.aten.mul.Tensor, given, counts), 2), counts


@pytest.mark.compiles
def test_compiled_steps_fuse_by_default_and_exact_and_eager_ones_do_not() -> None:
    def step(x: Tensor, labels: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        F.cross_entropy(x, labels).backward()
        assert x.grad is not None
        return x.grad

    def passes(**options: Any) -> list[str]:
        return [bound.name for bound in resolve(Options(**options)).passes]

    assert passes(lower="inductor") == ["fuse_loss"]
    assert passes(lower="inductor", disable_passes=["fuse_loss"]) == []
    assert passes(lower="inductor", lower_options={"exact": True}) == []
    assert passes(lower="eager") == passes(lower="eager", disable_passes=["fuse_loss"]) == []
    assert fuse_loss.contract.numerics == approximates(2)
    logits, labels = torch.randn(64, 1200), torch.arange(64)
    compiled = ws.compile(step, lower="inductor")
    torch.testing.assert_close(compiled(logits, labels), step(logits, labels), rtol=1e-4, atol=1e-7)
    assert compiled.last is not None
    assert ws.passes.applied_passes(compiled.last.gm) == ("fuse_loss",)
    assert "_log_softmax" not in names(compiled.last)


@pytest.mark.parametrize("name", each_now(["gpt2", "llama", "bert", "t5"], "gpt2"))
def test_the_losses_of_transformers_are_recognised(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 32}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model: nn.Module = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=97, n_embd=16, n_layer=1, n_head=2, n_positions=32, **special)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, **special, num_key_value_heads=1)
        ),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
            )
        ),
    }[name]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ids = torch.randint(3, 97, (2, 12))
    graph = fused(ws.capture(step, model, optimizer, ids, ids.clone().masked_fill(ids < 10, -100)))
    assert "_log_softmax" not in names(graph)
