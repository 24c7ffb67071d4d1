"""Convolutions and their gradients as functions, in 1, 2 and 3 dimensions, differentiable to any order.

The names and signatures of ``torch.nn.functional`` and ``torch.nn.grad``. The N-d functions do the work; the 1-d, 2-d
and 3-d ones are thin wrappers. ``padding`` may also state the low and the high side of each dimension, be negative (a
crop), or in 1-D be ``"causal"``.
"""

from ._arguments import Ints as Ints
from ._arguments import Padding as Padding
from ._arguments import sides_of as sides_of
from ._causal import causal_conv1d, causal_conv1d_update
from ._convolution import convolution
from ._convolution import convolution_with_backend as convolution_with_backend
from ._feedback import feedback_convolution
from ._gradients import convolution_backward, grad_bias, grad_input, grad_weight
from ._names import (
    conv1d,
    conv1d_input,
    conv1d_weight,
    conv2d,
    conv2d_input,
    conv2d_weight,
    conv3d,
    conv3d_input,
    conv3d_weight,
    conv_transpose1d,
    conv_transpose1d_input,
    conv_transpose1d_weight,
    conv_transpose2d,
    conv_transpose2d_input,
    conv_transpose2d_weight,
    conv_transpose3d,
    conv_transpose3d_input,
    conv_transpose3d_weight,
)
from ._per_sample import per_sample_norms
from ._rows import Layout as Layout
from ._rows import require_layout as require_layout

__all__ = ["causal_conv1d", "causal_conv1d_update", "conv1d", "conv1d_input", "conv1d_weight", "conv2d",
           "conv2d_input", "conv2d_weight", "conv3d", "conv3d_input", "conv3d_weight", "conv_transpose1d",
           "conv_transpose1d_input", "conv_transpose1d_weight", "conv_transpose2d", "conv_transpose2d_input",
           "conv_transpose2d_weight", "conv_transpose3d", "conv_transpose3d_input", "conv_transpose3d_weight",
           "convolution", "convolution_backward", "feedback_convolution", "grad_bias", "grad_input", "grad_weight",
           "per_sample_norms"]  # fmt: skip
