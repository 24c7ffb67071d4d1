"""Problems of the compiled CPU kernels, and every result of theirs beside PyTorch's in float64."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st
from torch import Tensor

from convgrad._compat import channels_last_of
from convgrad.backends import _native_library as library
from convgrad.backends.native import NativeBackend
from convgrad.problem import PADDING_MODES, ConvProblem
from convgrad.problem.sizes import Dimension, fields_of, output_length

BACKEND = NativeBackend()
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def problems(dtypes: tuple[torch.dtype, ...] = DTYPES) -> st.SearchStrategy[ConvProblem]:
    """Depthwise and small-group problems: borders wider than the image, crops, strides that leave rows unread, and
    every padding mode up to what there is to read."""

    # Groups, and input and output channels of each.
    few = st.sampled_from([2, 3, 4, 5, 8, 9, 16, 23, 40, 70])
    depthwise = st.tuples(few, st.just(1), st.sampled_from([1, 1, 1, 2, 3]))
    group = st.sampled_from([1, 2, 2, 3, 4, 4, 5, 8, 8, 11, 16])
    grouped = st.tuples(st.integers(1, 9), group, group)

    @st.composite
    def draw_one(draw: st.DrawFn) -> ConvProblem:
        ndim = draw(st.integers(1, 3))
        groups, inputs, outputs = draw(st.one_of(depthwise, grouped))
        longest = {1: 200, 2: 24, 3: 9}[ndim]
        mode = draw(st.sampled_from(PADDING_MODES))
        dims = [draw(dimension(longest, {1: 12, 2: 8, 3: 4}[ndim], mode)) for _ in range(ndim)]
        return ConvProblem(
            *(draw(st.integers(1, 5)), groups * inputs, groups * outputs, groups),
            **fields_of(dims),
            dtype=draw(st.sampled_from(dtypes)),
            memory_format=channels_last_of(ndim) if draw(st.booleans()) else torch.contiguous_format,
            padding_mode=mode,
        )

    @st.composite
    def dimension(draw: st.DrawFn, longest: int, widest: int, mode: str) -> Dimension:
        kernel, stride, dilation = draw(st.integers(1, widest)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
        low, high = draw(st.integers(-2, 6)), draw(st.integers(-2, 6))
        to_read = {"circular": max(low, high), "reflect": max(low, high) + 1}.get(mode, 1)
        least = max(1, dilation * (kernel - 1) + 1 - low - high, to_read)
        size = draw(st.integers(least, max(least, longest)))
        output = output_length(size, kernel, stride, low, high, dilation)
        return Dimension(size, output, kernel, stride, low, high, dilation)

    return draw_one()


@st.composite
def pointwise(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> ConvProblem:
    """Images of one pixel, of less than a vector, of several blocks; vectors that begin in one and end in another;
    with and without strides."""
    ndim = draw(st.integers(1, 3))
    longest = {1: 400, 2: 20, 3: 8}[ndim]
    size = tuple(draw(st.one_of(st.integers(1, 3), st.integers(1, longest))) for _ in range(ndim))
    groups, one = draw(st.sampled_from([1, 1, 1, 2, 5])), (1,) * ndim
    channels = st.sampled_from([1, 2, 3, 5, 8, 13, 16, 17, 24, 31, 40, 67, 130])
    inputs, outputs, batch = draw(channels) * groups, draw(channels) * groups, draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(dtypes))
    stride = draw(st.one_of(st.just(one), st.tuples(*(st.integers(1, 4),) * ndim)))
    output = tuple((n - 1) // step + 1 for n, step in zip(size, stride, strict=True))
    p = ConvProblem(batch, inputs, outputs, groups, size, one, stride, ((0, 0),) * ndim, one, output, dtype=dtype)
    return p.replace(memory_format=channels_last_of(ndim)) if ndim > 1 and draw(st.booleans()) else p


@st.composite
def planar(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> ConvProblem:
    """Small kernels with stride 1 on planes whose rows are read where they lie: borders of every width beside 14 to 130
    columns, which few or many vectors cover; long sequences."""
    ndim = draw(st.integers(1, 3))
    groups, multiplier = draw(st.sampled_from([4, 5, 9, 16])), draw(st.sampled_from([1, 1, 1, 2, 3]))

    def dimension(least: int, longest: int, kernels: int) -> Dimension:
        kernel, dilation = draw(st.integers(1, kernels)), draw(st.integers(1, 3))
        low, high = draw(st.integers(-2, 5)), draw(st.integers(-2, 5))
        reach = dilation * (kernel - 1)
        size = draw(st.integers(max(least, least + reach - low - high, 1 + reach - low - high), longest + reach + 4))
        return Dimension(size, output_length(size, kernel, 1, low, high, dilation), kernel, 1, low, high, dilation)

    dims = [dimension(14, 1200, 4) if ndim == 1 else dimension(14, 130, 3)]
    if ndim > 1:
        dims.insert(0, dimension(1, 24, 3))
    if ndim > 2:
        dims.insert(0, dimension(1, 4, 3))
    sizes = (draw(st.integers(2, 5)), groups, groups * multiplier, groups)
    return ConvProblem(*sizes, **fields_of(dims), dtype=draw(st.sampled_from(dtypes)))


def any_problem(dtypes: tuple[torch.dtype, ...] = DTYPES) -> st.SearchStrategy[ConvProblem]:
    """What any of the kernels takes."""
    return st.one_of(problems(dtypes), planar(dtypes), pointwise(dtypes))


def operands(p: ConvProblem, most: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers, whose sums every dtype's accumulator holds exactly."""

    def fill(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-most, most + 1, shape).to(p.dtype).contiguous(memory_format=p.memory_format)

    return fill(p.input_shape), fill(p.weight_shape), fill(p.output_shape)


def reference(
    p: ConvProblem,
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    dtype: torch.dtype | None = None,
    wide: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Everything in float64 by PyTorch, with the padding made explicit, and rounded."""
    x, w = input.to(wide).requires_grad_(), weight.to(wide).requires_grad_()
    pads = list(itertools.chain.from_iterable(reversed(p.padding)))
    mode = "constant" if p.padding_mode == "zeros" else p.padding_mode
    padded = torch.nn.functional.pad(x, [max(v, 0) for v in pads], mode=mode)
    padded = torch.nn.functional.pad(padded, [min(v, 0) for v in pads])  # PyTorch crops before it pads
    y = torch.convolution(padded, w, None, p.stride, [0] * p.ndim, p.dilation, False, [0] * p.ndim, p.groups)
    grads = torch.autograd.grad(y, (x, w), grad_output.to(wide))
    exact = {"forward": y.detach(), "grad_input": grads[0], "grad_weight": grads[1]}
    exact["grad_bias"] = grad_output.to(wide).sum((0, *range(2, p.ndim + 2)))
    return {name: value.to(dtype or p.dtype) for name, value in exact.items()}


def everything(p: ConvProblem, input: Tensor, weight: Tensor, grad_output: Tensor) -> list[tuple[str, Tensor]]:
    """Every result, from single passes and from every sweep."""
    results: list[tuple[str, Tensor]] = [
        ("forward", BACKEND.bind(p, ("forward",))(input, weight)),
        ("grad_input", BACKEND.bind(p, ("grad_input",))(grad_output, weight)),
        ("grad_weight", BACKEND.bind(p, ("grad_weight",))(grad_output, input)),
    ]
    for sweep in BACKEND.sweeps:
        results += zip(sweep, BACKEND.bind(p, sweep)(grad_output, input, weight), strict=True)
    return results


def assert_exact(p: ConvProblem, wide: torch.dtype = torch.float64) -> None:
    """Every result for integers, in the problem's layout, whose sums every dtype holds; small ones for 16 bits."""
    tensors = operands(p, 1 if p.dtype.itemsize == 2 else 3)
    expected = reference(p, *tensors, wide=wide)
    for name, result in everything(p, *tensors):
        assert torch.equal(result, expected[name]), (name, p, library.instruction_set())
        assert name == "grad_bias" or result.is_contiguous(memory_format=p.memory_format), name
