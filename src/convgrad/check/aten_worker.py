"""One of PyTorch's convolutions compared with the reference, in a child process (`Child`).

What comes out is right, wrong by how much, or not computed; where the process dies, `Child.ask` says how.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import pytorchs_call, usual_strides
from ..engine import get_backend
from ..problem import OPERANDS, ConvProblem
from .bounds import error_bound, reduction_length
from .operands import integer_operands, magnitude, reference


def _laid_out(t: Tensor, p: ConvProblem) -> Tensor:
    """A copy with the strides that a layer's tensors have, in dimensions of size 1 too."""
    strides = usual_strides(t.shape, p.channels_last)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype).copy_(t)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compute one pass with PyTorch's kernels and compare.

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
        # Of zeros, which change no result: some kernels go wrong with a bias only.
        biased = p.has_bias and pass_ == p.bias_pass
        got = call(*pair, torch.zeros(p.shape_of(p.bias_slot)[1], dtype=p.dtype) if biased else None)
    except RuntimeError as error:
        return {"status": "refused", "message": str(error).splitlines()[0]}
    # What a bit more rounding does stays far below this; uninitialized memory, or the wrong elements, do not.
    allowed = 16 * error_bound("direct", p.dtype, reduction_length(p, pass_), exact, magnitude(p, pass_, operands))
    if p.dtype.itemsize == 2:
        allowed = allowed + 0.04 * exact.abs() + 0.02 * exact.abs().amax()
    error = (got.double() - exact).abs().nan_to_num(float("inf"), float("inf"))
    if bool((error <= allowed).all()):
        return {"status": "right"}
    return {"status": "wrong", "error": float(error.amax()), "largest": float(exact.abs().amax())}
