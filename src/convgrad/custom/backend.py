"""A user's functions as a backend."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import Arithmetic, Backend, Kernel, Layout
from ..engine import thread
from ..errors import BackendError
from ..problem import PASSES, RESULT, ConvProblem, Output, Pass, passes_of
from . import arguments

__all__ = ["Accepts", "CustomBackend", "UserKernel"]

#: True, False, or the reason why not as a sentence.
Accepts = Callable[[ConvProblem], "bool | str"]


class UserKernel(NamedTuple):
    """A function for one pass, what it is called with, and which problems it accepts (None: every one)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    accepts: Accepts | None = None

    def reason_against(self, problem: ConvProblem, pass_: Pass) -> str:
        """Why it does not compute this problem; empty if it does."""
        try:
            arguments.values(self.args, problem, pass_)
        except LookupError as e:
            return str(e)
        try:
            answer = self.accepts is None or self.accepts(problem)
        except Exception as e:  # most often a look at a dimension that this problem does not have
            return f"its accepts raised {type(e).__name__}: {e}"
        if isinstance(answer, str) and answer:
            return answer
        return "" if answer else "its accepts says no"


class CustomBackend(Backend):
    """What `convgrad.register` makes: each function computes one pass of the problems that it accepts.

    Attributes:
        verified: whether it passed the conformance suite.
        note: what was checked, or why nothing was.
        version: changes with the functions' source.
    """

    def __init__(
        self,
        name: str,
        kernels: Mapping[Pass, UserKernel],
        *,
        layouts: tuple[Layout, ...],
        devices: tuple[str, ...] | None,
        dtypes: tuple[torch.dtype, ...],
        deterministic: bool,
        capture_safe: bool,
        arithmetic: Arithmetic,
        prefer: bool,
    ) -> None:
        self.name = name
        self.passes: tuple[Pass, ...] = tuple(p for p in PASSES if p in kernels)
        self.summary = f"registered by the user for {', '.join(self.passes)}"
        self.layouts: tuple[Layout, ...] = layouts
        self.deterministic, self.capture_safe, self.preferred = deterministic, capture_safe, prefer
        self.verified, self.note = False, "not verified"
        self.version = _version(f for k in kernels.values() for f in (k.function, k.accepts) if f is not None)
        self.devices, self._dtypes = devices, dtypes
        self._kernels = dict(kernels)
        self._arithmetic: Arithmetic = arithmetic

    def runs_on(self, device_type: str) -> bool:
        """Whether it was registered for this type of device."""
        return self.devices is None or device_type in self.devices

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        if "grad_bias" in outputs:
            return ["it computes one pass at a time and leaves the bias to the engine"]
        reasons = []
        if not self.runs_on(device.type):
            reasons.append(f"it was registered for {', '.join(self.devices or ())}, not for {device.type}")
        if problem.dtype not in self._dtypes:
            known, dtype = (", ".join(map(str, d)).replace("torch.", "") for d in (self._dtypes, (problem.dtype,)))
            reasons.append(f"it was registered for {known}, not for {dtype}")
        for pass_ in passes_of(outputs):
            kernel = self._kernels.get(pass_)
            reasons.append(f"it has no {pass_}" if kernel is None else kernel.reason_against(problem, pass_))
        return [*dict.fromkeys(filter(None, reasons))]

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return not problem.transposed and "forward" in self._kernels and "bias" in self._kernels["forward"].args

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return self._arithmetic

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        (pass_,) = passes_of(outputs)
        function, args, _ = self._kernels[pass_]
        names = arguments.tensors_of(pass_)
        tensors = [(i, names.index(arg)) for i, arg in enumerate(args) if isinstance(arg, str) and arg in names]
        values = arguments.values(args, problem, pass_)
        shape, dtype, memory_format = problem.shape_of(RESULT[pass_]), problem.dtype, problem.memory_format

        def kernel(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            # Nobody differentiates through the function: its derivatives are passes.
            operands = (
                a.detach() if a.requires_grad else a,
                b.detach() if b.requires_grad else b,
                bias if bias is None else bias.detach(),
            )
            call = values.copy()
            for i, which in tensors:
                call[i] = operands[which]
            outer, thread.in_backend = thread.in_backend, True  # PyTorch's convolutions in it are not taken over
            try:
                result = function(*call)
            except RecursionError:
                raise BackendError(
                    f"{pass_} of {self.name!r} ends in itself: convgrad, called in it, chose {self.name!r} again; "
                    'inside it name another one, with convgrad.use_backend("aten")'
                ) from None
            finally:
                thread.in_backend = outer
            if isinstance(result, (tuple, list)) and len(result) == 1:  # extensions return a vector of one tensor
                result = result[0]
            tensor = isinstance(result, Tensor)
            if not tensor or result.shape != shape or result.dtype != dtype or result.device != a.device:
                got = (
                    f"{tuple(result.shape)} {result.dtype} on {result.device}" if tensor else f"{type(result).__name__}"
                )
                raise BackendError(
                    f"{pass_} of {self.name!r} returned {got}, {problem} asks for {shape} {dtype} on {a.device}"
                )
            result = (result.detach() if result.requires_grad else result).contiguous(memory_format=memory_format)
            # The engine adds a bias in place, and autograd may keep the operands: the result has memory of its own.
            start = result.untyped_storage().data_ptr()
            shared = start == a.untyped_storage().data_ptr() or start == b.untyped_storage().data_ptr()
            return result.clone() if shared else result

        return kernel


def _version(functions: Iterable[Callable[..., Any]]) -> str:
    """A digest of the functions' source; without it, of their code, or of their names if they are no Python."""
    digest = hashlib.sha256()
    for function in map(inspect.unwrap, functions):
        try:
            digest.update(inspect.getsource(function).encode())
        except (OSError, TypeError):
            module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
            digest.update(f"{module} {name}".encode() + getattr(getattr(function, "__code__", None), "co_code", b""))
    return digest.hexdigest()[:16]
