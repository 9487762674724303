"""Graphs for `overlap.py`: some made by hand, of any size, and whole steps that wholestep captures on fake groups.

made by hand     traced from a few lines on fake tensors; no parameter exists
    sharded_layers    square layers, forward and backward, parameters gathered and gradients scattered on one group
    experts           every layer sends tokens to experts and back, and has an expert that all tokens share
captured         GPT, Llama, Mixtral (its experts lie on the ranks of a group), under a plan, with AdamW
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from models import GPT, Shape
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws

SHAPE = Shape(layers=8, width=1024, heads=16, batch=4, length=2048, words=32768)
WITHIN_NODE = 8
comm = torch.ops._c10d_functional
wait = comm.wait_tensor.default


def start_world(ranks: int) -> None:
    """This process is rank 0 of a fake group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def sharded_layers(layers: int, rows: int, width: int, ranks: int) -> fx.GraphModule:
    """Forward, backward and the update of square layers that are fully sharded on one axis."""
    start_world(ranks)

    def weight(shard: Tensor) -> Tensor:
        return wait(comm.all_gather_into_tensor.default(shard, ranks, "0"))

    def step(x: Tensor, shards: list[Tensor]) -> list[Tensor]:
        saved, updated = [], []
        for shard in shards:
            saved.append(x)
            x = torch.relu(x @ weight(shard))
        gradient = torch.ones_like(x)
        for shard, before in zip(reversed(shards), reversed(saved), strict=True):
            behind = gradient @ weight(shard).t()
            reduced = wait(comm.reduce_scatter_tensor.default(before.t() @ gradient, "avg", ranks, "0"))
            updated.append(shard - 0.1 * reduced)
            gradient = torch.where(before > 0, behind, 0)
        return [x.sum(), *updated]

    return _traced(step, (rows, width), [(width // ranks, width)] * layers)


def experts(layers: int, rows: int, width: int, ranks: int) -> fx.GraphModule:
    """Forward and backward of a mixture of experts: all-to-all on one group, parameters gathered on another one."""
    start_world(ranks)
    other = dist.new_group(list(range(ranks))).group_name
    split = [rows // ranks] * ranks

    def weight(shard: Tensor) -> Tensor:
        return wait(comm.all_gather_into_tensor.default(shard, ranks, "0"))

    def exchanged(tokens: Tensor) -> Tensor:
        return wait(comm.all_to_all_single.default(tokens, split, split, other))

    def step(x: Tensor, shards: list[Tensor]) -> list[Tensor]:
        saved, updated = [], []
        for shard in shards:
            whole = weight(shard)
            there = exchanged(x)
            saved.append((x, there))
            x = exchanged(torch.relu(there @ whole)) + x @ whole.t()
        gradient = torch.ones_like(x)
        for shard, (before, there) in zip(reversed(shards), reversed(saved), strict=True):
            whole = weight(shard)
            behind = exchanged(gradient)
            own = there.t() @ behind + before.t() @ gradient
            reduced = wait(comm.reduce_scatter_tensor.default(own, "avg", ranks, "0"))
            updated.append(shard - 0.1 * reduced)
            gradient = exchanged(behind @ whole.t()) + gradient @ whole
        return [x.sum(), *updated]

    return _traced(step, (rows, width), [(width // ranks, width)] * layers)


def _traced(step: Callable[..., Any], rows: tuple[int, int], shards: list[tuple[int, int]]) -> fx.GraphModule:
    with FakeTensorMode():
        x = torch.empty(rows, dtype=torch.bfloat16)
        return make_fx(step)(x, [torch.empty(shape, dtype=torch.bfloat16) for shape in shards])


class LlamaBlock(nn.Module):
    """Attention with fewer keys than queries, and a gated product; RMS norms before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, heads // 4, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.groups * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 7 * width // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (each(h).view(batch, length, -1, self.head).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))

    def product(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.product(self.norm2(x))


class MixtralBlock(LlamaBlock):
    """The gated product of a token is that of an expert on some rank, and one that all tokens share."""

    def __init__(self, width: int, heads: int, group: Any) -> None:
        super().__init__(width, heads)
        self.group, self.ranks = group, group.size()
        self.router = nn.Linear(width, self.ranks, bias=False)
        self.expert = nn.Sequential(
            nn.Linear(width, 2 * width, bias=False), nn.SiLU(), nn.Linear(2 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        h = self.norm2(x)
        tokens = h.reshape(-1, h.shape[-1])
        gates = self.router(tokens).softmax(-1)
        places = gates.amax(-1).argsort()  # as many tokens to each expert
        there = self._exchanged(tokens[places])
        back = self._exchanged(self.expert(there))
        mixed = torch.zeros_like(tokens).index_copy(0, places, back * gates.amax(-1)[places, None])
        return x + mixed.view_as(x) + self.product(h)

    def _exchanged(self, tokens: Tensor) -> Tensor:
        split = [len(tokens) // self.ranks] * self.ranks
        return functional.all_to_all_single_autograd(tokens.contiguous(), split, split, self.group)


class Llama(nn.Module):
    """Words in, the loss out."""

    def __init__(self, shape: Shape, block: Callable[[int, int], nn.Module] = LlamaBlock) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.Sequential(*(block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.words(ids))))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def mixtral(shape: Shape) -> Llama:
    """Experts lie on the ranks of a node."""
    near = dist.new_group(list(range(WITHIN_NODE)))
    return Llama(shape, lambda width, heads: MixtralBlock(width, heads, near))


MODELS: dict[str, Callable[[Shape], nn.Module]] = {"gpt": GPT, "llama": Llama, "mixtral": mixtral}
PLANS = ("sharded", "hsdp", "sharded_tp", "replicated")
_COLUMNS, _ROWS = "qkv q k v gate up".split(), "out o down".split()


def plan_of(name: str, ranks: int) -> Any:
    """A plan of wholestep on all ranks."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if name == "sharded_tp":
        mesh = init_device_mesh("cpu", (ranks // 4, 4), mesh_dim_names=("dp", "tp"))
        styles: dict[str, Any] = {f"blocks.*.{each}": ColwiseParallel() for each in _COLUMNS if each != "qkv"}
        styles |= {f"blocks.*.{each}": RowwiseParallel() for each in _ROWS if each != "out"}
        return ws.FullyShard(mesh["dp"], tensor_parallel=(mesh["tp"], styles), mp_policy=mixed)
    if name == "hsdp":
        mesh = init_device_mesh("cpu", (ranks // 8, 8), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    return ws.Replicate(mesh) if name == "replicated" else ws.FullyShard(mesh, mp_policy=mixed)


def captured(model_name: str, plan_name: str, ranks: int) -> Any:
    """The graph of a whole step, without passes."""
    start_world(ranks)
    torch.manual_seed(0)
    model = MODELS[model_name](SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    ids = torch.zeros(SHAPE.batch, SHAPE.length, dtype=torch.long)
    return ws.compile(train_step, parallel=plan_of(plan_name, ranks), passes=None).capture(ids, ids)
