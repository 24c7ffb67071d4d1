"""Sums over a sliding product: `grad_weight` of a depthwise convolution, alone or with `grad_input` in one sweep.

The idea. ``grad_weight[c, k] = sum over n, q of centre[n, c, q] * source[n, c, q * step + k * tap_step]``. A program
owns a channel (or a block of channels), a share of the batch and space, and a set of kernel positions, whose sums it
keeps in registers from its first tile to its last. Rows are handled as in `kernels`: one load of the source serves
every kernel row that meets one of the R rows of the centre. The shares are written out and added in a fixed order by
`add_shares`: there are no atomics, the same inputs give the same bits.

The sweep. With grad_output as the source and input as the centre the very same loads also give grad_input: each
loaded value of grad_output is multiplied by a weight for the one and by an input for the other. So both gradients cost
one reading of grad_output and input and one writing of grad_input; grad_bias is the sum of what one kernel position
loads (`Axis.whole_tap`).

Where columns are neighbours `patch_sums` comes first, where channels are `channel_sums`. Limits: TD * TH * TW kernel
positions a program; a larger kernel is split over programs (`grad_weight` alone).
"""

# ruff: noqa: N803, N806, PLR0912, PLR0915, RUF005, SIM108
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

from .kernels import UNSPECIALIZED, first_tap, mask_of, place_tile, within


@triton.jit
def load_rows(ptrs, row_stride, first, rows, ok, ACC: tl.constexpr, R: tl.constexpr, PHASES: tl.constexpr):
    """R rows of the centre; a row that does not exist is zero."""
    loaded = ()
    for j in tl.static_range(R):
        h = first + j * PHASES
        loaded = loaded + (tl.load(ptrs + h * row_stride, mask=mask_of(ok & (h < rows)), other=0.0).to(ACC),)
    return loaded


@triton.jit
def sum_column(
    sums, acc, bias, centre, ptrs, row, row_stride, rows, ok, first, result_rows, weight, weight_stride,
    weight_ok, kh, KH: tl.constexpr, ACC: tl.constexpr, R: tl.constexpr, TAPS: tl.constexpr,
    SRC_STEP: tl.constexpr, TAP_STEP: tl.constexpr, TAP_STRIDE: tl.constexpr, PHASES: tl.constexpr,
    CHECK: tl.constexpr, EXACT: tl.constexpr, SWEEP: tl.constexpr, BIAS_TAP: tl.constexpr,
):  # fmt: skip
    """For one column of the kernel: sums[t] += source * centre[j], acc[j] += source * weight[t]."""
    LOW: tl.constexpr = (TAPS - 1) * TAP_STEP if TAP_STEP < 0 else 0
    HIGH: tl.constexpr = (R - 1) * SRC_STEP + ((TAPS - 1) * TAP_STEP if TAP_STEP > 0 else 0)
    for i in tl.static_range(LOW, HIGH + 1):
        in_rows = within(row + i, rows)
        x = tl.load(ptrs + (row + i) * row_stride, mask=mask_of(ok & in_rows), other=0.0).to(ACC)
        new_sums = ()
        for t in tl.static_range(TAPS):
            if (i - t * TAP_STEP) % SRC_STEP == 0 and i - t * TAP_STEP >= 0 and i - t * TAP_STEP < R * SRC_STEP:
                if EXACT:
                    new_sums = new_sums + (sums[t] + x * centre[(i - t * TAP_STEP) // SRC_STEP],)
                else:  # not zero times what may be infinite
                    new_sums = new_sums + (
                        sums[t]
                        + tl.where(
                            first + (i - t * TAP_STEP) // SRC_STEP * PHASES < result_rows,
                            x * centre[(i - t * TAP_STEP) // SRC_STEP],
                            0.0,
                        ),
                    )
                if t == BIAS_TAP:
                    bias += x
            else:
                new_sums = new_sums + (sums[t],)
        sums = new_sums
        if SWEEP:
            new = ()
            for j in tl.static_range(R):
                if (
                    (i - j * SRC_STEP) % TAP_STEP == 0
                    and (i - j * SRC_STEP) // TAP_STEP >= 0
                    and (i - j * SRC_STEP) // TAP_STEP < TAPS
                ):
                    k = kh + (i - j * SRC_STEP) // TAP_STEP * TAP_STRIDE
                    if CHECK:
                        w = tl.load(weight + k * weight_stride, mask=mask_of(weight_ok & (k < KH)), other=0.0).to(ACC)
                        new = new + (acc[j] + tl.where(k < KH, x * w, 0.0),)
                    else:
                        w = tl.load(weight + k * weight_stride, mask=mask_of(weight_ok), other=0.0).to(ACC)
                        new = new + (acc[j] + x * w,)
                else:
                    new = new + (acc[j],)
            acc = new
    return sums, acc, bias


@triton.jit(do_not_specialize=UNSPECIALIZED)
def correlate_sum(
    src, centre, weight, out, shares, bias_shares, batch, channels, depth, height, width, src_depth,
    src_height, src_width, src_n, src_c, src_d, src_h, src_w, centre_n, centre_c, centre_d, centre_h, centre_w,
    out_n, out_c, out_d, out_h, out_w, weight_c, weight_k, share_c, share_k, pad_d, pad_h, pad_w, zero, parts,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PHASES: tl.constexpr,
    TAPS: tl.constexpr, TAP_STRIDE: tl.constexpr, SRC_STEP: tl.constexpr, TAP_STEP: tl.constexpr,
    ADJOINT: tl.constexpr, MULTIPLIER: tl.constexpr, CHANNEL_LANES: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, SWEEP: tl.constexpr, BIAS_TAP: tl.constexpr, EXACT: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BL: tl.constexpr, TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
):  # fmt: skip
    """shares[part, c, k] = a part of the sum over n, q of centre * source; with SWEEP out = grad_input as well.

    The host launches chunks x phases x channels (or blocks of them) x parts programs, in this order from the fastest. A
    sweep has one chunk. BIAS_TAP is the kernel position (depth, height, width) whose loads are summed, or -1 for none.
    """
    PD: tl.constexpr = PHASES[0]
    PH: tl.constexpr = PHASES[1]
    PW: tl.constexpr = PHASES[2]
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    TAPS_D: tl.constexpr = TAPS[0]
    TAPS_H: tl.constexpr = TAPS[1]
    TAPS_W: tl.constexpr = TAPS[2]
    CHUNKS_D: tl.constexpr = (TAPS_D + TD - 1) // TD
    CHUNKS_H: tl.constexpr = (TAPS_H + TH - 1) // TH
    CHUNKS_W: tl.constexpr = (TAPS_W + TW - 1) // TW
    CHECK_H: tl.constexpr = (ADJOINT and STRIDE[1] > 1) or TAPS_H % TH != 0

    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    td0 = pid % CHUNKS_D * TD
    pid = pid // CHUNKS_D
    th0 = pid % CHUNKS_H * TH
    pid = pid // CHUNKS_H
    tw0 = pid % CHUNKS_W * TW
    pid = pid // CHUNKS_W
    phase_w = pid % PW
    phase_h = pid // PW % PH
    phase_d = pid // (PW * PH) % PD
    pid = pid // (PW * PH * PD)
    depths = (depth + PD - 1) // PD
    groups = ((height + PH - 1) // PH + R - 1) // R
    columns = (width + PW - 1) // PW
    if CHANNEL_LANES:
        blocks = (channels + BL - 1) // BL
        inner = 1
        items = batch * depths * groups * columns
    else:
        blocks = channels
        inner = (columns + BL - 1) // BL
        items = batch * depths * groups
    block = pid % blocks
    part = pid // blocks
    tiles = (items + BM - 1) // BM * inner

    kd0, d0 = first_tap(phase_d, pad_d, KD, STRIDE[0], DILATION[0], TAP_STRIDE[0], ADJOINT)
    kh0, h0 = first_tap(phase_h, pad_h, KH, STRIDE[1], DILATION[1], TAP_STRIDE[1], ADJOINT)
    kw0, w0 = first_tap(phase_w, pad_w, KW, STRIDE[2], DILATION[2], TAP_STRIDE[2], ADJOINT)
    kh = kh0 + th0 * TAP_STRIDE[1]

    sums = ()
    for _ in tl.static_range(TD * TH * TW):
        sums = sums + (tl.zeros((BM, BL), ACC),)
    bias = tl.zeros((BM, BL), ACC)
    spread = tl.zeros((BM, BL), tl.int32) if CHANNEL_LANES and BM > 1 else 0

    for tile in range(part, tiles, parts):
        n, c, d, group, w = place_tile(
            tile // inner,
            block if CHANNEL_LANES else tile % inner,
            channels,
            depths,
            groups,
            columns,
            BM,
            BL,
            CHANNEL_LANES,
            False,
        )
        if not CHANNEL_LANES:
            c = block
        cs = c if ADJOINT else c // MULTIPLIER
        at_d = d * PD + phase_d
        at_w = w * PW + phase_w + zero
        ok = (n < batch) & (c < channels) & (at_w < width)
        in_depth = at_d < depth
        first = group * (R * PH) + phase_h
        rows = load_rows(
            centre + n * centre_n + c * centre_c + at_d * centre_d + at_w * centre_w,
            centre_h,
            first,
            height,
            ok & in_depth,
            ACC,
            R,
            PH,
        )
        base = src + n * src_n + cs * src_c
        acc = ()
        for _ in tl.static_range(R):
            acc = acc + (tl.zeros((BM, BL), ACC),)
        next_sums = ()
        for td in tl.static_range(TD):
            kd = kd0 + (td0 + td) * TAP_STRIDE[0]
            ds = d * SRC_STEP[0] + d0 + (td0 + td) * TAP_STEP[0]
            for tw in tl.static_range(TW):
                kw = kw0 + (tw0 + tw) * TAP_STRIDE[2]
                ws = w * SRC_STEP[2] + w0 + (tw0 + tw) * TAP_STEP[2]
                in_kernel = (kd < KD) & (kw < KW)
                column = ()
                for t in tl.static_range(TH):
                    column = column + (sums[(td * TW + tw) * TH + t],)
                column, acc, bias = sum_column(
                    column,
                    acc,
                    bias,
                    rows,
                    base + ds * src_d + ws * src_w,
                    group * (R * SRC_STEP[1]) + h0 + th0 * TAP_STEP[1],
                    src_h,
                    src_height,
                    ok & in_depth & in_kernel & within(ds, src_depth) & within(ws, src_width),
                    first,
                    height,
                    weight + c * weight_c + (kd * (KH * KW) + kw) * weight_k + spread,
                    KW * weight_k,
                    (c < channels) & in_kernel,
                    kh,
                    KH,
                    ACC,
                    R,
                    TH,
                    SRC_STEP[1],
                    TAP_STEP[1],
                    TAP_STRIDE[1],
                    PH,
                    CHECK_H,
                    EXACT,
                    SWEEP,
                    BIAS_TAP[1] if td == BIAS_TAP[0] and tw == BIAS_TAP[2] else -1,
                )
                next_sums = next_sums + column
        sums = next_sums
        if SWEEP:
            target = out + n * out_n + c * out_c + at_d * out_d + at_w * out_w
            for j in tl.static_range(R):
                h = first + j * PH
                tl.store(
                    target + h * out_h, acc[j].to(out.dtype.element_ty), mask=mask_of(ok & in_depth & (h < height))
                )

    if CHANNEL_LANES:
        c_out = block * BL + tl.arange(0, BL)
    else:
        c_out = block
    share = shares + part * (channels * KD * KH * KW) + c_out * share_c
    for td in tl.static_range(TD):
        kd = kd0 + (td0 + td) * TAP_STRIDE[0]
        for tw in tl.static_range(TW):
            kw = kw0 + (tw0 + tw) * TAP_STRIDE[2]
            for t in tl.static_range(TH):
                k = kh + t * TAP_STRIDE[1]
                total = sums[(td * TW + tw) * TH + t]
                total = tl.sum(total, axis=0) if CHANNEL_LANES else tl.sum(total)
                in_kernel = (kd < KD) & (k < KH) & (kw < KW)
                tl.store(
                    share + ((kd * KH + k) * KW + kw) * share_k,
                    total.to(shares.dtype.element_ty),
                    mask=mask_of(in_kernel & (c_out < channels)),
                )
    if BIAS_TAP[1] >= 0:
        total = tl.sum(bias, axis=0) if CHANNEL_LANES else tl.sum(bias)
        tl.store(bias_shares + part * channels + c_out, total.to(bias_shares.dtype.element_ty), mask=c_out < channels)


@triton.jit
def add_parts(shares, out, at, offset, parts, count, ACC: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):
    """out[at] = sum of shares[part, offset] over the parts, each of ``count`` values."""
    total = tl.zeros((BN,), ACC)
    for first in range(0, parts, BP):
        part = first + tl.arange(0, BP)[:, None]
        mask = (part < parts) & (at < count)[None, :]
        share = tl.load(shares + part * count + offset[None, :], mask=mask, other=0.0)
        total += tl.sum(share.to(ACC), axis=0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=("parts", "count"))
def add_shares(
    shares, out, bias_shares, bias, parts, count, share_c, share_k, ELEMENTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[c, k] = sum of shares[part, c, k] over the parts, in an order that depends on nothing but their number.

    With HAS_BIAS the programs behind those of ``out`` do the same for bias[c].
    """
    block = tl.program_id(0)
    blocks = (count + BN - 1) // BN
    if block < blocks:
        at = block * BN + tl.arange(0, BN)
        offset = at // ELEMENTS * share_c + at % ELEMENTS * share_k
        add_parts(shares, out, at, offset, parts, count, ACC, BP, BN)
    elif HAS_BIAS:
        at = (block - blocks) * BN + tl.arange(0, BN)
        add_parts(bias_shares, bias, at, at, parts, count // ELEMENTS, ACC, BP, BN)
