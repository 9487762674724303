"""Train a small GPT twice from one seed, eager and through wholestep, and show that nothing but the time differs.

First operator by operator (`lower="eager"`): exits with 1 if a single bit differs. Then with the step compiled by
Inductor (the default of `ws.compile`), which rounds differently. `demo_ranks.py` does the first on several ranks.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import torch
from rich.console import Console

import wholestep as ws
from side_by_side import (
    Corpus,
    Run,
    add_arguments,
    comparison,
    make_deterministic,
    make_run,
    train,
    train_step,
    verdict,
)
from tiny_gpt import TinyGPT


def show_result(eager: Run, whole: Run, step: ws.CompiledStep, console: Console) -> bool:
    """Print the table; True if both runs agree to the last bit."""
    same_losses = eager.losses == whole.losses
    theirs, ours = list(eager.model.parameters()), list(whole.model.parameters())
    same_parameters = all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    elements = f"{sum(p.numel() for p in ours):,}"
    rows = [
        ("final loss", f"{eager.losses[-1]:.9f}", f"{whole.losses[-1]:.9f}", verdict(same_losses)),
        ("parameters", elements, elements, verdict(same_parameters)),
    ]
    console.print(comparison("the same training run, twice", eager, whole, rows, step))
    for reason in step.recompiles:
        console.print(f"captured again: {reason}", style="dim", markup=False)
    return same_losses and same_parameters


def show_compiled(args: argparse.Namespace, corpus: Corpus, console: Console) -> None:
    """The same step lowered to Inductor: how fast, how close, and what was compiled."""
    console.print("\nthe same step compiled by Inductor (a minute of compiling the first time) ..", style="bold")
    config = corpus.config(args)
    step = ws.compile(train_step, lower="inductor")
    eager, whole = make_run("eager", train_step, config, args), make_run("compiled", step, config, args)
    train(eager, whole, itertools.islice(corpus.batches(args), args.compiled_steps), args.compiled_steps, console)
    apart = max(abs(a - b) for a, b in zip(eager.losses, whole.losses, strict=True))
    rows = [("final loss", f"{eager.losses[-1]:.9f}", f"{whole.losses[-1]:.9f}", f"at most {apart:.1g} apart")]
    console.print(comparison("the same training run, compiled", eager, whole, rows, step))
    console.print(str(step.lowering), style="dim", markup=False, highlight=False)


def show_sample(model: TinyGPT, vocabulary: Sequence[str], args: argparse.Namespace, console: Console) -> None:
    """The trained model is still the user's own module: switch it to eval and sample from it."""
    model.eval()
    prompt = torch.tensor([[vocabulary.index(character) for character in "Alice "]], device=args.device)
    text = "".join(vocabulary[i] for i in model.generate(prompt, args.sample)[0].tolist())
    console.print("\na sample of the model that wholestep trained:", style="bold")
    console.print(text, style="dim", markup=False, highlight=False)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, steps=300, batch=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiled-steps", type=int, default=60, help="steps of the compiled run, 0 for none")
    parser.add_argument("--sample", type=int, default=200, help="characters to sample at the end, 0 for none")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    if torch.device(args.device).type == "cuda":
        make_deterministic()
    corpus = Corpus.read()
    config = corpus.config(args)
    step = ws.compile(train_step, lower="eager")
    eager, whole = make_run("eager", train_step, config, args), make_run("wholestep", step, config, args)
    console.print(f"torch {torch.__version__} on {args.device}, {args.steps} steps of {args.batch} x {args.context}")
    train(eager, whole, corpus.batches(args), args.steps, console)
    equal = show_result(eager, whole, step, console)
    if args.sample and isinstance(whole.model, TinyGPT):
        show_sample(whole.model, corpus.vocabulary, args, console)
    if args.compiled_steps:
        show_compiled(args, corpus, console)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
