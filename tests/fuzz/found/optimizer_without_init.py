"""Seed 29: a wrapper that is an Optimizer, shares the inner one's groups and does not call super().__init__."""

import collections

import torch
from torch import nn


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.base = optimizer
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = collections.defaultdict(dict)

    def step(self, closure=None):
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


model = nn.Linear(3, 4)
optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


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
