"""``convgrad bench steps``: the losses are compared first, then steps are timed in each layout."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("typer")

from convgrad.backends import aten_defects
from convgrad.cli import bench_steps
from convgrad.cli.app import run
from convgrad.engine import Found, by_rules_alone, choose, measurements, measurer, record
from convgrad.engine.found import load
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

net = nn.Conv2d(3, 4, 3)

def zero():
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net
"""
TINY = ("bench", "steps", "own_models:tiny", "--input", "2x3x16x16", "--threads", "1", "--seconds", "0.02")


@pytest.fixture(autouse=True)
def _own_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, brief_trial: None) -> Any:
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


def steps(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> list[dict[str, Any]]:
    assert run([*args, "--json"]) == status
    return json.loads(capsys.readouterr().out)["data"]["steps"]


def test_steps_in_each_layout_with_equal_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.csv"
    assert run([*TINY, "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "on geometric average, at worst" in printed
    with file.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines))
    assert [r["layout"] for r in found] == ["contiguous", "channels_last", "auto"]
    for r in found:
        assert (r["batch"], r["size"], r["convolutions"], r["choice"], r["note"]) == ("2", "16", "2", "rules", "")
        assert float(r["stock_ms"]) / float(r["ours_ms"]) == pytest.approx(float(r["speed"]))
    assert measurements.entries() == {}


@pytest.mark.parametrize(
    ("factory", "sizes", "layouts"),
    [
        ("words", (3, 50), ["contiguous"]),
        ("pair", (2, 7), ["contiguous", "channels_last", "auto"]),
        ("net", (2, 20), ["contiguous", "channels_last", "auto"]),
    ],
)
def test_steps_of_models_of_the_users(
    capsys: pytest.CaptureFixture[str], factory: str, sizes: tuple[int, int], layouts: list[str]
) -> None:
    shape = ("--input", "2x3x20x20") if factory == "net" else ()
    found = steps(capsys, "bench", "steps", f"own_models:{factory}", *shape, "--measure", "--seconds", "0.02")
    assert [(r["layout"], r["note"], r["batch"], r["size"]) for r in found] == [(x, "", *sizes) for x in layouts]
    for module in (sys.modules["own_models"].net, sys.modules["own_models"].volumes):
        assert module.weight.is_contiguous()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("own_models:unlike_images",), "or its function returns (model, example_inputs)"),
        (("own_models:wrong",), "raised TypeError"),
        (("unlike_images",), "module:factory"),
        (("own_models:words", "--layout", "channels_last"), "needs an input that is an image or a volume"),
        (("own_models:net", "--input", "3,4"), "is no shape"),
    ],
)
def test_what_cannot_be_timed_is_refused(capsys: Any, args: tuple[str, ...], words: str) -> None:
    assert run(["bench", "steps", *args]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_model_without_inputs_and_convolutions(capsys: Any) -> None:
    (row,) = steps(capsys, "bench", "steps", "own_models:nothing", "--seconds", "0.02")
    assert (row["batch"], row["convolutions"]) == (None, 0)


def test_by_the_rules_what_pytorch_gets_wrong_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing that was measured counts, and nothing was read from the store before."""
    problem, cpu = ConvProblem.parse("mb2ic8iw9oc8kw3"), torch.device("cpu")
    outputs: tuple[Output, ...] = ("forward",)
    monkeypatch.setattr(aten_defects, "found", {})
    measurements.add(problem, outputs, cpu, measurements.Measurement({"aten": [1.0]}))
    record(Found(problem, "forward", "a test", ""))
    aten_defects.found.clear()
    load.cache_clear()
    try:
        with by_rules_alone():
            (step,) = choose(problem, outputs, cpu)
        assert step.backend.name != "aten"
        assert not step.reason.startswith("measured")
    finally:
        load.cache_clear()


def test_steps_with_every_convolution_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert [r["choice"] for r in steps(capsys, *TINY, "--layout", "channels_last", "--measure")] == ["measured"]
    known = measurements.entries()
    assert {key.split(" | ")[1] for key in known if "about" not in key} >= {"forward", "grad_input+grad_weight"}
    assert {len(times) for m in known.values() for times in m["times"].values()} >= {measurements.SETTLED}


def test_steps_of_compiled_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *_: compiled.append(self))
    (row,) = steps(capsys, *TINY, "--layout", "contiguous", "--compile")
    stock, ours = compiled
    assert stock is not ours
    assert (row["choice"], row["note"]) == ("rules, compiled", "")


def test_steps_under_autocast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides compute in bfloat16; and what is measured is what runs."""
    seen: set[tuple[bool, torch.dtype]] = set()
    timed = bench_steps.compare

    def comparing(calls: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, output: seen.add((type(module) is nn.Conv2d, output.dtype))
        ):
            for call in calls.values():
                call()
        return timed(calls, *args, **kwargs)

    monkeypatch.setattr(bench_steps, "compare", comparing)
    (row,) = steps(capsys, *TINY, "--layout", "contiguous", "--autocast", "--measure")
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert (row["choice"], row["note"]) == ("measured, bfloat16", "")
    assert any("bfloat16" in key for key in measurements.entries())


@pytest.mark.parametrize("model", ["tiny", "zero"])
def test_a_step_whose_loss_differs_or_vanishes_is_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def broken(model: nn.Sequential, layout: str | None, example_inputs: Tensor) -> Any:
        assert isinstance(model[1].weight, Tensor)
        model[1].weight.data *= 2
        return accelerate(model, layout, example_inputs=example_inputs)

    accelerate = bench_steps.accelerate_
    if model == "tiny":
        monkeypatch.setattr(bench_steps, "accelerate_", broken)
    command = ("bench", "steps", f"own_models:{model}", "--input", "2x3x16x16", "--layout", "contiguous")
    (row,) = steps(capsys, *command, status=1)
    assert row["note"].startswith("wrong: the losses are")
    assert row["speed"] is None
