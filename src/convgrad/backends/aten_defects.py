"""Known defects of PyTorch's convolutions, and how each is avoided: one row of `DEFECTS` each.

PyTorch hands most convolutions on a CPU to oneDNN, some of whose kernels read uninitialized memory, write past the
end, or take a stride for a size. They were found with freed memory full of large numbers (`convgrad check --aten`,
``tests/fuzz``); without, such a result is right on one day and wrong on another.

A row whose ``instead`` names backends is avoided: where its condition holds, ATen is not chosen, and computes only on
request. The others are cured inside of `aten`: it hands the same problem over in another form, and no time is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _compat
from ..problem import ConvProblem, Output, Outputs, effective_kernel
from ..settings import mkldnn


@dataclass(frozen=True)
class Defect:
    """One thing that PyTorch's convolution gets wrong."""

    name: str  # a word or two for tables and tests
    outputs: Outputs  # the passes of the plain problem that are wrong, first the one that the example shows
    dtypes: tuple[torch.dtype, ...]  # of the operands
    condition: Callable[[ConvProblem], bool]  # whether a problem is concerned, as PyTorch would be called for it
    when: str  # the condition in words
    happens: str  # what goes wrong, as the end of the sentence "PyTorch's kernel is wrong here: ..."
    reference: str  # where it is reported, or which kernel of which version does it
    example: str  # a problem that shows it
    instead: tuple[str, ...] = ()  # backends that compute it right, the fastest first; none where `aten` avoids it
    instructions: str = "avx512"  # of the kernel; "fp16" is AVX512-FP16, and "" stands for any

    def here(self) -> bool:
        """Whether this machine's kernels have it: whether oneDNN uses these instructions."""
        limit = _compat.onednn_limit().upper()
        avx2 = _compat.avx2_here() and limit != "AVX" and not limit.startswith("SSE")
        avx512 = avx2 and _compat.avx512_here() and not limit.startswith("AVX2")
        amx, fp16 = avx512 and _compat.amx_here(), avx512 and _compat.onednn_has(torch.float16)
        return {"": True, "avx2": avx2, "avx512": avx512, "amx": amx, "fp16": fp16}[self.instructions]

    def concerns(self, problem: ConvProblem, output: Output) -> bool:
        """Whether PyTorch gets this output of this problem wrong on this machine."""
        # in the order of what it costs
        return problem.dtype in self.dtypes and output in self.outputs and self.condition(problem) and self.here()


# ---- problems and operands that `aten` changes ---------------------------------------------------


def without_slack(problem: ConvProblem) -> ConvProblem:
    """Return the problem; over an input cropped to what its kernel reads where PyTorch would corrupt memory.

    oneDNN's workspace for a strided channels_last 1x1 convolution is too small for its backward, if rows or columns are
    left over behind the last stride and the channels fill no vector: the process dies, sooner or later. Of a transposed
    one the rows left over are output_padding; the result is plain, for PyTorch states no cropped output.
    """
    p = problem
    in_danger = p.ndim > 1 and p.pointwise and p.channels_last and p.dtype.is_floating_point
    if not in_danger or p.in_channels // p.groups % 16 == 0:
        return p
    tight = tuple((dim.low, dim.least_high) for dim in p.dims)
    return p if tight == p.padding else p.replace(padding=tight, origin="plain")


#: (shape, strides) of tensors whose strides are as PyTorch expects them; emptied when full.
_ordinary: set[Any] = set()


def tidy(t: Tensor) -> Tensor:
    """Return a view with ordinary strides in dimensions of size 1, or the tensor itself where they are ordinary.

    No index multiplies these strides, so they may be anything, but PyTorch 2.13 (oneDNN, groups, a channels_last
    weight) returns wrong numbers for others, silently.
    """
    key = (t.shape, t.stride())
    if key in _ordinary:
        return t
    channels_last = _compat.channels_last_of(t.dim() - 2)
    if t.dim() >= 4 and 1 in t.shape:
        layout = channels_last if _compat.suggests_channels_last(t) else torch.contiguous_format
        usual = _compat.usual_strides(t.shape, layout is channels_last)
        if t.is_contiguous(memory_format=layout):
            if key[1] != usual:
                return t.as_strided(t.shape, usual)
        elif layout is not channels_last and t.is_contiguous(memory_format=channels_last):
            return t.clone(memory_format=torch.contiguous_format)  # channels_last but for a stride that PyTorch reads
    if len(_ordinary) >= 4096:
        _ordinary.clear()
    _ordinary.add(key)
    return t


def reads_every_stride(problem: ConvProblem) -> bool:
    """Whether PyTorch's result may depend on the weight's strides in dimensions of size 1, which it should not.

    Its own CPU kernel for images in channels_last gives no gradient for a weight with others, but an error.
    """
    p = problem
    own = p.ndim == 2 and p.channels_last and max(p.kernel_size) > 1
    return p.ndim > 1 and (p.groups > 1 or own) and 1 in p.weight_shape


def reads_batch_stride(problem: ConvProblem) -> bool:
    """Whether PyTorch's grad_weight depends on the batch stride of an input of one image, which it should not.

    Its own CPU kernel (float64, or oneDNN switched off) does, with groups in channels_last: an image that was permuted
    from [H, W, C] and unsqueezed has such a stride.
    """
    p = problem
    return p.batch == 1 and p.groups > 1 and p.ndim == 2 and p.channels_last and not p.transposed


def reads_odd_strides(problem: ConvProblem, input: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's result, or in 1-D its layout, would depend on strides of these operands that mean nothing."""
    if problem.ndim == 1:
        return _compat.suggests_channels_last(weight.unsqueeze(2))
    return (reads_every_stride(problem) and tidy(weight) is not weight) or (
        reads_batch_stride(problem) and tidy(input) is not input
    )


def _reads_padding_alone(p: ConvProblem, dim: int) -> bool:
    """Whether one position of the output has no element of the input under its kernel, in one dimension."""
    n, out, k, step, low, _, dilation = p.dims[dim]
    firsts = (first for first in range(-low, out * step - low, step) if not 0 <= first < n)
    return any(all(not 0 <= first + tap * dilation < n for tap in range(k)) for first in firsts)


def _leaves_out(p: ConvProblem, dim: int) -> bool:
    """Whether kernels that overlap or touch, in one dimension, leave a position of the input that no result reads."""
    n, out, k, step, low, _, dilation = p.dims[dim]
    if step > effective_kernel(k, dilation):
        return False
    return not {*range(n)} <= {q * step + tap * dilation - low for q in range(out) for tap in range(k)}


def _one_slice_deep(p: ConvProblem) -> bool:
    return p.ndim == 3 and p.input_size[0] == 1 < p.kernel_size[0]


def _skips(p: ConvProblem) -> bool:
    """Whether kernels leave rows or slices between them, in oneDNN's AMX kernel that copies its input."""
    sizes = [*zip(p.stride, p.kernel_size, p.dilation, strict=True)][:-1]
    if not any(step > effective_kernel(k, dilation) for step, k, dilation in sizes):
        return False
    if p.ndim < 3:  # it fails without blocking by rows alone, which padding as wide as the kernel excludes
        return any(low >= k for k, (low, _) in zip(p.kernel_size, p.padding, strict=True))
    return not p.pointwise or any(map(any, p.padding))


def _joins_columns(p: ConvProblem) -> bool:
    """Whether oneDNN's AMX kernel multiplies by the channels of several kernel columns at once, which lie padded apart.

    They are those of a kernel row; or, where stride, kernel and row can be divided by a number, so many neighbors.
    """
    channels, k, step, n = p.in_channels // p.groups, p.kernel_size[-1], p.stride[-1], p.input_size[-1]
    if channels % 2 or channels >= 32 or k == 1 or p.dilation[-1] > 1:
        return False
    if p.groups == 1 and p.padding[-1][0] <= 0:
        together = [i for i in range(2, min(k, step, n) + 1) if n % i == k % i == step % i == 0]
        fitting = [i for i in together if channels * i <= 32 or channels * i % 32 == 0]
        if fitting:
            return channels * fitting[-1] > 32
    return channels < 16 and channels * k > 32 and channels * k % 32 == 0


# ---- the table -----------------------------------------------------------------------------------

_BF16 = (torch.bfloat16,)
_BF16_AND_32 = (torch.bfloat16, torch.float32)
_SIXTEEN_AND_32 = (torch.float32, torch.bfloat16, torch.float16)
_FLOATS = (*_SIXTEEN_AND_32, torch.float64)
#: The cost of each against the wrong kernel, for 64 channels of 2x14x14 (bfloat16, shallow volume): see the docs.
_AT_THE_BORDER = ("native", "aten:padded", "aten:float32", "im2col")
_INSIDE = ("native", "aten:float32", "im2col")
_MAIN = "oneDNN 3.12 and its main branch of August 2026, "

DEFECTS: tuple[Defect, ...] = (
    Defect("shallow volume", ("grad_weight",), _BF16, instead=_AT_THE_BORDER,
           condition=lambda p: p.ndim == 3 and p.kernel_size[0] > p.input_size[0] and p.padding[0][0] > 0
           and p.output_size[0] > 1,
           when="3-D, a kernel deeper than the input, padding in depth, more than one output slice",
           happens="the weight gradient adds uninitialized memory, and may write past its end",
           reference=f"{_MAIN}jit_avx512_core_bf16_conv_kernel.cpp, compute_od_loop_common",
           example="mb2ic16id2ih14iw14oc16kd3kh3kw3pd1ph1pw1 bfloat16"),
    Defect("front padding", ("grad_weight",), _BF16_AND_32, instead=_AT_THE_BORDER,
           condition=lambda p: p.ndim == 3 and p.padding[0][0] > p.stride[0] > 1 and p.padding[0][0] % p.stride[0] != 0,
           when="3-D, padding in depth larger than a stride of 2 or more and no multiple of it",
           happens="the weight gradient reads and writes outside of its operands",
           reference=f"{_MAIN}jit_avx512_common_conv_kernel.cpp, compute_od_loop_partial",
           example="g16mb4ic16id4ih3iw3oc32kd4kh3kw2sd2sh3sw3pd3ph0pw0 channels_last"),
    Defect("narrow rows", ("grad_weight",), _BF16, instead=_AT_THE_BORDER,
           condition=lambda p: any(dim.input <= dim.stride > 1 and dim.low > 0 for dim in p.dims[-2:]),
           when="a padded height or width that is no larger than its stride of 2 or more",
           happens="the weight gradient adds uninitialized memory", reference="oneDNN 3.12, jit_bf16:avx512_core_bf16",
           example="mb4ic18iw1oc2kw13sw3pw6 bfloat16"),
    Defect("dilated rows", ("grad_weight",), _BF16, instead=_INSIDE,
           condition=lambda p: p.channels_last and p.ndim > 1 and p.dilation[-2] > 1 == p.stride[-2]
           and p.output_size[-1] > 28 and p.in_channels // p.groups % 16 != 0
           and (p.groups > 1 or p.in_channels > 16),
           when="channels_last, a height dilated and not strided, more than 28 results in a row, and input channels "
                "that are no multiple of 16 (a group; without groups, more than 16)",
           happens="the weight gradient reads the wrong rows of the input, and unwritten memory behind the last one",
           reference="oneDNN 3.12 and its main branch, jit_avx512_core_bf16_conv_kernel.cpp, compute_oh_step_common",
           example="mb2ic17ih12iw40oc16kh3kw3ph2pw1dh1dw0 bfloat16 channels_last"),
    Defect("one input channel", ("forward",), _BF16_AND_32, instead=_INSIDE,
           condition=lambda p: p.channels_last and p.in_channels == p.groups
           and (p.output_size[-1] == 1 < p.stride[-1] or (p.dtype is torch.bfloat16 and _one_slice_deep(p))),
           when="channels_last, one input channel a group, and a width of 1 reached by a stride of 2 or more "
                "(bfloat16 also: an input one slice deep)", happens="the output adds uninitialized memory",
           reference="oneDNN 3.12, brg_conv_fwd:avx512_core; the same for more channels: pytorch/pytorch#169688",
           example="g16mb3ic16ih17iw5oc32kh3kw5sh1sw3ph1pw1 bfloat16 channels_last"),
    Defect("strided row", ("forward",), _BF16, instead=_INSIDE,
           condition=lambda p: p.output_size[-1] == 1 < p.stride[-1] or _one_slice_deep(p), instructions="amx",
           when="on a processor with AMX, a width of 1 reached by a stride of 2 or more, or an input one slice deep",
           happens="the output is wrong by more than its size, and the process may die",
           reference="https://github.com/pytorch/pytorch/issues/169688",
           example="mb2ic16id4ih4iw3oc16kd1kh1kw3sd1sh1sw3pd0ph0pw0 bfloat16"),
    Defect("joined columns", ("forward",), _BF16, instead=_INSIDE, condition=_joins_columns, instructions="amx",
           when="on a processor with AMX, an even number of channels below 32, and a row of the kernel (or as much of "
                "it as the stride divides) with a multiple of 32 elements of them, and more than 32",
           happens="the output is wrong by more than its size: the weights are read as if they lay without padding",
           reference=f"{_MAIN}jit_brgemm_conv_utils.cpp, relo_conv_weights and trans_dim_koef",
           example="ic4iw33oc2kw16 bfloat16"),
    Defect("skipped rows", ("forward",), _BF16, instead=_INSIDE, condition=_skips, instructions="amx",
           when="on a processor with AMX, a stride in depth or height that is larger than the (dilated) kernel; of an "
                "image only with padding as wide as the kernel",
           happens="the kernel writes past the end of its buffer: the output is wrong, or the process dies",
           reference="oneDNN 3.12, brg_conv_fwd:avx10_1_512_amx",
           example="ic64id10ih3iw10oc32kd1kh1kw3sd3sh1sw1pd0ph0pw1 bfloat16"),
    Defect("slices that nothing reads", ("grad_input",), _BF16, instead=_INSIDE,
           condition=lambda p: p.ndim == 3 and _leaves_out(p, 0), instructions="amx",
           when="on a processor with AMX, 3-D, a slice of the input that no result reads",
           happens="the input gradient of that slice is uninitialized memory", reference="oneDNN 3.12",
           example="ic2id4ih4iw40oc3kd3kh3kw3sd2sh1sw1pd0ph0pw0 bfloat16"),
    Defect("rows that nothing reads", ("grad_input",), _BF16, instead=_INSIDE,
           condition=lambda p: max(p.stride) == 1 and any(_leaves_out(p, dim) for dim in range(p.ndim - 1)),
           instructions="amx",
           when="on a processor with AMX, a row or slice of the input that no result of a dilated kernel reads",
           happens="the process may die (segmentation fault)", reference="oneDNN 3.12",
           example="ic24ih2iw4oc1kh2kw2ph1pw0dh2dw0 bfloat16"),
    Defect("gaps in a narrow row", ("forward",), _BF16_AND_32, instead=_AT_THE_BORDER,
           condition=lambda p: p.channels_last and p.dilation[-1] > 1 and p.input_size[-1] < p.stride[-1]
           and p.padding[-1][0] > 0, instructions="avx2",
           when="channels_last, a dilated row, padded and narrower than its stride",
           happens="the process dies (segmentation fault), in float32 with a bias",
           reference="oneDNN 3.12, brg_conv_fwd:avx512_core_bf16, brg_conv_fwd:avx512_core and brg_conv_fwd:avx2",
           example="mb2ic17ih1iw2oc2kh3kw3sh3sw3ph1pw7dw2 channels_last bias"),
    Defect("rows of padding", ("forward",), _BF16, instead=_AT_THE_BORDER,
           condition=lambda p: any(_reads_padding_alone(p, dim) for dim in range(p.ndim - 1)), instructions="amx",
           when="on a processor with AMX, a row or slice of results that reads nothing but padding",
           happens="the process may die (segmentation fault)", reference="oneDNN 3.12, brg_conv_fwd:avx10_1_512_amx",
           example="mb3ic16ih1iw14oc16kh2kw1sw3ph1pw2dh1 bfloat16"),
    Defect("a row narrower than its stride", ("forward",), (torch.float16,), instead=_AT_THE_BORDER,
           condition=lambda p: p.input_size[-1] < p.stride[-1] and p.padding[-1][0] > 0, instructions="fp16",
           when="with AVX512-FP16, a row, padded and narrower than its stride",
           happens="the process dies (segmentation fault)", reference="oneDNN 3.12, brg_conv_fwd:avx512_core_fp16",
           example="mb3ic64ih3iw1oc64kh1kw2sw2ph0pw3dw1 float16"),
    Defect("few channels in a wide row", ("forward",), (torch.float16,), instead=_INSIDE,
           condition=lambda p: p.depthwise and p.in_channels == p.out_channels <= 16 and p.stride[-1] == 1
           and p.dilation[-1] == 1 and p.kernel_size[-1] >= 15 and p.output_size[-1] > 30, instructions="fp16",
           when="depthwise with AVX512-FP16, up to 16 channels, 15 or more kernel elements and 31 results in a row",
           happens="the call never returns",
           reference="oneDNN 3.12, brdgmm_dw_convolution_fwd_t, while it generates its kernel",
           example="g16ic16iw92oc16kw15 float16"),
    Defect("rows left over", ("grad_weight", "grad_input"), _FLOATS, lambda p: without_slack(p) is not p,
           instructions="",
           when="channels_last, a strided 1x1 kernel, rows or columns behind the last stride, channels that fill no "
                "vector",
           happens="the backward writes past the end of its workspace: the process dies, sooner or later",
           reference="https://github.com/uxlfoundation/oneDNN/issues/6035",
           example="mb2ic4ih10oc3kh1sh2 channels_last"),
    Defect("strides of size 1", ("forward", "grad_input", "grad_weight"), _SIXTEEN_AND_32, reads_every_stride,
           instructions="", when="groups, and a channels_last weight with an unusual stride in a dimension of size 1",
           happens="the results are wrong", reference="oneDNN 3.12", example="g2mb2ic4ih3iw3oc2kh1kw2 channels_last"),
    Defect("batch stride of one image", ("grad_weight",), _FLOATS, reads_batch_stride, instructions="",
           when="2-D with groups in PyTorch's own kernel (float64, or oneDNN switched off), channels_last, one image "
                "with an unusual batch stride", happens="the weight gradient takes it for the size of an image",
           reference="PyTorch 2.13, slow_conv2d", example="g3mb1ic6ih8iw5oc3kh3kw3ph1pw1 float64 channels_last"),
)  # fmt: skip

#: What is wrong in normalization, which is no convolution, and so has no row.
INSTANCE_NORM_DEFECT = (
    "PyTorch's gradient of the instance normalization of a single image or volume is wrong in channels_last on a CPU"
)

# ---- what this machine showed ---------------------------------------------------------------------

#: (output, `geometry`) -> what `convgrad check --aten` saw on this machine.
found: dict[tuple[Output, Any], str] = {}


def geometry(p: ConvProblem) -> Any:
    """Return all of a problem but batch and channels: one wrong problem rules out all of its geometry."""
    return (
        *(p.dtype, p.memory_format, p.transposed, p.input_size, p.kernel_size),
        *(p.stride, p.padding, p.dilation, p.output_size),
    )


def learn(findings: Iterable[tuple[ConvProblem, Output, str]]) -> None:
    """Avoid ATen from now on for these outputs of these problems, whatever their batch and channels."""
    found.update({(output, geometry(p)): what for p, output, what in findings})


def defect_of(problem: ConvProblem, outputs: Iterable[Output], device: torch.device) -> tuple[str, tuple[str, ...]]:
    """Return the defect of PyTorch in one of these outputs, as a sentence, and the backends to use instead.

    Both are empty where nothing is known to be wrong, and where `aten` cures it.
    """
    if device.type != "cpu":
        return "", ()
    for output in outputs:
        for defect in DEFECTS if mkldnn() else ():
            if defect.instead and defect.concerns(problem, output):
                return f"{defect.happens} ({defect.when}; {defect.reference})", defect.instead
        if found and (output, geometry(problem)) in found:
            return f"{found[output, geometry(problem)]}, as convgrad check --aten found on this machine", _INSIDE
    return "", ()


@cache
def warn_of(wrong: str) -> None:
    """Warn, once for each sentence of `Backend.wrong_here`, that a requested result is known to be wrong."""
    if wrong:
        _compat.warn_user(f"requested by name, PyTorch's kernel is wrong here: {wrong}", RuntimeWarning)
