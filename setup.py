"""Builds the compiled CPU kernels of ``csrc/`` into the package; everything else is in pyproject.toml.

The library is a plain C interface without torch, so torch is not needed here and one build serves every torch. Each
instruction set is one object from the same source; a compiler that lacks one leaves it out, and without any C++
compiler the package installs without the library and says so when asked.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("csrc")
LIBRARY = "convgrad.backends.libconvgrad_native"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
# "-Werror=unknown-pragmas": an OpenMP pragma would be left out in silence, and the loop run on one thread
FLAGS += ["-Werror=unknown-pragmas"]
SHARED = ["-shared", *(["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else [])]
# name of the object -> (compiler flag, macro that tells the dispatcher); the first one must compile, the others may not
VARIANTS = {"baseline": ("", "")}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {"v3": ("-march=x86-64-v3", "CONVGRAD_HAS_V3"), "v4": ("-march=x86-64-v4", "CONVGRAD_HAS_V4")}


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or the first of the usual names that runs."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        command = shlex.split(name or "")
        if command and shutil.which(command[0]):
            return command
    raise FileNotFoundError("no C++ compiler was found")


def run(command: list[str]) -> None:
    """Run a compiler; its messages become the exception's text, the first line for people in a hurry."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise OSError(
            f"the C++ compiler {command[0]} failed ({complaint.strip()})\n{shlex.join(command)}\n{done.stderr}"
        )


def build_library(target: Path, extra: list[str] | None = None) -> list[str]:
    """Compile ``csrc/`` into a shared library; returns the instruction sets that it holds."""
    cxx, flags = compiler(), [*FLAGS, *(extra or [])]

    def compile_variant(name: str, folder: str) -> Path | None:
        march, _ = VARIANTS[name]
        out = Path(folder, f"{name}.o")
        command = [*cxx, *flags, *march.split(), f"-DCONVGRAD_VARIANT={name}"]
        try:
            run([*command, "-c", str(SOURCES / "variant.cpp"), "-o", str(out)])
        except OSError:
            if name == "baseline":
                raise
            return None
        return out

    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = dict(zip(VARIANTS, pool.map(lambda name: compile_variant(name, folder), VARIANTS), strict=True))
        built = [name for name, path in objects.items() if path]
        macros = [f"-D{VARIANTS[name][1]}" for name in built if VARIANTS[name][1]]
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = Path(folder, "library")
        # No OpenMP is linked: PyTorch's runtime, already loaded, answers the calls of csrc/parallel.h.
        parts = [str(objects[name]) for name in built]
        run([*cxx, *flags, *macros, *SHARED, str(SOURCES / "dispatch.cpp"), *parts, "-o", str(linked)])
        target.write_bytes(linked.read_bytes())
        target.chmod(0o755)
    return built


class BuildLibrary(build_ext):
    """Builds the one library; a failure is a message, not the end of the installation."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        reason = target.with_suffix(".txt")  # read by convgrad/backends/_native_library.py
        try:
            built = build_library(target)
        except OSError as error:
            target.unlink(missing_ok=True)
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(str(error).partition("\n")[0] + "\n", encoding="utf-8")
            print(f"convgrad: the compiled CPU kernels are left out: {error}", file=sys.stderr)
        else:
            reason.unlink(missing_ok=True)
            print(f"convgrad: compiled CPU kernels for {', '.join(built)}")

    def copy_extensions_to_source(self) -> None:
        built = Path(self.build_lib, self.get_ext_filename(LIBRARY))
        source = Path(self.get_finalized_command("build_py").get_package_dir(LIBRARY.rpartition(".")[0]), built.name)
        for suffix in (".so", ".txt"):  # one of the two is there
            source.with_suffix(suffix).unlink(missing_ok=True)
            if built.with_suffix(suffix).exists():
                self.copy_file(str(built.with_suffix(suffix)), str(source.with_suffix(suffix)))


class PlatformWheel(bdist_wheel):
    """Tagged for the platform, but for any Python: the library does not know Python either."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(LIBRARY, sources=[], optional=True)],
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    )
