"""The operators at the ``Autograd`` dispatch key: where the derivative table of `calculus` meets PyTorch's autograd.

A kernel of our own at this key, rather than ``register_autograd``: it keeps forward-mode tangents, composes with every
functorch transform, and computes only the gradients that the running backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import _compat, problem
from ..engine import Plan, Request, active, backward_of, find, generation, layout_of, resume
from ..problem import CONTRACTED, Form, Role
from ..settings import flags
from . import decompositions, flops, lowering

_C: Any = torch._C
_recording = torch.is_grad_enabled
_VIEWS = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)


class Call(NamedTuple):
    """One call of an operator, for `Contraction`."""

    below: Callable[..., Tensor]
    yields: Role
    form: Form
    request: Request | None
    #: A functorch level or a forward-mode level is active.
    transformed: bool = False


class Contraction(torch.autograd.Function):
    """Any operator that yields one role; its derivatives of every order follow from `calculus`."""

    @staticmethod
    def forward(ctx: Any, call: Any, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
        """Compute by a `Plan`, or by a `Call` that the dispatcher handed over, and save what a derivative will need."""
        ctx.call = call
        _, needs_first, needs_second, _ = ctx.needs_input_grad
        ctx.save_for_backward(first if needs_second else None, second if needs_first else None)
        if not call.transformed:
            compute = call.contract if call.__class__ is Plan else call.below
            output = compute(first, second, bias)
            if output._is_view():  # autograd refuses to change a returned view in place
                with _C._ExcludeDispatchKeyGuard(_VIEWS):
                    return torch.ops.aten.alias.default(output)
            return output
        ctx.save_for_forward(first, second)
        ctx.set_materialize_grads(False)  # a zero in place of a tangent would be contracted like any other
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # for the functorch levels below this one
            return call.below(first, second, bias)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One contraction for each gradient that the running backward pass needs."""
        if _compat.any_autocast() and not is_dynamo_compiling():
            with _compat.without_autocast():  # PyTorch's convolution casts nothing on its way back, either
                return Contraction.backward(ctx, cotangent)
        call = ctx.call
        first, second = ctx.saved_tensors
        if call.__class__ is Plan and _is_valid(call, cotangent):
            needs = _needed(ctx)
            plan = call.backwards.get(needs) or backward_of(call, needs)
            grad_first, grad_second, grad_bias = plan.gradients(cotangent, first, second)
            return None, grad_first, grad_second, grad_bias
        # Under these, autograd's engine does not run and cannot be asked.
        alone = torch.compiler.is_compiling() or _compat.functorch_active()
        needs = ctx.needs_input_grad[1:] if alone else _needed(ctx)
        if cotangent is None:
            return (None,) * 4
        with resume(call.request):
            return (None, *_gradients(call.form, call.yields, cotangent, first, second, needs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Forward mode: by linearity in each operand."""
        _, first, second, bias = tangents
        form, yields = ctx.call.form, ctx.call.yields
        roles = CONTRACTED[yields]
        with _compat.outer_tangents():
            operands = dict(zip(roles, map(_compat.primal, ctx.saved_tensors), strict=True))
            moved = problem.tangent(form, yields, operands, dict(zip(roles, (first, second), strict=True)))
            return problem.add_bias(bias.new_zeros(form.output_size) if moved is None else moved, bias)


class Linear(Contraction):
    """The contraction of a linear layer: a name of its own in what PyTorch's profiler shows."""


apply, apply_linear = _compat.apply_of(Contraction), _compat.apply_of(Linear)
_SingleLevel = _compat.single_level(Contraction)


def _is_valid(plan: Plan, cotangent: Tensor) -> bool:
    """Whether a plan may compute the backward pass: nothing has changed since, and no derivative of it is needed."""
    return (
        not is_dynamo_compiling()
        and cotangent.__class__ is Tensor
        and generation[0] == plan.generation
        and not _recording()
        and not _compat.dispatch_modes()
        and _compat.has_storage(cotangent)
        and cotangent.data_ptr() != 0
        and flags(cotangent) == plan.flags
    )


def _needed(ctx: Any) -> tuple[bool, bool, bool]:
    """Return which of (first, second, bias) the running backward pass needs; ``autograd.grad(y, x)`` needs one."""
    _, *needs = ctx.needs_input_grad
    if needs.count(True) > 1:  # with one, that one is needed: else this would not run
        nodes = ctx.next_functions  # one for each tensor argument, in their order
        for i in (0, 1, 2):
            if needs[i]:
                try:  # noqa: SIM105 - a `with` costs more than the question
                    needs[i] = _compat.will_engine_execute(nodes[i][0])
                except RuntimeError:  # a leaf that was asked for
                    pass
    return tuple(needs)


def with_layout(form: Form, input: Tensor, weight: Tensor) -> Form:
    """Return a form whose gradients have the layout that PyTorch's would have for these operands."""
    geometry = problem.conv_geometry(weight.shape, *form.arguments)
    return form._replace(memory_format=layout_of(input, weight, geometry))


def _gradients_of_padded_copy(
    form: Form, cotangent: Tensor, input: Tensor | None, weight: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients, differentiable themselves, of a convolution with a padding mode: those of the padded copy."""
    stride, padding, *rest = form.arguments
    sides, mode = problem.padding_pairs(padding, len(form.input_size) - 2), form.padding_mode
    size = (*form.input_size[:2], *(n + sum(pair) for n, pair in zip(form.input_size[2:], sides, strict=True)))
    copied = Form(size, form.weight_size, (stride, (0,) * len(sides), *rest))
    copy = None if input is None else problem.pad(input, sides, mode)
    grad_input, grad_weight, grad_bias = _gradients(copied, "output", cotangent, copy, weight, needs)
    return None if grad_input is None else problem.fold(grad_input, sides, mode), grad_weight, grad_bias


def _gradients(
    form: Form, yields: Role, cotangent: Tensor, first: Tensor | None, second: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    if form.padding_mode != "zeros":
        return _gradients_of_padded_copy(form, cotangent, first, second, needs)
    if yields == "output" and first is not None and second is not None:
        if needs[0] and needs[1]:  # both at once, for a joint backward
            sizes, mask = [form.bias_size] if needs[2] else None, [True, True, needs[2]]
            backward = torch.ops.convgrad.convolution_backward.default
            return backward(cotangent, first.conj(), second.conj(), sizes, *form.arguments, mask)
        form = with_layout(form, first, second)
    roles = CONTRACTED[yields]
    operands = dict(zip(roles, (first, second), strict=True))
    one, two = (
        problem.derivative(form, yields, role, cotangent, operands) if need else None
        for role, need in zip(roles, needs[:2], strict=True)
    )
    return one, two, problem.sum_of_bias(cotangent, form.bias_size) if needs[2] else None


# ---- kernels at the key --------------------------------------------------------------------------


def _below_autograd(op: Any, keyset: Any, operands: tuple[Any, ...], rest: Any) -> Callable[..., Any]:
    """Return the operator below autograd, or the one that a graph which is being traced gets instead."""
    if _compat.dispatch_modes():
        flops.register()
    traced = type(operands[0]).__name__ == "FunctionalTensor"  # by AOTAutograd
    call = lowering.traced_operator(op, operands, rest) if traced else None
    call = call or partial(op.redispatch, keyset & _C._after_autograd_keyset)

    def below(*args: Any, **options: Any) -> Any:
        with _C._AutoDispatchBelowAutograd():
            return call(*args, **options)

    return below


def _differentiable(
    op: Any, keyset: Any, yields: Role, form: Form, operands: tuple[Tensor, Tensor, Tensor | None], rest: Any,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Call the operator below autograd, through `Contraction` where a derivative may be needed."""
    call_below = _below_autograd(op, keyset, operands, rest)

    def below(first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
        args = (first, second, bias) if yields == "output" else (first, second)
        return call_below(*args, *rest, **options)

    transformed = _compat.functorch_active() or _compat.forward_ad_active()
    if not transformed and not _recorded(*operands):
        return below(*operands)
    first, second, _ = operands
    if yields == "output" and not (first.requires_grad and second.requires_grad):
        form = with_layout(form, first, second)  # later one of the operands is missing
    call = Call(below, yields, form, active(), transformed)
    if not _compat.functorch_active():
        return apply(call, *operands)
    with enable_single_level_autograd_function():
        return _SingleLevel.apply(call, *operands)


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _known(op: str, raw: tuple[Any, ...], *operands: Any) -> Plan | None:
    """Return the plan of a plain call that was seen before and is not recorded: it need not be dispatched once more."""
    plan = None if _recorded(*operands) else find(op, raw, *operands)
    return plan if plan.__class__ is Plan else None


def convolution(keyset: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """``convgrad::convolution`` with derivatives."""
    if plan := _known("convgrad::convolution", arguments, input, weight, bias):
        return plan.contract(input, weight, bias)
    problem.refuse_nested(input, weight, bias)
    if lowering.any_subclass(input, weight, bias):
        return decompositions.convolution(input, weight, bias, *arguments)
    form = Form(input.shape, weight.shape, arguments)
    op = torch.ops.convgrad.convolution.default
    return _differentiable(op, keyset, "output", form, (input, weight, bias), arguments)


def _gradient(yields: Role) -> Callable[..., Tensor]:
    def gradient(keyset: Any, grad_output: Tensor, other: Tensor, size: Any, *arguments: Any, **options: Any) -> Tensor:
        """``convgrad::grad_input`` or ``convgrad::grad_weight`` with derivatives."""
        problem.refuse_nested(grad_output, other)
        sizes = (size, other.shape) if yields == "input" else (other.shape, size)
        op, form = getattr(torch.ops.convgrad, f"grad_{yields}").default, Form(*sizes, arguments)
        return _differentiable(op, keyset, yields, form, (grad_output, other, None), (size, *arguments), **options)

    return gradient


grad_input, grad_weight = _gradient("input"), _gradient("weight")


def convolution_backward(
    keyset: Any, grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *arguments: Any
) -> Any:
    """``convgrad::convolution_backward``: where it is differentiated, its three gradients one by one."""
    if plan := _known("convgrad::convolution_backward", (bias_sizes, *arguments), grad_output, input, weight):
        return plan.gradients(grad_output, input, weight)
    problem.refuse_nested(grad_output, input, weight)
    if lowering.any_subclass(grad_output, input, weight):
        return decompositions.convolution_backward(grad_output, input, weight, bias_sizes, *arguments)
    *rest, mask = arguments
    tensors = (grad_output, input, weight)
    if not (_compat.functorch_active() or _compat.forward_ad_active() or _recorded(*tensors)):
        op = torch.ops.convgrad.convolution_backward.default
        return _below_autograd(op, keyset, tensors, (bias_sizes, *arguments))(*tensors, bias_sizes, *arguments)
    geometry = problem.conv_geometry(weight.shape, *rest)
    problem.check_backward(grad_output.shape, input.shape, weight.shape, bias_sizes, geometry, mask)
    form = with_layout(Form(input.shape, weight.shape, tuple(rest)), input, weight)
    operands: dict[Role, Tensor] = {"output": grad_output, "input": input, "weight": weight}
    grad_input = problem.contract(form, "input", operands) if mask[0] else None
    grad_weight = problem.contract(form, "weight", operands) if mask[1] else None
    return grad_input, grad_weight, problem.sum_of_bias(grad_output, form.bias_size) if mask[2] else None
