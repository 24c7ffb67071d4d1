# %% [markdown]
"""Bring your own kernel: a forward for some problems becomes a layer that trains, with nothing else to write.

`python examples/custom_kernel.py` runs it.
"""

# %%
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convgrad
from convgrad import CheckError, ConvProblem

# %% [markdown]
# The kernel has its own arguments, and `accepts` says which problems it computes. It stands for a kernel that is
# faster than what is there.


# %%
def depthwise_forward(input: Tensor, filter: Tensor, filter_height: int, stride: int) -> Tensor:
    """A depthwise convolution with plain ints; 3x3 and 5x5 filters, stride 1 or 2, padding that keeps the size."""
    pad = filter_height // 2
    windows = F.pad(input, [pad] * 4).unfold(2, filter_height, stride).unfold(3, filter_height, stride)
    return (windows * filter[:, 0, None, None]).sum((-2, -1))  # [N, C, H, W, k, k] -> [N, C, H, W]


def accepts(p: ConvProblem) -> bool:
    """The problems that it computes; all others stay with the engine."""
    return (
        p.depthwise
        and p.in_channels == p.out_channels
        and p.kernel_size in {(3, 3), (5, 5)}
        and p.stride in {(1, 1), (2, 2)}
        and p.dilation == (1, 1)
        and p.padding == tuple((k // 2, k // 2) for k in p.kernel_size)
    )


# %% [markdown]
# ## A mistake is found
# Registration runs the kernel on many problems and compares each result with the definition of a convolution. This
# one is wrong in the last column.


# %%
def forgets_the_border(input: Tensor, filter: Tensor, filter_height: int, stride: int) -> Tensor:
    """The same with a mistake: the last column is computed as if the image ended one column earlier."""
    result = depthwise_forward(input, filter, filter_height, stride)
    result[..., -1] = depthwise_forward(input[..., :-1], filter, filter_height, stride)[..., -1]
    return result


options = {
    "args": ("input", "weight", "kernel_size[0]", "stride[0]"),
    "accepts": accepts,
    "dtypes": (torch.float32, torch.float64),  # its sums in 16 bits would be too far off
    "prefer": False,  # only where it is named: it stands for a kernel that is faster than what is there
}
try:
    convgrad.register("wrong", forward=forgets_the_border, **options)
except CheckError as error:
    print(error)

# %% [markdown]
# ## The right one becomes a backend
# How it compares with what runs without it, and what `explain` says about it:

# %%
backend = convgrad.register("mine", forward=depthwise_forward, **options)
print(f"mine: {backend.note}")
print(*backend.timings, sep="\n")

# %%
print(convgrad.explain("g32mb8ic32ih28oc32kh5ph2"))

# %% [markdown]
# ## A layer that trains
# The gradients come from the engine: only the forward was written.

# %%
torch.manual_seed(0)
model = nn.Sequential(
    convgrad.nn.Conv2d(3, 32, 1),
    convgrad.nn.Conv2d(32, 32, 5, padding=2, groups=32, backend="mine"),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
x, target = torch.randn(20, 3, 28, 28), torch.arange(20) % 10
for step in range(10):
    loss = F.cross_entropy(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
