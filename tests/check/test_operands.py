"""The integers of a check are exact in the problem's dtype, and their results mostly not zero."""

from __future__ import annotations

import pytest

from convgrad.backends.reference import ReferenceBackend
from convgrad.check.operands import exact_limit, integer_operands, magnitude, structural
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Pass


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "complex64"])
@pytest.mark.parametrize("text", ["mb1ic1iw3oc1kw2", "mb4ic32ih16oc8kh3ph1", "g8mb8ic8ih24oc8kh3"])
def test_integer_operands_are_exact_and_their_results_mostly_not_zero(text: str, dtype: str) -> None:
    p = ConvProblem.parse(f"{text} {dtype}")
    alone: list[tuple[Pass, ...]] = [(q,) for q in PASSES]
    for passes in (*alone, PASSES):
        operands = integer_operands(p, passes, seed=3)
        assert all(float(magnitude(p, q, operands).amax()) <= exact_limit(p.dtype) for q in passes)
    for q in PASSES:
        operands = integer_operands(p, (q,), seed=3)
        a, b = (operands[slot] for slot in OPERANDS[q])
        result = ReferenceBackend().bind(p, (q,))(a, b)
        read = structural(p, q)
        assert int((result != 0)[read].sum()) * 2 >= int(read.sum())
