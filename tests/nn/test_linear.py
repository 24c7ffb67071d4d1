"""The linear layer: torch's results, gradients and errors, and who computes a call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import convgrad
from convgrad._compat import cpu_lacks
from convgrad.diagnostics import Trace
from convgrad.engine import cache, linear_gains, measurements, rules
from convgrad.engine.measure.measurements import Measurement
from convgrad.nn.linear import linear
from convgrad.problem import ConvProblem
from tests.copies import copies
from tests.norms import NEEDS_KERNELS


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, small_rows: None) -> Iterator[None]:
    """By rule every plain call is ours."""
    monkeypatch.setattr(rules, "_SMALL_PRODUCT", 0)
    monkeypatch.setattr(rules, "gains", lambda problem, outputs: {"native": 1.6} if problem.dtype.itemsize > 2 else {})
    cache.invalidate()
    yield
    cache.invalidate()


def pair(c: int, n: int, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    theirs = nn.Linear(c, n, **options).to(dtype)
    ours = convgrad.nn.Linear(c, n, **options).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def derivatives(layer: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """The result, its gradients, and the gradients of theirs."""
    x, g = x.detach().clone().requires_grad_(x.requires_grad), g.clone().requires_grad_()
    operands = [t for t in (x, *layer.parameters()) if t.requires_grad]
    y = layer(x)
    first = torch.autograd.grad(y, operands, g, create_graph=True)
    total = torch.stack([t.square().sum() for t in first]).sum()
    second = torch.autograd.grad(total, [*operands, g], allow_unused=True, materialize_grads=True)
    return [y, *first, *second]


@pytest.mark.parametrize("shape", [(4,), (5, 4), (1, 5, 4), (2, 3, 4), (2, 1, 3, 4), (2, 3, 1, 2, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", [pytest.param("native", marks=NEEDS_KERNELS), "im2col", "reference"])
def test_as_torch_to_the_second_order(shape: tuple[int, ...], bias: bool, backend: str, small: None) -> None:
    ours, theirs = pair(4, 3, bias=bias)
    x, g = torch.randn(shape, dtype=torch.float64).requires_grad_(), torch.randn(*shape[:-1], 3, dtype=torch.float64)
    with Trace() as seen, convgrad.use_backend(backend):
        found = derivatives(ours, x, g)
    assert {r.backend for r in seen} == {backend}
    for one, other in zip(found, derivatives(theirs, x, g), strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["BinaryLinear", "XnorLinear", "LinearShift"])
def test_quantized_layers_are_computed_as_others(name: str, small: None) -> None:
    layer, x = getattr(convgrad.nn, name)(4, 3), torch.randn(5, 4)
    with Trace() as seen, convgrad.use_backend("im2col"):
        y = layer(x)
    assert {r.backend for r in seen} == {"im2col"}
    operands = layer.scheme.input(x), layer.quantized_weight(), layer.scheme.bias(layer.bias)
    torch.testing.assert_close(y, nn.functional.linear(*operands))


@NEEDS_KERNELS
@pytest.mark.parametrize("needed", ["input", "weight", "bias"])
def test_only_the_gradients_that_are_needed(needed: str, small: None) -> None:
    ours, theirs = pair(64, 128, dtype=torch.float32)
    found, x = [], torch.randn(2, 6, 64)
    with Trace() as seen, convgrad.use_backend("native"):
        for layer in (ours, theirs):
            operands = {"input": x.clone(), "weight": layer.weight, "bias": layer.bias}
            for name, t in operands.items():
                t.requires_grad_(name == needed)
            layer(operands["input"]).square().mean().backward()
            found.append(operands[needed].grad)
    torch.testing.assert_close(*found)
    backends = [(r.outputs, r.backend) for r in seen]
    assert backends == [("forward", "native"), *([] if needed == "bias" else [(f"grad_{needed}", "native")])]


def test_an_activation_in_place_changes_no_view(small: None) -> None:
    for layer in pair(4, 3):
        y = layer(torch.randn(8, 4, dtype=torch.float64))
        assert not y._is_view()
        y.relu_().sum().backward()
        assert layer.weight.grad is not None


@NEEDS_KERNELS
@pytest.mark.parametrize("bias", [False, True])
def test_the_profiler_counts_the_product_of_a_call(bias: bool, small: None) -> None:
    layer, x = convgrad.nn.Linear(32, 64, bias), torch.randn(64, 32)
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as seen:
            layer(x)
        flops = {event.key: event.flops for event in seen.key_averages() if event.flops}
        assert flops == {"aten::addmm" if bias else "aten::mm": 2 * 64 * 32 * 64}


def test_without_gradients(small: None) -> None:
    ours, theirs = pair(4, 3)
    x = torch.randn(8, 4, dtype=torch.float64)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with Trace() as seen, mode, convgrad.use_backend("im2col"):
            torch.testing.assert_close(ours(x), theirs(x))
        assert [r.outputs for r in seen] == ["forward"]


# ---- torch's own ---------------------------------------------------------------------------------


def turned(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())


class Sub(Tensor):
    pass


X = torch.randn(1024, 64)


def flops(layer: nn.Linear) -> int:
    with FlopCounterMode(display=False) as counter:
        layer(X)
    return counter.get_total_flops()


def with_backend(layer: nn.Linear, name: str) -> Tensor:
    with convgrad.use_backend(name):
        return layer(X)


def traced(layer: nn.Linear) -> Tensor:
    graph: Any = torch.jit.trace(layer, X, check_trace=False)
    return graph(X)


def per_sample(layer: nn.Linear) -> Tensor:
    call_for_per_sample_grads(layer)(X).square().sum().backward()
    return layer.weight.grad_sample


CALLS: dict[str, Any] = {
    "no rows": lambda layer: layer(X[:0]),
    "not contiguous": lambda layer: layer(X.t().contiguous().t()),
    "turned weight": lambda layer: (turned(layer), layer(X))[1],
    "bfloat16": lambda layer: layer.bfloat16()(X.bfloat16()),
    "complex": lambda layer: layer.to(torch.complex64)(X.to(torch.complex64)),
    "subclass": lambda layer: layer(X.as_subclass(Sub)),
    "subclass of weights": lambda layer: torch.func.functional_call(
        layer, {"weight": layer.weight.detach().as_subclass(Sub), "bias": layer.bias}, (X,)
    ),
    "weights that know torch's functions": per_sample,
    "meta": lambda layer: layer.to("meta")(X.to("meta")).shape,
    "sparse": lambda layer: layer(X.to_sparse_csr()),
    "nested": lambda layer: layer(torch.nested.nested_tensor([X, X])).to_padded_tensor(0.0),
    "negative": lambda layer: layer(torch.complex(X, X).conj().imag),
    "vmap": lambda layer: torch.vmap(layer)(X.view(2, 512, 64)),
    "grad": lambda layer: torch.func.grad(lambda x: layer(x).square().sum())(X),
    "jvp": lambda layer: torch.func.jvp(layer, (X,), (X,)),
    "flops": flops,
    "jit.trace": traced,
    "a backend that cannot": lambda layer: with_backend(layer, "triton"),
    "aten": lambda layer: with_backend(layer, "aten"),
}


@NEEDS_KERNELS
def test_a_plain_call_is_ours(small: None) -> None:
    ours, theirs = pair(64, 48, dtype=torch.float32)
    for x in (X, X[:960], nn.Parameter(X)):
        with Trace() as seen:
            torch.testing.assert_close(ours(x), theirs(x))
        assert [r.backend for r in seen] == ["native"]


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR|Complex modules)", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_torchs_own_to_the_bit(name: str, small: None) -> None:
    if name == "bfloat16" and cpu_lacks(torch.bfloat16):
        pytest.skip("PyTorch's own is slow without 16-bit arithmetic, and ours runs")
    ours, theirs = pair(64, 128, dtype=torch.float32)
    with Trace() as seen:
        found = CALLS[name](ours)
    assert len(seen) == 0
    wanted = CALLS[name](theirs)
    for one, other in zip(*([t] if not isinstance(t, tuple) else t for t in (found, wanted)), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@NEEDS_KERNELS
def test_where_mkl_is_at_its_best_few_rows_are_torchs_unless_measured(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rules, "mkl_at_its_best", lambda: True)
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    measurements.reload()
    ours, theirs = pair(64, 48, dtype=torch.float32)

    def backends(x: Tensor) -> list[str]:
        with Trace() as seen:
            torch.testing.assert_close(ours(x), theirs(x))
        return [r.backend for r in seen]

    assert backends(X[:960]) == []
    problem = ConvProblem.parse("mb1ic64ih1iw960oc48kh1kw1 bias channels_last")
    for way, time, ran in (("aten:matmul", 0.6, []), ("im2col", 0.5, ["im2col"])):
        found = Measurement({"aten": (1.0,), way: (time,)})
        measurements.add(problem, ("forward",), torch.device("cpu"), found)
        cache.invalidate()
        assert backends(X[:960]) == ran
    measurements.reload()
    for wide, ran in ((False, []), (True, ["native"])):
        monkeypatch.setattr(rules, "avx512_here", lambda wide=wide: wide)
        cache.invalidate()
        assert backends(X.repeat(5, 1)) == ran


def test_one_input_feature_has_torchs_strides() -> None:
    ours, theirs = pair(1, 512, torch.float32)
    x = torch.randn(1, 2**25 // 512).t()
    with convgrad.use_backend("im2col"):
        assert ours(x).stride() == theirs(x).stride()


@pytest.mark.parametrize("sizes", [(100, 96, 384), (1024, 96, 1), (512, 16, 16), (31, 1024, 4096)])
def test_small_or_narrow_is_torchs(sizes: tuple[int, int, int]) -> None:
    rows, c, n = sizes
    assert not linear_gains(rows * c, n, c)
    assert linear_gains(100 * rows * c, 8 * n, c)


@NEEDS_KERNELS
@pytest.mark.parametrize("lacking", ["", "all"])
def test_autocast(small: None, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Where the processor has no arithmetic for 16 bits, our kernels convert; elsewhere it is torch's."""
    for module in (convgrad._compat, rules):
        monkeypatch.setattr(module, "cpu_lacks", lambda dtype: lacking if dtype.itemsize == 2 else "")
    monkeypatch.setitem(rules.TABLE, "emulated", {"native": 2.0})
    ours, theirs = pair(64, 128, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), Trace() as seen:
        found, expected = ours(X), theirs(X)
        assert torch.is_autocast_enabled("cpu")
    assert found.dtype is torch.bfloat16
    assert {r.backend for r in seen} == ({"native"} if lacking else set())
    for one, other in zip(
        (found, *torch.autograd.grad(found.float().square().sum(), [*ours.parameters()])),
        (expected, *torch.autograd.grad(expected.float().square().sum(), [*theirs.parameters()])),
        strict=True,
    ):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.detach().abs().max()))


def test_matrix_products_in_16_bits_are_torchs(small: None) -> None:
    ours, theirs = pair(64, 128, dtype=torch.float32)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(ours(X), theirs(X))


@pytest.mark.slow
def test_compiled(small: None) -> None:
    ours, theirs = pair(64, 128, dtype=torch.float32)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    for rows in (1024, 512, 1):
        torch.testing.assert_close(compiled(X[:rows]), theirs(X[:rows]))


@pytest.mark.parametrize(
    "bad",
    [lambda x: x[:, :63].contiguous(), lambda x: x.double(), lambda x: x.to("meta"), lambda x: x.tolist(),
     lambda x: torch.tensor(1.0), lambda x: None, lambda x: x.int()],
)  # fmt: skip
def test_torchs_errors(bad: Any, small: None) -> None:
    raised = []
    for layer in pair(64, 128, dtype=torch.float32):
        with pytest.raises((RuntimeError, TypeError)) as error:
            layer(bad(X))
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]


# ---- the module ----------------------------------------------------------------------------------


def test_constructor_state_and_copies(small: None) -> None:
    ours, theirs = pair(4, 3)
    assert repr(ours) == repr(theirs)
    assert convgrad.nn.Linear(4, 3, bias=False, device="meta", dtype=torch.float64).weight.is_meta
    x = torch.randn(8, 4, dtype=torch.float64)
    for twin in copies(ours):
        assert type(twin) is convgrad.nn.Linear
        assert twin.state_dict().keys() == theirs.state_dict().keys()
        with Trace() as seen, convgrad.use_backend("im2col"):
            torch.testing.assert_close(twin(x), theirs(x))
        assert len(seen) == 1


def test_measuring_may_change_the_choice_between_the_forwards_of_a_checkpoint(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They save the same tensors: a product of torch's saves others than ours, and the checkpoint refused that."""
    monkeypatch.setattr("convgrad.engine.measure.measurer.measure_now", lambda *_, **__: None)
    ours, theirs = pair(4, 3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    with convgrad.measure():
        monkeypatch.setattr("convgrad.nn.linear.beats_matmul", lambda plan: True)
        y: Any = checkpoint(ours, x, use_reentrant=False)
        monkeypatch.setattr("convgrad.nn.linear.beats_matmul", lambda plan: False)
        cache.invalidate()
        y.sum().backward()
    theirs(x.detach()).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_a_weight_of_one_row_without_its_dimension_is_torchs() -> None:
    x, w = torch.randn(512, 96), torch.randn(96)
    torch.testing.assert_close(linear(x, w), nn.functional.linear(x, w))
