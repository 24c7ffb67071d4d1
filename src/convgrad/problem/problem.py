"""`ConvProblem`: one convolution, as a frozen value of plain integers.

A convolution is a trilinear form ``<grad_output, conv(input, weight)>``. Its three arguments are the
**slots** ``input``, ``weight`` and ``grad_output``; fixing two of them gives one of the three
**passes** ``forward``, ``grad_input`` and ``grad_weight``, each of which yields the missing slot.

A transposed convolution is the pass ``grad_input`` of a plain one, read forwards. Its problem is
therefore the plain problem, with ``origin="transposed"`` as a hint: the tensor that the user calls
``input`` fills the slot ``grad_output``, and the user's output is the slot ``input``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, Literal

import torch

from . import grammar
from .sizes import Dimension, output_length, readable

Pass = Literal["forward", "grad_input", "grad_weight"]
Output = Literal["forward", "grad_input", "grad_weight", "grad_bias"]
#: What is asked for at once, in the order of `OUTPUTS`.
Outputs = tuple[Output, ...]
Slot = Literal["input", "weight", "grad_output"]
Origin = Literal["plain", "transposed"]
PaddingMode = Literal["zeros", "circular", "reflect", "replicate"]

PADDING_MODES: Final[tuple[PaddingMode, ...]] = ("zeros", *grammar.MODES)
PASSES: Final[tuple[Pass, ...]] = ("forward", "grad_input", "grad_weight")
#: What can be asked for at once, in the one order in which it is always written.
OUTPUTS: Final[Outputs] = (*PASSES, "grad_bias")

#: The two slots that a pass contracts, in the order in which a backend receives them.
OPERANDS: Final[dict[Pass, tuple[Slot, Slot]]] = {
    "forward": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
#: The slot that a pass yields.
RESULT: Final[dict[Pass, Slot]] = {"forward": "grad_output", "grad_input": "input", "grad_weight": "weight"}

#: Fields of a `ConvProblem` that have no default.
_REQUIRED: Final = 10
INT32_MAX: Final = 2**31 - 1


def passes_of(outputs: Collection[str]) -> tuple[Pass, ...]:
    """The passes among some outputs, in order: all but ``grad_bias``."""
    return tuple(p for p in PASSES if p in outputs)


def in_order(outputs: Collection[str]) -> Outputs:
    """The outputs in the one order in which they are written."""
    return tuple(o for o in OUTPUTS if o in outputs)


def gradient_outputs(transposed: bool, output_mask: Sequence[bool] = (True, True, True)) -> Outputs:
    """Return the outputs of the plain problem that are the user's ``grad_input``, ``grad_weight`` and ``grad_bias``."""
    outputs: Outputs = ("forward" if transposed else "grad_input", "grad_weight", "grad_bias")
    return tuple([o for o, wanted in zip(outputs, output_mask, strict=True) if wanted])


def shown_outputs(outputs: Collection[str], transposed: bool) -> str:
    """Outputs for people: ``forward (its grad_input)+grad_weight``, by what they are to a transposed problem's user."""
    words = {"forward": "forward (its grad_input)", "grad_input": "grad_input (its output)"} if transposed else {}
    return "+".join(words.get(o, o) for o in outputs)


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """One convolution: sizes, strides and layout, without tensors and without a device.

    Every size is that of the *plain* convolution. For ``origin="transposed"``, ``in_channels`` and
    ``input_size`` describe what the user calls the output.

    Args:
        batch: N, may be 0.
        in_channels: C_in, a multiple of ``groups``, may be 0.
        out_channels: C_out, a multiple of ``groups``.
        groups: number of independent channel groups.
        input_size: D spatial sizes of ``input``.
        kernel_size: D spatial sizes of ``weight``.
        stride: D positive integers.
        padding: D pairs (low, high); a negative value crops.
        dilation: D positive integers.
        output_size: D spatial sizes of ``grad_output``.
        dtype: of all operands.
        memory_format: layout in which the results are returned: ``torch.contiguous_format``, or
            ``torch.channels_last`` / ``torch.channels_last_3d``.
        has_bias: whether a bias is added (plain: C_out values, transposed: C_in values).
        origin: ``"plain"`` or ``"transposed"``, a hint that a backend may use.
        padding_mode: what is read outside the input: zeros, or the input itself as ``torch.nn.functional.pad`` does.
        name: a label for people; it takes no part in comparisons.

    Raises:
        ValueError: sizes that do not belong together.

    Equivalent to:
        >>> p = ConvProblem(1, 32, 32, 32, (112, 112), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (112, 112))
        >>> p.depthwise, p.flops
        (True, 7225344)
    """

    batch: int
    in_channels: int
    out_channels: int
    groups: int
    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    output_size: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    has_bias: bool = False
    origin: Origin = "plain"
    padding_mode: PaddingMode = "zeros"
    name: str = field(default="", compare=False)

    def __new__(cls, *args: object, **fields: object) -> ConvProblem:
        """Refuse tensors, and say which functions make a problem of a call or of a text."""
        given = (*args, *fields.values())
        if any(isinstance(value, torch.Tensor) for value in given) or 0 < len(given) < _REQUIRED:
            raise TypeError(
                "ConvProblem() takes all its sizes as integers; ConvProblem.of(input, weight, bias, stride=..., ...) "
                "makes the problem of a call, and ConvProblem.parse(text) that of a text"
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        d = len(self.input_size)
        sizes = (self.kernel_size, self.stride, self.padding, self.dilation, self.output_size)
        if d not in (1, 2, 3) or any(len(s) != d for s in sizes):
            raise ValueError(
                f"a convolution problem has 1, 2 or 3 spatial dimensions, the same in every field; got {self!r}"
            )
        if self.groups < 1 or self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f"in_channels={self.in_channels} and out_channels={self.out_channels} "
                f"must be multiples of groups={self.groups}"
            )
        if min(self.batch, self.in_channels, self.out_channels) < 0:
            raise ValueError(f"batch and channels are not negative; got {self!r}")
        least = 0 if self.empty else 1
        if min(self.input_size) < least:
            raise ValueError(f"input_size is not negative, and 0 only without a batch or channels; got {self!r}")
        if self.origin not in ("plain", "transposed"):
            raise ValueError(f"origin is 'plain' or 'transposed', got {self.origin!r}")
        if min(self.kernel_size) < least or min(*self.stride, *self.dilation) < 1:
            raise ValueError(f"kernel_size, stride and dilation are positive integers; got {self!r}")
        if (mode := self.padding_mode) not in PADDING_MODES or (mode != "zeros" and self.transposed):
            raise ValueError(f"padding_mode={mode!r} is none of a {self.origin} convolution")
        if mode != "zeros" and not readable(self.input_size, self.padding, mode):
            raise ValueError(f"{mode} padding {self.padding} reads more than an input of size {self.input_size} has")
        for i, dim in enumerate(self.dims):
            n, out, k, s, low, high, dil = dim
            got = output_length(n, k, s, low, high, dil)
            if got != out or out < least:
                raise ValueError(
                    f"output_size[{i}]={out} does not follow from input_size={n}, "
                    f"kernel_size={k}, stride={s}, padding=({low}, {high}), dilation={dil}, which give {got}"
                )
        if self.least_bytes >= 2**63:
            raise ValueError(f"its tensors have {self.least_bytes:,} bytes, more than any memory has")

    # ---- derived values ------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of spatial dimensions."""
        return len(self.input_size)

    @property
    def dims(self) -> tuple[Dimension, ...]:
        """The sizes of each spatial dimension together."""
        lows, highs = zip(*self.padding, strict=True)
        sizes = (self.input_size, self.output_size, self.kernel_size, self.stride, lows, highs, self.dilation)
        return tuple(map(Dimension._make, zip(*sizes, strict=True)))

    @property
    def transposed(self) -> bool:
        """Whether the user asked for a transposed convolution."""
        return self.origin == "transposed"

    @property
    def depthwise(self) -> bool:
        """One input channel a group, and more than one group."""
        return self.groups > 1 and self.in_channels == self.groups

    @property
    def pointwise(self) -> bool:
        """A kernel of one element in every dimension."""
        return all(k == 1 for k in self.kernel_size)

    @property
    def unpadded_pointwise(self) -> bool:
        """Pointwise, without padding: a matrix product of the positions that a stride reaches."""
        return self.pointwise and not any(map(any, self.padding))

    @property
    def matrix_product(self) -> bool:
        """Pointwise, without stride or padding: a matrix product, or one for each group."""
        return self.unpadded_pointwise and self.input_size == self.output_size

    @property
    def symmetric(self) -> bool:
        """Low and high padding agree in every dimension, and none is a crop."""
        return all(low == high and low >= 0 for low, high in self.padding)

    @property
    def channels_last(self) -> bool:
        """Whether the results are returned in a channels_last layout."""
        return self.memory_format in (torch.channels_last, torch.channels_last_3d)

    @property
    def layout(self) -> str:
        """The layout of the results as tables call it, in any number of dimensions."""
        return "channels_last" if self.channels_last else "contiguous"

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *self.output_size)

    def shape_of(self, slot: Slot) -> tuple[int, ...]:
        """Shape of the tensor that fills a slot."""
        if slot == "input":
            return self.input_shape
        return self.weight_shape if slot == "weight" else self.output_shape

    def result_shape(self, output: Output) -> tuple[int, ...]:
        """Shape of what an output computes; the gradient of a bias has the bias's."""
        return (self.shape_of(self.bias_slot)[1],) if output == "grad_bias" else self.shape_of(RESULT[output])

    @property
    def bias_slot(self) -> Slot:
        """The slot over whose channels a bias runs."""
        return "input" if self.transposed else "grad_output"

    @property
    def bias_pass(self) -> Pass:
        """The pass whose result a bias is added to."""
        return "grad_input" if self.transposed else "forward"

    @property
    def empty(self) -> bool:
        """No batch or no channel: every result is zero (plus bias), and any other size may be 0, as in PyTorch."""
        return 0 in (self.batch, self.in_channels, self.out_channels)

    @property
    def flops(self) -> int:
        """Floating-point operations of any one pass, a multiply and an add counted as two; complex: three real."""
        return (6 if self.dtype.is_complex else 2) * prod(self.output_shape) * prod(self.weight_shape[1:])

    @property
    def least_bytes(self) -> int:
        """Bytes that any one pass has to move: its two operands read and its result written once."""
        slots = (self.input_shape, self.weight_shape, self.output_shape)
        return self.dtype.itemsize * sum(prod(s) for s in slots)

    @property
    def needs_int64(self) -> bool:
        """Whether an offset into one of the dense tensors exceeds 32 bits."""
        slots = (self.input_shape, self.weight_shape, self.output_shape)
        return any(prod(s) > INT32_MAX for s in slots)

    # ---- other problems ------------------------------------------------------------------------

    def replace(self, **changes: object) -> ConvProblem:
        """Return the problem with some fields changed."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def canonical(self) -> ConvProblem:
        """The one spelling of this trilinear form: symmetric padding where it gives the same output size, else the
        smallest high padding that does; never a padded position that no kernel element reads.
        """
        padding = []
        for dim in self.dims:
            n, out, k, s, low, _, dil = dim
            symmetric = low >= 0 and output_length(n, k, s, low, low, dil) == out
            padding.append((low, low if symmetric else dim.least_high))
        return self if tuple(padding) == self.padding else self.replace(padding=tuple(padding))

    @classmethod
    def of(
        cls,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] | Sequence[tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        transposed: bool = False,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
    ) -> ConvProblem:
        """Return the problem of a call with these tensors, of which only sizes, dtype and layout are read.

        Args:
            stride, padding, dilation, transposed, output_padding, groups: as in `convgrad.convolution`.

        Shape:
            as in `convgrad.convolution`

        Raises:
            ShapeError: sizes that do not belong together, as in `convgrad.convolution`.

        Equivalent to:
            >>> x, w = torch.ones(1, 32, 112, 112), torch.ones(32, 1, 3, 3)
            >>> print(ConvProblem.of(x, w, stride=2, padding=1, groups=32))
            g32mb1ic32ih112oc32oh56kh3sh2ph1dh0
        """
        from .arguments import all_arguments
        from .shapes import conv_geometry, convolution_shape, layout_of, problem_of

        form = (stride, padding, dilation, transposed, output_padding, groups)
        g = conv_geometry(weight.shape, *all_arguments(weight.dim() - 2, weight.shape, *form))
        input = input.unsqueeze(0) if input.dim() == weight.dim() - 1 else input
        output_shape = convolution_shape(input.shape, weight.shape, None if bias is None else bias.shape, g)
        sizes, layout = (input.shape, weight.shape, output_shape), layout_of(input, weight, g)
        return problem_of(*sizes, g, dtype=input.dtype, memory_format=layout, has_bias=bias is not None)

    # ---- text ----------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, *, transposed: bool = False) -> ConvProblem:
        """Read benchdnn's grammar with our words after it (`convgrad.problem.grammar`); the result is canonical.

        Args:
            text: a descriptor of benchdnn, optionally followed by words.
            transposed: read the descriptor as that of a transposed convolution, as the word ``transposed`` does.

        Raises:
            TypeError: no text.
            ValueError: a text that is no problem; it names the field, the position and an example.

        Equivalent to:
            >>> ConvProblem.parse("g32ic32ih112oc32kh3ph1").kernel_size
            (3, 3)
            >>> print(ConvProblem.parse("ic3ih8oc4kh3 f16 bias"))
            g1mb2ic3ih8oc4oh6kh3sh1ph0dh0 float16 bias
        """
        if not isinstance(text, str):
            raise TypeError(f"ConvProblem.parse reads a text, got {type(text).__name__}")
        return grammar.parse(text, cls, transposed=transposed).canonical()

    def __str__(self) -> str:
        return grammar.format_problem(self)
