"""Reading a description of a machine, such as ``"h100 cudnn 9.10"`` or ``"cpu arm threads 1"``."""

from __future__ import annotations

import difflib
import re
from typing import Any

import torch

from .versions import cudnn_text_of, torch_minor

__all__ = ["fields_of"]

#: cuDNN that the CUDA wheel of a release asks for; used, and said, where a description names none.
_WHEEL_CUDNN = {"2.11": 91900, "2.12": 92000, "2.13": 92000, "2.14": 92400, "2.15": 92600}

#: Compute capability of GPUs by the name people use.
_NVIDIA = {
    "v100": (7, 0), "t4": (7, 5), "a100": (8, 0), "a10": (8, 6), "a40": (8, 6), "rtx3090": (8, 6), "3090": (8, 6),
    "l4": (8, 9), "l40": (8, 9), "l40s": (8, 9), "rtx4090": (8, 9), "4090": (8, 9), "h100": (9, 0), "h200": (9, 0),
    "gh200": (9, 0), "b100": (10, 0), "b200": (10, 0), "gb200": (10, 0), "b300": (10, 3), "rtx5090": (12, 0),
    "5090": (12, 0), "p100": (6, 0), "1080": (6, 1), "2080": (7, 5), "rtx2080": (7, 5),
}  # fmt: skip
_AMD = {
    "mi100": "gfx908", "mi210": "gfx90a", "mi250": "gfx90a", "mi250x": "gfx90a", "mi300": "gfx942", "mi300x": "gfx942",
    "mi300a": "gfx942", "mi325x": "gfx942", "mi350x": "gfx950", "mi355x": "gfx950", "7900xtx": "gfx1100",
}  # fmt: skip


def _cudnn_number(text: str) -> int:
    """9.10 -> 91000, 8.9.7 -> 8907: the number that cuDNN itself reports."""
    major, minor, patch = ([int(n) for n in text.split(".")] + [0, 0])[:3]
    return major * 10000 + minor * 100 + patch if major >= 9 else major * 1000 + minor * 100 + patch


def fields_of(text: str) -> dict[str, Any] | None:
    """The fields of `Machine` that a description states; None where it means the machine at hand."""
    words = re.sub(r"[,;+/]+", " ", text.strip().lower()).split()
    if not words:
        raise ValueError("an empty device description; try 'cuda sm_90 cudnn 9.10', 'rocm gfx942', 'xpu' or 'cpu arm'")
    if words in (["cpu"], ["here"]):
        return None
    found: dict[str, Any] = {"label": text.strip()}
    rest = iter(range(len(words)))
    for i in rest:
        used = _read_word(words[i], words[i + 1] if i + 1 < len(words) else "", found)
        if used == 2:
            next(rest, None)
    return _finish(found)


_PLAIN_WORDS: dict[str, dict[str, Any]] = {
    "cuda": {"device_type": "cuda"},
    "nvidia": {"device_type": "cuda"},
    "rocm": {"device_type": "cuda", "miopen": True},
    "hip": {"device_type": "cuda", "miopen": True},
    "amd": {"device_type": "cuda", "miopen": True},
    "miopen": {"device_type": "cuda", "miopen": True},
    "nhwc": {"miopen_nhwc": True},
    "xpu": {"device_type": "xpu"},
    "intel": {},
    "mps": {"device_type": "mps"},
    "cpu": {"device_type": "cpu"},
    "arm": {"arch": "arm"},
    "aarch64": {"arch": "arm"},
    "arm64": {"arch": "arm"},
    "macos": {"arch": "apple"},
    "apple": {"arch": "apple"},
    "riscv": {"arch": "riscv"},
    "x86": {"arch": "x86"},
    "x86_64": {"arch": "x86"},
    "avx2": {"arch": "x86", "mkldnn_bf16": False, "mkldnn_fp16": False},
    "avx512": {"arch": "x86", "mkldnn_bf16": True},
    "amx": {"arch": "x86", "mkldnn_bf16": True},
    "bf16": {"mkldnn_bf16": True},
    "fp16": {"mkldnn_fp16": True},
    "mobile": {"mobile": True},
    "native": {"depthwise_kernel": "native"},
    "mkldnn": {"mkldnn": True},
    "onednn": {"mkldnn": True},
    "nnpack": {"nnpack": True},
    "benchmark": {"benchmark": True},
    "deterministic": {"deterministic": True},
}
_NEGATED: dict[str, dict[str, Any]] = {
    "cudnn": {"cudnn_enabled": False},
    "miopen": {"cudnn_enabled": False},
    "mkldnn": {"mkldnn_enabled": False},
    "onednn": {"mkldnn_enabled": False},
    "nnpack": {"nnpack_enabled": False},
    "bf16": {"mkldnn_bf16": False},
    "fp16": {"mkldnn_fp16": False},
}


def _read_word(word: str, following: str, found: dict[str, Any]) -> int:
    """Take one word, or it and the next; return how many were taken."""
    number = re.fullmatch(r"\d+(\.\d+)*", following)
    if word in ("no", "without") and following in _NEGATED:
        found.update(_NEGATED[following])
        return 2
    if word in ("cudnn", "torch", "threads", "miopen") and number:
        if word == "cudnn":
            found["cudnn"] = _cudnn_number(following)
            found.setdefault("device_type", "cuda")
        elif word == "miopen":
            found.update(_PLAIN_WORDS["miopen"])
        else:
            found.update({"torch_version": torch_minor(following)} if word == "torch" else {"threads": int(following)})
        return 2
    if word == "cudnn":
        found.setdefault("device_type", "cuda")
    elif re.fullmatch(r"sm_?\d+a?", word):
        digits = re.sub(r"\D", "", word)
        found.update(device_type="cuda", capability=(int(digits[:-1]), int(digits[-1])))
    elif re.fullmatch(r"gfx[0-9a-f]+", word):
        found.update(device_type="cuda", miopen=True)
    elif word in _NVIDIA:
        found.update(device_type="cuda", capability=_NVIDIA[word])
    elif word in _AMD:
        found.update(device_type="cuda", miopen=True)
    elif word in _PLAIN_WORDS:
        found.update(_PLAIN_WORDS[word])
    else:
        raise ValueError(f"device description: {_unknown(word)}")
    return 1


def _unknown(word: str) -> str:
    """What to say of a word that describes no machine."""
    if word == "channels_last" or isinstance(getattr(torch, word, None), torch.dtype):
        return (
            f"{word!r} belongs to the problem and not to a machine; write it behind the problem, "
            f"'g96ic96ih56oc96kh7ph3 {word}', or make the operands so"
        )
    known = [*_PLAIN_WORDS, *_NVIDIA, *_AMD, "cudnn", "sm_90", "gfx942", "no", "threads", "torch"]
    near = difflib.get_close_matches(word, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"don't know {word!r}{hint} "
        "(examples: 'cuda sm_90 cudnn 9.10', 'h100', 'rocm gfx942 miopen', 'xpu', 'mps', 'cpu arm', 'cpu avx512')"
    )


def _finish(found: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the description left open, and say what was assumed."""
    assumed: list[str] = []
    arch = found.pop("arch", None)
    kind = found.setdefault("device_type", "cpu")
    version = found.setdefault("torch_version", torch_minor())
    if kind == "cuda" and not found.get("miopen"):
        if "capability" not in found:
            found["capability"] = (8, 0)
            assumed.append("compute capability 8.0")
        if "cudnn" not in found:
            found["cudnn"] = _WHEEL_CUDNN.get(version, max(_WHEEL_CUDNN.values()))
            if found.get("cudnn_enabled", True):
                assumed.append(f"cuDNN {cudnn_text_of(found['cudnn'])}")
    if kind == "cpu":
        _finish_cpu(found, arch or "x86", assumed)
    return {**found, "assumed": tuple(assumed)}


def _finish_cpu(found: dict[str, Any], arch: str, assumed: list[str]) -> None:
    if arch == "x86":
        found.setdefault("mkldnn_bf16", False)
    elif arch == "arm":
        if "mkldnn_bf16" not in found:
            found["mkldnn_bf16"] = True
            assumed.append("Arm BF16 instructions")
        found["mkldnn_fp16"] = False
    else:  # Apple and RISC-V builds come without oneDNN and with the Winograd kernel
        found.setdefault("mkldnn", False)
        found["winograd"] = True
        found.setdefault("nnpack", arch == "apple")
        assumed.append("built without oneDNN")
    if "threads" not in found:
        assumed.append("4 threads")
