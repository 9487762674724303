"""trl's SFTTrainer by WholestepTrainerMixin: the losses, metrics and weights of SFTTrainer, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from wholestep.integrations.transformers import WholestepTrainerMixin

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # the warnings of four packages are not ours


class CompiledSFTTrainer(WholestepTrainerMixin, SFTTrainer):
    """As the documentation says."""


def tokenizer() -> Any:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(40)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def trained(kind: Any, folder: Path, **options: Any) -> Any:
    """Two epochs, two micro-batches to an update."""
    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=43,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    texts = [" ".join(f"w{(i * j) % 40}" for j in range(1, 7)) for i in range(8)]
    args = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=16,
    )
    data = Dataset.from_dict({"text": texts})
    model = LlamaForCausalLM(config)
    trainer = kind(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **options)
    trainer.train()
    return trainer


def logs(trainer: Any) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second")
    return [{k: v for k, v in log.items() if not any(t in k for t in timed)} for log in trainer.state.log_history]


def test_supervised_fine_tuning_trains_as_in_trl(tmp_path: Path) -> None:
    expected = trained(SFTTrainer, tmp_path / "trl")
    actual = trained(CompiledSFTTrainer, tmp_path / "ours", compile_options={"lower": "eager"})
    for want, got in zip(logs(expected), logs(actual), strict=True):
        assert want == got
    assert "mean_token_accuracy" in logs(actual)[0]
    for want, got in zip(expected.model.parameters(), actual.model.parameters(), strict=True):
        assert torch.equal(want, got)
    assert len(actual.compiled_steps) == 2  # updates, and micro-batches before them
