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

from .._compat import channels_last_of, usual_strides
from ..problem import ConvProblem, Dimension, Outputs, Pass, fields_of
from ..settings import cudnn_allows_tf32
from .aten_defects import defect_of, reads_batch_stride, reads_every_stride, tidy, without_slack
from .base import BOTH_GRADIENTS, Arithmetic, Backend, Kernel
from .padded_copy import Restated, over_copy, padded

#: PyTorch's own backward, without a Python frame of its own.
aten_backward: Any = torch.ops.aten.convolution_backward.default._op


class AtenBackend(Backend):
    """PyTorch's own convolution and convolution_backward."""

    name = "aten"
    summary = "what PyTorch itself would run"
    from_pytorch = True
    sweeps = BOTH_GRADIENTS
    layouts = ("any",)

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        wanted = {o for o in outputs if o != "grad_bias"}
        dtype, transposed, both = problem.dtype, problem.transposed, len(wanted) > 1
        as_stated = statable(problem) is problem and without_slack(problem) is problem
        integers = not (dtype.is_floating_point or dtype.is_complex)
        at_once = "PyTorch has no operator that gives {} at once".format
        reasons = {
            at_once(f"{problem.bias_pass} and grad_weight of this problem"): both and problem.bias_pass in wanted,
            at_once("both gradients of complex numbers"): both and dtype.is_complex,
            at_once("both gradients of a transposed convolution with this padding"):
                both and transposed and not as_stated,
            f"PyTorch has no convolution for {dtype}":
                dtype is torch.bool or (dtype.is_floating_point and dtype.itemsize == 1),
            f"PyTorch has no integer convolution on {device.type}": integers and device.type != "cpu",
            "PyTorch cannot state this padding of a transposed convolution, and has no gradients for integers":
                integers and transposed and not as_stated,
            "PyTorch's CPU convolution has no gradients for integers": integers and wanted - {problem.bias_pass},
            "PyTorch's transposed and dilated CPU convolutions know no integers but int64":
                integers and dtype is not torch.int64 and (transposed or max(problem.dilation) > 1),
        }  # fmt: skip
        return [reason for reason, holds in reasons.items() if holds][:1]

    def wrong_here(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[str, tuple[str, ...]]:
        return defect_of(statable(problem.replace(dtype=problem.dtype.to_real())), outputs, device)

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        if device.type == "cuda" and problem.dtype is torch.float32:
            return "tf32" if cudnn_allows_tf32() else "transform"
        if problem.dtype in (torch.float16, torch.bfloat16) and device.type == "cpu":
            return "low-precision accumulation"  # its gradients exceed a bound that assumes float32 sums
        return "direct" if device.type == "cpu" else "transform"

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        real, several = problem.dtype.to_real(), len(outputs) > 1
        if real != problem.dtype:
            return partial(complex_product, self.bind(problem.replace(dtype=real), outputs))
        problem = without_slack(problem)
        p = statable(problem)
        if p is not problem:
            return over_copy(problem, outputs, self.bind(p, outputs))
        if several:
            sweep = _sweep(p, len(outputs))
            return sweep if p.ndim > 1 else lambda *operands: tuple([t.contiguous() for t in sweep(*operands)])
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        call = pytorchs_call(p, pass_)
        if p.ndim == 1:  # PyTorch lays results out as a weight that is a transposed view
            return lambda *operands: call(*operands).contiguous()
        reads = reads_batch_stride if pass_ == "grad_weight" else reads_every_stride
        return (lambda a, b, *rest: call(a, tidy(b), *rest)) if reads(p) else call


def output_padding(problem: ConvProblem) -> tuple[int, ...]:
    """Return the output_padding of this problem as PyTorch's transposed one; out of range where it cannot state it."""
    return tuple(dim.low - dim.least_high for dim in problem.dims)


def statable(problem: ConvProblem) -> ConvProblem:
    """Return the problem where PyTorch's arguments can state it, else the one over a padded input."""
    if not problem.transposed:
        return problem if problem.symmetric else padded(problem)
    extra = zip(problem.dims, output_padding(problem), strict=True)
    if all(dim.low >= 0 and 0 <= more < max(dim.stride, dim.dilation) for dim, more in extra):
        return problem
    return padded(problem).replace(origin="plain")


def runs_as_stated(problem: ConvProblem) -> bool:
    """Whether PyTorch's own operator may be called with the operands as they are: nothing padded, cropped or split."""
    p = problem
    return p.dtype.is_floating_point and not p.empty and statable(p) is p and without_slack(p) is p


def statable_arguments(problem: ConvProblem) -> tuple[Any, ...]:
    """Return stride, padding, dilation, transposed, output_padding and groups with which PyTorch states a problem."""
    op = output_padding(problem) if problem.transposed else (0,) * problem.ndim
    padding = tuple(low for low, _ in problem.padding)
    return (problem.stride, padding, problem.dilation, problem.transposed, op, problem.groups)


def pytorchs_call(p: ConvProblem, pass_: Pass) -> Callable[..., Tensor]:
    """Return PyTorch's own call for one pass of a problem that it can state, with no defect avoided.

    Of a transposed problem its grad_output is our slot input, and its input our slot grad_output.
    """
    arguments = statable_arguments(p)
    if pass_ == p.bias_pass:  # the pass that the user called
        return lambda a, b, bias=None, workspace=None: torch.convolution(a, b, bias, *arguments)
    of_weight = pass_ == "grad_weight"
    shape = p.weight_shape if of_weight else p.output_shape if p.transposed else p.input_shape
    # A tensor that ATen asks for its shape only; its memory is never touched, nor mapped.
    unread, mask = (shape, usual_strides(shape, p.channels_last)), (not of_weight, of_weight, False)

    def gradient(a: Tensor, b: Tensor, bias: None = None, workspace: Tensor | None = None) -> Tensor:
        absent = a.new_empty_strided(*unread)
        if not of_weight:
            return aten_backward(a, absent, b, None, *arguments, mask)[0]
        grad_output, input = (b, a) if p.transposed else (a, b)
        return aten_backward(grad_output, input, absent, None, *arguments, mask)[1]

    return gradient


def _sweep(p: ConvProblem, n: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return both gradients of the user's call, and with ``n`` = 3 that of the bias."""
    arguments, channels = (*statable_arguments(p), (True, True, n == 3)), [p.shape_of(p.bias_slot)[1]]
    of_weight = tidy if reads_every_stride(p) else lambda t: t
    of_input = tidy if reads_batch_stride(p) else lambda t: t

    def sweep(grad_output: Tensor, input: Tensor, weight: Tensor, workspace: Tensor | None = None) -> Any:
        first, second = (input, grad_output) if p.transposed else (grad_output, of_input(input))
        return aten_backward(first, second, of_weight(weight), channels, *arguments)[:n]

    return sweep


def complex_product(
    contract: Callable[[Tensor, Tensor, Tensor | None], Tensor], a: Tensor, b: Tensor, bias: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a bilinear map of complex operands as three real ones (Gauss; ATen's complex forward does the same)."""
    a, b = a.resolve_conj(), b.resolve_conj()
    cr, ci = (None, None) if bias is None else (bias.resolve_conj().real, bias.resolve_conj().imag)
    real, imag = contract(a.real, b.real, cr), contract(a.imag, b.imag, None)
    both = contract(a.real + a.imag, b.real + b.imag, None if cr is None or ci is None else cr + ci)
    return torch.complex(real - imag, both - real - imag)


def with_height(p: ConvProblem) -> ConvProblem:
    """Return a problem of one dimension as one of two, with a height of 1."""
    return p.replace(**fields_of((Dimension(1, 1, 1, 1, 0, 0, 1), *p.dims)))


# ---- routes: ATen in another dtype, layout or number of dimensions, where its kernels are faster ----

_aten = AtenBackend()


class AtenRoute(Restated):
    """ATen on operands converted to another dtype or layout, a sequence to an image of one row, within its time."""

    def __init__(self, name: str, summary: str, restated: Callable[[ConvProblem], ConvProblem], otherwise: str) -> None:
        super().__init__(_aten, restated, name, summary, otherwise)
        self.layouts = ("strided",)

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        other = self.restated(problem)
        kernel, lifted = _aten.bind(other, outputs), other.ndim > problem.ndim

        def there(t: Tensor) -> Tensor:
            return _converted(t.unsqueeze(2) if lifted else t, other)

        def back(t: Tensor) -> Tensor:
            return _converted(t.squeeze(2) if lifted else t, problem)

        def one_pass(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            return back(kernel(there(a), there(b), None if bias is None else bias.to(other.dtype)))

        def sweep(a: Tensor, b: Tensor, c: Tensor, workspace: object = None) -> tuple[Tensor, ...]:
            found = kernel(there(a), there(b), there(c))
            return tuple(t.to(problem.dtype) if t.dim() == 1 else back(t) for t in found)

        return one_pass if len(outputs) == 1 else sweep


def _converted(t: Tensor, p: ConvProblem) -> Tensor:
    """Return a tensor in the dtype and the layout of a problem, with one copy at most."""
    if t.dtype is not p.dtype:
        return t.to(p.dtype, memory_format=p.memory_format)
    return t.contiguous(memory_format=p.memory_format)


def _in_channels_last(p: ConvProblem) -> ConvProblem:
    lifted = with_height(p) if p.ndim == 1 else p
    return p if p.channels_last else lifted.replace(memory_format=channels_last_of(lifted.ndim))


_padding = Restated(
    _aten, padded, "aten:padded", "ATen over an input that carries its padding", "there is no padding to write out"
)
_padding.sweeps = ()

ROUTES = (
    # For a CPU without 16-bit arithmetic, and for sums that are rounded once.
    AtenRoute("aten:float32", "ATen in float32, for float16 and bfloat16",
              lambda p: p.replace(dtype=torch.float32) if p.dtype in (torch.float16, torch.bfloat16) else p,
              "it computes torch.float16 and torch.bfloat16 in torch.float32, got {p.dtype}"),
    # A sequence has no such layout.
    AtenRoute("aten:channels_last", "ATen in channels_last, for contiguous tensors; a sequence is an image of one row",
              _in_channels_last, "its layout is channels_last as it is"),
    # On a GPU cuDNN computes the groups of channels_last tensors one after the other.
    AtenRoute("aten:contiguous", "ATen on contiguous copies, for tensors in channels_last",
              lambda p: p.replace(memory_format=torch.contiguous_format) if p.channels_last else p,
              "its layout is contiguous as it is"),
    # Most of oneDNN's kernels in `aten_defects` go wrong where a border is wide and the image small. With the zeros
    # written out there is no border; that costs one copy of the input, and the kernel stays the fast one.
    _padding,
)  # fmt: skip
