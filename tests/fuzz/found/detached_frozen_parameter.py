# seed 800004: `p.detach()` of a frozen parameter was returned as the parameter itself
import torch
from torch import nn

model = nn.Linear(4, 4)
model.bias.requires_grad_(False)
optimizer = torch.optim.SGD([model.weight], lr=0.1)


def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, model.bias.detach(), model.bias, model.weight.detach(), model.weight, model.bias.data


def arguments(i):
    return (torch.ones(2, 4) * i,)


def keywords(i):
    return {}


def between(i):
    model.bias.requires_grad_(i % 2 == 0)
