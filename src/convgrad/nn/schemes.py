"""Binary and ternary weights: how a float weight becomes one of few values, and which gradient it gets.

The weight that the convolution uses is a step function of a float weight, the shadow weight, whose derivative is zero
almost everywhere. Each paper puts another gradient in its place. A scheme states both: the value, and an expression
whose derivative is that gradient. Layers and parametrizations use the same schemes and know no formula.

- BinaryConnect: Courbariaux, Bengio and David, arXiv:1511.00363
- BNN: Courbariaux, Hubara, Soudry, El-Yaniv and Bengio, Binarized Neural Networks, arXiv:1602.02830
- BWN and XNOR-Net: Rastegari, Ordonez, Redmon and Farhadi, arXiv:1603.05279
- TWN: Li, Zhang and Liu, Ternary Weight Networks, arXiv:1605.04711
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

__all__ = ["Binary", "Scheme", "Ternary", "Xnor", "binarize", "straight_through"]


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Return ``value``, exactly, with the derivative of ``gradient_of``: the straight-through estimator.

    Both are of one shape, and the latter finite. The difference of a tensor and itself is exactly zero, so nothing is
    rounded. These are ordinary operations, so autocast, vmap, forward mode and torch.compile work.

    Equivalent to:
        >>> import torch, convgrad
        >>> x = torch.tensor([0.4, 1.6], requires_grad=True)
        >>> y = convgrad.nn.straight_through(x.round(), x)
        >>> y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()
        ([0.0, 2.0], [1.0, 1.0])
    """
    return value.detach() + (gradient_of - gradient_of.detach())


def binarize(input: Tensor) -> Tensor:
    """Return the sign of each element, +1 for zero, with the gradient passed on where ``abs(input) <= 1``.

    The value is that of BNN (arXiv:1602.02830), section 1.1, the gradient that of its section 1.3.

    Equivalent to:
        >>> import torch, convgrad
        >>> x = torch.tensor([-2.0, -0.5, 0.0, 1.0, 3.0], requires_grad=True)
        >>> y = convgrad.nn.binarize(x)
        >>> y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()
        ([-1.0, -1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 0.0])
    """
    return straight_through(_sign(input), _inside(input))


def _sign(x: Tensor) -> Tensor:
    return (x >= 0).to(x.dtype) * 2 - 1


def _inside(x: Tensor) -> Tensor:
    """Its derivative is 1 where ``abs(x) <= 1``, else 0; that of clamp is 0 at the bounds from PyTorch 2.15 on."""
    return torch.where(x.abs() > 1, 0.0, x)


def _filters(weight: Tensor, transposed: bool, groups: int) -> tuple[Tensor, list[int]]:
    """Return a view of a weight, and the dimensions of it that belong to one output channel."""
    if not transposed:
        return weight, list(range(1, weight.dim()))
    view = weight.unflatten(0, (groups, -1))  # [groups, C_in/groups, C_out/groups, *k]
    return view, [1, *range(3, view.dim())]


@dataclass(frozen=True)
class Scheme:
    """The quantization of a layer's weight, input and bias: the base of all schemes, and of your own.

    Your own scheme is a frozen dataclass with `quantize`; the input and the bias are unchanged unless it overrides
    their methods too. `parametrize_` puts it on a layer.

    Equivalent to:
        >>> import torch, convgrad
        >>> class Rounded(convgrad.nn.Scheme):
        ...     def quantize(self, *originals, transposed=False, groups=1, training=False):
        ...         return convgrad.nn.straight_through(originals[0].round(), originals[0])
        >>> layer = convgrad.nn.parametrize_(torch.nn.Conv1d(1, 1, 3), Rounded())
        >>> layer.weight = torch.tensor([[[0.6, 1.2, -3.4]]])
        >>> layer.weight.tolist()
        [[[1.0, 1.0, -3.0]]]
    """

    #: The parameters that a layer keeps in place of the weight.
    names: ClassVar[tuple[str, ...]] = ("weight",)
    #: Options that a layer's constructor takes by position too, in front of ``device``.
    _leading: ClassVar[tuple[str, ...]] = ()

    def originals(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The float tensors, one for each of `names`, that stand for a float weight."""
        return (weight,)

    def quantize(self, *originals: Tensor, transposed: bool = False, groups: int = 1, training: bool = False) -> Tensor:
        """The weight that the convolution uses.

        Args:
            originals: the float tensors that `originals` made, or what training made of them.
            transposed: whether the output channels are the second dimension, in each of the ``groups``.
            groups: as in the convolution.
            training: whether the layer is in training mode.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define quantize, which gives the weight that is used"
        )

    def input(self, input: Tensor) -> Tensor:
        """The input that the convolution sees."""
        return input

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """The bias that is added."""
        return bias

    @property
    def quantizes_input(self) -> bool:
        """Whether `input` or `bias` changes anything."""
        return type(self).input is not Scheme.input or type(self).bias is not Scheme.bias

    def clip_(self, *originals: Tensor) -> None:
        """Bring shadow weights back into their range, in place, after an update."""

    def __str__(self) -> str:
        values = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        return ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)


def quantized(scheme: Scheme, transposed: bool, groups: int, training: bool, *originals: Tensor) -> Tensor:
    """`Scheme.quantize`; where torch.fx traces, one call in its graph."""
    if not isinstance(originals[0], Tensor):
        return handle_torch_function(quantized, originals, scheme, transposed, groups, training, *originals)
    return scheme.quantize(*originals, transposed=transposed, groups=groups, training=training)


@dataclass(frozen=True)
class Binary(Scheme):
    """Weights of two values: BWN's, or BinaryConnect's where ``scale`` is False.

    Args:
        scale: multiply the signs by the mean magnitude of the weights of each output channel.

    Both are published with a gradient of their own. With C the loss, W the shadow weight, W~ what the convolution uses:

    - BWN (arXiv:1603.05279, section 3.1): ``W~ = alpha * sign(W)`` with ``alpha = mean(abs(W))`` over the n weights of
      an output channel, and ``dC/dW = dC/dW~ * (1/n + alpha * (abs(W) <= 1))``.
    - BinaryConnect (arXiv:1511.00363, section 2.2 and algorithm 1): ``W~ = sign(W)`` and ``dC/dW = dC/dW~``; the shadow
      weights are clipped to [-1, 1] after each update (section 2.4; here `clip_`).

    Equivalent to:
        >>> import torch, convgrad
        >>> w = torch.tensor([[0.5, -1.5], [-0.25, 0.75]])
        >>> convgrad.nn.Binary().quantize(w).tolist(), convgrad.nn.Binary(scale=False).quantize(w).tolist()
        ([[1.0, -1.0], [-0.5, 0.5]], [[1.0, -1.0], [-1.0, 1.0]])
    """

    scale: bool = True

    def quantize(self, *originals: Tensor, transposed: bool = False, groups: int = 1, training: bool = False) -> Tensor:
        (weight,) = originals
        if not self.scale:
            return straight_through(_sign(weight), weight)
        view, own = _filters(weight, transposed, groups)
        fixed = view.detach()
        alpha = fixed.abs().mean(own, keepdim=True)
        n = fixed.numel() // max(alpha.numel(), 1)
        out = straight_through(alpha * _sign(fixed), view / n + alpha * _inside(view))
        return out.flatten(0, 1) if transposed else out

    def clip_(self, *originals: Tensor) -> None:
        originals[0].clamp_(-1, 1)


@dataclass(frozen=True)
class Xnor(Binary):
    """Weights and inputs of two values: XNOR-Net's, or BNN's where ``scale`` is False.

    Args:
        scale: as for `Binary`: alpha of each output channel.
        scale_input: multiply the output by K, the mean magnitude of the inputs that each output position sees.

    The input is replaced by `binarize` of itself: +1 or -1, and zero padding stays 0. XNOR-Net (arXiv:1603.05279,
    section 3.2) computes ``conv(sign(I), sign(W)) * K * alpha``. K is the mean of ``abs(I)`` over the channels (of the
    group, if there are groups), averaged by a convolution whose weights are all ``1 / kernel elements``. The paper does
    not cover transposed convolutions; there K is the mean over the input positions that reach the output position. BNN
    (arXiv:1602.02830, algorithm 1) uses only the signs: ``Xnor(scale=False)``. K is differentiated like any function.
    """

    scale_input: bool = False

    def input(self, input: Tensor) -> Tensor:
        return binarize(input)


@dataclass(frozen=True)
class Ternary(Scheme):
    """Weights of three values, -alpha, 0 and alpha, as in Ternary Weight Networks.

    Args:
        threshold: weights of a magnitude up to this many mean magnitudes become zero.

    With the weights of an output channel (arXiv:1605.04711, section 2): ``delta = 0.7 * mean(abs(W))``,
    ``W~ = alpha * sign(W) * (abs(W) > delta)`` with alpha the mean of ``abs(W)`` over the weights that are not zero;
    the shadow weight gets the gradient of W~ unchanged.

    Raises:
        ValueError: a threshold that is negative or not a number.

    Equivalent to:
        >>> import torch, convgrad
        >>> convgrad.nn.Ternary().quantize(torch.tensor([[0.5, -1.5, 0.25, -0.75]])).tolist()
        [[0.0, -1.125, 0.0, -1.125]]
    """

    threshold: float = 0.7

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float) or not self.threshold >= 0:
            raise ValueError(f"threshold must be a number of at least 0, got {self.threshold!r}")

    def quantize(self, *originals: Tensor, transposed: bool = False, groups: int = 1, training: bool = False) -> Tensor:
        (weight,) = originals
        fixed, own = _filters(weight.detach(), transposed, groups)
        magnitude = fixed.abs()
        large = magnitude > self.threshold * magnitude.mean(own, keepdim=True)
        alpha = (magnitude * large).sum(own, keepdim=True) / large.sum(own, keepdim=True).clamp(min=1)
        value = torch.where(large, alpha * _sign(fixed), 0)
        return straight_through(value.flatten(0, 1) if transposed else value, weight)
