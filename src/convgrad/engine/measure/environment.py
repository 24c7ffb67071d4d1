"""The environment of a measurement: all that changes its kernels' time beside the problem."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from functools import cache, lru_cache
from itertools import takewhile

import torch

from ..._compat import cuda_driver, onednn_limit, package_version, precision
from ..._version import __version__
from ...settings import benchmark, cudnn_allows_tf32, mkldnn, threads
from ...tables import counted


def environment(device: torch.device) -> str:
    """Return the machine, the versions and the flags in force, as one text; empty for a device that is not here."""
    if device.type == "cpu":
        limit = onednn_limit() and f" up to {onednn_limit()}"
        onednn = f"onednn {precision('mkldnn', 'conv')}{limit}" if mkldnn() else "no onednn"
        flags = f"{threads()} threads, {onednn}, matmul {precision('mkldnn', 'matmul')}"
        flags += ", memory kept" if memory_kept() else ""
    else:
        on = {"cudnn": torch.backends.cudnn.enabled, "benchmark": benchmark(), "tf32": cudnn_allows_tf32()}
        flags = " ".join(name if value else f"no {name}" for name, value in on.items())
    machine = kind_of_machine(device)
    return machine and f"{machine}; {_versions(device.type)}; {flags}"


@lru_cache
def kind_of_machine(device: torch.device) -> str:
    """Return the processor, as far as kernels can tell; empty for a device that is not here."""
    if device.type == "cpu":
        name, facts = processor()  # the name alone may be no more than "AMD EPYC"
        numbers = [facts[n] for n in ("cpu family", "model", "CPU implementer", "CPU part") if n in facts]
        full_name = f"{name} {'/'.join(numbers)}".strip()
        return f"cpu {full_name}, {torch.backends.cpu.get_cpu_capability()}"
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {torch.cuda.get_device_name(device)}, {major}.{minor}, driver {cuda_driver()}"


@cache
def _versions(device_type: str) -> str:
    versions = f"convgrad {__version__}, torch {torch.__version__}"
    if device_type == "cpu":
        return versions
    triton = package_version("triton")
    return f"{versions}, cudnn {torch.backends.cudnn.version()}, {f'triton {triton}' if triton else 'no triton'}"


def processor() -> tuple[str, dict[str, str]]:
    """Return the processor's name, and what Linux says of the first one."""
    facts = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in takewhile(str.strip, lines):
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
    return facts.get("model name") or platform.processor() or platform.machine(), facts


@cache
def mkl_at_its_best() -> bool:
    """Whether PyTorch's matrix products are MKL's on a processor of Intel's, for which it is made."""
    name, facts = processor()
    return torch.backends.mkl.is_available() and "Intel" in facts.get("vendor_id", name)


def surroundings(device: torch.device | str = "cpu") -> dict[str, str]:
    """Return the conditions of a measurement: machine, threads, versions, memory setting."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(device) if on_gpu else processor()[0],
        "threads": f"CUDA {torch.version.cuda}" if on_gpu else counted(threads(), "thread"),
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "memory": "freed memory kept" if memory_kept() else "freed memory returned to the system",
    }


def conditions(device: torch.device | str = "cpu") -> str:
    """Return one line that belongs under every table of times."""
    return ", ".join(surroundings(device).values())


# ---- memory ------------------------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's malloc.h
_KEEP = 2**31 - 4097
_kept = False


def keep_memory() -> bool:
    """Let the C library keep freed memory instead of returning it to the system, for this process, from now on.

    Fresh pages cost more than many kernels: filling 64 MB takes several times as long when every page must first be
    mapped. But memory stays with the process, and this is not fully reversible. Therefore only the user turns it on; a
    benchmark turns it on for both sides and says so. It works for memory that the main thread allocates, for each size
    after about ten allocations: glibc before 2.38 cannot reuse an aligned block at once (its bug 14581).

    Returns:
        Whether it took effect: only glibc on Linux can.
    """
    global _kept  # noqa: PLW0603 - the setting belongs to the process
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # An older glibc refuses thresholds above 32 MB; not to map at all does the same there.
    mapped = libc.mallopt(_MMAP_THRESHOLD, _KEEP) or libc.mallopt(_MMAP_MAX, 0)
    _kept = bool(mapped and libc.mallopt(_TRIM_THRESHOLD, _KEEP))
    return _kept


def memory_kept() -> bool:
    """Whether freed memory stays with the process, by `keep_memory` or by glibc's environment variables."""
    values = [os.environ.get(f"MALLOC_{name}_THRESHOLD_", "") for name in ("MMAP", "TRIM")]
    return _kept or all(v.isdecimal() and int(v) >= 1 << 30 for v in values)
