"""Fine-tune a Hugging Face Llama with LoRA (peft): the base is frozen, the step trains and updates only the adapters.

    python examples/gallery/finetune_lora.py --steps 60

The model comes from a config with random weights, so nothing is downloaded; with `from_pretrained` the script is the
same. A short pre-training of the whole model stands for the checkpoint that one would load.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import wholestep as ws

LENGTH = 24


def sentences(count: int, step: int) -> Tensor:
    """A language to learn: each token is the one before plus `step`, from a random start, among 50."""
    start = torch.randint(50, (count, 1))
    return (start + step * torch.arange(LENGTH)) % 50


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lower", default="eager", help="inductor compiles first, which pays in longer runs")
    parser.add_argument("--report", type=Path, help="write the page of the step here")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    base = LlamaForCausalLM(config)

    def training(model: nn.Module, lr: float, steps: int, language: int, compiled: bool) -> Callable[[Tensor], Tensor]:
        """Train the parameters that ask for it; the step."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr)
        scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

        def train_step(tokens: Tensor) -> Tensor:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = ws.compile(train_step, lower=args.lower) if compiled else train_step
        losses = []
        for _ in range(steps):
            losses.append(step(sentences(16, language)))
            scheduler.step()
        print(f"language {language}: loss {losses[0].item():.3f} -> {losses[-1].item():.3f}")
        return step

    training(base, 5e-3, args.steps, language=1, compiled=False)  # stands for a checkpoint

    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.05, target_modules="all-linear")
    model = get_peft_model(base, lora)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    step = training(model, 1e-2, args.steps, language=3, compiled=True)

    assert isinstance(step, ws.CompiledStep)
    assert step.last is not None
    trainable, total = model.get_nb_trainable_parameters()
    changed = [name for name, p in model.named_parameters() if name in frozen and not torch.equal(p, frozen[name])]
    print(f"{trainable:,} of {total:,} parameters were trained; of the base, {len(changed)} changed")
    written = sum(spec.kind.value == "parameter" for spec in step.last.signature.inputs)
    print(f"the graph reads {written} parameters and writes {len(step.last.signature.write_backs)} tensors of adapters")
    merged = model.merge_and_unload()  # adapters into the base, to serve it
    merged.eval()
    tokens = sentences(1, 3)
    following = merged(tokens[:, :12]).logits[0, -1].argmax().item()
    print(f"after {tokens[0, 8:12].tolist()} it says {following}, and {tokens[0, 12].item()} is right")
    if args.report:
        print(step.report(args.report))
    return 0 if not changed else 1


if __name__ == "__main__":
    raise SystemExit(main())
