"""What can be registered as a backend, and what is refused."""

from __future__ import annotations

import ctypes
import subprocess
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import CheckError, ConvProblem
from convgrad.backends import Backend
from convgrad.testing import check_problem

from .functions import WIDE, accepts, depthwise, forward, grad_input, grad_weight, operands, passed

pytestmark = pytest.mark.usefixtures("brief_search")


def test_decorator_of_a_function() -> None:
    @convgrad.register("mine", accepts=accepts, dtypes=WIDE, verify=False)
    def mine(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        return forward(input, weight, p)

    assert mine.__name__ == "mine"
    assert convgrad.list_backends()["mine"].passes == ("forward",)


def test_decorator_of_a_class() -> None:
    @convgrad.register("mine", accepts=accepts, dtypes=WIDE, verify=False)
    class Mine:
        forward = staticmethod(forward)
        grad_weight = staticmethod(grad_weight)
        forward2 = staticmethod(forward)  # a helper, beside the pass that its name is near to

    assert isinstance(Mine, type)
    assert convgrad.list_backends()["mine"].passes == ("forward", "grad_weight")


def test_an_operator_of_torch_library() -> None:
    @torch.library.custom_op("convgrad_test::conv", mutates_args=())
    def op(input: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
        return F.conv2d(input, weight, None, stride, padding)

    def dense(p: ConvProblem) -> bool:
        return accepts(p) and p.groups == 1 and p.dilation == (1, 1)

    args = ("input", "weight", "stride", "padding")
    options: dict[str, Any] = {"args": args, "accepts": dense, "dtypes": WIDE}
    x, w = torch.randn(1, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3)
    for function in (op, torch.ops.convgrad_test.conv, torch.ops.convgrad_test.conv.default):
        convgrad.register("library", forward=function, verify=False, **options)
        y = convgrad.conv2d(x, w)
        assert torch.equal(y, F.conv2d(x, w))
        y.sum().backward()
    # The first call has loaded the compiler: the child of the check need not.
    assert passed(convgrad.register("library", forward=op, seconds=0.2, **options))


def test_a_builtin() -> None:
    arguments = ("input", "weight", None, "stride", "padding", "dilation", "groups")
    assert passed(
        convgrad.register("builtin", forward=torch.conv2d, args=arguments, accepts=accepts, dtypes=WIDE, seconds=0.2)
    )


def test_a_kernel_in_numpy() -> None:
    def convolution(input: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
        windows = np.lib.stride_tricks.sliding_window_view(input.numpy(), weight.shape[2:], (2, 3))  # pyright: ignore[reportCallIssue, reportArgumentType]
        strided = windows[:, :, :: stride[0], :: stride[1]]
        return torch.from_numpy(np.einsum("ncyxij,ocij->noyx", strided, weight.numpy()))

    def plain(p: ConvProblem) -> bool:
        return accepts(p) and p.groups == 1 and p.dilation == (1, 1) and p.padding == ((0, 0), (0, 0))

    args = ("input", "weight", "stride")
    assert passed(convgrad.register("numpy", forward=convolution, args=args, accepts=plain, dtypes=WIDE, seconds=0.2))


def test_a_kernel_in_a_library_of_c(tmp_path: Path) -> None:
    source, library = tmp_path / "scale.c", tmp_path / "scale.so"
    source.write_text("void scale(const float *x, const float *w, float *y, long n, long c, long length) {"
                      "for (long i = 0; i < n * c * length; i++) y[i] = x[i] * w[i / length % c]; }")  # fmt: skip
    if subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=False).returncode:
        pytest.skip("there is no compiler")
    scale = ctypes.CDLL(str(library)).scale

    def depthwise_pointwise(input: Tensor, weight: Tensor, out: Tensor) -> None:
        tensors = [ctypes.c_void_p(t.data_ptr()) for t in (input, weight, out)]
        scale(*tensors, *[ctypes.c_long(n) for n in (*input.shape[:2], out[0, 0].numel())])

    def scaling(p: ConvProblem) -> bool:
        return p.depthwise and p.in_channels == p.out_channels and p.matrix_product

    options: dict[str, Any] = {"dtypes": torch.float32, "layouts": "contiguous", "seconds": 0.2}
    args = ("input", "weight", "out")
    assert passed(convgrad.register("c", forward=depthwise_pointwise, args=args, accepts=scaling, **options))


def test_the_forward_of_an_autograd_function() -> None:
    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
            ctx.save_for_backward(input, weight)
            return forward(input, weight, p)

    assert passed(convgrad.register("function", forward=Convolution.apply, accepts=accepts, dtypes=WIDE, seconds=0.2))


@pytest.mark.parametrize("kept", ["contiguous", ("contiguous", "channels_last")])
def test_it_writes_into_a_tensor_that_it_is_given(kept: Any) -> None:
    """``out`` lies as the function takes its operands; it may return it, or nothing."""

    def write(input: Tensor, weight: Tensor, p: ConvProblem, out: Tensor) -> None:
        layout = p.memory_format if len(kept) == 2 else torch.contiguous_format
        assert out.is_contiguous(memory_format=layout)
        out.copy_(forward(input, weight, p))

    args = ("input", "weight", "problem", "out")
    convgrad.register("mine", forward=write, args=args, accepts=accepts, layouts=kept, dtypes=WIDE, verify=False)
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for layout in (torch.contiguous_format, torch.channels_last):
        y = convgrad.conv2d(x.to(memory_format=layout), w)
        torch.testing.assert_close(y, F.conv2d(x, w))
        assert y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", ["strided", "any"])
def test_any_strides(layout: Any) -> None:
    assert passed(convgrad.register("mine", forward=forward, accepts=accepts, layouts=layout, dtypes=WIDE, seconds=0.3))


def test_a_function_may_allocate_what_it_needs() -> None:
    """It cannot declare a workspace. README's kernel was verified, and then failed `convgrad check -b mine`."""

    def windows(input: Tensor, weight: Tensor) -> Tensor:
        return (F.pad(input, [2] * 4).unfold(2, 5, 1).unfold(3, 5, 1) * weight[:, 0, None, None]).sum((-2, -1))

    convgrad.register("mine", forward=windows, args=("input", "weight"), accepts=lambda p: p.depthwise, verify=False)
    results = check_problem("mine", "g16mb1ic16ih14oc16oh14kh5sh1ph2dh0", "forward")
    assert {r.status for r in results} == {"passed", "skipped"}


class Own(Backend):
    """Both gradients in one sweep, with scratch memory; no gradient alone."""

    passes = ("forward",)
    sweeps = (("grad_input", "grad_weight"),)
    layouts = ("contiguous",)
    scratch: ClassVar[list[int]] = []

    def reasons_against(self, problem: ConvProblem, outputs: Any, device: torch.device) -> list[str]:
        good = accepts(problem) and problem.dtype in WIDE and {*outputs} <= {"forward", "grad_input", "grad_weight"}
        return [] if good else ["it is for images"]

    def workspace(self, problem: ConvProblem, outputs: Any) -> int:
        return 8 * problem.batch

    def bind(self, problem: ConvProblem, outputs: Any) -> Any:
        def both(grad_output: Tensor, input: Tensor, weight: Tensor, workspace: Any = None) -> Any:
            self.scratch.append(workspace.numel())
            pair = grad_input(grad_output, weight, problem), grad_weight(grad_output, input, problem)
            return tuple(t.contiguous(memory_format=problem.memory_format) for t in pair)

        def one(a: Tensor, b: Tensor, bias: Any = None, workspace: Any = None) -> Tensor:
            return forward(a, b, problem).contiguous(memory_format=problem.memory_format)

        return both if len(outputs) > 1 else one


def test_the_padding_modes_of_a_class_are_its_backends() -> None:
    class Circular(Own):
        padding_modes = ("zeros", "circular")

    convgrad.register("own", verify=False)(Circular)
    assert convgrad.list_backends()["own"].padding_modes == Circular.padding_modes
    with pytest.raises(CheckError, match=r"the problem: .* circular"):  # its functions pad with zeros
        convgrad.register("own")(Circular)


@pytest.mark.parametrize("what", [Own, Own()])
def test_a_class_of_ones_own_with_what_it_sweeps(what: Any) -> None:
    assert convgrad.register("own", seconds=0.5)(what) is what
    backend = convgrad.list_backends()["own"]
    assert passed(backend)
    assert backend.sweeps == Own.sweeps
    Own.scratch.clear()
    x, w = operands()
    depthwise(x, w).sum().backward()
    assert Own.scratch == [16]
    with convgrad.use_backend("own"):  # one gradient alone is the engine's
        torch.autograd.grad(depthwise(x, w).sum(), w)
    assert Own.scratch == [16]
    torch.testing.assert_close((x.grad, w.grad), torch.autograd.grad(F.conv2d(x, w, padding=1, groups=8).sum(), (x, w)))


class Contiguous(Own):
    """What it returns lies as its operands do, whatever the problem's layout; the forward's lies in the workspace."""

    layouts = ("contiguous",)

    def workspace(self, problem: ConvProblem, outputs: Any) -> int:
        return prod(problem.output_shape) * problem.dtype.itemsize

    def bind(self, problem: ConvProblem, outputs: Any) -> Any:
        def both(grad_output: Tensor, input: Tensor, weight: Tensor, workspace: Any = None) -> Any:
            return grad_input(grad_output, weight, problem), grad_weight(grad_output, input, problem)

        def one(a: Tensor, b: Tensor, bias: Any = None, workspace: Any = None) -> Tensor:
            return workspace.view(problem.dtype).view(problem.output_shape).copy_(forward(a, b, problem))

        return both if len(outputs) > 1 else one


def test_results_of_a_class_may_lie_in_any_layout_and_in_the_workspace() -> None:
    convgrad.register("own", seconds=0.5)(Contiguous)
    x, w = operands()
    x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    first = depthwise(x, w)
    assert first.is_contiguous(memory_format=torch.channels_last)
    want = first.detach().clone()
    (got,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(F.conv2d(x, w, padding=1, groups=8).sum(), x)[0])
    depthwise(2 * x, w)
    assert torch.equal(first, want)


def test_passes_and_sweeps_of_a_class_may_be_any_sequence() -> None:
    stated: list[dict[str, Any]] = [
        {"passes": "forward", "sweeps": [["grad_input", "grad_weight"]], "layouts": "contiguous"},
        {"passes": ["forward"]},
    ]
    for attributes in stated:
        convgrad.register("own", verify=False)(type("Listed", (Own,), attributes))
        backend = convgrad.list_backends()["own"]
        assert (backend.passes, backend.sweeps, backend.layouts) == (Own.passes, Own.sweeps, Own.layouts)


def test_a_class_that_raises_for_a_problem_does_not_compute_it() -> None:
    class Square(Own):
        def reasons_against(self, problem: ConvProblem, outputs: Any, device: torch.device) -> list[str]:
            return [] if problem.kernel_size[1] == 3 else ["it is for 3x3"]

    convgrad.register("own", verify=False)(Square)
    found = convgrad.list_backends()["own"].reasons_against(
        ConvProblem.parse("ic2iw9oc2kw3"), ("forward",), torch.device("cpu")
    )
    assert found == ["its reasons_against raised IndexError: tuple index out of range"]
    x, w = torch.randn(1, 2, 9), torch.randn(2, 2, 3)
    torch.testing.assert_close(convgrad.conv1d(x, w), F.conv1d(x, w))


def test_a_class_that_returns_something_else() -> None:
    class Shorter(Own):
        def bind(self, problem: ConvProblem, outputs: Any) -> Any:
            return lambda *args: forward(args[0], args[1], problem)[1:] if len(outputs) == 1 else args[0]

    convgrad.register("own", verify=False)(Shorter)
    x, w = operands()
    with pytest.raises(convgrad.BackendError, match=r"forward of 'own' returned \(1, 8, 9, 9\).* was expected"):
        depthwise(x, w)
    problem = ConvProblem.parse("g8mb2ic8ih9oc8kh3ph1")
    bound = convgrad.list_backends()["own"].bind(problem, Own.sweeps[0])
    with pytest.raises(convgrad.BackendError, match="returned Tensor, 2 tensors were expected"):
        bound(*(torch.zeros(s) for s in (problem.output_shape, problem.input_shape, problem.weight_shape)))


def test_a_sweep_runs_without_recording_gradients() -> None:
    class ByAutograd(Own):
        passes = ()

        def bind(self, problem: ConvProblem, outputs: Any) -> Any:
            def both(grad_output: Tensor, input: Tensor, weight: Tensor, workspace: Any = None) -> Any:
                input, weight = input.detach().requires_grad_(), weight.detach().requires_grad_()
                return torch.autograd.grad(forward(input, weight, problem), (input, weight), grad_output)

            return both

    with pytest.raises(CheckError, match="does not require grad"):
        convgrad.register("own")(ByAutograd)


def test_operands_of_a_class_require_no_gradients() -> None:
    """As those of a function, and those that it is checked with; numpy takes no others."""

    class ByNumpy(Own):
        def bind(self, problem: ConvProblem, outputs: Any) -> Any:
            kernel = super().bind(problem, outputs)
            return lambda *args: kernel(*(t if t is None else torch.from_numpy(t.numpy()) for t in args))

    convgrad.register("own", verify=False)(ByNumpy)
    x, w = operands()
    found = torch.autograd.grad(depthwise(x, w).square().sum(), (x, w))
    expected = torch.autograd.grad(F.conv2d(x, w, padding=1, groups=8).square().sum(), (x, w))
    torch.testing.assert_close(found, expected)


def test_a_class_of_ones_own_is_refused() -> None:
    class Half(Backend):
        def bind(self, problem: ConvProblem, outputs: Any) -> Any: ...

    class Wrong(Own):
        def bind(self, problem: ConvProblem, outputs: Any) -> Any:
            kernel = super().bind(problem, outputs)
            return kernel if len(outputs) == 1 else lambda *args: [-t for t in kernel(*args)]

    with pytest.raises(TypeError, match="class Half has no reasons_against, which every Backend has"):
        convgrad.register("own")(Half)
    with pytest.raises(TypeError, match="a Backend states layouts and accepts itself"):
        convgrad.register("own", layouts="strided", accepts=accepts)(Own)
    with pytest.raises(CheckError, match=r"grad_(input|weight) is wrong"):
        convgrad.register("own")(Wrong)
    assert "own" not in convgrad.list_backends()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"passes": ("forwards",)}, "passes of class Bad are among forward, grad_input, grad_weight, got 'forwards'"),
        ({"sweeps": (("grad_weight", "grad_inputs"),)}, "sweeps of class Bad are among .*, got .*'grad_inputs'"),
        ({"sweeps": (("grad_weight", "grad_input"),)}, r"are among \('grad_input', 'grad_weight'\), .*, got"),
        ({"sweeps": ("grad_input", "grad_wieght")}, "sweeps of class Bad are among .*, got .*'grad_input',"),
        ({"passes": (), "sweeps": ()}, "class Bad has neither passes nor sweeps: it computes nothing"),
    ],
)
def test_a_class_that_computes_what_there_is_not_is_refused(stated: dict[str, Any], message: str) -> None:
    bad = type("Bad", (Own,), stated)
    for what in (bad, bad()):
        with pytest.raises(ValueError, match=message):
            convgrad.register("own")(what)


@pytest.mark.parametrize("named", ["g8mb1ic8ih9oc8kh3ph1", ConvProblem.parse("g8mb1ic8ih9oc8kh3ph1")])
def test_one_problem_may_be_named_alone(named: Any) -> None:
    seen = []

    def accepts_one(p: ConvProblem) -> bool:
        seen.append(str(p))
        return p == ConvProblem.parse("g8mb1ic8ih9oc8kh3ph1")

    with pytest.raises(ValueError, match="problems= names g8mb2ic8ih9"):
        convgrad.register("one", forward=forward, accepts=accepts_one, problems="g8mb2ic8ih9oc8kh3ph1")
    convgrad.register("one", forward=forward, accepts=accepts_one, problems=named, seconds=0.2)
    assert "g8mb1ic8ih9oc8oh9kh3sh1ph1dh0" in seen


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "aten"}, ValueError, "'aten' is the name of a backend that comes with the library"),
        ({"name": "all"}, ValueError, "'all' means something else where backends are named"),
        ({"name": "my kernel"}, ValueError, "a backend's name consists of"),
        ({"layouts": ("nhwc",)}, ValueError, "layouts are among"),
        ({"layouts": ()}, ValueError, "layouts are among"),
        ({"layouts": None}, TypeError, "layouts are one or a sequence of them, got None"),
        ({"seconds": 0}, ValueError, "seconds is a positive number"),
        ({"seconds": "1"}, ValueError, "seconds is a positive number"),
        ({"prefer": "no"}, TypeError, "prefer is True or False or 'measured', got 'no'"),
        ({"deterministic": 1}, TypeError, "deterministic is True or False"),
        ({"forward": 3}, TypeError, "forward= takes a function, got 3"),
        ({"args": "input"}, TypeError, "args of forward is a sequence, got the text 'input'"),
        ({"args": {"weight": ()}}, ValueError, "args is for forward, .* there is no 'weight'"),
        ({"accepts": {"foward": accepts}}, ValueError, "accepts is for forward, .* there is no 'foward'"),
        ({"accepts": True}, TypeError, "accepts is a function of the problem, got True; None accepts every problem"),
        ({"accepts": lambda p: p.kernel[0] == 3}, CheckError, r"accepts raised AttributeError: .* times\)"),
        ({"problems": ["nonsense"]}, ValueError, "nonsense"),
        ({"problems": "g8mb2ic8ih9oc8kh3ph1 circular"}, ValueError, "does not accept: it computes padding_mode="),
        ({"problems": ["ic2iw9oc2kw3"]}, ValueError, "problems= names g1.* 'mine' does not accept: its accepts says"),
        ({"dtypes": "float32"}, TypeError, "dtypes takes dtypes such as torch.float32, got 'float32'"),
        ({"devices": ["gpu"]}, ValueError, "devices are types such as 'cpu' and 'cuda', got 'gpu'"),
        ({"devices": "cuda:0"}, ValueError, "got 'cuda:0'"),
        ({"devices": torch.device("cpu")}, ValueError, r"devices are types such as .*, got device\(type='cpu'\)"),
        ({"devices": ()}, ValueError, "devices are one or a sequence of them, got none"),
        ({"dtypes": ()}, ValueError, "dtypes are one or a sequence of them, got none"),
        ({"dtypes": 3}, TypeError, "dtypes are one or a sequence of them, got 3"),
        ({"layouts": "nchw"}, ValueError, r"layouts are among .* got \('nchw',\)"),
    ],
)
def test_arguments_that_make_no_backend(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    before = convgrad.list_backends()
    with pytest.raises(error, match=message):
        convgrad.register(**{"name": "mine", "forward": forward, "accepts": accepts, **arguments})
    assert convgrad.list_backends() == before


def test_a_class_without_a_kernel_and_an_unknown_arithmetic_are_refused() -> None:
    class Misspelt:
        @staticmethod
        def foward(input: Tensor, weight: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="class Misspelt has 'foward', which is no pass: did you mean 'forward'"):
        convgrad.register("misspelt")(Misspelt)

    class Helpers:
        forward_cuda = _forward = staticmethod(forward)
        foward = 3

    with pytest.raises(TypeError, match="class Helpers has no static method forward, grad_input, grad_weight, backw"):
        convgrad.register("misspelt")(Helpers)

    class Bound:
        def forward(self, input: Tensor, weight: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="forward of class Bound must be static"):
        convgrad.register("misspelt")(Bound)
    with pytest.raises(TypeError, match=r"is an autograd\.Function: register its kernels"):
        convgrad.register("misspelt")(torch.autograd.Function)
    with pytest.raises(ValueError, match=r"arithmetic is one of 'direct', .*, got 'winogard'"):
        convgrad.register("winogard", forward=torch.conv2d, arithmetic="winogard")  # pyright: ignore[reportArgumentType]
    assert not {"misspelt", "winogard"} & {*convgrad.list_backends()}


def test_objects_of_one_class_with_other_values_are_other_kernels() -> None:
    """What was measured of one says nothing of the other."""

    def version(tile: int) -> str:
        own: Any = Own()
        own.tile = tile
        convgrad.register("own", verify=False)(own)
        return convgrad.list_backends()["own"].version

    assert version(4) == version(4) != version(8)
