"""``convgrad bench steps``: the forms of a training step, each by its time and its speed."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from convgrad.backends import aten_defects
from convgrad.cli.app import run
from convgrad.engine import Found, choose, measurements, record
from convgrad.engine.measure import measurer
from convgrad.engine.registry import load_recorded
from convgrad.problem import ConvProblem, Output

OWN = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 4, groups=8)

    def forward(self, x, *, scale):
        return {"result": scale * self.conv(x)}

def words():
    return Words(), {"x": torch.randn(3, 8, 50), "scale": torch.ones(1)}

def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Dropout(0.5))

def unlike_images():
    return nn.Conv2d(5, 4, 3)

volumes = nn.Conv3d(2, 4, 3)

def wrong():
    return volumes, {"y": torch.randn(2)}

class Nothing(nn.Linear):
    def forward(self):
        return self.weight

def nothing():
    return Nothing(3, 3), {}

def pair():
    return volumes, (torch.randn(2, 2, 6, 6, 7),)

def interrupted():
    raise KeyboardInterrupt

net = nn.Conv2d(3, 4, 3)
"""


@pytest.fixture(autouse=True)
def _own_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, brief_trial: None, instant_limits: None) -> Any:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(measurer, "_SECONDS", 0.005)
    measurements.reload()
    yield
    sys.modules.pop("own_models", None)
    measurements.reload()


def steps(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert run(["bench", "steps", *args, "--seconds", "0.1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["data"]["steps"]


def test_each_form_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.csv"
    command = ["bench", "steps", "own_models:tiny", "own_models:words", "--input", "2x3x16x16", "--seconds", "0.2"]
    assert run([*command[:3], *command[4:], "--csv", str(file), "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    with file.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines))
    assert [r["name"] for r in found][:2] == ["PyTorch", "convgrad"]
    for r in found:
        assert r["model"] == "own_models:tiny"
        assert f"{float(r['milliseconds']):.4g}" in printed
    assert found[0]["speedup"] == ""
    assert float(found[1]["low"]) <= float(found[1]["speedup"]) <= float(found[1]["high"])


def test_interrupted_it_prints_and_writes_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "steps", "own_models:pair", "own_models:interrupted", "--seconds", "0.2", "--csv", "steps.csv"]
    assert run(command) == 130
    assert Path("steps.csv").read_text(encoding="utf-8").count("own_models:pair") >= 2
    printed, said = capsys.readouterr()
    assert "convgrad: interrupted" in said
    assert "own_models:pair  PyTorch" in printed


@pytest.mark.parametrize("factory", ["words", "pair", "net"])
def test_steps_of_models_of_the_users(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    found = steps(capsys, f"own_models:{factory}", *(("--input", "2x3x20x20") if factory == "net" else ()))
    assert [r["name"] for r in found][:2] == ["PyTorch", "convgrad"]
    for module in (sys.modules["own_models"].net, sys.modules["own_models"].volumes):
        assert module.weight.is_contiguous()


def test_steps_in_channels_last_alone(capsys: pytest.CaptureFixture[str]) -> None:
    seen: set[bool] = set()
    with torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.add(args[0].is_contiguous(memory_format=torch.channels_last))
    ):
        found = steps(capsys, "own_models:tiny", "--input", "2x3x16x16", "--layout", "channels_last")
    assert [r["name"] for r in found] == ["PyTorch", "convgrad"]
    assert seen == {True}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("own_models:unlike_images",), "or its function returns (model, example_inputs)"),
        (("own_models:wrong",), "raised TypeError"),
        (("own_models:nothing",), "no convolution ran in this model"),
        (("unlike_images",), "module:factory"),
        (("own_models:words", "--layout", "channels_last"), "needs an input that is an image or a volume"),
        (("own_models:net", "--input", "3,4"), "is no shape"),
    ],
)
def test_what_cannot_be_timed_is_refused(capsys: Any, args: tuple[str, ...], words: str) -> None:
    assert run(["bench", "steps", *args]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_by_the_rules_what_pytorch_gets_wrong_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing that was measured counts, and nothing was read from the store before."""
    problem, cpu = ConvProblem.parse("mb2ic8iw9oc8kw3"), torch.device("cpu")
    outputs: tuple[Output, ...] = ("forward",)
    monkeypatch.setattr(aten_defects, "found", {})
    measurements.add(problem, outputs, cpu, measurements.Measurement({"aten": [1.0]}))
    record(Found(problem, "forward", "a test", ""))
    aten_defects.found.clear()
    load_recorded.cache_clear()
    try:
        (step,) = choose(problem, outputs, cpu, stored=False)
        assert step.backend.name != "aten"
        assert not step.reason.startswith("measured")
    finally:
        load_recorded.cache_clear()


def test_steps_under_autocast_with_every_convolution_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides compute in bfloat16; and what is measured is what runs."""
    seen: set[tuple[str, torch.dtype]] = set()
    with torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: seen.add((type(module).__name__, output.dtype))
    ):
        steps(capsys, "own_models:tiny", "--input", "2x3x16x16", "--autocast", "--measure")
    assert ("Conv2d", torch.bfloat16) in seen
    assert any("bfloat16" in row["problem"] for row in measurements.exported())
    assert {len(times) for m in measurements.exported() for times in m["times"].values()} >= {measurements.SETTLED}
