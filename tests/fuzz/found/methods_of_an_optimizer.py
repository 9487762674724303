"""Seed 10: a wrapper keeps only the bound methods of an optimizer; the step is a closure."""

import torch
from torch import nn


class Wrapper:
    def __init__(self, optimizer):
        self.step = optimizer.step
        self.zero_grad = optimizer.zero_grad
        self.param_groups = optimizer.param_groups


def build():
    model = nn.Linear(3, 4)
    optimizer = Wrapper(torch.optim.AdamW(model.parameters()))

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def between(i):
        optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)

    return step, between


step, between = build()


def arguments(i):
    return (torch.randn(4, 3),)


def keywords(i):
    return {}
