"""Large depthwise kernels on the tensor cores, as products with banded matrices.

The idea. One row k of a kernel, slid along rows of a source, is a product with a banded (Toeplitz) matrix:

    out[m, w] = sum over v of source[m, v] * band[v, w],   band[v, w] = weight[k, (v - w * stride + low) / dilation]

where m runs over rows of results of one channel, and the band is zero outside the kernel. So a tile of results is the
sum over kernel rows of [rows, columns of the source] @ band: matrix products for the tensor cores, at the price of the
band's zeros. The band is gathered from the weight, which lies in the L1 cache, once for all rows of the tile; a tile
has rows of several images, so that few of them meet the padding above and below. Columns of the source are taken in
blocks that begin at multiples of their length: their loads are as wide as the rows' alignment allows, and columns of
padding are never visited. `grad_input` is the same with the transposed band; a stride along width only thins the band,
one along height has its phases, as in `kernels`.

``grad_weight`` is a product without a band: ``P[v, w] = sum over m of source[m, v] * centre[m, w]``, for several kernel
rows at once. Its diagonals, where v - w * stride + low = k * dilation, are the weights' gradients: they are moved into
rows by a gather and summed. Shares of the sum over m are added by `grad_weight.add_shares` in a fixed order.

What is not finite. A NaN or an infinity in the source would meet the band's zeros and spread over its row. It
leaves no finite sum there: a tile of results that holds any is computed again, product by product.

Limits: rows of neighbouring columns (NCHW); float32, as TF32, as three TF32 products, or exactly where a chip has such
products; float16, bfloat16. A sequence has one row an image: its tiles are as low as its batch.
"""

# ruff: noqa: N803, N806, PLR0915, SIM108
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

from .kernels import first_tap, mask_of, within

#: Sizes that must not select another compiled kernel. What loads may know of alignment is in ALIGN: rows and planes
#: begin at multiples of it, and a row's length is one.
UNSPECIALIZED = (
    *("batch", "channels", "depth", "height", "src_depth", "src_height", "src_columns"),
    *("src_n", "src_c", "src_d", "src_h", "centre_n", "centre_c", "centre_d", "centre_h"),
    *("out_n", "out_c", "out_d", "out_h", "columns", "pad_d", "pad_h", "pad_w", "parts"),
)


@triton.jit
def meeting(first, last, rows, TAPS: tl.constexpr, TAP_STEP: tl.constexpr):
    """The taps [low, high) with which rows that read from ``first`` to ``last`` with tap 0 meet [0, rows)."""
    if TAP_STEP > 0:
        low = (tl.maximum(-last, 0) + TAP_STEP - 1) // TAP_STEP
        high = (tl.maximum(rows - 1 - first, -TAP_STEP) + TAP_STEP) // TAP_STEP
    else:
        low = (tl.maximum(first - rows + 1, 0) - TAP_STEP - 1) // -TAP_STEP
        high = (tl.maximum(last, TAP_STEP) - TAP_STEP) // -TAP_STEP
    return low, tl.minimum(high, TAPS)


@triton.jit
def band_index(
    v, w, pad, columns, KW: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, ADJOINT: tl.constexpr
):
    """Which kernel column joins the source's column v with the result's column w, and whether one does."""
    if ADJOINT:
        distance = w + pad - v * STRIDE
    else:
        distance = v + pad - w * STRIDE
    k = distance // DILATION
    return k, (distance >= 0) & (distance % DILATION == 0) & (k < KW) & (v < columns)


@triton.jit
def batch_and_depth(image, depths, DEEP: tl.constexpr):
    """An image is one depth of one element of the batch."""
    if DEEP:
        return image // depths, image % depths
    else:
        return image, image * 0


@triton.jit
def one_by_one(
    src, row, row_ok, w0, w, weight, td_rows, kd, kh0, low, high, pad_w, rows, columns, src_h, KH: tl.constexpr,
    KW: tl.constexpr, TAP_STRIDE: tl.constexpr, TAP_STEP: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, ADJOINT: tl.constexpr,
):  # fmt: skip
    """The products of a tile and of one kernel plane without a band: what is not finite stays with its readers.

    A rare way, which must not take more registers than the other: it has no pipeline, and how many kernel columns it
    visits is known when it runs. LLVM for AMD would unroll a fixed number of them, and keep the addresses of all.
    """
    acc = tl.zeros((row.shape[0], w.shape[1]), tl.float32)
    last = w0 + w.shape[1] - 1
    if ADJOINT:
        left, right = meeting(w0 + pad_w, last + pad_w, columns * STRIDE, KW, -DILATION)
    else:
        left, right = meeting(w0 * STRIDE - pad_w, last * STRIDE - pad_w, columns, KW, DILATION)
    for t in tl.range(low, high, num_stages=1):
        kh = kh0 + t * TAP_STRIDE
        at = row + t * TAP_STEP
        ok = row_ok & within(at, rows) & (kh < KH)
        for kw in tl.range(left, right, num_stages=1):
            if ADJOINT:
                distance = w + pad_w - kw * DILATION
                v = distance // STRIDE
                inside = (distance >= 0) & (distance % STRIDE == 0) & (v < columns)
            else:
                v = w * STRIDE + kw * DILATION - pad_w
                inside = within(v, columns)
            x = tl.load(src + td_rows + at * src_h + v, mask=mask_of(ok & inside), other=0.0).to(tl.float32)
            k = tl.load(weight + (kd * KH + kh) * KW + kw, mask=mask_of(kh < KH), other=0.0).to(tl.float32)
            acc += tl.where(mask_of(ok & inside), x * k, 0.0)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def correlate(
    src, weight, bias, out, batch, channels, depth, height, src_depth, src_height, src_columns, src_n, src_c,
    src_d, src_h, out_n, out_c, out_d, out_h, columns, pad_d, pad_h, pad_w, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, PHASES: tl.constexpr, TAPS: tl.constexpr,
    TAP_STRIDE: tl.constexpr, SRC_STEP: tl.constexpr, TAP_STEP: tl.constexpr, ADJOINT: tl.constexpr,
    MULTIPLIER: tl.constexpr, WIDE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEEP: tl.constexpr, SRC_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr, J: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """out[n, c, q] = bias[c] + sum over taps of source * weight, for a tile of BN images x R rows x BW columns.

    The host launches column blocks x row blocks x image blocks x phases x channels programs, in this order from the
    fastest. An image is one depth of one element of the batch. Strides and lengths of rows come divided by ALIGN.
    """
    PD: tl.constexpr = PHASES[0]
    PH: tl.constexpr = PHASES[1]
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    TAPS_D: tl.constexpr = TAPS[0]
    TAPS_H: tl.constexpr = TAPS[1]
    MODULATED: tl.constexpr = MULTIPLIER if ADJOINT else 1
    # Kernel rows may be visited that do not exist: the last of several at a time, or in phases that have fewer.
    CHECK: tl.constexpr = J > 1 or (ADJOINT and (STRIDE[0] > 1 or STRIDE[1] > 1))

    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    depths = (depth + PD - 1) // PD
    groups = ((height + PH - 1) // PH + R - 1) // R
    blocks = (batch * depths + BN - 1) // BN
    width = columns * OUT_ALIGN
    across = (width + BW - 1) // BW
    w0 = (pid % across).to(tl.int32) * BW
    pid = pid // across
    q0 = (pid % groups).to(tl.int32) * R
    pid = pid // groups
    block = pid % blocks
    pid = pid // blocks
    phase_h = (pid % PH).to(tl.int32)
    phase_d = (pid // PH % PD).to(tl.int32)
    c = pid // (PH * PD)

    item = tl.arange(0, BN * R)[:, None]
    image = block * BN + item // R
    n, d = batch_and_depth(image, depths, DEEP)
    q = q0 + item % R
    kd0, d0 = first_tap(phase_d, pad_d, KD, STRIDE[0], DILATION[0], TAP_STRIDE[0], ADJOINT)
    kh0, h0 = first_tap(phase_h, pad_h, KH, STRIDE[1], DILATION[1], TAP_STRIDE[1], ADJOINT)
    last = tl.minimum(q0 + R, (height - phase_h + PH - 1) // PH) - 1
    low, high = meeting(q0 * SRC_STEP[1] + h0, last * SRC_STEP[1] + h0, src_height, TAPS_H, TAP_STEP[1])
    row = q * SRC_STEP[1] + h0
    row_ok = (n < batch) & (d * PD + phase_d < depth) & (q * PH + phase_h < height)

    src_width = src_columns * SRC_ALIGN
    stride_h = src_h * SRC_ALIGN
    w = w0 + tl.arange(0, BW)[None, :]
    if ADJOINT:
        left = (tl.maximum(w0 + pad_w - (KW - 1) * DILATION[2], 0)) // STRIDE[2]
        right = tl.maximum(w0 + BW - 1 + pad_w, -STRIDE[2]) // STRIDE[2] + 1
    else:
        left = w0 * STRIDE[2] - pad_w
        right = (w0 + BW - 1) * STRIDE[2] - pad_w + (KW - 1) * DILATION[2] + 1
    left = tl.maximum(left, 0) // BV * BV
    right = tl.minimum(right, src_width)
    tap = tl.arange(0, J * BV) // BV
    column = tl.arange(0, J * BV) % BV

    acc = tl.zeros((BN * R, BW), tl.float32)
    for m in range(MODULATED):
        cs = c * MULTIPLIER + m if ADJOINT else c // MULTIPLIER
        cw = cs if ADJOINT else c
        taps = weight + cw * (KD * KH * KW)
        for td in range(TAPS_D):
            kd = kd0 + td * TAP_STRIDE[0]
            ds = d * SRC_STEP[0] + d0 + td * TAP_STEP[0]
            plane = src + (n * src_n + cs * src_c + ds * src_d) * SRC_ALIGN + row * stride_h
            plane_ok = row_ok & within(ds, src_depth) & (kd < KD)
            for v0 in range(left, right, BV):
                v = v0 + column
                k, in_band = band_index(v[:, None], w, pad_w, src_width, KW, STRIDE[2], DILATION[2], ADJOINT)
                band = taps + kd * (KH * KW) + k
                for t0 in range(low, high, J):
                    t = t0 + tap
                    kh = kh0 + t * TAP_STRIDE[1]
                    ok = plane_ok & within(row + (t * TAP_STEP[1])[None, :], src_height) & (v < src_width)[None, :]
                    in_kernel = in_band
                    if CHECK:
                        exists = (t < high) & (kh < KH)
                        ok = ok & exists[None, :]
                        in_kernel = in_band & exists[:, None] & (kd < KD)
                    x = tl.load(plane + (t * (stride_h * TAP_STEP[1]) + v)[None, :], mask=mask_of(ok), other=0.0)
                    b = tl.load(band + (kh * KW)[:, None], mask=mask_of(in_kernel), other=0.0)
                    acc = tl.dot(x.to(OPERAND), b.to(OPERAND), acc, input_precision=PRECISION)

    if tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1)) > 0:
        acc = tl.zeros((BN * R, BW), tl.float32)
        for m in range(MODULATED):
            cs = c * MULTIPLIER + m if ADJOINT else c // MULTIPLIER
            cw = cs if ADJOINT else c
            for td in range(TAPS_D):
                kd = kd0 + td * TAP_STRIDE[0]
                ds = d * SRC_STEP[0] + d0 + td * TAP_STEP[0]
                acc += one_by_one(
                    src, row, row_ok & within(ds, src_depth) & (kd < KD) & (w < width), w0, w,
                    weight + cw * (KD * KH * KW), (n * src_n + cs * src_c + ds * src_d) * SRC_ALIGN, kd, kh0,
                    low, high, pad_w, src_height, src_width, stride_h, KH, KW, TAP_STRIDE[1], TAP_STEP[1], STRIDE[2],
                    DILATION[2], ADJOINT,
                )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + c).to(tl.float32)
    at = (n * out_n + c * out_c + (d * PD + phase_d) * out_d + (q * PH + phase_h) * out_h) * OUT_ALIGN
    tl.store(out + at + w, acc.to(out.dtype.element_ty), mask=mask_of(row_ok & (w < width)))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def correlate_sum(
    src, centre, shares, batch, channels, depth, height, src_depth, src_height, src_columns, src_n, src_c, src_d,
    src_h, centre_n, centre_c, centre_d, centre_h, columns, pad_d, pad_h, pad_w, parts, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, MULTIPLIER: tl.constexpr, WIDE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, DEEP: tl.constexpr, SRC_ALIGN: tl.constexpr,
    CENTRE_ALIGN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, J: tl.constexpr, BV: tl.constexpr,
    BW: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """shares[part, c, k] = a part of the sum over n, q of centre * source, for J rows of the kernel.

    The host launches kernel rows / J x kernel planes x channels x parts programs, in this order from the fastest.
    KP is a power of 2, no less than the kernel's width.
    """
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    CHUNKS: tl.constexpr = (KH + J - 1) // J

    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    kh0 = (pid % CHUNKS).to(tl.int32) * J
    pid = pid // CHUNKS
    kd = (pid % KD).to(tl.int32)
    pid = pid // KD
    c = pid % channels
    part = (pid // channels).to(tl.int32)

    src_width = src_columns * SRC_ALIGN
    width = columns * CENTRE_ALIGN
    tap = tl.arange(0, J * BV) // BV
    column = tl.arange(0, J * BV) % BV
    # Only rows of the centre that some of these kernel rows take to a row of the source.
    first = kh0 * DILATION[1] - pad_h
    begin = (tl.maximum(-first - (J - 1) * DILATION[1], 0) + STRIDE[1] - 1) // STRIDE[1]
    end = tl.minimum((tl.maximum(src_height - 1 - first, -STRIDE[1]) + STRIDE[1]) // STRIDE[1], height)
    groups = (tl.maximum(end - begin, 0) + R - 1) // R
    tiles = groups * ((batch * depth + BN - 1) // BN)
    item = tl.arange(0, BN * R)[:, None]
    kw = tl.arange(0, J * KP)[:, None] % KP
    down = (tap * DILATION[1])[None, :]

    total = tl.zeros((J * KP,), tl.float32)
    for w0 in range(0, width, BW):
        w = w0 + tl.arange(0, BW)[None, :]
        left = tl.maximum(w0 * STRIDE[2] - pad_w, 0) // BV * BV
        right = tl.minimum((w0 + BW - 1) * STRIDE[2] - pad_w + (KW - 1) * DILATION[2] + 1, src_width)
        for v0 in range(left, right, BV):
            v = (v0 + column)[None, :]
            ahead = down * (src_h * SRC_ALIGN) + v
            acc = tl.zeros((J * BV, BW), tl.float32)
            for tile in range(part, tiles, parts):
                n, d = batch_and_depth(tile // groups * BN + item // R, depth, DEEP)
                q = begin + tile % groups * R + item % R
                if WIDE:
                    n = n.to(tl.int64)
                    q = q.to(tl.int64)
                ok = (n < batch) & (q < end)
                near = centre + (n * centre_n + c * centre_c + d * centre_d + q * centre_h) * CENTRE_ALIGN
                g = tl.load(near + w, mask=mask_of(ok & (w < width)), other=0.0)
                ds = d * STRIDE[0] + kd * DILATION[0] - pad_d
                row = q * STRIDE[1] + first
                far = src + (n * src_n + c // MULTIPLIER * src_c + ds * src_d + row * src_h) * SRC_ALIGN
                ok = ok & within(ds, src_depth) & within(row + down, src_height) & (v < src_width)
                x = tl.load(far + ahead, mask=mask_of(ok), other=0.0)
                acc = tl.dot(tl.trans(x.to(OPERAND)), g.to(OPERAND), acc, input_precision=PRECISION)
            # acc[(j, v), w] belongs to the kernel column (v - w * stride + low) / dilation: one row for each.
            source = w * STRIDE[2] + kw * DILATION[2] - pad_w
            inside = (source >= v0) & (source < v0 + BV) & (source < src_width) & (w < width) & (kw < KW)
            index = tl.arange(0, J * KP)[:, None] // KP * BV + tl.where(inside, source - v0, 0)
            total += tl.sum(tl.where(inside, tl.gather(acc, index, 0), 0.0), axis=1)

    at = tl.arange(0, J * KP)
    kh = kh0 + at // KP
    k = at % KP
    share = shares + (part * channels + c) * (KD * KH * KW) + (kd * KH + kh) * KW + k
    tl.store(share, total.to(shares.dtype.element_ty), mask=(kh < KH) & (k < KW))
