"""What a step leaves for its next call is done before other code can see that it is not, and never twice."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import wholestep as ws
from cases.parts import train_step, zero_first
from ranks import run_ranks
from wholestep.errors import PendingError
from wholestep.passes.iter_move import overlap_optimizer_with_next_forward
from wholestep.torch_private.autograd import below_autograd
from wholestep.torch_private.modules_and_optimizers import GLOBAL_PRE_HOOKS


class Training:
    """A compiled step with something pending, beside eager on the mean of what all ranks get."""

    def __init__(self, fn: Callable[..., Any] = train_step, calls: int = 3) -> None:
        torch.manual_seed(0)
        self.fn = fn
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = SGD(self.model.parameters(), lr=0.5)
        self.parameters = list(self.model.parameters())
        """Asking the model for them completes what is pending."""
        self.eager = copy.deepcopy(self.model)
        self.eager_optimizer = SGD(self.eager.parameters(), lr=0.5)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        self.step = ws.compile(fn, parallel=ws.Replicate(mesh), passes=[overlap_optimizer_with_next_forward])
        self.call(calls)

    def call(self, calls: int = 1, **last: bool) -> None:
        """All ranks get the same batch: their mean gradient is anyone's."""
        for _ in range(calls):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))
            self.fn(self.eager, self.eager_optimizer, x)
            self.step(self.model, self.optimizer, x, **last)

    def is_stale(self) -> bool:
        return not all(map(torch.allclose, self.parameters, self.eager.parameters()))

    def check_complete(self) -> None:
        assert not self.step.has_pending
        assert not self.is_stale()


CHECKS: list[Callable[[int], None]] = []


def check(code: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS.append(code)
    return code


@check
def parameters_wait_for_the_next_call(rank: int) -> None:
    training = Training()
    assert training.step.has_pending
    assert training.is_stale()
    training.step.flush()
    training.check_complete()


@check
def a_state_dict_of_the_model_or_a_part_of_it_is_complete(rank: int) -> None:
    for module in (lambda m: m, lambda m: m[2], lambda m: nn.ModuleDict({"inside": m})):
        training = Training()
        module(training.model).state_dict()
        training.check_complete()


@check
def a_state_dict_of_the_optimizer_is_complete(rank: int) -> None:
    training = Training()
    training.optimizer.state_dict()
    training.check_complete()


@check
def what_a_distributed_checkpoint_saves_is_complete(rank: int) -> None:
    training = Training()
    saved = get_model_state_dict(training.model)
    training.check_complete()
    assert torch.equal(saved["0.weight"], training.model[0].weight)
    training.call()
    get_state_dict(training.model, training.optimizer)
    training.check_complete()


@check
def loading_replaces_the_completed_state(rank: int) -> None:
    training = Training()
    saved = copy.deepcopy(training.model.state_dict())
    training.call(2)
    training.model.load_state_dict(saved)
    assert not training.step.has_pending
    assert all(torch.equal(saved[name], value) for name, value in training.model.state_dict().items())


@check
def an_eager_forward_sees_the_update(rank: int) -> None:
    for module in (lambda m: m, lambda m: m[0], lambda m: nn.Sequential(m)):
        training = Training()
        training.model.eval()
        module(training.model)(torch.randn(2, 3))
        training.check_complete()


@check
def a_forward_of_another_model_lets_it_wait(rank: int) -> None:
    training = Training()
    nn.Linear(3, 3)(torch.randn(2, 3))
    assert training.step.has_pending


@check
def an_eager_step_of_the_optimizer_comes_after_the_update(rank: int) -> None:
    training = Training()
    training.optimizer.step()
    training.check_complete()


@check
def another_compiled_step_on_the_model_sees_the_update(rank: int) -> None:
    training = Training()
    evaluate = ws.compile(lambda model, x: model(x).sum())
    x = torch.randn(2, 3)
    torch.testing.assert_close(evaluate(training.model, x), training.eager(x).sum())
    training.check_complete()
    training.call()
    torch.testing.assert_close(evaluate(training.model, x), training.eager(x).sum())
    training.check_complete()
    assert len(evaluate.graphs) == 1


@check
def a_compiled_step_on_another_model_lets_it_wait(rank: int) -> None:
    training = Training()
    other, x = nn.Linear(3, 3), torch.randn(2, 3)
    evaluate = ws.compile(lambda model, x: model(x).sum())
    evaluate(other, x)  # captures, which nothing may disturb
    training.call(2)
    evaluate(other, x)
    assert training.step.has_pending
    training.call()
    assert len(training.step.graphs) == 1


@check
def a_capture_sees_the_update(rank: int) -> None:
    training = Training()
    ws.capture(lambda model, x: model(x).sum(), training.model, torch.randn(2, 3))
    training.check_complete()


@check
def another_graph_of_the_step_sees_the_update(rank: int) -> None:
    training = Training()
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    train_step(training.eager, training.eager_optimizer, x)
    training.step(training.model, training.optimizer, x)
    training.call(2)
    training.step.flush()
    training.check_complete()
    assert len(training.step.graphs) == 2


@check
def calls_neither_capture_again_nor_leave_hooks_behind(rank: int) -> None:
    training = Training(calls=6)
    training.model.state_dict()
    training.model(torch.randn(2, 3))
    training.call(3)
    assert len(training.step.graphs) == 1
    training.step.flush()
    assert not any("wholestep" in hooks for hooks in GLOBAL_PRE_HOOKS) or not training.step.has_pending
    assert all(not m._state_dict_pre_hooks for m in training.model.modules())
    training.call()
    assert len(training.step.graphs) == 1


@check
def a_copy_of_the_model_is_complete(rank: int) -> None:
    training = Training()
    made = copy.deepcopy(training.model)
    training.check_complete()
    assert all(map(torch.equal, made.parameters(), training.model.parameters()))
    made.state_dict()


@check
def a_pickled_model_is_complete(rank: int) -> None:
    training = Training()
    file = io.BytesIO()
    torch.save(training.model, file)
    made = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    training.check_complete()
    assert all(map(torch.equal, made.parameters(), training.model.parameters()))


@check
def the_end_of_a_with_block_completes(rank: int) -> None:
    training = Training()
    with training.step:
        training.call()
        assert training.step.has_pending
    training.check_complete()
    with contextlib.suppress(KeyError), training.step:
        training.call()
        raise KeyError
    training.check_complete()


@check
def a_step_that_is_forgotten_completes(rank: int) -> None:
    training = Training()
    del training.step
    gc.collect()
    assert not training.is_stale()


@check
def a_reset_completes(rank: int) -> None:
    training = Training()
    training.step.reset()
    training.check_complete()


@check
def the_last_train_step_leaves_nothing(rank: int) -> None:
    training = Training(calls=0)
    training.call(last_train_step=True)
    training.check_complete()
    training.call(2)
    training.call(last_train_step=True)
    training.check_complete()


@check
def an_update_is_not_lost_by_an_error_before_it(rank: int) -> None:
    training = Training()
    entry, pending = training.step._last, training.step._pending
    assert entry is not None
    assert entry.executor.graphs is not None
    assert pending is not None
    inputs = entry.gather.read([None, None, torch.randn(5, 3)])
    graphs, run = entry.executor.graphs, entry.executor.graphs._run_main

    def fails(*inputs: Any) -> Any:
        raise ArithmeticError

    graphs._run_main = fails
    with pytest.raises(ArithmeticError):
        graphs.run(inputs or [], pending)
    assert pending.remaining == list(range(len(graphs.pieces)))
    graphs._run_main = run
    training.step.flush()
    training.check_complete()


@check
def a_piece_that_ran_before_an_error_does_not_run_again(rank: int) -> None:
    training = Training()
    entry, pending = training.step._last, training.step._pending
    assert entry is not None
    assert entry.executor.graphs is not None
    assert pending is not None
    inputs = entry.gather.read([None, None, torch.randn(5, 3)])
    graphs = entry.executor.graphs

    def fails(*inputs: Any) -> Any:
        first = graphs.pieces[0]
        with below_autograd():
            first.run(*(pending.inputs[i] for i in first.state), *(pending.carried[i] for i in first.carried))
        graphs._done.append(0)
        raise ArithmeticError

    graphs._run_main = fails
    with pytest.raises(ArithmeticError):
        graphs.run(inputs or [], pending)
    training.step.flush()
    training.check_complete()


@check
def a_write_between_two_steps_raises_instead_of_mixing_with_the_update(rank: int) -> None:
    training = Training()
    with torch.no_grad():
        training.model[0].weight.mul_(2)
    with pytest.raises(PendingError, match=r"model\.0\.weight was written while its update"):
        training.step.flush()
    training.step.flush()  # said once
    assert not training.step.has_pending


@check
def a_write_after_a_flush_is_fine(rank: int) -> None:
    training = Training()
    training.step.flush()
    with torch.no_grad():
        training.model[0].weight.mul_(2)
        training.eager[0].weight.mul_(2)
    training.call(2)
    training.step.flush()
    training.check_complete()


@check
def a_gradient_that_somebody_looks_at_is_there(rank: int) -> None:
    training = Training(zero_first)
    assert training.step.has_pending
    grads = [p.grad for p in training.parameters]
    assert [g.shape for g in grads if g is not None] == [p.shape for p in training.parameters]
    assert training.step.has_pending, "shapes are known without waiting"
    for mine, theirs in zip(grads, training.eager.parameters(), strict=True):
        assert mine is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine + 0, theirs.grad)
    training.check_complete()
    assert all(type(p.grad) is Tensor for p in training.parameters)


@check
def a_gradient_that_was_dropped_or_replaced_before_the_update_does_not_come_back(rank: int) -> None:
    training = Training(zero_first)
    training.optimizer.zero_grad(set_to_none=True)
    mine = training.parameters[0].grad = torch.ones_like(training.parameters[0])
    training.step.flush()
    assert training.parameters[0].grad is mine
    assert all(p.grad is None for p in training.parameters[1:])


@check
def a_gradient_of_an_older_step_keeps_its_value(rank: int) -> None:
    training = Training(zero_first)
    mine, theirs = training.model[0].weight.grad, training.eager[0].weight.grad
    assert mine is not None
    assert theirs is not None
    theirs = theirs.clone()
    training.call(2)
    torch.testing.assert_close(mine + 0, theirs)
    training.step.flush()
    training.check_complete()


def test_pending_updates_complete_before_user_code_reads_the_state() -> None:
    def code(rank: int) -> list[str]:
        failed = []
        for each in CHECKS:
            try:
                each(rank)
            except Exception as error:
                failed.append(f"{each.__name__}: {type(error).__name__}: {error}")
        return failed

    assert run_ranks(code, 2, deadline=120) == [[], []]
