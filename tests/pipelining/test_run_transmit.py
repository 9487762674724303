"""A replicated or transmitted tied weight, checkpoint and autocast regions, a late input, a value returned twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from selection import each_now
from wholestep.pipelining import Pipe, SplitPoint, clip_grad_norm_, pipeline, schedule


class Tied(nn.Module):
    """Embedding and head are one weight; `extra` is used in two stages."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.autocast = autocast
        self.table = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight
        self.extra = nn.Parameter(torch.randn(6))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        h = early = self.table(ids)
        for number, layer in enumerate(self.layers):
            h = h + (checkpoint(layer, h, use_reentrant=False) if number % 2 else layer(h))
            if number == 1:
                early = h
            if number == 2:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    h = h + (h @ torch.diag(self.extra)).float()
        logits = self.head(h * self.extra + early) * mask.unsqueeze(-1)
        return {"logits": logits, "early": (early, early), "number": 3}


def loss_of(result: Any, target: torch.Tensor) -> torch.Tensor:
    early = result["early"]
    return nn.functional.cross_entropy(result["logits"], target) + early[0].mean() + early[1].square().mean()


def new_model(autocast: bool) -> Tied:
    torch.manual_seed(0)
    return Tied(autocast)


def cut(mode: str, autocast: bool) -> Pipe:
    places = dict.fromkeys(("layers.1", "layers.2", "head"), SplitPoint.BEGINNING)
    args = (torch.zeros(2, dtype=torch.long), torch.ones(2))
    return pipeline(new_model(autocast), args, split_spec=places, multi_use_params=mode)


def train(rank: int, cases: list[tuple[str, bool, Pipe]]) -> None:
    for kind, autocast, pipe in cases:
        model = new_model(autocast)
        mine = [rank, 3 - rank] if kind == "ZBVZeroBubble" else [rank, rank + 2]
        stages = [pipe.build_stage(index, "cpu") for index in mine]
        steps = schedule(kind, stages, 4, loss_of)
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], 0.1)
        eager = torch.optim.SGD(model.parameters(), 0.1)
        # In bfloat16 a gradient that starts from another number rounds otherwise, in eager too: even batches only.
        for step, rows in enumerate((8, 8, 8, 8, 8) if autocast else (8, 8, 7, 9, 8)):
            generator = torch.Generator().manual_seed(step)
            ids, target = torch.randint(0, 9, (2, rows), generator=generator)
            mask = torch.rand(rows, generator=generator)
            given = {"mask": mask} if 0 in mine else {}
            result = steps.step(*((ids,) if 0 in mine else ()), target=target if 3 in mine else None, **given)
            parts = zip(ids.tensor_split(4), mask.tensor_split(4), target.tensor_split(4), strict=True)
            expected = []
            for one, its_mask, wanted in parts:
                expected.append(model(one, its_mask))
                (loss_of(expected[-1], wanted) * (len(wanted) / rows)).backward()
            if 3 in mine:
                torch.testing.assert_close(result["logits"], torch.cat([each["logits"] for each in expected]))
                torch.testing.assert_close(result["early"][1], torch.cat([each["early"][1] for each in expected]))
                assert result["number"] == 3
            torch.testing.assert_close(clip_grad_norm_(stages, 0.7), nn.utils.clip_grad_norm_(model.parameters(), 0.7))
            theirs = dict(model.named_parameters(remove_duplicate=False))
            for name, parameter in [pair for stage in stages for pair in stage.submod.named_parameters()]:
                note = f"{kind}, step {step}, {name}"
                torch.testing.assert_close(
                    parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=note: f"{n}: {m}"
                )
            optimizer.step()
            eager.step()
            if step != 1:  # two steps for one of the updates
                optimizer.zero_grad()
                eager.zero_grad()


@pytest.mark.parametrize("mode", each_now(["replicate", "transmit"], "transmit"))
def test_parameters_shared_by_stages_train_like_eager(mode):
    cases = [("Interleaved1F1B", False), ("InterleavedZeroBubble", False), ("ZBVZeroBubble", True)]
    run_ranks(train, 2, [(kind, autocast, cut(mode, autocast)) for kind, autocast in cases])
