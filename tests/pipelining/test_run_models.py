"""Traced models on ranks: losses, outputs, gradients and parameters after five optimizer steps are those of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from pipelining.models import CASES, bert, gpt2, make, t5
from ranks import run_ranks
from wholestep.pipelining import Pipe, clip_grad_norm_, pipeline, schedule
from wholestep.torch_private.fx_graphs import pytree

MICROBATCHES = 4
STEPS = 5
NO_DROPOUT = {
    "gpt2": lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "bert": lambda: bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "t5": lambda: t5(dropout_rate=0.0),
}
WHOLE_INPUTS = {"in_place": (TensorChunkSpec(0), _Replicate())}


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, args, kwargs = make(name)
    if name in NO_DROPOUT:
        torch.manual_seed(0)
        model = NO_DROPOUT[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train(), args, kwargs


def cut(name: str) -> tuple[Pipe, nn.Module]:
    """The pipe, and another model with the same parameters for eager."""
    model, args, kwargs = build(name)
    pipe = pipeline(model, args, kwargs, split_spec=CASES[name].split)
    assert pipe.num_stages == CASES[name].stages
    return pipe, build(name)[0]


def loss_of(result: Any, target: None) -> torch.Tensor:
    """The model's own loss, or something of everything that it returns."""
    if "loss" in getattr(result, "keys", list)():
        return result["loss"]
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return sum((leaf.square().mean() for leaf in leaves), torch.zeros(()))


def batches(name: str, step: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The microbatches of a step."""
    _, args, kwargs = build(name)
    generator = torch.Generator().manual_seed(step)
    whole = WHOLE_INPUTS.get(name, ())

    def other(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator)
        return torch.randint(0, int(value.max()) + 1, value.shape, generator=generator)

    made = []
    for number in range(MICROBATCHES):
        given = [other(a) if not _is_whole(whole, i) or not number else made[0][0][i] for i, a in enumerate(args)]
        ones = {key: torch.ones_like(value) for key, value in kwargs.items() if key == "attention_mask"}
        made.append((tuple(given), {**{key: other(value) for key, value in kwargs.items()}, **ones}))
    return made


def _is_whole(whole: Any, place: int) -> bool:
    return place < len(whole) and isinstance(whole[place], _Replicate)


def joined(name: str, parts: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    whole = WHOLE_INPUTS.get(name, ())
    columns = zip(*(args for args, _ in parts), strict=True)
    args = tuple(column[0] if _is_whole(whole, i) else torch.cat(column) for i, column in enumerate(columns))
    return args, {key: torch.cat([kwargs[key] for _, kwargs in parts]) for key in parts[0][1]}


def train(rank: int, cases: list[tuple[str, str, Pipe, nn.Module]]) -> None:
    for name, kind, pipe, model in cases:
        mine = [rank] if kind in ("GPipe", "1F1B") else [rank, rank + 2] if kind[0] in "IL" else [rank, 3 - rank]
        stages = [pipe.build_stage(index, "cpu") for index in mine]
        first, last = 0 in mine, pipe.num_stages - 1 in mine
        spec = {"args_chunk_spec": WHOLE_INPUTS[name]} if name in WHOLE_INPUTS and first else {}
        steps = schedule(kind, stages, MICROBATCHES, loss_of, **spec)
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], 0.1, 0.9)
        eager = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for step in range(STEPS):
            parts = batches(name, step)
            args, kwargs = joined(name, parts)
            losses: list[torch.Tensor] = []
            result = steps.step(*(args if first else ()), losses=losses, **(kwargs if first else {}))
            results = [model(*args, **kwargs) for args, kwargs in parts]
            theirs = [loss_of(each, None) for each in results]
            (sum(theirs) / MICROBATCHES).backward()
            note = f"{name}, {kind}, step {step}"
            if last:
                torch.testing.assert_close(losses, theirs, msg=lambda m, n=note: f"{n}: {m}")
                compare_results(result, results)
            norm = clip_grad_norm_(stages, 1.0)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 1.0), rtol=1e-4, atol=1e-5)
            compare(stages, model, note, gradients=True)
            for each in (optimizer, eager):
                each.step()
                each.zero_grad()
        compare(stages, model, f"{name}, {kind}, trained", gradients=False)


def compare_results(ours: Any, theirs: list[Any]) -> None:
    """Ours are joined along the batch; a number became a row of one for each microbatch."""
    leaves = [pytree.tree_leaves(each) for each in theirs]
    for value, *parts in zip(pytree.tree_leaves(ours), *leaves, strict=True):
        if isinstance(value, torch.Tensor):
            expected = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
            torch.testing.assert_close(value, expected.detach())
        else:
            assert value == parts[0]


def compare(stages: list[Any], model: nn.Module, note: str, *, gradients: bool) -> None:
    theirs = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for stage in stages:
        state = dict(stage.submod.named_parameters()) if gradients else stage.submod.state_dict(keep_vars=True)
        for key, value in state.items():
            ours, other = (value.grad, theirs[key].grad) if gradients else (value.detach(), theirs[key].detach())
            where = f"{note}, stage {stage.stage_index}, {key}"
            torch.testing.assert_close(ours, other, rtol=2e-4, atol=2e-5, msg=lambda m, w=where: f"{w}: {m}")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (4, [("skip", "1F1B")]),
        (3, [("two_tower", "GPipe"), ("unet", "1F1B"), ("in_place", "1F1B"), ("moe", "1F1B")]),
        (2, [("skip", "DualPipeV"), ("skip", "InterleavedZeroBubble")]),
        pytest.param(3, [("gpt2", "1F1B"), ("llama", "GPipe")], marks=pytest.mark.long),
        pytest.param(2, [("bert", "1F1B"), ("t5", "ZBVZeroBubble")], marks=pytest.mark.long),
    ],
)
def test_models_train_like_eager(ranks, cases):
    run_ranks(train, ranks, [(name, kind, *cut(name)) for name, kind in cases], deadline=90)
