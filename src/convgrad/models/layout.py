"""The memory layout of a whole model: weights are converted once, inputs at the root, and what lies between follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .._compat import channels_last_of
from ..settings import cudnn_allows_tf32
from .classes import is_convolution


def _turned(value: Any) -> Any:
    """An image or volume in channels_last; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided and _is_image(value):
        return value.contiguous(memory_format=channels_last_of(value.dim() - 2))
    return value


def _is_image(t: Tensor) -> bool:
    return t.dim() in (4, 5)


def spatial_convolutions(model: nn.Module) -> list[Any]:
    """The convolutions of a model that are 2-d or 3-d, and so have a layout that could be turned."""
    return [m for m in model.modules() if is_convolution(m) and len(m.kernel_size) > 1]  # pyright: ignore[reportArgumentType]


def to_channels_last(model: nn.Module) -> list[Callable[[], None]]:
    """Lay the weights of a model's convolutions out in channels_last and, by a hook, what it is called with.

    Returns:
        Functions that undo both, to be called from the last one on.
    """
    hook = model.register_forward_pre_hook(_inputs_to_channels_last, prepend=True, with_kwargs=True)
    return [_weights_to_channels_last(spatial_convolutions(model)), hook.remove]


def _inputs_to_channels_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward pre-hook of the root: converts images to channels_last, wherever they are among the arguments."""
    return tree_map(_turned, (args, kwargs))


def _weights_to_channels_last(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Lay the weights of these modules out in channels_last; the objects stay the same.

    Returns:
        A function that lays them out as they were, with the values that they have by then.
    """
    found = [t for m in modules for t in (*m.parameters(), *m.buffers()) if not nn.parameter.is_lazy(t)]
    before = {t: t.stride() for t in found if _is_image(t)}  # a shared one once
    for t in before:
        t.data = t.data.contiguous(memory_format=channels_last_of(t.dim() - 2))

    def back() -> None:
        for t, strides in before.items():
            if len(strides) == t.dim() and t.stride() != strides:
                t.data = t.data.new_empty_strided(t.shape, strides).copy_(t.data)

    return back


def channels_last_pays(convolutions: list[Any]) -> tuple[bool, str]:
    """Whether channels_last is expected to pay for these 2-d and 3-d convolutions, and why, without measuring."""
    weights: list[Tensor] = [w for m in convolutions if (w := getattr(m, "weight", None)) is not None]
    if not weights:
        return False, "no 2-d or 3-d convolution whose layout could be turned"
    if all(w.dtype is torch.float64 for w in weights):
        return False, "PyTorch computes float64 in the contiguous layout"
    if weights[0].is_cuda and all(w.dtype is torch.float32 for w in weights) and not cudnn_allows_tf32():
        return False, "tensor cores, which channels_last serves, are not used for float32 here"
    return True, "oneDNN and tensor cores compute in channels_last, and every layer between keeps it"
