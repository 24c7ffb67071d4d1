"""FLOP formulas for ``torch.utils.flop_counter``: two operations for each multiply-add of a pass.

`torch.profiler` computes those of a call (``with_flops=True``) from the inputs of a range that is named like PyTorch's
operator: `profiled_call` opens it.

The counter's module imports triton, so it is not imported here: the formulas are registered once it is there, at the
latest when an operator runs under a counter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .._compat import profiler_range

_COUNTER = "torch.utils.flop_counter"


#: Of each operator, which of its arguments are input, weight and output (None: its result), and which is transposed.
_PLACES = {
    "convolution": (0, 1, None, 6),
    "convolution_backward": (1, 2, 0, 7),
    "grad_input": (2, 1, 0, 6),
    "grad_weight": (1, 2, 0, 6),
}


def _formula(name: str) -> Callable[..., int]:
    """Return the FLOP formula of a pass: each element of its output (transposed: input) takes a part of the weight."""
    input, weight, output, transposed = _PLACES[name]

    def flops(*args: Any, out_shape: Any = None, **_: Any) -> int:
        data = args[input] if args[transposed] else out_shape if output is None else args[output]
        passes = sum(map(bool, args[-1][:2])) if name == "convolution_backward" else 1
        return 2 * passes * prod(data) * prod(args[weight][1:])

    return flops


def register() -> None:
    """Give the formulas to ``torch.utils.flop_counter``, and to the counters that are running."""
    module = sys.modules.get(_COUNTER)
    if module is None:
        return
    packets = {getattr(torch.ops.convgrad, name): name for name in _PLACES}
    for packet, name in packets.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet)(_formula(name))
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):  # a counter copies the formulas when it is made
            registry.update({packet: module.flop_registry[packet] for packet in packets})


def profiled_call(name: str, input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]) -> Any:
    """Open the range that PyTorch's profiler shows for a call of its function, with operands, arguments and FLOPs."""
    stride, padding, dilation, transposed, output_padding, groups = arguments
    if len(padding) > len(stride):  # low and high of each dimension
        sums = [low + high for low, high in zip(padding[::2], padding[1::2], strict=True)]
        if any(both % 2 for both in sums):
            return profiler_range(name)  # which PyTorch cannot say, nor count
        padding = [both // 2 for both in sums]
    lists = [[*stride], [*padding]]
    lists += [[*output_padding], groups, [*dilation]] if transposed else [[*dilation], groups]
    return profiler_range(name, [input, weight, bias, *lists])
