"""The properties of a right backend, one function for each.

A property takes a `PropertyCheck` and yields each error that it found, with the one allowed. It raises `Failed`,
`Differs` or `Skipped`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .._compat import channels_last_of
from ..problem import OPERANDS, PASSES, Pass, Slot
from .memory_guards import PeakMemory, Poison, guarded_copy, paged_copy, raw_bytes
from .operands import Operands, index_of, reference, slots_of
from .process_state import restore, settings
from .property_check import Failed, PropertyCheck, Skipped

_THREADS, _ROUNDS = 4, 3

Found = Iterator[tuple[float, float]]
Property = Callable[[PropertyCheck], Found]


def exact(check: PropertyCheck) -> Found:
    """Small integers give the reference's result with no differing element."""
    operands = check.integers()
    with check.parallel():
        result = check.run(operands)
    yield check.compare(result, operands)


def again(check: PropertyCheck) -> Found:
    """Later calls are as right as the first: with other numbers in the same tensors, as after a step of an optimizer,
    and with the same numbers once more.
    """
    for how, passes, run in check.variants():
        first, second = check.integers(*passes), check.integers(*passes, other=True)
        placed: Operands = {slot: check.place(t).clone() for slot, t in first.items()}
        before = run(placed)
        for slot, t in placed.items():
            t.copy_(second[slot])
        after, once_more = run(placed), run(placed)
        check.compare(after, second, where=f"other numbers in the same tensors {how}".rstrip())
        check.compare(before, first, where=f"the first call's result, after later calls {how}".rstrip())
        yield check.compare(once_more, second, where=how)
        if check.backend.deterministic:
            _same_bits(after, once_more, f"a second call with the same operands {how}".rstrip())


def bound(check: PropertyCheck) -> Found:
    """Real numbers stay within the error bound of the arithmetic that the backend declares."""
    if not (check.problem.dtype.is_floating_point or check.problem.dtype.is_complex):
        raise Skipped("integers have no rounding")
    operands = check.reals()
    yield check.compare(check.run(operands), operands, integers=False)


def memory(check: PropertyCheck) -> Found:
    """It writes every element, reads and writes nothing outside its tensors, and leaves its operands and PyTorch's
    settings as they are.
    """
    operands = check.integers()
    # A forward pass records gradients, or is one of a model in inference mode; a backward pass does not record them.
    without = torch.inference_mode if check.output == "forward" else torch.no_grad
    modes = (torch.enable_grad, "in poisoned memory"), (without, f"with operands off alignment, in {without.__name__}")
    for shift, (mode, where) in enumerate(modes):
        with mode(), check.parallel():
            result = _guarded(check, operands, check.run, shift)
        yield check.compare(result, operands, where=where)


def _guarded(check: PropertyCheck, operands: Operands, run: Callable[[Operands], Tensor], shift: int = 0) -> Tensor:
    """Run on copies between margins, ``shift`` elements off an aligned start, with everything fresh poisoned.

    Raises:
        Failed: a margin or an operand was written, or a setting was changed.
    """
    guards = {slot: guarded_copy(check.place(t), shift) for slot, t in operands.items()}
    before = {slot: (guard.bytes(), *_header(guard.tensor)) for slot, guard in guards.items()}
    state = settings(random=check.backend.deterministic)
    try:
        with Poison() as poison:
            result = run({slot: guard.tensor for slot, guard in guards.items()})
    finally:
        changed = restore(state)
    if poison.overstepped():
        raise Failed("it wrote outside a tensor that it allocated")
    for slot, guard in guards.items():
        content, *header = before[slot]
        if header != [*_header(guard.tensor)] or not torch.equal(guard.bytes(), content):
            raise Failed(f"it wrote into {slot}, or just outside of it")
        if guard.tensor.requires_grad:
            raise Failed(f"it changed {slot}: it requires gradients now")
    if changed:
        raise Failed(f"it changed {' and '.join(changed)}, for whatever runs after it")
    return result


def _header(tensor: Tensor) -> tuple[Any, ...]:
    """Return what shows that a tensor was resized, or written and put back (autograd counts writes)."""
    return tensor.shape, tensor.stride(), None if tensor.is_inference() else tensor._version


def layouts(check: PropertyCheck) -> Found:
    """Any strides of the operands give the same."""
    operands = check.integers()
    for slot in operands:
        for name, changed in _layouts_of(check.place(operands[slot]), lazy="any" in check.backend.layouts):
            result = check.run({**operands, slot: changed})
            yield check.compare(result, operands, where=f"with {slot} {name}")
        for name, changed in _expanded(check.place(operands[slot])):
            varied: Operands = {**operands, slot: changed}
            yield check.compare(check.run(varied), varied, where=f"with {slot} {name}")


def _layouts_of(tensor: Tensor, lazy: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the same values at other places; ``lazy``: also those that PyTorch negates or conjugates later."""
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


def _expanded(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with strides of zero, as the gradients of sums have."""
    yield "expanded over dimension 0", tensor[:1].expand_as(tensor)
    yield "expanded from one element", tensor.new_ones([1] * tensor.dim()).expand_as(tensor)


def bias(check: PropertyCheck) -> Found:
    """A fused bias is added once, in its dtype, to the right channels."""
    alone = (check.problem.bias_pass,)
    if (check.output,) != alone or alone not in check.calls or not check.backend.fuses_bias(check.problem):
        raise Skipped("the engine adds the bias")
    dtype, channels = check.problem.dtype, check.problem.shape_of(check.problem.bias_slot)[1]
    real = dtype.is_floating_point or dtype.is_complex
    operands = check.reals() if real else check.integers()
    added = torch.arange(channels, device="cpu") * 37 % 61  # no two of 61 channels alike
    if real:
        added = (added - 30).to(torch.float64) / 7  # sevenths use all bits of the dtype
    added = (added + 1).to(dtype)
    yield check.compare(check.run(operands, check.place(added)), operands, integers=not real, bias=added)


def sweeps(check: PropertyCheck) -> Found:
    """Several outputs at once are what each is alone."""
    mine = [outputs for outputs in check.calls if len(outputs) > 1]
    if not mine:
        raise Skipped("no sweep computes this output")
    for outputs in mine:
        where = f"in the sweep {outputs}"
        run = partial(check.call, outputs)
        operands = check.integers(*PASSES)
        with torch.no_grad():  # as in a backward pass
            result = _guarded(check, operands, run)
        yield check.compare(result, operands, where=where)
        if check.problem.dtype.is_floating_point:
            real = check.reals(*PASSES)
            result = run(real)
            check.compare(result, real, integers=False, where=where)
            for _ in range(check.repeats - 1 if check.backend.deterministic else 0):
                _same_bits(result, run(real), f"a run of the sweep {outputs}")


def deterministic(check: PropertyCheck) -> Found:
    """Equal operands give the same bits, every time."""
    if not check.backend.deterministic:
        raise Skipped("it does not declare to repeat its bits")
    floating = check.problem.dtype.is_floating_point or check.problem.dtype.is_complex
    operands = check.reals() if floating else check.integers()
    operands = {slot: check.place(t) for slot, t in operands.items()}
    with check.parallel():
        first = check.run(operands)
        for i in range(2, check.repeats + 1):
            _same_bits(first, check.run(operands), f"run {i} of {check.repeats}")
    yield 0.0, 0.0


def _same_bits(a: Tensor, b: Tensor, what: str) -> None:
    if differing := int((raw_bytes(a) != raw_bytes(b)).sum()):
        raise Failed(f"{what} gave other bits than the first one in {differing} bytes", differing)


#: The operand that a NaN is put into: the one that is read with a border, so that exactly its readers become NaN.
_SPOILED: Final[dict[Pass, Slot]] = {"forward": "input", "grad_input": "grad_output", "grad_weight": "input"}


def nonfinite(check: PropertyCheck) -> Found:
    """A NaN or an infinity reaches exactly the elements that read it; one of the operand without a border may also
    reach those where it meets padding.
    """
    p, pass_ = check.problem, check.pass_
    if not p.dtype.is_floating_point:
        raise Skipped("only real numbers have a NaN and an infinity of their own")
    variants = check.variants()
    operands = check.reals(*max((passes for _, passes, _ in variants), key=len))
    bordered = _SPOILED[pass_]
    (other,) = {*OPERANDS[pass_]} - {bordered}
    for slot, value, part in (
        (bordered, float("nan"), 1.0),
        (bordered, float("inf"), 0.5),
        (other, float("nan"), 0.5),
        (other, -float("inf"), 1.0),
    ):
        spoiled = {s: t.clone() for s, t in operands.items()}
        at = tuple(index_of(int(part * (spoiled[slot].numel() - 1)), spoiled[slot].shape))
        spoiled[slot][at] = value
        expected = reference(p, pass_, spoiled)
        read = torch.ones((), dtype=torch.bool, device="cpu")
        if slot == other:  # elements that read more than padding
            alone = {s: torch.zeros_like(t) if s == slot else torch.ones_like(t) for s, t in operands.items()}
            alone[slot][at] = 1
            read = reference(p, pass_, alone) != 0
        for how, _, run in variants:
            got = run(spoiled).cpu().to(torch.float64)
            if check.arithmetic == "transform" or slot == other:  # a NaN may spread over a tile or the padding
                wrong = ~expected.isfinite() & got.isfinite() & read
            else:
                finite = expected.isfinite() & got.isfinite()
                wrong = ~(finite | (expected == got) | (expected.isnan() & got.isnan()))
            if count := int(wrong.sum()):
                where = tuple(wrong.nonzero()[0].tolist())
                raise check.unpromised(
                    f"with {value} in {slot}, {count} elements differ, the first at {where}: "
                    f"{got[where].item():.9g} instead of {expected[where].item():.9g} {how}".rstrip(),
                    count,
                )
    yield 0.0, 0.0


def workspace(check: PropertyCheck) -> Found:
    """It needs no more memory than it declares."""
    if not check.backend.states_workspace:
        raise Skipped("a function declares no workspace")
    for outputs in check.calls:
        arguments = check.arguments(outputs, check.integers(*check.passes(outputs)))
        with PeakMemory() as watch:
            watch.ignore(*(t for t in arguments if t is not None))
            results = check.kernel(outputs)(*arguments)
        storages = [t.untyped_storage() for t in tree_leaves(results)]
        used = watch.peak - sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        allowed = check.allowed_bytes(outputs)
        if used > allowed:
            where = f" (in the sweep {outputs})" if len(outputs) > 1 else ""
            text = f"it took {used} bytes beside its result and its workspace, {allowed} are allowed{where}"
            raise Failed(text, used, allowed)
        yield used, allowed


def pages(check: PropertyCheck) -> Found:
    """It reads nothing before the start and after the end of its operands: the pages there are closed."""
    if check.device.type != "cpu":
        raise Skipped("only pages of the CPU's memory can be closed")
    for how, passes, run in check.variants():
        operands, slots = check.integers(*passes), slots_of(passes)
        for at_end in (True, False):
            try:
                tensors = zip(slots, check.prepared(operands, slots), strict=True)
                closed: Operands = {slot: paged_copy(t, at_end=at_end) for slot, t in tensors}
            except NotImplementedError as e:
                raise Skipped(str(e)) from None
            where = f"closed pages {'after' if at_end else 'before'} its operands {how}".rstrip()
            yield check.compare(run(closed), operands, where=where)


def threads(check: PropertyCheck) -> Found:
    """Four threads at once, with one weight and two inputs, three times each, do not disturb one another."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise Skipped("Triton's interpreter runs one kernel at a time")
    for how, passes, run in check.variants():
        first = check.integers(*passes)
        weight = {slot: t for slot, t in first.items() if slot == "weight"}
        inputs = [first, {**check.integers(*passes, other=True), **weight}]
        placed: list[Operands] = [{slot: check.place(t) for slot, t in each.items()} for each in inputs]
        for i, result in _at_once(run, placed):
            where = f"in one of {_THREADS} threads at once {how}".rstrip()
            yield check.compare(result, inputs[i], where=where)


def _at_once(run: Callable[[Operands], Tensor], operands: list[Operands]) -> list[tuple[int, Tensor]]:
    """Return every result, with the number of its operands."""
    barrier = Barrier(_THREADS)

    def calls(thread: int) -> list[tuple[int, Tensor]]:
        barrier.wait()
        return [(i, run(operands[i])) for i in ((thread + r) % len(operands) for r in range(_ROUNDS))]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return [found for thread in pool.map(calls, range(_THREADS)) for found in thread]
    finally:
        sys.setswitchinterval(before)


PROPERTIES: Final[dict[str, Property]] = {
    p.__name__: p
    for p in (exact, again, bound, memory, layouts, bias, sweeps, deterministic, nonfinite, workspace)
}  # fmt: skip
#: Checked only where they are named, as `convgrad.register` does in a child process: they cost more, and a kernel that
#: reads outside of its operands does not survive `pages`.
STRESS: Final[dict[str, Property]] = {p.__name__: p for p in (pages, threads)}
ALL_PROPERTIES: Final = PROPERTIES | STRESS
