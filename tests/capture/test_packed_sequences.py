"""Packed sequences in a step: one graph for all lengths, with the bits of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import wholestep as ws
from harness import Run, assert_frames_equal, play
from wholestep.ir.io.arguments import TargetReader

LENGTHS = ([5, 3, 2], [1, 4, 4], [2, 2, 5], [3, 1, 3])


class Tagger(nn.Module):
    """An embedding, an RNN over packed sequences, a head over the padded result."""

    def __init__(self, kind: str = "GRU", total: int | None = None, **settings: Any) -> None:
        super().__init__()
        self.total = total
        self.first = nn.Linear(6, 6)
        self.rnn = getattr(nn, kind)(6, 8, batch_first=True, **settings)
        self.head = nn.Linear(16 if settings.get("bidirectional") else 8, 3)

    def forward(self, x: Tensor, lengths: Any) -> tuple[Tensor, Tensor, Tensor]:
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        out, last = self.rnn(packed)
        padded, sizes = pad_packed_sequence(out, batch_first=True, total_length=self.total)
        return self.head(padded), sizes, last[1] if isinstance(last, tuple) else last


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, lengths: Any, y: Tensor) -> Any:
    logits, sizes, last = model(x, lengths)
    loss = F.cross_entropy(logits.sum(1), y) + last.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, logits, sizes


def run_of(lengths: Any = torch.tensor, **settings: Any) -> Run:
    torch.manual_seed(0)
    model = Tagger(**settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def arguments(i: int) -> tuple[Any, ...]:
        made = torch.Generator().manual_seed(i)
        x, y = torch.randn(3, 5, 6, generator=made), torch.randint(0, 3, (3,), generator=made)
        return model, optimizer, x, lengths(LENGTHS[i % 4]), y

    return Run(train_step, arguments, {"model": model, "optimizer": optimizer})


def same_as_eager(calls: int = 4, **settings: Any) -> Any:
    run = run_of(**settings)
    expected = play(run, run.step, calls)
    run = run_of(**settings)
    compiled = ws.compile(run.step, lower="eager")
    assert_frames_equal(expected, play(run, compiled, calls))
    assert len(compiled.graphs) == 2
    return compiled


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "GRU"},
        {"kind": "LSTM", "num_layers": 2, "bidirectional": True, "dropout": 0.3},
        pytest.param({"kind": "LSTM", "total": 7}, marks=pytest.mark.long),
        pytest.param({"kind": "RNN", "total": 5}, marks=pytest.mark.long),
        pytest.param({"kind": "RNN", "nonlinearity": "relu", "bias": False}, marks=pytest.mark.long),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_an_rnn_over_packed_sequences_has_one_graph_for_all_lengths(settings: dict[str, Any]) -> None:
    same_as_eager(**settings)


def test_a_batch_with_lengths_that_cannot_be_raises_what_eager_raises() -> None:
    run = run_of()
    compiled = same_as_eager(calls=2)
    model, optimizer, x, _, y = run.arguments(0)
    with pytest.raises(RuntimeError, match="greater than 0"):
        compiled(model, optimizer, x, torch.tensor([3, 0, 1]), y)


def test_sequences_that_were_packed_before_the_step_are_taken() -> None:
    torch.manual_seed(0)
    rnn = nn.GRU(6, 4)

    def step(packed: PackedSequence) -> Tensor:
        _, last = rnn(packed)
        last.sum().backward()
        return last

    compiled = ws.compile(step, lower="eager")
    for sizes in ((4, 2), (4, 2), (3, 3)):
        packed = pack_sequence([torch.randn(size, 6) for size in sizes])
        rnn.zero_grad()
        expected = step(packed)
        gradient = rnn.weight_hh_l0.grad
        rnn.zero_grad()
        assert torch.equal(compiled(packed), expected)
        assert torch.equal(rnn.weight_hh_l0.grad, gradient)


def test_a_file_may_name_the_operators_of_packed_sequences() -> None:
    for name in ("pack", "packed_rnn_backward"):
        assert str(TargetReader().read(f"wholestep_packed::{name}")) == f"wholestep_packed.{name}.default"


def test_autocast_around_a_packed_sequence_is_refused() -> None:
    run = run_of()

    def step(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train_step(*args)

    with pytest.raises(ws.errors.UnsupportedError, match="autocast"):
        ws.compile(step, lower="eager")(*run.arguments(0))


@pytest.mark.long
def test_packed_sequences_run_between_compiled_regions() -> None:
    run, other = run_of(), run_of()
    compiled = ws.compile(train_step)
    for i in range(3):
        expected, actual = train_step(*run.arguments(i)), compiled(*other.arguments(i))
        torch.testing.assert_close(actual, expected)


@pytest.mark.long
def test_lengths_in_a_list_are_taken() -> None:
    same_as_eager(lengths=list)
