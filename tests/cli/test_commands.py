"""The command line as a user meets it: what it prints, its exit status, its errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import typer
from tests.check.broken import around

import convgrad
from convgrad.backends.reference import ReferenceBackend
from convgrad.cli.app import run
from convgrad.diagnostics import measure_limits
from convgrad.engine import Found, register
from convgrad.problem import ConvProblem

SMALL = "g4mb2ic4ih6oc4kh3ph1"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("convgrad.diagnostics.roofline._best", lambda call, device, seconds=0.0: 1e-3)


def call(capsys, *args: str) -> tuple[int, str, str]:
    status = run(args)
    got = capsys.readouterr()
    return status, got.out, got.err


def shown(capsys, *args: str, status: int = 0) -> str:
    """What is printed on standard output."""
    found, printed, _ = call(capsys, *args)
    assert found == status
    return printed


def refused(capsys, *args: str) -> str:
    """The error, in one line."""
    status, printed, error = call(capsys, *args)
    assert status == 2
    assert printed == ""
    assert error.startswith("convgrad: ")
    assert "Traceback" not in error
    return " ".join(error.split())


# ---- info ----------------------------------------------------------------------------------------


def test_info_is_a_screen(capsys) -> None:
    printed = shown(capsys, "info")
    for words in ("versions", torch.__version__, "backends", "reference", "mkldnn_enabled", "limits", "not measured"):
        assert words in printed
    assert len(printed.splitlines()) <= 24


def test_info_says_why_nothing_can_be_stored(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("convgrad.engine.measure.store._failed", {})
    monkeypatch.setattr("convgrad.engine.measure.store._warned", False)
    status, printed, error = call(capsys, "info")
    assert (status, error) == (0, "")
    assert "below; cannot be written (" in " ".join(printed.split())


def test_info_has_every_reason_and_defect_with_all(capsys) -> None:
    printed = shown(capsys, "info", "--all")
    for words in ("depthwise on", "groups of 4 channels", "it runs on GPUs", "rows left over", "verified"):
        assert words in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's would be measured too")
def test_limits_are_measured_again_in_every_dtype_that_is_stored(capsys, monkeypatch) -> None:
    measure_limits(torch.float64)
    measured: list[torch.dtype] = []
    monkeypatch.setattr("convgrad.diagnostics.measure_limits", lambda dtype, device: measured.append(dtype))
    shown(capsys, "info", "--measure")
    assert measured == [torch.float32, torch.float64]


# ---- explain -------------------------------------------------------------------------------------


def test_explain_a_problem_here_and_there(capsys) -> None:
    printed = shown(
        capsys, "explain", SMALL, "-o", "grad_weight", "-d", "here", "-d", "h100 cudnn 9.10 bfloat16 channels_last",
        "--rules",
    )  # fmt: skip
    here, there = printed.split("\n\n")
    there = " ".join(there.split())
    assert "on this CPU" in here
    assert " ms" in here.split("grad_weight")[1]  # measured
    assert "bfloat16 channels_last" in there
    assert "Cudnn (cudnn_convolution_backward)" in there
    assert "yes AND input or weight suggests channels_last" in there
    assert "datasheet of the H100" in there


def test_info_begins_with_missing_kernels(capsys, monkeypatch) -> None:
    monkeypatch.setattr("convgrad.backends.why_absent", lambda: "there is no compiler")
    assert shown(capsys, "info").startswith("NO COMPILED KERNELS: there is no compiler")


def test_explain_names_the_others_and_shows_them_with_all(capsys) -> None:
    printed = shown(capsys, "explain", SMALL, "--no-measure")
    others = r"not chosen: .*; \d+ more cannot compute it \(--all shows why; in Python, "
    assert re.search(others, " ".join(printed.split()))
    assert len(printed.splitlines()) < 30
    assert " ms" not in printed
    assert "why PyTorch" not in printed
    printed = shown(capsys, "explain", SMALL, "--no-measure", "--all")
    assert "it runs on GPUs" in printed
    assert "others cannot" not in printed


DENSE_CIRCULAR = "ic64ih8oc64kh3ph1 circular"


def test_explain_and_check_where_a_padded_copy_is_chosen(capsys) -> None:
    """PyTorch's call is measured with its copy, and no row says again that there is one."""
    printed = shown(capsys, "explain", DENSE_CIRCULAR, "-o", "forward", "--json")
    (explained,) = json.loads(printed)["data"]["explanations"]
    chosen, *others = explained["rows"]
    assert chosen["backend"] == "aten (padded copy)"
    assert chosen["seconds"] > 0
    assert chosen["runs"]
    assert "aten" not in {row["backend"] for row in others}
    printed = shown(capsys, "check", DENSE_CIRCULAR)
    assert re.search(r"\d\d checks passed, 0 failed", printed)


def test_explain_measures_what_pytorch_does_with_a_padding_mode(capsys) -> None:
    printed = shown(capsys, "explain", f"{SMALL} circular", "-o", "forward", "--json")
    rows = json.loads(printed)["data"]["explanations"][0]["rows"]
    assert [r["backend"] for r in rows if r["seconds"]] == ["native", "aten (padded copy)"]


@pytest.mark.usefixtures("_wrong")
def test_what_is_wrong_over_a_padded_copy_is_repeated(capsys) -> None:
    given = ("check", "ic2ih6oc4kh3ph1 circular", "-b", "wrong (padded copy)", "-o", "forward", "--property", "exact")
    printed = shown(capsys, *given, status=1)
    assert "wrong (padded copy) forward of" in " ".join(printed.split())


FACTORY = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 4, stride=4)
        self.mix = torch.nn.Conv2d(8, 8, 7, padding=3, groups=8)
    def forward(self, x):
        return self.mix(self.stem(x))
def make():
    return Block()
def fed():
    return Block(), torch.randn(2, 3, 32, 32)
def late():
    import my_blocks
    torch.linspace(0, 1, 3)[1].item()
    return my_blocks.Block()
def pooled():
    return torch.nn.Sequential(Block(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(8))
number = 3
def linear():
    return torch.nn.Linear(64, 64), torch.ones(64, 64)
def half():
    return torch.nn.Conv2d(3, 4, 3).half(), torch.ones(1, 3, 8, 8).half()
def raises():
    raise RuntimeError("one line\\nand another")
def ends():
    raise SystemExit(0)
"""


def test_explain_a_model_of_ones_own(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "my_factory_module.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    shape = ("--input", "2x3x32x32")
    printed = shown(capsys, "explain", "my_factory_module:make", *shape)
    assert "2 convolutions, 2 different" in printed
    assert call(capsys, "explain", "my_factory_module:fed")[1] == printed
    (tmp_path / "my_blocks.py").write_text(FACTORY)
    assert call(capsys, "explain", "my_factory_module:late", *shape)[1] == printed
    assert "g1mb2ic3ih224" in shown(capsys, "explain", "my_factory_module:pooled")  # normalizes over the images
    printed = shown(
        capsys, "explain", "my_factory_module:make", *shape, "-l", "7x7", "-o", "grad_weight", "-d", "a100 float16"
    )
    assert "g8mb2ic8ih8oc8oh8kh7sh1ph3dh0" in printed
    assert "CudaDepthwise2d (conv_depthwise2d_backward)" in printed
    assert "no convolution of this model" in refused(capsys, "explain", "my_factory_module:make", *shape, "-l", "9x9")
    assert "'int' object is not callable (hint: module:factory" in refused(
        capsys, "explain", "my_factory_module:number"
    )
    assert "cannot get" in refused(capsys, "explain", "my_factory_module:nothing")
    assert "is no shape" in refused(capsys, "explain", "my_factory_module:make", "--input", "3,4")
    assert shown(capsys, "explain", "my_factory_module:linear").startswith("1 linear layer, 1 different")
    assert "oh6kh3sh1ph0dh0 float16 bias" in shown(capsys, "explain", "my_factory_module:half")
    assert "raised RuntimeError: one line and another (hint" in refused(capsys, "explain", "my_factory_module:raises")
    assert "raised SystemExit: 0" in refused(capsys, "explain", "my_factory_module:ends")
    (tmp_path / "my_script.py").write_text("raise SystemExit(0)")
    assert "'my_script:make' raised SystemExit: 0" in refused(capsys, "explain", "my_script:make")


def test_the_rules_of_a_complex_problem_are_those_of_its_real_convolutions(capsys) -> None:
    printed = shown(capsys, "explain", "g4mb2ic4ih9oc4kh5 complex64", "--rules", "--no-measure", "--all")
    assert "for each of the three real convolutions" in printed
    runs = re.search(r"(\w+) \(\w+\), as three real ones", printed)
    assert runs is not None, printed
    assert f"backend: {runs[1]}\n" in printed


@pytest.mark.usefixtures("small_rows")
def test_explain_layers_that_not_every_machine_has(capsys, tmp_path, monkeypatch) -> None:
    """A linear layer is one of ours on a CPU alone."""
    (tmp_path / "mixed_layers.py").write_text(
        "from torch.nn import Conv1d, Linear, ModuleDict, Module\n"
        "class Net(Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.mix = ModuleDict({'rows': Linear(8, 4), 'steps': Conv1d(3, 5, 1)})\n"
        "    def forward(self, x):\n"
        "        return self.mix['steps'](self.mix['rows'](x))\n"
    )
    monkeypatch.chdir(tmp_path)
    given = ("explain", "mixed_layers:Net", "--input", "2x3x8", "-l", "mix", "-d", "here", "-d", "h100")
    printed = shown(capsys, *given, "--no-measure", "--json")
    problems = [e["problem"] for e in json.loads(printed)["data"]["explanations"]]
    assert [p.startswith("g1mb2ic3iw4oc5") for p in problems] == [False, True, True]


def test_explain_a_known_model(capsys) -> None:
    pytest.importorskip("transformers")
    printed = shown(capsys, "explain", "convnext", "-d", "h100 cudnn 9.10 bfloat16 channels_last")
    assert "22 convolutions" in printed
    assert "aten Cudnn" in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("explain", "g96ic96zz"), "unrecognized field 'zz'"),
        (("explain", "convnet"), "neither a problem nor a model"),
        (("explain", SMALL, "-d", "h10"), "did you mean 'h100'"),
        (("explain",), "(hint: see convgrad explain --help)"),
        (("explain", SMALL, "-d"), "(hint: see convgrad explain --help)"),
        (("explain", SMALL, "-d", "h100 float16 float32"), "one dtype at a time, got float16 and float32"),
        (("explain", SMALL, "-d", ""), "an empty device description"),
        (("check", ""), "no fields, at position 0 of the problem ''"),  # and not the suite's own list
        (("bench", "steps", "--thread", "1"), "(hint: see convgrad bench steps --help)"),
        (("check", SMALL, "-b", "nope"), "no backend is called 'nope'"),
        (("check", SMALL, "--device", "xla"), "cannot run on 'xla'"),
        (("check", "no/such/file"), "there is no file"),
        (("check", "--transposed"), "--transposed says how a problem or a file is read, and none is named"),
        (
            ("check", __file__),
            f"is a script, not a file of problems (hint: --kernels {__file__} before the command loads",
        ),
        (("explain", "absent.py"), "there is no file 'absent.py'"),
        (("explain", __file__), "is a script, not a model (hint: run, report and tune take scripts"),
        (("names", "cudnn_convolutoin"), "did you mean 'cudnn_convolution'"),
        (("names", ""), "called ''; there are conv1d"),
        (("names", "nonsense"), "'nonsense'; there are conv"),  # and not 'ones'
        (("check", SMALL, "--seconds", "-1"), "Invalid value for '--seconds'"),
        (("check", SMALL, "--seed", str(2**70)), "--seed"),
        (("--kernels", "nowhere.py", "info"), "there is no script 'nowhere.py'"),
        (("explain", SMALL, "--dtype", "float64"), "--dtype is for a model"),
        (("explain", SMALL, "--layer", "7x7"), "--layer is for a model"),
        (("explain", SMALL, "--measure", "-d", "h100"), "--measure times what is here, and no --device is"),
        (("explain", "convnext", "--rules"), "--rules shows those of layers, and a whole model is a table of them"),
        (("explain", "convnext", "--measure", "-o", "forward"), "--measure times a model's whole step"),
        (("explain", "convnext", "--measure", "--plot", "roof.png"), "convgrad report draws it"),
        (("explain", "os:getcwd"), "'os:getcwd' returned str, not an nn.Module (hint: module:factory"),
        (("explain", "os:mkdir"), "'os:mkdir' raised TypeError"),
        (("explain", ":make"), "cannot get ':make': Empty module name"),
        (("explain", "os:getcwd", "-d", "here int8"), "PyTorch makes no model of torch.int8"),
        (("explain", "resnet50", "--input", f"{10**20}x3"), "does not fit in any memory"),
        (("explain", "resnet50", "--input", f"{10**9}x{10**9}x{10**9}"), "does not fit in any memory"),
    ],
)
def test_errors_are_one_line_with_a_hint(capsys, args: tuple[str, ...], words: str) -> None:
    assert words in refused(capsys, *args)


@pytest.mark.parametrize("command", ["bench", "check", "tune"])
def test_a_line_of_a_file_that_is_no_problem_is_refused_before_anything_runs(capsys, tmp_path, command: str) -> None:
    (tmp_path / "shapes").write_text(f"{SMALL}\nic2zz9\n")
    assert "shapes:2: unrecognized field 'zz9'" in refused(capsys, command, str(tmp_path / "shapes"))


def test_names(capsys) -> None:
    printed = shown(capsys, "names", "conv2d")
    assert "backward: convolution_backward" in printed
    for name, words in (
        ("finput", "unfolded input"),
        ("convgrad.direct", "thnn_conv2d_backward"),
        ("thnn_conv2d", "under its old name: convgrad.direct.thnn_conv2d"),
        ("slow_conv2d_backward_out_cuda", "backward: _slow_conv2d_backward"),
    ):
        printed = shown(capsys, "names", name)
        assert words in printed


# ---- check ---------------------------------------------------------------------------------------


@pytest.fixture
def _wrong() -> None:
    register(
        around(ReferenceBackend, lambda kernel, *_: lambda *args: kernel(*args) + 1, name="wrong"), candidate=False
    )


def test_check_one_problem_for_every_property(capsys) -> None:
    printed = shown(capsys, "check", SMALL, "-b", "reference")
    assert "0 failed (exact, again, bound, memory" in printed


KERNELS = """
import argparse
import convgrad
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--by", type=float)
by = parser.parse_args().by
convgrad.register("mine", forward=lambda x, w, p: by * torch.conv2d(x, w), accepts=lambda p: p.ndim == 2 and p.pointwise
                  and p.groups == 1 and p.stride == (1, 1) and p.padding == ((0, 0), (0, 0)))
if __name__ == "__main__":
    raise SystemExit("not reached")
"""


@pytest.mark.parametrize("device", [(), ("--seed", "3")])
def test_a_failure_prints_the_command_that_repeats_it(capsys, tmp_path, device: tuple[str, ...]) -> None:
    """Also of a script of kernels that takes arguments, and that is refused where nothing but the check looks at it."""
    script = tmp_path / "kernels of mine.py"
    script.write_text(KERNELS)
    check = ("check", "mb1ic3ih3oc4kh1", "-b", "mine", "--property", "exact")
    given = ("--kernels", f"'{script}' --by 2", *check, *device)
    printed = shown(capsys, *given, status=1)
    assert printed.count("repeat: ") == 1
    program, *args = shlex.split(printed.split("repeat: ")[1].split("\n0 of")[0].split("\n1 of")[0])
    assert program == "convgrad"
    assert args[:2] == ["--kernels", f"'{script}' --by 2"]
    assert args[-2:] == ["--seed", "3"] if device else "--seed" not in args
    again = shown(capsys, *args, status=1)
    assert again.split(" (exact;")[0] == printed.split(" (exact;")[0]


@pytest.mark.usefixtures("_wrong")
def test_what_no_command_can_name_is_repeated_by_a_call(capsys) -> None:
    printed = shown(capsys, "check", SMALL, "-b", "wrong", "-o", "grad_weight", "--property", "exact", status=1)
    (result,) = eval(printed.split("repeat: ")[1].split("\n1 of")[0], {"convgrad": convgrad})
    assert result.status == "failed"


def test_what_was_not_checked_is_not_counted(capsys, tmp_path) -> None:
    path = tmp_path / "shapes"
    path.write_text("ic2iw9oc2kw3\nmb1ic80ih5oc2kh3\ng2ic2iw9oc2kw3\ng2ic2iw9oc2kw3\n")
    printed = shown(capsys, "check", str(path), "-b", "native", "-o", "forward")
    assert "3 of 4 problems, 1 not checked: 6 checks passed" in printed


def test_a_script_of_kernels_that_raises_shows_its_own_frames(capsys, tmp_path) -> None:
    script = tmp_path / "mine.py"
    for text, words, status in (
        ("def deep():\n    return 1 / 0\ndeep()\n", "ZeroDivisionError: division by zero", 2),
        ("import nowhere_at_all\n", "ModuleNotFoundError: No module named 'nowhere_at_all'", 2),
        ("import convgrad\nconvgrad.register('mine', forward=3)\n", "TypeError: forward= takes a function, got 3", 2),
        (KERNELS.replace("by = parser.parse_args().by", "by = 2"), "'mine' is refused", 1),
    ):
        script.write_text(text)
        got, printed, error = call(capsys, "--kernels", str(script), "info")
        assert (got, printed) == (status, "")
        assert words in " ".join(error.split())
        assert "convgrad/check" not in error
        assert "runpy" not in error
        assert ('mine.py", line' in error.replace("\n", "")) == (status == 2)


FILE = """
# as benchdnn has them
--reset --dir=FWD_B
mb2ic3ih8oc4kh3ph1n"one"
mb256g512ic512ih56oc512oh56kh3ph1n"large*1"
mb1ic4iw40oc4kw5pw2 bfloat16
"""


def test_a_script_of_kernels_may_end_itself(capsys, tmp_path) -> None:
    script = tmp_path / "mine.py"
    given = ("--kernels", str(script), "names", "conv2d")
    script.write_text("import sys\nsys.exit(0)\n")
    assert "convolution_backward" in shown(capsys, *given)
    script.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(SystemExit, match="3"):
        run(given)


def test_check_a_file(capsys, tmp_path: Path) -> None:
    path = tmp_path / "shapes_some"
    path.write_text(FILE)
    printed = shown(capsys, "check", str(path), "-b", "reference")
    assert "3 of 3 problems" in printed
    assert "1 problem checked at a reduced size" in printed
    printed = shown(capsys, "check", str(path), "--transposed", "-b", "reference")
    assert "(exact, bound;" in printed


def test_a_problem_longer_than_a_files_name(capsys) -> None:
    name = "x" * 300
    printed = shown(capsys, "check", f'ic2iw9oc2kw3n"{name}"', "-b", "reference", "--property", "exact")
    assert "1 of 1 problems" in printed


def test_explain_measures_unsigned_integers(capsys) -> None:
    printed = shown(capsys, "explain", "ic2iw9oc2kw3 uint8", "-o", "forward", "--measure")
    assert " ms" in printed


def test_check_stops_when_time_is_up(capsys, tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    path.write_text("ic2iw9oc2kw3\n" * 50)
    printed = shown(capsys, "check", str(path), "--seconds", "0", status=1)  # nothing was checked
    assert printed.startswith("stopped: time was up after 0 of 50 problems")


def test_interrupted_with_a_partial_summary(capsys, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "shapes"
    path.write_text("ic2iw9oc2kw3\nic2iw9oc2kw4\n")
    real = convgrad.check.check_problem

    def interrupted(name: str, problem: ConvProblem, *args, **kwargs):
        if problem.kernel_size == (4,):
            raise KeyboardInterrupt
        return real(name, problem, *args, **kwargs)

    monkeypatch.setattr("convgrad.check.check_problem", interrupted)
    status, printed, _ = call(capsys, "check", str(path))
    assert status == 130
    assert printed.startswith("interrupted after 1 of 2 problems: 8 checks passed")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, typer.Abort])
def test_interrupted_in_a_command_that_has_nothing_to_say_then(monkeypatch, interrupt: type[BaseException]) -> None:
    """Releases of typer differ in what they make of it."""

    def named(name: str) -> None:
        raise interrupt

    monkeypatch.setattr("convgrad.diagnostics.named", named)
    assert run(["names", "conv2d"]) == 130


@pytest.mark.parametrize("command", [["check", "--aten"], ["tune", "--aten", "60", "ic2iw9oc2kw3"]])
def test_an_interrupted_search_says_how_far_it_got(capsys, monkeypatch, command: list[str]) -> None:
    def interrupted(seconds: float, seed: int, look: Callable[[float, int], None]) -> Iterator[Found]:
        look(0.5, 17)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("convgrad.check.search_aten", interrupted)
    status, printed, error = call(capsys, *command)
    assert (status, error) == (130, "")
    assert " ".join(printed.split()).startswith("interrupted after PyTorch's kernels on 17 problems")
    assert "ic2iw9oc2kw3" not in printed  # nothing is measured any more


@pytest.mark.parametrize("problem", ["mb0ic2iw9oc2kw3", "mb9000ic9000ih9000oc9000kh3"])
def test_a_problem_that_is_empty_or_too_large_is_not_checked(capsys, problem: str) -> None:
    printed = shown(capsys, "check", problem, status=1)
    assert "0 failed" in printed
    assert "nothing could be checked" in printed
    assert ("an empty problem" if "mb0" in problem else "there is no memory") in " ".join(printed.split())


# ---- the process ---------------------------------------------------------------------------------


def process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_without_the_packages_one_line_says_what_to_install() -> None:
    done = process("import sys; sys.modules['typer'] = None\nfrom convgrad_command import main\nmain()")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "convgrad: the command line needs typer; install it with: pip install 'convgrad[cli]'"
    )


def test_without_a_command_it_prints_the_help(capsys) -> None:
    assert call(capsys) == call(capsys, "--help")


def test_a_module_of_kernels_that_is_not_there(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no module 'nowhere.kernels'" in refused(capsys, "--kernels", "nowhere.kernels", "info")
    (tmp_path / "needs_more.py").write_text("import nowhere")
    status, _, error = call(capsys, "--kernels", "needs_more", "info")  # its own mistake has its own frames
    assert status == 2
    assert "needs_more raised ModuleNotFoundError: No module named 'nowhere'" in " ".join(error.split())
    assert 'needs_more.py", line 1' in error


def test_interrupted_while_it_is_being_loaded() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, *rest):
        if name == "convgrad.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from convgrad_command import main
main()"""
    done = process(code)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_warning_of_the_library_is_one_line_without_its_source(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "convgrad", "tune", "ic2iw9oc2kw3"], capture_output=True, text=True, check=False,
        env={**os.environ, "CONVGRAD_CACHE": str(tmp_path / "file")},
    )  # fmt: skip
    assert done.stderr.startswith("convgrad: convgrad's store")
    assert ".py" not in done.stderr
