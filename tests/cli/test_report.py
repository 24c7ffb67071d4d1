"""``convgrad report``: what it takes, what it writes, and what it refuses before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra [cli] brings typer")
pytest.importorskip("jinja2", reason="the extra [report] brings jinja2 and matplotlib")

from convgrad.cli.app import run
from convgrad.report import Profile

MODEL = """
import torch
def alone():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, groups=1), torch.nn.BatchNorm2d(4))
def with_inputs():
    return alone(), torch.randn(4, 3, 9, 9)
def wrong():
    return alone(), torch.randn(4, 2, 9, 9)
class Asserting(torch.nn.Module):
    def forward(self, x):
        assert x is None, "no input at all"
"""
SCRIPT = """
import sys, torch
torch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))
print(sys.argv[1:])
sys.exit(5)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("convgrad.diagnostics.records.limits_of", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    Path("report_models.py").write_text(MODEL)
    Path("script.py").write_text(SCRIPT)
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("other.json").write_text("{}")
    Path("other.txt").write_text("g4mb2ic4ih9oc4kh3ph1\n")


def test_a_model_then_compared_with_itself(capsys) -> None:
    assert run(["report", "--seconds", "0.2", "report_models:with_inputs"]) == 0
    out = capsys.readouterr().out
    assert "written to report.html" in out
    first = Profile.read("report.html")
    assert first.finding in " ".join(out.split())
    assert "mb4ic3" in first.rows[0].problem
    args = ["--against", "report.html", "--input", "2x3x8x8", "-o", "second.json", "--seconds", "0.2"]
    assert run(["report", *args, "report_models:alone"]) == 0
    second = Profile.read("second.json")
    assert run(["report", "second.json", "-o", "again.html"]) == 0
    assert Profile.read("again.html") == second
    assert second.before is not None
    assert second.before.what == "report_models:with_inputs"
    assert "mb2ic3ih8" in second.rows[0].problem
    args = ["report_models:with_inputs", "--dtype", "float64", "-o", "third.json", "--seconds", "0.1"]
    assert run(["report", *args]) == 0
    assert all("float64" in row.problem for row in Profile.read("third.json").rows)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("report_models:with_inputs",), ""),
        (("--channels-last", "report_models:with_inputs"), "--channels-last "),
        (("--input", "2x3x8x8", "report_models:with_inputs"), "--input 2x3x8x8 "),
        (("--dtype", "float64", "report_models:alone"), "--dtype float64 "),
    ],
)
def test_the_command_that_measures_takes_the_inputs_of_the_function(
    capsys, args: tuple[str, ...], options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile_model(*_: object, tune: str, **__: object) -> Profile:
        raise TypeError(tune)  # which is printed

    monkeypatch.setattr("convgrad.diagnostics.profile_model", profile_model)
    assert run(["report", *args]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"TypeError: convgrad tune {options}{args[-1]} (hint" in said


def test_a_script_keeps_its_arguments_its_output_and_its_status(capsys) -> None:
    assert run(["report", "--seconds", "0.1", "--json", "--stock", "script.py", "--epochs", "-o", "x"]) == 5
    printed, said = capsys.readouterr()
    assert "['--epochs', '-o', 'x']" in said
    assert json.loads(printed)["data"]["kind"] == "run"
    assert not Path("report.html").exists()
    Path("before.json").write_text(printed)
    assert Profile.read("before.json").kind == "run"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("other.csv",), "is no table of convgrad run --csv or --json, trace, or bench PROBLEM --csv"),
        (("nothing.csv",), "there is no file 'nothing.csv'"),
        (("other.json",), "'other.json': this does not hold the data of a convgrad report"),
        (("other.txt",), "'other.txt' is a file, not a model (hint: check, bench and tune read problems, report .csv"),
        (("--stock", "other.json"), "--stock is for a script, and 'other.json' is none"),
        (("--against", "other.csv", "script.py"), "'other.csv': this is neither a page nor a JSON file"),
        (("nothing.py",), "there is no file 'nothing.py' (hint: it was looked for in "),
        (("--against", "other.json", "script.py"), "'other.json': this does not hold the data of a convgrad report"),
        (("-o", "no/such/folder.html", "script.py"), "cannot be written"),
        (("--input", "1x3x9x9", "script.py"), "--input is for a model, and 'script.py' is none"),
        (("--stock", "report_models:alone"), "--stock is for a script"),
        (("report_models:alone", "epochs"), "the argument 'epochs' is for a script"),
        (("--secnds", "3", "script.py"), "there is no option '--secnds'"),
        (("report_models:alone", "--epochs"), "No such option: --epochs"),
        (("kernels.csv", "-o"), "Option '-o' requires an argument"),
        (("report_models:wrong",), "raised RuntimeError: Given groups=1"),
        (("report_models:Asserting",), "raised AssertionError: no input at all (hint: --input states"),
        (("report_models:nothing",), "cannot get"),
        (("--seconds", "0", "script.py"), "Invalid value for '--seconds'"),
        (("--seconds", "inf", "report_models:alone"), "--seconds must be positive and finite, got inf"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line(capsys, args: tuple[str, ...], words: str) -> None:
    assert run(["report", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in " ".join(err.split())
    assert not Path("report.html").exists()


def test_without_its_packages_it_says_how_to_get_them(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convgrad.cli.report.find_spec", lambda name: None)
    assert run(["report", "script.py"]) == 2
    assert "pip install 'convgrad[report]'" in " ".join(capsys.readouterr().err.split())
    assert run(["report", "-o", "x.json", "--seconds", "0.1", "script.py"]) == 5


def test_explain_draws_the_roofline(capsys) -> None:
    where = ("--device", "h100 cudnn 9.10")
    assert run(["explain", "g8mb2ic8ih9oc8kh3", *where, "--no-rules", "--plot", "roofline.png"]) == 0
    assert Path("roofline.png").read_bytes().startswith(b"\x89PNG")
    assert run(["explain", "g8mb2ic8ih9oc8kh3", *where, *where, "--plot", "two.png"]) == 2
    assert run(["explain", "g8mb2ic8ih9oc8kh3", "--no-measure", "--plot", "none.png"]) == 2
    assert run(["explain", "g8mb2ic8ih9oc8kh3", *where, "--plot", "no/such/folder.png"]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "--plot draws one roofline, and these are 2" in errors
    assert "nothing to draw" in errors
    assert "no/such/folder.png" in errors
    assert not Path("two.png").exists()
