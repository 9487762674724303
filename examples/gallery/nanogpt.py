"""A character-level GPT in the manner of nanoGPT: warm-up and cosine decay, gradient accumulation, clipping,
evaluation, a checkpoint of the best model, and a sample at the end.

    python examples/gallery/nanogpt.py --steps 300 --report nanogpt.html

What is compiled is one function, `update`: all micro-batches, the clipping and AdamW are one graph. The learning rate
is written into the groups before each call; it is an input of the graph, so it captures nothing.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
CONTEXT, WIDTH, HEADS, LAYERS = 32, 96, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))

    def loss(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def sample(self, tokens: Tensor, length: int) -> Tensor:
        for _ in range(length):
            following = F.softmax(self(tokens[:, -CONTEXT:])[:, -1] / 0.8, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(following, 1)], dim=1)
        return tokens


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over a tenth of the steps, then half a cosine down to a tenth."""
    warm_up = max(steps // 10, 1)
    if step < warm_up:
        return 3e-3 * (step + 1) / warm_up
    part = (step - warm_up) / max(steps - warm_up, 1)
    return 3e-4 + 0.5 * (3e-3 - 3e-4) * (1 + math.cos(math.pi * part))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of one update")
    parser.add_argument("--lower", default="eager", help="inductor compiles first, which pays in longer runs")
    parser.add_argument("--report", type=Path, help="write the page of the step here")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    text = TEXT.read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    parts = {"train": data[: int(0.9 * len(data))], "held out": data[int(0.9 * len(data)) :]}

    def rows(part: str) -> Tensor:
        starts = torch.randint(len(parts[part]) - CONTEXT - 1, (args.batch,))
        return torch.stack([parts[part][start : start + CONTEXT + 1] for start in starts])

    model = GPT(len(letters))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])

    @ws.compile(lower=args.lower)
    def update(micro_batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for rows in micro_batches:
            loss = model.loss(rows) / len(micro_batches)
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        loss = torch.stack([model.loss(rows("held out")) for _ in range(10)]).mean().item()
        model.train()
        return loss

    best, checkpoint = evaluate(), Path(tempfile.mkdtemp()) / "best.pt"
    print(f"before: held out {best:.3f}")
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        loss = update([rows("train") for _ in range(args.accumulate)])
        if (step + 1) % max(args.steps // 6, 1) == 0:
            held_out = evaluate()
            print(f"step {step + 1:4}: train {loss.item():.3f}, held out {held_out:.3f}")
            if held_out < best:  # model and optimizer are plain objects: saved and loaded as always
                best = held_out
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    if checkpoint.exists():
        model.load_state_dict(torch.load(checkpoint)["model"])
    print(f"after: held out {best:.3f}; {len(update.graphs)} graphs, {update.last.num_nodes} nodes, {args.steps} steps")
    start = torch.tensor([[letters.index(letter) for letter in "Alice "]])
    print("".join(letters[i] for i in model.sample(start, 120)[0]))
    if args.report:
        print(update.report(args.report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
