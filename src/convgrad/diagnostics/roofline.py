"""The machine's limit: how fast it moves bytes and multiplies, measured or from a datasheet, and labelled so.

A pass cannot take less time than its bytes need (two operands read, one result written) nor than its arithmetic needs
(S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

import torch

from .._compat import onednn_has, precision
from ..engine import store
from ..engine.measure import call_seconds, conditions
from ..problem import OPERANDS, RESULT, ConvProblem, Slot, passes_of
from .aten_rules import MACHINES, Machine, machine_words, short

#: What is above this part of the limit shows that the limit is too low: a little above is noise.
BEYOND = 1.05
TOO_LOW = (
    "Above 100 %, the limit that is stored is too low, for this machine was busy when it was measured (convgrad info "
    "--measure does it again), the operands came from a cache, or the kernel multiplies less (native:winograd, fft)."
)


@dataclass(frozen=True)
class Limits:
    """The best that a machine can do."""

    bytes_per_second: float  # of a large copy, bytes read and bytes written both counted
    flops_per_second: float  # in this dtype
    dtype: str  # by name, "float32"
    source: str  # how these two are known

    def seconds(self, problem: ConvProblem, outputs: Collection[str] = ("forward",)) -> float:
        """The least time of one call for these outputs; every single pass has the same."""
        return max(self._seconds(problem, outputs))

    def bound(self, problem: ConvProblem, outputs: Collection[str] = ("forward",)) -> str:
        """Return what that time is made of: ``"memory"`` or ``"arithmetic"``."""
        moving, computing = self._seconds(problem, outputs)
        return "memory" if moving >= computing else "arithmetic"

    def _seconds(self, problem: ConvProblem, outputs: Collection[str]) -> tuple[float, float]:
        flops, moved = least_work(problem, outputs)
        return moved / self.bytes_per_second, flops / self.flops_per_second

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_second / 1e9:,.1f} GB/s and {self.flops_per_second / 1e9:,.0f} GFLOP/s in {self.dtype} "
            f"({self.source})"
        )


def least_work(problem: ConvProblem, outputs: Collection[str]) -> tuple[int, int]:
    """Operations, and bytes moved at least, of one call for these outputs: operands read and results written once."""
    passes = passes_of(outputs)
    read: set[Slot] = {slot for p in passes for slot in OPERANDS[p]}
    written: list[Slot] = [RESULT[p] for p in passes]
    elements = sum(torch.Size(problem.shape_of(s)).numel() for s in (*read, *written))
    return len(passes) * problem.flops, elements * problem.dtype.itemsize


def datasheet(machine: Machine, dtype: torch.dtype) -> Limits | None:
    """The limits of a described GPU by its datasheet; None where its name or this dtype is not in the table."""
    key, name = short(dtype), next((word for word in machine_words(machine.label) if word in MACHINES), None)
    if name is None or key not in (sheet := MACHINES[name]).flops:
        return None
    return Limits(sheet.bandwidth * 1e9, sheet.flops[key] * 1e12, key, f"datasheet of the {name.upper()}, dense")


def limits_of(machine: Machine, dtype: torch.dtype, *, measured: bool = False) -> Limits | None:
    """Return the known limits of a machine: measured here (``measured``: now, if not before), or the datasheet's."""
    known = None
    if machine.device_type in ("cpu", "cuda") and machine.is_here:
        device = torch.device(machine.device_type)
        known = _stored(dtype, device) or (measure_limits(dtype, device) if measured else None)
    return known or datasheet(machine, dtype)


def measure_limits(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Limits:
    """Measure this machine: the best of several large copies and of several large matrix products.

    The result is kept on disk for the same processor, number of threads, PyTorch, precision and dtype; measuring again
    can only raise it, since a busy machine shows less than it can do.
    """
    device = torch.device(device)
    a = torch.ones(1 << 26, dtype=torch.uint8, device=device)  # 64 MB, above any private cache
    b = torch.empty_like(a)
    copy = 2 * a.numel() / _best(lambda: b.copy_(a), device)
    product = max(_product(n, dtype, device) for n in (512, 1024, 2048))
    where = "this CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    known = _stored(dtype, device)
    if known is not None:
        copy, product = max(copy, known.bytes_per_second), max(product, known.flops_per_second)
    result = Limits(
        copy, product, short(_arithmetic(dtype, device)), f"measured on {where}: a 64 MB copy, the best matrix product"
    )
    store.write("limits", _key(dtype, device), asdict(result))
    return result


def _product(n: int, dtype: torch.dtype, device: torch.device, seconds: float = 0.3) -> float:
    """FLOPs per second of the matrix product of two n x n matrices."""
    x = torch.ones(n, n, device=device, dtype=_arithmetic(dtype, device))
    y = torch.empty_like(x)
    return 2 * n**3 / _best(lambda: torch.mm(x, x, out=y), device, seconds)


def of_usual_speed(dtype: torch.dtype) -> float | None:
    """Return the part of this CPU's known speed that a matrix product has now; None where it is not known."""
    known = _stored(dtype, torch.device("cpu"))
    return known and _product(1024, dtype, torch.device("cpu"), 0.1) / known.flops_per_second


def _arithmetic(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which this machine multiplies: 16-bit numbers are widened where a CPU has no instructions for them,
    complex ones are pairs of real ones, and there is no matrix product to measure for integers.
    """
    dtype = dtype.to_real() if dtype.is_complex else dtype
    if not dtype.is_floating_point:
        return torch.float32
    widened = device.type == "cpu" and dtype.itemsize == 2 and not onednn_has(dtype)
    return torch.float32 if widened else dtype


def _best(call: Callable[[], object], device: torch.device, seconds: float = 0.4) -> float:
    """The shortest time of one call, of as many as fit into ``seconds`` and at least three."""
    call()
    stop, times = time.perf_counter() + seconds, [call_seconds(call, device) for _ in range(3)]
    while time.perf_counter() < stop:
        times.append(call_seconds(call, device))
    return min(times)


def _key(dtype: torch.dtype, device: torch.device) -> str:
    library = "cuda" if device.type == "cuda" else "mkldnn"
    return f"{conditions(device)}, matmul {precision(library, 'matmul')}, {short(dtype)}"


def _stored(dtype: torch.dtype, device: torch.device) -> Limits | None:
    result = store.read("limits", _key(dtype, device))
    return Limits(**result) if isinstance(result, dict) and result.keys() == Limits.__annotations__.keys() else None
