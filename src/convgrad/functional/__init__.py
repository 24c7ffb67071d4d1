"""Convolutions and their gradients as functions, in 1, 2 and 3 dimensions, differentiable to any order.

The names and signatures of ``torch.nn.functional`` and ``torch.nn.grad``. The N-d functions do the work; the 1-d, 2-d
and 3-d ones are thin wrappers. ``padding`` may also state the low and the high side of each dimension, be negative (a
crop), or in 1-D be ``"causal"``.
"""

# ruff: noqa: F403
from ..problem import Ints as Ints
from ..problem import Padding as Padding
from . import _convolution, _gradients
from ._arguments import sides_of as sides_of
from ._causal import causal_conv1d, causal_conv1d_update
from ._convolution import *
from ._convolution import Layout as Layout
from ._convolution import convolution_with_backend as convolution_with_backend
from ._convolution import require_layout as require_layout
from ._feedback import feedback_convolution
from ._gradients import *
from ._per_sample import per_sample_norms

__all__ = ["causal_conv1d", "causal_conv1d_update", "feedback_convolution", "per_sample_norms"]
__all__ += _convolution.__all__
__all__ += _gradients.__all__
