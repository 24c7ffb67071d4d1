"""vmap: an added batch dimension B folds into an axis that is there already.

The three roles share axes in pairs: input and output share N, input and weight the input channels of a group (ci),
weight and output the output channels of a group (co); all three share the groups (g). So if one operand is batched, B
folds into the axis that it shares with the result and not with the other operand; if both are, into the groups: these
lead their dimension, so B right before g makes [B, g, c], B times as many groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..problem import CONTRACTED, Form, Role, check_backward, check_operands, contract, conv_geometry, convolution_shape


def _axes(role: Role, transposed: bool) -> tuple[str, ...]:
    """Return the axes of an operand's first two dimensions; the groups and what follows them are one dimension."""
    if role == "weight":
        return ("g", "ci", "co") if transposed else ("g", "co", "ci")
    return ("N", "g", "ci" if role == "input" else "co")


def _fold(t: Tensor, axes: tuple[str, ...], axis: str, groups: int) -> Tensor:
    """[B, first, second, *k] -> B inside the dimension that holds ``axis``, right before that axis."""
    g, at = axes.index("g"), axes.index(axis)
    t = t.unflatten(g + 1, (groups, t.shape[g + 1] // groups))
    return t.movedim(0, at).flatten(at, at + 1).flatten(g, g + 1)


def _unfold(t: Tensor, axes: tuple[str, ...], axis: str, groups: int, batch: int) -> Tensor:
    """Return the inverse of `_fold`."""
    g, at = axes.index("g"), axes.index(axis)
    groups *= batch if axis == "g" else 1
    t = t.unflatten(g, (groups, t.shape[g] // groups))
    return t.unflatten(at, (batch, t.shape[at] // batch)).movedim(at, 0).flatten(g + 1, g + 2)


def _batched(info: Any, form: Form, yields: Role, operands: Sequence[Tensor], in_dims: Sequence[int | None]) -> Tensor:
    """Return the contraction with B folded into another axis; B comes first in the result."""
    roles, batch = CONTRACTED[yields], info.batch_size
    if batch == 0:
        return operands[0].new_empty((0, *getattr(form, f"{yields}_size")))
    if in_dims[0] is None and in_dims[1] is None:
        same = contract(form, yields, dict(zip(roles, operands, strict=True)))
        return same.expand(batch, *same.shape)
    *arguments, groups = form.arguments
    axes = _axes(yields, arguments[3])
    batched = (_axes(r, arguments[3]) for r, d in zip(roles, in_dims, strict=True) if d is not None)
    (axis,) = {*axes}.intersection(*batched) - {"g"} or {"g"}
    folded: dict[Role, Tensor] = {
        r: t if d is None else _fold(t.movedim(d, 0), _axes(r, arguments[3]), axis, groups)
        for r, t, d in zip(roles, operands, in_dims, strict=True)
    }
    sizes: dict[Role, list[int]] = {"input": [*form.input_size], "weight": [*form.weight_size]}
    if yields in sizes:
        at = axes.index(axis)
        sizes[yields][at - (at > axes.index("g"))] *= batch
    wide = Form(sizes["input"], sizes["weight"], (*arguments, groups * batch if axis == "g" else groups))
    return _unfold(contract(wide, yields, folded), axes, axis, groups, batch)


def convolution(
    info: Any, in_dims: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
) -> tuple[Tensor, int]:
    """vmap of convolution: batched input, batched weight, or both; batched bias."""
    x, w = (_shape(t, d) for t, d in zip((input, weight), in_dims[:2], strict=True))
    convolution_shape(x, w, None if bias is None else _shape(bias, in_dims[2]), conv_geometry(w, *arguments))
    check_operands(("input", input), ("weight", weight), ("bias", bias))
    output = _batched(info, Form(x, w, arguments), "output", (input, weight), in_dims[:2])
    if bias is not None and output.shape[2]:
        rows = bias[None] if in_dims[2] is None else bias.movedim(in_dims[2], 0)
        output = output + rows.view(rows.shape[0], 1, rows.shape[1], *(1,) * (output.dim() - 3))
    return output, 0


def _gradient(yields: Role) -> Callable[..., tuple[Tensor, int]]:
    def rule(
        info: Any, in_dims: Any, grad_output: Tensor, other: Tensor, size: Any, *arguments: Any, **_: Any
    ) -> tuple[Tensor, int]:
        """vmap of a gradient; of grad_weight with both operands batched, per-sample gradients in one contraction."""
        shape = _shape(other, in_dims[1])
        form = Form(size, shape, arguments) if yields == "input" else Form(shape, size, arguments)
        _check(grad_output, in_dims[0], form)
        return _batched(info, form, yields, (grad_output, other), in_dims[:2]), 0

    return rule


grad_input, grad_weight = _gradient("input"), _gradient("weight")


def convolution_backward(
    info: Any, in_dims: Any, grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *arguments: Any
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """vmap of convolution_backward: each gradient by its own rule."""
    *rest, mask = arguments
    g, x, w = in_dims[:3]
    form = Form(_shape(input, x), _shape(weight, w), tuple(rest))
    _check(grad_output, g, form, bias_sizes, mask)
    one = _batched(info, form, "input", (grad_output, weight), (g, w)) if mask[0] else None
    two = _batched(info, form, "weight", (grad_output, input), (g, x)) if mask[1] else None
    three = None
    if mask[2]:
        rows = grad_output[None] if g is None else grad_output.movedim(g, 0)  # [B or 1, N, C, *out]
        sums = rows.transpose(1, 2).flatten(2).sum(2) if rows.shape[2] else rows.new_zeros(1, form.bias_size)
        three = sums.expand(info.batch_size, -1)
    return (one, two, three), tuple([None if t is None else 0 for t in (one, two, three)])


def _check(
    grad_output: Tensor, dim: int | None, form: Form, bias_sizes: Any = None, mask: Sequence[bool] = (True,) * 3
) -> None:
    """Refuse what is refused without vmap, in terms of what the user gave and not of what it is folded into."""
    g = conv_geometry(form.weight_size, *form.arguments)
    check_backward(_shape(grad_output, dim), form.input_size, form.weight_size, bias_sizes, g, mask)


def _shape(t: Tensor, dim: int | None) -> list[int]:
    """Return the shape in one of the B contractions."""
    shape = list(t.shape)
    if dim is not None:
        del shape[dim]
    return shape
