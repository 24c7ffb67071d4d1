"""A function or a module as a backend that is not registered: for `convgrad.testing.check_backend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..errors import ShapeError
from ..problem import (
    OPERANDS,
    PASSES,
    ConvProblem,
    Pass,
    conv_geometry,
    convolution_shape,
    effective_kernel,
    problem_of,
)
from . import arguments
from .problem_set import in_layouts
from .user_backend import Accepts, CustomBackend, Functions, UserKernel


def backend_of(what: Any, args: Sequence[Any] | None = None, accepts: Accepts | None = None) -> CustomBackend:
    """Return the backend of a function of the forward, in float32 and float64, or of a convolution module."""
    if isinstance(what, nn.Module):
        if args is not None or accepts is not None:
            raise TypeError("args and accepts belong to a function; a module says itself what it computes")
        return CustomBackend(type(what).__name__, ConvModule(what))
    if not callable(what) or isinstance(what, type):
        raise TypeError(f"expected a backend or its name, a function or a module, got {what!r}")
    kernel = UserKernel(what, arguments.check(what, args, "forward"), accepts)
    name = getattr(what, "__name__", type(what).__name__)
    return CustomBackend(name, Functions(name, {"forward": kernel}))


class ConvModule(Functions):
    """A module that convolves inputs of any size with its ``weight``, with the gradients that autograd derives."""

    def __init__(self, module: nn.Module) -> None:
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "weight")
        missing = [n for n in names if not hasattr(module, n)]
        usual = {"padding_mode": "zeros", "layout": "NCL"}
        other = [f"its {n} is {getattr(module, n)}" for n, value in usual.items() if getattr(module, n, value) != value]
        if missing or other:
            why = f"it has no {', '.join(missing)}" if missing else other[0]
            raise TypeError(f"{type(module).__name__} is no zero-padded convolution of (N, C, ...) tensors: {why}")
        self._module: Any = module
        self._transposed = bool(getattr(module, "transposed", False))
        kernels: dict[arguments.Method, UserKernel] = {
            p: UserKernel(partial(self._pass, p), arguments.USUAL[p], self._accepts) for p in PASSES
        }
        super().__init__(type(module).__name__, kernels, layouts=("strided",))

    def problems(self) -> Iterator[ConvProblem]:
        """Yield problems of small images of several sizes, in both dtypes and layouts."""
        spans = [effective_kernel(*kd) for kd in zip(self._module.kernel_size, self._module.dilation, strict=True)]
        for batch, more in ((2, 0), (1, 1), (3, 4), (1, 7), (2, 12)):
            for dtype in (torch.float32, torch.float64):
                if problem := self._problem(batch, tuple(n + more + i for i, n in enumerate(spans)), dtype):
                    yield from in_layouts(problem)

    def _problem(self, batch: int, size: tuple[int, ...], dtype: torch.dtype) -> ConvProblem | None:
        """Return the problem for an input of this size; None if it has no output."""
        try:
            problem = problem_of_module(self._module, (batch, self._module.in_channels, *size), dtype)
            return None if problem.empty else problem.replace(has_bias=False).canonical()
        except ShapeError:
            return None

    def _accepts(self, problem: ConvProblem) -> bool | str:
        own_input = problem.output_size if self._transposed else problem.input_size
        alike = problem.ndim == len(self._module.kernel_size)
        own = self._problem(problem.batch, own_input, problem.dtype) if alike else None
        given = problem.replace(memory_format=torch.contiguous_format, has_bias=False)
        return own == given.canonical() or f"the module computes {own} for such an input"

    def _pass(self, pass_: Pass, a: Tensor, b: Tensor, problem: ConvProblem) -> Tensor:
        # The input of a transposed module is the problem's grad_output, and it returns grad_input.
        input_slot, result_slot = ("grad_output", "input") if self._transposed else ("input", "grad_output")
        given: dict[str, Tensor] = dict(zip(OPERANDS[pass_], (a, b), strict=True))
        with torch.enable_grad():
            made = [given[s] if s in given else a.new_zeros(problem.shape_of(s)).requires_grad_()
                    for s in (input_slot, "weight")]  # fmt: skip
            state = {"weight": made[1]}
            if getattr(self._module, "bias", None) is not None:
                state["bias"] = a.new_zeros(self._module.out_channels)
            result = torch.func.functional_call(self._module, state, (made[0],))
            if result_slot not in given:
                return result
            return torch.autograd.grad(result, made["weight" not in given], given[result_slot])[0]


def problem_of_module(
    module: Any,
    input_shape: Sequence[int],
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> ConvProblem:
    """Return the problem that a convolution module computes for an input of this shape, batch included."""
    # Of plain numbers: a model's sizes may be numpy's, which not all functions of PyTorch take.
    kernel, stride, dilation = (tuple(map(int, s)) for s in (module.kernel_size, module.stride, module.dilation))
    output_padding = tuple(map(int, getattr(module, "output_padding", (0,) * len(kernel))))
    transposed, pairs = bool(getattr(module, "transposed", False)), functional.sides_of(module)
    channels = (module.in_channels, module.out_channels) if transposed else (module.out_channels, module.in_channels)
    weight_shape = (channels[0], channels[1] // module.groups, *kernel)
    if getattr(module, "padding_mode", "zeros") != "zeros":
        spatial = (n + low + high for n, (low, high) in zip(input_shape[2:], pairs, strict=True))
        input_shape, pairs = (*input_shape[:2], *spatial), ((0, 0),) * len(kernel)
    padding = tuple(int(p) for pair in pairs for p in pair)
    g = conv_geometry(weight_shape, stride, padding, dilation, transposed, output_padding, module.groups)
    shape = convolution_shape(input_shape, weight_shape, None, g)
    has_bias = getattr(module, "bias", None) is not None
    return problem_of(input_shape, weight_shape, shape, g, dtype=dtype, memory_format=memory_format, has_bias=has_bias)
