"""Derivatives of every order from every operator, and only the work that they need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F

import convgrad
from convgrad import engine
from convgrad.backends import ReferenceBackend
from tests.check.broken import around

from .forms import EVERY, SOME, Case, case, identify

ops = torch.ops.convgrad
PLAIN: Any = ([1], [0], [1], False, [0], 1)


def functions(c: Case) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Each operator as a function of the tensors that it is differentiated by."""
    x, w, b = (t.clone().requires_grad_() for t in (c.input, c.weight, c.bias))
    g = torch.randn_like(c.output).requires_grad_()
    a = c.arguments
    return {
        "convolution": (lambda x, w, b: ops.convolution(x, w, b, *a), (x, w, b)),
        "convolution_backward": (
            lambda g, x, w: ops.convolution_backward(g, x, w, [b.shape[0]], *a, [True] * 3),
            (g, x, w),
        ),
        "grad_input": (lambda g, w: ops.grad_input(g, w, x.shape, *a), (g, w)),
        "grad_weight": (lambda g, x: ops.grad_weight(g, x, w.shape, *a), (g, x)),
    }


def check(d: int, transposed: bool, kind: str, geometry: str, *, fast_mode: bool) -> None:
    for function, tensors in functions(case(d, transposed, kind, geometry)).values():
        assert gradcheck(
            function,
            tensors,
            nondet_tol=0.0,
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
            fast_mode=fast_mode,
        )
        assert gradgradcheck(
            function,
            tensors,
            nondet_tol=0.0,
            check_fwd_over_rev=True,
            check_rev_over_rev=True,
            check_batched_grad=True,
            fast_mode=fast_mode,
        )


def cases(forms: tuple[tuple[Any, ...], ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("arguments", forms, ids=lambda e: "-".join(map(identify, e)))


@cases(SOME)
def test_derivatives(arguments: tuple[Any, ...]) -> None:
    """Along random directions: a wrong element of a Jacobian shows in its product with a random vector."""
    check(*arguments, fast_mode=True)


@pytest.mark.slow
@cases(EVERY)
def test_every_element_of_the_jacobians(arguments: tuple[Any, ...]) -> None:
    check(*arguments, fast_mode=False)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("own", ["convolution", "gradient", "feedback"])
def test_forward_over_forward_mode(own: str, order: int) -> None:
    """PyTorch calls a ``jvp`` with the levels around it switched off: what two operands share was lost until 0.1.0."""
    x, w = torch.randn(1, 2, 5, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)
    moved = [(torch.randn_like(x), torch.randn_like(w)) for _ in range(order)]
    functions: dict[str, Any] = {
        "convolution": lambda x, w: convgrad.conv1d(x * x, w.sin()),
        "gradient": lambda x, w: convgrad.grad_weight(x.sin(), w.shape, F.conv1d(x, w)),
        "feedback": lambda x, w: convgrad.feedback_convolution(x * x, w.sin(), w),
    }

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        if own == "gradient":
            return torch.func.vjp(lambda w: F.conv1d(x.sin(), w), w)[1](F.conv1d(x, w))[0]
        return F.conv1d(x * x, w.sin())

    def derivative(f: Any) -> Tensor:
        for tangents in moved:
            f = partial(lambda f, tangents, *at: torch.func.jvp(f, at, tangents)[1], f, tangents)
        return f(x, w)

    torch.testing.assert_close(derivative(functions[own]), derivative(theirs))


def test_complex_derivatives_conjugate() -> None:
    x = torch.randn(2, 2, 5, dtype=torch.complex128, requires_grad=True)
    w = torch.randn(4, 1, 3, dtype=torch.complex128, requires_grad=True)
    b = torch.randn(4, dtype=torch.complex128, requires_grad=True)

    def ours(*t: Tensor) -> Tensor:
        return convgrad.conv1d(*t, stride=2, padding=1, groups=2)

    assert gradcheck(ours, (x, w, b), check_forward_ad=True)
    assert gradgradcheck(ours, (x, w, b))
    y = torch.nn.functional.conv1d(x, w, b, stride=2, padding=1, groups=2)
    g = torch.randn_like(y)
    want = torch.autograd.grad(y, (x, w), g)
    gi = convgrad.conv1d_input(x.shape, w.detach(), g, stride=2, padding=1, groups=2)
    gw = convgrad.conv1d_weight(x.detach(), w.shape, g, stride=2, padding=1, groups=2)
    torch.testing.assert_close((gi, gw), want)
    joint = convgrad.convolution_backward(g, x.detach(), w.detach(), None, 2, 1, groups=2)
    torch.testing.assert_close(joint[:2], want)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("convolve", ["conv1d", "conv_transpose1d"])
def test_complex_numbers_of_32_bits(convolve: str) -> None:
    parts = [torch.randint(-3, 4, size).float() for size in [(2, 2, 5), (2, 2, 3), (2,)] * 2]
    pairs = zip(parts[:3], parts[3:], strict=True)
    x, w, b = (torch.complex(*pair).to(torch.complex32).requires_grad_() for pair in pairs)
    y = getattr(convgrad, convolve)(x, w, b)
    g = torch.complex(*torch.randint(-3, 4, (2, *y.shape)).float()).to(torch.complex32)
    wide = [t.detach().to(torch.complex64).requires_grad_() for t in (x, w, b)]
    want = torch.autograd.grad(getattr(torch.nn.functional, convolve)(*wide), wide, g.to(torch.complex64))
    got = torch.autograd.grad(y, (x, w, b), g)
    assert all(torch.equal(a.to(torch.complex64), c) for a, c in zip(got, want, strict=True))


def test_what_a_kernel_returns_as_a_view_may_be_changed_in_place() -> None:
    def cropped(kernel: Any, *_: Any) -> Any:
        return lambda *args: torch.nn.functional.pad(kernel(*args), (0, 1))[..., :-1]

    engine.register(around(ReferenceBackend, cropped, name="cropped"))
    x, w, _ = operands()
    want = torch.autograd.grad(torch.conv2d(x, w).relu_().sum(), (x, w))
    with convgrad.use_backend(forward="cropped"):
        outputs = convgrad.conv2d(x, w), ops.convolution(x, w, None, *PLAIN)
    for y in outputs:
        assert y.stride()[2] == 5
        torch.testing.assert_close(torch.autograd.grad(y.relu_().sum(), (x, w)), want)


# ---- only what is needed -------------------------------------------------------------------------


@pytest.fixture
def asked() -> list[str]:
    """What the backend "counting", which is the reference, was asked for."""
    calls: list[str] = []

    def counting(kernel: Any, problem: Any, outputs: Any) -> Any:
        return lambda *operands: calls.append(outputs[0]) or kernel(*operands)

    engine.register(around(ReferenceBackend, counting, name="counting"))
    return calls


def operands(groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, 4, 6, 6, requires_grad=True),
        torch.randn(4, 4 // groups, 3, 3, requires_grad=True),
        torch.randn(4, requires_grad=True),
    )


def test_each_gradient_is_one_call(asked: list[str]) -> None:
    x, w, b = operands()
    with convgrad.use_backend("counting"):
        y = convgrad.conv2d(x, w, b)
    assert asked == ["forward"]
    asked.clear()
    y.sum().backward()  # the request of the forward holds
    assert sorted(asked) == ["grad_input", "grad_weight"]


@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("of", [convgrad.conv2d, lambda x, w, b: convgrad.feedback_convolution(x, w, w, b)])
def test_forward_mode_contracts_only_what_moves(asked: list[str], moving: tuple[int, ...], of: Any) -> None:
    """A zero in the place of a tangent would cost a contraction, and make NaN of an infinite operand."""
    fixed = [t.detach() for t in operands()]
    fixed[0][0, 0, 0, 0] = fixed[1][0, 0, 0, 0] = torch.inf

    def function(*moved: Tensor) -> Tensor:
        return of(*[moved[moving.index(i)] if i in moving else t for i, t in enumerate(fixed)])

    primals = tuple(fixed[i] for i in moving)
    with convgrad.use_backend("counting"):
        _, tangent = torch.func.jvp(function, primals, tuple(map(torch.zeros_like, primals)))
    assert len(asked) == 1 + len({0, 1} & {*moving})
    assert tangent.isnan().any() == bool({0, 1} & {*moving})


@pytest.mark.parametrize("of", [convgrad.conv2d, lambda *tensors: ops.convolution(*tensors, *PLAIN)])
@pytest.mark.parametrize("wanted", [("input",), ("weight",), ("bias",), ("input", "bias"), ("weight", "bias")])
def test_only_the_gradients_asked_for(asked: list[str], wanted: tuple[str, ...], of: Any) -> None:
    tensors = dict(zip(("input", "weight", "bias"), operands(), strict=True))
    with convgrad.use_backend("counting"):
        y = of(*tensors.values())
    asked.clear()
    grads = torch.autograd.grad(y.sum(), [tensors[n] for n in wanted])
    assert asked == [f"grad_{n}" for n in wanted if n != "bias"]
    want = torch.autograd.grad(torch.nn.functional.conv2d(*tensors.values()).sum(), [tensors[n] for n in wanted])
    torch.testing.assert_close(grads, want)


@pytest.mark.parametrize(
    "mask", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
def test_the_mask_holds_where_the_gradients_are_differentiated(asked: list[str], mask: tuple[bool, ...]) -> None:
    x, w, _ = operands()
    g = torch.randn(2, 4, 4, 4, requires_grad=True)
    with convgrad.use_backend("counting"):
        got = ops.convolution_backward(g, x, w, [4], *PLAIN, mask)
    assert tuple(t is not None for t in got) == mask
    assert asked == [name for name, wanted in zip(("grad_input", "grad_weight"), mask, strict=False) if wanted]


def test_what_is_differentiated_lies_and_is_refused_as_what_is_not() -> None:
    x, w, _ = operands()
    x = x.detach().contiguous(memory_format=torch.channels_last)
    g = torch.randn(2, 4, 4, 4)
    with convgrad.use_backend("reference"):
        plain, recorded = (
            ops.convolution_backward(t, x, w.detach(), [4], *PLAIN, [True] * 3) for t in (g, g.clone().requires_grad_())
        )
    assert [t.stride() for t in recorded] == [t.stride() for t in plain]
    with pytest.raises(convgrad.ShapeError, match=r"expected bias_sizes to be \[4\]"):
        ops.convolution_backward(g, x, w, [5], *PLAIN, [True] * 3)


@pytest.mark.parametrize("frozen", [0, 1])
def test_the_operator_with_a_frozen_operand(frozen: int) -> None:
    x, w, b = (t.detach() for t in operands())
    tensors = x.contiguous(memory_format=torch.channels_last), w, b
    moved = [t.requires_grad_() for i, t in enumerate(tensors) if i != frozen]
    g = torch.randn(2, 4, 4, 4)
    with convgrad.use_backend("reference"):
        got = torch.autograd.grad(ops.convolution(*tensors, *PLAIN), moved, g)
    want = torch.autograd.grad(torch.conv2d(*tensors), moved, g)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, check_stride=True)


@pytest.mark.parametrize("moved", [0, 1])
def test_a_gradient_of_which_one_operand_moves_is_recorded(moved: int) -> None:
    g, w = torch.randn(2, 4, 4, 4), torch.randn(4, 1, 3, 3)
    (g, w)[moved].requires_grad_()
    assert convgrad.grad_input((2, 4, 6, 6), w, g, groups=4).requires_grad


def kept_elements(x: Tensor, w: Tensor) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = convgrad.conv2d(x, w, padding=1, groups=x.shape[1] // w.shape[1])
    y.sum().backward()
    return kept


def test_nothing_is_kept_that_is_not_needed() -> None:
    for channels, groups in ((3, 1), (4, 4)):
        x, w = torch.randn(2, channels, 8, 8), torch.randn(4, channels // groups, 3, 3)
        large = torch.randn(2, channels, 512, 512, requires_grad=True)
        assert kept_elements(large, w) == [w.shape]  # frozen weight: no input
    # PyTorch's autograd keeps a weight that is trained, although without a gradient for the input nothing reads it.
    assert kept_elements(x, w.clone().requires_grad_()) in ([x.shape], [x.shape, w.shape])


# ---- forward mode --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "aten", "im2col", "reference"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_batch_of_gradients_at_once(backend: str | None, groups: int) -> None:
    # PyTorch's older vmap stands behind it: to Python such a gradient is a plain tensor, but it has no memory.
    x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(4, 4 // groups, 3, 3, requires_grad=True)
    with convgrad.use_backend(backend):
        y = convgrad.conv2d(x, w, groups=groups)
    many = torch.randn(3, *y.shape)
    got = torch.autograd.grad(y, (x, w), many, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(y, (x, w), one, retain_graph=True) for one in many]
    for a, b in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of", [convgrad.conv2d, lambda x, w, b: convgrad.feedback_convolution(x, w, w, b)])
def test_no_gradient_comes_back(of: Any) -> None:
    """Under forward mode, in which no zeros take the place of a gradient that is none."""

    class Blocked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            return None

    tensors = operands()
    with forward_ad.dual_level():
        y: Any = Blocked.apply(of(*tensors))
        assert torch.autograd.grad(y.sum(), tensors, allow_unused=True) == (None,) * 3


def test_vmap_of_a_backward_pass_of_what_came_before_it() -> None:
    x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(4, 1, 3, 3, requires_grad=True)
    many = torch.randn(3, 2, 4, 4, 4)
    got, want = (
        torch.func.vmap(lambda g, y=y: torch.autograd.grad(y, (x, w), g, retain_graph=True))(many)
        for y in (convgrad.conv2d(x, w, groups=4), torch.conv2d(x, w, groups=4))
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
