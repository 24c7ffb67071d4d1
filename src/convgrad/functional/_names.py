"""The 1-d, 2-d and 3-d names: thin over the N-d function, with the signatures of ``torch.nn.functional``.

Each signature is written once; only the name, the docstring and the number of dimensions differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from ._arguments import Ints, conv_arguments, transpose_arguments
from ._call import Signature, not_tensors, run, signatures
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


def words(name: str) -> dict[str, Any]:
    """What a docstring says of the dimensions of ``conv2d``, ``ConvTranspose3d`` and so on.

    Equivalent to:
        >>> known = words("ConvTranspose2d")
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
    known = {**words(name), "example": "stride=2" if "transpose" in name else "padding=1"}
    more = {key: text.format(**known) if known["d"] == 1 else "" for key, text in _OF_SEQUENCES.items()}
    function.__name__ = function.__qualname__ = name
    function.__doc__ = _DOCSTRING.format(**known, **more)
    signatures[name] = Signature(known["d"], read, function)
    if known["d"] == 1:
        signatures[f"{name}{_NLC}"] = Signature(2, in_one_row(read))
    return function


conv1d = _named("conv1d", conv1d, conv_arguments)
conv_transpose1d = _named("conv_transpose1d", conv_transpose1d, transpose_arguments)
conv2d, conv_transpose2d = _of_dimensions(2)
conv3d, conv_transpose3d = _of_dimensions(3)
