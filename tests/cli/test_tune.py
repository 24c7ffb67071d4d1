"""``convgrad tune``: measured ahead of time, interrupted and resumed, taken to another machine of the same kind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from tests.engine.measuring import deterministic, fresh

from convgrad import engine
from convgrad.cli.app import run
from convgrad.cli.tune import jobs_of
from convgrad.engine import cache, choose, measurements, store
from convgrad.engine.measure import measurer
from convgrad.engine.measure.environment import environment
from convgrad.problem import ConvProblem

SMALL, OTHER = "g8mb2ic8ih12oc8oh12kh3sh1ph1dh0", "g1mb2ic8ih12oc4oh12kh1sh1ph0dh0"
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-W", "error", "-m", "convgrad", "tune"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    fresh(monkeypatch)
    monkeypatch.setattr(measurer, "_SECONDS", 0.01)  # what is chosen does not matter here
    yield tmp_path
    measurements.reload()
    cache.invalidate()


class Positive(torch.nn.Conv2d):
    """Its result has a size that depends on the data."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input[super().forward(input) > 0]


def counts() -> dict[str, int]:
    """Output and problem -> how often it was measured."""
    return {
        f"{row['outputs']} {row['problem']}": len(next(iter(row["times"].values()))) for row in measurements.exported()
    }


def each(problem: str, times: int = 3) -> dict[str, int]:
    outputs = ("forward", "grad_input", "grad_input+grad_weight", "grad_weight")
    return {f"{o} {problem}": times for o in outputs}


def test_first_it_searches_for_what_pytorch_gets_wrong(capsys) -> None:
    assert run(["tune", "--aten", "0.2", SMALL]) == 0
    printed = capsys.readouterr().out
    assert printed.index("found wrong beyond") < printed.index("measured 3 times on this machine")


def test_a_problem_is_measured_forward_and_backward(capsys) -> None:
    assert run(["tune", SMALL]) == 0
    printed = capsys.readouterr().out
    assert printed.count("measured 3 times on this machine") == 2
    assert counts() == each(SMALL)
    spent = measurer._state.spent
    assert run(["tune", SMALL]) == 0  # nothing is left to do
    assert measurer._state.spent == spent


def test_of_a_padding_mode_its_padded_copy_is_measured(capsys) -> None:
    """That is what a choice is looked up for."""
    problem = ConvProblem.parse("ic8ih8oc8kh3ph1 circular")
    assert run(["tune", str(problem)]) == 0
    assert capsys.readouterr().out.count("measured 3 times on this machine") == 2
    assert counts() == each("g1mb2ic8ih10oc8oh8kh3sh1ph0dh0")
    (step,) = choose(problem, ("forward",), torch.device("cpu"))
    assert step.reason.startswith("measured")


def test_info_says_what_is_there(capsys) -> None:
    assert run(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["store"]["measured"] == {}
    assert run(["tune", SMALL]) == 0
    capsys.readouterr()
    assert run(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data"]["store"]
    assert found["measured"] == {environment(torch.device("cpu")): 1}
    assert found["folder"].endswith("store")


def test_a_file_of_problems(folder) -> None:
    (folder / "list.txt").write_text(f"# two\n{SMALL}\n{OTHER}\n")
    assert run(["tune", "list.txt"]) == 0
    assert counts() == each(SMALL) | each(OTHER)


def test_a_models_convolutions(folder) -> None:
    (folder / "nets.py").write_text(
        "import torch.nn as nn\n"
        "def net(): return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8))\n"
    )
    assert run(["tune", "--input", "2x3x12x12", "nets:net"]) == 0
    first = "g1mb2ic3ih12oc8oh12kh3sh1ph1dh0"
    expected = {f"forward {p} bias": 3 for p in (first, SMALL)}
    assert counts() == expected | {k: 3 for p in (first, SMALL) for k in each(p) if not k.startswith("forward")}


@pytest.mark.usefixtures("small_rows")
def test_a_models_linear_layers(folder) -> None:
    (folder / "rows.py").write_text("import torch.nn as nn\ndef net(): return nn.Linear(8, 4)\n")
    assert run(["tune", "--input", "2x3x8", "rows:net"]) == 0
    problem = "g1mb1ic8ih1iw6oc4oh1ow6kh1kw1sh1sw1ph0pw0dh0dw0 channels_last"
    assert counts() == {k + " bias" * k.startswith("forward"): 3 for k in each(problem)}


def test_a_scripts_convolutions_with_its_arguments(folder, capsys) -> None:
    (folder / "train.py").write_text(
        "import sys, torch\n"
        "x, w = torch.ones(int(sys.argv[1]), 8, 12, 12), torch.ones(8, 1, 3, 3, requires_grad=True)\n"
        "x.requires_grad_()\n"
        "torch.nn.functional.conv2d(x, w, padding=1, groups=8).sum().backward()\n"
    )
    assert run(["tune", "train.py", "2"]) == 0
    assert counts() == each(SMALL)
    with (folder / "train.py").open("a") as script:
        script.write("sys.exit(3)\n")
    assert run(["tune", "train.py", "2"]) == 3


def test_a_script_that_uses_no_measurement(folder, capsys) -> None:
    (folder / "train.py").write_text("import torch; torch.nn.Conv1d(8, 8, 3, groups=8)(torch.ones(1, 8, 12))")
    with deterministic():
        assert run(["tune", "train.py"]) == 2
    assert "'train.py' demands deterministic algorithms" in capsys.readouterr().err
    assert counts() == {}


def test_every_count_is_of_problems(folder, capsys) -> None:
    """Not of the passes, of the problems that stand for similar ones, or of a bias."""
    (folder / "layers").write_text(f"{SMALL} bias\n{OTHER}\n")
    assert run(["tune", "layers", "--export", "choices.json"]) == 0
    assert "choices for 2 problems written" in capsys.readouterr().out
    assert run(["info"]) == 0
    assert "choices for 2 problems on " in " ".join(capsys.readouterr().out.split())
    assert run(["tune", "--forget", "--import", "choices.json"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "choices for 2 problems removed", "choices for 2 problems read, 2 of them for this kind of machine"
    ]  # fmt: skip


def test_a_bad_request_forgets_nothing(capsys) -> None:
    assert run(["tune", SMALL]) == 0
    before = measurements.exported()
    for what in ("absent.py", "nothing", "mb0ic3ih9oc3kh3", "ic2zz9"):
        capsys.readouterr()
        assert run(["tune", "--forget", what]) == 2
        assert capsys.readouterr().out == ""
    assert measurements.exported() == before != []


def test_choices_move_to_another_machine_of_the_same_kind(folder, capsys) -> None:
    assert run(["tune", "--export", "choices.json", SMALL]) == 0
    content = json.loads((folder / "choices.json").read_text())
    here = environment(torch.device("cpu"))
    assert {c["machine"] for c in content["choices"]} == {here}
    assert {c["problem"] for c in content["choices"]} >= {SMALL}
    before = measurements.exported()
    other = json.loads(json.dumps(content).replace(here, f"cpu of another kind; {here}"))
    (folder / "other.json").write_text(json.dumps(other))
    assert run(["tune", "--forget"]) == 0
    assert measurements.exported() == []
    capsys.readouterr()
    assert run(["tune", "--import", "choices.json"]) == 0
    assert run(["tune", "--import", "choices.json"]) == 0  # once more changes nothing
    assert measurements.exported() == before
    assert run(["tune", "--import", "other.json"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["choices for 1 problem read, 1 of them for this kind of machine"] * 2 + [
        "choices for 1 problem read, 0 of them for this kind of machine"
    ]
    assert run(["tune", SMALL]) == 0
    assert measurer._state.measured == {} or counts() == each(SMALL)


def test_what_cannot_be_stored_is_said_and_is_no_success(folder, monkeypatch, capsys) -> None:
    """Unless it is exported: then it is kept."""
    assert run(["tune", "--export", "choices.json", SMALL]) == 0
    (folder / "file").write_text("in place of a folder")
    monkeypatch.setenv("CONVGRAD_CACHE", str(folder / "file" / "store"))
    monkeypatch.setattr(store, "_unwritten", {})
    monkeypatch.setattr(store, "_warned", True)
    for args in ((SMALL,), ("--import", "choices.json")):
        capsys.readouterr()
        assert run(["tune", *args]) == 1
        assert "choices could not be stored" in capsys.readouterr().err
    assert run(["tune", "--export", "again.json", SMALL]) == 0


GOOD = {"machine": "m", "outputs": "forward", "problem": SMALL, "times": {"aten": [1.0]}}


@pytest.mark.parametrize("content", [
    3, [], {}, "[" * 100_000, {"choices": 3}, {"choices": [GOOD, 3]},
    *({"choices": [GOOD, {**GOOD, **bad}]} for bad in (
        {"problem": "nothing"}, {"outputs": "backward"}, {"machine": "m | n"}, {"times": {"aten": [0.0]}}, {"times": 3},
        {"times": {"aten": [10**400]}}, {"machine": "\x1b[31m"}, {"machine": "\ud800"}, {"times": {"aten": [True]}},
        {"times": {"aten": ["1.5"]}}, {"machine": "m" * 10**7}, {"machine": 3}, {"problem": None}, {"outputs": []},
        {"times": {"aten": [1.0], "reference": [0.5]}}, {"times": {"aten, reference": [1.0]}}, {"wrong": {"aten": 3}},
        {"times": {"aten, native": [1.0]}}, {"times": {"aten": 1.0}}, {"times": {"a" * 10**4: [1.0]}}, {"wrong": []},
        {"times": {"aten": []}}, {"times": {}}, {"times": {"aten": [float("inf")]}}, {"times": {"aten": [None]}},
    )),
])  # fmt: skip
def test_what_is_no_export_is_refused_whole(folder, content, capsys) -> None:
    (folder / "bad.json").write_text(content if isinstance(content, str) else json.dumps(content))
    assert run(["tune", "--import", "bad.json"]) == 2
    assert capsys.readouterr().err.startswith("convgrad: bad.json holds no exported choices")
    assert measurements.exported() == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there is nothing to do"),
        (["nothing.py", "--epochs", "1"], "there is no file 'nothing.py' (hint: it was looked for in "),
        (["--input", "2x3x8x8", "tests.cli.test_tune:Positive"], "`convgrad tune` and `run` a script"),
        ([SMALL, "epochs"], "only a script takes arguments"),
        ([SMALL, "--epochs"], "No such option: --epochs"),
        (["--dtype", "bfloat16", SMALL], "--dtype is for a model"),
        (["mb2ic3"], "no spatial dimension"),
        (["--device", "cuda:99", SMALL], "cannot run on"),
        (["--device", "meta", SMALL], "cannot run on 'meta'"),
        (["--threads", "100000", SMALL], "Input should be less than or equal to 1024"),
        (["--import", "absent.json"], "'absent.json': No such file"),
        (["--export", "no/such/file.json"], "'no/such/file.json' cannot be written"),
        (["mb0ic3ih9oc3kh3"], "'mb0ic3ih9oc3kh3' holds nothing to measure"),
    ],
)
def test_a_bad_request_is_one_line(args, message, capsys) -> None:
    assert run(["tune", *args]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("convgrad: ")
    assert message in error


def test_what_another_process_measures_meanwhile_is_not_measured_again(monkeypatch, capsys) -> None:
    jobs, asked = [*jobs_of([ConvProblem.parse(SMALL)])], []

    def another(problem, outputs, device, force):
        asked.append(outputs)
        for job in jobs * 3:
            measurements.add(*job, device, measurements.Measurement({"aten": (1.0,)}))

    monkeypatch.setattr(engine, "measure_now", another)
    assert run(["tune", SMALL]) == 0
    assert asked == [("forward",)]
    assert "not measured" not in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="another signal")
def test_interrupted_it_goes_on_where_it_was(folder) -> None:
    many = [f"g8mb2ic8ih{n}oc8kh3ph1" for n in range(10, 60)]
    (folder / "many.txt").write_text("\n".join(many))
    pipe = subprocess.PIPE
    # A suite in the background of a shell ignores the signal, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [*COMMAND, "--threads", str(torch.get_num_threads()), str(folder / "many.txt")]
    try:
        first = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    finally:
        signal.signal(signal.SIGINT, before)
    end = time.monotonic() + 120
    while not counts() and first.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    printed, error = first.communicate()
    assert first.returncode == 130, printed + error
    left = re.search(r"interrupted; (\d+) of 300 measurements are left, the same command", " ".join(error.split()))
    assert left is not None
    assert 0 < int(left[1]) < 300  # what was measured once or twice counts
    assert "measured once" in printed
    assert "no rule prefers" not in printed  # only what was measured is shown
    done = counts()
    assert 0 < len(done) < 200
    (folder / "many.txt").write_text("\n".join(many[:1]))  # what is left of the first
    assert run(["tune", "many.txt"]) == 0
    measured = {key: n for key, n in counts().items() if "ih10oc" in key}
    assert all(3 <= n <= 4 for n in measured.values()), measured  # a single pass is measured with both, too
