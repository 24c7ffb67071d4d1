"""The kernels of batch normalization against its definition in float64, for every instruction set."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from convgrad._compat import channels_last_of
from convgrad.backends import _native_library as library
from convgrad.backends import normalization_gradients, normalize
from convgrad.check.guards import Poison, paged_copy

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_absent())

EPSILON = {torch.float32: 2**-23, torch.float64: 2**-52, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Planes shorter than a vector, with and without a rest; channels that fill vectors alone or with others; few pixels.
SHAPES = [(8, 32), (33, 17), (5, 3), (2, 5, 3), (3, 40, 1, 1), (2, 1, 9, 9), (1, 8, 40, 40), (2, 7, 3, 4, 5),
          (4, 3, 5, 5), (2, 16, 7, 7), (5, 24, 10, 3), (2, 130, 16, 16), (2, 64, 33, 33)]  # fmt: skip
#: In channels_last: rows of a vector and more, with and without a rest; more and fewer rows than a part has.
LAST_SHAPES = [(2, 16, 7, 7), (5, 24, 10, 3), (3, 37, 9, 8), (2, 33, 3, 4, 5), (1, 131, 2, 1), (2, 64, 33, 33)]
CASES = [*((shape, False) for shape in SHAPES), *((shape, True) for shape in LAST_SHAPES)]


def drawn(shape: tuple[int, ...], last: bool = False) -> Tensor:
    x = torch.randn(shape)
    return x.contiguous(memory_format=channels_last_of(len(shape) - 2)) if last else x


def definition(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """Output, mean, variance, and the gradients of the three, written out (Ioffe and Szegedy, 2015, section 3)."""
    x, weight, bias, g = (t.double() for t in (x, weight, bias, g))
    over = [d for d in range(x.dim()) if d != 1]
    size = (1, -1, *[1] * (x.dim() - 2))
    mean = x.mean(over, keepdim=True)
    var = (x - mean).square().mean(over, keepdim=True)
    invstd = (var + epsilon).rsqrt()
    xhat, w = (x - mean) * invstd, weight.view(size)
    moved = g - g.mean(over, keepdim=True) - xhat * (g * xhat).mean(over, keepdim=True)
    y, gx = xhat * w + bias.view(size), moved * w * invstd
    return y, mean.flatten(), var.flatten(), gx, (g * xhat).sum(over), g.sum(over)


def near(found: Tensor, exact: Tensor, error: float) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=error * max(1.0, float(exact.abs().max())))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_the_definition(dtype: torch.dtype, wide: bool) -> None:
    if wide and dtype.itemsize != 2:
        pytest.skip("its parameters have its own dtype")
    error = 32 * EPSILON[dtype] if dtype.itemsize > 2 else 2 * EPSILON[dtype]
    for shape, last in CASES:
        channels, n = shape[1], torch.Size(shape).numel() // shape[1]
        values = [torch.randn(channels, dtype=torch.float64).to(torch.float32 if wide else dtype) for _ in range(4)]
        weight, bias, mean, var = values
        start_mean, start_var = mean.double(), var.double()
        x, g = (drawn(shape, last).to(dtype) for _ in range(2))
        running = mean.clone(), var.clone()
        # with few elements the variance may be anything, and so may its inverse
        y, statistics = normalize(x, weight, bias, *running, 0.25, 0.5)
        exact = definition(x, weight, bias, g, 0.5)
        near(y, exact[0], error)
        near(statistics[0], exact[1], error)
        near(statistics[1], (exact[2] + 0.5).rsqrt(), error)
        near(running[0], 0.25 * exact[1] + 0.75 * start_mean, error)
        near(running[1], 0.25 * exact[2] * n / (n - 1) + 0.75 * start_var, error)
        for found, gradient in zip(
            normalization_gradients(g, x, weight, bias, statistics, (True, True, True)), exact[3:], strict=True
        ):
            assert found is not None
            near(found, gradient, error)
        assert normalization_gradients(g, x, weight, bias, statistics, (False, False, False)) == (None, None, None)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("last", [False, True])
def test_a_large_mean_and_a_small_variance(last: bool) -> None:
    """The error of the variance does not grow with the mean; and a first image unlike the others does no harm."""
    x = drawn((6, 20, 50, 50), last) / 8 + 1000
    x[0] -= 7
    _, statistics = normalize(x, None, None, None, None, 0.0, 1e-5)
    exact = (x.double().var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(statistics[1].double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(statistics[0].double(), x.double().mean((0, 2, 3)), rtol=2**-23, atol=0)


@pytest.mark.parametrize("last", [False, True])
def test_infinite_elements_stay_in_their_channel(last: bool) -> None:
    x = drawn((3, 19, 6, 7), last)
    x[:, 1], x[1, 2, 3, 3], x[0, 3] = float("inf"), float("inf"), float("nan")
    mean, var = torch.zeros(2, 19), torch.zeros(2, 19)
    y, _ = normalize(x, None, None, mean[0], var[0], 1.0, 1e-5)
    want = torch.native_batch_norm(x, None, None, mean[1], var[1], True, 1.0, 1e-5)[0]
    torch.testing.assert_close(y, want, equal_nan=True)
    torch.testing.assert_close(mean[0], mean[1], equal_nan=True)
    torch.testing.assert_close(var[0], var[1], equal_nan=True)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("last", [False, True])
def test_a_nan_of_a_parameter_stays_one_whatever_its_bits(last: bool) -> None:
    x = drawn((2, 17, 5, 5), last).bfloat16()
    weight = torch.ones(17)
    weight.view(torch.int32)[3] = 0x7FFFFFFF  # as GPUs write it: rounded as other numbers are, it would be -0
    y, _ = normalize(x, weight, None, None, None, 0.0, 1e-5)
    assert y[:, 3].isnan().all()
    assert not y[:, :3].isnan().any()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.skipif(os.name != "posix", reason="it has no mprotect")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_outside_is_touched_and_all_is_written(dtype: torch.dtype, at_end: bool) -> None:
    for shape, last in CASES:
        x, g = (paged_copy(drawn(shape, last).to(dtype), at_end=at_end) for _ in range(2))
        weight = paged_copy(torch.ones(shape[1], dtype=dtype), at_end=at_end)
        with Poison() as memory:
            y, statistics = normalize(x, weight, weight, None, None, 0.0, 1e-5)
            results = normalization_gradients(g, x, weight, weight, statistics, (True, True, True))
        assert not memory.overstepped()
        assert not any(t.isnan().any() for t in (y, statistics, *results) if t is not None)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(4, 5, 64, 64), (2, 3, 150, 150), (9, 40, 31, 33)], ids=str)
def test_threads_change_no_bit(shape: tuple[int, ...], last: bool) -> None:
    x, g = (drawn((shape[0], shape[1] + 16 * last, *shape[2:]), last) for _ in range(2))
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        y, statistics = normalize(x, None, None, None, None, 0.0, 1e-5)
        results.append((y, statistics, *normalization_gradients(g, x, None, None, statistics, (True, True, True))))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


# ---- with an activation --------------------------------------------------------------------------

FUNCTIONS = {name: getattr(torch.nn.functional, name) for name in ("relu", "relu6", "silu", "hardswish")}


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activated(activation: str, dtype: torch.dtype) -> None:
    """As PyTorch in double; where an edge of the activation lies within the rounding, on either side."""
    error = 32 * EPSILON[dtype] if dtype.itemsize > 2 else 4 * EPSILON[dtype]
    for shape, last in CASES:
        x, g = (drawn(shape, last).to(dtype) for _ in range(2))
        weight, bias = (3 * torch.randn(shape[1]).to(dtype) for _ in range(2))
        y, statistics = normalize(x, weight, bias, None, None, 0.0, 0.5, activation)
        exact = [t.double().requires_grad_() for t in (x, weight, bias)]
        normalized = torch.nn.functional.batch_norm(exact[0], None, None, exact[1], exact[2], True, 0.0, 0.5)
        want = FUNCTIONS[activation](normalized)
        near(y, want.detach(), error)
        edges = {"relu": [0.0], "relu6": [0.0, 6.0], "silu": [], "hardswish": [-3.0, 3.0]}[activation]
        for edge in edges:
            g.masked_fill_((normalized - edge).abs() < 1e-5, 0)
        gradients = torch.autograd.grad(want, exact, g.double())
        for wanted in ((True, True, True), (False, True, True)):  # other code, which a compiler may round otherwise
            found = normalization_gradients(g, x, weight, bias, statistics, wanted, activation)
            for one, other, given in zip(found, gradients, wanted, strict=True):
                assert (one is not None) == given
                if one is not None:
                    near(one, other, error)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_edges_of_activations(activation: str, dtype: torch.dtype, last: bool) -> None:
    """Where the weight is 0, the bias is what is activated."""
    edges = torch.tensor([-float("inf"), -1e4, -3, 0, 3, 6, 1e4, float("inf"), float("nan")], dtype=dtype).repeat(2)
    x, weight = drawn((2, len(edges), 4, 8), last).to(dtype), torch.zeros_like(edges)
    z = edges.clone().requires_grad_()
    want = FUNCTIONS[activation](z[:, None, None].repeat(2, 1, 4, 8))
    y, statistics = normalize(x, weight, edges, None, None, 0.0, 0.5, activation)
    torch.testing.assert_close(y, want, equal_nan=True, check_stride=False)
    (gradient,) = torch.autograd.grad(want.sum(), z)
    needs = True, True, True
    found = normalization_gradients(torch.ones_like(x), x, weight, edges, statistics, needs, activation)
    assert found[2] is not None
    number = ~edges.isnan()  # there PyTorch's vectors give another gradient than its single elements
    torch.testing.assert_close(found[2][number], gradient[number], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_bias_in_float32_without_a_weight(activation: str, dtype: torch.dtype) -> None:
    """The backward read the bias as if it had the input's dtype."""
    x, g, bias = drawn((2, 20, 9, 9)).to(dtype), drawn((2, 20, 9, 9)).to(dtype), 3 * torch.randn(20)
    _, statistics = normalize(x, None, bias, None, None, 0.0, 0.5, activation)
    found = normalization_gradients(g, x, None, bias, statistics, (True, False, True), activation)
    weight = torch.ones(20)
    want = normalization_gradients(g, x, weight, bias, statistics, (True, False, True), activation)
    assert found[2] is not None
    assert found[2].dtype is torch.float32
    torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_silu_over_its_whole_range(dtype: torch.dtype) -> None:
    """To a few units in the last place of what PyTorch gives in double."""
    most = 88 if dtype is torch.float32 else 708
    z = torch.linspace(-most, most, 4001, dtype=torch.float64).to(dtype)
    z = torch.cat([z, z / 64])
    # a mean of 0 and a weight that undoes the division: what is activated is the input
    x = torch.cat([z, -z])[None, None]
    scale = (x.double().square().mean() + 1e-5).sqrt()
    y, statistics = normalize(x, scale.to(dtype)[None], None, None, None, 0.0, 1e-5, "silu")
    seen = (x.double() - statistics[0].double()) * statistics[1].double() * scale.to(dtype).double()
    want = torch.nn.functional.silu(seen)
    # the slope and the product are rounded before e is raised to the power: so many units more as z is large
    bound = EPSILON[dtype] * want.abs() * (4 + 2 * seen.abs())
    assert bool(((y.double() - want).abs() <= bound + torch.finfo(dtype).tiny).all())


@pytest.mark.parametrize("last", [False, True])
def test_squares_beyond_float32(last: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, g = (1e25 * drawn((2, 18, 5, 5), last)).to(dtype), drawn((2, 18, 5, 5), last).to(dtype)
        weight = torch.ones(18, dtype=dtype)
        y, statistics = normalize(x, weight, weight, None, None, 0.0, 1e-5)
        exact = definition(x, weight, weight, g, 1e-5)
        near(y, exact[0], 32 * EPSILON[dtype])
        found = normalization_gradients(g, x, weight, weight, statistics, (True, False, False))[0]
        assert found is not None
        near(found * 1e25, exact[3] * 1e25, 32 * EPSILON[dtype])
