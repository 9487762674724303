"""Fully sharded training on several ranks, with a checkpoint that any number of ranks can load.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/gallery/fsdp.py

`ws.FullyShard(mesh)` shards parameters, gradients and optimizer state as `fully_shard` does. Gathers and reductions are
nodes of the graph, packed and moved by the pass `overlap_communication`. The checkpoint is torch's own (DCP).
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws

WIDTH, LAYERS, LETTERS, CONTEXT = 64, 3, 128, 32
TEXT = Path(__file__).parents[1] / "data" / "alice.txt"


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, rows: Tensor) -> Tensor:
        tokens, targets = rows[:, :-1], rows[:, 1:]
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT))
        later = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=later)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="rows of each rank")
    parser.add_argument("--lower", default="eager", help="inductor compiles first, which pays in longer runs")
    parser.add_argument("--report", type=Path, help="write the page of the step of rank 0 here")
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")  # for GPUs: "nccl", and a mesh for "cuda"
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    say = print if rank == 0 else lambda *_: None

    torch.manual_seed(0)  # the same model everywhere; FullyShard would send rank 0's in any case
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    whole = sum(p.numel() for p in model.parameters())
    text = torch.tensor(list(TEXT.read_bytes()))
    torch.manual_seed(1 + rank)  # other rows on each rank

    @ws.compile(parallel=ws.FullyShard(mesh), lower=args.lower)
    def train_step(rows: Tensor) -> Tensor:
        loss = model(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def batch() -> Tensor:
        starts = torch.randint(len(text) - CONTEXT - 1, (args.batch,))
        return torch.stack([text[start : start + CONTEXT + 1] for start in starts])

    for step in range(args.steps):
        loss = train_step(batch())
        if step == 0 or (step + 1) % max(args.steps // 4, 1) == 0:
            mean = loss.clone()
            dist.all_reduce(mean)
            say(f"step {step + 1:3}: loss {mean.item() / world:.3f}")

    held = sum(p.to_local().numel() for p in model.parameters())
    say(f"{whole:,} parameters, {held:,} of them on this rank")
    found = ws.inspect.show(train_step, op="_c10d_functional.*").rows
    kinds = Counter(row.operator.split(".")[1] for row in found if "wait" not in row.operator)
    say("collectives in the graph:", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))

    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)  # one folder for all ranks
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=shared[0])
        before = model.head.weight.to_local().clone()
        train_step(batch())
        dcp.load(state, checkpoint_id=shared[0])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        restored = torch.equal(before, model.head.weight.to_local())
        say(f"saved, trained on, loaded: {'as it was' if restored else 'not the same'}")
        dist.barrier()
    if args.report and rank == 0:
        say(train_step.report(args.report))
    dist.destroy_process_group()
    return 0 if restored else 1


if __name__ == "__main__":
    raise SystemExit(main())
