"""Heads in chunks of tokens: parity with float64, what is cut, and where the compiled backward begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from wholestep.errors import OptionError
from wholestep.ir.meta import node_meta
from wholestep.lower.compiled_region import CompiledRegion
from wholestep.lower.forward_backward import ForwardBackward
from wholestep.passes import chunk_head, fuse_loss
from wholestep.passes.loss.chunk_head import plan_heads

CLASSES, WIDTH, TOKENS = 19, 8, 14
LABELS = torch.tensor([[0, 18, 3, -100, 7, 7, 1], [1, -100, -100, 5, 18, 0, 2]])
WEIGHT = torch.linspace(0.0, 2.0, CLASSES)
Loss = Callable[..., Tensor]


class Head(nn.Module):
    """A layer below the head, so that the backward goes on behind it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.layer(x)))
        return logits


def entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


def train_step(loss: Loss, autocast: bool = False) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = loss(model(x), *targets)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step


def captured(loss: Loss, *targets: Tensor, dtype: torch.dtype = torch.float32, autocast: bool = False) -> ws.StepGraph:
    model = Head(bias=not autocast).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    given = [t.to(dtype) if t.is_floating_point() else t for t in targets]
    return ws.capture(train_step(loss, autocast), model, optimizer, torch.randn(2, 7, WIDTH, dtype=dtype), *given)


def shapes(graph: ws.StepGraph) -> set[tuple[int, ...]]:
    values = [node.meta.get("val") for node in graph.gm.graph.nodes]
    return {tuple(value.shape) for value in values if isinstance(value, Tensor)}


CASES: dict[str, tuple[Loss, tuple[Tensor, ...], dict[str, Any]]] = {
    "mean": (entropy, (LABELS,), {}),
    "sum, scaled": (lambda x, y: entropy(x, y, reduction="sum") * 0.125 / 7, (LABELS,), {}),
    "weights": (lambda x, y, w: entropy(x, y, weight=w), (LABELS, WEIGHT), {}),
    "autocast": (entropy, (LABELS,), {"autocast": True}),
    "autocast, float logits": (lambda x, y: entropy(x.float(), y), (LABELS,), {"autocast": True}),
    "bfloat16": (entropy, (LABELS,), {"dtype": torch.bfloat16}),
    "all ignored": (entropy, (torch.full_like(LABELS, -100),), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_head_in_chunks_is_as_close_to_float64(name: str) -> None:
    loss, targets, options = CASES[name]
    graph = captured(loss, *targets, **options)
    ws.passes.run_passes(graph, [chunk_head(chunks=4)], level=3)
    assert {(TOKENS, CLASSES), (CLASSES, TOKENS)}.isdisjoint(shapes(graph)), "no logits of all tokens are left"
    assert (4, CLASSES) in shapes(graph), "chunks of 3 and 4 tokens"
    starts = [node.target for node in graph.gm.graph.nodes if node_meta(node).starts_backward]
    assert starts == [torch.ops.aten.cat.default]
    ws.passes.run_passes(graph, [fuse_loss(least_elements=0)], level=3)
    assert not any("_log_softmax" in str(node.target) for node in graph.gm.graph.nodes)


def test_a_step_with_chunks_follows_eager() -> None:
    torch.manual_seed(0)
    results = []
    for chunks in (0, 3):
        torch.manual_seed(0)
        model = Head(bias=True)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        step: Any = train_step(entropy)
        step = ws.compile(step, lower="eager", passes=[chunk_head(chunks=chunks)]) if chunks else step
        losses = [step(model, optimizer, torch.ones(2, 7, WIDTH) * i, LABELS).item() for i in range(4)]
        results.append([torch.tensor(losses), *(p.detach() for p in model.parameters())])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: entropy(x, y) + x.square().mean(),
        lambda x, y: entropy(x, y, label_smoothing=0.1),
        lambda x, y: entropy(x, y, reduction="none").square().mean(),
        lambda x, y: (lambda found: found * found)(entropy(x, y)),
        lambda x, y: entropy(x.softmax(-1), y),
    ],
    ids=["logits read elsewhere", "smoothing", "none", "the loss squared", "no product"],
)
def test_what_needs_the_logits_of_all_tokens_is_left_alone(loss: Loss) -> None:
    graph = captured(loss, LABELS)
    assert plan_heads(graph.gm.graph) == []
    ws.passes.run_passes(graph, [chunk_head()])
    assert (TOKENS, CLASSES) in shapes(graph)


def test_the_plan_names_what_reads_the_gradient() -> None:
    (plan,) = plan_heads(captured(entropy, LABELS).gm.graph)
    assert sorted(reader.kind for reader in plan.readers) == ["bias", "tokens", "weight"]
    assert plan.tokens == TOKENS
    assert plan_heads(captured(entropy, LABELS).gm.graph, least=TOKENS * CLASSES + 1) == []


def test_wrong_options_are_refused() -> None:
    with pytest.raises(OptionError, match="2 or more"):
        chunk_head(chunks=1)


@pytest.mark.long
def test_a_compiled_backward_begins_behind_the_chunks_and_trains_as_eager() -> None:
    torch.manual_seed(0)
    models = [Head(bias=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 7, WIDTH)
    compiled = ws.compile(train_step(entropy), lower="inductor", passes=[chunk_head(chunks=2), fuse_loss()])
    for model, step in zip(models, (train_step(entropy), compiled), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(2):
            step(model, optimizer, x, LABELS)
    for eager, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, eager)
    assert compiled.executable is not None
    regions = [module.compiled for module in compiled.executable.children() if isinstance(module, CompiledRegion)]
    cut = [region for region in regions if isinstance(region, ForwardBackward)]
    assert [region.computes_seed for region in cut] == [True]
