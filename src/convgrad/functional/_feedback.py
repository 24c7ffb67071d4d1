"""A convolution whose backward pass goes through another weight: learning without weight transport."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ShapeError
from ..ops import cast_operands, traced_request
from ..problem import Ints, Padding, all_arguments, check_operands, check_rank
from ._arguments import of_tensors
from ._convolution import Layout, as_images, in_one_row


@of_tensors("input", "weight", "feedback_weight", "bias")
def feedback_convolution(
    input: Tensor, weight: Tensor, feedback_weight: Tensor, bias: Tensor | None = None, stride: Ints = 1,
    padding: Padding | str = 0, dilation: Ints = 1, transposed: bool = False, output_padding: Ints = 0, groups: int = 1,
    *, layout: Layout = "NCL",
) -> Tensor:  # fmt: skip
    """Return a convolution with ``weight`` whose gradient for the input uses ``feedback_weight``.

    The gradients of weight and bias are the usual ones. A feedback_weight that requires a gradient gets the weight's;
    under weight decay the two then converge (the Kolen-Pollack algorithm of Akrout et al., "Deep
    Learning without Weight Transport", arXiv:1904.05391). One that requires none stays as it is (feedback alignment:
    Lillicrap et al., "Random synaptic feedback weights support error backpropagation for deep learning", 2016, Fig. 1).

    Higher derivatives are those of this backward pass as a function of grad_output, input and feedback_weight. They are
    not the second derivatives of any function, so a Hessian made from them need not be symmetric. Forward mode
    transposes nothing, so its derivatives are those of `convolution`.

    Arguments and shapes are those of `convolution`, or without N; the layout, in 1-D, is that of `conv1d`.

    Raises:
        ShapeError, DtypeError: as `convolution`; a feedback_weight of another shape, dtype or device than weight's.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w, b = torch.randn(2, 4, 9, requires_grad=True), torch.randn(6, 4, 3), torch.randn(6, 4, 3)
        >>> y = convgrad.feedback_convolution(x, w, b)
        >>> torch.equal(y, convgrad.convolution(x, w))
        True
        >>> (want,) = torch.autograd.grad(torch.nn.functional.conv1d(x, b).sum(), x)
        >>> torch.allclose(torch.autograd.grad(y.sum(), x)[0], want, atol=1e-5)
        True
    """
    form = (stride, padding, dilation, transposed, output_padding, groups)
    if feedback_weight.shape != weight.shape:
        raise ShapeError(
            f"Expected feedback_weight of the size of weight, {list(weight.shape)}, "
            f"but got {list(feedback_weight.shape)}"
        )
    if layout != "NCL":

        def call(image: Tensor, kernel: Tensor) -> Tensor:
            row_form = in_one_row(all_arguments)(2, kernel.shape, *form)
            return feedback_convolution(image, kernel, feedback_weight.unsqueeze(2), bias, *row_form)

        return as_images(call, input, weight, layout)
    if input.dim() == weight.dim() - 1:
        return feedback_convolution(input.unsqueeze(0), weight, feedback_weight, bias, *form).squeeze(0)
    check_rank(input.shape, weight.shape)
    operands: Any = cast_operands(input, weight, bias, feedback_weight)
    check_operands(("weight", operands[1]), ("feedback_weight", operands[3]))
    from ._feedback_function import apply  # its decorator loads the compiler

    return apply(*operands, form, traced_request())
