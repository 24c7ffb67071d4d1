"""oneDNN, once MKL-DNN, by its old names: on the CPU, in float32, and in 16 bits where the CPU has the instructions.

Only the forward has an operator in PyTorch today; its gradients, of every order, are pinned to oneDNN all the same (see
`convgrad.backends.aten_direct_mkldnn`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import functional
from ..engine.registry import get
from ._forced import Grads, Ints, backward, forced

__all__ = [
    "mkldnn_convolution",
    "mkldnn_convolution_backward",
    "mkldnn_convolution_backward_input",
    "mkldnn_convolution_backward_weights",
]

_BACKEND = "aten:mkldnn"


def mkldnn_convolution(
    self: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
) -> Tensor:
    """A convolution by oneDNN.

    Shape:
        - self: (N, C_in, *in), weight: (C_out, C_in/groups, *k), bias: (C_out,), result: (N, C_out, *out)

    Raises:
        BackendError: oneDNN cannot compute this here, with the reasons.

    Equivalent to:
        >>> import torch
        >>> x, w = torch.randn(2, 4, 6, 5), torch.randn(6, 2, 3, 3)
        >>> want = torch.nn.functional.conv2d(x, w, padding=1, groups=2)
        >>> torch.allclose(mkldnn_convolution(x, w, None, [1, 1], [1, 1], [1, 1], 2), want, atol=1e-5)
        True
    """
    with forced("mkldnn_convolution", get(_BACKEND), self):
        return functional.convolution(self, weight, bias, stride, padding, dilation, False, 0, groups)


def mkldnn_convolution_backward(
    self: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    output_mask: Sequence[bool] = (True, True, True),
) -> Grads:
    """The gradients of `mkldnn_convolution`, by oneDNN; that of the bias is a sum.

    Shape:
        - self: (N, C_in, *in), grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k)
        - result: like self, like weight, and (C_out,); None where the mask does not ask

    Raises:
        BackendError: oneDNN cannot compute this here, with the reasons.

    Equivalent to:
        >>> import torch
        >>> x, w, g = torch.randn(2, 4, 6, 5), torch.randn(6, 4, 3, 3), torch.randn(2, 6, 4, 3)
        >>> gi, gw, gb = mkldnn_convolution_backward(x, g, w, [0, 0], [1, 1], [1, 1], 1, [True, True, False])
        >>> gi.shape == x.shape, gw.shape == w.shape, gb
        (True, True, None)
    """
    with forced("mkldnn_convolution_backward", get(_BACKEND), self):
        return backward(grad_output, self, weight, (stride, padding, dilation, groups), output_mask)


def mkldnn_convolution_backward_input(
    self_size: Sequence[int],
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    bias_defined: bool = False,
) -> Tensor:
    """The gradient of the input, by oneDNN.

    Args:
        bias_defined: has no bearing on this gradient.

    Shape:
        - self_size: N, C_in and the spatial sizes of the input
        - grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k), result: ``self_size``

    Raises:
        BackendError: oneDNN cannot compute this here, with the reasons.
    """
    with forced("mkldnn_convolution_backward_input", get(_BACKEND), grad_output):
        return functional.grad_input(self_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def mkldnn_convolution_backward_weights(
    weight_size: Sequence[int],
    grad_output: Tensor,
    self: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    bias_defined: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the weight, by oneDNN, and where ``bias_defined`` that of the bias.

    Shape:
        - weight_size: C_out, C_in/groups and the kernel sizes
        - grad_output: (N, C_out, *out), self: (N, C_in, *in), result: ``weight_size`` and (C_out,)

    Raises:
        BackendError: oneDNN cannot compute this here, with the reasons.
    """
    with forced("mkldnn_convolution_backward_weights", get(_BACKEND), self):
        grad = functional.grad_weight(self, weight_size, grad_output, stride, padding, dilation, False, 0, groups)
    return grad, functional.grad_bias(grad_output) if bias_defined else None
