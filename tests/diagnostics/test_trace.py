"""What a trace notes, against calls that are known."""

import csv
import io
import json
import os
import sys
import threading

import pytest
import torch

import convgrad
from convgrad.check.operands import integer_operands
from convgrad.diagnostics import trace
from convgrad.engine import plan_for, use_backend
from convgrad.engine.events import observers
from convgrad.models import Usage
from convgrad.problem import PASSES, ConvProblem

P = ConvProblem.parse("g4mb2ic4ih9oc4kh3ph1")


SLOTS = integer_operands(P, PASSES, 0)


def forward(p: ConvProblem = P) -> None:
    given = integer_operands(p, ("forward",), 0)
    plan_for(p, ("forward",), torch.device("cpu")).contract(given["input"], given["weight"])


def test_each_call_is_noted_in_order() -> None:
    with trace() as t, use_backend("reference"):
        forward()
        plan_for(P, ("grad_weight",), torch.device("cpu")).gradients(**SLOTS)
    assert [(r.call, r.outputs, r.backend, r.layout) for r in t] == [
        (0, "forward", "reference", "contiguous"),
        (1, "grad_weight", "reference", "contiguous"),
    ]
    assert all(r.milliseconds > 0 and r.device == "cpu" and r.problem == str(P) for r in t)
    assert not observers
    with trace() as t, use_backend("aten"):
        plan_for(P, ("grad_input", "grad_weight"), torch.device("cpu")).gradients(**SLOTS)
    assert [r.outputs for r in t] == ["grad_input+grad_weight"]  # a sweep is one call


def test_a_layout_has_one_name_in_any_number_of_dimensions() -> None:
    """The name that explain and problems as text have for it."""
    with trace() as t, Usage() as usage:
        forward(ConvProblem.parse("ic2id5oc2kd3 channels_last"))
    assert [r.layout for r in (*t, *usage.rows)] == ["channels_last"] * 2
    assert [r.milliseconds for r in t] == [r.total for r in usage.rows]


def test_a_table_says_what_the_passes_of_a_transposed_convolution_are_to_its_user() -> None:
    layer, x = convgrad.nn.ConvTranspose2d(4, 4, 3, groups=4), torch.randn(1, 4, 5, 5, requires_grad=True)
    with trace() as t, use_backend("im2col"):
        layer(x).sum().backward()
    assert [r.outputs for r in t] == ["grad_input", "forward", "grad_weight"]
    column = [line["outputs"] for line in csv.DictReader(io.StringIO(t.to_csv()))]
    assert column == ["grad_input (its output)", "forward (its grad_input)", "grad_weight"]
    assert all(text in t.table() for text in column)
    with trace() as t:
        convgrad.nn.Conv2d(4, 4, 3)(x).sum().backward()
    assert "(its" not in t.table()


def test_a_trace_and_the_table_of_a_script_call_a_kernel_the_same() -> None:
    with trace() as t, Usage() as usage:
        for backend in ("aten", "im2col"):
            with use_backend(backend):
                forward()
    assert {r.name for r in t} == {r.name for r in usage.rows}
    assert t.records[0].kernel in ("Mkldnn", "Slow2d")


def test_other_threads_are_seen_and_nothing_after_the_block() -> None:
    with trace() as t:
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    forward()
    assert len(t) == 1
    with pytest.raises(ZeroDivisionError), trace():
        raise ZeroDivisionError
    assert not observers


def test_a_block_within_its_own() -> None:
    with trace() as t:
        with t:
            forward()
        forward()
        forward()
    assert len(t) == 3


def test_a_table_of_nothing_says_how_pytorchs_own_layers_are_recorded() -> None:
    with trace() as t:
        torch.nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 1, 1))
    assert t.table() == "nothing was recorded; PyTorch's own layers and functions are inside convgrad.takeover()"


def test_table_and_csv(tmp_path) -> None:
    with trace() as t, use_backend("reference"):
        forward()
    table = t.table().splitlines()
    assert "kernel" not in table[0]  # an empty column is left out
    assert table[-1].startswith("1 call, ")
    text = t.to_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text(encoding="utf-8") == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0]["outputs"] == "forward"
    assert float(rows[0]["milliseconds"]) > 0
    assert "<table>" in t._repr_html_()
    (row,) = json.loads(json.dumps(t.to_dict()))
    assert (row["backend"], row["outputs"], row["calls"]) == ("reference", ["forward"], 1)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_onednn_is_named_and_standard_output_is_left_alone(capfd, monkeypatch) -> None:
    p = ConvProblem.parse("g8mb2ic8ih20oc8kh7ph3")
    given = integer_operands(p, ("grad_weight",), 0)
    with open(1, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        print("before")
        with trace(onednn=True) as t, use_backend("aten"):
            print("inside")
            plan_for(p, ("grad_weight",), torch.device("cpu")).contract(given["grad_output"], given["input"])
            os.write(1, b"raw\n")
        print("after")
    assert capfd.readouterr().out.splitlines() == ["before", "inside", "raw", "after"]
    assert "backward_weights" in t.records[0].kernel

    def closed(*_: object) -> int:
        raise OSError

    monkeypatch.setattr(os, "write", closed)
    with trace(onednn=True) as t, use_backend("aten"):
        plan_for(p, ("grad_weight",), torch.device("cpu")).contract(given["grad_output"], given["input"])
    assert "backward_weights" in t.records[0].kernel
