"""Seed 100017: copy.deepcopy of a weight in the step."""

import copy

import torch
from torch import nn

model = nn.Linear(3, 4)


def step(x):
    loss = model(x).sum() + copy.deepcopy(model.weight.detach()).sum() * 0.1
    loss.backward()
    return loss


def arguments(i):
    return (torch.randn(4, 3),)


def keywords(i):
    return {}


def between(i):
    pass
