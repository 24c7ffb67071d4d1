"""Routes: backends that call ATen in another dtype, layout or number of dimensions, where that is faster.

PyTorch computes a convolution in the dtype, layout and number of dimensions of its operands, even if its kernels for
these are slow. A route restates the problem, converts the operands, calls ATen, and converts the result back; the
conversions count in its time.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from .._compat import channels_last_of, exact_matmul
from ..problem import RESULT, ConvProblem, Outputs, Pass
from .aten import AtenBackend
from .aten_libraries import with_height
from .base import BOTH_GRADIENTS, Arithmetic, Backend, Kernel
from .padding import over_copy, padded

_aten = AtenBackend()


class _Restated(Backend):
    """ATen on converted operands: another dtype or layout, a sequence as an image of one row, padding written out."""

    from_pytorch = True
    sweeps = BOTH_GRADIENTS
    layouts = ("strided",)

    @abstractmethod
    def restated(self, problem: ConvProblem) -> ConvProblem:
        """Return the problem that ATen gets; the same one where this route changes nothing."""

    @abstractmethod
    def nothing_to_change(self, problem: ConvProblem) -> str:
        """Return why this route is the same as ATen's call; empty if it is not."""

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        why = self.nothing_to_change(problem)
        return [why] if why else _aten.reasons_against(self.restated(problem), outputs, device)

    def wrong_here(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[str, tuple[str, ...]]:
        return _aten.wrong_here(self.restated(problem), outputs, device)

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

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return _aten.arithmetic(self.restated(problem), pass_, device)


def _converted(t: Tensor, p: ConvProblem) -> Tensor:
    """Return a tensor in the dtype and the layout of a problem, with one copy at most."""
    if t.dtype is not p.dtype:
        return t.to(p.dtype, memory_format=p.memory_format)
    return t.contiguous(memory_format=p.memory_format)


class AtenFloat32Backend(_Restated):
    """float16 and bfloat16 in float32: for a CPU without their arithmetic, and for sums that are rounded once."""

    name = "aten:float32"
    summary = "ATen in float32, for float16 and bfloat16"

    def nothing_to_change(self, problem: ConvProblem) -> str:
        if problem.dtype in (torch.float16, torch.bfloat16):
            return ""
        return f"it computes torch.float16 and torch.bfloat16 in torch.float32, got {problem.dtype}"

    def restated(self, problem: ConvProblem) -> ConvProblem:
        return problem.replace(dtype=torch.float32)


class AtenChannelsLastBackend(_Restated):
    """Contiguous tensors in channels_last; a sequence, which has no such layout, as an image of one row."""

    name = "aten:channels_last"
    summary = "ATen in channels_last, for contiguous tensors; a sequence is an image of one row"

    def nothing_to_change(self, problem: ConvProblem) -> str:
        return "its layout is channels_last as it is" if problem.channels_last else ""

    def restated(self, problem: ConvProblem) -> ConvProblem:
        lifted = with_height(problem) if problem.ndim == 1 else problem
        return lifted.replace(memory_format=channels_last_of(lifted.ndim))


class AtenContiguousBackend(_Restated):
    """Tensors in channels_last as contiguous ones: cuDNN computes groups there one after the other, on a GPU."""

    name = "aten:contiguous"
    summary = "ATen on contiguous copies, for tensors in channels_last"

    def nothing_to_change(self, problem: ConvProblem) -> str:
        return "" if problem.channels_last else "its layout is contiguous as it is"

    def restated(self, problem: ConvProblem) -> ConvProblem:
        return problem.replace(memory_format=torch.contiguous_format)


class AtenPaddedBackend(_Restated):
    """ATen over an input that carries its padding, for its kernels that are wrong at the border.

    Most of oneDNN's kernels in `aten_defects` go wrong where a border is wide and the image small. With the zeros
    written out there is no border; that costs one copy of the input, and the kernel stays the fast one.
    """

    name = "aten:padded"
    summary = "ATen over an input that carries its padding"
    sweeps = ()
    layouts = ("any",)

    def nothing_to_change(self, problem: ConvProblem) -> str:
        return "there is no padding to write out" if padded(problem) is problem else ""

    def restated(self, problem: ConvProblem) -> ConvProblem:
        """A plain problem: a transposed one over a padded output is its gradient of the input, and then cropped."""
        return padded(problem).replace(origin="plain")

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        return over_copy(problem, outputs, _aten.bind(self.restated(problem), outputs))


class AtenMatmulBackend(Backend):
    """A pointwise convolution as PyTorch's matrix products on the uncopied tensors; a linear layer calls them, too.

    In channels_last that is one product of all pixels' rows of channels, otherwise one for each image.
    """

    name = "aten:matmul"
    summary = "PyTorch's matrix product, for pointwise convolutions"
    from_pytorch = True

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        if not problem.matrix_product or problem.groups > 1:
            return ["it computes pointwise convolutions without groups, stride and padding"]
        if device.type != "cpu" or not problem.dtype.is_floating_point or problem.dtype.itemsize == 1:
            return [f"it computes floating-point numbers on a CPU, got {problem.dtype} on {device.type}"]
        return [] if exact_matmul() else ["PyTorch may compute its matrix products in 16 bits here"]

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "low-precision accumulation" if problem.dtype.itemsize == 2 else "direct"

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        shape, weights = problem.shape_of(RESULT[pass_]), problem.weight_shape[:2]

        def of_rows(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            rows = a.movedim(1, -1).view(-1, a.shape[1])  # [N * pixels, channels]
            if pass_ == "grad_weight":
                return (rows.t() @ b.movedim(1, -1).view(-1, b.shape[1])).view(shape)
            matrix = b.view(weights) if pass_ == "grad_input" else b.view(weights).t()
            product = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
            return product.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)

        def of_images(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            images = a.view(*a.shape[:2], -1)  # [N, channels, pixels]
            if pass_ == "grad_weight":
                others = b.view(*b.shape[:2], -1).transpose(1, 2)
                return torch.addbmm(a.new_empty(weights), images, others, beta=0).view(shape)
            matrix = b.view(weights).t() if pass_ == "grad_input" else b.view(weights)
            matrices = matrix.expand(len(images), -1, -1)
            if bias is None:
                return torch.bmm(matrices, images).view(shape)
            return torch.baddbmm(bias.view(-1, 1), matrices, images).view(shape)

        return of_rows if problem.channels_last else of_images
