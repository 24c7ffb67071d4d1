"""Validation: PyTorch's words, the same in eager, fake and meta, before anything is computed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import convgrad

ops = torch.ops.convgrad
PLAIN = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)


def change(**changes: Any) -> tuple[Any, ...]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    values = dict(zip(names, PLAIN, strict=True))
    values.update(changes)
    return tuple(values[n] for n in names)


T = {"transposed": True}
X, W = (2, 4, 6, 6), (4, 4, 3, 3)
#: message, input, weight, bias, arguments
BAD = [
    ("weight should have at least three dimensions", X, (4, 4), None, PLAIN),
    ("Expected a weight with 1, 2 or 3 spatial dimensions", (1,) * 6, (1,) * 6, None, PLAIN),
    ("expected stride to be a single integer value or a list of 2 values", X, W, None, change(stride=(1, 1, 1))),
    ("expected stride to be a single integer", X, W, None, change(stride=())),
    ("expected padding to be a single integer value or a list of 2 values", X, W, None, change(padding=(1, 1, 1))),
    ("expected dilation to be", X, W, None, change(dilation=(1, 1, 1))),
    ("expected output_padding to be", X, W, None, change(output_padding=(1, 1, 1), **T)),
    ("negative padding is not supported", X, W, None, change(padding=(-1, 0))),
    ("negative output_padding is not supported", X, W, None, change(output_padding=(-1, 0), **T)),
    ("non-positive stride is not supported", X, W, None, change(stride=(0, 1))),
    ("non-positive dilation is not supported", X, W, None, change(dilation=(1, 0))),
    ("non-positive groups is not supported", X, W, None, change(groups=0)),
    ("Expected 4-dimensional input for 4-dimensional weight", (2, 4, 6), W, None, PLAIN),
    ("expected weight to be at least 2 at dimension 0", X, (1, 2, 3, 3), None, change(groups=2)),
    ("expected weight to be divisible by 2 at dimension 0", X, (3, 2, 3, 3), None, change(groups=2)),
    ("to have 4 channels, but got 5 channels instead", (2, 5, 6, 6), W, None, PLAIN),
    ("to have 4 channels, but got 5 channels instead", (2, 5, 6, 6), W, None, change(**T)),
    ("expected bias to be 1-dimensional with 4 elements", X, W, (5,), PLAIN),
    ("expected bias to be 1-dimensional with 4 elements", X, W, (4, 1), PLAIN),
    ("expected bias to be 1-dimensional with 6 elements", X, (4, 6, 3, 3), (4,), change(**T)),
    ("Kernel size can't be greater than actual input size", (2, 4, 2, 2), W, None, PLAIN),
    ("kernel size should be greater than zero", X, (4, 4, 0, 3), None, PLAIN),
    ("output padding must be smaller than either stride or dilation", X, W, None, change(output_padding=(1, 1), **T)),
    ("Output size is too small", (2, 4, 1, 1), W, None, change(padding=(2, 2), **T)),
    ("Only zero batch or zero channel inputs are supported", (2, 4, 0, 6), W, None, change(padding=(2, 2))),
    ("expected weight to be at least 1 at dimension 0", X, (0, 4, 3, 3), None, PLAIN),
    ("expected weight to be at least 1 at dimension 1", X, (4, 0, 3, 3), None, change(**T)),
    ("does not fit in any memory", X, (4, 4, 1, 1), None, change(padding=(2**40, 2**40))),
    ("a padded input of size", X, W, None, change(padding=(2**60, 0), dilation=(2**60, 1))),
]


def tensors(mode: str, *shapes: tuple[int, ...] | None) -> list[Tensor | None]:
    device = "meta" if mode == "meta" else "cpu"
    return [None if s is None else torch.empty(s, device=device) for s in shapes]


@pytest.mark.parametrize("mode", ["eager", "meta", "fake"])
@pytest.mark.parametrize(("message", "input", "weight", "bias", "arguments"), BAD, ids=range(len(BAD)))
def test_refused(message: str, input: Any, weight: Any, bias: Any, arguments: Any, mode: str) -> None:
    operands = tensors(mode, input, weight, bias)
    with FakeTensorMode() if mode == "fake" else nullcontext() as fake:
        if mode == "fake":
            operands = [t if t is None else fake.from_tensor(t) for t in operands]
        with pytest.raises(RuntimeError, match=message):
            ops.convolution(*operands, *arguments)


WRONG_GRADS = [
    ((1, 4, 4, 4), None),  # batch 1 against 2: ATen reads past the end
    ((5, 4, 4, 4), None),
    ((2, 5, 4, 4), None),
    ((2, 4, 5, 4), None),
    ((2, 4, 4), None),
    ((2, 4, 4, 4), [5]),
    ((2, 4, 4, 4), [4, 1]),
]


@pytest.mark.parametrize("mode", ["eager", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("grad", "sizes"), WRONG_GRADS)
def test_every_size_of_grad_output_is_checked(grad: Any, sizes: Any, dtype: torch.dtype, mode: str) -> None:
    g, x, w = (t.to(dtype) for t in tensors(mode, grad, (2, 4, 6, 6), (4, 4, 3, 3)) if t is not None)
    with pytest.raises(convgrad.ShapeError, match=r"grad_output|bias_sizes"):
        ops.convolution_backward(g, x, w, sizes, *PLAIN, [True] * 3)
    if sizes is None:
        with pytest.raises(convgrad.ShapeError, match="grad_output"):
            ops.grad_input(g, w, x.shape, *PLAIN)
        with pytest.raises(convgrad.ShapeError, match="grad_output"):
            ops.grad_weight(g, x, w.shape, *PLAIN)


def test_dtypes_devices_and_layouts() -> None:
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    with pytest.raises(convgrad.DtypeError, match=r"Input type \(torch.FloatTensor\) and weight type \(torch.Double"):
        convgrad.conv2d(x, w.double())
    with pytest.raises(convgrad.DtypeError, match="bias type"):
        convgrad.conv2d(x, w, torch.randn(4).double())
    with pytest.raises(convgrad.DtypeError, match=r"Expected input to be a dense tensor.*_mkldnn.*to_dense"):
        convgrad.conv2d(x.to_mkldnn(), w)
    with pytest.raises(convgrad.DtypeError, match=r"Expected weight to be a dense tensor"):
        convgrad.conv2d(x, w.to_sparse())
    with pytest.raises(convgrad.DtypeError, match="same device"):
        convgrad.conv2d(x, w.to("meta"))
    with pytest.raises(NotImplementedError, match="Bool"):
        convgrad.conv2d(x > 0, w > 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_empty_batch_has_empty_and_zero_gradients(transposed: bool) -> None:
    x = torch.randn(0, 4, 6, 6, requires_grad=True)
    w, b = torch.randn(4, 4, 3, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    y = ops.convolution(x, w, b, *change(transposed=transposed))
    assert y.shape == (0, 4, *([8, 8] if transposed else [4, 4]))
    y.sum().backward()
    for t in (x, w, b):
        assert t.grad is not None
        assert t.grad.shape == t.shape
        assert not t.grad.any()
    # bias_sizes=None with mask[2]: ATen aborts the process
    grads = ops.convolution_backward(y.detach(), x, w, None, *change(transposed=transposed), [True] * 3)
    assert grads[2].shape == (4,)


def test_empty_channels() -> None:
    x, w = torch.randn(2, 0, 6, 6, requires_grad=True), torch.randn(4, 0, 3, 3, requires_grad=True)
    b = torch.randn(4, requires_grad=True)
    y = convgrad.conv2d(x, w, b)
    assert y.shape == torch.nn.functional.conv2d(x, w, b).shape
    y.sum().backward()
    assert [t.grad.shape for t in (x, w, b)] == [t.shape for t in (x, w, b)]
    grads = ops.convolution_backward(torch.ones(2, 4, 4, 4), x, w, [4], *PLAIN, [True] * 3)
    assert torch.equal(grads[2], torch.full((4,), 32.0))


def test_output_padding_beyond_the_stride_of_a_dilated_kernel() -> None:
    x, w = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(4, 3, 3, dtype=torch.float64)
    options: dict[str, Any] = {"stride": 1, "output_padding": 1, "dilation": 2}
    expected = torch.nn.functional.conv_transpose1d(x, w, **options)
    torch.testing.assert_close(convgrad.conv_transpose1d(x, w, **options), expected)
