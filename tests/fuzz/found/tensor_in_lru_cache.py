"""Seed 5: a tensor in functools.lru_cache, in a step that is captured and in one that is refused."""

import functools

import torch


@functools.lru_cache
def weights(n):
    return torch.linspace(0.5, 1.5, n)


def step(x, k):
    h = x * weights(x.shape[1])
    return h.sum() if k < 4 else h.sum().item()


def arguments(i):
    return (torch.randn(4, 3), i)


def keywords(i):
    return {}


def between(i):
    pass
