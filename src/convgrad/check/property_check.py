"""One thing to check: an output of a problem by a backend, called as the engine calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from ..backends import Arithmetic, Backend, Kernel, PaddedCopy, wide_dtype
from ..engine import SLOTS, prepare
from ..errors import BackendError
from ..problem import OPERANDS, PASSES, ConvProblem, Output, Outputs, Pass, Slot, passes_of
from .bounds import error_bound, reduction_length, unit_roundoff
from .operands import (
    Operands,
    exact_limit,
    index_of,
    integer_operands,
    magnitude,
    real_operands,
    reference,
    structural,
    surely_exact,
)

_T = TypeVar("_T")

#: Bytes that may be taken for odds and ends, such as a bias in another dtype.
_SLACK = 4096


class Failed(Exception):  # noqa: N818 (an outcome)
    """The backend is wrong; how far off it is and how far it may be."""

    def __init__(self, message: str, worst: float = 1.0, bound: float = 0.0) -> None:
        super().__init__(message)
        self.worst, self.bound = worst, bound


class Differs(Failed):
    """A kernel of PyTorch does not do what other kernels are held to, and PyTorch does not promise it."""


class Skipped(Exception):  # noqa: N818 (an outcome)
    """There is nothing to check, for this reason."""


def described(error: BaseException) -> str:
    """Return an error of a backend in words; a refusal of what a kernel returned is its own message."""
    return str(error) if isinstance(error, BackendError) else f"it raised {type(error).__name__}: {error}"


def calls_with(backend: Backend, output: Output) -> list[Outputs]:
    """Return the calls of a backend that yield an output: of that alone, and sweeps."""
    alone: list[Outputs] = [(output,)] if output in backend.passes else []
    return [*alone, *(sweep for sweep in backend.sweeps if output in sweep)]


@dataclass
class PropertyCheck:
    """An output of a problem by a backend on a device: what every property is checked on.

    ``threads``: how many PyTorch has while the kernel runs in `parallel`; 0: as many as now.
    ``calling``: called before each call of the backend, in any thread.
    ``given``: shapes and strides of the last call's operands, in words.
    """

    backend: Backend
    problem: ConvProblem
    output: Output
    device: torch.device
    seed: int = 0
    repeats: int = 20
    threads: int = 0
    calling: Callable[[], None] = lambda: None
    given: str = field(default="", init=False)
    _made: dict[object, Any] = field(default_factory=dict, init=False)

    @property
    def pass_(self) -> Pass:
        """The output as a pass.

        Raises:
            Skipped: it is the gradient of a bias.
        """
        if self.output == "grad_bias":
            raise Skipped("computed in sweeps only")
        return self.output

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of the output; a bias gradient has no products to round or transform, only a sum."""
        if self.output != "grad_bias":
            return self.backend.arithmetic(self.problem, self.output, self.device)
        low = "low-precision accumulation"
        return low if self.backend.arithmetic(self.problem, "grad_weight", self.device) == low else "direct"

    def reasons_against(self) -> list[str]:
        """Return why the backend computes this output neither alone nor in a sweep; empty if it does."""
        if self.problem.empty:
            return ["backends are never given an empty problem"]
        if not self.calls:
            alone = self.output in self.backend.passes
            against = self.backend.against(self.problem, (self.output,), self.device) if alone else []
            return against or [f"it does not compute {self.output} of this problem"]
        try:  # operands that cannot even be allocated are no failure of a backend
            for slot in get_args(Slot):
                torch.empty(self.problem.shape_of(slot), dtype=self.problem.dtype, device=self.device)
        except (RuntimeError, MemoryError):
            return [f"there is no memory for {self.problem.least_bytes:,} bytes of operands"]
        return []

    # ---- operands ------------------------------------------------------------------------------

    def integers(self, *passes: Pass, other: bool = False) -> Operands:
        """Return `integer_operands` for a `run`, or for all of ``passes``; ``other``: with other numbers."""
        passes = passes or self.passes(self._first)
        return self._cached((passes, other), partial(integer_operands, self.problem, passes, self.seed + other))

    def reals(self, *passes: Pass) -> Operands:
        """Return `real_operands` for a `run`, or for all of ``passes``."""
        passes = passes or self.passes(self._first)
        return self._cached(("reals", passes), partial(real_operands, self.problem, passes, self.seed))

    def _cached(self, key: object, make: Callable[[], _T]) -> _T:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def prepared(self, operands: Operands, slots: Sequence[Slot]) -> list[Tensor]:
        """Return the operands as the engine passes them to the backend."""
        tensors = [prepare(self.backend, self.problem, self.place(operands[s])) for s in slots]
        given = (f"{s} {tuple(t.shape)} with strides {t.stride()}" for s, t in zip(slots, tensors, strict=True))
        self.given = ", ".join(given)
        self.calling()
        return tensors

    # ---- calling the backend -------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[Outputs]:
        """The outputs of each call that computes the output, alone and in sweeps."""
        calls = calls_with(self.backend, self.output)
        return [c for c in calls if not self.backend.against(self.problem, c, self.device)]

    @property
    def _first(self) -> Outputs:
        """The outputs of the call that `run` makes: the output alone, or a sweep if nothing else computes it."""
        return (self.pass_,) if (self.pass_,) in self.calls else self.calls[0]

    def passes(self, outputs: Outputs) -> tuple[Pass, ...]:
        """Return the passes whose operands one call for these outputs reads."""
        return PASSES if len(outputs) > 1 else passes_of(outputs)

    def kernel(self, outputs: Outputs) -> Kernel:
        """Return the function that a plan would keep and call."""
        return self._cached(outputs, lambda: self.backend.bind(self.problem, outputs))

    def arguments(self, outputs: Outputs, operands: Operands, bias: Tensor | None = None) -> list[Tensor | None]:
        """Return the arguments of the `kernel`; the workspace is full of ones, NaN to every floating-point dtype."""
        several = len(outputs) > 1
        tensors = self.prepared(operands, SLOTS if several else OPERANDS[self.passes(outputs)[0]])
        size = self.backend.workspace(self.problem, outputs)
        scratch = None
        if size:  # of `empty`, so that it is between `Poison`'s margins
            scratch = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(255)
        return [*tensors, *([] if several else [bias]), scratch]

    def run(self, operands: Operands, bias: Tensor | None = None) -> Tensor:
        """Return the output, computed alone, or in a sweep if nothing else computes it."""
        return self.call(self._first, operands, bias)

    def call(self, outputs: Outputs, operands: Operands, bias: Tensor | None = None) -> Tensor:
        """Return the output from one call of the backend for these outputs.

        Raises:
            Failed: a result of another shape, dtype, device or layout than the problem's.
        """
        results = self.kernel(outputs)(*self.arguments(outputs, operands, bias))
        if len(outputs) > 1:
            if len(results) != len(outputs):
                raise Failed(f"the sweep {outputs} returned {len(results)} tensors")
            results = results[outputs.index(self.output)]
        result, p = results, self.problem
        for what, got, expected in (
            ("shape", tuple(result.shape), p.result_shape(self.output)),
            ("dtype", result.dtype, p.dtype),
            ("device", result.device.type, self.device.type),
        ):
            if got != expected:
                raise Failed(f"the result has {what} {got}, the problem says {expected}")
        # A backend of layout "any" passes its operands on to ATen, whose layout follows from them.
        memory_format = torch.contiguous_format if self.output == "grad_bias" else p.memory_format
        if "any" not in self.backend.layouts and not result.is_contiguous(memory_format=memory_format):
            raise Failed(f"the result has strides {result.stride()}, the problem says {memory_format}")
        return result

    @contextlib.contextmanager
    def parallel(self) -> Iterator[None]:
        """In this block PyTorch has ``threads`` threads."""
        before = torch.get_num_threads()
        if self.threads in (0, before):  # setting it costs threads that end and begin
            yield
            return
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def variants(self) -> list[tuple[str, tuple[Pass, ...], Callable[[Operands], Tensor]]]:
        """Return each call that computes the output: in words, the passes whose operands it reads, and the call."""
        return [
            (f"in the sweep {outputs}" if len(outputs) > 1 else "", self.passes(outputs), partial(self.call, outputs))
            for outputs in self.calls
        ]

    # ---- comparing -----------------------------------------------------------------------------

    def compare(
        self, result: Tensor, operands: Operands, *, integers: bool = True, bias: Tensor | None = None, where: str = ""
    ) -> tuple[float, float]:
        """Hold a result to the reference: no differing element, or the bound of the declared arithmetic.

        Returns:
            The worst error, in units of what is allowed there, and 1; for integers (0, 0).

        Raises:
            Failed: it is wrong.
            Skipped: the output is mostly zero, which proves nothing.
        """
        where, dtype, arithmetic = f" ({where})" if where else "", self.problem.dtype, self.arithmetic
        expected, length = self._expected(operands), self._length(operands)
        got = result.detach().cpu().to(expected.dtype)
        added = None if bias is None else bias.to(expected.dtype).view(-1, *(1,) * self.problem.ndim)
        if added is not None:
            expected, length = expected + added, length + 1
        if integers and arithmetic != "transform" and self._is_exact(operands, added):
            self._equal(got, expected, where)
            return 0.0, 0.0
        size = self._expected(operands, absolute=True) + (0 if added is None else added.abs())
        allowed = error_bound(arithmetic, dtype, length, expected, size)
        if added is not None and (dtype.is_floating_point or dtype.is_complex):  # the sum may be rounded to it before
            allowed = allowed + unit_roundoff(dtype) * ((expected - added).abs() + allowed)
        error = (got - expected).abs()
        ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=float("inf"))
        if not float(ratio.amax()) <= 1:
            at = tuple(index_of(int(ratio.argmax()), ratio.shape))
            failed = self.unpromised if arithmetic == "low-precision accumulation" else Failed
            message = f"element {at} is {got[at].item():.9g}, exact is {expected[at].item():.9g}{where}"
            raise failed(message, float(error[at]), float(allowed[at]))
        return float(ratio.amax()), 1.0

    def unpromised(self, message: str, worst: float, bound: float = 0.0) -> Failed:
        """Return the error for what PyTorch does on some processors only: a difference if the kernel is PyTorch's."""
        return (Differs if self.backend.from_pytorch else Failed)(message, worst, bound)

    def _expected(self, operands: Operands, *, absolute: bool = False) -> Tensor:
        """Return the exact result, or that of the absolute values."""

        def make() -> tuple[Operands, Tensor]:
            if self.output == "grad_bias":
                terms = operands[self.problem.bias_slot].cpu().to(wide_dtype(self.problem.dtype))
                return operands, (terms.abs() if absolute else terms).sum((0, *range(2, terms.dim())))
            return operands, (magnitude if absolute else reference)(self.problem, self.output, operands)

        # The operands are cached too: their id is theirs alone as long as they exist.
        return self._cached((id(operands), absolute), make)[1]

    def _is_exact(self, operands: Operands, added: Tensor | None) -> bool:
        """Whether every partial sum is exact, that of the bias included."""
        if added is None and self.output != "grad_bias" and surely_exact(self.problem, self.output, operands):
            return True
        bias = 0.0 if added is None else float(added.abs().amax())
        return float(self._expected(operands, absolute=True).amax()) + bias <= exact_limit(self.problem.dtype)

    def _length(self, operands: Operands) -> int:
        """Return how many products, or terms of the bias gradient, an element sums."""
        p = self.problem
        if self.output == "grad_bias":
            return operands[p.bias_slot].numel() // max(1, p.shape_of(p.bias_slot)[1])
        return reduction_length(p, self.output)

    def _equal(self, got: Tensor, expected: Tensor, where: str) -> None:
        wrong = got != expected
        if count := int(wrong.sum()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise Failed(
                f"{count} of {wrong.numel()} elements differ, the first at {at}: "
                f"{got[at].item()} instead of {expected[at].item()}{where}",
                count,
            )
        read = torch.ones_like(wrong) if self.output == "grad_bias" else structural(self.problem, self.output)
        if int((expected != 0)[read].sum()) * 2 < int(read.sum()):
            raise Skipped("the output is mostly zero, which proves nothing")

    def allowed_bytes(self, outputs: Outputs) -> int:
        """Return what one call may allocate beside its results and the declared workspace.

        A backend that declares none may hold its operands and its result three times more, padded, in the widest
        dtype: a cast, a padded copy and a product, but no matrix of columns.
        """
        p = self.problem
        if self.backend.workspace(p, outputs) and not isinstance(self.backend, PaddedCopy):
            return _SLACK
        padded = [max(n, n + low + high) for n, (low, high) in zip(p.input_size, p.padding, strict=True)]
        elements = p.batch * p.in_channels * prod(padded) + prod(p.weight_shape) + prod(p.output_shape)
        return _SLACK + 3 * (16 if p.dtype.is_complex else 8) * elements
