"""Layers that are computed together: only where nothing else sees what lies between them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad.engine.events import observing
from tests.norms import NEEDS_KERNELS, take_small_inputs, watch

pytestmark = NEEDS_KERNELS


@pytest.fixture(autouse=True)
def _small_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    take_small_inputs(monkeypatch)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations that a kernel of ours computed, of calls forward."""
    seen: list[str] = []
    watch(monkeypatch, "normalize", lambda *args: seen.append(args[-1]))
    return seen


class Block(nn.Module):
    """Both are called by a forward of the user's; the activation twice."""

    def __init__(self, activation: nn.Module, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.activation = activation
        self.between = between

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(self.activation(z if self.between is None else self.between(z)) - scale)


class Both(Block):
    """The activation is not all that uses the normalisation's output."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(z) + z


class Checkpointing(Block):
    """What is computed again in the backward is so while this forward does not run."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return checkpoint(super().forward, x, scale, use_reentrant=False)  # pyright: ignore[reportReturnType]


class InTraining(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(z) if self.training else z


class Twice(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.activation(self.norm(self.activation(self.norm(self.conv(x)))))


class OfSizes(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        z = self.norm(self.conv(x))
        return self.activation(z) if x.shape[0] > 1 else z


def padded(x: Tensor, conv: nn.Module, more: int = 0) -> Tensor:
    """It needs the sizes, as `apply_tf_padding` of transformers does."""
    return nn.functional.pad(x, [int(x.shape[-1]) % 2 + more] * 4) if conv.training or x.shape[0] else x


class Padded(Block):
    """What comes before is a function that cannot be traced; another one follows the activation."""

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return halved(self.activation(self.norm(self.conv(padded(x, self.conv, more=1)))))


def halved(x: Tensor) -> Tensor:
    return x / 2 if int(x.shape[0]) else x


class PaddedBetween(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.activation(padded(self.norm(self.conv(x)), self.conv))


class Given(Block):
    """A function that cannot be traced gets what could call the normalisation."""

    def __init__(self, activation: nn.Module, given: Callable[[Any], Any]) -> None:
        super().__init__(activation)
        self.given = given

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        x = with_call(self.conv(x), self.given(self))
        return self.activation(self.norm(x))


def with_call(x: Tensor, given: Any) -> Tensor:
    call = given[0] if isinstance(given, tuple) else getattr(given, "norm", given)
    return call(x) + int(x.shape[0])


class Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


ACTIVATIONS = [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.ReLU6(inplace=True), nn.SiLU(), nn.SiLU(inplace=True)]


def layers(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), activation, nn.Conv2d(6, 2, 1))


def pair(stock: nn.Module) -> tuple[Any, Any, Any]:
    for norm in (m for m in stock.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    ours = copy.deepcopy(stock)
    return ours, stock, convgrad.accelerate_(ours, only_gains=False)


def agree(ours: Any, stock: Any, x: Tensor | None = None, **near: Any) -> None:
    x = torch.randn(2, 3, 9, 7) if x is None else x
    results = []
    for model in (ours, stock):
        model.zero_grad()
        a = x.clone().requires_grad_()
        y = model(a)
        y.square().sum().backward()
        results.append((y, a.grad, *(p.grad for p in model.parameters()), *model.buffers()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **(near or {"rtol": 1e-4, "atol": 1e-4}))


@pytest.mark.parametrize("build", [layers, Block, Padded], ids=["sequential", "module", "padded"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_nothing_is_different(build: Any, activation: nn.Module, joined: list[str]) -> None:
    ours, stock, report = pair(build(copy.deepcopy(activation)))
    agree(ours, stock)
    assert joined == [type(activation).__name__.lower()]
    assert sum("with" in what for what in report.replaced.values()) == 1
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert repr(ours) == repr(stock)
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward)
    ours.eval()
    stock.eval()
    agree(ours, stock)
    report.restore()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert [vars(m).keys() for m in ours.modules()] == [vars(m).keys() for m in stock.modules()]


LEFT = {
    "used twice": lambda: Both(nn.ReLU()),
    "not in evaluation": lambda: InTraining(nn.ReLU()),
    "called twice": lambda: Twice(nn.ReLU()),
    "a branch by sizes": lambda: OfSizes(nn.ReLU()),
    "given to a function": lambda: Given(nn.ReLU(), lambda block: block.norm),
    "given in a tuple": lambda: Given(nn.ReLU(), lambda block: (block.norm, 1)),
    "given as a method": lambda: Given(nn.ReLU(), lambda block: block.norm.forward),
    "given in a function": lambda: Given(nn.ReLU(), lambda block: lambda x: block.norm(x) + 0),
    "given with the owner": lambda: Given(nn.ReLU(), lambda block: block),
    "a function between": lambda: PaddedBetween(nn.ReLU()),
    "something between": lambda: Block(nn.ReLU(), torch.neg),
    "another activation": lambda: layers(nn.GELU()),
    "an activation of the user's": lambda: layers(type("Mine", (nn.ReLU,), {})()),
    "a normalisation of the user's": lambda: nn.Sequential(nn.Conv2d(3, 6, 1), Own(6), nn.ReLU()),
}


@pytest.mark.parametrize("why", LEFT)
def test_left_alone(why: str, joined: list[str]) -> None:
    ours, stock, _ = pair(LEFT[why]())
    agree(ours, stock)
    assert set(joined) == {""}
    assert not hasattr(ours, "_convgrad_joined")


@pytest.mark.parametrize("which", ["norm", "activation"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_sees_what_it_always_saw(which: str, kind: str, joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    seen: list[list[Tensor]] = []
    for model in (ours, stock):
        seen.append([])

        def hook(module: nn.Module, *tensors: Any, to: list[Tensor] = seen[-1]) -> None:
            to.extend(t for given in tensors for t in (given if isinstance(given, tuple) else (given,)))

        getattr(getattr(model, which), f"register_{kind}_hook")(hook)
    agree(ours, stock)
    assert joined == [""]
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_parts_by_themselves(joined: list[str]) -> None:
    """A slice, and modules that are called or replaced by someone else, know nothing of one another."""
    ours, stock, _ = pair(layers(nn.ReLU()))
    x = torch.randn(2, 3, 9, 7)
    torch.testing.assert_close(ours[:2](x), stock[:2](x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1](ours[0](x)), stock[1](stock[0](x)), rtol=1e-4, atol=1e-5)
    ours[2], stock[2] = nn.Tanh(), nn.Tanh()
    agree(ours, stock)
    assert set(joined) == {""}


def test_a_forward_that_changed_is_an_error() -> None:
    ours, _, _ = pair(Block(nn.ReLU()))
    ours.between = torch.neg
    with pytest.raises(RuntimeError, match="forward of Block has changed"):
        ours(torch.randn(2, 3, 9, 7))
    ours.between = None
    ours(torch.randn(2, 3, 9, 7))


@pytest.mark.parametrize("build", [layers, Block], ids=["sequential", "module"])
def test_copies_and_pickles(build: Any, joined: list[str]) -> None:
    ours, stock, _ = pair(build(nn.SiLU()))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        agree(twin, copy.deepcopy(stock))
        assert joined.pop() == "silu"
        assert type(twin) is type(ours)


@pytest.mark.parametrize("frozen", ["all", "conv", "norm"])
def test_frozen_parameters(frozen: str, joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    for model in (ours, stock):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen != "all" and not name.startswith(frozen))
    agree(ours, stock)
    with torch.no_grad():
        x = torch.randn(2, 3, 9, 7)
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
    assert joined == ["silu"] * 2


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.SiLU()], ids=repr)
def test_second_derivatives(activation: nn.Module, joined: list[str]) -> None:
    ours, stock, _ = pair(Block(activation).double())
    x, results = torch.randn(2, 3, 4, 3, dtype=torch.float64), []
    for model in (ours, stock):
        a = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(a).square().sum(), a, create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), (a, *model.parameters())))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert joined == [type(activation).__name__.lower()]


def test_a_checkpoint_in_the_forward_itself(joined: list[str]) -> None:
    """It must save the same tensors when it computes again."""
    agree(*pair(Checkpointing(nn.SiLU()))[:2])
    assert set(joined) == {""}


def test_autocast_checkpoints_and_transforms(joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    with torch.autocast("cpu", torch.bfloat16):
        agree(ours, stock, rtol=0.1, atol=0.5)
    x = torch.randn(2, 3, 9, 7)
    for model in (ours, stock):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    assert set(joined) == {"silu"}
    joined.clear()
    for norm in (ours.norm, stock.norm):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    one, other = (torch.func.jvp(model, (x,), (x,)) for model in (ours, stock))
    torch.testing.assert_close(one, other)
    one, other = (torch.func.vmap(model)(x[None]) for model in (ours, stock))
    torch.testing.assert_close(one, other)
    one, other = (torch.fx.symbolic_trace(model, {"scale": 1.0})(x) for model in (ours, stock))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert set(joined) <= {""}


@pytest.mark.slow
def test_compiled(joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    torch._dynamo.reset()
    agree(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock)
    assert joined == []


# ---- padding and the convolution behind it ---------------------------------------------------------


class Asymmetric(nn.Module):
    """As models that came from TensorFlow pad where they stride; nothing else is called."""

    def __init__(self, d: int = 2, pad: Any = None, conv: Callable[..., nn.Module] = nn.Conv2d, **options: Any) -> None:
        super().__init__()
        of_dimensions: Any = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)[d - 1]
        self.pad = of_dimensions((0, 1, 3, 1, 1, 0)[: 2 * d] if pad is None else pad)
        self.conv: Any = conv(6, options.pop("channels", 6), 3, **({"stride": 2, "groups": 6} | options))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pad(x))


class PadUsedTwice(Asymmetric):
    def forward(self, x: Tensor) -> Tensor:
        z = self.pad(x)
        return self.conv(z) + z.mean()


class ConvTwice(Asymmetric):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pad(x)) + self.conv(x).mean()


class InPlaceBetween(Asymmetric):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        z = self.pad(x)
        x.zero_()
        return self.conv(z) + x.mean()


class WhereItStrides(Asymmetric):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x if self.conv.stride[0] == 1 else self.pad(x))


class CheckpointedPad(Asymmetric):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


class Inherits(nn.Conv2d):
    def __init__(self, channels: int, *args: Any, **options: Any) -> None:
        super().__init__(channels, *args, bias=False, **options)


class Shifted(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


def of_kernels(model: nn.Module, x: Tensor) -> set[tuple[tuple[int, int], ...]]:
    """The padding that the kernels which compute a step are given."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    with observing(lambda event: seen.add(event.problem.padding)), convgrad.use_backend("native"):
        model(x).sum().backward()
    return seen


#: By the number of dimensions; with a stride of 2 all padding is read.
SHAPES = {1: (2, 6, 12), 2: (2, 6, 11, 8), 3: (2, 6, 4, 11, 8)}


#: What is joined, and the padding that the kernels are given.
JOINED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "1-d": (lambda: Asymmetric(1, conv=nn.Conv1d), ((0, 1),)),
    "2-d": (Asymmetric, ((3, 1), (0, 1))),
    "3-d": (lambda: Asymmetric(3, conv=nn.Conv3d), ((1, 1), (3, 1), (0, 1))),
    "more padding": (lambda: Asymmetric(padding=(0, 2)), ((3, 1), (2, 3))),
    "valid": (lambda: Asymmetric(padding="valid"), ((3, 1), (0, 1))),
    "same": (lambda: Asymmetric(padding="same", stride=1), ((4, 2), (1, 2))),
    "a class of the user's": (lambda: Asymmetric(conv=Inherits), ((3, 1), (0, 1))),
    "where it strides": (WhereItStrides, ((3, 1), (0, 1))),
    "sequential": (lambda: nn.Sequential(*Asymmetric().children()), ((3, 1), (0, 1))),
}


@pytest.mark.parametrize("which", JOINED)
def test_padding_is_not_copied(which: str) -> None:
    build, padding = JOINED[which]
    ours, stock, report = pair(build())
    assert sum("with ZeroPad" in what for what in report.replaced.values()) == 1
    x = torch.randn(SHAPES[len(padding)])
    assert of_kernels(ours, x) == {padding}
    with convgrad.use_backend("native"):
        agree(ours, stock, x)
        for each in (ours, stock):
            each.eval()
        torch.testing.assert_close(ours(x), stock(x))
        torch.testing.assert_close(ours(x[0]), stock(x[0]))
    assert repr(ours) == repr(stock)
    report.restore()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


PADDED: dict[str, Callable[[], nn.Module]] = {
    "the padded input is used twice": PadUsedTwice,
    "the convolution is called twice": ConvTwice,
    "the input changes in place": InPlaceBetween,
    "a checkpoint in the forward": CheckpointedPad,
    "a crop": lambda: Asymmetric(pad=(1, -1, 1, 1)),
    "a forward of the user's": lambda: Asymmetric(conv=Shifted),
    "another padding mode": lambda: Asymmetric(padding=1, padding_mode="reflect"),
    "a request": lambda: Asymmetric(
        conv=lambda *args, **options: convgrad.nn.Conv2d(*args, **options, backend="native")
    ),
    "no stride": lambda: WhereItStrides(stride=1),
}


@pytest.mark.parametrize("why", PADDED)
def test_padding_is_left_alone(why: str) -> None:
    ours, stock, _ = pair(PADDED[why]())
    x = torch.randn(SHAPES[2])
    assert all(one == other for padding in of_kernels(ours, x) for one, other in padding)
    agree(ours, stock, x)


def test_padding_of_other_dimensions() -> None:
    """ZeroPad2d of a sequence pads its channels."""
    ours, stock, _ = pair(Asymmetric(pad=(1, 0, 1, 1), conv=nn.Conv1d, groups=1, stride=1))
    agree(ours, stock, torch.randn(2, 4, 11))
    ours, stock, _ = pair(Asymmetric(1))
    agree(ours, stock, torch.randn(SHAPES[2]))


def test_padding_stays_a_copy_where_pytorch_computes() -> None:
    """PyTorch's call takes no such padding; it would be copied in the backward, too."""
    ours, stock, _ = pair(Asymmetric(groups=1, channels=32))
    seen, x = [], torch.randn(SHAPES[2])
    with observing(lambda event: seen.append(event.problem.padding)), convgrad.use_backend("aten"):
        agree(ours, stock, x)
    assert set(seen) == {((0, 0), (0, 0))}


@pytest.mark.parametrize("which", ["pad", "conv"])
def test_a_hook_sees_padding_as_it_was(which: str) -> None:
    ours, stock, _ = pair(Asymmetric())
    shapes: list[Any] = []
    for model in (ours, stock):
        getattr(model, which).register_forward_hook(lambda m, given, y: shapes.append((given[0].shape, y.shape)))
    agree(ours, stock, torch.randn(SHAPES[2]))
    assert shapes[0] == shapes[1]


def test_parts_of_padding_by_themselves() -> None:
    ours, stock, _ = pair(Asymmetric())
    x = torch.randn(SHAPES[2])
    assert torch.equal(ours.pad(x), stock.pad(x))
    torch.testing.assert_close(ours.conv(x), stock.conv(x))
    ours.conv = copy.deepcopy(stock.conv)
    agree(ours, stock, x)


def test_padding_under_autocast_and_transforms() -> None:
    ours, stock, _ = pair(Asymmetric())
    x = torch.randn(SHAPES[2])
    with torch.autocast("cpu", torch.bfloat16):
        agree(ours, stock, x, rtol=0.1, atol=0.5)
    for one, other in (
        (torch.func.jvp(m, (x,), (x,)) for m in (ours, stock)),
        (torch.func.vmap(m)(x[None]) for m in (ours, stock)),
        (torch.fx.symbolic_trace(m)(x) for m in (ours, stock)),
        (m(x.permute(0, 1, 3, 2)) for m in (ours, stock)),
        (m(x.contiguous(memory_format=torch.channels_last)) for m in (ours, stock)),
        (checkpoint(m, x, use_reentrant=False) for m in (ours, stock)),
    ):
        torch.testing.assert_close(one, other)
    x = x.double().requires_grad_()
    assert torch.autograd.gradgradcheck(ours.double(), x[:1, :, :5, :4])


@pytest.mark.slow
def test_padding_compiled() -> None:
    ours, stock, _ = pair(Asymmetric())
    torch._dynamo.reset()
    agree(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock, torch.randn(SHAPES[2]))
