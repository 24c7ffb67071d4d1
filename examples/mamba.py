# %% [markdown]
"""A small Mamba-style network that draws handwritten digits pixel by pixel, and how it streams.

It learns to predict each of the 64 pixels of scikit-learn's digits from the earlier ones. Then it sees the upper halves
of digits that are new to it and draws the lower halves: the first 32 pixels at once (`causal_conv1d` with a state), the
others one by one (`causal_conv1d_update`), and what it computes in steps is compared with what it computes at once.

The block is that of Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces" (2023), section 3.4:
a causal depthwise convolution, then a diagonal state space whose step, input map and output map depend on the input.

    python examples/mamba.py                          about a minute; writes mamba.png
    python examples/mamba.py --steps 2000 --figure digits.png
"""

# %%
from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import convgrad

LEVELS, SIDE, WIDTH, INNER, STATES, TAPS, BATCH = 17, 8, 32, 64, 4, 4, 32
PIXELS, HALF, START = SIDE * SIDE, SIDE * SIDE // 2, LEVELS  # START: what stands in front of the first pixel
console = Console(highlight=False)

# %% [markdown]
# ## The block
# `forward` takes any number of pixels and `step` one; both continue from a state.


# %%
class State(NamedTuple):
    """What a block remembers of the pixels so far."""

    inputs: Tensor  # [N, TAPS - 1, INNER], the last ones of the convolution
    hidden: Tensor  # [N, INNER, STATES]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.taps, self.bias = nn.Parameter(torch.randn(INNER, TAPS) / TAPS), nn.Parameter(torch.zeros(INNER))
        self.select = nn.Linear(INNER, INNER + 2 * STATES)
        self.log_rate = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(INNER, 1))
        self.skip = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Any number of pixels, [N, L, WIDTH]."""
        seen, gate = self.enter(self.norm(x)).chunk(2, -1)
        seen, inputs = convgrad.causal_conv1d(
            seen, self.taps, self.bias, layout="NLC", initial_state=state.inputs, return_state=True, activation="silu"
        )
        mixed, hidden = self.scan(seen, state.hidden)
        return x + self.leave(mixed * F.silu(gate)), State(inputs, hidden)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The next pixel, [N, WIDTH]; the state's inputs are changed in place."""
        seen, gate = self.enter(self.norm(x)).chunk(2, -1)
        seen = convgrad.causal_conv1d_update(seen, state.inputs, self.taps, self.bias, "silu", layout="NLC")
        mixed, hidden = self.scan(seen[:, None], state.hidden)
        return x + self.leave(mixed[:, 0] * F.silu(gate)), State(state.inputs, hidden)

    def scan(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """h[t] = exp(-step[t] rate) h[t-1] + step[t] x[t] b[t];  y[t] = <h[t], c[t]> + skip x[t]."""
        steps, b, c = self.select(x).split([INNER, STATES, STATES], -1)
        steps = F.softplus(steps - 2)[..., None]  # [N, L, INNER, 1]
        decay, driven = (-steps * self.log_rate.exp()).exp(), steps * x[..., None] * b[:, :, None]
        after = []
        for of_step, into_step in zip(decay.unbind(1), driven.unbind(1), strict=True):
            hidden = torch.addcmul(into_step, of_step, hidden)  # [N, INNER, STATES]
            after.append(hidden)
        return (torch.stack(after, 1) @ c[..., None])[..., 0] + self.skip * x, hidden


# %% [markdown]
# ## The network


# %%
class Network(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.level, self.place = nn.Embedding(LEVELS + 1, WIDTH), nn.Embedding(PIXELS, WIDTH)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LEVELS)

    def start(self, batch: int) -> list[State]:
        return [State(torch.zeros(batch, TAPS - 1, INNER), torch.zeros(batch, INNER, STATES)) for _ in self.blocks]

    def forward(self, before: Tensor, states: Sequence[State], first: int = 0) -> tuple[Tensor, list[State]]:
        """[N, L] pixels, of which the first stands at ``first`` -> [N, L, LEVELS] predictions of those behind them."""
        x, after = self.level(before) + self.place.weight[first : first + before.shape[1]], []
        for block, state in zip(self.blocks, states, strict=True):
            x, new = block(x, state)
            after.append(new)
        return self.head(self.norm(x)), after

    def step(self, before: Tensor, states: Sequence[State], at: int) -> tuple[Tensor, list[State]]:
        """The same of one pixel each, [N] -> [N, LEVELS]."""
        x, after = self.level(before) + self.place.weight[at], []
        for block, state in zip(self.blocks, states, strict=True):
            x, new = block.step(x, state)
            after.append(new)
        return self.head(self.norm(x)), after


# %% [markdown]
# ## Training


# %%
def shifted(pixels: Tensor) -> Tensor:
    """What stands before each pixel."""
    return F.pad(pixels[:, :-1], (1, 0), value=START)


def loss_of(net: Network, pixels: Tensor) -> Tensor:
    """Nats a pixel."""
    return F.cross_entropy(net(shifted(pixels), net.start(len(pixels)))[0].flatten(0, 1), pixels.flatten())


def train(net: Network, pixels: Tensor, steps: int) -> list[float]:
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=4e-3), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in track(range(steps), "training", console=console, transient=True):
        loss = loss_of(net, pixels[torch.randint(len(pixels), (BATCH,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## Streaming
# The upper half at once, then pixel by pixel from the state that it leaves.


# %%
@torch.no_grad()
def completed(net: Network, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Lower halves drawn below upper halves [N, HALF], and the predictions that were made on the way."""
    predictions, states = net(shifted(upper), net.start(len(upper)))
    pixels, made = [*upper.unbind(1)], [*predictions.unbind(1)]
    for at in range(HALF, PIXELS):
        prediction, states = net.step(pixels[-1], states, at)
        pixels.append((prediction / 0.7).softmax(-1).multinomial(1)[:, 0])  # a little less bold than it is unsure
        made.append(prediction)
    return torch.stack(pixels, 1), torch.stack(made, 1)


# %% [markdown]
# ## The comparison


# %%
def draw(path: str, losses: list[float], originals: Tensor, drawn: Tensor) -> None:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    curve, images = figure.subplots(1, 2, width_ratios=[1, 2])
    curve.plot(losses)
    curve.set(xlabel="step", ylabel="nats a pixel", title="training")
    rows = [torch.cat([*F.pad(digits.view(-1, SIDE, SIDE), (1, 1, 1, 1))], 1) for digits in (originals, drawn)]
    images.imshow(torch.cat(rows).numpy(), cmap="gray_r")
    images.axhline(rows[0].shape[0] + SIDE / 2 + 0.5, color="tab:red", linewidth=1)
    images.set(xticks=[], yticks=[], title="new digits; below them the network's, from the red line on, pixel by pixel")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], float]:
    """Train, stream, draw; the losses, and how far streaming is from computing at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--figure", default="mamba.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    pixels = torch.tensor(load_digits(return_X_y=True)[0]).long()[torch.randperm(1797)]  # [1797, 64]
    known, new = pixels[:1437], pixels[1437:]
    net = Network()
    losses = train(net, known, options.steps)
    with torch.no_grad():
        console.print(f"{loss_of(net, new):.3f} nats a pixel on digits that are new to it ({losses[0]:.3f} at first)")

    start = time.perf_counter()
    drawn, streamed = completed(net, new[:10, :HALF])
    seconds = time.perf_counter() - start
    with torch.no_grad():
        whole, _ = net(shifted(drawn), net.start(len(drawn)))
    difference = float((whole - streamed).abs().max())
    console.print(f"10 halves drawn in {seconds:.2f} s; step by step and at once differ by at most {difference:.1e}")
    draw(options.figure, losses, new[:10], drawn)
    console.print(f"figure: {options.figure}")
    return losses, difference


# %% tags=["active-py"]
if __name__ == "__main__":
    main()

# %% [markdown]
# ## Train, stream, draw

# %% tags=["active-ipynb"]
# from IPython.display import Image
#
# losses, difference = main(["--steps", "300"])
# Image("mamba.png")
