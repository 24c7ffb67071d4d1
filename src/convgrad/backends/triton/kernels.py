"""Results of a sliding sum: `forward` and `grad_input` of a depthwise convolution, in 1-D, 2-D and 3-D.

The idea. A depthwise convolution moves few bytes for each product, so what limits a kernel is how often a loaded
value is used again before it is dropped, not the products. A program computes R consecutive rows of results, each as
a tile of lanes that lives in registers. It loads each row of the source once for every column of the kernel and adds
it to all the results that use it: with K kernel rows a value serves up to min(R, K) products instead of one.
The lanes of a tile are neighbours in memory: columns of an image (NCHW) or channels (channels_last).

A tile is [BM, BL]. With CHANNEL_LANES, BM items run over (batch, depth, row group, column) and BL over channels;
without, BM items run over (batch, channel, depth, row group) and BL over columns. Nothing is staged in shared
memory: neighbouring columns come from the L1 cache.

This is the way of what `patches` and `channel_patches` do not take: large kernels, several output channels per channel
in channels_last, and columns that a stride or the alignment of rows keeps from being loaded together. See `geometry`
for the two directions and for phases. Limits: R, BM * BL and the number of kernel positions that are unrolled bound the
registers; `tiles` chooses them, and larger kernels run through the loops around the unrolled part.
"""

# ruff: noqa: N803, N806, RUF005, SIM108
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

#: Sizes that must not select another compiled kernel. Columns carry one of them on purpose (pads, zero): if the
#: compiler knew which columns are aligned, it would give every load a layout of its own and shuffle between them.
UNSPECIALIZED = (
    *("batch", "depth", "height", "width", "src_depth", "src_height", "src_width"),
    *("pad_d", "pad_h", "pad_w", "zero", "parts"),
)


@triton.jit
def first_tap(
    phase, pad, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, TAP_STRIDE: tl.constexpr,
    ADJOINT: tl.constexpr,
):  # fmt: skip
    """First kernel position that results of a phase read, and where in the source the result 0 reads it."""
    if ADJOINT:
        first = phase * 0 + KERNEL  # no kernel position
        for back in range(TAP_STRIDE):
            k = TAP_STRIDE - 1 - back
            first = tl.where((phase + pad - k * DILATION) % STRIDE == 0, k, first)
        offset = (phase + pad - first * DILATION) // STRIDE
    else:
        first = phase * 0
        offset = first - pad
    return first, offset


@triton.jit
def within(index, size):
    """0 <= index < size; in one comparison where that is cheap, for a negative index is a large unsigned one."""
    if index.dtype == tl.int32:
        return index.to(tl.uint32, bitcast=True) < size.to(tl.uint32)
    else:
        return (index >= 0) & (index < size)


@triton.jit
def mask_of(condition):
    """The same condition: where a scalar meets a tile, Triton's interpreter holds integers until they are compared."""
    return condition != 0


@triton.jit
def place_tile(
    block, inner, channels, depths, groups, columns, BM: tl.constexpr, BL: tl.constexpr,
    CHANNEL_LANES: tl.constexpr, OVER_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Batch, channel, depth, row group and column of a tile's lanes; without OVER_CHANNELS the channel is not in it."""
    lane = inner * BL + tl.arange(0, BL)[None, :]
    if BM == 1:
        item = block
    else:
        item = block * BM + tl.arange(0, BM)[:, None]
    if CHANNEL_LANES:
        c = lane
        w = item % columns
        item = item // columns
    else:
        c = item * 0
        w = lane
    group = item % groups
    item = item // groups
    d = item % depths
    n = item // depths
    if OVER_CHANNELS and not CHANNEL_LANES:
        c = n % channels
        n = n // channels
    return n, c, d, group, w


@triton.jit
def add_column(
    acc, ptrs, row, row_stride, rows, ok, weight, weight_stride, weight_ok, kh, KH: tl.constexpr,
    ACC: tl.constexpr, R: tl.constexpr, TAPS: tl.constexpr, SRC_STEP: tl.constexpr, TAP_STEP: tl.constexpr,
    TAP_STRIDE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """acc[j] += sum over t of source[row + j * SRC_STEP + t * TAP_STEP] * weight[kh + t * TAP_STRIDE].

    ``ptrs`` stand at the source's row ``row``, in the right column.
    """
    LOW: tl.constexpr = (TAPS - 1) * TAP_STEP if TAP_STEP < 0 else 0
    HIGH: tl.constexpr = (R - 1) * SRC_STEP + ((TAPS - 1) * TAP_STEP if TAP_STEP > 0 else 0)
    for i in tl.static_range(LOW, HIGH + 1):
        x = tl.load(ptrs + i * row_stride, mask=mask_of(ok & within(row + i, rows)), other=0.0).to(ACC)
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
    return acc


@triton.jit
def accumulate(
    acc, n, c, d, group, w, ok, src, weight, channels, src_depth, src_height, src_width, src_n, src_c, src_d,
    src_h, src_w, weight_c, weight_k, kd0, d0, kh0, h0, kw0, w0, KERNEL: tl.constexpr, TAPS: tl.constexpr,
    TAP_STRIDE: tl.constexpr, SRC_STEP: tl.constexpr, TAP_STEP: tl.constexpr, ADJOINT: tl.constexpr,
    MULTIPLIER: tl.constexpr, ACC: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, CHECK_H: tl.constexpr,
):  # fmt: skip
    """All the taps of a tile, chunk after chunk of unrolled kernel positions."""
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    TAPS_D: tl.constexpr = TAPS[0]
    TAPS_H: tl.constexpr = TAPS[1]
    TAPS_W: tl.constexpr = TAPS[2]
    MODULATED: tl.constexpr = MULTIPLIER if ADJOINT else 1
    # A weight that differs between the rows of a tile gets the tile's shape, and with it the layout of the other loads.
    spread = tl.zeros((BM, BL), tl.int32) if BM > 1 else 0
    for m in range(MODULATED):
        if ADJOINT:
            cs = c * MULTIPLIER + m
            cw = cs
        else:
            cs = c // MULTIPLIER
            cw = c
        # What a loop adds to this pointer is the same for all lanes: an offset in the load instruction at best.
        base = src + n * src_n + cs * src_c + (w * SRC_STEP[2] + w0) * src_w
        weights = weight + cw * weight_c + spread
        for td in range(TAPS_D):
            kd = kd0 + td * TAP_STRIDE[0]
            ds = d * SRC_STEP[0] + d0 + td * TAP_STEP[0]
            in_depth = within(ds, src_depth) & (kd < KD)
            for th in range(0, TAPS_H, TH):
                row = group * (R * SRC_STEP[1]) + h0 + th * TAP_STEP[1]
                rows = base + ds * src_d + row * src_h
                for tw0 in range(0, TAPS_W, TW):
                    for t in tl.static_range(TW):
                        tw = tw0 + t
                        kw = kw0 + tw * TAP_STRIDE[2]
                        ws = w * SRC_STEP[2] + w0 + tw * TAP_STEP[2]
                        in_kernel = (kw < KW) & (kd < KD)
                        acc = add_column(
                            acc,
                            rows + tw * TAP_STEP[2] * src_w,
                            row,
                            src_h,
                            src_height,
                            ok & in_depth & in_kernel & within(ws, src_width),
                            weights + (kd * (KH * KW) + kw) * weight_k,
                            KW * weight_k,
                            (c < channels) & in_kernel,
                            kh0 + th * TAP_STRIDE[1],
                            KH,
                            ACC,
                            R,
                            TH,
                            SRC_STEP[1],
                            TAP_STEP[1],
                            TAP_STRIDE[1],
                            CHECK_H,
                        )
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def correlate(
    src, weight, bias, out, batch, channels, depth, height, width, src_depth, src_height, src_width, src_n,
    src_c, src_d, src_h, src_w, out_n, out_c, out_d, out_h, out_w, weight_c, weight_k, pad_d, pad_h, pad_w,
    zero, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PHASES: tl.constexpr,
    TAPS: tl.constexpr, TAP_STRIDE: tl.constexpr, SRC_STEP: tl.constexpr, TAP_STEP: tl.constexpr,
    ADJOINT: tl.constexpr, MULTIPLIER: tl.constexpr, CHANNEL_LANES: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr,
):  # fmt: skip
    """out[n, c, q] = bias[c] + sum over taps of source * weight, for R rows of a [BM, BL] tile.

    The host launches phases x (column blocks or channel blocks) x item blocks programs, in this order from the fastest.
    """
    # Triton takes a tuple of constants as an argument, but wants its elements as constants of their own.
    PD: tl.constexpr = PHASES[0]
    PH: tl.constexpr = PHASES[1]
    PW: tl.constexpr = PHASES[2]
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    TAPS_H: tl.constexpr = TAPS[1]
    # Kernel positions may be visited that do not exist: in phases that have fewer of them, in the last of several
    # unrolled chunks.
    CHECK_H: tl.constexpr = (ADJOINT and STRIDE[1] > 1) or TAPS_H % TH != 0

    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    phase_w = pid % PW
    phase_h = pid // PW % PH
    phase_d = pid // (PW * PH) % PD
    pid = pid // (PW * PH * PD)
    depths = (depth + PD - 1) // PD
    groups = ((height + PH - 1) // PH + R - 1) // R
    columns = (width + PW - 1) // PW
    inner = (channels + BL - 1) // BL if CHANNEL_LANES else (columns + BL - 1) // BL
    n, c, d, group, w = place_tile(
        pid // inner, pid % inner, channels, depths, groups, columns, BM, BL, CHANNEL_LANES, True
    )

    kd0, d0 = first_tap(phase_d, pad_d, KD, STRIDE[0], DILATION[0], TAP_STRIDE[0], ADJOINT)
    kh0, h0 = first_tap(phase_h, pad_h, KH, STRIDE[1], DILATION[1], TAP_STRIDE[1], ADJOINT)
    kw0, w0 = first_tap(phase_w, pad_w, KW, STRIDE[2], DILATION[2], TAP_STRIDE[2], ADJOINT)
    out_column = w * PW + phase_w + zero
    ok = (n < batch) & (c < channels) & (out_column < width)

    acc = ()
    for _ in tl.static_range(R):
        acc = acc + (tl.zeros((BM, BL), ACC),)
    acc = accumulate(
        acc, n, c, d, group, w, ok, src, weight, channels, src_depth, src_height, src_width, src_n, src_c, src_d,
        src_h, src_w, weight_c, weight_k, kd0, d0, kh0, h0, kw0, w0, KERNEL, TAPS, TAP_STRIDE, SRC_STEP, TAP_STEP,
        ADJOINT, MULTIPLIER, ACC, R, BM, BL, TH, TW, CHECK_H,
    )  # fmt: skip

    target = out + n * out_n + c * out_c + (d * PD + phase_d) * out_d + out_column * out_w
    ok = ok & (d * PD + phase_d < depth)
    if HAS_BIAS:
        spread = tl.zeros((BM, BL), tl.int32) if BM > 1 else 0
        added = tl.load(bias + c + spread, mask=mask_of(c < channels), other=0.0).to(ACC)
    for j in tl.static_range(R):
        h = (group * R + j) * PH + phase_h
        result = acc[j]
        if HAS_BIAS:
            result = result + added
        tl.store(target + h * out_h, result.to(out.dtype.element_ty), mask=mask_of(ok & (h < height)))
