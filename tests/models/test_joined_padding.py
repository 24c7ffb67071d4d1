"""Padding that the convolution behind it reads: only where nothing else sees the padded copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad.engine.events import observing
from tests.models.joining import agree, pair


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


class PadReadLater(Asymmetric):
    both = False

    def forward(self, x: Tensor) -> Any:
        z = self.pad(x)
        y = self.conv(z)
        return (y, z) if self.both else y


class PadChoice(Asymmetric):
    """What is called is decided before, in the expression itself."""

    flag = False

    def forward(self, x: Tensor) -> Tensor:
        return (torch.neg if self.flag else self.conv)(self.pad(x))


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


def shared() -> nn.Module:
    pad = nn.ZeroPad2d(1)
    return nn.Sequential(pad, nn.Conv2d(6, 6, 3), nn.Sequential(pad, nn.MaxPool2d(3)))


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
        assert of_kernels(ours, x) == {padding}
        torch.testing.assert_close(ours(x), stock(x))
        torch.testing.assert_close(ours(x[0]), stock(x[0]))
    assert repr(ours) == repr(stock)
    report.restore()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


PADDED: dict[str, Callable[[], nn.Module]] = {
    "the padded input is used twice": PadUsedTwice,
    "another module has the padding, too": shared,
    "the input changes in place": InPlaceBetween,
    "a flag may give the padded input out": PadReadLater,
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


def test_a_convolution_that_is_called_without_its_padding_too() -> None:
    ours, stock, _ = pair(ConvTwice())
    x = torch.randn(SHAPES[2])
    assert of_kernels(ours, x) == {((3, 1), (0, 1)), ((0, 0), (0, 0))}
    agree(ours, stock, x)


def test_a_forward_that_changed_is_an_error() -> None:
    ours, _, _ = pair(PadChoice())
    ours(torch.randn(SHAPES[2]))
    ours.flag = True
    with pytest.raises(RuntimeError, match="forward of PadChoice has changed"):
        ours(torch.randn(SHAPES[2]))


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


def test_padding_with_another_value() -> None:
    ours, stock, _ = pair(Asymmetric())
    ours.pad.value = stock.pad.value = 2.0
    agree(ours, stock, torch.randn(SHAPES[2]))


@pytest.mark.parametrize("scheme", [convgrad.nn.Binary(), convgrad.nn.Xnor(), convgrad.nn.ShiftQ()], ids=repr)
def test_a_convolution_that_is_converted_later(scheme: Any) -> None:
    """It quantizes the input, so it reads the padded one."""
    ours, stock, _ = pair(Asymmetric(groups=1))
    for model in (ours, stock):
        convgrad.nn.convert_(model, scheme)
    agree(ours, stock, torch.randn(SHAPES[2]))


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
