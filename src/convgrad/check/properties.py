"""What it means that a backend is right: one function for each aspect, all of them listed in `ASPECTS`.

An aspect takes a `Case` and returns the worst error that it found and the one allowed. It raises `Failed` or `Skipped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from ..problem import PASSES, RESULT, Pass, Slot
from .case import Case, Differs, Failed, Skipped
from .memory_guards import PeakMemory, Poison, guarded_copy, raw_bytes
from .operands import Operands, integer_operands, reference

__all__ = ["ASPECTS", "Case", "Differs", "Failed", "Skipped"]

Aspect = Callable[[Case], tuple[float, float]]


def exact(case: Case) -> tuple[float, float]:
    """Small integers give the reference's result with no differing element."""
    operands = case.integers()
    return case.compare(case.run(operands), operands)


def again(case: Case) -> tuple[float, float]:
    """A second call is as right as the first, with other operands and with the same ones."""
    first, second = case.integers(), integer_operands(case.problem, case.passes, case.seed + 1)
    before = case.run(first)
    case.compare(case.run(second), second)
    case.compare(before, first, where="the first call's result, after a second call")
    after = case.run(first)
    worst = case.compare(after, first)
    if case.backend.deterministic:
        _same_bits(before, after, "the second call with the same operands")
    return worst


def bound(case: Case) -> tuple[float, float]:
    """Real numbers stay within the error bound of the arithmetic that the backend declares."""
    if not (case.problem.dtype.is_floating_point or case.problem.dtype.is_complex):
        raise Skipped("integers have no rounding")
    operands = case.reals()
    return case.compare(case.run(operands), operands, integers=False)


def memory(case: Case) -> tuple[float, float]:
    """It writes every element, reads and writes nothing outside its tensors, and leaves its operands as they are."""
    worst = (0.0, 0.0)
    for shift in (0, 1):  # 1: the operands begin off any alignment
        operands = case.integers()
        guards = {slot: guarded_copy(case.place(t), shift) for slot, t in operands.items()}
        before = {slot: guard.bytes() for slot, guard in guards.items()}
        with Poison() as poison:
            result = case.run({slot: guard.tensor for slot, guard in guards.items()})
        if poison.overstepped():
            raise Failed("it wrote outside a tensor that it allocated")
        for slot, guard in guards.items():
            if not torch.equal(guard.bytes(), before[slot]):
                raise Failed(f"it wrote to {slot}, or beside it")
        where = "with operands off alignment" if shift else "in poisoned memory"
        worst = max(worst, case.compare(result, operands, where=where))
    return worst


def layouts(case: Case) -> tuple[float, float]:
    """Any strides of the operands give the same."""
    operands = case.integers()
    worst = (0.0, 0.0)
    for slot in operands:
        for name, changed in _layouts_of(case.place(operands[slot])):
            result = case.run({**operands, slot: changed})
            worst = max(worst, case.compare(result, operands, where=f"with {slot} {name}"))
        for name, changed in _expanded(case.place(operands[slot])):
            varied: Operands = {**operands, slot: changed}
            worst = max(worst, case.compare(case.run(varied), varied, where=f"with {slot} {name}"))
    return worst


def _layouts_of(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in other places."""
    yield "contiguous", tensor.contiguous()
    if tensor.dim() > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        yield "channels_last", tensor.contiguous(memory_format=formats[tensor.dim()])
    yield "permuted", tensor.transpose(0, -1).contiguous().transpose(0, -1)
    yield "sliced", torch.stack([tensor, torch.full_like(tensor, 77)], dim=-1)[..., 0]
    odd = [123 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    yield "of odd strides where its size is 1", tensor.as_strided(tensor.shape, odd)


def _expanded(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Strides of zero, as the gradients of sums have."""
    yield "expanded over dimension 0", tensor[:1].expand_as(tensor)
    yield "expanded from one element", tensor.new_ones([1] * tensor.dim()).expand_as(tensor)


def bias(case: Case) -> tuple[float, float]:
    """A fused bias is added once, in its dtype, to the right channels."""
    if case.pass_ != case.problem.bias_pass or not case.backend.fuses_bias(case.problem):
        raise Skipped("the engine adds the bias")
    operands = case.integers()
    channels = case.problem.shape_of(case.problem.bias_slot)[1]
    added = (torch.arange(channels, device="cpu") % 2 + 1).to(case.problem.dtype)
    return case.compare(case.run(operands, case.place(added)), operands, bias=added)


def sweeps(case: Case) -> tuple[float, float]:
    """Several outputs at once are what each is alone."""
    mine = [s for s in case.usable_sweeps() if case.output in s]
    if not mine:
        raise Skipped("no sweep computes this output")
    worst = (0.0, 0.0)
    for outputs in mine:
        operands = case.integers(PASSES)
        guards = {slot: guarded_copy(case.place(t)) for slot, t in operands.items()}
        before = {slot: guard.bytes() for slot, guard in guards.items()}
        with Poison() as poison:
            result = case.sweep(outputs, {slot: guard.tensor for slot, guard in guards.items()})
        if poison.overstepped() or any(not torch.equal(g.bytes(), before[s]) for s, g in guards.items()):
            raise Failed(f"the sweep {outputs} wrote outside its results")
        worst = max(worst, case.compare(result, operands, where=f"in the sweep {outputs}"))
        if case.problem.dtype.is_floating_point:
            real = case.reals(PASSES)
            result = case.sweep(outputs, real)
            case.compare(result, real, integers=False, where=f"in the sweep {outputs}")
            for _ in range(case.repeats - 1 if case.backend.deterministic else 0):
                _same_bits(result, case.sweep(outputs, real), f"a run of the sweep {outputs}")
    return worst


def adjoint(case: Case) -> tuple[float, float]:
    """The passes are one trilinear form: <grad_output, conv(input, weight)> by this pass is that by another."""
    others: list[Pass] = [q for q in case.backend.passes if q != case.pass_ and not case.for_pass(q).reasons_against()]
    if not others:
        raise Skipped("no other pass to compare with")
    if case.arithmetic == "transform":
        raise Skipped("a transform is not exact on integers")
    operands = case.integers(PASSES)
    values = [_form(case.for_pass(q), operands) for q in (case.pass_, *others)]
    worst = max(abs(v - values[0]) for v in values)
    if worst:
        raise Failed(f"the form is {values} by {(case.pass_, *others)}", worst)
    return 0.0, 0.0


def _form(case: Case, operands: Operands) -> complex:
    result = case.run(operands).cpu()
    wide = torch.complex128 if result.is_complex() else torch.float64
    return (result.to(wide) * operands[RESULT[case.pass_]].to(wide)).sum().item()


def deterministic(case: Case) -> tuple[float, float]:
    """The same operands give the same bits, every time."""
    if not case.backend.deterministic:
        raise Skipped("it does not declare to repeat its bits")
    floating = case.problem.dtype.is_floating_point or case.problem.dtype.is_complex
    operands = case.reals() if floating else case.integers()
    operands = {slot: case.place(t) for slot, t in operands.items()}
    first = case.run(operands)
    for i in range(2, case.repeats + 1):
        _same_bits(first, case.run(operands), f"run {i} of {case.repeats}")
    return 0.0, 0.0


def _same_bits(a: Tensor, b: Tensor, what: str) -> None:
    differing = int((raw_bytes(a) != raw_bytes(b)).sum())
    if differing:
        raise Failed(f"{what} gave other bits than the first one in {differing} bytes", differing)


#: The operand that a NaN goes into: the one that is read with a border, so that exactly its readers become NaN.
_SPOILED: Final[dict[Pass, Slot]] = {"forward": "input", "grad_input": "grad_output", "grad_weight": "input"}


def nonfinite(case: Case) -> tuple[float, float]:
    """A NaN or an infinity reaches exactly the elements that read it."""
    if not case.problem.dtype.is_floating_point:
        raise Skipped("only real numbers have a NaN and an infinity of their own")
    operands = case.reals()
    slot = _SPOILED[case.pass_]
    for value in (float("nan"), float("inf"), -float("inf")):
        spoiled = {s: t.clone() for s, t in operands.items()}
        at = (case.seed * 7919 + spoiled[slot].numel() // 2) % spoiled[slot].numel()
        spoiled[slot][_index(at, spoiled[slot].shape)] = value
        expected = reference(case.problem, case.pass_, spoiled)
        got = case.run(spoiled).cpu().to(torch.float64)
        if case.arithmetic == "transform":  # it may spread over a tile
            wrong = ~expected.isfinite() & got.isfinite()
        else:
            finite = expected.isfinite() & got.isfinite()
            wrong = ~(finite | (expected == got) | (expected.isnan() & got.isnan()))
        count = int(wrong.sum())
        if count:
            raise case.unpromised(
                f"{value} in {slot}: {_nonfinite(got)} where the reference has {_nonfinite(expected)}; "
                f"{count} elements differ",
                count,
            )
    return 0.0, 0.0


def _nonfinite(tensor: Tensor) -> str:
    return f"{int(tensor.isnan().sum())} NaN and {int(tensor.isinf().sum())} infinite"


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), tuple(shape)))


def workspace(case: Case) -> tuple[float, float]:
    """It needs no more memory than it declares."""
    operands = case.integers()
    a, b = case.prepared({slot: case.place(t) for slot, t in operands.items()})
    given = case.scratch()
    with PeakMemory() as watch:
        watch.ignore(a, b, *([] if given is None else [given]))
        result = case.bound_run(a, b, None, given)
    used = watch.peak - result.untyped_storage().nbytes()
    allowed = case.allowed_bytes()
    if used > allowed:
        raise Failed(f"it took {used} bytes beside its result and its workspace, {allowed} are allowed", used, allowed)
    return used, allowed


ASPECTS: Final[dict[str, Aspect]] = {
    "exact": exact,
    "again": again,
    "bound": bound,
    "memory": memory,
    "layouts": layouts,
    "bias": bias,
    "sweeps": sweeps,
    "adjoint": adjoint,
    "deterministic": deterministic,
    "nonfinite": nonfinite,
    "workspace": workspace,
}
