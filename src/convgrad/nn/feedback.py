"""Convolutions whose input gradient uses a feedback weight B in place of the forward weight W, by one of these rules.

``alignment``: B is random and never changes (Lillicrap et al., "Random synaptic feedback weights support error
backpropagation for deep learning", 2016). ``uSF``, ``brSF`` and ``frSF``, elsewhere called sign-symmetric: sign(W), or
|M| sign(W) with M drawn in each forward or once (Liao et al., "How Important is Weight Symmetry in Backpropagation?",
arXiv:1510.05067). ``mirror`` learns W from noise, in ``mirror_``; ``kolen-pollack`` gets the gradient of W, which it
becomes with weight decay on both (Akrout et al., "Deep Learning without Weight Transport", arXiv:1904.05391).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from .. import functional
from ..engine import use_backend
from ..errors import UnsupportedError
from . import modules
from .constructors import dimensions, set_constructor, with_bases
from .convert import new_classes

__all__ = ["FeedbackConv1d", "FeedbackConv2d", "FeedbackConv3d", "FeedbackConvTranspose1d", "FeedbackConvTranspose2d",
           "FeedbackConvTranspose3d", "convert_feedback_"]  # fmt: skip


def _random(weight: Tensor) -> Tensor:
    """Return another weight from the distribution of torch's convolutions."""
    parts = torch.view_as_real(weight) if weight.is_complex() else weight
    drawn = (2 * torch.rand_like(parts) - 1) / math.sqrt(max(1, weight.shape[1:].numel()))
    return torch.view_as_complex(drawn) if weight.is_complex() else drawn


#: rule -> what ``feedback_weight`` is, if there is one, and how B follows from W and it.
_RULES: dict[str, tuple[Any, Callable[[Tensor, Any], Tensor]]] = {
    "alignment": (torch.nn.Buffer, lambda _, b: b),
    "uSF": (None, lambda w, _: w.sgn()),
    "brSF": (None, lambda w, _: w.sgn() * _random(w).abs()),
    "frSF": (torch.nn.Buffer, lambda w, b: w.sgn() * b.abs()),
    "mirror": (torch.nn.Buffer, lambda _, b: b),
    "kolen-pollack": (torch.nn.Parameter, lambda _, b: b),
}


class Feedback:
    """The base of the six feedback layers."""

    rule: str

    def __init__(self: Any, *args: Any, rule: str = "alignment", **kwargs: Any) -> None:
        _check(rule)
        super().__init__(*args, **kwargs)
        self._follow(rule)

    def _follow(self: Any, rule: str) -> None:
        """Set a rule, with a feedback weight where the rule has one."""
        self.rule = rule
        if (kind := _RULES[rule][0]) is not None:
            self.feedback_weight = kind(_random(self.weight.detach()))

    def reset_parameters(self: Any) -> None:
        """Draw the weights again, the feedback weight too."""
        super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]
        if getattr(self, "feedback_weight", None) is not None:
            with torch.no_grad():
                self.feedback_weight.copy_(_random(self.weight))

    def feedback(self: Any, weight: Tensor | None = None) -> Tensor:
        """Return the weight of the backward pass, as the rule derives it from a weight: the layer's present one."""
        present: Tensor = self.weight if weight is None else weight
        return _RULES[self.rule][1](present.detach(), getattr(self, "feedback_weight", None))

    @torch.no_grad()
    def angle(self: Any) -> Tensor:
        """The angle between the weight and that of the backward pass, in degrees: 0 is backpropagation, 90 is chance.

        It is 90 where one of the two is zero.
        """
        forth, back = self.weight, self.feedback()
        lengths = (forth.norm() * back.norm()).clamp(min=torch.finfo(forth.dtype).tiny)
        cosine = (forth.conj() * back).sum().real / lengths
        return torch.rad2deg(cosine.clamp(-1, 1).acos())

    @torch.no_grad()
    def mirror_(
        self: Any, samples: int = 64, lr: float = 0.1, weight_decay: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        """Let feedback_weight learn the weight from noise: one step of the rule ``mirror``.

        Standard normal noise x fills one window of the kernel, y = W x without the bias, and B changes by
        lr (mean of y x^T - weight_decay B). The mean tends to W, so B to W / weight_decay. (The weight
        mirror of Akrout et al., arXiv:1904.05391, for a layer without an activation.)

        Raises:
            UnsupportedError: the layer has another rule.
            ValueError: ``samples`` is not positive.
        """
        if self.rule != "mirror":
            raise UnsupportedError(f"mirror_ is for layers with rule='mirror', not {self.rule!r}")
        if samples < 1:
            raise ValueError(f"samples is a positive integer, got {samples!r}")
        w, transposed = self.weight, self.transposed
        window = [1 if transposed else s * (k - 1) + 1 for s, k in zip(self.dilation, self.kernel_size, strict=True)]
        x = torch.randn(samples, self.in_channels, *window, generator=generator, dtype=w.dtype, device=w.device)
        form = (1, 0, self.dilation, transposed, 0, self.groups)
        mean = functional.grad_weight(x, w.shape, functional.convolution(x, w, None, *form), *form) / samples
        self.feedback_weight.add_(mean - weight_decay * self.feedback_weight, alpha=lr)

    @staticmethod
    def _convgrad_unpadded(*_: Any) -> None:
        """Always pad first: the unpadded kernel would use the forward weight in the backward pass."""

    def _convgrad_compute(self: Any, *args: Any) -> Tensor:
        input, weight, bias, *rest = args
        if self.transposed:
            stride, padding, output_padding, groups, dilation = rest
        else:
            (stride, padding, dilation, groups), output_padding = rest, 0
        form = (stride, padding, dilation, self.transposed, output_padding, groups)
        back = self.feedback(weight)  # the weight that is used need not be the layer's own
        with nullcontext() if self._convgrad_backend is None else use_backend(self._convgrad_backend):
            return functional.feedback_convolution(input, weight, back, bias, *form, layout=self._convgrad_layout)

    def extra_repr(self: Any) -> str:
        return f"{super().extra_repr()}, rule={self.rule!r}"  # pyright: ignore[reportAttributeAccessIssue]


def _check(rule: str) -> None:
    if rule not in _RULES:
        raise ValueError(f"rule is one of {', '.join(map(repr, _RULES))}, got {rule!r}")


_DOCSTRING = """`convgrad.nn.{name}` with a feedback weight for the backward pass, given by ``rule``.

    ``layer.feedback()`` is that weight and ``layer.angle()`` its angle with the forward weight. Of the rules in
    `convgrad.nn.feedback`, "alignment", "frSF" and "mirror" keep a buffer ``feedback_weight``, and "kolen-pollack" a
    parameter, for the optimizer and its weight decay; under "mirror" call ``layer.mirror_()`` between training steps.
    Shapes and errors are those of `convgrad.nn.{name}`; an unknown rule is a ValueError.

    Equivalent to:
        >>> import torch, convgrad
        >>> layer = convgrad.nn.Feedback{name}(3, 8, 3, rule="uSF")
        >>> x = torch.randn(1, 3{x5}, requires_grad=True)
        >>> y = layer(x)
        >>> backwards = torch.nn.functional.{function}(x, layer.weight.sign())
        >>> (got,), (want,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(backwards.sum(), x)
        >>> torch.allclose(got, want, atol=1e-5)
        True
    """


# fmt: off
class FeedbackConv1d(Feedback, modules.Conv1d): ...
class FeedbackConv2d(Feedback, modules.Conv2d): ...
class FeedbackConv3d(Feedback, modules.Conv3d): ...
class FeedbackConvTranspose1d(Feedback, modules.ConvTranspose1d): ...
class FeedbackConvTranspose2d(Feedback, modules.ConvTranspose2d): ...
class FeedbackConvTranspose3d(Feedback, modules.ConvTranspose3d): ...
# fmt: on

#: The class of a layer, torch's or ours -> its class with feedback.
_CLASSES: dict[type, type] = {}
for _layer in Feedback.__subclasses__():
    _base = _layer.__mro__[2]
    _function = _base._convgrad_function.__name__
    _layer.__doc__ = _DOCSTRING.format(name=_base.__name__, function=_function, x5=", 5" * dimensions(_base))
    set_constructor(_layer, _base, {"rule": "alignment"})
    _CLASSES |= {_base: _layer, getattr(torch.nn, _base.__name__): _layer}


def convert_feedback_(model: torch.nn.Module, rule: str = "alignment", *, skip: str | Iterable[str] = ()) -> list[str]:
    """Give every convolution of a network a feedback weight for the backward pass, in place.

    A layer gets another class and stays the same object with the same parameters, parametrizations and hooks. Rules
    that store a weight add a ``feedback_weight``, so create the optimizer afterwards. Subclasses of torch's layers are
    left alone, because they may compute anything; derive those from the feedback layers instead.

    Model, ``skip`` and what is returned are those of `convert_`.

    Raises:
        ValueError: an unknown rule, or a name in ``skip`` that no layer has.

    Equivalent to:
        >>> import torch, convgrad
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(4, 1, 3))
        >>> convgrad.nn.convert_feedback_(model, rule="mirror")
        ['0', '2']
        >>> type(model[2]).__name__, model[2].feedback_weight.shape
        ('FeedbackConvTranspose2d', torch.Size([4, 1, 3, 3]))
    """
    _check(rule)
    classes = new_classes(model, skip, _converted, Feedback)
    for layer, cls in classes.values():
        layer.__class__ = cls
        layer._follow(rule)
    return [*classes]


def _converted(layer: torch.nn.Module) -> type | None:
    cls = type(layer)
    base = cls.__bases__[0]
    if parametrize.is_parametrized(layer) and base in _CLASSES:  # torch made this class for this layer
        return with_bases(cls, (_CLASSES[base],))
    return _CLASSES.get(cls)
