"""A random program: parts add lines to sections of one training step, and `render` makes a Python module of them.

The module that comes out defines

    step(...)          the training step, which is run in eager and under ws.compile
    arguments(i)       its arguments for call i
    between(i)         what the user does after call i

and everything else it reaches is state that is compared. Programs are source, so that errors have lines and a failing
program can be shrunk, read and stored.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass, field

HEADER = """\
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import io
import itertools
import math
import operator
import os
import random
import threading
import time
import types
import typing
import uuid

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""

SECTIONS = ("start", "forward", "loss", "backward", "gradients", "update", "end")
FORMS = ("globals", "arguments", "closure", "method", "callable", "partial", "decorated")


@dataclass
class Builder:
    """A program while it is written. `rng` is the only source of choices, so a seed is a program."""

    rng: random.Random
    form: str = "globals"
    top: list[str] = field(default_factory=list)
    net_init: list[str] = field(default_factory=list)
    net_forward: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    parameters: list[tuple[str, str]] = field(default_factory=list)
    keywords: list[tuple[str, str]] = field(default_factory=list)
    sections: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in SECTIONS})
    returns: list[tuple[str, str]] = field(default_factory=list)
    between: list[str] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    assigned_in_step: set[str] = field(default_factory=set)
    assigned_between: set[str] = field(default_factory=set)
    batch: str = "4"
    loss: str = "loss = h.square().mean()"
    optimizers: list[str] = field(default_factory=list)
    names: int = 0

    def name(self, stem: str) -> str:
        """A new variable."""
        self.names += 1
        return f"{stem}{self.names}"

    def add_top(self, block: str) -> None:
        """A class or function of the module."""
        block = textwrap.dedent(block).strip("\n")
        if block not in self.top:
            self.top.append(block)

    def step(self, section: str, *lines: str) -> None:
        """Lines of the step."""
        self.sections[section] += "\n".join(lines).split("\n")

    def after(self, *lines: str) -> None:
        """Lines that run between calls; `i` is the index of the call that has just returned."""
        self.between += "\n".join(lines).split("\n")

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability


def indent(lines: list[str], levels: int = 1) -> list[str]:
    """Lines one or more levels deeper."""
    return ["    " * levels + line if line else line for each in lines for line in each.split("\n")]


def render(built: Builder, title: str) -> str:
    """The source of the module."""
    net = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *indent(built.net_init, 2),
        "",
        "    def forward(self, h):",
        *indent(built.net_forward, 2),
        "        return h",
    ]
    body = [line for name in SECTIONS for line in built.sections[name]]
    body.append(_returned(built))
    between = [*_scope(built, built.assigned_between), *(built.between or ["pass"])]
    made = _step_definition(built, body)
    names = ["x", *(name for name, _ in built.parameters)]
    values = [f"batch(i, {built.batch}, 3)", *(value for _, value in built.parameters)]
    if built.form == "arguments":
        values = ["model", *built.optimizers, *values]
    assert len(names) == len(set(names))
    arguments = ["def arguments(i):", f"    return ({', '.join(values)},)"]
    keywords = ["def keywords(i):", f"    return dict({', '.join(f'{k}={v}' for k, v in built.keywords)})"]
    batch = [
        "def batch(i, *sizes):",
        "    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1000 + i), dtype=torch.float32)",
    ]
    rest = [*built.setup, "", *made, "", *arguments, "", *keywords, "", "def between(i):", *indent(between)]
    if built.form == "closure":
        rest = [
            "def build():",
            *indent(rest),
            "    return step, arguments, keywords, between",
            "",
            "step, arguments, keywords, between = build()",
        ]
    doc = [f'"""{title}', "", *textwrap.wrap(", ".join(built.features), 110), '"""', ""]
    blocks = ["\n".join(doc), HEADER, "\n".join(batch), *built.top, "\n".join(net), "\n".join(rest)]
    return "\n\n".join(blocks) + "\n"


def _scope(built: Builder, names: set[str]) -> list[str]:
    word = "nonlocal" if built.form == "closure" else "global"
    return [f"{word} {', '.join(sorted(names))}"] if names else []


def _returned(built: Builder) -> str:
    kind = built.rng.choice(("first", "first", "tuple", "dict", "list"))
    values = built.returns
    if not values:
        return "return None"
    if len(values) == 1 and kind != "dict":
        return f"return {values[0][1]}"
    if kind == "dict":
        return "return {" + ", ".join(f"{name!r}: {value}" for name, value in values) + "}"
    brackets = "[]" if kind == "list" else "()"
    return "return " + brackets[0] + ", ".join(value for _, value in values) + brackets[1]


def _step_definition(built: Builder, body: list[str]) -> list[str]:
    names = ["x", *(name for name, _ in built.parameters), *(name for name, _ in built.keywords)]
    scope = _scope(built, built.assigned_in_step)
    body = [*scope, *body]
    given = ["model", *built.optimizers]
    if built.form == "arguments":
        return [f"def step({', '.join([*given, *names])}):", *indent(body)]
    if built.form == "partial":
        return [
            f"def do_step({', '.join([*given, *names])}):",
            *indent(body),
            "",
            f"step = functools.partial(do_step, {', '.join(given)})",
        ]
    if built.form == "decorated":
        return [
            "def timed(function):",
            "    @functools.wraps(function)",
            "    def call(*args, **kwargs):",
            "        return function(*args, **kwargs)",
            "    return call",
            "",
            "@timed",
            f"def step({', '.join(names)}):",
            *indent(body),
        ]
    if built.form in ("method", "callable"):
        method = "step" if built.form == "method" else "__call__"
        return [
            "class Trainer:",
            "    def __init__(self):",
            *indent([f"self.{name} = {name}" for name in given], 2),
            *indent(built.attributes, 2),
            "",
            f"    def {method}({', '.join(['self', *names])}):",
            *indent(scope, 2),
            *indent([f"{name} = self.{name}" for name in given], 2),
            *indent(body[len(scope) :], 2),
            "",
            "trainer = Trainer()",
            "step = trainer.step" if built.form == "method" else "step = trainer",
        ]
    return [f"def step({', '.join(names)}):", *indent(body)]
