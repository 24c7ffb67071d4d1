"""The same convolution, smaller: what a check of thousands of large problems looks at."""

from __future__ import annotations

from ..problem import ConvProblem
from ..sizes import effective_kernel, output_length

__all__ = ["shrunk"]


def shrunk(problem: ConvProblem, most_flops: int) -> ConvProblem:
    """A problem of at most about ``most_flops``, with the same kernel, stride, dilation, border and kind of groups.

    Less batch first, then fewer groups, fewer channels in each, then fewer rows; what cannot be had smaller stays. The
    remainder of every size by the stride stays too, so that rows that no kernel reads are still there.

    Equivalent to:
        >>> p = shrunk(ConvProblem.parse("mb256ic64ih56oc64oh56kh3ph1"), 2_000_000)
        >>> p.flops <= 2_000_000, p.kernel_size, p.padding
        (True, (3, 3), ((1, 1), (1, 1)))
    """
    p = problem
    if p.flops <= most_flops or p.empty:
        return p
    for batch in (2, 1):
        p = p if p.flops <= most_flops else p.replace(batch=min(p.batch, batch))
    for groups in (16, 5, 3, 2):
        p = p if p.flops <= most_flops else _groups(p, groups)
    for channels in (16, 7, 3):
        p = p if p.flops <= most_flops else _channels(p, channels)
    for rows in (16, 9, 5, 2, 1):
        p = p if p.flops <= most_flops else _rows(p, rows)
    return p.canonical()


def _groups(p: ConvProblem, groups: int) -> ConvProblem:
    if p.groups <= groups:
        return p
    per_in, per_out = p.in_channels // p.groups, p.out_channels // p.groups
    return p.replace(groups=groups, in_channels=per_in * groups, out_channels=per_out * groups)


def _channels(p: ConvProblem, channels: int) -> ConvProblem:
    per_in, per_out = min(p.in_channels // p.groups, channels), min(p.out_channels // p.groups, channels)
    return p.replace(in_channels=per_in * p.groups, out_channels=per_out * p.groups)


def _rows(p: ConvProblem, rows: int) -> ConvProblem:
    """At most ``rows`` output positions in each dimension, the input cut by as many strides."""
    sizes = []
    for i, out in enumerate(p.output_size):
        cut = min(max(0, out - rows), max(0, (p.input_size[i] - 1) // p.stride[i]))
        sizes.append(p.input_size[i] - cut * p.stride[i])
    outputs = []
    for i, size in enumerate(sizes):
        (low, high), k = p.padding[i], p.kernel_size[i]
        got = output_length(size, k, p.stride[i], low, high, p.dilation[i])
        if got < 1 or size + low + high < effective_kernel(k, p.dilation[i]):
            return p
        outputs.append(got)
    return p.replace(input_size=tuple(sizes), output_size=tuple(outputs))
