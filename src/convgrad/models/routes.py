"""Where a call of aten::convolution or aten::convolution_backward goes: to a plan of ours, or to PyTorch's own kernel.

The same call always goes the same way, so a route is found once and looked up from then on. PyTorch keeps its own
kernel where it was chosen, and for everything that is not a dense real convolution that we validate and plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import aten_memory_format, channels_last_of, record
from ..engine.cache import BoundedCache
from ..engine.events import thread
from ..engine.plan import Plan, plan_for
from ..engine.request import active
from ..errors import BackendError, ConvgradError
from ..problem import ConvProblem, Output, gradient_outputs
from ..settings import cpu_flags, current
from ..shapes import Geometry, conv_geometry, convolution_shape, problem_of
from ..validation import check_backward, check_operands

__all__ = ["Route", "backward_route", "forward_route", "inside"]

Ints = Sequence[int]


class Route(NamedTuple):
    """What a call computes, and the plan that does; without a plan PyTorch's own kernel does."""

    problem: ConvProblem
    outputs: tuple[Output, ...]
    plan: Plan | None
    #: PyTorch's kernel computes, and is not made of other convolutions, which would then be taken over.
    is_stock: bool = False
    #: It does for operands of these sizes in any layout, with or without bias and under any flags.
    is_settled: bool = False


class inside:  # noqa: N801 - a block, as torch.no_grad is one; a generator would cost several microseconds more
    """Convolutions in this block are PyTorch's own, and nothing is recorded for autograd, which lies above."""

    __slots__ = ("_recorded",)

    def __enter__(self) -> None:
        thread.inside = True
        self._recorded = torch.is_grad_enabled()
        record(False)

    def __exit__(self, *exception: object) -> None:
        record(self._recorded)
        thread.inside = False


_routes: Any = BoundedCache()
#: Remembered for calls that PyTorch must see as they are.
_LEFT: Any = object()


def forward_route(
    taking: bool, input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]
) -> Route | None:
    """The route of a forward; None where PyTorch must see the call as it is.

    Args:
        taking: whether ours may compute; otherwise the route only says what PyTorch's own kernel computes.
        arguments: stride, padding, dilation, transposed, output_padding, groups, as tuples.

    Raises:
        BackendError: a backend that was asked for by name cannot.
    """
    key = (  # no function makes it: this is paid for at every call of the process
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.device,
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        arguments,
        taking,
        active(),
        cpu_flags() if input.is_cpu else current(),
    )
    route = _routes.get(key)
    if route is None:
        with inside():
            route = _routes[key] = _plan_forward(taking, input, weight, bias, arguments) or _LEFT
    return None if route is _LEFT else route


def _plan_forward(
    taking: bool, input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]
) -> Route | None:
    try:
        g = _geometry(weight, arguments)
        shape = convolution_shape(input.shape, weight.shape, None if bias is None else bias.shape, g)
        check_operands(("input", input), ("weight", weight), ("bias", bias))
    except ConvgradError:
        return None  # PyTorch says in its own words what is wrong
    if 0 in shape or input.shape[1] == 0:
        return None
    layout = _layout(input, weight, bias, arguments)
    problem = problem_of(
        input.shape, weight.shape, shape, g, dtype=input.dtype, memory_format=layout, has_bias=bias is not None
    )
    return _route(taking, problem, (problem.bias_pass,), input.device)


def backward_route(
    taking: bool,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: tuple[int, ...] | None,
    arguments: tuple[Any, ...],
    mask: tuple[bool, ...],
) -> Route | None:
    """The route of a backward; None where PyTorch must see the call as it is.

    Raises:
        ShapeError: a grad_output or bias_sizes that PyTorch's own kernel would not check before it reads memory.
        BackendError: a backend that was asked for by name cannot.
    """
    key = (
        grad_output.shape,
        grad_output.dtype,
        grad_output.device,
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.device,
        bias_sizes,
        arguments,
        mask,
        taking,
        active(),
        cpu_flags() if input.is_cpu else current(),
    )
    route = _routes.get(key)
    if route is None:
        with inside():
            found = _plan_backward(taking, grad_output, input, weight, bias_sizes, arguments, mask)
        route = _routes[key] = found or _LEFT
    return None if route is _LEFT else route


def _plan_backward(
    taking: bool,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: tuple[int, ...] | None,
    arguments: tuple[Any, ...],
    mask: tuple[bool, ...],
) -> Route | None:
    try:
        g = _geometry(weight, arguments)
        check_operands(("grad_output", grad_output), ("input", input), ("weight", weight))
    except ConvgradError:
        return None
    check_backward(grad_output.shape, input.shape, weight.shape, bias_sizes, g, mask)
    if grad_output.numel() == 0 or input.numel() == 0 or not any(mask):
        return None
    layout = _layout(input, weight, None, arguments)
    problem = problem_of(input.shape, weight.shape, grad_output.shape, g, dtype=input.dtype, memory_format=layout)
    return _route(taking, problem, gradient_outputs(g.transposed, mask), input.device)


def _geometry(weight: Tensor, arguments: tuple[Any, ...]) -> Geometry:
    """The arguments as ATen reads them: it knows no padding whose low and high sides differ.

    Raises:
        ShapeError: arguments that ATen refuses.
    """
    d = weight.dim() - 2
    padding = arguments[1]
    if len(padding) not in (1, d):
        raise ConvgradError("left to PyTorch")
    return conv_geometry(weight.shape, *arguments)


def _layout(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]) -> torch.memory_format:
    return aten_memory_format(input, weight, bias, *arguments)


def _route(taking: bool, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> Route:
    """Ours where a step of the plan is not ATen's; else PyTorch's own kernel, with nothing in between."""
    if not taking or problem.dtype.is_complex:
        return Route(problem, outputs, None, is_stock=not problem.dtype.is_complex)
    try:
        plan = plan_for(problem, outputs, device)
    except BackendError:
        if active() is not None:
            raise
        return Route(problem, outputs, None, is_stock=True)
    ours = any(step.backend.name != "aten" for step in plan.steps)
    settled = taking and not ours and active() is None and _is_settled(problem, outputs, device)
    return Route(problem, outputs, plan if ours else None, is_stock=not ours, is_settled=settled)


def _is_settled(p: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> bool:
    """Whether ATen is chosen in each layout, with a bias and without. Only for a convolution without groups: there the
    rules look at no flag.
    """
    return (device.type, p.groups) == ("cpu", 1) and all(
        step.backend.name == "aten"
        for memory_format in {torch.contiguous_format, channels_last_of(p.ndim)}
        for has_bias in (False, True)
        for step in plan_for(p.replace(memory_format=memory_format, has_bias=has_bias), outputs, device).steps
    )
