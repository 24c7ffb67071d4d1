"""Padding modes: PyTorch's numbers, in every derivative, whoever differentiates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import convgrad
from convgrad.problem.padding_modes import fold
from convgrad.problem.padding_modes import pad as padded

MODES = ("circular", "reflect", "replicate")
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def pytorchs(x: Tensor, sides: Any, mode: str) -> Tensor:
    return F.pad(x, [n for pair in reversed(sides) for n in pair], mode=mode)


SIDES = [((2, 1),), ((0, 3),), ((1, 2), (3, 0)), ((4, 4), (0, 0)), ((1, 1), (2, 1), (0, 4))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["unbatched", "batched"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sides", SIDES)
def test_circular_is_pytorchs(sides: Any, last: bool, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*batch, 3, *[4] * len(sides)).to(dtype)
    if last and batch and len(sides) > 1:
        x = x.contiguous(memory_format=FORMATS[len(sides)])
    x.requires_grad_()
    got, want = padded(x, sides, "circular"), pytorchs(x, sides, "circular")
    assert torch.equal(got, want)
    assert got.stride()[-1] == x.stride()[-1]
    g = torch.empty_like(got).copy_(torch.randint(-3, 4, got.shape))  # exact, in whatever order they are added
    (a,), (b,) = torch.autograd.grad(got, x, g), torch.autograd.grad(want, x, g)
    assert torch.equal(a, b)
    assert a.stride() == x.stride()
    assert got.grad_fn is not None
    assert "PadOrFold" in type(got.grad_fn).__name__


def test_a_batch_of_gradients_at_once() -> None:
    """PyTorch's older vmap stands behind it: to Python such a gradient is a plain tensor, but it has no memory."""
    x = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    for move in (padded, fold):
        y = move(x, ((1, 2), (1, 1)), "circular")
        many = torch.randn(3, 2, *y.shape[2:], 3).movedim(-1, 2)
        (got,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
        want = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in many]
        torch.testing.assert_close(got, torch.stack(want))


def test_a_volume_without_a_batch_that_lies_like_a_channels_last_image() -> None:
    x, sides = torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last), ((1, 2), (2, 1), (0, 3))
    assert torch.equal(padded(x, sides, "circular"), pytorchs(x, sides, "circular"))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
def test_transforms_and_compilers(mode: str) -> None:
    layer = convgrad.nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode=mode)
    theirs = torch.nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode=mode)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, 6, 5)

    def loss(module: torch.nn.Module) -> Any:
        return vmap(grad(lambda w, x: torch.func.functional_call(module, w, (x,)).square().sum()), (None, 0))

    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    torch.testing.assert_close(loss(layer)(parameters, x), loss(theirs)(parameters, x[:, None]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), theirs(x))
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), theirs(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), theirs(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [3, (0, -1)])
def test_what_pytorch_refuses_or_crops(mode: str, padding: Any) -> None:
    x = torch.randn(1, 2, 3 if mode == "reflect" else 2)
    sides = ((3, 3),) if padding == 3 else (padding,)
    try:
        want = pytorchs(x, sides, mode)
    except (RuntimeError, NotImplementedError) as refusal:
        with pytest.raises(type(refusal), match=r"[Pp]adding"):
            padded(x, sides, mode)
    else:
        assert torch.equal(padded(x, sides, mode), want)
