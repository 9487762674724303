"""Hugging Face models straight from their config: random weights, small sizes, unmodified."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness import Case, Run, batch_of, case, tokens_of

VOCABULARY = 67
LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
BERT_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LANGUAGE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA_LIKE),
    "Bert": ("BertConfig", "BertForMaskedLM", BERT_LIKE),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {**LLAMA_LIKE, "sliding_window": 4}),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA_LIKE),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA_LIKE, "head_dim": 8}),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", {**LLAMA_LIKE, "head_dim": 8}),
    "Roberta": ("RobertaConfig", "RobertaForMaskedLM", {**BERT_LIKE, "pad_token_id": 1}),
    "DistilBert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "OPT": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {**LLAMA_LIKE, "num_local_experts": 4}),
    "DebertaV2": ("DebertaV2Config", "DebertaV2ForMaskedLM", BERT_LIKE),
    "GPTNeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BERT_LIKE),
    "T5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
}


def language_model(name: str, **changes: Any) -> nn.Module:
    """A small model of that family with random weights."""
    import transformers

    config_name, model_name, settings = LANGUAGE_MODELS[name]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`torch.jit.script` is deprecated", DeprecationWarning
        )  # DeBERTa still uses it
        config = getattr(transformers, config_name)(**{**special, **settings, **changes})
        model: nn.Module = getattr(transformers, model_name)(config)
    return model.train()


def hugging_face_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The step of the README."""
    loss: torch.Tensor = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def training(
    where: torch.device,
    name: str,
    mask: bool = False,
    *,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **changes: Any,
) -> Run:
    model = language_model(name, **changes).to(where)
    optimizer = make_optimizer(model.parameters(), lr=1e-3)

    def batch(i: int) -> dict[str, torch.Tensor]:
        ids = tokens_of(where, i, 2, 9, vocabulary=VOCABULARY - 3) + 3
        if not mask:
            return {"input_ids": ids, "labels": ids}
        attended = (torch.arange(9, device=where) < torch.tensor([[9], [6]], device=where)).long()
        return {"input_ids": ids, "attention_mask": attended, "labels": ids.masked_fill(attended == 0, -100)}

    return Run(hugging_face_step, lambda i: (model, optimizer, batch(i)), {"model": model, "optimizer": optimizer})


def training_with_recomputation(where: torch.device) -> Run:
    run = training(where, "GPT2")
    model: Any = run.watch["model"]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return run


def training_in_bfloat16(where: torch.device) -> Run:
    run = training(where, "Llama")
    run.watch["model"].to(torch.bfloat16)
    return run


def vision_transformer(where: torch.device) -> Run:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    model = transformers.ViTForImageClassification(config).to(where).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batch(i: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": batch_of(where, i, 2, 3, 8, 8), "labels": tokens_of(where, i, 2, vocabulary=5)}

    return Run(hugging_face_step, lambda i: (model, optimizer, batch(i)), {"model": model, "optimizer": optimizer})


CASES: list[Case] = [
    *(case(training, name, mask) for name in ("GPT2", "Llama", "Bert") for mask in (False, True)),
    case(training_with_recomputation, options={"hooks": "trace"}),
    case(training_in_bfloat16, steps=4),
]

SMOKE: list[Case] = [
    *(case(training, name, True, steps=3) for name in LANGUAGE_MODELS if name not in ("GPT2", "Llama", "Bert")),
    case(vision_transformer, steps=3),
]
