"""A bias is any vector: expanded from one number, every second element of another, a negated view, of no channel.

Kernels that take an address alone read whatever lies behind it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import ConvProblem
from convgrad.engine.registry import backends, reasons_against

CPU = torch.device("cpu")
BIASES = {
    "expanded": lambda: torch.randn(1).expand(6),
    "every second": lambda: torch.randn(12)[::2],
    "backwards in memory": lambda: torch.randn(6, 2).t()[1],
    "negated": lambda: torch.randn(6, dtype=torch.complex64).conj().imag,
}


def usable(transposed: bool) -> list[str]:
    problem = ConvProblem.parse("g6mb2ic6ih7oc6oh7kh3ph1")
    passes = ("grad_input",) if transposed else ("forward",)
    return [n for n, b in backends().items() if not reasons_against(b, problem, passes, CPU)]


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_every_backend_adds_the_bias_that_is_meant(bias, transposed):
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 6, 7, 7), torch.randn(6, 1, 3, 3), bias()

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convgrad.convolution(x, w, b, padding=1, groups=6, transposed=transposed)

    want = call(x.double(), w.double(), b.resolve_neg().double().contiguous())
    torch.testing.assert_close(call(x, w, b).double(), want, rtol=1e-5, atol=1e-5)
    names = usable(transposed)
    assert {"aten", "reference"} <= {*names}
    for name in names:
        with convgrad.use_backend(name):
            torch.testing.assert_close(call(x, w, b).double(), want, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("needs_weight", [False, True])
def test_the_gradient_of_a_bias_without_a_channel_to_be_added_to(needs_input, needs_weight):
    x = torch.randn(2, 0, 5, requires_grad=needs_input)
    w = torch.randn(4, 0, 3, requires_grad=needs_weight)
    b = torch.randn(4, requires_grad=True)
    convgrad.conv1d(x, w, b, groups=2).sum().backward()
    assert torch.equal(b.grad, torch.zeros(4))


@pytest.mark.parametrize("backend", ["reference", "im2col", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_that_cancels_the_sum(backend: str, dtype: torch.dtype, transposed: bool) -> None:
    """Rounded before and after it is added, it had a whole ulp of the sum as its error."""
    generator = torch.Generator().manual_seed(0)
    name = "conv_transpose1d" if transposed else "conv1d"
    for groups in (1, 4):
        x = torch.randn(2, 16, 64, generator=generator).to(dtype)
        w = torch.randn(16, 16 // groups, 5, generator=generator).to(dtype)
        bias = torch.full((16,), -4.0, dtype=dtype)
        exact = getattr(F, name)(x.double(), w.double(), bias.double(), groups=groups)
        try:
            with convgrad.use_backend(backend):
                y = getattr(convgrad, name)(x, w, bias, groups=groups)
        except convgrad.BackendError as error:
            pytest.skip(str(error))
        ulp = exact.abs() * torch.finfo(dtype).eps
        assert ((y.double() - exact).abs() <= ulp.clamp(min=1e-4)).all()  # half an ulp, and what float32 sums lose
