"""A search for what PyTorch's CPU kernels get wrong here: random problems, poisoned memory, a child process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..backends import DEFECTS, pytorchs_call, statable_arguments, usual_strides
from ..engine import Found, get_backend
from ..problem import OPERANDS, PASSES, ConvProblem, Output, Pass
from .bounds import error_bound, reduction_length
from .child import POISON, Child
from .operands import integer_operands, magnitude, reference
from .problem_set import fewer_groups, random_problems

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
                key = (pass_, small.replace(batch=1))
                if key not in seen:
                    seen.add(key)
                    yield Found(small, pass_, what, _upstream_command(small, pass_))


def _avoided(p: ConvProblem, pass_: Pass) -> bool:
    """Whether `aten` would not be chosen here, or cannot compute it."""
    aten = get_backend("aten")
    return bool(aten.wrong_here(p, (pass_,), _CPU)[0] or aten.reasons_against(p, (pass_,), _CPU))


def _wrong(child: Child, p: ConvProblem, pass_: Pass, seed: int = 0) -> str:
    """Return the end of "PyTorch's kernel is wrong here: ..."; empty if it is right."""
    found, death = child.ask({"problem": str(p), "output": pass_, "seed": seed})
    if death.startswith("the process ended"):  # an error of the comparison itself
        return ""
    if death:
        return death
    return f"off by {found['error']:.2g}" if found["status"] == "wrong" else ""


def _shrunk(child: Child, p: ConvProblem, pass_: Pass, until: float) -> ConvProblem:
    """Return the problem with fewer images and channels, as long as it stays wrong."""
    for change in (
        lambda p: p.replace(batch=1),
        lambda p: fewer_groups(p, 2),
        lambda p: p.replace(in_channels=p.groups),
        lambda p: p.replace(out_channels=p.groups),
    ):
        if time.monotonic() > until:
            break
        smaller = change(p)
        if smaller != p and _wrong(child, smaller, pass_):
            p = smaller
    return p


def _upstream_command(p: ConvProblem, output: Output) -> str:
    """Return a shell command that shows a wrong result with PyTorch alone, in memory that glibc has filled."""
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


def _laid_out(t: Tensor, p: ConvProblem) -> Tensor:
    """Return a copy with the strides that a layer's tensors have, in dimensions of size 1 too."""
    strides = usual_strides(t.shape, p.channels_last)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype).copy_(t)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compute one pass with PyTorch's kernels, and compare it with the reference, in the child.

    The result is right, wrong by how much, or refused; if the process dies, `Child.ask` says how.

    Args:
        request: ``problem``, ``output`` and ``seed``; ``raw``: without `aten`'s cures;
            ``odd``: which operand (0 or 1) gets unusual strides in its dimensions of size 1.
    """
    p, pass_ = ConvProblem.parse(request["problem"]), request["output"]
    torch.set_num_threads(1)
    operands = integer_operands(p, (pass_,), request.get("seed", 0))
    pair = [_laid_out(operands[slot], p) for slot in OPERANDS[pass_]]
    exact = reference(p, pass_, operands)
    if "odd" in request:
        t = pair[request["odd"]]
        strides = [6 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
        pair[request["odd"]] = t.as_strided(t.shape, strides)
    try:
        call = pytorchs_call(p, pass_) if request.get("raw") else get_backend("aten").bind(p, (pass_,))
        # Zeros change no result, but some kernels are wrong only with a bias.
        biased = p.has_bias and pass_ == p.bias_pass
        got = call(*pair, torch.zeros(p.shape_of(p.bias_slot)[1], dtype=p.dtype) if biased else None)
    except RuntimeError as error:
        return {"status": "refused", "message": str(error).splitlines()[0]}
    # More rounding stays far below this; uninitialized memory and wrong elements do not.
    allowed = 16 * error_bound("direct", p.dtype, reduction_length(p, pass_), exact, magnitude(p, pass_, operands))
    if p.dtype.itemsize == 2:
        allowed = allowed + 0.04 * exact.abs() + 0.02 * exact.abs().amax()
    error = (got.double() - exact).abs().nan_to_num(float("inf"), float("inf"))
    if bool((error <= allowed).all()):
        return {"status": "right"}
    return {"status": "wrong", "error": float(error.amax()), "largest": float(exact.abs().amax())}
