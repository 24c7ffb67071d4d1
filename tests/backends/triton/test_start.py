"""A launch hands Triton its arguments, and the first result of each compiled kernel is looked at."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from convgrad.backends import ReferenceBackend
from convgrad.backends.triton import TritonBackend, first_check, launch
from convgrad.engine import cache
from convgrad.engine.registry import get_backend
from convgrad.problem import OPERANDS, ConvProblem, Output

PROBLEM = ConvProblem.parse("g8ic8oc8mb2ih4iw8kh1kw3ph0pw1")
HALF = PROBLEM.replace(dtype=torch.bfloat16)


class Compiled:
    """What Triton compiled: it computes nothing, and keeps how it was started."""

    n_regs = 100

    def __init__(self, text: str, spills: int, started: list[Any]) -> None:
        self.hash, self.n_spills, self.started = text, spills, started

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.started.append((grid, given))


class Kernel:
    """In the place of a kernel, before it is compiled."""

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = arg_names
        self.compiled: list[dict[str, Any]] = []
        self.started: list[tuple[tuple[int, ...], Any]] = []
        #: Bytes, for each time to come that it is compiled.
        self.spills: list[int] = []
        self.raises: Exception | None = None

    def warmup(self, grid: tuple[int, ...], src: Tensor | None = None, **given: Any) -> Compiled:
        self.compiled.append(given)
        if self.raises is not None:
            raise self.raises
        return Compiled(
            str((given["out"] if src is None else src).dtype), self.spills.pop(0) if self.spills else 0, self.started
        )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel(*launch.correlate.arg_names)
    monkeypatch.setattr(launch, "correlate", found)
    return found


def call(backend: TritonBackend, problem: ConvProblem, pass_: Output = "forward") -> Any:
    operands = [torch.zeros(problem.shape_of(s), dtype=problem.dtype) for s in OPERANDS[pass_]]
    return backend.bind(problem, (pass_,))(*operands)


def on_a_gpu(address: int) -> Any:
    return SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, data_ptr=lambda: address)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[launch.Launch, Kernel]:
    found = Kernel("src", "width", "parts")
    monkeypatch.setattr(launch, "at_once", lambda device, registers, threads: registers + threads)
    return launch.Launch(found, {"width": 5}, {"num_warps": 4}, lambda programs: (programs, 2)), found


PLAIN = {"width": 5, "parts": 1, "num_stages": 1, "num_warps": 4, "enable_fp_fusion": True}
GRID = (100 + 4 * 32, 1, 1)


def test_a_kernel_that_spills_gets_all_registers(launched: tuple[launch.Launch, Kernel]) -> None:
    """At once, and for good: also one that spills with them."""
    launch_, kernel = launched
    kernel.spills = [2, 2, 2]
    for address in (16, 8):
        src = on_a_gpu(address)
        assert launch_.start(src=src, out=src) == (2, "torch.float32")
    assert kernel.compiled == [PLAIN, *[{**PLAIN, "maxnreg": 255}] * 2]
    assert len(kernel.started) == 2


def test_a_kernel_is_compiled_once_for_each_alignment(launched: tuple[launch.Launch, Kernel]) -> None:
    launch_, kernel = launched
    first, second, third = on_a_gpu(32), on_a_gpu(48), on_a_gpu(40)
    assert launch_.start(src=first, out=first) == (2, "torch.float32")
    assert launch_.start(src=second, out=second) == (2, "")
    assert launch_.start(src=third, out=second) == (2, "torch.float32")
    assert launch_.start(src=third, out=third) == (2, "torch.float32")
    assert kernel.started == [(GRID, (t, 5, 2)) for t in (first, second, third, third)]
    assert kernel.compiled == [PLAIN] * 3


def test_programs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are registers and threads for, and no more than a multiprocessor takes."""
    gpu = SimpleNamespace(multi_processor_count=10, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    cuda = torch.device("cuda", 77)
    assert [launch.at_once(cuda, n, 128) for n in (16, 48, 50, 148, 255)] == [160, 100, 90, 30, 20]
    assert launch.at_once(cuda, 255, 512) == 10
    assert launch.at_once(cuda, 32, 32) == 320
    assert launch.at_once(torch.device("xpu", 0), 48, 128) == launch.PROGRAMS


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        ([PROBLEM, PROBLEM.replace(batch=3), PROBLEM, HALF], [PROBLEM, HALF]),
        # Once for each order of magnitude: offsets are larger there.
        ([PROBLEM.replace(batch=n) for n in (2, 4, 64, 80, 3)], [PROBLEM.replace(batch=n) for n in (2, 64)]),
    ],
)
def test_a_kernel_is_checked_once_whatever_the_batch(
    problems: list[ConvProblem], expected: list[ConvProblem], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[ConvProblem] = []
    monkeypatch.setattr(first_check, "fault", lambda problem, *_: checked.append(problem))
    backend = TritonBackend()
    for problem in problems:
        call(backend, problem)
    assert checked == expected
    assert len(kernel.started) == len(problems)


BOTH: tuple[Output, ...] = ("grad_input", "grad_weight", "grad_bias")


@pytest.mark.parametrize("outputs", [("forward",), ("grad_input",), ("grad_weight",), BOTH[:2], BOTH])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.usefixtures("kernel")
def test_a_wrong_first_result_bans_the_backend(
    monkeypatch: pytest.MonkeyPatch, outputs: tuple[Output, ...], layout: torch.memory_format
) -> None:
    """This call and all later ones get PyTorch's result, one warning says so, and choices are made again."""
    monkeypatch.setattr(launch, "add_partials", Kernel(*launch.add_partials.arg_names))
    problem = PROBLEM.replace(memory_format=layout, has_bias=outputs == ("forward",))
    backend, changes = TritonBackend(), []
    monkeypatch.setattr(backend, "changed", lambda: changes.append(1))
    names: Any = OPERANDS[outputs[0]] if len(outputs) == 1 else ("grad_output", "input", "weight")
    operands = [torch.randn(problem.shape_of(s)).contiguous(memory_format=layout) for s in names]
    if problem.has_bias:
        operands.append(torch.randn(8))
    exact = {o: ReferenceBackend().bind(problem, (o,)) for o in outputs if o != "grad_bias"}
    expected = []
    for output in outputs:
        given = dict(zip(names, operands, strict=False))
        if output == "grad_bias":
            expected.append(given["grad_output"].sum((0, 2, 3)))
        else:
            expected.append(exact[output](*[given[s] for s in OPERANDS[output]]))
    if problem.has_bias:
        expected[0] += operands[-1].view(-1, 1, 1)
    for where, name in ((torch, "empty"), (Tensor, "new_empty")):  # memory that holds no right result by chance
        new = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *of, _new=new, **how: _new(*of, **how).fill_(1))
    run = backend.bind(problem, outputs)
    with pytest.warns(RuntimeWarning, match="'triton' is not used on cpu any more: its .* kernel is wrong"):
        first = run(*operands)
    for result in (first, run(*operands), backend.bind(problem, outputs)(*operands)):
        found = result if isinstance(result, tuple) else (result,)
        assert len(found) == len(expected)
        for output, one, other in zip(outputs, found, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert output in ("grad_weight", "grad_bias") or one.is_contiguous(memory_format=layout)
    assert changes == [1]
    assert any("is wrong" in reason for reason in backend.reasons_against(problem, outputs, torch.device("cpu")))


def test_a_ban_empties_the_cache_of_plans(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.generation[0]
    monkeypatch.setattr(first_check, "fault", lambda *_: "its forward kernel is wrong on cpu")
    with pytest.warns(RuntimeWarning, match="is wrong"):
        call(registered := get_backend("triton"), PROBLEM)
    assert cache.generation[0] == before + 1
    registered._banned.clear()
    cache.invalidate()


def test_nothing_is_launched_for_the_first_time_in_a_capture(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be neither compiled nor checked there: PyTorch computes, with a warning."""
    checked: list[int] = []
    captures = [True]
    monkeypatch.setattr(first_check, "fault", lambda *_: checked.append(len(kernel.started)))
    monkeypatch.setattr(launch, "capturing", lambda: captures[0])
    backend = TritonBackend()
    problem = PROBLEM.replace(batch=5)
    x, weight = torch.randn(problem.input_shape), torch.randn(problem.weight_shape)
    run = backend.bind(problem, ("forward",))
    for captures[0] in (True, False, True, False):
        if not kernel.started and captures[0]:
            with pytest.warns(RuntimeWarning, match="call the model once before"):
                result = run(x, weight)
            torch.testing.assert_close(result, torch.conv2d(x, weight, padding=(0, 1), groups=8))
        else:
            run(x, weight)
    assert checked == [1]
    assert len(kernel.started) == 3


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376."),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        AssertionError(""),
    ],
)
def test_a_kernel_that_is_not_compiled_is_not_used(
    error: Exception, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this problem; the call gets PyTorch's result, and one warning says why. It ended the user's step."""
    monkeypatch.setattr(first_check, "fault", lambda *_: None)
    backend, changes, cpu = TritonBackend(), [], torch.device("cpu")
    monkeypatch.setattr(backend, "changed", lambda: changes.append(1))
    problem, kernel.raises = PROBLEM.replace(batch=6), error
    x, weight = torch.randn(problem.input_shape), torch.randn(problem.weight_shape)
    run, expected = backend.bind(problem, ("forward",)), torch.conv2d(x, weight, padding=(0, 1), groups=8)
    with pytest.warns(RuntimeWarning, match="'triton' is not used for forward of .*: its kernel cannot be compiled"):
        first = run(x, weight)
    for result in (first, run(x, weight), backend.bind(problem, ("forward",))(x, weight)):
        torch.testing.assert_close(result, expected)
    assert (len(kernel.compiled), changes) == (1, [1])
    assert "cannot be compiled" in backend.reasons_against(problem, ("forward",), cpu)[0]
    assert not any("cannot" in reason for reason in backend.reasons_against(problem, ("grad_input",), cpu))
    kernel.raises = None
    call(backend, PROBLEM)
    assert kernel.started


def test_without_memory_to_compile_it_is_tried_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_check, "fault", lambda *_: None)
    backend, kernel.raises = TritonBackend(), torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        call(backend, PROBLEM)
    kernel.raises = None
    call(backend, PROBLEM)
    assert kernel.started


def test_a_check_that_did_not_end_is_made_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was used without a check after one for which there was no memory."""
    checked: list[int] = []

    def fault(*_: object) -> None:
        checked.append(1)
        if len(checked) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(first_check, "fault", fault)
    backend = TritonBackend()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            call(backend, PROBLEM)
    for _ in range(2):
        call(backend, PROBLEM)
    assert len(checked) == 3


def test_products_of_tf32_may_cut_both_operands() -> None:
    """Tensor cores read the upper 19 bits; where all products have one sign, cuts add up instead of cancelling."""
    problem = ConvProblem.parse("g4mb2ic4ih12iw12kh1kw9ph0pw4oc4")
    x, weight = torch.rand(problem.input_shape) + 0.5, torch.full(problem.weight_shape, 1.0 + 2**-10 - 2**-20)
    cut = [(t.view(torch.int32) & -(1 << 13)).view(torch.float32) for t in (x, weight)]
    given = {"input": x, "weight": weight}
    result = ReferenceBackend().bind(problem, ("forward",))(*cut)
    assert first_check.fault(problem, ("forward",), {**given, "forward": result}, "tf32") is None
    wrong = result * (1 + 2**-7)
    assert first_check.fault(problem, ("forward",), {**given, "forward": wrong}, "tf32")
