"""The base class of backends: a backend contracts two tensors, for one pass of one problem.

Adding one is a file with a subclass of `Backend`, a line in ``backends/__init__.py``, and a green
``pytest -k <name>``: the conformance suite is inherited, not written again.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, Literal

import torch

from .._compat import channels_last_of
from ..problem import PASSES, ConvProblem, Outputs, PaddingMode, Pass, gradient_outputs

#: How a backend sums products; it selects the error bound to which the backend is held.
#: ``direct``: products rounded at most once, summed in float32 or better (float64 for float64).
#: ``tf32``: operands rounded to 10 mantissa bits. ``transform``: Winograd, FFT.
#: ``low-precision accumulation``: partial sums kept in the storage dtype.
Arithmetic = Literal["direct", "tf32", "transform", "low-precision accumulation"]

#: What `Backend.bind` returns.
Kernel = Callable[..., Any]

#: The engine hands operands over in the problem's memory format where it is among these, else in the one that is;
#: ``strided`` means as they lie in memory: any strides, even overlapping ones. ``any`` means as they are, lazily
#: conjugated or negated too: for a backend that is made of torch operators alone.
Layout = Literal["contiguous", "channels_last", "strided", "any"]

#: The sweeps that yield both gradients of a plain and of a transposed problem, without and with that of the bias.
BOTH_GRADIENTS: Final = tuple(
    gradient_outputs(transposed, (True, True, bias)) for transposed in (False, True) for bias in (False, True)
)

_described: ContextVar[tuple[int, int] | None] = ContextVar("_described", default=None)


@contextlib.contextmanager
def described(capability: tuple[int, int] | None) -> Iterator[None]:
    """Describe a CUDA device to all backends in this block by its compute capability; it need not be there."""
    token = _described.set(capability)
    try:
        yield
    finally:
        _described.reset(token)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of the NVIDIA GPU that a backend is asked about; None where it is not known."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    found = _described.get()
    if found is None and torch.cuda.is_initialized():
        found = torch.cuda.get_device_capability(device)
    return found


class Backend(ABC):
    """Contracts two tensors, for one pass of one problem.

    A backend never validates (that is done before), and is never called with an empty problem. A transposed convolution
    is the pass ``grad_input`` to it; ``problem.origin`` says where that matters.
    """

    #: The name that choices, tables and commands use.
    name: str
    #: One line for people.
    summary: str = ""
    #: The passes that it implements.
    passes: tuple[Pass, ...] = PASSES
    #: The sets of several outputs that one call can compute, each in the order of ``OUTPUTS``.
    sweeps: tuple[Outputs, ...] = ()
    #: The same inputs always give the same bits.
    deterministic: bool = True
    #: May be called while a CUDA graph is captured.
    capture_safe: bool = True
    #: Operand layouts that it takes; the engine copies any other into the problem's memory format.
    layouts: tuple[Layout, ...] = ("contiguous", "channels_last")
    #: For any other padding mode, the engine gives it a padded copy of the input.
    padding_modes: tuple[PaddingMode, ...] = ("zeros",)
    #: It checks its own first results: a check on a smaller problem would only compile other kernels.
    checks_itself: bool = False
    #: Its kernels are PyTorch's, whose behavior may depend on the processor.
    from_pytorch: bool = False
    #: Whether `workspace` says how much memory it needs; a user's function has no way to.
    states_workspace: bool = True
    #: What a measurement depends on besides the library's release: a digest of a source, of a compiled library.
    version: str = ""

    #: Called when `reasons_against` answers otherwise from now on; `engine.register` sets it.
    changed: Callable[[], None] = staticmethod(lambda: None)

    def __repr__(self) -> str:
        return f"<backend {self.name!r}: {self.summary}>"

    @abstractmethod
    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        """Return sentences that say why this backend cannot compute ``outputs``; empty means usable.

        They may be asked about a device that is not here, and must not touch one.
        """

    def against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        """Return `reasons_against`, and the reasons that hold for any backend."""
        if problem.padding_mode not in self.padding_modes:
            return [f"it computes padding_mode={problem.padding_mode!r} over a padded copy of the input"]
        return self.reasons_against(problem, outputs, device)

    def wrong_here(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[str, tuple[str, ...]]:
        """Return the known defect in one of these outputs, as a sentence, and the backends to use instead.

        Both are empty where nothing is known. Such a backend computes on request, and is never chosen.
        """
        return "", ()

    @abstractmethod
    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        """Return the function that computes ``outputs`` of this problem: one pass, or several (one of ``sweeps``).

        What a problem costs to prepare is paid here: a plan binds once and calls many times.

        Shape:
            - ("forward",): kernel(input, weight) -> output
            - ("grad_input",): kernel(grad_output, weight) -> grad_input
            - ("grad_weight",): kernel(grad_output, input) -> grad_weight
            - several: kernel(grad_output, input, weight) -> a tuple in the order of ``outputs``. These are tensors of
              the plain problem; ``grad_bias`` is the sum of the slot ``problem.bias_slot`` over batch and space.

        The function of one pass is ``kernel(a, b, bias=None, workspace=None)``, that of several outputs
        ``kernel(grad_output, input, weight, workspace=None)``. A bias is passed only where `fuses_bias` says so, and is
        added to the result along its channels; the workspace is a uint8 tensor of `workspace` bytes, or None where that
        is 0. Results are dense tensors in ``problem.memory_format`` (where a dimension of size 1 makes two formats
        true, in either).
        """

    def workspace(self, problem: ConvProblem, outputs: Outputs) -> int:
        """Return an upper bound of the scratch memory of one call, in bytes; tests check it."""
        return 0

    def fuses_bias(self, problem: ConvProblem) -> bool:
        """Whether its kernel adds the bias itself in ``problem.bias_pass``."""
        return False

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        """Return the arithmetic of a pass, which selects its error bound."""
        return "direct"

    def repeats_aten(self, problem: ConvProblem, device: torch.device) -> bool:
        """Whether it would make PyTorch's own call for this problem, which it can compute."""
        return False

    def remark(self, outputs: Outputs) -> str:
        """Return a remark for the reason of a choice, or nothing."""
        return ""

    def kernel_name(self, problem: ConvProblem, outputs: Outputs) -> str:
        """Return the name of the kernel that would run, where the backend has several; for display."""
        return ""


def operand_format(backend: Backend, problem: ConvProblem) -> torch.memory_format | None:
    """Return the layout in which the backend receives this problem's operands; None where it takes any strides."""
    if "strided" in backend.layouts or "any" in backend.layouts:
        return None
    if problem.channels_last and "channels_last" in backend.layouts:
        return problem.memory_format
    if "contiguous" in backend.layouts:
        return torch.contiguous_format
    return channels_last_of(problem.ndim)
