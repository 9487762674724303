"""No fake tensor of a trace is left in the user's objects: caches are emptied, or the step is refused."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from capture.odd_places import at_address
from capture.refused import Use, World, assert_points_at, assert_unchanged_and_trainable, step_with
from cases.parts import adamw, mlp, plain_run
from harness import Run, Story, assert_frames_equal, assert_same_story
from wholestep.capture.results.leftover_fakes import Leftovers
from wholestep.torch_private.fake_tensors import FakeTensor


def fakes_alive() -> list[Any]:
    """Fake tensors that something else than the graphs of captured steps holds."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is FakeTensor]


# functools.lru_cache is emptied, and the step is captured.


@functools.lru_cache
def cached_mask(n: int) -> torch.Tensor:
    return torch.tril(torch.ones(n, n))


@functools.cache
def cached_pair(n: int) -> dict[str, torch.Tensor]:
    return {"up": torch.full((n,), 2.0), "down": torch.full((n,), 0.5)}


@functools.lru_cache(maxsize=2)
def cached_for(tensor: Any) -> torch.Tensor:
    return tensor * 2


class Tables:
    @staticmethod
    @functools.lru_cache
    def frequencies(n: int) -> torch.Tensor:
        return torch.arange(n) / n

    @functools.lru_cache  # noqa: B019
    def scaled(self, n: int) -> torch.Tensor:
        return torch.ones(n) * 3


TABLES = Tables()
HIDDEN = types.ModuleType("hidden_package")
HIDDEN.cached = functools.lru_cache(lambda n: torch.ones(n) * 4)  # type: ignore[attr-defined]
sys.modules["hidden_package"] = HIDDEN


def hidden_cache(h: torch.Tensor) -> torch.Tensor:
    return h * sys.modules["hidden_package"].cached(4)


def nested_caches(h: torch.Tensor) -> torch.Tensor:
    return h @ cached_mask(4) * cached_pair(4)["up"] + Tables.frequencies(4)


CACHED: dict[str, Use] = {
    "lru_cache": lambda h: h @ cached_mask(4),
    "cache": lambda h: h * cached_pair(4)["up"] * cached_pair(4)["down"],
    "keyed_by_a_tensor": lambda h: cached_for(h),
    "static_method": lambda h: h + Tables.frequencies(4),
    "method": lambda h: h * TABLES.scaled(4),
    "in_another_module": hidden_cache,
    "several": nested_caches,
}


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    yield
    for cache in (cached_mask, cached_pair, cached_for, Tables.frequencies, Tables.scaled, HIDDEN.cached):
        cache.cache_clear()


@pytest.mark.parametrize("name", CACHED)
def test_an_lru_cache_filled_while_tracing_is_emptied_and_the_step_captured(name: str) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, adamw(model), step_with(CACHED[name]))

    def story(it: Story) -> None:
        empty()
        it.call(4)
        it.call_eager(2)
        empty()
        it.call(2)

    def empty() -> None:
        for cache in (cached_mask, cached_pair, cached_for, Tables.frequencies, Tables.scaled, HIDDEN.cached):
            cache.cache_clear()

    assert_same_story(make, story)


def test_an_entry_of_a_cache_that_holds_no_fake_stays() -> None:
    calls = []

    @functools.lru_cache
    def width(n: int) -> int:
        calls.append(n)
        return n * 2

    width(4)
    world = World(fresh=False)
    ws.compile(step_with(lambda h: h * width(4)))(world.model, world.optimizer, world.batch())
    width(4)
    assert calls == [4]


# Other holders: the entry is taken out and the step refused.


class Config:
    cache: Any = None
    table: ClassVar[dict[str, Any]] = {}
    history: ClassVar[list[Any]] = []
    seen: ClassVar[set[Any]] = set()


MODULE_CACHE: dict[Any, Any] = {}
NESTED: dict[str, dict[str, list[Any]]] = {"a": {"b": []}}
RING: deque[Any] = deque(maxlen=4)
ORDERED: OrderedDict[str, Any] = OrderedDict()
GROUPS: defaultdict[str, list[Any]] = defaultdict(list)
LOCAL = threading.local()
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=None)


ADDRESSES = {
    name: id(globals()[name]) for name in ("MODULE_CACHE", "NESTED", "RING", "ORDERED", "GROUPS", "LOCAL", "VARIABLE")
}
ADDRESSES["hidden_package"] = id(HIDDEN)


def hidden(name: str) -> Any:
    return at_address(ADDRESSES[name])


def class_attribute(h: torch.Tensor) -> torch.Tensor:
    if Config.cache is None:
        Config.cache = torch.ones(4)  # <- here
    return h * Config.cache


def class_dict(h: torch.Tensor) -> torch.Tensor:
    if "mask" not in Config.table:
        Config.table["mask"] = torch.ones(4)  # <- here
    return h * Config.table["mask"]


def class_list(h: torch.Tensor) -> torch.Tensor:
    Config.history.append((1, h.sum()))  # <- here
    return h


def class_set(h: torch.Tensor) -> torch.Tensor:
    Config.seen.add(torch.ones(4))  # <- here
    return h


def remember(key: Any, make: Callable[[], Any]) -> Any:
    cache = hidden("MODULE_CACHE")
    if key not in cache:
        cache[key] = make()
    return cache[key]


def module_dict(h: torch.Tensor) -> torch.Tensor:
    return h * remember("ones", lambda: torch.ones(4))  # <- here


def module_dict_keyed_by_a_tensor(h: torch.Tensor) -> torch.Tensor:
    twice = h * 2  # <- here
    remember(twice, lambda: 5)
    return h


def nested_containers(h: torch.Tensor) -> torch.Tensor:
    hidden("NESTED")["a"]["b"].append({"x": (h * 2,)})  # <- here
    return h


def ring(h: torch.Tensor) -> torch.Tensor:
    hidden("RING").append(h.mean())  # <- here
    return h


def ordered(h: torch.Tensor) -> torch.Tensor:
    hidden("ORDERED")["last"] = h.mean()  # <- here
    return h


def grouped(h: torch.Tensor) -> torch.Tensor:
    hidden("GROUPS")["norms"].append(h.norm())  # <- here
    return h


def in_a_package(h: torch.Tensor) -> torch.Tensor:
    hidden("hidden_package").store["x"] = (torch.ones(4),)  # <- here
    return h


def on_a_function(h: torch.Tensor) -> torch.Tensor:
    remember.__dict__["last"] = h * 3  # <- here
    return h


def default_argument(h: torch.Tensor) -> torch.Tensor:
    return h * _with_default()


def _with_default(store: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
    if "x" not in store:
        store["x"] = torch.ones(4)  # <- here
    return store["x"]


def thread_local(h: torch.Tensor) -> torch.Tensor:
    hidden("LOCAL").mask = torch.ones(4)  # <- here
    return h * hidden("LOCAL").mask


def context_variable(h: torch.Tensor) -> torch.Tensor:
    hidden("VARIABLE").set(h.mean())  # <- here
    return h


def kept_by_a_closure(h: torch.Tensor) -> torch.Tensor:
    twice = h * 2  # <- here
    hidden("MODULE_CACHE")["callback"] = lambda: twice
    return h


class Squares(torch.autograd.Function):
    kept: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.half = x / 2  # <- here
        Squares.kept.append(ctx)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.half * 4


def autograd_context(h: torch.Tensor) -> torch.Tensor:
    return Squares.apply(h)


HOLDERS: dict[str, tuple[Use, str, Any]] = {
    "module_dict": (module_dict, "MODULE_CACHE['ones']", module_dict),
    "module_dict_keyed_by_a_tensor": (module_dict_keyed_by_a_tensor, "MODULE_CACHE", module_dict_keyed_by_a_tensor),
    "nested_containers": (nested_containers, "NESTED['a']['b'][0]", nested_containers),
    "deque": (ring, "RING[0]", ring),
    "ordered_dict": (ordered, "ORDERED['last']", ordered),
    "defaultdict": (grouped, "GROUPS['norms']", grouped),
    "in_a_package": (in_a_package, "hidden_package.store['x']", in_a_package),
    "default_argument": (default_argument, "the contents of store", None),
    "thread_local": (thread_local, "LOCAL.mask", thread_local),
    "context_variable": (context_variable, "VARIABLE", context_variable),
    "closure": (kept_by_a_closure, "MODULE_CACHE['callback']", kept_by_a_closure),
    "autograd_context": (autograd_context, "Squares.kept", None),
}


@pytest.fixture
def tidy() -> Iterator[None]:
    HIDDEN.store = {}  # type: ignore[attr-defined]
    yield
    Config.cache = None
    for container in (Config.table, Config.history, Config.seen, MODULE_CACHE, RING, ORDERED, GROUPS, Squares.kept):
        container.clear()
    NESTED["a"]["b"].clear()
    LOCAL.__dict__.clear()
    remember.__dict__.clear()
    VARIABLE.set(None)
    assert _with_default.__defaults__ is not None
    _with_default.__defaults__[0].clear()


def contents() -> list[Any]:
    """All holders of this file, as text."""
    assert _with_default.__defaults__ is not None
    held = (Config.cache, Config.table, Config.history, Config.seen, MODULE_CACHE, NESTED, RING, ORDERED, GROUPS)
    more = (
        HIDDEN.store,
        LOCAL.__dict__,
        VARIABLE.get(),
        remember.__dict__,
        Squares.kept,
        _with_default.__defaults__[0],
    )  # type: ignore[attr-defined]
    return [repr(each) for each in (*held, *more)]


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("name", HOLDERS)
def test_a_fake_stored_while_tracing_is_removed_and_the_step_refused_with_the_holder(name: str) -> None:
    use, where, at = HOLDERS[name]
    world = World(fresh=False)
    before, held = world.look(), contents()
    step = ws.compile(step_with(use))
    with pytest.raises(ws.errors.SideEffectError) as caught:
        step(world.model, world.optimizer, world.batch())
    said = str(caught.value)
    assert where in said, said
    if at is not None:
        assert_points_at(said, at)
    assert contents() == held
    assert_unchanged_and_trainable(world, before, fresh=False)
    step_with(use)(world.model, world.optimizer, world.batch())  # eager goes on
    assert contents() != held


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("name", HOLDERS)
def test_a_fake_stored_by_a_failing_capture_is_removed_too(name: str) -> None:
    use, _, _ = HOLDERS[name]

    def fails(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        step_with(use)(model, optimizer, x)
        raise LookupError("in the middle")

    world = World(fresh=False)
    before, held = world.look(), contents()
    with pytest.raises(LookupError):
        ws.compile(fails)(world.model, world.optimizer, world.batch())
    assert contents() == held
    assert_unchanged_and_trainable(world, before, fresh=False)
    step_with(use)(world.model, world.optimizer, world.batch())


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("use", [class_attribute, on_a_function])
def test_an_attribute_of_a_class_or_function_set_to_a_tensor_is_set_by_a_replay_too(use: Use) -> None:
    def make(where: torch.device) -> Run:
        Config.cache = None
        remember.__dict__.clear()
        model = mlp(where)
        return plain_run(where, model, adamw(model), step_with(use))

    def story(it: Story) -> None:
        it.call(3)
        it.look(cache=Config.cache, last=remember.__dict__.get("last"))
        it.call_eager()

    assert_same_story(make, story)


@pytest.mark.usefixtures("tidy")
def test_what_was_cached_before_is_back_after_a_capture() -> None:
    Config.cache = old = torch.full((4,), 3.0)
    Config.table["mask"] = old
    Config.history.append(old)

    def replaces(h: torch.Tensor) -> torch.Tensor:
        Config.cache = h.mean()
        Config.table["mask"] = h.sum()
        Config.history[0] = h
        return h

    world = World(fresh=False)
    ws.compile(step_with(replaces)).capture(world.model, world.optimizer, world.batch())
    assert Config.cache is Config.table["mask"] is Config.history[0] is old


@pytest.mark.usefixtures("tidy")
def test_garbage_collected_by_the_step_does_not_hide_a_holder() -> None:
    def collects(h: torch.Tensor) -> torch.Tensor:
        out = in_a_package(h)
        gc.collect()
        return out

    world = World(fresh=False)
    with pytest.raises(ws.errors.SideEffectError, match="hidden_package"):
        ws.compile(step_with(collects))(world.model, world.optimizer, world.batch())
    assert HIDDEN.store == {}  # type: ignore[attr-defined]


class Positions(nn.Module):
    """Computes a table at the first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.table: Any = None

    @functools.cached_property
    def signs(self) -> torch.Tensor:
        return torch.tensor([1.0, -1.0, 1.0, -1.0]) * 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4) / 4
        return x * self.scale + self.table * self.signs


def test_a_table_that_a_module_computes_at_its_first_call_is_captured() -> None:
    def make(where: torch.device) -> Run:
        model = Positions().to(where)
        return plain_run(where, model, adamw(model), step_with(lambda h: h), sizes=(3, 4))

    step = assert_same_story(make, lambda it: it.call(4))
    assert type(step.graphs) is list


def test_a_weak_cache_is_empty_again() -> None:
    cache: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
    HIDDEN.weak = cache  # type: ignore[attr-defined]

    def use(h: torch.Tensor) -> torch.Tensor:
        weak = sys.modules["hidden_package"].weak
        twice = weak.get("twice")
        if twice is None:
            weak["twice"] = twice = h * 2
        sys.modules["hidden_package"].by_tensor[h] = 1
        return twice

    by_tensor: weakref.WeakKeyDictionary[torch.Tensor, int] = weakref.WeakKeyDictionary()
    HIDDEN.by_tensor = by_tensor  # type: ignore[attr-defined]

    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, adamw(model), step_with(use))

    def story(it: Story) -> None:
        it.call(2)
        assert not cache
        assert not by_tensor
        it.call_eager()
        it.call()

    assert_same_story(make, story)


# Memory.


@pytest.mark.usefixtures("tidy")
def test_no_fakes_are_alive_after_captures_refusals_and_failures() -> None:
    already = len(fakes_alive())

    def fails(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        step_with(class_list)(model, optimizer, x)
        raise LookupError

    for each in (step_with(lambda h: h @ cached_mask(4)), step_with(class_attribute), fails):
        world = World(fresh=False)
        with contextlib.suppress(ws.errors.SideEffectError, LookupError):
            ws.compile(each)(world.model, world.optimizer, world.batch())
    del world
    assert len(fakes_alive()) <= already


def test_fakes_of_a_captured_step_are_those_of_its_graph() -> None:
    already = len(fakes_alive())
    world = World(fresh=False)
    step = ws.compile(step_with(lambda h: h))
    step(world.model, world.optimizer, world.batch())
    nodes = sum(len(graph.gm.graph.nodes) for graph in step.graphs)
    assert 0 < len(fakes_alive()) - already < 2 * nodes
    step.reset()
    assert len(fakes_alive()) <= already


def test_100_recaptures_leave_nothing() -> None:
    world = World(fresh=False)
    already = len(fakes_alive())
    step = ws.compile(lambda x, n: (x * n).sum())
    for n in range(100):
        step(torch.ones(3, requires_grad=False), str(n) and n)
        step.reset()
    assert len(fakes_alive()) <= already
    assert_frames_equal([world.look()], [world.look()])


def test_captures_that_leave_nothing_behind_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search looks at every object of the process: an ordinary step must not pay for it."""

    def fail(*args: Any) -> None:
        pytest.fail("a fake has references that are neither in our records nor left behind")

    monkeypatch.setattr(Leftovers, "_search", fail)
    rnn = nn.LSTM(4, 4, batch_first=True)
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.1))
    for make in (torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9, foreach=True), torch.optim.RAdam):
        optimizer, scaler = make([*rnn.parameters(), *net.parameters()], lr=0.1), torch.amp.GradScaler("cpu")

        def step(x: torch.Tensor, scale: float, optimizer: Any = optimizer, scaler: Any = scaler) -> Any:
            with torch.autocast("cpu"):
                h = checkpoint(net, x, use_reentrant=False)
            loss = rnn(h.float().transpose(1, 2))[0].square().mean() * scale
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return {"loss": loss, "twice": x * 2}

        compiled = ws.compile(step)
        for i in range(3):
            compiled(torch.randn(2, 1, 8), i + 0.5)
        assert compiled.graphs


def test_a_cached_function_under_another_default_dtype_is_refused() -> None:
    """Eager would go on with the float32 tensor that it made and cached in the first call."""

    @functools.lru_cache
    def weights(n: int) -> torch.Tensor:
        return torch.linspace(0.5, 1.5, n)

    @ws.compile(lower="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weights(x.shape[0])

    x = torch.ones(4)
    assert step(x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ws.errors.UnsupportedError, match="lru_cache and makes tensors") as raised:
            step(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert raised.value.location is not None
    assert step(x).dtype == torch.float32


@pytest.mark.parametrize("clears", [False, True])
def test_tensors_that_were_in_a_cache_before_the_capture_are_used(clears: bool) -> None:
    @functools.lru_cache
    def positions(n: int) -> torch.Tensor:
        return torch.arange(n) * 0.5

    class Masks:
        @functools.cache  # noqa: B019
        def of(self, n: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return torch.ones(n, n).tril(), {"row": torch.ones(n)}

    masks = Masks()

    def step(x: torch.Tensor) -> torch.Tensor:
        mask, more = masks.of(4)
        return x @ mask + more["row"] + positions(4)

    x = torch.randn(2, 4)
    expected = step(x)  # in eager, before anything is captured
    ours = ws.compile(step, lower="eager")
    for i in range(4):
        assert torch.equal(ours(x), expected)
        if clears and i == 1:
            positions.cache_clear()
            Masks.of.cache_clear()
    assert len(ours.graphs) == (2 if clears else 1)
