"""What is valid is one answer, and PyTorch's: eager, without data, compiled, taken over and accelerated.

A transposed convolution whose output had size 0 gave an empty tensor where PyTorch refuses it, and failed when
compiled; sizes of 0 without a batch or channels, which PyTorch accepts, were refused; the gradients of a plain
convolution with an output_padding, which PyTorch refuses, were computed.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convgrad

TOO_SMALL, NOT_TRANSPOSED = "Output size is too small", "output_padding is not supported for non-transposed"


def random_call(r: random.Random) -> tuple[list[int], list[int], tuple[Any, ...], bool, torch.dtype]:
    """Sizes of input and weight, the operator's arguments, whether there is a bias, and the dtype."""
    d, transposed, groups = r.choice([1, 1, 2, 3]), r.random() < 0.5, r.choice([1, 1, 2])
    first, second = r.choice([0, 1, 2, 2]), r.choice([0, 1, 2, 2])
    weight = [first, second] if transposed else [second, first // groups]

    def each(*values: int) -> list[int]:
        return [r.choice(values) for _ in range(d)]

    extra = each(0, 0, 0, 1) if transposed or r.random() < 0.1 else [0] * d
    arguments = (each(1, 1, 2, 3), each(0, 0, 1, 2), each(1, 1, 2), transposed, extra, groups)
    sizes = [r.choice([0, 1, 1, 2]), first, *each(0, 1, 2, 3)]
    kernel = each(0, *[1, 2, 3] * 5)
    return sizes, weight + kernel, arguments, r.random() < 0.3, r.choice([torch.float32, torch.float64])


def outcome(conv: Callable[..., Tensor], operands: tuple[Tensor | None, ...], arguments: Any, backward: bool) -> Any:
    """The output, with the gradients of its sum, or the error."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in operands]
    try:
        y = conv(*leaves, *arguments)
        gradients = torch.autograd.grad(y, [t for t in leaves if t is not None], torch.ones_like(y)) if backward else ()
    except (RuntimeError, IndexError) as error:
        return error
    return [y.detach(), *gradients]


def agree(found: Any, expected: Any) -> bool:
    if isinstance(found, Exception) or isinstance(expected, Exception):
        return isinstance(found, RuntimeError) and isinstance(expected, RuntimeError)
    return all(a.shape == b.shape and (a.is_meta or torch.equal(a, b)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backward", [False, True])
def test_pytorch_decides(backward: bool) -> None:
    r, seen = random.Random(0), {"valid": 0, "refused": 0}
    for i in range(250):
        sizes, weight_sizes, arguments, has_bias, dtype = random_call(r)
        channels = weight_sizes[1] * arguments[5] if arguments[3] else weight_sizes[0]
        generator = torch.Generator().manual_seed(i)
        shapes = (sizes, weight_sizes, [channels] if has_bias else None)
        operands = tuple(None if s is None else torch.randint(-3, 4, s, generator=generator).to(dtype) for s in shapes)
        expected = outcome(torch.convolution, operands, arguments, backward)
        case = f"{sizes} {weight_sizes} {arguments} {has_bias} {dtype}"
        with convgrad.takeover():
            found = outcome(torch.convolution, operands, arguments, backward)
        assert agree(found, expected) or isinstance(expected, IndexError), case
        meta = tuple(t if t is None else t.to("meta") for t in operands)
        functions = (convgrad.convolution, torch.ops.convgrad.convolution)
        ours = [outcome(f, operands, arguments, backward) for f in functions]
        ours.append(outcome(torch.ops.convgrad.convolution, meta, arguments, backward))
        if isinstance(expected, IndexError):  # PyTorch's accident with empty weights of 2 and 3 dimensions
            expected = ours[0]
        elif not isinstance(expected, Exception) and arguments[3] and 0 in expected[0].shape[2:] and 0 not in sizes[:2]:
            assert all(TOO_SMALL in str(found) for found in ours), case  # accepted by oneDNN's kernels alone
            continue
        assert all(agree(found, expected) for found in ours), f"{case}: {ours}, {expected}"
        seen["refused" if isinstance(expected, Exception) else "valid"] += 1
    assert min(seen.values()) > 30


@pytest.mark.parametrize("d", [1, 2, 3])
def test_an_accelerated_layer_is_refused_as_stock_is(d: int) -> None:
    model = nn.Sequential(getattr(nn, f"ConvTranspose{d}d")(1, 1, 2, stride=2, padding=2))
    x = torch.ones(1, 1, *[2] * d)
    convgrad.accelerate_(model, only_gains=False)
    for call in (model, torch.compile(model, backend="eager")):
        with pytest.raises(RuntimeError, match=TOO_SMALL):
            call(x)


def test_takeover_leaves_to_pytorch_what_onednn_accepts() -> None:
    x, w = torch.ones(2, 1, 2, 2, requires_grad=True), torch.ones(1, 1, 2, 2, requires_grad=True)
    try:
        F.conv_transpose2d(x, w, stride=2, padding=2)
    except RuntimeError:
        pytest.skip("PyTorch computes this without oneDNN here")
    with convgrad.takeover():
        y = F.conv_transpose2d(x, w, stride=2, padding=2)
        assert y.shape == (2, 1, 0, 0)
        assert not any(g.any() for g in torch.autograd.grad(y.sum(), (x, w)))


def test_gradients_of_a_plain_convolution_with_an_output_padding() -> None:
    x, w = torch.ones(1, 1, 4), torch.ones(1, 1, 2)
    form: Any = ([2], [0], [1], False, [1], 1)
    g = torch.ones_like(torch.convolution(x, w, None, *form))
    with pytest.raises(RuntimeError, match=NOT_TRANSPOSED):
        torch.ops.aten.convolution_backward(g, x, w, None, *form, [True, True, False])
    for call in (
        lambda: convgrad.convolution_backward(g, x, w, None, *form),
        lambda: torch.ops.convgrad.convolution_backward(g, x, w, None, *form, [True, True, False]),
        lambda: convgrad.grad_input(x.shape, w, g, *form),
        lambda: convgrad.grad_weight(x, w.shape, g, *form),
        lambda: convgrad.per_sample_norms(x, w.shape, g, *form),
        lambda: convgrad.convolution(x.requires_grad_(), w, None, *form).sum().backward(),
    ):
        with pytest.raises(convgrad.ShapeError, match=NOT_TRANSPOSED):
            call()
