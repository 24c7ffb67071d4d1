"""The 1-d, 2-d and 3-d names: thin over the N-d function, with the signatures of ``torch.nn.functional``.

Each signature is written once; only the name, the docstring and the number of dimensions differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ._arguments import Ints, conv_arguments, transpose_arguments
from ._call import public_functions, run

Function = TypeVar("Function", bound=Callable[..., Tensor])


def _convolution(d: int):
    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        return run(name, d, conv_arguments, input, weight, bias, (stride, padding, dilation, groups))

    name = f"conv{d}d"
    return _named(name, d, conv, "convolution", "(C_out, C_in/groups, {k})", "6, 4", "padding=1")


def _transposed(d: int):
    def conv_transpose(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        raw = (stride, padding, output_padding, groups, dilation)
        return run(name, d, transpose_arguments, input, weight, bias, raw)

    name = f"conv_transpose{d}d"
    return _named(name, d, conv_transpose, "transposed convolution", "(C_in, C_out/groups, {k})", "4, 6", "stride=2")


_DOCSTRING = """A {d}-d {what}, as ``torch.nn.functional.{name}``.

    Shape:
        - input: (N, C_in, {size}), or without N
        - weight: {weight}, bias: (C_out,)
        - result: (N, C_out, {out}), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4{sevens}), torch.randn({channels}{threes})
        >>> torch.equal(convgrad.{name}(x, w, {example}), torch.nn.functional.{name}(x, w, {example}))
        True
    """


def _named(name: str, d: int, function: Function, what: str, weight: str, channels: str, example: str) -> Function:
    """Name a function, write its docstring, and make it known to `run`."""
    sizes = (("L",), ("H", "W"), ("D", "H", "W"))[d - 1]
    kernel = ("k_d", "k_h", "k_w")[3 - d :]
    function.__name__ = function.__qualname__ = name
    function.__doc__ = _DOCSTRING.format(
        d=d,
        what=what,
        name=name,
        weight=weight.format(k=", ".join(kernel)),
        size=", ".join(sizes),
        out=", ".join(f"{s}_out" for s in sizes),
        sevens=", 7" * d,
        threes=", 3" * d,
        channels=channels,
        example=example,
    )
    public_functions[name] = function
    return function


conv1d, conv2d, conv3d = _convolution(1), _convolution(2), _convolution(3)
conv_transpose1d, conv_transpose2d, conv_transpose3d = _transposed(1), _transposed(2), _transposed(3)
