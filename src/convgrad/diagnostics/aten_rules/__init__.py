"""PyTorch's own convolution pipeline in the open: validate, select a backend, choose a layout, compute.

Every answer carries the rules that led to it, in PyTorch's order, with the value that made each true or false; for
the device at hand and for one that is only described. No tensor needs memory: a `TensorSpec` is enough.

    >>> import torch
    >>> from convgrad.diagnostics.aten_rules import TensorSpec, select_conv_backend
    >>> x = TensorSpec((8, 96, 56, 56), dtype=torch.bfloat16)
    >>> w = TensorSpec((96, 1, 7, 7), dtype=torch.bfloat16)
    >>> select_conv_backend(x, w, padding=3, groups=96, device="h100 cudnn 9.10").backend
    'CudaDepthwise2d'
"""

from .backward import check_backward, unchecked
from .call import Call, make_call
from .compute import Copy, Step, Walk, walk
from .layouts import LAYOUT_RULES
from .machine import Machine
from .names import Function, Kernel, backward_of, forward_of, kernel_of
from .rules import Decision, Rule
from .select import BACKENDS, determine_backend_memory_format, select_conv_backend
from .tensors import TensorSpec
from .versions import MODELLED_VERSIONS

__all__ = [
    "BACKENDS",
    "LAYOUT_RULES",
    "MODELLED_VERSIONS",
    "Call",
    "Copy",
    "Decision",
    "Function",
    "Kernel",
    "Machine",
    "Rule",
    "Step",
    "TensorSpec",
    "Walk",
    "backward_of",
    "check_backward",
    "determine_backend_memory_format",
    "forward_of",
    "kernel_of",
    "make_call",
    "select_conv_backend",
    "unchecked",
    "walk",
]
