"""A user's functions, or a class of the user's own, as a backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import resolving_lazy_views
from ..backends import BOTH_GRADIENTS, Arithmetic, Backend, Kernel, operand_format
from ..engine import SLOTS, thread
from ..errors import BackendError
from ..problem import OPERANDS, PASSES, ConvProblem, Output, Outputs, Pass, gradient_outputs, passes_of, sum_of_bias
from . import arguments
from .arguments import METHODS, Method

#: True, False, or the reason why not as a sentence.
Accepts = Callable[[ConvProblem], "bool | str"]

#: The reason against a problem where ``accepts`` gives none; the values that it read follow.
NO = "its accepts says no"

#: What a `CustomBackend` states and answers as the backend of the user's does.
_AS_ITS_OWN = (
    "deterministic", "capture_safe", "padding_modes", "states_workspace", "workspace", "fuses_bias", "arithmetic",
    "kernel_name",
)  # fmt: skip


def as_tuple(name: str, option: Any) -> tuple[Any, ...]:
    """Return an option that may be one value or a sequence of them as a tuple."""
    if isinstance(option, (str, torch.dtype, torch.device, ConvProblem)):
        return (option,)
    if not isinstance(option, Iterable):
        raise TypeError(f"{name} are one or a sequence of them, got {option!r}")
    return tuple(option)


class _Watched:
    """A problem that records the attributes that are read."""

    def __init__(self, problem: ConvProblem) -> None:
        self._problem, self._read = problem, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._problem, name)
        if not callable(value):
            self._read[name] = value
        return value


def without_values(reason: str) -> str:
    """Return a reason against a problem as it is for others too, to be counted."""
    return NO if reason.startswith(NO) else reason


class UserKernel(NamedTuple):
    """A function, its arguments, and which problems it accepts (None: every one)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    accepts: Accepts | None = None

    def reason_against(self, problem: ConvProblem) -> str:
        """Return why it does not compute this problem; empty if it does."""
        try:
            arguments.values(self.args, problem)
        except LookupError as e:
            return str(e)
        try:
            answer = self.accepts is None or self.accepts(problem)
        except Exception as e:  # most often a look at a dimension that this problem does not have
            return f"its accepts raised {type(e).__name__}: {e}"
        if answer is None:
            return "its accepts returned None, neither True nor False nor a reason"
        if answer or self.accepts is None:
            return answer if isinstance(answer, str) else ""
        watched: Any = _Watched(problem)
        with suppress(Exception):  # it needs a real problem
            if not self.accepts(watched) and watched._read:
                return f"{NO}: {', '.join(f'{name} is {value}' for name, value in watched._read.items())}"
        return NO


class Timing(NamedTuple):
    """The speed of a kernel relative to another backend, for some outputs of a problem."""

    problem: str
    outputs: tuple[str, ...]
    other: str
    speed: float
    low: float
    high: float

    def __str__(self) -> str:
        ratio = f"{self.speed:.2g}x [{self.low:.2g}, {self.high:.2g}]"
        return f"{'+'.join(self.outputs)} of {self.problem}: {ratio} as fast as {self.other}"


def in_words(timings: Sequence[Timing]) -> str:
    """Return one sentence for all timings: of each set of outputs the range of its speed."""
    parts = []
    for outputs in dict.fromkeys(t.outputs for t in timings):
        of = [t for t in timings if t.outputs == outputs]
        low, high = (f"{which(t.speed for t in of):.2g}x" for which in (min, max))
        others = " and ".join(dict.fromkeys(t.other for t in of))
        parts.append(f"{'+'.join(outputs)} {low if low == high else f'{low} to {high}'} as fast as {others}")
    return ", ".join(parts)


class Functions(Backend):
    """Functions that compute a pass each, or the gradients that a mask asks for; ``stated`` are its traits."""

    states_workspace = False

    def __init__(
        self,
        name: str,
        kernels: Mapping[Method, UserKernel],
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64),
        arithmetic: Arithmetic = "direct",
        **stated: Any,
    ) -> None:
        self.name, self._kernels, self._dtypes = name, dict(kernels), dtypes
        self._arithmetic: Arithmetic = arithmetic
        vars(self).update(stated)
        masked = ("grad_input", "grad_weight") if "backward" in kernels else ()  # a mask may ask for one of them
        self.passes = tuple(p for p in PASSES if p in kernels or p in masked)
        self.sweeps = BOTH_GRADIENTS[:2] if "backward" in kernels else ()  # those of a plain convolution
        self.summary = f"registered by the user for {', '.join(m for m in METHODS if m in kernels)}"
        #: What they consist of, for a digest: whatever their name is.
        self.parts = (self._kernels, dtypes, arithmetic, sorted(stated.items()))

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        if "grad_bias" in outputs and problem.transposed:
            return ["it leaves this gradient of the bias to the engine"]
        reasons: list[str] = []
        if problem.dtype not in self._dtypes:
            known = ", ".join(map(str, self._dtypes))
            reasons.append(f"it was registered for {known}, not for {problem.dtype}".replace("torch.", ""))
        kernel = self._kernels.get(method := self.method(outputs))
        reasons.append(f"it has no {method}" if kernel is None else kernel.reason_against(problem))
        return [*filter(None, reasons)]

    def method(self, outputs: Outputs) -> Method:
        """Return the function that computes them: one for a pass alone goes before that with a mask."""
        passes = passes_of(outputs)
        alone = passes[0] if len(passes) == 1 else "backward"
        return alone if alone in self._kernels or alone not in self.passes else "backward"

    def unsaid(self, output: Output) -> list[str]:
        """Return advice on options that were not given for the function that computes an output."""
        method = self.method((output,))
        kernel, usual = self._kernels[method], arguments.USUAL[method]
        return [
            *["a kernel for some problems only says which: accepts=lambda p: p.ndim == 2"] * (kernel.accepts is None),
            *[f"it is called with ({', '.join(usual)}) unless args= says otherwise"] * (kernel.args == usual),
        ]

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return not problem.transposed and "forward" in self._kernels and "bias" in self._kernels["forward"].args

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return self._arithmetic

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        method, alone = self.method(outputs), len(outputs) == 1
        function, args, _ = self._kernels[method]
        read = OPERANDS[passes_of(outputs)[0]] if alone else SLOTS
        # The tensor that only the other gradient reads has no values.
        made = {str(t): problem.shape_of(t) for t in SLOTS if method == "backward" and t not in read}
        made |= {"out": problem.result_shape(outputs[0])} if "out" in args else {}
        given = (*read, *["bias"] * (method == "forward"))
        tensors, values = (*given, *made), arguments.values(args, problem, outputs)
        where = [tensors.index(a) if isinstance(a, str) and a in tensors else None for a in args]
        layout = operand_format(self, problem) or problem.memory_format
        which = [gradient_outputs(False).index(output) for output in outputs if method == "backward"]

        def kernel(*operands: Any) -> Any:  # the last one may be a workspace
            here: list[Any] = [*operands, None][: len(given)]
            like = {"dtype": problem.dtype, "device": here[0].device, "memory_format": layout}
            here += [torch.empty(shape, **like) for shape in made.values()]
            result = function(*(v if i is None else here[i] for i, v in zip(where, values, strict=True)))
            several = isinstance(result, (tuple, list))
            if method != "backward":
                if several and len(result) == 1:  # extensions return a vector of one tensor
                    return result[0]
                return here[-1] if "out" in made and result is None else result
            if not several or len(result) not in (2, 3):
                what = f"{len(result)} results" if several else type(result).__name__
                raise BackendError(
                    f"backward of {self.name!r} returned {what}, not (grad_input, grad_weight) or "
                    "(grad_input, grad_weight, grad_bias)"
                )
            if "grad_bias" in outputs and (len(result) == 2 or result[2] is None):
                result = (*result[:2], sum_of_bias(here[0]))
            return result[which[0]] if alone else tuple(result[i] for i in which)

        return kernel


class CustomBackend(Backend):
    """`Functions`, or a `Backend` of the user's own, as `convgrad.register` adds it; it records how it was checked."""

    #: How fast it was when it was registered, on a few of its problems.
    timings: tuple[Timing, ...] = ()

    def __init__(
        self, name: str, own: Backend, devices: tuple[str, ...] | None = None, prefer: bool | str = False,
        named: Sequence[ConvProblem] = (),
    ) -> None:  # fmt: skip
        self.name, self.own, self.devices, self.named, self.prefer = name, own, devices, named, prefer
        #: Whether it passed the conformance suite, and what was checked, or why nothing was.
        self.verified, self.note = False, "not verified"
        #: What it consists of, for a digest.
        self.parts = (own.parts if isinstance(own, Functions) else own, devices)
        self.summary = own.summary or f"registered by the user: class {type(own).__name__}"
        self.passes, self.layouts = as_tuple("passes", own.passes), as_tuple("layouts", own.layouts)
        self.sweeps = tuple(as_tuple("sweeps", sweep) for sweep in own.sweeps)
        for stated in _AS_ITS_OWN:
            setattr(self, stated, getattr(own, stated))

    def remark(self, outputs: Outputs) -> str:
        of = [t for t in self.timings if t.outputs == passes_of(outputs)]
        return ", ".join(filter(None, ["" if self.verified else "not verified", in_words(of)]))

    def runs_on(self, device_type: str) -> bool:
        """Whether it was registered for this type of device."""
        return self.devices is None or device_type in self.devices

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons: list[str] = []
        if not self.runs_on(device.type):
            reasons.append(f"it was registered for {', '.join(self.devices or ())}, not for {device.type}")
        try:
            reasons += self.own.reasons_against(problem, outputs, device)
        except Exception as e:  # as of an `accepts`: most often a look at a dimension that this problem does not have
            reasons.append(f"its reasons_against raised {type(e).__name__}: {e}")
        return [*dict.fromkeys(reasons)]

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        kernel = self.own.bind(problem, outputs)
        what = self.own.method(outputs) if isinstance(self.own, Functions) else "+".join(outputs)

        def stated(*operands: Tensor | None) -> Any:
            # A kernel is never differentiated: its derivatives are passes.
            args = [t.detach() if t is not None and t.requires_grad else t for t in operands]
            outer, thread.in_backend = thread.in_backend, True  # `takeover` leaves PyTorch's convolutions in it alone
            try:
                with resolving_lazy_views():
                    results = kernel(*args)
            except RecursionError:
                if not outer:  # the function's own
                    raise
                raise BackendError(
                    f"{what} of {self.name!r} ends in itself: convgrad, called in it, chose {self.name!r} again; "
                    'inside it name another one, with convgrad.use_backend("aten")'
                ) from None
            except Exception as error:
                if sys.version_info >= (3, 11):
                    error.add_note(f"in {what} of {self.name!r}, called for {problem}")
                raise
            finally:
                thread.in_backend = outer
            given = [t for t in args if t is not None]  # the workspace too, which the next call overwrites
            if len(outputs) == 1:
                return self._as_stated(results, problem, outputs[0], what, given)
            if not isinstance(results, (tuple, list)) or len(results) != len(outputs):
                got = type(results).__name__
                raise BackendError(f"{what} of {self.name!r} returned {got}, {len(outputs)} tensors were expected")
            return tuple(self._as_stated(r, problem, o, what, given) for r, o in zip(results, outputs, strict=True))

        return stated

    def _as_stated(self, result: Any, p: ConvProblem, output: Output, what: str, given: Sequence[Tensor]) -> Tensor:
        """Return a result in the layout and the memory that the engine expects."""
        device = given[0].device
        shape = p.result_shape(output)
        tensor = isinstance(result, Tensor)
        if not tensor or result.shape != shape or result.dtype != p.dtype or result.device != device:
            got = f"{tuple(result.shape)} {result.dtype} on {result.device}" if tensor else type(result).__name__
            which = f"{what} of {self.name!r}" if output == what else f"{output} by {what} of {self.name!r}"
            raise BackendError(f"{which} returned {got}, {shape} {p.dtype} on {device} was expected")
        layout = torch.contiguous_format if output == "grad_bias" else p.memory_format
        result = (result.detach() if result.requires_grad else result).contiguous(memory_format=layout)
        # The engine adds a bias in place, and autograd may keep the operands: the result has memory of its own.
        # Of a function in inference mode it is copied too, for autograd takes no tensors from there.
        start = result.untyped_storage().data_ptr()
        if any(start == t.untyped_storage().data_ptr() for t in given) or (
            result.is_inference() and not torch.is_inference_mode_enabled()
        ):
            return result.clone()
        return result
