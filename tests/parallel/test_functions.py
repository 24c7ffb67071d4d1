"""Every rule of a function against PyTorch in one process: result, gradients, derivatives of them, buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import convgrad
from convgrad.errors import UnsupportedError
from convgrad.parallel import shard_

from .processes import Processes, on


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor], *sizes: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*sizes or (1,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight) if self.function.__code__.co_argcount > 1 else self.function(x)


class Doubled(nn.Conv2d):
    """A convolution of a user's."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y += x
    return y.mul_(3)


def in_place_with(x: Tensor, p: Tensor) -> Tensor:
    y = x * 2
    y += p
    return y.mul_(p).sub_(p.detach(), alpha=2)


def one_row(x: Tensor) -> Tensor:
    y = F.max_pool2d(x, (9, 1))
    return F.relu(y) + y


def modules(w: int) -> dict[str, nn.Module]:
    """For an input of size (3, 4, 9, w)."""
    up = nn.Upsample
    labels = torch.arange(27 * w).view(3, 9, w) % 4
    return {
        "relu": nn.ReLU(), "relu in place": nn.ReLU(inplace=True), "hardswish in place": nn.Hardswish(inplace=True),
        "gelu": nn.GELU(), "prelu": nn.PReLU(4), "one prelu": nn.PReLU(), "softmax": nn.Softmax(1), "glu": nn.GLU(1),
        "batch": nn.BatchNorm2d(4), "batch eval": nn.BatchNorm2d(4).eval(), "group": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "layer": nn.LayerNorm((4, 9, w)),
        "rms": nn.RMSNorm((4, 9, w)), "response": nn.LocalResponseNorm(2),
        "max": nn.MaxPool2d(2), "max halo": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        "max dilated": nn.MaxPool2d(2, 1, 1, 2),
        "avg": nn.AvgPool2d(2), "avg halo": nn.AvgPool2d(3, 2, 1), "avg divisor": nn.AvgPool2d(2, divisor_override=3),
        "avg ceil": nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True, count_include_pad=False),
        "mean to one": nn.AdaptiveAvgPool2d(1), "mean to some": nn.AdaptiveAvgPool2d((5, 3)),
        "maximum of all": nn.AdaptiveMaxPool2d(1), "maxima": nn.AdaptiveMaxPool2d((5, 3)),
        "nearest": up(scale_factor=2), "nearest size": up(size=(11, 5)),
        "exact": up(size=(11, 5), mode="nearest-exact"),
        "bilinear": up(scale_factor=2, mode="bilinear"), "smaller": up(size=(5, 13), mode="bilinear"),
        "corners": up(scale_factor=2, mode="bilinear", align_corners=True), "area": up(size=(5, 3), mode="area"),
        "one and a half": up(scale_factor=1.5, mode="bilinear"),
        # Not quite a whole number of times, where it comes out as one of these sizes.
        "not quite nearest": up(scale_factor=(1.1, 2.1), mode="nearest"),
        "not quite exact": up(scale_factor=(1.1, 2.1), mode="nearest-exact"),
        "not quite linear": up(scale_factor=(1.1, 2.1), mode="bilinear"),
        "bicubic": up(scale_factor=2, mode="bicubic"),
        "bicubic size": up(size=(5, 13), mode="bicubic"),
        "bicubic corners": up(size=(5, 13), mode="bicubic", align_corners=True),
        "around": nn.Conv2d(4, 4, 3, padding=(2, 1), padding_mode="circular"),
        "around in steps": convgrad.nn.Conv2d(
            4, 6, (4, 2), 2, (5, 1), dilation=(2, 1), groups=2, padding_mode="circular"
        ),
        "around more on one side": convgrad.nn.Conv2d(4, 4, 3, padding=((0, 2), (1, 0)), padding_mode="circular"),
        "around by a user": Doubled(4, 4, 3, padding=1, padding_mode="circular"),
        "around a split": convgrad.nn.BinaryConv2d(4, 4, 3, padding=3, padding_mode="circular_split"),
        "around a crop": convgrad.nn.Conv2d(4, 4, 3, padding=((3, -1), (1, 1)), padding_mode="circular"),
        "circular": nn.CircularPad2d((2, 1, 1, 3)), "circular crop": nn.CircularPad2d((2, -1, -1, 3)),
        "reflect": nn.ReflectionPad2d((2, 1, 1, 3)),
        "replicate": nn.ReplicationPad2d((2, 1, 1, 3)), "constant": nn.ConstantPad2d((2, -1, -1, 3), 2.5),
        "shuffle": nn.PixelShuffle(2), "unshuffle": Applied(lambda x: F.pixel_unshuffle(F.pad(x, (0, w % 2, 0, 1)), 2)),
        "cat": Applied(lambda x: torch.cat([x, x * 2], 1)), "residual": Applied(lambda x: x + F.relu(x)),
        "scale": Applied(lambda x, p: x * p + p, 4, 1, 1), "each position": Applied(lambda x, p: x * p, 9, w),
        "mean": Applied(lambda x: x.mean()), "sum": Applied(lambda x: x.sum(2)), "in place": Applied(in_place),
        "in place with a parameter": Applied(in_place_with, 4, 1, 1),
        "gate": Applied(lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)).expand_as(x)),
        "one column": Applied(lambda x: F.relu(F.max_pool2d(x, (1, w)))), "one row": Applied(one_row),
        "masked": Applied(lambda x: x.masked_fill(x > 0.5, 2.0)),
        "gate in place": Applied(lambda x: x * F.silu(F.adaptive_avg_pool2d(x, 1), inplace=True)),
        "gate with a layer": Applied(lambda x, p: x * F.linear(x.mean((2, 3)), p)[..., None, None], 4, 4),
        "crop": Applied(lambda x: x[:, :, 1:-1, 2:]), "steps": Applied(lambda x: x[:, None, ..., ::2]),
        "chunk": Applied(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        "signs of an input": convgrad.nn.XnorConv2d(4, 4, 3, padding=1, scale_input=True),
        "channel shuffle": Applied(lambda x: x.view(3, 2, 2, 9, w).transpose(1, 2).reshape(3, 4, 9, w)),
        "convolution of a multiple": Applied(lambda x, p: F.conv2d(x * 0.125, p, padding=1).square(), 4, 4, 3, 3),
        "stack": Applied(lambda x: torch.stack([x, x], 1)),
        "pointwise": Applied(lambda x, p: F.linear(x.permute(0, 2, 3, 1), p).permute(0, 3, 1, 2), 5, 4),
        "along a shard": Applied(lambda x, p: F.linear(x, p, p[:, 0]), 3, w),
        "head": Applied(lambda x, p: F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), p), 2, 4),
        "channels last": Applied(lambda x, p: F.layer_norm(x.permute(0, 2, 3, 1), (4,), p), 4),
        "mse": Applied(lambda x: F.mse_loss(x, x.sin())),
        "sum of l1": Applied(lambda x: F.l1_loss(x, x * 2, reduction="sum")),
        "logits": Applied(lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid())),
        "classes": Applied(lambda x, p: F.cross_entropy(x, labels, weight=p.detach().abs(), ignore_index=1), 4),
        "smooth classes": Applied(lambda x: F.cross_entropy(x, labels, label_smoothing=0.1)),
        "probabilities": Applied(lambda x: F.cross_entropy(x, x.softmax(1))),
    }  # fmt: skip


def compare(dims: tuple[int, ...], sizes: tuple[int, ...], w: int, *only: str) -> list[str]:
    """Names of modules whose numbers differ, and what differs."""
    mesh, plan, wrong = init_device_mesh("cpu", sizes), [Shard(d) for d in dims], []
    for name, module in modules(w).items():
        if only and name not in only:
            continue
        if 0 in dims and name == "instance":
            continue  # PyTorch averages its running statistics over the samples in another order
        expected = copy.deepcopy(module).double()
        x = torch.randn(3, 4, 9, w, dtype=torch.float64)
        factor = torch.randn_like(copy.deepcopy(expected)(x))
        loss = Applied(lambda y, factor=factor: (y * factor).sum())
        try:
            sharded = shard_(module.double(), mesh, plan)
            wrong_there = ("layer", "channels last")  # PyTorch's own third derivative; some have none since 2.15
            without = (*wrong_there, "batch", "instance") if torch.__version__ >= (2, 15) else wrong_there
            orders = 2 if name in without else 3
            pairs = (expected, loss), (sharded, shard_(copy.deepcopy(loss), mesh, plan))
            seen = [numbers(*pair, x, orders) for pair in pairs]
        except UnsupportedError:
            wrong.append(f"{name} is refused")
            continue
        for at, (a, b) in enumerate(zip(*seen, strict=False)):
            if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-12):
                wrong.append(f"{name}: number {at} differs by {(a - b).abs().max() if a.shape == b.shape else b.shape}")
    return wrong


def test_the_gradient_of_a_convolution_of_channels_has_derivatives(processes: Processes) -> None:
    """It is a sum over processes, which DTensor's own backward adds up without recording it."""
    assert processes(2, compare, (1,), (2,), 7, "convolution of a multiple", "signs of an input") == [[], []]


def numbers(model: nn.Module, loss: nn.Module, x: Tensor, orders: int) -> list[Tensor]:
    """What a model computes, its gradients, their derivatives, and its buffers."""
    x = x.clone().requires_grad_()
    y = model(x * 1)  # not the leaf, which a module may change in place
    whole = y.detach()
    found = [whole.full_tensor() if isinstance(whole, DTensor) else whole]
    value, given = loss(y), [x, *model.parameters()]
    value = value.to_local() if isinstance(value, DTensor) else value
    for _ in range(orders):
        if not value.requires_grad:
            break
        gradients = torch.autograd.grad(value, given, create_graph=True, allow_unused=True, materialize_grads=True)
        found += gradients
        value, given = sum(((g * g).sum() for g in gradients), torch.zeros(())), [x]
    return [*found, *model.buffers()]


@pytest.mark.parametrize(
    ("dims", "sizes", "w"),
    [
        pytest.param((2, 3), (2, 2), 7, marks=pytest.mark.slow),
        pytest.param((2,), (3,), 7, marks=pytest.mark.slow),
        ((3,), (3,), 4),  # of 4 columns the third process has none
        pytest.param((0,), (4,), 7, marks=pytest.mark.slow),  # of 3 samples the last process has none
        pytest.param((1,), (3,), 7, marks=pytest.mark.slow),  # nor of 4 channels
        pytest.param((1, 2), (2, 2), 7, marks=pytest.mark.slow),
        pytest.param((3, 0, 2), (2, 2, 2), 5, marks=pytest.mark.slow),
        pytest.param((2,), (8,), 5, marks=pytest.mark.slow),
    ],
)
def test_every_rule_is_pytorch_in_one_process(processes: Processes, dims, sizes, w) -> None:
    along_channels = (
        *("softmax", "glu", "response", "shuffle", "unshuffle", "channel shuffle"),
        *("classes", "smooth classes", "probabilities"),
    )
    expected = [f"{name} is refused" for name in along_channels] if 1 in dims else []
    wrong = processes(torch.Size(sizes).numel(), compare, dims, sizes, w, seconds=240)
    assert wrong == [expected] * len(wrong)


# ---- the same call in other words ----------------------------------------------------------------------

_WEIGHTS, _BITS = torch.rand(3, 4, 9, 7), {"quant_min": 0, "quant_max": 7}
SPELLINGS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.flip(1, 2),
    lambda x: x.flip(1),
    lambda x: torch.flip(x, [1, -2]),
    lambda x: x.flip(dims=(1,)),
    lambda x: x.sum(axis=1),  # pyright: ignore[reportCallIssue]
    lambda x: x.mean(axis=(2, 3), keepdims=True),  # pyright: ignore[reportCallIssue]
    lambda x: torch.cat(torch.chunk(x, 2, axis=1)[::-1], axis=1),  # pyright: ignore[reportCallIssue]
    lambda x: torch.stack(tensors=[x, x], dim=1),
    lambda x: (
        x + torch.fake_quantize_per_channel_affine(_WEIGHTS, torch.ones(4), torch.zeros(4), axis=1, **_BITS).sum()
    ),
    lambda x: F.pixel_shuffle(x, upscale_factor=2),
    lambda x: F.mse_loss(x, x * 2, weight=_WEIGHTS),  # pyright: ignore[reportCallIssue]
    lambda x: F.huber_loss(x, x * 2, weight=x.abs()),  # pyright: ignore[reportCallIssue]
    lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid(), weight=_WEIGHTS),
    lambda x: F.gaussian_nll_loss(x, x * 2, x.abs().mean(3)),
    lambda x: F.rms_norm((x / 100).bfloat16(), (9, 7)),
    lambda x: (x * 0 + 60000).half().mean(),
    lambda x: (x * 0 + 60000).half().mean((2, 3)),
    lambda x: F.adaptive_avg_pool2d((x * 0 + 60000).half(), 1),
    lambda x: F.batch_norm(x, None, None, training=True, eps=0.0),
    lambda x: F.mse_loss((x * 0).half(), (x * 0 + 200).half()),
    lambda x: 2 // (x.abs() + 1),
    lambda x: 2 % (x.abs() + 1),
    lambda x: (x > 0).sum(1),
    lambda x: x.view(torch.int32),
    lambda x: (x > 0).to(torch.int32).mean(),
    lambda x: F.mse_loss(x, x, reduction="avg"),
    lambda x: F.cross_entropy(x, x.softmax(1), reduction="avg"),
)


def outcomes() -> list[tuple[object, object]]:
    """What each gives in one process and on shards: a tensor, or the kind of error."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(3, 4, 9, 7)
    found = []
    for function in SPELLINGS:
        both: list[object] = []
        for model, given in ((function, x), (shard_(Applied(function), mesh, Shard(3)), x)):
            try:
                y = model(given)
                both.append(y.full_tensor() if isinstance(y, DTensor) else y)
            except (RuntimeError, ValueError) as error:
                both.append(type(error))
        found.append(tuple(both))
    return found


def test_other_words_for_a_call_mean_the_same(processes: Processes) -> None:
    for number, (expected, got) in enumerate(processes(2, outcomes)[0]):
        if isinstance(expected, Tensor):
            assert isinstance(got, Tensor), number
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5, msg=lambda m, n=number: f"{n}: {m}")
        elif expected is NotImplementedError:  # which PyTorch 2.15 raises in place of its base class
            assert got in (RuntimeError, NotImplementedError), number
        else:
            assert got is expected, number


def test_what_follows_a_pooling_to_one_position_in_one_process(processes: Processes) -> None:
    """It is not sharded any more, as in several: a gate is computed, and a classifier."""
    processes(1, gated)


def gated() -> None:
    layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 4))
    gate = Applied(lambda x: x * layers(x)[..., None, None])
    gate.layers, x = layers, torch.randn(3, 4, 9, 7)
    expected = gate(x)
    y = shard_(gate, init_device_mesh("cpu", (1,)), Shard(2))(x)
    torch.testing.assert_close(y.full_tensor(), expected)


@on(2)
def test_interpolation_of_16_bits_rounds_once() -> None:
    def bicubic(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(7, 3), mode="bicubic")

    x = torch.randn(3, 4, 9, 7).half()
    y = shard_(Applied(bicubic), init_device_mesh("cpu", (2,)), Shard(3))(x)
    expected = bicubic(x.float()).half()  # PyTorch's own kernel of 16 bits rounds more often
    torch.testing.assert_close(y.full_tensor(), expected, rtol=2**-10, atol=1e-6)


@on(2)
def test_layers_that_exchange_something_compile_into_one_graph() -> None:
    warnings.filterwarnings("ignore", ".*should not be instantiated")  # PyTorch's own, where Dynamo meets a Function
    mesh = init_device_mesh("cpu", (2,))
    layers = nn.Sequential(nn.BatchNorm2d(4), nn.AvgPool2d(3, 2, 1)).double()
    model, loss = shard_(copy.deepcopy(layers), mesh, Shard(2)), Applied(lambda y: (y * y).sum())
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    expected, y = layers(x), torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    loss(expected).backward()
    shard_(copy.deepcopy(loss), mesh, Shard(2))(y).backward()
    torch.testing.assert_close(y.full_tensor(), expected, rtol=0, atol=1e-12)
    for p, q in zip(layers.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


@on(2)
def test_gradients_of_complex_weights_are_sums_too() -> None:
    """Of parameters that each process uses for its part."""
    mesh = init_device_mesh("cpu", (2,))
    scaled = Applied(lambda x, p: F.linear(x, p) * p[0])
    scaled.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
    for module in (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", dtype=torch.complex128), scaled):
        x, results = torch.randn(2, 4, 5, 3, dtype=torch.complex128), []
        loss = Applied(lambda y: (y * y).sum())
        for model, criterion in (
            (module, loss), (shard_(copy.deepcopy(module), mesh, Shard(2)), shard_(copy.deepcopy(loss), mesh, Shard(2)))
        ):  # fmt: skip
            value = criterion(model(x))
            value = value.to_local() if isinstance(value, DTensor) else value
            results.append(torch.autograd.grad(value.real, list(model.parameters())))
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@on(2)
def test_what_has_no_rule_on_shards_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for function, words in (
        (lambda x: x.flip(1, 3), "flip works along dimension 3, which is sharded"),
        (lambda x: F.interpolate(x.to(torch.uint8), size=(7, 3), mode="bilinear"), "uint8 to any size has no rule"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            shard_(Applied(function), mesh, Shard(3))(torch.rand(3, 4, 9, 7))
