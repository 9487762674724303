"""Optimizers that keep lists, dicts and deques of tensors, values of the whole optimizer, or lists in param groups."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import wholestep as ws
from harness import Case, Run, Story, assert_parity, assert_same_story, batch_of, device
from wholestep import errors

Update = Callable[["Custom", dict[str, Any], Tensor, dict[str, Any]], None]
Pair = namedtuple("Pair", "mean square")


class Custom(Optimizer):
    """An optimizer whose update of one parameter is given."""

    def __init__(self, parameters: Any, update: Update) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(self, group, p, {} if self.update is by_identity else self.state[p])


class Whole:
    """All that an optimizer keeps, with what a `state_dict` leaves out."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        names = {p: i for i, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        by_id = {id(p): name for p, name in names.items()}
        state = {
            names[k] if isinstance(k, Tensor) else by_id.get(k, k): _listed(v) for k, v in self.optimizer.state.items()
        }
        groups = [{k: _listed(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"state": state, "groups": groups}


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {type(value).__name__: {key: _listed(item) for key, item in value.items()}}
    if isinstance(value, list | tuple | deque):
        return {type(value).__name__: [_listed(item) for item in value]}
    return value


def make(where: torch.device, update: Update, groups: int = 1, **options: Any) -> Run:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(where)
    parameters: Any = list(model.parameters())
    if groups == 2:
        parameters = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = Custom(parameters, update)
    for group in optimizer.param_groups:
        group.update(options)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def slower(i: int, result: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    watch = {"model": model, "optimizer": Whole(optimizer)}
    return Run(step, lambda i: (batch_of(where, i, 3, 4), batch_of(where, 50 + i, 3, 2)), watch, after=slower)


def a_list(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if not state:
        state["moments"] = [torch.zeros_like(p), torch.ones_like(p)]
    mean, square = state["moments"]
    mean.mul_(0.9).add_(p.grad)
    square.mul_(0.99).addcmul_(p.grad, p.grad)
    p.addcdiv_(mean, square.sqrt().add_(1e-3), value=-group["lr"])


def a_list_of_new_tensors(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    old = state.get("moments", [torch.zeros_like(p)] * 2)
    state["moments"] = [0.9 * old[0] + p.grad, 0.99 * old[1] + p.grad.square()]
    p.addcdiv_(state["moments"][0], state["moments"][1].sqrt() + 1e-3, value=-group["lr"])


def an_element_is_replaced(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    state.setdefault("moments", [torch.zeros_like(p), torch.ones_like(p)])
    state["moments"][0] = 0.9 * state["moments"][0] + p.grad
    p.sub_(state["moments"][0] * state["moments"][1], alpha=group["lr"])


def a_dict_by_float(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if "buffers" not in state:
        state["buffers"] = {beta: torch.zeros_like(p) for beta in group["betas"]}
    for beta in group["betas"]:
        state["buffers"][beta].mul_(beta).add_(p.grad)
        p.sub_(state["buffers"][beta], alpha=group["lr"] / 3)


def nested_dicts(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    inner = state.setdefault("a", {}).setdefault("b", {"steps": 0, "sums": [torch.zeros_like(p)]})
    inner["steps"] += 1
    inner["sums"][0].add_(p.grad, alpha=1 / inner["steps"])
    p.sub_(inner["sums"][0], alpha=group["lr"])


def a_tuple(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    mean, square = state.get("pair", (torch.zeros_like(p), torch.zeros_like(p)))
    state["pair"] = (mean.lerp(p.grad, 0.1), square.mul_(0.9))
    p.sub_(state["pair"][0], alpha=group["lr"])


def a_named_tuple(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    pair = state.get("pair", Pair(torch.zeros_like(p), torch.ones_like(p)))
    state["pair"] = pair._replace(mean=pair.mean.lerp(p.grad, 0.1))
    pair.square.add_(p.grad.square())
    p.sub_(state["pair"].mean / state["pair"].square, alpha=group["lr"])


def a_queue(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    queue = state.setdefault("queue", deque(maxlen=3))
    queue.append(p.grad.clone())
    p.sub_(sum(queue), alpha=group["lr"] / len(queue))


def a_list_as_a_queue(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    queue = state.setdefault("queue", [])
    queue.append(p.grad.clone())
    if len(queue) > 2:
        p.sub_(queue.pop(0), alpha=group["lr"])


def ordered_entries(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if not state:
        optimizer.state[p] = OrderedDict(mean=torch.zeros_like(p))
    optimizer.state[p]["mean"].lerp_(p.grad, 0.1)
    p.sub_(optimizer.state[p]["mean"], alpha=group["lr"])


def a_defaultdict(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    sums = state.setdefault("sums", defaultdict(float))
    sums["plain"] = sums["plain"] + p.grad
    p.sub_(sums["plain"], alpha=group["lr"])


def a_count_of_the_optimizer(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    optimizer.state["count"] = optimizer.state["count"] + 1 if "count" in optimizer.state else 1
    p.sub_(p.grad, alpha=group["lr"] / optimizer.state["count"])


def a_tensor_of_the_optimizer(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if "count" not in optimizer.state:
        optimizer.state["count"] = torch.zeros(1)
    optimizer.state["count"] += 1
    p.sub_(p.grad / optimizer.state["count"], alpha=group["lr"])


def a_list_of_the_optimizer(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if "norms" not in optimizer.state:
        optimizer.state["norms"] = [torch.zeros(())]
    optimizer.state["norms"][0].add_(p.grad.norm())
    p.sub_(p.grad / (1 + optimizer.state["norms"][0]), alpha=group["lr"])


def by_identity(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    mine = optimizer.state[id(p)]
    if not mine:
        mine["mean"] = torch.zeros_like(p)
    mine["mean"].lerp_(p.grad, 0.1)
    p.sub_(mine["mean"], alpha=group["lr"])


def empty_entries(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    p.sub_(p.grad, alpha=group["lr"])  # `state` was made by being asked for


def entries_that_are_dropped(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    mean = state.get("mean")
    p.sub_(p.grad if mean is None else mean, alpha=group["lr"])
    if mean is None:
        optimizer.state[p] = {"mean": p.grad.clone()}
    else:
        del optimizer.state[p]


def text_and_flags(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if state.get("phase", "warm") == "warm":
        state.update(phase="cold", seen=[True, None], mean=p.grad.clone())
    p.sub_(state["mean"] if state["seen"][0] else p.grad, alpha=group["lr"])


def a_table_in_the_group(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    state["step"] = state.get("step", 0) + 1
    row = group["table"][int(state["step"] % 3)]
    if row[0] != state["step"]:
        row[0], row[1] = state["step"], group["lr"] * 0.9 ** state["step"]
    p.sub_(p.grad, alpha=row[1])


def floats_in_the_group(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    group["scales"][1] = group["scales"][0] * 0.5 + group["scales"][1] * 0.5
    p.sub_(p.grad, alpha=group["lr"] * group["scales"][1])


CASES: dict[str, tuple[Update, dict[str, Any]]] = {
    "list": (a_list, {}),
    "list of new tensors": (a_list_of_new_tensors, {}),
    "replaced element": (an_element_is_replaced, {}),
    "dict by float": (a_dict_by_float, {"betas": (0.5, 0.9, 0.99)}),
    "nested dicts": (nested_dicts, {}),
    "tuple": (a_tuple, {}),
    "named tuple": (a_named_tuple, {}),
    "queue": (a_queue, {}),
    "list as a queue": (a_list_as_a_queue, {}),
    "ordered entries": (ordered_entries, {}),
    "defaultdict": (a_defaultdict, {}),
    "count of the optimizer": (a_count_of_the_optimizer, {}),
    "tensor of the optimizer": (a_tensor_of_the_optimizer, {}),
    "list of the optimizer": (a_list_of_the_optimizer, {}),
    "by identity": (by_identity, {}),
    "empty entries": (empty_entries, {}),
    "dropped entries": (entries_that_are_dropped, {}),
    "text and flags": (text_and_flags, {}),
    "table in the group": (a_table_in_the_group, {"table": [[None, None] for _ in range(3)]}),
    "floats in the group": (floats_in_the_group, {"scales": [1.0, 0.5]}),
}


@pytest.mark.parametrize("name", CASES)
def test_state_of_any_nesting_is_that_of_eager(name: str) -> None:
    update, options = CASES[name]
    graphs = {"queue": 4, "list as a queue": 4, "table in the group": None, "dropped entries": 3}.get(name, 2)
    made = Case(name, lambda where: make(where, update, **copy.deepcopy(options)), steps=8, graphs=graphs)
    assert_parity(made, device())


@pytest.mark.parametrize("name", ["list", "nested dicts", "queue", "by identity", "count of the optimizer"])
def test_two_groups_keep_their_own_nested_state(name: str) -> None:
    update, options = CASES[name]
    made = Case(name, lambda where: make(where, update, 2, **copy.deepcopy(options)), steps=6, graphs=None)
    assert_parity(made, device())


def test_a_nested_tensor_that_is_replaced_between_calls_is_used() -> None:
    def story(teller: Story) -> None:
        teller.call(3)
        optimizer = teller.run.watch["optimizer"].optimizer
        for state in optimizer.state.values():
            state["moments"] = [torch.full_like(state["moments"][0], 0.25), state["moments"][1]]
        teller.call(2)
        for state in optimizer.state.values():
            state["moments"][1] = state["moments"][1] * 2
        teller.call(2)

    step = assert_same_story(lambda where: make(where, a_list), story)
    assert len(step.graphs) == 2


def test_nested_state_that_is_loaded_between_calls_is_used() -> None:
    def story(teller: Story) -> None:
        optimizer = teller.run.watch["optimizer"].optimizer
        teller.call(3)
        saved = copy.deepcopy(optimizer.state_dict())
        teller.call(2)
        optimizer.load_state_dict(saved)
        teller.call(2)

    assert_same_story(lambda where: make(where, nested_dicts), story)


def test_a_flag_in_state_that_the_user_changes_between_calls_is_seen() -> None:
    def story(teller: Story) -> None:
        teller.call(3)
        optimizer = teller.run.watch["optimizer"].optimizer
        for state in optimizer.state.values():
            state["seen"][0] = False
        teller.call(2)
        for state in optimizer.state.values():
            state["phase"] = "warm"
        teller.call(2)

    assert_same_story(lambda where: make(where, text_and_flags), story)


def test_a_list_that_grows_between_calls_is_seen() -> None:
    def update(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        for each in state.setdefault("all", [torch.zeros_like(p)]):
            each.add_(p.grad)
            p.sub_(each, alpha=group["lr"])

    def story(teller: Story) -> None:
        teller.call(3)
        for p, state in teller.run.watch["optimizer"].optimizer.state.items():
            state["all"].append(torch.ones_like(p))
        teller.call(3)

    assert_same_story(lambda where: make(where, update), story)


def test_a_list_that_two_groups_share_is_refused_where_the_step_writes_it() -> None:
    update, options = CASES["table in the group"]
    run = make(device(), update, 2, **copy.deepcopy(options))
    before = copy.deepcopy(run.watch["optimizer"].state_dict())
    with pytest.raises(errors.UnsupportedError, match=r"param_groups\[0\]\.table.*same object as.*param_groups\[1\]"):
        ws.compile(run.step)(*run.arguments(0))
    assert run.watch["optimizer"].state_dict()["groups"] == before["groups"]


def test_a_new_list_in_the_state_of_two_parameters_is_refused() -> None:
    def update(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        if not state:
            shared = next((s["count"] for s in optimizer.state.values() if s), None)
            state["count"] = [torch.zeros(())] if shared is None else shared
        state["count"][0].add_(1)
        p.sub_(p.grad / state["count"][0], alpha=group["lr"])

    run = make(device(), update)
    with pytest.raises(errors.UnsupportedError, match="are the same list"):
        ws.compile(run.step)(*run.arguments(0))


def test_a_tensor_in_the_state_of_two_parameters_stays_one_tensor() -> None:
    def update(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        if not state:
            shared = next((s["count"] for s in optimizer.state.values() if s), None)
            state["count"] = torch.zeros(()) if shared is None else shared
        state["count"].add_(1)
        p.sub_(p.grad / state["count"], alpha=group["lr"])

    assert_parity(Case("shared", lambda where: make(where, update), steps=5), device())


def test_a_set_of_tensors_in_state_is_refused() -> None:
    def update(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        state["all"] = {p.grad.clone()}

    run = make(device(), update)
    with pytest.raises(errors.WholestepError, match="set"):
        ws.compile(run.step)(*run.arguments(0))
    run.step(*run.arguments(0))
    with pytest.raises(errors.UnsupportedError, match="is a set of tensors"):
        ws.compile(run.step)(*run.arguments(0))


def test_an_object_with_tensors_in_state_is_refused_and_eager_continues() -> None:
    class Projector:
        def __init__(self, like: Tensor) -> None:
            self.mean = torch.zeros_like(like)

    def update(optimizer: Custom, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["projector"] = Projector(p)
        state["projector"].mean.add_(p.grad)
        p.sub_(state["projector"].mean, alpha=group["lr"])

    run = make(device(), update)
    with pytest.raises(errors.SideEffectError, match="to a Projector") as caught:
        ws.compile(run.step)(*run.arguments(0))
    assert caught.value.location is not None
    assert caught.value.location.text == "optimizer.step()"
    assert not run.watch["optimizer"].optimizer.state
    run.step(*run.arguments(0))
    with pytest.raises(errors.WholestepError):
        ws.compile(run.step)(*run.arguments(1))
    run.step(*run.arguments(1))


def test_a_skipped_step_of_a_scaler_leaves_nested_state_as_it_was() -> None:
    def build(where: torch.device) -> Run:
        run = make(where, a_queue)
        model, optimizer = run.watch["model"], run.watch["optimizer"].optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        def arguments(i: int) -> tuple[Tensor, Tensor]:
            x, y = run.arguments(i)
            return (x * 1e30 if i == 3 else x), y

        return Run(step, arguments, {**run.watch, "scaler": scaler})

    assert_parity(Case("skipped", build, steps=7, graphs=None), device())
