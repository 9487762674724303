"""Everything that must be captured is, to the last bit of every result and all state, what eager PyTorch does."""

from __future__ import annotations

import pytest

from cases import (
    buffers_and_randomness,
    gradients,
    huggingface,
    networks,
    optimizers,
    precision,
    schedules,
    structure,
)
from harness import Case, assert_parity, assert_parity_or_refusal, cases_on, device
from selection import each_now


@pytest.mark.parametrize("each", cases_on("cpu", optimizers.CASES))
def test_an_optimizer_moves_every_weight_and_its_state_as_in_eager(each: Case) -> None:
    assert_parity(each, device())


@pytest.mark.parametrize("each", cases_on("cpu", schedules.CASES))
def test_a_schedule_is_followed_and_needs_no_new_graph(each: Case) -> None:
    assert_parity(each, device())


@pytest.mark.parametrize("each", cases_on("cpu", gradients.CASES))
def test_gradients_are_left_as_eager_leaves_them(each: Case) -> None:
    assert_parity(each, device())


@pytest.mark.parametrize("each", cases_on("cpu", buffers_and_randomness.CASES))
def test_buffers_and_random_numbers_are_those_of_eager(each: Case) -> None:
    assert_parity(each, device())


@pytest.mark.parametrize("each", cases_on("cpu", precision.CASES))
def test_any_precision_has_the_bits_of_eager(each: Case) -> None:
    assert_parity(each, device())


@pytest.mark.parametrize("each", cases_on("cpu", structure.CASES))
def test_a_step_may_be_written_in_any_of_the_usual_ways(each: Case) -> None:
    assert_parity(each, device())


@pytest.mark.parametrize("each", cases_on("cpu", networks.CASES))
def test_a_network_trains_as_in_eager(each: Case) -> None:
    assert_parity(each, device())


_FAMILIES = [each for each in (*huggingface.CASES, *huggingface.SMOKE) if "cpu" in each.devices]
_FAMILIES_NOW = [f"training-{name}-True" for name in ("GPT2", "Llama", "Bert", "T5", "Mixtral")]
_FAMILIES_NOW += ["training_with_recomputation", "training_in_bfloat16", "vision_transformer"]


@pytest.mark.parametrize("each", each_now(_FAMILIES, *_FAMILIES_NOW), ids=lambda each: each.name)
def test_a_hugging_face_model_trains_unmodified(each: Case) -> None:
    assert_parity(each, device())


@pytest.mark.parametrize(
    "each",
    cases_on(
        "cpu",
        optimizers.OTHERS,
        schedules.OTHERS,
        gradients.OTHERS,
        networks.OTHERS,
        buffers_and_randomness.OTHERS,
        precision.OTHERS,
    ),
)
def test_what_no_list_promises_is_equal_or_refused(each: Case) -> None:
    assert_parity_or_refusal(each, device())
