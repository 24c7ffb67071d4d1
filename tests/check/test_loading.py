"""``convgrad --kernels``: a script or a module whose kernels every command sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convgrad
from convgrad.check import foreign_frames, load_kernels
from convgrad.check.loading import is_foreign

KERNELS = """
import convgrad

convgrad.register("mine", forward=lambda x, w, p: x, accepts=lambda p: p.pointwise, verify=False)
if __name__ == "__main__":
    raise SystemExit("not reached")
"""


def test_files_beside_libraries_are_the_users() -> None:
    """Their folders may begin with a library's name, and Python's may hold packages."""
    folders = [os.path.dirname(module.__file__ or "") for module in (convgrad, torch, os)]
    assert is_foreign(f"{folders[-1]}/site-packages/mykernels/a.py")
    for folder in folders:
        for file, own in ((f"{folder}/a.py", False), (f"{folder}_kernels/a.py", True)):
            with pytest.raises(ZeroDivisionError) as caught:
                exec(compile("1 / 0", file, "exec"))
            assert (file in [f.filename for f in foreign_frames(caught.value)]) == own


def test_a_script(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(KERNELS)
    load_kernels(str(script))
    assert "mine" in convgrad.list_backends()
    assert str(tmp_path) not in sys.path
    with pytest.raises(FileNotFoundError, match="there is no script"):
        load_kernels(str(tmp_path / "other.py"))


def test_a_script_that_looks_for_a_library_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import os; assert os.path.isabs(__file__), __file__")
    monkeypatch.chdir(tmp_path)
    load_kernels("mine.py")


def test_a_script_that_changes_where_modules_are_found(tmp_path: Path) -> None:
    script, argv = tmp_path / "mine.py", sys.argv
    script.write_text(f"import sys; sys.path.remove({str(tmp_path)!r})")
    load_kernels(f"{script} an argument")
    assert sys.argv is argv


def test_a_module_on_the_command_line(tmp_path: Path) -> None:
    """Of a package in the folder where the command runs: relative imports work."""
    pytest.importorskip("typer")
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("from . import conv")
    (package / "conv.py").write_text(KERNELS)
    main = "import sys; from convgrad.cli.app import run; sys.exit(run())"
    command = (sys.executable, "-c", main, "-k", "kernels", "check", "ic2ih9oc2kh1", "--backend", "mine")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "failed: mine forward of" in done.stdout
