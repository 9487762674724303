# a wrapper that shares its param groups with the optimizer inside of it, and the scheduler has the wrapper
import torch
from torch import nn


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def step(self, closure=None):
        return self.optimizer.step()

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


model = nn.Linear(4, 4)
optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
optimizer.param_groups[0]["k"] = 0
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def step(x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    group = optimizer.param_groups[0]
    group["k"] = (group["k"] + 1) % 4
    scheduler.step()
    group["weight_decay"] = 0.01 * group["k"]


def arguments(i):
    return (torch.ones(2, 4) * i,)


def keywords(i):
    return {}


def between(i):
    pass
