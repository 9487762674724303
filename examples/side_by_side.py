"""What the demos share: two training runs of one small GPT that take each batch in turn, and a table of both.

Taking turns means that a busy machine slows both runs alike.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
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
Row = tuple[str, str, str, str]


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

    name: str
    step: Step
    model: nn.Module
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

    @property
    def milliseconds(self) -> float:
        """The median of a step."""
        return 1000 * statistics.median(self.seconds)


@dataclass(frozen=True)
class Corpus:
    """The text as numbers."""

    vocabulary: list[str]
    tokens: Tensor

    @classmethod
    def read(cls) -> Corpus:
        text = TEXT.read_text(encoding="ascii")
        vocabulary = sorted(set(text))
        index = {character: i for i, character in enumerate(vocabulary)}
        return cls(vocabulary, torch.tensor([index[character] for character in text]))

    def batches(self, args: argparse.Namespace, rank: int = 0) -> Iterator[Batch]:
        """Random windows of the text, others on each rank; the targets are the same window, one character on."""
        generator = torch.Generator().manual_seed(args.seed + rank)
        offsets = torch.arange(args.context + 1)
        for _ in range(args.steps):
            starts = torch.randint(len(self.tokens) - args.context, (args.batch, 1), generator=generator)
            window = self.tokens[starts + offsets].to(args.device)
            yield {"idx": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}

    def config(self, args: argparse.Namespace) -> Config:
        return Config(len(self.vocabulary), args.context, args.layers, args.heads, args.width, args.dropout)


def add_arguments(parser: argparse.ArgumentParser, steps: int, batch: int) -> None:
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each run")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="characters in a window")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)


def make_deterministic() -> None:
    """Some CUDA kernels add in an order of their own; without this, eager is not even equal to eager."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def make_run(
    name: str,
    step: Step,
    config: Config,
    args: argparse.Namespace,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    rank: int = 0,
) -> Run:
    """A model that is the same on all ranks; its dropout is not."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model = wrap(TinyGPT(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(args.steps))
    torch.manual_seed(args.seed + rank)
    return Run(name, step, model, optimizer, scheduler, _get_random_state(device))


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def train(eager: Run, whole: Run, batches: Iterator[Batch], steps: int, console: Console) -> None:
    """Both runs, batch by batch, with a progress bar."""
    columns = (
        TextColumn("training"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn(f"loss: {eager.name} {{task.fields[eager]:.4f}}  {whole.name} {{task.fields[whole]:.4f}}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, eager=math.nan, whole=math.nan)
        for batch in batches:
            eager.advance(batch)
            whole.advance(batch)
            progress.update(task, advance=1, eager=eager.losses[-1], whole=whole.losses[-1])


def comparison(title: str, eager: Run, whole: Run, rows: Sequence[Row], step: ws.CompiledStep) -> Table:
    """A column for each run: the rows given, then time, then what is known of the graph."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column(eager.name, justify="right")
    table.add_column(whole.name, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(*row)
    faster = f"{eager.milliseconds / whole.milliseconds:.2f}x"
    table.add_row("time per step", f"{eager.milliseconds:.1f} ms", f"{whole.milliseconds:.1f} ms", faster)
    table.add_row("nodes in the graph", "", f"{step.last.num_nodes:,}" if step.last else "", "")
    table.add_row("graphs captured", "", str(len(step.graphs)), "")
    table.add_row("capture time", "", f"{step.capture_seconds:.2f} s", "")
    return table


def verdict(equal: bool, otherwise: str = "NOT equal") -> str:
    return "[green]equal to the bit[/green]" if equal else f"[bold red]{otherwise}[/bold red]"


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
