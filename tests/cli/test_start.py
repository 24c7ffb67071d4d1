"""The command starts without PyTorch; what computes finds the package as ``import convgrad`` makes it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import convgrad
from convgrad.check import PROPERTIES
from convgrad.cli import options
from convgrad.cli.app import COMMANDS
from convgrad.diagnostics import Machine
from convgrad.problem import OUTPUTS
from convgrad.problem_text import DTYPES

SOURCE = Path(__file__).parents[2] / "src"
LAUNCH = """
import json, sys
sys.path.insert(0, {source!r})
from convgrad_command import main
sys.argv[1:] = {args!r}
try:
    main()
except SystemExit as stop:
    heavy = sorted({{"torch", "rich", "numpy"}} & set(sys.modules))
    print(json.dumps([stop.code, heavy]), file=sys.stderr)
"""


def launched(*args: str) -> tuple[int, list[str], str, str]:
    """Exit status, what was loaded, standard output, standard error."""
    code = LAUNCH.format(source=str(SOURCE), args=list(args))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    *error, last = done.stderr.splitlines()
    status, heavy = json.loads(last)
    return status, heavy, done.stdout, "\n".join(error)


@pytest.mark.parametrize(
    "args",
    [("--help",), ("--version",), *((name, "--help") for name in COMMANDS), ("bench", "steps", "--help")],
    ids=" ".join,
)
def test_help_loads_no_pytorch(args: tuple[str, ...]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    status, heavy, printed, error = launched(*args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (status, heavy, error) == (0, [], "")
    assert printed.strip() == convgrad.__version__ if "--version" in args else "Usage: convgrad" in printed
    # 0.2 s of the processor's time on an idle machine
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("chek",), "No such command 'chek'"),
        (("check", "--bad"), "No such option"),
        (("explain", "convnext", "-o", "grad"), "unknown output 'grad'"),
        (("check", "-b", "im2cl"), "did you mean 'im2col'?"),
        (("check", "--property", "nope"), "unknown property 'nope'"),
        (("explain", "resnet", "--dtype", "float"), "unknown dtype 'float'"),
        (("explain", "resnet", "--input", "3,4"), "is no shape"),
        (("run", "--csv", "no/such/folder/x.csv", "script.py"), "there is no folder"),
    ],
)
def test_bad_options_are_refused_without_pytorch(args: tuple[str, ...], words: str) -> None:
    status, heavy, printed, error = launched(*args)
    assert (status, heavy, printed) == (2, [], "")
    assert words in " ".join(error.split())


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
    status, heavy, printed, error = launched("--kernels", str(script), "names", "conv2d")
    assert status == 0, error
    assert "torch" in heavy
    assert error.splitlines() == ["[] Conv2d", " ".join(options.BACKENDS)]  # every backend's name is offered
    assert "convolution_backward" in printed


def test_the_names_that_are_offered_are_those_there_are() -> None:
    assert options.OUTPUTS == OUTPUTS
    assert (*PROPERTIES,) == options.PROPERTIES
    assert (*DTYPES,) == options.DTYPES
    for text in options.MACHINES:
        assert isinstance(Machine.parse(text), Machine)
