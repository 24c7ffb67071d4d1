"""Modules: torch's constructor, repr and state_dict, and the same numbers."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import convgrad
from tests.copies import copies

NAMES = [f"Conv{t}{d}d" for t in ("", "Transpose") for d in (1, 2, 3)]
MODES = ("zeros", "circular", "reflect", "replicate")


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    ours, theirs = getattr(convgrad.nn, name)(*args, **kwargs), getattr(torch.nn, name)(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [1, "same"])
def test_convolution(d: int, mode: str, padding: Any) -> None:
    ours, theirs = pair(f"Conv{d}d", 4, 6, 3, padding=padding, groups=2, padding_mode=mode)
    x = torch.randn(2, 4, *[6] * d)
    with convgrad.use_backend("aten"):
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x[0]), theirs(x[0]))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours(x).pow(2).sum().backward()
    theirs(x).pow(2).sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        near = 4 * torch.finfo(torch.float32).eps * float(b.grad.abs().max())  # what cancels is off by what is large
        torch.testing.assert_close(a.grad, b.grad, rtol=1.3e-6, atol=max(1e-5, near))


@pytest.mark.parametrize("mode", [*MODES[1:], "constant"])
def test_padding_that_is_changed_where_torch_reads_it(mode: str) -> None:
    """As a causal convolution may; "constant" is no mode that the constructor takes."""
    ours, theirs = pair("Conv2d", 4, 6, 3, padding=1, padding_mode="circular")
    for module in (ours, theirs):
        module.padding_mode, module.padding = mode, (5, 5)  # pyright: ignore[reportArgumentType]
        module._reversed_padding_repeated_twice = [2, 0, 1, 0]  # pyright: ignore[reportArgumentType]
        module.stride = 2  # pyright: ignore[reportArgumentType]
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("d", [1, 2, 3])
def test_transposed(d: int) -> None:
    ours, theirs = pair(f"ConvTranspose{d}d", 4, 6, 3, stride=2, padding=1, groups=2)
    x = torch.randn(2, 4, *[5] * d)
    size = [10] * d
    assert ours(x, output_size=size).shape[2:] == theirs(x, output_size=size).shape[2:] == torch.Size(size)
    torch.testing.assert_close(ours(x, output_size=size), theirs(x, output_size=size))
    with convgrad.use_backend("aten"):
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
        torch.testing.assert_close(ours(x, output_size=size), theirs(x, output_size=size), rtol=0, atol=0)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["misspelt", 3])
def test_a_backend_that_does_not_exist_is_refused_when_the_module_is_made(name: str, backend: Any) -> None:
    with pytest.raises(KeyError, match=f"no backend is called {backend!r}; there are aten, .*im2col"):
        getattr(convgrad.nn, name)(2, 2, 3, backend=backend)


def test_a_backend_that_is_gone_is_refused_when_the_module_is_called() -> None:
    convgrad.register("mine", forward=lambda input, weight, problem: input, verify=False)
    layer = convgrad.nn.Conv2d(2, 2, 3, backend="mine")
    convgrad.unregister("mine")
    with pytest.raises(KeyError, match="no backend is called 'mine'; there are aten"):
        layer(torch.zeros(1, 2, 5, 5))


def test_a_kernel_of_other_dimensions() -> None:
    """torch's constructor takes it, and the layer fails when it is called."""
    with pytest.raises(convgrad.errors.ShapeError, match="kernel_size is an integer or 2 of them, got"):
        convgrad.nn.Conv2d(3, 8, (3, 3, 3))


def test_a_module_may_ask_for_a_backend_and_so_do_its_copies() -> None:
    layer = convgrad.nn.Conv2d(2, 2, 3, backend="im2col")
    x = torch.randn(1, 2, 5, 5)
    for other in (layer, *copies(layer)):
        with convgrad.trace() as t:
            y = other(x)
            y.sum().backward()
        assert {r.backend for r in t.records} == {"im2col"}
        torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize(
    "layer", [convgrad.nn.ConvTranspose1d(2, 2, 3), convgrad.nn.Linear(3, 2), convgrad.nn.BatchNorm1d(2)], ids=repr
)
def test_scripting_is_refused_in_words_and_changes_nothing(layer: torch.nn.Module) -> None:
    """``torch.jit.script`` puts what it compiles in place of a module into the model that it was given."""
    net = torch.nn.Sequential(convgrad.nn.BatchNorm1d(2), layer)
    before = list(net)
    for one in (net, layer):
        with pytest.raises(convgrad.errors.UnsupportedError, match=r"takeover\(\)"):
            torch.jit.script(one)
    assert list(net) == before


@pytest.mark.parametrize("name", NAMES)
def test_constructors_say_their_arguments(name: str) -> None:
    ours, theirs = getattr(convgrad.nn, name), getattr(torch.nn, name)
    with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) missing .*'kernel_size'"):
        ours(3, 4)
    found = inspect.signature(ours).parameters
    ours_alone = ["backend", "layout"] if name.endswith("1d") else ["backend"]
    assert [*found] == [*inspect.signature(theirs).parameters, *ours_alone]
    assert all(found[one].kind is inspect.Parameter.KEYWORD_ONLY for one in ours_alone)
    empty = torch.nn.utils.skip_init(ours, 3, 4, 3)
    assert empty.weight.shape == theirs(3, 4, 3).weight.shape

    class Mine(ours):
        def __init__(self, width: int) -> None:
            super().__init__(width, width, 3, backend="im2col")

    assert [*inspect.signature(Mine).parameters] == ["width"]
    assert Mine(4).backend == "im2col"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [1, "same"])
def test_channels_last_sequences(mode: str, padding: Any) -> None:
    theirs = torch.nn.Conv1d(4, 6, 3, padding=padding, groups=2, padding_mode=mode)
    ours = convgrad.nn.Conv1d(4, 6, 3, padding=padding, groups=2, padding_mode=mode, layout="NLC")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 4)
    for mine in (ours, *copies(ours)):
        torch.testing.assert_close(mine(x), theirs(x.mT).mT)
        torch.testing.assert_close(mine(x[0]), theirs(x[0].mT).mT)
    assert ours(x).is_contiguous()
    assert repr(ours) == repr(theirs)[:-1] + ", layout=NLC)"


def test_channels_last_sequences_transposed() -> None:
    theirs = torch.nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1)
    ours = convgrad.nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, layout="NLC")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 4)
    for size in (None, [13], [14]):
        torch.testing.assert_close(ours(x, output_size=size), theirs(x.mT, output_size=size).mT)
    assert ours(x, output_size=torch.Size([2, 14, 6])).shape == (2, 14, 6)


@pytest.mark.parametrize("name", ["Conv1d", "ConvTranspose1d"])
def test_a_backend_and_a_layout_under_compile(name: str) -> None:
    layer = getattr(convgrad.nn, name)(4, 6, 3, padding=1, backend="im2col", layout="NLC")
    x = torch.randn(2, 7, 4)
    with convgrad.trace() as seen:
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))
    assert {record.backend for record in seen} == {"im2col"}


@pytest.mark.parametrize("name", [name for name in convgrad.nn.__all__ if "Conv" in name and name.endswith("1d")])
def test_every_layer_of_sequences_has_the_layout(name: str) -> None:
    options: Any = {"scale_input": True} if name.startswith("Xnor") else {}
    ours = getattr(convgrad.nn, name)(4, 6, 3, padding=1, groups=2, layout="NLC", **options)
    other = getattr(convgrad.nn, name)(4, 6, 3, padding=1, groups=2, **options)
    other.load_state_dict(ours.state_dict())
    x = torch.randn(2, 7, 4, requires_grad=True)
    got, want = ours(x), other(x.mT).mT
    torch.testing.assert_close(got, want)
    g = torch.randn_like(got)
    torch.testing.assert_close(torch.autograd.grad(got, x, g), torch.autograd.grad(want, x, g))


@pytest.mark.parametrize(
    "layer",
    [
        convgrad.nn.Conv1d(3, 3, 1),
        convgrad.nn.ConvTranspose1d(3, 3, 1),
        convgrad.nn.Linear(5, 5),
        convgrad.nn.BatchNorm1d(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_leaf_of_fx_that_is_given_a_buffer(layer: Any) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)
            self.register_buffer("rows", torch.randn(2, 3, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layer(self.rows)

    net, x = Net(), torch.randn(2, 3, 5)
    graph: Any = torch.fx.symbolic_trace(net)
    assert "call_module" in {node.op for node in graph.graph.nodes}
    with torch.no_grad():
        net.layer.weight.mul_(2)
    assert torch.equal(graph(x), net(x))
