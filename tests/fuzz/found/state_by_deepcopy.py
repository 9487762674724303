"""Seed 12: state of an optimizer made by copy.deepcopy(p.data)."""

import copy

import torch
from torch import nn


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["buffer"] = copy.deepcopy(p.data)
                state["buffer"].mul_(0.9).add_(p.grad.data)
                p.data.add_(state["buffer"], alpha=-group["lr"])


model = nn.Linear(3, 4)
optimizer = Own(model.parameters())


def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(i):
    return (torch.randn(4, 3),)


def keywords(i):
    return {}


def between(i):
    pass
