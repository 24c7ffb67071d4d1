"""Time candidates of a problem here, as the chosen backend and ATen; and notice what else this machine does."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from ..backends import COPY
from ..engine import BY_RULE, Step, get_backend, reasons_against, trials
from ..engine.measure import Comparison, compare, second_call
from ..problem import PASSES, ConvProblem, Outputs
from ..tables import counted
from .explanation import Answer, Explanation
from .onednn_log import onednn_log
from .roofline import limits_of, of_usual_speed

_MOST_BYTES = 4 << 30
_MOST_SECONDS = 1.0  # of a call that is compared
_DIFFERENT = 0.05  # of a time: less is noise
_OTHERS = 0.25  # processors that others may take from ours
_TELLING = 0.3  # seconds, of which a tick of the processors' clocks, a hundredth, is little
_USUAL = 0.5  # of the usual speed, which caches and clocks explain


def measured(explanation: Explanation) -> Explanation:
    """Return an explanation with the times of the chosen backend and of ATen, and the machine's limit.

    Each pass is timed alternately in this process. One that a backend computes only together with others has no time.
    """
    problem, machine, rows = explanation.problem, explanation.machine, explanation.rows
    if not machine.is_here:
        raise ValueError(f"{machine} is not here, so nothing can be measured on it")
    load, device = Load(), torch.device(machine.device_type)
    if not (problem.empty or problem.least_bytes > _MOST_BYTES):
        rows = _timed(problem, rows, device)
    warnings = load.warnings(device, problem.dtype)
    limits = limits_of(machine, problem.dtype, measured=True)
    return replace(explanation, rows=rows, limits=limits, warnings=warnings)


#: Name -> the problem, perhaps in another layout, and the steps that compute it.
Candidates = Mapping[str, tuple[ConvProblem, tuple[Step, ...]]]


def requested(names: Sequence[str], problem: ConvProblem, outputs: Outputs, device: torch.device) -> Candidates:
    """Return those of the named backends that can compute these outputs, as candidates for `compared`."""
    return {
        name: (problem, (Step(get_backend(name), outputs, "requested by name"),))
        for name in names if not reasons_against(get_backend(name), problem, outputs, device, requested=True)
    }  # fmt: skip


def compared(
    candidates: Candidates, outputs: Outputs, device: torch.device, *, baselines: Sequence[str], seconds: float,
    least_rounds: int = 7, hopeless: float = float("inf"),
) -> Comparison | None:  # fmt: skip
    """Time candidates for the same outputs alternately; return their times with the fastest baseline as the baseline.

    Candidates whose second call takes ``hopeless`` times as long as that of the first baseline are left out. None where
    there is no memory for the operands, or no other is left.
    """
    try:
        with torch.no_grad():
            calls = trials(candidates, outputs, device)
            if hopeless < float("inf"):
                once = {name: second_call(call, device) for name, call in calls.items()}
                most = min(_MOST_SECONDS, hopeless * once[baselines[0]])
                calls = {name: call for name, call in calls.items() if once[name] <= most}
            if baselines[0] not in calls or len(calls) < min(2, len(candidates)):
                return None
            seen = compare(calls, baselines[0], seconds=seconds, device=device, least_rounds=least_rounds)
    except (RuntimeError, MemoryError):
        return None
    return Comparison(min(filter(calls.__contains__, baselines), key=seen.median), seen.samples)


def _timed(problem: ConvProblem, answers: tuple[Answer, ...], device: torch.device) -> tuple[Answer, ...]:
    result = list(answers)
    for pass_ in PASSES:
        rows = [row for row in answers if row.output == pass_ and (row.chosen or (row.by_aten and row.runs))]
        candidates = requested([row.backend for row in rows], problem, (pass_,), device)
        if not candidates:
            continue
        seen = compared(candidates, (pass_,), device, baselines=[*candidates], seconds=0.3, least_rounds=1)
        seconds = {name: seen.median(name) for name in seen.samples} if seen else {}
        aten = next((s for name, s in seconds.items() if name.removesuffix(COPY) == "aten"), None)
        for i, row in enumerate(answers):
            if row.output != pass_ or row.backend not in seconds:
                continue
            runs, reasons = row.runs, row.reasons
            if row.by_aten and device.type == "cpu":
                with onednn_log() as take:
                    trials({"": candidates[row.backend]}, (pass_,), device)[""]()
                    primitives = " + ".join(dict.fromkeys(take()))
                runs += f": {primitives}" if primitives else ""
            if aten is not None and row.chosen and not row.by_aten and reasons[0].startswith(BY_RULE):
                speed = aten / seconds[row.backend]  # which is known now, whatever the rule expected
                faster = f"{speed:.3g}x as fast as aten" if abs(speed - 1) > _DIFFERENT else "no faster than aten"
                _, one, together = reasons[0].partition(", in one ")
                reasons = (f"by rule; in this measurement {faster}{one}{together}",)
            result[i] = replace(row, seconds=seconds[row.backend], runs=runs, reasons=reasons)
    return tuple(result)


class Load:
    """The processor time that other processes take, from when it is made."""

    def __init__(self) -> None:
        self._start = self._times()

    @staticmethod
    def _times() -> tuple[float, float]:
        """Seconds by the clock, and of processors for others, of which only Linux tells."""
        others = 0.0
        with suppress(OSError, ValueError), open("/proc/stat", encoding="utf-8") as lines:
            user, nice, system, _, _, irq, soft, steal = map(int, next(lines).split()[1:9])
            others = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
        return time.perf_counter(), others

    @property
    def others(self) -> float:
        """Return the number of processors that others kept busy; 0 where the time is too short to tell."""
        (begun, before), (now, after) = self._start, self._times()
        return max(0.0, (after - before) / (now - begun)) if now - begun > _TELLING else 0.0

    def warnings(self, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        """Why what was timed since then is not to be trusted; nothing where it is."""
        if device.type != "cpu":
            return ()
        said, cores, threads, others = [], os.cpu_count() or 1, torch.get_num_threads(), self.others
        if others + threads > cores + _OTHERS and others > _OTHERS:
            said.append(
                f"other processes kept {others:.1f} of its {cores} processors busy, and this one has "
                + counted(threads, "thread")
            )
        if (part := of_usual_speed(dtype)) is not None and part < _USUAL:
            said.append(f"PyTorch's own matrix product ran at {part:.0%} of its usual speed")
        return (f"THIS MACHINE WAS BUSY: {' and '.join(said)}; run it again when it is idle.",) if said else ()
