"""``native:avx2``: the kernels of another instruction set than the one in use, beside those."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from convgrad.backends import _native_library as library
from convgrad.engine import get_backend
from convgrad.problem import ConvProblem

pytestmark = pytest.mark.skipif(library.instruction_set() != "x86-64-v4", reason="no processor with AVX-512")

P = ConvProblem.parse("g24mb3ic24ih65oc24kh3ph1")  # vectors of neighboring columns, whose sums are sums of columns
GRAD_OUTPUT, INPUT = torch.randn(P.output_shape), torch.randn(P.input_shape)
CPU = torch.device("cpu")


def select(name: str) -> None:
    """Use another instruction set for the plans made from now on."""
    loaded = library.load()
    assert loaded is not None
    assert loaded.convgrad_select(name.encode()) == 0


def bits(name: str) -> torch.Tensor:
    return get_backend(name).bind(P, ("grad_weight",))(GRAD_OUTPUT, INPUT)


def test_it_runs_the_kernels_of_the_other_set_and_changes_nothing_else() -> None:
    """The order of sums follows the width of the vectors, and so do the bits."""
    wide, narrow = bits("native"), bits("native:avx2")
    assert not torch.equal(wide, narrow)
    assert torch.allclose(wide, narrow, rtol=1e-4, atol=1e-4)
    assert library.instruction_set() == "x86-64-v4"
    select("x86-64-v3")
    try:
        assert torch.equal(bits("native"), narrow)
    finally:
        select("x86-64-v4")
    assert torch.equal(bits("native"), wide)


def test_plans_made_in_several_threads_get_the_set_that_they_asked_for() -> None:
    expected = {name: bits(name) for name in ("native", "native:avx2")}

    def make(name: str) -> None:
        assert all(torch.equal(bits(name), expected[name]) for _ in range(60)), name

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, (*expected, *expected)))


def test_it_is_refused_where_it_would_be_native_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend("native:avx2")
    assert backend.reasons_against(P, ("forward",), CPU) == []
    library.why_not.cache_clear()
    select("x86-64-v3")
    try:
        assert backend.reasons_against(P, ("forward",), CPU) == ["x86-64-v3 is what 'native' uses here"]
    finally:
        select("x86-64-v4")
        library.why_not.cache_clear()
    assert "does not have vax" in library.why_not("vax")
    assert library.instruction_set() == "x86-64-v4"


def test_a_measurement_belongs_to_one_build_of_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    before = get_backend("native").version
    assert len(before) == 8
    changed = tmp_path / "other.so"
    changed.write_bytes(library.library_path().read_bytes() + b" ")
    other = ctypes.CDLL(str(changed))
    monkeypatch.setattr(library, "load", lambda: other)
    library.digest.cache_clear()
    try:
        assert get_backend("native:avx2").version != before
    finally:
        library.digest.cache_clear()
