"""What was measured, as a value: merged, ranked, read from the store, told in words; and the key it is stored under."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import convgrad
from convgrad.engine import measurements, store
from convgrad.engine.measure.environment import environment
from convgrad.engine.measure.measurements import Measurement, similar
from convgrad.foreign import read_as
from convgrad.problem import ConvProblem, Output

P = ConvProblem.parse("g1mb2ic24ih20oc24oh20kh3ph1")
CPU = torch.device("cpu")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")


def test_measurements_are_merged():
    first = Measurement({"aten": (1.0,), "a": (0.5,), "b": (2.0,)}, {"d": "it is wrong"})
    both = first.merged(Measurement({"aten": (1.0,), "a": (0.7125,), "c": (3.0,)}, {"b": "it raised"}))
    wrong = {"d": "it is wrong", "b": "it raised"}
    assert both == Measurement({"aten": (1.0, 1.0), "a": (0.5, 0.7125), "c": (3.0,)}, wrong)
    assert read_as(Measurement, both.to_json(), "it").checked() == both
    for _ in range(20):
        both = both.merged(Measurement({"aten": (1.0,), "a": (0.9,)}))
    assert max(map(len, both.times.values())) < 10
    assert {*both.times["a"]} == {0.9}  # the newest
    other = Measurement({"a": (1.0,), "aten": (3.0,)})  # relative to something else
    assert both.merged(other) == other


def test_a_way_that_was_seldom_timed_is_not_taken():
    assert Measurement({"aten": (1.0,) * 4, "a, b": (0.5,), "a": (0.75, 0.25)}).ranked() == [("a", 0.5), ("aten", 1.0)]


def test_hardly_faster_is_not_faster():
    assert Measurement({"aten": (1.0,), "a": (0.99,)}).ranked()[0][0] == "aten"
    assert Measurement({"aten": (1.0,), "a": (0.9,)}).ranked()[0][0] == "a"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "value", [None, 3, [], {}, {"times": 3}, {"times": {}}, {"times": {"a": []}}, {"times": {"a": ["x"]}},
              {"times": {"a": [-1.0]}}, {"times": {"a": [float("nan")]}}, {"times": {"a": [float("inf")]}},
              {"times": {"a": [1.0]}, "wrong": 3}],
)  # fmt: skip
def test_a_value_that_is_no_measurement_is_not_one(value: Any) -> None:
    with pytest.raises(ValueError, match="measurement"):
        read_as(Measurement, value, "a measurement").checked()
    store.write("choice", " | ".join(measurements.key_of(P, ("forward",), environment(CPU))), value)
    assert measurements.find(P, ("forward",), CPU) is None
    [step] = convgrad.engine.choose(P, ("forward",), CPU)
    assert step.backend.name == "aten"
    new = Measurement({"aten": (1.0,)})
    assert measurements.add(P, ("forward",), CPU, new) == new


@pytest.mark.parametrize(
    ("times", "way", "said"),
    [
        ({"aten": 2.0, "native": 1.0}, "native", "2.00x as fast as aten"),
        ({"aten": 1.0, "aten, aten": 1.5}, "aten", "the next, aten in 2 calls, takes 1.50x as long"),
        ({"aten": 1.0, "native, aten": 1.5}, "aten", "the next, native and aten, takes 1.50x as long"),
    ],
)
def test_what_a_reason_says(times: dict[str, float], way: str, said: str) -> None:
    reason = Measurement({w: [t] for w, t in times.items()}).reason(way)
    assert reason == f"measured once on this machine: {said}"


# ---- the key ---------------------------------------------------------------------------------------


def test_the_key_tells_everything_apart_that_changes_the_answer(monkeypatch):
    where = environment(CPU)
    others = ["g1mb3ic24ih20oc24oh20kh3ph1", f"{P} float64", f"{P} channels_last", f"{P} bias", f"{P} transposed"]
    problems = [P, *map(ConvProblem.parse, others)]
    asked: list[tuple[Output, ...]] = [("forward",), ("grad_input",), BOTH]
    keys = {measurements.key_of(p, o, where) for p in problems for o in asked}
    assert len(keys) == 3 * len(problems)
    assert measurements.key_of(P.replace(name="conv1"), (*BOTH, "grad_bias"), where) in keys
    for flag, value in (("threads", torch.get_num_threads() + 1), ("mkldnn", False)):
        with monkeypatch.context() as patched:
            patched.setattr(f"convgrad.engine.measure.environment.{flag}", lambda v=value: v)
            assert environment(CPU) != where
    with monkeypatch.context() as patched:
        patched.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert environment(CPU) != where
    mkldnn: Any = torch.backends.mkldnn
    for operation in (mkldnn.conv, mkldnn.matmul):  # each by itself, which makes PyTorch's old getter raise
        operation.fp32_precision = "bf16"
        changed = environment(CPU)
        operation.fp32_precision = "none"
        assert changed != where
    torch.set_float32_matmul_precision("highest")  # what holds where nothing is said
    assert environment(CPU) == where
    assert f"torch {torch.__version__}" in where
    assert f"convgrad {convgrad.__version__}" in where
    assert environment(torch.device("meta")) == ""


@pytest.mark.parametrize("text", [
    "mb0ic3iw9oc4kw3", "mb30ic3iw1000oc8kw5",
    "mb7ic3ih9oc4kh9", "g3mb5ic3ih19iw33oc3kh3kw3sh2sw2ph1pw1", "ic3id9oc4kd3dd2",
    "mb3ic4ih7oc8oh14kh4sh2ph1 transposed bias", "mb1ic3iw10ow10oc4kw4pw3", "mb2ic8ih7oc8kh3ph1",
])  # fmt: skip
def test_what_is_similar_is_a_problem_of_the_same_kind(text):
    p = ConvProblem.parse(text)
    q = similar(p)
    assert similar(q) == q
    same = ("in_channels", "out_channels", "groups", "kernel_size", "stride", "dilation", "dtype", "has_bias", "origin")
    assert all(getattr(p, name) == getattr(q, name) for name in same)
    for a, b in zip(p.input_size, q.input_size, strict=True):
        assert a == b if a <= 8 else 0.8 < a / b < 1.25


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("machine", ["foo x; y", "", "cuda of no kind"])
def test_what_another_machine_exported_is_kept_for_it(machine: str) -> None:
    row = {"machine": machine, "outputs": "forward", "problem": str(P), "times": {"aten": [1.0]}}
    assert measurements.imported([row]) == (1, 0)
    assert measurements.exported() == [row]
    here = {**row, "machine": environment(CPU)}
    assert measurements.imported([row, here]) == (2, 1)
    assert measurements.imported([here]) == (1, 1)
    for times, known in (((2.0,), (1.0,)), ((2.0,) * 2, (2.0,) * 2), ((3.0,) * 2, (2.0,) * 2)):  # only what is more
        measurements.imported([{**here, "times": {"aten": times}}])
        assert measurements.find(P, ("forward",), CPU) == Measurement({"aten": known})


@pytest.mark.usefixtures("folder")
def test_what_others_measured_is_known_once_the_store_is_looked_into_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def known() -> Measurement | None:
        return measurements.find(P, ("forward",), CPU)

    key = " | ".join(measurements.key_of(P, ("forward",), environment(CPU)))
    assert known() is None
    store.write("choice", key, {"times": {"aten": [1.0]}})
    assert known() is None
    measurements.reload()
    assert known() == Measurement({"aten": (1.0,)})
    store.write("choice", key, {"times": {"aten": [1.0, 1.0]}})
    assert measurements.add(P, ("forward",), CPU, Measurement({"aten": (1.0,)})) == Measurement({"aten": (1.0,) * 3})
    store.write("choice", key, {"times": {"aten": [2.0]}})
    measurements.reload()
    assert known() == Measurement({"aten": (2.0,)})
    store.write("choice", key.replace("forward", "grad_input"), None)  # another version's
    store.write("choice", "of no such form", {"times": {"aten": [2.0]}})
    assert (len(measurements.exported()), sum(measurements.summary().values())) == (1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(store, "forget", lambda _: 0)  # as where it cannot be written
        assert measurements.forget() == 0
    assert (measurements.forget(), known()) == (1, None)
