"""The GPU benchmark without a GPU: it must work the first time it has one."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import gpu_calls
import gpu_problems
import gpu_report
import pytest
import torch
from gpu_workers import Worker, _answer, in_parallel
from torch import nn

import convgrad
from convgrad.backends import triton
from convgrad.backends.base import described
from convgrad.engine import choice, choose
from convgrad.engine.measure import measurer
from convgrad.engine.registry import get_backend
from convgrad.problem import ConvProblem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def dry_run(out: Path, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", "--out", str(out), "--workers", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_dry_run_and_its_continuation(tmp_path: Path) -> None:
    """Device and versions first, a line for each row, both files; a second run measures only what is missing."""
    said = dry_run(tmp_path, "--only", "mamba", "--seconds", "120").splitlines()
    assert "torch" in said[0]
    assert "triton" in said[0]
    state = json.loads((tmp_path / "gpu-state.json").read_text())
    assert len(state["rows"]) == state["wanted"] == 12
    assert all({"ours NCHW", "ours channels_last"} <= row["times"].keys() for row in state["rows"])
    assert not any("error" in row for row in state["rows"])
    assert [answer["failures"] for answer in state["compiled"].values()] == [[]] * 3
    text = (tmp_path / "gpu.md").read_text()
    assert "no figure here says anything about a GPU" in text
    assert "31x31 forward over nn.Conv2d, worst, at least 14x: not measured" in text
    assert text.count("- host time") == len(gpu_problems.HOST)
    del state["rows"][0]
    (tmp_path / "gpu-state.json").write_text(json.dumps(state))
    again = dry_run(tmp_path, "--only", "mamba", "--seconds", "120")
    assert "11 rows are there already" in again
    rows = json.loads((tmp_path / "gpu-state.json").read_text())["rows"]
    assert rows[:11] == state["rows"]
    assert len(rows) == 12


def test_without_time_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = ["--dry-run", "--out", str(tmp_path), "--only", "mamba", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    assert gpu.main() == 0
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("not measured") >= 7
    assert "met" not in text.replace("geometric", "")


def test_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model by torchvision's name; both sides compute the same, and the table says how long they take."""

    def tiny() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 7, 16), nn.Conv2d(4, 4, 3, groups=4), nn.Dropout(), nn.Flatten())

    given: list[Any] = []
    accelerate = convgrad.accelerate_
    noted = lambda *a, **k: given.append(k["example_inputs"]) or accelerate(*a, **k)  # noqa: E731
    monkeypatch.setattr(convgrad, "accelerate_", noted)
    models = SimpleNamespace(mobilenet_v2=tiny)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    found = gpu_calls.training_step("mobilenet_v2", 2, "channels_last", "eager", "cpu")
    assert found["replaced"] == 1
    assert given[0].shape == (2, 3, 224, 224)  # without it nothing is replaced on a GPU
    assert min(found["stock"], found["ours"]) > 0
    (*_, row, failed, _) = gpu_report.steps_table({"a step": found, "another": {"error": "no answer"}})
    assert row.startswith("| a step | 1 | ")
    assert "no answer" in failed


def test_a_compiled_step_comes_after_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled graph times nothing: it has PyTorch's kernels where the model was not called before."""
    told: list[str] = []
    monkeypatch.setattr(gpu_calls, "_step", lambda *_: told.append("step") or torch.ones(()))
    monkeypatch.setattr(torch, "compile", lambda model: told.append("compile") or model)
    monkeypatch.setattr(gpu_calls, "_of_torchvision", lambda *_: (nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2)))
    gpu_calls.training_step("any", 1, "NCHW", "compiled", "cpu")
    assert told[:4] == ["step", "step", "compile", "step"]


@pytest.mark.parametrize(
    "text", ["g2ic2oc2mb1ih6kh3ph1 channels_last", "mb2ic3ih8oc4kh4sh4", "mb2ic3ih4oc2oh8kh2sh2 transposed"]
)
def test_what_the_first_calls_decide(text: str) -> None:
    said = gpu_calls.verdicts(text, "cpu")
    assert list(said) == (
        ["forward", "grad_input+grad_weight"] if "g2" in text else ["forward", "grad_input", "grad_weight"]
    )
    assert all(": " in one for one in said.values())


@pytest.mark.parametrize("text", gpu_problems.PROPOSED)
def test_a_rule_proposes_something(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_installed", lambda: True)
    with described((9, 0)):
        assert choose(ConvProblem.parse(text), ("forward",), torch.device("cuda"), stored=False)[0].proposed


def test_a_first_call_that_times_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's call goes on with PyTorch's kernels whatever prevents the timing; the script must say what it was."""
    monkeypatch.setattr(choice, "proposals", lambda problem, device: [("reference", "it is said to be fast")])
    monkeypatch.setattr(choice, "by_rule", lambda *_: [])

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("an event has no device")

    monkeypatch.setattr(measurer, "compare", fails)
    monkeypatch.setattr(measurer, "_HOPELESS", 1e9)
    with pytest.raises(RuntimeError, match="an event has no device"):
        gpu_calls.verdicts("g2ic2oc2mb1ih6kh3ph1", "cpu")


def test_results_of_another_machine_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with other versions, or on another card, began anew in their place."""
    other = json.dumps({"conditions": "NVIDIA A10", "warning": "", "card": {}, "rows": [], "wanted": 0})
    (tmp_path / "gpu-state.json").write_text(other)
    (tmp_path / "gpu.md").write_text("# of an A10")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(tmp_path)])
    for _ in range(2):
        run = gpu.Run(gpu.arguments())
        run.resume()
        run.save()
    assert [p.read_text() for p in tmp_path.glob("gpu-state-*.json")] == [other]
    assert [p.read_text() for p in tmp_path.glob("gpu-2*.md")] == ["# of an A10"]


def test_which_backends_have_rows() -> None:
    """Without options the large kernels, and no others, go to the tensor cores; one backend may be named."""
    given = argparse.Namespace(backend="triton,triton:banded", only="", dry_run=False, device="cuda")
    large = {p.name for p, backend in gpu.table(given) if backend == "triton:banded"}
    assert large == {"replknet 32 k31", "replknet 7 k13"}
    assert len({p.name for p, backend in gpu.table(given) if backend == "triton"}) == len(gpu_problems.PROBLEMS) - 2
    given.backend, given.only = "triton:banded", "k13,k31"
    assert [backend for _, backend in gpu.table(given)] == ["triton:banded"] * 6
    given.backend, given.only = "triton", "k13,k31"  # whose rows then say why there are none
    assert [backend for _, backend in gpu.table(given)] == ["triton"] * 6


def test_a_sequence_is_measured_in_both_layouts() -> None:
    problem = ConvProblem.parse("g4ic4oc4mb2iw16ow16kw4pw3")
    for layout, like in gpu_problems.layouts(problem).items():
        given = gpu_calls.operands(like, "cpu", integers=True, layout=layout)
        strides = (64, 1, 4) if layout == "channels_last" else (64, 16, 1)
        assert given["input"].stride() == given["grad_output"].stride() == strides
        assert given["weight"].is_contiguous()


@pytest.mark.slow
def test_some_stages(tmp_path: Path) -> None:
    """Only what is named is run; what an earlier run found is kept."""
    dry_run(tmp_path, "--only", "mamba", "--stages", "card,conformance")
    state = json.loads((tmp_path / "gpu-state.json").read_text())
    assert state["card"]["launch"] > 0
    assert [answer["failures"] for answer in state["conformance"].values()] == [[]]
    assert not state["rows"]
    assert "compiled" not in state
    assert "compiled: not run" in (tmp_path / "gpu.md").read_text()
    dry_run(tmp_path, "--only", "mamba", "--stages", "rows", "--seconds", "1")
    assert json.loads((tmp_path / "gpu-state.json").read_text())["conformance"] == state["conformance"]


@pytest.mark.parametrize("text", [*gpu_problems.NARROW, *gpu_problems.WIDE])
def test_the_problems_of_the_conformance_stage(text: str) -> None:
    """Each is taken by one of ours."""
    problem, cuda = ConvProblem.parse(text), torch.device("cuda")
    given = gpu_calls.taking(problem, "triton,triton:banded", "cuda")
    assert [] in [get_backend(name).reasons_against(problem, ("forward",), cuda) for name in given]


@pytest.mark.parametrize(
    ("option", "said"),
    [("--backend=triton,tritn", "no backend is called 'tritn'"), ("--stages=rows,cards", "no stage is called 'cards'")],
)
def test_an_unknown_name_is_said_at_once(option: str, said: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", option])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert said in capsys.readouterr().err


# ---- the workers -----------------------------------------------------------------------------------


def task(kind: str) -> dict[str, Any]:
    """What a worker may meet; it runs in another process."""
    if kind == "dies":
        os._exit(3)
    if kind == "hangs":
        time.sleep(60)
    if kind == "raises":
        raise ValueError("it raised\nwith a second line")
    if kind == "breaks":
        return {"failures": ["CUDA error: an illegal memory access was encountered"], "passed": 0}
    return {"passed": 1, "process": os.getpid()}


def test_a_banned_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernels compute from then on: the conformance suite passed, and rows had PyTorch's times as ours."""
    monkeypatch.setitem(get_backend("triton")._banned, (torch.device("cuda", 0),), "its forward kernel is wrong")
    found = _answer((task, "works"))
    assert found == {
        "answer": {"error": "'triton' was banned: its forward kernel is wrong", "passed": 1},
        "broken": True,
    }


@pytest.mark.slow
def test_a_worker_outlives_its_processes() -> None:
    with Worker() as worker:
        first = worker.run(task, "works", limit=60)
        assert worker.run(task, "works", limit=60) == first
        assert worker.run(task, "raises", limit=60)["error"] == "ValueError: it raised"
        assert worker.run(task, "works", limit=60) == first
        assert worker.run(task, "dies", limit=60)["error"] == "ended the process with status 3"
        second = worker.run(task, "works", limit=60)
        assert second["process"] != first["process"]
        assert worker.run(task, "hangs", limit=1)["error"].startswith("did not return in 1 s")
        third = worker.run(task, "works", limit=60)
        assert third["process"] not in (first["process"], second["process"])
        worker.run(task, "breaks", limit=60)
        assert worker.run(task, "works", limit=60)["process"] != third["process"]


@pytest.mark.slow
def test_one_failure_does_not_end_the_others() -> None:
    texts = ["works", "dies", "works", "raises", "works"]
    found: list[tuple[str, dict[str, Any]]] = []
    in_parallel(task, texts, (), 1, time.monotonic() + 60, lambda *answer: found.append(answer))
    assert [text for text, _ in found] == texts
    assert gpu_report.failures(dict(found)) == [
        "dies: ended the process with status 3",
        "raises: ValueError: it raised",
    ]


def test_a_stop_in_the_middle_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four minutes of a stage were lost; the next run goes on with what is missing."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), "--device", "cpu", "--workers", "1"])
    first, second, third, *_ = gpu_problems.NARROW
    asked: list[str] = []

    def answer(self: Worker, task: object, text: str, *_: object, limit: float) -> dict[str, Any]:
        asked.append(text)
        if text == third:
            raise KeyboardInterrupt
        return {"error": "it hangs"} if asked == [first] else {"passed": 7, "failures": []}

    monkeypatch.setattr(Worker, "run", answer)
    for wanted in ([first, second, third], [first, second, third, first, third]):
        run = gpu.Run(gpu.arguments())
        run.resume()
        with pytest.raises(KeyboardInterrupt):
            gpu.conformance(run)
        assert asked == wanted


# ---- the report ------------------------------------------------------------------------------------

CARD = {"device": "NVIDIA H100 80GB HBM3", "copy bytes/s": 2e12, "float32 peak": 50e12}


def row(problem: str, what: str, ours: float, theirs: float, **more: Any) -> dict[str, Any]:
    times = {"ours NCHW": ours, "ours channels_last": 2 * ours, "pytorch NCHW": theirs, "pytorch channels_last": theirs}
    known = {"problem": problem, "text": problem, "dtype": "float32", "what": what, "backend": "triton"}
    return {**known, "times": times, "bytes": 1_000_000_000, "flops": 1_000_000_000, **more}


def bar(words: str, *rows: dict[str, Any], **card: Any) -> str:
    """The line of one bar."""
    (line,) = (line for line in gpu_report.bars([*rows], CARD | card) if words in line)
    return line


MIXED = [
    row("mobilenet", "forward", 0.55e-3, 1.1e-3),
    row("mobilenet", "backward", 0.6e-3, 6e-3),
    row("replknet k31", "forward", 1e-3, 15e-3),
    row("mamba", "forward", 0.55e-3, 0.55e-3),
]


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("PyTorch's NCHW", "10.00 of 1 rows: met"),
        ("backward over PyTorch's best", "10.00 of 1 rows: met"),
        ("every pass", f"{(2 * 10 * 15 * 1) ** 0.25:.2f} of 4 rows: met"),
        ("31x31 forward", "15.00 of 1 rows: met"),
        ("31x31 backward", "not measured"),
        ("forward up to 7x7", f"{0.5 / 0.85 / 0.55:.2f} of 1 rows: met"),
        ("backward up to 7x7", f"{0.5 / 0.85 / 0.6:.2f} of 1 rows: MISSED"),
        ("grad_weight up to 7x7", "not measured"),
        ("forward conv1d", "1.01 of 1 rows: met"),
    ],
)
def test_bars_met_and_missed(words: str, end: str) -> None:
    """A gigabyte at 2 TB/s takes 0.5 ms, and 0.588 ms at 85 % of it."""
    assert bar(words, *MIXED).endswith(end)
    assert "1 below" in bar("backward up to 7x7", *MIXED)


def test_of_two_rows_the_faster_one_counts() -> None:
    plain = row("replknet k31", "forward", 5e-3, 15e-3)
    wide = row("replknet k31", "forward", 1e-3, 15e-3, backend="triton:banded")
    for rows in ([plain, wide], [wide, plain]):
        assert bar("31x31 forward", *rows).endswith("15.00 of 1 rows: met")
    table = gpu_report.report({"card": CARD, "rows": [plain, wide], "conditions": "", "wanted": 2})
    assert "| replknet k31 | float32 | forward | triton | 5000.0 |" in table
    assert "| replknet k31 | float32 | forward | triton:banded | 1000.0 |" in table


@pytest.mark.parametrize(
    ("launch", "end"), [(1e-4, "1.07 of 1 rows: met"), (2e-4, "too short to judge): not measured")]
)
def test_what_a_few_launches_take_is_not_judged(launch: float, end: str) -> None:
    """The bar allows 0.588 ms for a gigabyte: enough beside launches of 0.1 ms, and not beside such of 0.2 ms."""
    assert bar("forward up to 7x7", MIXED[0], launch=launch).endswith(end)


def test_the_float32_peak_binds_where_there_are_many_products() -> None:
    heavy = row("convnext", "forward", 1e-3, 2e-3, flops=50_000_000_000)
    assert gpu_report.allowed(heavy, CARD, 0.85) == pytest.approx(2e-3)
    assert gpu_report.allowed(heavy, {**CARD, "float32 peak": None}, 0.85) == pytest.approx(0.588e-3, rel=1e-3)


def test_the_card_is_named() -> None:
    """The bars were set for an H100; another device is measured against them, and says so."""
    state = {"card": {**CARD, "device": "NVIDIA H200"}, "rows": [], "conditions": "", "wanted": 0}
    told = gpu_report.report(state).splitlines()
    assert {"- device: NVIDIA H200", "- copy bytes/s: 2000 GB/s", "- float32 peak: 50.0 TFLOP/s"} <= set(told)
    assert any("an H100; this is NVIDIA H200" in line for line in told)
    assert not any("H100;" in line for line in gpu_report.bars([], CARD))


def test_a_row_that_failed_says_why() -> None:
    failed = {**row("mobilenet", "forward", 1, 1), "times": {}, "error": "the process died"}
    assert "the process died" in gpu_report.line(failed, CARD)
    assert gpu_report.bars([failed], {})[0].endswith("not measured")


def test_what_pytorch_refuses_is_not_compared() -> None:
    refused = row("x3d", "backward", 1e-3, 2e-3, refused="pytorch NCHW: RuntimeError: no engine")
    del refused["times"]["pytorch NCHW"]
    assert gpu_report.bars([refused], CARD)[0].endswith("not measured")
    assert gpu_report.bars([refused], CARD)[1].endswith("2.00 of 1 rows: met")
    state = {"card": CARD, "rows": [refused], "conditions": "", "wanted": 1}
    assert "no engine" in gpu_report.report(state)
    del refused["times"]["pytorch channels_last"]
    assert "nanx" in gpu_report.line(refused, CARD)
    assert gpu_report.bars([refused], CARD)[1].endswith("not measured")
