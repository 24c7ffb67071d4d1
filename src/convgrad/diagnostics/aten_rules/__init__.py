"""PyTorch's own path of a convolution: validate, select a backend, choose a layout, compute.

Every answer carries the rules that led to it, in PyTorch's order, with the value that made each true or false; for
this machine and for one that is only described. No tensor needs memory: a `TensorSpec` is enough.
"""

from .call import ConvCall, TensorSpec, short
from .machine import MACHINES, MODELLED_VERSIONS, DeviceLike, Machine, Sheet, machine_of
from .names import Kernel, Scratch, kernel_of, named
from .rules import Rule
from .steps import (
    BACKENDS,
    AtenTrace,
    Copy,
    Decision,
    KernelRun,
    determine_backend_memory_format,
    select_conv_backend,
    trace_aten,
    trace_call,
)

__all__ = [
    "BACKENDS", "MACHINES", "MODELLED_VERSIONS", "AtenTrace", "ConvCall", "Copy", "Decision",
    "DeviceLike", "Kernel", "KernelRun", "Machine", "Rule", "Scratch", "Sheet", "TensorSpec",
    "determine_backend_memory_format", "kernel_of", "machine_of", "named", "select_conv_backend", "short",
    "trace_aten", "trace_call",
]  # fmt: skip
