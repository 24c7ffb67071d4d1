"""Limits: measured ones are kept, described ones are labelled, and the roofline is the larger of two times."""

from dataclasses import asdict

import pytest
import torch

from convgrad.diagnostics import Limits
from convgrad.diagnostics import roofline as limits
from convgrad.diagnostics.aten_rules import Machine
from convgrad.engine import store
from convgrad.problem import ConvProblem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "cache"))


def keep(device: torch.device, found: Limits) -> None:
    store.write("limits", limits._key(torch.float32, device), asdict(found))


def test_roofline() -> None:
    one = Limits(1e9, 1e9, "float32", "test")
    depthwise = ConvProblem.parse("g32mb1ic32ih10oc32kh3ph1")  # 2 * 3200 + 288 floats, 57600 operations
    assert one.seconds(depthwise) == pytest.approx(57600e-9)
    assert one.seconds(depthwise, ("grad_input", "grad_weight")) == pytest.approx(2 * 57600e-9)
    assert one.bound(depthwise) == "arithmetic"
    fast = Limits(1e9, 1e12, "float32", "test")
    assert fast.seconds(depthwise) == pytest.approx(4 * (6400 + 288) * 1e-9)
    assert fast.bound(depthwise) == "memory"
    assert one.seconds(depthwise.replace(dtype=torch.complex64)) == pytest.approx(3 * 57600e-9)
    assert limits._arithmetic(torch.complex128, CPU) == torch.float64
    p, a_number_a_second = ConvProblem.parse("mb1ic1iw4oc1kw1"), Limits(4.0, 1e30, "float32", "test")
    assert a_number_a_second.seconds(p, ("forward",)) == 4 + 1 + 4
    assert a_number_a_second.seconds(p, ("grad_input", "grad_weight", "grad_bias")) == 9 + 5  # operands are read once


def test_measured_once_and_kept(monkeypatch) -> None:
    here, best = Machine.here(), limits._best
    monkeypatch.setattr(limits, "_best", lambda call, device, seconds=0.0: best(call, device, 0.05))
    assert limits.limits_of(here, torch.float32) is None
    found = limits.limits_of(here, torch.float32, measured=True)
    assert found.source.startswith("measured on this CPU")
    assert found.bytes_per_second > 1e8
    monkeypatch.setattr(limits, "measure_limits", lambda *_: pytest.fail("measured again"))
    assert limits.limits_of(here, torch.float32, measured=True) == found


def test_those_of_a_gpu_are_kept_too(monkeypatch) -> None:
    """Beside the CPU's; until they are measured, its datasheet holds."""
    gpu = Machine.parse("h100")
    monkeypatch.setattr(Machine, "is_here", True)
    monkeypatch.setattr(limits, "conditions", str)
    monkeypatch.setattr(limits, "measure_limits", lambda *_: pytest.fail("measured again"))
    assert limits.limits_of(gpu, torch.float32) == limits.datasheet(gpu, torch.float32)
    found = Limits(2e12, 5e13, "float32", "measured on a GPU")
    keep(torch.device("cuda"), found)
    assert limits.limits_of(gpu, torch.float32, measured=True) == limits.limits_of(gpu, torch.float32) == found
    assert limits.limits_of(Machine.here(), torch.float32) is None


def test_another_precision_or_what_is_no_measurement_is_none(monkeypatch) -> None:
    keep(CPU, Limits(1e9, 1e9, "float32", "measured before"))
    with monkeypatch.context() as patch:
        patch.setattr(limits, "precision", lambda library, operation: "bf16")
        assert limits.limits_of(Machine.here(), torch.float32) is None
    assert limits.limits_of(Machine.here(), torch.float32) is not None
    store.write("limits", limits._key(torch.float32, CPU), {"wrong": 1})
    assert limits.limits_of(Machine.here(), torch.float32) is None


def test_measuring_again_only_raises(monkeypatch) -> None:
    monkeypatch.setattr(limits, "_best", lambda call, device, seconds=0.0: 1e-3)
    slow, fast = (2e3 * 2**26, 2e3 * 2048**3), (1e18, 1e21)  # of 64 MB, read and written, in a millisecond
    for before, after in (((1.0, 1.0), slow), (fast, fast)):
        keep(CPU, Limits(*before, "float32", "measured before"))
        again = limits.measure_limits(torch.float32)
        assert (again.bytes_per_second, again.flops_per_second) == after
    assert limits.limits_of(Machine.here(), torch.float64) is None


def test_datasheets() -> None:
    h100 = Machine.parse("h100 cudnn 9.10")
    bf16 = limits.limits_of(h100, torch.bfloat16)
    assert (bf16.bytes_per_second, bf16.flops_per_second) == (3350e9, 989e12)
    assert "datasheet" in str(bf16)
    assert limits.limits_of(Machine.parse("cuda sm_90"), torch.float32) is None
    called = Machine(device_type="cuda", label="NVIDIA GeForce RTX 4090")
    assert limits.datasheet(called, torch.float32) == limits.datasheet(Machine.parse("rtx4090"), torch.float32)
    assert limits.limits_of(Machine.parse("h100"), torch.int32) is None
    assert limits.limits_of(Machine.parse("xpu"), torch.float32) is None


def test_16_bit_on_a_cpu_without_instructions_for_it() -> None:
    wanted = torch.bfloat16 if Machine.here().mkldnn_bf16 else torch.float32
    assert [limits._arithmetic(dtype, CPU) for dtype in (torch.bfloat16, torch.int32)] == [wanted, torch.float32]
