"""The command starts without PyTorch; what computes finds the package as ``import convgrad`` makes it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import convgrad
from convgrad.check import PROPERTIES, STRESS
from convgrad.cli import options
from convgrad.cli.app import COMMANDS
from convgrad.diagnostics import Machine
from convgrad.problem import OUTPUTS
from convgrad.problem.grammar import DTYPES

HEAVY = "sorted({'torch', 'rich', 'numpy'} & {*sys.modules})"
#: Every request in one process: the sooner a module at the top of a command's loads PyTorch, the sooner it is seen.
ALL = """
import contextlib, io, json, sys
import convgrad_command
sys.argv[1:] = ["--version"]
with contextlib.suppress(SystemExit):
    convgrad_command.main()
from convgrad.cli.app import run
for args in {requests!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = run(args)
    print(json.dumps([status, {heavy}, out.getvalue(), err.getvalue()]))
"""
REFUSED = {
    ("chek",): "No such command 'chek'",
    ("check", "--bad"): "No such option",
    ("check", "--kernels", "mine.py"): "it stands before the command: see convgrad --help",
    ("names",): "Missing argument 'NAME'",
    ("explain", "convnext", "-o", "grad"): "no output is called 'grad'",
    ("check", "-b", "im2cl"): "did you mean 'im2col'?",
    ("check", "--property", "nope"): "no property is called 'nope'",
    ("explain", "resnet", "--dtype", "float"): "no dtype is called 'float'",
    ("explain", "resnet", "--input", "3,4"): "is no shape",
    ("run", "--csv", "no/such/folder/x.csv", "script.py"): "cannot be written",
    ("bench", "ic2ih3oc2kh1", "--seconds", "0"): "--seconds must be positive",
    ("bench", "steps", "resnet", "--layout", "nhwc"): "no layout is called 'nhwc'",
}


def test_help_and_refusals_load_no_pytorch() -> None:
    helps = [[*words, "--help"] for words in ([], *([name] for name in COMMANDS), ["bench", "steps"])]
    code = ALL.format(requests=[*helps, *map(list, REFUSED)], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    version, *answers = done.stdout.splitlines()
    assert version == convgrad.__version__, done.stderr
    for args, answer in zip([*helps, *REFUSED], answers, strict=True):
        status, heavy, printed, error = json.loads(answer)
        assert heavy == [], args
        if args in helps:
            assert (status, printed[:15], error) == (0, "Usage: convgrad", "")
            assert ("Examples:" in printed) == (args not in (["--help"], ["bench", "--help"]))
        else:
            assert (status, printed, error[:10]) == (2, "", "convgrad: ")
            assert REFUSED[args] in " ".join(error.split())


@pytest.mark.parametrize("args", [["--help"], ["check", "--help"]], ids=" ".join)
def test_help_is_there_at_once(args: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "convgrad_command", *args], capture_output=True, timeout=120, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # 0.2 s of the processor's time; more where it is slow or busy, and 2 s where PyTorch is loaded
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.8


def test_it_ends_quietly_where_nobody_reads() -> None:
    reads, writes = os.pipe()
    os.close(reads)  # as `head` does once it has its lines
    command = [sys.executable, "-m", "convgrad_command", "--help"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_kernels_script_finds_the_whole_package(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"
    script.write_text(
        "import convgrad, torch\nfrom convgrad import conv2d\n"
        "x = torch.ones(1, 1, 3, 3)\n"
        "operator = torch.ops.convgrad.convolution\n"
        "assert torch.equal(conv2d(x, x), operator(x, x, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1))\n"
        "print(sorted(set(convgrad.__all__) - set(dir(convgrad))), convgrad.nn.Conv2d.__name__)\n"
        "print(*convgrad.list_backends())\n"
    )
    command = [sys.executable, "-m", "convgrad_command", "--kernels", str(script), "names", "conv2d"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["[] Conv2d", " ".join(options.BACKENDS)]  # every backend's name is offered
    assert "convolution_backward" in done.stdout


def test_the_names_that_are_offered_are_those_there_are() -> None:
    assert options.OUTPUTS == OUTPUTS
    assert (*PROPERTIES,) == options.PROPERTIES
    assert (*STRESS,) == options.STRESS
    assert tuple(n for n, d in DTYPES.items() if d.is_floating_point or d.is_complex) == options.DTYPES
    for text in options.MACHINES:
        assert isinstance(Machine.parse(text), Machine)
