"""The computation of a call, from the arguments that users write ("The path of a call" in docs/architecture.md).

Under autocast the operands are cast, and what follows is a call like any other. One that is not a plain eager one
(compiled, traced, transformed, of a subclass) goes to the operator ``torch.ops.convgrad.convolution``; what runs it in
the end is a plan, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .._compat import overrides_functions, profiler_enabled, saved_tensors_hooks, without_autocast
from ..engine import Plan, find, is_eager, make, observers, pack, pytorch_autograd_suffices, requested
from ..errors import ShapeError
from ..ops import any_subclass, apply, autocast_is_on, cast, opened, operator, profiled_call, run_gradient
from ..problem import check_rank, refuse_nested
from ._arguments import require_tensors


class Signature(NamedTuple):
    """The reader of a function's arguments."""

    #: Spatial dimensions; None for a function of any number of them.
    ndim: int | None
    #: Makes the operator's arguments of (number of dimensions, weight's size, *arguments as the user wrote them).
    read: Callable[..., tuple[Any, ...]]
    #: The function itself, for what stands for a tensor.
    public: Any = None
    #: The order of the arguments for the table of calls: that of ``conv2d`` (0), ``conv_transpose2d`` (1) or
    #: ``convolution`` (2); None if it cannot read them.
    order: int | None = None
    #: PyTorch's function of the same arguments.
    pytorchs: Callable[..., Tensor] | None = None


#: By the name of the function; each file of functions adds its own.
signatures: dict[str, Signature] = {}
#: Elements from which an input is not kept for a frozen weight: our own autograd, which does not keep it, takes longer
#: than PyTorch's, and a small layer notices (docs/research.md).
_LARGE = 2**20
_convolution, _recording = torch.convolution, torch.is_grad_enabled
#: A call recorded by PyTorch's own autograd, whose backward is this library's (`ops.pytorch_operators`).
_recorded: Any = torch.ops.aten.convolution_overrideable.default._op


def run(name: str, input: Tensor, weight: Tensor, bias: Tensor | None, raw: tuple[Any, ...]) -> Tensor:
    """Compute one call of a function; ``raw``, its arguments as written, is read only where it was not seen before."""
    key = None
    if is_eager(input, weight, bias) and requested() is None:
        recorded = _recording() and (
            input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        signature = signatures[name]
        if signature.order is not None and (not recorded or _may_keep(input, weight)) and (table := opened()):
            key = table.call(signature.order, signature.ndim or 0, recorded, input, weight, bias, raw)
            if key.__class__ is Tensor:
                return key
            if key is True and (pytorchs := signature.pytorchs) is not None:
                return pytorchs(input, weight, bias, *raw)
    plan = find(name, raw, input, weight, bias)
    if plan.__class__ is not Plan:
        return _first_call(plan, name, input, weight, bias, raw)
    if profiler_enabled() and signatures[name].pytorchs is not None:
        with profiled_call(f"aten::{name}", input, weight, bias, plan.form.arguments):
            return _without_table(plan, input, weight, bias)
    result = _without_table(plan, input, weight, bias)
    if isinstance(key, bytes) and (table := opened()) is not None:
        pytorchs = plan.aten and all(pytorch_autograd_suffices(plan, first, True) for first in (True, False))
        if (entry := pack(plan, (input, weight, bias), pytorchs)) is not None:
            table.store(key, entry)
    return result


def _may_keep(input: Tensor, weight: Tensor) -> bool:
    """Return whether PyTorch's autograd may keep the input: no gradient needs it where the weight is frozen."""
    return weight.requires_grad or input.numel() < _LARGE


def _without_table(plan: Plan, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a call by its plan: recorded by PyTorch's autograd if that loses nothing, else by ours."""
    if _recording():
        first, second = input.requires_grad, _may_keep(input, weight)
        if first or weight.requires_grad or (bias is not None and bias.requires_grad):
            if plan.aten and _pytorch_suffices(plan, first, second):
                return _convolution(input, weight, bias, *plan.arguments)
            p, plain = plan.problem, requested() is None and opened() is not None
            if second and plain and p.padding_mode == "zeros" and not p.dtype.is_complex:
                return _recorded(input, weight, bias, *plan.form.arguments)
            return apply(plan, input, weight, bias)
    return plan.contract(input, weight, bias)


def _pytorch_suffices(plan: Plan, first: bool, second: bool) -> bool:
    """Whether PyTorch's autograd is as good as ours, for an input and a weight that require a gradient or not."""
    suffices = plan.suffices.get((first, second))
    if suffices is None:
        suffices = pytorch_autograd_suffices(plan, first, second)
    # PyTorch saves both operands; a checkpoint counts what is saved, and may see another choice later.
    return suffices and not observers and not profiler_enabled() and (first or not saved_tensors_hooks())


def _first_call(
    key: Any, name: str, input: Tensor, weight: Tensor, bias: Tensor | None, raw: tuple[Any, ...]
) -> Tensor:
    """Compute a call that was not seen before, or that must go through the dispatcher (its key is None)."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and isinstance(bias, Tensor | None)):
        return not_tensors(name, input, weight, bias, raw)
    if is_eager(input, weight, bias) and autocast_is_on(device := input.device.type):
        with without_autocast():
            return run(name, cast(input, device), cast(weight, device), cast(bias, device), raw)
    ndim, read, _, _, pytorchs = signatures[name]
    own_rules = key is None and not torch.compiler.is_dynamo_compiling() and overrides_functions(weight, bias)
    if own_rules and pytorchs is not None:  # they may know PyTorch's functions alone
        return pytorchs(input, weight, bias, *raw)
    refuse_nested(input, weight, bias)
    if ndim is not None and input.dim() == ndim + 1:
        return run(name, input.unsqueeze(0), weight, bias, raw).squeeze(0)
    if ndim is not None and input.dim() != ndim + 2:
        raise ShapeError(
            f"Expected {ndim + 1}D (unbatched) or {ndim + 2}D (batched) input to {name}, "
            f"but got input of size: {list(input.shape)}"
        )
    check_rank(input.shape, weight.shape)
    arguments = read(weight.dim() - 2, weight.shape, *raw)
    if key is None or not _is_plain(raw):
        any_subclass(input, weight, bias)  # brings the rules of DTensor, which inference mode would not ask for
        return operator("convolution")(input, weight, bias, *arguments)
    make(key, "convolution", arguments, input, weight, bias)
    return run(name, input, weight, bias, raw)


def _is_plain(raw: Any) -> bool:
    """Whether `find` tells these arguments from all others: of numpy's numbers `marshal` writes the bytes alone."""
    if isinstance(raw, (tuple, list)):
        return all(map(_is_plain, raw))
    return raw is None or type(raw) in (bool, int, float, str)


def gradient(op: str, raw: tuple[Any, ...], a: Tensor, b: Tensor, c: Tensor | None = None) -> Any:
    """Compute one call of a gradient operator: without the dispatcher where it is plain and nothing is recorded."""
    operands = (a, b) if c is None else (a, b, c)
    recorded = _recording() and any(t.requires_grad for t in operands)
    found = None if recorded else find(op, raw, a, b, c)
    if found is None:
        return operator(op)(*operands, *raw)
    plan = found if found.__class__ is Plan else make(found, op, raw, *operands)
    return run_gradient(op, plan, raw, *operands)


def not_tensors(name: str, input: object, weight: object, bias: object, raw: tuple[Any, ...], **options: object) -> Any:
    """Let an operand that handles the call, such as a proxy of torch.fx, do so; refuse any other, as PyTorch does."""
    operands = {"input": input, "weight": weight, **({} if bias is None else {"bias": bias})}
    require_tensors(name, **operands)
    return handle_torch_function(signatures[name].public, operands.values(), input, weight, bias, *raw, **options)
