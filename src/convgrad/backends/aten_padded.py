"""``aten:padded``: ATen over an input that carries its padding, for its kernels that are wrong at the border.

Most of oneDNN's kernels in `aten_defects` go wrong where a border is wide and the image small. With the zeros written
out there is no border; that costs one copy of the input, and the kernel stays the fast one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import ConvProblem, Output, Pass
from .aten import AtenBackend
from .base import Arithmetic, Backend, Kernel
from .padding import pad_input, padded, unpad_input

__all__ = ["AtenPaddedBackend"]

_aten = AtenBackend()


class AtenPaddedBackend(Backend):
    """ATen over a padded copy of the input."""

    name = "aten:padded"
    summary = "ATen over an input that carries its padding"
    from_pytorch = True
    layouts = ("any",)

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        if padded(problem) is problem:
            return ["there is no padding to write out"]
        return _aten.reasons_against(_stated(problem), outputs, device)

    def wrong_here(
        self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device
    ) -> tuple[str, tuple[str, ...]]:
        return _aten.wrong_here(_stated(problem), outputs, device)

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        kernel = _aten.bind(_stated(problem), outputs)

        def forward(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            return kernel(pad_input(problem, a), b, bias)

        def grad_input(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            return unpad_input(problem, kernel(a, b))

        def grad_weight(a: Tensor, b: Tensor, bias: object = None, workspace: object = None) -> Tensor:
            return kernel(a, pad_input(problem, b))

        return {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}[pass_]

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return not problem.transposed

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return _aten.arithmetic(problem, pass_, device)


def _stated(problem: ConvProblem) -> ConvProblem:
    """A plain problem: a transposed one over a padded output is its gradient of the input, and then cropped."""
    return padded(problem).replace(origin="plain")
