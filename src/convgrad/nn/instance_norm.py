"""Instance normalization modules: torch's own, computed on a CPU by the kernels of batch normalization.

To normalize each image of (N, C, *spatial) by itself is to normalize one image of N * C channels by its batch.
PyTorch computes it so, too, and returns a contiguous result whatever the layout of the input. Small inputs, running
statistics, compilers, transforms, modes and subclasses of Tensor are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._compat import fx_tracing
from ..backends import norm_gains
from .batch_norm import compute, document, expected_reader, fit, is_plain
from .tracing import leaf_of_fx, refuse_scripting

__all__ = ["InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"]


def _is_ours(input: Any, weight: Any, bias: Any, eps: float) -> bool:
    return (
        eps > 0
        and is_plain(input)
        and norm_gains(input.shape, input.itemsize, False, by_image=True)
        and fit(input, (weight, bias))
    )


def _compute(module: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return compute(module, expected_reader(module), input, weight, bias, None, None, 0.0, eps, by_image=True)


class _InstanceNorm:
    """The forward of the three classes."""

    def forward(self: Any, input: Any) -> Any:
        """Apply the module."""
        if (input.__class__ is not Tensor or fx_tracing()) and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]

    def _apply_instance_norm(self: Any, input: Any) -> Any:  # torch's forward has checked the input
        if self.running_mean is None and _is_ours(input, self.weight, self.bias, self.eps):
            return _compute(self, input, self.weight, self.bias, self.eps)
        return super()._apply_instance_norm(input)  # pyright: ignore[reportAttributeAccessIssue]

    __prepare_scriptable__ = refuse_scripting


def instance_norm(
    module: Any, input: Any, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.instance_norm``, computed by convgrad where a module would be.

    Args:
        module: the module whose forward calls it.
    """
    if use_input_stats and running_mean is None and running_var is None and _is_ours(input, weight, bias, eps):
        return _compute(module, input, weight, bias, eps)
    return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


# fmt: off
class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d): ...
class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d): ...
class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d): ...
# fmt: on

document(InstanceNorm1d, "on a CPU", "(N, C, L) or (C, L)", "2, 8, 16384")
document(InstanceNorm2d, "on a CPU", "(N, C, H, W) or (C, H, W)", "2, 8, 128, 128")
document(InstanceNorm3d, "on a CPU", "(N, C, D, H, W) or (C, D, H, W)", "2, 8, 16, 32, 32")
