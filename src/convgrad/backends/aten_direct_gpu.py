"""``aten:cudnn`` and ``aten:miopen``: the two GPU libraries, by the operators that PyTorch exposes.

``cudnn_convolution`` is the forward. ``cudnn_convolution_transpose`` is what PyTorch itself calls for the gradient of
the input (cuDNN's backward-data). For the gradient of the weight no operator is left: it is PyTorch's own backward
where that picks the library, and refused with the reason where not. The same holds for MIOpen.

Flags that are given to an instance hold for its calls only. PyTorch's own backward takes none: where the flags given
forbid something that PyTorch's allow, the gradient of the weight is a forward of the library in another role.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..problem import ConvProblem, Output, Pass
from ..settings import cudnn_allows_tf32, current
from .aten_direct import CUDNN, MIOPEN, AtenDirect, Contract, aten_choice, grad_weight_as_convolution, name_of
from .aten_direct import output_padding as output_padding_of
from .base import Arithmetic

__all__ = ["AtenCudnnBackend", "AtenMiopenBackend", "Flags"]


class Flags(NamedTuple):
    """Flags of a call; None means PyTorch's flag at the time of the call.

    Args:
        benchmark: try the library's algorithms and take the fastest.
        deterministic: only algorithms that repeat their bits.
        allow_tf32: float32 operands may be rounded to TF32 (cuDNN only).
    """

    benchmark: bool | None = None
    deterministic: bool | None = None
    allow_tf32: bool | None = None

    def in_force(self) -> tuple[bool, bool, bool]:
        """The three values to pass."""
        s = current()
        return (
            s.cudnn_benchmark if self.benchmark is None else self.benchmark,
            s.must_be_deterministic if self.deterministic is None else self.deterministic,
            s.cudnn_tf32 if self.allow_tf32 is None else self.allow_tf32,
        )

    def stricter_than_pytorch(self, dtype: torch.dtype) -> bool:
        """Whether these flags forbid something that PyTorch's own allow at this moment."""
        s = current()
        tf32 = self.allow_tf32 is False and s.cudnn_tf32 and dtype is torch.float32
        return tf32 or (self.deterministic is True and not s.must_be_deterministic)

    def __str__(self) -> str:
        """Those that are given, as ``benchmark=1,deterministic=0``."""
        return ",".join(f"{k}={int(v)}" for k, v in self._asdict().items() if v is not None)


class _GpuLibrary(AtenDirect):
    """What the two have in common.

    Args:
        flags: of every call of this instance; those that are given become part of its name.
    """

    library: str
    dtypes: tuple[torch.dtype, ...]

    def __init__(self, flags: Flags = Flags()) -> None:  # noqa: B008, immutable
        self.flags = flags
        if str(flags):
            self.name = f"{type(self).name}[{flags}]"
        # Without the flag it follows PyTorch's: where deterministic algorithms are demanded, they are asked for.
        self.deterministic = flags.deterministic is not False

    def absent(self, device: torch.device) -> list[str]:
        """Why the library is not there."""
        raise NotImplementedError

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        reasons = self.absent(device)
        if problem.dtype not in self.dtypes:
            known = ", ".join(map(str, self.dtypes))
            reasons.append(f"{self.library} convolutions compute {known}, got {problem.dtype}")
        if reasons or "grad_weight" not in outputs or not torch.cuda.is_available():
            return reasons
        if self._weight_gradient_in_another_role(problem):
            return reasons
        choice = aten_choice(problem, device)
        if choice not in self.kinds:
            reasons.append(
                f"{self.library}'s gradient of the weight is reached only through convolution_backward, "
                f"which picks {name_of(choice)} for this problem under the flags in force"
            )
        return reasons

    def _weight_gradient_in_another_role(self, problem: ConvProblem) -> bool:
        """Whether grad_weight has to be a forward call, the only one to which these flags can be given."""
        return self.flags.stricter_than_pytorch(problem.dtype)

    def contraction(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        if pass_ == "grad_weight" and not self._weight_gradient_in_another_role(problem):
            return super().contraction(problem, pass_, device)
        return self.forced(problem, pass_, device)  # the same functions that PyTorch calls, with this call's flags

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> tuple[Contract, bool]:
        if pass_ == "forward":
            return self.convolution(problem)
        if pass_ == "grad_input":
            return self.convolution_transpose(problem)
        return grad_weight_as_convolution(problem, lambda p: self.convolution(p)[0]), False

    def convolution(self, p: ConvProblem) -> tuple[Contract, bool]:
        """The library's forward, and whether it adds the bias."""
        raise NotImplementedError

    def convolution_transpose(self, p: ConvProblem) -> tuple[Contract, bool]:
        """The library's backward-data, and whether it adds the bias."""
        raise NotImplementedError


class AtenCudnnBackend(_GpuLibrary):
    """cuDNN, forced."""

    name = "aten:cudnn"
    summary = "NVIDIA's cuDNN"
    kinds = CUDNN
    library = "cuDNN"
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

    def absent(self, device: torch.device) -> list[str]:
        reasons = []
        if torch.version.hip is not None or not torch.backends.cudnn.is_available():
            reasons.append("this PyTorch was built without cuDNN")
        if device.type != "cuda":
            reasons.append(f"cuDNN needs a CUDA device, got {device.type}")
        return reasons

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        allowed = cudnn_allows_tf32() if self.flags.allow_tf32 is None else self.flags.allow_tf32
        return "tf32" if allowed and problem.dtype is torch.float32 else "transform"

    def convolution(self, p: ConvProblem) -> tuple[Contract, bool]:
        pad, s, d, g = [low for low, _ in p.padding], p.stride, p.dilation, p.groups
        flags = self.flags.in_force
        return lambda a, b, bias=None: torch.cudnn_convolution(a, b, pad, s, d, g, *flags()), False

    def convolution_transpose(self, p: ConvProblem) -> tuple[Contract, bool]:
        pad, s, d, g = [low for low, _ in p.padding], p.stride, p.dilation, p.groups
        extra, flags = output_padding_of(p), self.flags.in_force
        return lambda a, b, bias=None: torch.cudnn_convolution_transpose(
            a, b, pad, extra, s, d, g, *flags()
        ), False  # fmt: skip


class AtenMiopenBackend(_GpuLibrary):
    """MIOpen, forced."""

    name = "aten:miopen"
    summary = "AMD's MIOpen"
    kinds = MIOPEN
    library = "MIOpen"
    dtypes = (torch.float32, torch.float16, torch.bfloat16)

    def absent(self, device: torch.device) -> list[str]:
        reasons = []
        if torch.version.hip is None:
            reasons.append("this PyTorch was built without MIOpen")
        if device.type != "cuda":
            reasons.append(f"MIOpen needs a ROCm device (PyTorch calls it cuda), got {device.type}")
        return reasons

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        reasons = super().reasons_against(problem, outputs, device)
        if problem.groups > 1 and any(d > 1 for d in problem.dilation):
            reasons.append("PyTorch gives MIOpen no convolution that is both grouped and dilated")
        strided = problem.groups > 1 and any(s > 1 for s in problem.stride)
        if strided and "grad_weight" in outputs and self._weight_gradient_in_another_role(problem):
            reasons.append(
                "for MIOpen's gradient of the weight PyTorch takes no flags of the call, and without its own flag "
                "torch.backends.cudnn.deterministic there is no other way for a grouped and strided convolution"
            )
        return reasons

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "transform"

    def convolution(self, p: ConvProblem) -> tuple[Contract, bool]:
        pad, s, d, g = [low for low, _ in p.padding], p.stride, p.dilation, p.groups
        own = torch.miopen_depthwise_convolution if p.depthwise else torch.miopen_convolution
        flags = self.flags.in_force
        return lambda a, b, bias=None: own(a, b, bias, pad, s, d, g, *flags()[:2]), True

    def convolution_transpose(self, p: ConvProblem) -> tuple[Contract, bool]:
        pad, s, d, g = [low for low, _ in p.padding], p.stride, p.dilation, p.groups
        extra, flags = output_padding_of(p), self.flags.in_force
        return lambda a, b, bias=None: torch.miopen_convolution_transpose(
            a, b, bias, pad, extra, s, d, g, *flags()[:2]
        ), True  # fmt: skip
