"""From a call as people write it to what computes it: a plan, PyTorch's own call, or the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .._compat import profiler_enabled
from ..engine import Plan, find, make, observers
from ..errors import ShapeError
from ..ops import any_subclass, apply, kernels, operator
from ..shapes import check_rank
from ..validation import refuse_nested
from ._arguments import all_arguments, require_tensors

#: The functions that people call, by name; each file of them adds its own.
public_functions: dict[str, Callable[..., Tensor]] = {}
_convolution, _recording = torch.convolution, torch.is_grad_enabled


def run(
    name: str,
    d: int,
    normalize: Callable[..., tuple[Any, ...]],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    raw: tuple[Any, ...],
) -> Tensor:
    """Compute one call.

    Args:
        name: what the user called; it says how ``raw`` is read.
        normalize: makes the operator's arguments of (d, weight size, *raw).
        raw: the arguments as the user wrote them; they are not looked into for a call that was seen before.
    """
    plan = find(name, raw, input, weight, bias)
    if plan.__class__ is not Plan:
        return _first_call(plan, name, d, normalize, input, weight, bias, raw)
    if _recording():
        first, second = input.requires_grad, weight.requires_grad
        if first or second or (bias is not None and bias.requires_grad):
            if plan.aten:
                pytorchs = plan.pytorchs.get((first, second))
                if pytorchs is None:
                    pytorchs = plan.autograd_is_pytorchs(first, second)
                if pytorchs and not observers and not profiler_enabled():
                    return _convolution(input, weight, bias, *plan.arguments)
            return apply(plan, input, weight, bias)
    if observers or profiler_enabled():
        return plan.contract(input, weight, bias)
    return plan.kernel(input, weight, bias)


def _first_call(
    key: Any,
    name: str,
    d: int,
    normalize: Callable[..., tuple[Any, ...]],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    raw: tuple[Any, ...],
) -> Tensor:
    """A call that was not seen before, or that may not skip the dispatcher (its key is None)."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and isinstance(bias, Tensor | None)):
        return _not_tensors(name, input, weight, bias, raw)
    refuse_nested(input, weight, bias)
    if weight.dim() != d + 2:
        _refuse_rank(d, input, weight)
    if input.dim() != d + 2:
        return _unbatched(name, d, input, lambda x: run(name, d, normalize, x, weight, bias, raw))
    arguments = normalize(d, weight.shape, *raw)
    if key is None or input.is_meta or input.shape[1] == 0 or not _is_plain(raw):
        any_subclass(input, weight, bias)  # brings the rules of DTensor, which inference mode would not ask for
        return operator("convolution")(input, weight, bias, *arguments)
    make(key, "convolution", arguments, input, weight, bias)
    return run(name, d, normalize, input, weight, bias, raw)


def _is_plain(raw: Any) -> bool:
    """Whether `find` tells these arguments from all others: of numpy's numbers `marshal` writes the bytes alone."""
    if isinstance(raw, (tuple, list)):
        return all(map(_is_plain, raw))
    return raw is None or type(raw) in (bool, int, float, str)


def run_nd(input: Tensor, weight: Tensor, bias: Tensor | None, *form: Any) -> Tensor:
    """Compute one call of `convolution`, whose arguments from stride to groups are ``form``."""
    return run("convolution", weight.dim() - 2, all_arguments, input, weight, bias, form)


def gradient(op: str, raw: tuple[Any, ...], a: Tensor, b: Tensor, c: Tensor | None = None) -> Any:
    """Compute one call of a gradient operator: without the dispatcher where it is plain and nothing is recorded."""
    operands = (a, b) if c is None else (a, b, c)
    recorded = _recording() and any(t.requires_grad for t in operands)
    if recorded or find(op, raw, a, b, c) is None:
        return operator(op)(*operands, *raw)
    return getattr(kernels, op)(*operands, *raw)


def _not_tensors(name: str, input: object, weight: object, bias: object, raw: tuple[Any, ...]) -> Any:
    """What is no tensor may stand for one (a proxy of torch.fx, say); anything else is refused as PyTorch does."""
    operands = {"input": input, "weight": weight, "bias": bias}
    if has_torch_function(tuple(operands.values())):
        public = public_functions.get(name)
        if public is not None:
            return handle_torch_function(public, tuple(operands.values()), input, weight, bias, *raw)
    require_tensors(name, **{n: t for n, t in operands.items() if n != "bias" or t is not None})
    raise TypeError(f"{name}() takes tensors")


def _refuse_rank(d: int, input: Tensor, weight: Tensor) -> None:
    """A weight of another dimension: the message that PyTorch gives, which speaks of the batched input."""
    shape = (1, *input.shape) if input.dim() == d + 1 else tuple(input.shape)
    check_rank(shape, weight.shape)
    raise ShapeError(f"Expected a {d + 2}-dimensional weight, but got weight of size {list(weight.shape)}")


def _unbatched(name: str, d: int, input: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
    if input.dim() != d + 1:
        raise ShapeError(
            f"Expected {d + 1}D (unbatched) or {d + 2}D (batched) input to {name}, "
            f"but got input of size: {list(input.shape)}"
        )
    return call(input.unsqueeze(0)).squeeze(0)
