"""A stride that no index ever multiplies must not matter: a dimension of size 1 may have any.

PyTorch 2.13 on the CPU (oneDNN) returns wrong numbers, silently, for a grouped convolution whose channels_last weight
has an odd stride in a dimension of size 1. Found by the check's property "layouts".
"""

from itertools import product

import pytest
import torch

import convgrad
from convgrad._compat import channels_last_of, usual_strides
from convgrad.backends.aten_defects import tidy


def odd(t: torch.Tensor) -> torch.Tensor:
    return t.as_strided(t.shape, [123 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


@pytest.mark.parametrize("backend", ["im2col", "reference", "aten"])
@pytest.mark.parametrize("kernel", [(1, 2), (2, 1), (1, 1, 2), (2, 1, 1)], ids=str)
def test_a_channels_last_weight_of_groups(backend: str, kernel: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[len(kernel)]
    input = torch.randint(-3, 4, (2, 4, *(3 for _ in kernel)), generator=generator).float()
    weight = torch.randint(-3, 4, (2, 2, *kernel), generator=generator).float()
    conv = {2: convgrad.conv2d, 3: convgrad.conv3d}[len(kernel)]
    with convgrad.use_backend("reference"):
        expected = conv(input, weight, groups=2)

    strange = odd(weight.contiguous(memory_format=layout))
    assert torch.equal(strange, weight)
    with convgrad.use_backend(backend):
        assert torch.equal(conv(input.contiguous(memory_format=layout), strange, groups=2), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("channels", [(1, 6, 3, 3), (4, 6, 1, 3), (6, 1, 3, 1)], ids=str)
def test_a_channels_last_weight_in_pytorchs_own_kernel(channels: tuple[int, ...], transposed: bool) -> None:
    """PyTorch 2.13 raises "grad_weight must be contiguous" in float64."""
    last = torch.channels_last
    weight = torch.randn(channels, dtype=torch.float64).contiguous(memory_format=last)
    strange = odd(weight)
    input = torch.randn(2, channels[not transposed], 9, 9, dtype=torch.float64).contiguous(memory_format=last)
    conv = (torch.conv2d, torch.conv_transpose2d)[transposed], (convgrad.conv2d, convgrad.conv_transpose2d)[transposed]
    grads = []
    for call, w in zip(conv, (weight, strange), strict=True):
        w.requires_grad_()
        grads.append(torch.autograd.grad(call(input, w).square().sum(), w)[0])
    with convgrad.use_backend("aten"):
        grads.append(torch.autograd.grad(conv[1](input, strange).square().sum(), strange)[0])
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


@pytest.mark.parametrize("backend", ["im2col", "aten", None])
@pytest.mark.parametrize("input_too", [False, True], ids=["grad_weight", "both gradients"])
def test_the_batch_stride_of_one_image(backend: str | None, input_too: bool) -> None:
    """PyTorch 2.13's own kernel for grouped float64 in channels_last takes it for the size of an image."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(-3, 4, (8, 5, 6), generator=generator).double()
    input = image.permute(2, 0, 1).unsqueeze(0).requires_grad_(input_too)  # [1, 6, 8, 5], batch stride 6
    weight = torch.randint(-3, 4, (3, 2, 3, 3), generator=generator).double()
    weight = weight.contiguous(memory_format=torch.channels_last).requires_grad_()
    (expected,) = torch.autograd.grad(
        torch.conv2d(input.detach().contiguous(), weight, padding=1, groups=3).square().sum(), weight
    )
    with convgrad.use_backend(backend):
        convgrad.conv2d(input, weight, padding=1, groups=3).square().sum().backward()
    assert torch.equal(weight.grad, expected)


def test_the_batch_stride_of_one_image_in_pytorchs_own_calls() -> None:
    generator = torch.Generator().manual_seed(0)
    input = torch.randint(-3, 4, (8, 5, 96), generator=generator).double().permute(2, 0, 1).unsqueeze(0)
    weight = torch.randint(-3, 4, (48, 32, 3, 3), generator=generator).double()  # groups that no kernel of ours takes
    weight = weight.contiguous(memory_format=torch.channels_last).requires_grad_()
    arguments = ([1, 1], [1, 1], [1, 1], False, [0, 0], 3)
    grad_output = torch.randint(-3, 4, (1, 48, 8, 5), generator=generator).double()
    expected = torch.ops.aten.convolution_backward(
        grad_output, input.contiguous(), weight.detach(), None, *arguments, (False, True, False)
    )[1]
    (found,) = torch.autograd.grad(convgrad.conv2d(input, weight, padding=1, groups=3), weight, grad_output)
    assert torch.equal(found, expected)
    with convgrad.takeover():
        (found,) = torch.autograd.grad(torch.conv2d(input, weight, padding=1, groups=3), weight, grad_output)
    assert torch.equal(found, expected)
    backward = convgrad.convolution_backward(
        grad_output, input, weight.detach(), None, *arguments, output_mask=(False, True, False)
    )
    assert torch.equal(backward[1], expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("d", [2, 3])
def test_pytorch_reads_such_strides_of_a_weight_only(d: int, transposed: bool) -> None:
    """What `reads_every_stride` rests on: odd strides of the other operands never change what PyTorch returns."""
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[d]
    generator = torch.Generator().manual_seed(0)
    kernels = [(1,) * d, (3,) * d, (1, 2, 1)[:d], (2, 1, 1)[:d]]
    choices = product((1, 2), (1, 3), kernels, (1, 2), (1, 3), (False, True), (False, True), (False, True))
    for batch, size, kernel, per_in, per_out, *layouts in choices:
        if size < max(kernel):
            continue
        groups = 2
        shape = (per_in * groups, per_out, *kernel) if transposed else (per_out * groups, per_in, *kernel)
        sizes = (batch, per_in * groups, *[size] * d), shape
        x, w = (torch.randint(-3, 4, s, generator=generator).float() for s in sizes)
        rest = ([1] * d, [0] * d, [1] * d, transposed, [0] * d, groups)
        go = torch.randint(-3, 4, torch.convolution(x, w, None, *rest).shape, generator=generator).float()
        pairs = zip((x, w, go), layouts, strict=True)
        x, w, go = (t.contiguous(memory_format=last) if turn else t for t, turn in pairs)
        every = [True, True, True]
        doubles = (t.double().contiguous() for t in (go, x, w))
        want = torch.ops.aten.convolution_backward(*doubles, [per_out * groups], *rest, every)
        for a, b in ((odd(go), x), (go, odd(x)), (odd(go), odd(x))):
            got = torch.ops.aten.convolution_backward(a, b, w, [per_out * groups], *rest, every)
            assert all(torch.equal(one.double(), two) for one, two in zip(got, want, strict=True))
        assert torch.equal(torch.convolution(odd(x), w, None, *rest), torch.convolution(x, w, None, *rest))


@pytest.mark.parametrize("shape", [(1, 4, 5), (2, 3, 1, 4), (0, 3, 2, 2), (1, 3, 4, 5), (1, 3, 2, 4, 5)])
@pytest.mark.parametrize("last", [False, True])
def test_usual_strides_are_those_of_a_new_tensor_and_tidy_makes_them(shape: tuple[int, ...], last: bool) -> None:
    layout = channels_last_of(len(shape) - 2) if last and len(shape) > 3 else torch.contiguous_format
    usual = torch.empty(shape, memory_format=layout).stride()
    assert usual_strides(shape, layout is not torch.contiguous_format) == usual
    t = torch.randn(1000).as_strided(shape, (777, *usual[1:]))
    if len(shape) > 3 and shape[0] == 1:
        tidied = tidy(t)
        assert (tidied.stride(), tidied.data_ptr()) == (usual, t.data_ptr())
        assert torch.equal(tidied, t)
        assert tidy(tidied) is tidied


def test_what_is_channels_last_but_for_that_stride_is_copied() -> None:
    t = torch.randn(1000).as_strided((1, 3, 4, 5), (7, 1, 15, 3))
    assert tidy(t).is_contiguous()
    assert torch.equal(tidy(t), t)
