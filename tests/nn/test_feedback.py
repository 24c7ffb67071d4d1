"""Layers with feedback weights: each rule as its paper defines it, and conversion of torch's layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import convgrad
from convgrad.nn import FeedbackConv1d, FeedbackConv2d, FeedbackConvTranspose2d, convert_feedback_
from tests.copies import copies

RULES = ("alignment", "uSF", "brSF", "frSF", "mirror", "kolen-pollack")
NAMES = tuple(f"Conv{t}{d}d" for d in (1, 2, 3) for t in ("", "Transpose"))


def stock(name: str) -> Any:
    return getattr(F, name.replace("ConvT", "conv_t").lower())


def layer(name: str, **options: Any) -> tuple[Any, Tensor]:
    made = getattr(convgrad.nn, f"Feedback{name}")(4, 6, 3, stride=2, padding=1, groups=2, **options)
    return made, torch.randn(2, 4, *(7, 6, 5)[: int(name[-2])], requires_grad=True)


def gradient(function: Any, x: Tensor, g: Tensor, *rest: Any) -> Tensor:
    return torch.autograd.grad(function(x, *rest), x, g)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", ["alignment", "uSF", "frSF", "mirror", "kolen-pollack"])
def test_the_gradient_goes_back_through_the_weight_of_the_rule(name: str, rule: str) -> None:
    made, x = layer(name, rule=rule)
    form = {"stride": 2, "padding": 1, "groups": 2}
    y, theirs = made(x), stock(name)(x, made.weight, made.bias, **form)
    torch.testing.assert_close(y, theirs)
    w, stored = made.weight.detach(), getattr(made, "feedback_weight", None)
    back = {"uSF": w.sign(), "frSF": None if stored is None else stored.abs() * w.sign()}.get(rule, stored)
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, made.weight, made.bias), g, retain_graph=True)
    want = torch.autograd.grad(theirs, (made.weight, made.bias), g)
    through = stock(name)(x, back.detach(), **form)
    torch.testing.assert_close(got, (torch.autograd.grad(through, x, g)[0], *want), rtol=1e-4, atol=1e-5)
    if rule == "kolen-pollack":
        torch.testing.assert_close(torch.autograd.grad(y, made.feedback_weight, g)[0], want[0], rtol=1e-4, atol=1e-5)
    else:
        assert stored is None or not stored.requires_grad


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate", "zeros, joined"])
@pytest.mark.parametrize("rule", ["alignment", "uSF"])
def test_padding_that_a_kernel_could_read_in_place_changes_nothing(mode: str, rule: str) -> None:
    x, g = torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(2, 16, 8, 8)
    if mode == "zeros, joined":
        made: Any = FeedbackConv2d(16, 16, 3, groups=16, rule=rule)
        model, torchs = nn.Sequential(nn.ZeroPad2d(1), made), "constant"
        convgrad.accelerate_(model, only_gains=False)
    else:
        model = made = FeedbackConv2d(16, 16, 3, padding=1, groups=16, rule=rule, padding_mode=mode)
        torchs = mode
    got = gradient(model, x, g)
    want = gradient(lambda x: F.conv2d(F.pad(x, [1] * 4, mode=torchs), made.feedback(), groups=16), x, g)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_signs_are_those_of_the_weight_that_is_used() -> None:
    made, x = FeedbackConv2d(4, 4, 3, rule="uSF"), torch.randn(2, 4, 6, 6, requires_grad=True)
    other = torch.randn_like(made.weight)  # as a layer around it gives it: LoRA
    got = gradient(lambda x: made._conv_forward(x, other, None), x, torch.ones(2, 4, 4, 4))
    want = gradient(lambda x: F.conv2d(x, other.sign()), x, torch.ones(2, 4, 4, 4))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_batchwise_random_magnitudes_are_drawn_in_each_forward_and_keep_the_signs() -> None:
    made, x = layer("Conv2d", rule="brSF")
    g = torch.randn_like(made(x))
    one, other = (torch.autograd.grad(made(x), x, g)[0] for _ in range(2))
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    got = torch.autograd.grad(made(x), x, g)[0]
    torch.manual_seed(3)
    back = made.feedback()
    assert torch.equal(back.sign(), made.weight.sign())
    assert float(back.abs().max()) <= 1 / math.sqrt(2 * 9)
    want = torch.autograd.grad(F.conv2d(x, back, stride=2, padding=1, groups=2), x, g)[0]
    torch.testing.assert_close(got, want)


def test_complex_weights_are_drawn_around_zero() -> None:
    made = FeedbackConv1d(8, 64, 3, dtype=torch.complex64)
    for weight in (made.weight, made.feedback_weight):
        for part in torch.view_as_real(weight.detach()).unbind(-1):
            assert part.abs().max() <= 24**-0.5
            assert part.mean().abs() < 0.03  # ten times its standard deviation


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_the_mirror_is_the_correlation_of_noise_with_its_image(name: str) -> None:
    """Akrout et al. 2019: the change of B is y x^T for noise x and y = W x, with decay; here with matrices."""
    made = getattr(convgrad.nn, f"Feedback{name}")(4, 6, 3, dilation=2, stride=3, rule="mirror", dtype=torch.float64)
    before = made.feedback_weight.clone()
    made.mirror_(samples=5, lr=0.5, weight_decay=0.25, generator=torch.Generator().manual_seed(1))
    d, generator = int(name[-2]), torch.Generator().manual_seed(1)
    if "Transpose" in name:  # one element in, a window out: the matrix is [C_in, C_out * k]
        x = torch.randn(5, 4, *[1] * d, generator=generator, dtype=torch.float64).flatten(1)
        change = x.T @ (x @ made.weight.flatten(1))
    else:
        x = torch.randn(5, 4, *[5] * d, generator=generator, dtype=torch.float64)
        x = x[(..., *[slice(None, None, 2)] * d)].flatten(1)  # the taps of a dilated window, [N, C_in * k]
        change = (x @ made.weight.flatten(1).T).T @ x
    want = before + 0.5 * (change.view_as(before) / 5 - 0.25 * before)
    torch.testing.assert_close(made.feedback_weight, want)


@pytest.mark.parametrize("name", ["Conv1d", "ConvTranspose2d"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_mirror_makes_the_weights_alike(name: str, groups: int) -> None:
    made = getattr(convgrad.nn, f"Feedback{name}")(4, 8, 3, groups=groups, rule="mirror")
    assert made.angle() > 45
    for _ in range(60):
        made.mirror_(samples=256)
    assert made.angle() < 10
    torch.testing.assert_close(made.feedback_weight.norm(), made.weight.norm(), rtol=0.1, atol=0)


def test_kolen_pollack_makes_the_weights_alike_while_training() -> None:
    """With the same change and the same decay the difference of the weights decays: Akrout et al. 2019."""
    made = FeedbackConv2d(3, 4, 3, rule="kolen-pollack", dtype=torch.float64)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, weight_decay=0.5)
    apart = (made.weight - made.feedback_weight).detach()
    for _ in range(20):
        optimizer.zero_grad()
        made(torch.randn(2, 3, 6, 6, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close((made.weight - made.feedback_weight).detach(), apart * (1 - 0.1 * 0.5) ** 20)


def test_the_angle() -> None:
    made = FeedbackConv1d(2, 2, 1, rule="mirror", bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 0], [0, 0]])[..., None])
        made.feedback_weight.copy_(torch.tensor([[1.0, 1], [0, 0]])[..., None])
    torch.testing.assert_close(made.angle(), torch.tensor(45.0))
    for _ in range(20):  # whatever the rounding of the cosine
        with torch.no_grad():
            made.feedback_weight.copy_(made.weight.normal_().neg())
        assert float(made.angle()) == pytest.approx(180, abs=0.1)


def test_the_angle_of_zeros_is_that_of_chance() -> None:
    made = FeedbackConv1d(2, 2, 1)
    torch.nn.init.zeros_(made.feedback_weight)
    assert float(made.angle()) == pytest.approx(90)
    torch.nn.init.zeros_(made.weight)
    assert float(made.angle()) == pytest.approx(90)


@pytest.mark.parametrize("name", ["Conv1d", "ConvTranspose1d"])
def test_channels_last_sequences_are_not_copied(name: str) -> None:
    """The convolution is that of an image of one row, whose operands lie in channels_last as they came."""
    made = getattr(convgrad.nn, f"Feedback{name}")(8, 8, 3, groups=8, padding=1, layout="NLC")
    x = torch.randn(2, 9, 8, requires_grad=True)
    with convgrad.trace() as ran:
        made(x).backward(torch.randn(2, 9, 8))
    assert {record.layout for record in ran.records} == {"channels_last"}
    assert not any(record.copies for record in ran.records)


@pytest.mark.parametrize("rule", RULES)
def test_state_copies_and_repr(rule: str) -> None:
    made, x = layer("ConvTranspose2d", rule=rule)
    kept = rule not in ("uSF", "brSF")
    assert ("feedback_weight" in made.state_dict()) is kept
    assert ("feedback_weight" in dict(made.named_parameters())) is (rule == "kolen-pollack")
    other, _ = layer("ConvTranspose2d", rule=rule)
    other.load_state_dict(made.state_dict())
    for each in (other, *copies(made)):
        assert f"rule={rule!r}" in repr(each)
        torch.manual_seed(0)
        got = torch.autograd.grad(each(x).sum(), x)
        torch.manual_seed(0)
        torch.testing.assert_close(got, torch.autograd.grad(made(x).sum(), x))
    if kept:
        before = made.feedback_weight.clone()
        torch.manual_seed(1)
        made.reset_parameters()
        assert not torch.equal(before, made.feedback_weight)


@pytest.mark.parametrize(("rule", "backend"), [("brSF", None), ("kolen-pollack", "im2col")])
def test_compiled_under_autocast(rule: str, backend: str | None) -> None:
    torch.compiler.reset()  # each case compiles the same code object
    made = FeedbackConv2d(4, 4, 3, padding=1, padding_mode="circular", rule=rule, backend=backend)
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    results = []
    for call in (made, compiled):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(x)
        assert y.dtype is torch.bfloat16
        results.append(torch.autograd.grad(y.sum(), (x, *made.parameters())))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_request_holds_in_the_backward_too(compiled: bool) -> None:
    """A compiled layer computed by whatever was chosen without it."""
    torch.compiler.reset()
    made, x = layer("Conv2d", backend="im2col")
    call = torch.compile(made, backend="aot_eager", fullgraph=True) if compiled else made
    with convgrad.trace() as ran:
        call(x).sum().backward()
    assert {record.backend for record in ran} == {"im2col"}


def test_an_ensemble_and_samples_by_vmap() -> None:
    made = FeedbackConv2d(3, 4, 3, rule="alignment")
    stacked = {k: torch.stack([v.detach(), 2 * v.detach()]) for k, v in made.state_dict().items()}
    x = torch.randn(5, 3, 6, 6)

    def loss(state: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(made, state, (image,)).square().sum()  # without its batch dimension

    got = torch.func.vmap(torch.func.vmap(torch.func.grad(loss, 1), (None, 0)), (0, None))(stacked, x)
    assert got.shape == (2, *x.shape)
    for i in range(2):
        state = {k: v[i] for k, v in stacked.items()}
        g = 2 * F.conv2d(x, state["weight"], state["bias"])
        torch.testing.assert_close(got[i], torch.nn.grad.conv2d_input(x.shape, state["feedback_weight"], g))


@pytest.mark.parametrize("rule", RULES)
def test_conversion_keeps_the_layers(rule: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.Sequential(convgrad.nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 2, 3)),
        parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
    )
    layers, parameters = list(model.modules()), dict(model.named_parameters())
    x = torch.randn(1, 3, 8, 8)
    want = model(x)
    assert convert_feedback_(model, rule) == ["0", "2.0", "2.1", "3"]
    with pytest.warns(UserWarning, match=r"converted already: 0 \(FeedbackConv2d\), 2\.0"):
        assert convert_feedback_(model, rule) == []
    assert [id(m) for m in layers] == [id(m) for m in model.modules()]
    assert all(dict(model.named_parameters())[k] is v for k, v in parameters.items())
    assert isinstance(model[2][1], FeedbackConvTranspose2d)
    assert parametrize.is_parametrized(model[3], "weight")
    torch.testing.assert_close(model(x), want)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    parametrize.remove_parametrizations(model[3], "weight")
    assert type(model[3]) is FeedbackConv2d
    torch.testing.assert_close(model(x), want)


def test_a_converted_parametrized_layer_sends_back_through_its_rule() -> None:
    made = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    convert_feedback_(made, "uSF")
    x = torch.randn(1, 3, 6, 6, requires_grad=True)
    (got,) = torch.autograd.grad(made(x).sum(), x)
    torch.testing.assert_close(got, *torch.autograd.grad(F.conv2d(x, made.weight.sign()).sum(), x))


def test_what_is_left_alone() -> None:
    class Mine(nn.Conv2d):
        """Its forward may be anything."""

    model = nn.Sequential(nn.Conv2d(1, 1, 1), Mine(1, 1, 1), convgrad.nn.BinaryConv2d(1, 1, 1), nn.Conv2d(1, 1, 1))
    before = [type(layer) for layer in model]
    assert convert_feedback_(model, skip="0") == ["3"]
    assert [type(layer) for layer in model] == [*before[:3], FeedbackConv2d]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rule is one of 'alignment', 'uSF', .*, got 'hebb'"):
        FeedbackConv2d(1, 1, 1, rule="hebb")
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="rule is one of"):
        convert_feedback_(model, "hebb")
    with pytest.raises(ValueError, match="skip names layers that the model does not have: 1, x"):
        convert_feedback_(model, skip=["x", "0", "1"])
    assert type(model[0]) is nn.Conv2d
    with pytest.raises(convgrad.UnsupportedError, match="rule='mirror', not 'uSF'"):
        FeedbackConv2d(1, 1, 1, rule="uSF").mirror_()
    with pytest.raises(ValueError, match="samples is a positive integer, got 0"):
        FeedbackConv2d(1, 1, 1, rule="mirror").mirror_(samples=0)
