"""Arguments as people write them: of which kinds, in which forms, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad.engine.cache import invalidate

KINDS: dict[str, Any] = {
    "float": 1.0,
    "bool": True,
    "numpy int": np.int32(1),
    "numpy bool": np.True_,
    "numpy float": np.float64(1),
    "tensor": torch.tensor(1),
    "float tensor": torch.tensor(1.0),
    "complex": 1 + 0j,
    "fraction": Fraction(1),
    "enum": IntEnum("One", "ONE").ONE,
    "None": None,
    "text": "1",
}
WRITTEN: dict[str, Callable[[Any], Any]] = {
    "alone": lambda v: v,
    "tuple": lambda v: (v, v),
    "list": lambda v: [v, v],
    "second": lambda v: (1, v),
    "one": lambda v: (v,),
}


@pytest.mark.parametrize(("way", "channels"), [("conv2d", 2), ("conv2d", 16), ("conv_transpose2d", 16)])
@pytest.mark.parametrize("argument", ["stride", "padding", "dilation", "groups"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_integer_of_another_kind_is_taken_or_refused_as_by_pytorch(
    way: str, argument: str, kind: str, channels: int
) -> None:
    """Before and after the same call was made with the integer 1: to Python, 1, 1.0 and True are equal.

    With 2 channels PyTorch computes, with 16 native may be chosen.
    """
    ours, theirs = getattr(convgrad, way), getattr(F, way)
    x, w = torch.randn(1, channels, 6, 6), torch.randn(channels, channels if channels == 2 else 1, 3, 3)
    fixed = {"groups": 1 if channels == 2 else channels}
    shapes = {"alone": WRITTEN["alone"]} if argument == "groups" else WRITTEN
    if argument == "groups":
        x, w, fixed = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3), {}
    for shape, write in shapes.items():
        given = {**fixed, argument: write(KINDS[kind])}
        try:
            want = theirs(x, w, **given)
        except (TypeError, RuntimeError) as error:
            want = error
        invalidate()
        for warm in (False, True):
            if isinstance(want, Tensor):
                assert torch.allclose(ours(x, w, **given), want, atol=1e-5), (shape, warm)
            else:
                with pytest.raises(type(want)):
                    ours(x, w, **given)
            for known in ({argument: 1}, {argument: (1, 1)} if argument != "groups" else {}):
                ours(x, w, **{**fixed, **known})


@pytest.mark.parametrize("transposed", [0, 1, np.True_, None])
def test_transposed_is_a_bool(transposed: Any) -> None:
    x, w = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3)
    with pytest.raises(TypeError):
        torch.convolution(x, w, None, (1,), (0,), (1,), transposed, (0,), 1)
    for call in (
        lambda: convgrad.convolution(x, w, transposed=transposed),
        lambda: convgrad.grad_input(x.shape, w, x, transposed=transposed),
    ):
        with pytest.raises(TypeError, match="transposed is True or False, got"):
            call()


@pytest.mark.parametrize(
    "bad",
    [{"stride": 1.5}, {"padding": "foo"}, {"padding": (1, 2, 3)}, {"groups": 3}, {"padding": "same", "stride": 2}],
)
def test_bad_arguments_raise_the_same_class_as_pytorch(bad: dict[str, Any]) -> None:
    x, w = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3)
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        F.conv2d(x, w, **bad)
    with pytest.raises(theirs.type):
        convgrad.conv2d(x, w, **bad)


@pytest.mark.parametrize("bad", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [None, 1.5, (1, None), "1"])
def test_the_message_names_the_argument_that_is_no_integer(bad: str, value: Any) -> None:
    if bad == "padding" and isinstance(value, str):
        pytest.skip("padding may be a word")
    x, w = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3)
    with pytest.raises(TypeError, match=re.escape(f"{bad} is an integer or a tuple of 2 integers, got {value!r}")):
        convgrad.conv2d(x, w, **{bad: value})
    with pytest.raises(TypeError, match=f"{bad} is an integer or a tuple"):
        convgrad.grad_input(x.shape, w, x, **{bad: value})
    with pytest.raises(TypeError, match=r"groups is an integer, got 2\.5"):
        convgrad.conv2d(x, w, groups=2.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", [None, 12, (2, None, 6, 6), (2.0, 2, 6, 6), torch.zeros(1, 2, 6, 6)])
def test_a_size_that_is_none_is_refused_in_a_short_line(size: Any) -> None:
    x, w, g = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3), torch.randn(1, 2, 4, 4)
    calls: list[Callable[[], Any]] = [
        lambda: convgrad.grad_input(size, w, g),
        lambda: convgrad.conv2d_input(size, w, g),
        lambda: convgrad.grad_weight(x, size, g),
        lambda: convgrad.conv2d_weight(x, size, g),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="_size is a sequence of integers") as refused:
            call()
        assert len(str(refused.value)) < 120


@pytest.mark.parametrize("operands", [(None, 1), (1, None), ("x", 1), (1, 1, "b")])
def test_what_is_no_tensor_is_refused_as_in_pytorch(operands: tuple[Any, ...]) -> None:
    real = [torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3), torch.randn(2)]
    mixed = [t if o == 1 else o for o, t in zip(operands, real, strict=False)]
    for function in (convgrad.conv2d, convgrad.convolution):
        with pytest.raises(TypeError, match="must be Tensor, not"):
            function(*mixed)


X, W = torch.randn(2, 4, 9), torch.randn(4, 4, 3)
OF_A_BIAS: dict[str, Callable[[Any], Any]] = {
    "conv1d": lambda b: convgrad.conv1d(X.mT, W, b, layout="NLC"),
    "conv_transpose1d": lambda b: convgrad.conv_transpose1d(X.mT, W, b, layout="NLC"),
    "feedback_convolution": lambda b: convgrad.feedback_convolution(X, W, 2 * W, b),
    "causal_conv1d": lambda b: convgrad.causal_conv1d(X, W[0], b),
    "causal_conv1d_update": lambda b: convgrad.causal_conv1d_update(X, torch.zeros(2, 4, 2), W[0], b),
}


@pytest.mark.parametrize("name", OF_A_BIAS)
def test_a_bias_is_checked_and_traced_as_the_other_operands_are(name: str) -> None:
    """A proxy of torch.fx in its place alone was handed on, and a feedback weight was left out of the graph."""
    call = OF_A_BIAS[name]
    for none_or_tensor in (None, torch.randn(4)):
        assert call(none_or_tensor).shape == call(None).shape
    with pytest.raises(TypeError, match=rf"{name}\(\): argument 'bias' must be Tensor, not float"):
        call(1.0)
    graph = torch.fx.symbolic_trace(call)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [getattr(convgrad, name)]
    assert torch.equal(graph(bias := torch.randn(4)), call(bias))


@pytest.mark.parametrize("size", [(1, 3, 5, 5), (3, 5, 5)])
def test_a_weight_of_another_rank_is_refused_with_the_batched_size(size: tuple[int, ...]) -> None:
    words = "3-dimensional weight [2, 3, 3], but got 4-dimensional input of size [1, 3, 5, 5]"
    with pytest.raises(convgrad.ShapeError, match=re.escape(words)):
        convgrad.conv2d(torch.zeros(size), torch.zeros(2, 3, 3))


@pytest.mark.parametrize("padding", ["valid", "same", "causal", 0])
@pytest.mark.parametrize("size", [(), (4,), (4, 4)])
def test_a_weight_size_without_space_is_refused(size: tuple[int, ...], padding: Any) -> None:
    with pytest.raises(convgrad.ShapeError, match="weight should have at least three dimensions"):
        convgrad.grad_weight(X, size, X, padding=padding)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("input", lambda x, w, g: convgrad.grad_weight(None, w.shape, g)),
        ("weight", lambda x, w, g: convgrad.conv2d_input(x.shape, None, g)),
        ("grad_output", lambda x, w, g: convgrad.convolution_backward(None, x, w)),
        ("grad_output", lambda x, w, g: convgrad.grad_bias(None)),
    ],
)
def test_a_gradient_of_no_tensor_is_refused_by_name(argument: str, call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=f"argument '{argument}' must be Tensor, not NoneType"):
        call(torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3), torch.randn(1, 2, 4, 4))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"output_mask": None}, "output_mask is a sequence of three booleans, got None"),
        ({"output_mask": "abc"}, "output_mask is a sequence of three booleans, got 'abc'"),
        ({"bias_sizes": 2}, "bias_sizes is a sequence of integers"),
        ({"bias_sizes": "2"}, "bias_sizes is a sequence of integers"),
    ],
)
def test_what_is_no_mask_and_no_size_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    x, w, g = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3), torch.randn(1, 2, 4, 4)
    with pytest.raises(TypeError, match=words):
        convgrad.convolution_backward(g, x, w, **wrong)


@pytest.mark.parametrize("padding", [((1, 0), (2, -1)), [(1, 0), (2, -1)], (1, 0, 2, -1)])
def test_pairs_of_padding(padding: Any) -> None:
    x, w = torch.randn(1, 2, 5, 6, dtype=torch.float64), torch.randn(2, 2, 3, 3, dtype=torch.float64)
    want = F.conv2d(F.pad(x, (2, -1, 1, 0)), w)
    torch.testing.assert_close(convgrad.conv2d(x, w, padding=padding), want)
    assert convgrad.grad_input(x.shape, w, torch.ones_like(want), padding=padding).shape == x.shape
    want = F.pad(F.conv_transpose2d(x, w, stride=2), (-2, 1, -1, 0))  # a crop there
    assert torch.equal(convgrad.convolution(x, w, stride=2, padding=padding, transposed=True), want)
    assert torch.equal(convgrad.conv_transpose2d(x, w, stride=2, padding=padding), want)
    with pytest.raises(convgrad.ShapeError, match=r"a pair .low, high. for each dimension"):
        convgrad.conv2d(x, w, padding=((1,), (2,)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_pytorch_does_not_convolve(dtype: torch.dtype) -> None:
    x, w = torch.ones(1, 2, 5, 5).to(dtype), torch.ones(2, 2, 3, 3).to(dtype)
    word = re.escape(f"not implemented for '{str(dtype)[6:].capitalize()}'")
    for call in (torch.conv2d, convgrad.conv2d, convgrad.conv_transpose2d):
        with pytest.raises(NotImplementedError, match=word):
            call(x, w)
    with pytest.raises(convgrad.UnsupportedError, match=word):
        convgrad.grad_weight(x, w.shape, torch.ones(1, 2, 3, 3).to(dtype))
