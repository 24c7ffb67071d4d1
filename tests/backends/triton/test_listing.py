"""Listings as nvdisasm prints them: kinds of instructions, loops, what a launch executes of them."""

from __future__ import annotations

import pytest

from convgrad.backends.triton.listing import Counts, parse

LISTING = """
	.section	.text.kernel,"ax",@progbits
        .global         kernel
kernel:
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/                   FMUL R9, R8, R7 ;
        /*0030*/               @P0 BRA `(.L_x_0) ;
        /*0040*/                   HFMA2.MMA R36, -RZ, RZ, 0, 0 ;
.L_x_1:
        /*0050*/               @P2 LDG.E.128 R36, desc[UR6][R102.64] ;
        /*0060*/              @!P3 LDG.E.U16 R123, desc[UR6][R48.64+-0x2] ;
        /*0070*/                   FFMA R112, R125, R123, R112 ;
        /*0080*/                   FFMA R105, R129, R36.reuse, R112.reuse ;
        /*0090*/                   IADD3 R6, R6, 0x1, RZ ;
        /*00a0*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*00b0*/                   STG.E.64 desc[UR4][R2.64], R8 ;
        /*00c0*/                   EXIT ;
.L_x_2:
        /*00d0*/                   BRA `(.L_x_2);
        /*00e0*/                   NOP ;
"""

TENSORS = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_2:
        /*0020*/                   LDSM.16.M88.4 R4, [R8] ;
        /*0030*/                   HMMA.16816.F32.BF16 R16, R4, R8, R16 ;
        /*0040*/                   HMMA.1688.F32.TF32 R16, R4, R8, R16 ;
        /*0050*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0060*/               @P5 BRA `(.L_x_2) ;
        /*0070*/                   ISETP.NE.AND P5, PT, R1, RZ, PT ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
.L_x_3:
        /*0090*/                   FFMA R1, R1, R1, R1 ;
        /*00a0*/                   FFMA R1, R1, R1, R1 ;
        /*00b0*/               @P1 BRA `(.L_x_3) ;
        /*00c0*/                   EXIT ;
"""


def test_a_loop_and_what_is_around_it() -> None:
    """The branch to itself behind the end is neither a loop nor counted, nor are NOPs."""
    found = parse(LISTING)
    assert found.straight == Counts(multiplying=1, memory=1, other=5, products=1, lines=2)
    (loop,) = found.loops
    assert loop.counts == Counts(multiplying=2, memory=2, other=2, products=2, lines=5)
    assert not loop.tensor
    assert found.executed(21) == found.straight.plus(loop.counts, 10)
    assert found.executed(0) == found.straight.plus(loop.counts, 1)
    assert found.executed(21).issued == 7 + 60


def test_tensor_cores_and_nested_loops() -> None:
    """The loop of tensor cores is what counts; the one that multiplies one by one is a way for rare values."""
    found = parse(TENSORS)
    outer, inner, rare = found.loops
    each = (16 * 8 * 16 + 16 * 8 * 8) / 32 + 64 * 32 * 16 / 128
    assert inner.counts == Counts(multiplying=3, memory=1, other=1, products=each, lines=4)
    assert (outer.inside, inner.inside, rare.inside) == ((), (0,), ())
    assert outer.counts == Counts(other=3)
    expected = found.straight.plus(inner.counts, 10).plus(outer.counts, 5)
    assert found.executed(10 * each, entries=5) == expected


def test_nothing_but_straight_code() -> None:
    found = parse(LISTING.replace("@!P0 BRA `(.L_x_1)", "@!P0 BRA `(.L_x_0)"))
    assert not found.loops
    assert found.executed(1000) == found.straight
    assert found.straight.products == 3


@pytest.mark.parametrize(("suffix", "lines"), [("", 1), (".64", 2), (".128", 4), (".U8", 1), (".BYPASS.128", 4)])
def test_lines_of_the_cache(suffix: str, lines: int) -> None:
    assert parse(f"        /*0000*/    LDG.E{suffix} R1, desc[UR6][R2.64] ;").straight.lines == lines
