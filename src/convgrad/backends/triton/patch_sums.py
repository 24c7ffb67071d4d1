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
    load_row,
    load_vectors,
    opened,
    place_patches,
    reads,
    store_row,
)


@triton.jit
def sum_row(
    sums, bias, x, centre, left, r: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    ADJOINT: tl.constexpr, R: tl.constexpr, V: tl.constexpr, START: tl.constexpr, EXACT: tl.constexpr,
    BIAS_H: tl.constexpr, BIAS_W: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add all products of row ``r`` of the source and a patch of the centre; of its columns ``left`` rows exist."""
    new = ()
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            total = sums[kh * KW + kw]
            for j in tl.static_range(R):
                if kernel_row(r, j, KH, SH, DH, PH, ADJOINT) == kh:
                    for v in tl.static_range(V):
                        if reads(v, kw, SW, DW, PW, ADJOINT, WHOLE[0], WHOLE[1]):
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
    BIAS_TAP: tl.constexpr, EXACT: tl.constexpr, SEQUENCE: tl.constexpr, WHOLE: tl.constexpr,
    UNITS: tl.constexpr, AHEAD: tl.constexpr, DEEP: tl.constexpr, FULL: tl.constexpr, DENSE: tl.constexpr,
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
    TOP: tl.constexpr = first_read(KH, SH, DH, PH, ADJOINT, WHOLE[2])
    BOTTOM: tl.constexpr = last_read(R, KH, SH, DH, PH, ADJOINT, WHOLE[2])
    FIRST: tl.constexpr = 0 if WHOLE[0] else first_read(KW, SW, DW, PW, ADJOINT, 0) // U
    LAST: tl.constexpr = 0 if WHOLE[0] else last_read(V, KW, SW, DW, PW, ADJOINT, 0) // U
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
            lane = tile * B + tl.arange(0, B)
            vector, group, d, n = place_patches(lane, vectors, groups, depth, WHOLE, DEEP)
            ok = tl.full((B,), 1, tl.int1) if FULL else n < batch
        if WIDE:
            n, d, group = n.to(tl.int64), d.to(tl.int64), group.to(tl.int64)
        row = group * STEP_H
        src_pitch = WHOLE[1] if DENSE else src_h * UNITS[0]
        centre_pitch = WHOLE[0] if DENSE else centre_h * UNITS[1]
        out_pitch = WHOLE[0] if DENSE else out_h * UNITS[1]
        left = R if SEQUENCE else height - group * R

        middle = centre + (n * centre_n + c * centre_c + d * centre_d + group * R * centre_h + vector) * UNITS[1]
        patch = ()
        acc = ()
        lefts = ()
        for _ in tl.static_range(V):
            lefts = lefts + (left,)
        near = ()
        for j in tl.static_range(R):
            if SEQUENCE:
                loaded = load_vectors(middle + j * (B * V), vector + j * B, vectors, ok, V, 0, 0, 0)
            else:
                there = ok if WHOLE[2] else ok & (j < left)
                loaded = load_vectors(middle + j * centre_pitch, vector, vectors, there, V, 0, 0, WHOLE[0])
            if WHOLE[0]:
                near = near + (loaded,)
            else:
                patch = patch + opened(loaded, ACC, B, V)
            for _ in tl.static_range(V):
                acc = acc + (tl.zeros((B,), ACC),)
        if WHOLE[0]:
            for j in tl.static_range(R):
                patch = patch + opened(near[j], ACC, B, V)

        base = (
            src + (n * src_n + (c if ADJOINT else c // MULTIPLIER) * src_c + row * src_h + vector * STEP_W) * UNITS[0]
        )
        new = ()
        for kd in tl.static_range(KD):
            if ADJOINT and (WHOLE[0] == 0 or DEEP):
                ds = (d + PAD[0] - kd * DILATION[0]) // SD
                there = ok & within(ds, src_depth) & (ds * SD == d + PAD[0] - kd * DILATION[0])
            else:
                ds = d * SD + kd * DILATION[0] - PAD[0]
                there = ok & within(ds, src_depth) if WHOLE[0] == 0 or DEEP else ok
            plane = base + ds * src_d * UNITS[0]
            some = ()
            some_w = ()
            for k in tl.static_range(KH * KW):
                some = some + (sums[kd * KH * KW + k],)
                if SWEEP:
                    some_w = some_w + (w[kd * KH * KW + k],)
            queue = ()
            for r in tl.static_range(TOP, BOTTOM + 1 + AHEAD):
                if r <= BOTTOM:
                    loaded = load_row(
                        plane, r, row, src_pitch, src_height, vector, vectors, src_vectors, there, B, U, FIRST,
                        LAST, STEP_W, SEQUENCE, WHOLE,
                    )  # fmt: skip
                    queue = queue + (loaded,)
                if r - AHEAD >= TOP:
                    x = opened(queue[r - AHEAD - TOP], ACC, B, U)
                    some, bias = sum_row(
                        some, bias, x, patch, lefts, r - AHEAD, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT,
                        R, V, FIRST * U, EXACT, BIAS_TAP[1] if kd == BIAS_TAP[0] else -1, BIAS_TAP[2], WHOLE,
                    )  # fmt: skip
                    if SWEEP:
                        acc = add_row(
                            acc, x, some_w, r - AHEAD, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT, R, V, FIRST * U, WHOLE
                        )
            new = new + some
        sums = new
        if SWEEP:
            target = out + (n * out_n + c * out_c + d * out_d + group * R * out_h + vector) * UNITS[1]
            for j in tl.static_range(R):
                values = ()
                for v in tl.static_range(V):
                    values = values + (acc[j * V + v],)
                if SEQUENCE:
                    store_row(target + j * (B * V), values, ok & (vector + j * B < vectors), B, V, WHOLE[0])
                else:
                    there = ok if WHOLE[2] else ok & (j < left)
                    store_row(target + j * out_pitch, values, there, B, V, WHOLE[0])

    share = shares + (part * channels + c) * (KD * KH * KW)
    for k in tl.static_range(KD * KH * KW):
        tl.store(share + k, tl.sum(sums[k]).to(shares.dtype.element_ty))
    if BIAS_TAP[1] >= 0:
        tl.store(bias_shares + part * channels + c, tl.sum(bias).to(bias_shares.dtype.element_ty))
