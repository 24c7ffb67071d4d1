"""Large depthwise kernels on the tensor cores, as products with banded matrices.

The idea. One row k of a kernel, slid along rows of a source, is a product with a banded (Toeplitz) matrix:

    out[m, w] = sum over v of source[m, v] * band[v, w],   band[v, w] = weight[k, (v - w * stride + low) / dilation]

where m runs over rows of results of one channel, and the band is zero outside the kernel. So a tile of results is the
sum over kernel rows of [rows, columns of the source] @ band: matrix products for the tensor cores, at the price of the
band's zeros. The band is gathered from the weight, which lies in the L1 cache, once for all rows of the tile; a tile
has rows of several images, so that few of them meet the padding above and below. Columns of the source are taken in
blocks that begin at multiples of their length: their loads are as wide as the length of rows allows, and columns of
padding are never visited. `grad_input` without a stride is the same with the kernel FLIPPED.

``grad_weight`` is a product without a band: ``P[v, w] = sum over m of source[m, v] * centre[m, w]``, for several kernel
rows at once. Its diagonals, where v - w * stride + low = k * dilation, are the weights' gradients: they are moved into
rows by a gather and summed. Partial sums over m are added by `correlate.add_partials` in a fixed order.

What is not finite. A NaN or an infinity in the source would meet the band's zeros and spread over its row, and an
infinite weight the padding's. It leaves no finite sum there: a tile of results that holds any is computed again,
product by product.

Limits: dense rows of neighboring columns (NCHW); float32 as TF32, or exactly where a chip has such products; float16,
bfloat16. A sequence has one row an image: its tiles are as low as its batch.
"""

# ruff: noqa: N803, N806, PLR0915
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl

from .patches import mask_of, one_by_one, within

#: Sizes that must not select another compiled kernel. What loads may know of alignment is in ALIGN.
SIZES = ("batch", "channels", "depth", "height", "columns", "src_depth", "src_height", "src_columns", "parts")


@triton.jit
def meeting(first, last, size, COUNT: tl.constexpr, STEP: tl.constexpr):
    """The taps [low, high) with which positions that read from ``first`` to ``last`` with tap 0 meet [0, size)."""
    low = (tl.maximum(-last, 0) + STEP - 1) // STEP
    high = (tl.maximum(size - 1 - first, -STEP) + STEP) // STEP
    return low, tl.minimum(high, COUNT)


@triton.jit(do_not_specialize=SIZES)
def correlate(
    src, weight, bias, out, batch, channels, depth, height, columns, src_depth, src_height, src_columns,
    DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FLIPPED: tl.constexpr, MULTIPLIER: tl.constexpr,
    WIDE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr,
    SRC_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, J: tl.constexpr,
    BV: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """out[n, c, q] = bias[c] + sum over taps of source * weight, for a tile of BN images x R rows x BW columns.

    The host launches column blocks x row blocks x image blocks x channels programs, in this order from the fastest. An
    image is one depth of one element of the batch. Lengths of rows come divided by ALIGN.
    """
    KD: tl.constexpr = DEPTH[0]
    KH: tl.constexpr = HEIGHT[0]
    KW: tl.constexpr = WIDTH[0]
    SOURCES: tl.constexpr = MULTIPLIER if FLIPPED else 1  # channels of the source for one of the results

    pid = tl.program_id(0)
    groups = (height + R - 1) // R
    blocks = (batch * depth + BN - 1) // BN
    width = columns * OUT_ALIGN
    src_width = src_columns * SRC_ALIGN
    across = (width + BW - 1) // BW
    w0 = pid % across * BW
    pid = pid // across
    q0 = pid % groups * R
    pid = pid // groups
    image = pid % blocks * BN + tl.arange(0, BN * R)[:, None] // R
    c = pid // blocks
    if WIDE:
        image, c = image.to(tl.int64), c.to(tl.int64)
    n, d = image // depth, image % depth
    q = q0 + tl.arange(0, BN * R)[:, None] % R

    last = tl.minimum(q0 + R, height) - 1
    low, high = meeting(q0 * HEIGHT[1] - HEIGHT[3], last * HEIGHT[1] - HEIGHT[3], src_height, KH, HEIGHT[2])
    row = q * HEIGHT[1] - HEIGHT[3]
    row_ok = (n < batch) & (q < height)
    w = w0 + tl.arange(0, BW)[None, :]
    left = tl.maximum(w0 * WIDTH[1] - WIDTH[3], 0) // BV * BV
    right = tl.minimum((w0 + BW - 1) * WIDTH[1] - WIDTH[3] + (KW - 1) * WIDTH[2] + 1, src_width)
    tap = tl.arange(0, J * BV) // BV
    column = tl.arange(0, J * BV) % BV

    acc = tl.zeros((BN * R, BW), tl.float32)
    for m in range(SOURCES):
        cs = c * SOURCES + m if FLIPPED else c // MULTIPLIER
        taps = weight + (cs if FLIPPED else c) * (KD * KH * KW)
        first = (n * (channels * SOURCES if FLIPPED else channels // MULTIPLIER) + cs) * src_depth
        for kd in range(KD):
            ds = d * DEPTH[1] + kd * DEPTH[2] - DEPTH[3]
            plane = src + ((first + ds) * src_height + row) * src_width
            plane_ok = row_ok & (ds >= 0) & (ds < src_depth)
            for v0 in range(left, right, BV):
                v = v0 + column
                distance = v[:, None] + WIDTH[3] - w * WIDTH[1]
                k = distance // WIDTH[2]
                in_band = (distance >= 0) & (k * WIDTH[2] == distance) & (k < KW) & (v < src_width)[:, None]
                for t0 in range(low, high, J):
                    t = t0 + tap
                    exists = t < high
                    ok = (
                        plane_ok
                        & within(row + (t * HEIGHT[2])[None, :], src_height)
                        & (exists & (v < src_width))[None, :]
                    )
                    x = tl.load(plane + (t * (src_width * HEIGHT[2]) + v)[None, :], mask=mask_of(ok), other=0.0)
                    at = (kd * KH + t[:, None]) * KW + k
                    at = KD * KH * KW - 1 - at if FLIPPED else at
                    b = tl.load(taps + at, mask=mask_of(in_band & exists[:, None]), other=0.0)
                    acc = tl.dot(x.to(OPERAND), b.to(OPERAND), acc, input_precision=PRECISION)

    if tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1)) > 0:
        acc = one_by_one(
            tl.zeros((BN * R, BW), tl.float32), src, weight, n, c, d, q, w, row_ok & (w < width), 1,
            channels * SOURCES if FLIPPED else channels // MULTIPLIER, src_depth, src_height, src_width, src_width,
            DEPTH, HEIGHT, WIDTH, FLIPPED, False, MULTIPLIER, False, 1,
        )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + c).to(tl.float32)
    target = out + (((n * channels + c) * depth + d) * height + q) * width
    tl.store(target + w, acc.to(out.dtype.element_ty), mask=mask_of(row_ok & (w < width)))


@triton.jit(do_not_specialize=SIZES)
def correlate_sum(
    src, centre, partials, batch, channels, depth, height, columns, src_depth, src_height, src_columns, parts,
    DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MULTIPLIER: tl.constexpr, WIDE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, SRC_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr, J: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """partials[part, c, k] = a part of the sum over n, q of centre * source, for J rows of the kernel.

    The host launches kernel rows / J x kernel planes x channels x parts programs, in this order from the fastest.
    KP is a power of 2, no less than the kernel's width.
    """
    KD: tl.constexpr = DEPTH[0]
    KH: tl.constexpr = HEIGHT[0]
    KW: tl.constexpr = WIDTH[0]
    CHUNKS: tl.constexpr = (KH + J - 1) // J

    pid = tl.program_id(0)
    kh0 = pid % CHUNKS * J
    pid = pid // CHUNKS
    kd = pid % KD
    pid = pid // KD
    c = pid % channels
    part = pid // channels
    if WIDE:
        c = c.to(tl.int64)

    src_width = src_columns * SRC_ALIGN
    width = columns * OUT_ALIGN
    tap = tl.arange(0, J * BV) // BV
    column = tl.arange(0, J * BV) % BV
    # Only rows of the centre that some of these kernel rows take to a row of the source.
    first = kh0 * HEIGHT[2] - HEIGHT[3]
    begin = (tl.maximum(-first - (J - 1) * HEIGHT[2], 0) + HEIGHT[1] - 1) // HEIGHT[1]
    end = tl.minimum((tl.maximum(src_height - 1 - first, -HEIGHT[1]) + HEIGHT[1]) // HEIGHT[1], height)
    groups = (tl.maximum(end - begin, 0) + R - 1) // R
    tiles = groups * ((batch * depth + BN - 1) // BN)
    item = tl.arange(0, BN * R)[:, None]
    kw = tl.arange(0, J * KP)[:, None] % KP
    down = (tap * HEIGHT[2])[None, :]

    total = tl.zeros((J * KP,), tl.float32)
    for w0 in range(0, width, BW):
        w = w0 + tl.arange(0, BW)[None, :]
        left = tl.maximum(w0 * WIDTH[1] - WIDTH[3], 0) // BV * BV
        right = tl.minimum((w0 + BW - 1) * WIDTH[1] - WIDTH[3] + (KW - 1) * WIDTH[2] + 1, src_width)
        for v0 in range(left, right, BV):
            v = (v0 + column)[None, :]
            acc = tl.zeros((J * BV, BW), tl.float32)
            for tile in range(part, tiles, parts):
                image = tile // groups * BN + item // R
                q = begin + tile % groups * R + item % R
                if WIDE:
                    image = image.to(tl.int64)
                n, d = image // depth, image % depth
                ok = (n < batch) & (q < end)
                near = centre + (((n * channels + c) * depth + d) * height + q) * width
                g = tl.load(near + w, mask=mask_of(ok & (w < width)), other=0.0)
                ds = d * DEPTH[1] + kd * DEPTH[2] - DEPTH[3]
                row = q * HEIGHT[1] + first
                plane = (n * (channels // MULTIPLIER) + c // MULTIPLIER) * src_depth + ds
                far = src + (plane * src_height + row) * src_width
                ok = ok & (ds >= 0) & (ds < src_depth) & within(row + down, src_height) & (v < src_width)
                x = tl.load(far + down * src_width + v, mask=mask_of(ok), other=0.0)
                acc = tl.dot(tl.trans(x.to(OPERAND)), g.to(OPERAND), acc, input_precision=PRECISION)
            # acc[(j, v), w] belongs to the kernel column (v - w * stride + low) / dilation: one row for each.
            source = w * WIDTH[1] + kw * WIDTH[2] - WIDTH[3]
            inside = (source >= v0) & (source < v0 + BV) & (source < src_width) & (w < width) & (kw < KW)
            index = tl.arange(0, J * KP)[:, None] // KP * BV + tl.where(inside, source - v0, 0)
            total += tl.sum(tl.where(inside, tl.gather(acc, index, 0), 0.0), axis=1)

    at = tl.arange(0, J * KP)
    kh = kh0 + at // KP
    k = at % KP
    share = partials + (part * channels + c) * (KD * KH * KW) + (kd * KH + kh) * KW + k
    tl.store(share, total.to(partials.dtype.element_ty), mask=(kh < KH) & (k < KW))
