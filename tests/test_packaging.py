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


@pytest.mark.slow
def test_sdist_and_wheel_hold_what_they_should(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    script = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "src/convgrad/py.typed"} <= inside
    assert {f"csrc/{p.name}" for p in (ROOT / "csrc").glob("*.*")} <= inside

    subprocess.run([*build, str(sdist)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (meta,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(archive.read(meta).decode())
    assert required(header.get_all("Requires-Dist", [])) == {"torch"}
    assert {"convgrad/py.typed", "convgrad/include/convgrad.h"} <= set(names)
    assert not [n for n in names if not n.startswith("convgrad")]
    assert not [n for n in names if "libgomp" in n]


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "reason"), [("/bin/false", "/bin/false failed"), ("", "no C++ compiler")])
def test_without_a_working_compiler_the_wheel_holds_the_reason(tmp_path, compiler, reason):
    source, path = tmp_path / "a tree", tmp_path / "no compiler"  # both names have a space
    path.mkdir()
    keep = shutil.ignore_patterns("*.so", "build", ".*", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=keep)
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(path), "PIP_NO_BUILD_ISOLATION": "1", **({"CXX": compiler} if compiler else {})}
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [n for n in archive.namelist() if n.endswith(".so")]
        archive.extractall(tmp_path / "installed")
    code = "from convgrad.backends._native_library import why_absent; print(why_absent())"
    environment |= {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert reason in done.stdout
    assert "g++ or clang++" in done.stdout
