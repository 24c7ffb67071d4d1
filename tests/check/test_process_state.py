"""PyTorch's settings, which a kernel has to leave as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from convgrad.check import check_problem
from convgrad.check.process_state import settings
from tests.check.broken import TEXT, Broken


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (partial(torch.set_num_threads, 7), "the number of threads"),
        (partial(torch.set_default_dtype, torch.float64), "the default dtype"),
        (partial(torch.set_grad_enabled, True), "whether gradients are recorded"),
        (partial(torch.set_grad_enabled, False), "whether gradients are recorded"),
        (partial(torch.use_deterministic_algorithms, True), "whether algorithms are deterministic"),
        (partial(torch.set_float32_matmul_precision, "medium"), "the precision of matrix products"),
        (partial(setattr, torch.backends.mkldnn, "enabled", False), "whether oneDNN is used"),
        (partial(torch.set_flush_denormal, True), "whether subnormal numbers become zero"),
        (partial(torch.manual_seed, 12345), "PyTorch's random numbers"),
    ],
)
def test_what_a_kernel_changes_is_named_and_set_back(change: Callable[[], Any], what: str) -> None:
    def changing(problem: Any, pass_: Any, a: Any, b: Any, result: Any) -> Any:
        change()
        return result

    before = settings(random=True)
    (found,) = check_problem(Broken(changing), TEXT, "forward", properties=["memory"])
    assert (found.status, found.message) == ("failed", f"it changed {what}, for whatever runs after it")
    assert settings(random=True) == before


def test_a_precision_of_one_library_is_the_users() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # now PyTorch's own getter raises
    test_what_a_kernel_changes_is_named_and_set_back(
        partial(torch.set_float32_matmul_precision, "medium"), "the precision of matrix products"
    )
