"""ATen: what PyTorch itself would run, bit for bit, and the backend that is never banned.

A problem that PyTorch can state is handed over as it is: a plain one to ``convolution`` and
``convolution_backward``, a transposed one to the same with ``transposed=True``. Padding that PyTorch cannot state
(low != high) is made explicit first. Complex gradients, which ATen lacks, are three real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..problem import ConvProblem, Output, Pass
from ..sizes import effective_kernel
from .aten_defects import defect_of, reads_batch_stride, reads_every_stride, without_slack
from .base import BOTH_GRADIENTS, Arithmetic, Backend, Kernel
from .padding import pad_input, padded, unpad_input
from .strides import tidy, usual_strides

__all__ = [
    "AtenBackend",
    "aten_backward",
    "output_padding",
    "runs_as_stated",
    "statable",
    "statable_arguments",
]

#: PyTorch's own backward, without a Python frame of its own.
aten_backward: Any = torch.ops.aten.convolution_backward.default._op
_MASKS: dict[str, tuple[bool, bool, bool]] = {
    "grad_input": (True, False, False),
    "grad_weight": (False, True, False),
}


class AtenBackend(Backend):
    """PyTorch's own convolution and convolution_backward."""

    name = "aten"
    summary = "what PyTorch itself would run"
    from_pytorch = True
    sweeps = BOTH_GRADIENTS
    layouts = ("any",)

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        wanted = {o for o in outputs if o != "grad_bias"}
        if wanted == {"forward", "grad_weight"} and not problem.transposed:
            return ["PyTorch has no operator that gives forward and grad_weight of a plain convolution at once"]
        if wanted == {"grad_input", "grad_weight"} and problem.transposed:
            return [
                "PyTorch has no operator that gives grad_input and grad_weight of this role-exchanged problem at once"
            ]
        dtype = problem.dtype
        if dtype.is_floating_point and dtype.itemsize == 1:
            return [f"PyTorch has no convolution for {dtype}"]
        if dtype.is_floating_point or dtype.is_complex:
            return []
        if device.type != "cpu":
            return [f"PyTorch has no integer convolution on {device.type}"]
        if dtype is torch.bool:
            return ["PyTorch has no convolution for torch.bool"]
        if statable(problem) is not problem and problem.transposed:
            return ["PyTorch cannot state this padding of a transposed convolution, and has no gradients for integers"]
        if wanted - {problem.bias_pass}:
            return ["PyTorch's CPU convolution has no gradients for integers"]
        if dtype is not torch.int64 and (problem.transposed or any(d > 1 for d in problem.dilation)):
            return ["PyTorch's transposed and dilated CPU convolutions know no integers but int64"]
        return []

    def wrong_here(
        self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device
    ) -> tuple[str, tuple[str, ...]]:
        return defect_of(statable(_real(problem) if problem.dtype.is_complex else problem), outputs, device)

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        if device.type == "cuda" and problem.dtype is torch.float32:
            from ..settings import cudnn_allows_tf32

            return "tf32" if cudnn_allows_tf32() else "transform"
        if problem.dtype in (torch.float16, torch.bfloat16) and device.type == "cpu":
            return "low-precision accumulation"  # its gradients exceed a bound that assumes float32 sums
        return "direct" if device.type == "cpu" else "transform"

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        if len(outputs) != 1:
            return self._sweep(problem, outputs)
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        if problem.dtype.is_complex:
            return partial(_complex, self.bind(_real(problem), outputs))
        problem = without_slack(problem)
        call = _operator(problem) if pass_ == problem.bias_pass else _gradient(problem, pass_)
        reads = reads_batch_stride if pass_ == "grad_weight" else reads_every_stride
        if not reads(problem):
            return call
        return lambda a, b, *rest: call(a, tidy(b), *rest)

    def _sweep(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Callable[..., tuple[Tensor, ...]]:
        if problem.dtype.is_complex:
            return partial(self._complex_sweep, problem, outputs)
        problem = without_slack(problem)
        p, n = statable(problem), len(outputs)
        arguments = (*statable_arguments(p), (True, True, "grad_bias" in outputs))
        if p is not problem:
            return partial(_padded_sweep, problem, p, arguments, n)
        channels = [p.shape_of(p.bias_slot)[1]]
        tidied = tidy if reads_every_stride(problem) else _as_it_is
        if problem.transposed:  # PyTorch's grad_output is our slot input, its input our slot grad_output
            return lambda grad_output, input, weight, workspace=None: aten_backward(
                input, grad_output, tidied(weight), channels, *arguments
            )[:n]
        tidied_input = tidy if reads_batch_stride(problem) else _as_it_is
        return lambda grad_output, input, weight, workspace=None: aten_backward(
            grad_output, tidied_input(input), tidied(weight), channels, *arguments
        )[:n]

    def _complex_sweep(
        self,
        problem: ConvProblem,
        outputs: tuple[Output, ...],
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        slots = {"input": input, "weight": weight, "grad_output": grad_output}
        operands = {
            "forward": (input, weight),
            "grad_input": (grad_output, weight),
            "grad_weight": (grad_output, input),
        }
        dims = (0, *range(2, problem.ndim + 2))
        return tuple(
            slots[problem.bias_slot].sum(dims) if o == "grad_bias" else self.bind(problem, (o,))(*operands[o])
            for o in outputs
        )


def output_padding(problem: ConvProblem) -> tuple[int, ...]:
    """The output_padding with which PyTorch states this problem as a transposed one; out of range where it cannot."""
    return tuple(
        n - ((out - 1) * s - 2 * low + effective_kernel(k, d))
        for n, out, k, s, (low, _), d in zip(
            problem.input_size,
            problem.output_size,
            problem.kernel_size,
            problem.stride,
            problem.padding,
            problem.dilation,
            strict=True,
        )
    )


def statable(problem: ConvProblem) -> ConvProblem:
    """The problem itself where PyTorch's arguments can state it, else the one over a padded input."""
    if not problem.transposed:
        return problem if problem.symmetric else padded(problem)
    if all(low >= 0 for low, _ in problem.padding) and all(
        op >= 0 and (op < s or op < d)
        for op, s, d in zip(output_padding(problem), problem.stride, problem.dilation, strict=True)
    ):
        return problem
    return padded(problem).replace(origin="plain")


def runs_as_stated(problem: ConvProblem) -> bool:
    """Whether PyTorch's own operator may be called with the operands as they are: nothing padded, cropped or split."""
    p = problem
    return p.dtype.is_floating_point and not p.empty and statable(p) is p and without_slack(p) is p


def statable_arguments(problem: ConvProblem) -> tuple[Any, ...]:
    """Stride, padding, dilation, transposed, output_padding and groups by which PyTorch states a problem."""
    op = output_padding(problem) if problem.transposed else (0,) * problem.ndim
    padding = tuple(low for low, _ in problem.padding)
    return (problem.stride, padding, problem.dilation, problem.transposed, op, problem.groups)


def _operator(problem: ConvProblem) -> Callable[..., Tensor]:
    """What the user called: a convolution, or for a transposed problem its pass ``grad_input``."""
    p = statable(problem)
    arguments = statable_arguments(p)
    if p is problem:
        return lambda a, b, bias=None, workspace=None: torch.convolution(a, b, bias, *arguments)
    if not problem.transposed:
        return lambda a, b, bias=None, workspace=None: torch.convolution(pad_input(problem, a), b, bias, *arguments)
    contract = _gradient(problem, "grad_input")

    def transposed(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
        result = contract(a, b)
        return result if bias is None else result.add_(bias.view(-1, *(1,) * problem.ndim))

    return transposed


def _gradient(problem: ConvProblem, pass_: Pass) -> Callable[..., Tensor]:
    """One gradient of what the user called."""
    p = statable(problem)
    arguments = statable_arguments(p)
    if problem.transposed and p is problem:
        return _transposed_gradient(problem, pass_)
    if pass_ == "forward":
        return lambda a, b, bias=None, workspace=None: torch.convolution(pad_input(problem, a), b, None, *arguments)
    if pass_ == "grad_weight":

        def grad_weight(a: Tensor, b: Tensor, bias: object = None, workspace: object = None) -> Tensor:
            input = b if p is problem else pad_input(problem, b)
            return aten_backward(a, input, a.new_empty_strided(*unread), None, *arguments, _MASKS["grad_weight"])[1]

        unread = _unread(p, p.weight_shape)
        return grad_weight

    def grad_input(a: Tensor, b: Tensor, bias: object = None, workspace: object = None) -> Tensor:
        grad = aten_backward(a, a.new_empty_strided(*unread), b, None, *arguments, _MASKS["grad_input"])[0]
        return grad if p is problem else unpad_input(problem, grad)

    unread = _unread(p, p.input_shape)
    return grad_input


def _transposed_gradient(problem: ConvProblem, pass_: Pass) -> Callable[..., Tensor]:
    """PyTorch's names for a transposed problem: its grad_output is our slot input, its input our slot grad_output."""
    arguments = statable_arguments(problem)
    if pass_ == "forward":
        unread = _unread(problem, problem.output_shape)
        return lambda a, b, bias=None, workspace=None: aten_backward(
            a, a.new_empty_strided(*unread), b, None, *arguments, _MASKS["grad_input"]
        )[0]
    unread = _unread(problem, problem.weight_shape)
    return lambda a, b, bias=None, workspace=None: aten_backward(
        b, a, a.new_empty_strided(*unread), None, *arguments, _MASKS["grad_weight"]
    )[1]


def _unread(problem: ConvProblem, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor that ATen asks for its shape only; its memory is never touched, nor mapped."""
    return shape, usual_strides(shape, problem.channels_last)


def _padded_sweep(
    problem: ConvProblem,
    p: ConvProblem,
    arguments: tuple[Any, ...],
    n: int,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """A sweep over an input that carries its padding."""
    if problem.transposed:  # stated as a plain one: its forward and grad_weight are two calls
        padded_input = pad_input(problem, input)
        forward = torch.convolution(padded_input, weight, None, *arguments[:-1])
        masks = (False, True, False)
        grad_weight = aten_backward(grad_output, padded_input, weight, None, *arguments[:-1], masks)[1]
        grad_bias = input.sum((0, *range(2, problem.ndim + 2)))
        return (forward, grad_weight, grad_bias)[:n]
    grads = aten_backward(grad_output, pad_input(problem, input), weight, [p.out_channels], *arguments)
    return (unpad_input(problem, grads[0]), *grads[1:])[:n]


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def _real(problem: ConvProblem) -> ConvProblem:
    return problem.replace(dtype=problem.dtype.to_real())


def _complex(
    contract: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """A bilinear map of complex operands as three real ones (Gauss; ATen's complex forward does the same)."""
    a, b = a.resolve_conj(), b.resolve_conj()
    cr, ci = (None, None) if bias is None else (bias.resolve_conj().real, bias.resolve_conj().imag)
    real, imag = contract(a.real, b.real, cr), contract(a.imag, b.imag, None)
    both = contract(a.real + a.imag, b.real + b.imag, None if cr is None or ci is None else cr + ci)
    return torch.complex(real - imag, both - real - imag)
