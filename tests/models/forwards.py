"""Modules that call a batch normalization and an activation, in every way in which forwards are written."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Both are called by a forward of the user's; the activation twice."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.activation = activation
        self.flag = False
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(self.activation(z) - scale)


class Optional(Block):
    """Only the layers themselves decide whether they are called, as in the MobileNets of transformers."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        x = self.norm(self.conv(x)) if self.norm is not None else self.conv(x)
        if self.activation is not None:
            x = self.activation(x)
        return x


class Between(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.activation(-self.norm(self.conv(x)))


class Flagged(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        x = self.norm(self.conv(x))
        if not self.flag:
            x = self.activation(x)
        return x


class FlaggedBefore(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        flag, x = self.flag, self.norm(self.conv(x))
        return x if flag else self.activation(x)


class FlaggedOrder(Block):
    """Called at two places: where the activation follows they are computed together."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        x = self.conv(x)
        return self.norm(self.activation(x)) if self.flag else self.activation(self.norm(x))


class FlaggedLook(Block):
    """A function that is called between them looks at the result later."""

    def look(self, x: Tensor) -> None:
        if self.flag:
            self.seen.append(x.detach().clone())

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        x = self.norm(self.conv(x))
        self.look(x)
        return self.activation(x)


class FlaggedChoice(Block):
    """What is called is decided before, in the expression itself."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return (torch.neg if self.flag else self.activation)(self.norm(self.conv(x)))


class FlaggedAfter(Block):
    """What lies between them is read behind both."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        y = self.norm(self.conv(x))
        z = self.activation(y)
        if self.flag:
            z = z + y
        return z


class FlaggedMerge(Block):
    """What lies between them is given to a function, beside the result of both."""

    def merge(self, y: Tensor, z: Tensor) -> Tensor:
        return z + y if self.flag else z

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        y = self.norm(self.conv(x))
        return self.merge(y, self.activation(y))


class FlaggedLayers(nn.Sequential):
    """The one is called by the class that it is derived from, the other by itself."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.flag, self.seen = False, []

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        z = F.relu(y)
        return z + y if self.flag else z


class FlaggedWalrus(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.activation(y := self.norm(self.conv(x)))
        return z + y if self.flag else z


class FlaggedLoop(Block):
    """Read again only where the loop comes back to it."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        x = y = self.conv(x)
        for _ in range(1 + self.flag):
            x = self.norm(x)
            y = self.activation(x)
        return y


class FlaggedLog(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        y = self.norm(self.conv(x))
        z = self.activation(y)
        if self.flag:
            self.seen.append(y)
        return z


class FlaggedClosure(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        y = self.norm(self.conv(x))
        z = self.activation(y)

        def both() -> Tensor:
            return z + y

        return both() if self.flag else z


class FlaggedList(Block):
    """A list that someone else may have, too."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        seen = self.seen if self.flag else []
        seen += [self.norm(self.conv(x))]
        return self.activation(seen[-1])


class FlaggedError(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        try:
            y = self.norm(self.conv(x))
            z = self.activation(y)
            return refused_if(self.flag, z)
        except ValueError:
            return y


def refused_if(flag: bool, x: Tensor) -> Tensor:
    if flag:
        raise ValueError
    return x


class Rebound(Block):
    """What lies between them is gone behind them, whatever is done to the result."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        for _ in range(1):
            x = self.conv(x)
            x = self.norm(x)
            x = self.activation(x)
        return x + 1 if self.flag else x


class Both(Block):
    """The activation is not all that uses the normalization's output."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(z) + z


class Checkpointing(Block):
    """What is computed again in the backward is so while this forward does not run."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return checkpoint(super().forward, x, scale, use_reentrant=False)  # pyright: ignore[reportReturnType]


class InTraining(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(z) if self.training else z


class Twice(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.activation(self.norm(self.activation(self.norm(self.conv(x)))))


class OfSizes(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(z) if x.shape[0] > 1 else z


def padded(x: Tensor, conv: nn.Module, more: int = 0) -> Tensor:
    """It needs the sizes, as `apply_tf_padding` of transformers does."""
    return nn.functional.pad(x, [int(x.shape[-1]) % 2 + more] * 4) if conv.training or x.shape[0] else x


class Padded(Block):
    """What comes before is a function that cannot be traced; another one follows the activation."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        y = self.norm(self.conv(padded(x, self.conv, more=1)))
        z = self.activation(y)
        return z if self.flag else halved(z)


def halved(x: Tensor) -> Tensor:
    return x / 2 if int(x.shape[0]) else x


class PaddedBetween(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.activation(padded(self.norm(self.conv(x)), self.conv))


class Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(input)


class Kept(Block):
    """Someone may look at it later."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        self.z = self.norm(self.conv(x))
        return self.activation(self.z)


class Drawing(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.norm(self.conv(x))
        drawn = random.random() + np.random.rand() + torch.rand(1).item()
        return self.activation(z if drawn < 4 or not self.training else 2 * z)


class Activated(nn.BatchNorm2d):
    """The activation is its own, as that of timm's BatchNormAct2d; it may have another behind or beside it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(3)
        self.drop, self.act, self.flag = nn.Identity(), activation, False

    def given(self) -> tuple[Any, ...]:
        return self.running_mean, self.running_var, self.weight, self.bias, self.training

    def normalized(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, *self.given())

    def forward(self, input: Tensor) -> Tensor:
        torch._assert(input.ndim == 4, f"{input.ndim}")
        x = F.batch_norm(input, *self.given(), eps=self.eps)
        x = self.drop(x)
        x = self.act(x)
        return x


class FlaggedActivated(Activated):
    def forward(self, input: Tensor) -> Tensor:
        x = F.batch_norm(input, *self.given())
        if self.flag:
            x = -x
        return self.act(x)


class KeptActivated(Activated):
    def forward(self, input: Tensor) -> Tensor:
        self.z = self.drop(F.batch_norm(input, *self.given()))
        return self.act(self.z)


class TwiceActivated(Activated):
    def forward(self, input: Tensor) -> Tensor:
        x = F.batch_norm(input, *self.given())
        return self.act(F.batch_norm(self.act(x), *self.given()))


class OtherwiseActivated(Activated):
    """The function is called in one of its methods, the activation in another."""

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.normalized(input))


FUNCTIONS = {nn.ReLU: F.relu, nn.ReLU6: F.relu6, nn.SiLU: F.silu, nn.Hardswish: F.hardswish}


def called(activation: Any) -> nn.Module:
    """A function, in place of the module."""
    function, inplace = FUNCTIONS[type(activation)], activation.inplace

    class Called(Block):
        def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
            x = self.norm(self.conv(x))
            return function(x, inplace=inplace)

    return Called(nn.Identity())


def called_in_norm(activation: Any) -> nn.Module:
    function, inplace = FUNCTIONS[type(activation)], activation.inplace

    class Called(Activated):
        def forward(self, input: Tensor) -> Tensor:
            return function(self.drop(F.batch_norm(input, *self.given())), inplace=inplace)

    return Called(nn.Identity())


class Method(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.norm(self.conv(x)).relu() * scale


class MethodInPlace(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.norm(self.conv(x)).relu_() * scale


class FunctionInPlace(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return torch.relu_(self.norm(self.conv(x))) * scale


class Keyword(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return torch.relu(input=self.norm(self.conv(x)))


class FlaggedFunction(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return (torch.neg if self.flag else torch.relu)(self.norm(self.conv(x)))


class Crossed(nn.Module):
    """Two results wait for one activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), self.other(x)
        return self.activation(one) * self.activation(other)


ACTIVATIONS = [a(inplace=inplace) for a in (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish) for inplace in (False, True)]


def with_forward(module: nn.Module, forward: Any) -> nn.Module:
    module.forward = forward
    return module


def layers(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), activation, nn.Conv2d(6, 2, 1))


def with_identity(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Identity(), activation)


#: More forwards; no activation is the first and only reader of each normalization.
OTHERS = {
    "used twice": lambda: Both(nn.ReLU()),
    "not in evaluation": lambda: InTraining(nn.ReLU()),
    "called twice": lambda: Twice(nn.ReLU()),
    "a branch by sizes": lambda: OfSizes(nn.ReLU()),
    "another call between": lambda: Crossed(nn.ReLU()),
    "a function between": lambda: PaddedBetween(nn.ReLU()),
    "kept in an attribute": lambda: Kept(nn.ReLU()),
    "chance": lambda: Drawing(nn.ReLU()),
    "something between": lambda: Between(nn.ReLU()),
    "a branch between": lambda: Flagged(nn.ReLU()),
    "a branch decided before": lambda: FlaggedBefore(nn.ReLU()),
    "a function that may look": lambda: FlaggedLook(nn.ReLU()),
    "given by its keyword": lambda: Keyword(nn.ReLU()),
    "another activation": lambda: layers(nn.GELU()),
    "a forward of its own": lambda: layers(with_forward(nn.ReLU(), torch.tanh)),
    "a forward of the owner's own": lambda: with_forward(block := Block(nn.ReLU()), block.forward),
    "a graph of torch.fx": lambda: fx.symbolic_trace(Block(nn.ReLU())),
    "an activation of the user's": lambda: layers(type("Mine", (nn.ReLU,), {})()),
    "a branch between function and module": lambda: FlaggedActivated(nn.ReLU()),
    "kept between function and module": lambda: KeptActivated(nn.ReLU()),
    "the function called twice": lambda: TwiceActivated(nn.ReLU()),
    "the function called by another method": lambda: OtherwiseActivated(nn.ReLU()),
    "a normalization of the user's": lambda: nn.Sequential(nn.Conv2d(3, 6, 1, bias=False), Own(6), nn.ReLU()),
}

#: With a flag that changes what the forward does.
FLAGGED = [
    Flagged, FlaggedBefore, FlaggedOrder, FlaggedLook, FlaggedAfter, FlaggedMerge, FlaggedLayers, FlaggedWalrus,
    FlaggedLoop, FlaggedLog, FlaggedClosure, FlaggedList, FlaggedError, FlaggedChoice, FlaggedFunction,
]  # fmt: skip
