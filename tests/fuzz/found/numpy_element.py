"""Seed 8: an element of a NumPy array is read as a number and changed between calls."""

import numpy as np
import torch

array = np.array([2, 0])


def step(x):
    return x[:, int(array[0])].mean()


def arguments(i):
    return (torch.randn(4, 3),)


def keywords(i):
    return {}


def between(i):
    array[0] = i % 3
