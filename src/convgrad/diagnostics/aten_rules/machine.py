"""`Machine`: what PyTorch's choice reads of a machine and its settings, for this one or for one in words."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

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
    """

    device_type: str = "cpu"  # or "cuda" (NVIDIA and ROCm alike), "xpu", "mps", ...
    label: str = ""  # what people call it
    capability: tuple[int, int] | None = None  # compute capability of an NVIDIA GPU
    cudnn: int | None = None  # as the number that it reports: 91000 is 9.10.0
    miopen: bool = False  # PyTorch was built for ROCm with MIOpen
    mkldnn: bool = True  # PyTorch was built with oneDNN
    mkldnn_bf16: bool = True  # oneDNN has bfloat16 instructions here (AVX-512, AVX-NE-CONVERT, Arm BF16)
    mkldnn_fp16: bool = False  # oneDNN has float16 instructions here (AVX512-FP16, AMX-FP16; never on Arm)
    nnpack: bool = True  # NNPACK is built in and runs here
    winograd: bool = False  # built for __ARM_NEON__ (Apple, 32-bit Arm) or the RISC-V vector extension
    threads: int = 4  # torch.get_num_threads()
    torch_version: str = field(default_factory=lambda: _minor(torch.__version__))  # whose rules apply
    cudnn_enabled: bool = True  # torch.backends.cudnn.enabled (it switches MIOpen too)
    cudnn_v8: bool = True  # cuDNN's v8 interface; off with TORCH_CUDNN_V8_API_DISABLED=1
    depthwise_kernel: str = "auto"  # torch.backends.cudnn.depthwise_kernel (2.13 and later)
    mkldnn_enabled: bool = True  # torch.backends.mkldnn.enabled
    nnpack_enabled: bool = True  # torch.backends.nnpack flags
    miopen_nhwc: bool = False  # PYTORCH_MIOPEN_SUGGEST_NHWC=1
    assumed: tuple[str, ...] = ()  # what a description left open and was assumed

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
            parts.append(("MIOpen" if self.miopen else self.cudnn_text) + " (off)" * (not self.cudnn_enabled))
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
        words = machine_words(text)
        if not words:
            raise ValueError(
                "an empty device description; try 'cuda sm_90 cudnn 9.10', 'rocm gfx942', 'xpu' or 'cpu arm'"
            )
        if words in (["cpu"], ["here"]):
            return cls.here("cpu")
        if len(named := [word for word in words if word in MACHINES]) > 1:
            raise ValueError(f"device description: one machine at a time, got {' and '.join(named)}")
        known: dict[str, Any] = {"torch_version": _minor(torch.__version__)}
        for word in words:
            known |= _meant(word)
        arch, kind = known.pop("arch", "x86"), known.get("device_type", "cpu")
        assumed: dict[str, tuple[Any, str]] = {}  # field -> its value and how it is said
        if kind == "cuda" and "miopen" not in known:
            cudnn = _WHEEL_CUDNN.get(known["torch_version"], max(_WHEEL_CUDNN.values()))
            said = cls(cudnn=cudnn).cudnn_text if known.get("cudnn_enabled", True) else ""
            assumed = {"capability": ((8, 0), "compute capability 8.0"), "cudnn": (cudnn, said)}
        elif kind == "cpu":
            known |= {"mkldnn_fp16": False} if arch == "arm" else {}
            assumed = _BUILDS[arch] | {"threads": (4, "4 threads")}
        left_open = {name: value for name, value in assumed.items() if name not in known}
        told = tuple(text for _, text in left_open.values() if text)
        return cls(**known, **{name: value for name, (value, _) in left_open.items()}, label=text.strip(), assumed=told)


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
    """A row of the table of machines: what a name means, and the maker's datasheet, of the SXM or OAM version."""

    capability: tuple[int, int] | None  # compute capability of an NVIDIA GPU; None for one of AMD's
    bandwidth: int = 0  # GB/s of memory; 0 where it is not known
    flops: dict[str, float] = {}  # noqa: RUF012 - TFLOP/s by dtype, dense, accumulated in float32; never changed


def _sheet(capability: tuple[int, int] | None, bandwidth: int, double: float, single: float, half: float) -> Sheet:
    flops = {"float64": double, "float32": single, "float16": half}
    if capability is None or capability >= (8, 0):
        flops["bfloat16"] = half
    return Sheet(capability, bandwidth, {dtype: value for dtype, value in flops.items() if value})


#: GPUs by name.
MACHINES: dict[str, Sheet] = {
    "a100": _sheet((8, 0), 2039, 19.5, 19.5, 312),
    "h100": _sheet((9, 0), 3350, 67, 67, 989),
    "h200": _sheet((9, 0), 4800, 67, 67, 989),
    "v100": _sheet((7, 0), 900, 7.8, 15.7, 125),
    "t4": _sheet((7, 5), 320, 0.25, 8.1, 65),
    "a10": _sheet((8, 6), 600, 0, 31.2, 125),
    "l4": _sheet((8, 9), 300, 0, 30.3, 121),
    "l40s": _sheet((8, 9), 864, 0, 91.6, 362),
    "rtx4090": _sheet((8, 9), 1008, 1.3, 82.6, 165),
    "mi250x": _sheet(None, 3277, 95.7, 95.7, 383),
    "mi300x": _sheet(None, 5300, 163.4, 163.4, 1307),
}
_NO_SHEET: dict[tuple[int, int] | None, str] = {
    (6, 0): "p100", (6, 1): "1080", (7, 5): "rtx2080", (8, 6): "a40 rtx3080 rtx3090", (8, 9): "l40 rtx4080",
    (9, 0): "gh200", (10, 0): "b100 b200 gb200", (10, 3): "b300", (12, 0): "rtx5080 rtx5090",
    None: "mi100 mi210 mi250 mi300 mi300a mi325x mi350x mi355x 7900xtx",
}  # fmt: skip
MACHINES |= {name: Sheet(capability) for capability, names in _NO_SHEET.items() for name in names.split()}

#: cuDNN that the CUDA wheel of a release requires; assumed where a description names none.
_WHEEL_CUDNN = {"2.11": 91900, "2.12": 92000, "2.13": 92000, "2.14": 92400, "2.15": 92600}

#: A pattern of words in a description, with their ``no`` or their number -> the fields that they mean, or a function
#: of the match that returns these ("arch" is no field, but a key of `_BUILDS`).
_WORDS: dict[str, dict[str, Any] | Callable[[re.Match[str]], dict[str, Any]]] = {
    "cuda|nvidia|cudnn": {"device_type": "cuda"},
    "rocm|hip|amd|miopen|miopen .+|gfx[0-9a-f]+": {"device_type": "cuda", "miopen": True},
    "intel|geforce": {},
    "xpu": {"device_type": "xpu"},
    "mps": {"device_type": "mps"},
    "cpu": {"device_type": "cpu"},
    "arm|aarch64|arm64": {"arch": "arm"},
    "macos|apple": {"arch": "apple"},
    "riscv": {"arch": "riscv"},
    "x86|x86_64": {"arch": "x86"},
    "avx2": {"arch": "x86", "mkldnn_bf16": False, "mkldnn_fp16": False},
    "avx512|amx": {"arch": "x86", "mkldnn_bf16": True},
    "bf16": {"mkldnn_bf16": True},
    "fp16": {"mkldnn_fp16": True},
    "mkldnn|onednn": {"mkldnn": True},
    "nnpack": {"nnpack": True},
    "nhwc": {"miopen_nhwc": True},
    "native": {"depthwise_kernel": "native"},
    "benchmark|deterministic": {},  # they change the algorithm inside cuDNN, not the backend
    "no cudnn|no miopen": {"cudnn_enabled": False},
    "no mkldnn|no onednn": {"mkldnn_enabled": False},
    "no nnpack": {"nnpack_enabled": False},
    "no bf16": {"mkldnn_bf16": False},
    "no fp16": {"mkldnn_fp16": False},
    r"sm_?(\d+)(\d)a?": lambda m: {"device_type": "cuda", "capability": (int(m[1]), int(m[2]))},
    r"torch (.+)": lambda m: {"torch_version": _minor(m[1])},
    r"threads ([1-9]\d*)": lambda m: {"threads": int(m[1])},
    r"cudnn (.+)": lambda m: {"device_type": "cuda", "cudnn": _cudnn(m[1])},
}
#: A CPU's architecture -> what is assumed of PyTorch's build for it and of its instructions: value, and how it is said.
_BUILDS: dict[str, dict[str, tuple[Any, str]]] = {
    "x86": {"mkldnn_bf16": (False, "")},
    "arm": {"mkldnn_bf16": (True, "Arm BF16 instructions")},
    "apple": {"mkldnn": (False, "built without oneDNN"), "winograd": (True, "")},
    "riscv": {"mkldnn": (False, "built without oneDNN"), "winograd": (True, ""), "nnpack": (False, "")},
}


def machine_words(text: str) -> list[str]:
    """The words of a description, each with its ``no`` or its number.

    ``rtx 4090``, ``RTX-4090`` and ``4090`` are one name, ``cuda:0`` is ``cuda``, ``without`` is ``no``.
    """
    text = re.sub(r"\b(cuda|xpu|mps|cpu):\d+\b", r"\1", text.lower())
    text = re.sub(r"\b(?:rtx[ -]?)?([2-5]0[89]0)\b", r"rtx\1", text)
    pattern = r"(?:no|without)\s+[^\s,;+/]+|(?:cudnn|miopen|torch|threads)\s+\d[\d.]*(?![^\s,;+/])|[^\s,;+/]+"
    return [re.sub(r"^without ", "no ", " ".join(word.split())) for word in re.findall(pattern, text)]


def _cudnn(version: str) -> int:
    """Return 91002 for ``"9.10.2"``, as cuDNN does."""
    major, minor, patch = ([int(n) for n in version.split(".")] + [0, 0])[:3]
    return major * (10000 if major >= 9 else 1000) + minor * 100 + patch


def _meant(word: str) -> dict[str, Any]:
    """Return the fields that a word means, or a word with its ``no`` or its number."""
    if word in MACHINES:
        capability = MACHINES[word].capability
        return {"device_type": "cuda", **({"capability": capability} if capability else {"miopen": True})}
    for pattern, fields in _WORDS.items():
        if found := re.fullmatch(pattern, word):
            return fields(found) if callable(fields) else fields
    if word.split(maxsplit=1)[0] in ("torch", "threads"):
        why = f"{word.split(maxsplit=1)[0]!r} is followed by a number, as in 'cpu threads 4 torch 2.12'"
    elif word == "channels_last" or isinstance(getattr(torch, word, None), torch.dtype):
        why = (
            f"{word!r} belongs to the problem and not to a machine; write it behind the problem, "
            f"'g96ic96ih56oc96kh7ph3 {word}', or make the operands so"
        )
    else:
        names = [name for pattern in _WORDS for name in pattern.split("|") if re.fullmatch(r"[\w ]+", name)]
        why = UnknownNameError.of("don't know", word, [*MACHINES, *names, "sm_90", "gfx942", "threads", "torch"])
    raise ValueError(f"device description: {why}")
