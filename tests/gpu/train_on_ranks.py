"""One of several NCCL ranks that share a GPU: trains under a plan beside torch's wrapper and says whether bits agree.

Started by test_parallel_cuda.py, as a process of its own: CUDA does not survive a fork. NCCL refuses two ranks on one
device unless they seem to be on different hosts (NCCL_HOSTID).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

STEPS = 8


def net() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Linear(8, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 5)
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run(kind: str, rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
    model, reference = net().cuda(), net().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if "bf16" in kind else None
    if kind.startswith("replicate"):
        plan: Any = ws.Replicate(mesh)
        wrapped: nn.Module = DistributedDataParallel(reference)
    else:
        plan = ws.FullyShard(mesh, mp_policy=policy)
        wrapped = fully_shard(reference, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    options: Any = {"fused": True} if "fused" in kind else {"foreach": True}
    ours = torch.optim.AdamW(model.parameters(), 1e-2, **options)
    theirs = torch.optim.AdamW(wrapped.parameters(), 1e-2, **options)
    passes = "default" if "passes" in kind else None
    step = ws.compile(train_step, parallel=plan, passes=passes)
    worst = 0.0
    for i in range(STEPS):
        torch.manual_seed(100 * i + rank)
        x = torch.randn(4, 6, 8, device="cuda")
        worst = max(worst, (step(model, ours, x) - train_step(wrapped, theirs, x)).abs().item())
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    parameters = max((local(a) - local(b)).abs().max().item() for a, b in pairs if local(a).numel())
    return {"kind": kind, "loss": worst, "parameters": parameters, "graphs": len(step.graphs)}


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=world, device_id=torch.device("cuda:0"))
    results = [run(kind, rank, world) for kind in sys.argv[4:]]
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
