"""What a program calls: sequences (N, L, C) and padding modes, forward and backward; weight gradients of each sample.

Each result is checked against the baseline's before it is timed; all ways are timed alternately in one process and keep
freed memory. A figure is how many times as fast as the baseline a way is, with the 95 % interval of the median.

    python benchmarks/programs.py sequences                       Mamba's convolutions
    python benchmarks/programs.py padding --threads 1             nn layers with circular, reflect and replicate
    python benchmarks/programs.py per_sample --threads 1          also the memory beyond the operands
    python benchmarks/programs.py sequences --dtype bfloat16 --seconds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.profiler import ProfilerActivity, profile

import convgrad
from convgrad.engine.measure import compare, conditions, keep_memory
from convgrad.problem import ConvProblem

#: Batch, length, channels, taps.
SEQUENCES = ((4, 2048, 1536, 4), (8, 1024, 768, 4), (1, 8192, 768, 4), (2, 512, 256, 4))
LAYERS = (
    "g64mb8ic64ih56oc64kh3ph1",
    "g64mb8ic64ih56oc64kh3ph1 channels_last",
    "g96mb8ic96ih56oc96kh7ph3",
    "g96mb8ic96ih56oc96kh7ph3 channels_last",
    "g384mb8ic384ih14oc384kh7ph3 channels_last",
    "g32mb2ic32ih224oc32kh3ph1",
    "g32mb8ic128ih28oc128kh3ph1",
    "g256mb8ic256iw4096oc256kw9pw4",
    "g32mb2ic32id24oc32kd3pd1",
    "mb8ic64ih56oc64kh3ph1 channels_last",
)
SAMPLES = (
    "g64mb32ic64ih28oc64kh3ph1",
    "g128mb32ic128ih14oc128kh5ph2",
    "mb32ic16ih28oc32kh3ph1",
    "mb32ic64ih14oc64kh3ph1",
    "mb16ic256ih7oc256kh3ph1",
)
Way = Callable[[], Tensor]


def sequence_ways(x: Tensor, w: Tensor) -> dict[str, Way]:
    """The same causal depthwise convolution of an (N, L, C) tensor, written in four ways; PyTorch's comes last."""
    taps, channels, length = w.shape[1], x.shape[2], x.shape[1]
    weight = w[:, None]

    def row() -> Tensor:
        image = x.transpose(1, 2).unsqueeze(2)
        padding = (0, 0, taps - 1, 0)
        return convgrad.conv2d(image, weight[:, :, None], None, 1, padding, 1, channels).squeeze(2).transpose(1, 2)

    def pytorch() -> Tensor:
        return F.conv1d(x.transpose(1, 2), weight, None, 1, taps - 1, 1, channels)[..., :length].transpose(1, 2)

    def pytorch_row() -> Tensor:
        image = x.transpose(1, 2).unsqueeze(2)
        padded = F.conv2d(image, weight[:, :, None], None, 1, (0, taps - 1), 1, channels)
        return padded[..., :length].squeeze(2).transpose(1, 2)

    return {
        "causal_conv1d": lambda: convgrad.causal_conv1d(x, w, layout="NLC"),
        "conv1d, layout": lambda: convgrad.conv1d(x, weight, None, 1, "causal", 1, channels, layout="NLC"),
        "row by hand": row,
        "conv1d of the view": lambda: convgrad.conv1d(x.mT, weight, None, 1, "causal", 1, channels).mT,
        "PyTorch's row": pytorch_row,
        "PyTorch": pytorch,
    }


def sequences(dtype: torch.dtype, seconds: float) -> None:
    """Mamba's shapes."""
    for batch, length, channels, taps in SEQUENCES:
        x = torch.randn(batch, length, channels).to(dtype).requires_grad_()
        w = torch.randn(channels, taps).to(dtype).requires_grad_()
        show(f"{batch} x {length} x {channels}, k{taps}", sequence_ways(x, w), (x, w), seconds)


def padding(dtype: torch.dtype, seconds: float) -> None:
    """Layers with a padding mode."""
    for text, mode in product(LAYERS, ("circular", "reflect", "replicate")):
        with_padding_mode(ConvProblem.parse(f"{text} {mode}").replace(dtype=dtype), seconds)


def with_padding_mode(p: ConvProblem, seconds: float) -> None:
    """Against the padded copy; zeros, which computes something else, shows the least."""
    d, k, mode, groups = p.ndim, p.kernel_size[0], p.padding_mode, p.groups
    x = torch.randn(p.input_shape).to(p.dtype, memory_format=p.memory_format).requires_grad_()
    options = {"padding": k // 2, "groups": groups, "bias": False, "padding_mode": mode, "dtype": p.dtype}
    ours = getattr(convgrad.nn, f"Conv{d}d")(p.in_channels, p.out_channels, k, **options)
    theirs = getattr(torch.nn, f"Conv{d}d")(p.in_channels, p.out_channels, k, **options)
    theirs.weight = w = ours.to(memory_format=p.memory_format).weight
    function = getattr(convgrad, f"conv{d}d")
    ways = {
        "padding_mode": lambda: ours(x),
        "PyTorch": lambda: theirs(x),
        "padded copy": lambda: function(F.pad(x, [k // 2] * (2 * d), mode=mode), w, None, 1, 0, 1, groups),
    }
    show(str(p), ways, (x, w), seconds, {"zeros": lambda: function(x, w, None, 1, k // 2, 1, groups)})


def show(
    name: str, ways: dict[str, Way], leaves: tuple[Tensor, ...], seconds: float, unlike: dict[str, Way] | None = None
) -> None:
    """A row for the forward and one for forward and both gradients, both against the last of ``ways``."""
    *_, baseline = ways
    want = ways[baseline]()
    g = torch.randn_like(next(iter(ways.values()))())  # laid out as what comes next would give it

    def step(way: Way) -> Callable[[], object]:
        return lambda: torch.autograd.grad(way(), leaves, g)

    gradients = torch.autograd.grad(want, leaves, g)
    for label, way in ways.items():
        got = way()
        for mine, theirs in zip((got, *torch.autograd.grad(got, leaves, g)), (want, *gradients), strict=True):
            same(mine, theirs, f"{name}, {label}")
    for what, kind in (("forward", torch.no_grad()), ("forward and gradients", step)):
        calls = {label: kind(way) for label, way in {**(unlike or {}), **ways}.items()}
        row(f"{name} | {what}", calls, baseline, seconds)


def same(mine: Tensor, theirs: Tensor, what: str) -> None:
    """Refuse a way that does not compute what the baseline does."""
    error = float((mine.detach().double() - theirs.detach().double()).norm() / theirs.detach().double().norm())
    if not error < (3e-2 if theirs.dtype.itemsize == 2 else 1e-4):
        raise AssertionError(f"{what}: relative difference {error:.2g} from the baseline")


def row(name: str, calls: dict[str, Callable[[], object]], baseline: str, seconds: float, more: str = "") -> None:
    """Time all ways alternately, and print them."""
    seen = compare(calls, baseline, seconds=seconds)
    cells = [f"{label} {seen.speedup(label)}" for label in seen.samples if label != baseline]
    print(f"{name} | {baseline} {seen.median(baseline) * 1e3:.2f} ms | {' | '.join(cells)}{more}", flush=True)


# ---- weight gradients of each sample, and their norms ------------------------------------------------


def sample_ways(p: ConvProblem) -> dict[str, Way]:
    """Every way there is to compute them; the last one gives the norms alone."""
    x, g, w = (torch.randn(shape).to(p.dtype) for shape in (p.input_shape, p.output_shape, p.weight_shape))
    kernel, groups = p.kernel_size[0], p.groups
    form: dict[str, Any] = {"padding": kernel // 2, "groups": groups}

    def loss(weight: Tensor, image: Tensor, grad_output: Tensor, conv: Callable[..., Tensor]) -> Tensor:
        return (conv(image[None], weight, **form)[0] * grad_output).sum()

    def unfold() -> Tensor:
        rows = F.unfold(x, kernel, padding=kernel // 2).unflatten(1, (groups, -1))  # [N, g, ci * k * k, T]
        return (g.flatten(2).unflatten(1, (groups, -1)) @ rows.mT).view(p.batch, *w.shape)

    def one(image: Tensor, grad_output: Tensor) -> Tensor:
        return convgrad.grad_weight(image[None], w.shape, grad_output[None], **form)

    return {
        "PyTorch": lambda: vmap(grad(loss), (None, 0, 0, None))(w, x, g, F.conv2d),
        "vmap(grad(loss))": lambda: vmap(grad(loss), (None, 0, 0, None))(w, x, g, convgrad.conv2d),
        "vmap(grad_weight)": lambda: vmap(one)(x, g),
        "grad_weight(per_sample=True)": lambda: convgrad.grad_weight(x, w.shape, g, **form, per_sample=True),
        "unfold and a matrix product": unfold,
        "per_sample_norms": lambda: convgrad.per_sample_norms(x, w.shape, g, **form),
    }


def per_sample(dtype: torch.dtype, seconds: float) -> None:
    """Each way against PyTorch's ``vmap(grad(loss))``, and the most that it holds at one time."""
    for text in SAMPLES:
        p = ConvProblem.parse(text).replace(dtype=dtype)
        ways = sample_ways(p)
        want = ways["PyTorch"]()
        for label, way in ways.items():
            norms = label == "per_sample_norms"
            same(way(), want.flatten(1).norm(dim=1) if norms else want, f"{p}, {label}")
        held = [f"{label} {peak(way):.2f}" for label, way in ways.items()]
        row(str(p), {**ways}, "PyTorch", seconds, f"\n  MB: {' | '.join(held)}")


def peak(call: Way) -> float:
    """The most megabytes that a call holds at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    every: list[Any] = profiled.profiler.kineto_results.events()
    changes = [e.nbytes() for e in sorted(every, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    return max(accumulate(changes), default=0) / 1e6


WHAT = {"sequences": sequences, "padding": padding, "per_sample": per_sample}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*WHAT])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()
    print(f"{conditions()}. Times as fast as the baseline, whose milliseconds are shown.")
    WHAT[arguments.what](getattr(torch, arguments.dtype), arguments.seconds)


if __name__ == "__main__":
    main()
