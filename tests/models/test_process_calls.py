"""Where a taken over call goes: what stays PyTorch's, in which words it is refused, how results lie in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import convgrad
from convgrad.diagnostics import Trace
from convgrad.models import takeover

from .taken_over import OURS, operands


def left(call) -> bool:
    """Whether a call gives under takeover, bit for bit, what it gives without."""
    want = call()
    with Trace() as seen, takeover():
        got = call()
    return torch.equal(got.to_dense() if got.is_mkldnn else got, want.to_dense() if want.is_mkldnn else want) and not [
        r for r in seen if r.backend != "aten"
    ]


def test_meta_and_mkldnn_and_complex_and_integers_stay():
    x, w, _ = operands()
    with takeover():
        assert F.conv2d(x.to("meta"), w.to("meta"), groups=2).shape == (2, 6, 4, 3)
    assert left(lambda: F.conv2d(x.to_mkldnn(), w.to_mkldnn(), groups=2))
    dense = torch.randn(6, 4, 3, 3)
    assert left(lambda: F.conv2d(x.to(torch.complex64), dense.to(torch.complex64)))
    assert left(lambda: F.conv2d(x.long(), w.long(), groups=2))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation", "ignore::DeprecationWarning")
def test_quantized_stays():
    x = torch.quantize_per_tensor(torch.randn(1, 4, 5, 5), 0.1, 64, torch.quint8)
    conv = torch.ao.nn.quantized.Conv2d(4, 4, 3)
    want = conv(x)
    with takeover():
        assert torch.equal(conv(x).dequantize(), want.dequantize())


def test_empty_batch_and_no_bias_sizes_do_not_end_the_process():
    x, w = torch.zeros(0, 3, 4, 4), torch.zeros(2, 3, 3, 3)
    args = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    with takeover():
        grads = torch.ops.aten.convolution_backward(torch.zeros(0, 2, 2, 2), x, w, None, *args, [True, True, True])
    assert [tuple(g.shape) for g in grads] == [(0, 3, 4, 4), (2, 3, 3, 3), (2,)]
    assert not grads[2].any()


def test_a_wrong_call_gets_the_words_of_pytorch():
    x, w = torch.randn(1, 3, 4, 4), torch.randn(2, 4, 3, 3)

    def message() -> str:
        with pytest.raises(RuntimeError) as error:
            F.conv2d(x, w)
        return str(error.value)

    want = message()
    with takeover():
        assert message() == want


def test_padding_of_two_sides_stays_an_error():
    with takeover(), pytest.raises(RuntimeError, match="padding"):
        torch.ops.aten.convolution(
            torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), None, [1], [1, 0, 1, 0], [1], False, [0], 1
        )


def test_a_backend_that_cannot_is_named():
    x, w = torch.ones(1, 1, 5, 5, dtype=torch.int32), torch.ones(1, 1, 3, 3, dtype=torch.int32)
    with takeover(), convgrad.use_backend("aten"), pytest.raises(convgrad.BackendError, match="no integers but int64"):
        F.conv2d(x, w, dilation=2)


# ---- layouts -------------------------------------------------------------------------------------


def strides_that_matter(t):
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]


@settings(max_examples=60)
@given(
    d=st.sampled_from([1, 2, 3]),
    channels=st.sampled_from([(1, 1, 1), (1, 4, 1), (4, 1, 1), (4, 4, 4), (4, 8, 2)]),
    size=st.integers(3, 6),
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
    last=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    groups_first=st.booleans(),
)
def test_results_lie_in_memory_as_pytorchs(d, channels, size, kernel, stride, last, transposed, dtype, groups_first):
    c_in, c_out, groups = channels
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}

    def lay(t, channels_last):
        return t.contiguous(memory_format=formats[d]) if channels_last and d > 1 else t

    x = lay(torch.randn(2, c_in, *(size,) * d, dtype=dtype), last[0])
    w_shape = (c_in, c_out // groups) if transposed else (c_out, c_in // groups)
    w = lay(torch.randn(*w_shape, *(kernel,) * d, dtype=dtype), last[1])
    args = ([stride] * d, [0] * d, [1] * d, transposed, [0] * d, groups)
    y = torch.convolution(x, w, None, *args)
    g = lay(torch.randn(y.shape, dtype=dtype), last[2])
    want = (y, *torch.ops.aten.convolution_backward(g, x, w, [0], *args, [True, True, False])[:2])
    with takeover(), convgrad.use_backend(OURS):
        y = torch.convolution(x, w, None, *args)
        got = (y, *torch.ops.aten.convolution_backward(g, x, w, [0], *args, [True, True, False])[:2])
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert strides_that_matter(ours) == strides_that_matter(theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


# ---- calls that stay PyTorch's in any layout -----------------------------------------------------


class Seen(torch.overrides.TorchFunctionMode):
    """The names of torch's functions that somebody called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_call_of_pytorchs_own_is_the_same_each_time(d, transposed):
    x, w, b = operands(groups=1, d=d, requires_grad=True)
    call = getattr(F, f"conv{'_transpose' if transposed else ''}{d}d")
    w = w.detach().transpose(0, 1).contiguous().requires_grad_() if transposed else w
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(d, torch.contiguous_format)
    ways = [(x, b), (x, None), (x.detach().contiguous(memory_format=last).requires_grad_(), b)]
    want = [call(i, w, c, stride=2, padding=1) for i, c in ways]
    gradients = [torch.autograd.grad(y.square().sum(), (i, w)) for y, (i, _) in zip(want, ways, strict=True)]
    with takeover():
        for _ in range(3):  # planned, then known
            for (i, c), y, g in zip(ways, want, gradients, strict=True):
                got = call(i, w, c, stride=2, padding=1)
                assert torch.equal(got, y)
                assert got.stride() == y.stride()
                found = torch.autograd.grad(got.square().sum(), (i, w))
                assert all(torch.equal(a, e) and a.stride() == e.stride() for a, e in zip(found, g, strict=True))
        with torch.inference_mode():
            assert torch.equal(call(x, w, b, stride=2, padding=1), want[0])
        with Seen() as seen:
            call(x, w, b, stride=2, padding=1)
        assert seen.names == [call.__name__]
        with pytest.raises(RuntimeError, match="same"):
            call(x, w.double(), b, stride=2, padding=1)
        with pytest.raises(RuntimeError, match="bias"):
            call(x, w, torch.ones(5), stride=2, padding=1)
        with Trace() as seen, convgrad.use_backend("im2col"):
            call(x, w, b, stride=2, padding=1)
        assert [r.backend for r in seen] == ["im2col"]


def test_a_kernel_that_is_registered_meanwhile_is_chosen():
    x, w, _ = operands(groups=1)
    with takeover():
        for _ in range(2):
            F.conv2d(x, w)
        convgrad.register(
            "ones", forward=lambda x, w, p: torch.ones(p.output_shape), accepts=lambda p: p.groups == 1, verify=False
        )
        assert torch.equal(F.conv2d(x, w), torch.ones(2, 6, 4, 3))
        convgrad.unregister("ones")
        assert not torch.equal(F.conv2d(x, w), torch.ones(2, 6, 4, 3))


def test_the_backward_of_an_empty_batch():
    x, w = torch.zeros(0, 4, 5, 5, requires_grad=True), torch.ones(4, 1, 3, 3, requires_grad=True)
    with takeover():
        F.conv_transpose2d(x, w, None, 1, 1, 1, 4).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()
