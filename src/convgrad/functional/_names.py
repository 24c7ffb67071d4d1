"""The 1-d, 2-d and 3-d names: thin over the N-d functions, with the signatures of PyTorch's functions and gradients.

Each signature is written once; only the name, the docstring and the number of dimensions differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._arguments import Ints, conv_arguments, transpose_arguments
from ._call import ORDERS, Signature, not_tensors, run, signatures
from ._gradients import grad_input, grad_weight
from ._rows import Layout, as_images, in_one_row

Function = TypeVar("Function", bound=Callable[..., Tensor])
#: Behind the name of a function in messages, and in `signatures`.
_NLC = "(layout='NLC')"


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    layout: Layout = "NCL",
) -> Tensor:
    raw = (stride, padding, dilation, groups)
    if layout == "NCL":
        return run("conv1d", input, weight, bias, raw)
    return _channels_last("conv1d", input, weight, bias, raw, layout)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    layout: Layout = "NCL",
) -> Tensor:
    raw = (stride, padding, output_padding, groups, dilation)
    if layout == "NCL":
        return run("conv_transpose1d", input, weight, bias, raw)
    return _channels_last("conv_transpose1d", input, weight, bias, raw, layout)


def _channels_last(
    name: str, input: Tensor, weight: Tensor, bias: Tensor | None, raw: tuple[Any, ...], layout: Layout
) -> Tensor:
    """One of the two above, of a tensor (N, L, C)."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and isinstance(bias, Tensor | None)):
        return not_tensors(name, input, weight, bias, raw, layout=layout)

    def call(image: Tensor, kernel: Tensor) -> Tensor:
        return run(f"{name}{_NLC}", image, kernel, bias, raw)

    return as_images(call, input, weight, layout)


def _of_dimensions(d: int):
    """The convolution and the transposed convolution of ``d`` dimensions."""
    plain, transposed = f"conv{d}d", f"conv_transpose{d}d"

    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        return run(plain, input, weight, bias, (stride, padding, dilation, groups))

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
        return run(transposed, input, weight, bias, (stride, padding, output_padding, groups, dilation))

    return _named(plain, conv, conv_arguments), _named(transposed, conv_transpose, transpose_arguments)


_DOCSTRING = """A {d}-d {what}, as ``torch.nn.functional.{name}``.
{more}
    Shape:
        - input: (N, C_in, {size}), or without N
        - weight: {weight}, bias: (C_out,)
        - result: (N, C_out, {out}), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).{raises}

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4{x7}), torch.randn({channels}{x3})
        >>> torch.equal(convgrad.{name}(x, w, {example}), torch.nn.functional.{name}(x, w, {example}))
        True{also}
    """
_OF_SEQUENCES = {
    "more": """
    Args:
        layout: ``"NLC"``: input and result are (N, L, C), or (L, C), and are not copied. (A transposed view without it
            is copied, because results are laid out like PyTorch's, as contiguous (N, C, L).)
""",
    "raises": """
        ValueError: another layout.""",
    "also": """
        >>> y = convgrad.{name}(x.transpose(1, 2), w, {example}, layout="NLC")
        >>> torch.allclose(y.transpose(1, 2), torch.nn.functional.{name}(x, w, {example}), atol=1e-5)
        True""",
}


def docstring_words(name: str) -> dict[str, Any]:
    """What a docstring says of the dimensions of ``conv2d``, ``ConvTranspose3d`` and so on.

    Equivalent to:
        >>> known = docstring_words("ConvTranspose2d")
        >>> known["function"], known["weight"], known["out"], known["x5"]
        ('conv_transpose2d', '(C_in, C_out/groups, k_h, k_w)', 'H_out, W_out', ', 5, 5')
    """
    d, transposed = int(name[-2]), "transpose" in name.lower()
    sizes = ("D", "H", "W")[3 - d :] if d > 1 else ("L",)
    kernel = ", ".join(("k_d", "k_h", "k_w")[3 - d :])
    return {
        "d": d,
        "name": name,
        "function": name.replace("ConvT", "conv_t").lower(),
        "what": "transposed convolution" if transposed else "convolution",
        "weight": f"(C_in, C_out/groups, {kernel})" if transposed else f"(C_out, C_in/groups, {kernel})",
        "channels": "4, 6" if transposed else "6, 4",
        "size": ", ".join(sizes),
        "out": ", ".join(f"{s}_out" for s in sizes),
        **{f"x{n}": f", {n}" * d for n in (3, 5, 7)},
    }


def _named(name: str, function: Function, read: Callable[..., tuple[Any, ...]]) -> Function:
    """Name a function, write its docstring, and make its signature known to `run`."""
    known = {**docstring_words(name), "example": "stride=2" if "transpose" in name else "padding=1"}
    more = {key: text.format(**known) if known["d"] == 1 else "" for key, text in _OF_SEQUENCES.items()}
    function.__name__ = function.__qualname__ = name
    function.__doc__ = _DOCSTRING.format(**known, **more)
    signatures[name] = Signature(known["d"], read, function, ORDERS[name[:-2]], getattr(torch, name))
    if known["d"] == 1:
        signatures[f"{name}{_NLC}"] = Signature(2, in_one_row(read))
    return function


conv1d = _named("conv1d", conv1d, conv_arguments)
conv_transpose1d = _named("conv_transpose1d", conv_transpose1d, transpose_arguments)
conv2d, conv_transpose2d = _of_dimensions(2)
conv3d, conv_transpose3d = _of_dimensions(3)


# ---- gradients -----------------------------------------------------------------------------------


def _gradients_of_dimensions(d: int):
    """The four functions of ``d`` dimensions; those of transposed convolutions have another order of arguments."""

    def conv_input(
        input_size: Sequence[int],
        weight: Tensor,
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        return grad_input(input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)

    def conv_weight(
        input: Tensor,
        weight_size: Sequence[int],
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        return grad_weight(input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)

    def conv_transpose_input(
        input_size: Sequence[int],
        weight: Tensor,
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        return grad_input(input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)

    def conv_transpose_weight(
        input: Tensor,
        weight_size: Sequence[int],
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        return grad_weight(input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)

    for function in (conv_input, conv_weight, conv_transpose_input, conv_transpose_weight):
        kind, operand = function.__name__.rsplit("_", 1)
        forward, of_input = f"{kind}{d}d", operand == "input"
        function.__name__ = function.__qualname__ = f"{forward}_{operand}"
        function.__doc__ = _OF_GRADIENT.format(
            **docstring_words(forward),
            gradient=function.__name__,
            operand=operand,
            as_in_torch="" if "transpose" in forward else f", as ``torch.nn.grad.{function.__name__}``",
            input="input_size" if of_input else "input",
            of_weight="weight" if of_input else "weight_size",
            variable="x" if of_input else "w",
            arguments="x.shape, w" if of_input else "x, w.shape",
        )
    return conv_input, conv_weight, conv_transpose_input, conv_transpose_weight


_OF_GRADIENT = """The gradient of `{name}` with respect to its {operand}{as_in_torch}.

    Shape:
        - {input}: (N, C_in, {size}), or without N
        - {of_weight}: the weight's, as in `{name}`
        - grad_output: like the result of `{name}`
        - result: ``{operand}_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x = torch.randn(2, 4{x7}, requires_grad=True)
        >>> w = torch.randn({channels}{x3}, requires_grad=True)
        >>> y = torch.nn.functional.{name}(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), {variable})
        >>> got = convgrad.{gradient}({arguments}, torch.ones_like(y))
        >>> torch.allclose(got, want, atol=1e-4)
        True
    """

conv1d_input, conv1d_weight, conv_transpose1d_input, conv_transpose1d_weight = _gradients_of_dimensions(1)
conv2d_input, conv2d_weight, conv_transpose2d_input, conv_transpose2d_weight = _gradients_of_dimensions(2)
conv3d_input, conv3d_weight, conv_transpose3d_input, conv_transpose3d_weight = _gradients_of_dimensions(3)
