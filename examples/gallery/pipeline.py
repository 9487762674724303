"""A transformer on a pipeline of ranks: cut by cost, its schedule chosen by simulation, trained by it.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/gallery/pipeline.py

The model is ordinary: `pipeline` captures it, cuts it into stages of equal cost and routes every value between them,
the tied weight too. Before anything runs, `pipe.check` proves that the schedule cannot deadlock.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.pipelining import clip_grad_norm_, pipeline, schedule

WIDTH, LAYERS, LETTERS, CONTEXT = 64, 4, 128, 32
TEXT = Path(__file__).parents[1] / "data" / "alice.txt"


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT))
        later = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=later)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1F1B", help="GPipe, 1F1B")
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world - 1
    say = print if last else lambda *_: None

    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes()))
    example = torch.zeros(args.batch // args.microbatches, CONTEXT, dtype=torch.long)
    pipe = pipeline(GPT(), (example,), stages=world)
    predicted = pipe.check(args.schedule, microbatches=args.microbatches)
    say(str(predicted))

    stage = pipe.build_stage(rank, "cpu")
    run = schedule(args.schedule, stage, args.microbatches, loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=2e-3)
    say(f"the last of {world} stages has {sum(p.numel() for p in stage.submod.parameters()):,} parameters")

    for step in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (args.batch,))  # the same on every rank: the seed is
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        losses: list[Tensor] = []
        run.step(*([rows[:, :-1]] if first else []), target=rows[:, 1:] if last else None, losses=losses)
        clip_grad_norm_(stage, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % max(args.steps // 4, 1) == 0:
            say(f"step {step + 1:3}: loss {torch.stack(losses).mean().item():.3f}" if last else "")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
