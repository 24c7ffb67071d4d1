"""The registry of backends, while several threads use it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

import convgrad
from convgrad.backends import ReferenceBackend
from convgrad.check import check_problem
from convgrad.engine import backends, choose, get_backend, register, unregister
from convgrad.engine.registry import reasons_against
from convgrad.errors import BackendError, UnknownNameError
from convgrad.problem import PASSES, ConvProblem, Outputs
from convgrad.settings import flags


class Another(ReferenceBackend):
    name = "another"


@pytest.fixture
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_backends_may_be_registered_while_another_thread_looks(eager_threads: None) -> None:
    failed: list[Exception] = []
    ended = threading.Event()

    def look() -> None:
        try:
            while not ended.is_set():
                backends()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3000):
            register(Another())
            unregister("another")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_choice_as_if_no_backend_had_a_name() -> None:
    asked = ConvProblem.parse("mb1ic2ih6oc3kh3"), ("forward",), torch.device("cpu")
    usual = choose(*asked)
    register(Another(), preferred=True)
    assert choose(*asked)[0].backend.name == "another"
    assert choose(*asked, without="another") == usual


@pytest.mark.parametrize("spelling", ["", " (padded copy)"])
def test_the_default_that_is_removed_is_none_any_more(spelling: str) -> None:
    """Every call raised KeyError until another default was set."""
    register(Another())
    convgrad.set_default_backend("another" + spelling)
    unregister("another")
    assert convgrad.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 1)).shape == (1, 1, 3)


def test_while_a_graph_is_captured_it_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a plan that was made before would run what may not be captured, and one that was made then would stay."""

    class Unsafe(ReferenceBackend):
        capture_safe = False

    asked = Unsafe(), ConvProblem.parse("ic1iw3oc1kw1"), ("forward",), torch.device("cuda")
    on_a_gpu = torch.empty(0, device="meta")  # anything but a CPU
    before = flags(on_a_gpu)
    assert reasons_against(*asked) == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert flags(on_a_gpu) != before
    assert reasons_against(*asked) == ["a CUDA graph is being captured and it may not be called then"]


@pytest.mark.parametrize("name", ["native", "im2col"])
def test_a_backend_over_a_padded_copy_has_a_name_too(name: str) -> None:
    """And is right in all respects: also where it has a workspace, and sweeps of transposed problems."""
    copied = get_backend(f"{name} (padded copy)")
    assert copied.name == f"{name} (padded copy)"
    for output in PASSES:
        found = check_problem(copied, "mb2ic4ih6oc8kh3ph1 reflect", output)
        assert not [r for r in found if r.status == "failed"]
        assert [r for r in found if r.status == "passed"]
    for unknown in (unregister, get_backend):
        with pytest.raises(UnknownNameError, match="no backend is called"):
            unknown("none (padded copy)")
    with pytest.raises(UnknownNameError, match="no backend is called"):
        unregister(copied.name)


def test_a_padded_copy_that_cannot_says_why() -> None:
    x = torch.ones(1, 1, 3, dtype=torch.complex64)
    with convgrad.use_backend("native (padded copy)"), pytest.raises(BackendError, match=r"\n  native .*: \w"):
        convgrad.conv1d(x, x)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cudnn", "aten:cudnn"),
        ("MKLDNN", "aten:mkldnn"),
        ("winogard", "native:winograd"),
        ("nativ", "native"),
        (["native"], "native"),
    ],
)
def test_a_part_of_a_name_is_enough_for_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(KeyError, match=f"did you mean '{meant}'"), convgrad.use_backend(name):
        pass


def test_for_a_choice_a_backend_is_asked_once_about_the_same_outputs() -> None:
    class Moody(ReferenceBackend):
        """Usable for one pass the first time that it is asked, and never again."""

        name = "moody"
        asked: ClassVar[list[Outputs]] = []

        def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
            self.asked.append(outputs)
            return [] if outputs == ("grad_weight",) and self.asked.count(outputs) == 1 else ["no"]

    register(Moody(), preferred=True)
    steps = choose(ConvProblem.parse("mb1ic2ih6oc3kh3"), ("grad_input", "grad_weight"), torch.device("cpu"))
    assert steps[1].backend.name == "moody"
    assert len(Moody.asked) == len({*Moody.asked})
