"""A wrong kernel is refused with the problem that shows it; a right one is not."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import CheckError, ConvProblem
from convgrad.check import CheckResult, problems_for, speed, verify
from convgrad.check.problem_set import drawn
from convgrad.check.refusal import advice
from convgrad.engine import store
from convgrad.testing import check_backend

from .functions import DEPTHWISE, WIDE, accepts, grad_weight, passed
from .functions import forward as right
from .planted import when, writing


def refusal(forward: Callable[..., Any], **options: Any) -> str:
    """What is said of a kernel that is refused."""
    with pytest.raises(CheckError) as caught:
        convgrad.register("wrong", forward=forward, **{"accepts": accepts, **options})
    return str(caught.value)


def named_problem(message: str) -> ConvProblem:
    found = re.search(r"the problem: (.*)", message)
    assert found, message
    return ConvProblem.parse(found[1])


def test_message() -> None:
    """A problem that shows it, the first wrong element, how far off, with which tensors, and a line that repeats it."""
    forward = when(lambda x, w, p: p.stride == (2, 2))
    message = refusal(forward)
    assert re.match(r"'wrong' is refused: its forward is wrong \(\d+ problems? passed\)\n", message)
    assert named_problem(message).stride == (2, 2)
    assert re.search(r"\d+ of \d+ elements differ, the first at \(.*\): .* instead of", message)
    assert re.search(r"worst error [\d.]+, allowed [\d.e-]+", message)
    assert re.search(r"it was called with input \(.*\) with strides \(.*\), weight \(.*\) with strides", message)
    convgrad.register("wrong", forward=forward, accepts=accepts, verify=False)
    assert "failed" in {r.status for r in eval(message.splitlines()[-1])}


def test_a_result_of_another_shape_is_wrong_and_nothing_was_raised() -> None:
    message = refusal(lambda x, w, p: right(x, w, p)[..., 1:])
    assert re.match(r"'wrong' is refused: its forward is wrong \(0 problems passed\)\n", message)
    assert re.search(r"\n  memory: forward of .wrong. returned \(\d.*\) torch\.\w+ on cpu, \(.* was expected", message)
    assert "BackendError" not in message
    assert message.count("was expected") == 1  # not once more for its threads


def test_what_it_raised() -> None:
    """Once, with the line, and not as a wrong result."""

    def narrow(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        if len(input) != 2:
            raise ValueError("two images")
        return right(input, weight, p)

    line = narrow.__code__.co_firstlineno + 2
    message = refusal(narrow, seconds=60)
    assert re.search(rf"its forward raised ValueError: two images \(.*test_verify\.py:{line}\)", message)
    assert (message.count("two images"), "is wrong" in message) == (1, False)


@pytest.mark.parametrize("fails", ["raise ValueError", "import ctypes; ctypes.string_at(0)"])
def test_the_line_is_the_kernels_own_and_not_that_of_a_package_that_it_calls(fails: str) -> None:
    package: dict[str, Any] = {}
    exec(compile(f"def helper(): {fails}", "/usr/lib/python3/dist-packages/helper.py", "exec"), package)

    def forward(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        return package["helper"]()

    line = forward.__code__.co_firstlineno + 1
    assert f"test_verify.py:{line})" in refusal(forward).splitlines()[0]


def test_a_dtype_that_it_does_not_know() -> None:
    def floats(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        if input.dtype.itemsize == 2:
            raise RuntimeError("\"mine\" not implemented for 'Half'")
        return right(input, weight, p)

    with pytest.raises(CheckError, match="a kernel for some dtypes only says which: dtypes="):
        convgrad.register("wrong", forward=floats, accepts=accepts, seconds=60)


def test_the_write_stands_alone() -> None:
    lines = refusal(writing).splitlines()
    assert "memory: it wrote into input" in lines[1]
    assert "it was called with" in lines[2]  # nothing of what only follows from it


def test_a_changed_setting_comes_first() -> None:
    def changing(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return right(input, weight, p)

    assert refusal(changing).splitlines()[1].startswith("  memory: it changed the default dtype")


@pytest.mark.parametrize("change", [lambda w: w.neg_().neg_(), lambda w: w.resize_(0)])
def test_an_operand_is_not_written_and_put_back_or_resized(change: Callable[[Tensor], Any]) -> None:
    def changing(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        result = right(input, weight, p)
        change(weight)
        return result

    with pytest.raises(CheckError, match="memory: it wrote into weight"):
        convgrad.register("wrong", forward=changing, accepts=accepts)


@pytest.mark.usefixtures("brief_search")
def test_gradients_run_without_recording() -> None:
    def by_autograd(grad_output: Tensor, input: Tensor, p: ConvProblem) -> Tensor:
        weight = input.new_zeros(p.weight_shape).requires_grad_()
        return torch.autograd.grad(right(input, weight, p), weight, grad_output)[0]

    with pytest.raises(CheckError, match=r"does not require grad(.|\n)*in torch\.enable_grad\(\)"):
        convgrad.register("wrong", grad_weight=by_autograd, accepts=accepts)
    right_one = torch.enable_grad()(by_autograd)
    convgrad.register("right", grad_weight=right_one, accepts=accepts, dtypes=(torch.float32,), seconds=0.3)


def test_one_message_of_several_properties_is_shown_once() -> None:
    message = refusal(lambda x, w, p: None)
    assert message.count("returned NoneType, (1, 1, 1, 1) torch.float32 on cpu was expected\n") == 1


def test_no_problem_is_begun_for_which_a_slow_kernel_has_no_time() -> None:
    def slow(*operands: Any) -> Tensor:
        time.sleep(0.01)
        return right(*operands)

    backend = convgrad.register("slow", forward=slow, accepts=accepts, dtypes=WIDE, prefer=False, seconds=0.01)
    assert passed(backend) <= 2  # the first is checked in any case, and tells how long others take


def test_each_pass_is_checked() -> None:
    def negative(*operands: Any) -> Tensor:
        return grad_weight(*operands).neg()

    with pytest.raises(CheckError, match="its grad_weight is wrong"):
        convgrad.register("wrong", forward=right, grad_weight=negative, accepts=accepts)


def test_what_was_not_said_of_a_function_is_suggested() -> None:
    with pytest.raises(CheckError) as caught:
        convgrad.register("mine", forward=F.conv2d)
    assert "it is called with (input, weight, problem) unless args= says otherwise" in str(caught.value)
    assert "says which: accepts=lambda p: p.ndim == 2" in str(caught.value)
    everything = ("input", "weight", "stride", "padding", "dilation", "groups")
    with pytest.raises(CheckError, match="says which: accepts=") as caught:
        convgrad.register("mine", forward=lambda x, w, *rest: F.conv2d(x, w, None, *rest), args=everything)
    assert "unless args=" not in str(caught.value)
    with pytest.raises(CheckError, match="is registered as grad_input"):
        convgrad.register("mine", forward=F.conv_transpose2d, args=everything[:2], accepts=lambda p: p.transposed)


@pytest.mark.usefixtures("brief_search")
def test_contiguous_tensors_are_suggested() -> None:
    def naive(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        """Reads the memory as if it were contiguous."""
        dense = [t.as_strided(t.shape, torch.empty(t.shape).stride()) for t in (input, weight)]
        return right(*dense, p)

    def rows(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        input.permute(0, 2, 3, 1).view(-1, p.in_channels)  # raises for any other layout
        return right(input, weight, p)

    def few(p: ConvProblem) -> bool:
        return accepts(p) and p.depthwise

    with pytest.raises(CheckError, match=r'layouts=\("contiguous",\)'):
        convgrad.register("naive", forward=naive, accepts=few, dtypes=WIDE, seconds=30)
    backend = convgrad.register("naive", forward=naive, accepts=few, dtypes=WIDE, layouts="contiguous", seconds=0.3)
    assert passed(backend)
    # who gets contiguous tensors only is not told of them, nor who is wrong in both
    assert "layouts=" not in refusal(writing, accepts=lambda p: p.channels_last, layouts="contiguous")
    assert "layouts=" not in refusal(when(lambda x, w, p: True), accepts=lambda p: p.channels_last)
    assert 'layouts=("channels_last",)' in refusal(rows, accepts=lambda p: accepts(p) and not p.transposed)


def test_time_is_limited() -> None:
    """Few problems are too few to say that it is right; that is said."""
    backend = convgrad.register("right", forward=right, accepts=accepts, dtypes=WIDE, seconds=0.05)
    assert not backend.verified
    assert re.fullmatch(
        r"not verified: \d+ problems? passed, 30 are needed; more did not fit into 0.05 s", backend.note
    )
    assert "not verified" in backend.summary


@pytest.mark.usefixtures("brief_search")
def test_a_kernel_that_accepts_one_problem() -> None:
    """It is named, and the check can say no more than that the kernel is right for this one."""
    only = ConvProblem.parse("g34mb2ic34ih12iw12oc34oh7ow3kh6kw10")
    options: dict[str, Any] = {"accepts": lambda p: p == only, "problems": only}
    with pytest.warns(UserWarning, match="'one' runs wherever it is usable, and is not verified: 1 problem passed"):
        backend = convgrad.register("one", forward=right, **options)
    assert (backend.verified, passed(backend)) == (False, 1)
    assert backend.note.endswith("it accepts no more that could be found")
    with pytest.warns(UserWarning, match="'named' is not verified: 1 problem passed"):
        convgrad.register("named", forward=right, **options, prefer=False)
    with pytest.raises(CheckError, match=r"the problem: g34mb2ic34ih12"):
        convgrad.register("one", forward=when(lambda x, w, p: True), **options)


@pytest.mark.usefixtures("brief_search")
def test_what_was_skipped_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(backend: Any, problem: ConvProblem, output: Any, **_: Any) -> list[CheckResult]:
        return [CheckResult("right", problem, output, "usable", "skipped", "there is no memory")]

    monkeypatch.setattr(verify, "check_problem", skip)
    monkeypatch.setattr(speed, "measure", lambda *_: ())

    def never_seen(*operands: Any, **arguments: Any) -> Any:  # what `right` has passed may be remembered
        return right(*operands, **arguments)

    backend = convgrad.register("right", forward=never_seen, accepts=accepts, seconds=0.2, prefer=False)
    assert backend.note.startswith("not verified: 0 problems passed, 30 are needed")


def test_a_named_problem_may_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convgrad.check.problem_set._SECONDS", 0.1)
    monkeypatch.setattr(speed, "measure", lambda *_: ())
    only = ConvProblem.parse("mb2ic64ih56oc64kh3ph1")
    options: dict[str, Any] = {"accepts": lambda p: p == only, "problems": only, "prefer": False, "seconds": 0.2}
    assert passed(convgrad.register("one", forward=right, **options)) == 1
    with pytest.raises(CheckError, match="its forward is wrong"):
        convgrad.register("one", forward=when(lambda x, w, p: True), **options)


def test_a_crash() -> None:
    def crashing(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        if p.input_size[0] == 6:
            ctypes.string_at(0)
        return right(input, weight, p)

    message, line = refusal(crashing, seconds=60, dtypes=WIDE), crashing.__code__.co_firstlineno + 2
    assert re.search(rf"its forward crashed with SIGSEGV \(.*test_verify\.py:{line}\)", message)
    assert named_problem(message).input_size[0] == 6


def test_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        while p.batch == 2:
            time.sleep(1)
        return right(input, weight, p)

    monkeypatch.setattr(verify, "_PATIENCE", 2.0)
    with pytest.raises(CheckError, match=r"its forward did not return in 2 s \(.*\): it hangs") as caught:
        convgrad.register("wrong", forward=hanging, accepts=accepts, seconds=60)
    assert named_problem(str(caught.value)).batch == 2


@pytest.mark.parametrize(
    ("leave", "how"), [(os._exit, "ended the process with status 3"), (sys.exit, "raised SystemExit: 3")]
)
def test_it_exits(leave: Any, how: str) -> None:
    with pytest.raises(CheckError, match=f"its forward {how}"):
        convgrad.register("wrong", forward=lambda x, w, p: leave(3), accepts=accepts)


@pytest.mark.usefixtures("brief_search")
def test_without_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check, but for what would end the process; and it says so."""
    monkeypatch.setattr(verify, "why_not_in_child", lambda: "there is no fork on the moon")
    threads = torch.get_num_threads()
    backend = convgrad.register("right", forward=right, accepts=accepts, seconds=0.3)
    assert backend.note.endswith("it was checked in this process: there is no fork on the moon")
    assert torch.get_num_threads() == threads
    with pytest.raises(CheckError, match="is wrong"):
        convgrad.register("wrong", forward=writing, accepts=accepts)


@pytest.mark.usefixtures("brief_search")
def test_a_kernel_that_differentiates_is_checked_here_where_no_fork_can() -> None:
    """As where this process differentiated on a GPU before: PyTorch then raises this in each of its forks."""
    here = os.getpid()

    def forward(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        if os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        return right(x, w, p)

    backend = convgrad.register("right", forward=forward, accepts=accepts, seconds=0.3)
    why = "PyTorch cannot differentiate in a fork of this process"
    assert backend.note.endswith(f"it was checked in this process: {why}")


@pytest.mark.usefixtures("brief_search")
def test_a_library_that_sets_the_number_of_threads_once() -> None:
    """As numba's first parallel call does: to as many as PyTorch has, or to another number."""

    def setting(n: int) -> Any:
        called: list[None] = []

        def forward(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
            if not called:
                called.append(torch.set_num_threads(n))
            return right(x, w, p)

        return forward

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        convgrad.register("same", forward=setting(2), accepts=accepts, seconds=0.3, prefer=False)
        with pytest.raises(CheckError, match=r"(?s)changed the number of threads.*NUMBA_NUM_THREADS"):
            convgrad.register("other", forward=setting(3), accepts=accepts, prefer=False)
    finally:
        torch.set_num_threads(threads)


# ---- what is remembered --------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that were checked; all are right, and a check finds 40 problems and has time for 35."""
    names: list[str] = []

    def run(check: Any) -> None:
        names.append(check.backend.name)
        check.passed, check.left = Counter(forward=35), 5

    monkeypatch.setattr(verify._Check, "run", run)
    monkeypatch.setattr(speed, "measure", lambda *_: ())
    store.forget("verified")
    yield names
    store.forget("verified")


def test_it_is_remembered(monkeypatch: pytest.MonkeyPatch, checked: list[str]) -> None:
    """The same kernel is not checked again, under whatever name; another helper or value is another kernel."""

    def make(limit: int) -> tuple[Callable[..., Tensor], Callable[[ConvProblem], bool]]:
        kernel = when(lambda x, w, p: False)
        return kernel, lambda p: accepts(p) and p.depthwise and p.kernel_size == (limit, limit)

    options: dict[str, Any] = {"dtypes": torch.float32, "seconds": 50}
    for name in ("first", "second"):
        kernel, takes = make(3)
        convgrad.register(name, forward=kernel, accepts=takes, **options)
    assert checked == ["first"]
    second: Any = convgrad.list_backends()["second"]
    assert (second.verified, second.note) == (True, "verified on 35 of 40 problems; more did not fit into 50 s")
    kernel, takes = make(5)
    convgrad.register("third", forward=kernel, accepts=takes, **options)
    assert checked == ["first", "third"]
    convgrad.register("third", forward=kernel, accepts=takes, **{**options, "seconds": 10})
    assert checked == ["first", "third"]
    convgrad.register("third", forward=kernel, accepts=takes, **{**options, "seconds": 60})  # which may suffice for all
    convgrad.register(
        "third",
        forward=kernel,
        accepts=takes,
        **options | {"problems": DEPTHWISE.replace(kernel_size=(5, 5), padding=((2, 2),) * 2)},
    )
    for owner in (verify, torch):
        with monkeypatch.context() as patched:
            patched.setattr(owner, "__version__", "9.9")
            convgrad.register("third", forward=kernel, accepts=takes, **options)
    assert checked == ["first", *["third"] * 5]


def test_a_search_that_finds_nothing_ends_soon() -> None:
    asked: list[ConvProblem] = []
    assert drawn(asked.append) == []  # pyright: ignore[reportArgumentType] - None is no
    assert len(asked) < 8_000


def test_few_problems_are_found() -> None:
    """Of kernels for one kind of layer, as networks have it."""

    def causal(p: ConvProblem) -> bool:
        return p.ndim == 1 and p.depthwise and p.kernel_size == (7,) and p.padding == ((6, 0),)

    def pointwise(p: ConvProblem) -> bool:
        by_64 = p.groups == 1 and p.in_channels % 64 == p.out_channels % 64 == 0
        return accepts(p) and p.pointwise and by_64 and p.channels_last and p.dtype == torch.bfloat16

    for narrow in (causal, pointwise):
        assert len(drawn(narrow)) > 100


@pytest.mark.usefixtures("brief_search")
def test_register_under_autocast() -> None:
    """Which is off wherever a kernel is called, and where it is timed."""

    def never_seen(*operands: Any) -> Tensor:  # what was timed is stored
        return right(*operands)

    with torch.autocast("cpu", torch.bfloat16):
        backend = convgrad.register("mine", forward=never_seen, accepts=accepts, seconds=0.2, prefer=False)
    assert backend.timings


@pytest.mark.usefixtures("brief_search")
def test_nothing_accepted() -> None:
    message = refusal(right, accepts=lambda p: "the moon is not full")
    assert "no problem was found that its forward accepts on cpu" in message
    assert re.search(r"the moon is not full \([\d,]+ times\)", message)
    assert "padding is a pair" not in message
    message = refusal(right, accepts=lambda p: p.padding == (1, 1))
    assert re.search(r"padding is a pair .* p\.padding == \(\(1, 1\), \(1, 1\)\)", message)
    assert "int8" not in message  # that it is for floats is no news


def test_named_problems_come_first() -> None:
    named = ConvProblem.parse("mb2ic4ih21oc3kh3ph1")
    assert named_problem(refusal(when(lambda x, w, p: True), problems=[named])) == named


def test_unverified_is_visible() -> None:
    backend = convgrad.register("wrong", forward=writing, accepts=accepts, verify=False)
    assert not backend.verified
    assert backend.note == "not verified: registered with verify=False"
    from convgrad.diagnostics import explain_problem

    assert "registered by the user, not verified" in str(explain_problem(ConvProblem.parse("ic2ih5oc2kh3")))


@pytest.mark.usefixtures("brief_search")
def test_a_refused_kernel_leaves_the_one_before() -> None:
    first = convgrad.register("mine", forward=right, accepts=accepts, seconds=0.2)
    with pytest.raises(CheckError):
        convgrad.register("mine", forward=writing, accepts=accepts)
    assert convgrad.list_backends()["mine"] is first


def test_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = convgrad.register("gpu", forward=right, accepts=accepts, devices=("cuda",))
    assert not backend.verified
    assert backend.note == "not verified: no cuda is here"
    reasons = backend.reasons_against(ConvProblem.parse("ic2ih5oc2kh3"), ("forward",), torch.device("cpu"))
    assert reasons == ["it was registered for cuda, not for cpu"]


def test_one_device_of_two_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cpu": "verified on 3 problems on cpu", "cuda": "not verified: no problem was reached"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("convgrad.check.verify._on_device", lambda backend, device, *_: found[device])
    backend = convgrad.register("mine", forward=right, accepts=accepts, prefer=False, devices=("cpu", "cuda"))
    assert not backend.verified
    assert backend.note == "; ".join(found.values())


def test_advice() -> None:
    fails = itertools.repeat(True)

    def contiguous(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        return right(x, w, p) * (1 + (p.channels_last and next(fails)))

    backend = convgrad.register("mine", forward=contiguous, accepts=accepts, verify=False, prefer=False)
    p = ConvProblem.parse("g8mb2ic8ih9oc8kh3ph1 channels_last")

    def hints(*failed: str, message: str = "") -> list[str]:
        return list(advice(backend, [CheckResult("mine", p, "forward", n, "failed", message) for n in failed], 1))

    assert hints("threads") == hints("again", "threads") == []  # other bits at another call, in any layout
    assert "it is right where the same tensors are contiguous" in hints("exact")[0]
    fails = itertools.cycle((True, False))
    assert hints("exact") == []  # now and then
    assert "deterministic=False" in hints("deterministic", "again", message="run 2 of 3 gave other bits")[0]
    assert 'devices="cuda"' in hints("memory", message="it raised RuntimeError: 0 active drivers ([]).")[0]


def test_a_kernel_that_remembers_its_results_is_not_told_of_layouts() -> None:
    results: dict[ConvProblem, Tensor] = {}

    def once(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        return results.setdefault(p, right(x, w, p))

    message = refusal(once)
    assert "again: " in message
    assert "layouts=" not in message


@pytest.mark.usefixtures("brief_search")
def test_the_suite_checks_a_registered_kernel_on_problems_made_for_it() -> None:
    """`convgrad check -b NAME` and `testing.check_backend` without problems; few of the common list are for it."""

    def few(p: ConvProblem) -> bool:
        return accepts(p) and p.groups == 24 and p.kernel_size == (5, 5)

    one = "g24ic24ih9oc24kh5ph2"
    backend = convgrad.register("few", forward=right, accepts=few, problems=one, verify=False)
    found = problems_for(backend)
    assert len(found) > 20
    assert all(few(p) for p in found)
    checked = {r.problem for r in check_backend("few", seconds=1.0, properties=["exact"]).results}
    assert checked
    assert checked <= {*found}
