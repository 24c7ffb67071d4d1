"""The old direct names: cuDNN, MIOpen, oneDNN and THNN called by name, with their flags and argument order.

PyTorch removed most of these functions, or hid them behind ``convolution_backward``. Here each is forced onto its
library, differentiable to any order on the same library, and refused with the reasons where the library is not.

    >>> import torch
    >>> from convgrad import direct
    >>> x = torch.randn(1, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    >>> w = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    >>> torch.autograd.gradcheck(lambda x: direct.slow_conv2d(x, w, 3, None, 1, 1), x)
    True
    >>> x, w, g = torch.randn(2, 4, 6, 5), torch.randn(6, 4, 3, 3), torch.randn(2, 6, 4, 3)
    >>> gi, gw, gb = direct.mkldnn_convolution_backward(x, g, w, [0, 0], [1, 1], [1, 1], 1, [True, True, False])
    >>> gi.shape == x.shape, gw.shape == w.shape, gb
    (True, True, None)

The flags ``benchmark``, ``deterministic`` and ``allow_tf32`` hold for the call and its derivatives and touch no global.
For the gradient of the weight PyTorch has kept no function that takes them: it is PyTorch's own backward, under
PyTorch's own flags, as long as these allow no more than the call's; else a forward of the library in another role
computes it, with the call's flags, more slowly.
"""

from __future__ import annotations

from ._factory import (
    BACKWARD,
    CUDNN,
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    MIOPEN,
    NATIVE,
    ONEDNN,
    TRANSPOSED,
    TRANSPOSED_BACKWARD,
    TRANSPOSED_GRAD_INPUT,
    TRANSPOSED_GRAD_WEIGHT,
    and_grad_bias,
    and_scratch,
    by,
    depthwise,
    kernel_size,
    redundant_input_size,
    unread_bias_defined,
    unread_scratch,
)

# Annotations follow from the names of the arguments.
# fmt: off

# ---- cuDNN, arguments in PyTorch 1.10's order, the flags last ------------------------------------

@by(CUDNN, FORWARD)
def cudnn_convolution(self, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None, *, bias=None): ...
@by(CUDNN, BACKWARD)
def cudnn_convolution_backward(self, grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None, output_mask=(True, True)): ...
@by(CUDNN, GRAD_INPUT)
def cudnn_convolution_backward_input(self_size, grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...
@by(CUDNN, GRAD_WEIGHT)
def cudnn_convolution_backward_weight(weight_size, grad_output, self, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...
@by(CUDNN, TRANSPOSED)
def cudnn_convolution_transpose(self, weight, padding, output_padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None, *, bias=None): ...
@by(CUDNN, TRANSPOSED_BACKWARD)
def cudnn_convolution_transpose_backward(self, grad_output, weight, padding, output_padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None, output_mask=(True, True)): ...
@by(CUDNN, TRANSPOSED_GRAD_INPUT)
def cudnn_convolution_transpose_backward_input(grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...
@by(CUDNN, TRANSPOSED_GRAD_WEIGHT)
def cudnn_convolution_transpose_backward_weight(weight_size, grad_output, self, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...

# ---- MIOpen, arguments in PyTorch 1.10's order, the flags last -----------------------------------

@by(MIOPEN, FORWARD)
def miopen_convolution(self, weight, bias, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, BACKWARD)
def miopen_convolution_backward(self, grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, output_mask=(True, True, True)): ...
@by(MIOPEN, GRAD_INPUT)
def miopen_convolution_backward_input(self_size, grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, GRAD_WEIGHT)
def miopen_convolution_backward_weight(weight_size, grad_output, self, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, TRANSPOSED)
def miopen_convolution_transpose(self, weight, bias, padding, output_padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, TRANSPOSED_BACKWARD)
def miopen_convolution_transpose_backward(self, grad_output, weight, padding, output_padding, stride, dilation, groups,
    benchmark=None, deterministic=None, output_mask=(True, True, True)): ...
@by(MIOPEN, TRANSPOSED_GRAD_INPUT)
def miopen_convolution_transpose_backward_input(grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, TRANSPOSED_GRAD_WEIGHT)
def miopen_convolution_transpose_backward_weight(weight_size, grad_output, self, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, FORWARD, depthwise)
def miopen_depthwise_convolution(self, weight, bias, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, BACKWARD, depthwise)
def miopen_depthwise_convolution_backward(self, grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None, output_mask=(True, True, True)): ...
@by(MIOPEN, GRAD_INPUT, depthwise)
def miopen_depthwise_convolution_backward_input(self_size, grad_output, weight, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...
@by(MIOPEN, GRAD_WEIGHT, depthwise)
def miopen_depthwise_convolution_backward_weight(weight_size, grad_output, self, padding, stride, dilation, groups,
    benchmark=None, deterministic=None): ...

# ---- oneDNN, once MKL-DNN: on the CPU ------------------------------------------------------------

@by(ONEDNN, FORWARD)
def mkldnn_convolution(self, weight, bias, padding, stride, dilation, groups): ...
@by(ONEDNN, BACKWARD)
def mkldnn_convolution_backward(self, grad_output, weight, padding, stride, dilation, groups,
    output_mask=(True, True, True)): ...
@by(ONEDNN, GRAD_INPUT, unread_bias_defined)
def mkldnn_convolution_backward_input(
    self_size, grad_output, weight, padding, stride, dilation, groups, bias_defined=False): ...
@by(ONEDNN, GRAD_WEIGHT, and_grad_bias)
def mkldnn_convolution_backward_weights(
    weight_size, grad_output, self, padding, stride, dilation, groups, bias_defined=False): ...

# ---- THNN: 2-D, undilated, ungrouped; thnn_conv2d and slow_conv2d are one kernel -----------------

@by(NATIVE, FORWARD, kernel_size)
def thnn_conv2d(self, weight, kernel_size, bias=None, stride=1, padding=0): ...
@by(NATIVE, FORWARD, kernel_size, and_scratch)
def thnn_conv2d_forward(self, weight, kernel_size, bias, stride, padding): ...
@by(NATIVE, BACKWARD, kernel_size, unread_scratch)
def thnn_conv2d_backward(grad_output, self, weight, kernel_size, stride, padding,
    finput=None, fgrad_input=None, output_mask=(True, True, True)): ...
@by(NATIVE, FORWARD, kernel_size)
def slow_conv2d(self, weight, kernel_size, bias=None, stride=1, padding=0): ...
@by(NATIVE, FORWARD, kernel_size, and_scratch)
def slow_conv2d_forward(self, weight, kernel_size, bias, stride, padding): ...
@by(NATIVE, BACKWARD, kernel_size, unread_scratch)
def slow_conv2d_backward(grad_output, self, weight, kernel_size, stride, padding,
    finput=None, fgrad_input=None, output_mask=(True, True, True)): ...

# ---- The small extension that many copied to reach cuDNN: stride before padding ------------------

@by(CUDNN, FORWARD)
def convolution(input, weight, stride, padding, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None, *, bias=None): ...
@by(CUDNN, GRAD_INPUT)
def convolution_backward_input(input_size, weight, grad_output, stride, padding, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...
@by(CUDNN, GRAD_WEIGHT)
def convolution_backward_weight(input, weight_size, grad_output, stride, padding, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...
@by(CUDNN, TRANSPOSED)
def convolution_transpose(input, weight, stride, padding, output_padding, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None, *, bias=None): ...
@by(CUDNN, TRANSPOSED_GRAD_INPUT, redundant_input_size)
def convolution_transpose_backward_input(input_size, weight, grad_output, stride, padding, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...
@by(CUDNN, TRANSPOSED_GRAD_WEIGHT)
def convolution_transpose_backward_weight(input, weight_size, grad_output, stride, padding, dilation, groups,
    benchmark=None, deterministic=None, allow_tf32=None): ...

# fmt: on

#: The functions above, not what is imported.
__all__ = [n for n, f in list(globals().items()) if getattr(f, "__module__", "") == __name__]  # pyright: ignore[reportUnsupportedDunderAll]
