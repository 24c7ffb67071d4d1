"""A plan: the steps that compute the outputs asked for, bound to their problem and ready to be called.

Everything that can be decided once a problem is decided here; a call runs the bound functions and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from .. import settings
from .._compat import profiler_enabled
from ..problem import OPERANDS, RESULT, ConvProblem, Output, Slot, gradient_outputs, in_order
from .cache import BoundedCache
from .choice import Step, choose
from .events import Event, observers, thread
from .operands import is_prepared, prepare, prepare_bias
from .request import active

__all__ = ["Plan", "plan_for"]


class Plan:
    """What will run for one problem, one set of outputs and one device.

    Attributes:
        problem: what is computed.
        outputs: what is asked for, in the order of ``problem.OUTPUTS``.
        device: where.
        steps: the calls of backends, each with its reason. A ``grad_bias`` that no step yields is a sum.
    """

    __slots__ = ("_bound", "_first", "_places", "_program", "_whole", "device", "outputs", "problem", "steps")

    def __init__(
        self,
        problem: ConvProblem,
        outputs: tuple[Output, ...],
        device: torch.device,
        steps: tuple[Step, ...],
    ) -> None:
        self.problem = problem
        self.outputs = outputs
        self.device = device
        self.steps = () if problem.empty else steps
        self._bound = [_bind(problem, step) for step in self.steps]
        self._first = self._bound[0] if self._bound else None
        #: One sweep yields everything.
        self._whole = len(self.steps) == 1 and self.steps[0].outputs == outputs and len(outputs) > 1
        #: For each step: which slots it reads, and where among the outputs its results belong.
        self._program = [(_slots_of(step), tuple([outputs.index(o) for o in step.outputs])) for step in self.steps]
        #: Where among the outputs PyTorch's grad_input, grad_weight and grad_bias are.
        self._places = [outputs.index(o) if o in outputs else None for o in gradient_outputs(problem.transposed)]

    def contract(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run a plan of a single pass.

        Shape:
            - a, b: the operands of the pass, in the order of `Backend.bind`.
            - result: the slot that the pass yields.
        """
        if observers or profiler_enabled() or self._first is None:
            return self._contract(a, b, bias)
        return self._first(a, b, bias)

    def _contract(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        if self._first is None:
            return _empty_result(self.problem, self.outputs[0], a, bias)
        return self._observed(0, (a, b), (a, b, bias))

    def all(self, grad_output: Tensor | None, input: Tensor | None, weight: Tensor | None) -> tuple[Tensor, ...]:
        """Run a plan of any outputs on the three slots; the results in the order of ``outputs``.

        Args:
            grad_output, input, weight: the slots; one that no step reads may be None.
        """
        slots = (grad_output, input, weight)
        watched = observers or profiler_enabled()
        if self._whole and not watched:
            return self._bound[0](*slots)
        results: list[Any] = [None] * len(self.outputs)
        for i, (reads, places) in enumerate(self._program):
            operands: Any = tuple([slots[r] for r in reads])
            result = self._observed(i, operands, operands) if watched else self._bound[i](*operands)
            if len(places) == 1:
                results[places[0]] = result
            else:
                for place, one in zip(places, result, strict=True):
                    results[place] = one
        for i, result in enumerate(results):
            if result is None:
                results[i] = self._rest(self.outputs[i], slots)
        return tuple(results)

    def gradients(self, grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        """Run a plan of gradients, in PyTorch's words: (grad_input, grad_weight, grad_bias), None where not asked for.

        Of a transposed problem PyTorch's grad_output is the slot input, and its input the slot grad_output.
        """
        both = (input, grad_output) if self.problem.transposed else (grad_output, input)
        found = self.all(*both, weight)
        return tuple([None if place is None else found[place] for place in self._places])

    def _rest(self, output: Output, slots: tuple[Tensor | None, ...]) -> Tensor:
        """What no step yields: the sum that a grad_bias is, or the result of an empty contraction."""
        p = self.problem
        if output != "grad_bias":
            return _empty_result(p, output, next(t for t in slots if t is not None), None)
        tensor = slots[_SLOTS.index(p.bias_slot)]
        assert tensor is not None
        if tensor.shape[1] != 0:
            return tensor.sum((0, *range(2, p.ndim + 2)))
        return tensor.new_zeros(p.shape_of(p.bias_slot)[1])

    # ---- for those who watch ---------------------------------------------------------------------

    def _observed(self, i: int, operands: tuple[Tensor, ...], args: tuple[Any, ...]) -> Any:
        step = self.steps[i]
        label = f"convgrad::{'+'.join(step.outputs)}[{step.backend.name}]"
        wait = self.device.type == "cuda" and any(o.synchronize for o in observers)
        with record_function(label):
            if wait:
                torch.cuda.synchronize(self.device)
            outer, thread.inside = thread.inside, True  # or a convolution of ATen's would be reported once more
            start = time.perf_counter()
            try:
                result = self._bound[i](*args)
            finally:
                thread.inside = outer
            if wait:
                torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - start
        copies = tuple(
            f"operand {tuple(t.shape)} of strides {t.stride()}"
            for t in operands
            if not is_prepared(step.backend, self.problem, t)
        )
        event = Event(self.problem, step.outputs, step.backend.name, str(self.device), step.reason, copies, seconds)
        for observer in tuple(observers):
            observer(event)
        return result


_SLOTS: tuple[Slot, Slot, Slot] = ("grad_output", "input", "weight")


def _slots_of(step: Step) -> tuple[int, ...]:
    """Which of `_SLOTS` a step reads, in the order in which its backend takes them."""
    reads = OPERANDS[step.outputs[0]] if len(step.outputs) == 1 else _SLOTS  # pyright: ignore[reportArgumentType]
    return tuple([_SLOTS.index(s) for s in reads])


def _bind(problem: ConvProblem, step: Step) -> Callable[..., Any]:
    """One function that lays out the operands, gives a workspace, adds the bias where the backend does not."""
    backend = step.backend
    size = backend.workspace(problem, step.outputs)
    as_they_are = "any" in backend.layouts and not size

    def scratch(like: Tensor) -> Tensor | None:
        return torch.empty(size, dtype=torch.uint8, device=like.device) if size else None

    kernel = backend.bind(problem, step.outputs)
    if len(step.outputs) > 1:

        def run_sweep(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            slots = [prepare(backend, problem, t) for t in (grad_output, input, weight)]
            return kernel(*slots, scratch(weight))

        return kernel if as_they_are else run_sweep
    fused = backend.fuses_bias(problem)
    channels = (-1, *(1,) * problem.ndim)

    def run_pass(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        a, b = prepare(backend, problem, a), prepare(backend, problem, b)
        if bias is None:
            return kernel(a, b, None, scratch(a))
        if fused:
            return kernel(a, b, prepare_bias(bias), scratch(a))
        return kernel(a, b, None, scratch(a)).add_(bias.view(channels))

    return kernel if as_they_are and fused else run_pass


def _empty_result(problem: ConvProblem, output: Output, like: Tensor, bias: Tensor | None) -> Tensor:
    """The result of a contraction over nothing: zeros, plus bias."""
    slot = RESULT[output]  # pyright: ignore[reportArgumentType]
    result = torch.zeros(problem.shape_of(slot), dtype=like.dtype, device=like.device)
    if bias is not None:
        result += bias.view(-1, *(1,) * problem.ndim)
    return result.contiguous(memory_format=problem.memory_format)


_plans = BoundedCache()


def plan_for(problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> Plan:
    """The plan under the flags and the request in force; made once and remembered.

    Raises:
        BackendError: a requested backend cannot compute the outputs, or none can.
    """
    flags = settings.current()
    key = (problem, outputs, device, active(), flags)
    plan = _plans.get(key)
    if plan is None:
        outputs = in_order(outputs)
        steps = () if problem.empty else choose(problem, outputs, device, flags, active())
        plan = _plans[key] = Plan(problem, outputs, device, steps)
    return plan
