"""What capture and replay cost beside eager and a bare make_fx, in one run.

    python benchmarks/overhead.py [--device cuda] [--json FILE] [--before SRC]

1. Per call: a compiled step against calling its graph module with the inputs already in hand. Target: at most 200 us
   for 200 parameters.
2. Capture of a 12-layer transformer step against one bare `make_fx` of the same function. Target: at most 1.5x.
3. Peak memory of a replayed step against eager. Target: at most 1.05x.

`--before SRC`: only the time of a call, against the package in another source tree (`git worktree add ../before REV`,
then `--before ../before/src`), each in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless
from torch.optim.sgd import sgd

import wholestep as ws


class Narrow(nn.Module):
    """Many parameters, little work."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Transformer(nn.Module):
    """Twelve pre-norm layers."""

    def __init__(self, layers: int, width: int, heads: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def median_seconds(fn: Callable[[], Any], repeat: int) -> tuple[float, float, float]:
    """Median and quartiles of the time of a call."""
    times = []
    for _ in range(repeat):
        _sync()
        start = time.perf_counter()
        fn()
        _sync()
        times.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, low, high


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Mixed(nn.Module):
    """As many parameters, in modules of two classes."""

    def __init__(self, pairs: int, width: int = 8) -> None:
        super().__init__()
        made = [module for _ in range(pairs) for module in (nn.Linear(width, width), nn.LayerNorm(width))]
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def per_call(device: str) -> dict[str, float]:
    """A compiled step against its own graph, in turns, so that both meet caches as a training run leaves them.

    `over_replay`: against the bare graph module (an `fx.GraphModule`, in place, below autograd as the step runs it).
    `over_program`: against the function the step runs instead of that module: guards, gathering and write-back alone.
    """
    found = _per_call("linear", Narrow(100).to(device), device)
    return found | _per_call("mixed", Mixed(50).to(device), device)


def _per_call(name: str, model: nn.Module, device: str) -> dict[str, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(4, 8, device=device)
    step = ws.compile(train_step, lower="eager")
    for _ in range(3):
        step(model, optimizer, x)
    entry = step._last
    assert entry is not None
    inputs = entry.gather.read([model, optimizer, x])
    assert inputs is not None
    times: dict[str, list[float]] = {"step": [], "replay": [], "program": [], "eager": []}
    for _ in range(200):
        times["program"].append(_seconds(lambda: _replay(entry._forward, inputs)))
        times["step"].append(_seconds(lambda: step(model, optimizer, x)))
        times["replay"].append(_seconds(lambda: _replay(entry.executable.forward, inputs)))
        times["eager"].append(_seconds(lambda: train_step(model, optimizer, x)))
    middle = {key: statistics.median(values) * 1e6 for key, values in times.items()}
    found = {f"{name}_{key}_us": value for key, value in middle.items()}
    found[f"{name}_over_replay_us"] = middle["step"] - middle["replay"]
    found[f"{name}_over_program_us"] = middle["step"] - middle["program"]
    return found


def _replay(forward: Callable[..., Any], inputs: list[Any]) -> None:
    from wholestep.torch_private.autograd import below_autograd  # `--before`: older trees do not have it

    with below_autograd():
        forward(*inputs)


def _seconds(fn: Callable[[], Any]) -> float:
    _sync()
    start = time.perf_counter()
    fn()
    _sync()
    return time.perf_counter() - start


def capture_time(device: str, layers: int = 12) -> dict[str, float]:
    model = Transformer(layers, 64).to(device)
    x = torch.randn(2, 16, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    train_step(model, optimizer, x)
    names = [n for n, _ in model.named_parameters()]

    def stateless_step(params: list[Tensor], momenta: list[Tensor], x: Tensor) -> Tensor:
        with stateless._reparametrize_module(model, dict(zip(names, params, strict=True))):
            loss = model(x).square().mean()
            grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            sgd(
                params,
                list(grads),
                momenta,
                has_sparse_grad=False,
                foreach=True,
                fused=False,
                weight_decay=0.0,
                momentum=0.9,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        return loss

    params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    momenta = [torch.zeros_like(p) for p in params]

    def bare() -> None:
        make_fx(stateless_step, tracing_mode="fake")(params, list(momenta), x)

    def ours() -> None:
        ws.capture(train_step, model, optimizer, x)

    bare(), ours()
    ratios, bares, captures = [], [], []
    for _ in range(5):
        bares.append(median_seconds(bare, 2)[0])
        captures.append(median_seconds(ours, 2)[0])
        ratios.append(captures[-1] / bares[-1])
    return {
        "nodes": ws.capture(train_step, model, optimizer, x).num_nodes,
        "make_fx_s": statistics.median(bares),
        "capture_s": statistics.median(captures),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def peak_memory(device: str) -> dict[str, float]:
    def peak(compiled: bool, kind: str, wide: bool) -> int:
        torch.manual_seed(0)
        gc.collect()
        # Activations are most of the first; the second is nearly all parameters, so that the optimizer makes the peak.
        model = (Narrow(6, 512) if wide else Transformer(4, 128)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=kind == "foreach", fused=kind == "fused")
        x = torch.randn(4, 512, device=device) if wide else torch.randn(8, 64, 128, device=device)
        step = ws.compile(train_step, lower="eager") if compiled else train_step
        for _ in range(3):
            step(model, optimizer, x)
        return _peak_bytes(lambda: step(model, optimizer, x), device)

    found: dict[str, float] = {}
    for wide in (False, True):
        for kind in ("single", "foreach", "fused"):
            name = f"{'parameters' if wide else 'activations'}_{kind}"
            eager, ours = peak(False, kind, wide), peak(True, kind, wide)
            found[f"{name}_eager_mib"] = eager / 2**20
            found[f"{name}_ours_mib"] = ours / 2**20
            found[f"{name}_ratio"] = ours / eager
    return found


def _peak_bytes(fn: Callable[[], Any], device: str) -> int:
    """Most bytes allocated above the start of the call: the allocator's count on CUDA, the profiler's on CPU."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    current = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def _call_us(model: nn.Module, device: str) -> float:
    """The median time of a call of a step without anything between two calls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(4, 8, device=device)
    step = ws.compile(train_step, lower="eager")
    for _ in range(20):
        step(model, optimizer, x)
    return median_seconds(lambda: step(model, optimizer, x), 300)[0] * 1e6


def before_and_after(before: str, device: str, turns: int) -> dict[str, float]:
    """The time of a call with the package of another source tree and with this one, in turns of fresh processes."""
    here = str(pathlib.Path(ws.__file__).parents[1])
    times: dict[str, dict[str, list[float]]] = {tree: {"linear": [], "mixed": []} for tree in (before, here)}
    for _ in range(turns):
        for tree, found in times.items():
            command = [sys.executable, __file__, "--device", device, "--only-calls"]
            ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": tree}, capture_output=True, check=True)
            measured = json.loads(ran.stdout)
            for name, values in found.items():
                values.append(measured[f"{name}_step_us"])
    results: dict[str, float] = {}
    for name in ("linear", "mixed"):
        ratios = [after / first for first, after in zip(times[before][name], times[here][name], strict=True)]
        results[f"{name}_before_us"] = statistics.median(times[before][name])
        results[f"{name}_after_us"] = statistics.median(times[here][name])
        low, middle, high = statistics.quantiles(ratios, n=4)
        results |= {f"{name}_ratio": middle, f"{name}_ratio_low": low, f"{name}_ratio_high": high}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", default="")
    parser.add_argument("--before", default="", help="another source tree of the package to compare a call with")
    parser.add_argument("--turns", type=int, default=10, help="with --before: how often each is measured")
    parser.add_argument("--only-calls", action="store_true", help="print the times of a call as JSON, nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only_calls:
        models = {"linear": Narrow(100), "mixed": Mixed(50)}
        print(json.dumps({f"{n}_step_us": _call_us(m.to(options.device), options.device) for n, m in models.items()}))
        return
    if options.before:
        compared = before_and_after(options.before, options.device, options.turns)
        print(json.dumps(compared, indent=2))
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps({"torch": torch.__version__, **compared}, indent=2))
        return
    results: dict[str, Any] = {"device": options.device, "torch": torch.__version__}
    for name, measure in (("per_call", per_call), ("capture", capture_time), ("memory", peak_memory)):
        results[name] = measure(options.device)
        print(name, json.dumps(results[name], indent=2))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
