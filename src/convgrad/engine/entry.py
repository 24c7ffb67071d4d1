"""Entries of the compiled table of calls: a plan as ``csrc/aten`` reads it, if all that it does can be done there."""

from __future__ import annotations

from struct import Struct

from torch import Tensor

from .._compat import usual_strides
from ..backends import (
    LAUNCH_BYTES,
    TritonBackend,
    native_plan,
    operand_format,
    reads_odd_strides,
    runs_as_stated,
)
from ..problem import ConvProblem, Outputs, gradient_outputs
from .plan import SLOTS, Plan, Step, is_prepared, slots_of

#: ``Step`` and ``Entry`` of ``csrc/aten/convolution.cpp``.
_PYTORCH, _NATIVE, _SUM_OF_BIAS, _CUDA = range(4)
_MOST_RANK = 5
_MOST_LAUNCHES = 3
_pack_step = Struct("2i1536s").pack
_pack_launches = Struct(f"2i{_MOST_LAUNCHES}q").pack
_SHAPES = 3 * (1 + 2 * _MOST_RANK)  # a rank, a shape and strides for each result
_pack_entry = Struct(f"4i{_SHAPES}q").pack


def pack(plan: Plan, operands: tuple[Tensor | None, ...], pytorchs_autograd: bool = False) -> bytes | None:
    """Return the entry of a plan that has just computed a call with these operands; None if Python is needed for it.

    With ``pytorchs_autograd``, PyTorch's own call, recorded by its own autograd, does all that the plan does.
    """
    p = plan.problem
    if plan.aten:
        return _pack_entry(0, pytorchs_autograd, 0, False, *(0,) * _SHAPES)
    if plan.unsettled or p.empty or p.padding_mode != "zeros":
        return None
    backward = plan.outputs != (p.bias_pass,)
    results = gradient_outputs(p.transposed) if backward else (p.bias_pass,)
    slots = ("grad_output" if p.transposed else "input", "weight", "bias")
    if backward:
        slots = ("input", "grad_output", "weight") if p.transposed else ("grad_output", "input", "weight")
    given: dict[str, Tensor | None] = dict(zip(slots, operands, strict=True))
    copied, steps = _copied(plan, given), [_packed(p, step, results, given) for step in plan.steps]
    if plan.rests:
        a_sum = plan.rests == ["grad_bias"] and p.shape_of(p.bias_slot)[1] > 0
        steps.append(_pack_step(_SUM_OF_BIAS, 4, b"") if a_sum else None)
    packed = [step for step in steps if step is not None]
    if copied is None or len(packed) < len(steps):
        return None
    shapes = []
    for output in results:
        shape = p.result_shape(output)
        strides = usual_strides(shape, p.channels_last) if output != "grad_bias" else (1,)
        fill = (0,) * (_MOST_RANK - len(shape))
        shapes += [len(shape), *shape, *fill, *strides, *fill]
    shapes += [0] * (_SHAPES - len(shapes))
    return _pack_entry(len(steps), pytorchs_autograd, copied, p.channels_last, *shapes) + b"".join(packed)


def _packed(problem: ConvProblem, step: Step, results: Outputs, given: dict[str, Tensor | None]) -> bytes | None:
    """Return one step of a plan as the compiled code reads it; None if it needs Python."""
    backend, bias = step.backend, given.get("bias")
    places = sum(1 << results.index(output) for output in step.outputs)
    if backend.name == "aten":
        _, *input_and_weight = given.values()
        backward = "bias" not in given
        as_they_are = backward and runs_as_stated(problem) and not reads_odd_strides(problem, *input_and_weight)  # pyright: ignore[reportArgumentType]
        return _pack_step(_PYTORCH, places, b"") if as_they_are else None
    if isinstance(backend, TritonBackend):
        read = {*_reads(step), "bias"}
        launched = backend.entry(problem, step.outputs, {n: t for n, t in given.items() if t is not None and n in read})
        if launched is None or len(launched.scratch) > 1:
            return None
        count = len(launched.launches) // LAUNCH_BYTES
        unusual = any(
            output != "grad_bias" and strides != usual_strides(shape, problem.channels_last)
            for output, (shape, strides) in launched.results.items()
        )
        if count > _MOST_LAUNCHES or unusual:
            return None
        scratch = (*launched.scratch, *(0,) * (_MOST_LAUNCHES - len(launched.scratch)))
        head = _pack_launches(count, len(launched.scratch), *scratch)
        return _pack_step(_CUDA, places, head + launched.launches)
    native = native_plan(backend, problem, step.outputs)
    return None if native is None or not (bias is None or bias.is_contiguous()) else _pack_step(_NATIVE, places, native)


def _reads(step: Step) -> list[str]:
    """Return the names of the operands that a step reads, but for a bias."""
    return [SLOTS[i] for i in slots_of(step.outputs)]


def _copied(plan: Plan, given: dict[str, Tensor | None]) -> int | None:
    """Return which operands the CPU kernels read as dense copies, a bit each; None if Python must make the copies."""
    problem, copied = plan.problem, 0
    steps = [s for s in plan.steps if s.backend.name != "aten" and not isinstance(s.backend, TritonBackend)]
    for i, (name, t) in enumerate(given.items()):
        readers = [s.backend for s in steps if name in _reads(s)]
        if t is None or all(is_prepared(backend, problem, t) for backend in readers):
            continue
        layouts = {operand_format(backend, problem) for backend in readers}
        if layouts != {problem.memory_format} or t.is_conj() or t.is_neg():
            return None
        copied |= 1 << i
    return copied
