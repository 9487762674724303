"""Train a small GPT twice from one seed, eager and through wholestep, and show that nothing but the time differs.

Both runs take each batch in turn, so that a busy machine slows both alike. Exits with 1 if a single bit differs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import wholestep as ws
from tiny_gpt import Config, TinyGPT

TEXT = Path(__file__).parent / "data" / "alice.txt"

Batch = dict[str, Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch], Tensor]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    loss = model(**batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Run:
    """One training run with its own model, optimizer, schedule and place in the stream of random numbers."""

    step: Step
    model: TinyGPT
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    random_state: Tensor
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, batch: Batch) -> None:
        device = next(iter(batch.values())).device
        _set_random_state(device, self.random_state)
        start = time.perf_counter()
        loss = self.step(self.model, self.optimizer, batch)
        _synchronize(device)
        self.seconds.append(time.perf_counter() - start)
        self.random_state = _get_random_state(device)
        self.losses.append(loss.item())
        self.scheduler.step()


def make_run(step: Step, config: Config, args: argparse.Namespace) -> Run:
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = TinyGPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(args.steps))
    return Run(step, model, optimizer, scheduler, _get_random_state(device))


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def batches(tokens: Tensor, args: argparse.Namespace) -> Iterator[Batch]:
    """Random windows of the text; the targets are the same window, one character on."""
    generator = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.context + 1)
    for _ in range(args.steps):
        starts = torch.randint(len(tokens) - args.context, (args.batch, 1), generator=generator)
        window = tokens[starts + offsets].to(args.device)
        yield {"idx": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}


def train(eager: Run, whole: Run, tokens: Tensor, args: argparse.Namespace, console: Console) -> None:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss: eager {task.fields[eager]:.4f}  wholestep {task.fields[whole]:.4f}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=args.steps, eager=math.nan, whole=math.nan)
        for batch in batches(tokens, args):
            eager.advance(batch)
            whole.advance(batch)
            progress.update(task, advance=1, eager=eager.losses[-1], whole=whole.losses[-1])


def show_result(eager: Run, whole: Run, step: ws.CompiledStep, console: Console) -> bool:
    """Print the table; True if both runs agree to the last bit."""
    same_losses = eager.losses == whole.losses
    theirs, ours = list(eager.model.parameters()), list(whole.model.parameters())
    differing = sum(not torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    elements = f"{sum(p.numel() for p in ours):,}"
    eager_ms, whole_ms = (1000 * statistics.median(run.seconds) for run in (eager, whole))

    table = Table(title="the same training run, twice")
    table.add_column("")
    table.add_column("eager", justify="right")
    table.add_column("wholestep", justify="right")
    table.add_column("")
    table.add_row("final loss", f"{eager.losses[-1]:.9f}", f"{whole.losses[-1]:.9f}", _verdict(same_losses))
    table.add_row("parameters", elements, elements, _verdict(differing == 0))
    table.add_row("median time per step", f"{eager_ms:.1f} ms", f"{whole_ms:.1f} ms", f"{eager_ms / whole_ms:.2f}x")
    table.add_row("nodes in the graph", "", f"{len(step.last.gm.graph.nodes):,}" if step.last else "", "")
    table.add_row("graphs captured", "", str(len(step.graphs)), "")
    table.add_row("capture time, in all", "", f"{step.capture_seconds:.2f} s", "")
    console.print(table)
    for reason in step.recompiles:
        console.print(f"captured again: {reason}", style="dim", markup=False)
    return same_losses and differing == 0


def show_sample(model: TinyGPT, vocabulary: Sequence[str], args: argparse.Namespace, console: Console) -> None:
    """The trained model is still the user's own module: switch it to eval and sample from it."""
    model.eval()
    prompt = torch.tensor([[vocabulary.index(character) for character in "Alice "]], device=args.device)
    text = "".join(vocabulary[i] for i in model.generate(prompt, args.sample)[0].tolist())
    console.print("\na sample of the model that wholestep trained:", style="bold")
    console.print(text, style="dim", markup=False, highlight=False)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=500, help="training steps of each run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="characters in a window")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=200, help="characters to sample at the end, 0 for none")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    if torch.device(args.device).type == "cuda":
        # Some CUDA kernels add in an order of their own; without this, eager is not even equal to eager.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    text = TEXT.read_text(encoding="ascii")
    vocabulary = sorted(set(text))
    index = {character: i for i, character in enumerate(vocabulary)}
    tokens = torch.tensor([index[character] for character in text])
    config = Config(len(vocabulary), args.context, args.layers, args.heads, args.width, args.dropout)

    step = ws.compile(train_step)
    eager, whole = make_run(train_step, config, args), make_run(step, config, args)
    console.print(f"torch {torch.__version__} on {args.device}, {args.steps} steps of {args.batch} x {args.context}")
    train(eager, whole, tokens, args, console)
    equal = show_result(eager, whole, step, console)
    if args.sample:
        show_sample(whole.model, vocabulary, args, console)
    return 0 if equal else 1


def _get_random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _verdict(equal: bool) -> str:
    return "[green]equal to the bit[/green]" if equal else "[bold red]NOT equal[/bold red]"


if __name__ == "__main__":
    sys.exit(main())
