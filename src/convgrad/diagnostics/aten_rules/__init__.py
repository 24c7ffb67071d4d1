"""PyTorch's own path of a convolution: validate, select a backend, choose a layout, compute.

Every answer carries the rules that led to it, in PyTorch's order, with the value that made each true or false; for
this machine and for one that is only described. No tensor needs memory: a `TensorSpec` is enough.
"""

from .call import ConvCall, TensorSpec, short
from .kernel_names import Kernel, Scratch, kernel_of, named
from .machine import MACHINES, MODELLED_VERSIONS, DeviceLike, Machine, machine_of, machine_words
from .steps import (
    BACKENDS,
    AtenTrace,
    Decision,
    decided,
    determine_backend_memory_format,
    select_conv_backend,
    trace_aten,
)

__all__ = [
    "BACKENDS", "MACHINES", "MODELLED_VERSIONS", "AtenTrace", "ConvCall", "Decision", "DeviceLike", "Kernel",
    "Machine", "Scratch", "TensorSpec", "decided", "determine_backend_memory_format", "kernel_of", "machine_of",
    "machine_words", "named", "select_conv_backend", "short", "trace_aten",
]  # fmt: skip
