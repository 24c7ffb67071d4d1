"""The parts of a whole step, by kind of operator: convolutions, normalization, linear layers, and so on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ..engine.measure import call_seconds
from .onednn_log import redirected

#: Part -> operators, ranges and nodes of autograd that belong to it with all that they call; the first that fits.
_OPERATORS = {
    "optimizer": "^Optimizer",
    "normalization": "[nN]orm",
    "activations": r"relu|hardtanh|clamp_min|threshold|[gs]elu|silu|mish|sigmoid|tanh|softmax|hardswish|softplus",
    "linear layers": r"\b(add|b|badd)?mm\b|matmul|linear|LinearBackward|mmBackward|attention",
    "convolutions": r"convgrad::|conv(?!grad|ert)",
}
PARTS: tuple[str, ...] = ("convolutions", "normalization", "linear layers", "activations", "optimizer", "rest")


class Watched(NamedTuple):
    """A step as the profiler saw it: seconds of each of `PARTS`, of all, and the most bytes beyond those before it."""

    parts: dict[str, float]
    seconds: float
    peak: int


def watched(step: Callable[[], object], device: torch.device) -> Watched:
    """Run a step under PyTorch's profiler; what no operator accounts for belongs to the rest."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    before = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seen = profile(activities=activities, profile_memory=not on_gpu)
    with open(os.devnull, "wb") as nothing, redirected(2, nothing):  # the profiler's library logs there
        seen.start()
    try:
        took = call_seconds(step, device)
    finally:
        with open(os.devnull, "wb") as nothing, redirected(2, nothing):
            seen.stop()
    parts = dict.fromkeys(PARTS, 0.0)
    level = peak = 0
    for event in sorted(seen.events() or (), key=lambda event: event.time_range.start):
        if not on_gpu:
            level += event.cpu_memory_usage if event.name == "[memory]" else event.self_cpu_memory_usage
            peak = max(peak, level)
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        parts[_part(event)] += spent * 1e-6
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device) - before
    parts["rest"] += max(0.0, took - sum(parts.values()))
    return Watched(parts, took, peak)


def _part(event: Any) -> str:
    """Return the part of the outermost operator around an event that belongs to one."""
    result = "rest"
    while event is not None:
        result = next((part for part, names in _OPERATORS.items() if re.search(names, event.name)), result)
        event = event.cpu_parent
    return result
