"""What a user installs: the library and nothing that he did not ask for."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def required(lines: list[str]) -> set[str]:
    """Names of the unconditional requirements among ``Requires-Dist`` lines."""
    return {re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line}


def test_the_library_requires_torch_and_where_caches_lie_and_nothing_else():
    assert required(metadata.requires("convgrad") or []) == {"torch", "platformdirs"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder")
    script = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_demo_installs_what_it_needs_unless_everything_is_there(tmp_path):
    def commands() -> str:
        make = ["make", "--dry-run", "demo", f"VENV={tmp_path}"]
        return subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert "-e '.[examples]'" in commands()
    assert "[dev]" not in commands()
    (tmp_path / ".installed").touch()
    assert "pip" not in commands()


@pytest.mark.slow
def test_the_sdist_holds_what_it_should(sdist):
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "src/convgrad/py.typed"} <= inside
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")} <= inside
    assert not [name for name in inside if name.startswith(("tests", "docs")) or name.endswith((".so", ".pyc"))]


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "reason"), [("/bin/false", "/bin/false failed"), ("", "no C++ compiler")])
def test_without_a_working_compiler_the_wheel_holds_the_reason(sdist, tmp_path, compiler, reason):
    path = tmp_path / "no compiler"
    path.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(path), "PIP_NO_BUILD_ISOLATION": "1", **({"CXX": compiler} if compiler else {})}
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(sdist)]
    subprocess.run(build, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (meta,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(archive.read(meta).decode())
        archive.extractall(tmp_path / "installed")
    assert required(header.get_all("Requires-Dist", [])) == {"torch", "platformdirs"}
    assert {"convgrad/py.typed", "convgrad/include/convgrad.h"} <= set(names)
    assert not [n for n in names if not n.startswith("convgrad") or n.endswith(".so")]
    code = "from convgrad.backends._native_library import why_absent; print(why_absent())"
    environment |= {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert reason in done.stdout
    assert "g++ or clang++" in done.stdout


def test_without_a_working_compiler_the_last_line_of_the_build_says_so(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "src/convgrad/_version.py"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "built"]
    environment = {**os.environ, "CXX": "/bin/false"}
    done = subprocess.run(build, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("convgrad: WITHOUT THE COMPILED CPU KERNELS")
    assert "/bin/false failed" in last
