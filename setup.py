"""Builds the compiled CPU kernels of ``csrc/`` into the package; everything else is in pyproject.toml.

The library is a plain C interface without torch, so torch is not needed here and one build serves every torch. Each
instruction set and type of arithmetic is one object from the same source; a compiler that lacks an instruction set
leaves it out, and without any C++ compiler the package installs without the library and says so when asked. CXX may
name a compiler for another processor; `make wheel` does. A checkout keeps the library in ``build/`` until its source
changes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("csrc")
LIBRARY = "convgrad.backends.libconvgrad_native"
# Square roots set no errno: else each may call the mathematical library, which the wheels would then need.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno"]
# A loop that begins anywhere takes up to a fifth longer while another hyperthread uses the same core.
FLAGS += ["-falign-loops=64"]
# "-Werror=unknown-pragmas": an OpenMP pragma would be left out in silence, and the loop run on one thread
FLAGS += ["-Werror=unknown-pragmas"]
# For v3 and v4, of GCC's -O3 what the kernels need: all of it takes a third longer, for copies that gain nothing.
GCC_FLAGS = ["-O2", "-fpeel-loops", "-fvect-cost-model=dynamic", "-fgcse-after-reload", "-ftree-partial-pre"]
GCC_FLAGS += ["-fpredictive-commoning", "-fsplit-loops", "-fsplit-paths", "-funswitch-loops"]
SHARED = ["-shared", *(["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else ["-s"])]
ARITHMETIC = ("float", "double")
# name -> (compiler flags, macro that tells the dispatcher); the first one must compile, the others may not
SETS = {"baseline": ("", "")}
X86_SETS = {
    "baseline": ("-Os -DCONVGRAD_SMALL", ""),  # for processors without AVX2, which few still have
    "v3": ("-march=x86-64-v3", "CONVGRAD_HAS_V3"),
    "v4": ("-march=x86-64-v4", "CONVGRAD_HAS_V4"),
    # some of float's, beside v4's
    "amx": ("-march=x86-64-v4 -mavx512bf16 -mavx512vbmi2 -mamx-tile -mamx-bf16", "CONVGRAD_HAS_AMX"),
}


def say(line: str) -> None:
    """Print a line, also to the terminal of somebody for whom pip hides what a build prints."""
    print(line, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with suppress(OSError), open("/dev/tty", "w", encoding="utf-8") as terminal:
            print(f"\n{line}", file=terminal)


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or the first of the usual names that runs."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise FileNotFoundError(f"no C++ compiler was found{f', CXX={wanted} is none' if wanted else ''}")


def run(command: list[str]) -> str:
    """What a compiler prints; its complaints become the exception's text, the first line for people in a hurry."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise OSError(
            f"the C++ compiler {command[0]} failed ({complaint.strip()})\n{shlex.join(command)}\n{done.stderr}"
        )
    return done.stdout


def kept_library(cxx: list[str]) -> Path:
    """Where the library of these sources and this compiler is kept."""
    key = blake2b(repr([*cxx, run([*cxx, "--version"])]).encode(), digest_size=8)
    for path in (Path(__file__), *sorted(SOURCES.rglob("*.[ch]*"))):
        key.update(path.read_bytes())
    return Path("build", f"kernels-{key.hexdigest()}.so")


def build_library(cxx: list[str], target: Path) -> None:
    """Compile ``csrc/`` into a shared library."""
    sets = X86_SETS if run([*cxx, "-dumpmachine"]).startswith(("x86_64", "amd64")) else SETS
    gcc = "Free Software Foundation" in run([*cxx, "--version"])

    def compile_part(name: str, arithmetic: str, folder: str) -> Path | None:
        part = Path(folder, f"{name}_{arithmetic}.o")
        macros = [f"-DCONVGRAD_VARIANT={name}", f"-DCONVGRAD_ARITHMETIC={arithmetic}"]
        source = SOURCES / ("amx/amx.cpp" if name == "amx" else "variant.cpp")
        flags = [*FLAGS, *(GCC_FLAGS if gcc and name in ("v3", "v4") else []), *sets[name][0].split()]
        command = [*cxx, *flags, *macros, "-c", str(source), "-o", str(part)]
        try:
            run(command)
        except OSError:
            if name == "baseline":
                raise
            return None
        return part

    with tempfile.TemporaryDirectory() as folder:
        # The longest first, so that no core waits at the end: float's arithmetic has three dtypes.
        wanted = [(name, kind) for kind in ARITHMETIC for name in [*sets][::-1] if (name, kind) != ("amx", "double")]
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        minutes = -(-len(wanted) // (2 * cores))  # half a minute each
        say(f"convgrad: {cxx[0]} compiles the CPU kernels on {cores} cores, in about {minutes} minutes")
        with ThreadPoolExecutor(cores) as pool:
            work = {part: pool.submit(compile_part, *part, folder) for part in wanted}
            parts = {name: [job.result() for part, job in work.items() if part[0] == name] for name in sets}
        built = [name for name, compiled in parts.items() if all(compiled) and (name != "amx" or all(parts["v4"]))]
        macros = [f"-D{sets[name][1]}" for name in built if sets[name][1]]
        # The way into PyTorch's operators throws what Python raised, so it has exceptions.
        way_in = Path(folder, "aten.o")
        exceptions = [flag for flag in FLAGS if flag not in ("-fno-exceptions", "-fno-rtti")]
        exceptions += ["-fno-sized-deallocation"]  # else it would need a C++ library of 2015 or later
        run([*cxx, *exceptions, "-c", str(SOURCES / "aten" / "convolution.cpp"), "-o", str(way_in)])
        linked = Path(folder, "library")
        # No OpenMP is linked: PyTorch's runtime, already loaded, answers the calls of csrc/vectors/parallel.h.
        objects = [str(way_in), *(str(part) for name in built for part in parts[name])]
        sources = [str(SOURCES / "dispatch.cpp"), str(SOURCES / "aten" / "cuda_launch.cpp")]
        run([*cxx, *FLAGS, *macros, *SHARED, *sources, *objects, "-o", str(linked)])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(linked, target)
    print(f"convgrad: compiled CPU kernels for {', '.join(built)}")


class BuildLibrary(build_ext):
    """Builds the one library; a failure is a message, not the end of the installation."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        reason = target.with_suffix(".txt")  # read by convgrad/backends/_native_library.py
        reason.parent.mkdir(parents=True, exist_ok=True)
        try:
            cxx = compiler()
            kept = kept_library(cxx)
            if not kept.exists():
                build_library(cxx, kept)
            shutil.copy(kept, target)
        except OSError as error:
            target.unlink(missing_ok=True)
            reason.write_text(str(error).partition("\n")[0] + "\n", encoding="utf-8")
            print(f"convgrad: {error}", file=sys.stderr)
            say(
                "convgrad: WITHOUT THE COMPILED CPU KERNELS: convolutions on the CPU will be no faster than PyTorch's. "
                f"Install g++ or clang++, then convgrad again ({str(error).partition(chr(10))[0]})"
            )
        else:
            reason.unlink(missing_ok=True)

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
