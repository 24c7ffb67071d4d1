"""Modules to accelerate, and what must be the same again after `restore`."""

import torch
from torch import nn
from torch.nn import functional as F

import convgrad
from convgrad.diagnostics import Trace

OURS = "im2col"
FAST = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


def image(cls=nn.Conv2d, channels=4):
    d = int(cls.__name__[-2])
    return torch.randn(2, channels, *(6, 5, 4)[:d])


def fingerprint(model):
    """All that restore promises to bring back: classes, objects, layouts, values, hooks."""
    modules = [(id(m), type(m), sorted(m.__dict__), len(m._forward_pre_hooks)) for m in model.modules()]
    tensors = [(n, id(t), t.stride(), t.clone()) for n, t in model.state_dict(keep_vars=True).items()]
    return modules, tensors


def same(a, b) -> bool:
    (m1, t1), (m2, t2) = a, b
    return m1 == m2 and all(x[:3] == y[:3] and torch.equal(x[3], y[3]) for x, y in zip(t1, t2, strict=True))


def runs_ours(model, x) -> list[str]:
    """Which outputs our backend computed in one training step."""
    with Trace() as seen, convgrad.use_backend(OURS):
        y = model(x)
        y.square().sum().backward()
    return [o for r in seen if r.backend == OURS for o in r.outputs.split("+")]


class OwnName(nn.Conv2d):
    """A subclass that only adds to the constructor, as real models have it."""

    def __init__(self, channels, **kwargs):
        super().__init__(channels, channels, 3, groups=channels, **kwargs)


class CallsSuper(nn.Conv2d):
    def forward(self, input):
        return super().forward(2 * input)


class CallsConvForward(nn.Conv2d):
    """A weight of its own, handed to torch's computation."""

    def forward(self, input):
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


class CallsFunction(nn.Conv2d):
    backend = "an attribute of the user"

    def forward(self, input):
        return F.conv2d(F.pad(input, (0, 1, 0, 1)), self.weight.tanh(), bias=self.bias)


class OwnConvForward(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return F.conv2d(input, weight / weight.norm(), bias, self.stride, self.padding)


class TransposedCallsFunction(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return F.conv_transpose2d(input, self.weight, self.bias, padding=1)


class ComputesItself(nn.Conv2d):
    def forward(self, input):
        return (self.weight.flatten(1) @ F.unfold(input, self.kernel_size)).unsqueeze(-1)


class TransposedCallsSuper(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1
