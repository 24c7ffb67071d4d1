"""The properties of a right backend, one function for each, and what they are checked on: a `PropertyCheck`.

A property raises an `Outcome`, or has nothing to object.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf, nan, prod
from threading import Barrier
from typing import Any, Final, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .._compat import channels_last_of
from ..backends import Arithmetic, Backend, Kernel, PaddedCopy
from ..engine import SLOTS, prepare
from ..errors import BackendError
from ..problem import OPERANDS, PASSES, ConvProblem, Output, Outputs, Pass, Slot, passes_of
from .bounds import error_bound, reduction_length, unit_roundoff
from .guards import Guarded, PeakMemory, Poison, paged_copy, raw_bytes, restore, settings
from .loading import foreign_frames, is_foreign
from .operands import Operands, exact_limit, integer_operands, magnitude, real_operands, reference, slots_of, structural
from .problem_set import changed
from .results import Status

#: Bytes that may be taken for odds and ends, such as a bias in another dtype.
_SLACK = 4096
_THREADS, _ROUNDS = 4, 3
#: A thread pauses before each of so many lines of the user's, so that others run between any two; for how many seconds.
_LINES, _PAUSE = 100, 5e-4
_ONLY_A_SUM = "the gradient of a bias is only a sum"


class Outcome(Exception):  # noqa: N818 (it is an outcome)
    """The end of a property, raised where it did not pass: its status, how far off the backend is, and may be."""

    def __init__(self, message: str, worst: float = 1.0, bound: float = 0.0, status: Status = "failed") -> None:
        super().__init__(message)
        self.worst, self.bound = worst, bound
        self.status: Status = status


def skipped(reason: str) -> Outcome:
    """Return the outcome where there is nothing to check."""
    return Outcome(reason, worst=0.0, status="skipped")


def calls_of(backend: Backend, output: Output | None = None) -> list[Outputs]:
    """Return what one call of a backend can yield, passes alone and sweeps; with an output, those that yield it."""
    calls: list[Outputs] = [*((p,) for p in backend.passes), *backend.sweeps]
    return [call for call in calls if output is None or output in call]


@dataclass
class PropertyCheck:
    """An output of a problem by a backend on a device: what every property is checked on.

    ``threads``: how many PyTorch has while the kernel runs in `parallel`; 0: as many as now.
    ``progress``: called with the name of a property before it is checked, and before each call of the backend.
    ``calls``: the outputs of each call that computes the output, alone and in sweeps; ``outputs``: those of the call
    that `run` makes.
    ``given``: shapes and strides of the last call's operands, in words.
    ``worst``: the largest error that was compared, in units of what is allowed, and 1.
    """

    backend: Backend
    problem: ConvProblem
    output: Output
    device: torch.device
    seed: int = 0
    repeats: int = 20
    threads: int = 0
    progress: Callable[[str], object] = lambda name: None
    name: str = field(default="", init=False)
    given: str = field(default="", init=False)
    worst: tuple[float, float] = field(default=(0.0, 0.0), init=False)
    _made: dict[object, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        asked = () if self.problem.empty else calls_of(self.backend, self.output)
        self._against = {c: self.backend.against(self.problem, c, self.device) for c in asked}
        self.calls = [call for call, reasons in self._against.items() if not reasons]
        self.outputs: Outputs = self.calls[0] if self.calls else ()
        #: Whether the dtype has real or complex numbers.
        self.rounds = self.problem.dtype.is_floating_point or self.problem.dtype.is_complex

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of the output; a bias gradient has no products to round or transform, only a sum."""
        if self.output != "grad_bias":
            return self.backend.arithmetic(self.problem, self.output, self.device)
        low = "low-precision accumulation"
        return low if self.backend.arithmetic(self.problem, "grad_weight", self.device) == low else "direct"

    def reasons_against(self) -> list[str]:
        """Return why the backend computes this output neither alone nor in a sweep; empty if it does."""
        p = self.problem
        if p.empty:
            return ["backends are never given an empty problem"]
        if not self.calls:
            return self._against.get((self.output,)) or [f"it does not compute {self.output} of this problem"]
        try:  # operands that cannot even be allocated are no failure of a backend
            _ = [torch.empty(p.shape_of(slot), dtype=p.dtype, device=self.device) for slot in get_args(Slot)]
        except (RuntimeError, MemoryError):
            return [f"there is no memory for {p.least_bytes:,} bytes of operands"]
        return []

    def outcome(self, name: str) -> Outcome:
        """Check a property of each call that it is for; what the backend raises is its failure, and the cause."""
        self.name, self.worst = name, (0.0, 0.0)
        self.progress(name)
        try:
            for outputs in self.calls if name in EACH_CALL else self.calls[:1]:
                self.outputs = outputs
                ALL_PROPERTIES[name](self)
        except Outcome as e:
            swept = e.status != "skipped" and len(self.outputs) > 1
            return Outcome(f"{e}, in the sweep {self.outputs}", e.worst, e.bound, e.status) if swept else e
        except (Exception, SystemExit) as e:
            # What a kernel returned is refused in its own words; else a user's line before one of Triton's or numba's.
            what = str(e) if isinstance(e, BackendError) else f"it raised {type(e).__name__}: {e}"
            frames = sorted(foreign_frames(e), key=lambda frame: "-packages" not in frame.filename)
            where = "".join(f" ({f.filename}:{f.lineno})" for f in frames[-1:])
            failed = Outcome(what + where, inf)
            failed.__cause__ = e
            return failed
        return Outcome("", *self.worst, "passed")

    # ---- operands ------------------------------------------------------------------------------

    def integers(self, *, other: bool = False) -> Operands:
        """Return `integer_operands` for a `run`; ``other``: with other numbers."""
        passes, seed = self.passes, self.seed + other
        return self._cached((passes, seed), lambda: integer_operands(self.problem, passes, seed))

    def reals(self) -> Operands:
        """Return `real_operands` for a `run`; integers for a dtype without them."""
        if not self.rounds:
            return self.integers()
        return self._cached(("reals", self.passes), lambda: real_operands(self.problem, self.passes, self.seed))

    def _cached(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def placed(self, operands: Operands) -> Operands:
        return {slot: t.to(self.device) for slot, t in operands.items()}

    def prepared(self, operands: Operands, slots: Sequence[Slot]) -> list[Tensor]:
        """Return the operands as the engine passes them to the backend."""
        tensors = [prepare(self.backend, self.problem, operands[s].to(self.device)) for s in slots]
        given = (f"{s} {tuple(t.shape)} with strides {t.stride()}" for s, t in zip(slots, tensors, strict=True))
        self.given = ", ".join(given)
        self.progress(self.name)
        return tensors

    # ---- calling the backend -------------------------------------------------------------------

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes whose operands `run` reads."""
        return PASSES if len(self.outputs) > 1 else passes_of(self.outputs)

    def kernel(self) -> Kernel:
        """Return the function that a plan would keep and call."""
        return self._cached(self.outputs, lambda: self.backend.bind(self.problem, self.outputs))

    def arguments(self, operands: Operands, bias: Tensor | None = None) -> list[Tensor | None]:
        """Return the arguments of the `kernel`; the workspace is full of ones, NaN to every floating-point dtype."""
        several = len(self.outputs) > 1
        tensors = self.prepared(operands, SLOTS if several else OPERANDS[self.passes[0]])
        size = self.backend.workspace(self.problem, self.outputs)
        # Of `empty`, so that it is between `Poison`'s margins.
        scratch = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(255) if size else None
        return [*tensors, *([] if several else [bias]), scratch]

    def run(self, operands: Operands, bias: Tensor | None = None) -> Tensor:
        """Return the output from one call of the backend, which has the problem's shape, dtype, device and layout."""
        result = self.kernel()(*self.arguments(operands, bias))
        if len(self.outputs) > 1:
            if len(result) != len(self.outputs):
                raise Outcome(f"the sweep {self.outputs} returned {len(result)} tensors")
            result = result[self.outputs.index(self.output)]
        p = self.problem
        stated = {"shape": p.result_shape(self.output), "dtype": p.dtype, "device": self.device.type}
        got = {"shape": tuple(result.shape), "dtype": result.dtype, "device": result.device.type}
        if wrong := [what for what in stated if got[what] != stated[what]]:
            raise Outcome(f"the result has {wrong[0]} {got[wrong[0]]}, the problem says {stated[wrong[0]]}")
        # A backend of layout "any" passes its operands on to ATen, whose layout follows from them.
        memory_format = torch.contiguous_format if self.output == "grad_bias" else p.memory_format
        if "any" not in self.backend.layouts and not result.is_contiguous(memory_format=memory_format):
            raise Outcome(f"the result has strides {result.stride()}, the problem says {memory_format}")
        return result

    @contextlib.contextmanager
    def parallel(self) -> Iterator[None]:
        """In this block PyTorch has ``threads`` threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    # ---- comparing -----------------------------------------------------------------------------

    def compare(
        self, result: Tensor, operands: Operands, *, integers: bool = True, bias: Tensor | None = None, where: str = ""
    ) -> None:
        """Hold a result to the reference: no differing element, or the bound of the declared arithmetic.

        Raises:
            Outcome: it is wrong, or the output is mostly zero, which proves nothing.
        """
        where, dtype, arithmetic = f" ({where})" if where else "", self.problem.dtype, self.arithmetic
        alone, size = self._expected(operands, reference), self._expected(operands, magnitude)
        expected, length = alone, reduction_length(self.problem, self.output)
        got = result.detach().cpu().to(expected.dtype)
        if bias is not None:
            added = bias.to(expected.dtype).view(-1, *(1,) * self.problem.ndim)
            expected, size, length = alone + added, size + added.abs(), length + 1
        if integers and arithmetic != "transform" and float(size.amax()) <= exact_limit(dtype):
            if count := int((wrong := got != expected).sum()):
                at = _first(wrong)
                what = f"{count} of {wrong.numel()} elements differ, the first at {at}"
                raise Outcome(f"{what}: {got[at].item()} instead of {expected[at].item()}{where}", count)
            read = torch.ones_like(wrong) if self.output == "grad_bias" else structural(self.problem, self.output)
            if int((expected != 0)[read].sum()) * 2 < int(read.sum()):
                raise skipped("the output is mostly zero, which proves nothing")
            return
        allowed = error_bound(arithmetic, dtype, length, expected, size)
        if bias is not None and self.rounds:  # the sum may be rounded to the dtype before
            allowed = allowed + unit_roundoff(dtype) * (alone.abs() + allowed)
        error = (got - expected).abs()
        ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=inf)
        worst = ratio.amax()
        if not float(worst) <= 1:
            at = _first(ratio == worst)
            failed = self.unpromised if arithmetic == "low-precision accumulation" else Outcome
            message = f"element {at} is {got[at].item():.9g}, exact is {expected[at].item():.9g}{where}"
            raise failed(message, float(error[at]), float(allowed[at]))
        self.worst = max(self.worst, (float(worst), 1.0))

    def unpromised(self, message: str, worst: float, bound: float = 0.0) -> Outcome:
        """Return the outcome of what PyTorch does on some processors only: a difference if the kernel is PyTorch's."""
        return Outcome(message, worst, bound, "differs" if self.backend.from_pytorch else "failed")

    def _expected(self, operands: Operands, of: Callable[[ConvProblem, Output, Operands], Tensor]) -> Tensor:
        """Return the exact result, or that of the absolute values."""
        # The operands are cached too: their id is theirs alone as long as they exist.
        return self._cached((id(operands), of), lambda: (operands, of(self.problem, self.output, operands)))[1]


def _first(found: Tensor) -> tuple[int, ...]:
    """Return the index of the first element that is true."""
    return tuple(found.nonzero()[0].tolist())


# ---- the properties ------------------------------------------------------------------------------

Property = Callable[[PropertyCheck], None]


def exact(check: PropertyCheck) -> None:
    """Small integers give the reference's result with no differing element."""
    with check.parallel():
        result = check.run(check.integers())
    check.compare(result, check.integers())


def again(check: PropertyCheck) -> None:
    """Later calls are as right as the first: with other numbers in the same tensors, as after a step of an optimizer,
    with the same numbers once more, and after an image without padding that is as large as this one with it.
    """
    first, second, p = check.integers(), check.integers(other=True), check.problem
    placed: Operands = {slot: t.clone() for slot, t in check.placed(first).items()}
    before = check.run(placed)
    for slot, t in placed.items():
        t.copy_(second[slot])
    after, once_more = check.run(placed), check.run(placed)
    check.compare(after, second, where="other numbers in the same tensors")
    check.compare(before, first, where="the first call's result, after later calls")
    check.compare(once_more, second)
    if check.backend.deterministic:
        _same_bits(after, once_more, "a second call with the same operands")
    whole = changed(p, input_size=tuple(d.padded for d in p.dims), padding=((0, 0),) * p.ndim)
    if whole and whole != p and (larger := replace(check, problem=whole)).calls:
        with contextlib.suppress(Exception):  # whether it can compute that one is no matter of this problem's
            larger.run(larger.integers())
        check.compare(check.run(placed), second, where=f"after {larger.problem}: is its scratch memory cleared?")


def bound(check: PropertyCheck) -> None:
    """Real numbers stay within the error bound of the arithmetic that the backend declares."""
    if not check.rounds:
        raise skipped("integers have no rounding")
    check.compare(check.run(check.reals()), check.reals(), integers=False)


def memory(check: PropertyCheck) -> None:
    """It writes every element, reads and writes nothing outside its tensors, and leaves its operands and PyTorch's
    settings as they are.
    """
    operands = check.integers()
    # A forward pass records gradients, or is one of a model in inference mode; a backward pass does not record them.
    without = torch.inference_mode if check.output == "forward" else torch.no_grad
    modes = (torch.enable_grad, "in poisoned memory"), (without, f"with operands off alignment, in {without.__name__}")
    for shift, (mode, where) in enumerate(modes):
        with mode(), check.parallel():
            result = _guarded(check, operands, shift)
        check.compare(result, operands, where=where)


def _guarded(check: PropertyCheck, operands: Operands, shift: int) -> Tensor:
    """Run on copies between margins, ``shift`` elements off an aligned start, with everything fresh poisoned."""
    guards = {slot: Guarded(t, shift) for slot, t in check.placed(operands).items()}
    watched = [_watched(slot, guard) for slot, guard in guards.items()]
    state = settings(random=check.backend.deterministic)
    try:
        with Poison() as poison:
            result = check.run({slot: guard.tensor for slot, guard in guards.items()})
    finally:
        changed = restore(state)
    if poison.overstepped():
        raise Outcome("it wrote outside a tensor that it allocated")
    for look in watched:
        look()
    if changed:
        raise Outcome(f"it changed {' and '.join(changed)}, for whatever runs after it")
    return result


def _watched(name: str, guard: Guarded) -> Callable[[], None]:
    """Return a function that raises an `Outcome` where an operand, or what lies beside it, has changed since now."""

    def header() -> tuple[Any, ...]:  # it shows a resize, and what was written and put back (autograd counts writes)
        return tensor.shape, tensor.stride(), None if tensor.is_inference() else tensor._version

    def look() -> None:
        if header() != before or guard.overstepped() or not torch.equal(raw_bytes(tensor), content):
            raise Outcome(f"it wrote into {name}, or just outside of it")
        if tensor.requires_grad:
            raise Outcome(f"it changed {name}: it requires gradients now")

    tensor = guard.tensor
    before, content = header(), raw_bytes(tensor)
    return look


def layouts(check: PropertyCheck) -> None:
    """Any strides of the operands give the same."""
    if check.output == "grad_bias":
        raise skipped(_ONLY_A_SUM)
    operands = check.integers()
    for slot, tensor in check.placed(operands).items():
        for name, other in _layouts_of(tensor, lazy="any" in check.backend.layouts):
            varied: Operands = {**operands, slot: other}
            values = varied if name.startswith("expanded") else operands
            check.compare(check.run(varied), values, where=f"with {slot} {name}")


def _layouts_of(tensor: Tensor, lazy: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the same values at other places, and values that repeat by strides of zero, as gradients of sums do."""
    yield "contiguous", tensor.contiguous()
    if tensor.dim() > 3:
        yield "channels_last", tensor.contiguous(memory_format=channels_last_of(tensor.dim() - 2))
    if lazy and tensor.is_complex():
        yield "lazily conjugated", tensor.conj_physical().conj()
    if lazy and tensor.dtype in (torch.float32, torch.float64):
        yield "lazily negated", torch.complex(tensor, -tensor).conj().imag
    yield "permuted", tensor.transpose(0, -1).contiguous().transpose(0, -1)
    yield "sliced", torch.stack([tensor, torch.full_like(tensor, 77)], dim=-1)[..., 0]
    for odd in (1, 123) if 1 in tensor.shape else ():  # below and, for most of these problems, above what it would be
        strides = [odd if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        yield f"of stride {odd} where its size is 1", tensor.as_strided(tensor.shape, strides)
    yield "expanded over dimension 0", tensor[:1].expand_as(tensor)
    yield "expanded from one element", tensor.new_ones([1] * tensor.dim()).expand_as(tensor)


def bias(check: PropertyCheck) -> None:
    """A fused bias is added once, in its dtype, to the right channels, and is left as it is."""
    p = check.problem
    if check.output != p.bias_pass or (check.output,) not in check.calls or not check.backend.fuses_bias(p):
        raise skipped("the engine adds the bias")
    added = torch.arange(p.shape_of(p.bias_slot)[1], device="cpu") * 37 % 61  # no two of 61 channels alike
    if check.rounds:
        added = (added - 30).to(torch.float64) / 7  # sevenths use all bits of the dtype
    added, operands = (added + 1).to(p.dtype), check.reals()
    guard = Guarded(added.to(check.device))
    look = _watched("bias", guard)
    result = check.run(operands, guard.tensor)
    look()
    check.compare(result, operands, integers=not check.rounds, bias=added)


def sweeps(check: PropertyCheck) -> None:
    """Each further call that computes the output, with others in a sweep, is as right as the first."""
    if len(check.calls) == 1:
        raise skipped("one call computes this output, and no sweep beside it")
    rounded, repeated = check.problem.dtype.is_floating_point, check.backend.deterministic
    for outputs in check.calls[1:]:
        check.outputs = outputs
        for checked in (memory, *[bound] * rounded, *[deterministic] * repeated):
            checked(check)


def deterministic(check: PropertyCheck) -> None:
    """Equal operands give the same bits, every time."""
    if not check.backend.deterministic:
        raise skipped("it does not declare to repeat its bits")
    operands = check.placed(check.reals())
    with check.parallel():
        first = check.run(operands)
        for i in range(2, check.repeats + 1):
            _same_bits(first, check.run(operands), f"run {i} of {check.repeats}")


def _same_bits(a: Tensor, b: Tensor, what: str) -> None:
    if differing := int((raw_bytes(a) != raw_bytes(b)).sum()):
        raise Outcome(f"{what} gave other bits than the first one in {differing} bytes", differing)


def nonfinite(check: PropertyCheck) -> None:
    """A NaN or an infinity reaches exactly the elements that read it; one of the operand without a border may also
    reach those where it meets padding.
    """
    p, pass_ = check.problem, check.output
    if pass_ == "grad_bias":
        raise skipped(_ONLY_A_SUM)
    if not p.dtype.is_floating_point:
        raise skipped("only real numbers have a NaN and an infinity of their own")
    # The operand that is read with a border: exactly the readers of its NaN become NaN.
    operands, bordered = check.reals(), "grad_output" if pass_ == "grad_input" else "input"
    (other,) = {*OPERANDS[pass_]} - {bordered}
    for slot, value, part in ((bordered, nan, 1.0), (bordered, inf, 0.5), (other, nan, 0.5), (other, -inf, 1.0)):
        shape = operands[slot].shape
        only = torch.arange(prod(shape), device="cpu").view(shape) == int(part * (prod(shape) - 1))
        spoiled: Operands = {**operands, slot: operands[slot].clone().masked_fill_(only, value)}
        expected = reference(p, pass_, spoiled)
        read = torch.ones((), dtype=torch.bool, device="cpu")
        if slot == other:  # elements that read more than padding
            read = reference(p, pass_, {bordered: torch.ones_like(operands[bordered]), slot: only}) != 0
        got = check.run(spoiled).cpu().to(torch.float64)
        if check.arithmetic == "transform" or slot == other:  # a NaN may spread over a tile or the padding
            wrong = ~expected.isfinite() & got.isfinite() & read
        else:
            finite = expected.isfinite() & got.isfinite()
            wrong = ~(finite | (expected == got) | (expected.isnan() & got.isnan()))
        if count := int(wrong.sum()):
            at = _first(wrong)
            raise check.unpromised(
                f"with {value} in {slot}, {count} elements differ, the first at {at}: "
                f"{got[at].item():.9g} instead of {expected[at].item():.9g}",
                count,
            )


def workspace(check: PropertyCheck) -> None:
    """It needs no more memory than it declares."""
    if not check.backend.states_workspace:
        raise skipped("a function declares no workspace")
    p = check.problem
    arguments = check.arguments(check.integers())
    with PeakMemory(*arguments) as watch:
        results = check.kernel()(*arguments)
    storages = [t.untyped_storage() for t in tree_leaves(results)]
    used, allowed = watch.peak - sum({s.data_ptr(): s.nbytes() for s in storages}.values()), _SLACK
    if not check.backend.workspace(p, check.outputs) or isinstance(check.backend, PaddedCopy):
        # One that declares none may hold its operands and its result three times more, padded, in the widest dtype:
        # a cast, a padded copy and a product, but no matrix of columns.
        padded = [max(n, n + low + high) for n, (low, high) in zip(p.input_size, p.padding, strict=True)]
        elements = p.batch * p.in_channels * prod(padded) + prod(p.weight_shape) + prod(p.output_shape)
        allowed += 3 * (16 if p.dtype.is_complex else 8) * elements
    if used > allowed:
        text = f"it took {used} bytes beside its result and its workspace, {allowed} are allowed"
        raise Outcome(text, used, allowed)
    check.worst = max(check.worst, (used, allowed))


def pages(check: PropertyCheck) -> None:
    """It reads nothing before the start and after the end of its operands: the pages there are closed."""
    if check.device.type != "cpu" or os.name != "posix":
        raise skipped("only pages of the CPU's memory can be closed, by mprotect")
    operands, slots = check.integers(), slots_of(check.passes)
    for at_end in (True, False):
        tensors = zip(slots, check.prepared(operands, slots), strict=True)
        try:
            closed: Operands = {slot: paged_copy(t, at_end=at_end) for slot, t in tensors}
        except OSError as e:
            raise skipped(str(e)) from None
        where = f"closed pages {'after' if at_end else 'before'} its operands"
        check.compare(check.run(closed), operands, where=where)


def threads(check: PropertyCheck) -> None:
    """Four threads at once, with one weight and two inputs, three times each, do not disturb one another."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise skipped("Triton's interpreter runs one kernel at a time")
    barrier, first = Barrier(_THREADS), check.integers()
    inputs = [first, {**check.integers(other=True), **{s: t for s, t in first.items() if s == "weight"}}]
    placed = [check.placed(operands) for operands in inputs]

    def calls(thread: int) -> list[tuple[int, Tensor]]:
        lines = iter(range(_LINES))

        def pausing(frame: Any, *_: Any) -> Any:
            if not is_foreign(frame.f_code.co_filename) or next(lines, None) is None:
                return None
            time.sleep(_PAUSE)
            return pausing

        barrier.wait()
        before = sys.gettrace()
        sys.settrace(pausing)
        try:
            return [(i % 2, check.run(placed[i % 2])) for i in range(thread, thread + _ROUNDS)]
        finally:
            sys.settrace(before)  # since Python 3.12 all threads remain slow until it is unset

    with ThreadPoolExecutor(_THREADS) as pool:
        found = [result for results in pool.map(calls, range(_THREADS)) for result in results]
    for i, result in found:
        check.compare(result, inputs[i], where=f"in one of {_THREADS} threads at once")


PROPERTIES: Final[dict[str, Property]] = {
    p.__name__: p
    for p in (exact, again, bound, memory, layouts, bias, sweeps, deterministic, nonfinite, workspace)
}  # fmt: skip
#: Checked only where they are named, as `convgrad.register` does in a child process: they cost more, and a kernel that
#: reads outside of its operands does not survive `pages`.
STRESS: Final[dict[str, Property]] = {p.__name__: p for p in (pages, threads)}
ALL_PROPERTIES: Final = PROPERTIES | STRESS
#: Checked on each call that computes the output, the others on the first.
EACH_CALL: Final = ("again", "nonfinite", "workspace", *STRESS)
