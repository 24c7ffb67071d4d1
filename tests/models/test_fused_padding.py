"""Zeros around the result of a normalization that a convolution reads: without a copy, with stock's results."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad.engine.events import observing
from tests.copies import copies
from tests.models.joining import agree
from tests.models.joining import pair as paired
from tests.norms import NEEDS_KERNELS

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]


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


class ByFunction(Asymmetric):
    """Pads by a function."""

    def __init__(self, d: int = 2, pad: Any = None, **options: Any) -> None:
        super().__init__(d, pad, **options)
        self.by = self.pad.padding
        del self.pad

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.by))


def pad_same(x: Tensor, conv: nn.Conv2d, value: float = 0.0) -> Tensor:
    """As models that came from TensorFlow pad: it needs the sizes."""
    pad = []
    for n, k, s in zip(x.shape[:-3:-1], conv.kernel_size[::-1], conv.stride[::-1], strict=True):
        more = max((math.ceil(n / s) - 1) * s + k - int(n), 0)
        pad += [more // 2, more - more // 2]
    if max(pad) > 0:
        x = nn.functional.pad(x, pad, "constant", value)
    return x


class BySizes(ByFunction):
    def forward(self, x: Tensor) -> Tensor:
        if self.conv.groups:
            x = pad_same(x, self.conv)
        return self.conv(x)


class ByMethod(ByFunction):
    @staticmethod
    def padded(x: Tensor, by: Any, mode: str = "constant", value: float = 0.0) -> Tensor:
        return F.pad(x, by, mode, value) if x.dim() else x

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.padded(x, self.by))


class Same(nn.Conv2d):
    """As `timm` has it, with calls of functions."""

    by: Any = (0, 1, 3, 1)
    value = 0.0

    def forward(self, input: Tensor) -> Tensor:
        x = F.pad(input, self.by, value=self.value)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, dilation=1, groups=self.groups)


class Causal(nn.Conv1d):
    """As it is often written."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.pad(input, (2, 0)))


class FunctionUsedTwice(ByFunction):
    def forward(self, x: Tensor) -> Tensor:
        z = F.pad(x, self.by)
        return self.conv(z) + z.mean()


class FunctionBehindAnother(ByFunction):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(self.by_itself(x), self.by))

    def __init__(self) -> None:
        super().__init__()
        self.by_itself = nn.Tanh()


class FunctionTwice(ByFunction):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(F.pad(x, self.by), (1, 1)))


class FunctionElsewhere(ByFunction):
    """The same function pads what goes to nobody, or to someone else."""

    flag = True

    def forward(self, x: Tensor) -> Tensor:
        if self.flag:
            return self.conv(pad_same(x, self.conv))
        return self.conv(x) + pad_same(x, self.conv).mean()


class FunctionForSizes(ByFunction):
    """What gets the padded input depends on its size."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.conv if x.shape[-1] < 100 else nn.functional.relu
        return layer(F.pad(x, self.by))


class FunctionOfFlag(ByFunction):
    flag = False

    def forward(self, x: Tensor) -> Tensor:
        layer = nn.Identity() if self.flag else self.conv
        return layer(F.pad(x, self.by)).relu()


class Swapped(ByFunction):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(6, 6, 3, 2, groups=6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.other, self.conv) if x.shape[0] == 1 else (self.conv, self.other)
        return a(F.pad(x, self.by)).mean() + b(x).mean()


class Cached(ByFunction):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(keeps(x, self.by))


@functools.cache
def keeps(x: Tensor, by: Any) -> Tensor:
    return F.pad(x, by)


class AddedInPlace(ByFunction):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x += self.conv(F.pad(x, (1, 1, 1, 1)))
        return x


class NothingInPlace(Asymmetric):
    """No zeros need no copy, but the convolution's input is changed later."""

    def __init__(self) -> None:
        super().__init__(pad=(0, 0, 0, 0), stride=1, padding=1, groups=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.pad(x))
        x += y
        return x


class AddedInPlaceLater(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = ByFunction(pad=(1, 1, 1, 1), **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.inner(x)
        x += y
        return x


class ChangedByLayer(ByFunction):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return self.conv(F.pad(x, self.by)).mean() + self.act(x)


class ChangedByMethod(ByFunction):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.conv(F.pad(x, self.by))
        return y.mean() + x.relu_()


class ChangedByIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ByFunction()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.inner(x)
        x[:, 0] = 0
        return y.mean() + x


kept: list[Tensor] = []


class KeptByFunction(ByFunction):
    @staticmethod
    def padded(x: Tensor, by: Any) -> Tensor:
        z = F.pad(x, by)
        kept[:] = [z]
        return z

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.padded(x, self.by))


class PaddedWeight(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, F.pad(self.weight, (1, 1)), self.bias, 1, (1, 2), 1, self.groups)


class FunctionOfMode(ByFunction):
    mode, value = "reflect", 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.by, self.mode, self.value))


class Inherits(nn.Conv2d):
    def __init__(self, channels: int, *args: Any, **options: Any) -> None:
        super().__init__(channels, *args, bias=False, **options)


class Shifted(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


class Behind(nn.Module):
    """A module that gets the result of a normalization and its activation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        channels = next(m for m in inner.modules() if hasattr(m, "in_channels")).in_channels
        d = next(m for m in inner.modules() if hasattr(m, "kernel_size")).kernel_size
        self.norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(d) - 1](channels)

    def forward(self, x: Tensor) -> Any:
        return self.inner(F.silu(self.norm(x)))


def pair(inner: nn.Module) -> tuple[Any, Any, Any]:
    return paired(Behind(inner))


def of_kernels(model: nn.Module, x: Tensor) -> set[tuple[tuple[int, int], ...]]:
    """The padding that the kernels which compute the second of two steps are given."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    with convgrad.use_backend("native"):
        model(x).sum().backward()
        with observing(lambda event: seen.add(event.problem.padding)):
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
    "a function": (ByFunction, ((3, 1), (0, 1))),
    "a function, 1-d": (lambda: ByFunction(1, conv=nn.Conv1d), ((0, 1),)),
    "a function, 3-d": (lambda: ByFunction(3, conv=nn.Conv3d), ((1, 1), (3, 1), (0, 1))),
    "a function that needs sizes": (BySizes, ((1, 1), (0, 1))),
    "a method": (ByMethod, ((3, 1), (0, 1))),
    "in a class with functions": (lambda: Same(6, 6, 3, 2, padding=(0, 2), groups=6), ((3, 1), (2, 3))),
    "same padding in a class with functions": (lambda: Same(6, 6, 3, padding="same", groups=6), ((4, 2), (1, 2))),
    "in a causal class": (lambda: Causal(6, 6, 3, groups=6), ((2, 0),)),
    "some dimensions": (lambda: with_attributes(ByFunction(), by=(3, 0)), ((0, 0), (3, 0))),
}


def with_attributes(model: Any, **values: Any) -> Any:
    vars(model).update(values)
    return model


@pytest.mark.parametrize("which", JOINED)
def test_padding_is_not_copied(which: str) -> None:
    build, padding = JOINED[which]
    ours, stock, report = pair(build())
    x = torch.randn(SHAPES[len(padding)])
    assert of_kernels(ours, x) == {padding}
    stock(x)
    stock(x)
    with convgrad.use_backend("native"):
        agree(ours, stock, x)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
        for each in (ours, stock):
            each.eval()
        agree(ours, stock, x)
    assert repr(ours) == repr(stock)
    report.restore()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


def test_a_function_is_watched_again_where_it_may_gain() -> None:
    """In evaluation the normalization is PyTorch's and nothing waits for a reader: that holds for these sizes alone."""
    ours, stock, _ = pair(ByFunction())
    x = torch.randn(SHAPES[2])
    for model in (ours, stock):
        model.eval()
    agree(ours, stock, x)
    agree(ours, stock, x)
    for model in (ours, stock):
        model.train()
    agree(ours, stock, x)
    assert of_kernels(ours, x) == {((3, 1), (0, 1))}


class OneForward(nn.Module):
    """A block that is written in one forward: a convolution comes before the padding."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.expand, self.norm, self.inner = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), inner
        self.conv = nn.Conv2d(6, 6, 3, 2, groups=6)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        return self.conv(F.pad(F.relu(self.norm(self.expand(x))), (0, 1, 0, 1)))


@pytest.mark.parametrize("build", [OneForward, lambda: OneForward(OneForward()), lambda: nn.Sequential(OneForward())])
def test_padding_behind_another_convolution_of_the_same_forward(build: Any) -> None:
    stock = build()
    ours, stock, _ = paired(stock)
    x, strided, blocks = torch.randn(2, 6, 12, 12), [], sum(isinstance(m, OneForward) for m in stock.modules())

    def note(event: Any) -> None:
        if event.problem.stride == (2, 2) and event.outputs == ("forward",):
            strided.append(event.problem.padding)

    for _ in range(2):
        strided.clear()
        with convgrad.use_backend("native"), observing(note):
            agree(ours, stock, x)
        assert strided == [((0, 1), (0, 1))] * blocks


#: What is right, however it is computed.
PADDED: dict[str, Callable[[], nn.Module]] = {
    "the padded input is used twice": PadUsedTwice,
    "another module has the padding, too": shared,
    "nothing, and an addition in place": NothingInPlace,
    "the input changes in place": InPlaceBetween,
    "a flag may give the padded input out": PadReadLater,
    "a checkpoint in the forward": CheckpointedPad,
    "a crop": lambda: Asymmetric(pad=(1, -1, 1, 1)),
    "a forward of the user's": lambda: Asymmetric(conv=Shifted),
    "another padding mode": lambda: Asymmetric(padding=1, padding_mode="reflect"),
    "a request": lambda: Asymmetric(conv=functools.partial(convgrad.nn.Conv2d, backend="native")),
    "no stride": lambda: WhereItStrides(stride=1),
    "a function whose result is used twice": FunctionUsedTwice,
    "a function behind another layer": FunctionBehindAnother,
    "two functions": FunctionTwice,
    "a function that pads with something else": FunctionOfMode,
    "a function that crops": lambda: with_attributes(ByFunction(), by=(1, -1, 1, 1)),
    "a function and a request": lambda: ByFunction(conv=functools.partial(convgrad.nn.Conv2d, backend="native")),
    "an addition in place": lambda: AddedInPlace(stride=1),
    "an addition in place later": lambda: AddedInPlaceLater(stride=1),
    "a layer that changes the input in place": ChangedByLayer,
    "a method that changes a tensor in place": ChangedByMethod,
    "an element that is changed in place": ChangedByIndex,
    "a function that keeps its result elsewhere": KeptByFunction,
    "a padded weight": lambda: PaddedWeight(6, 6, 3, groups=6),
}


@pytest.mark.parametrize("backend", ["native", None])
@pytest.mark.parametrize("why", PADDED)
def test_padding_is_right(why: str, backend: str | None) -> None:
    """Also where the input is changed in place, before or after the convolution has read it."""
    ours, stock, _ = pair(PADDED[why]())
    x = torch.randn(SHAPES[2])
    for _ in range(3):
        with convgrad.use_backend(backend) if backend else nullcontext():
            agree(ours, stock, x)


def test_second_derivatives_where_the_input_was_changed() -> None:
    ours, stock, _ = pair(AddedInPlace(stride=1).double())
    x, results = torch.randn(2, 6, 5, 4, dtype=torch.float64), []
    for model in (ours.double(), stock.double()):
        for _ in range(2):
            a = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(model(a).square().sum(), a, create_graph=True)
            found = torch.autograd.grad(g.square().sum(), (a, *model.parameters()))
        results.append(found)
    torch.testing.assert_close(*results)


def test_a_convolution_that_is_called_without_its_padding_too() -> None:
    ours, stock, _ = pair(ConvTwice())
    x = torch.randn(SHAPES[2])
    for _ in range(2):
        agree(ours, stock, x)


@pytest.mark.parametrize("kind", [PadChoice, FunctionForSizes, FunctionOfFlag, Swapped])
def test_what_gets_the_padded_input_changes(kind: Any) -> None:
    """It is padded then."""
    ours, stock, _ = pair(kind())
    for shape in (SHAPES[2], (1, 6, 11, 8), (2, 6, 11, 108)):
        agree(ours, stock, torch.randn(shape))
    ours.inner.flag = stock.inner.flag = True
    agree(ours, stock, torch.randn(SHAPES[2]))


@pytest.mark.parametrize("kind", [Asymmetric, ByFunction])
def test_another_padding_mode_later(kind: Any) -> None:
    """As for images that can be tiled."""
    ours, stock, _ = pair(kind(padding=1))
    for model in (ours, stock):
        model.inner.conv.padding_mode = "circular"
    agree(ours, stock, torch.randn(SHAPES[2]))
    for model in (ours, stock):
        model.inner.conv._conv_forward = lambda x, w, b: F.conv2d(x.relu(), w, b, groups=6)
    agree(ours, stock, torch.randn(SHAPES[2]))


def test_a_function_that_pads_otherwise_later() -> None:
    ours, stock, _ = pair(FunctionOfMode())
    x = torch.randn(SHAPES[2])
    for mode, value in (("constant", 0.0), ("constant", 2.0), ("replicate", 0.0)):
        for model in (ours, stock):
            model.inner.mode, model.inner.value = mode, value
        agree(ours, stock, x)
    ours, stock, _ = pair(with_attributes(Same(6, 6, 3, groups=6), value=1.0))
    agree(ours, stock, x)


def test_layers_see_no_mode_of_functions() -> None:
    """A `TorchFunctionMode` would slow down all of them, and keep batch normalizations to PyTorch."""
    seen: list[Any] = []

    class Block(ByFunction):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(_get_current_function_mode())
            return y

    ours, stock, _ = pair(Block())
    agree(ours, stock, torch.randn(SHAPES[2]))
    assert seen == [None] * 2
    ours.inner.conv.weight = None
    with pytest.raises(Exception, match="weight"):
        ours(torch.randn(SHAPES[2]))
    assert _get_current_function_mode() is None


def test_padding_of_other_dimensions() -> None:
    """ZeroPad2d of a sequence pads its channels."""
    ours, stock, _ = pair(Asymmetric(1))
    agree(ours, stock, torch.randn(SHAPES[2]))
    ours, stock, _ = pair(with_attributes(ByFunction(1, conv=nn.Conv1d, channels=6, groups=2), by=(1, 0, 0, 0)))
    agree(ours, stock, torch.randn(2, 6, 11))


@pytest.mark.parametrize("kind", [Asymmetric, ByFunction, lambda groups, channels: Same(6, channels, 3, groups=groups)])
def test_padding_stays_a_copy_where_pytorch_computes(kind: Any) -> None:
    """PyTorch's call takes no such padding; it would be copied in the backward, too."""
    ours, stock, _ = pair(kind(groups=1, channels=32))
    seen, x = [], torch.randn(SHAPES[2])
    with observing(lambda event: seen.append(event.problem.padding)), convgrad.use_backend("aten"):
        agree(ours, stock, x)
    assert set(seen) == {((0, 0), (0, 0))}


def test_padding_with_another_value() -> None:
    ours, stock, _ = pair(Asymmetric())
    ours.inner.pad.value = stock.inner.pad.value = 2.0
    agree(ours, stock, torch.randn(SHAPES[2]))


@pytest.mark.parametrize("scheme", [convgrad.nn.Binary(), convgrad.nn.Xnor(), convgrad.nn.ShiftQ()], ids=repr)
def test_a_convolution_that_is_converted_later(scheme: Any) -> None:
    """It quantizes the input, so it reads the padded one."""
    ours, stock, _ = pair(Asymmetric(groups=1))
    for model in (ours, stock):
        convgrad.nn.convert_(model, scheme)
    agree(ours, stock, torch.randn(SHAPES[2]))


@pytest.mark.parametrize("kind", [Asymmetric, ByFunction])
def test_a_hook_on_all_modules_sees_padding_as_it_was(kind: Any) -> None:
    ours, stock, _ = pair(kind())
    seen: list[Any] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda m, given, y: seen.append((type(given[0]), given[0].shape))
    )
    with hook:
        agree(ours, stock, torch.randn(SHAPES[2]))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.parametrize(("kind", "which"), [(Asymmetric, "pad"), (Asymmetric, "conv"), (ByFunction, "conv")])
def test_a_hook_sees_padding_as_it_was(kind: Any, which: str) -> None:
    ours, stock, _ = pair(kind())
    shapes: list[Any] = []
    for model in (ours, stock):
        getattr(model.inner, which).register_forward_hook(lambda m, given, y: shapes.append((given[0].shape, y.shape)))
    agree(ours, stock, torch.randn(SHAPES[2]))
    assert shapes[0] == shapes[1]


KINDS = pytest.mark.parametrize("kind", [Asymmetric, BySizes, lambda: Same(6, 6, 3, 2, groups=6)])


@KINDS
def test_padding_under_autocast_and_transforms(kind: Any) -> None:
    ours, stock, _ = pair(kind())
    x = torch.randn(SHAPES[2])
    for model in (ours, stock):
        model.norm.track_running_stats, model.norm.running_mean, model.norm.running_var = False, None, None
    with torch.autocast("cpu", torch.bfloat16):
        agree(ours, stock, x, rtol=0.1, atol=0.5)
    for one, other in (
        (torch.func.jvp(m, (x,), (x,)) for m in (ours, stock)),
        (torch.func.vmap(m)(x[None]) for m in (ours, stock)),
        (m(x.permute(0, 1, 3, 2)) for m in (ours, stock)),
        (m(x.contiguous(memory_format=torch.channels_last)) for m in (ours, stock)),
        (checkpoint(m, x, use_reentrant=False) for m in (ours, stock)),
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    x = x.double().requires_grad_()
    assert torch.autograd.gradgradcheck(ours.double(), x[:1, :, :5, :4])


@KINDS
def test_copies_and_pickles_of_padding(kind: Any) -> None:
    ours, stock, _ = pair(kind())
    for twin in copies(ours):
        assert of_kernels(copy.deepcopy(twin), torch.randn(SHAPES[2])) != {((0, 0), (0, 0))}
        agree(twin, copy.deepcopy(stock), torch.randn(SHAPES[2]))


@pytest.mark.slow
@KINDS
def test_padding_compiled(kind: Any) -> None:
    ours, stock, _ = pair(kind())
    torch._dynamo.reset()
    agree(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock, torch.randn(SHAPES[2]))
