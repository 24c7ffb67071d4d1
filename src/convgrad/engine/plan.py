"""A plan: the kernels that compute the outputs asked for, bound to their problem and ready to be called.

Everything that can be decided once a problem is decided here; a call runs the bound kernels and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat import profiler_enabled
from ..backends import runs_as_stated, statable_arguments, warn_if_absent
from ..problem import (
    ConvProblem,
    Output,
    Outputs,
    Role,
    add_bias,
    check_output_padding,
    gradient_outputs,
    in_order,
    sum_of_bias,
)
from .cache import generation
from .choice import choose
from .events import observed, observers
from .measure.measurer import confirmed, look_again
from .request import Request, active, resume
from .steps import SLOTS, Step, bind_step, is_prepared, slots_of

#: PyTorch's second derivatives of a convolution in groups take a number of kernel calls that grows with the groups.
#: Up to here they are as fast as ours (0.55x to 1.0x of our time at 2 to 32 groups; 1.1x at 64, 2.3x at 256).
_MOST_GROUPS = 32


class Plan:
    """The kernels for one problem, one set of outputs and one device, under the flags and request at its making.

    Attributes:
        outputs: in the order of ``problem.OUTPUTS``.
        steps: the calls of backends, each with its reason. A ``grad_bias`` that no step yields is a sum.
        unsettled: the kernel makes the choice again, so neither PyTorch's own operator nor an entry of the table may
            replace it.
        aten: whether PyTorch's own operator, called with the operands as they are, computes all of it.
        arguments: of that operator, if so.
        backwards, suffices: the results of `backward` and `pytorch_autograd_suffices`.
        form: for the plan of a call, the form from which its derivatives are made.
        request: the `use_backend` request under which it was made.
        flags, generation: the plan is valid until one of them changes; without flags, never for a backward pass.
    """

    #: What `ops.autograd.Contraction` reads of a `Call`, and of a plan in its place.
    yields: Role = "output"
    transformed = False

    __slots__ = (
        "_kernels", "_places", "_program", "_rests", "arguments", "aten", "backwards", "device", "flags", "form",
        "generation", "outputs", "problem", "request", "steps", "suffices", "unsettled",
    )  # fmt: skip

    def __init__(
        self, problem: ConvProblem, outputs: Outputs, device: torch.device, steps: tuple[Step, ...], since: int
    ) -> None:
        self.problem, self.outputs, self.device, self.steps = problem, outputs, device, steps
        one_call = len(steps) == 1 and steps[0].backend.name == "aten"
        self.unsettled = any(step.unsettled or step.proposed for step in steps)
        self.aten = one_call and not self.unsettled and runs_as_stated(problem)
        self.arguments: tuple[Any, ...] = statable_arguments(problem) if self.aten else ()
        self.form: Any = None
        self.request: Request | None = active()
        self.flags: object = None
        self.generation = since
        self._kernels: list[Callable[..., Any]] | None = None
        #: For each step: which slots it reads, and where among the outputs its results belong.
        self._program = [(slots_of(step.outputs), tuple([outputs.index(o) for o in step.outputs])) for step in steps]
        yielded = {o for step in steps for o in step.outputs}
        self._rests = [i for i, output in enumerate(outputs) if output not in yielded]
        #: Where among the outputs PyTorch's grad_input, grad_weight and grad_bias are; -1 for none.
        self._places = [outputs.index(o) if o in outputs else -1 for o in gradient_outputs(problem.transposed)]
        self.backwards: dict[tuple[bool, ...], Plan] = {}
        self.suffices: dict[tuple[bool, bool], bool] = {}

    # ---- running -------------------------------------------------------------------------------------

    def bind(self, like: tuple[Tensor | None, ...] = ()) -> list[Callable[..., Any]]:
        """Return the kernel of each step; bound when first needed, for many plans are explained and never run.

        Args:
            like: operands and bias of a pass, as `bind_step` takes them.
        """
        if self._kernels is None:
            kernels = [bind_step(self.problem, step, like) for step in self.steps]
            for i, step in enumerate(self.steps):
                if step.proposed:
                    kernels[i] = confirmed(kernels[i], self.problem, step, self.device)
                elif step.unsettled:
                    kernels[i] = look_again(kernels[i], self.device)
            self._kernels = kernels
        return self._kernels

    def contract(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run a plan of a single pass.

        Shape:
            - a, b: the operands of the pass, in the order of ``Backend.bind``.
            - result: the slot that the pass yields.
        """
        if not self.steps:
            return _empty_result(self.problem, self.outputs[0], a, bias)
        if observers or profiler_enabled():
            return self._observed(0, (a, b), (a, b, bias))
        return (self._kernels or self.bind())[0](a, b, bias)

    def gradients(
        self, grad_output: Tensor, input: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Run a plan of gradients: (grad_input, grad_weight, grad_bias) as the user knows them, None for the others.

        Args:
            grad_output, input, weight: of the user's convolution; one that no step reads may be None. In a transposed
                problem, grad_output fills the slot input, and input the slot grad_output.
        """
        slots: Any = (input, grad_output, weight) if self.problem.transposed else (grad_output, input, weight)
        kernels = self._kernels or self.bind()
        watched = observers or profiler_enabled()
        results: list[Any] = [None] * (len(self.outputs) + 1)  # the last one is never filled
        for i, (reads, places) in enumerate(self._program):
            operands = slots if len(reads) == 3 else (slots[reads[0]], slots[reads[1]])
            result = self._observed(i, operands, operands) if watched else kernels[i](*operands)
            if len(places) == 1:
                results[places[0]] = result
            else:
                for place, one in zip(places, result, strict=True):
                    results[place] = one
        for i in self._rests:
            results[i] = self._rest(self.outputs[i], slots)
        one, two, three = self._places
        return results[one], results[two], results[three]

    def _rest(self, output: Output, slots: tuple[Tensor | None, ...]) -> Tensor:
        """Return an output that no step yields: the sum for grad_bias, or the result of an empty contraction."""
        p = self.problem
        if output != "grad_bias":
            return _empty_result(p, output, next(t for t in slots if t is not None), None)
        tensor = slots[SLOTS.index(p.bias_slot)]
        assert tensor is not None
        return sum_of_bias(tensor, p.shape_of(p.bias_slot)[1])

    # ---- the backward of a forward plan ------------------------------------------------------------------

    def backward(self, needs: tuple[bool, ...]) -> Plan:
        """Return the plan of the gradients of (input, weight, bias) that are needed; made when it is first needed."""
        plan = self.backwards.get(needs)
        if plan is None:
            if self.form is not None:
                *_, transposed, output_padding, _ = self.form.arguments
                check_output_padding(transposed, output_padding)
            with resume(self.request):
                outputs = gradient_outputs(self.problem.transposed, needs)
                plan = plan_for(self.problem.replace(has_bias=False), outputs, self.device, now=True)
            self.backwards[needs] = plan
        return plan

    def pytorch_autograd_suffices(self, input: bool, weight: bool) -> bool:
        """Whether PyTorch's own call, recorded by its own autograd, computes all of it and loses nothing by it.

        Args:
            input, weight: which of them require a gradient. If the weight does not, PyTorch would save an input that
                no gradient needs; ours does not.
        """
        p = self.problem
        lost = not weight or p.depthwise or p.groups > _MOST_GROUPS or self.request is not None
        if not self.aten or lost or self.device.type != "cpu" or any(self.arguments[4] + self.form.arguments[4]):
            found = False
        else:
            found = all(self.backward((input, True, bias)).aten for bias in {False, p.has_bias})
        self.suffices[input, weight] = found
        return found

    # ---- observed -------------------------------------------------------------------------------------------

    def _observed(self, i: int, operands: tuple[Tensor, ...], args: tuple[Any, ...]) -> Any:
        step = self.steps[i]
        copies = tuple(
            f"operand {tuple(t.shape)} of strides {t.stride()}"
            for t in operands
            if not is_prepared(step.backend, self.problem, t)
        )
        call = partial(self.bind()[i], *args)
        return observed(self.problem, step.outputs, step.backend.name, self.device, step.reason, call, copies)


def _empty_result(problem: ConvProblem, output: Output, like: Tensor, bias: Tensor | None) -> Tensor:
    """The result of a contraction over nothing: zeros, plus bias."""
    zeros = torch.zeros(problem.result_shape(output), dtype=like.dtype, device=like.device)
    return add_bias(zeros, bias).contiguous(memory_format=problem.memory_format)


def plan_for(problem: ConvProblem, outputs: Outputs, device: torch.device, now: bool = False) -> Plan:
    """A new plan under the flags and the request in force. The plan of a call comes from `resolve`, which keeps it.

    Args:
        now: it is about to run, so that measuring makes sense where that is on.

    Raises:
        BackendError: a requested backend cannot compute the outputs, or none can.
    """
    outputs, since = in_order(outputs), generation[0]
    if now and device.type == "cpu":
        warn_if_absent()
    steps = () if problem.empty else choose(problem, outputs, device, active(), now=now)
    return Plan(problem, outputs, device, steps, since)
