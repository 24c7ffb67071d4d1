"""`Machine`: what PyTorch's choice reads of a machine and its settings, for this one or one that is not here."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .describe import fields_of
from .versions import MODELLED_VERSIONS, cudnn_text_of, torch_minor

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """What PyTorch's choice of a convolution kernel reads of the machine, its build and its settings.

    `Machine.here` reads this one, `Machine.parse` a description of another.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` (NVIDIA and ROCm alike), ``"xpu"``, ``"mps"`` or another.
        label: what people call it.
        capability: compute capability of an NVIDIA GPU.
        cudnn: cuDNN as the number that it reports (91000 is 9.10.0), None without it.
        miopen: whether PyTorch was built for ROCm with MIOpen.
        mkldnn: whether PyTorch was built with oneDNN.
        mkldnn_bf16: whether oneDNN has bfloat16 instructions here (AVX-512, AVX-NE-CONVERT, Arm BF16).
        mkldnn_fp16: whether oneDNN has float16 instructions here (AVX512-FP16, AMX-FP16; never on Arm).
        nnpack: whether NNPACK is built in and runs here.
        winograd: whether ``__ARM_NEON__`` (Apple, 32-bit Arm) or the RISC-V vector extension was there at build time.
        mobile: whether this is a mobile build, with XNNPACK.
        threads: ``torch.get_num_threads()``.
        torch_version: the release whose rules are asked for.
        cudnn_enabled: ``torch.backends.cudnn.enabled`` (it switches MIOpen too).
        cudnn_v8: the v8 interface of cuDNN, off with ``TORCH_CUDNN_V8_API_DISABLED=1``.
        depthwise_kernel: ``torch.backends.cudnn.depthwise_kernel`` (2.13 and later).
        benchmark: ``torch.backends.cudnn.benchmark``; it changes the algorithm inside cuDNN, not the backend.
        deterministic: deterministic algorithms; likewise.
        mkldnn_enabled: ``torch.backends.mkldnn.enabled``.
        nnpack_enabled: ``torch.backends.nnpack`` flags.
        miopen_nhwc: ``PYTORCH_MIOPEN_SUGGEST_NHWC=1``.
        assumed: what a description left open and was assumed.

    Equivalent to:
        >>> Machine.parse("h100 cudnn 9.10").capability
        (9, 0)
    """

    device_type: str = "cpu"
    label: str = ""
    capability: tuple[int, int] | None = None
    cudnn: int | None = None
    miopen: bool = False
    mkldnn: bool = True
    mkldnn_bf16: bool = True
    mkldnn_fp16: bool = False
    nnpack: bool = True
    winograd: bool = False
    mobile: bool = False
    threads: int = 4
    torch_version: str = field(default_factory=torch_minor)
    cudnn_enabled: bool = True
    cudnn_v8: bool = True
    depthwise_kernel: str = "auto"
    benchmark: bool = False
    deterministic: bool = False
    mkldnn_enabled: bool = True
    nnpack_enabled: bool = True
    miopen_nhwc: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def modelled(self) -> bool:
        """Whether the rules of this PyTorch release were read."""
        return self.torch_version in MODELLED_VERSIONS

    def since(self, version: str) -> bool:
        """Whether this release is ``version`` or later."""
        return _version_key(self.torch_version) >= _version_key(version)

    def replace(self, **changes: Any) -> Machine:
        """The same machine with some fields changed."""
        return replace(self, **changes)

    @property
    def cudnn_text(self) -> str:
        """cuDNN's version for people."""
        return "no cuDNN" if self.cudnn is None else f"cuDNN {cudnn_text_of(self.cudnn)}"

    def __str__(self) -> str:
        parts = [self.label or self.device_type]
        if self.device_type == "cuda":
            parts.append("MIOpen" if self.miopen else self.cudnn_text)
        if self.device_type == "cpu":
            parts.append(f"{self.threads} thread{'s' if self.threads != 1 else ''}")
        parts.append(f"torch {self.torch_version}")
        text = ", ".join(parts)
        return text + (f" (assumed: {'; '.join(self.assumed)})" if self.assumed else "")

    @classmethod
    def here(cls, device: torch.device | str | None = None) -> Machine:
        """The machine at hand with the settings in force, for a device that is here.

        Raises:
            ValueError: this PyTorch has no such device.
        """
        return _read_machine(torch.device("cpu" if device is None else device))

    @classmethod
    def parse(cls, text: str) -> Machine:
        """Read a description such as ``"cuda sm_90 cudnn 9.10"``, ``"h100"``, ``"rocm gfx942 miopen"``, ``"xpu"``,
        ``"mps"``, ``"cpu"``, ``"cpu arm"``, ``"cpu avx512 threads 1 torch 2.12"``.

        Raises:
            ValueError: a word that it does not know, with the nearest one that it does.
        """
        fields = fields_of(text)
        return cls.here("cpu") if fields is None else cls(**fields)


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _read_machine(device: torch.device) -> Machine:
    kind = device.type
    common: dict[str, Any] = {
        "device_type": kind,
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "mkldnn_bf16": _cpu_flag("_is_mkldnn_bf16_supported"),
        "mkldnn_fp16": _cpu_flag("_is_mkldnn_fp16_supported"),
        "nnpack": bool(torch._nnpack_available()),  # pyright: ignore[reportPrivateImportUsage]
        "winograd": platform.machine() == "arm64" or platform.machine().startswith("riscv"),
        "cudnn_enabled": torch._C._get_cudnn_enabled(),
        "cudnn_v8": os.environ.get("TORCH_CUDNN_V8_API_DISABLED") != "1",
        "depthwise_kernel": getattr(torch._C, "_get_cudnn_depthwise_kernel", lambda: "auto")(),
        "benchmark": torch._C._get_cudnn_benchmark(),
        "deterministic": torch._C._get_cudnn_deterministic() or torch.are_deterministic_algorithms_enabled(),
        "mkldnn_enabled": torch._C._get_mkldnn_enabled(),
        "nnpack_enabled": torch._C._get_nnpack_enabled(),
        "miopen_nhwc": os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") == "1",
    }
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "no CUDA device is here; describe one instead, for example device='cuda sm_90 cudnn 9.10' or 'h100'"
            )
        common["miopen"] = torch.version.hip is not None
        common["cudnn"] = None if common["miopen"] else torch.backends.cudnn.version()
        common["capability"] = torch.cuda.get_device_capability(device)
        common["label"] = torch.cuda.get_device_name(device)
    elif kind == "cpu":
        common["label"] = f"this CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    return Machine(**common)


def _cpu_flag(name: str) -> bool:
    """Ask oneDNN's operators what this CPU can do; no where this build has no such operator."""
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):
        return False
