"""A search for what PyTorch's CPU kernels get wrong here: random problems, poisoned memory, a child process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from ..backends import DEFECTS, statable_arguments
from ..engine import Found, get_backend
from ..problem import PASSES, ConvProblem, Output, Pass
from .aten_worker import answer
from .child import POISON, Child
from .problems import random_problems

_CPU = torch.device("cpu")


def search_aten(
    seconds: float = 60.0, seed: int = 0, progress: Callable[[float, int], None] | None = None
) -> Iterator[Found]:
    """Compare PyTorch's kernels with the reference, and yield what is wrong and not known yet, made small.

    Args:
        progress: called with (share of the time, problems done).
    """
    r, done, start = random.Random(seed), 0, time.monotonic()
    known = [ConvProblem.parse(d.example[0]) for d in DEFECTS]
    seen: set[Any] = set()
    with Child(answer) as child:
        for plain in chain(known, random_problems(seed)):
            passed = time.monotonic() - start
            if passed > seconds:
                return
            done += 1
            if progress is not None:
                progress(passed / seconds, done)
            p = plain.replace(has_bias=r.random() < 0.5)
            for pass_ in PASSES:
                what = "" if _avoided(p, pass_) else _wrong(child, p, pass_, r.randrange(1000))
                if not what:
                    continue
                small = _shrunk(child, p, pass_, start + 2 * seconds)
                key = (pass_, small.replace(batch=1, dtype=p.dtype))
                if key not in seen:
                    seen.add(key)
                    yield Found(small, pass_, what, _upstream_command(small, pass_))


def _avoided(p: ConvProblem, pass_: Pass) -> bool:
    """Whether `aten` would not be chosen here, or cannot compute it."""
    aten = get_backend("aten")
    return bool(aten.wrong_here(p, (pass_,), _CPU)[0] or aten.reasons_against(p, (pass_,), _CPU))


def _wrong(child: Child, p: ConvProblem, pass_: Pass, seed: int = 0) -> str:
    """What goes wrong, as the end of "PyTorch's kernel is wrong here: ..."; empty where nothing does."""
    found, death = child.ask({"problem": str(p), "output": pass_, "seed": seed})
    if death:
        return death
    return f"off by {found['error']:.2g}" if found["status"] == "wrong" else ""


def _shrunk(child: Child, p: ConvProblem, pass_: Pass, until: float) -> ConvProblem:
    """Fewer images and channels, as long as it stays wrong."""
    for change in (
        {"batch": 1},
        {"groups": 2, "in_channels": p.in_channels // p.groups * 2, "out_channels": p.out_channels // p.groups * 2},
        {"in_channels": p.groups},
        {"out_channels": p.groups},
    ):
        if time.monotonic() > until or change.get("groups", 1) > p.groups:
            break
        smaller = p.replace(**change)
        if smaller != p and _wrong(child, smaller, pass_):
            p = smaller
    return p


def _upstream_command(p: ConvProblem, output: Output) -> str:
    """A shell command that shows a wrong result with PyTorch alone, in memory that glibc has filled."""
    rest = ", ".join(str(list(a) if isinstance(a, tuple) else a) for a in statable_arguments(p))
    layout = f".to(memory_format={p.memory_format})" if p.channels_last else ""
    shapes = {"x": p.input_shape, "w": p.weight_shape, "g": p.output_shape}
    if p.transposed:
        shapes["x"], shapes["g"] = shapes["g"], shapes["x"]
    made = "; ".join(f"{n} = torch.randint(-3, 4, {s}).to({p.dtype}){layout}" for n, s in shapes.items())
    if output == p.bias_pass:
        bias = f"torch.zeros({p.shape_of(p.bias_slot)[1]}).to({p.dtype})" if p.has_bias else None
        call = f"torch.convolution(x, w, {bias}, {rest})"
        doubles = f"torch.convolution(x.double(), w.double(), None, {rest})"
    else:
        i = 1 if output == "grad_weight" else 0
        mask = [i == 0, i == 1, False]
        backward = "torch.ops.aten.convolution_backward"
        call = f"{backward}(g, x, w, None, {rest}, {mask})[{i}]"
        doubles = f"{backward}(g.double(), x.double(), w.double(), None, {rest}, {mask})[{i}]"
    program = f"import torch; torch.set_num_threads(1); {made}; print(({call}.double() - {doubles}).abs().max())"
    return f'MALLOC_PERTURB_={POISON} python -c "{program}"'
