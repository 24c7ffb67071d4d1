"""Any small problem, as a hypothesis strategy for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._compat import channels_last_of
from ..problem import ConvProblem
from ..sizes import Dimension, effective_kernel, fields_of, output_length

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


def problems(
    *,
    ndim: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    crops: bool = True,
    largest: int = 12,
) -> SearchStrategy[ConvProblem]:
    """Return a hypothesis strategy of small canonical problems.

    Args:
        ndim: 1, 2 or 3 dimensions only.
        dtypes: to draw from.
        crops: whether padding may be negative.
        largest: spatial size.

    Raises:
        ImportError: hypothesis is not installed.

    Equivalent to:
        >>> from hypothesis import find
        >>> find(problems(ndim=2), lambda p: p.depthwise and p.stride == (2, 2)).groups
        2
    """
    from hypothesis import strategies as st

    @st.composite
    def draw_problem(draw: DrawFn) -> ConvProblem:
        d = ndim or draw(st.integers(1, 3))
        groups = draw(st.sampled_from([1, 1, 2, 3, 5]))
        dims = [_draw_dimension(draw, largest, crops) for _ in range(d)]
        last = d > 1 and draw(st.booleans())
        return ConvProblem(
            batch=draw(st.integers(1, 3)),
            in_channels=groups * draw(st.integers(1, 3)),
            out_channels=groups * draw(st.integers(1, 4)),
            groups=groups,
            **fields_of(dims),
            dtype=draw(st.sampled_from(dtypes)),
            memory_format=channels_last_of(d) if last else torch.contiguous_format,
            has_bias=draw(st.booleans()),
            origin=draw(st.sampled_from(("plain", "transposed"))),
        ).canonical()

    return draw_problem()


def _draw_dimension(draw: DrawFn, largest: int, crops: bool) -> Dimension:
    from hypothesis import strategies as st

    kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    least = -2 if crops else 0
    low, high = draw(st.integers(least, 4)), draw(st.integers(least, 4))
    fits = effective_kernel(kernel, dilation) - low - high  # the smallest input with an output
    size = max(draw(st.integers(1, largest)), fits)
    out = output_length(size, kernel, stride, low, high, dilation)
    return Dimension(size, out, kernel, stride, low, high, dilation)
