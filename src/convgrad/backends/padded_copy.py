"""A padded or cropped copy of the input, for backends that do not support a padding or padding mode themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ..problem import PADDING_MODES, ConvProblem, Outputs, Pass, Sides, by_pytorch, fold, pad
from .base import Arithmetic, Backend, Kernel, operand_format

#: What the name of a backend that computes over such a copy ends with.
COPY: Final = " (padded copy)"


def padded(problem: ConvProblem) -> ConvProblem:
    """Return the problem over an input that contains its padding: one with padding 0.

    A transposed problem becomes a plain one: over a padded output it is the gradient of the input, and then cropped.
    """
    if all(pair == (0, 0) for pair in problem.padding) and problem.padding_mode == "zeros":
        return problem
    size = tuple(n + low + high for n, (low, high) in zip(problem.input_size, problem.padding, strict=True))
    return problem.replace(input_size=size, padding=((0, 0),) * problem.ndim, padding_mode="zeros", origin="plain")


def sides(problem: ConvProblem) -> tuple[Sides, Sides]:
    """Return what is added on each side of the input, and what is cropped of each; a crop may exceed the input."""
    added = tuple((max(low, 0), max(high, 0)) for low, high in problem.padding)
    return added, tuple((max(-low, 0), max(-high, 0)) for low, high in problem.padding)


def inside(t: Tensor, sides: Sides) -> Tensor:
    """Return a view without these positions at the ends of its last dimensions."""
    for d, (low, high) in enumerate(sides, start=2):
        if low or high:
            t = t.narrow(d, low, t.shape[d] - low - high)
    return t


def over_copy(
    problem: ConvProblem, outputs: Outputs, kernel: Kernel, layout: torch.memory_format | None = None
) -> Kernel:
    """Return the bound function of a problem, made from that of ``padded(problem)``; it takes the copy in a layout."""
    layout, mode, (added, cropped) = layout or problem.memory_format, problem.padding_mode, sides(problem)

    def with_padding(input: Tensor) -> Tensor:  # (N, C_in, *(in + low + high))
        if any(map(any, added)):
            input = by_pytorch(input, added) if mode == "zeros" else pad(input, added, mode)
        return inside(input, cropped).contiguous(memory_format=layout)  # PyTorch may pad into another

    def without_padding(t: Tensor) -> Tensor:  # (N, C_in, *in): the adjoint
        if any(map(any, cropped)):
            t = by_pytorch(t, cropped)
        t = inside(t, added) if mode == "zeros" else fold(t, added, mode)
        return t.contiguous(memory_format=problem.memory_format)

    def one_pass(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
        if outputs[0] == "forward":
            return kernel(with_padding(a), b, bias, workspace)
        if outputs[0] == "grad_weight":
            return kernel(a, with_padding(b), None, workspace)
        result = without_padding(kernel(a, b, None, workspace))
        return result if bias is None else result.add_(bias.view(-1, *(1,) * problem.ndim))

    def gradients(a: Tensor, b: Tensor, c: Tensor, workspace: Tensor | None = None) -> tuple[Tensor, ...]:
        found = zip(outputs, kernel(a, with_padding(b), c, workspace), strict=True)
        return tuple(without_padding(t) if output == "grad_input" else t for output, t in found)

    return one_pass if len(outputs) == 1 else gradients


class Restated(Backend):
    """Computes a problem as another problem, by another backend.

    Args:
        restated: makes the other problem; the same one where there is nothing to change.
        otherwise: why that is refused; empty where the other backend computes it as it is.
    """

    def __init__(
        self, of: Backend, restated: Callable[[ConvProblem], ConvProblem], name: str, summary: str, otherwise: str = ""
    ) -> None:
        self.of, self.restated, self.name, self.summary, self.otherwise = of, restated, name, summary, otherwise
        self.passes, self.sweeps, self.layouts = of.passes, of.sweeps, of.layouts
        self.deterministic, self.capture_safe, self.from_pytorch = of.deterministic, of.capture_safe, of.from_pytorch

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        other = self.restated(problem)
        if other is problem and self.otherwise:
            return [self.otherwise.format(p=problem)]
        return self.of.reasons_against(other, outputs, device)

    def wrong_here(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[str, tuple[str, ...]]:
        return self.of.wrong_here(self.restated(problem), outputs, device)

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        kernel = self.of.bind(self.restated(problem), outputs)
        return over_copy(problem, outputs, kernel, operand_format(self.of, problem))

    def workspace(self, problem: ConvProblem, outputs: Outputs) -> int:
        return self.of.workspace(self.restated(problem), outputs)

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return self.of.fuses_bias(self.restated(problem))

    def kernel_name(self, problem: ConvProblem, outputs: Outputs) -> str:
        return self.of.kernel_name(self.restated(problem), outputs)

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return self.of.arithmetic(self.restated(problem), pass_, device)


class PaddedCopy(Restated):
    """A backend that pads for another one; it is made for a plan that needs it, and never registered."""

    padding_modes = PADDING_MODES

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, padded, backend.name + COPY, "")

    @classmethod
    def where_needed(cls, backend: Backend, problem: ConvProblem, outputs: Outputs, device: torch.device) -> Backend:
        """Return the backend itself where it can compute the padding mode, else one that pads a copy for it."""
        return cls(backend) if backend.against(problem, outputs, device) else backend
