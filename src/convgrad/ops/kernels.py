"""The operators below autograd: resolve the call and run its plan, only validate it, or cast its operands before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import without_autocast
from ..engine import Plan, checked_backward, checked_convolution, checked_grad_input, checked_grad_weight, resolve
from ..problem import channels_of_output


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """Compute the operator on tensors with data."""
    if input.dim() > 1 and input.shape[1] == 0:  # as in PyTorch, the output has no channels then
        return input.new_empty(checked_convolution(input, weight, bias, *arguments).output_size)
    return resolve("convolution", arguments, input, weight, bias).contract(input, weight, bias)


def run(op: str, plan: Plan, raw: tuple[Any, ...], *operands: Tensor) -> Any:
    """A gradient operator's call by its plan: one gradient, or three with None for those that the mask leaves out."""
    if op != "convolution_backward":
        exchanged = op == "grad_weight" and raw[4]  # of a transposed convolution
        return plan.contract(*(operands[::-1] if exchanged else operands))
    return plan.gradients(*operands)


def _gradient(op: str, count: int) -> Callable[..., Any]:
    """The operator itself, on real tensors; the first ``count`` of its arguments."""

    def kernel(*args: Any, memory_format: torch.memory_format | None = None) -> Any:
        operands, raw = args[:count], args[count:]
        result = run(op, resolve(op, raw, *operands, memory_format=memory_format), raw, *operands)
        # ATen goes by the layout of the operands.
        return result if memory_format is None else result.contiguous(memory_format=memory_format)

    return kernel


convolution_backward = _gradient("convolution_backward", 3)
grad_input, grad_weight = _gradient("grad_input", 2), _gradient("grad_weight", 2)


# ---- without data: the same validation, with symbolic sizes ------------------------------------------------


def _empty(shape: Sequence[int], like: Tensor, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def _fake(checked: Callable[..., Any], size: str) -> Callable[..., Tensor]:
    def fake(first: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """The output, or one gradient, without data."""
        call = checked(first, *arguments, **options)
        return _empty(getattr(call, size), first, call.layout)

    return fake


fake_convolution = _fake(checked_convolution, "output_size")
fake_grad_input, fake_grad_weight = _fake(checked_grad_input, "input_size"), _fake(checked_grad_weight, "weight_size")


def fake_convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that the mask selects, without data."""
    call = checked_backward(grad_output, input, weight, *arguments)
    g = call.geometry
    return (
        _empty(input.shape, input, call.layout) if call.mask[0] else None,
        _empty(weight.shape, weight, call.layout) if call.mask[1] else None,
        input.new_empty(channels_of_output(weight.shape, g.transposed, g.groups)) if call.mask[2] else None,
    )


# ---- autocast: operands are cast to the autocast dtype of their device, as for PyTorch's own convolution ----

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}


def cast_operands(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return operands as autocast casts them: before an autograd.Function, so that it saves what was computed with."""
    return tuple([cast(t, t.device.type) if t is not None and autocast_is_on(t.device.type) else t for t in operands])


def autocast_is_on(device: str) -> bool:
    """Whether autocast casts on this kind of device."""
    return device in KEYS and torch.is_autocast_enabled(device)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts operands to on this kind of device; None where it is off."""
    return torch.get_autocast_dtype(device) if autocast_is_on(device) else None


def cast(value: Any, device: str) -> Any:
    """Return one argument of an operator as autocast casts it on this kind of device."""
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.get_autocast_dtype(device)) if eligible and value.device.type == device else value


def casting(operator: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return the kernel of an operator at the autocast key of a kind of device."""

    def kernel(*args: Any, **options: Any) -> Any:
        with without_autocast():
            return operator(*[cast(a, device) for a in args], **options)

    return kernel
