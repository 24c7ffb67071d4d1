"""A plan: the kernels that compute the outputs asked for, bound to their problem; a call runs them and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._compat import profiler_enabled
from ..backends import Backend, operand_format, runs_as_stated, statable_arguments
from ..problem import OPERANDS, ConvProblem, Output, Outputs, Role, Slot, add_bias, gradient_outputs, sum_of_bias
from .events import Event, observed, observers

SLOTS: tuple[Slot, Slot, Slot] = ("grad_output", "input", "weight")


class Step(NamedTuple):
    """One call of one backend, and why it was chosen."""

    backend: Backend
    outputs: Outputs
    reason: str
    #: The outputs of which measuring, once there is time, may change the choice; else none.
    unsettled: Outputs = ()
    #: The steps that rules propose, itself the first; its first call times them against PyTorch's own. Else none.
    proposed: tuple[Step, ...] = ()


def slots_of(outputs: Outputs) -> tuple[int, ...]:
    """Return the operands that one call for these outputs reads, in the order of its backend's arguments."""
    slots = OPERANDS[outputs[0]] if len(outputs) == 1 else SLOTS  # pyright: ignore[reportArgumentType]
    return tuple([SLOTS.index(s) for s in slots])


@dataclass(slots=True, eq=False)
class Plan:
    """The kernels for one problem, one set of outputs and one device, under the flags and request at its making."""

    problem: ConvProblem
    #: In the order of ``problem.OUTPUTS``.
    outputs: Outputs
    device: torch.device
    steps: tuple[Step, ...]
    #: The `use_backend` request under which it was made.
    request: Any = None
    #: It is valid until these two change; without flags, never for a backward pass.
    generation: int = -1
    flags: object = None
    #: Makes the kernel of a step that measuring may change.
    wrap: Callable[..., Callable[..., Any]] | None = None
    #: For the plan of a call, the form from which its derivatives are made.
    form: Any = None
    #: The results of the functions of these names (`calls.backward_of`, `calls.pytorch_autograd_suffices`).
    backwards: dict[tuple[bool, ...], Plan] = field(default_factory=dict)
    suffices: dict[tuple[bool, bool], bool] = field(default_factory=dict)
    fusion_gains: bool | None = None
    #: A call may measure, so neither PyTorch's own operator nor an entry of the table may replace it.
    unsettled: bool = field(init=False)
    #: Whether PyTorch's own operator, called with the operands as they are, computes all of it; and its arguments.
    aten: bool = field(init=False)
    arguments: tuple[Any, ...] = field(init=False)
    #: The outputs that no step yields: the sum for a ``grad_bias``, or all of an empty problem.
    rests: list[Output] = field(init=False)
    _kernels: list[Callable[..., Any]] | None = field(init=False, default=None)
    #: For each step: which slots it reads, and where among the outputs its results belong.
    _program: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(init=False)
    #: Where among the outputs PyTorch's grad_input, grad_weight and grad_bias are; -1 for none.
    _places: list[int] = field(init=False)

    # What `ops.autograd.Contraction` reads of a `Call`, and of a plan in its place.
    yields: ClassVar[Role] = "output"
    transformed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        outputs, steps = self.outputs, self.steps
        self.unsettled = any(step.unsettled or step.proposed for step in steps)
        atens = [step.backend.name for step in steps] == ["aten"] and not self.unsettled
        self.aten = atens and runs_as_stated(self.problem)
        self.arguments = statable_arguments(self.problem) if self.aten else ()
        self.rests = [o for o in outputs if not any(o in step.outputs for step in steps)]
        self._program = [(slots_of(step.outputs), tuple([outputs.index(o) for o in step.outputs])) for step in steps]
        gradients = gradient_outputs(self.problem.transposed)
        self._places = [outputs.index(o) if o in outputs else -1 for o in gradients]

    def bind(self, like: tuple[Tensor | None, ...] = ()) -> list[Callable[..., Any]]:
        """Return the kernel of each step, bound when first needed: many plans are explained and never run."""
        if self._kernels is None:
            kernels, wrap = [bind_step(self.problem, step, like) for step in self.steps], self.wrap
            for i, step in enumerate(self.steps):
                if wrap and (step.unsettled or step.proposed):
                    kernels[i] = wrap(kernels[i], self.problem, step, self.device)
            self._kernels = kernels
        return self._kernels

    def contract(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run a plan of a single pass on its operands, in the order of ``Backend.bind``."""
        if not self.steps:
            return self._empty(self.outputs[0], a, bias)
        if observers or profiler_enabled():
            return self._observed(0, (a, b), (a, b, bias))
        return (self._kernels or self.bind())[0](a, b, bias)

    def gradients(
        self, grad_output: Tensor, input: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Run a plan of gradients: (grad_input, grad_weight, grad_bias) as the user knows them, None for the others.

        The operands are the user's: of a transposed problem grad_output is the input. None for one that no step reads.
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
        for output in self.rests:
            if output == "grad_bias":
                slot = self.problem.bias_slot
                result = sum_of_bias(slots[SLOTS.index(slot)], self.problem.shape_of(slot)[1])
            else:
                result = self._empty(output, grad_output, None)
            results[self.outputs.index(output)] = result
        one, two, three = self._places
        return results[one], results[two], results[three]

    def _empty(self, output: Output, like: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result of a contraction over nothing: zeros, plus bias."""
        zeros = like.new_zeros(self.problem.result_shape(output))
        return add_bias(zeros, bias).contiguous(memory_format=self.problem.memory_format)

    def _observed(self, i: int, operands: tuple[Tensor, ...], args: tuple[Any, ...]) -> Any:
        step = self.steps[i]
        copied = [t for t in operands if not is_prepared(step.backend, self.problem, t)]
        copies = tuple(f"operand {tuple(t.shape)} of strides {t.stride()}" for t in copied)
        event = self.event(step.backend.name, step.reason)._replace(outputs=step.outputs, copies=copies)
        return observed(event, partial(self.bind()[i], *args))

    def event(self, backend: str, reason: str) -> Event:
        """Return a call that observers are told of."""
        return Event(self.problem, self.outputs, backend, str(self.device), reason)


# ---- the function of a step, and operands in the layout in which its backend takes them ------------------------


def bind_step(problem: ConvProblem, step: Step, like: tuple[Tensor | None, ...] = ()) -> Callable[..., Any]:
    """Return a function that copies operands into a layout of the backend, allocates a workspace, and adds a bias.

    Later operands have the strides of those ``like`` which it is called, and none is lazily negated: where the backend
    takes these as they are, its own function is returned.
    """
    backend = step.backend
    kernel = backend.bind(problem, step.outputs)
    size = backend.workspace(problem, step.outputs)
    one_pass = len(step.outputs) == 1
    fused = backend.fuses_bias(problem)
    if "any" in backend.layouts and not size and (fused or not one_pass):
        return kernel
    ask_all = problem.dtype.is_complex  # a lazy conjugate is possible
    if like and not ask_all and not size:
        a, b, bias = like
        taken = all(t is not None and is_prepared(backend, problem, t) for t in (a, b))
        if taken and (bias is None or (fused and bias.is_contiguous())):
            return kernel
    # Where any strides will do, contiguous operands are not looked at further.
    layout = operand_format(backend, problem) or torch.contiguous_format

    def ready(t: Tensor) -> Tensor:
        return prepare(backend, problem, t) if ask_all or not t.is_contiguous(memory_format=layout) or t.is_neg() else t

    def scratch(like: Tensor) -> Tensor | None:
        return torch.empty(size, dtype=torch.uint8, device=like.device) if size else None

    def run_several(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return kernel(ready(grad_output), ready(input), ready(weight), scratch(weight))

    def run_pass(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        # Written out, for a call of `ready` would be most of what a small convolution costs beside its kernel.
        if ask_all or not a.is_contiguous(memory_format=layout) or a.is_neg():
            a = prepare(backend, problem, a)
        if ask_all or not b.is_contiguous(memory_format=layout) or b.is_neg():
            b = prepare(backend, problem, b)
        workspace = scratch(a) if size else None
        if bias is None or not fused:
            result = kernel(a, b, None, workspace)
            return result if bias is None else result.add_(bias.view(-1, *(1,) * problem.ndim))
        bias = bias.resolve_conj().resolve_neg().contiguous()  # one that is expanded, or strided in another tensor
        return kernel(a, b, bias, workspace)

    return run_pass if one_pass else run_several


def is_prepared(backend: Backend, problem: ConvProblem, tensor: Tensor) -> bool:
    """Whether the backend takes this tensor as it is."""
    if "any" in backend.layouts:
        return True
    if tensor.is_conj() or tensor.is_neg():
        return False
    memory_format = operand_format(backend, problem)
    return memory_format is None or tensor.is_contiguous(memory_format=memory_format)


def prepare(backend: Backend, problem: ConvProblem, tensor: Tensor) -> Tensor:
    """Return the tensor as the backend takes it: itself, or a copy in `operand_format`, nothing of it lazy."""
    if is_prepared(backend, problem, tensor):
        return tensor
    tensor, memory_format = tensor.resolve_conj().resolve_neg(), operand_format(backend, problem)
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)
