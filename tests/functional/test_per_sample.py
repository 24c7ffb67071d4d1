"""Gradients of single samples and their norms, against a loop over the samples of stock PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import ShapeError

# input, weight, options; the last entry says whether the norms come from products of positions (ghost norms)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], bool]] = {
    "1d": ((3, 4, 9), (6, 4, 3), {}, False),
    "1d ghost": ((3, 8, 6), (16, 8, 5), {"padding": 1, "dilation": 1}, True),
    "1d dilated ghost": ((3, 8, 8), (16, 8, 3), {"padding": 1, "dilation": 2, "stride": 2}, True),
    "2d depthwise": ((4, 6, 7, 6), (6, 1, 3, 3), {"groups": 6, "padding": 1}, False),
    "2d multiplier": ((2, 3, 8, 7), (6, 1, 3, 2), {"groups": 3, "stride": (2, 1)}, False),
    "2d grouped ghost": ((2, 16, 4, 5), (32, 8, 3, 2), {"groups": 2, "stride": 2, "padding": (1, 0)}, True),
    "3d": ((2, 4, 5, 4, 6), (6, 2, 2, 3, 1), {"groups": 2, "dilation": (1, 1, 2)}, False),
    "3d ghost": ((2, 6, 4, 4, 4), (8, 6, 3, 3, 3), {"padding": 0}, True),
    "transposed": ((3, 4, 6, 5), (4, 3, 3, 3), {"transposed": True, "stride": 2, "output_padding": 1}, False),
    "transposed ghost": (
        (3, 8, 2, 3),
        (8, 6, 3, 3),
        {"transposed": True, "groups": 2, "stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},
        True,
    ),
    "transposed 1d": ((3, 8, 3), (8, 6, 4), {"transposed": True, "stride": 3}, True),
    "nothing in it": ((0, 4, 9), (6, 4, 3), {}, False),
}


def stock(x: Tensor, w: Tensor, b: Tensor | None, options: dict[str, Any]) -> Tensor:
    transposed = options.get("transposed", False)
    rest = {k: v for k, v in options.items() if k != "transposed"}
    return getattr(F, f"conv{'_transpose' * transposed}{x.dim() - 2}d")(x, w, b, **rest)


def loop(x: Tensor, size: tuple[int, ...], g: Tensor, options: dict[str, Any]) -> Tensor:
    """By definition: the gradient of each sample alone."""
    w = torch.randn(size, dtype=x.dtype, requires_grad=True)
    one = [torch.autograd.grad(stock(x[i : i + 1], w, None, options), w, g[i : i + 1])[0] for i in range(len(x))]
    return torch.stack(one) if one else x.new_zeros(0, *size)


def operands(case: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, tuple[int, ...], Tensor, dict[str, Any]]:
    input_size, size, options, _ = CASES[case]
    x = torch.randn(input_size, dtype=dtype)
    g = torch.randn_like(stock(x, torch.randn(size, dtype=dtype), None, options))
    return x, size, g, options


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_gradients_and_norms(case: str, dtype: torch.dtype) -> None:
    x, size, g, options = operands(case, dtype)
    want = loop(x, size, g, options)
    got = convgrad.grad_weight(x, size, g, **options, per_sample=True)
    torch.testing.assert_close(got, want)
    with convgrad.trace() as ran:
        norms = convgrad.per_sample_norms(x, size, g, **options)
    if len(x):
        assert any(r.outputs == "grad_weight" for r in ran) is not CASES[case][-1]
    exact = loop(
        x.to(torch.promote_types(dtype, torch.float64)), size, g.double() if not g.is_complex() else g, options
    )
    expected = exact.flatten(1).norm(dim=1)
    assert norms.dtype is {torch.float64: torch.float64}.get(dtype, torch.float32)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["2d depthwise", "2d grouped ghost", "transposed ghost"])
def test_norms_with_the_bias(case: str) -> None:
    x, size, g, options = operands(case)
    of_bias = convgrad.grad_bias(g, per_sample=True)
    torch.testing.assert_close(of_bias, torch.stack([one.flatten(1).sum(1) for one in g]))
    both = torch.cat([loop(x, size, g, options).flatten(1), of_bias], 1).norm(dim=1)
    torch.testing.assert_close(convgrad.per_sample_norms(x, size, g, **options, bias=True), both)


@pytest.mark.parametrize("case", ["2d depthwise", "2d grouped ghost", "transposed 1d"])
def test_derivatives(case: str) -> None:
    x, size, g, options = operands(case)
    leaves = (x.requires_grad_(), g.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda x, g: convgrad.grad_weight(x, size, g, **options, per_sample=True), leaves, fast_mode=True
    )
    norms = lambda x, g: convgrad.per_sample_norms(x, size, g, **options, bias=True)  # noqa: E731
    assert torch.autograd.gradcheck(norms, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(norms, leaves, fast_mode=True)


@pytest.mark.parametrize("case", ["2d depthwise", "1d ghost"])
def test_a_sample_without_a_gradient(case: str) -> None:
    x, size, g, options = operands(case)
    x[1], g[1] = 0, 0
    leaves = (x.requires_grad_(), g.requires_grad_())
    for bias in (False, True):
        norms = convgrad.per_sample_norms(x, size, g, **options, bias=bias)
        assert norms[1] == 0
        for grad in torch.autograd.grad(norms.sum(), leaves):
            assert bool(grad.isfinite().all())


def test_depthwise_is_one_depthwise_call() -> None:
    x, size, g, options = operands("2d depthwise")
    with convgrad.trace() as ran:
        convgrad.grad_weight(x, size, g, **options, per_sample=True)
    (record,) = ran
    problem = convgrad.ConvProblem.parse(record.problem)
    assert (problem.depthwise, problem.groups, problem.batch) == (True, 24, 1)


@pytest.mark.parametrize("case", ["1d dilated ghost", pytest.param("2d depthwise", marks=pytest.mark.slow)])
def test_compile_and_vmap(case: str) -> None:
    x, size, g, options = operands(case, torch.float32)

    def both(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        norms = convgrad.per_sample_norms(x, size, g, **options)
        return convgrad.grad_weight(x, size, g, **options, per_sample=True), norms

    want = both(x, g)
    torch._dynamo.reset()
    # With symbolic integers, which no message may print before it is one.
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, g), want)
    stacked = torch.func.vmap(both)(torch.stack([x, 2 * x]), torch.stack([g, g]))
    torch.testing.assert_close(stacked, tuple(torch.stack([t, 2 * t]) for t in want))


def test_ghost_norms_are_one_graph() -> None:
    x, size, g, options = operands("1d ghost", torch.float32)

    def norms(x: Tensor, g: Tensor) -> Tensor:
        return convgrad.per_sample_norms(x, size, g, **options)

    torch._dynamo.reset()
    compiled = torch.compile(norms, backend="eager", fullgraph=True)
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            torch.testing.assert_close(compiled(x, g), norms(x, g))


@pytest.mark.parametrize("case", ["1d", "1d ghost", "transposed ghost"])
def test_norms_under_autocast_are_float32_those_of_the_gradients(case: str) -> None:
    x, size, g, options = operands(case, torch.float32)
    want = loop(x.bfloat16().float(), size, g.bfloat16().float(), options).flatten(1).norm(dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        norms = convgrad.per_sample_norms(x, size, g, **options)
    assert norms.dtype == torch.float32
    # Of a gradient in bfloat16 where it is computed, and exact where it is not.
    torch.testing.assert_close(norms, want, rtol=1e-5 if "ghost" in case else 2**-8, atol=0)


def test_operands_of_two_dtypes() -> None:
    for case in ("1d", "1d ghost"):
        x, size, g, options = operands(case)
        with pytest.raises(convgrad.DtypeError, match="Grad_output type"):
            convgrad.per_sample_norms(x.float(), size, g, **options)


def test_what_is_refused() -> None:
    x, size, g, options = operands("2d depthwise")
    for function in (convgrad.per_sample_norms, lambda *a, **k: convgrad.grad_weight(*a, **k, per_sample=True)):
        with pytest.raises(ShapeError, match="grad_output"):
            function(x, size, g[:2], **options)
        with pytest.raises(ShapeError, match="grad_output"):
            function(x, size, g[..., 1:], **options)
        with pytest.raises(ShapeError, match="grad_output"):  # as many channels in all
            function(x, size, g.transpose(0, 1), **options)
        with pytest.raises(ShapeError, match="Expected 4-dimensional input"):
            function(x[0], size, g[0], **options)
        for none in (3, None):
            with pytest.raises(TypeError, match=f"must be Tensor, not {type(none).__name__}"):
                function(none, size, g, **options)
    wrong: Any = 1
    with pytest.raises(TypeError, match="per_sample is True or False, got 1"):
        convgrad.grad_weight(x, size, g, **options, per_sample=wrong)
    with pytest.raises(TypeError, match="per_sample is True or False, got 1"):
        convgrad.grad_bias(g, per_sample=wrong)
    with pytest.raises(TypeError, match="bias is True or False, got 1"):
        convgrad.per_sample_norms(x, size, g, **options, bias=wrong)


@pytest.mark.parametrize("per_sample", [False, True])
def test_the_gradient_of_a_bias_without_a_batch_is_refused(per_sample: bool) -> None:
    with pytest.raises(convgrad.ShapeError, match=r"Expected grad_output \(N, C_out, \*out\), .* of size \[3, 5\]"):
        convgrad.grad_bias(torch.ones(3, 5), per_sample=per_sample)
