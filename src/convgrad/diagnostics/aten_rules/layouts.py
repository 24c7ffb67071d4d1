"""The layout in which a backend works: PyTorch's rules, one per library.

Modelled after ``ConvUtils.h`` and ``determine_backend_memory_format`` of ATen (2.11 to 2.15). What they share: the
result is channels_last if *either* input or weight suggests it.
"""

from __future__ import annotations

import torch

from ..._compat import channels_last_of
from .call import TensorSpec, short
from .decision import Decision, DecisionLog
from .machine import Machine

_CONTIGUOUS = torch.contiguous_format

#: Which rule each backend follows; a backend that is not here always works in contiguous tensors.
LAYOUT_RULES: dict[str, str] = {
    **dict.fromkeys(("Cudnn", "CudnnTranspose"), "cudnn"),
    **dict.fromkeys(("Miopen", "MiopenDepthwise", "MiopenTranspose"), "miopen"),
    **dict.fromkeys(("Mkldnn", "MkldnnTranspose"), "mkldnn"),
    **dict.fromkeys(("Slow2d", "SlowDilated2d", "SlowTranspose2d"), "thnn"),
    **dict.fromkeys(("Mps", "MpsTranspose"), "mps"),
    "Overrideable": "xpu",
}


def layout_decision(backend: str, input: TensorSpec, weight: TensorSpec, m: Machine) -> Decision:
    """The layout in which ``backend`` works on these operands, with every rule on the way."""
    log = DecisionLog()
    fmt = _layout(log, backend, input, weight, m)
    return Decision("memory_format", short(fmt), tuple(log.rules), m, (), fmt)


def _layout(log: DecisionLog, backend: str, input: TensorSpec, weight: TensorSpec, m: Machine) -> torch.memory_format:
    rule = LAYOUT_RULES.get(backend)
    log.record("the backend has a layout rule", rule is not None, rule or f"{backend}: contiguous")
    if rule is None:
        return _CONTIGUOUS
    if rule == "cudnn":
        return cudnn_layout(log, input, weight, m)
    exact = False
    if rule == "miopen":
        enabled = (
            log.record("PyTorch is built with MIOpen", m.miopen, m.miopen)
            and _no_float64(log, input, weight)
            and log.record("PYTORCH_MIOPEN_SUGGEST_NHWC=1", m.miopen_nhwc, m.miopen_nhwc)
        )
    elif rule == "thnn":
        enabled = log.record("the input is on the CPU", input.device_type == "cpu", input.device_type)
        enabled = enabled and log.record("2-D", weight.ndim == 4, f"{weight.ndim - 2}-D")
    elif rule == "mkldnn":
        opaque = input.mkldnn or weight.mkldnn
        enabled = _no_float64(log, input, weight) and log.record(
            "neither is an opaque oneDNN tensor", not opaque, opaque
        )
    else:
        kinds = (input.device_type, weight.device_type)
        enabled = log.record(f"both are {rule.upper()} tensors", kinds == (rule, rule), f"{kinds[0]} and {kinds[1]}")
        exact = rule == "mps" and m.since("2.12")
    return _channels_last(log, input, weight, enabled, exact)


def cudnn_layout(log: DecisionLog, input: TensorSpec, weight: TensorSpec, m: Machine) -> torch.memory_format:
    """cuDNN's layout rule on its own; the choice of a depthwise kernel reads it too."""
    enabled = log.record("PyTorch is built with cuDNN", m.cudnn is not None, m.cudnn_text)
    enabled = enabled and _no_float64(log, input, weight)
    if enabled and not m.since("2.13"):  # earlier releases name a version below any that they support
        least = 8005 if weight.ndim == 5 else 7603
        enabled = log.record(f"cuDNN is {least} or later", (m.cudnn or 0) >= least, m.cudnn_text)
    return _channels_last(log, input, weight, enabled)


def _no_float64(log: DecisionLog, input: TensorSpec, weight: TensorSpec) -> bool:
    dtypes = (input.dtype, weight.dtype)
    return log.record("neither is float64", torch.float64 not in dtypes, " and ".join(map(short, dtypes)))


def _channels_last(
    log: DecisionLog, input: TensorSpec, weight: TensorSpec, enabled: bool, exact: bool = False
) -> torch.memory_format:
    wanted = channels_last_of(weight.ndim - 2)
    if not enabled or wanted == _CONTIGUOUS:
        return _CONTIGUOUS
    got = (input.suggest_memory_format(exact), weight.suggest_memory_format(exact))
    how = " by its exact strides" if exact else ""
    either = log.record(f"input or weight suggests {wanted}{how}", wanted in got, f"{got[0]}, {got[1]}")
    return wanted if either else _CONTIGUOUS
