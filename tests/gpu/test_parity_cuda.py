"""The parity suite on CUDA: the same cases, and the forms that only CUDA has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
from harness import Case, assert_parity, assert_parity_or_refusal, cases_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch warns where the first product of a process runs in a thread of autograd, in eager too.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

PROMISED = (
    optimizers.CASES,
    schedules.CASES,
    gradients.CASES,
    buffers_and_randomness.CASES,
    precision.CASES,
    structure.CASES,
    networks.CASES,
    huggingface.CASES,
    huggingface.SMOKE,
)
OTHERS = (
    optimizers.OTHERS,
    schedules.OTHERS,
    gradients.OTHERS,
    networks.OTHERS,
    buffers_and_randomness.OTHERS,
    precision.OTHERS,
)


@pytest.fixture(autouse=True)
def eager_repeats_itself() -> Iterator[None]:
    """Kernels that sum in the same order each time: without them eager differs from eager."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.parametrize("each", cases_on("cuda", *PROMISED))
def test_a_step_on_cuda_has_the_bits_of_eager(each: Case) -> None:
    assert_parity(each, torch.device("cuda"))


@pytest.mark.parametrize("each", cases_on("cuda", *OTHERS))
def test_what_no_list_promises_is_equal_or_refused_on_cuda(each: Case) -> None:
    assert_parity_or_refusal(each, torch.device("cuda"))
