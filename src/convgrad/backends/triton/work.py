"""What a launch multiplies, as its kernel's source has it: products of one thread, padding and idle lanes included.

Plain arithmetic over a launch's arguments, for `counting`; nothing here is compiled or run.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from .start import Call

__all__ = ["Work", "work_of"]

_WARP = 32


class Work(NamedTuple):
    """Products of one thread, and how often its innermost loop begins."""

    products: float
    entries: float = 1


def work_of(call: Call) -> Work | None:
    """What a thread of a launch multiplies, on average; None for one that only adds shares.

    Raises:
        KeyError: a kernel that is not known here.
    """
    fn = call.kernel.fn
    name = f"{fn.__module__.rsplit('.', 1)[-1]}.{fn.__name__}"
    if name == "grad_weight.add_shares":
        return None
    return _KNOWN[name](call.arguments, _WARP * call.warps)


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _read(axis: int, a: dict[str, Any], results: int, sources: int = 0) -> float:
    """Products of some neighbouring results with a kernel in one dimension: with a stride, on average over its phases.

    Args:
        sources: where these are all the results there are, the positions of the source; others are not read.
    """
    kernel, stride, dilation, pad = (a[name][axis] for name in ("KERNEL", "STRIDE", "DILATION", "PAD"))
    if not sources:
        if not a["ADJOINT"]:
            return results * kernel
        reads = ((v + pad - k * dilation) % stride == 0 for v in range(stride) for k in range(kernel))
        return results * sum(reads) / stride
    pairs = ((v, k * dilation) for v in range(results) for k in range(kernel))
    if a["ADJOINT"]:
        return sum((v + pad - k) % stride == 0 and 0 <= (v + pad - k) // stride < sources for v, k in pairs)
    return sum(0 <= v * stride + k - pad < sources for v, k in pairs)


def _patch(a: dict[str, Any], threads: int) -> float:
    """Products of the patches that a thread has at a time, in one plane of the kernel."""
    columns, source_columns, source_rows, _ = a["WHOLE"]
    each = _read(1, a, a["R"], source_rows) * _read(2, a, columns or a["V"], source_columns)
    return max(1, a["B"] // threads) * each


def _patches(a: dict[str, Any], threads: int) -> Work:
    modulated = a["MULTIPLIER"] if a["ADJOINT"] else 1
    return Work(_patch(a, threads) * a["KERNEL"][0] * modulated, modulated)


def _patch_sums(a: dict[str, Any], threads: int) -> Work:
    if a["SEQUENCE"]:
        tiles = a["batch"] * _up(a["vectors"], a["B"] * a["R"])
    else:
        tiles = _up(a["batch"] * a["depth"] * _up(a["height"], a["R"]) * a["vectors"], a["B"])
    return Work(tiles / a["parts"] * _patch(a, threads) * a["KERNEL"][0] * (2 if a["SWEEP"] else 1))


def _channel_patch(a: dict[str, Any], threads: int) -> float:
    """Products of the patches of channels that a thread has at a time."""
    each = _read(1, a, a["R"]) * _read(2, a, a["W"]) * a["V"]
    return max(1, a["B"] // threads) * each * a["KERNEL"][0]


def _channel_patches(a: dict[str, Any], threads: int) -> Work:
    return Work(_channel_patch(a, threads))


def _channel_sums(a: dict[str, Any], threads: int) -> Work:
    items = a["batch"] * a["depth"] * _up(a["height"], a["R"]) * _up(a["width"], a["W"])
    tiles = _up(items, a["B"] // a["LINE"] * a["period"])
    return Work(tiles / a["parts"] * _channel_patch(a, threads) * (2 if a["SWEEP"] else 1))


def _rows(a: dict[str, Any], threads: int) -> Work:
    each = a["R"] * a["BM"] * a["BL"] / threads
    depth, height, width = a["TAPS"]
    begins = (a["MULTIPLIER"] if a["ADJOINT"] else 1) * depth * _up(height, a["TH"])
    return Work(each * begins * a["TH"] * _up(width, a["TW"]) * a["TW"], begins)


def _row_sums(a: dict[str, Any], threads: int) -> Work:
    depths, height, columns = (_up(a[n], p) for n, p in zip(("depth", "height", "width"), a["PHASES"], strict=True))
    items, across = a["batch"] * depths * _up(height, a["R"]), _up(columns, a["BL"])
    if a["CHANNEL_LANES"]:
        items, across = items * columns, 1
    tiles = _up(items, a["BM"]) * across
    each = a["R"] * a["BM"] * a["BL"] / threads * a["TD"] * a["TH"] * a["TW"]
    return Work(tiles / a["parts"] * each * (2 if a["SWEEP"] else 1))


# ---- bands -----------------------------------------------------------------------------------------


def _times(a: dict[str, Any]) -> int:
    return 3 if a["PRECISION"] == "tf32x3" else 1


def _blocks(a: dict[str, Any], results: int, align: str) -> list[int]:
    """For each block of result columns, the blocks of source columns that it reads."""
    kernel, stride, dilation = (a[name][2] for name in ("KERNEL", "STRIDE", "DILATION"))
    found: list[int] = []
    for first in range(0, results * a[align], a["BW"]):
        last, pad = first + a["BW"] - 1, a["pad_w"]
        if a.get("ADJOINT"):
            left, right = max(first + pad - (kernel - 1) * dilation, 0) // stride, (last + pad) // stride + 1
        else:
            left, right = first * stride - pad, last * stride - pad + (kernel - 1) * dilation + 1
        left, right = max(left, 0) // a["BV"] * a["BV"], min(right, a["src_columns"] * a["SRC_ALIGN"])
        found.append(_up(max(right - left, 0), a["BV"]))
    return found


def _first_row(a: dict[str, Any], phase: int) -> int:
    """The row of the source that the first row of a phase reads through its first kernel row."""
    pad, stride, dilation = a["pad_h"], a["STRIDE"][1], a["DILATION"][1]
    if not a["ADJOINT"]:
        return -pad
    kernel_rows = range(a["TAP_STRIDE"][1])
    first = next((k for k in kernel_rows if (phase + pad - k * dilation) % stride == 0), a["KERNEL"][1])
    return (phase + pad - first * dilation) // stride


def _band(a: dict[str, Any], threads: int) -> Work:
    step, taps, down = a["TAP_STEP"][1], a["TAPS"][1], a["SRC_STEP"][1]
    phases = a["PHASES"][1]
    met: list[int] = []  # for each block of rows, the kernel rows that it meets, several at a time
    for phase in range(phases):
        start, rows = _first_row(a, phase), _up(a["height"] - phase, phases)
        for q in range(0, _up(a["height"], phases), a["R"]):
            first, last = q * down + start, (min(q + a["R"], rows) - 1) * down + start
            meeting = [t for t in range(taps) if last + t * step >= 0 and first + t * step < a["src_height"]]
            met.append(_up(len(meeting), a["J"]))
    blocks = _blocks(a, a["columns"], "OUT_ALIGN")
    entries = sum(blocks) / len(blocks) * a["TAPS"][0] * (a["MULTIPLIER"] if a["ADJOINT"] else 1)
    each = prod(a[name] for name in ("BN", "R", "BW", "J", "BV")) / threads
    return Work(entries * sum(met) / len(met) * each * _times(a), entries)


def _band_sums(a: dict[str, Any], threads: int) -> Work:
    tiles: list[int] = []
    images = _up(a["batch"] * a["depth"], a["BN"])
    for kh in range(0, a["KERNEL"][1], a["J"]):
        first, stride = kh * a["DILATION"][1] - a["pad_h"], a["STRIDE"][1]
        begin = _up(max(-first - (a["J"] - 1) * a["DILATION"][1], 0), stride)
        end = min((max(a["src_height"] - 1 - first, -stride) + stride) // stride, a["height"])
        tiles.append(_up(max(end - begin, 0), a["R"]) * images)
    entries = sum(_blocks(a, a["columns"], "CENTRE_ALIGN"))
    each = prod(a[name] for name in ("BN", "R", "BW", "J", "BV")) / threads
    return Work(entries * sum(tiles) / len(tiles) / a["parts"] * each * _times(a), entries)


_KNOWN: dict[str, Callable[[dict[str, Any], int], Work]] = {
    "patches.correlate_patches": _patches,
    "patch_sums.sum_patches": _patch_sums,
    "channel_patches.correlate_channels": _channel_patches,
    "channel_sums.sum_channels": _channel_sums,
    "kernels.correlate": _rows,
    "grad_weight.correlate_sum": _row_sums,
    "banded.correlate": _band,
    "banded.correlate_sum": _band_sums,
}
