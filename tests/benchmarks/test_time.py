"""The benchmarks of layers and of steps: which layers, checked first, resumed where they stopped."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("typer")

import result_rows
import time_layers
import time_steps

from convgrad.cli import models
from convgrad.cli.models import MODELS, Model
from convgrad.cli.options import OfModel
from convgrad.diagnostics import Limits
from convgrad.engine import measurements, trials
from convgrad.engine.measure import measurer
from convgrad.problem import ConvProblem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

#: A depthwise layer, a dense one, and the first once more under another name.
TINY = 'g4mb2ic4ih6oc4kh3ph1n"one"\nmb1ic4iw9oc6kw3\ng4mb2ic4ih6oc4kh3ph1n"two"'


class Tiny(Model):
    def build(self) -> nn.Module:
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Dropout(0.5)
        return nn.Sequential(*layers)


@pytest.fixture(autouse=True)
def _tiny_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, brief_trial: None) -> Any:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr(time_layers, "limits_of", lambda *args, **kwargs: Limits(1e9, 1e9, "float32", "a test"))
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text(TINY)
    monkeypatch.setitem(models.MODELS, "tiny", Tiny(""))
    monkeypatch.setattr(time_steps, "_SCALES", ((2, 16),))
    monkeypatch.setattr(measurer, "_SECONDS", 0.005)
    measurements.reload()
    yield
    measurements.reload()


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def layers(file: Path, *args: str) -> int:
    return time_layers.main([str(file), *args])


def test_layers_each_once_forward_and_backward_in_each_layout(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "layers.csv"
    command = ("tiny", "--threads", "1", "--seconds", "0.01")
    assert layers(file, *command) == 0
    printed = capsys.readouterr().out
    assert "tiny" in printed
    assert "by rules" in printed
    found = rows(file)
    problems = {ConvProblem.parse(r["problem"]) for r in found}
    assert len(problems) == 3  # a sequence has one layout
    assert len(found) == 2 * len(problems)
    for r in found:
        p = ConvProblem.parse(r["problem"])
        assert r["layout"] == ("channels_last" if p.channels_last else "contiguous")
        assert r["threads"] == "1"
        assert (r["busy"], r["torch"], r["note"]) == ("0", torch.__version__, "")
        for who in ("rules", "measured"):
            low, speed, high = (float(r[f"{who}_{c}"]) for c in ("low", "speed", "high"))
            assert low <= speed <= high
        took = float(r["pytorch_best_ms"]) / float(r["measured_speed"]) / 1e3
        arithmetic = (2 if r["output"] == "backward" else 1) * p.flops / 1e9
        assert float(r["of_limit"]) * took >= 0.99 * arithmetic  # or the bytes are more
    before = file.read_text()
    assert layers(file, *command, "--resume") == 0
    assert file.read_text() == before
    for lacks in (1, 30):  # killed in the last row: of which only the end of the line is missing, or more
        file.write_text(before[:-lacks])
        assert layers(file, *command, "--resume") == 0
        assert [(r["problem"], r["output"]) for r in rows(file)] == [(r["problem"], r["output"]) for r in found]
    with pytest.raises(SystemExit, match="--resume"):
        layers(file, *command)


def test_a_run_that_is_cut_off_has_something_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: [f"mb{n + 1}ic{c}ih9oc{c}kh{1 + n % 2}" for n in range(20)] for name, c in (("a", 3), ("b", 5))}
    of = {name: [*map(ConvProblem.parse, some)] for name, some in texts.items()}
    monkeypatch.setattr(time_layers, "layers_of", lambda name, *_: of[name])
    first, again = (list(time_layers._in_turn(["a", "b"], 1, 9, ["contiguous"])) for _ in range(2))
    assert first == again
    assert [name for name, _ in first] == ["a", "b"] * 20
    for name, problems in of.items():
        mine = [p for n, p in first if n == name]
        assert mine != problems
        assert {*mine} == {*problems}
        assert 2 <= sum(p.pointwise for p in mine[:10]) <= 8


def test_what_differs_from_pytorch_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ways: Any, outputs: Any, device: Any) -> Any:
        calls = trials(ways, outputs, device)
        if len(outputs) == 1 and "native" in calls:
            right = calls["native"]
            calls["native"] = lambda: right() + 1
        return calls

    monkeypatch.setattr(time_layers, "trials", wrong)
    monkeypatch.setattr(time_layers, "_named", lambda steps: ", ".join(s.backend.name for s in steps))
    file = tmp_path / "layers.csv"
    status = layers(file, "tiny", "--layout", "contiguous", "--seconds", "0.01")
    wrong_rows = [r for r in rows(file) if r["note"].startswith("wrong: native")]
    assert status == int(bool(wrong_rows))
    assert all(not r["measured_speed"] for r in wrong_rows)
    assert wrong_rows


def test_out_of_time_it_says_what_is_left(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "layers.csv"
    assert layers(file, "tiny", "--minutes", "0.0005", "--seconds", "0.01") == 0
    assert "5 of 6 are left; --resume goes on" in capsys.readouterr().err
    assert len(rows(file)) == 1


def test_steps_in_each_layout_by_rules_and_measured(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "steps.csv"
    command = [str(file), "tiny", "--threads", "1", "--seconds", "0.02"]
    assert time_steps.main(command) == 0
    assert "on geometric average" in capsys.readouterr().out
    found = rows(file)
    assert [(r["model"], r["layout"]) for r in found] == [
        ("tiny", layout) for layout in ("contiguous", "channels_last", "auto")
    ]
    for r in found:
        assert (r["batch"], r["size"], r["convolutions"], r["note"]) == ("2", "16", "2", "")
        assert float(r["stock_ms"]) / float(r["ours_ms"]) == pytest.approx(float(r["speed"]), rel=2e-3)
    assert {r["choice"] for r in found} == {"rules"}
    assert measurements.exported() == []
    assert time_steps.main([*command, "--resume"]) == 0
    assert rows(file) == found
    assert time_steps.main([*command, "--resume", "--measure", "--layout", "contiguous"]) == 0
    assert [r["choice"] for r in rows(file)] == ["rules"] * 3 + ["measured"]


def test_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *_: compiled.append(self))
    file = tmp_path / "steps.csv"
    command = [str(file), "tiny", "--layout", "contiguous", "--seconds", "0.02", "--compile", "--autocast"]
    assert time_steps.main(command) == 0
    stock, ours = compiled
    assert stock is not ours
    [row] = rows(file)
    assert (row["choice"], row["note"]) == ("rules, compiled, bfloat16", "")


@pytest.mark.parametrize("in_both", [False, True])
def test_a_step_whose_loss_differs_or_vanishes_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_both: bool
) -> None:
    def broken(model: nn.Sequential, layout: str | None, example_inputs: Tensor) -> Any:
        model[1].weight.data *= 2
        return accelerate(model, layout, example_inputs=example_inputs)

    def build(self: Model) -> nn.Module:
        return nn.Conv2d(3, 8, 3).apply(lambda net: [nn.init.zeros_(p) for p in net.parameters()])

    accelerate = time_steps.accelerate_
    if in_both:
        monkeypatch.setattr(Tiny, "build", build)
    else:
        monkeypatch.setattr(time_steps, "accelerate_", broken)
    file = tmp_path / "steps.csv"
    assert time_steps.main([str(file), "tiny", "--layout", "contiguous", "--seconds", "0.02"]) == 1
    [row] = rows(file)
    assert row["note"].startswith("wrong: the losses are")
    assert not row["speed"]


def test_the_largest_images_that_a_model_takes_in_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[-1] > 16, "too small"
            return super().forward(x)

    monkeypatch.setattr(Tiny, "build", lambda self: Large(3, 4, 3))
    monkeypatch.setattr(time_steps, "_SCALES", ((2, 16), (2, 20), (2, 24)))
    for calls, size in ((0, "24"), (1e9, "20")):
        monkeypatch.setattr(time_steps, "_CALLS", calls)
        file = tmp_path / f"steps{size}.csv"
        assert time_steps.main([str(file), "tiny", "--layout", "contiguous", "--seconds", "0.02"]) == 0
        assert [r["size"] for r in rows(file)] == [size]
    monkeypatch.setattr(time_steps, "_SCALES", ((2, 16),))
    with pytest.raises(RuntimeError, match="takes no images"):
        time_steps.main([str(tmp_path / "none.csv"), "tiny", "--layout", "contiguous"])


OWN = """
import torch
from torch import nn

class Words(nn.Conv1d):
    def forward(self, *, x):
        return super().forward(x)

def words():
    return Words(8, 8, 4, groups=8), {"x": torch.randn(3, 8, 50)}

def pair():
    return nn.Conv3d(2, 4, 3), (torch.randn(2, 2, 6, 6, 7),)
"""


def test_layers_of_a_model_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "layers.csv"
    (tmp_path / "own_layers.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert layers(file, "own_layers:words", "own_layers:pair", "--seconds", "0.01") == 0
    conv, volume = "g8mb3ic8iw50oc8kw4 bias", "mb2ic2id6ih6iw7oc4kd3kh3kw3 bias"
    expected = {ConvProblem.parse(text) for text in (conv, volume, f"{volume} channels_last")}
    assert {ConvProblem.parse(r["problem"]) for r in rows(file)} == expected


def test_a_busy_machine_is_busy_and_idle_again() -> None:
    with result_rows.busy_cores(True) as others:
        assert len(others) >= 1
        assert all(other.poll() is None for other in others)
    assert all(other.poll() is not None for other in others)


@pytest.mark.skipif(sys.platform == "win32", reason="nobody tells a process there that its parent has ended")
def test_a_killed_benchmark_leaves_nothing_running() -> None:
    code = "import os\nfrom result_rows import busy_cores\nwith busy_cores(True): os.kill(os.getpid(), 9)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, timeout=120, check=False)  # to its end
    assert done.returncode == -9


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "layers").iterdir()), ids=str)
def test_every_file_of_layers_is_one(file: Path) -> None:
    plain, last = (time_layers.layers_of(str(file), 1, 32, last) for last in (False, True))
    assert len(plain) == len({*plain}) == len(last) > 3
    assert all(p.channels_last for p in last)


def test_efficientnet_has_signals_as_a_trained_one_has() -> None:
    pytest.importorskip("transformers")
    model, images = models.with_inputs("efficientnet_b0", "cpu", OfModel("2x3x32x32"))
    assert 0.1 < model.train()(images).last_hidden_state.std() < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    found = time_layers.layers_of(name, 2, 224, False)
    assert found
    images = len(MODELS[name].input) == 3
    assert (found[0].in_channels == 3) == images
    assert all(p.dtype is torch.float32 for p in found)
    assert not found[0].channels_last  # later ones may be: a permuted LayerNorm leaves its result so
    last = time_layers.layers_of(name, 2, 224, True)
    assert any(p.channels_last for p in last) == images


@pytest.mark.parametrize(
    ("milliseconds", "high", "slower"),
    [("10", "0.9", True), ("10", "0.98", False), ("0.05", "0.9", False), ("0.2", "0.9", True), ("10", "inf", False)],
)
def test_slower_is_beyond_noise_and_ten_microseconds(milliseconds: str, high: str, slower: bool) -> None:
    assert time_layers._is_slower({"measured_high": high, "pytorch_best_ms": milliseconds}) == slower
