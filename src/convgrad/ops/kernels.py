"""The operators below autograd: look the call up, validate it if it is new, run its plan.

A call that was seen before costs one look-up in a bounded dictionary whose key holds everything that validation and
choice depend on; so validation happens once for each kind of call, completely, before any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import settings
from .._compat import aten_memory_format, profiler_enabled
from ..backends.aten import aten_backward
from ..calculus import Form
from ..engine.cache import BoundedCache
from ..engine.events import observers
from ..engine.plan import Plan, plan_for
from ..engine.request import active
from ..problem import Output, gradient_outputs
from ..shapes import Geometry, conv_geometry, convolution_shape, problem_of
from ..validation import check_backward, check_grad_input, check_grad_weight, check_operands
from .eager import EagerCall
from .stock import stock_backward

__all__ = ["convolution", "convolution_backward", "eager_call", "grad_input", "grad_weight", "gradients", "layout_of"]

Ints = Sequence[int]
_calls = BoundedCache()


def _key(op: str, first: Tensor, second: Tensor, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Everything that a call's meaning depends on; None for a tensor without strides (validation refuses it)."""
    try:
        return (
            op,
            first.shape,
            first.stride(),
            first.dtype,
            first.device,
            second.shape,
            second.stride(),
            second.dtype,
            second.device,
            arguments,
            active(),
            settings.key(first),
        )
    except RuntimeError:
        return None


def layout_of(input: Tensor, weight: Tensor, g: Geometry) -> torch.memory_format:
    """The layout in which PyTorch would return the results of this convolution.

    PyTorch is asked with the same padding on both sides, one that leaves room for the kernel and for an output.
    """
    wider = min if g.transposed else max
    padding = tuple(max(wider(low, high), 0) for low, high in g.padding)
    return aten_memory_format(
        input, weight, None, g.stride, padding, g.dilation, g.transposed, g.output_padding, g.groups
    )


def layout_like(shape: Ints, like: Tensor) -> Tensor:
    """An untouched tensor of this shape in the layout that another suggests, for a question about layouts alone."""
    from .._compat import channels_last_of, suggests_channels_last

    memory_format = torch.contiguous_format
    if like.dim() == len(shape) and suggests_channels_last(like):
        memory_format = channels_last_of(like.dim() - 2)
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format)


# ---- convolution ---------------------------------------------------------------------------------


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Tensor:
    """The operator itself, on real tensors."""
    arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    return convolution_call(input, weight, bias, arguments)(input, weight, bias)


def convolution_call(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The function that computes this call: looked up, or validated, planned and remembered."""
    extra = None if bias is None else (bias.shape, bias.dtype, bias.device)
    key = _key("convolution", input, weight, (arguments, extra))
    call = _calls.get(key)
    if call is None:
        call = _plan_convolution(input, weight, bias, arguments)
        if key is not None:
            _calls[key] = call
    return call


def eager_call(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]) -> EagerCall | None:
    """The call for the short way; None where it is not open (no problem behind it, or no device)."""
    contract = convolution_call(input, weight, bias, arguments)
    plan = getattr(contract, "__self__", None)
    if not isinstance(plan, Plan) or input.device.type == "meta":
        return None
    return EagerCall(contract, Form(input.shape, weight.shape, arguments), plan.problem, input, weight)


def _plan_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    g = conv_geometry(weight.shape, *arguments)
    shape = convolution_shape(input.shape, weight.shape, None if bias is None else bias.shape, g)
    check_operands(("input", input), ("weight", weight), ("bias", bias))
    if shape[1] == 0:
        return lambda input, weight, bias: input.new_empty(shape)
    problem = problem_of(
        input.shape,
        weight.shape,
        shape,
        g,
        dtype=input.dtype,
        memory_format=layout_of(input, weight, g),
        has_bias=bias is not None,
    )
    return plan_for(problem, (problem.bias_pass,), input.device).contract


# ---- gradients -----------------------------------------------------------------------------------


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Up to three gradients at once; None where the mask does not ask."""
    arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    sizes = None if bias_sizes is None else tuple(bias_sizes)
    return gradients(grad_output, input, weight, sizes, arguments, tuple(output_mask))


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    sizes: tuple[int, ...] | None,
    arguments: tuple[Any, ...],
    mask: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same, with everything hashable: by PyTorch's own operator, if nobody watches and that is the same."""
    extra = (arguments, sizes, mask, grad_output.shape, grad_output.dtype, grad_output.device, grad_output.layout)
    key = _key("convolution_backward", input, weight, extra)
    plan, is_stock = _calls.get(key) or (None, False)
    if plan is None:
        plan = _plan_backward(grad_output, input, weight, sizes, arguments, mask)
        sized = sizes is not None or not mask[2]
        is_stock = sized and stock_backward(plan, arguments, weight)
        if key is not None:
            _calls[key] = (plan, is_stock)
    if is_stock and not observers and not profiler_enabled():
        found = aten_backward(grad_output, input, weight, sizes, *arguments, mask)
        # oneDNN computes, and returns, what the mask leaves out too.
        return tuple([t if wanted else None for t, wanted in zip(found, mask, strict=True)])  # pyright: ignore[reportReturnType]
    return plan.gradients(grad_output, input, weight)  # pyright: ignore[reportReturnType]


def _plan_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Ints | None,
    arguments: tuple[Any, ...],
    mask: Sequence[bool],
) -> Plan:
    g = conv_geometry(weight.shape, *arguments)
    check_backward(grad_output.shape, input.shape, weight.shape, bias_sizes, g, mask)
    check_operands(("grad_output", grad_output), ("input", input), ("weight", weight))
    outputs = gradient_outputs(g.transposed, mask)
    return _plan(outputs, input.shape, weight.shape, grad_output.shape, g, layout_of(input, weight, g), input)


def grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """The gradient of the input alone; needs no input."""
    arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    size = tuple(input_size)
    key = _key("grad_input", grad_output, weight, (arguments, size, memory_format))
    contract = _calls.get(key)
    if contract is None:
        g = conv_geometry(weight.shape, *arguments)
        check_grad_input(grad_output.shape, weight.shape, size, g)
        check_operands(("grad_output", grad_output), ("weight", weight))
        layout = memory_format or layout_of(layout_like(size, grad_output), weight, g)
        outputs = gradient_outputs(transposed, (True, False, False))
        contract = _plan(outputs, size, weight.shape, grad_output.shape, g, layout, grad_output).contract
        if key is not None:
            _calls[key] = contract
    return contract(grad_output, weight)


def grad_weight(
    grad_output: Tensor,
    input: Tensor,
    weight_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """The gradient of the weight alone; needs no weight."""
    arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    size = tuple(weight_size)
    key = _key("grad_weight", grad_output, input, (arguments, size, memory_format))
    contract = _calls.get(key)
    if contract is None:
        g = conv_geometry(size, *arguments)
        check_grad_weight(grad_output.shape, input.shape, size, g)
        check_operands(("grad_output", grad_output), ("input", input))
        weight = torch.empty(size, dtype=input.dtype, device=input.device)
        layout = memory_format or layout_of(input, weight, g)
        contract = _plan(("grad_weight",), input.shape, size, grad_output.shape, g, layout, input).contract
        if key is not None:
            _calls[key] = contract
    return contract(input, grad_output) if transposed else contract(grad_output, input)


def _plan(
    outputs: tuple[Output, ...],
    input_size: Ints,
    weight_size: Ints,
    output_size: Ints,
    g: Geometry,
    layout: torch.memory_format,
    like: Tensor,
) -> Plan:
    problem = problem_of(input_size, weight_size, output_size, g, dtype=like.dtype, memory_format=layout)
    return plan_for(problem, outputs, like.device)
