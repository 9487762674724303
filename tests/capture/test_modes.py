"""Modes and settings of the process that are switched after a capture: the next call does what eager would."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import wholestep as ws
from capture.refused import World, assert_points_at, assert_refused, assert_unchanged_and_trainable
from cases.parts import adamw, mlp, plain_run, train_step
from harness import Run, Story, assert_same_story
from selection import each_now

Switch = Callable[[], contextlib.AbstractContextManager[Any]]


def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Switch:
    """A switch that sets a value and puts back what was there."""

    @contextlib.contextmanager
    def switched() -> Iterator[None]:
        before = get()
        put(value)
        try:
            yield
        finally:
            put(before)

    return switched


def attribute(owner: Any, name: str, value: Any) -> Switch:
    return setting(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def deterministic(**options: Any) -> Switch:
    return setting(
        torch.are_deterministic_algorithms_enabled,
        lambda mode: torch.use_deterministic_algorithms(mode, **options if mode else {}),
        True,
    )


def fp32(backend: str, op: str, value: str) -> Switch:
    return setting(
        lambda: torch._C._get_fp32_precision_getter(backend, op),
        lambda new: torch._C._set_fp32_precision_setter(backend, op, new),
        value,
    )


cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn

SWITCHES: dict[str, tuple[Switch, str]] = {
    "deterministic": (deterministic(), "use_deterministic_algorithms"),
    "deterministic_warn_only": (deterministic(warn_only=True), "use_deterministic_algorithms"),
    "fill_uninitialized": (
        attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "fill_uninitialized_memory",
    ),
    "matmul_precision_medium": (
        setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        "set_float32_matmul_precision",
    ),
    "matmul_precision_high": (
        setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
        "set_float32_matmul_precision",
    ),
    "matmul_tf32": (attribute(cuda.matmul, "allow_tf32", True), "allow_tf32"),
    "mkldnn_matmul_bf16": (fp32("mkldnn", "matmul", "bf16"), "mkldnn.matmul.fp32_precision"),
    "mkldnn_conv_tf32": (fp32("mkldnn", "conv", "tf32"), "mkldnn.conv.fp32_precision"),
    "cudnn_conv_ieee": (fp32("cuda", "conv", "ieee"), "cudnn.conv.fp32_precision"),
    "fp16_reduction": (
        attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        "allow_fp16_reduced_precision_reduction",
    ),
    "bf16_reduction": (
        attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        "allow_bf16_reduced_precision_reduction",
    ),
    "fp16_accumulation": (attribute(cuda.matmul, "allow_fp16_accumulation", True), "allow_fp16_accumulation"),
    "cudnn_enabled": (attribute(cudnn, "enabled", False), "cudnn.enabled"),
    "cudnn_benchmark": (attribute(cudnn, "benchmark", True), "cudnn.benchmark"),
    "cudnn_deterministic": (attribute(cudnn, "deterministic", True), "cudnn.deterministic"),
    "cudnn_tf32": (attribute(cudnn, "allow_tf32", False), "cudnn.conv.fp32_precision"),
    "mkldnn_enabled": (attribute(mkldnn, "enabled", False), "mkldnn.enabled"),
    "mkldnn_deterministic": (attribute(mkldnn, "deterministic", True), "mkldnn.deterministic"),
    "nnpack": (lambda: torch.backends.nnpack.flags(enabled=False), "nnpack"),
    "flash_sdp": (setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False), "enable_flash_sdp"),
    "math_sdp_alone": (lambda: sdpa_kernel(SDPBackend.MATH), "sdp"),
    "sdp_priority": (lambda: sdpa_kernel([SDPBackend.MATH, *_ALL_SDP], set_priority=True), "priority"),
    "math_sdp_reduction": (
        setting(cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp, True),
        "allow_fp16_bf16_reduction_math_sdp",
    ),
    "default_dtype": (setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64), "get_default_dtype"),
    "default_device": (lambda: torch.device("cpu"), "default device"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "autocast_cuda": (lambda: torch.autocast("cuda", torch.bfloat16, enabled=True), "autocast"),
    "autocast_dtype": (
        setting(
            lambda: torch.get_autocast_dtype("cpu"), lambda new: torch.set_autocast_dtype("cpu", new), torch.float16
        ),
        "get_autocast_dtype",
    ),
    "mha_fastpath": (
        setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
        "set_fastpath_enabled",
    ),
    "flush_denormal": (setting(lambda: False, torch.set_flush_denormal, True), "set_flush_denormal"),
    "sparse_invariants": (
        torch.sparse.check_sparse_tensor_invariants,
        "check_sparse_tensor_invariants",
    ),
    "checkpoint_early_stop": (lambda: set_checkpoint_early_stop(False), "set_checkpoint_early_stop"),
    "dual_level": (torch.autograd.forward_ad.dual_level, "dual_level"),
    "no_saved_hooks": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        "disable_saved_tensors_hooks",
    ),
}
_ALL_SDP = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.OVERRIDEABLE,
]


class Sensitive(nn.Module):
    """Convolution, attention, matrix products, and tensors made with the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 3, padding=1)
        self.inner = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.saves = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x[:, None]).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, self.inner(h), h)
        h = checkpoint(self.last, h, use_reentrant=False) if self.saves else self.last(h)
        return F.dropout(h, 0.2)


def sensitive_run(where: torch.device) -> Run:
    model = Sensitive().to(where)
    optimizer = adamw(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        loss = model(x).float().square().mean()
        with torch.autocast("cpu"):
            halved = model.inner.weight @ model.last.weight
        (loss + halved.float().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        tiny = torch.full((2,), 1e-38) * 1e-2
        return loss, torch.arange(3) / 2 * torch.ones(3), halved, tiny

    return plain_run(where, model, optimizer, step)


SWITCHED_NOW = """
    deterministic fill_uninitialized matmul_precision_medium mkldnn_matmul_bf16 bf16_reduction cudnn_benchmark
    mkldnn_enabled nnpack flash_sdp sdp_priority default_dtype default_device autocast autocast_dtype mha_fastpath
    flush_denormal checkpoint_early_stop dual_level no_saved_hooks
""".split()
"""One setting of each place where torch keeps such."""


@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:In CPU autocast", "ignore:.*CUDA is not available")
@pytest.mark.parametrize("name", each_now(SWITCHES, *SWITCHED_NOW))
def test_a_setting_switched_after_the_capture_is_honoured_and_named(name: str) -> None:
    switch, said = SWITCHES[name]
    recaptured = []

    def story(it: Story) -> None:
        it.run.watch["model"].saves = name != "no_saved_hooks"
        it.call(3)
        with switch():
            it.call()
        graphs = len(getattr(it.step, "graphs", ()))
        it.call(2)
        with switch():
            it.call()
        with switch():
            it.call()
        it.call()
        if graphs:
            recaptured.append(graphs == len(it.step.graphs))

    step = assert_same_story(sensitive_run, story)
    assert recaptured == [True], "the graph of a mode is found again when the mode is back"
    assert len(step.graphs) == 3
    assert said in step.recompiles[-1].reason


def test_no_grad_around_the_call_raises_as_in_eager_and_the_graph_is_found_again() -> None:
    def story(it: Story) -> None:
        it.call(3)
        with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
            it.call()
        with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
            it.call()
        torch.manual_seed(5)  # eager drew numbers before it raised
        it.call(2)

    step = assert_same_story(sensitive_run, story)
    assert len(step.graphs) == 2


def test_an_operator_without_a_deterministic_form_raises_as_in_eager() -> None:
    unpool = nn.MaxUnpool2d(2)

    def make(where: torch.device) -> Run:
        model = nn.Linear(4, 4).to(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            pooled, where = F.max_pool2d(model(x), 2, return_indices=True)
            loss = unpool(pooled, where).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return plain_run(where, model, adamw(model), step, sizes=(2, 3, 4, 4))

    def story(it: Story) -> None:
        it.call(3)
        with deterministic()(), pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            it.call()
        it.call(2)

    assert_same_story(make, story)


def test_the_number_of_threads_needs_no_new_graph() -> None:
    def story(it: Story) -> None:
        it.call(3)
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        it.call(2)
        torch.set_num_threads(before)
        it.call()

    step = assert_same_story(sensitive_run, story)
    assert len(step.graphs) == 2


def test_another_default_device_is_seen_though_as_many_modes_are_on() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
            return train_step(model, optimizer, x), str(torch.empty(2).device)

        batches = [torch.randn(5, 6) for _ in range(7)]
        optimizer = adamw(model)
        return Run(step, lambda i: (model, optimizer, batches[i]), {"model": model})

    def story(it: Story) -> None:
        with torch.device("cpu"):
            it.call(3)
        with torch.device("meta"):
            it.call(2)
        with torch.device("cpu"):
            it.call(2)

    step = assert_same_story(make, story)
    assert len(step.graphs) == 3


# Modes that act on the operators that eager runs.


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class HalveProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.addmm.default else out


class CountFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class DoubleGelu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.gelu else out


class CountSaved(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        self.count = 0
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor


class CountedFlops(FlopCounterMode):
    def __init__(self) -> None:
        super().__init__(display=False)

    @property
    def count(self) -> int:
        return self.get_total_flops()


AROUND: dict[str, Callable[[], Any]] = {
    "anomaly": torch.autograd.detect_anomaly,
    "dispatch_mode": CountOperators,
    "dispatch_mode_that_changes_results": HalveProducts,
    "flop_counter": CountedFlops,
    "function_mode": CountFunctions,
    "function_mode_that_changes_results": DoubleGelu,
    "saved_tensors_hooks": CountSaved,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "parametrize_cached": nn.utils.parametrize.cached,
    "saved_tensors_that_change_gradients": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t * 2, lambda t: t
    ),
}


def parametrized_run(where: torch.device) -> Run:
    model = mlp(where)
    nn.utils.parametrizations.weight_norm(model[0])
    return plain_run(where, model, adamw(model))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", AROUND)
def test_a_mode_that_acts_on_operators_makes_the_call_run_in_eager_with_a_warning(kind: str) -> None:
    def story(it: Story) -> None:
        compiled = isinstance(it.step, ws.CompiledStep)
        it.call(3)
        for first in (True, False):
            with AROUND[kind]() as mode, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ws.EagerWarning)
                it.call()
            assert len([w for w in caught if w.category is ws.EagerWarning]) == (compiled and first)
            it.look(count=getattr(mode, "count", 0))
            it.call(2)

    step = assert_same_story(parametrized_run, story)
    assert len(step.graphs) == 2
    assert not step.recompiles[1:]


def test_the_first_call_may_be_under_such_a_mode() -> None:
    def story(it: Story) -> None:
        with CountOperators() as mode, warnings.catch_warnings():
            warnings.simplefilter("ignore", ws.EagerWarning)
            it.call(2)
        it.look(count=mode.count)
        it.call(2)

    step = assert_same_story(parametrized_run, story)
    assert len(step.graphs) == 1


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected", "ignore::wholestep.EagerWarning")
def test_anomaly_detection_switched_on_raises_on_nan_in_the_backward_like_eager() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) * 0).sqrt().sum()  # the gradient of sqrt at 0 is infinite: times 0 it is NaN
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return plain_run(where, model, adamw(model), step)

    def story(it: Story) -> None:
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
            it.call()
        it.look()
        it.run.watch["optimizer"].zero_grad()
        it.call()
        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
            it.call()
        it.run.watch["optimizer"].zero_grad()
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            it.call()
        it.call()

    assert_same_story(make, story)


@pytest.mark.filterwarnings("ignore::wholestep.EagerWarning")
def test_capture_under_such_a_mode_is_refused() -> None:
    world = World(fresh=False)
    before = world.look()
    with CountOperators(), pytest.raises(ws.errors.UnsupportedError, match="CountOperators is active around the call"):
        ws.capture(train_step, world.model, world.optimizer, world.batch())
    assert_unchanged_and_trainable(world, before, fresh=False)


# Settings that the step itself switches.


def product_without_mkldnn(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    with mkldnn.flags(enabled=False):  # <- here
        loss = (x @ model.first.weight.T).square().mean()
    loss.backward()
    return loss


def deterministic_in_the_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)  # <- here
    loss = (x @ model.first.weight.T).square().mean()
    loss.backward()
    torch.use_deterministic_algorithms(False)
    return loss


def other_default_dtype(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    torch.set_default_dtype(torch.float64)  # <- here
    scale = torch.ones(3)
    torch.set_default_dtype(torch.float32)
    return loss * scale.sum()


def anomaly_in_the_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.detect_anomaly():  # <- here
        loss = model(x).square().mean()
        loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "step", [product_without_mkldnn, deterministic_in_the_step, other_default_dtype, anomaly_in_the_step]
)
def test_a_setting_that_kernels_read_is_refused_inside_of_the_step_with_the_line(step: Callable[..., Any]) -> None:
    said = assert_refused(step, ws.errors.UnsupportedError)
    assert_points_at(said, step)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert mkldnn.enabled
    assert not torch.is_anomaly_enabled()


def leaves_grad_mode_off(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = train_step(model, optimizer, x)
    torch.set_grad_enabled(False)
    return loss


def leaves_benchmarking_on(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    cudnn.benchmark = True
    return train_step(model, optimizer, x)


def leaves_flash_attention_off(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    cuda.enable_flash_sdp(False)
    return train_step(model, optimizer, x)


def leaves_autocast_on(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = train_step(model, optimizer, x)
    torch.set_autocast_enabled("cpu", True)
    return loss


def leaves_tf32_allowed(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = train_step(model, optimizer, x)
    cuda.matmul.allow_tf32 = True
    return loss


@pytest.mark.parametrize(
    "step",
    [
        leaves_grad_mode_off,
        leaves_benchmarking_on,
        leaves_flash_attention_off,
        leaves_autocast_on,
        leaves_tf32_allowed,
    ],
)
def test_a_setting_that_the_step_leaves_changed_is_refused_and_put_back(step: Callable[..., Any]) -> None:
    kinds = (ws.errors.SideEffectError, ws.errors.UnsupportedError)
    said = assert_refused(step, *kinds)
    assert "leaves" in said or "sets" in said
    assert torch.is_grad_enabled()
    assert not cudnn.benchmark
    assert cuda.flash_sdp_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not cuda.matmul.allow_tf32


def test_attention_backends_chosen_inside_of_the_step_are_captured() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            h = model(x)[None, None]
            with sdpa_kernel(SDPBackend.MATH):
                loss = F.scaled_dot_product_attention(h, h, h).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return plain_run(where, model, adamw(model), step)

    step = assert_same_story(make, lambda it: it.call(4))
    assert "flash" not in str(step.last.gm.graph)


def test_a_setting_left_changed_by_an_exception_of_the_step_is_put_back() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        raise LookupError("in the middle")

    world = World(fresh=False)
    before = world.look()
    with pytest.raises(LookupError):
        ws.compile(step)(world.model, world.optimizer, world.batch())
    assert torch.is_grad_enabled()
    assert_unchanged_and_trainable(world, before, fresh=False)


@pytest.mark.parametrize("name", ["deterministic", "matmul_precision_medium", "default_dtype"])
def test_a_graph_captured_under_a_mode_is_used_again_under_that_mode(name: str) -> None:
    switch, _ = SWITCHES[name]

    def story(it: Story) -> None:
        for _ in range(4):
            with switch():
                it.call()

    step = assert_same_story(sensitive_run, story)
    assert len(step.graphs) == 2, step.recompiles
