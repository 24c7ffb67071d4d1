"""Sums over a sliding product in patches: `grad_weight`, alone or with `grad_input` in one sweep, by channels.

The idea. As in `channel_patches`, a thread holds a patch of R rows, W columns and V channels, here of the centre, and
goes over the rows of the source that the patch meets: every value of the source is multiplied by each value of the
centre that it meets, for one sum a kernel position and channel; with SWEEP by each weight as well, for grad_input. See
`grad_weight` for what the centre is, for the sweep and for how the shares of a sum are added.

A program owns a line of vectors of channels and a share of the batch and space. Its threads keep their sums in
registers to its end; then those of the same vectors are added through shared memory.

Limits: all kernel positions at once, so kernels up to 7x7 or 3x3x3; one output channel per input channel.
"""

# ruff: noqa: N803, N806, PLR0912, PLR0915, RUF005, SIM108
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

from .channel_patches import (
    LENGTHS,
    UNSPECIALIZED,
    is_read,
    load_strip,
    load_weights,
    place,
    store_patch,
    store_positions,
)
from .kernels import within
from .patch_sums import sum_row
from .patches import NARROW, add_row, first_read, last_read, place_patches


@triton.jit
def add_lines(x, LINE: tl.constexpr, B: tl.constexpr, V: tl.constexpr):
    """The sums of the lanes that have the same vector: [B, V] to [LINE, V]."""
    return tl.sum(tl.reshape(x, (B // LINE, LINE, V)), axis=0)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=LENGTHS)
def sum_channels(
    src, centre, weight, out, shares, bias_shares, batch, vectors, depth, height, width, src_depth, src_height,
    src_width, period, src_n, src_d, src_h, src_w, centre_n, centre_d, centre_h, centre_w, out_n, out_c, out_d, out_h,
    out_w, share_c, share_k, parts, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    PAD: tl.constexpr, ADJOINT: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, SWEEP: tl.constexpr,
    BIAS_TAP: tl.constexpr, TRANSPOSED: tl.constexpr, INSIDE_D: tl.constexpr,
    INSIDE_H: tl.constexpr, INSIDE_W: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr, W: tl.constexpr,
    V: tl.constexpr, TOGETHER: tl.constexpr, LINE: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """shares[share, c, k] = a part of the sum over n, q of centre * source; with SWEEP out = grad_input as well.

    The host launches (lines of a period) x parts programs, in this order from the fastest; there are parts x period
    shares. BIAS_TAP is the kernel position (depth, height, width) whose loads are summed, or -1 for none. EXACT: every
    row and column of every patch exists. FULL: every lane has a patch in every tile.
    """
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    SD: tl.constexpr = STRIDE[0]
    SH: tl.constexpr = STRIDE[1]
    SW: tl.constexpr = STRIDE[2]
    DH: tl.constexpr = DILATION[1]
    DW: tl.constexpr = DILATION[2]
    PH: tl.constexpr = PAD[1]
    PW: tl.constexpr = PAD[2]
    # The first and the last row, and column, of the source that a patch reads.
    TOP: tl.constexpr = first_read(KH, SH, DH, PH, ADJOINT)
    BOTTOM: tl.constexpr = last_read(R, KH, SH, DH, PH, ADJOINT)
    FIRST: tl.constexpr = first_read(KW, SW, DW, PW, ADJOINT)
    LAST: tl.constexpr = last_read(W, KW, SW, DW, PW, ADJOINT)
    STEP_H: tl.constexpr = R // SH if ADJOINT else R * SH
    STEP_W: tl.constexpr = W // SW if ADJOINT else W * SW

    strips = (width + W - 1) // W
    groups = (height + R - 1) // R
    items = batch * depth * groups * strips
    at_once = B // LINE * period
    tiles = (items + at_once - 1) // at_once
    blocks = vectors * period // LINE
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    if WIDE:
        src_h, centre_h, out_h = src_h.to(tl.int64), centre_h.to(tl.int64), out_h.to(tl.int64)
        src_w, centre_w, out_w = src_w.to(tl.int64), centre_w.to(tl.int64), out_w.to(tl.int64)
        out_c = out_c.to(tl.int64)
    sums = ()
    for _ in tl.static_range(KD * KH * KW):
        sums = sums + (tl.zeros((B, V), ACC),)
    bias = tl.zeros((B, V), ACC)
    w = ()
    if SWEEP:
        here, _item, _ok = place(block, 0, vectors, items, period, LINE, B)
        w = load_weights(weight + here * V, vectors, 0, KD * KH * KW, ACC, V)

    for tile in range(part, tiles, parts):
        vector, item, ok = place(block, tile, vectors, items, period, LINE, B)
        strip, group, d, n = place_patches(item, strips, groups, depth, NARROW, True)
        if WIDE:
            n, vector, d, group, strip = (
                n.to(tl.int64), vector.to(tl.int64), d.to(tl.int64), group.to(tl.int64), strip.to(tl.int64)
            )  # fmt: skip
        row = group * STEP_H
        left = strip * STEP_W
        rows = height - group * R
        columns = width - strip * W
        exist = ()
        for v in tl.static_range(W):
            exist = exist + (tl.where(v < columns, rows, 0)[:, None],)

        middle = centre + (n * centre_n + d * centre_d + group * R * centre_h + strip * W * centre_w + vector) * V
        patch = ()
        acc = ()
        for j in tl.static_range(R):
            patch = patch + load_strip(
                middle + j * centre_h * V, centre_w * V, strip * W, width, ok & (j < rows), not (EXACT and FULL),
                ACC, V, 0, W - 1, W if EXACT else 0, W, 1, 1, 1, 0, False,
            )  # fmt: skip
            for _ in tl.static_range(W):
                acc = acc + (tl.zeros((B, V), ACC),)

        base = src + (n * src_n + row * src_h + left * src_w + vector) * V
        new = ()
        for kd in tl.static_range(KD):
            if ADJOINT:
                ds = (d + PAD[0] - kd * DILATION[0]) // SD
            else:
                ds = d * SD + kd * DILATION[0] - PAD[0]
            in_depth = within(ds, src_depth)
            if not FULL:
                in_depth = in_depth & ok
            plane = base + ds * src_d * V
            some = ()
            some_w = ()
            for k in tl.static_range(KH * KW):
                some = some + (sums[kd * KH * KW + k],)
                if SWEEP:
                    some_w = some_w + (w[kd * KH * KW + k],)
            for r in tl.static_range(TOP, BOTTOM + 1):
                if is_read(r, R, KH, SH, DH, PH, ADJOINT):
                    x = load_strip(
                        plane + r * src_h * V, src_w * V, left, src_width, in_depth & within(row + r, src_height),
                        not FULL or INSIDE_D == 0 or r < 0 or r >= INSIDE_H, ACC, V, FIRST, LAST, INSIDE_W,
                        W, KW, SW, DW, PW, ADJOINT,
                    )  # fmt: skip
                    some, bias = sum_row(
                        some, bias, x, patch, exist, r, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT,
                        R, W, FIRST, EXACT, BIAS_TAP[1] if kd == BIAS_TAP[0] else -1, BIAS_TAP[2], NARROW,
                    )  # fmt: skip
                    if SWEEP:
                        acc = add_row(acc, x, some_w, r, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT, R, W, FIRST, NARROW)
            new = new + some
        sums = new
        if SWEEP:
            if TRANSPOSED:
                target = out + (n * out_n + vector * V * out_c + group * (R // TOGETHER)) * TOGETHER
                store_positions(target, out_c * TOGETHER, acc, ok, rows, R, B, V, TOGETHER)
            else:
                target = out + (n * out_n + d * out_d + group * R * out_h + strip * W * out_w + vector) * V
                store_patch(target, out_h * V, out_w * V, acc, ok, rows, columns, EXACT, EXACT, R, W, B, V)

    line = block * LINE + tl.arange(0, LINE)
    of = part * period + line // vectors  # the shares of a period's patches are shares of their own
    c = (line % vectors * V)[:, None] + tl.arange(0, V)[None, :]
    share = shares + (of * (vectors * V * KD * KH * KW))[:, None] + c * share_c
    for k in tl.static_range(KD * KH * KW):
        tl.store(share + k * share_k, add_lines(sums[k], LINE, B, V).to(shares.dtype.element_ty))
    if BIAS_TAP[1] >= 0:
        total = add_lines(bias, LINE, B, V).to(bias_shares.dtype.element_ty)
        tl.store(bias_shares + (of * (vectors * V))[:, None] + c, total)
