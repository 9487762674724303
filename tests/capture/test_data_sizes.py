"""Sizes that the data of a batch decides: one graph for all counts, 0 and 1 among them, with the bits of eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws
from harness import Case, Run, assert_parity, device
from ranks import run_ranks

COUNTS = (5, 3, 12, 1, 7, 0)
"""How many of the 12 rows of each batch are labelled. No gradient of a parameter is NaN before the last."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.table, self.scale = nn.Embedding(7, 6), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.norm(self.inner(x))))  # type: ignore[no-any-return]


Loss = Callable[[Net, Tensor, Tensor], Any]


def labelled(i: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(i)
    count = COUNTS[i % len(COUNTS)]
    labels = torch.full((12,), -100)
    labels[torch.randperm(12, generator=made)[:count]] = torch.randint(0, 5, (count,), generator=made)
    return torch.randn(12, 6, generator=made), labels


def sized_case(loss_of: Loss, **options: Any) -> Case:
    def make(where: torch.device) -> Run:
        model = Net().to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

        def step(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Any:
            result = loss_of(model, x, labels)
            (result[0] if isinstance(result, tuple) else result).backward()
            optimizer.step()
            optimizer.zero_grad()
            return result

        return Run(step, lambda i: (model, optimizer, *labelled(i)), {"model": model, "optimizer": optimizer})

    return Case(loss_of.__name__, make, len(COUNTS), graphs=2, options={"lower": "eager", **options})


def boolean_index(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    keep = labels != -100
    return F.cross_entropy(m(x)[keep], labels[keep])


def rows_by_nonzero(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    rows = (labels != -100).nonzero().squeeze(1)
    (again,) = torch.nonzero(labels != -100, as_tuple=True)
    return m(x[rows]).square().sum() + m(x.index_select(0, again)).logsumexp(-1).sum()


def masked_select(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    keep = labels != -100
    return m(x).masked_select(keep[:, None]).square().sum() + m(x)[torch.argwhere(keep)[:, 0]].sum()


def divided_by_the_count(m: Net, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    y = m(x[labels != -100])
    loss = y.square().sum() / (y.shape[0] + 1) + y.sum() / torch.sym_max(y.size(0), 1)
    return loss + y.sum() / max(len(y), 1) + torch.ones(len(y)).sum(), y.detach(), y.shape[0]


def reshaped(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    y = m(x[labels != -100])
    return y.reshape(-1).square().sum() + y.view(y.shape[0], 5, 1).sum() + y.t().reshape(-1).sum()


def concatenated_and_padded(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    keep = labels != -100
    y = torch.cat([m(x[keep]), m(x[~keep])])
    return y.square().mean() + F.pad(m(x)[keep], (0, 0, 0, 12 - keep.nonzero().shape[0])).sum()


def experts(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    weights, chosen = m.inner(x)[:, :3].softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for expert in range(3):
        token, place = torch.where(chosen == expert)
        out.index_add_(0, token, x[token] * m.scale[expert] * weights[token, place, None])
    return m(out).square().mean()


def experts_by_masks(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    chosen, out = m.inner(x)[:, :3].argmax(-1), torch.zeros(12, 8)
    for expert in range(3):
        out[chosen == expert] += m.inner(x[chosen == expert]) * (expert + 1)
    return m.outer(out).square().mean()  # type: ignore[no-any-return]


def unique_rows(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    ids, inverse, counts = torch.unique(labels.clamp(min=0), return_inverse=True, return_counts=True)
    runs = torch.unique_consecutive(labels.clamp(min=0).sort().values)
    return m(m.table(ids))[inverse].square().mean() + (m(m.table(runs)).sum() * counts).sum() / counts.sum()


def counted(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    counts = torch.bincount(labels.clamp(min=0))
    some = torch.bincount(labels.clamp(min=0), minlength=5)[:5]
    return (m(x).mean() * counts).sum() + (m(x).mean(0) * some).sum()


def packed_sequences(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    repeats = (labels != -100).long() + 1
    segment = torch.repeat_interleave(torch.arange(12), repeats)
    position = torch.arange(segment.shape[0]) - (repeats.cumsum(0) - repeats)[segment]
    return torch.zeros(12, 5).index_add(0, segment, m(x[segment]) + position[:, None]).square().mean()


def random_numbers(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    y = m(x[labels != -100])
    return (y * torch.rand_like(y)).sum() + F.dropout(y, 0.5).sum() + torch.randn(y.shape[0]).sum() * y.sum()


def statistics(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    y = m(x[labels != -100])
    return ((y - y.mean(0)) / (y.var(0, correction=0) + 1)).square().sum() + y.cumsum(0).sum() + y.flatten().norm()


def losses(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    y = m(x)[labels != -100]
    near = F.binary_cross_entropy_with_logits(y, torch.ones_like(y)) + F.smooth_l1_loss(y, y.detach() * 2)
    return near + F.kl_div(y.log_softmax(-1), y.detach().softmax(-1), reduction="batchmean")


def pairs(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    one, other = m(x)[labels != -100], m(x)[labels == -100]
    return (one[:, None] - other[None]).square().sum() + torch.cdist(one, other).sum() + (one @ one.t()).sum()


def written_in_place(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    y = m(x)[labels != -100]
    z = y.detach().clone()
    z.mul_(2)
    z[:, 0] = 1
    sums = torch.zeros(5, 5).index_put((labels[labels != -100],), y, accumulate=True)
    return (z * y).sum() + sums.sum()


def sizes_taken_out_of_tensors(m: Net, x: Tensor, labels: Tensor) -> Tensor:
    count = (labels != -100).sum()
    y, n = m(x), int(count)
    first, rest = y.split([n, 12 - n])
    repeats = (labels != -100).long() + 1
    segment = torch.repeat_interleave(torch.arange(12), repeats, output_size=int(repeats.sum()))
    return first.square().sum() + rest.sum() + y[:count].sum() * torch.ones(n, 2).sum() + m(x[segment]).mean()


CASES = (
    sizes_taken_out_of_tensors,
    boolean_index,
    rows_by_nonzero,
    masked_select,
    divided_by_the_count,
    reshaped,
    concatenated_and_padded,
    experts,
    experts_by_masks,
    unique_rows,
    counted,
    packed_sequences,
    random_numbers,
    statistics,
    losses,
    pairs,
    written_in_place,
)


@pytest.mark.parametrize("loss_of", CASES, ids=lambda each: each.__name__)
def test_one_graph_has_the_bits_of_eager_for_every_count(loss_of: Loss) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager and graph warn of statistics of no rows
        assert_parity(sized_case(loss_of), device())


@pytest.mark.parametrize("loss_of", [boolean_index, experts, packed_sequences], ids=lambda each: each.__name__)
def test_all_levels_of_verification_accept_such_a_graph(loss_of: Loss) -> None:
    for level in (2, 3):
        assert_parity(sized_case(loss_of, verify=level), device())


def counts_differ(rank: int, sharded: bool) -> tuple[list[Tensor], int]:
    plan: Any = (ws.FullyShard if sharded else ws.Replicate)(init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    run = sized_case(boolean_index).make(device())
    step = ws.compile(run.step, lower="eager", parallel=plan)
    for i in range(4):
        step(*run.arguments(0)[:2], *labelled(i + 2 * rank))
    return [torch.as_tensor(p.sum()) for p in run.watch["model"].parameters() if not sharded], len(step.graphs)


@pytest.mark.parametrize("sharded", [False, True], ids=["Replicate", "FullyShard"])
def test_ranks_may_have_other_counts(sharded: bool) -> None:
    one, other = run_ranks(counts_differ, 2, sharded, deadline=90)
    assert one[1] == other[1] == 2
    assert all(map(torch.equal, one[0], other[0]))


def refused(loss_of: Loss) -> ws.errors.WholestepError:
    run = sized_case(loss_of).make(device())
    with pytest.raises(ws.errors.CaptureError) as caught:
        ws.compile(run.step, lower="eager")(*run.arguments(0))
    return caught.value


def test_a_branch_on_such_a_size_is_refused_with_its_line() -> None:
    def branches(m: Net, x: Tensor, labels: Tensor) -> Tensor:
        rows = (m(x)[:, 0] > 0).nonzero()
        if rows.shape[0] == 0:  # <- here
            return m(x).sum()
        return m(x[rows[:, 0]]).sum()

    error = refused(branches)
    assert error.code == "WS-CONTROL-FLOW"
    assert error.location is not None
    assert "<- here" in error.location.text


def test_a_branch_on_a_size_that_follows_from_the_batch_is_a_guard() -> None:
    def branches(m: Net, x: Tensor, labels: Tensor) -> Tensor:
        rows = (labels != -100).nonzero()[:, 0]
        return m(x).sum() if rows.shape[0] == 0 else m(x[rows]).sum()

    assert_parity(replace(sized_case(branches), graphs=3), device())


def test_the_text_of_such_a_size_is_refused() -> None:
    for text in (lambda n: f"{n} rows", str):

        def told(m: Net, x: Tensor, labels: Tensor, text: Callable[[Any], str] = text) -> tuple[Tensor, str]:
            y = m(x[labels != -100])
            return y.sum(), text(y.shape[0])

        assert refused(told).code == "WS-ITEM"


def test_a_loop_over_such_a_size_is_refused_with_its_line() -> None:
    def loops(m: Net, x: Tensor, labels: Tensor) -> Tensor:
        rows = (labels != -100).nonzero()
        return sum((m(x[i]).sum() for i in range(rows.shape[0])), m(x).sum())  # <- here

    error = refused(loops)
    assert error.code in ("WS-DATA-SHAPE", "WS-CONTROL-FLOW")
    assert error.location is not None
    assert "<- here" in error.location.text


def test_what_the_step_says_of_a_size_is_checked_before_anything_is_written() -> None:
    def bounded(m: Net, x: Tensor, labels: Tensor) -> Tensor:
        y = m(x[labels != -100])
        torch._check(y.shape[0] > 2)
        return y.sum() if y.shape[0] > 1 else m(x).sum()

    run = sized_case(bounded).make(device())
    step = ws.compile(run.step, lower="eager")
    for i in (0, 1, 2):
        step(*run.arguments(i))
    before = [p.detach().clone() for p in run.watch["model"].parameters()]
    with pytest.raises(ws.errors.DataShapeError, match="u0"):
        step(*run.arguments(3))
    assert all(map(torch.equal, before, run.watch["model"].parameters()))


def test_attention_over_no_rows_is_refused_at_run_time() -> None:
    """Eager takes another kernel there: the one that the graph has divides by the number of rows, and crashes."""

    def attends(m: Net, x: Tensor, labels: Tensor) -> Tensor:
        y = m(x[labels != -100])[None, None]
        return F.scaled_dot_product_attention(y, y, y).sum()

    run = sized_case(attends).make(device())
    step = ws.compile(run.step, lower="eager")
    step(*run.arguments(0))
    with pytest.raises(ws.errors.DataShapeError, match="Ne\\(u0, 0\\)"):
        step(*run.arguments(5))
