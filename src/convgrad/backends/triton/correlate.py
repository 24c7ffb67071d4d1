"""All passes of a depthwise convolution by CUDA cores: one kernel, and the second stage of its sums.

The idea. A depthwise convolution does few products for each byte, so what limits a kernel is how often it uses a value
again before dropping it. A thread computes a patch of R rows and W columns: of one channel, in vectors of U loaded and
S stored columns, where columns are neighbors in memory (NCHW, 1-D); of V channels, where channels are
(channels_last). It goes over the rows of the source that the patch reads; each value is loaded, masked and converted
once for all of its up to KH * KW products. Values that threads have in common come from the L1 cache; nothing is
staged in shared memory.

RESULT: ``out = sum over taps of source * weight``, which is forward and grad_input; with an ACTIVATION its SiLU (1), or
the derivative of SiLU there times the centre (2), the gradient of a convolution's result before SiLU. SUM: the patch is
one of the **centre**, and every value of the source is multiplied by each value of the centre that it meets, for one
sum a kernel position, which is grad_weight. Both at once are the sweep of both gradients: with grad_output as the
source and input as the centre the same loads serve both, and grad_bias is the sum of what one kernel position reads
(`Axis.whole_tap`).

A program owns LINE neighboring vectors of channels, whose weights and sums it keeps in registers, and every
``parts``-th of the tiles of its batch and space. The partial sums are written out and added by `add_partials` in a
fixed order: there are no atomics, the same inputs give the same bits.

What is not finite. A value outside the source is loaded as zero, which an infinite weight would make a NaN, and in a
sweep an infinite value of the centre, too. Where there is one (which is rare) the results, or the sums, are computed
again, product by product.

Limits: dense operands in one memory format; all kernel positions of a plane in registers, for a sum those of all
planes; one output channel per input channel in channels_last and in a sweep. `tiles` chooses the patch.
"""

# ruff: noqa: N803, N806, PLR0912, PLR0915, RUF005
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl

from .patches import (
    activated,
    add_products,
    any_read,
    first_plane,
    first_read,
    last_read,
    load_channel,
    load_row,
    load_weights,
    mask_of,
    meets,
    one_by_one,
    spoiling,
    spread,
    store_row,
    sum_products,
    within,
    zeros,
)

#: Sizes that must not select another compiled kernel; `LENGTHS` do where they are 1, and then cost nothing.
SIZES = ("batch", "channels", "columns", "src_depth", "src_height", "src_columns", "parts")
LENGTHS = ("depth", "height")
#: An axis of which each result reads its own position.
ONE = tl.constexpr((1, 1, 1, 0))


@triton.jit
def patch_of(tile, strips, groups, depth, WIDE: tl.constexpr, LINE: tl.constexpr, B: tl.constexpr):
    """Return the image, the plane, and the index in the plane of each lane's patch."""
    item = tile * (B // LINE) + tl.arange(0, B) // LINE
    strip = item % strips
    item = item // strips
    group = item % groups
    item = item // groups
    n = item // depth
    return n.to(tl.int64) if WIDE else n, item % depth, group, strip


@triton.jit
def store_sum(
    ptr, lanes, share, line, c, step, STEP: tl.constexpr, CHANNELS_LAST: tl.constexpr, V: tl.constexpr,
    LINE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Store the sum over a program's lanes for each of its channels, ``STEP`` from the next one's."""
    if CHANNELS_LAST:
        first = (line * LINE + tl.arange(0, LINE)) * V
        total = tl.sum(tl.reshape(lanes, (B // LINE, LINE, V)), axis=0)
        at, there = first[:, None] + tl.arange(0, V)[None, :], mask_of(first < step)[:, None]
        tl.store(ptr + (share + at) * STEP, total.to(ptr.dtype.element_ty), mask=there)
    else:
        tl.store(ptr + (share + c) * STEP, tl.sum(lanes).to(ptr.dtype.element_ty))


@triton.jit
def store_one_by_one(
    out, src, weight, added, centre, n, c, d, h, w, ok, height, width, row_step, step, src_channels, src_depth,
    src_height, src_width, src_row_step, DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ADJOINT: tl.constexpr, MULTIPLIER: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute and store a patch with each product masked, so that no padding is multiplied: slow, and rare."""
    for i in tl.range(R * W, num_stages=1):
        j, v = i // W, i % W
        total = one_by_one(
            added, src, weight, n, c, d, h + j, w + v, ok, step, src_channels, src_depth, src_height, src_width,
            src_row_step, DEPTH, HEIGHT, WIDTH, ADJOINT, ADJOINT, MULTIPLIER, CHANNELS_LAST, V,
        )  # fmt: skip
        moved, there = j * row_step + v * step, mask_of(ok & (h + j < height) & (w + v < width))
        ptrs, there = spread(out + moved, there, CHANNELS_LAST, V)
        if ACTIVATION == 1:
            total = activated(total, 0.0, 1)
        if ACTIVATION == 2:
            given, _there = spread(centre + moved, there, CHANNELS_LAST, V)
            total = activated(total, tl.load(given, mask=there, other=0.0).to(tl.float32), 2)
        tl.store(ptrs, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def sum_one_by_one(
    src, centre, partials, share, line, part, parts, tiles, strips, groups, c, owned, batch, channels, depth, height,
    width, row_step, step, src_depth, src_height, src_width, src_row_step, DEPTH: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, ADJOINT: tl.constexpr, CHANNELS_LAST: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, V: tl.constexpr, LINE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute and store a program's sums with each product masked, as `store_one_by_one` does a patch."""
    KH: tl.constexpr = HEIGHT[0]
    KW: tl.constexpr = WIDTH[0]
    ELEMENTS: tl.constexpr = DEPTH[0] * KH * KW
    for k in tl.range(ELEMENTS, num_stages=1):
        total = zeros(1, B, V, CHANNELS_LAST)[0]
        for tile in tl.range(part, tiles, parts, num_stages=1):
            n, d, group, strip = patch_of(tile, strips, groups, depth, WIDE, LINE, B)
            ds, in_depth = meets(d, k // (KH * KW), src_depth, DEPTH[1], DEPTH[2], DEPTH[3], ADJOINT)
            own = (first_plane(n, c, channels, depth, CHANNELS_LAST) + d) * height
            far = (first_plane(n, c, channels, src_depth, CHANNELS_LAST) + ds) * src_height
            for i in tl.range(R * W, num_stages=1):
                h, w = group * R + i // W, strip * W + i % W
                hs, in_height = meets(h, k // KW % KH, src_height, HEIGHT[1], HEIGHT[2], HEIGHT[3], ADJOINT)
                ws, in_width = meets(w, k % KW, src_width, WIDTH[1], WIDTH[2], WIDTH[3], ADJOINT)
                there = mask_of(owned & (n < batch) & (h < height) & (w < width) & in_depth & in_height & in_width)
                first, second = centre + (own + h) * row_step + w * step, src + (far + hs) * src_row_step + ws * step
                if CHANNELS_LAST:
                    first += c  # where src stands
                    first, _there = spread(first, there, CHANNELS_LAST, V)
                    second, there = spread(second, there, CHANNELS_LAST, V)
                x = tl.load(first, mask=there, other=0.0).to(tl.float32)
                total += x * tl.load(second, mask=there, other=0.0).to(tl.float32)
        store_sum(partials + k, total, share, line, c, step, ELEMENTS, CHANNELS_LAST, V, LINE, B)


@triton.jit
def add_plane(
    acc, sums, bias, w, centre, exist, plane, row_step, step, row, at, src_height, src_width, ok, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, ADJOINT: tl.constexpr, CHANNELS_LAST: tl.constexpr, RESULT: tl.constexpr, SUM: tl.constexpr,
    BIAS_H: tl.constexpr, BIAS_W: tl.constexpr, EXACT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    U: tl.constexpr, V: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """All products of one plane of the source, of which ``plane`` points to the patch's first row and column."""
    KH: tl.constexpr = HEIGHT[0]
    KW: tl.constexpr = WIDTH[0]
    FIRST: tl.constexpr = first_read(WIDTH, ADJOINT)
    LAST: tl.constexpr = last_read(W, WIDTH, ADJOINT)
    START: tl.constexpr = FIRST // U * U
    for r in tl.static_range(first_read(HEIGHT, ADJOINT), last_read(R, HEIGHT, ADJOINT) + 1):
        if any_read(r, 1, R, HEIGHT, ADJOINT):
            there = ok & within(row + r, src_height)
            x = load_row(
                plane + r * row_step, step, at, src_width, there, FIRST, LAST, WIDTH, ADJOINT, W, CHANNELS_LAST, U, V, B
            )
            if RESULT:
                acc = add_products(acc, x, w, r, START, HEIGHT, WIDTH, KW, ADJOINT, R, W)
            if SUM:
                sums, bias = sum_products(
                    sums, bias, x, centre, exist, r, START, HEIGHT, WIDTH, KH, KW, ADJOINT, R, W, EXACT, BIAS_H, BIAS_W
                )
    return acc, sums, bias


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTHS)
def correlate(
    src, centre, weight, bias, out, partials, bias_partials, batch, channels, depth, height, columns, src_depth,
    src_height, src_columns, parts, DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ADJOINT: tl.constexpr, MULTIPLIER: tl.constexpr, CHANNELS_LAST: tl.constexpr, WIDE: tl.constexpr,
    RESULT: tl.constexpr, SUM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BIAS_TAP: tl.constexpr,
    EXACT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, V: tl.constexpr, U: tl.constexpr, S: tl.constexpr,
    LINE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out = bias + sum over taps of source * weight; partials[part, c, k] = a part of the sum of centre * source.

    ``channels``, ``columns`` and ``src_columns`` are counted in vectors of V, S and U: so the compiler knows what is
    aligned. The host launches (lines of channels) x parts programs, in this order from the fastest. EXACT: every row
    and column of every patch exists. BIAS_TAP is the kernel position whose reads are summed, or -1 for none.
    """
    # Triton takes a tuple of constants as an argument, but wants its elements as constants of their own.
    KD: tl.constexpr = DEPTH[0]
    KH: tl.constexpr = HEIGHT[0]
    KW: tl.constexpr = WIDTH[0]
    ELEMENTS: tl.constexpr = KD * KH * KW
    SOURCES: tl.constexpr = MULTIPLIER if ADJOINT else 1  # channels of the source for one of the results
    KEPT: tl.constexpr = SUM or KD * SOURCES == 1  # the weights, from a program's first tile to its last
    # From one patch to the next, in the source.
    STEP_H: tl.constexpr = R // HEIGHT[1] if ADJOINT else R * HEIGHT[1]
    STEP_W: tl.constexpr = W // WIDTH[1] if ADJOINT else W * WIDTH[1]

    width = columns * S
    src_width = src_columns * U
    step = channels * V if CHANNELS_LAST else 1  # between neighboring columns
    lines = (channels + LINE - 1) // LINE
    line = tl.program_id(0) % lines
    part = tl.program_id(0) // lines
    if WIDE:  # it is multiplied by the kernel's elements
        line = line.to(tl.int64)
    lane = tl.arange(0, B)
    if CHANNELS_LAST:
        c = (line * LINE + lane % LINE) * V
        owned = c < step
    else:
        c = line
        owned = lane >= 0
    strips = (width + W - 1) // W
    groups = (height + R - 1) // R
    items = batch * depth * groups * strips
    tiles = (items + B // LINE - 1) // (B // LINE)
    if WIDE:  # before they are multiplied
        width_step, src_width_step = width.to(tl.int64), src_width.to(tl.int64)
        if CHANNELS_LAST:
            step = step.to(tl.int64)
    else:
        width_step, src_width_step = width, src_width
    row_step, src_row_step = width_step * step, src_width_step * step

    src_channels = channels * SOURCES if ADJOINT else channels // MULTIPLIER
    sums = zeros(ELEMENTS if SUM else 0, B, V, CHANNELS_LAST)
    read = zeros(1, B, V, CHANNELS_LAST)[0]
    w = load_weights(weight, c, owned, 0, ELEMENTS if RESULT and KEPT else 0, ELEMENTS, CHANNELS_LAST, V)
    spoiled = spoiling(read, w, ELEMENTS if RESULT and KEPT else 0)
    added = read  # to every result
    if HAS_BIAS:
        added += load_channel(bias, c, owned, 1, CHANNELS_LAST, V)
    if CHANNELS_LAST:
        src += c

    for tile in range(part, tiles, parts):
        n, d, group, strip = patch_of(tile, strips, groups, depth, WIDE, LINE, B)
        ok = owned & (n < batch)
        h0, w0 = group * R, strip * W
        row, at = group * STEP_H, strip * STEP_W
        target = ((first_plane(n, c, channels, depth, CHANNELS_LAST) + d) * height + h0) * row_step + w0 * step
        if CHANNELS_LAST:
            target += c
        acc = zeros(R * W if RESULT else 0, B, V, CHANNELS_LAST)

        if SUM:
            patch, exist, new = (), (), ()
            for v in tl.static_range(W):
                left = tl.where(w0 + v < width, height - h0, 0)
                exist = exist + ((left[:, None] if CHANNELS_LAST else left),)
            for j in tl.static_range(R):
                patch = patch + load_row(
                    centre + target + j * row_step, step, w0, width, ok & (h0 + j < height), 0, W - 1, ONE, False, W,
                    CHANNELS_LAST, S, V, B,
                )  # fmt: skip
            first = first_plane(n, c // MULTIPLIER, src_channels, src_depth, CHANNELS_LAST)
            for kd in tl.static_range(KD):
                ds, in_depth = meets(d, kd, src_depth, DEPTH[1], DEPTH[2], DEPTH[3], ADJOINT)
                some, taps = (), ()
                for k in tl.static_range(KH * KW):
                    some = some + (sums[kd * KH * KW + k],)
                    if RESULT:
                        taps = taps + (w[kd * KH * KW + k],)
                plane = src + ((first + ds) * src_height + row) * src_row_step + at * step
                acc, some, read = add_plane(
                    acc, some, read, taps, patch, exist, plane, src_row_step, step, row, at, src_height, src_width,
                    ok & in_depth, HEIGHT, WIDTH, ADJOINT, CHANNELS_LAST, RESULT, SUM,
                    BIAS_TAP[1] if kd == BIAS_TAP[0] else -1, BIAS_TAP[2], EXACT, R, W, U, V, B,
                )  # fmt: skip
                new = new + some
            sums = new
        else:
            for m in range(SOURCES):
                cs = c * SOURCES + m if ADJOINT else c // MULTIPLIER
                first = first_plane(n, cs, src_channels, src_depth, CHANNELS_LAST)
                for kd in range(KD):
                    taps = w
                    if not KEPT:
                        cw = cs if ADJOINT else c
                        taps = load_weights(weight, cw, owned, kd * (KH * KW), KH * KW, ELEMENTS, CHANNELS_LAST, V)
                        spoiled = spoiling(spoiled, taps, KH * KW)
                    ds, in_depth = meets(d, kd, src_depth, DEPTH[1], DEPTH[2], DEPTH[3], ADJOINT)
                    plane = src + ((first + ds) * src_height + row) * src_row_step + at * step
                    acc, _sums, _read = add_plane(
                        acc, (), read, taps, (), (), plane, src_row_step, step, row, at, src_height, src_width,
                        ok & in_depth, HEIGHT, WIDTH, ADJOINT, CHANNELS_LAST, RESULT, SUM, -1, -1, EXACT, R, W, U, V, B,
                    )  # fmt: skip

        if RESULT:
            if HAS_BIAS:
                new = ()
                for i in tl.static_range(R * W):
                    new = new + (acc[i] + added,)
                acc = new
            if ACTIVATION != 0:
                new, given = (), zeros(W, B, V, CHANNELS_LAST)
                for j in tl.static_range(R):
                    if ACTIVATION == 2:
                        given = load_row(
                            centre + target + j * row_step, step, w0, width, ok & (h0 + j < height), 0, W - 1, ONE,
                            False, W, CHANNELS_LAST, S, V, B,
                        )  # fmt: skip
                    for v in tl.static_range(W):
                        new = new + (activated(acc[j * W + v], given[v], ACTIVATION),)
                acc = new
            for j in tl.static_range(R):
                there = ok & (h0 + j < height)
                store_row(out + target + j * row_step, step, w0, width, there, acc, j, W, CHANNELS_LAST, S, V, B)
            if tl.max(tl.where(spoiled == 0, 0, 1)) > 0:
                tl.debug_barrier()  # other threads store the same elements now
                store_one_by_one(
                    out + target, src, weight, added, centre + target, n, c, d, h0, w0, ok, height, width, row_step,
                    step, src_channels, src_depth, src_height, src_width, src_row_step, DEPTH, HEIGHT, WIDTH, ADJOINT,
                    MULTIPLIER, CHANNELS_LAST, ACTIVATION, R, W, V,
                )  # fmt: skip

    if SUM:
        share = part * (channels * V)
        for k in tl.static_range(ELEMENTS):
            store_sum(partials + k, sums[k], share, line, c, step, ELEMENTS, CHANNELS_LAST, V, LINE, B)
        if BIAS_TAP[1] >= 0:
            store_sum(bias_partials, read, share, line, c, step, 1, CHANNELS_LAST, V, LINE, B)
        if RESULT:
            broken = spoiling(zeros(1, B, V, CHANNELS_LAST)[0], sums, ELEMENTS)
            if tl.max(tl.where(broken == 0, 0, 1)) > 0:
                tl.debug_barrier()  # other threads store the same elements now
                sum_one_by_one(
                    src, centre, partials, share, line, part, parts, tiles, strips, groups, c, owned, batch, channels,
                    depth, height, width, row_step, step, src_depth, src_height, src_width, src_row_step, DEPTH, HEIGHT,
                    WIDTH, ADJOINT, CHANNELS_LAST, WIDE, R, W, V, LINE, B,
                )  # fmt: skip


@triton.jit(do_not_specialize=("parts", "weights", "biases"))
def add_partials(partials, out, bias_partials, bias, parts, weights, biases, BP: tl.constexpr, BN: tl.constexpr):
    """out[i] = sum of partials[part, i] over the parts, in an order that depends on nothing but their number.

    The programs behind those of ``out`` do the same for ``bias``.
    """
    block = tl.program_id(0)
    blocks = (weights + BN - 1) // BN
    count = weights
    if block >= blocks:
        block = block - blocks
        partials, out, count = bias_partials, bias, biases
    at = block * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for first in range(0, parts, BP):
        part = first + tl.arange(0, BP)[:, None]
        mask = (part < parts) & (at < count)[None, :]
        total += tl.sum(tl.load(partials + part * count + at[None, :], mask=mask, other=0.0), axis=0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
