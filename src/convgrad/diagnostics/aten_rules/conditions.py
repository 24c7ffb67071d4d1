"""The questions that PyTorch asks before it takes a backend, one predicate each, condition by condition.

Modelled after the members of ``ConvParams`` in ATen's ``Convolution.cpp`` (2.11 to 2.15), in their order. A condition
after the first that fails is not asked, there as here.
"""

from __future__ import annotations

from math import prod

import torch

from .call import Call
from .layouts import cudnn_layout
from .machine import Machine
from .rules import Trail, question
from .tensors import INT32_MAX

__all__ = ["is_depthwise", "use_cudnn", "use_cudnn_depthwise", "use_miopen", "use_mkldnn", "use_mps", "use_nnpack",
           "use_winograd", "use_xnnpack"]  # fmt: skip

_HALF, _BF16, _FLOAT = torch.float16, torch.bfloat16, torch.float32


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@question("it is depthwise on a CUDA or ROCm device")
def is_depthwise(t: Trail, c: Call, m: Machine) -> bool:
    x, w = c.input.shape, c.weight.shape
    return (
        t.ask("the input is on a CUDA or ROCm device", c.input.device_type == "cuda", c.input.device_type)
        and t.ask("not transposed", not c.transposed, f"transposed={c.transposed}")
        and t.ask("2-D (or 1-D viewed as 2-D) or 3-D", c.input.ndim in (4, 5), f"{c.input.ndim} dimensions")
        and t.ask("one input channel per group", x[1] == c.groups, f"{x[1]} channels, {c.groups} groups")
        and t.ask("more than one group", c.groups > 1, f"{c.groups} groups")
        and t.ask("out_channels is a multiple of in_channels", w[0] % x[1] == 0, f"{w[0]} % {x[1]} = {w[0] % x[1]}")
    )


@question("too large for 32-bit offsets, even one batch item at a time")
def needs_64bit_no_split(t: Trail, c: Call) -> bool:
    if c.input.numel == 0:
        return False
    one_input = c.input.numel // c.input.shape[0]
    if t.ask("one batch item of the input has more than 2**31 - 1 elements", one_input > INT32_MAX, one_input):
        return True
    one_output = prod(c.output_shape[1:])
    return t.ask("one batch item of the output has more than 2**31 - 1 elements", one_output > INT32_MAX, one_output)


def _cudnn_64bit(t: Trail, m: Machine) -> bool:
    return t.ask(
        "64-bit offsets need cuDNN 9.3 and its v8 interface",
        (m.cudnn or 0) >= 90300 and m.cudnn_v8,
        f"{m.cudnn_text}, v8 interface {'on' if m.cudnn_v8 else 'off'}",
    )


def _cudnn_here(t: Trail, c: Call, m: Machine) -> bool:
    return (
        t.ask("PyTorch is built with cuDNN", m.cudnn is not None, m.cudnn_text)
        and t.ask("the input is on a CUDA device", c.input.device_type == "cuda", c.input.device_type)
        and t.ask("torch.backends.cudnn.enabled", m.cudnn_enabled, m.cudnn_enabled)
    )


@question("cuDNN can take it")
def use_cudnn(t: Trail, c: Call, m: Machine) -> bool:
    if not _cudnn_here(t, c, m):
        return False
    if needs_64bit_no_split(t, c) and not _cudnn_64bit(t, m):
        return False
    if _BF16 in (c.input.dtype, c.weight.dtype) and not t.ask(
        "bfloat16 needs compute capability 8.0 and the v8 interface",
        (m.capability or (0, 0))[0] >= 8 and m.cudnn_v8,
        f"sm_{''.join(map(str, m.capability or ()))}, v8 interface {'on' if m.cudnn_v8 else 'off'}",
    ):
        return False
    # A contiguous dilated convolution additionally needs supportsDilatedConvolutionWithCuDNN, true in every build.
    return _output_padding_small(t, c)


def _output_padding_small(t: Trail, c: Call) -> bool:
    return t.ask(
        "output_padding is smaller than the stride",
        not c.output_padding_big,
        f"output_padding={c.output_padding}, stride={c.stride}",
    )


@question("cuDNN can take it as a depthwise convolution")
def use_cudnn_depthwise(t: Trail, c: Call, m: Machine) -> bool:
    if not _cudnn_here(t, c, m):
        return False
    layout = cudnn_layout(c.input, c.weight, m)
    fits = c.input.fits_32bit_index() and c.weight.fits_32bit_index()
    if not t.ask("input and weight have 32-bit offsets", fits, f"{c.input.numel} and {c.weight.numel} elements"):
        if layout != torch.contiguous_format and not t.ask(
            "cuDNN after 9.10.0 and before 9.15.0 is wrong for 64-bit channels_last",
            not 91000 < (m.cudnn or 0) < 91500,
            m.cudnn_text,
        ):
            return False
        return _cudnn_64bit(t, m)
    if t.ask(
        "input or weight suggests channels_last, and neither is float64", layout != torch.contiguous_format, layout
    ):
        return True
    if not t.ask(
        "compute capability 7.0", (m.capability or (0, 0))[0] >= 7, f"sm_{''.join(map(str, m.capability or ()))}"
    ):
        return False
    return _cudnn_contiguous_depthwise(t, c, m)


def _cudnn_contiguous_depthwise(t: Trail, c: Call, m: Machine) -> bool:
    """Contiguous depthwise goes to cuDNN for float16 only, and there for what once was measured to be faster."""
    x = c.input.shape
    if not (
        use_cudnn(t, c, m)
        and t.ask("the input is float16", c.input.dtype == _HALF, _short(c.input.dtype))
        and t.ask("the weight is float16", c.weight.dtype == _HALF, _short(c.weight.dtype))
        and is_depthwise(t, c, m)
        and t.ask("not 3-D", c.input.ndim == 4, f"{c.input.ndim} dimensions")
        and t.ask("not dilated", not c.dilated, f"dilation={c.dilation}")
        and t.ask("square stride, or height 1", c.stride[0] == c.stride[1] or x[2] == 1, f"stride={c.stride}")
        and t.ask("at least 32 channels", x[1] >= 32, f"{x[1]} channels")
    ):
        return False
    if m.since("2.13") and m.depthwise_kernel != "auto":
        flag = f"depthwise_kernel={m.depthwise_kernel!r}"
        return t.ask("torch.backends.cudnn.depthwise_kernel asks for cuDNN", m.depthwise_kernel == "cudnn", flag)
    return cudnn_depthwise_is_fast(t, c)


@question("the measured cases in which cuDNN's float16 depthwise kernel is faster")
def cudnn_depthwise_is_fast(t: Trail, c: Call) -> bool:
    n, channels, height, width = c.input.shape
    stride, kernel = c.stride[1], c.weight.shape[3]
    if t.ask("height 1 and stride 1", height == 1 and stride == 1, f"height {height}, stride {stride}"):
        return True
    size = f"{c.weight.shape[2]}x{kernel}"
    if not (
        t.ask("square kernel", c.weight.shape[2] == kernel, size)
        and t.ask("kernel 1, 3 or 5", kernel in (1, 3, 5), size)
        and t.ask("width at least 7", width >= 7, width)
    ):
        return False
    if t.ask("stride 1", stride == 1, stride):
        return True
    if not t.ask("stride 2", stride == 2, stride):
        return False
    got = f"batch {n}, {channels} channels, width {width}, kernel {kernel}"
    if kernel == 1:
        fast = width <= 28 if n == 1 else n <= 16 and channels >= 128 and width <= 7
        return t.ask("kernel 1: batch 1 and width <= 28, or batch <= 16, 128 channels, width <= 7", fast, got)
    fast = n == 1 or channels >= 512 or (channels >= 256 and width >= 28)
    return t.ask("kernel 3 or 5: batch 1, or 512 channels, or 256 channels and width >= 28", fast, got)


@question("MIOpen can take it")
def use_miopen(t: Trail, c: Call, m: Machine) -> bool:
    return (
        t.ask("float32, float16 or bfloat16", c.input.dtype in (_FLOAT, _HALF, _BF16), _short(c.input.dtype))
        and t.ask("torch.backends.cudnn.enabled", m.cudnn_enabled, m.cudnn_enabled)
        and t.ask("the input is on a ROCm device", c.input.device_type == "cuda", c.input.device_type)
        and t.ask("PyTorch is built with MIOpen", m.miopen, m.miopen)
        and t.ask("at most 5 dimensions", c.input.ndim <= 5, c.input.ndim)
        and t.ask("not both grouped and dilated", not (c.groups > 1 and c.dilated), f"groups={c.groups}, {c.dilation}")
    )


@question("oneDNN can take it and is worth it")
def use_mkldnn(t: Trail, c: Call, m: Machine) -> bool:
    x, dtype = c.input, c.input.dtype
    if not (
        t.ask("PyTorch is built with oneDNN", m.mkldnn, m.mkldnn)
        and t.ask("torch.backends.mkldnn.enabled", m.mkldnn_enabled, m.mkldnn_enabled)
    ):
        return False
    if c.transposed and not _output_padding_small(t, c):
        return False
    on_cpu = x.device_type == "cpu"
    if on_cpu and not x.mkldnn and dtype in (_BF16, _HALF):
        has = m.mkldnn_bf16 if dtype == _BF16 else m.mkldnn_fp16
        need = "AVX-512, AVX-NE-CONVERT or Arm BF16" if dtype == _BF16 else "AVX512-FP16 or AMX-FP16"
        if t.ask(f"{_short(dtype)} instructions ({need})", has, has):
            return True
    if t.ask("the input is an opaque oneDNN tensor", x.mkldnn, x.mkldnn):
        return True
    return (
        t.ask("the input is on the CPU", on_cpu, x.device_type)
        and t.ask("the input is float32", dtype == _FLOAT, _short(dtype))
        and _mkldnn_parallel(t, c, m)
        and _mkldnn_large(t, c)
    )


def _mkldnn_parallel(t: Trail, c: Call, m: Machine) -> bool:
    kernel = c.weight.shape[-2:]
    return t.ask(
        "strided, dilated, batch >= 16, kernel other than 1x1, or more than one thread",
        c.strided or c.dilated or c.input.shape[0] >= 16 or kernel[-1] != 1 or kernel[-2] != 1 or m.threads > 1,
        f"stride={c.stride}, dilation={c.dilation}, batch {c.input.shape[0]}, kernel {kernel}, {m.threads} threads",
    )


def _mkldnn_large(t: Trail, c: Call) -> bool:
    kernel, elements = c.weight.shape[-2:], prod(c.input.shape[:4])
    return t.ask(
        "grouped, kernel above 3x3, batch above 1, or N*C*H*W above 20480",
        c.groups > 1 or (kernel[-1] > 3 and kernel[-2] > 3) or c.input.shape[0] > 1 or elements > 20480,
        f"groups={c.groups}, kernel {kernel}, batch {c.input.shape[0]}, {elements} elements",
    )


@question("XNNPACK can take it (mobile builds, no gradient needed)")
def use_xnnpack(t: Trail, c: Call, m: Machine) -> bool:
    return (
        t.ask("no gradient is needed", not c.need_backward, f"need_backward={c.need_backward}")
        and t.ask("a mobile build", m.mobile, m.mobile)
        and t.ask("not transposed", not c.transposed, f"transposed={c.transposed}")
        and t.ask("one input channel per group", c.input.shape[1] == c.groups, f"{c.input.shape[1]}, {c.groups} groups")
        and t.ask(
            "2-D, float32, on the CPU, and no weight that needs a gradient",
            c.input.ndim == 4
            and c.weight.ndim == 4
            and {c.input.dtype, c.weight.dtype} == {_FLOAT}
            and {c.input.device_type, c.weight.device_type} == {"cpu"}
            and not c.weight.requires_grad,
            f"{_short(c.input.dtype)}, {c.input.device_type}",
        )
    )


@question("the Winograd 3x3 depthwise kernel can take it (Apple and 32-bit Arm, RISC-V; no gradient needed)")
def use_winograd(t: Trail, c: Call, m: Machine) -> bool:
    x, w = c.input, c.weight
    return (
        t.ask("no gradient is needed", not c.need_backward, f"need_backward={c.need_backward}")
        and t.ask("built for __ARM_NEON__ or the RISC-V vector extension", m.winograd, m.winograd)
        and t.ask("2-D", x.ndim == 4 and w.ndim == 4, f"{x.ndim - 2}-D")
        and t.ask("one input channel per group", x.shape[1] == c.groups, f"{x.shape[1]}, {c.groups} groups")
        and t.ask("out_channels is a multiple of in_channels", w.shape[0] % x.shape[1] == 0, w.shape[0])
        and t.ask("3x3 kernel", w.shape[1:] == (1, 3, 3), w.shape[1:])
        and t.ask("on the CPU", {x.device_type, w.device_type} == {"cpu"}, x.device_type)
        and t.ask("float32", {x.dtype, w.dtype} == {_FLOAT}, f"{_short(x.dtype)}, {_short(w.dtype)}")
        and t.ask(
            "input, weight and bias are contiguous",
            x.is_contiguous() and w.is_contiguous() and (c.bias is None or c.bias.is_contiguous()),
            f"{x.suggest_memory_format()}, {w.suggest_memory_format()}",
        )
        and t.ask(
            "stride and dilation 1, not transposed",
            not (c.strided or c.dilated or c.transposed),
            f"stride={c.stride}, dilation={c.dilation}, transposed={c.transposed}",
        )
    )


@question("NNPACK can take it")
def use_nnpack(t: Trail, c: Call, m: Machine) -> bool:
    kernel = c.weight.shape[2:]
    return (
        t.ask("NNPACK is enabled", m.nnpack_enabled, m.nnpack_enabled)
        and t.ask("NNPACK is built in and runs here", m.nnpack, m.nnpack)
        and t.ask("the input is on the CPU", c.input.device_type == "cpu", c.input.device_type)
        and t.ask("the input is float32", c.input.dtype == _FLOAT, _short(c.input.dtype))
        and t.ask("not dilated, not transposed", not (c.dilated or c.transposed), f"dilation={c.dilation}")
        and t.ask("2-D", c.input.ndim == 4 and c.weight.ndim == 4, f"{c.input.ndim - 2}-D")
        and t.ask("kernel below 17x17", kernel[0] < 17 and kernel[1] < 17, kernel)
        and t.ask("padding below the kernel size", c.padding[0] < kernel[0] and c.padding[1] < kernel[1], c.padding)
        and (m.mobile or t.ask("batch of at least 16", c.input.shape[0] >= 16, f"batch {c.input.shape[0]}"))
    )


@question("MPS can take it")
def use_mps(t: Trail, c: Call, m: Machine) -> bool:
    if needs_64bit_no_split(t, c):
        return False
    return t.ask("the input is on an MPS device", c.input.device_type == "mps", c.input.device_type)
