"""A padded or cropped copy of a slot, and its adjoint, for backends that only know symmetric padding."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..problem import ConvProblem

__all__ = ["pad_input", "padded", "unpad_input"]


def padded(problem: ConvProblem) -> ConvProblem:
    """The same contraction over an input that carries its padding: a problem with padding zero."""
    if all(pair == (0, 0) for pair in problem.padding):
        return problem
    size = tuple(n + low + high for n, (low, high) in zip(problem.input_size, problem.padding, strict=True))
    return problem.replace(input_size=size, padding=((0, 0),) * problem.ndim)


def pad_input(problem: ConvProblem, input: Tensor) -> Tensor:
    """The input of ``padded(problem)``: zeros around it, or a part of it where the padding crops.

    Shape:
        (N, C_in, *in) -> (N, C_in, *(in + low + high))
    """
    if _misses(problem):
        return input.new_zeros(padded(problem).input_shape)
    return _shift(input, problem.padding)


def unpad_input(problem: ConvProblem, grad_input: Tensor) -> Tensor:
    """The adjoint of `pad_input`.

    Shape:
        (N, C_in, *(in + low + high)) -> (N, C_in, *in)
    """
    if _misses(problem):
        return grad_input.new_zeros(problem.input_shape)
    grad_input = _shift(grad_input, tuple((-low, -high) for low, high in problem.padding))
    return grad_input.contiguous(memory_format=problem.memory_format)


def _shift(t: Tensor, padding: tuple[tuple[int, int], ...]) -> Tensor:
    return pad(t, [p for pair in reversed(padding) for p in pair])


def _misses(problem: ConvProblem) -> bool:
    """Whether a crop leaves nothing of the input, so that only padding is read."""
    return any(-low >= n or -high >= n for n, (low, high) in zip(problem.input_size, problem.padding, strict=True))
