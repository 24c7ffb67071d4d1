"""The conditions under which PyTorch takes a backend, one predicate each.

Modelled after the members of ``ConvParams`` in ATen's ``Convolution.cpp`` (2.11 to 2.15), in their order. A condition
after the first that fails is not evaluated, there as here.
"""

from __future__ import annotations

from math import prod

import torch

from ...problem import INT32_MAX
from .call import ConvCall, short
from .decision import DecisionLog, recorded
from .layouts import cudnn_layout
from .machine import Machine

_HALF, _BF16, _FLOAT = torch.float16, torch.bfloat16, torch.float32


@recorded("it is depthwise on a CUDA or ROCm device")
def is_depthwise(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    x, w, record = c.input.shape, c.weight.shape, log.record
    return (
        record("the input is on a CUDA or ROCm device", c.input.device_type == "cuda", c.input.device_type)
        and record("not transposed", not c.transposed, f"transposed={c.transposed}")
        and record("2-D (or 1-D viewed as 2-D) or 3-D", c.input.ndim in (4, 5), f"{c.input.ndim} dimensions")
        and record("one input channel per group", x[1] == c.groups, f"{x[1]} channels, {c.groups} groups")
        and record("more than one group", c.groups > 1, f"{c.groups} groups")
        and record("out_channels is a multiple of in_channels", w[0] % x[1] == 0, f"{w[0]} % {x[1]} = {w[0] % x[1]}")
    )


@recorded("too large for 32-bit offsets, even one batch item at a time")
def _needs_64bit_no_split(log: DecisionLog, c: ConvCall) -> bool:
    x, y = prod(c.input.shape[1:]), prod(c.output_shape[1:])
    return c.input.numel > 0 and (
        log.record("one batch item of the input has more than 2**31 - 1 elements", x > INT32_MAX, x)
        or log.record("one batch item of the output has more than 2**31 - 1 elements", y > INT32_MAX, y)
    )


def _cudnn_64bit(log: DecisionLog, m: Machine) -> bool:
    return log.record(
        "64-bit offsets need cuDNN 9.3 and its v8 interface",
        (m.cudnn or 0) >= 90300 and m.cudnn_v8,
        f"{m.cudnn_text}, v8 interface {'on' if m.cudnn_v8 else 'off'}",
    )


def _cudnn_here(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    return (
        log.record("PyTorch is built with cuDNN", m.cudnn is not None, m.cudnn_text)
        and log.record("the input is on a CUDA device", c.input.device_type == "cuda", c.input.device_type)
        and log.record("torch.backends.cudnn.enabled", m.cudnn_enabled, m.cudnn_enabled)
    )


def _capability(m: Machine) -> str:
    return f"sm_{''.join(map(str, m.capability or ()))}"


@recorded("cuDNN can take it")
def use_cudnn(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    if not _cudnn_here(log, c, m):
        return False
    if _needs_64bit_no_split(log, c) and not _cudnn_64bit(log, m):
        return False
    if _BF16 in (c.input.dtype, c.weight.dtype) and not log.record(
        "bfloat16 needs compute capability 8.0 and the v8 interface",
        (m.capability or (0, 0))[0] >= 8 and m.cudnn_v8,
        f"{_capability(m)}, v8 interface {'on' if m.cudnn_v8 else 'off'}",
    ):
        return False
    # A contiguous dilated convolution additionally needs supportsDilatedConvolutionWithCuDNN, true in every build.
    return _output_padding_small(log, c)


def _output_padding_small(log: DecisionLog, c: ConvCall) -> bool:
    return log.record(
        "output_padding is smaller than the stride",
        all(p < s for p, s in zip(c.output_padding, c.stride, strict=True)),
        f"output_padding={c.output_padding}, stride={c.stride}",
    )


@recorded("cuDNN can take it as a depthwise convolution")
def use_cudnn_depthwise(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    if not _cudnn_here(log, c, m):
        return False
    layout = cudnn_layout(DecisionLog(), c.input, c.weight, m)
    last, record = layout != torch.contiguous_format, log.record
    fits = c.input.fits_32bit_index() and c.weight.fits_32bit_index()
    if not record("input and weight have 32-bit offsets", fits, f"{c.input.numel} and {c.weight.numel} elements"):
        broken = 91000 < (m.cudnn or 0) < 91500
        text = "cuDNN after 9.10.0 and before 9.15.0 is wrong for 64-bit channels_last"
        return not (last and not record(text, not broken, m.cudnn_text)) and _cudnn_64bit(log, m)
    if record("input or weight suggests channels_last, and neither is float64", last, layout):
        return True
    volta = (m.capability or (0, 0))[0] >= 7
    return record("compute capability 7.0", volta, _capability(m)) and _cudnn_contiguous_depthwise(log, c, m)


def _cudnn_contiguous_depthwise(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    """Contiguous depthwise goes to cuDNN for float16 only, and there for what once was measured to be faster."""
    x, record = c.input.shape, log.record
    if not (
        use_cudnn(log, c, m)
        and record("the input is float16", c.input.dtype == _HALF, short(c.input.dtype))
        and record("the weight is float16", c.weight.dtype == _HALF, short(c.weight.dtype))
        and is_depthwise(log, c, m)
        and record("not 3-D", c.input.ndim == 4, f"{c.input.ndim} dimensions")
        and record("not dilated", not c.dilated, f"dilation={c.dilation}")
        and record("square stride, or height 1", c.stride[0] == c.stride[1] or x[2] == 1, f"stride={c.stride}")
        and record("at least 32 channels", x[1] >= 32, f"{x[1]} channels")
    ):
        return False
    if m.since("2.13") and m.depthwise_kernel != "auto":
        flag = f"depthwise_kernel={m.depthwise_kernel!r}"
        return record("torch.backends.cudnn.depthwise_kernel is 'cudnn'", m.depthwise_kernel == "cudnn", flag)
    return _cudnn_depthwise_is_fast(log, c)


@recorded("the measured cases in which cuDNN's float16 depthwise kernel is faster")
def _cudnn_depthwise_is_fast(log: DecisionLog, c: ConvCall) -> bool:
    n, channels, height, width = c.input.shape
    stride, kernel, record = c.stride[1], c.weight.shape[3], log.record
    if record("height 1 and stride 1", height == 1 and stride == 1, f"height {height}, stride {stride}"):
        return True
    size = f"{c.weight.shape[2]}x{kernel}"
    if not (
        record("square kernel", c.weight.shape[2] == kernel, size)
        and record("kernel 1, 3 or 5", kernel in (1, 3, 5), size)
        and record("width at least 7", width >= 7, width)
    ):
        return False
    if record("stride 1", stride == 1, stride):
        return True
    if not record("stride 2", stride == 2, stride):
        return False
    got = f"batch {n}, {channels} channels, width {width}, kernel {kernel}"
    if kernel == 1:
        fast = width <= 28 if n == 1 else n <= 16 and channels >= 128 and width <= 7
        return record("kernel 1: batch 1 and width <= 28, or batch <= 16, 128 channels, width <= 7", fast, got)
    fast = n == 1 or channels >= 512 or (channels >= 256 and width >= 28)
    return record("kernel 3 or 5: batch 1, or 512 channels, or 256 channels and width >= 28", fast, got)


@recorded("MIOpen can take it")
def use_miopen(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    x, both = c.input, f"groups={c.groups}, dilation={c.dilation}"
    return (
        log.record("float32, float16 or bfloat16", x.dtype in (_FLOAT, _HALF, _BF16), short(x.dtype))
        and log.record("torch.backends.cudnn.enabled", m.cudnn_enabled, m.cudnn_enabled)
        and log.record("the input is on a ROCm device", x.device_type == "cuda", x.device_type)
        and log.record("PyTorch is built with MIOpen", m.miopen, m.miopen)
        and log.record("at most 5 dimensions", x.ndim <= 5, x.ndim)
        and log.record("not both grouped and dilated", not (c.groups > 1 and c.dilated), both)
    )


@recorded("oneDNN can take it and is worth it")
def use_mkldnn(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    x, dtype, record = c.input, c.input.dtype, log.record
    if not (
        record("PyTorch is built with oneDNN", m.mkldnn, m.mkldnn)
        and record("torch.backends.mkldnn.enabled", m.mkldnn_enabled, m.mkldnn_enabled)
    ):
        return False
    if c.transposed and not _output_padding_small(log, c):
        return False
    on_cpu = x.device_type == "cpu"
    if on_cpu and not x.mkldnn and dtype in (_BF16, _HALF):
        has = m.mkldnn_bf16 if dtype == _BF16 else m.mkldnn_fp16
        need = "AVX-512, AVX-NE-CONVERT or Arm BF16" if dtype == _BF16 else "AVX512-FP16 or AMX-FP16"
        if record(f"{short(dtype)} instructions ({need})", has, has):
            return True
    if record("the input is an opaque oneDNN tensor", x.mkldnn, x.mkldnn):
        return True
    kernel, batch, elements = c.weight.shape[-2:], x.shape[0], prod(x.shape[:4])
    return (
        record("the input is on the CPU", on_cpu, x.device_type)
        and record("the input is float32", dtype == _FLOAT, short(dtype))
        and record(
            "strided, dilated, batch >= 16, kernel other than 1x1, or more than one thread",
            c.strided or c.dilated or batch >= 16 or kernel != (1, 1) or m.threads > 1,
            f"stride={c.stride}, dilation={c.dilation}, batch {batch}, kernel {kernel}, {m.threads} threads",
        )
        and record(
            "grouped, kernel above 3x3, batch above 1, or N*C*H*W above 20480",
            c.groups > 1 or min(kernel) > 3 or batch > 1 or elements > 20480,
            f"groups={c.groups}, kernel {kernel}, batch {batch}, {elements} elements",
        )
    )


@recorded("the Winograd 3x3 depthwise kernel can take it (Apple and 32-bit Arm, RISC-V; no gradient needed)")
def use_winograd(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    x, w, record = c.input, c.weight, log.record
    contiguous = all(t is None or t.is_contiguous() for t in (x, w, c.bias))
    return (
        record("no gradient is needed", not c.need_backward, f"need_backward={c.need_backward}")
        and record("built for __ARM_NEON__ or the RISC-V vector extension", m.winograd, m.winograd)
        and record("2-D", x.ndim == 4 and w.ndim == 4, f"{x.ndim - 2}-D")
        and record("one input channel per group", x.shape[1] == c.groups, f"{x.shape[1]}, {c.groups} groups")
        and record("out_channels is a multiple of in_channels", w.shape[0] % x.shape[1] == 0, w.shape[0])
        and record("3x3 kernel", w.shape[1:] == (1, 3, 3), w.shape[1:])
        and record("on the CPU", x.device_type == w.device_type == "cpu", x.device_type)
        and record("float32", x.dtype == w.dtype == _FLOAT, f"{short(x.dtype)}, {short(w.dtype)}")
        and record(
            "input, weight and bias are contiguous",
            contiguous,
            f"{x.suggest_memory_format()}, {w.suggest_memory_format()}",
        )
        and record(
            "stride and dilation 1, not transposed",
            not (c.strided or c.dilated or c.transposed),
            f"stride={c.stride}, dilation={c.dilation}, transposed={c.transposed}",
        )
    )


@recorded("NNPACK can take it")
def use_nnpack(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    x, kernel, padding, record = c.input, c.weight.shape[2:], tuple(low for low, _ in c.padding), log.record
    return (
        record("NNPACK is enabled", m.nnpack_enabled, m.nnpack_enabled)
        and record("NNPACK is built in and runs here", m.nnpack, m.nnpack)
        and record("the input is on the CPU", x.device_type == "cpu", x.device_type)
        and record("the input is float32", x.dtype == _FLOAT, short(x.dtype))
        and record("not dilated, not transposed", not (c.dilated or c.transposed), f"dilation={c.dilation}")
        and record("2-D", x.ndim == 4 and c.weight.ndim == 4, f"{x.ndim - 2}-D")
        and record("kernel below 17x17", max(kernel) < 17, kernel)
        and record("padding below the kernel size", padding[0] < kernel[0] and padding[1] < kernel[1], padding)
        and record("batch of at least 16", x.shape[0] >= 16, f"batch {x.shape[0]}")
    )


@recorded("MPS can take it")
def use_mps(log: DecisionLog, c: ConvCall, m: Machine) -> bool:
    kind = c.input.device_type
    return not _needs_64bit_no_split(log, c) and log.record("the input is on an MPS device", kind == "mps", kind)
