"""Random problems for a search: small images, wide borders, odd channels, where kernels go wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from ..problem import ConvProblem
from ..sizes import effective_kernel, output_length

__all__ = ["random_problems"]

_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
_KERNELS = {1: (1, 2, 3, 4, 5, 7, 13), 2: (1, 2, 3, 3, 4, 5, 7), 3: (1, 2, 3, 4)}
_SIZES = {1: (1, 2, 3, 5, 8, 17, 33), 2: (1, 2, 3, 4, 5, 8, 14, 17), 3: (1, 2, 3, 4, 7)}
_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def random_problems(seed: int, dtypes: Sequence[torch.dtype] = _DTYPES) -> Iterator[ConvProblem]:
    """Problems without end, the same for the same seed; all that PyTorch can state.

    Equivalent to:
        >>> from itertools import islice
        >>> len({str(p) for p in islice(random_problems(0), 50)}) > 40
        True
    """
    r = random.Random(seed)
    while True:
        problem = _one(r, r.choice(dtypes))
        if problem is not None:
            yield problem


def _one(r: random.Random, dtype: torch.dtype) -> ConvProblem | None:
    d = r.choice((1, 2, 3))
    kernel = [r.choice(_KERNELS[d]) for _ in range(d)]
    stride = [r.choice((1, 1, 2, 3)) for _ in range(d)]
    dilation = [r.choice((1, 1, 1, 2, 3)) for _ in range(d)]
    padding = [r.randint(0, k * s // 2 if r.random() < 0.7 else k * s) for k, s in zip(kernel, dilation, strict=True)]
    size = [r.choice(_SIZES[d]) for _ in range(d)]
    groups = r.choice((1, 1, 1, 2, 3, 16))
    inputs, outputs = (r.choice((1, 2, 3, 4, 8, 16, 17, 18, 32)) for _ in "io")
    if max(inputs, outputs) * groups > 64:
        inputs, outputs = 1, 2
    fields = list(zip(size, kernel, stride, padding, dilation, strict=True))
    if any(n + 2 * p < effective_kernel(k, dil) for n, k, _, p, dil in fields):
        return None
    return ConvProblem(
        batch=r.choice((1, 2, 3, 4)),
        in_channels=inputs * groups,
        out_channels=outputs * groups,
        groups=groups,
        input_size=tuple(size),
        kernel_size=tuple(kernel),
        stride=tuple(stride),
        padding=tuple((p, p) for p in padding),
        dilation=tuple(dilation),
        output_size=tuple(output_length(n, k, s, p, p, dil) for n, k, s, p, dil in fields),
        dtype=dtype,
        memory_format=_LAST[d] if d > 1 and r.random() < 0.5 else torch.contiguous_format,
        origin="transposed" if r.random() < 0.25 else "plain",
    ).canonical()
