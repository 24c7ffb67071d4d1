"""Batch and instance normalization modules: torch's own, with convgrad's training on a CPU.

They are here because they are most of what is left of a convolutional net's training step after the convolutions. All
but a plain call with the statistics of the batch is torch's: evaluation, compilers, transforms, modes, subclasses of
Tensor, small inputs. To normalize each image of (N, C, *spatial) by itself is to normalize one image of N * C channels
by its batch. PyTorch computes it so, too, and returns a contiguous result whatever the layout of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._compat import fx_tracing
from .normalization import compute, expected_reader, kernels_take
from .tracing import leaf_of_fx, refuse_scripting

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"]


def batch_norm(
    module: Any, input: Any, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return ``torch.nn.functional.batch_norm`` of a module's call: by convgrad where that gains."""
    parameters = weight, bias, running_mean, running_var
    if training and eps > 0 and kernels_take(input, parameters):
        reader = expected_reader(module)
        if reader != "" or input.is_contiguous():
            return compute(module, reader, input, *parameters, momentum, eps)
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def instance_norm(
    module: Any, input: Any, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return ``torch.nn.functional.instance_norm`` of a module's call: by convgrad where that gains."""
    parameters = weight, bias, running_mean, running_var
    by_images = use_input_stats and running_mean is None and running_var is None and eps > 0
    if by_images and kernels_take(input, parameters, by_image=True):
        return compute(module, expected_reader(module), input, *parameters, 0.0, eps, by_image=True)
    return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


class _BatchNorm:
    def forward(self: Any, input: Any) -> Any:
        """Apply the module."""
        if (input.__class__ is not Tensor or fx_tracing()) and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        self._check_input_dim(input)
        momentum, mean, var = self.momentum, self.running_mean, self.running_var
        by_batch = self.training or (mean is None and var is None)
        if self.training and not self.track_running_stats:
            mean = var = None
        elif self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return batch_norm(self, input, mean, var, self.weight, self.bias, by_batch, momentum or 0.0, self.eps)

    __prepare_scriptable__ = refuse_scripting


class _InstanceNorm:
    def forward(self: Any, input: Any) -> Any:
        """Apply the module."""
        if (input.__class__ is not Tensor or fx_tracing()) and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]

    def _apply_instance_norm(self: Any, input: Any) -> Any:  # torch's forward has checked the input
        own = self.running_mean, self.running_var, self.weight, self.bias
        return instance_norm(
            self, input, *own, self.training or not self.track_running_stats, self.momentum or 0.0, self.eps
        )

    __prepare_scriptable__ = refuse_scripting


# fmt: off
class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d): ...
class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d): ...
class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d): ...
class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d): ...
class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d): ...
class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d): ...
# fmt: on

_DOCSTRING = """``torch.nn.{name}``, computed by convgrad {where}.

    Shape:
        {shape} -> the same

    Equivalent to:
        >>> import torch, convgrad
        >>> ours, theirs = convgrad.nn.{name}(8), torch.nn.{name}(8)
        >>> x = torch.randn({x})
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5), repr(ours) == repr(theirs)
        (True, True)
    """
for _module, _where, _shape, _x in (
    (BatchNorm1d, "in training on a CPU", "(N, C) or (N, C, L)", "2, 8, 4096"),
    (BatchNorm2d, "in training on a CPU", "(N, C, H, W)", "2, 8, 64, 64"),
    (BatchNorm3d, "in training on a CPU", "(N, C, D, H, W)", "2, 8, 8, 16, 32"),
    (InstanceNorm1d, "on a CPU", "(N, C, L) or (C, L)", "2, 8, 16384"),
    (InstanceNorm2d, "on a CPU", "(N, C, H, W) or (C, H, W)", "2, 8, 128, 128"),
    (InstanceNorm3d, "on a CPU", "(N, C, D, H, W) or (C, D, H, W)", "2, 8, 16, 32, 32"),
):
    _module.__doc__ = _DOCSTRING.format(name=_module.__name__, where=_where, shape=_shape, x=_x)
