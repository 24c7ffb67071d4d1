"""The wheels that `make wheel` leaves: their names, sizes and contents, and that they work where no compiler is."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MOST_BYTES = 4_000_000
HERE = platform.machine()
LIBRARY = "convgrad/backends/libconvgrad_native.so"

#: What a user does first: both gradients by a compiled kernel, compared with PyTorch's.
FIRST_STEPS = """
import torch, convgrad
from convgrad.backends._native_library import why_absent
assert not why_absent(), why_absent()
x, w = torch.randn(2, 4, 9, 9, requires_grad=True), torch.randn(4, 1, 3, 3, requires_grad=True)
expected = torch.autograd.grad(torch.conv2d(x, w, groups=4).square().sum(), (x, w))
with convgrad.use_backend("native"):
    found = torch.autograd.grad(convgrad.conv2d(x, w, groups=4).square().sum(), (x, w))
torch.testing.assert_close(found, expected)
print("works from", convgrad.__file__)
"""


def needed(*names: str) -> str:
    """The first of these programs that is installed; the test is skipped where none is."""
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no {' or '.join(names)}")


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", params=["x86_64", "aarch64"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as a release is made."""
    needed("make")
    needed("c++" if request.param == HERE else f"{request.param}-linux-gnu-g++")
    folder = tmp_path_factory.mktemp("dist")
    run("make", f"wheel-{request.param}", f"DIST={folder}", cwd=ROOT)
    (made,) = folder.glob("*.whl")
    return made


def only_for(wheel: Path, machine: str) -> None:
    if machine not in wheel.name:
        pytest.skip(f"not for {machine}")


@pytest.fixture
def unpacked(wheel: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_one_wheel_serves_every_python_and_systems_from_2014_on(wheel):
    assert "-py3-none-" in wheel.name
    assert "manylinux_2_17_" in wheel.name, "the library needs a newer glibc than it did"
    assert wheel.stat().st_size < MOST_BYTES


def test_the_library_needs_what_every_pytorch_has_loaded(unpacked):
    dynamic = run(needed("readelf"), "--dynamic", unpacked / LIBRARY)
    found = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert found <= {"libc.so.6", "libgcc_s.so.1", "libstdc++.so.6", *loaders}


def test_it_works_in_a_fresh_environment_without_a_compiler(wheel, tmp_path):
    only_for(wheel, HERE)
    run(sys.executable, "-m", "venv", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not "installed already"
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, env=elsewhere)
    # torch is not fetched again: it is found behind what is installed here.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    behind = [entry for entry in sys.path if entry.endswith("-packages")]
    (site / "behind.pth").write_text("\n".join(behind) + "\n")
    environment = {"PATH": "", "HOME": str(tmp_path), "CONVGRAD_CACHE": str(tmp_path)}
    assert str(site) in run(python, "-c", FIRST_STEPS, cwd=tmp_path, env=environment)


def test_the_aarch64_library_computes_what_plain_loops_compute(wheel, unpacked):
    only_for(wheel, "aarch64")
    compiler, emulator = needed("aarch64-linux-gnu-g++"), needed("qemu-aarch64-static", "qemu-aarch64")
    driver, tests = unpacked / "driver", ROOT / "csrc" / "tests"
    sources = [tests / "driver.cpp", tests / "threads.cpp"]
    run(compiler, "-std=c++17", "-O2", "-pthread", "-rdynamic", *sources, unpacked / LIBRARY, "-o", driver)
    environment = os.environ | {"LD_LIBRARY_PATH": ""}
    assert "100 cases" in run(emulator, "-L", "/usr/aarch64-linux-gnu", driver, "100", env=environment)
