# seed 5129999618: a number that must be an input was the size of F.interpolate, which takes no symbol: a RuntimeError
import math
import types

import torch
from torch import nn
from torch.nn import functional as F


def batch(i, *sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1000 + i), dtype=torch.float32)


class Wrapper:
    def __init__(self, optimizer):
        self.__dict__["_inner"] = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["_inner"], name)

    def step(self):
        return self._inner.step()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 4)
        self.register_buffer("count2", torch.tensor(1))

    def forward(self, h):
        h = torch.tanh(self.first(h))
        h = self.last(h)
        return h


def build():
    model = Net()
    large = {"params": [p for p in model.parameters() if p.ndim > 1]}
    small = {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 0.03}
    optimizer = torch.optim.SGD([large, small], lr=0.1)
    optimizer = Wrapper(optimizer)
    K1 = 2
    settings3 = {"k": 0.25, "name": "text"}
    state4 = types.SimpleNamespace(step=0, epoch=0, log=None)
    calls5 = 0
    extra = nn.Parameter(torch.ones(4))

    def step(x):
        nonlocal K1, calls5
        state4.step += 1
        state4.epoch = state4.step // 3
        h = model(x)
        h = h * extra
        loss = F.cross_entropy(h, x.argmax(1))
        loss = loss + h.mean() * math.ceil(K1 / 2)
        loss = loss + (h * K1).mean()
        weights = [0.5] * (model.count2.item() + 1)
        loss = loss * sum(weights)
        loss = loss + F.interpolate(h[None], size=model.count2.item() + 2).mean()
        loss = loss + sum((h[:, j].sum() for j in range(1 + int(settings3["k"] * 2) % 4)), start=h.new_zeros(()))
        loss = loss * (1 + 0.1 * state4.epoch)
        calls5 += 1
        if calls5 % 3 == 0:
            return None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        K1 = min(K1 + 1, 3)
        return (loss, state4.step)

    def arguments(i):
        return (batch(i, 4, 3),)

    def keywords(i):
        return {}

    def between(i):
        nonlocal K1
        model.count2.fill_((model.count2.item() + 1) % 3)
        settings3["k"] = settings3["k"] + 0.125
        if i == 2:
            optimizer.param_groups[0]["params"].append(extra)

    return step, arguments, keywords, between


step, arguments, keywords, between = build()
