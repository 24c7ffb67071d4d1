"""Schemes on layers that are there already: whole networks, and layers of anybody's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize, prune

import convgrad
from convgrad import nn

SCHEMES = [nn.Binary(), nn.Xnor(scale=False), nn.Ternary(), nn.ShiftQ(weight_bits=4), nn.ShiftPS(freeze_sign=True)]


class Theirs(torch.nn.ConvTranspose2d):
    """A layer of somebody's, with a forward of its own."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(input, output_size).relu()


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"),
        torch.nn.Sequential(torch.nn.BatchNorm2d(4), convgrad.nn.Conv2d(4, 6, 1)),
        torch.nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2),
        Theirs(4, 2, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * 12 * 12, 5),
    )


CONVERTIBLE = ["0", "1", "2.1", "3", "6"]


@pytest.mark.parametrize("scheme", [None, *SCHEMES], ids=repr)
def test_a_network(scheme: Any) -> None:
    net = network()
    before = {n: (m, type(m)) for n, m in net.named_modules()}
    state, parameters = copy.deepcopy(net.state_dict()), set(net.parameters())
    called: list[str] = []
    net[3].register_forward_hook(lambda *_: called.append("hook"))
    net.eval()
    assert nn.convert_(net, scheme) == CONVERTIBLE
    with pytest.warns(UserWarning, match=r"no layer was converted; converted already: 0 \(\w+\), 1 \(\w+\), 2\.1"):
        assert nn.convert_(net, nn.Binary()) == []

    chosen = nn.ShiftQ() if scheme is None else scheme
    for name, module in net.named_modules():
        assert module is before[name][0]
        assert (type(module) is before[name][1]) == (name not in CONVERTIBLE)
        assert not module.training
    x = torch.randn(2, 1, 6, 6)
    y = net(x)
    assert called == ["hook"]
    y.sum().backward()
    if not isinstance(chosen, nn.ShiftPS):
        assert set(net.parameters()) == parameters
        assert all(torch.equal(v, state[n]) for n, v in net.state_dict().items())
    # PyTorch's own layers with what the scheme makes of weights, inputs and biases
    plain = network().eval()
    plain.load_state_dict(state)
    for name, module in plain.named_modules():
        if name in CONVERTIBLE:
            known = (getattr(module, "transposed", False), getattr(module, "groups", 1))
            originals = chosen.originals(module.weight.data)
            module.weight.data = chosen.quantize(*originals, transposed=known[0], groups=known[1])
            module.bias.data = chosen.bias(module.bias.data)
            module.register_forward_pre_hook(lambda _, args: chosen.input(args[0]))
    torch.testing.assert_close(y, plain(x))


def test_an_accelerated_network() -> None:
    net = network()
    convgrad.accelerate_(net, only_gains=False)
    assert nn.convert_(net, nn.Binary()) == CONVERTIBLE


def test_layers_that_stay_in_float() -> None:
    net = network()
    assert nn.convert_(net, nn.Binary(), skip=["0", "6"]) == ["1", "2.1", "3"]
    assert type(net[0]) is torch.nn.Conv2d
    assert nn.convert_(torch.nn.ModuleDict({"conv1": torch.nn.Conv1d(1, 1, 1), "fc": torch.nn.Linear(1, 1)}),
                       skip="conv1") == ["fc"]  # fmt: skip
    with pytest.raises(ValueError, match=r"skip names layers that the model does not have: 2\.7, conv9"):
        nn.convert_(net, nn.Binary(), skip=["conv9", "2.7", "0"])
    with pytest.raises(TypeError, match="a scheme is an instance such as"):
        nn.convert_(net, nn.Binary)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"the layers of a torch.nn.Module are converted, got NoneType"):
        nn.convert_(None)  # pyright: ignore[reportArgumentType]


def test_a_pruned_layer_stays_pruned() -> None:
    """Shift and sign would take the place of a weight that the hook of pruning goes on making of its own parameter."""
    layer: Any = prune.identity(torch.nn.Conv1d(2, 2, 3), "weight")
    with pytest.warns(UserWarning, match="no layer here is of a class that is converted"):
        assert nn.convert_(layer, nn.ShiftPS()) == []
    assert nn.convert_(layer, nn.ShiftQ()) == [""]
    layer.weight_mask[0] = 0
    layer(torch.randn(1, 2, 5))
    assert not layer.quantized_weight()[0].any()


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_transformer_computes_with_the_scheme_in_eval_too(scheme: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = torch.nn.TransformerEncoder(layer, 2).eval()
    assert nn.convert_(net, scheme) == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False] * 3, [False, False, True]])
    for mask in (None, padding):
        want = net(x, src_key_padding_mask=mask)  # while autograd records, no fast path
        with torch.no_grad():
            torch.testing.assert_close(net(x, src_key_padding_mask=mask), want)


def test_deepshift_ps_keeps_tied_weights_tied() -> None:
    net: Any = torch.nn.ModuleDict({n: torch.nn.Linear(3, 3) for n in ("one", "two", "other")})
    net.two.weight = net.one.weight
    nn.convert_(net, nn.ShiftPS())
    assert net.one.shift is net.two.shift
    assert net.one.sign is net.two.sign
    assert net.other.shift is not net.one.shift


def test_deepshift_ps_refuses_a_weight_that_another_layer_keeps() -> None:
    net: Any = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5)})
    net.head.weight = net.words.weight
    with pytest.raises(ValueError, match="the weight of 'head' is also a parameter of 'words'"):
        nn.convert_(net, nn.ShiftPS())
    assert type(net.head) is torch.nn.Linear
    assert nn.convert_(net, nn.ShiftQ()) == ["head"]
    assert net.head.weight is net.words.weight


def test_complex_layers_are_refused_before_anything_changes() -> None:
    net = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 3), torch.nn.Conv1d(2, 2, 3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="schemes are of real weights, those of 1 are complex"):
        nn.convert_(net, nn.Binary())
    assert type(net[0]) is torch.nn.Conv1d
    assert nn.convert_(net, nn.Binary(), skip="1") == ["0"]
    with pytest.raises(TypeError, match=r"quantizes real weights, got torch\.complex64"):
        nn.TernaryConv1d(2, 2, 3, dtype=torch.complex64)


@pytest.mark.parametrize("scheme", [*SCHEMES, nn.Xnor(scale_input=True)], ids=repr)
def test_a_converted_network_is_traced_by_torch_fx(scheme: Any) -> None:
    net = network()
    del net[4], net[2][0]  # of a class that is not converted; of running statistics
    net[-1] = torch.nn.Linear(4 * 12 * 12, 5)
    nn.convert_(net, scheme)
    traced, x = torch.fx.symbolic_trace(net), torch.randn(2, 1, 6, 6)
    torch.testing.assert_close(traced(x), net(x))
    names, trained = zip(*((name, p) for name, p in net.named_parameters() if p.requires_grad), strict=True)
    got = torch.autograd.grad(traced(x).sum(), [traced.get_parameter(name) for name in names])
    torch.testing.assert_close(got, torch.autograd.grad(net(x).sum(), trained))


def test_deepshift_ps_keeps_what_was_frozen() -> None:
    layer: Any = torch.nn.Conv2d(2, 3, 3)
    layer.weight.requires_grad_(False)
    nn.convert_(layer, nn.ShiftPS())
    assert not layer.shift.requires_grad
    assert not layer.sign.requires_grad
    assert list(layer.state_dict()) == ["bias", "shift", "sign"]


class Rounded(nn.Scheme):
    """A scheme of a user's."""

    def quantize(self, *originals: Tensor, transposed: bool = False, groups: int = 1, training: bool = False) -> Tensor:
        return nn.straight_through(originals[0].round(), originals[0])


class AllRounded(Rounded):
    def input(self, input: Tensor) -> Tensor:
        return input.round()

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.round()


def test_a_scheme_of_ones_own_may_quantize_the_input_and_the_bias() -> None:
    layer, x = torch.nn.Conv2d(1, 2, 3), 4 * torch.randn(1, 1, 5, 5)
    weight, bias = (9 * p.data for p in layer.parameters())
    layer.load_state_dict({"weight": weight, "bias": bias})
    want = torch.nn.functional.conv2d(x.round(), weight.round(), bias.round())
    torch.testing.assert_close(nn.parametrize_(layer, AllRounded())(x), want)
    layer = nn.parametrize_(torch.nn.Conv2d(1, 2, 3), Rounded())
    assert not layer._forward_pre_hooks
    assert not parametrize.is_parametrized(layer, "bias")


def test_a_scheme_of_ones_own_has_no_layers() -> None:
    class Mine(nn.Binary): ...

    with pytest.raises(TypeError, match="there are no layers of Mine; parametrize_ takes"):
        nn.convert_(network(), Mine())


# ---- parametrizations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.nn.ConvTranspose2d, convgrad.nn.ConvTranspose2d, Theirs])
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_parametrization_is_the_layer(scheme: Any, kind: Any) -> None:
    """On torch's class, ours and a subclass: the results and the gradients of the layer with the same weights."""
    layer = kind(4, 6, 3, stride=2, groups=2)
    twin = torch.nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)
    twin.load_state_dict(layer.state_dict())
    nn.convert_(twin, scheme)
    assert nn.parametrize_(layer, scheme) is layer
    x = torch.randn(2, 4, 5, 5)
    cotangent = torch.randn(2, 6, 11, 11)
    y, want = layer(x), twin(x)
    want = want.relu() if kind is Theirs else want
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(layer(input=x), want)
    assert f"{type(scheme).__name__}({scheme})" in repr(layer)
    y.backward(cotangent)
    want.backward(cotangent)
    trained = sorted((g for g in layer.parameters() if g.grad is not None), key=lambda p: p.numel())
    wanted = sorted((g for g in twin.parameters() if g.grad is not None), key=lambda p: p.numel())
    for got, expected in zip(trained, wanted, strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_what_torch_does_with_parametrizations(scheme: Any) -> None:
    layer = nn.parametrize_(torch.nn.Conv1d(2, 3, 3), scheme)
    x = torch.randn(1, 2, 6)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    fresh = nn.parametrize_(torch.nn.Conv1d(2, 3, 3), scheme)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y)
    if isinstance(scheme, (nn.Binary, nn.ShiftPS)):  # of one parameter, and of two
        torch.compiler.reset()  # each scheme compiles the same code object
        compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), y, rtol=0.03, atol=0.03)
    assert copy.deepcopy(layer).half()(x.half()).dtype == torch.float16
    weight = layer.weight.detach().clone()
    layer.weight = torch.randn(3, 2, 3)  # through the scheme
    assert not torch.equal(layer.weight, weight)
    quantized = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight, quantized)


def test_a_shift_parametrization_as_integers() -> None:
    layer = torch.nn.Conv1d(2, 3, 3)
    integers = [nn.export_shift(nn.parametrize_(copy.deepcopy(layer), s)) for s in (nn.ShiftQ(), nn.ShiftPS())]
    nn.convert_(layer, nn.ShiftQ())
    want = nn.export_shift(layer)
    for got in integers:
        assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


@pytest.mark.parametrize(
    ("layer", "scheme", "words"),
    [
        (torch.nn.ReLU(), nn.Binary(), "ReLU has no floating-point weight"),
        (torch.nn.BatchNorm1d(2), nn.Binary(), "no floating-point weight of at least two"),
        (nn.BinaryConv1d(1, 1, 1), nn.Binary(), "quantized or parametrized already"),
        (nn.parametrize_(torch.nn.Linear(1, 1), nn.Binary()), nn.Binary(), "quantized or parametrized already"),
        (torch.nn.Conv1d(1, 1, 1), nn.Xnor(scale_input=True), "no parametrization can"),
    ],
)
def test_layers_that_cannot_be_parametrized(layer: Any, scheme: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        nn.parametrize_(layer, scheme)


# ---- shadow weights ---------------------------------------------------------------------------------------------


def test_an_update_is_that_of_binary_connect() -> None:
    """arXiv:1511.00363, algorithm 1: w <- clip(w - eta * dC/dw_b, -1, 1), with all propagations on the signs w_b."""
    layer = nn.BinaryConv1d(2, 3, 3, scale=False, bias=False)
    layer.weight.data.uniform_(-1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2)
    optimizer.register_step_post_hook(lambda *_: nn.clip_(layer))
    x, wanted, w = torch.randn(4, 2, 8), torch.randn(4, 3, 6), layer.weight.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        (layer(x) * wanted).mean().backward()
        optimizer.step()
        signs = torch.where(w >= 0, 1.0, -1.0).requires_grad_()
        (by_signs,) = torch.autograd.grad((torch.conv1d(x, signs) * wanted).mean(), signs)
        w = (w - 2 * by_signs).clamp(-1, 1)
        torch.testing.assert_close(layer.weight.detach(), w)
    assert (w.abs() == 1).any()


@pytest.mark.parametrize("way", ["convert", "parametrize"])
def test_shadow_weights_are_clipped(way: str) -> None:
    """[-1, 1]: BinaryConnect, arXiv:1511.00363, section 2.4. DeepShift's code: into the range of the shifts."""
    values = torch.tensor([[-3.0, -0.5, 0.0, 0.01, 7.0]])
    wanted = {
        nn.Binary(): [[-1.0, -0.5, 0.0, 0.01, 1.0]],
        nn.Xnor(): [[-1.0, -0.5, 0.0, 0.01, 1.0]],
        nn.Ternary(): values.tolist(),
        nn.ShiftQ(weight_bits=3): [[-1.0, -0.5, 0.0, 0.125, 1.0]],
        nn.ShiftPS(weight_bits=3): [[-2.0, -0.5, 0.0, 0.0, 0.0]],
    }
    for scheme, want in wanted.items():
        net = torch.nn.Sequential(torch.nn.Linear(5, 1))
        layer: Any = net[0]
        if way == "convert":
            nn.convert_(net, scheme)
        else:
            nn.parametrize_(layer, scheme)
        held = layer.parametrizations["weight"] if way == "parametrize" else layer
        names = {"convert": ("weight", "shift"), "parametrize": ("original", "original0")}[way]
        shadow = getattr(held, names[isinstance(scheme, nn.ShiftPS)])
        shadow.data.copy_(values)
        nn.clip_(net)
        torch.testing.assert_close(shadow.data, torch.tensor(want))


def test_the_input_of_a_layer_may_have_any_name() -> None:
    class Named(torch.nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    layer, x = nn.parametrize_(Named(2, 3, 3), nn.ShiftQ()), torch.randn(1, 2, 8)
    torch.testing.assert_close(layer(x=x), layer(x), rtol=0, atol=0)
    up, x = nn.parametrize_(torch.nn.ConvTranspose1d(2, 3, 3, stride=2), nn.ShiftQ()), torch.randn(1, 2, 8)
    torch.testing.assert_close(up(output_size=[18], input=x), up(x, [18]), rtol=0, atol=0)
