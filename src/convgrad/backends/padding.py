"""A padded or cropped copy of a slot, and its adjoint, for backends that only know symmetric padding."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from .. import padding_modes
from ..problem import ConvProblem

__all__ = ["pad_input", "padded", "unpad_input"]


def padded(problem: ConvProblem) -> ConvProblem:
    """The same contraction over an input that carries its padding: a problem with padding zero."""
    if all(pair == (0, 0) for pair in problem.padding) and problem.padding_mode == "zeros":
        return problem
    size = tuple(n + low + high for n, (low, high) in zip(problem.input_size, problem.padding, strict=True))
    return problem.replace(input_size=size, padding=((0, 0),) * problem.ndim, padding_mode="zeros")


def pad_input(problem: ConvProblem, input: Tensor) -> Tensor:
    """The input of ``padded(problem)``: its padding around it, or a part of it where the padding crops.

    Shape:
        (N, C_in, *in) -> (N, C_in, *(in + low + high))
    """
    if problem.padding_mode != "zeros":
        return _shift(padding_modes.pad(input, _added(problem), problem.padding_mode), _cropped(problem))
    if _misses(problem):
        return input.new_zeros(padded(problem).input_shape)
    return _shift(input, problem.padding)


def unpad_input(problem: ConvProblem, grad_input: Tensor) -> Tensor:
    """The adjoint of `pad_input`.

    Shape:
        (N, C_in, *(in + low + high)) -> (N, C_in, *in)
    """
    if problem.padding_mode != "zeros":
        grad_input = _shift(grad_input, tuple((-low, -high) for low, high in _cropped(problem)))
        grad_input = padding_modes.fold(grad_input, _added(problem), problem.padding_mode)
    elif _misses(problem):
        return grad_input.new_zeros(problem.input_shape)
    else:
        grad_input = _shift(grad_input, tuple((-low, -high) for low, high in problem.padding))
    return grad_input.contiguous(memory_format=problem.memory_format)


def _added(problem: ConvProblem) -> padding_modes.Sides:
    return tuple((max(low, 0), max(high, 0)) for low, high in problem.padding)


def _cropped(problem: ConvProblem) -> padding_modes.Sides:
    return tuple((min(low, 0), min(high, 0)) for low, high in problem.padding)


def _shift(t: Tensor, padding: tuple[tuple[int, int], ...]) -> Tensor:
    return pad(t, [p for pair in reversed(padding) for p in pair])


def _misses(problem: ConvProblem) -> bool:
    """Whether a crop leaves nothing of the input, so that only padding is read."""
    return any(-low >= n or -high >= n for n, (low, high) in zip(problem.input_size, problem.padding, strict=True))
