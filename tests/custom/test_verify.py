"""A wrong kernel is refused with the problem that shows it; a right one is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import CheckError, ConvProblem
from convgrad.custom.verify import problems_for

from .functions import accepts, grad_weight, padding
from .functions import forward as right


def wrong_if(condition: Callable[[Tensor, Tensor, ConvProblem], bool]) -> Callable[..., Tensor]:
    def forward(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        result = right(input, weight, p)
        return result * 2 if condition(input, weight, p) else result

    return forward


def wrong_border(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    """The border is repeated instead of zero."""
    low = padding(p)
    padded = F.pad(input.double(), (low[1], low[1], low[0], low[0]), mode="replicate").to(input.dtype)
    return F.conv2d(padded, weight, None, p.stride, 0, p.dilation, p.groups)


def writing(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    result = right(input, weight, p)
    input[(0,) * input.dim()] += 1
    return result


class SecondCall:
    """Right once for each problem."""

    def __init__(self) -> None:
        self.seen: set[ConvProblem] = set()

    def __call__(self, input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        result = right(input, weight, p) * (2 if p in self.seen else 1)
        self.seen.add(p)
        return result


class OneBuffer:
    """Every call overwrites what the call before it returned."""

    def __init__(self) -> None:
        self.buffers: dict[ConvProblem, Tensor] = {}

    def __call__(self, input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        result = right(input, weight, p).contiguous(memory_format=p.memory_format)
        return self.buffers.setdefault(p, result.clone()).copy_(result)


def low_precision(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    return right(input.float(), weight.float(), p).to(p.dtype)


WRONG: dict[str, tuple[Callable[..., Tensor], Callable[[ConvProblem], bool]]] = {
    "one image": (wrong_if(lambda x, w, p: len(x) == 1), lambda p: p.batch == 1),
    "not square": (
        wrong_if(lambda x, w, p: x.shape[2] != x.shape[3]),
        lambda p: p.input_size[0] != p.input_size[1],
    ),
    "odd width": (wrong_if(lambda x, w, p: x.shape[3] % 8 != 0), lambda p: p.input_size[1] % 8 != 0),
    "stride 2": (wrong_if(lambda x, w, p: p.stride == (2, 2)), lambda p: p.stride == (2, 2)),
    "float64": (low_precision, lambda p: p.dtype == torch.float64),
    "border": (wrong_border, lambda p: p.padding != ((0, 0), (0, 0))),
    "second call": (SecondCall(), lambda p: True),
    "one buffer": (OneBuffer(), lambda p: True),
    "writes its input": (writing, lambda p: True),
    "depthwise": (wrong_if(lambda x, w, p: p.depthwise), lambda p: p.depthwise),
    "channels past a tile": (wrong_if(lambda x, w, p: x.shape[1] > 64), lambda p: p.in_channels > 64),
    "columns past a tile": (wrong_if(lambda x, w, p: x.shape[3] > 64), lambda p: p.input_size[1] > 64),
    "rows past a tile": (wrong_if(lambda x, w, p: x.shape[2] > 64), lambda p: p.input_size[0] > 64),
    "images past a tile": (wrong_if(lambda x, w, p: len(x) > 64), lambda p: p.batch > 64),
    "last of many channels": (wrong_if(lambda x, w, p: x.shape[1] > 8), lambda p: p.in_channels > 8),
}


def named_problem(message: str) -> ConvProblem:
    found = re.search(r"its forward of (.*?) is wrong", message)
    assert found, message
    return ConvProblem.parse(found[1])


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("narrow", [False, True])
def test_wrong_kernel(kind: str, narrow: bool) -> None:
    """The named problem is one of those on which the kernel is wrong, also if it accepts few."""
    kernel, concerned = WRONG[kind]

    def takes(p: ConvProblem) -> bool:
        """What a MobileNet needs."""
        return p.depthwise and p.kernel_size in {(3, 3), (5, 5)} and p.stride in {(1, 1), (2, 2)} and accepts(p)

    with pytest.raises(CheckError) as caught:
        convgrad.register("wrong", forward=kernel, accepts=takes if narrow else accepts, seconds=60)
    problem = named_problem(str(caught.value))
    assert concerned(problem), str(caught.value)
    assert accepts(problem)
    assert not narrow or takes(problem)
    assert "wrong" not in convgrad.list_backends()


def test_message() -> None:
    """The first wrong element, how far off the result is, and a line that repeats it."""
    forward = wrong_if(lambda x, w, p: p.stride == (2, 2))
    with pytest.raises(CheckError) as caught:
        convgrad.register("wrong", forward=forward, accepts=accepts)
    message = str(caught.value)
    assert re.search(r"exact: \d+ of \d+ elements differ, the first at \(.*\): .* instead of", message)
    assert re.search(r"worst error [\d.]+, allowed [\d.e-]+", message)
    convgrad.register("wrong", forward=forward, accepts=accepts, verify=False)
    assert "failed" in {r.status for r in eval(message.splitlines()[-1])}


def test_where_it_raised() -> None:
    def narrow(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        if len(input) != 2:
            raise ValueError("two images")
        return right(input, weight, p)

    line = narrow.__code__.co_firstlineno + 2
    with pytest.raises(CheckError, match=rf"it raised ValueError: two images \(.*test_verify\.py:{line}\)"):
        convgrad.register("wrong", forward=narrow, accepts=accepts, seconds=60)


def test_the_write_comes_first() -> None:
    with pytest.raises(CheckError) as caught:
        convgrad.register("wrong", forward=writing, accepts=accepts)
    assert "memory: it wrote to input" in str(caught.value).splitlines()[1]


def test_right_kernel() -> None:
    def takes(p: ConvProblem) -> bool:
        return accepts(p) and p.depthwise

    backend = convgrad.register("right", forward=right, accepts=takes, seconds=60)
    assert backend.verified
    assert re.fullmatch(r"verified on \d+ problems", backend.note)
    assert int(backend.note.split()[2]) >= 60


def test_each_pass_is_checked() -> None:
    def negative(*operands: Any) -> Tensor:
        return grad_weight(*operands).neg()

    with pytest.raises(CheckError, match="its grad_weight of"):
        convgrad.register("wrong", forward=right, grad_weight=negative, accepts=accepts)


def test_contiguous_tensors_are_suggested() -> None:
    def naive(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        """Reads the memory as if it were contiguous."""
        dense = [t.as_strided(t.shape, torch.empty(t.shape).stride()) for t in (input, weight)]
        return right(*dense, p)

    with pytest.raises(CheckError, match=r'layouts=\("contiguous",\)'):
        convgrad.register("naive", forward=naive, accepts=lambda p: accepts(p) and p.depthwise, seconds=30)
    backend = convgrad.register(
        "naive", forward=naive, accepts=lambda p: accepts(p) and p.depthwise, layouts=("contiguous",), seconds=3
    )
    assert backend.verified
    with pytest.raises(CheckError) as caught:  # who gets contiguous tensors only is not told of them
        convgrad.register("wrong", forward=writing, accepts=lambda p: p.channels_last, layouts="contiguous")
    assert "layouts=" not in str(caught.value)


def test_time_is_limited() -> None:
    backend = convgrad.register("right", forward=right, accepts=accepts, seconds=0.2)
    assert backend.verified
    assert re.fullmatch(r"verified on \d+ problems; \d+ more were not reached in 0.2 s", backend.note)


def test_nothing_accepted() -> None:
    with pytest.raises(CheckError, match="accepts none of the default problems") as caught:
        convgrad.register("none", forward=right, accepts=lambda p: "the moon is not full")
    assert "the moon is not full (x" in str(caught.value)


def test_a_kernel_that_accepts_no_default_problem() -> None:
    """It is verified on the problems that are named, and on the same in other sizes."""
    named = ConvProblem.parse("g34mb2ic34ih12iw12oc34oh7ow3kh6kw10")

    def takes(p: ConvProblem) -> bool:
        return p.kernel_size == (6, 10) and p.in_channels == 34

    with pytest.raises(CheckError, match="name some that it does"):
        convgrad.register("one", forward=right, accepts=takes)
    assert len(problems_for(takes, [named])) > 20
    wrong = wrong_if(lambda x, w, p: x.shape[3] % 2 == 1)
    with pytest.raises(CheckError, match="elements differ"):
        convgrad.register("one", forward=wrong, accepts=takes, problems=[str(named)], seconds=60)
    backend = convgrad.register("one", forward=wrong, accepts=lambda p: p == named, problems=[named])
    assert backend.note == "verified on 1 problem"


def test_named_problems_come_first() -> None:
    named = ConvProblem.parse("mb2ic4ih21oc3kh3ph1")
    assert problems_for(accepts, [named])[0] == named
    with pytest.raises(CheckError) as caught:
        convgrad.register("wrong", forward=wrong_if(lambda x, w, p: True), accepts=accepts, problems=[named])
    assert named_problem(str(caught.value)) == named


def test_unverified_is_visible() -> None:
    backend = convgrad.register("wrong", forward=writing, accepts=accepts, verify=False)
    assert not backend.verified
    assert backend.note == "not verified: registered with verify=False"
    from convgrad.diagnostics import explain_problem

    assert "registered by the user, not verified" in str(explain_problem(ConvProblem.parse("ic2ih5oc2kh3")))


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
