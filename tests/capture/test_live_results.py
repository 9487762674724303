"""Tensors that the user keeps behave as in eager: parameters, results, gradients."""

from __future__ import annotations

import torch
from torch import nn

import wholestep as ws
from capture.live import net_run, parts
from cases.parts import adamw, mlp, plain_run, train_step
from harness import Run, Story, assert_same_story, batch_of, device, freeze, play


def test_the_tensors_of_parameters_state_and_buffers_keep_their_identity() -> None:
    run = net_run(device())
    step = ws.compile(run.step)
    model, optimizer = run.watch["model"], run.watch["optimizer"]
    parameters = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    buffers = {name: (b, b.data_ptr()) for name, b in model.named_buffers()}
    play(run, step, 2)
    state = {p: dict(optimizer.state[p]) for p in model.parameters()}
    play(run, step, 3)
    for name, p in model.named_parameters():
        assert p is parameters[name][0]
        assert p.data_ptr() == parameters[name][1]
        assert all(optimizer.state[p][key] is value for key, value in state[p].items())
    for name, b in model.named_buffers():
        assert b is buffers[name][0]
        assert b.data_ptr() == buffers[name][1]


def test_a_result_is_not_overwritten_by_a_later_step() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[torch.Tensor]:
            loss = train_step(model, optimizer, x)
            return [loss, *(p.detach().clone() for p in model.parameters())]

        return plain_run(where, model, adamw(model), step)

    run = make(device())
    step = ws.compile(run.step)
    results = [step(*run.arguments(i)) for i in range(3)]
    kept = [freeze(result) for result in results]
    for i in range(3, 6):
        step(*run.arguments(i))
    assert [freeze(result) for result in results] == kept


def test_gradients_kept_by_the_user_behave_as_in_eager() -> None:
    """`zero_grad(set_to_none=True)` lets go of the gradient, so what the user kept stays; set to zero it does not."""

    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return plain_run(where, model, adamw(model), step)

    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(2)
        kept = [p.grad for p in model.parameters()]
        told.call(2)
        told.look(kept=kept)
        assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))

    assert_same_story(make, story)


def test_results_and_gradients_have_the_strides_of_eager() -> None:
    def strides(compiled: bool) -> list[tuple[int, ...]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)).to(device())
        model = model.to(memory_format=torch.channels_last)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            out = model(x)
            out.square().mean().backward()
            return out, out.transpose(1, 2), out.permute(0, 2, 3, 1).contiguous()

        run_step = ws.compile(step) if compiled else step
        results: tuple[torch.Tensor, ...] = ()
        for i in range(3):
            x = batch_of(device(), i, 2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
            results = run_step(x)
        return [t.stride() for t in results] + [p.grad.stride() for p in model.parameters() if p.grad is not None]

    assert strides(compiled=True) == strides(compiled=False)
