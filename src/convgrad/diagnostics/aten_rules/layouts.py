"""The layout in which a backend works: PyTorch's rules, one per library.

Modelled after ``ConvUtils.h`` and ``determine_backend_memory_format`` of ATen (2.11 to 2.15). What they share: the
result is channels_last if *either* input or weight suggests it.
"""

from __future__ import annotations

import torch

from .machine import Machine
from .rules import Trail
from .tensors import TensorSpec

__all__ = ["LAYOUT_RULES", "cudnn_layout", "layout_of"]

_CONTIGUOUS = torch.contiguous_format
_BY_WEIGHT = {4: torch.channels_last, 5: torch.channels_last_3d}

#: Which rule each backend follows; a backend that is not here always works in contiguous tensors.
LAYOUT_RULES: dict[str, str] = {
    "Cudnn": "cudnn",
    "CudnnTranspose": "cudnn",
    "Miopen": "miopen",
    "MiopenDepthwise": "miopen",
    "MiopenTranspose": "miopen",
    "Mkldnn": "mkldnn",
    "MkldnnTranspose": "mkldnn",
    "Slow2d": "thnn",
    "SlowDilated2d": "thnn",
    "SlowTranspose2d": "thnn",
    "Overrideable": "xpu",
    "Mps": "mps",
    "MpsTranspose": "mps",
}


def layout_of(trail: Trail, backend: str, input: TensorSpec, weight: TensorSpec, m: Machine) -> torch.memory_format:
    """Memory format in which ``backend`` works on these operands."""
    rule = LAYOUT_RULES.get(backend)
    trail.ask("the backend has a layout rule", rule is not None, rule or f"{backend}: contiguous")
    if m.mobile or rule is None:
        return _CONTIGUOUS
    if rule == "cudnn":
        return _library_layout(trail, input, weight, _cudnn_has_channels_last(trail, input, weight, m))
    if rule == "miopen":
        return _library_layout(trail, input, weight, _miopen_has_channels_last(trail, input, weight, m))
    if rule == "thnn":
        return _thnn_layout(trail, input, weight)
    exact = False
    if rule == "mkldnn":
        enabled = _no_float64(trail, input, weight) and trail.ask(
            "neither is an opaque oneDNN tensor", not (input.mkldnn or weight.mkldnn), input.mkldnn or weight.mkldnn
        )
    else:
        kinds = (input.device_type, weight.device_type)
        enabled = trail.ask(f"both are {rule.upper()} tensors", kinds == (rule, rule), f"{kinds[0]} and {kinds[1]}")
        exact = rule == "mps" and m.since("2.12")
    if enabled and _either(trail, input, weight, exact):
        return torch.channels_last_3d if weight.ndim == 5 else torch.channels_last
    return _CONTIGUOUS


def cudnn_layout(input: TensorSpec, weight: TensorSpec, m: Machine) -> torch.memory_format:
    """cuDNN's layout rule on its own; the choice of a depthwise kernel asks it too."""
    trail = Trail()
    return _library_layout(trail, input, weight, _cudnn_has_channels_last(trail, input, weight, m))


def _no_float64(t: Trail, input: TensorSpec, weight: TensorSpec) -> bool:
    dtypes = (input.dtype, weight.dtype)
    return t.ask(
        "neither is float64", torch.float64 not in dtypes, " and ".join(str(d).removeprefix("torch.") for d in dtypes)
    )


def _cudnn_has_channels_last(t: Trail, input: TensorSpec, weight: TensorSpec, m: Machine) -> bool:
    if not (t.ask("PyTorch is built with cuDNN", m.cudnn is not None, m.cudnn_text) and _no_float64(t, input, weight)):
        return False
    if m.since("2.13"):
        return True
    # Earlier releases ask for a cuDNN that none of them can be used without.
    least = 8005 if weight.ndim == 5 else 7603
    return t.ask(f"cuDNN is {least} or later", (m.cudnn or 0) >= least, m.cudnn_text)


def _miopen_has_channels_last(t: Trail, input: TensorSpec, weight: TensorSpec, m: Machine) -> bool:
    return (
        t.ask("PyTorch is built with MIOpen", m.miopen, m.miopen)
        and _no_float64(t, input, weight)
        and t.ask("PYTORCH_MIOPEN_SUGGEST_NHWC=1", m.miopen_nhwc, m.miopen_nhwc)
    )


def _library_layout(t: Trail, input: TensorSpec, weight: TensorSpec, enabled: bool) -> torch.memory_format:
    """cuDNN and MIOpen: the weight's rank says which channels_last counts."""
    wanted = _BY_WEIGHT.get(weight.ndim)
    if not enabled or wanted is None:
        return _CONTIGUOUS
    got = (input.suggest_memory_format(), weight.suggest_memory_format())
    return wanted if t.ask(f"input or weight suggests {wanted}", wanted in got, f"{got[0]}, {got[1]}") else _CONTIGUOUS


def _thnn_layout(t: Trail, input: TensorSpec, weight: TensorSpec) -> torch.memory_format:
    got = (input.suggest_memory_format(), weight.suggest_memory_format())
    if t.ask("the input is on the CPU", input.device_type == "cpu", input.device_type) and t.ask(
        "input or weight suggests torch.channels_last", torch.channels_last in got, f"{got[0]}, {got[1]}"
    ):
        return torch.channels_last
    return _CONTIGUOUS


def _either(t: Trail, input: TensorSpec, weight: TensorSpec, exact: bool) -> bool:
    got = (input.suggest_memory_format(exact), weight.suggest_memory_format(exact))
    how = " by its exact strides" if exact else ""
    return t.ask(
        f"input or weight suggests channels_last{how}", any(f != _CONTIGUOUS for f in got), f"{got[0]}, {got[1]}"
    )
