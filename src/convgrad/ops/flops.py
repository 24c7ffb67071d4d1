"""FLOP formulas for ``torch.utils.flop_counter``: two operations for each multiply-add of a pass.

That module imports triton, so it is not imported here: the formulas are handed over once it has been imported,
at the latest when an operator runs under a counter.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COUNTER = "torch.utils.flop_counter"


def _pass_flops(data: Any, weight: Any) -> int:
    """One pass: each element of the tensor on the weight's dimension 0 meets the rest of the weight.

    ``data`` is the output of a plain convolution, the input of a transposed one.
    """
    return 2 * prod(data) * prod(weight[1:])


def _convolution(input: Any, weight: Any, _bias: Any, *arguments: Any, out_shape: Any = None, **_: Any) -> int:
    return _pass_flops(input if arguments[3] else out_shape, weight)


def _backward(grad: Any, input: Any, weight: Any, _sizes: Any, *arguments: Any, **_: Any) -> int:
    return _pass_flops(input if arguments[3] else grad, weight) * sum(map(bool, arguments[-1][:2]))


def _grad_input(grad: Any, weight: Any, input_size: Any, *arguments: Any, **_: Any) -> int:
    return _pass_flops(input_size if arguments[3] else grad, weight)


def _grad_weight(grad: Any, input: Any, weight_size: Any, *arguments: Any, **_: Any) -> int:
    return _pass_flops(input if arguments[3] else grad, weight_size)


_FORMULAS = {
    "convolution": _convolution,
    "convolution_backward": _backward,
    "grad_input": _grad_input,
    "grad_weight": _grad_weight,
}


def register() -> None:
    """Give the formulas to ``torch.utils.flop_counter``, and to the counters that are running."""
    module = sys.modules.get(_COUNTER)
    if module is None:
        return
    packets = {getattr(torch.ops.convgrad, name): formula for name, formula in _FORMULAS.items()}
    for packet, formula in packets.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):  # a counter copies the formulas when it is made
            registry.update({packet: module.flop_registry[packet] for packet in packets})
