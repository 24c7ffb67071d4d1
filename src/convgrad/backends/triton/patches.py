"""Results of a sliding sum in patches: `forward` and `grad_input` where columns are neighbours in memory.

The idea. A thread computes a patch of R rows and V columns, V values that one instruction stores (16 bytes where the
rows' alignment allows it). For each row of the source it loads the vectors of U values that the patch reads, takes
them apart in registers, and adds every product that a value takes part in. So a value is loaded, masked and converted
once for all of its up to KH * KW products, and a mask covers a vector. Vectors beside the patch's own come from L1.

Where a value goes is known when the kernel is compiled: strides, dilation and padding are constants. With a stride,
`grad_input` needs no phases: a patch holds all of them.

Lanes are patches, numbered along the row, then over row groups, depths, channels and the batch, so that no thread of a
program is without work. SEQUENCE: one long row, of which a program takes R pieces of B patches.

Limits: `patch_tiles` chooses R, V and U and refuses what would not fit into registers; see `kernels` for the rest.
"""

# ruff: noqa: N803, N806, PLR0912, PLR0915, RUF005
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

from .kernels import mask_of, within

#: Sizes and strides that must not select another compiled kernel: all of them.
UNSPECIALIZED = (
    *("batch", "channels", "depth", "height", "vectors", "src_depth", "src_height", "src_vectors", "parts"),
    *(f"{operand}_{axis}" for operand in ("src", "centre", "out") for axis in "ncdh"),
)


@triton.constexpr_function
def first_read(K, S, D, P, ADJOINT):
    """The first position of the source that a patch reads in one dimension, from where its own would begin."""
    return -(((K - 1) * D - P) // S) if ADJOINT else -P


@triton.constexpr_function
def last_read(results, K, S, D, P, ADJOINT):
    """The last one, of a patch of so many results."""
    return (results - 1 + P) // S if ADJOINT else (results - 1) * S + (K - 1) * D - P


@triton.constexpr_function
def kernel_row(r, j, KH, SH, DH, PH, ADJOINT):
    """The row of the kernel through which row j of a patch reads row r of the source, or -1."""
    distance = j + PH - r * SH if ADJOINT else r + PH - j * SH
    return distance // DH if distance % DH == 0 and 0 <= distance < KH * DH else -1


@triton.constexpr_function
def reads(v, kw, SW, DW, PW, ADJOINT):
    """Whether column v of a patch reads the source at all through column kw of the kernel."""
    return not ADJOINT or (v + PW - kw * DW) % SW == 0


@triton.constexpr_function
def column(v, kw, SW, DW, PW, ADJOINT):
    """The column of the source that column v of a patch then reads."""
    return (v + PW - kw * DW) // SW if ADJOINT else v * SW + kw * DW - PW


@triton.jit
def unpack(x, B: tl.constexpr, V: tl.constexpr):
    """The columns of a tile [B, V], each [B]. A thread holds a whole row of it, so nothing is moved."""
    if V == 1:
        return (tl.reshape(x, (B,)),)
    elif V == 2:
        x0, x1 = tl.split(x)
        return (x0, x1)
    elif V == 4:
        even, odd = tl.split(tl.reshape(x, (B, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        return (x0, x1, x2, x3)
    else:
        tl.static_assert(V == 8)
        even, odd = tl.split(tl.reshape(x, (B, 4, 2)))
        x04, x26 = tl.split(tl.reshape(even, (B, 2, 2)))
        x15, x37 = tl.split(tl.reshape(odd, (B, 2, 2)))
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        return (x0, x1, x2, x3, x4, x5, x6, x7)


@triton.jit
def pack(x, B: tl.constexpr, V: tl.constexpr):
    """The inverse of `unpack`."""
    if V == 1:
        return x[0][:, None]
    elif V == 2:
        return tl.join(x[0], x[1])
    elif V == 4:
        return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (B, 4))
    else:
        even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
        return tl.reshape(tl.join(tl.reshape(even, (B, 4)), tl.reshape(odd, (B, 4))), (B, 8))


@triton.jit
def load_span(
    ptrs, vector, vectors, ok, ACC: tl.constexpr, B: tl.constexpr, U: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """The values of a row from its vector ``vector + FIRST`` to ``vector + LAST``; what lies outside is zero."""
    found = ()
    for u in tl.static_range(FIRST, LAST + 1):
        at = ptrs[:, None] + (u * U + tl.arange(0, U))[None, :]
        mask = mask_of(ok & within(vector + u, vectors))
        values = unpack(tl.load(at, mask=mask[:, None], other=0.0), B, U)
        for i in tl.static_range(U):
            found = found + (values[i].to(ACC),)
    return found


@triton.jit
def store_row(ptrs, values, ok, B: tl.constexpr, V: tl.constexpr):
    """Store V columns, in the type that the pointers point to."""
    cast = ()
    for i in tl.static_range(V):
        cast = cast + (values[i].to(ptrs.dtype.element_ty),)
    tl.store(ptrs[:, None] + tl.arange(0, V)[None, :], pack(cast, B, V), mask=mask_of(ok)[:, None])


@triton.jit
def place_patches(lane, vectors, groups, depths):
    """Vector, row group, depth of numbered patches, and what is left of the number."""
    vector = lane % vectors
    lane = lane // vectors
    group = lane % groups
    lane = lane // groups
    return vector, group, lane % depths, lane // depths


@triton.jit
def add_row(
    acc, x, w, r: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ADJOINT: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Add all products of row ``r`` of the source, whose values begin at column START, to a patch's results."""
    new = ()
    for j in tl.static_range(R):
        for v in tl.static_range(V):
            total = acc[j * V + v]
            if kernel_row(r, j, KH, SH, DH, PH, ADJOINT) >= 0:
                for kw in tl.static_range(KW):
                    if reads(v, kw, SW, DW, PW, ADJOINT):
                        value = x[column(v, kw, SW, DW, PW, ADJOINT) - START]
                        total += value * w[kernel_row(r, j, KH, SH, DH, PH, ADJOINT) * KW + kw]
            new = new + (total,)
    return new


@triton.jit(do_not_specialize=[name for name in UNSPECIALIZED if name != "parts" and "centre" not in name])
def correlate_patches(
    src, weight, bias, out, batch, channels, depth, height, vectors, src_depth, src_height, src_vectors, src_n,
    src_c, src_d, src_h, out_n, out_c, out_d, out_h, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, PAD: tl.constexpr, ADJOINT: tl.constexpr, MULTIPLIER: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, HAS_BIAS: tl.constexpr, SEQUENCE: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[n, c, q] = bias[c] + sum over taps of source * weight.

    Strides of the source are given in vectors of U values, those of the result in vectors of V: so the compiler knows
    what is aligned.
    """
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    SD: tl.constexpr = STRIDE[0]
    SH: tl.constexpr = STRIDE[1]
    SW: tl.constexpr = STRIDE[2]
    PH: tl.constexpr = PAD[1]
    PW: tl.constexpr = PAD[2]
    DH: tl.constexpr = DILATION[1]
    DW: tl.constexpr = DILATION[2]
    # The first and the last row, and vector, of the source that a patch reads.
    TOP: tl.constexpr = first_read(KH, SH, DH, PH, ADJOINT)
    BOTTOM: tl.constexpr = last_read(R, KH, SH, DH, PH, ADJOINT)
    FIRST: tl.constexpr = first_read(KW, SW, DW, PW, ADJOINT) // U
    LAST: tl.constexpr = last_read(V, KW, SW, DW, PW, ADJOINT) // U
    # From one patch to the next, in rows and in vectors of the source.
    STEP_H: tl.constexpr = R // SH if ADJOINT else R * SH
    STEP_W: tl.constexpr = V // SW // U if ADJOINT else V * SW // U
    MODULATED: tl.constexpr = MULTIPLIER if ADJOINT else 1

    pid = tl.program_id(0)
    if SEQUENCE:
        blocks = (vectors + B * R - 1) // (B * R)
        vector = pid % blocks * (B * R) + tl.arange(0, B)
        c = pid // blocks % channels
        n = pid // (blocks * channels)
        group = vector * 0
        d = group
        ok = n < batch
    else:
        vector, group, d, c = place_patches(pid * B + tl.arange(0, B), vectors, (height + R - 1) // R, depth)
        n = c // channels
        c = c % channels
        ok = n < batch
    if WIDE:
        n, c, d, group = n.to(tl.int64), c.to(tl.int64), d.to(tl.int64), group.to(tl.int64)
        src_h, out_h = src_h.to(tl.int64), out_h.to(tl.int64)
    row = group * STEP_H

    acc = ()
    for _ in tl.static_range(R * V):
        acc = acc + (tl.zeros((B,), ACC),)
    for m in range(MODULATED):
        cs = c * MULTIPLIER + m if ADJOINT else c // MULTIPLIER
        weights = weight + (cs if ADJOINT else c) * (KD * KH * KW)
        base = src + (n * src_n + cs * src_c + row * src_h + vector * STEP_W) * U
        for kd in range(KD):
            if ADJOINT:
                ds = (d + PAD[0] - kd * DILATION[0]) // SD
                there = ok & within(ds, src_depth) & (ds * SD == d + PAD[0] - kd * DILATION[0])
            else:
                ds = d * SD + kd * DILATION[0] - PAD[0]
                there = ok & within(ds, src_depth)
            w = ()
            for k in tl.static_range(KH * KW):
                w = w + (tl.load(weights + (kd * (KH * KW) + k), mask=mask_of(ok), other=0.0).to(ACC),)
            plane = base + ds * src_d * U
            for r in tl.static_range(TOP, BOTTOM + 1):
                if SEQUENCE:
                    ptrs, at = plane + r * (B * STEP_W * U), (vector + r * B) * STEP_W
                    inside = there & (vector + r * B < vectors)
                else:
                    ptrs, at = plane + r * src_h * U, vector * STEP_W
                    inside = there & within(row + r, src_height)
                x = load_span(ptrs, at, src_vectors, inside, ACC, B, U, FIRST, LAST)
                acc = add_row(acc, x, w, r, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT, R, V, FIRST * U)

    if HAS_BIAS:
        added = tl.load(bias + c, mask=mask_of(ok), other=0.0).to(ACC)
        new = ()
        for i in tl.static_range(R * V):
            new = new + (acc[i] + added,)
        acc = new
    target = out + (n * out_n + c * out_c + d * out_d + group * R * out_h + vector) * V
    for j in tl.static_range(R):
        values = ()
        for v in tl.static_range(V):
            values = values + (acc[j * V + v],)
        if SEQUENCE:
            store_row(target + j * (B * V), values, ok & (vector + j * B < vectors), B, V)
        else:
            store_row(target + j * out_h * V, values, ok & (group * R + j < height), B, V)
