"""What watches memory sees what is there, and nothing else; PyTorch's settings have to be left as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from convgrad.check import check_problem
from convgrad.check.guards import Guarded, PeakMemory, Poison, settings

from .broken import TEXT, Broken


def test_watching_memory() -> None:
    with PeakMemory() as watch:
        a = torch.zeros(1000)
        for _ in range(3):
            torch.ones(500)
        b = a + 1
    assert watch.peak == 4 * 2000
    assert b.numel() == 1000
    with Poison() as poison:
        fresh = torch.empty(10)
        assert fresh.isnan().all()
        assert torch.empty(4, dtype=torch.int32).eq(2**31 - 1).all()
    assert not poison.overstepped()
    fresh.as_strided((1,), (1,), fresh.storage_offset() + 10).fill_(0)
    assert poison.overstepped()
    guard = Guarded(torch.ones(3, 4, 5).transpose(0, 2), shift=1)
    assert guard.tensor.shape == (5, 4, 3)
    assert guard.tensor.data_ptr() % 8 == 4
    assert not guard.overstepped()


def test_a_tensor_without_elements_may_be_resized_by_who_writes_it() -> None:
    with Poison() as poison:
        assert torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(0)).eq(3).all()
    assert not poison.overstepped()


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
