# %% [markdown]
"""A Triton kernel as a backend: a causal depthwise convolution of a sequence, which then trains like any layer.

`python examples/triton_kernel.py` runs it on a GPU; `TRITON_INTERPRET=1 python examples/triton_kernel.py` anywhere, by
Triton's interpreter, which is slow, but runs the same code.
"""

# %%
from __future__ import annotations

import os
import threading
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

import convgrad
from convgrad import ConvProblem

#: Triton's interpreter runs in one thread at a time, and takes a millisecond for each program; a GPU needs neither.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
alone = threading.Lock() if INTERPRETED else nullcontext()

# %% [markdown]
# The kernel computes one row of one channel; `causal` launches it, and `accepts` says what it computes.


# %%
@triton.jit
def causal_kernel(x, w, y, channels, length, taps: tl.constexpr, block: tl.constexpr):
    """One row of [N * C, L]: y[t] = sum over k of w[k] * x[t + k - (taps - 1)]."""
    row = tl.program_id(0).to(tl.int64)  # row * length may exceed 32 bits
    t = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for k in tl.static_range(taps):
        at = t + k - (taps - 1)
        value = tl.load(x + row * length + at, mask=(at >= 0) & (t < length), other=0.0)
        total += value.to(tl.float32) * tl.load(w + (row % channels) * taps + k).to(tl.float32)
    tl.store(y + row * length + t, total, mask=t < length)


def causal(input: Tensor, weight: Tensor, out: Tensor) -> None:
    """The launcher; convgrad allocates ``out``."""
    n, c, length = input.shape
    block = min(1024, triton.next_power_of_2(length))
    with alone:
        causal_kernel[(n * c, triton.cdiv(length, block))](
            input, weight, out, c, length, taps=weight.shape[2], block=block
        )  # fmt: skip


def accepts(p: ConvProblem) -> bool | str:
    """What the kernel computes; the reason why not is shown by `convgrad.explain`."""
    if not (p.ndim == 1 and p.depthwise and p.in_channels == p.out_channels):
        return "it is for depthwise sequences"
    if INTERPRETED and p.batch * p.in_channels > 12:
        return "Triton's interpreter would take long"
    if INTERPRETED and p.dtype == torch.bfloat16:
        return "Triton's interpreter cuts off where the GPU rounds to bfloat16"
    causal_padding = p.padding == ((p.kernel_size[0] - 1, 0),)
    return (p.stride == p.dilation == (1,) and causal_padding) or "it pads in front only, without stride and dilation"


# %% [markdown]
# Registration checks it against the definition of a convolution.

# %%
here = "cuda" if torch.cuda.is_available() else "cpu"
backend = convgrad.register(
    "causal",
    forward=causal,
    args=("input", "weight", "out"),
    accepts=accepts,
    layouts="contiguous",
    devices=here,
    dtypes=(torch.float32, torch.bfloat16),
    seconds=2,
    prefer=False,  # only where it is named: by Triton's interpreter it is slow
)
print(f"causal: {backend.note}")

# %% [markdown]
# The forward is the kernel's, and the gradients are another backend's. They agree with PyTorch's.

# %%
x = torch.randn(2, 3, 9, device=here, requires_grad=True)
w = torch.randn(3, 1, 4, device=here, requires_grad=True)
with convgrad.use_backend("causal"), convgrad.trace() as ran:
    y = convgrad.conv1d(x, w, padding=(3, 0), groups=3)
    y.square().sum().backward()
print(ran)

expected = torch.nn.functional.conv1d(torch.nn.functional.pad(x, (3, 0)), w, groups=3)
torch.testing.assert_close(y, expected)
for got, want in zip((x.grad, w.grad), torch.autograd.grad(expected.square().sum(), (x, w)), strict=True):
    torch.testing.assert_close(got, want)
