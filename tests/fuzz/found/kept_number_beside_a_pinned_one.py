# seed 910661: a number that must be an input was found while another one was pinned: an internal exception came out
import torch
from torch import nn

model = nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.param_groups[0]["k"] = 0.5
last = 0.0


def step(x):
    global last
    h = model(x)
    loss = h.square().mean() + ((optimizer.param_groups[0]["k"] + 1) ** h.tanh()).mean()
    loss = loss * (1 + min(last, 1.5))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    last = float(loss)
    return loss.detach()


def arguments(i):
    return (torch.ones(2, 3) * i,)


def keywords(i):
    return {}


def between(i):
    optimizer.param_groups[0]["k"] = 0.25 + 0.125 * i
