"""The environment of a measurement: all that changes its kernels' time beside the problem, as one text."""

from __future__ import annotations

from functools import lru_cache

import torch

from .._compat import cuda_driver, onednn_limit, package_version, precision
from .._version import __version__
from ..settings import benchmark, cudnn_allows_tf32, mkldnn, threads
from .ab_timer import memory_kept, processor


def environment(device: torch.device) -> str:
    """The machine, the versions and the flags in force; empty for a device that is not here.

    What changes with one backend alone (a compiled library, the source of a user's function) belongs to the
    backend (``Backend.version``).

    Equivalent to:
        >>> environment(torch.device("cpu")).startswith("cpu ")
        True
    """
    if device.type == "cpu":
        conv, matmul = precision("mkldnn", "conv"), precision("mkldnn", "matmul")
        limit = onednn_limit()
        onednn = f"onednn {conv}{limit and f' up to {limit}'}" if mkldnn() else "no onednn"
        flags = f"{threads()} threads, {onednn}, matmul {matmul}"
        flags += ", memory kept" if memory_kept() else ""
    else:
        on = {"cudnn": torch.backends.cudnn.enabled, "benchmark": benchmark(), "tf32": cudnn_allows_tf32()}
        flags = " ".join(name if value else f"no {name}" for name, value in on.items())
    machine = kind_of_machine(device)
    return machine and f"{machine}; {_versions(device.type)}; {flags}"


@lru_cache
def kind_of_machine(device: torch.device) -> str:
    """The processor, as far as kernels can tell; empty for a device that is not here.

    Equivalent to:
        >>> kind_of_machine(torch.device("cuda", 99))
        ''
    """
    if device.type == "cpu":
        name, facts = processor()  # the name alone may be no more than "AMD EPYC"
        numbers = [facts[n] for n in ("cpu family", "model", "CPU implementer", "CPU part") if n in facts]
        full_name = f"{name} {'/'.join(numbers)}".strip()
        return f"cpu {full_name}, {torch.backends.cpu.get_cpu_capability()}"
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {torch.cuda.get_device_name(device)}, {major}.{minor}, driver {cuda_driver()}"


@lru_cache
def _versions(device_type: str) -> str:
    parts = [f"convgrad {__version__}", f"torch {torch.__version__}"]
    if device_type != "cpu":
        triton = package_version("triton")
        parts += [f"cudnn {torch.backends.cudnn.version()}", f"triton {triton}" if triton else "no triton"]
    return ", ".join(parts)


@lru_cache
def mkl_at_its_best() -> bool:
    """Whether PyTorch's matrix products are MKL's on a processor of Intel's, for which it is made."""
    name, facts = processor()
    return torch.backends.mkl.is_available() and "Intel" in facts.get("vendor_id", name)
