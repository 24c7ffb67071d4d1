"""Descriptions of machines: what is read, what is assumed, and what is refused with a hint."""

from dataclasses import replace

import pytest
import torch

from convgrad.diagnostics.aten_rules import MODELLED_VERSIONS, Machine, TensorSpec, machine_of, select_conv_backend


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("cuda sm_90 cudnn 9.10", {"device_type": "cuda", "capability": (9, 0), "cudnn": 91000, "assumed": ()}),
        ("H100, cuDNN 9.10.2", {"capability": (9, 0), "cudnn": 91002}),
        ("sm_100a cudnn 9.15", {"capability": (10, 0), "cudnn": 91500}),
        ("v100 cudnn 8.9.7", {"capability": (7, 0), "cudnn": 8907}),
        ("a100 torch 2.11", {"torch_version": "2.11", "cudnn": 91900}),
        *((text, {"capability": (8, 9)}) for text in ("rtx 4090", "RTX-4090", "4090", "NVIDIA GeForce RTX 4090")),
        ("cuda:0", {"device_type": "cuda", "capability": (8, 0)}),
        ("rocm gfx942 miopen 3.4", {"device_type": "cuda", "miopen": True, "cudnn": None}),
        ("mi300x nhwc", {"miopen": True, "miopen_nhwc": True}),
        ("xpu", {"device_type": "xpu"}),
        ("intel xpu", {"device_type": "xpu"}),
        ("mps", {"device_type": "mps"}),
        ("cpu arm threads 1", {"device_type": "cpu", "mkldnn_bf16": True, "mkldnn_fp16": False, "threads": 1}),
        ("cpu avx512 fp16", {"mkldnn_bf16": True, "mkldnn_fp16": True}),
        ("cpu apple", {"mkldnn": False, "winograd": True}),
        ("cpu avx2 no mkldnn", {"mkldnn_enabled": False, "mkldnn_bf16": False}),
    ],
)
def test_descriptions(text: str, want: dict) -> None:
    machine = Machine.parse(text)
    assert {name: getattr(machine, name) for name in want} == want


def test_assumptions_are_said() -> None:
    assert "assumed: compute capability 8.0; cuDNN" in str(Machine.parse("cuda"))
    assert "assumed" not in str(Machine.parse("h100 cudnn 9.10"))
    assert "(off), torch" in str(Machine.parse("h100 no cudnn"))


def test_cpu_alone_is_this_cpu() -> None:
    assert Machine.parse("cpu") == Machine.here("cpu")


@pytest.mark.parametrize(
    ("text", "words"),
    [("h100 a100", "one machine at a time, got h100 and a100"),
     ("h100 cudn 9.10", "did you mean 'cudnn'"), ("", "empty device description"), ("h10", "did you mean 'h100'"),
     ("quantum", "don't know 'quantum'; there are a100, h100, h200"), ("cudnn 9.10 sm", "don't know 'sm'"),
     *((f"cpu {words}", "is followed by a number") for words in ("threads", "threads 0", "threads 1.5", "torch"))],
)  # fmt: skip
def test_what_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Machine.parse(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here() -> None:
    assert machine_of(torch.device("cuda:0")).assumed
    with pytest.raises(ValueError, match="describe one instead"):
        Machine.here("cuda")


def test_versions() -> None:
    x, w = TensorSpec((2, 8, 9, 9)), TensorSpec((8, 8, 3, 3))
    for version in MODELLED_VERSIONS:
        assert not select_conv_backend(x, w, device=f"h100 torch {version}").notes
    for version in ("2.10", "2.16", "3.0"):
        decision = select_conv_backend(x, w, device=f"h100 torch {version}")
        assert f"torch {version} is unknown" in decision.notes[0]
    x, w = TensorSpec((1, 64, 8, 8), dtype=torch.float16), TensorSpec((64, 1, 7, 7), dtype=torch.float16)
    for version, backend in (("2.9", "CudaDepthwise2d"), ("2.12", "CudaDepthwise2d"), ("2.13", "Cudnn")):
        machine = replace(Machine.parse(f"h100 torch {version}"), depthwise_kernel="cudnn")
        assert select_conv_backend(x, w, padding=3, groups=64, device=machine).backend == backend
