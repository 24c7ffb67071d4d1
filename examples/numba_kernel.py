# %% [markdown]
"""A numba kernel as a backend: a depthwise convolution whose two gradients come from one loop, under an output mask.

`python examples/numba_kernel.py` runs it, after `pip install numba`.
"""

# %%
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

import convgrad
from convgrad import ConvProblem

# %% [markdown]
# Plain loops over NumPy's arrays, compiled by numba: the forward, and one loop for both gradients.


# %%
@njit(nogil=True)
def forward_planes(x, w, y, stride, pad):
    """x [N, C, H, W], w [C, 1, K, K], y [N, C, OH, OW]."""
    for n in range(y.shape[0]):
        for c in range(y.shape[1]):
            for i in range(y.shape[2]):
                for j in range(y.shape[3]):
                    total = x.dtype.type(0)
                    for k in range(w.shape[2]):
                        for m in range(w.shape[3]):
                            h, v = i * stride + k - pad, j * stride + m - pad
                            if 0 <= h < x.shape[2] and 0 <= v < x.shape[3]:
                                total += x[n, c, h, v] * w[c, 0, k, m]
                    y[n, c, i, j] = total


@njit(nogil=True)
def backward_planes(g, x, w, grad_x, grad_w, stride, pad, need_x, need_w):
    """Both gradients, or the one that is needed: each product's place in the forward, read the other way round."""
    for n in range(g.shape[0]):
        for c in range(g.shape[1]):
            for i in range(g.shape[2]):
                for j in range(g.shape[3]):
                    for k in range(w.shape[2]):
                        for m in range(w.shape[3]):
                            h, v = i * stride + k - pad, j * stride + m - pad
                            if 0 <= h < x.shape[2] and 0 <= v < x.shape[3]:
                                if need_x:
                                    grad_x[n, c, h, v] += g[n, c, i, j] * w[c, 0, k, m]
                                if need_w:
                                    grad_w[c, 0, k, m] += g[n, c, i, j] * x[n, c, h, v]


# %% [markdown]
# This connects the tensors and the loops. convgrad allocates the result of the forward, and tells by the mask
# which gradients are needed.


# %%
def forward(input: Tensor, weight: Tensor, stride: int, pad: int, out: Tensor) -> None:
    """numba works on numpy's arrays, which share the tensors' memory."""
    forward_planes(input.numpy(), weight.numpy(), out.numpy(), stride, pad)


def backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, stride: int, pad: int, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """What the mask does not ask for is None; the tensor that only the other gradient needs holds no values then."""
    g, x, w = grad_output.numpy(), input.numpy(), weight.numpy()
    grad_x, grad_w = np.zeros(x.shape, x.dtype), np.zeros(w.shape, w.dtype)
    backward_planes(g, x, w, grad_x, grad_w, stride, pad, *mask)
    return (
        torch.from_numpy(grad_x) if mask[0] else None,
        torch.from_numpy(grad_w) if mask[1] else None,
    )


def accepts(p: ConvProblem) -> bool:
    """Square depthwise images without dilation, padded alike on all sides."""
    square = len({*p.kernel_size}) == len({*p.stride}) == len({*p.padding}) == 1
    return p.ndim == 2 and p.depthwise and p.in_channels == p.out_channels and square and p.dilation == (1, 1)


# %% [markdown]
# Registration checks all of it against the definition, and then measures it. `args` says which arguments the functions
# take, and in which order.

# %%
backend = convgrad.register(
    "numba",
    forward=forward,
    backward=backward,
    args={
        "forward": ("input", "weight", "stride[0]", "padding[0]", "out"),
        "backward": ("grad_output", "input", "weight", "stride[0]", "padding[0]", "output_mask[:2]"),
    },
    accepts=accepts,
    layouts="contiguous",
    devices="cpu",
    dtypes=torch.float32,
    seconds=3,
    prefer=False,
)
print(f"numba: {backend.note}\non a few of its problems, against what runs without it:")
print(*backend.timings, sep="\n")

# %% [markdown]
# From now on it is a backend like any other: a layer can request it, and `trace` shows what ran.

# %%
layer = convgrad.nn.Conv2d(8, 8, 3, padding=1, groups=8, backend="numba")
with convgrad.trace() as ran:
    layer(torch.randn(2, 8, 14, 14, requires_grad=True)).square().sum().backward()
print(ran)
assert [r.outputs for r in ran if r.backend == "numba"] == ["forward", "grad_input+grad_weight+grad_bias"]
