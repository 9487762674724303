"""One of several ranks that share a device: trains a pipeline under each schedule beside eager, and says how far off.

Started by test_pipelining_cuda.py with NCCL, as a process of its own: CUDA does not survive a fork.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholestep.pipelining import pipeline, schedule

SINGLE, FOLDED = ("GPipe", "1F1B"), ("ZBVZeroBubble", "DualPipeV")
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied words, a value of the first stage that the last one needs, and something made on the device."""

    def __init__(self, width: int = 32, words: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.words(ids) + torch.arange(ids.shape[1], device=ids.device).unsqueeze(-1) / 10
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


def loss_of(logits: Any, target: Tensor) -> Tensor:
    logits = logits[0] if isinstance(logits, tuple) else logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def places(name: str, rank: int, ranks: int) -> list[int]:
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in FOLDED else [rank, rank + ranks]


def run(kind: str, rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """Some steps beside one process that has the whole model: the largest differences over all ranks."""
    name, _, shared = kind.partition(" ")
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model).to(device)
    mine = places(name, rank, ranks)
    count = ranks * len(mine)
    pipe = pipeline(model, (torch.zeros(2, 6, dtype=torch.long),), stages=count, multi_use_params=shared or "replicate")
    stages = [pipe.build_stage(place, device) for place in mine]
    steps = schedule(name, stages, 4, loss_of)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], 0.1, momentum=0.9)
    eager = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    losses_off = 0.0
    for i in range(STEPS):
        torch.manual_seed(i)
        ids = torch.randint(0, 24, (8, 6)).to(device)
        losses: list[Tensor] = []
        last = count - 1 in mine
        steps.step(*((ids,) if 0 in mine else ()), target=ids.roll(1, 1) if last else None, losses=losses)
        expected = loss_of(reference(ids), ids.roll(1, 1))
        expected.backward()
        if last:
            losses_off = max(losses_off, (torch.stack(losses).mean() - expected).abs().item())
        optimizer.step()
        eager.step()
        optimizer.zero_grad()
        eager.zero_grad()
    theirs = reference.state_dict()
    found = {k: v for stage in stages for k, v in stage.submod.state_dict().items()}
    parameters = max((value - theirs[key]).abs().max().item() for key, value in found.items())
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (losses_off, parameters, sorted(found)))
    missing = set(theirs) - {key for each in everyone for key in each[2]}
    worst = [max(each[i] for each in everyone) for i in range(2)]
    return {"kind": kind, "loss": worst[0], "parameters": worst[1], "missing": sorted(missing)}


def main() -> None:
    backend, rank, ranks, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(0)
        options["device_id"] = device
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks, **options)
    results = [run(kind, rank, ranks, device) for kind in sys.argv[5:]]
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
