"""Hugging Face families from their configs: made small by the names of their sizes, random weights, unmodified code."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness import Run

VOCABULARY = 67
SMALL: dict[str, int] = {
    **dict.fromkeys("hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim embedding_size".split(), 32),
    **dict.fromkeys("intermediate_size ffn_dim d_ff hidden_dim n_inner encoder_ffn_dim decoder_ffn_dim".split(), 48),
    **dict.fromkeys("ffn_hidden_size shared_intermediate_size".split(), 48),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 24),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers".split(), 2),
    **dict.fromkeys("num_decoder_layers num_encoder_layers".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), 4),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx".split(), 64),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts".split(), 4),
    **dict.fromkeys("num_key_value_heads num_experts_per_tok type_vocab_size".split(), 2),
    **dict.fromkeys("n_group topk_group n_shared_experts bos_token_id".split(), 1),
    **dict.fromkeys("head_dim d_kv qk_nope_head_dim v_head_dim state_size".split(), 8),
    **dict.fromkeys("rotary_dim qk_rope_head_dim sliding_window window_size conv_kernel time_step_rank".split(), 4),
    **dict.fromkeys("q_lora_rank kv_lora_rank".split(), 16),
    **dict.fromkeys("pad_token_id decoder_start_token_id".split(), 0),
    "vocab_size": VOCABULARY,
    "eos_token_id": 2,
    "attention_window": 4,
}
"""Sizes by the names that configs give them. A family that needs another value has it in its row."""

Batch = Callable[[int, Any], dict[str, Tensor]]


def tokens(i: int, length: int = 9, rows: int = 2) -> Tensor:
    """Token numbers of call i, none of them special."""
    return torch.randint(3, VOCABULARY - 3, (rows, length), generator=torch.Generator().manual_seed(i))


def noise(i: int, *shape: int) -> Tensor:
    """Normal numbers of call i."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i))


def text(i: int, model: Any) -> dict[str, Tensor]:
    ids = tokens(i)
    return {"input_ids": ids, "labels": ids}


def masked_text(i: int, model: Any) -> dict[str, Tensor]:
    ids = tokens(i)
    attended = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    return {"input_ids": ids, "attention_mask": attended, "labels": ids.masked_fill(attended == 0, -100)}


def images(i: int, model: Any) -> dict[str, Tensor]:
    size = model.config.image_size if isinstance(getattr(model.config, "image_size", None), int) else 32
    channels = getattr(model.config, "num_channels", 3)
    return {"pixel_values": noise(i, 2, channels, size, size), "labels": torch.tensor([i % 2, 1])}


def classes_of_text(i: int, model: Any) -> dict[str, Tensor]:
    return {"input_ids": tokens(i), "labels": torch.tensor([i % 2, 1])}


def spans(i: int, model: Any) -> dict[str, Tensor]:
    return {
        "input_ids": tokens(i),
        "start_positions": torch.tensor([1, i % 5]),
        "end_positions": torch.tensor([3, 6]),
    }


def labels_of_tokens(i: int, model: Any) -> dict[str, Tensor]:
    return {"input_ids": tokens(i), "labels": tokens(i + 50) % 2}


@dataclass(frozen=True)
class Family:
    """A model class with its config. `changes` are settings of the config."""

    config: str
    model: str
    batch: Batch = text
    changes: dict[str, Any] = field(default_factory=dict)
    step: Callable[..., Any] | None = None
    prepare: Callable[[Any], Any] | None = None
    """What the user does with the model before training."""

    def build(self) -> Any:
        import transformers

        kind = getattr(transformers, self.config)
        with _quiet():
            usual = kind()
            names = {*vars(usual), *getattr(kind, "attribute_map", {})}
            sizes = {name: size for name, size in SMALL.items() if name in names and _one(getattr(usual, name, None))}
            model = getattr(transformers, self.model)(kind(**sizes | self.changes)).train()
        return model if self.prepare is None else self.prepare(model)

    def run(self) -> Run:
        model = self.build()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return Run(
            self.step or train,
            lambda i: (model, optimizer, self.batch(i, model)),
            {"model": model, "optimizer": optimizer},
        )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """The step of the README."""
    loss: Tensor = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _one(value: Any) -> bool:
    """Whether a size is one number, not one for each layer."""
    return value is None or isinstance(value, int)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations and advice of the packages
        yield
