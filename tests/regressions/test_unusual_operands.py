"""Operands that once ended the process, kept it busy for a minute, or got a message about somebody else's tensor, or a
result in another layout.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import convgrad
from convgrad.problem import validation

FORM = ([1, 1], [0, 0], [1, 1], False, [0, 0], 4)
X, W, G = (1, 4, 8, 8), (4, 1, 3, 3), (1, 4, 6, 6)


# ---- zeros without memory --------------------------------------------------------------------------


def zeros(*shape: int) -> Tensor:
    return torch._efficientzerotensor(shape)


@pytest.mark.parametrize("backend", [None, "native", "aten", "im2col", "reference"])
def test_zeros_without_memory(backend: str | None) -> None:
    x, w, g = torch.randn(X), torch.randn(W), torch.randn(G)
    with convgrad.use_backend(backend):
        results = [
            convgrad.conv2d(zeros(*X), w, groups=4),
            convgrad.conv2d(x, zeros(*W), groups=4),
            convgrad.grad_input(X, w, zeros(*G), groups=4),
            convgrad.grad_weight(zeros(*X), W, g, groups=4),
            convgrad.convolution_backward(zeros(*G), x, w, None, groups=4)[1],
            torch.ops.convgrad.convolution(zeros(*X), w, None, *FORM),
        ]
        with convgrad.takeover():
            results.append(torch.conv2d(zeros(*X), w, groups=4))
        torch.testing.assert_close(convgrad.conv2d(x, w, zeros(4), groups=4), convgrad.conv2d(x, w, groups=4))
    assert not any(t.any() for t in results if t is not None)


def test_forward_mode_makes_them() -> None:
    x, w = torch.randn(X), torch.randn(W)
    with forward_ad.dual_level():
        y = convgrad.conv2d(forward_ad.make_dual(x, zeros(*X)), w, groups=4)
        tangent = forward_ad.unpack_dual(y).tangent
    assert tangent is None or not tangent.any()


# ---- wrappers without memory -----------------------------------------------------------------------


def escaped(t: Tensor) -> Tensor:
    """As a hook keeps an activation under ``torch.func.grad``: PyTorch computes with it as with any other tensor."""
    kept: list[Tensor] = []
    torch.func.grad(lambda t: (kept.append(t * 1), t.sum())[1])(t)
    return kept[0]


def test_tensors_that_escaped_from_a_transform() -> None:
    x, w = torch.randn(X, requires_grad=True), torch.randn(W)
    layer = convgrad.nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="circular")
    want = torch.conv2d(x, w, groups=4)
    norm, images = convgrad.nn.BatchNorm2d(4), torch.randn(8, 4, 64, 64, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(convgrad.conv2d(escaped(x), escaped(w), groups=4), want)
        torch.testing.assert_close(layer(escaped(x)), layer(x))
        torch.testing.assert_close(norm(escaped(images)), norm(images))
        for leaf, y in ((x, convgrad.conv2d(x, w, groups=4)), (images, norm(images))):
            g = torch.randn_like(y)
            (got,) = torch.autograd.grad(y, leaf, escaped(g), retain_graph=True)
            torch.testing.assert_close(got, *torch.autograd.grad(y, leaf, g))


@pytest.mark.parametrize("name", ["function", "operator"])
def test_functional_tensors(name: str) -> None:
    """They ended the process."""
    x, w = torch.randn(X), torch.randn(W)
    want = CALLS[name](x, w)
    torch._enable_functionalization(reapply_views=True)
    try:
        got = torch._from_functional_tensor(CALLS[name](*map(torch._to_functional_tensor, (x, w))))
    finally:
        torch._disable_functionalization()
    torch.testing.assert_close(got, want)


# ---- fake ones beside real ones --------------------------------------------------------------------

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "function": lambda x, w: convgrad.conv2d(x, w, groups=4),
    "operator": lambda x, w: torch.ops.convgrad.convolution(x, w, None, *FORM),
    "gradients": lambda x, w: convgrad.convolution_backward(x.new_zeros(G), x, w, None, groups=4),
    "gradient": lambda x, w: convgrad.grad_input(X, w, x.new_zeros(G), groups=4),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("within", [False, True], ids=["outside of the mode", "in the mode"])
def test_a_fake_tensor_beside_a_real_one(name: str, within: bool) -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(X)
    with mode if within else nullcontext(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        CALLS[name](fake, REAL)


REAL = torch.randn(W)


def test_real_tensors_where_the_mode_takes_them() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert convgrad.conv2d(torch.empty(X), REAL, groups=4).shape == G
    with FakeTensorMode(), pytest.raises(AssertionError, match="FakeTensors"):
        convgrad.conv2d(REAL, REAL)


# ---- more than there is memory for -------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "native", "aten", "im2col", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_what_does_not_fit_is_refused_at_once(backend: str | None, dtype: torch.dtype) -> None:
    n, start = 2**36, monotonic()
    row = torch.ones(1, 4, 1, dtype=dtype)
    w = torch.ones(4, 2, 3, dtype=dtype)
    for padding in (0, n // 2):  # the result, and a dense copy of the operand
        with convgrad.use_backend(backend), pytest.raises(convgrad.UnsupportedError, match="GB are free"):
            convgrad.conv_transpose1d(row.expand(1, 4, n), w, padding=padding)
    if dtype is not torch.complex64:
        with convgrad.use_backend(backend), pytest.raises(RuntimeError, match=r"GB are free|can't allocate memory"):
            convgrad.grad_input((1, 1, n), row[:, :1, :1].expand(1, 1, 1), row[:, :1].expand(1, 1, n))
    assert monotonic() - start < 20


def test_a_dense_copy_of_grad_output_that_does_not_fit_is_refused() -> None:
    """As ``y.sum().backward()`` makes one; only those of input and weight were counted."""
    n, x, w = 2**36, torch.ones(1, 4, 2), torch.ones(4, 2, 1)
    form = {"stride": n, "transposed": True, "output_mask": (False, True, False)}
    with pytest.raises(convgrad.UnsupportedError, match="GB are free"):
        convgrad.convolution_backward(torch.ones(1).expand(1, 2, n + 1), x, w, **form)


def test_only_what_lies_in_memory_once_needs_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_LARGE", 1)
    monkeypatch.setattr(validation, "_free_memory", lambda: 4 * 37)  # for the result
    w = torch.ones(1, 1, 1)
    assert convgrad.conv1d(torch.ones(1, 1, 37), w).sum() == 37
    with pytest.raises(convgrad.UnsupportedError, match="GB are free"):
        convgrad.conv1d(torch.ones(1).expand(1, 1, 37), w)


def test_what_a_container_holds_of_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control group counts them as used, and after a data set was read there seemed to be no memory left."""
    stat = "anon 400\nactive_file 1500\ninactive_file 1000\nslab 9\n"
    for name, text in {"max": "3000\n", "current": "2900\n", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(validation, "_GROUP", tmp_path)
    assert validation._free_memory() == 2600
    (tmp_path / "memory.max").write_text("max\n")
    assert validation._free_memory() > 1 << 20


def test_native_does_not_pack_gigabytes_of_padding() -> None:
    """It took a minute for an output of 4097 numbers."""
    x, w = torch.randn(1, 16, 16), torch.randn(16, 1, 1)
    options: Any = {"stride": 2**20, "padding": 2**31 - 1, "groups": 16}
    with convgrad.use_backend("native"), pytest.raises(convgrad.BackendError, match="may pack a whole image"):
        convgrad.conv1d(x, w, **options)
    assert convgrad.conv1d(x, w, **options).shape == (1, 16, 4097)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("backend", "channels"),
    [(None, 4), (None, 96), ("aten", 4), ("aten:native", 4), ("native", 4), ("im2col", 4)],
)
def test_sequences_are_contiguous_beside_a_transposed_weight(
    backend: str | None, recorded: bool, channels: int
) -> None:
    """PyTorch's results are transposed as the weight is. Without a request it computes 96 channels."""
    x = torch.randn(2, channels, 9, requires_grad=recorded)
    w = torch.randn(channels, 3, channels).transpose(1, 2).requires_grad_(recorded)
    with convgrad.use_backend(backend):
        for call in (convgrad.conv1d, convgrad.conv_transpose1d):
            for _ in range(2):
                y = call(x, w)
                assert y.is_contiguous()
                torch.testing.assert_close(y, getattr(F, call.__name__)(x, w), rtol=1e-4, atol=1e-4)
        g = torch.randn(2, channels, 7)
        gradients = torch.autograd.grad(convgrad.conv1d(x, w), (x, w), g) if recorded else ()
        for t in (*gradients, *convgrad.convolution_backward(g, x.detach(), w.detach())[:2]):
            assert t is not None
            assert t.is_contiguous()
