"""ATen's own backends by name: forced rightly, bit-equal where PyTorch would pick the same, refused with reasons."""

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from convgrad.backends import AtenCudnnBackend, AtenMiopenBackend, AtenMkldnnBackend, AtenNativeBackend
from convgrad.backends.aten import AtenBackend
from convgrad.backends.aten_libraries import AtenLibrary, Flags, aten_choice
from convgrad.backends.reference import ReferenceBackend
from convgrad.check.operands import integer_operands
from convgrad.engine import choose
from convgrad.engine.measure.measurer import _candidates
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Pass
from convgrad.testing import default_problems, problems
from tests.standins import install

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BY_NAME = [AtenCudnnBackend, AtenMiopenBackend, AtenMkldnnBackend, AtenNativeBackend]


def operands(problem: ConvProblem, pass_: Pass) -> list[torch.Tensor]:
    """Small integers, so that every order of summation gives the same bits."""
    given = integer_operands(problem, (pass_,), 0)
    return [given[slot] for slot in OPERANDS[pass_]]


def bias_of(problem: ConvProblem, pass_: Pass) -> torch.Tensor | None:
    if pass_ != problem.bias_pass:
        return None
    return torch.randint(-2, 3, (problem.shape_of(problem.bias_slot)[1],)).to(problem.dtype)


def assert_right(backend: AtenLibrary, problem: ConvProblem, pass_: Pass) -> None:
    a, b = operands(problem, pass_)
    bias = bias_of(problem, pass_)
    got = backend.bind(problem, (pass_,))(a, b, bias)
    want = ReferenceBackend().bind(problem, (pass_,))(a, b).to(torch.float64)
    if bias is not None:
        want = want + bias.double().view(-1, *(1,) * problem.ndim)
    assert got.dtype == problem.dtype
    assert got.is_contiguous(memory_format=problem.memory_format)
    assert torch.equal(got.double(), want), f"{backend.name} {pass_} of {problem}"


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("backend", [AtenNativeBackend(), AtenMkldnnBackend()], ids=lambda b: b.name)
@given(problem=problems(dtypes=(torch.float32,), largest=8))
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_operators_themselves_are_right(backend, pass_, problem, monkeypatch):
    with monkeypatch.context() as patch:  # also where PyTorch would take the way to them itself
        patch.setattr(AtenLibrary, "repeats_aten", lambda self, problem, device: False)
        assert_right(backend, problem, pass_)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("backend", [AtenCudnnBackend(), AtenMiopenBackend()], ids=lambda b: b.name)
@given(problem=problems(dtypes=(torch.float64,), largest=8))
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_gpu_libraries_are_called_rightly(backend, pass_, problem, monkeypatch):
    with monkeypatch.context() as patch:
        calls = install(patch)
        if backend.reasons_against(problem, (pass_,), CPU):
            assert backend.name == "aten:miopen"  # grouped and dilated
            return
        assert_right(backend, problem, pass_)
        assert len(calls) == 1
        assert calls[0].name.startswith(backend.name.removeprefix("aten:"))
        assert calls[0].name.endswith("_transpose") == (pass_ == "grad_input")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_bit_equal_to_aten_where_pytorch_would_pick_the_same(dtype):
    picked = 0
    for problem in (p for p in default_problems() if p.dtype is torch.float32):
        p = problem.replace(dtype=dtype)
        choice = int(aten_choice(p, CPU))
        backend = next((b() for b in BY_NAME if choice in b.kinds), None)
        assert backend is not None, f"PyTorch picks {choice} for {p}"
        if backend.reasons_against(p, ("forward",), CPU):
            continue
        for pass_ in PASSES:
            a, b = (torch.randn_like(t) for t in operands(p, pass_))
            got, want = backend.bind(p, (pass_,))(a, b), AtenBackend().bind(p, (pass_,))(a, b)
            assert torch.equal(got, want), (backend.name, p)
            picked += 1
    assert picked > 100


def test_a_pick_is_forced_where_pytorch_would_pick_another():
    small = ConvProblem.parse("mb1ic2ih5oc3kh3ph1")
    assert AtenNativeBackend().repeats_aten(small.replace(dtype=torch.float64), CPU)
    large = ConvProblem.parse("mb16ic8ih9oc8kh3ph1")
    assert AtenMkldnnBackend().repeats_aten(large, CPU)
    assert not AtenCudnnBackend().repeats_aten(large, CPU)
    native = AtenNativeBackend()
    a, b = (torch.randn_like(t) for t in operands(large, "forward"))
    own = torch.ops.aten._slow_conv2d_forward(a, b, [3, 3], None, [1, 1], [1, 1])
    assert torch.equal(native.bind(large, ("forward",))(a, b), own)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_native_takes_the_integers_that_pytorch_takes(dtype):
    native = AtenNativeBackend()
    p = ConvProblem.parse("mb2g2ic4ih6oc4kh3ph1").replace(dtype=dtype)
    assert native.reasons_against(p, ("forward",), CPU) == []
    a, b = (torch.randint(0, 3, p.shape_of(s)).to(dtype) for s in OPERANDS["forward"])
    assert torch.equal(native.bind(p, ("forward",))(a, b), torch.conv2d(a, b, padding=1, groups=2))
    assert native.reasons_against(p, ("grad_weight",), CPU)


def test_an_odd_stride_where_the_size_is_one_does_no_harm():
    p = ConvProblem.parse("g3mb1ic6ih8iw5oc3kh3kw3sh2sw2ph1pw1 float64 channels_last")
    a, b = operands(p, "grad_weight")
    odd = b.as_strided(b.shape, (7919, *b.stride()[1:]))
    native = AtenNativeBackend()
    want = ReferenceBackend().bind(p, ("grad_weight",))(a, b)
    assert torch.equal(native.bind(p, ("grad_weight",))(a, odd), want)


# ---- reasons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "device", "elsewhere"),
    [
        (AtenCudnnBackend(), CUDA, CPU),
        (AtenMiopenBackend(), CUDA, CPU),
        (AtenMkldnnBackend(), CPU, CUDA),
        (AtenNativeBackend(), CPU, torch.device("mps")),
    ],
    ids=lambda b: getattr(b, "name", ""),
)
def test_complex_numbers_another_device_and_a_build_without_the_library_are_reasons(
    backend: AtenLibrary, device: torch.device, elsewhere: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(dtype: torch.dtype, device: torch.device) -> list[str]:
        return backend.reasons_against(ConvProblem.parse("ic1iw3oc1kw1").replace(dtype=dtype), ("forward",), device)

    assert any("complex" in r for r in reasons(torch.complex64, device))
    assert any(r.endswith(f"got {elsewhere.type}") for r in reasons(torch.float32, elsewhere))
    for library in (torch.backends.cudnn, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    absent = [] if backend.name == "aten:native" else [f"this PyTorch was built without {backend.library}"]
    assert reasons(torch.float32, device) == absent


def test_onednn_is_not_called_where_it_is_switched_off():
    """Least of all by rule: without it, PyTorch writes columns down for every volume."""
    p = ConvProblem.parse("mb1ic32id8ih16iw16oc96kd3kh3kw3")
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns where there is no Intel GPU
    for pass_ in PASSES:
        (reason,) = AtenMkldnnBackend().reasons_against(p, (pass_,), CPU)
        assert "torch.backends.mkldnn is switched off" in reason
        assert [step.backend.name for step in choose(p, (pass_,), CPU, stored=False)] != ["aten:mkldnn"]


def test_a_weight_gradient_that_pytorch_gives_to_another_backend_is_refused(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    p = ConvProblem.parse("mb2ic2ih5oc3kh3 float64")  # asked about the CPU, where PyTorch picks its own kernels
    assert AtenCudnnBackend().reasons_against(p, ("forward",), CPU) == []
    assert AtenCudnnBackend().reasons_against(p, ("grad_input",), CPU) == []
    (reason,) = AtenCudnnBackend().reasons_against(p, ("grad_weight",), CPU)
    assert "only through convolution_backward, which picks Slow2d for this problem" in reason


def test_a_weight_gradient_that_pytorch_would_give_to_the_library_is_pytorchs_own(monkeypatch):
    calls = install(monkeypatch)
    monkeypatch.setattr(AtenLibrary, "repeats_aten", lambda self, problem, device: True)
    assert_right(AtenCudnnBackend(), ConvProblem.parse("mb2ic2ih5oc3kh3 float64"), "grad_weight")
    assert calls == []


# ---- flags -----------------------------------------------------------------------------------------


def test_flags_are_stricter_than_pytorchs_only_where_they_forbid_what_it_allows():
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=True):
        assert Flags(deterministic=True).stricter_than_pytorch(torch.float16)
        assert Flags(allow_tf32=False).stricter_than_pytorch(torch.float32)
        assert not Flags(allow_tf32=False).stricter_than_pytorch(torch.float64)
        assert not Flags(True, False, True).stricter_than_pytorch(torch.float32)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        assert not Flags(True, True, False).stricter_than_pytorch(torch.float32)


def test_a_backend_is_deterministic_unless_its_flags_say_otherwise():
    assert AtenCudnnBackend().deterministic
    assert AtenCudnnBackend(Flags(deterministic=True)).deterministic
    assert not AtenCudnnBackend(Flags(deterministic=False)).deterministic


def test_miopen_refuses_what_pytorch_does_not_give_it(monkeypatch):
    install(monkeypatch)
    dilated = ConvProblem.parse("g2ic2ih7oc2kh3dh1")
    assert "grouped and dilated" in AtenMiopenBackend().reasons_against(dilated, ("forward",), CPU)[0]
    strided = ConvProblem.parse("g2ic2ih7oc2kh3sh2")
    assert AtenMiopenBackend().reasons_against(strided, ("forward",), CPU) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    strict = AtenMiopenBackend(Flags(deterministic=True))
    assert "grouped and strided" in strict.reasons_against(strided, ("grad_weight",), CPU)[0]


def test_onednn_is_measured_where_pytorch_does_not_call_it():
    ways = [_candidates(ConvProblem.parse(f"mb{n}ic32id8oc32kd3pd1"), ("forward",), CPU) for n in (1, 2)]
    assert ["aten:mkldnn" in found for found in ways] == [True, False]


def test_rows_left_over_never_reach_onednn():
    """Its workspace is too small for them (`without_slack`)."""
    seen: list[ConvProblem] = []

    class Watched(AtenMkldnnBackend):
        def operator(self, problem, pass_, device):
            seen.append(problem)
            return super().operator(problem, pass_, device)

    problem = ConvProblem.parse("mb1ic4id6oc3kd1sd2 channels_last")  # the last row and column are read by nothing
    for pass_ in PASSES:
        assert_right(Watched(), problem, pass_)
    assert [p.input_size for p in seen] == [(5, 5, 5)] * 3
