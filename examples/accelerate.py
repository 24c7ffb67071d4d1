# %% [markdown]
"""A whole model through convgrad in three ways: in place, for a block, and as an unmodified script.

`python examples/accelerate.py` runs it.
"""

# %%
from __future__ import annotations

import copy

import torch
from torch import nn

import convgrad

STEPS, SIZE = 5, 64

# %% [markdown]
# The model is plain PyTorch: two inverted residuals as in MobileNetV2, which widen, filter each channel, and narrow.


# %%
def block(channels: int, out: int, stride: int) -> nn.Sequential:
    wide = 4 * channels
    return nn.Sequential(
        nn.Conv2d(channels, wide, 1),
        nn.ReLU6(),
        nn.Conv2d(wide, wide, 7, stride=stride, padding=3, groups=wide),
        nn.ReLU6(),
        nn.Conv2d(wide, out, 1),
    )


def model() -> nn.Sequential:
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(stem, block(16, 24, 2), block(24, 32, 2), *head)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> float:
    """The loss after some steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return nn.functional.cross_entropy(net(x), y).item()


torch.manual_seed(0)
stock = model()
x, y = torch.randn(8, 3, SIZE, SIZE), torch.randint(0, 10, (8,))

# %% [markdown]
# ## 1. In place
# What is replaced, what is not, and why:

# %%
net = copy.deepcopy(stock)
report = convgrad.accelerate_(net, memory_format="channels_last", example_inputs=x)
print(report)

# %% [markdown]
# It trains as before, to the same loss, and can be undone.

# %%
expected = train(copy.deepcopy(stock), x, y, STEPS)
print(f"loss after {STEPS} steps: {train(net, x, y, STEPS):.6f}, stock {expected:.6f}")
report.restore()
assert type(net[0]) is nn.Conv2d

# %% [markdown]
# ## 2. For a block
# This covers whatever the code inside calls. These kernels ran:

# %%
with convgrad.trace() as seen, convgrad.takeover():
    loss = train(copy.deepcopy(stock), x, y, 1)
print("\n".join(sorted({f"{r.outputs:40} {r.backend}" for r in seen})))
print(f"loss after 1 step: {loss:.6f}, stock {train(copy.deepcopy(stock), x, y, 1):.6f}")

# %% [markdown]
# ## 3. An unmodified script
# `convgrad run train.py` in the terminal; `convgrad run --stock train.py` shows the same for stock PyTorch.
