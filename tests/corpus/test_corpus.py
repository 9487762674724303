"""A small part of the corpus in `make test`; `make corpus` runs all of it."""

from __future__ import annotations

import pytest

from corpus.entry import Entry, Found, try_entry
from corpus.every_entry import REFUSED, entries

ENTRIES = {f"{entry.group}/{entry.name}": entry for entry in entries()}
CHOSEN = (
    "Hugging Face: causal language models/MambaForCausalLM",
    "Hugging Face: images, audio, other heads/clip",
    "Hugging Face: images, audio, other heads/resnet",
    "PEFT/lora",
    "recipes/gan",
    "recipes/maml",
    "recipes/moco",
    "recipes/soft_actor_critic",
    "recipes/wasserstein_gan_with_gradient_penalty",
)


LATER = "diffusers/unet_with_ema_model"  # the import takes longer than the entry


@pytest.mark.parametrize("name", [*CHOSEN, pytest.param(LATER, marks=pytest.mark.long)])
def test_an_entry_of_the_corpus_is_as_its_row_says(name: str) -> None:
    entry = ENTRIES[name]
    found = try_entry(entry, lower="eager")
    assert (found.kind if found.kind != "refused" else found.code) == (entry.why_refused or "equal"), found.text


def test_the_corpus_has_the_size_that_its_page_says() -> None:
    groups = [entry.group for entry in ENTRIES.values()]
    assert len(ENTRIES) >= 450
    assert sum(group.startswith("Hugging Face") for group in groups) >= 200
    assert sum(group == "optimizers" for group in groups) >= 40
    assert set(REFUSED) <= set(ENTRIES)


def test_a_step_that_differs_a_crash_and_a_refusal_are_told_apart() -> None:
    def crashes() -> None:
        raise RuntimeError("no such model")

    assert try_entry(Entry("none", "none", crashes)).kind == "eager fails"
    assert Found("different").failed
    assert Found("crash").failed
    assert not Found("refused", code="WS-RNG").failed
