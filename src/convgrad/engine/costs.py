"""The estimated time of CPU kernels for a pass: a sum of what they do, each amount times a coefficient.

The coefficients are relative to the price of a call of oneDNN. ``benchmarks/derive.py`` fits them to the times that
``benchmarks/sweep.py`` measured, and writes the table below. Each function that counts is written by hand, from what is
known of the kernels. Depthwise problems and 16 bits that a processor has no arithmetic for have no estimate: see
`rules.TABLE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

import torch

from ..backends import MOST_A_GROUP, aten_choice, transformed_dimensions
from ..problem import ConvProblem, Outputs, Pass, passes_of
from ..settings import threads

#: Lanes of a vector: oneDNN's hold channels, those of ``native`` hold results of a row.
_CHANNELS, _RESULTS = 16, 8
#: Elements of a kernel up to which ``native`` gathers a patch at once.
_PATCH = 512
#: How many times as fast ``native`` computes several passes in one call as by themselves, about.
_TOGETHER = 1.1

Amounts = dict[str, float]
Costs = Mapping[str, Mapping[str, float]]
#: The backends that have an estimate.
BACKENDS = ("native", "native:amx", "native:winograd")

#: Kernels -> the price of each amount that `work` counts.
# begin of the derived lines
COSTS: Costs = {
    "columns": {"call": 0.256, "calls": 0.0145, "columns": 11.8, "convolution": 0.161, "operands": 7.13},
    "native": {
        "call": 0.125,
        "convolution": 0.137,
        "few channels": 0.174,
        "idle lanes": 0.098,
        "input with padding": 3.23,
        "output": 4.47,
        "patches": 3.7,
        "product": 0.124,
        "weight": 0.555,
    },
    "native:amx": {"call": 0.119, "convolution": 0.0892, "input with padding": 5.03, "output": 6.28, "weight": 3.61},
    "native:winograd": {"call": 0.0703, "convolution": 0.153, "input": 4.42, "output": 5.03, "weight": 7.28},
    "oneDNN": {
        "call": 1.0,
        "convolution": 0.136,
        "laid out for forward": 2.44,
        "laid out for grad_input": 8.69,
        "laid out for grad_weight": 4.25,
        "operands": 4.55,
        "product": 0.183,
        "sequence": 0.0293,
    },
}
# end of the derived lines


def gains(problem: ConvProblem, outputs: Outputs) -> dict[str, float]:
    """Return how many times as fast as PyTorch's kernels each backend is, by estimate, in the order to try them."""
    passes, pytorchs = passes_of(outputs), library_of(problem)
    times = {
        kernels: sum(COSTS[kernels][what] * n for pass_ in passes for what, n in work(problem, pass_, kernels).items())
        for kernels in (pytorchs, *BACKENDS)
    }
    return ranked(problem, len(passes), {name: times[pytorchs] / times[name] for name in BACKENDS})


def ranked(problem: ConvProblem, passes: int, found: Mapping[str, float]) -> dict[str, float]:
    """Return gains in the order to try their backends: the largest first, but for ``native:amx``.

    That comes first unless ``native`` is as fast: on no machine were it and Winograd's algorithm measured together.
    """
    order = dict(sorted(found.items(), key=lambda item: -item[1]))
    amx = order.pop("native:amx", 0.0)
    fits = problem.unpadded_pointwise or max(_group(problem)) <= MOST_A_GROUP
    rival = order.get("native", 0.0) * (_TOGETHER if passes > 1 else 1) if fits else 0.0
    if not amx:
        return order
    return {"native:amx": amx, **order} if amx > rival else {**order, "native:amx": amx}


def library_of(problem: ConvProblem) -> str:
    """Return which of PyTorch's libraries computes a problem on a CPU."""
    return "columns" if aten_choice(problem, torch.device("cpu")).name.startswith("Slow") else "oneDNN"


def work(p: ConvProblem, pass_: Pass, kernels: str) -> Amounts:
    """Return what kernels (a backend's, or a library's) do for a pass: operations, and elements of 4 bytes moved.

    Both are in millions for each thread; ``call`` and ``calls`` are counts.
    """
    counted = {"call": 1.0}
    operands, pointwise = prod(p.input_shape) + prod(p.output_shape), p.unpadded_pointwise
    channels = _group(p)[pass_ != "grad_input"]  # of a group, which a vector of oneDNN's may hold
    padded = p.batch * p.in_channels * prod(dim.padded for dim in p.dims)
    elements = {"input with padding": padded, "output": prod(p.output_shape), "weight": prod(p.weight_shape)}
    if kernels == "native":  # vectors hold results of a row, and tiles the padding
        operations = {
            "product" if pointwise else "convolution": p.flops,
            "idle lanes": 0.0 if pointwise else p.flops * (_filled(p.output_size[-1], _RESULTS) - 1),
            "few channels": p.flops / min(channels, _CHANNELS),
        }
        # pixels are gathered where kernels do not overlap, a part of a large kernel at a time
        patches = not pointwise and all(s >= k for s, k in zip(p.stride, p.kernel_size, strict=True))
        elements["patches"] = operands * patches * ceil(prod(p.kernel_size) / _PATCH)
    elif kernels == "native:amx":  # tiles of 16 channels of both sides, in float32 alone
        operations = {"convolution": p.flops * prod(_filled(n, 16) for n in _group(p))}
    elif kernels == "native:winograd":
        tiles, products, values = _transformed(p)
        operations = {"convolution": 2 * tiles * products * _group(p)[0] * p.out_channels}
        transformed = {"input": values * p.in_channels, "output": values * p.out_channels}
        elements = {**transformed, "weight": elements["weight"]}
    elif kernels == "oneDNN":  # vectors hold channels, for which contiguous operands are copied
        full = p.flops * _filled(channels, _CHANNELS)
        operations = {"convolution": full, "sequence": full * (p.ndim == 1) * p.kernel_size[0] ** 0.5}
        operations = {"product": p.flops} if pointwise else operations
        elements = {"operands": operands, f"laid out for {pass_}": operands * (not p.channels_last)}
    else:  # one matrix product of each image and group, of columns that are written first
        counted["calls"] = p.batch * p.groups
        columns = p.batch * p.in_channels * prod(p.kernel_size) * prod(p.output_size) * (not pointwise)
        operations, elements = {"convolution": p.flops}, {"columns": columns, "operands": operands}
    share, size = 1e-6 / threads(), p.dtype.itemsize / 4
    # oneDNN computes in 16 bits; all others convert them.
    counted |= {what: n * share * (min if kernels == "oneDNN" else max)(size, 1) for what, n in operations.items()}
    return counted | {what: n * share * size for what, n in elements.items()}


def _transformed(p: ConvProblem) -> tuple[int, int, int]:
    """Return the tiles of Winograd's algorithm, the products of each, and the values: 4 or 4x4 for 2 or 2x2 results."""
    along = transformed_dimensions(p) or [0]
    tiles, products = p.batch, 1
    for d, (size, kernel, dilation) in enumerate(zip(p.output_size, p.kernel_size, p.dilation, strict=True)):
        apart = min(dilation, size)  # the results of a tile; with each of those between them other tiles begin
        tiles *= apart * ceil(size / apart / 2) if d in along else size
        products *= 4 if d in along else kernel
    return tiles, products, tiles * 4 ** len(along)


def _group(p: ConvProblem) -> tuple[int, int]:
    """Return the input and the output channels of a group."""
    return p.in_channels // p.groups, p.out_channels // p.groups


def _filled(n: int, lanes: int) -> float:
    """Return how many lanes are computed for each one that is used."""
    return ceil(n / lanes) * lanes / n
