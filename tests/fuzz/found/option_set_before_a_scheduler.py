# seed 10910: what the step set in a param group before scheduler.step() was lost; what it set after was seen too early
import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.param_groups[0]["k"] = 0
optimizer.param_groups[0]["m"] = 0.5
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
count = 0
second = torch.optim.SGD(model.parameters(), lr=0.1)
by_count = torch.optim.lr_scheduler.LambdaLR(second, lambda n: 1 / (1 + count))


def step(x):
    global count
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    group = optimizer.param_groups[0]
    group["k"] = (group["k"] + 1) % 4
    group["m"] = 1.5 - group["m"]
    group["lr"] = group["lr"] * 0.75
    count += 10
    group["norm"] = group.get("norm", 0.0) + x.sum().item()
    scheduler.step()
    by_count.step()
    count += 1
    group["weight_decay"] = 0.01 * count
    group["momentum"] = 0.25


def arguments(i):
    return (torch.ones(2, 4) * i,)


def keywords(i):
    return {}


def between(i):
    optimizer.param_groups[0]["momentum"] = 0.0
