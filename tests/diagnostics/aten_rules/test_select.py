"""Machines that are not here: cases derived by hand from PyTorch's source, and the rules that an answer lists."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch

from convgrad.diagnostics.aten_rules import BACKENDS, Machine, TensorSpec, select_conv_backend
from convgrad.diagnostics.aten_rules import determine_backend_memory_format as layout_of
from convgrad.diagnostics.aten_rules.call import suggested
from convgrad.diagnostics.aten_rules.conditions import FACTS, LAYOUT_RULES, SELECT, Table, parsed, rules
from convgrad.errors import ShapeError
from convgrad.problem import ConvProblem

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def spec(*shape: int, dtype: torch.dtype = F32, last: bool = False, grad: bool = False) -> TensorSpec:
    t = torch.empty(shape, device="meta", dtype=dtype)
    if last:
        t = t.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)])
    return TensorSpec(shape, t.stride(), dtype, requires_grad=grad)


def depthwise(n: int, c: int, h: int, w: int, k: int, *, dtype: torch.dtype = F16, last: bool = False, **more):
    x, weight = spec(n, c, h, w, dtype=dtype, last=last), spec(c, 1, k, k, dtype=dtype)
    device = more.pop("device", "h100 cudnn 9.10")
    return select_conv_backend(x, weight, padding=k // 2, groups=c, device=device, **more).backend


H = "h100 cudnn 9.10"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (depthwise(8, 96, 56, 56, 7), "CudaDepthwise2d"),  # kernel 7 is not in the table
        (depthwise(8, 96, 56, 56, 7, last=True), "Cudnn"),
        (depthwise(8, 96, 56, 56, 7, last=True, dtype=BF16), "Cudnn"),
        (depthwise(8, 96, 56, 56, 7, last=True, dtype=F64), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3), "Cudnn"),  # float16, stride 1, kernel 3, width >= 7
        (depthwise(8, 96, 56, 56, 3, dtype=BF16), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, dtype=F32), "CudaDepthwise2d"),
        (depthwise(8, 31, 56, 56, 3), "CudaDepthwise2d"),  # fewer than 32 channels
        (depthwise(8, 32, 6, 6, 3), "CudaDepthwise2d"),  # narrower than 7
        (depthwise(8, 32, 6, 7, 3), "Cudnn"),
        (depthwise(8, 96, 56, 56, 3, stride=2), "CudaDepthwise2d"),  # 96 < 256 channels
        (depthwise(8, 256, 28, 28, 3, stride=2), "Cudnn"),
        (depthwise(8, 256, 27, 27, 3, stride=2), "CudaDepthwise2d"),
        (depthwise(8, 512, 7, 7, 5, stride=2), "Cudnn"),
        (depthwise(1, 32, 14, 14, 5, stride=2), "Cudnn"),  # batch 1
        (depthwise(1, 32, 28, 28, 1, stride=2), "Cudnn"),
        (depthwise(1, 32, 29, 29, 1, stride=2), "CudaDepthwise2d"),
        (depthwise(16, 128, 7, 7, 1, stride=2), "Cudnn"),
        (depthwise(17, 128, 7, 7, 1, stride=2), "CudaDepthwise2d"),
        (depthwise(8, 512, 28, 28, 3, stride=3), "CudaDepthwise2d"),
        (depthwise(8, 512, 28, 28, 3, stride=(1, 2)), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, dilation=2), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, dilation=2, last=True), "Cudnn"),
        (depthwise(8, 96, 56, 56, 3, device="cuda sm_61 cudnn 9.10"), "CudaDepthwise2d"),  # before Volta
        (depthwise(8, 96, 56, 56, 3, device="h100 native torch 2.13"), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, device="h100 native torch 2.12"), "Cudnn"),  # the flag came with 2.13
        (depthwise(8, 96, 56, 56, 3, device="h100 no cudnn"), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, device="h100 no cudnn", last=True), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, device="rocm gfx942 miopen"), "MiopenDepthwise"),
        (depthwise(8, 96, 56, 56, 3, device="rocm", dtype=F64), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, device="rocm", dilation=2), "CudaDepthwise2d"),  # grouped and dilated
        (depthwise(8, 96, 56, 56, 3, device="rocm no miopen"), "CudaDepthwise2d"),
        (depthwise(8, 96, 56, 56, 3, device="xpu"), "Overrideable"),
        (depthwise(8, 96, 56, 56, 3, device="mps"), "Mps"),
    ],
)  # fmt: skip
def test_depthwise_on_devices_that_are_not_here(got: str, want: str) -> None:
    assert got == want


def test_forced_depthwise_kernel_skips_the_table_only() -> None:
    machine = replace(Machine.parse(H), depthwise_kernel="cudnn", torch_version="2.13")
    assert depthwise(8, 96, 56, 56, 7, device=machine) == "Cudnn"
    assert depthwise(8, 96, 56, 56, 7, device=machine, dtype=F32) == "CudaDepthwise2d"
    assert depthwise(8, 96, 56, 56, 7, device=replace(machine, torch_version="2.12")) == "CudaDepthwise2d"


@pytest.mark.parametrize(
    ("cudnn", "last", "want"),
    [("9.10", True, "Cudnn"), ("9.10.1", True, "CudaDepthwise2d"), ("9.14", True, "CudaDepthwise2d"),
     ("9.15", True, "Cudnn"), ("9.14", False, "Cudnn"), ("9.2", False, "CudaDepthwise2d"),
     ("9.2", True, "CudaDepthwise2d")],
)  # fmt: skip
def test_depthwise_with_64bit_offsets(cudnn: str, last: bool, want: str) -> None:
    assert depthwise(1, 64, 8192, 4097, 7, device=f"h100 cudnn {cudnn}", last=last) == want


def conv(d: int, device: str, dtype: torch.dtype = F32, **more) -> str:
    n, size = more.pop("n", 2), more.pop("size", 16)
    x, w = spec(n, 8, *[size] * d, dtype=dtype), spec(8, 8 // more.get("groups", 1), *[3] * d, dtype=dtype)
    return select_conv_backend(x, w, device=device, **more).backend


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (conv(1, H), "Cudnn"),
        (conv(2, H, F64), "Cudnn"),
        (conv(3, H, transposed=True), "CudnnTranspose"),
        (conv(2, H, transposed=True, output_padding=1, dilation=2), "SlowTranspose2d"),  # output_padding >= stride
        (conv(3, H, transposed=True, output_padding=1, dilation=2), "SlowTranspose3d"),
        (conv(2, H, BF16), "Cudnn"),
        (conv(2, "t4 cudnn 9.10", BF16), "Slow2d"),  # no bfloat16 before Ampere
        (conv(3, "t4 cudnn 9.10", BF16), "SlowDilated3d"),
        (conv(2, "t4 cudnn 9.10", BF16, dilation=2), "SlowDilated2d"),
        (conv(2, "h100 no cudnn"), "Slow2d"),
        (conv(2, "rocm"), "Miopen"),
        (conv(2, "rocm", transposed=True), "MiopenTranspose"),
        (conv(3, "rocm", groups=2, dilation=2), "SlowDilated3d"),
        (conv(2, "rocm", F64), "Slow2d"),
        (conv(1, "xpu"), "Overrideable"),
        (conv(2, "mps", transposed=True), "MpsTranspose"),
        (conv(1, "mps"), "Mps"),
        (conv(2, "cpu avx512", BF16), "Mkldnn"),
        (conv(2, "cpu avx2", BF16), "Slow2d"),
        (conv(2, "cpu avx512", F16), "Slow2d"),
        (conv(2, "cpu avx512 fp16", F16, transposed=True), "MkldnnTranspose"),
        (conv(2, "cpu arm"), "Mkldnn"),
        (conv(2, "cpu arm", BF16), "Mkldnn"),
        (conv(2, "cpu arm no bf16", BF16), "Slow2d"),
        (conv(2, "cpu macos"), "Slow2d"),
        (conv(2, "cpu macos", n=16), "NnpackSpatial"),
        (conv(3, "cpu macos"), "Slow3d"),
    ],
)
def test_dense_on_devices_that_are_not_here(got: str, want: str) -> None:
    assert got == want


def test_64bit_that_no_batch_split_can_help() -> None:
    x, w = spec(1, 2, 2**16, 2**15, dtype=F16), spec(8, 2, 1, 1, dtype=F16)
    assert select_conv_backend(x, w, device="h100 cudnn 9.3").backend == "Cudnn"
    assert select_conv_backend(x, w, device="h100 cudnn 9.2").backend == "Slow2d"
    assert select_conv_backend(x, w, device="mps").backend == "Overrideable"


def test_kernels_without_a_backward_are_chosen_only_where_none_is_needed() -> None:
    x, w = spec(2, 8, 16, 16), spec(8, 1, 3, 3)
    for grad, want in ((False, "Winograd3x3Depthwise"), (True, "Slow2d")):
        assert select_conv_backend(x, w, groups=8, device="cpu macos", need_backward=grad).backend == want


def test_empty_and_impossible() -> None:
    assert conv(2, H, n=0) == "Empty"
    opaque = TensorSpec((0, 8, 4, 4), mkldnn=True)
    assert select_conv_backend(opaque, spec(8, 8, 3, 3)).backend == "MkldnnEmpty"
    with pytest.raises(ShapeError, match="Only zero batch or zero channel"):
        select_conv_backend(spec(2, 8, 0, 4), spec(8, 8, 3, 3), padding=2, device=H)
    with pytest.raises(TypeError, match="expected a Tensor or a TensorSpec, got NoneType"):
        select_conv_backend(spec(2, 8, 4, 4))


def layout(backend: str, device: str, x: TensorSpec, w: TensorSpec) -> torch.memory_format:
    return layout_of(x, w, backend, device=device).memory_format


def test_layout_rules_of_libraries_that_are_not_here() -> None:
    x, w = spec(2, 8, 4, 4, last=True), spec(8, 8, 3, 3)
    x3, w3 = spec(2, 8, 4, 4, 4), spec(8, 8, 3, 3, 3, last=True)
    last, last_3d, contiguous = torch.channels_last, torch.channels_last_3d, torch.contiguous_format
    for backend, device in (("Cudnn", H), ("CudnnTranspose", "a100"), ("Miopen", "rocm nhwc"), ("Mkldnn", "cpu arm"),
                            ("Overrideable", "xpu"), ("Mps", "mps"), ("MkldnnTranspose", "cpu avx512")):  # fmt: skip
        assert layout(backend, device, x, w) == last
        assert layout(backend, device, x3, w3) == last_3d
        if backend not in ("Overrideable", "Mps"):
            assert layout(backend, device, spec(2, 8, 4, 4, dtype=F64, last=True), w) == contiguous
    for backend in ("Slow2d", "SlowDilated2d", "SlowTranspose2d"):
        assert layout(backend, "cpu", x, w) == last
        assert layout(backend, "h100", x, w) == contiguous  # a CPU rule
        assert layout(backend, "cpu", x3, w3) == contiguous  # a 2-D rule
    for backend, device in (("Miopen", "rocm"), ("CudaDepthwise2d", H), ("Slow3d", "cpu"), ("Cudnn", "rocm")):
        assert layout(backend, device, x, w) == contiguous
    assert layout("Overrideable", "cuda", x, w) == contiguous  # XPU's rule asks for XPU tensors


def test_mps_reads_exact_strides_since_2_12() -> None:
    x = TensorSpec((2, 4, 5, 5), (200, 1, 40, 8))  # 4 of the 8 channels of a channels_last tensor
    assert suggested(x.meta) == torch.channels_last
    assert suggested(x.meta, exact_strides=True) == torch.contiguous_format
    w = spec(4, 4, 3, 3)
    assert layout("Mps", "mps torch 2.11", x, w) == torch.channels_last
    assert layout("Mps", "mps torch 2.12", x, w) == torch.contiguous_format


def test_old_cudnn_in_old_releases() -> None:
    machine = replace(Machine.parse("v100 torch 2.12"), cudnn=8004)
    x3, w3 = spec(2, 8, 4, 4, 4, last=True), spec(8, 8, 3, 3, 3)
    assert layout_of(x3, w3, "Cudnn", device=machine).memory_format == torch.contiguous_format
    newer = replace(machine, torch_version="2.13")
    assert layout_of(x3, w3, "Cudnn", device=newer).memory_format == torch.channels_last_3d


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="not one of ATen's backends"):
        layout_of(spec(1, 1, 3, 3), spec(1, 1, 3, 3), "cudnn")


def test_a_decision_explains_itself() -> None:
    operands = spec(8, 96, 56, 56, dtype=BF16), spec(96, 1, 7, 7, dtype=BF16)
    d = select_conv_backend(*operands, padding=3, groups=96, device=H)
    text = str(d)
    words = "backend: CudaDepthwise2d; channels_last; bfloat16; cuDNN 9.10.0; channels 96; AND; OR; NOT; [ConvParams::"
    assert all(word in text for word in words.split("; "))
    assert [r.text for r in d.rules if r.depth == 0][:2] == [
        "the batch or the channels are empty", "it is depthwise on a CUDA or ROCm device"]  # fmt: skip
    failed = next(r for r in d.rules if r.text == "dtypes == (float16, float16)")
    assert (failed.holds, failed.value) == (False, "bfloat16 and bfloat16")
    with pytest.raises(AttributeError, match="about a backend"):
        _ = d.memory_format


def test_a_problem_is_enough() -> None:
    p = ConvProblem.parse("g96mb8ic96ih56oc96oh56kh7ph3")
    assert select_conv_backend(p, device=H).backend == "CudaDepthwise2d"
    last = p.replace(memory_format=torch.channels_last, dtype=BF16)
    assert select_conv_backend(last, device=H).backend == "Cudnn"
    assert select_conv_backend(p).backend == "Mkldnn"


def test_a_problem_with_padding_that_pytorch_does_not_know() -> None:
    causal = ConvProblem(2, 8, 8, 8, (32,), (4,), (1,), ((3, 0),), (1,), (32,))
    d = select_conv_backend(causal, device=H)
    assert "padded copy of the input, 2x8x35" in d.notes[0]
    wide = ConvProblem(2, 8, 8, 1, (33,), (4,), (2,), ((1, 2),), (1,), (17,), origin="transposed")
    assert "crops it" in select_conv_backend(wide, device=H).notes[0]
    plain = ConvProblem(2, 8, 6, 1, (34,), (4,), (2,), ((1, 1),), (1,), (17,), origin="transposed")
    assert select_conv_backend(plain, device="cpu").backend == "MkldnnTranspose"


def test_every_condition_reads_facts_that_there_are() -> None:
    known = {*FACTS, *(f.name for f in fields(Machine)), *rules()}
    known |= {"float16", "bfloat16", "float32", "float64", "contiguous_format", "INT32_MAX", "since"}

    def walk(table: Table) -> Iterator[str]:
        for condition, answer in table.items():
            yield condition
            if isinstance(answer, dict):
                yield from walk(answer)
            else:
                assert answer.format(T="", d=2) in BACKENDS

    told = [expression for _, _, expression in rules().values()]
    assert len(told) > 20
    for expression in (*told, *map(parsed, walk(SELECT)), *map(parsed, LAYOUT_RULES.values())):
        names = [n for n in ast.walk(expression) if isinstance(n, ast.Name)]
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}  # by a comprehension
        assert {n.id for n in names} <= known | bound | {*dir(builtins)}, ast.unparse(expression)
