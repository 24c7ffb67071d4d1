"""Rows from the tables that the library's own commands write."""

import json

import pytest
import torch

import convgrad
from convgrad.diagnostics import Limits, layer_ranges
from convgrad.diagnostics.script import read_table
from convgrad.models import Usage, observe_aten
from convgrad.report import profile_table

P = "g4mb2ic4ih9oc4kh3ph1"


def compute() -> None:
    layer = torch.nn.Conv2d(4, 4, 3, padding=1, groups=4)
    transposed = torch.nn.ConvTranspose2d(4, 4, 3)
    for _ in range(2):
        transposed(layer(torch.ones(2, 4, 9, 9, requires_grad=True))).sum().backward()


def test_the_table_of_a_run(tmp_path, monkeypatch) -> None:
    known = Limits(1e10, 1e11, "float32", "made up")
    monkeypatch.setattr("convgrad.diagnostics.records.limits_of", lambda *_, **__: known)
    with layer_ranges(), observe_aten(), Usage() as usage:
        compute()
    path = tmp_path / "kernels.csv"
    path.write_text(usage.to_csv())
    rows = read_table(path)
    assert {(r.problem, r.outputs, r.calls) for r in rows} == {(r.problem, r.outputs, 2) for r in usage.rows}
    assert {r.layers for r in rows} == {r.layers for r in usage.rows} == {("Conv2d",), ("ConvTranspose2d",)}
    assert sum(r.total for r in rows) == pytest.approx(usage.seconds * 1e3, rel=0.05, abs=0.03)
    assert all(r.of_limit is not None and r.least is None for r in rows)
    shown = {r.shown for r in rows}
    assert "grad_input (its output)" in shown
    assert profile_table(path).finding.startswith("8 calls of convolutions, ")


def test_the_json_of_a_run_holds_its_calls(tmp_path, monkeypatch) -> None:
    known = Limits(1e10, 1e11, "float32", "made up")
    monkeypatch.setattr("convgrad.diagnostics.records.limits_of", lambda *_, **__: known)
    with observe_aten(), Usage() as usage:
        compute()
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": "convgrad run", "data": usage.to_dict()}))
    assert read_table(path) == [row.against(known) for row in usage.rows]
    assert profile_table(path).finding.startswith("8 calls of convolutions, ")


def test_a_table_that_a_spreadsheet_wrote_and_one_that_is_no_text(tmp_path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text("layer,output,backend,mean ms,problem\nstem,forward,aten,2,ic2ih3oc2kh1\n", encoding="utf-8-sig")
    assert profile_table(path).rows[0].layers == ("stem",)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"kernels\.csv"):
        profile_table(path)


def test_a_call_that_took_next_to_no_time(tmp_path) -> None:
    path = tmp_path / "kernels.csv"
    columns = "calls,output,backend,layout,total ms,mean ms,share,of limit,problem"
    path.write_text(f"{columns}\n1,forward,native,contiguous,0.00,0.0041,0.001,,mb1ic1ih3oc1kh3\n")
    (row,) = read_table(path)
    assert row.total == pytest.approx(0.0041)


def test_the_table_of_a_trace(tmp_path) -> None:
    with observe_aten(), convgrad.trace() as t:
        compute()
    t.to_csv(tmp_path / "trace.csv")
    rows = read_table(tmp_path / "trace.csv")
    assert sum(r.calls for r in rows) == len(t)
    assert sum(r.total for r in rows) == pytest.approx(sum(r.milliseconds for r in t), rel=1e-2)
    assert {r.reason for r in rows} == {"PyTorch's own kernel"}


def test_the_table_of_a_benchmark(tmp_path) -> None:
    pytest.importorskip("typer", reason="the extra [cli] brings typer")
    from convgrad.cli.app import run

    path = tmp_path / "times.csv"
    assert run(["bench", P, "-b", "aten", "--seconds", "0.02", "--no-limit", "--csv", str(path)]) == 0
    rows = read_table(path)
    assert {r.outputs for r in rows} == {"forward", "grad_input", "grad_weight"}
    assert all(r.pytorch and r.calls == 1 for r in rows)


HEAD = "calls,output,backend,mean ms,problem\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("other.csv", "", "it has no line"),
        ("other.csv", "a,b\n1,2\n", "it has the columns a, b"),
        ("other.csv", f"{HEAD}1,sideways,aten,2,ic2ih3oc2kh1\n", "unknown output 'sideways'"),
        ("other.csv", f"{HEAD}0,forward,aten,2,ic2ih3oc2kh1\n", "0 calls of 2.0 ms"),
        ("other.csv", f"{HEAD}1,forward,aten,nan,ic2ih3oc2kh1\n", "nan"),
        ("other.csv", f"{HEAD}1,forward,aten,2,ic2zz\n", "unrecognized field 'zz'"),
        ("other.csv", f"{HEAD}1,forward\n", ""),
        ("other.csv", f'{HEAD}1,"{"x" * 200_000}', "field larger"),
        ("deep.json", "[" * 100_000 + "]" * 100_000, ""),
        ("run.json", json.dumps({"schema": "convgrad run", "data": {"rows": [{"calls": "x"}]}}), ""),
        ("run.json", json.dumps({"schema": "convgrad run", "data": {"rows": 7}}), ""),
    ],
)
@pytest.mark.parametrize("read", [read_table, profile_table])
def test_what_is_no_table_is_one_clear_error(tmp_path, read, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
        read(tmp_path / name)
    assert words in str(error.value)
    assert len(str(error.value)) < 400 + len(str(tmp_path))
