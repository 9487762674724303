"""All entries of the corpus, and the codes of those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from corpus import more_recipes, recipes
from corpus.entry import Entry
from corpus.families import CAUSAL, IMAGES, MASKED, OTHERS, SEQUENCE_TO_SEQUENCE
from corpus.hugging_face import Family
from corpus.packages import DIFFUSERS, FRAMEWORKS, PEFT
from corpus.recipe_parts import RECIPES
from harness import Run
from packages.zoo import Sample, samples

TEXTS = {
    "Hugging Face: causal language models": CAUSAL,
    "Hugging Face: masked language models": MASKED,
    "Hugging Face: sequence to sequence": SEQUENCE_TO_SEQUENCE,
}
ASSUMED = """
masked language models/LongformerForMaskedLM
masked language models/IBertForMaskedLM
sequence to sequence/LEDForConditionalGeneration
sequence to sequence/ProphetNetForConditionalGeneration
sequence to sequence/FSMTForConditionalGeneration
images, audio, other heads/led
images, audio, other heads/mixtral_with_eager_experts
images, audio, other heads/qwen3_moe_with_eager_experts
PEFT/loha
PEFT/lokr
optimizers/timm/AdamP
optimizers/timm/Mars
optimizers/timm/SGDP
optimizers/torch_optimizer/AdamP
optimizers/torch_optimizer/Lamb
optimizers/torch_optimizer/SGDP
optimizers/pytorch_optimizer/AdaGC
optimizers/pytorch_optimizer/AdamP
optimizers/pytorch_optimizer/AvaGrad
optimizers/pytorch_optimizer/DAdaptAdaGrad
optimizers/pytorch_optimizer/DAdaptAdan
optimizers/pytorch_optimizer/DAdaptLion
optimizers/pytorch_optimizer/DAdaptSGD
optimizers/pytorch_optimizer/Nero
optimizers/pytorch_optimizer/Prodigy
optimizers/pytorch_optimizer/SGDP
optimizers/pytorch_optimizer/SGDSaI
optimizers/torch_optimizer/SWATS
optimizers/pytorch_optimizer/SWATS
""".strip().splitlines()
"""Models and optimizers that branch on values which only the step computes: they are compiled with assume=True."""

REFUSED: dict[str, str] = {
    # Layer drop: which layers run depends on random numbers.
    "Hugging Face: sequence to sequence/M2M100ForConditionalGeneration": "WS-CONTROL-FLOW",
    # The masks are drawn with numpy.
    "Hugging Face: images, audio, other heads/wav2vec2_with_masks": "WS-RNG",
    # A module is built in the first forward.
    "Hugging Face: masked language models/BigBirdForMaskedLM": "WS-PARAM-DATA",
    "Hugging Face: causal language models/BigBirdForCausalLM": "WS-PARAM-DATA",
    "Hugging Face: sequence to sequence/BigBirdPegasusForConditionalGeneration": "WS-PARAM-DATA",
}
"""Code by entry. Any other refusal is a failure of the corpus."""


def entries() -> list[Entry]:
    """Every entry, by group."""
    found = [*_texts(), *_families("Hugging Face: images, audio, other heads", IMAGES | OTHERS)]
    found += _made("PEFT", PEFT) + _made("diffusers", DIFFUSERS) + _made("frameworks", FRAMEWORKS)
    found += _made("recipes", _recipes()) + _optimizers()
    return [_with_settings(entry) for entry in found]


def _with_settings(entry: Entry) -> Entry:
    name = f"{entry.group}/{entry.name}"
    options = {"assume": True} if name.removeprefix("Hugging Face: ") in ASSUMED else {}
    why_refused = None if options else REFUSED.get(name, entry.why_refused)
    return replace(entry, why_refused=why_refused, options=options)


def _texts() -> list[Entry]:
    return [
        Entry(group, row.split(":")[1], Family(*row.split(":")).run) for group, rows in TEXTS.items() for row in rows
    ]


def _recipes() -> dict[str, Callable[[], Run]]:
    names = {*vars(recipes), *vars(more_recipes)}  # importing them filled the table
    return {name: make for name, make in RECIPES.items() if name in names}


def _families(group: str, families: dict[str, Family]) -> list[Entry]:
    return [Entry(group, name, family.run) for name, family in families.items()]


def _made(group: str, makers: dict[str, Callable[[], Run]]) -> list[Entry]:
    return [Entry(group, name, make) for name, make in makers.items()]


def _optimizers() -> list[Entry]:
    return [Entry("optimizers", name, _run_of(sample), sample.refused) for name, sample in samples().items()]


def _run_of(sample: Sample) -> Any:
    return sample.run
