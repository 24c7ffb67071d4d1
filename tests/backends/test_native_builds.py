"""The compiled CPU kernels as other compilers, processors and sanitizers see them: ``csrc/tests/driver.cpp``, which
compares random problems with plain loops over integers."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from convgrad.backends import _native_library as library

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = [str(CSRC / name) for name in ("dispatch.cpp", "tests/driver.cpp", "tests/threads.cpp")]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]  # psabi: GCC remarks on vectors wider than the processor's
PORTABLE = ["-fno-exceptions", "-fno-rtti", *WARNINGS]
MEMORY = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DCONVGRAD_KEPT_BYTES=0"]
#: New memory begins as NaN in every dtype.
POISON = {"ASAN_OPTIONS": "max_malloc_fill_size=1000000000:malloc_fill_byte=255"}
RACES = ["-O1", "-g", "-fsanitize=thread"]
SMALL_TILES = "-DCONVGRAD_TILE_BYTES=2048"  # cuts small problems into many tiles
WIDE = "-DCONVGRAD_VECTOR_BYTES=64"  # the lanes of AVX-512, on a processor that need not have it
V3 = "-march=x86-64-v3"
ARITHMETIC = ("float", "double")


def first_found(*names: str) -> str:
    """The first of these programs that is installed; the test is skipped where none is."""
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no {' or '.join(names)}")


def run(*command: str) -> str:
    """What a program prints; its complaint is the test's failure."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=os.environ | POISON)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def compile_kernels(folder: Path, compiler: str, *flags: str) -> list[str]:
    """The objects of one instruction set."""

    def compile_part(arithmetic: str) -> str:
        name = str(folder / f"{arithmetic}.o")
        macros = ["-DCONVGRAD_VARIANT=baseline", f"-DCONVGRAD_ARITHMETIC={arithmetic}"]
        run(compiler, "-std=c++17", *flags, *macros, "-c", str(CSRC / "variant.cpp"), "-o", name)
        return name

    with ThreadPoolExecutor() as pool:
        return [*pool.map(compile_part, ARITHMETIC)]


def build_driver(folder: Path, compiler: str, *flags: str) -> str:
    """The program, for one instruction set."""
    driver, objects = str(folder / "driver"), compile_kernels(folder, compiler, *flags)
    run(compiler, "-std=c++17", *flags, *SOURCES, *objects, "-pthread", "-o", driver)
    return driver


def skip_without_avx2(flags: list[str]) -> None:
    cpu = Path("/proc/cpuinfo")
    if V3 in flags and not (cpu.exists() and " avx2 " in cpu.read_text()):
        pytest.skip("this processor has no AVX2")


def test_nothing_is_prefetched_after_the_last_line(tmp_path: Path) -> None:
    program = str(tmp_path / "prefetcher")
    run(first_found("g++", "c++"), "-std=c++17", "-O1", *WARNINGS, str(CSRC / "tests/prefetcher.cpp"), "-o", program)
    assert "passed" in run(program)


@pytest.mark.parametrize("flags", [MEMORY, RACES], ids=["memory", "races"])
def test_eight_threads_in_the_table_of_calls(tmp_path: Path, flags: list[str]) -> None:
    program = str(tmp_path / "table")
    source = str(CSRC / "tests/table.cpp")
    run(first_found("g++", "clang++"), "-std=c++17", *flags, *WARNINGS, source, "-pthread", "-o", program)
    assert "0 wrong" in run(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [*MEMORY],
        [*MEMORY, V3],
        [*MEMORY, WIDE],
        [*MEMORY, V3, WIDE],
        [*MEMORY, V3, "-DCONVGRAD_VECTOR_BYTES=16"],
        [*MEMORY, SMALL_TILES],
        [*MEMORY, V3, SMALL_TILES],
    ],
    ids=["16 bytes", "32 bytes", "64 bytes of 16", "64 bytes of 32", "16 bytes of 32", "16 in tiles", "32 in tiles"],
)
def test_memory_and_results_at_every_vector_width(tmp_path: Path, flags: list[str]) -> None:
    compiler = first_found("g++", "clang++")
    skip_without_avx2(flags)
    assert "500 cases" in run(build_driver(tmp_path, compiler, *flags, *WARNINGS), "500")


@pytest.mark.slow
@pytest.mark.skipif(bool(library.why_not("amx")), reason="no processor with AMX")
@pytest.mark.parametrize("flags", [MEMORY, RACES], ids=["memory", "races"])
def test_amx_beside_the_baselines_kernels(tmp_path: Path, flags: list[str]) -> None:
    """Which stand for those of x86-64-v4: compiling all of these takes minutes."""
    functions = ("convgrad_plan_make", "convgrad_plan_make_winograd", "convgrad_normalize")
    names = [f"{name}_{{}}_{kind}" for name in functions for kind in ARITHMETIC]
    flags = [*flags, "-DCONVGRAD_HAS_AMX", *(f"-D{name.format('v4')}={name.format('baseline')}" for name in names)]
    compiler, objects = first_found("g++"), compile_kernels(tmp_path, first_found("g++"), *flags)
    driver, amx = str(tmp_path / "driver"), str(tmp_path / "amx.o")
    extensions = ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi2", "-mamx-tile", "-mamx-bf16"]
    run(compiler, "-std=c++17", *flags, *extensions, "-c", str(CSRC / "amx/amx.cpp"), "-o", amx)
    run(compiler, "-std=c++17", *flags, *SOURCES, *objects, amx, "-pthread", "-o", driver)
    assert "amx: 500 cases" in run(driver, "500")


@pytest.mark.slow
def test_threads_do_not_race(tmp_path: Path) -> None:
    assert "300 cases" in run(build_driver(tmp_path, first_found("g++", "clang++"), *RACES, *WARNINGS), "300")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], [V3]], ids=["baseline", "v3"])
@pytest.mark.parametrize("names", [("clang++", *(f"clang++-{n}" for n in range(22, 12, -1))), ("g++-11",), ("g++-14",)])
def test_other_compilers_agree(tmp_path: Path, names: tuple[str, ...], flags: list[str]) -> None:
    compiler = first_found(*names)
    skip_without_avx2(flags)
    assert "500 cases" in run(build_driver(tmp_path, compiler, "-O3", *flags, *PORTABLE), "500")


def innermost_loops(object_file: str) -> Iterator[tuple[str, list[str]]]:
    """Name of the function and instructions of each loop that multiplies and adds, and holds no other loop."""
    listing = run(first_found("objdump"), "-d", "-C", "--no-show-raw-insn", object_file)
    for function in re.split(r"\n\n", listing):
        name, *lines = function.strip().splitlines()
        matches = (re.match(r"\s*([0-9a-f]+):\s+(.*)", line) for line in lines)
        code = [(int(m[1], 16), m[2]) for m in matches if m]
        jumps = [(at, re.match(r"j\w+ +([0-9a-f]+)", text)) for at, text in code]
        loops = [(int(m[1], 16), at) for at, m in jumps if m and code[0][0] <= int(m[1], 16) <= at]
        for first, last in loops:
            if not any((first, last) != (a, b) and first <= a and b <= last for a, b in loops):
                body = [text for at, text in code if first <= at <= last]
                if any("fmadd" in text for text in body):
                    yield name, body


@pytest.mark.slow
@pytest.mark.parametrize(("march", "register"), [("x86-64-v4", "zmm"), ("x86-64-v3", "ymm")])
def test_inner_loops_keep_their_sums_in_whole_registers(tmp_path: Path, march: str, register: str) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("not this processor's registers")
    objects = compile_kernels(tmp_path, first_found("g++"), "-O3", "-fPIC", f"-march={march}")
    loops = [
        loop
        for part in objects
        for loop in innermost_loops(part)
        if re.search("(correlate|accumulate|multiply)(_planes)?<", loop[0])
    ]
    assert len(loops) > 400
    slot = r"((?:-?0x[0-9a-f]+)?\(%r[sb]p\))"
    for name, body in loops:
        products = [text for text in body if "fmadd" in text]
        assert all(register in text for text in products), name
        # Of forward and grad_input, GCC keeps one of 12 sums, 3 weights and a pixel on the stack, although 16 registers
        # would do, and two beside the mask that widens bfloat16. In float32 that costs no time: held in registers by
        # inline assembly, the loop ran as fast.
        full = register == "ymm" and len(products) >= 33 and "::correlate<" in name
        # The addresses of weight gradients of groups are more than there are registers; none of the sums may be there.
        addresses = "::accumulate_planes<" in name
        spilt = [text for text in body if "mm" in text and re.search(r"%r[sb]p", text)]
        written, read = (set(re.findall(p, "\n".join(body))) for p in (rf"{register}\d+,{slot}", rf"{slot},"))
        assert len(spilt) <= (4 if full or addresses else 0), f"{name} spills"
        assert len(written & read) <= (2 if full else 0), f"{name} spills"
