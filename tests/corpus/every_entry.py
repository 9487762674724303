"""All entries of the corpus, and the codes of those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from corpus.entry import Entry
from corpus.families import CAUSAL, IMAGES, MASKED, OTHERS, SEQUENCE_TO_SEQUENCE
from corpus.hugging_face import Family
from corpus.packages import DIFFUSERS, FRAMEWORKS, PEFT
from corpus.recipes import RECIPES
from harness import Run
from packages.zoo import Sample, samples

REFUSED: dict[str, str] = {}
"""Code by entry. Any other refusal is a failure of the corpus."""


def entries() -> list[Entry]:
    """Every entry, by group."""
    found = [*_texts(), *_families("Hugging Face: images, audio, other heads", IMAGES | OTHERS)]
    found += _made("PEFT", PEFT) + _made("diffusers", DIFFUSERS) + _made("frameworks", FRAMEWORKS)
    found += _made("recipes", RECIPES) + _optimizers()
    return [replace(e, why_refused=REFUSED.get(f"{e.group}/{e.name}", e.why_refused)) for e in found]


def _texts() -> list[Entry]:
    return [
        Entry(f"Hugging Face: {kind}", row.split(":")[1], Family(*row.split(":")).run)
        for kind, rows in (
            ("causal language models", CAUSAL),
            ("masked language models", MASKED),
            ("sequence to sequence", SEQUENCE_TO_SEQUENCE),
        )
        for row in rows
    ]


def _families(group: str, families: dict[str, Family]) -> list[Entry]:
    return [Entry(group, name, family.run) for name, family in families.items()]


def _made(group: str, makers: dict[str, Callable[[], Run]]) -> list[Entry]:
    return [Entry(group, name, make) for name, make in makers.items()]


def _optimizers() -> list[Entry]:
    return [Entry("optimizers", name, _run_of(sample), sample.refused) for name, sample in samples().items()]


def _run_of(sample: Sample) -> Any:
    return sample.run
