"""Networks: the layers people use, and forwards that write in place through views."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from cases.parts import model_run
from harness import Case, Run, batch_of, case, tokens_of


def convolution(where: torch.device) -> Run:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.GroupNorm(2, 8),
        nn.SiLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).to(where)
    return model_run(where, model, lambda i: (batch_of(where, i, 4, 3, 8, 8),))


def convolution_channels_last(where: torch.device) -> Run:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3)).to(where)
    model = model.to(memory_format=torch.channels_last)
    inputs = lambda i: (batch_of(where, i, 4, 3, 8, 8).contiguous(memory_format=torch.channels_last),)  # noqa: E731
    return model_run(where, model, inputs)


def transformer_encoder(where: torch.device, norm_first: bool) -> Run:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(where)
    return model_run(where, model, lambda i: (batch_of(where, i, 3, 5, 16),))


def transformer_with_mask(where: torch.device) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
            self.inner.encoder.enable_nested_tensor = False

        def forward(self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            # Left to itself, torch compares the mask with the causal one and branches on the result.
            return self.inner(source, target, tgt_mask=mask, tgt_is_causal=True)

    model = Model().to(where)
    mask = nn.Transformer.generate_square_subsequent_mask(4, device=where)
    return model_run(where, model, lambda i: (batch_of(where, i, 3, 5, 16), batch_of(where, 50 + i, 3, 4, 16), mask))


def recurrent(where: torch.device, kind: str) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            # On CUDA, cuDNN draws the dropout between layers from a state of its own: that is refused.
            dropout = 0.2 if where.type == "cpu" else 0.0
            options = {"num_layers": 2, "batch_first": True, "dropout": dropout, "bidirectional": True}
            self.body = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[kind](6, 8, **options)
            self.head = nn.Linear(16, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(tokens))[0][:, -1])

    model = Model().to(where)
    return model_run(where, model, lambda i: (tokens_of(where, i, 3, 5, vocabulary=11),))


def recurrent_cell(where: torch.device) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return state[0]

    model = Model().to(where)
    return model_run(where, model, lambda i: (batch_of(where, i, 3, 4, 6),))


def attention(where: torch.device) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1)
            plain, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
            padded, weights = self.attention(x, plain, plain, key_padding_mask=padding)
            return padded + weights.sum()

    def inputs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        padding = torch.arange(5, device=where) >= torch.tensor([[5], [3], [4]], device=where)
        return batch_of(where, i, 3, 5, 16), padding

    return model_run(where, Model().to(where), inputs)


def scaled_dot_product_attention(where: torch.device) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(3, 5, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
            return out.transpose(1, 2).reshape(3, 5, 16)

    return model_run(where, Model().to(where), lambda i: (batch_of(where, i, 3, 5, 16),))


def embedding(where: torch.device) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8, padding_idx=0, scale_grad_by_freq=where.type == "cpu")
            self.bag = nn.EmbeddingBag(11, 8, mode="mean")
            self.limited = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens) + self.bag(tokens).unsqueeze(1) + self.limited(tokens)
            return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten(), ignore_index=0, label_smoothing=0.1)

    model = Model().to(where)
    return model_run(where, model, lambda i: (tokens_of(where, i, 3, 5, vocabulary=11),), lambda loss: loss)


def embedding_with_a_largest_norm(where: torch.device) -> Run:
    model = nn.Sequential(nn.Embedding(11, 8, max_norm=1.0), nn.Linear(8, 2)).to(where)
    return model_run(where, model, lambda i: (tokens_of(where, i, 3, 5, vocabulary=11),))


def norms(where: torch.device) -> Run:
    model = nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)
    ).to(where)
    return model_run(where, model, lambda i: (batch_of(where, i, 3, 4, 8),))


class InPlace(nn.Module):
    """Writes through indexing, slices, masks and index_add_, with the result read through other views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        first = y[:, 0] * 2
        y[:, 0] = first
        y[:, 1:3] += self.scale[1:3]
        y[1::2].mul_(0.5)
        y.masked_fill_(y > 2, 0.1)
        rows = torch.tensor([0, 2, 0], device=x.device)
        total = torch.zeros_like(y)
        total.index_add_(0, rows, y[:3])
        total[rows[:2], 3] = y[:2, 4]
        total.t()[5].copy_(y[:, 5])
        left, right = total[:, :3], total.narrow(1, 3, 3)
        left.add_(right)
        out = torch.empty_like(total)
        out[:] = total.sin()
        out.view(-1)[::7] = 0.0
        out.diagonal().add_(1)
        out.scatter_add_(1, rows.view(3, 1), y[:3, :1])
        return out + y


class ReluInPlace(nn.Module):
    """In-place activations in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = F.relu(layer(x), inplace=True) * 0.5
            h += x
            x = F.leaky_relu_(h, 0.1)
        x = x + 1
        return x.clamp_(-3, 3)


class Assorted(nn.Module):
    """Operators that reach far into torch: gather, cumsum, topk, where, einsum, unfold, pad, interpolate."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.b = nn.Bilinear(6, 6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bi,ij->bj", x, self.a)
        y = self.b(y, x)
        top, where = y.topk(3, dim=-1)
        y = y.cumsum(-1) + torch.where(y > 0, y, y.exp() - 1)
        y = y + y.gather(1, where).sum(-1, keepdim=True) + top.amin(-1, keepdim=True)
        y = F.pad(y, (1, 1), value=0.5).unfold(1, 3, 1).amax(-1)
        y = F.interpolate(y[:, None], scale_factor=2, mode="nearest")[:, 0, ::2]
        return torch.logsumexp(torch.stack([y, y.flip(0), y.roll(1, 1)]), 0) + y.sort(dim=1).values


class Product(nn.Module):
    """The gradient of a product looks for zeros in its input: eager takes another path when there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).prod(-1) + self.inner(x).relu().prod(0).sum()


class DropsPaths(nn.Module):
    """Stochastic depth without a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            keep = x.new_empty(x.shape[0], 1).bernoulli_(0.7)
            x = x + keep.div_(0.7) * layer(x).tanh_()
        return x


def small_module(where: torch.device, kind: Callable[[], nn.Module]) -> Run:
    return model_run(where, kind().to(where), lambda i: (batch_of(where, i, 5, 6),))


def losses(where: torch.device) -> Run:
    model = nn.Linear(6, 4).to(where)

    def loss(out: torch.Tensor) -> torch.Tensor:
        target = torch.tensor([0, 1, 2, 3, 1], device=out.device)
        soft = out.detach().softmax(-1)
        return (
            F.cross_entropy(out, target, weight=torch.ones(4, device=out.device))
            + F.nll_loss(out.log_softmax(-1), target)
            + F.binary_cross_entropy(out.sigmoid(), soft)
            + F.smooth_l1_loss(out, soft)
            + F.huber_loss(out, soft)
            + F.cosine_embedding_loss(out, soft, torch.ones(5, device=out.device))
            + F.margin_ranking_loss(out[0], out[1], torch.ones(4, device=out.device))
            + F.poisson_nll_loss(out, soft)
        )

    return model_run(where, model, lambda i: (batch_of(where, i, 5, 6),), loss)


CASES: list[Case] = [
    case(convolution),
    case(convolution_channels_last),
    case(transformer_encoder, True),
    case(transformer_encoder, False),
    case(transformer_with_mask),
    *(case(recurrent, kind, steps=5) for kind in ("LSTM", "GRU", "RNN")),
    case(recurrent_cell),
    case(attention),
    case(scaled_dot_product_attention),
    case(embedding),
    case(embedding_with_a_largest_norm),
    case(norms),
    *(
        case(small_module, kind, name=f"network-{kind.__name__}")
        for kind in (InPlace, ReluInPlace, Assorted, DropsPaths)
    ),
    case(losses, steps=5),
]

OTHERS: list[Case] = [case(small_module, Product, name="network-Product")]
