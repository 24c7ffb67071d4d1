"""Sequences (N, L, C): PyTorch's numbers, nothing copied, under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.samples import op_info
from torch import Tensor
from torch.func import grad, jvp, vmap

import convgrad

NAMES = ("conv1d", "conv_transpose1d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_of_pytorch(name: str, dtype: torch.dtype) -> None:
    for s in op_info(name).sample_inputs("cpu", dtype, requires_grad=True):
        want: Tensor = getattr(F, name)(s.input, *s.args, **s.kwargs)
        got = getattr(convgrad, name)(s.input.mT.contiguous(), *s.args, **s.kwargs, layout="NLC")
        assert got.is_contiguous()
        torch.testing.assert_close(got.mT, want, **near(want))
        moved = [t for t in (s.input, *s.args) if isinstance(t, Tensor) and t.requires_grad]
        g = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(got.mT, moved, g), torch.autograd.grad(want, moved, g), strict=True):
            torch.testing.assert_close(a, b, **near(b))


def near(like: Tensor) -> dict[str, float]:
    """Both sides round each result, PyTorch's 16-bit kernels in between too; what cancels is off by what is large."""
    return {"rtol": 0.0, "atol": 16 * torch.finfo(like.dtype).eps * max(1.0, float(like.detach().abs().max()))}


@pytest.mark.parametrize("padding", ["causal", "same", "valid", 2, (1, 0), (0, -1)])
def test_every_form_of_padding(padding: Any) -> None:
    x, w, b = torch.randn(2, 11, 6), torch.randn(6, 1, 4), torch.randn(6)
    want = convgrad.conv1d(x.mT, w, b, 1, padding, 1, 6)
    torch.testing.assert_close(convgrad.conv1d(x, w, b, 1, padding, 1, 6, layout="NLC").mT, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_nothing_is_copied(dtype: torch.dtype) -> None:
    x = torch.randn(2, 50, 32, dtype=dtype, requires_grad=True)
    w, g = torch.randn(32, 1, 4, dtype=dtype, requires_grad=True), torch.randn(2, 50, 32, dtype=dtype)
    with convgrad.trace() as seen:
        convgrad.conv1d(x, w, padding="causal", groups=32, layout="NLC").backward(g)
    assert [record.copies for record in seen] == [(), ()]
    assert x.grad is not None
    assert x.grad.is_contiguous()
    with convgrad.trace() as seen:  # the test can fail: such a view is copied
        convgrad.conv1d(x.mT, w, padding="causal", groups=32)
    assert [len(record.copies) for record in seen] == [1]


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_and_transforms(name: str) -> None:
    x, w = torch.randn(2, 7, 4, dtype=torch.double), torch.randn(4, 2, 3, dtype=torch.double)
    v = torch.randn_like(x)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return getattr(convgrad, name)(x, w, stride=2, padding=1, groups=2, layout="NLC")

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        return getattr(F, name)(x.mT, w, stride=2, padding=1, groups=2).mT

    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, leaves)
    torch.testing.assert_close(jvp(ours, (x, w), (v, w)), jvp(theirs, (x, w), (v, w)))

    def of_sample(call: Any) -> Any:
        return vmap(grad(lambda w, x: call(x, w).square().sum()), in_dims=(None, 0))

    torch.testing.assert_close(of_sample(ours)(w, x), of_sample(theirs)(w, x[:, None]))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*leaves), theirs(x, w))
    with torch.autocast("cpu", torch.bfloat16):
        half = ours(x.float(), w.float())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), theirs(x, w), rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, w: convgrad.conv1d(x, w, layout="CNL"), ValueError, "layout is 'NCL' or 'NLC', got 'CNL'"),
        (lambda x, w: convgrad.conv1d(x.mT, w, layout="NLC"), convgrad.ShapeError, r"got 9 .*\[2, 4, 9\] as"),
        (lambda x, w: convgrad.conv1d(x[:, :0], w, padding=2, layout="NLC"), convgrad.ShapeError, r"\[2, 0, 4\] as"),
        (lambda x, w: convgrad.conv1d(x[0, 0], w, layout="NLC"), convgrad.ShapeError, r"takes an input \(N, L, C\)"),
        (lambda x, w: convgrad.conv1d(x, w[0], layout="NLC"), convgrad.ShapeError, "a weight with 3 dimensions"),
        (lambda x, w: convgrad.conv1d(x, w, stride=(1, 2), layout="NLC"), convgrad.ShapeError, "a list of 1 values"),
        (lambda x, w: convgrad.conv1d(x, w.double(), layout="NLC"), convgrad.DtypeError, "should be the same"),
        (lambda x, w: convgrad.conv1d(x, None, layout="NLC"), TypeError, "'weight' must be Tensor, not NoneType"),
        (lambda x, w: convgrad.nn.Conv1d(2, 2, 3, layout="LNC"), ValueError, "got 'LNC'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(2, 9, 4), torch.randn(6, 4, 3))
