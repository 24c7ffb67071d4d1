"""The derivative table of convolution, and nothing else.

A convolution is one trilinear form in three **roles**, ``input``, ``weight`` and ``output``. Each operator contracts
two of them and yields the third (`CONTRACTED`): ``convolution`` the output, ``grad_input`` and ``grad_weight`` theirs.

The form is linear in each role. Hence the whole table is one rule:

    The derivative of an operator with respect to one of its arguments is the operator that yields this argument,
    with the cotangent in the place of the result.

For instance, the derivative of ``grad_weight(grad_output, input)`` with respect to ``grad_output`` yields the role
output: ``convolution(input, cotangent)``. Applied to its own results, the rule gives derivatives of every order; a
transposed convolution obeys it unchanged, since it is the same form read the other way round. For complex tensors the
other argument is conjugated, as PyTorch's convention for gradients asks.

Forward-mode derivatives follow from linearity: the sum, over the arguments, of the operator itself with that
argument replaced by its tangent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .problem import PaddingMode
from .shapes import channels_of_output, conv_geometry, convolution_shape

Role = Literal["input", "weight", "output"]

#: The roles that the operator yielding a role contracts, in the order of its arguments.
CONTRACTED: dict[Role, tuple[Role, Role]] = {
    "output": ("input", "weight"),
    "input": ("output", "weight"),
    "weight": ("output", "input"),
}


class Form(NamedTuple):
    """One trilinear form: what all of its operators share."""

    #: Full shapes of the roles.
    input_size: Sequence[int]
    weight_size: Sequence[int]
    #: Stride, padding, dilation, transposed, output_padding and groups, as the operators take them.
    arguments: tuple[Any, ...]
    #: Layout of the gradients; None lets the operator decide from its operands.
    memory_format: torch.memory_format | None = None
    #: The operators know no other than zeros; of another one derivatives are those of the padded copy.
    padding_mode: PaddingMode = "zeros"

    @property
    def output_size(self) -> tuple[int, ...]:
        """The full shape of the role output."""
        return convolution_shape(
            self.input_size, self.weight_size, None, conv_geometry(self.weight_size, *self.arguments)
        )

    @property
    def bias_size(self) -> int:
        """The number of elements of a bias."""
        return channels_of_output(self.weight_size, self.arguments[3], self.arguments[5])


def contract(form: Form, yields: Role, operands: Mapping[Role, Tensor]) -> Tensor:
    """Call the operator that yields a role."""
    ops = torch.ops.convgrad
    first, second = (operands[r] for r in CONTRACTED[yields])
    if yields == "output":
        return ops.convolution.default(first, second, None, *form.arguments)
    gradient, size = (ops.grad_input, form.input_size) if yields == "input" else (ops.grad_weight, form.weight_size)
    return gradient.default(first, second, size, *form.arguments, memory_format=form.memory_format)


def derivative(
    form: Form, yields: Role, argument: Role, cotangent: Tensor, operands: Mapping[Role, Tensor | None]
) -> Tensor:
    """Return the derivative for an argument: the pass that yields it, with the cotangent in the result's place."""
    others: dict[Role, Tensor] = {role: t.conj() for role, t in operands.items() if t is not None}
    return contract(form, argument, {**others, yields: cotangent})


def tangent(
    form: Form, yields: Role, operands: Mapping[Role, Tensor], tangents: Mapping[Role, Tensor | None]
) -> Tensor | None:
    """Return the forward-mode derivative: one contraction for each argument with a tangent; None without any."""
    terms = [contract(form, yields, {**operands, role: moved}) for role, moved in tangents.items() if moved is not None]
    return sum(terms[1:], terms[0]) if terms else None


def sum_of_bias(cotangent: Tensor, channels: int = 0) -> Tensor:
    """Return the derivative for a bias, (N, C, *out) -> (C,): a sum over batch and space; zeros where C is 0.

    They are as many as the bias has: an input without channels has an output without, bias or not.
    """
    have = cotangent.shape[1]
    if isinstance(have, int) and have == 0:
        return cotangent.new_zeros(channels)
    dims = (0, *range(2, cotangent.dim()))
    if cotangent.is_complex():  # PyTorch cannot sum complex32
        return torch.complex(cotangent.real.sum(dims), cotangent.imag.sum(dims))
    return cotangent.sum(dims)


def add_bias(t: Tensor, bias: Tensor | None) -> Tensor:
    """Return (N, C, *out) plus a bias (C,); unchanged without one."""
    return t if bias is None else t + bias.view(-1, *(1,) * (t.dim() - 2))
