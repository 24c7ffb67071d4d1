"""Layers whose kernels read their padding from the input: PyTorch's numbers, and no padded copy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad.backends import _native_library as library
from convgrad.backends import padded
from convgrad.check import check_problem
from convgrad.engine import cache, plan_for, rules
from convgrad.problem import OUTPUTS, ConvProblem

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")

MODES = ("circular", "reflect", "replicate")
FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
CPU = torch.device("cpu")


def of_copy(layer: Any, x: Tensor, sides: tuple[tuple[int, int], ...], weight: Tensor, bias: Tensor) -> Tensor:
    """By PyTorch, over a padded copy."""
    copy = F.pad(x, [n for pair in reversed(sides) for n in pair], mode=layer.padding_mode)
    d = weight.dim() - 2
    convolution = getattr(F, f"conv{d}d")
    return convolution(copy, weight, bias, layer.stride, 0, layer.dilation, layer.groups)


# (channels in and out, groups), sizes, kernel, low and high padding, stride, dilation: up to what there is to read
LAYERS = [
    ((20, 20, 20), (9,), (4,), ((8, 3),), 1, 2),
    ((6, 12, 6), (30,), (3,), ((0, 2),), 3, 1),
    ((33, 33, 33), (7, 5), (3, 3), ((1, 1), (1, 1)), 1, 1),
    ((17, 17, 17), (6, 9), (5, 3), ((2, 4), (5, 0)), (2, 1), 1),
    ((8, 4, 2), (5, 8), (3, 2), ((4, 1), (0, 7)), (1, 2), (2, 1)),
    ((4, 4, 4), (20, 40), (3, 3), ((1, 1), (1, 1)), 1, 1),
    ((5, 5, 5), (3, 4, 5), (2, 3, 3), ((2, 0), (1, 3), (1, 1)), 1, 1),
    ((6, 4, 2), (4, 3, 4), (3, 2, 3), ((1, 2), (2, 0), (3, 1)), (1, 1, 2), 1),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_results_and_gradients_are_those_of_a_copy(layer: Any, last: bool, mode: str) -> None:
    (inputs, outputs, groups), sizes, kernel, sides, stride, dilation = layer
    make = getattr(convgrad.nn, f"Conv{len(sizes)}d")
    for dtype, tolerance in TOLERANCES.items():
        module = make(
            inputs, outputs, kernel, stride, tuple(itertools.chain(*sides)), dilation, groups,
            padding_mode=mode, dtype=dtype, backend="native",
        )  # fmt: skip
        x = torch.randn(2, inputs, *sizes).to(dtype)
        if last:
            x, module = x.to(memory_format=FORMATS[len(sizes)]), module.to(memory_format=FORMATS[len(sizes)])
        leaves = [x.requires_grad_(), module.weight, module.bias]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        with convgrad.trace() as traced:
            y = module(x)
            g = torch.randn_like(y)
            got = (y, *torch.autograd.grad(y, leaves, g))
        assert [e.backend for e in traced.records] == ["native"] * 2
        assert all(e.problem.endswith(mode) for e in traced.records)
        z = of_copy(module, wide[0], sides, wide[1], wide[2])
        want = (z, *torch.autograd.grad(z, wide, g.double()))
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("backend", ["native", "aten"])
@pytest.mark.parametrize("mode", MODES)
def test_derivatives_of_any_order(mode: str, backend: str) -> None:
    """By kernels that read the padding, and through a padded copy."""
    x, w = torch.randn(1, 2, 3, 2, dtype=torch.double), torch.randn(2, 2, 2, 2, dtype=torch.double)
    layer = convgrad.nn.Conv2d(2, 2, 2, padding=(2, 1), bias=False, padding_mode=mode, dtype=x.dtype, backend=backend)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": w}, (x,)).square()

    leaves = x.requires_grad_(), w.requires_grad_()
    with convgrad.trace() as traced:
        call(*leaves)
    assert traced.records[0].problem.endswith(mode) == (backend == "native")
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    w.requires_grad_(False)  # and the input is not there to be contracted
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("mode", MODES)
def test_rows_and_single_images(mode: str) -> None:
    rows = convgrad.nn.Conv1d(6, 6, 3, padding=(2, 1), groups=6, padding_mode=mode, layout="NLC", backend="native")
    x = torch.randn(2, 9, 6)
    want = of_copy(rows, x.transpose(1, 2), ((2, 1),), rows.weight, rows.bias)
    with convgrad.trace() as traced:
        y = rows(x)
    torch.testing.assert_close(y, want.transpose(1, 2))
    torch.testing.assert_close(rows(x[0]), y[0])
    assert y.is_contiguous()
    assert traced.records[0].problem.endswith(mode)


@pytest.mark.parametrize("rows", [False, True])
def test_any_other_backend_computes_the_copy(rows: bool) -> None:
    options: Any = {"padding": 1, "groups": 4, "padding_mode": "circular", "backend": "im2col"}
    layer: Any = (
        convgrad.nn.Conv1d(4, 4, 3, layout="NLC", **options) if rows else convgrad.nn.Conv2d(4, 4, 3, **options)
    )
    x = torch.randn(2, 4, *[6] * (1 if rows else 2))
    with convgrad.trace() as traced:
        y = layer(x.mT).mT if rows else layer(x)
    assert [e.backend for e in traced.records] == ["im2col"]
    assert "8oc" in traced.records[0].problem
    torch.testing.assert_close(y, of_copy(layer, x, ((1, 1),) * (x.dim() - 2), layer.weight, layer.bias))


@pytest.mark.parametrize("mode", MODES)
def test_images_too_large_to_be_folded_in_scratch_memory(mode: str) -> None:
    layer = convgrad.nn.Conv2d(16, 16, 3, padding=1, groups=16, padding_mode=mode, backend="native", dtype=torch.double)
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.randn(1, 16, 112, 112, dtype=torch.double).to(memory_format=torch.channels_last).requires_grad_()
    with convgrad.trace() as traced:
        y = layer(x)
        g = torch.randn_like(y)
        got = torch.autograd.grad(y, [x, *layer.parameters()], g)
    assert [e.backend for e in traced.records] == ["native", "native (padded copy)"]
    assert traced.records[1].kernel == "packed"
    z = of_copy(layer, x, ((1, 1), (1, 1)), layer.weight, layer.bias)
    torch.testing.assert_close(got, torch.autograd.grad(z, [x, *layer.parameters()], g))


@pytest.mark.parametrize(
    ("name", "mode"),
    [*(("native", m) for m in MODES), ("reference", "reflect"), ("im2col", "replicate"), ("aten", "circular")],
)
def test_the_suite_on_a_padded_copy(name: str, mode: str) -> None:
    """Also of an image whose strides PyTorch's padding takes for contiguous ones, but channels_last kernels do not."""
    for output in OUTPUTS:
        found = check_problem(f"{name} (padded copy)", f"mb1ic4ih5oc8kh3ph2 channels_last {mode}", output, repeats=2)
        assert not [str(r) for r in found if r.status == "failed"]


@pytest.mark.parametrize("name", ["native", "reference", "im2col", "aten"])
@pytest.mark.parametrize("text", ["g4mb2ic4ih7oc8kh3sh2ph2 circular", "g2mb1ic4iw6oc6ow6kw3pw4 float64 reflect"])
def test_every_pass_by_every_backend(name: str, text: str) -> None:
    p = ConvProblem.parse(text)
    operands = {slot: torch.randint(-3, 4, p.shape_of(slot)).to(p.dtype) for slot in ("input", "weight", "grad_output")}
    x, w, g = operands["input"].requires_grad_(), operands["weight"].requires_grad_(), operands["grad_output"]
    copy = F.pad(x, [n for pair in reversed(p.padding) for n in pair], mode=p.padding_mode)
    y = torch.convolution(copy, w, None, p.stride, [0] * p.ndim, p.dilation, False, [0] * p.ndim, p.groups)
    want = (y, *torch.autograd.grad(y, (x, w), g))
    with torch.no_grad(), convgrad.use_backend(name):
        got = (
            plan_for(p, ("forward",), CPU).contract(x, w),
            plan_for(p, ("grad_input",), CPU).contract(g, w),
            plan_for(p, ("grad_weight",), CPU).contract(g, x),
        )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert padded(p).padding_mode == "zeros"


def test_measuring_may_change_the_choice_between_the_forwards_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """They save the same tensors: a padded copy is larger than the input, and the checkpoint refused that."""
    monkeypatch.setattr("convgrad.engine.measure.measurer.measure_now", lambda *_, **__: None)
    layer = convgrad.nn.Conv2d(16, 16, 3, padding=1, groups=16, padding_mode="circular")
    x = torch.randn(2, 16, 6, 6, requires_grad=True)
    with convgrad.measure():
        y: Any = checkpoint(layer, x, use_reentrant=False)
        monkeypatch.setattr(rules, "TABLE", {})
        cache.invalidate()
        y.sum().backward()
    cache.invalidate()
    sides = ((1, 1), (1, 1))
    (want,) = torch.autograd.grad(of_copy(layer, x, sides, layer.weight, layer.bias).sum(), x)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("mode", MODES)
def test_no_copy_under_autocast(mode: Any) -> None:
    layer: Any = convgrad.nn.Conv2d(8, 8, 3, padding=1, groups=8, padding_mode=mode)
    x = torch.randn(2, 8, 12, 12, requires_grad=True)
    results: list[Any] = []
    with torch.autocast("cpu", torch.bfloat16):
        with convgrad.trace() as ran, convgrad.use_backend("native"):
            results.append(layer(x))
        results.append(of_copy(layer, x, ((1, 1), (1, 1)), layer.weight, layer.bias))
    assert [mode in r.problem for r in ran.records] == [True]
    assert results[0].dtype is torch.bfloat16
    results = [(y, *torch.autograd.grad(y.float().square().sum(), (x, layer.weight, layer.bias))) for y in results]
    torch.testing.assert_close(*results, rtol=0.05, atol=0.5)
