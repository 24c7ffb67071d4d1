"""A user's functions as a backend."""

from __future__ import annotations

import hashlib
import inspect
import marshal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Arithmetic, Backend, Kernel, Layout
from ..engine.events import thread
from ..errors import BackendError
from ..problem import PASSES, RESULT, ConvProblem, Output, Pass
from .recipe import Recipe

__all__ = ["Accepts", "CustomBackend"]

#: True, False, or the reason why not as a sentence.
Accepts = Callable[[ConvProblem], "bool | str"]


class CustomBackend(Backend):
    """What `convgrad.register` makes: each function computes one pass of the problems that it accepts.

    Attributes:
        verified: whether it passed the conformance suite.
        note: what was checked, or why nothing was.
        version: changes with the functions' source, so that remembered choices of an older one don't count.
    """

    def __init__(
        self,
        name: str,
        functions: Mapping[Pass, tuple[Callable[..., Any], Recipe]],
        *,
        accepts: Mapping[Pass, Accepts | None],
        layouts: tuple[Layout, ...],
        devices: tuple[str, ...] | None,
        dtypes: tuple[torch.dtype, ...],
        deterministic: bool,
        capture_safe: bool,
        arithmetic: Arithmetic,
        prefer: bool,
    ) -> None:
        self.name = name
        self.summary = f"registered by the user for {', '.join(functions)}"
        self.passes: tuple[Pass, ...] = tuple(p for p in PASSES if p in functions)
        self.layouts: tuple[Layout, ...] = layouts
        self.deterministic, self.capture_safe, self.preferred = deterministic, capture_safe, prefer
        self.verified, self.note = False, "not verified"
        self.version = _version([*(f for f, _ in functions.values()), *(a for a in accepts.values() if a is not None)])
        self._functions, self._accepts = dict(functions), dict(accepts)
        self.devices, self._dtypes = devices, dtypes
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
            known = ", ".join(str(d).removeprefix("torch.") for d in self._dtypes)
            reasons.append(f"it was registered for {known}, not for {str(problem.dtype).removeprefix('torch.')}")
        for output in outputs:
            pass_: Pass = output  # pyright: ignore[reportAssignmentType]
            if pass_ not in self._functions:
                reasons.append(f"it has no {pass_}")
                continue
            reasons += self._functions[pass_][1].reasons_against(problem)
            refused = self._refused(pass_, problem)
            reasons += [refused] if refused and refused not in reasons else []
        return reasons

    def _refused(self, pass_: Pass, problem: ConvProblem) -> str | None:
        accepts = self._accepts.get(pass_)
        if accepts is None:
            return None
        try:
            answer = accepts(problem)
        except Exception as e:  # a look at a dimension that this problem does not have, most often
            return f"its accepts raised {type(e).__name__}: {e}"
        if isinstance(answer, str) and answer:
            return answer
        return None if answer else "its accepts says no"

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return not problem.transposed and "forward" in self._functions and self._functions["forward"][1].takes_bias

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return self._arithmetic

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        function, recipe = self._functions[pass_]
        call = recipe.bind(function, problem)
        shape, dtype, memory_format = problem.shape_of(RESULT[pass_]), problem.dtype, problem.memory_format

        def contract(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            # Nobody differentiates through the function: its derivatives are passes.
            a, b = a.detach() if a.requires_grad else a, b.detach() if b.requires_grad else b
            outer, thread.inside = thread.inside, True  # a convolution of PyTorch's in it is its own affair
            try:
                with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                    result = call(a, b, None if bias is None else bias.detach())
            except RecursionError:
                raise BackendError(
                    f"{pass_} of {self.name!r} ends in itself: convgrad, called in it, chose {self.name!r} again; "
                    'inside it ask for another one, with convgrad.use_backend("aten")'
                ) from None
            finally:
                thread.inside = outer
            if isinstance(result, (tuple, list)) and len(result) == 1:  # extensions return a vector of one tensor
                result = result[0]
            if not isinstance(result, Tensor):
                raise BackendError(f"{pass_} of {self.name!r} returned a {type(result).__name__}, not a tensor")
            if result.shape != shape or result.dtype != dtype or result.device != a.device:
                raise BackendError(
                    f"{pass_} of {self.name!r} returned {tuple(result.shape)} {result.dtype} on {result.device}, "
                    f"{problem} asks for {shape} {dtype} on {a.device}"
                )
            result = (result.detach() if result.requires_grad else result).contiguous(memory_format=memory_format)
            # The engine adds a bias in place, and autograd may keep the operands: the result has memory of its own.
            start = result.untyped_storage().data_ptr()
            mine = start != a.untyped_storage().data_ptr() and start != b.untyped_storage().data_ptr()
            return result if mine else result.clone()

        return contract


def _version(functions: list[Callable[..., Any]]) -> str:
    """A digest of the functions' source; without it (typed in, or an extension's) of their code, or names and files."""
    digest = hashlib.sha256()
    for function in functions:
        try:
            digest.update(inspect.getsource(inspect.unwrap(function)).encode())
        except (OSError, TypeError):
            code = getattr(inspect.unwrap(function), "__code__", None)
            if code is not None:
                digest.update(marshal.dumps(code))
                continue
            module = inspect.getmodule(function)
            digest.update(f"{getattr(module, '__file__', '')} {getattr(function, '__name__', function)!r}".encode())
    return digest.hexdigest()[:16]
