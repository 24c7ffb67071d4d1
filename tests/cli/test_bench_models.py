"""``convgrad bench layers`` and ``bench steps``: which layers, checked first, resumed where they stopped."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("typer")

from convgrad.backends import aten_defects
from convgrad.cli import bench_layers, bench_steps, models
from convgrad.cli.app import run
from convgrad.cli.bench_layers import layers_of
from convgrad.cli.models import MODELS, Model
from convgrad.diagnostics import Limits
from convgrad.engine import Found, by_rules_alone, choose, measurements, record, trials
from convgrad.engine.found import load
from convgrad.engine.measure import measurer
from convgrad.problem import ConvProblem, Output

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
    monkeypatch.setattr(bench_layers, "limits_of", lambda *args, **kwargs: Limits(1e9, 1e9, "float32", "a test"))
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text(TINY)
    monkeypatch.setattr(bench_layers, "MODELS", {})
    monkeypatch.setattr(bench_steps, "MODELS", {"tiny": Tiny("")})
    monkeypatch.setitem(models.MODELS, "tiny", Tiny(""))
    monkeypatch.setattr(bench_steps, "_SCALES", ((2, 16),))
    monkeypatch.setattr(measurer, "_SECONDS", 0.005)
    measurements.reload()
    yield
    measurements.reload()


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_layers_each_once_forward_and_backward_in_each_layout(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "layers.csv"
    command = ["bench", "layers", "tiny", "--threads", "1", "--seconds", "0.01", "--csv", str(file)]
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
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
    assert run([*command, "--resume"]) == 0
    assert file.read_text() == before
    file.write_text(before[:-1])  # killed in the last row, which lacks nothing but its end
    assert run([*command, "--resume"]) == 0
    assert len(rows(file)) == len(found)
    capsys.readouterr()
    assert run(command) == 2
    assert "--resume" in capsys.readouterr().err


def test_there_is_no_file_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "layers", "tiny", "--resume"]) == 2
    assert "--resume adds to a file" in capsys.readouterr().err


def test_a_run_that_is_cut_off_has_something_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {name: [ConvProblem.parse(f"mb{n + 1}ic{c}ih9oc{c}kh{1 + n % 2}") for n in range(20)] for name, c in
              (("a", 3), ("b", 5))}  # fmt: skip
    monkeypatch.setattr(bench_layers, "layers_of", lambda name, *_: layers[name])
    first, again = (list(bench_layers._in_turn(["a", "b"], 1, 9, ["contiguous"])) for _ in range(2))
    assert first == again
    assert [name for name, _ in first] == ["a", "b"] * 20
    for name, problems in layers.items():
        mine = [p for n, p in first if n == name]
        assert mine != problems
        assert {*mine} == {*problems}
        assert 2 <= sum(p.pointwise for p in mine[:10]) <= 8


def test_a_row_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "layers.csv"
    command = ["bench", "layers", "tiny", "--layout", "contiguous", "--seconds", "0.01", "--csv", str(file)]
    assert run(command) == 0
    whole = rows(file)
    file.write_text(file.read_text()[:-30])
    assert run([*command, "--resume"]) == 0
    assert [r["problem"] + r["output"] for r in rows(file)] == [r["problem"] + r["output"] for r in whole]


def test_what_differs_from_pytorch_gets_no_time(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ways: Any, outputs: Any, device: Any) -> Any:
        calls = trials(ways, outputs, device)
        if len(outputs) == 1 and "native" in calls:
            right = calls["native"]
            calls["native"] = lambda: [t + 1 for t in right()]
        return calls

    monkeypatch.setattr(bench_layers, "trials", wrong)
    monkeypatch.setattr(bench_layers, "_named", lambda steps: ", ".join(s.backend.name for s in steps))
    file = tmp_path / "layers.csv"
    status = run(["bench", "layers", "tiny", "--layout", "contiguous", "--seconds", "0.01", "--csv", str(file)])
    wrong_rows = [r for r in rows(file) if r["note"].startswith("wrong: native")]
    assert status == int(bool(wrong_rows))
    assert all(not r["measured_speed"] for r in wrong_rows)
    assert wrong_rows


def test_out_of_time_it_says_what_is_left(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "layers.csv"
    assert run(["bench", "layers", "tiny", "--minutes", "0.0005", "--csv", str(file)]) == 0
    assert "5 of 6 are left; --resume goes on" in capsys.readouterr().err
    assert len(rows(file)) == 1


def test_steps_in_each_layout_with_equal_losses(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "steps.csv"
    command = ["bench", "steps", "--threads", "1", "--seconds", "0.02", "--csv", str(file)]
    assert run(command) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    found = rows(file)
    assert [(r["model"], r["layout"]) for r in found] == [
        ("tiny", layout) for layout in ("contiguous", "channels_last", "auto")
    ]
    for r in found:
        assert (r["batch"], r["size"], r["convolutions"], r["note"]) == ("2", "16", "2", "")
        assert float(r["stock_ms"]) / float(r["ours_ms"]) == pytest.approx(float(r["speed"]), rel=2e-3)
    assert {r["choice"] for r in found} == {"rules"}
    assert measurements.entries() == {}
    capsys.readouterr()
    assert run([*command, "--resume", "--json"]) == 0
    assert rows(file) == found
    for step in json.loads(capsys.readouterr().out)["data"]["steps"]:
        counts = [step[c] for c in ("batch", "size", "convolutions", "threads", "busy")]
        assert repr(counts) == "[2, 16, 2, 1, 0]"  # and not 2.0
        assert (type(step["replaced"]), type(step["stock_ms"])) == (int, float)


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

class Large(nn.Conv2d):
    def forward(self, x):
        assert x.shape[-1] > 16, "too small"
        return super().forward(x)

def large():
    return Large(3, 4, 3)

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
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(bench_steps, "_SCALES", ((2, 16), (2, 20)))
    monkeypatch.setattr(bench_steps, "_CALLS", 0)  # there is time for the largest images
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.parametrize(
    ("factory", "sizes", "layouts"),
    [
        ("words", ("3", "50"), ["contiguous"]),
        ("large", ("2", "20"), ["contiguous", "channels_last", "auto"]),
        ("pair", ("2", "7"), ["contiguous", "channels_last", "auto"]),
        ("net", ("2", "20"), ["contiguous", "channels_last", "auto"]),
    ],
)
def test_steps_of_a_model_of_the_users(
    own: None, tmp_path: Path, factory: str, sizes: tuple[str, str], layouts: list[str]
) -> None:
    file = tmp_path / "steps.csv"
    command = ["bench", "steps", f"own_models:{factory}", "--measure", "--seconds", "0.02", "--csv", str(file)]
    assert run(command) == 0
    found = rows(file)
    assert [r["layout"] for r in found] == layouts
    assert {(r["model"], r["note"]) for r in found} == {(f"own_models:{factory}", "")}
    assert {(r["batch"], r["size"]) for r in found} == {sizes}
    for module in (sys.modules["own_models"].net, sys.modules["own_models"].volumes):
        assert module.weight.is_contiguous()


def test_a_model_of_the_users_that_cannot_be_called(own: None, capsys: Any) -> None:
    assert run(["bench", "steps", "own_models:unlike_images"]) == 2
    assert "return (nn.Module, example_inputs)" in capsys.readouterr().err
    assert run(["bench", "steps", "own_models:wrong"]) == 2
    assert "raised TypeError" in capsys.readouterr().err
    assert run(["bench", "steps", "unlike_images"]) == 2
    assert "module:factory" in capsys.readouterr().err
    assert run(["bench", "steps", "own_models:nothing", "--seconds", "0.02"]) == 0
    assert "ours ms" in capsys.readouterr().out
    assert run(["bench", "steps", "own_models:words", "--layout", "channels_last"]) == 0
    assert "ours ms" not in capsys.readouterr().out


def test_layers_of_a_model_of_the_users(own: None, tmp_path: Path) -> None:
    file = tmp_path / "layers.csv"
    command = ["bench", "layers", "own_models:words", "own_models:pair", "--seconds", "0.01", "--csv", str(file)]
    assert run(command) == 0
    conv, volume = "g8mb3ic8iw50oc8kw4 bias", "mb2ic2id6ih6iw7oc4kd3kh3kw3 bias"
    expected = {ConvProblem.parse(text) for text in (conv, volume, f"{volume} channels_last")}
    assert {ConvProblem.parse(r["problem"]) for r in rows(file)} == expected


def test_by_the_rules_what_pytorch_gets_wrong_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing that was measured counts, and nothing was read from the store before."""
    problem, cpu = ConvProblem.parse("mb2ic8iw9oc8kw3"), torch.device("cpu")
    outputs: tuple[Output, ...] = ("forward",)
    monkeypatch.setattr(aten_defects, "found", {})
    measurements.add(problem, outputs, cpu, measurements.Measurement({"aten": (1.0,)}))
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


def test_steps_with_every_convolution_measured(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "steps.csv"
    command = ["bench", "steps", "--layout", "channels_last", "--threads", "1", "--seconds", "0.02", "--csv", str(file)]
    assert run([*command, "--measure"]) == 0
    known = measurements.entries()
    assert {key.split(" | ")[1] for key in known if "about" not in key} >= {"forward", "grad_input+grad_weight"}
    assert {len(times) for m in known.values() for times in m["times"].values()} >= {measurements.SETTLED}
    assert run([*command, "--resume"]) == 0  # by the rules is another row
    assert [r["choice"] for r in rows(file)] == ["measured", "rules"]
    assert measurements.entries() == known


def test_steps_of_compiled_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *_: compiled.append(self))
    file = tmp_path / "steps.csv"
    command = ["bench", "steps", "--layout", "contiguous", "--seconds", "0.02", "--csv", str(file)]
    assert run([*command, "--compile"]) == 0
    stock, ours = compiled
    assert stock is not ours
    [row] = rows(file)
    assert (row["choice"], row["note"]) == ("rules, compiled", "")


def test_steps_under_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    file = tmp_path / "steps.csv"
    command = ["bench", "steps", "--layout", "contiguous", "--seconds", "0.02", "--csv", str(file)]
    assert run([*command, "--autocast", "--measure"]) == 0
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    [row] = rows(file)
    assert (row["choice"], row["note"]) == ("measured, bfloat16", "")
    assert any("bfloat16" in key for key in measurements.entries())


@pytest.mark.parametrize("in_both", [False, True])
def test_a_step_whose_loss_differs_or_vanishes_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_both: bool
) -> None:
    def broken(model: nn.Sequential, layout: str | None, example_inputs: Tensor) -> Any:
        assert isinstance(model[1].weight, Tensor)
        model[1].weight.data *= 2
        return accelerate(model, layout, example_inputs=example_inputs)

    def build(self: Model) -> nn.Module:
        net = nn.Conv2d(3, 8, 3)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)  # pyright: ignore[reportArgumentType]
        return net

    accelerate = bench_steps.accelerate_
    if in_both:
        monkeypatch.setattr(Tiny, "build", build)
    else:
        monkeypatch.setattr(bench_steps, "accelerate_", broken)
    file = tmp_path / "steps.csv"
    assert run(["bench", "steps", "--layout", "contiguous", "--seconds", "0.02", "--csv", str(file)]) == 1
    [row] = rows(file)
    assert row["note"].startswith("wrong: the losses are")
    assert not row["speed"]


def test_a_busy_machine_is_busy_and_idle_again(tmp_path: Path) -> None:
    from convgrad.cli import bench_results

    with bench_results.busy_cores(True) as others:
        assert len(others) >= 1
        assert all(other.poll() is None for other in others)
    assert all(other.poll() is not None for other in others)


@pytest.mark.skipif(sys.platform == "win32", reason="nobody tells a process there that its parent has ended")
def test_a_killed_benchmark_leaves_nothing_running() -> None:
    code = (
        "import os\nfrom convgrad.cli.bench_results import busy_cores\nwith busy_cores(True): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120, check=False)  # to its end
    assert done.returncode == -9


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "benchmarks" / "layers").iterdir()), ids=str)
def test_every_file_of_layers_is_one(file: Path) -> None:
    plain, last = (layers_of(str(file), 1, 32, last) for last in (False, True))
    assert len(plain) == len({*plain}) == len(last) > 3
    assert all(p.channels_last for p in last)


def test_efficientnet_has_signals_as_a_trained_one_has() -> None:
    pytest.importorskip("transformers")
    model = MODELS["efficientnet_b0"]
    assert 0.1 < model.build().train()(model.sample(2, 32)).last_hidden_state.std() < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    found = layers_of(name, 2, 224, False)
    assert found
    images = MODELS[name].image
    assert (found[0].in_channels == 3) == images
    assert all(p.dtype is torch.float32 for p in found)
    assert not found[0].channels_last  # later ones may be: a permuted LayerNorm leaves its result so
    last = layers_of(name, 2, 224, True)
    assert any(p.channels_last for p in last) == images


@pytest.mark.parametrize(
    ("milliseconds", "high", "slower"),
    [("10", "0.9", True), ("10", "0.98", False), ("0.05", "0.9", False), ("0.2", "0.9", True), ("10", "inf", False)],
)
def test_slower_is_beyond_noise_and_ten_microseconds(milliseconds: str, high: str, slower: bool) -> None:
    assert bench_layers._is_slower({"measured_high": high, "pytorch_best_ms": milliseconds}) == slower
