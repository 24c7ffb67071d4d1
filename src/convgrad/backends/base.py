"""What a backend is: it contracts two tensors, for one pass of one problem.

Adding one is a file with a subclass of `Backend`, a line in ``backends/__init__.py``, and a green
``pytest -k <name>``: the conformance suite is inherited, not written again.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from ..problem import PASSES, ConvProblem, Output, Pass, gradient_outputs

__all__ = ["BOTH_GRADIENTS", "Arithmetic", "Backend", "Layout", "capability", "described"]

#: How a backend sums products; it selects the error bound to which the backend is held.
#: ``direct``: products rounded at most once, summed in float32 or better (float64 for float64).
#: ``tf32``: operands rounded to 10 mantissa bits. ``transform``: Winograd, FFT.
#: ``low-precision accumulation``: partial sums kept in the storage dtype.
Arithmetic = Literal["direct", "tf32", "transform", "low-precision accumulation"]

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
    """In this block questions about a CUDA device are about one of this compute capability, which need not be here."""
    token = _described.set(capability)
    try:
        yield
    finally:
        _described.reset(token)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of the NVIDIA GPU that a backend is asked about; None where nothing is known of it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    found = _described.get()
    if found is None and torch.cuda.is_initialized():
        found = torch.cuda.get_device_capability(device)
    return found


class Backend(ABC):
    """Contracts two tensors, for one pass of one problem.

    A backend never validates (that is done before it), never knows the word "transposed" unless it wants
    to (``problem.origin``), and is never called with an empty problem.
    """

    #: The name that choices, tables and commands use.
    name: str
    #: One line for people.
    summary: str = ""
    #: The passes that it implements.
    passes: tuple[Pass, ...] = PASSES
    #: The sets of several outputs that one `sweep` computes, each in the order of ``OUTPUTS``.
    sweeps: tuple[tuple[Output, ...], ...] = ()
    #: The same inputs always give the same bits.
    deterministic: bool = True
    #: May be called while a CUDA graph is captured.
    capture_safe: bool = True
    #: Operand layouts that it takes; the engine copies any other into the problem's memory format.
    layouts: tuple[Layout, ...] = ("contiguous", "channels_last")
    #: The conformance suite has passed; a user's kernel may be registered without it.
    verified: bool = True
    #: The rules take it wherever it is usable: a user registered it for that.
    preferred: bool = False

    @abstractmethod
    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        """Sentences that say why this backend cannot compute ``outputs``; empty means usable.

        They may be asked about a device that is not here, and must not touch one.
        """

    @abstractmethod
    def run(
        self,
        problem: ConvProblem,
        pass_: Pass,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Contract two slots.

        Shape:
            - forward: a = input, b = weight -> output
            - grad_input: a = grad_output, b = weight -> grad_input
            - grad_weight: a = grad_output, b = input -> grad_weight

        Args:
            bias: passed only where `fuses_bias` says so; added to the result along its channels.
            workspace: a uint8 tensor of `workspace` bytes, or None where that is 0.

        Returns:
            A dense tensor in ``problem.memory_format`` (where a size-1 dimension makes both formats true, either).
        """

    def sweep(
        self,
        problem: ConvProblem,
        outputs: tuple[Output, ...],
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute several outputs (one of ``sweeps``) at once, in the order of ``outputs``.

        The tensors are slots of the plain problem; ``grad_bias`` is the sum of the slot ``problem.bias_slot``
        over batch and space.
        """
        raise NotImplementedError(f"{self.name} has no sweep")

    def bind(self, problem: ConvProblem, pass_: Pass) -> Callable[..., Tensor]:
        """``run`` with the problem fixed: a function of (a, b, bias, workspace) that a plan keeps.

        Override it where a problem costs something to prepare: it is asked once a problem, not once a call.
        """
        return partial(self.run, problem, pass_)

    def bind_sweep(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Callable[..., tuple[Tensor, ...]]:
        """``sweep`` with the problem fixed: a function of (grad_output, input, weight, workspace)."""
        return partial(self.sweep, problem, outputs)

    def workspace(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
        """Bytes of scratch memory that one call needs: an upper bound that tests hold it to."""
        return 0

    def fuses_bias(self, problem: ConvProblem) -> bool:
        """Whether ``run`` adds the bias itself in ``problem.bias_pass``."""
        return False

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        """How it sums for this problem."""
        return "direct"

    def expected_speedup(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> float:
        """How many times faster than ATen it is expected to be, from measurements; the rules of choice take the
        usable backend with the largest value. ATen's own value is 1; 0 means "never unless asked for".
        """
        return 0.0
