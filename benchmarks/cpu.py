"""Depthwise and small-group convolutions on the CPU: ours against PyTorch as given and PyTorch through channels_last.

Each result is checked against PyTorch's before it is timed. All sides are timed alternately in one process and keep
freed memory (`keep_memory`), conversions between layouts count, and a ratio is the median over rounds.

    python benchmarks/cpu.py                      the table and 100 random problems, all threads, both layouts
    python benchmarks/cpu.py --short              a few problems, a few seconds
    python benchmarks/cpu.py --groups             the same for 2 to 16 channels a group
    python benchmarks/cpu.py --threads 1 --dtype bfloat16 --problem mb32g144ic144ih56oc144kh3ph1

Where other programs keep the cores busy, two threads of a team land on one core and wait for each other, and most
calls show nothing but that. There pin the threads and take the fastest calls after a rest (--shared):

    OMP_PROC_BIND=true OMP_PLACES=cores nice -n -10 python benchmarks/cpu.py --shared
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from convgrad.backends.native import NativeBackend
from convgrad.engine.ab_timer import Comparison, compare, conditions, keep_memory
from convgrad.engine.rules import why_native
from convgrad.problem import ConvProblem, Output
from convgrad.sizes import output_length

TABLE = (
    "mb32g32ic32ih112oc32kh3ph1",
    "mb32g96ic96ih112oc96kh3sh2ph1",
    "mb32g144ic144ih56oc144kh3ph1",
    "mb32g192ic192ih28oc192kh3ph1",
    "mb32g576ic576ih14oc576kh3ph1",
    "mb32g960ic960ih7oc960kh3ph1",
    "mb32g240ic240ih28oc240kh5ph2",
    "mb32g672ic672ih14oc672kh5ph2",
    "mb32g96ic96ih56oc96kh7ph3",
    "mb32g384ic384ih14oc384kh7ph3",
    "mb32g768ic768ih7oc768kh7ph3",
    "mb8g128ic128ih32oc128kh13ph6",
    "mb8g128ic128ih32oc128kh31ph15",
    "mb8g768ic768iw2048oc768ow2048kw4pw3",
    "mb1g1536ic1536iw8192oc1536ow8192kw4pw3",
    "mb2g96ic96id16ih56iw56oc96kd3kh3kw3pd1ph1pw1",
    "mb2g64ic64id8ih28iw28oc64kd5kh5kw5pd2ph2pw2",
    "mb8g256ic256ih32oc256oh64kh4sh2ph1 transposed",
)
# ResNeXt-50 32x4d (its last stage has 32 channels a group), RegNet's widths of 8 and 16, 2 channels a group, others.
GROUPS = (
    "mb16g32ic128ih56oc128kh3ph1",
    "mb16g32ic256ih56oc256kh3sh2ph1",
    "mb16g32ic256ih28oc256kh3ph1",
    "mb16g32ic512ih28oc512kh3sh2ph1",
    "mb16g32ic512ih14oc512kh3ph1",
    "mb16g28ic224ih28oc224kh3ph1",
    "mb16g14ic224ih28oc224kh3ph1",
    "mb16g64ic128ih56oc128kh3ph1",
    "mb16g64ic256ih28oc256kh3sh2ph1",
    "mb16g64ic256ih14oc256kh3ph1",
    "mb16g128ic512ih14oc512kh3ph1",
    "mb16g128ic512ih7oc512kh3ph1",
    "mb16g32ic96ih28oc192kh3ph1",
    "mb8g16ic64iw2048oc64kw5pw2",
    "mb2g16ic64id8ih28iw28oc64kd3kh3kw3pd1ph1pw1",
)
SHORT = ("mb32g144ic144ih56oc144kh3ph1", "mb32g768ic768ih7oc768kh7ph3", "mb8g768ic768iw2048oc768ow2048kw4pw3")
ASKED: dict[str, tuple[Output, ...]] = {
    "forward": ("forward",),
    "grad_input": ("grad_input",),
    "grad_weight": ("grad_weight",),
    "both": ("grad_input", "grad_weight"),
}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
Results = tuple[Tensor, ...]


def random_channels(rng: random.Random, grouped: bool) -> tuple[int, int, int]:
    """Input channels, output channels and groups."""
    if not grouped:
        channels, multiplier = rng.randint(2, 400), rng.choice([1, 1, 1, 1, 2, 3])
        return channels, channels * multiplier, channels
    inputs = rng.choice([2, 2, 3, 4, 4, 4, 6, 8, 8, 16])
    outputs, groups = rng.choice([inputs, inputs, rng.randint(1, 16)]), max(2, rng.randint(8, 400) // inputs)
    return groups * inputs, groups * outputs, groups


def random_problem(rng: random.Random, grouped: bool = False) -> ConvProblem:
    """Any stride, dilation, odd size, kernel and multiplier; channels that fit no vector; 1 to 20 million elements."""
    while True:
        ndim = rng.choice([1, 2, 2, 2, 3])
        longest = {1: 20000, 2: 150, 3: 40}[ndim]
        size = tuple(round(math.exp(rng.uniform(math.log(5), math.log(longest)))) for _ in range(ndim))
        kernel = tuple(rng.choice([1, 2, 3, 3, 3, 4, 5, 7, 9, 11][: 7 if ndim == 3 else 10]) for _ in range(ndim))
        stride = tuple(rng.choice([1, 1, 1, 2, 2, 3]) for _ in range(ndim))
        dilation = tuple(rng.choice([1, 1, 1, 2, 3]) for _ in range(ndim))
        padding = tuple((rng.randint(0, k // 2 * d),) * 2 for k, d in zip(kernel, dilation, strict=True))
        axes = zip(size, kernel, stride, padding, dilation, strict=True)
        output = tuple(output_length(i, k, s, *p, d) for i, k, s, p, d in axes)
        channels = random_channels(rng, grouped)
        batch = rng.choice([1, 2, 4, 8, 16, 32])
        elements = batch * channels[0] * math.prod(size)
        products = elements * math.prod(kernel) * (channels[1] // channels[2] if grouped else 1)
        if min(output) >= 1 and 1e5 <= elements <= 2e7 and products < 5e8:
            return ConvProblem(batch, *channels, size, kernel, stride, padding, dilation, output)


def symmetric(p: ConvProblem, x: Tensor) -> tuple[Tensor, list[int]]:
    """The input as PyTorch's convolution takes it: with the padding that it cannot state made explicit."""
    if p.symmetric:
        return x, [low for low, _ in p.padding]
    return torch.nn.functional.pad(x, [v for pair in reversed(p.padding) for v in pair]), [0] * p.ndim


def pytorch(
    p: ConvProblem, asked: tuple[Output, ...], x: Tensor, w: Tensor, g: Tensor, b: Tensor | None = None
) -> Results:
    """The same results by PyTorch's own operators, on operands in any layout."""
    zeros = [0] * p.ndim
    too_much = asked == ("forward",) and all(low >= max(high, 0) for low, high in p.padding)  # and then a part of it
    padded, padding = (x, [low for low, _ in p.padding]) if too_much else symmetric(p, x)
    if asked == ("forward",):
        found = torch.convolution(padded, w, b, p.stride, padding, p.dilation, False, zeros, p.groups)
        return (found[(..., *map(slice, p.output_size))],)
    mask = ["grad_input" in asked, "grad_weight" in asked, "grad_bias" in asked]
    sizes = [p.out_channels] if mask[2] else None
    grads = torch.ops.aten.convolution_backward(
        g, padded, w, sizes, p.stride, padding, p.dilation, False, zeros, p.groups, mask
    )
    found = [grads[i] for i in range(3) if mask[i]]
    if mask[0] and not p.symmetric:
        found[0] = torch.nn.functional.pad(found[0], [-v for pair in reversed(p.padding) for v in pair])
    return tuple(found)


def as_image(p: ConvProblem) -> ConvProblem:
    """A sequence as an image of one row, which is how it can be channels_last."""
    return ConvProblem(
        p.batch, p.in_channels, p.out_channels, p.groups, (1, *p.input_size), (1, *p.kernel_size), (1, *p.stride),
        ((0, 0), *p.padding), (1, *p.dilation), (1, *p.output_size), dtype=p.dtype,
    )  # fmt: skip


def through_channels_last(
    p: ConvProblem, asked: tuple[Output, ...], x: Tensor, w: Tensor, g: Tensor, b: Tensor | None = None
) -> Results:
    """PyTorch on channels_last copies, results copied back; a sequence is an image of one row."""
    q = as_image(p) if p.ndim == 1 else p
    if p.ndim == 1:
        x, w, g = x.unsqueeze(2), w.unsqueeze(2), g.unsqueeze(2)
    copies = (t.contiguous(memory_format=FORMATS[q.ndim]) for t in (x, w, g))
    found = tuple(t.contiguous() for t in pytorch(q, asked, *copies, b))
    return tuple(t.squeeze(2) if t.ndim > 1 else t for t in found) if p.ndim == 1 else found


def calls(p: ConvProblem, asked: tuple[Output, ...], bias: bool = False) -> dict[str, Callable[[], Results]]:
    """What is compared, checked: ours first. With a bias, the forward adds it, and grad_bias comes with grad_weight."""
    ours = NativeBackend()

    def operand(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape).to(p.dtype).contiguous(memory_format=p.memory_format)

    x, w, g = operand(p.input_shape), operand(p.weight_shape), operand(p.output_shape)
    b = torch.randn(p.out_channels).to(p.dtype) if bias and asked == ("forward",) else None
    if bias and "grad_weight" in asked:
        asked = (*asked, "grad_bias")

    kernel = ours.bind(p, asked)

    def native() -> Results:
        if len(asked) > 1:
            return kernel(g, x, w)
        operands = {"forward": (x, w, b), "grad_input": (g, w, None), "grad_weight": (g, x, None)}[asked[0]]
        return (kernel(*operands),)

    found = {"ours": native, "pytorch": lambda: pytorch(p, asked, x, w, g, b)}
    if not p.channels_last:
        found["through channels_last"] = lambda: through_channels_last(p, asked, x, w, g, b)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4}.get(p.dtype, 3e-2)
    for mine, theirs in zip(native(), found["pytorch"](), strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
        if not error < tolerance:
            raise AssertionError(f"{asked} of {p}: relative difference {error:.2g} from PyTorch")
    return found


class Found(NamedTuple):
    """Seconds of ours and of the better of PyTorch's ways, and how many times faster ours is."""

    ours: float
    best: float
    ratio: float


def on_a_quiet_machine(sides: dict[str, Callable[[], Results]], seconds: float) -> Found:
    """Medians, and the median ratio over rounds."""
    seen: Comparison = compare(sides, "pytorch", seconds=seconds)
    theirs = min((name for name in seen.samples if name != "ours"), key=seen.median)
    ratios = [t / o for t, o in zip(seen.samples[theirs], seen.samples["ours"], strict=True)]
    return Found(seen.median("ours"), seen.median(theirs), statistics.median(ratios))


def on_a_shared_machine(sides: dict[str, Callable[[], Results]], seconds: float) -> Found:
    """The fastest call of each side, each called after a rest, for ``seconds``, seven times at least."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    wake = torch.ones(200_000)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(samples["ours"]) < 7:
        for name, call in sides.items():
            time.sleep(0.005)
            for _ in range(2):  # the threads have fallen asleep too
                wake.add_(0)
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    fastest = {name: min(times[2:]) for name, times in samples.items()}  # the first two calls settle the memory
    best = min(took for name, took in fastest.items() if name != "ours")
    return Found(fastest["ours"], best, best / fastest["ours"])


def layouts(problems: list[ConvProblem], wanted: str) -> Iterator[tuple[str, list[ConvProblem]]]:
    if wanted != "channels_last":
        yield "contiguous", problems
    if wanted != "contiguous":
        images = (as_image(p) if p.ndim == 1 else p for p in problems)
        yield "channels_last", [p.replace(memory_format=FORMATS[p.ndim]) for p in images]


def table(
    title: str,
    problems: list[ConvProblem],
    wanted: str,
    measure: Callable[..., Found],
    seconds: float,
    bias: bool = False,
) -> None:
    """One table a layout: ours / the best of PyTorch in ms, and their ratio; below it the summary."""
    for layout, chosen in layouts(problems, wanted):
        ratios: dict[str, list[tuple[float, bool, ConvProblem]]] = {name: [] for name in ASKED}
        print(f"\n## {title}, {layout}\n")
        print("| problem | " + " | ".join(f"{n} ms" for n in ASKED) + " | of the roofline |\n|---|" + "---|" * 5)
        for p in chosen:
            cells, shares = [], []
            for name, asked in ASKED.items():
                found = measure(calls(p, asked, bias), seconds)
                chosen_here = bool(why_native(p, asked, torch.device("cpu"), torch.get_num_threads()))
                ratios[name].append((found.ratio, chosen_here, p))
                mark = "" if chosen_here else " *"
                cells.append(f"{found.ours * 1e3:.2f} / {found.best * 1e3:.2f} = **{found.ratio:.2f}x**{mark}")
                shares.append(f"{roofline(p) * len(asked) / found.ours:.0%}")
            print(f"| `{p}` | " + " | ".join(cells) + f" | {', '.join(shares[:3])} |", flush=True)
        print("\n| | geometric mean | worst | worst where chosen | slower where chosen |\n|---|---|---|---|---|")
        for name, seen in ratios.items():
            values = [r for r, _, _ in seen]
            taken = [r for r, e, _ in seen if e]
            worst = f"{min(taken):.2f}x" if taken else "-"
            mean, slower = (
                f"{statistics.geometric_mean(values):.2f}x",
                f"{sum(r < 0.95 for r in taken)} of {len(taken)}",
            )
            print(f"| {name} | {mean} | {min(values):.2f}x | {worst} | {slower} |", flush=True)


def limits() -> tuple[float, float]:
    """Bytes per second of a copy, and floating point operations per second of a matrix product: the best of many."""
    a, b = torch.empty(16 << 20), torch.randn(16 << 20)
    m = torch.randn(2048, 2048)

    def fastest(call: Callable[[], object]) -> float:
        took = []
        for _ in range(20):
            time.sleep(0.01)
            start = time.perf_counter()
            call()
            took.append(time.perf_counter() - start)
        return min(took)

    return 2 * 4 * a.numel() / fastest(lambda: a.copy_(b)), 2 * 2048**3 / fastest(lambda: m @ m)


LIMITS: list[float] = []


def roofline(p: ConvProblem) -> float:
    """Seconds that one pass must take on this machine."""
    if not LIMITS:
        LIMITS.extend(limits())
    return max(p.least_bytes / LIMITS[0], p.flops / LIMITS[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few problems, a few seconds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--seconds", type=float, default=0.4, help="for each number")
    parser.add_argument("--random", type=int, default=100, help="how many random problems")
    parser.add_argument("--seed", type=int, default=0, help="of the random problems")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], help="only this one")
    parser.add_argument("--shared", action="store_true", help="the fastest calls, on a machine that others use")
    parser.add_argument("--groups", action="store_true", help="small groups instead of depthwise problems")
    parser.add_argument("--bias", action="store_true", help="the forward adds one, the gradients give its own too")
    parser.add_argument("--no-table", action="store_true", help="only the random problems")
    parser.add_argument("--problem", action="append", help="only these, instead of the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()
    if reasons := NativeBackend().reasons_against(ConvProblem.parse(SHORT[0]), ("forward",), torch.device("cpu")):
        raise SystemExit(f"nothing to measure: {'; '.join(reasons)}")
    texts = arguments.problem or (GROUPS if arguments.groups else SHORT if arguments.short else TABLE)
    problems = [ConvProblem.parse(text).replace(dtype=getattr(torch, arguments.dtype)) for text in texts]
    if arguments.bias:  # a transposed convolution's bias belongs to another pass than PyTorch's here
        problems = [p for p in problems if p.origin != "transposed"]
    wanted, measure = arguments.layout or "both", on_a_shared_machine if arguments.shared else on_a_quiet_machine
    print(f"{conditions()}. Ours / PyTorch's best in milliseconds; * where the rules of choice take PyTorch.")
    if not arguments.no_table:
        seconds = min(arguments.seconds, 0.2) if arguments.short else arguments.seconds
        table("The table", problems, wanted, measure, seconds, arguments.bias)
    if not (arguments.short or arguments.problem) and arguments.random:
        rng = random.Random(arguments.seed)
        drawn = [random_problem(rng, arguments.groups) for _ in range(arguments.random)]
        drawn = [p.replace(dtype=problems[0].dtype) for p in drawn]
        table("Random problems", drawn, wanted, measure, arguments.seconds / 4, arguments.bias)


if __name__ == "__main__":
    main()
