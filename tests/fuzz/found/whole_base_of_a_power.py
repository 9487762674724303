# seed 5123649560: autograd of `k ** x` compares k with 0.0, which torch cannot do with a symbolic int
"""Seed 5123649560.

form:method, optimizer:adam, home:buffer_item, whole:index negative, whole:number to the tensor, change:never,
home:deep_object, whole:modulo, change:once, taken:meter, trainer:trainer_state,
trainer:shared_gradient_state, between:checkpoint_model
"""

import contextlib
import copy
import types

import torch
from torch import nn
from torch.nn import functional as F


def batch(i, *sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1000 + i), dtype=torch.float32)


class Meter3:
    def __init__(self):
        self.value = self.average = self.sum = 0
        self.count = 0

    def update(self, value, n=1):
        self.value = value
        self.sum += value * n
        self.count += n
        self.average = self.sum / max(1, self.count)


class GradientState:
    _shared = {}  # noqa: RUF012

    def __init__(self):
        self.__dict__ = self._shared
        if not self._shared:
            self.sync, self.micro, self.every = True, 0, 2

    @contextlib.contextmanager
    def accumulate(self):
        self.micro += 1
        self.sync = self.micro % self.every == 0
        yield self
        self.last = self.sync


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 4)
        self.register_buffer("count1", torch.tensor(0))

    def forward(self, h):
        h = torch.tanh(self.first(h))
        h = self.last(h)
        return h


model = Net()
optimizer = torch.optim.Adam([{"params": [p], "lr": 0.02 * (n + 1)} for n, p in enumerate(model.parameters())], lr=0.01)
deep2 = types.SimpleNamespace(
    a=types.SimpleNamespace(
        b=types.SimpleNamespace(
            c=types.SimpleNamespace(
                d=types.SimpleNamespace(e=types.SimpleNamespace(f=types.SimpleNamespace(g=types.SimpleNamespace(k=0))))
            )
        )
    )
)
meter3 = Meter3()
state4 = types.SimpleNamespace(step=0, epoch=0, log=None)
gradients = GradientState()
saved = None


class Trainer:
    def __init__(self):
        self.model = model
        self.optimizer = optimizer

    def step(self, x):
        model = self.model
        optimizer = self.optimizer
        state4.step += 1
        state4.epoch = state4.step // 3
        h = model(x)
        loss = F.cross_entropy(h, x.argmax(1))
        loss = loss + h[:, -1 - model.count1.item()].mean()
        loss = loss + (model.count1.item() ** h.tanh().abs()).mean()
        loss = loss + h.mean() * (deep2.a.b.c.d.e.f.g.k % 3)
        with gradients.accumulate() as state:
            loss = loss * (2.0 if state.sync else 0.5)
        loss.backward()
        if GradientState().sync:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter3.update(h.detach().abs().max().item())
        if state4.step % 2 == 0:
            state4.log = (loss.detach(), state4.step)
        return (loss, meter3.sum, state4.step)


trainer = Trainer()
step = trainer.step


def arguments(i):
    return (batch(i, 4, 3),)


def keywords(i):
    return {}


def between(i):
    global saved
    if i == 3:
        deep2.a.b.c.d.e.f.g.k = abs(deep2.a.b.c.d.e.f.g.k - 1)
    if i == 1:
        saved = copy.deepcopy(model.state_dict())
    if i == 3:
        model.load_state_dict(saved)
