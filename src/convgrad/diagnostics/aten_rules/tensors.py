"""`TensorSpec`: what PyTorch's choice reads of a tensor (sizes, strides, dtype, device), without any memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

__all__ = ["INT32_MAX", "TensorSpec", "dense_strides"]

INT32_MAX = 2**31 - 1

#: Dimensions from the innermost to the outermost in a channels_last tensor.
_CHANNELS_LAST_ORDER = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def dense_strides(
    shape: tuple[int, ...], memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[int, ...]:
    """Strides of a new tensor of this shape, as PyTorch writes them (size-1 dimensions included)."""
    order = tuple(reversed(range(len(shape))))
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        order = _CHANNELS_LAST_ORDER[len(shape)]
    strides = [0] * len(shape)
    step = 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Sizes, strides, dtype and device type of a tensor that need not exist.

    Args:
        shape: sizes.
        strides: in elements; contiguous where not given.
        dtype: element type.
        device_type: ``"cpu"``, ``"cuda"`` (also ROCm), ``"xpu"``, ``"mps"``, ``"meta"``, ...
        requires_grad: whether autograd follows it.
        mkldnn: whether it is an opaque oneDNN tensor (``Tensor.to_mkldnn()``).

    Equivalent to:
        >>> TensorSpec((2, 8, 4, 4)).strides
        (128, 16, 4, 1)
        >>> TensorSpec.of(torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last)).suggest_memory_format()
        torch.channels_last
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device_type: str = "cpu"
    requires_grad: bool = False
    mkldnn: bool = False

    def __post_init__(self) -> None:
        if not self.strides:
            object.__setattr__(self, "strides", dense_strides(self.shape))
        if len(self.strides) != len(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} has {len(self.shape)} strides, got {self.strides}")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor; its memory is not touched."""
        mkldnn = tensor.layout == torch._mkldnn  # pyright: ignore[reportAttributeAccessIssue]
        return cls(
            tuple(tensor.shape),
            dense_strides(tuple(tensor.shape)) if mkldnn else tuple(tensor.stride()),
            tensor.dtype,
            tensor.device.type,
            tensor.requires_grad,
            mkldnn,
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, as if they were dense."""
        return self.numel * self.dtype.itemsize

    def on(self, device_type: str) -> TensorSpec:
        """The same tensor on another kind of device."""
        return replace(self, device_type=device_type)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the elements lie densely in this order; size-1 dimensions may have any stride."""
        if memory_format == torch.contiguous_format:
            if self.numel == 0:
                return True
            order = tuple(reversed(range(self.ndim)))
        elif self.ndim in _CHANNELS_LAST and _CHANNELS_LAST[self.ndim] == memory_format:
            order = _CHANNELS_LAST_ORDER[self.ndim]
        else:
            return False
        expected = 1
        for d in order:
            if self.shape[d] != 1:
                if self.strides[d] != expected:
                    return False
                expected *= self.shape[d]
        return True

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> TensorSpec:
        """What ``Tensor.contiguous(memory_format=...)`` returns: itself where it already is."""
        if self.is_contiguous(memory_format):
            return self
        return replace(self, strides=dense_strides(self.shape, memory_format))

    def narrowed(self, dim: int, length: int) -> TensorSpec:
        """What ``Tensor.narrow`` returns: the same strides, one size smaller."""
        return replace(self, shape=(*self.shape[:dim], length, *self.shape[dim + 1 :]))

    def view_1d_as_2d(self) -> TensorSpec:
        """(N, C, L) as (N, C, 1, L), which is how PyTorch runs 1-D convolutions (``unsqueeze(2)``)."""
        new_stride = self.shape[2] * self.strides[2]
        return replace(
            self, shape=(*self.shape[:2], 1, self.shape[2]), strides=(*self.strides[:2], new_stride, self.strides[2])
        )

    def suggest_memory_format(self, exact_strides: bool = False) -> torch.memory_format:
        """The layout that PyTorch reads out of the strides.

        The strides of size-1 dimensions count, so a tensor can be contiguous in both orders and still be taken for
        channels_last. With ``exact_strides`` they must be those of a new channels_last tensor (MPS asks for that).
        """
        fmt = _CHANNELS_LAST.get(self.ndim)
        if self.mkldnn or fmt is None or not self._strides_like_channels_last():
            return torch.contiguous_format
        if exact_strides and self.strides != dense_strides(self.shape, fmt):
            return torch.contiguous_format
        return fmt

    def _strides_like_channels_last(self) -> bool:
        if self.strides[1] == 0:  # an expanded channel dimension
            return False
        least = 0
        for d in _CHANNELS_LAST_ORDER[self.ndim]:
            if self.shape[d] == 0 or self.strides[d] < least:
                return False
            # (N, 1, 1, 1) with equal strides is ambiguous, and PyTorch takes it for contiguous.
            if d == 0 and least == self.strides[1]:
                return False
            least = self.strides[d] * max(self.shape[d], 1)
        return True

    def fits_32bit_index(self, limit: int = INT32_MAX) -> bool:
        """Whether number of elements and largest offset stay below ``limit`` (ATen's canUse32BitIndexMath)."""
        if self.numel >= limit:
            return False
        if self.numel == 0:
            return True
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return last < limit

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        fmt = self.suggest_memory_format()
        layout = "mkldnn" if self.mkldnn else str(fmt).removeprefix("torch.").removesuffix("_format")
        dense = self.mkldnn or self.is_contiguous(fmt)
        return f"{shape} {str(self.dtype).removeprefix('torch.')} {layout}{'' if dense else f' strides {self.strides}'}"
