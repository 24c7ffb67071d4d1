"""The command in a refusal repeats it, from a script as from a notebook."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import convgrad
from convgrad.custom import origin

SCRIPT = """
import convgrad
import torch.nn.functional as F

def forward(input, weight, problem):
    p = problem
    result = F.conv2d(input, weight, None, p.stride, [low for low, _ in p.padding], p.dilation, p.groups)
    return result * 2 if p.stride == (2, 2) else result

convgrad.register("mine", forward=forward, accepts=lambda p: p.ndim == 2 and p.symmetric)
raise SystemExit("not reached by the command")
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("inside", [False, True])
def test_the_command_of_a_script(tmp_path: Path, inside: bool) -> None:
    """Whether it registers at its top level or in a function."""
    script = f"def main():{SCRIPT}".replace("\n", "\n    ") + "\nmain()\n" if inside else SCRIPT
    (tmp_path / "train it.py").write_text(script)
    refused = run(sys.executable, "train it.py", cwd=tmp_path)
    assert "CheckError: 'mine' is refused" in refused.stderr
    command = refused.stderr.strip().splitlines()[-1].strip().removeprefix("repeat: ")
    program, *arguments = shlex.split(command)
    assert program == "python"
    again = run(sys.executable, *arguments, cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert "failed: exact: " in again.stdout
    assert "not reached" not in again.stderr


def test_the_command_of_a_module(tmp_path: Path) -> None:
    """A module of a package that a script imports: relative imports work."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helpers.py").write_text("factor = 2\n")
    (package / "conv.py").write_text("from .helpers import factor\n" + SCRIPT)
    refused = run(sys.executable, "-c", "import kernels.conv", cwd=tmp_path)
    command = refused.stderr.strip().splitlines()[-1].strip().removeprefix("repeat: ")
    _, *arguments = shlex.split(command)
    assert "kernels.conv" in arguments
    again = run(sys.executable, *arguments, cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert "failed: exact: " in again.stdout


def test_a_script_without_it(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import convgrad\n")
    with pytest.raises(KeyError, match="registers no backend called 'mine'"):
        origin.load(str(script), "mine")
    assert str(tmp_path) not in sys.path


def test_of_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError, match="no kernel called 'never'"):
        convgrad.custom.repeat("never", "ic2ih5oc2kh3")
    convgrad.register("kept", forward=lambda x, w, p: x, accepts=lambda p: p.pointwise, verify=False)
    assert not convgrad.custom.repeat("kept", "ic2ih5oc2kh1")
    assert capsys.readouterr().out.startswith("failed: exact: ")


def test_the_command_line_loads_kernels(tmp_path: Path) -> None:
    """Every command of convgrad sees them, with what was checked."""
    pytest.importorskip("typer")
    (tmp_path / "mine.py").write_text(SCRIPT.replace("symmetric)", "symmetric, verify=False)").rsplit("raise", 1)[0])
    main = "import sys; from convgrad.cli.app import run; sys.exit(run())"
    shown = run(sys.executable, "-c", main, "--kernels", "mine.py", "info", cwd=tmp_path)
    assert "registered by the user for forward; not verified: registered with verify=False" in shown.stdout, shown
    checked = run(
        *(sys.executable, "-c", main, "-k", "mine.py", "check", "ic2ih9oc2kh3sh2", "--backend", "mine"), cwd=tmp_path
    )
    assert checked.returncode == 1
    assert "failed: mine forward of" in checked.stdout
