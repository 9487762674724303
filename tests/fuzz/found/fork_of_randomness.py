"""Seed 100023, on a machine with CUDA that was not used yet: fork_rng in the step."""

import torch


def step(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand(3)
    return (x + noise * torch.rand(3)).sum()


def arguments(i):
    return (torch.randn(4, 3),)


def keywords(i):
    return {}


def between(i):
    pass
