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

#: By the number of dimensions; with a stride of 2 all padding is read.
SHAPES = {1: (2, 6, 12), 2: (2, 6, 11, 8), 3: (2, 6, 4, 11, 8)}
X = SHAPES[2]
PAD = ((3, 1), (0, 1))


class ByModule(nn.Module):
    """As models that came from TensorFlow pad where they stride; ``use`` reads the input and the padded one."""

    def __init__(
        self, use: Callable[[Any, Tensor, Tensor], Any] | None = None, d: int = 2, pad: Any = None,
        conv: Callable[..., nn.Module] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        by = (0, 1, 3, 1, 1, 0)[: 2 * d] if pad is None else pad
        self.use, self.pad, self.flag = use, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)[d - 1](by), False
        conv = conv or (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1]
        self.conv: Any = conv(6, options.pop("channels", 6), 3, **({"stride": 2, "groups": 6} | options))

    def padded(self, x: Tensor) -> Tensor:
        return self.pad(x)

    def forward(self, x: Tensor) -> Any:
        z = self.padded(x)
        return self.conv(z) if self.use is None else self.use(self, x, z)


class ByFunction(ByModule):
    mode, value = "constant", 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.by = self.pad.padding
        del self.pad

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self.by, self.mode, self.value)


class BySizes(ByFunction):
    """As such models pad by a function that needs the sizes."""

    def padded(self, x: Tensor) -> Tensor:
        pad = []
        for n, k, s in zip(x.shape[:-3:-1], self.conv.kernel_size[::-1], self.conv.stride[::-1], strict=True):
            more = max((math.ceil(n / s) - 1) * s + k - int(n), 0)
            pad += [more // 2, more - more // 2]
        return nn.functional.pad(x, pad, "constant", 0.0) if max(pad) > 0 else x


class Same(nn.Conv2d):
    """As `timm` has it, with calls of functions."""

    value = 0.0

    def forward(self, input: Tensor) -> Tensor:
        x = F.pad(input, (0, 1, 3, 1), value=self.value)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, dilation=1, groups=self.groups)


class Causal(nn.Conv1d):
    """As it is often written."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.pad(input, (2, 0)))


class PaddedWeight(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, F.pad(self.weight, (1, 1)), self.bias, 1, (1, 2), 1, self.groups)


class Inherits(nn.Conv2d):
    def __init__(self, channels: int, *args: Any, **options: Any) -> None:
        super().__init__(channels, *args, bias=False, **options)


class Shifted(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


class ChangedLater(nn.Module):
    """The input of a block that pads is changed in place, behind the block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ByFunction(pad=(1, 1, 1, 1), stride=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        x[:, 0] = 0
        x += y
        return x


class Behind(nn.Module):
    """A module that gets the result of a normalization and its activation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        conv: Any = next(m for m in inner.modules() if hasattr(m, "in_channels"))
        self.norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(conv.kernel_size) - 1](conv.in_channels)

    def forward(self, x: Tensor) -> Any:
        return self.inner(F.silu(self.norm(x)))


def pair(inner: nn.Module) -> tuple[Any, Any, Any]:
    return paired(Behind(inner))


def with_attributes(model: Any, **values: Any) -> Any:
    vars(model).update(values)
    return model


def of_kernels(model: nn.Module, x: Tensor) -> set[tuple[tuple[int, int], ...]]:
    """The padding that the kernels which compute the second of two steps are given."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    with convgrad.use_backend("native"):
        model(x).sum().backward()
        with observing(lambda event: seen.add(event.problem.padding)):
            model(x).sum().backward()
    return seen


#: What is joined, and the padding that the kernels are given.
JOINED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "1-d": (lambda: ByModule(d=1), ((0, 1),)),
    "2-d": (ByModule, PAD),
    "3-d": (lambda: ByModule(d=3), ((1, 1), *PAD)),
    "more padding": (lambda: ByModule(padding=(0, 2)), ((3, 1), (2, 3))),
    "valid": (lambda: ByModule(padding="valid"), PAD),
    "same": (lambda: ByModule(padding="same", stride=1), ((4, 2), (1, 2))),
    "a class of the user's": (lambda: ByModule(conv=Inherits), PAD),
    "sequential": (lambda: nn.Sequential(*ByModule().children()), PAD),
    "a function": (ByFunction, PAD),
    "a function, 1-d": (lambda: ByFunction(d=1), ((0, 1),)),
    "a function, 3-d": (lambda: ByFunction(d=3), ((1, 1), *PAD)),
    "a function that needs sizes": (BySizes, ((1, 1), (0, 1))),
    "in a class with functions": (lambda: Same(6, 6, 3, 2, padding=(0, 2), groups=6), ((3, 1), (2, 3))),
    "same padding in a class with functions": (lambda: Same(6, 6, 3, padding="same", groups=6), ((4, 2), (1, 2))),
    "in a causal class": (lambda: Causal(6, 6, 3, groups=6), ((2, 0),)),
    "some dimensions": (lambda: ByModule(d=1, conv=nn.Conv2d), ((0, 0), (0, 1))),
    "some dimensions by a function": (lambda: ByFunction(pad=(3, 0)), ((0, 0), (3, 0))),
}


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
    x = torch.randn(X)
    for training in (False, False, True):
        for model in (ours, stock):
            model.train(training)
        agree(ours, stock, x)
    assert of_kernels(ours, x) == {PAD}


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


@pytest.mark.parametrize("blocks", [1, 2])
def test_padding_behind_another_convolution_of_the_same_forward(blocks: int) -> None:
    ours, stock, _ = paired(OneForward() if blocks == 1 else OneForward(OneForward()))
    x, strided = torch.randn(2, 6, 12, 12), []

    def note(event: Any) -> None:
        if event.problem.stride == (2, 2) and event.outputs == ("forward",):
            strided.append(event.problem.padding)

    for _ in range(2):
        strided.clear()
        with convgrad.use_backend("native"), observing(note):
            agree(ours, stock, x)
        assert strided == [((0, 1), (0, 1))] * blocks


kept: list[Tensor] = []
#: What else reads the input x and the padded input z, beside ``m.conv(z)`` or in its place.
USES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "used twice": lambda m, x, z: m.conv(z) + z.mean(),
    "the input, too": lambda m, x, z: m.conv(z) + m.conv(x).mean(),
    "kept elsewhere": lambda m, x, z: (kept.append(z), m.conv(z), kept.clear())[1],
    "the input changes before": lambda m, x, z: (x.zero_(), m.conv(z) + x.mean())[1],
    "the input changes after": lambda m, x, z: m.conv(z).mean() + x.relu_(),
    "another function": lambda m, x, z: torch.neg(z),
    "padded twice": lambda m, x, z: m.conv(F.pad(z, (1, 1))),
}
#: Whole modules that read more or less than the padded input, or pad otherwise.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "another module has the padding, too": lambda: nn.Sequential(
        pad := nn.ZeroPad2d(1), nn.Conv2d(6, 6, 3), nn.Sequential(pad, nn.MaxPool2d(3))
    ),
    "nothing, and an addition in place": lambda: ByModule(
        lambda m, x, z: x.add_(m.conv(z)), pad=(0, 0, 0, 0), stride=1, padding=1, groups=1
    ),
    "a crop": lambda: ByModule(pad=(1, -1, 1, 1)),
    "a function that crops": lambda: ByFunction(pad=(1, -1, 1, 1)),
    "a forward of the user's": lambda: ByModule(conv=Shifted),
    "another padding mode": lambda: ByModule(padding=1, padding_mode="reflect"),
    "a request": lambda: ByModule(conv=functools.partial(convgrad.nn.Conv2d, backend="native")),
    "a function that pads with something else": lambda: with_attributes(ByFunction(), mode="reflect"),
    "an input that is changed later": ChangedLater,
    "a padded weight": lambda: PaddedWeight(6, 6, 3, groups=6),
    "other dimensions": lambda: ByFunction(d=1, pad=(1, 0, 0, 0), channels=6, groups=2),
}
RIGHT = MODULES | {
    f"{kind.__name__}, {why}": functools.partial(kind, use)
    for kind in (ByModule, ByFunction)
    for why, use in USES.items()
}


@pytest.mark.parametrize("backend", ["native", None])
@pytest.mark.parametrize("why", RIGHT)
def test_padding_is_right(why: str, backend: str | None) -> None:
    """Also where the input is changed in place, before or after the convolution has read it."""
    ours, stock, _ = pair(RIGHT[why]())
    x = torch.randn((2, 6, 11) if why == "other dimensions" else X)
    for _ in range(3):
        with convgrad.use_backend(backend) if backend else nullcontext():
            agree(ours, stock, x)


def test_second_derivatives_where_the_input_was_changed() -> None:
    ours, stock, _ = pair(ChangedLater().double())
    x, results = torch.randn(2, 6, 5, 4, dtype=torch.float64), []
    for model in (ours.double(), stock.double()):
        for _ in range(2):
            a = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(model(a).square().sum(), a, create_graph=True)
            found = torch.autograd.grad(g.square().sum(), (a, *model.parameters()))
        results.append(found)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", [ByModule, ByFunction])
def test_what_reads_and_pads_may_change_later(kind: Any) -> None:
    """The reader by a flag, the padding of the convolution, its forward, and what is padded with."""
    changes: list[Callable[[Any], None]] = [
        lambda m: setattr(m, "flag", True),
        lambda m: setattr(m.conv, "padding_mode", "circular"),
        lambda m: setattr(m.conv, "_conv_forward", lambda x, w, b: F.conv2d(x.relu(), w, b, groups=6)),
        lambda m: setattr(m if kind is ByFunction else m.pad, "value", 2.0),
        lambda m: setattr(m, "mode", "replicate"),
    ]
    x = torch.randn(X)
    for change in changes:
        ours, stock, _ = pair(kind(lambda m, x, z: (torch.neg if m.flag else m.conv)(z), padding=1))
        agree(ours, stock, x)
        for model in (ours, stock):
            change(model.inner)
        agree(ours, stock, x)


def test_a_class_with_functions_that_pads_with_another_value() -> None:
    ours, stock, _ = pair(with_attributes(Same(6, 6, 3, groups=6), value=1.0))
    agree(ours, stock, torch.randn(X))


def test_layers_see_no_mode_of_functions() -> None:
    """A `TorchFunctionMode` would slow down all of them, and keep batch normalizations to PyTorch."""
    seen: list[Any] = []

    def use(m: Any, x: Tensor, z: Tensor) -> Tensor:
        y = m.conv(z)
        seen.append(_get_current_function_mode())
        return y

    ours, stock, _ = pair(ByFunction(use))
    agree(ours, stock, torch.randn(X))
    assert seen == [None] * 2
    ours.inner.conv.weight = None
    with pytest.raises(Exception, match="weight"):
        ours(torch.randn(X))
    assert _get_current_function_mode() is None


@pytest.mark.parametrize("kind", [ByModule, ByFunction, lambda groups, channels: Same(6, channels, 3, groups=groups)])
def test_padding_stays_a_copy_where_pytorch_computes(kind: Any) -> None:
    """PyTorch's call takes no such padding; it would be copied in the backward, too."""
    ours, stock, _ = pair(kind(groups=1, channels=32))
    seen, x = [], torch.randn(X)
    with observing(lambda event: seen.append(event.problem.padding)), convgrad.use_backend("aten"):
        agree(ours, stock, x)
    assert set(seen) == {((0, 0), (0, 0))}


@pytest.mark.parametrize("scheme", [convgrad.nn.Binary(), convgrad.nn.Xnor(), convgrad.nn.ShiftQ()], ids=repr)
def test_a_convolution_that_is_converted_later(scheme: Any) -> None:
    """It quantizes the input, so it reads the padded one."""
    ours, stock, _ = pair(ByModule(groups=1))
    for model in (ours, stock):
        convgrad.nn.convert_(model, scheme)
    agree(ours, stock, torch.randn(X))


@pytest.mark.parametrize(
    ("kind", "which"),
    [(ByModule, "pad"), (ByModule, "conv"), (ByFunction, "conv"), (ByModule, "all"), (ByFunction, "all")],
)
def test_a_hook_sees_padding_as_it_was(kind: Any, which: str) -> None:
    ours, stock, _ = pair(kind())
    seen: list[Any] = []

    def hook(module: Any, given: Any, y: Tensor) -> None:
        seen.append((given[0].shape, y.shape, which != "all" or type(given[0])))

    if which == "all":
        with nn.modules.module.register_module_forward_hook(hook):
            agree(ours, stock, torch.randn(X))
    else:
        for model in (ours, stock):
            getattr(model.inner, which).register_forward_hook(hook)
        agree(ours, stock, torch.randn(X))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] != []


KINDS = pytest.mark.parametrize("kind", [ByModule, BySizes, lambda: Same(6, 6, 3, 2, groups=6)])


@KINDS
def test_padding_under_autocast_and_transforms(kind: Any) -> None:
    ours, stock, _ = pair(kind())
    x = torch.randn(X)
    for model in (ours, stock):
        model.norm.track_running_stats, model.norm.running_mean, model.norm.running_var = False, None, None
    with torch.autocast("cpu", torch.bfloat16):
        agree(ours, stock, x, rtol=0.1, atol=0.5)
    for call in (
        lambda m: torch.func.jvp(m, (x,), (x,)),
        lambda m: torch.func.vmap(m)(x[None]),
        lambda m: m(x.permute(0, 1, 3, 2)),
        lambda m: m(x.contiguous(memory_format=torch.channels_last)),
        lambda m: checkpoint(m, x, use_reentrant=False),
    ):
        torch.testing.assert_close(call(ours), call(stock), rtol=1e-4, atol=1e-5)
    x = x.double().requires_grad_()
    assert torch.autograd.gradgradcheck(ours.double(), x[:1, :, :5, :4])


@KINDS
def test_copies_and_pickles_of_padding(kind: Any) -> None:
    ours, stock, _ = pair(kind())
    for twin in copies(ours):
        assert of_kernels(copy.deepcopy(twin), torch.randn(X)) != {((0, 0), (0, 0))}
        agree(twin, copy.deepcopy(stock), torch.randn(X))


@pytest.mark.slow
@KINDS
def test_padding_compiled(kind: Any) -> None:
    ours, stock, _ = pair(kind())
    torch._dynamo.reset()
    agree(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock, torch.randn(X))
