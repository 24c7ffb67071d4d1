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
    integer_operands,
    magnitude,
    real_operands,
    reference,
    structural,
    surely_exact,
)
from .samples import elements_at, index_of

_T = TypeVar("_T")

#: Bytes that may be taken for odds and ends, such as a bias in another dtype.
_SLACK = 4096


class Failed(Exception):  # noqa: N818 (an outcome)
    """The backend is wrong; how far off it is and how far it may be."""

    def __init__(self, message: str, worst: float = 1.0, bound: float = 0.0) -> None:
        super().__init__(message)
        self.worst, self.bound = worst, bound


class Differs(Failed):
    """One of PyTorch's kernels does not do what ours are held to, and PyTorch does not promise it."""


class Skipped(Exception):  # noqa: N818 (an outcome)
    """There is nothing to check, for this reason."""


def described(error: BaseException) -> str:
    """What a backend raised; its own refusal of what a kernel returned says all that there is to say."""
    return str(error) if isinstance(error, BackendError) else f"it raised {type(error).__name__}: {error}"


def calls_with(backend: Backend, output: Output) -> list[Outputs]:
    """The calls of a backend that yield an output: of that alone, and sweeps."""
    alone: list[Outputs] = [(output,)] if output in backend.passes else []
    return [*alone, *(sweep for sweep in backend.sweeps if output in sweep)]


@dataclass
class PropertyCheck:
    """An output of a problem by a backend on a device: what every property is checked on.

    ``threads``: how many PyTorch has while the kernel runs in `parallel`; 0: as many as now.
    ``calling``: called before each call of the backend, in any thread.
    ``given``: shapes and strides of what the kernel was called with last, in words.
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

    # ---- what it is ----------------------------------------------------------------------------

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
        """How the output is summed; a bias gradient has no products to round or transform, only a sum."""
        if self.output != "grad_bias":
            return self.backend.arithmetic(self.problem, self.output, self.device)
        low = "low-precision accumulation"
        return low if self.backend.arithmetic(self.problem, "grad_weight", self.device) == low else "direct"

    def reasons_against(self) -> list[str]:
        """Why the backend computes this output neither alone nor in a sweep; empty if it does."""
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

    @cached_property
    def calls(self) -> list[Outputs]:
        """What the backend computes in one call with the output among it: the output alone, and sweeps."""
        calls = calls_with(self.backend, self.output)
        return [c for c in calls if not self.backend.against(self.problem, c, self.device)]

    @property
    def _first(self) -> Outputs:
        """How `run` calls the backend: for the output alone, or in a sweep where that is the only way."""
        return (self.pass_,) if (self.pass_,) in self.calls else self.calls[0]

    # ---- what it is given ----------------------------------------------------------------------

    def integers(self, *passes: Pass, other: bool = False, certain: bool = True) -> Operands:
        """`integer_operands` for a `run`, or for all of ``passes``: the same at every call.

        Args:
            other: with other numbers.
            certain: False for a problem that is too large to look at every sum.
        """
        passes = passes or self.passes(self._first)
        make = partial(integer_operands, self.problem, passes, self.seed + other, certain=certain)
        return self._kept((passes, other, certain), make)

    def reals(self, *passes: Pass) -> Operands:
        """`real_operands` for a `run`, or for all of ``passes``: the same at every call."""
        passes = passes or self.passes(self._first)
        return self._kept(("reals", passes), partial(real_operands, self.problem, passes, self.seed))

    def _kept(self, key: object, make: Callable[[], _T]) -> _T:
        """What is made once and used by several properties."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # ---- calling the backend -------------------------------------------------------------------

    def kernel(self, outputs: Outputs) -> Kernel:
        """The function that a plan would keep, and call again and again."""
        return self._kept(outputs, lambda: self.backend.bind(self.problem, outputs))

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def scratch(self, outputs: Outputs) -> Tensor | None:
        """A workspace of the declared size, full of ones: NaN to every floating-point dtype."""
        size = self.backend.workspace(self.problem, outputs)
        if not size:
            return None
        return torch.empty(size, dtype=torch.uint8, device=self.device).fill_(255)  # empty: between `Poison`'s margins

    def prepared(self, operands: Operands, slots: Sequence[Slot]) -> list[Tensor]:
        tensors = [prepare(self.backend, self.problem, self.place(operands[s])) for s in slots]
        given = (f"{s} {tuple(t.shape)} with strides {t.stride()}" for s, t in zip(slots, tensors, strict=True))
        self.given = ", ".join(given)
        self.calling()
        return tensors

    def passes(self, outputs: Outputs) -> tuple[Pass, ...]:
        """The passes whose operands one call for these outputs reads."""
        return PASSES if len(outputs) > 1 else passes_of(outputs)

    def arguments(self, outputs: Outputs, operands: Operands, bias: Tensor | None = None) -> list[Tensor | None]:
        """What the `kernel` of one call for these outputs is called with."""
        swept = len(outputs) > 1
        tensors = self.prepared(operands, SLOTS if swept else OPERANDS[self.passes(outputs)[0]])
        return [*tensors, *([] if swept else [bias]), self.scratch(outputs)]

    def run(self, operands: Operands, bias: Tensor | None = None) -> Tensor:
        """The output, computed alone, or in a sweep where that is the only way."""
        return self.call(self._first, operands, bias)

    def call(self, outputs: Outputs, operands: Operands, bias: Tensor | None = None) -> Tensor:
        """The output, out of one call of the backend for these outputs.

        Raises:
            Failed: a result of another shape, dtype, device or layout than the problem's.
        """
        results = self.kernel(outputs)(*self.arguments(outputs, operands, bias))
        if len(outputs) == 1:
            return self._as_stated(results)
        if len(results) != len(outputs):
            raise Failed(f"the sweep {outputs} returned {len(results)} tensors")
        return self._as_stated(results[outputs.index(self.output)])

    def _as_stated(self, result: Tensor) -> Tensor:
        p = self.problem
        for what, got, expected in (
            ("shape", tuple(result.shape), p.result_shape(self.output)),
            ("dtype", result.dtype, p.dtype),
            ("device", result.device.type, self.device.type),
        ):
            if got != expected:
                raise Failed(f"the result has {what} {got}, the problem says {expected}")
        if "any" in self.backend.layouts:
            # It passes its operands on to ATen, whose layout follows from them. So does the engine's for a problem, by
            # the same rule; but here problems come with a layout of their own.
            return result
        memory_format = torch.contiguous_format if self.output == "grad_bias" else p.memory_format
        if not result.is_contiguous(memory_format=memory_format):
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
        """How the backend computes the output, alone and in sweeps: in words, the passes whose operands it needs, and
        the call.
        """
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
        where = f" ({where})" if where else ""
        expected, length = self._expected(operands), self._length(operands)
        got = result.detach().cpu().to(expected.dtype)
        arithmetic = self.arithmetic
        added = None if bias is None else bias.to(expected.dtype).view(-1, *(1,) * self.problem.ndim)
        if added is not None:
            expected, length = expected + added, length + 1
        if integers and arithmetic != "transform" and self._is_exact(operands, added):
            self._equal(got, expected, where)
            return 0.0, 0.0
        size = self._expected(operands, absolute=True) + (0 if added is None else added.abs())
        dtype = self.problem.dtype
        allowed = error_bound(arithmetic, dtype, length, expected, size)
        if added is not None and (dtype.is_floating_point or dtype.is_complex):  # the sum may be rounded to it before
            allowed = allowed + unit_roundoff(dtype) * ((expected - added).abs() + allowed)
        return self._within(allowed, got, expected, where)

    def compare_at(self, places: Tensor, result: Tensor, operands: Operands, where: str = "") -> tuple[float, float]:
        """Hold these elements of a pass's result to what they are by themselves: integers, exact where the dtype is.

        Shape:
            - places: [samples]

        Returns:
            The worst error, in units of what is allowed there, and 1.

        Raises:
            Failed: one is wrong.
        """
        p, arithmetic, pass_ = self.problem, self.arithmetic, self.output
        assert pass_ != "grad_bias"
        expected, size = elements_at(p, pass_, operands, places)
        got = result.detach().cpu().flatten()[places].to(expected.dtype)
        allowed = error_bound(arithmetic, p.dtype, self._length(operands), expected, size)
        if arithmetic != "transform":
            allowed[size <= exact_limit(p.dtype)] = 0
        return self._within(allowed, got, expected, f" ({where})" if where else "", places)

    def _within(
        self, allowed: Tensor, got: Tensor, expected: Tensor, where: str, places: Tensor | None = None
    ) -> tuple[float, float]:
        error = (got - expected).abs()
        ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=float("inf"))
        worst = float(ratio.amax())
        if not worst <= 1:
            worst_at = int(ratio.argmax())
            at = tuple(index_of(worst_at, ratio.shape))
            shape = self.problem.result_shape(self.output)
            shown = at if places is None else tuple(index_of(int(places[worst_at]), shape))
            failed = self.unpromised if self.arithmetic == "low-precision accumulation" else Failed
            raise failed(
                f"element {shown} is {got[at].item():.9g}, exact is {expected[at].item():.9g}{where}",
                float(error[at]),
                float(allowed[at]),
            )
        return worst, 1.0

    def unpromised(self, message: str, worst: float, bound: float = 0.0) -> Failed:
        """The error for what PyTorch does on some processors only: a difference if the kernel is PyTorch's."""
        return (Differs if self.backend.from_pytorch else Failed)(message, worst, bound)

    def _expected(self, operands: Operands, *, absolute: bool = False) -> Tensor:
        """The exact result, or the same of absolute values."""

        def make() -> tuple[Operands, Tensor]:
            if self.output == "grad_bias":
                terms = operands[self.problem.bias_slot].cpu().to(wide_dtype(self.problem.dtype))
                return operands, (terms.abs() if absolute else terms).sum((0, *range(2, terms.dim())))
            return operands, (magnitude if absolute else reference)(self.problem, self.output, operands)

        # The operands are kept too: their id belongs to them as long as they live.
        return self._kept((id(operands), absolute), make)[1]

    def _is_exact(self, operands: Operands, added: Tensor | None) -> bool:
        """Whether every partial sum is exact, that of the bias included."""
        if added is None and self.output != "grad_bias" and surely_exact(self.problem, self.output, operands):
            return True
        bias = 0.0 if added is None else float(added.abs().amax())
        return float(self._expected(operands, absolute=True).amax()) + bias <= exact_limit(self.problem.dtype)

    def _length(self, operands: Operands) -> int:
        """How many products, or terms of the bias gradient, an element sums."""
        p = self.problem
        if self.output == "grad_bias":
            return operands[p.bias_slot].numel() // max(1, p.shape_of(p.bias_slot)[1])
        return reduction_length(p, self.output)

    def _equal(self, got: Tensor, expected: Tensor, where: str) -> None:
        wrong = got != expected
        count = int(wrong.sum())
        if count:
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
        """What one call may allocate beside its results and the declared workspace.

        A backend that declares none may hold its operands and its result three times more, padded, in the widest
        dtype: a cast, a padded copy and a product, but no matrix of columns.
        """
        p = self.problem
        if self.backend.workspace(p, outputs) and not isinstance(self.backend, PaddedCopy):
            return _SLACK
        padded = [max(n, n + low + high) for n, (low, high) in zip(p.input_size, p.padding, strict=True)]
        elements = p.batch * p.in_channels * prod(padded) + prod(p.weight_shape) + prod(p.output_shape)
        return _SLACK + 3 * (16 if p.dtype.is_complex else 8) * elements
