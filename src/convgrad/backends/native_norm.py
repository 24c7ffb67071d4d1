"""Batch normalization by the statistics of the batch, and its gradients: the kernels of ``csrc/norm/norm.h``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .._compat import accumulate_dtype
from . import _native_library as library
from .native import DTYPES

#: The least sizes with which a training step gains more than a node of autograd in Python costs: elements of an input
#: on one thread (several: twice as many for each; in 16 bits, and in channels_last: four times as many), of a channel,
#: and of its part of an image, which is read in vectors. Where each image is normalized by itself the parameters are
#: repeated for each.
LEAST_NORM = {"input": 3 * 2**14, "channel": 64, "pixels": 16, "input, by image": 2**18}

#: What an input in channels_last has at least: a vector.
LEAST_CHANNELS = 16

#: What may follow a normalization in the same kernel, by its number in ``csrc/convgrad_native.h``.
ACTIVATIONS = ("", "relu", "relu6", "silu", "hardswish")


def native_norm_takes(dtype: torch.dtype) -> bool:
    """Whether there are kernels for a dtype."""
    return dtype in DTYPES and library.load() is not None


def least_norm(itemsize: int, by_image: bool, contiguous: bool) -> int:
    """Return the number of an input's elements from which a training step gains."""
    if by_image:
        return LEAST_NORM["input, by image"]
    least, threads = LEAST_NORM["input"], torch.get_num_threads()
    if threads > 1:
        least *= 2 * threads
    if itemsize == 2:
        least *= 4
    return least if contiguous else 4 * least


def norm_gains(shape: Sequence[int], channels_last: bool, by_image: bool) -> bool:
    """Whether the channels of an input that is large enough are; in channels_last whether there is a kernel, too."""
    pixels = prod(shape[2:])
    channel = pixels if by_image else shape[0] * pixels
    large = channel >= LEAST_NORM["channel"] and pixels >= LEAST_NORM["pixels"]
    return large and (not channels_last or shape[1] >= LEAST_CHANNELS)


def normalize(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, epsilon: float, activation: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the normalized, activated input, and each channel's mean and inverse deviation; update running values.

    The input is contiguous, or in channels_last with `LEAST_CHANNELS` or more; all others are contiguous, and of its
    dtype, or all of float32 beside 16 bits.

    Shape:
        (N, C, *spatial) -> (N, C, *spatial), (2, C)
    """
    layout = torch.contiguous_format if input.is_contiguous() else torch.preserve_format  # one channel is both layouts
    output = torch.empty_like(input, memory_format=layout)
    statistics = input.new_empty((2, input.shape[1]), dtype=accumulate_dtype(input.dtype))
    tensors = (weight, bias, None, running_mean, running_var, output, None, None)
    _run(input, statistics, activation, tensors, epsilon, momentum)
    return output, statistics


def normalization_gradients(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
    needs: tuple[bool, bool, bool], activation: str = "",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients that are needed, of a grad_output with the input's strides."""
    like = weight if weight is not None else bias if bias is not None else input
    grad_input = torch.empty_like(input) if needs[0] else None
    grad_weight = like.new_empty(input.shape[1]) if needs[1] else None
    grad_bias = like.new_empty(input.shape[1]) if needs[2] else None
    tensors = (weight, bias, grad_output, None, None, grad_input, grad_weight, grad_bias)
    _run(input, statistics, activation, tensors)
    return grad_input, grad_weight, grad_bias


def _run(
    input: Tensor, statistics: Tensor, activation: str, tensors: tuple[Tensor | None, ...], epsilon: float = 0.0,
    momentum: float = 0.0,
) -> None:  # fmt: skip
    """Call the library, not on the meta device, with the tensors of ``convgrad_norm`` but mean and invstd."""
    if input.is_meta:
        return
    loaded = library.load()
    assert loaded is not None
    batch, channels = input.shape[:2]
    pixels = input.numel() // (batch * channels)
    mean = statistics.data_ptr()
    invstd = mean + channels * statistics.itemsize
    channels_last, threads = not input.is_contiguous(), torch.get_num_threads()
    number, follows = DTYPES[input.dtype], ACTIVATIONS.index(activation)
    wide = any(t is not None and t.dtype is not input.dtype for t in (*tensors[:2], tensors[3]))  # vectors of channels
    sizes = batch, channels, pixels, epsilon, momentum, channels_last, number, threads, follows, wide
    weight, bias, grad_output, *others = [0 if t is None else t.data_ptr() for t in tensors]
    addresses = input.data_ptr(), weight, bias, grad_output, mean, invstd, *others
    if loaded.convgrad_normalize(library.pack_norm(*sizes, *addresses)):
        raise MemoryError("no memory for the sums of a batch normalization")
