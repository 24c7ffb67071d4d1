"""Quantized layers as modules: every one of them, compiled, mapped, copied, saved, in every dtype."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

import convgrad
from convgrad import nn
from convgrad.nn.quantized import Quantized
from tests.copies import copies

BASES = [*(f"Conv{t}{d}d" for t in ("", "Transpose") for d in (1, 2, 3)), "Linear"]
PATTERNS = ["Binary{}", "Xnor{}", "Ternary{}", "{}Shift", "{}ShiftQ"]
LAYERS = [pattern.format(base) for pattern in PATTERNS for base in BASES]
#: One of each scheme, of each dimension, plain and transposed.
SOME = ["BinaryConvTranspose1d", "XnorConv2d", "TernaryConv3d", "ConvTranspose2dShift", "Conv1dShiftQ", "XnorLinear"]


def made(name: str, **options: Any) -> tuple[Any, torch.Tensor]:
    if "Linear" in name:
        return getattr(nn, name)(4, 6, **options), torch.randn(3, 4)
    d = next(int(c) for c in name if c.isdigit())
    layer = getattr(nn, name)(4, 6, 3, stride=2, padding=1, groups=2, **options)
    return layer, torch.randn(3, 4, *[5] * d)


def gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in layer.named_parameters():
        assert p.grad is not None
        found[name], p.grad = p.grad, None
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_trains_and_is_copied_saved_and_cast(name: str) -> None:
    layer, x = made(name)
    y = layer(x)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    for other in copies(layer):
        assert torch.equal(other(x), y)
    fresh, _ = made(name)
    assert not torch.equal(fresh(x), y)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    fresh.load_state_dict(torch.load(saved))
    assert torch.equal(fresh(x), y)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        cast = copy.deepcopy(layer).to(dtype)
        assert cast(x.to(dtype)).dtype == dtype
    torch.testing.assert_close(copy.deepcopy(layer).double()(x.double()).float(), y)
    layer.reset_parameters()
    assert not torch.equal(layer(x), y)


def test_a_layer_whose_weight_is_computed_resets_what_torchs_does() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.BinaryConv1d(2, 3, 3))
    before = layer.bias.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.bias, before)


@pytest.mark.parametrize("name", [n for n in LAYERS if not n.endswith("Shift")])
def test_a_float_models_state_fits(name: str) -> None:
    layer, _ = made(name)
    base = name.removesuffix("ShiftQ")
    for prefix in ("Binary", "Xnor", "Ternary"):
        base = base.removeprefix(prefix)
    plain = torch.nn.Linear(4, 6) if base == "Linear" else getattr(torch.nn, base)(4, 6, 3, groups=2)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)


SCALED = [(name, {"scale_input": True}) for name in SOME if "Xnor" in name]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in SOME), *SCALED])
def test_compiled_in_one_graph(name: str, options: dict[str, Any], backend: str) -> None:
    torch.compiler.reset()  # every layer compiles the same code object
    layer, x = made(name, **options)
    y = layer(x)
    y.square().sum().backward()
    want = gradients(layer)
    compiled: Any = torch.compile(layer, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), y)
    compiled(x).square().sum().backward()
    torch.testing.assert_close(gradients(layer), want)


@pytest.mark.parametrize("name", LAYERS)
def test_per_sample_gradients_and_an_ensemble(name: str) -> None:
    layer, x = made(name)
    state = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, state, (x[None],)).square().sum()

    mapped = vmap(grad(loss), (None, 0))(state, x)
    for i in range(len(x)):
        torch.testing.assert_close({n: g[i] for n, g in mapped.items()}, grad(loss)(state, x[i]))

    models = [layer, made(name)[0]]
    stacked, _ = stack_module_state(models)
    outputs = vmap(lambda state: functional_call(layer, state, (x,)))(stacked)
    torch.testing.assert_close(outputs, torch.stack([m(x) for m in models]))


@pytest.mark.parametrize("name", SOME)
def test_under_autocast(name: str) -> None:
    layer, x = made(name, **({"scale_input": True} if "Xnor" in name else {}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.03, atol=0.03)
    y.float().square().sum().backward()
    got = gradients(layer)
    assert {g.dtype for g in got.values()} == {torch.float32}
    layer(x).square().sum().backward()
    for n, want in gradients(layer).items():
        assert (got[n] - want).norm() <= 0.03 * want.norm()


def test_it_is_convgrad_that_computes() -> None:
    layer = nn.BinaryConvTranspose2d(2, 2, 3, backend="im2col")
    with convgrad.trace() as seen:
        layer(torch.randn(1, 2, 5, 5)).sum().backward()
    assert {r.backend for r in seen.records} == {"im2col"}


def test_output_size_and_causal_padding() -> None:
    layer = nn.BinaryConvTranspose1d(2, 2, 3, stride=2, scale=False)
    x = torch.randn(1, 2, 4)
    assert [layer(x, output_size=[n]).shape[-1] for n in (9, 10)] == [9, 10]
    causal = nn.TernaryConv1d(2, 2, 3, padding="causal")
    assert causal(x).shape == x.shape


@pytest.mark.parametrize("name", LAYERS)
def test_constructors_say_their_arguments(name: str) -> None:
    layer = getattr(nn, name)
    assert issubclass(layer, Quantized)
    assert f"convgrad.nn.{name}(" in layer.__doc__
    assert {"bias", "device", "dtype"} <= set(inspect.signature(layer).parameters)
    assert torch.nn.utils.skip_init(layer, *([4, 6] if "Linear" in name else [4, 6, 3])).bias.shape == (6,)

    class Mine(layer):
        def __init__(self, width: int) -> None:
            super().__init__(width, width, **({} if "Linear" in name else {"kernel_size": 1}))

    assert list(inspect.signature(Mine).parameters) == ["width"]
    assert type(Mine(2).scheme) is type(made(name)[0].scheme)


def test_a_constructor_names_its_class() -> None:
    with pytest.raises(TypeError, match=r"BinaryConv2d\.__init__\(\) got an unexpected keyword argument 'scal'"):
        nn.BinaryConv2d(2, 3, 3, scal=True)


@pytest.mark.parametrize("name", [name for name in LAYERS if "Transpose" not in name])
def test_traced_by_torch_fx_by_itself(name: str) -> None:
    layer, x = made(name)
    torch.testing.assert_close(torch.fx.symbolic_trace(layer)(x), layer(x))


def test_a_leaf_of_torch_fx_follows_eval() -> None:
    net, x = torch.nn.Sequential(nn.ConvTranspose1dShiftQ(2, 3, 3, rounding="stochastic")), torch.randn(2, 2, 9)
    graph: Any = torch.fx.symbolic_trace(net)
    graph.eval()  # in training it rounds at random
    assert torch.equal(graph(x), net(x))


def test_repr_shows_the_options_that_were_changed() -> None:
    assert repr(nn.BinaryConv1d(1, 2, 3)) == "BinaryConv1d(1, 2, kernel_size=(3,), stride=(1,))"
    assert repr(nn.XnorConv1d(1, 2, 3, scale=False)).endswith("stride=(1,), scale=False)")
    assert repr(nn.LinearShift(1, 2, weight_bits=4)).endswith("bias=True, weight_bits=4)")
