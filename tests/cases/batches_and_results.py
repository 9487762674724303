"""What a step is given and what it returns: containers, dataclasses, numbers, views, batches that are written."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cases.parts import adamw, mlp, plain_run, train_step
from harness import Case, Run, batch_of, case, tokens_of

Pair = namedtuple("Pair", ["loss", "extra"])


@dataclass
class Report:
    """A result registered as a pytree."""

    loss: torch.Tensor
    name: str
    extra: Any = None


@dataclass
class Batch:
    """A batch registered as a pytree."""

    x: torch.Tensor
    weight: float
    mask: torch.Tensor | None = None


torch.export.register_dataclass(Report)
torch.export.register_dataclass(Batch)


def returned(where: torch.device, what: str) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        mixed = {"loss": loss, "none": None, "text": "ok", "count": 3, "nested": [{"out": out}, (1.5, True)], "e": {}}
        results = {
            "nothing": None,
            "number": 3,
            "mixed": mixed,
            "named_tuple": Pair(loss, {"out": out}),
            "dataclass": Report(loss, "first", extra=[out, None]),
            "views": (out, out[0], out.t(), out.flatten()[3:5]),
            "twice": (loss, loss, out.detach()),
            "batch": {"x": x, "row": x[0]},
            "parameters": [p.detach() for p in model.parameters()],
            "parameter_itself": model[0].weight,
            "gradients": grads,
            "shapes": (out.shape, out.dtype, out.device.type),
            "empty": (),
        }
        return results[what]

    return plain_run(where, model, adamw(model), step)


RETURNED = (
    "nothing",
    "number",
    "mixed",
    "named_tuple",
    "dataclass",
    "views",
    "twice",
    "batch",
    "parameters",
    "parameter_itself",
    "gradients",
    "shapes",
    "empty",
)


def batch_shaped_as(where: torch.device, kind: str) -> Run:
    model = mlp(where)

    def leaves_of(batch: Any) -> tuple[torch.Tensor, float]:
        if isinstance(batch, Batch):
            return (batch.x if batch.mask is None else batch.x * batch.mask), batch.weight
        if kind == "nested":
            return batch["inputs"][0]["x"] + batch["inputs"][1], batch["meta"]["weight"]
        if kind == "dict":
            return batch["x"], batch["weight"]
        return batch[0], batch[1]

    def build(i: int) -> Any:
        x = batch_of(where, i, 5, 6)
        batches = {
            "dict": {"x": x, "weight": 0.5, "name": "train", "none": None},
            "tuple": (x, 0.5),
            "list": [x, 2],
            "named_tuple": Pair(x, 0.5),
            "nested": {"inputs": [{"x": x}, x * 2], "meta": {"weight": 0.5, "ids": [1, 2, 3]}},
            "dataclass": Batch(x, 0.5),
            "dataclass_with_mask": Batch(x, 0.5, mask=(x > 0).float()),
        }
        return batches[kind]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        x, weight = leaves_of(batch)
        loss = model(x).square().mean() * weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer = adamw(model)
    return Run(step, lambda i: (model, optimizer, build(i)), {"model": model, "optimizer": optimizer})


BATCHES = ("dict", "tuple", "list", "named_tuple", "nested", "dataclass", "dataclass_with_mask")


def python_numbers_in_the_batch(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = model(batch["x"])[: batch["rows"]].square().mean() * batch["weight"]
        if batch["flag"]:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(i: int) -> dict[str, Any]:
        odd = bool(i % 2)
        return {"x": batch_of(where, i, 5, 6), "rows": 3 if odd else 5, "weight": 0.5 if odd else 1.5, "flag": odd}

    return Run(step, lambda i: (batch(i),), {"model": model, "optimizer": optimizer})


def batch_written_by_the_step(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        x[:, 0] = 1.0
        return train_step(model, optimizer, x)

    return plain_run(where, model, adamw(model), step)


def batches_with_other_layouts(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)

    def batch(i: int) -> torch.Tensor:
        if i % 3 == 1:
            return batch_of(where, i, 6, 5).t()
        if i % 3 == 2:
            return batch_of(where, i, 1, 6).expand(5, 6)
        return batch_of(where, i, 5, 6)

    return Run(train_step, lambda i: (model, optimizer, batch(i)), {"model": model, "optimizer": optimizer})


def same_tensor_twice_in_the_batch(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = (model(batch["x"]) @ batch["y"][:4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(i: int) -> dict[str, torch.Tensor]:
        x = batch_of(where, i, 5, 6)
        return {"x": x, "y": x}

    return Run(step, lambda i: (batch(i),), {"model": model, "optimizer": optimizer})


def hugging_face_batch_encoding(where: torch.device) -> Run:
    from transformers import BatchEncoding

    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).to(where)
    optimizer = adamw(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(i: int) -> Any:
        ids = tokens_of(where, i, 2, 5, vocabulary=11)
        return BatchEncoding({"input_ids": ids, "labels": ids.roll(-1, 1)})

    return Run(step, lambda i: (model, optimizer, batch(i)), {"model": model, "optimizer": optimizer})


CASES: list[Case] = [
    *(case(returned, what, steps=4) for what in RETURNED),
    *(case(batch_shaped_as, kind, steps=4) for kind in BATCHES),
    case(python_numbers_in_the_batch, graphs=3),
    case(batch_written_by_the_step),
    case(batches_with_other_layouts, graphs=4),
    case(same_tensor_twice_in_the_batch),
    case(hugging_face_batch_encoding),
]
