"""Sums over a sliding product in patches: `grad_weight`, alone or with `grad_input` in one sweep, by columns.

The idea. As in `patches`, a thread holds a patch of R rows and V columns, here of the centre, and goes over the rows
of the source that the patch meets: every value of the source is multiplied by each value of the centre that it meets,
for one sum a kernel position; with SWEEP by each weight as well, for grad_input. See `grad_weight` for what the
centre is, for the sweep and for how the shares of a sum are added.

A program owns a channel and a share of the batch and space, and keeps all the sums in registers to its end.

Limits: all kernel positions at once, so kernels up to 7x7 or 3x3x3; no multiplier in a sweep.
"""

# ruff: noqa: N803, N806, PLR0912, PLR0915, RUF005
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

from .kernels import within
from .patches import (
    UNSPECIALIZED,
    add_row,
    column,
    first_read,
    kernel_row,
    last_read,
    load_span,
    place_patches,
    reads,
    store_row,
)


@triton.jit
def sum_row(
    sums, bias, x, centre, left, r: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    ADJOINT: tl.constexpr, R: tl.constexpr, V: tl.constexpr, START: tl.constexpr, EXACT: tl.constexpr,
    BIAS_H: tl.constexpr, BIAS_W: tl.constexpr,
):  # fmt: skip
    """Add all products of row ``r`` of the source and a patch of the centre; of its columns ``left`` rows exist."""
    new = ()
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            total = sums[kh * KW + kw]
            for j in tl.static_range(R):
                if kernel_row(r, j, KH, SH, DH, PH, ADJOINT) == kh:
                    for v in tl.static_range(V):
                        if reads(v, kw, SW, DW, PW, ADJOINT):
                            value = x[column(v, kw, SW, DW, PW, ADJOINT) - START]
                            if EXACT:
                                total += value * centre[j * V + v]
                            else:  # not zero times what may be infinite
                                total += tl.where(j < left[v], value * centre[j * V + v], 0.0)
                            if kh == BIAS_H and kw == BIAS_W:
                                bias += value
            new = new + (total,)
    return new, bias


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_patches(
    src, centre, weight, out, shares, bias_shares, batch, channels, depth, height, vectors, src_depth, src_height,
    src_vectors, src_n, src_c, src_d, src_h, centre_n, centre_c, centre_d, centre_h, out_n, out_c, out_d, out_h,
    parts, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    ADJOINT: tl.constexpr, MULTIPLIER: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, SWEEP: tl.constexpr,
    BIAS_TAP: tl.constexpr, EXACT: tl.constexpr, SEQUENCE: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, U: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """shares[part, c, k] = a part of the sum over n, q of centre * source; with SWEEP out = grad_input as well.

    The host launches channels x parts programs, in this order from the fastest. BIAS_TAP is the kernel
    position (depth, height, width) whose loads are summed, or -1 for none.
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
    STEP_H: tl.constexpr = R // SH if ADJOINT else R * SH
    STEP_W: tl.constexpr = V // SW // U if ADJOINT else V * SW // U

    c = tl.program_id(0) % channels
    part = tl.program_id(0) // channels
    if WIDE:
        c = c.to(tl.int64)
        src_h, centre_h, out_h = src_h.to(tl.int64), centre_h.to(tl.int64), out_h.to(tl.int64)
    sums = ()
    for _ in tl.static_range(KD * KH * KW):
        sums = sums + (tl.zeros((B,), ACC),)
    bias = tl.zeros((B,), ACC)
    w = ()
    if SWEEP:
        for k in tl.static_range(KD * KH * KW):
            w = w + (tl.load(weight + c * (KD * KH * KW) + k).to(ACC),)

    if SEQUENCE:
        blocks = (vectors + B * R - 1) // (B * R)
        tiles = batch * blocks
    else:
        groups = (height + R - 1) // R
        tiles = (batch * depth * groups * vectors + B - 1) // B
    for tile in range(part, tiles, parts):
        if SEQUENCE:
            vector = tile % blocks * (B * R) + tl.arange(0, B)
            n = tile // blocks
            group = vector * 0
            d = group
            ok = n < batch
        else:
            vector, group, d, n = place_patches(tile * B + tl.arange(0, B), vectors, groups, depth)
            ok = n < batch
        if WIDE:
            n, d, group = n.to(tl.int64), d.to(tl.int64), group.to(tl.int64)
        row = group * STEP_H
        left = R if SEQUENCE else height - group * R

        middle = centre + (n * centre_n + c * centre_c + d * centre_d + group * R * centre_h + vector) * V
        patch = ()
        acc = ()
        lefts = ()
        for _ in tl.static_range(V):
            lefts = lefts + (left,)
        for j in tl.static_range(R):
            if SEQUENCE:
                patch = patch + load_span(middle + j * (B * V), vector + j * B, vectors, ok, ACC, B, V, 0, 0)
            else:
                patch = patch + load_span(middle + j * centre_h * V, vector, vectors, ok & (j < left), ACC, B, V, 0, 0)
            for _ in tl.static_range(V):
                acc = acc + (tl.zeros((B,), ACC),)

        base = src + (n * src_n + (c if ADJOINT else c // MULTIPLIER) * src_c + row * src_h + vector * STEP_W) * U
        new = ()
        for kd in tl.static_range(KD):
            if ADJOINT:
                ds = (d + PAD[0] - kd * DILATION[0]) // SD
                there = ok & within(ds, src_depth) & (ds * SD == d + PAD[0] - kd * DILATION[0])
            else:
                ds = d * SD + kd * DILATION[0] - PAD[0]
                there = ok & within(ds, src_depth)
            plane = base + ds * src_d * U
            some = ()
            some_w = ()
            for k in tl.static_range(KH * KW):
                some = some + (sums[kd * KH * KW + k],)
                if SWEEP:
                    some_w = some_w + (w[kd * KH * KW + k],)
            for r in tl.static_range(TOP, BOTTOM + 1):
                if SEQUENCE:
                    ptrs, at = plane + r * (B * STEP_W * U), (vector + r * B) * STEP_W
                    inside = there & (vector + r * B < vectors)
                else:
                    ptrs, at = plane + r * src_h * U, vector * STEP_W
                    inside = there & within(row + r, src_height)
                x = load_span(ptrs, at, src_vectors, inside, ACC, B, U, FIRST, LAST)
                some, bias = sum_row(
                    some, bias, x, patch, lefts, r, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT,
                    R, V, FIRST * U, EXACT, BIAS_TAP[1] if kd == BIAS_TAP[0] else -1, BIAS_TAP[2],
                )  # fmt: skip
                if SWEEP:
                    acc = add_row(
                        acc, x, some_w, r, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT, R, V,
                        FIRST * U,
                    )  # fmt: skip
            new = new + some
        sums = new
        if SWEEP:
            target = out + (n * out_n + c * out_c + d * out_d + group * R * out_h + vector) * V
            for j in tl.static_range(R):
                values = ()
                for v in tl.static_range(V):
                    values = values + (acc[j * V + v],)
                if SEQUENCE:
                    store_row(target + j * (B * V), values, ok & (vector + j * B < vectors), B, V)
                else:
                    store_row(target + j * out_h * V, values, ok & (j < left), B, V)

    share = shares + (part * channels + c) * (KD * KH * KW)
    for k in tl.static_range(KD * KH * KW):
        tl.store(share + k, tl.sum(sums[k]).to(shares.dtype.element_ty))
    if BIAS_TAP[1] >= 0:
        tl.store(bias_shares + part * channels + c, tl.sum(bias).to(bias_shares.dtype.element_ty))
