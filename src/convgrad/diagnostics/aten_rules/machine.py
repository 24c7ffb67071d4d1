"""`Machine`: what PyTorch's choice reads of a machine and its settings, for this one or for one in words."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from ..._compat import onednn_has
from ...errors import UnknownNameError

#: The releases of PyTorch whose rules were read and are modelled.
MODELLED_VERSIONS: tuple[str, ...] = ("2.11", "2.12", "2.13", "2.14", "2.15")


def _minor(version: str) -> str:
    """``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True)
class Machine:
    """The facts of a machine, its build and its settings that PyTorch's choice of a convolution kernel reads.

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
        threads: ``torch.get_num_threads()``.
        torch_version: the release whose rules apply.
        cudnn_enabled: ``torch.backends.cudnn.enabled`` (it switches MIOpen too).
        cudnn_v8: the v8 interface of cuDNN, off with ``TORCH_CUDNN_V8_API_DISABLED=1``.
        depthwise_kernel: ``torch.backends.cudnn.depthwise_kernel`` (2.13 and later).
        mkldnn_enabled: ``torch.backends.mkldnn.enabled``.
        nnpack_enabled: ``torch.backends.nnpack`` flags.
        miopen_nhwc: ``PYTORCH_MIOPEN_SUGGEST_NHWC=1``.
        assumed: what a description left open and was assumed.
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
    threads: int = 4
    torch_version: str = field(default_factory=lambda: _minor(torch.__version__))
    cudnn_enabled: bool = True
    cudnn_v8: bool = True
    depthwise_kernel: str = "auto"
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
        return TorchVersion(self.torch_version) >= version

    @property
    def since_2_12(self) -> bool:
        return self.since("2.12")

    @property
    def since_2_13(self) -> bool:
        return self.since("2.13")

    @property
    def cudnn_text(self) -> str:
        """cuDNN's version for people: 91000 is 9.10.0, 8907 is 8.9.7."""
        if self.cudnn is None:
            return "no cuDNN"
        step = 10000 if self.cudnn >= 90000 else 1000
        return f"cuDNN {self.cudnn // step}.{self.cudnn % step // 100}.{self.cudnn % 100}"

    def __str__(self) -> str:
        parts = [self.label or self.device_type]
        if self.device_type == "cuda":
            parts.append("MIOpen" if self.miopen else self.cudnn_text)
        if self.device_type == "cpu":
            parts.append(f"{self.threads} thread{'s' if self.threads != 1 else ''}")
        parts.append(f"torch {self.torch_version}")
        text = ", ".join(parts)
        return text + (f" (assumed: {'; '.join(self.assumed)})" if self.assumed else "")

    @property
    def is_here(self) -> bool:
        """Whether it is this machine with the settings in force, and not one that is only described."""
        try:
            return self == Machine.here(self.device_type)
        except (ValueError, RuntimeError):
            return False

    @classmethod
    def here(cls, device: torch.device | str | None = None) -> Machine:
        """Return the machine at hand with the settings in force, for a device that is here.

        Raises:
            ValueError: this PyTorch has no such device.
        """
        device = torch.device("cpu" if device is None else device)
        known: dict[str, Any] = {}
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(
                    "no CUDA device is here; describe one instead, for example device='cuda sm_90 cudnn 9.10' or 'h100'"
                )
            known["miopen"] = torch.version.hip is not None
            known["cudnn"] = None if known["miopen"] else torch.backends.cudnn.version()
            known["capability"] = torch.cuda.get_device_capability(device)
            known["label"] = torch.cuda.get_device_name(device)
        elif device.type == "cpu":
            known["label"] = f"this CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
        return cls(
            device_type=device.type,
            threads=torch.get_num_threads(),
            mkldnn=torch.backends.mkldnn.is_available(),
            mkldnn_bf16=onednn_has(torch.bfloat16),
            mkldnn_fp16=onednn_has(torch.float16),
            nnpack=bool(torch._nnpack_available()),  # pyright: ignore[reportPrivateImportUsage]
            winograd=platform.machine() == "arm64" or platform.machine().startswith("riscv"),
            cudnn_enabled=torch._C._get_cudnn_enabled(),
            cudnn_v8=os.environ.get("TORCH_CUDNN_V8_API_DISABLED") != "1",
            depthwise_kernel=getattr(torch._C, "_get_cudnn_depthwise_kernel", lambda: "auto")(),
            mkldnn_enabled=torch._C._get_mkldnn_enabled(),
            nnpack_enabled=torch._C._get_nnpack_enabled(),
            miopen_nhwc=os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") == "1",
            **known,
        )

    @classmethod
    def parse(cls, text: str) -> Machine:
        """Read a description such as ``"cuda sm_90 cudnn 9.10"``, ``"h100"``, ``"rtx 4090"``, ``"rocm gfx942 miopen"``,
        ``"xpu"``, ``"mps"``, ``"cpu"``, ``"cpu arm"``, ``"cpu avx512 threads 1 torch 2.12"``.

        Raises:
            ValueError: a word that it does not know, with the nearest one that it does.
        """
        words = _words(text)
        if not words:
            raise ValueError(
                "an empty device description; try 'cuda sm_90 cudnn 9.10', 'rocm gfx942', 'xpu' or 'cpu arm'"
            )
        if words in (["cpu"], ["here"]):
            return cls.here("cpu")
        known: dict[str, Any] = {}
        while words:
            _read_words(words, known)
        arch, kind = known.pop("arch", "x86"), known.get("device_type", "cpu")
        assumed: tuple[str, ...] = ()
        if kind == "cuda" and "miopen" not in known:
            assumed = _with_libraries(known)
        elif kind == "cpu":
            assumed = _with_instructions(known, arch)
        return cls(label=text.strip(), assumed=assumed, **known)

    @property
    def sheet(self) -> tuple[str, Sheet] | None:
        """The name and the datasheet of a GPU in `MACHINES`, by a word of its label."""
        return next(((word, MACHINES[word]) for word in _words(self.label) if word in MACHINES), None)


# ---- descriptions --------------------------------------------------------------------------------

DeviceLike = Machine | torch.device | str | None


def machine_of(device: DeviceLike, found_on: str = "cpu") -> Machine:
    """Return a machine from a machine, a device or a description; without one, the operands' device.

    A GPU that is not here, as in ``torch.device("cuda:0")``, is taken for one that is described by its kind.
    """
    if isinstance(device, Machine):
        return device
    if device is not None and not isinstance(device, (str, torch.device)):
        raise TypeError(f"device is a torch.device or a description such as 'h100', got {device!r}")
    text = found_on if device is None else str(device)
    if re.fullmatch(r"cuda(:\d+)?", text) and torch.cuda.is_available():
        return Machine.here(text)
    if device is None or (isinstance(device, torch.device) and device.type != "cuda"):
        return Machine.here(text)
    return Machine.parse(text)


class Sheet(NamedTuple):
    """A row of the table of machines: what a name means, and the maker's datasheet.

    Args:
        capability: compute capability of an NVIDIA GPU; None for one of AMD's.
        bandwidth: GB/s of memory; 0 where it is not known.
        flops: TFLOP/s by dtype, dense, accumulated in float32 where the datasheet says so; of the SXM or OAM version
            where there are several.
    """

    capability: tuple[int, int] | None
    bandwidth: int = 0
    flops: dict[str, float] = {}  # noqa: RUF012 - never changed


def _tflops(double: float, single: float, half: float, bf16: bool = True) -> dict[str, float]:
    known = {"float64": double, "float32": single, "float16": half, "bfloat16": half}
    return {dtype: value for dtype, value in known.items() if value and (bf16 or dtype != "bfloat16")}


#: GPUs by name.
MACHINES: dict[str, Sheet] = {
    "a100": Sheet((8, 0), 2039, _tflops(19.5, 19.5, 312)),
    "h100": Sheet((9, 0), 3350, _tflops(67, 67, 989)),
    "h200": Sheet((9, 0), 4800, _tflops(67, 67, 989)),
    "gh200": Sheet((9, 0)),
    "b100": Sheet((10, 0)),
    "b200": Sheet((10, 0)),
    "gb200": Sheet((10, 0)),
    "b300": Sheet((10, 3)),
    "v100": Sheet((7, 0), 900, _tflops(7.8, 15.7, 125, False)),
    "t4": Sheet((7, 5), 320, _tflops(0.25, 8.1, 65, False)),
    "a10": Sheet((8, 6), 600, _tflops(0, 31.2, 125)),
    "a40": Sheet((8, 6)),
    "l4": Sheet((8, 9), 300, _tflops(0, 30.3, 121)),
    "l40": Sheet((8, 9)),
    "l40s": Sheet((8, 9), 864, _tflops(0, 91.6, 362)),
    "rtx2080": Sheet((7, 5)),
    **dict.fromkeys(("rtx3080", "rtx3090"), Sheet((8, 6))),
    "rtx4080": Sheet((8, 9)),
    "rtx4090": Sheet((8, 9), 1008, _tflops(1.3, 82.6, 165)),
    **dict.fromkeys(("rtx5080", "rtx5090"), Sheet((12, 0))),
    "p100": Sheet((6, 0)),
    "1080": Sheet((6, 1)),
    "mi250x": Sheet(None, 3277, _tflops(95.7, 95.7, 383)),
    "mi300x": Sheet(None, 5300, _tflops(163.4, 163.4, 1307)),
    **dict.fromkeys(
        ("mi100", "mi210", "mi250", "mi300", "mi300a", "mi325x", "mi350x", "mi355x", "7900xtx"), Sheet(None)
    ),
}

#: cuDNN that the CUDA wheel of a release requires; assumed where a description names none.
_WHEEL_CUDNN = {"2.11": 91900, "2.12": 92000, "2.13": 92000, "2.14": 92400, "2.15": 92600}

#: Words of a description, and the fields that they mean ("arch" is no field: `_with_instructions` reads it).
_VOCABULARY: dict[str, dict[str, Any]] = {
    "cuda nvidia cudnn": {"device_type": "cuda"},
    "rocm hip amd miopen": {"device_type": "cuda", "miopen": True},
    "intel geforce": {},
    "xpu": {"device_type": "xpu"},
    "mps": {"device_type": "mps"},
    "cpu": {"device_type": "cpu"},
    "arm aarch64 arm64": {"arch": "arm"},
    "macos apple": {"arch": "apple"},
    "riscv": {"arch": "riscv"},
    "x86 x86_64": {"arch": "x86"},
    "avx2": {"arch": "x86", "mkldnn_bf16": False, "mkldnn_fp16": False},
    "avx512 amx": {"arch": "x86", "mkldnn_bf16": True},
    "bf16": {"mkldnn_bf16": True},
    "fp16": {"mkldnn_fp16": True},
    "mkldnn onednn": {"mkldnn": True},
    "nnpack": {"nnpack": True},
    "nhwc": {"miopen_nhwc": True},
    "native": {"depthwise_kernel": "native"},
    "benchmark deterministic": {},  # they change the algorithm inside cuDNN, not the backend
}
_WORDS = {word: fields for words, fields in _VOCABULARY.items() for word in words.split()}
_WORDS |= {
    name: {"device_type": "cuda"} | ({"capability": sheet.capability} if sheet.capability else {"miopen": True})
    for name, sheet in MACHINES.items()
}
#: What is false after "no" or "without".
_NEGATED = {
    "cudnn": "cudnn_enabled", "miopen": "cudnn_enabled", "mkldnn": "mkldnn_enabled", "onednn": "mkldnn_enabled",
    "nnpack": "nnpack_enabled", "bf16": "mkldnn_bf16", "fp16": "mkldnn_fp16",
}  # fmt: skip
#: Words that a number follows; without one, cuDNN and MIOpen are those of PyTorch.
_NUMBERED = {**dict.fromkeys(("cudnn", "miopen", "torch"), r"\d+(\.\d+)*"), "threads": r"[1-9]\d*"}


def _words(text: str) -> list[str]:
    """The words of a description; ``rtx 4090``, ``RTX-4090`` and ``4090`` are one name, ``cuda:0`` is ``cuda``."""
    text = re.sub(r"[,;+/]+", " ", text.strip().lower())
    text = re.sub(r"\b(cuda|xpu|mps|cpu):\d+\b", r"\1", text)
    return re.sub(r"\b(?:rtx[ -]?)?([2-5]0[89]0)\b", r"rtx\1", text).split()


def _read_words(words: list[str], known: dict[str, Any]) -> None:
    """Take the first word, or it and the number (or the word after ``no``) that follows."""
    word = words.pop(0)
    following = words[0] if words else ""
    if word in ("no", "without") and following in _NEGATED:
        known[_NEGATED[words.pop(0)]] = False
    elif word in _NUMBERED and re.fullmatch(_NUMBERED[word], following):
        number = words.pop(0)
        if word == "torch":
            known["torch_version"] = _minor(number)
        elif word == "threads":
            known["threads"] = int(number)
        else:
            known.update(_WORDS[word])
        if word == "cudnn":
            major, minor, patch = ([int(n) for n in number.split(".")] + [0, 0])[:3]
            known["cudnn"] = major * (10000 if major >= 9 else 1000) + minor * 100 + patch
    elif re.fullmatch(r"sm_?\d+a?", word):
        digits = re.sub(r"\D", "", word)
        known.update(device_type="cuda", capability=(int(digits[:-1]), int(digits[-1])))
    elif re.fullmatch(r"gfx[0-9a-f]+", word):
        known.update(_WORDS["rocm"])
    elif word in _WORDS:
        known.update(_WORDS[word])
    elif word in _NUMBERED:
        raise ValueError(f"device description: {word!r} is followed by a number, as in 'cpu threads 4 torch 2.12'")
    else:
        raise ValueError(f"device description: {_unknown(word)}")


def _unknown(word: str) -> str:
    """Return the message about a word that describes no machine."""
    if word == "channels_last" or isinstance(getattr(torch, word, None), torch.dtype):
        return (
            f"{word!r} belongs to the problem and not to a machine; write it behind the problem, "
            f"'g96ic96ih56oc96kh7ph3 {word}', or make the operands so"
        )
    return str(
        UnknownNameError.of("don't know", word, [*MACHINES, *_WORDS, "sm_90", "gfx942", "no", "threads", "torch"])
    )


def _with_libraries(known: dict[str, Any]) -> tuple[str, ...]:
    """Fill in what the description of an NVIDIA GPU left open, and say so."""
    assumed: list[str] = []
    if "capability" not in known:
        known["capability"] = (8, 0)
        assumed.append("compute capability 8.0")
    if "cudnn" not in known:
        version = known.get("torch_version", _minor(torch.__version__))
        known["cudnn"] = _WHEEL_CUDNN.get(version, max(_WHEEL_CUDNN.values()))
        if known.get("cudnn_enabled", True):
            assumed.append(Machine(cudnn=known["cudnn"]).cudnn_text)
    return tuple(assumed)


def _with_instructions(known: dict[str, Any], arch: str) -> tuple[str, ...]:
    """Fill in what the description of a CPU left open, and say so."""
    threads = () if "threads" in known else ("4 threads",)
    if arch == "x86":
        known.setdefault("mkldnn_bf16", False)
        return threads
    if arch == "arm":
        known["mkldnn_fp16"] = False
        return threads if "mkldnn_bf16" in known else ("Arm BF16 instructions", *threads)
    # Apple and RISC-V builds come without oneDNN and with the Winograd kernel
    known.update({"mkldnn": False, "nnpack": arch == "apple", **known, "winograd": True})
    return ("built without oneDNN", *threads)
