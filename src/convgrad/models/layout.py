"""The memory layout of a whole model: weights are converted once, inputs at the root; all else follows from these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .._compat import channels_last_of, forward_ad_active, functorch_active
from ..settings import cudnn_allows_tf32
from .classes import kind_of


def spatial_convolutions(model: nn.Module) -> list[Any]:
    """Return the convolutions of a model that are 2-d or 3-d, which alone have two layouts."""
    return [m for m in model.modules() if kind_of(m) == "convolution" and len(m.kernel_size) > 1]  # pyright: ignore[reportArgumentType]


def to_channels_last(model: nn.Module) -> list[Callable[[], None]]:
    """Convert the weights of a model's convolutions to channels_last and, by a hook, the model's inputs.

    Returns functions that undo both, to be called from the last one on.
    """
    convolutions = spatial_convolutions(model)
    turn = partial(_inputs_to_channels_last, {len(m.kernel_size) + 2 for m in convolutions})
    hook = model.register_forward_pre_hook(turn, prepend=True, with_kwargs=True)
    return [_weights_to_channels_last(convolutions), hook.remove]


def _inputs_to_channels_last(dims: set[int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert the inputs that convolutions may read, anywhere among the arguments: the root's forward pre-hook.

    That is what has so many dimensions: a video is no image for a model of images.
    """

    if functorch_active() or forward_ad_active():  # vmap has no such layout
        return args, kwargs

    def converted(t: Tensor) -> Tensor:
        fits = t.dim() in dims and t.is_floating_point() and t.layout is torch.strided
        return t.contiguous(memory_format=channels_last_of(t.dim() - 2)) if fits else t

    return tree_map_only(Tensor, converted, (args, kwargs))


def _weights_to_channels_last(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Convert the weights of these modules to channels_last; return a function that undoes it for the same tensors."""
    found = [t for m in modules for t in (*m.parameters(), *m.buffers()) if not nn.parameter.is_lazy(t)]
    before = {t: t.stride() for t in found if t.dim() in (4, 5)}  # a shared tensor once
    for t in before:
        t.data = t.data.contiguous(memory_format=channels_last_of(t.dim() - 2))

    def back() -> None:
        for t, strides in before.items():
            if len(strides) == t.dim() and t.stride() != strides:
                t.data = t.data.new_empty_strided(t.shape, strides).copy_(t.data)

    return back


def channels_last_pays(weights: list[Tensor]) -> tuple[bool, str]:
    """Return whether channels_last is expected to pay for 2-d and 3-d convolutions, and why, without measuring."""
    if not weights:
        return False, "no 2-d or 3-d convolution that has two layouts"
    if all(w.dtype is torch.float64 for w in weights):
        return False, "PyTorch computes float64 in the contiguous layout"
    if weights[0].is_cuda and all(w.dtype is torch.float32 for w in weights) and not cudnn_allows_tf32():
        return False, "tensor cores, which channels_last serves, are not used for float32 here"
    return True, "oneDNN and tensor cores compute in channels_last, and every layer between keeps it"
