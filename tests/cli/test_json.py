"""What ``--json`` prints: one object, valid by the schema that is shipped, and nothing else on standard output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("jsonschema")

import jsonschema
import torch

from convgrad.cli.app import COMMANDS, run
from convgrad.cli.schemas import schema_of_command

SMALL = "g4mb2ic4ih6oc4kh3ph1"
KERNELS = 'print("a script of kernels prints this")\n'
FACTORY = (
    'import torch\nprint("printed by a model")\ndef make(): return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3))\n'
)
SCRIPT = 'import torch\nprint("its own")\ntorch.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))\n'


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("convgrad.engine.measure.measurer._SECONDS", 0.01)
    monkeypatch.setattr("convgrad.diagnostics.roofline._best", lambda call, device, seconds=0.0: 1e-3)
    Path("kernels.py").write_text(KERNELS)
    Path("factory_for_json.py").write_text(FACTORY)
    Path("script.py").write_text(SCRIPT)
    Path("shapes").write_text(f"{SMALL}\nmb0ic2iw9oc2kw3\n")


@cache
def validator(command: str) -> Any:
    """By the schema, but closed: what is printed has a description."""
    return jsonschema.Draft202012Validator(schema_of_command(command, more=False))


def valid(command: str, text: str) -> dict[str, Any]:
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    validator(command).validate(found)
    return found


def read(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> dict[str, Any]:
    assert run(args) == status
    found = valid(next(a for a in args if a in COMMANDS), capsys.readouterr().out)
    assert found["arguments"] == list(args)
    return found["data"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_schema(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--schema", command]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["data"]


def test_every_command_has_a_line_on_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
    tables = [part.split("\n\n")[0] for part in page.split("|---|---|\n")[1:]]
    for table in (tables[0], tables[-1]):  # what it answers, what its data holds
        assert re.findall(r"^\| `(\w+)", table, re.MULTILINE) == [*COMMANDS]


def test_what_does_not_belong_there_is_not_valid(capsys: pytest.CaptureFixture[str]) -> None:
    run(["names", "conv2d", "--json"])
    found = json.loads(capsys.readouterr().out)
    for wrong in (
        {"schema": "convgrad info"}, {"schema_version": 1}, {"more": 1}, {"data": {"name": "x", "more": 1}},
    ):  # fmt: skip
        assert not validator("names").is_valid(found | wrong)


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    data = read(capsys, "info", "--json")
    assert data["machine"]["limits"] is None
    assert data["settings"]["threads"] == torch.get_num_threads()
    assert data["backends"]["reference"]["layers"]["dense"]["passes"] == ["forward", "grad_input", "grad_weight"]
    assert read(capsys, "--kernels", "kernels.py", "info", "--json", "--measure")["machine"]["limits"]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    data = read(capsys, "explain", SMALL, "--json", "-o", "forward", "-d", "here", "-d", "h100 cudnn 9.10")
    assert [len(data[key]) for key in ("explanations", "models")] == [2, 0]
    assert any(row["seconds"] for row in data["explanations"][0]["rows"])
    assert any(not row["usable"] for row in data["explanations"][1]["rows"])
    data = read(capsys, "explain", "factory_for_json:make", "--input", "1x3x9x9", "--json")
    assert data["models"][0]["layers"][0]["names"] == ["0"]


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    data = read(capsys, "check", "shapes", "--json", "-b", "reference", "-o", "forward")
    assert (data["problems"], data["checked"], data["ok"]) == (2, 1, True)
    assert {r["status"] for r in data["results"]} >= {"passed"}
    assert read(capsys, "check", "--aten", "--seconds", "0", "--json") == {"aten_findings": []}


def test_tune(capsys: pytest.CaptureFixture[str]) -> None:
    data = read(capsys, "tune", "--json", "--export", "choices", SMALL)
    assert [c["outputs"] for c in data["choices"]] == [["forward"], ["grad_input", "grad_weight"]]
    assert data["exported_problems"] == 1
    assert read(capsys, "tune", "--json", "--import", "choices", "--forget")["removed_problems"] == 1


@pytest.mark.parametrize("args", [("-o", "forward"), ("-o", "grad_weight", "-b", "native", "-b", "triton")])
def test_bench(capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    data = read(capsys, "bench", SMALL, *args, "--json", "--seconds", "0.02", "--return-memory")
    assert data["problems"][0]["speed"] > 0


def test_bench_of_the_layers_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    data = read(capsys, "bench", "factory_for_json:make", "--input", "1x3x9x9", "--seconds", "0.01", "--json")
    assert [row["output"] for row in data["problems"]] == ["forward", "grad_input", "grad_weight"]


def test_standard_error_may_be_closed() -> None:
    command = ["sh", "-c", '"$0" -m convgrad names conv2d --json 2>&-', sys.executable]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert valid("names", done.stdout)["data"]["name"] == "conv2d"


def test_what_a_compiled_kernel_prints_goes_to_standard_error() -> None:
    Path("kernels.py").write_text("import ctypes\nctypes.CDLL(None).printf(b'by C')\n")
    command = [sys.executable, "-m", "convgrad", "--kernels", "kernels.py", "names", "conv2d", "--json"]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    assert valid("names", done.stdout)["data"]["name"] == "conv2d"
    assert "by C" in done.stderr


def test_report_of_a_script_whose_process_prints(capfd: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(f"import os\nos.system('echo a process of it')\n{SCRIPT}")
    assert read(capfd, "report", "--json", "--seconds", "0.1", "script.py")["kind"] == "run"


def test_bench_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--json", "--seconds", "0.5", "--input", "2x3x9x9")
    data = read(capsys, "bench", "steps", "factory_for_json:make", *given)
    assert [step["name"] for step in data["steps"]][:2] == ["PyTorch", "convgrad"]


@pytest.mark.slow
def test_a_report_of_a_model_against_an_earlier_one(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--json", "--seconds", "0.2", "--input", "2x3x9x9", "factory_for_json:make")
    assert run(["report", *model]) == 0
    Path("before.json").write_text(capsys.readouterr().out)
    assert read(capsys, "report", "--against", "before.json", *model)["before"]["rows"]


def test_run_writes_a_file_for_standard_output_is_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--no-limit", "--json", "calls.json", "script.py", "--json"]) == 0
    assert capsys.readouterr().out == "its own\n"
    data = valid("run", Path("calls.json").read_text())["data"]
    assert [(row["outputs"], row["calls"]) for row in data["rows"]] == [(["forward"], 1)]


@pytest.mark.parametrize(
    ("name", "field"), [("conv2d", "functions"), ("finput", "scratch_tensor"), ("convgrad.direct", "direct_functions"),
                        ("thnn_conv2d", "direct_function")],
)  # fmt: skip
def test_names(capsys: pytest.CaptureFixture[str], name: str, field: str) -> None:
    assert read(capsys, "names", name, "--json")[field]


def test_a_bad_request_prints_nothing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "ic2zz", "--json"]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith("convgrad: unrecognized field")
