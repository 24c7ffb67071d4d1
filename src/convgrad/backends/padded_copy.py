"""A backend over a copy of the input that carries its padding, for the padding modes that it does not know itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import PADDING_MODES, ConvProblem, Output, Pass
from .base import Arithmetic, Backend, Kernel
from .padding import pad_input, padded, unpad_input

__all__ = ["PaddedCopy"]


class PaddedCopy(Backend):
    """Another backend, which computes `padded` of the problem; it is made where one is chosen, and never registered."""

    padding_modes = PADDING_MODES

    def __init__(self, backend: Backend) -> None:
        self._of = backend
        self.name = f"{backend.name} (padded copy)"
        self.passes, self.sweeps, self.layouts = backend.passes, backend.sweeps, backend.layouts
        self.deterministic, self.capture_safe = backend.deterministic, backend.capture_safe

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        return self._of.reasons_against(padded(problem), outputs, device)

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        kernel = self._of.bind(padded(problem), outputs)

        def forward(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            return kernel(pad_input(problem, a), b, bias, workspace)

        def grad_input(a: Tensor, b: Tensor, bias: None = None, workspace: Tensor | None = None) -> Tensor:
            return unpad_input(problem, kernel(a, b, None, workspace))

        def grad_weight(a: Tensor, b: Tensor, bias: None = None, workspace: Tensor | None = None) -> Tensor:
            return kernel(a, pad_input(problem, b), None, workspace)

        def gradients(a: Tensor, b: Tensor, c: Tensor, workspace: Tensor | None = None) -> tuple[Tensor, ...]:
            first, *rest = kernel(a, pad_input(problem, b), c, workspace)
            return (unpad_input(problem, first), *rest)

        one: dict[Output, Kernel] = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}
        return one[outputs[0]] if len(outputs) == 1 else gradients

    def workspace(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
        return self._of.workspace(padded(problem), outputs)

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return self._of.fuses_bias(padded(problem))

    def kernel_name(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> str:
        return self._of.kernel_name(padded(problem), outputs)

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return self._of.arithmetic(padded(problem), pass_, device)
