"""What watches memory sees what is there, and nothing else."""

from __future__ import annotations

import torch

from convgrad.check.memory_guards import PeakMemory, Poison, guarded_copy


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
    guard = guarded_copy(torch.ones(3, 4, 5).transpose(0, 2), shift=1)
    assert guard.tensor.shape == (5, 4, 3)
    assert guard.tensor.data_ptr() % 8 == 4
    assert not guard.overstepped()


def test_a_tensor_without_elements_may_be_resized_by_who_writes_it() -> None:
    with Poison() as poison:
        assert torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(0)).eq(3).all()
    assert not poison.overstepped()
