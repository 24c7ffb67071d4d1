"""From a call to its plan: `find` looks it up under one key; the first time, `make` validates the call and plans it.

Every call of the library ends here: of an eager function, of a dispatcher's kernel, of a process that was taken over.
The functions ``checked_*`` only validate. They accept symbolic sizes, so the operators without data use them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from marshal import dumps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .._compat import (
    any_autocast,
    device_modes,
    dispatch_modes,
    function_modes,
    functorch_active,
    jit_tracing,
    suggested_format,
)
from ..backends import reads_odd_strides, warn_if_absent
from ..problem import (
    ConvProblem,
    Form,
    Geometry,
    Outputs,
    PaddingMode,
    check_backward,
    check_memory,
    check_operands,
    check_output_padding,
    conv_geometry,
    convolution_shape,
    gradient_outputs,
    in_order,
    layout_of,
    problem_of,
)
from ..settings import flags
from .cache import generation, plans, remember
from .choice import BY_USER, choose
from .measure.measurer import watched
from .plan import Plan
from .request import active, requested, resume

Ints = Sequence[int]
#: PyTorch's second derivatives of a convolution in groups take a number of kernel calls that grows with the groups.
#: Up to here they are as fast as ours (0.55x to 1.0x of our time at 2 to 32 groups; 1.1x at 64, 2.3x at 256).
_MOST_GROUPS = 32


def is_plain(a: Tensor, b: Tensor, c: Tensor | None) -> bool:
    """Return whether a call is eager, without subclass, transform, mode, forward-mode level, autocast or trace."""
    return is_eager(a, b, c) and not any_autocast()


def is_eager(a: Tensor, b: Tensor, c: Tensor | None) -> bool:
    """Return whether a call is a plain one (`is_plain`), but for autocast."""
    return not (
        is_dynamo_compiling()  # first: the compiler folds it, and traces nothing of what follows
        or not (a.__class__ is Tensor or a.__class__ is Parameter)
        or not (b.__class__ is Parameter or b.__class__ is Tensor)
        or not (c is None or c.__class__ is Parameter or c.__class__ is Tensor)
        or functorch_active()
        or dispatch_modes()
        or ((modes := function_modes()) and modes > device_modes())
        or forward_ad._current_level >= 0
        or jit_tracing() is not None
    )


def find(
    op: str,
    raw: tuple[Any, ...],
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    memory_format: torch.memory_format | None = None,
    below: bool = False,
) -> Any:
    """Look a call up: its `Plan` if it was seen before, else the key (a tuple) under which to keep one.

    None if it has no key or must go through the dispatcher: ``below`` it, any call has been there. The key holds all
    that validation and choice depend on: ``raw``, the arguments as the caller wrote them, as the bytes that `marshal`
    makes of them, for 1, 1.0 and True are equal as keys, but PyTorch does not accept one for another.
    """
    if not below and not is_plain(a, b, c):
        return None
    try:
        key = (
            op, dumps(raw, 2),
            a.shape, a.stride(), a.dtype, a.device,
            b.shape, b.stride(), b.dtype, b.device,
            None if c is None else (c.shape, c.stride(), c.dtype, c.device),
            memory_format, requested(), flags(a),
        )  # fmt: skip
    except (ValueError, RuntimeError):  # an argument that has no bytes, a tensor that has no strides
        return None
    plan = plans.get(key, key)
    if below or (plan.__class__ is Plan and plan.aten):  # PyTorch's own operators know such tensors
        return plan
    try:  # no memory of their own: batched, escaped from a transform, or the zeros of forward mode
        there = a.data_ptr() and b.data_ptr() and (c is None or c.data_ptr())
    except RuntimeError:
        return None
    # The imaginary part of a conjugate is negated.
    return None if not there or a.is_neg() or b.is_neg() or (c is not None and c.is_neg()) else plan


def resolve(op: str, raw: tuple[Any, ...], *operands: Any, memory_format: torch.memory_format | None = None) -> Plan:
    """Return the plan for a call of an operator below the dispatcher: looked up, or made."""
    found = find(f"convgrad::{op}", raw, *operands, memory_format=memory_format, below=True)
    return found if isinstance(found, Plan) else make(found, op, raw, *operands, memory_format=memory_format)


def make(
    key: tuple[Any, ...] | None, op: str, raw: tuple[Any, ...], *operands: Any,
    memory_format: torch.memory_format | None = None, padding_mode: PaddingMode = "zeros",
) -> Plan:  # fmt: skip
    """Validate a call of an operator, plan it, and remember the plan under a key; only a ``convolution`` has a mode."""
    checked = _CHECKS[op](*operands, *raw, **({} if memory_format is None else {"memory_format": memory_format}))
    first, g, forward = operands[0], checked.geometry, op == "convolution"
    sizes, layout = (checked.input_size, checked.weight_size, checked.output_size), checked.layout
    has_bias = forward and operands[2] is not None
    problem = problem_of(*sizes, g, dtype=first.dtype, memory_format=layout, has_bias=has_bias)
    if padding_mode != "zeros":
        problem = problem.replace(padding_mode=padding_mode)
    outputs: Outputs = (problem.bias_pass,) if forward else gradient_outputs(g.transposed, checked.mask)
    if first.is_cpu:
        warn_if_absent()
        check_memory(problem, outputs, operands)
    plan = plan_for(problem, outputs, first.device)
    if plan.aten and len(operands) == 3:  # an operator of PyTorch's too, which would get its operands as they are
        plan.aten = not reads_odd_strides(problem, *(operands[:2] if forward else operands[1:]))
    if forward:
        plan.form = Form(first.shape, operands[1].shape, raw, padding_mode=padding_mode)
    plan.flags = None if first.is_complex() else flags(first)
    plan.bind(operands if forward else ())
    if key is not None:
        remember(key, plan, plan.generation)
    return plan


def plan_for(problem: ConvProblem, outputs: Outputs, device: torch.device) -> Plan:
    """Return a new plan under the flags and the request in force."""
    outputs, since, request = in_order(outputs), generation[0], active()
    steps = () if problem.empty else choose(problem, outputs, device, request)
    return Plan(problem, outputs, device, steps, request, since, wrap=watched)


# ---- the backward of a forward plan ------------------------------------------------------------------------


def backward_of(plan: Plan, needs: tuple[bool, ...]) -> Plan:
    """Return the plan of the gradients of (input, weight, bias) that are needed; made when it is first needed."""
    found = plan.backwards.get(needs)
    if found is None:
        if plan.form is not None:
            *_, transposed, output_padding, _ = plan.form.arguments
            check_output_padding(transposed, output_padding)
        with resume(plan.request):
            outputs = gradient_outputs(plan.problem.transposed, needs)
            found = plan_for(plan.problem.replace(has_bias=False), outputs, plan.device)
        plan.backwards[needs] = found
    return found


def pytorch_autograd_suffices(plan: Plan, input: bool, weight: bool) -> bool:
    """Whether PyTorch's own call, recorded by its own autograd, computes all of it and loses nothing by it.

    ``input`` and ``weight`` say which require a gradient: for a frozen weight, PyTorch would save an input for nothing.
    """
    p = plan.problem
    lost = not weight or p.depthwise or p.groups > _MOST_GROUPS or plan.request is not None
    found = plan.aten and not lost and plan.device.type == "cpu" and not any(plan.arguments[4] + plan.form.arguments[4])
    if found:
        found = all(backward_of(plan, (input, True, bias)).aten for bias in {False, p.has_bias})
    plan.suffices[input, weight] = found
    return found


#: Of a linear layer as a convolution: stride, padding, dilation, transposed, output_padding and groups.
POINTWISE = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)


def as_pointwise(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., in_features] as an image [1, in_features, 1, rows] in channels_last, the weight as a kernel 1x1."""
    return rows.view(1, 1, -1, rows.shape[-1]).permute(0, 3, 1, 2), weight.view(*weight.shape, 1, 1)


def beats_matmul(plan: Plan) -> bool:
    """Whether a linear layer's plan leaves any part to a faster backend than torch's matrix product, or is unsettled.

    What it leaves to PyTorch must be that product.
    """
    steps = (*plan.steps, *backward_of(plan, (True, True, plan.problem.has_bias)).steps)
    others = [step for step in steps if step.backend.name != "aten:matmul"]
    for step in others:
        known = plan.request is not None or step.reason.startswith((BY_USER, "measured"))
        if step.backend.from_pytorch or not (known or step.backend.name.startswith("native")):
            return False
    return bool(others) or any(step.unsettled for step in steps)


# ---- validation -------------------------------------------------------------------------


class Checked(NamedTuple):
    """A validated call, as its user sees it: of a transposed convolution, not of the plain problem behind it."""

    geometry: Geometry
    input_size: Ints
    weight_size: Ints
    output_size: Ints
    #: The layout in which PyTorch would return the results.
    layout: torch.memory_format
    #: Which gradients to compute.
    mask: Sequence[bool] = (True, True, True)


def checked_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Checked:
    """Validate a convolution's operands: real, fake or meta."""
    g = conv_geometry(weight.shape, *arguments)
    shape = convolution_shape(input.shape, weight.shape, None if bias is None else bias.shape, g)
    check_operands(("input", input), ("weight", weight), ("bias", bias))
    return Checked(g, input.shape, weight.shape, shape, layout_of(input, weight, g))


def checked_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Ints | None, *arguments: Any
) -> Checked:
    """Validate the operands of ``convolution_backward``."""
    *form, mask = arguments
    g = conv_geometry(weight.shape, *form)
    check_backward(grad_output.shape, input.shape, weight.shape, bias_sizes, g, mask)
    check_operands(("grad_output", grad_output), ("input", input), ("weight", weight))
    return Checked(g, input.shape, weight.shape, grad_output.shape, layout_of(input, weight, g), mask)


def _checked_gradient(
    of_weight: bool,
    grad_output: Tensor,
    other: Tensor,
    size: Ints,
    *arguments: Any,
    memory_format: torch.memory_format | None = None,
) -> Checked:
    """Validate the operands of ``grad_input`` or ``grad_weight``; without a layout, they decide."""
    input_size, weight_size = (other.shape, size) if of_weight else (size, other.shape)
    g = conv_geometry(weight_size, *arguments)
    check_backward(grad_output.shape, input_size, weight_size, None, g)
    check_operands(("grad_output", grad_output), ("input" if of_weight else "weight", other))
    if memory_format is None:  # the missing operand: a contiguous weight, an input in the layout of grad_output
        known = torch.contiguous_format if of_weight else suggested_format(grad_output)
        missing = torch.empty(tuple(size), dtype=other.dtype, device=other.device, memory_format=known)
        memory_format = layout_of(other, missing, g) if of_weight else layout_of(missing, other, g)
    return Checked(g, input_size, weight_size, grad_output.shape, memory_format, (not of_weight, of_weight, False))


checked_grad_input, checked_grad_weight = partial(_checked_gradient, False), partial(_checked_gradient, True)
_CHECKS: dict[str, Callable[..., Checked]] = {
    "convolution": checked_convolution,
    "convolution_backward": checked_backward,
    "grad_input": checked_grad_input,
    "grad_weight": checked_grad_weight,
}
