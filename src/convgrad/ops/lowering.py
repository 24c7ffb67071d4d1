"""Lowering to aten: for tensor subclasses that we do not know, and for the compiler.

A subclass gets aten's operator, which it may know, instead of ours, which it cannot. Under ``torch.compile`` a problem
whose choice is ATen becomes a plain aten convolution in the graph, so that Inductor still sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import hint_of, is_subclass, is_traced
from ..engine.plan import plan_for
from ..engine.resolve import layout_of
from ..problem import ConvProblem, gradient_outputs
from ..shapes import conv_geometry, convolution_shape, problem_of
from . import fake

__all__ = ["any_subclass", "aten_convolution", "aten_convolution_backward", "traced_operator"]

_aten = torch.ops.aten


def any_subclass(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors is a subclass with a dispatch of its own."""
    return any(t is not None and is_subclass(t) for t in tensors)


def _explicit(input: Tensor, padding: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
    """Padding with 2D entries made explicit, since aten cannot state it."""
    d = input.dim() - 2
    if len(padding) != 2 * d:
        return input, padding
    pairs = [(padding[2 * i], padding[2 * i + 1]) for i in range(d)]
    flat = [p for pair in reversed(pairs) for p in pair]
    return torch.nn.functional.pad(input, flat), [0] * d


def aten_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, *rest: Any
) -> Tensor:
    """aten's convolution for a subclass."""
    if len(padding) == 2 * (input.dim() - 2):
        transposed = rest[1]
        if transposed and any(padding[::2][i] != p for i, p in enumerate(padding[1::2])):
            raise NotImplementedError(
                f"a transposed convolution of {type(input).__name__} with padding {list(padding)}: "
                "PyTorch has no transposed convolution whose low and high padding differ"
            )
        if transposed:
            padding = padding[::2]
        else:
            input, padding = _explicit(input, padding)
    return _aten.convolution.default(input, weight, bias, stride, padding, *rest)


def aten_convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, *rest: Any
) -> Any:
    """aten's convolution_backward for a subclass."""
    if len(padding) == 2 * (input.dim() - 2):
        if any(padding[::2][i] != p for i, p in enumerate(padding[1::2])):
            raise NotImplementedError(
                f"convolution_backward of {type(input).__name__} with padding {list(padding)}: "
                "PyTorch has none whose low and high padding differ"
            )
        padding = padding[::2]
    return _aten.convolution_backward.default(grad_output, input, weight, bias_sizes, stride, padding, *rest)


# ---- the compiler --------------------------------------------------------------------------------


def traced_operator(op: Any, operands: tuple[Tensor | None, ...], rest: tuple[Any, ...]) -> Callable[..., Any] | None:
    """aten's operator in place of ours, where a graph is being traced and ATen would be chosen."""
    first, second = operands[0], operands[1]
    if first is None or second is None or not is_traced(first):
        return None
    name = op._schema.name.removeprefix("convgrad::")
    if name in ("grad_input", "grad_weight"):
        return None  # aten has no operator for one gradient alone
    input, weight = (first, second) if name == "convolution" else (second, operands[2])
    assert weight is not None
    arguments = rest if name == "convolution" else rest[1:7]
    if len(arguments[1]) == 2 * (input.dim() - 2):
        return None  # aten cannot state this padding
    if name == "convolution":
        fake.convolution(first, second, operands[2], *rest)  # the same validation as everywhere
        return _aten.convolution.default if _all_aten(input, weight, arguments, None) else None
    fake.convolution_backward(first, second, weight, *rest)
    return _aten.convolution_backward.default if _all_aten(input, weight, arguments, rest[-1]) else None


def _all_aten(input: Tensor, weight: Tensor, arguments: Sequence[Any], mask: Sequence[bool] | None) -> bool:
    """Whether every step of the plan for these sizes (for symbolic ones: for their hints) is ATen's."""
    problem = _hinted_problem(input, weight, arguments)
    if problem is None or problem.empty:
        return True
    outputs = (problem.bias_pass,) if mask is None else gradient_outputs(problem.transposed, mask)
    return plan_for(problem, outputs, input.device).aten


def _hinted_problem(input: Tensor, weight: Tensor, arguments: Sequence[Any]) -> ConvProblem | None:
    shapes = [[hint_of(n) for n in t.shape] for t in (input, weight)]
    values = [[hint_of(n) for n in a] if isinstance(a, (list, tuple)) else hint_of(a) for a in arguments]
    if any(n is None for s in [*shapes, *(v for v in values if isinstance(v, list))] for n in s):
        return None
    g = conv_geometry(shapes[1], *values)  # pyright: ignore[reportArgumentType]
    shape = convolution_shape(shapes[0], shapes[1], None, g)  # pyright: ignore[reportArgumentType]
    layout = torch.contiguous_format
    if input.dim() > 3:
        layout = layout_of(input, weight, conv_geometry(weight.shape, *arguments))
    return problem_of(shapes[0], shapes[1], shape, g, dtype=input.dtype, memory_format=layout)  # pyright: ignore[reportArgumentType]
