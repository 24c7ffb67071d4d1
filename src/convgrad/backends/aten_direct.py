"""One of ATen's own libraries, chosen by name: how a problem gets to its operators.

PyTorch picks one of its libraries for a convolution by rules and global flags. Here it is picked by name, with no flag
touched, in the first of three ways that there is:

1. PyTorch's own call (`AtenBackend`), bit for bit, where PyTorch would pick this library anyway;
2. the library's own operator, where PyTorch exposes one (``torch.cudnn_convolution``, ``aten::_slow_conv2d_forward``);
3. that operator in another role: the gradient of the input is a transposed convolution, and the gradient of the
   weight is a convolution of the input with grad_output, stride and dilation exchanged (`grad_weight_as_convolution`).

Where there is none, `reasons_against` says so. The libraries themselves are in `aten_libraries`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..problem import ConvProblem, Outputs, Pass
from ..sizes import Dimension, fields_of
from .aten import AtenBackend, output_padding, statable, statable_arguments
from .aten_defects import without_slack
from .base import Backend, Kernel
from .padding import over_copy, padded
from .strides import tidy, usual_strides

#: A function of (a, b, bias): the operands of one pass of one problem, and what is added to the result's channels.
Contract = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

_aten = AtenBackend()


class _Sized(Tensor):
    """A tensor that has sizes and a device, but no memory. PyTorch's own, `FakeTensor`, takes a second to import."""

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        raise NotImplementedError(f"{func} is asked of a tensor without memory")


def aten_choice(problem: ConvProblem, device: torch.device) -> Any:
    """Return the library that PyTorch chooses for this problem under the flags in force: a ``torch._C._ConvBackend``.

    The device must be here.
    """
    p = statable(problem)
    stride, padding, dilation, transposed, more, groups = statable_arguments(p)
    first, weight = p.output_shape if p.transposed else p.input_shape, p.weight_shape
    if p.ndim == 1:  # PyTorch computes it as 2-D
        stride, padding, dilation, more = (1, *stride), (0, *padding), (1, *dilation), (0, *more)
        first, weight = (*first[:2], 1, *first[2:]), (*weight[:2], 1, *weight[2:])

    def sized(shape: tuple[int, ...]) -> Tensor:
        strides = usual_strides(shape, p.channels_last)
        return Tensor._make_wrapper_subclass(_Sized, shape, strides, dtype=p.dtype, device=device)

    operands = sized(first), sized(weight)
    return torch._C._select_conv_backend(*operands, None, stride, padding, dilation, transposed, more, groups)


class AtenDirect(Backend):
    """One of ATen's libraries, by name."""

    #: The values of ``torch._C._ConvBackend`` that stand for it, the same in every release that is supported.
    kinds: frozenset[int]
    #: Its own name, the types of device that it is for, and these in words.
    library: str
    device_types: tuple[str, ...]
    where: str
    #: What it computes; empty where there are other rules.
    dtypes: tuple[torch.dtype, ...] = ()
    from_pytorch = True
    candidate = False

    def built(self) -> bool:
        """Whether this PyTorch was built with it."""
        return True

    def absent(self, device: torch.device) -> list[str]:
        """Return why the library is not there for this device; empty if it is."""
        reasons = [] if self.built() else [f"this PyTorch was built without {self.library}"]
        if device.type not in self.device_types:
            reasons.append(f"{self.library} needs {self.where}, got {device.type}")
        return reasons

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons = self.absent(device)
        if self.dtypes and problem.dtype not in self.dtypes:
            reasons.append(f"{self.library} computes {', '.join(map(str, self.dtypes))}, got {problem.dtype}")
        return reasons

    @abstractmethod
    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        """Return the library's function for one pass of a problem of 2 or 3 dimensions with symmetric padding."""

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        contraction = cache(partial(self.contraction, problem, pass_))  # the device is known at the first call

        def kernel(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            return contraction(a.device)(a, b, bias).contiguous(memory_format=problem.memory_format)

        return kernel

    def repeats_aten(self, problem: ConvProblem, device: torch.device) -> bool:
        return int(aten_choice(problem, device)) in self.kinds

    def contraction(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        """Return PyTorch's own call where that chooses this library, else the library's operator."""
        if self.repeats_aten(problem, device):
            return _aten.bind(problem, (pass_,))
        return self.forced(problem, pass_, device)

    def forced(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        """Return the library's operator for any padding, and for one dimension as an image of height 1."""
        problem = without_slack(problem)
        if not problem.symmetric:
            return over_copy(problem, (pass_,), self.forced(padded(problem), pass_, device))
        flat = problem.ndim == 1
        operator = self.operator(with_height(problem) if flat else problem, pass_, device)

        def contract(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            a, b = (tidy(t.unsqueeze(2) if flat else t) for t in (a, b))
            result = operator(a, b, bias)
            return result.squeeze(2) if flat else result

        return contract


def with_height(p: ConvProblem) -> ConvProblem:
    """Return a problem of one dimension as one of two, with a height of 1."""
    return p.replace(**fields_of((Dimension(1, 1, 1, 1, 0, 0, 1), *p.dims)))


def grad_weight_as_convolution(p: ConvProblem, operator: Callable[[ConvProblem], Contract]) -> Contract:
    """Compute the gradient of the weight as the forward of another problem, for a library that exposes only forwards.

    The input's channels become the batch, the batch becomes the channels that are summed over, grad_output the kernel;
    stride and dilation change places. Positions past the kernel, which a stride leaves over, are cut off.

    Args:
        operator: makes the forward of a problem.
    """
    n, g, c = p.batch, p.groups, p.in_channels // p.groups
    reached = tuple(d.kernel + more // d.dilation for d, more in zip(p.dims, output_padding(p), strict=True))
    exchanged = p.replace(
        batch=c,
        in_channels=g * n,
        kernel_size=p.output_size,
        stride=p.dilation,
        dilation=p.stride,
        output_size=reached,
        memory_format=torch.contiguous_format,
        has_bias=False,
        origin="plain",
    )
    forward = operator(exchanged)

    def grad_weight(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        kernel = a.transpose(0, 1).contiguous()  # [C_out, N, *out]
        input = b.reshape(n, g, c, *p.input_size).transpose(0, 2).reshape(c, g * n, *p.input_size)
        result = forward(input, kernel, None)  # [C_in/groups, C_out, *reached]
        for i, k in enumerate(p.kernel_size):
            result = result.narrow(2 + i, 0, k)
        return result.transpose(0, 1)  # [C_out, C_in/groups, *k]

    return grad_weight
