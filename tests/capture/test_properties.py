"""Random programs: whatever eager accepts, the graph computes to the same bits.

A program is a list of small integers, read by an interpreter that turns every list into something valid, so that a
failing one shrinks to the few lines that matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from harness import Frame, Run, assert_frames_equal, batch_of, device, play

WIDTH = 6
Instruction = tuple[int, int, int]
PROGRAMS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


def eager_frames(make: Callable[[], Run], steps: int) -> list[Frame]:
    """What eager does, where eager itself accepts the program (autograd forbids some in-place writes)."""
    torch.manual_seed(17)
    run = make()
    try:
        return play(run, run.step, steps)
    except RuntimeError:
        assume(False)
        raise


def assert_program_agrees(make: Callable[[], Run], steps: int = 3) -> None:
    expected = eager_frames(make, steps)
    torch.manual_seed(17)
    run = make()
    assert_frames_equal(expected, play(run, ws.compile(run.step), steps))


class Interpreted(nn.Module):
    """A module whose forward is a program over `x`, a stack of earlier values, shared layers and a buffer."""

    def __init__(self, program: list[Instruction]) -> None:
        super().__init__()
        self.program = tuple(program)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.RMSNorm(WIDTH)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier = [x]
        x = self.layers[0](x)
        for kind, a, b in self.program:
            x = LAYER_OPS[kind % len(LAYER_OPS)](self, x, earlier, a, b)
            earlier.append(x)
        return x


def slot(a: int) -> int:
    return a % WIDTH


def write_slice(m: Any, x: torch.Tensor, earlier: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
    x = x * 1.0
    x[:, : 1 + slot(a)] += m.scale[: 1 + slot(a)] * b
    return x


def write_column(m: Any, x: torch.Tensor, earlier: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
    x = x + 0.5
    x[:, slot(a)] = earlier[b % len(earlier)][:, slot(b)]
    return x


def write_buffer(m: Any, x: torch.Tensor, earlier: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
    m.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - m.seen


def write_through_views(m: Any, x: torch.Tensor, earlier: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
    x = x.clone()
    halves = x.view(x.shape[0], 2, WIDTH // 2)
    halves.transpose(1, 2)[:, a % 3].mul_(0.5)
    x.t()[slot(b)].sub_(1)
    return x + halves.sum(1).repeat(1, 2)


def use_again(m: Any, x: torch.Tensor, earlier: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
    earlier[a % len(earlier)] = x
    return m.layers[b % 2](x)


def in_place(name: str) -> Callable[..., torch.Tensor]:
    def apply(m: Any, x: torch.Tensor, earlier: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
        x = x if a < 5 else x + 1
        return getattr(x, name)()

    return apply


LAYER_OPS: list[Callable[..., torch.Tensor]] = [
    lambda m, x, earlier, a, b: m.layers[a % 2](x),
    use_again,
    lambda m, x, earlier, a, b: F.gelu(x),
    in_place("relu_"),
    in_place("tanh_"),
    in_place("sigmoid_"),
    lambda m, x, earlier, a, b: x + earlier[a % len(earlier)],
    lambda m, x, earlier, a, b: x * earlier[a % len(earlier)].sigmoid(),
    lambda m, x, earlier, a, b: F.dropout(x, 0.1 * a),
    lambda m, x, earlier, a, b: x + torch.randn_like(x) * 0.1,
    lambda m, x, earlier, a, b: m.norms[a % 3](x),
    write_slice,
    write_column,
    write_buffer,
    write_through_views,
    lambda m, x, earlier, a, b: torch.cat([x[:, slot(a) :], x[:, : slot(a)]], dim=1),
    lambda m, x, earlier, a, b: (x.unsqueeze(1) * x.unsqueeze(2)).diagonal(dim1=1, dim2=2),
    lambda m, x, earlier, a, b: x.masked_fill(x > 1, 0.5).clamp_(-2, 2),
    lambda m, x, earlier, a, b: x.softmax(-1) * m.scale,
    lambda m, x, earlier, a, b: torch.stack(x.chunk(3, dim=1)).sum(0).repeat(1, 3),
    lambda m, x, earlier, a, b: x.detach() + x.flip(0) if b % 2 else x.roll(a, 1),
    lambda m, x, earlier, a, b: x.index_add(0, torch.tensor([0, 1, 0], device=x.device), x[:3], alpha=0.5),
]

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
    lambda p: torch.optim.NAdam(p, lr=0.01),
]


@given(PROGRAMS, st.integers(0, len(OPTIMIZERS) - 1), st.sampled_from(["start", "end", "never"]), st.booleans())
@example([(11, 3, 2), (14, 1, 1), (1, 0, 0), (12, 2, 1), (8, 5, 0)], 3, "start", True)
@example([(13, 0, 0), (3, 9, 0), (6, 1, 0), (10, 1, 0)], 0, "end", False)
def test_a_random_module_trains_as_in_eager(
    program: list[Instruction], optimizer_index: int, zero: str, clip: bool
) -> None:
    def make() -> Run:
        model = Interpreted(program).to(device())
        optimizer = OPTIMIZERS[optimizer_index](model.parameters())

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            if zero == "start":
                optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if zero == "end":
                optimizer.zero_grad()
            return loss

        return Run(
            step,
            lambda i: (model, optimizer, batch_of(device(), i, 4, WIDTH)),
            {"model": model, "optimizer": optimizer},
        )

    assert_program_agrees(make)


class Reference:
    """A tensor of a program; what comes out of `expand` must not be written to."""

    def __init__(self, tensor: torch.Tensor, writable: bool = True) -> None:
        self.tensor = tensor
        self.writable = writable


def any_dim(t: torch.Tensor, a: int) -> int:
    return a % t.ndim


def sliced(t: torch.Tensor, a: int, b: int) -> torch.Tensor:
    dim = any_dim(t, a)
    size = t.shape[dim]
    start = b % size
    index = [slice(None)] * t.ndim
    index[dim] = slice(start, size, 1 + a % 2)
    return t[tuple(index)]


def reshaped(t: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """A view where the strides allow one, a copy where they do not: eager decides by the same rule."""
    return t.reshape(-1) if b % 2 else t.reshape(t.shape[0], -1)


def unfolded_dim(t: torch.Tensor, a: int, b: int) -> torch.Tensor:
    dim = any_dim(t, a)
    return t.unflatten(dim, (2, -1)) if t.shape[dim] % 2 == 0 and t.shape[dim] > 0 else t


VIEWS: list[Callable[[torch.Tensor, int, int], torch.Tensor]] = [
    sliced,
    lambda t, a, b: t.select(any_dim(t, a), b % t.shape[any_dim(t, a)]) if t.ndim > 1 else t[:],
    lambda t, a, b: t.transpose(any_dim(t, a), any_dim(t, b)),
    lambda t, a, b: t.flatten() if t.is_contiguous() else t.mT if t.ndim > 1 else t,
    reshaped,
    lambda t, a, b: t.unsqueeze(a % (t.ndim + 1)),
    lambda t, a, b: t.diagonal(b % 2) if t.ndim > 1 and t.shape[1] > 1 else t.view(t.shape),
    lambda t, a, b: t.split(2, any_dim(t, a))[0],
    lambda t, a, b: t.unbind(any_dim(t, a))[b % t.shape[any_dim(t, a)]] if t.ndim > 1 else t[:1],
    lambda t, a, b: t.chunk(2, any_dim(t, a))[-1],
    lambda t, a, b: t.squeeze(),
    lambda t, a, b: t.movedim(any_dim(t, a), any_dim(t, b)),
    lambda t, a, b: t.narrow(any_dim(t, a), 0, 1 + b % t.shape[any_dim(t, a)]),
    unfolded_dim,
    lambda t, a, b: t.detach(),
]


def write_rows(t: torch.Tensor, a: int, b: int) -> None:
    t[..., 0] = float(a)


def write_index(t: torch.Tensor, a: int, b: int) -> None:
    t[torch.tensor([b % t.shape[0]], device=t.device)] = float(a)


WRITES: list[Callable[[torch.Tensor, int, int], Any]] = [
    lambda t, a, b: t.add_(a + 1),
    lambda t, a, b: t.mul_(0.5),
    lambda t, a, b: t.zero_(),
    lambda t, a, b: t.neg_(),
    lambda t, a, b: t.fill_(b),
    lambda t, a, b: t.copy_(t.flip(0) + a),
    lambda t, a, b: t.add_(t.clone().cumsum(0), alpha=0.1),
    write_rows,
    write_index,
    lambda t, a, b: t.masked_fill_(t > a / 10, float(b)),
    lambda t, a, b: t.index_add_(0, torch.tensor([0], device=t.device), torch.ones_like(t[:1])),
    lambda t, a, b: t.sin_(),
    lambda t, a, b: t.clamp_(-b, b),
]

FRESH: list[Callable[[torch.Tensor, int, int], torch.Tensor]] = [
    lambda t, a, b: t * 2,
    lambda t, a, b: t.clone(),
    lambda t, a, b: t.contiguous(),
    lambda t, a, b: t.expand(2, *t.shape),
    lambda t, a, b: t.sum(0, keepdim=True),
]


def run_view_program(program: list[Instruction], base: torch.Tensor) -> list[torch.Tensor]:
    """Views of views, writes through any of them, reads of all: returns every tensor that the program made."""
    references = [Reference(base)]
    for kind, a, b in program:
        source = references[(kind // 20 + a) % len(references)]
        what = kind % 10
        if source.tensor.numel() == 0 or source.tensor.ndim == 0:
            continue
        if what < 5:
            view = VIEWS[(kind + a * 3 + b) % len(VIEWS)](source.tensor, a, b)
            references.append(Reference(view, source.writable))
        elif what < 9 and source.writable:
            write = WRITES[(kind + a + b * 3) % len(WRITES)]
            write(source.tensor, a, b)
        else:
            index = (a + b) % len(FRESH)
            fresh = FRESH[index](source.tensor, a, b)
            references.append(Reference(fresh, source.writable and index != 3))
    return [reference.tensor for reference in references]


VIEW_PROGRAMS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=10)


@given(VIEW_PROGRAMS, st.sampled_from(["batch", "buffer", "clone"]))
def test_writes_through_random_views_are_seen_through_every_other_view(
    program: list[Instruction], where_from: str
) -> None:
    def make() -> Run:
        kept = batch_of(device(), 77, 4, 6)

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            base = {"batch": x, "buffer": kept, "clone": x.clone()}[where_from]
            return [t.clone() for t in run_view_program(program, base)]

        return Run(step, lambda i: (batch_of(device(), i, 4, 6),), {"kept": kept})

    assert_program_agrees(make)


@given(VIEW_PROGRAMS)
def test_gradients_flow_through_writes_into_random_views(program: list[Instruction]) -> None:
    def make() -> Run:
        weight = nn.Parameter(batch_of(device(), 78, 4, 6))

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            weight.grad = None
            made = run_view_program(program, weight * x)
            sum(t.square().sum() for t in made).backward()
            return [t.detach().clone() for t in made]

        return Run(step, lambda i: (batch_of(device(), i, 4, 6),), {"weight": weight})

    assert_program_agrees(make)


@given(VIEW_PROGRAMS)
def test_views_that_a_step_returns_have_the_values_that_the_last_write_left(program: list[Instruction]) -> None:
    def make() -> Run:
        def step(x: torch.Tensor) -> list[torch.Tensor]:
            return run_view_program(program, x + 1)

        return Run(step, lambda i: (batch_of(device(), i, 4, 6),), {})

    assert_program_agrees(make)
