"""Parts of `correlate`: what one thread does with its patch of R rows and W columns, of one channel or of V.

A value of a patch is a tile [B], one for each thread, where columns are neighbors in memory, and [B, V] where channels
are. Which value of the source meets which kernel position and which result is known when the kernel is compiled: an
axis is a tuple (kernel, stride, dilation, low padding), and `tap`, `position` and their like compute with it.
"""

# ruff: noqa: N803, N806, RUF005
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false
from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# ---- known when the kernel is compiled -------------------------------------------------------------


@triton.constexpr_function
def tap(r, j, axis, adjoint):
    """The kernel position through which result j of a patch reads position r of the source, or -1."""
    kernel, stride, dilation, low = axis
    distance = j + low - r * stride if adjoint else r + low - j * stride
    return distance // dilation if distance % dilation == 0 and 0 <= distance < kernel * dilation else -1


@triton.constexpr_function
def reads(q, k, axis, adjoint):
    """Whether result q reads anything through kernel position k."""
    _, stride, dilation, low = axis
    return not adjoint or (q + low - k * dilation) % stride == 0


@triton.constexpr_function
def position(q, k, axis, adjoint):
    """The position of the source that it then reads, from where the patch's own would begin."""
    _, stride, dilation, low = axis
    return (q + low - k * dilation) // stride if adjoint else q * stride + k * dilation - low


@triton.constexpr_function
def first_read(axis, adjoint):
    """The first position of the source that a patch reads."""
    kernel, stride, dilation, low = axis
    return -(((kernel - 1) * dilation - low) // stride) if adjoint else -low


@triton.constexpr_function
def last_read(results, axis, adjoint):
    """The last one, of a patch of so many results."""
    kernel, stride, dilation, low = axis
    return (results - 1 + low) // stride if adjoint else (results - 1) * stride + (kernel - 1) * dilation - low


@triton.constexpr_function
def any_read(first, count, results, axis, adjoint):
    """Whether a patch reads one of these positions at all; a dilated kernel leaves some out."""
    kernel, stride, dilation, low = axis
    taps = [(q, k * dilation - low) for q in range(results) for k in range(kernel)]
    read = [(q - k) / stride if adjoint else q * stride + k for q, k in taps]
    return any(at in range(first, first + count) for at in read)


# ---- masks -----------------------------------------------------------------------------------------


@triton.jit
def within(index, size):
    """0 <= index < size; in one comparison where that is cheap, for a negative index is a large unsigned one."""
    if index.dtype == tl.int32:
        return index.to(tl.uint32, bitcast=True) < size.to(tl.uint32)
    else:
        return (index >= 0) & (index < size)


@triton.jit
def mask_of(condition):
    """Return the condition as a tile: Triton's interpreter has plain integers until they are compared with one."""
    if INTERPRETED:
        return condition != 0
    else:
        return condition


@triton.jit
def meets(q, k, size, STRIDE: tl.constexpr, DILATION: tl.constexpr, LOW: tl.constexpr, ADJOINT: tl.constexpr):
    """The position of the source that result q reads through kernel position k, and whether there is one."""
    if ADJOINT:
        distance = q + LOW - k * DILATION
        at = distance // STRIDE
        return at, (distance >= 0) & (at * STRIDE == distance) & (at < size)
    else:
        at = q * STRIDE + k * DILATION - LOW
        return at, (at >= 0) & (at < size)


# ---- values of a thread ----------------------------------------------------------------------------


@triton.jit
def zeros(COUNT: tl.constexpr, B: tl.constexpr, V: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """So many zeros for each thread."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + ((tl.zeros((B, V), tl.float32) if CHANNELS_LAST else tl.zeros((B,), tl.float32)),)
    return found


@triton.jit
def first_plane(n, c, channels, depth, CHANNELS_LAST: tl.constexpr):
    """The number of an image's first plane, of one channel where columns are neighbors."""
    if CHANNELS_LAST:
        return n * depth
    else:
        return (n * channels + c) * depth


@triton.jit
def spoiling(found, w, COUNT: tl.constexpr):
    """Return the result, with NaN where a weight is not finite."""
    for k in tl.static_range(COUNT):
        found += w[k] * 0.0
    return found


# ---- loads and stores ------------------------------------------------------------------------------


@triton.jit
def unpack(x, B: tl.constexpr, V: tl.constexpr):
    """The columns of a tile [B, V], each [B]; a thread then holds a whole row of it."""
    if V == 1:
        return (tl.reshape(x, (B,)),)
    else:
        even, odd = tl.split(tl.reshape(x, (B, V // 2, 2)))
        even, odd = unpack(even, B, V // 2), unpack(odd, B, V // 2)
        columns = ()
        for i in tl.static_range(V // 2):
            columns = columns + (even[i], odd[i])
        return columns


@triton.jit
def halves(x, V: tl.constexpr):
    """Columns joined in pairs, pairs of pairs, and so on: [B, 2, 2, ...]."""
    if V == 2:
        return tl.join(x[0], x[1])
    else:
        even, odd = (), ()
        for i in tl.static_range(V // 2):
            even, odd = even + (x[2 * i],), odd + (x[2 * i + 1],)
        return tl.join(halves(even, V // 2), halves(odd, V // 2))


@triton.jit
def pack(x, B: tl.constexpr, V: tl.constexpr):
    """The inverse of `unpack`."""
    if V == 1:
        return x[0][:, None]
    else:
        return tl.reshape(halves(x, V), (B, V))


@triton.jit
def load_row(
    ptrs, step, at, width, ok, FIRST: tl.constexpr, LAST: tl.constexpr, AXIS: tl.constexpr, ADJOINT: tl.constexpr,
    W: tl.constexpr, CHANNELS_LAST: tl.constexpr, U: tl.constexpr, V: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Columns of a row from the vector of U that holds column ``at + FIRST`` to the one that holds ``at + LAST``.

    ``ptrs`` stand at column ``at``. What lies outside the row is zero; of what the W results of a patch don't read
    nothing is loaded.
    """
    found = ()
    for u in tl.static_range(FIRST // U, LAST // U + 1):
        if any_read(u * U, U, W, AXIS, ADJOINT):
            there = mask_of(ok & within(at + u * U, width))[:, None]
            if CHANNELS_LAST:
                x = tl.load((ptrs + u * step)[:, None] + tl.arange(0, V)[None, :], mask=there, other=0.0)
                found = found + (x.to(tl.float32),)
            else:
                x = tl.load(ptrs[:, None] + (u * U + tl.arange(0, U))[None, :], mask=there, other=0.0)
                columns = unpack(x, B, U)
                for i in tl.static_range(U):
                    found = found + (columns[i].to(tl.float32),)
        else:
            for _ in tl.static_range(U):
                found = found + (0.0,)
    return found


@triton.jit
def store_row(
    ptrs, step, at, width, ok, acc, J: tl.constexpr, W: tl.constexpr, CHANNELS_LAST: tl.constexpr, S: tl.constexpr,
    V: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Store row J of a patch's results, in vectors of S columns or of V channels."""
    for v in tl.static_range(0, W, S):
        there = mask_of(ok & (at + v < width))[:, None]
        if CHANNELS_LAST:
            x = acc[J * W + v].to(ptrs.dtype.element_ty)
            tl.store((ptrs + v * step)[:, None] + tl.arange(0, V)[None, :], x, mask=there)
        else:
            cast = ()
            for i in tl.static_range(S):
                cast = cast + (acc[J * W + v + i].to(ptrs.dtype.element_ty),)
            tl.store(ptrs[:, None] + (v + tl.arange(0, S))[None, :], pack(cast, B, S), mask=there)


@triton.jit
def spread(ptrs, mask, CHANNELS_LAST: tl.constexpr, V: tl.constexpr):
    """Return pointers and masks [B] of each thread's first channel for all of its channels, [B, V]."""
    if CHANNELS_LAST:
        return ptrs[:, None] + tl.arange(0, V)[None, :], mask[:, None]
    else:
        return ptrs, mask


@triton.jit
def load_channel(ptr, c, ok, STEP: tl.constexpr, CHANNELS_LAST: tl.constexpr, V: tl.constexpr):
    """One value of each channel, ``STEP`` from the next one's: a scalar, or [B, V] where channels are neighbors."""
    if CHANNELS_LAST:
        at = ptr + (c[:, None] + tl.arange(0, V)[None, :]) * STEP
        return tl.load(at, mask=mask_of(ok)[:, None], other=0.0).to(tl.float32)
    else:
        return tl.load(ptr + c * STEP).to(tl.float32)


@triton.jit
def load_weights(
    weight, c, ok, first, COUNT: tl.constexpr, STEP: tl.constexpr, CHANNELS_LAST: tl.constexpr, V: tl.constexpr
):
    """The weights of each channel at the kernel positions from ``first``, where they lie in [C, 1, *k]."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (load_channel(weight + first + k, c, ok, STEP, CHANNELS_LAST, V),)
    return found


# ---- products --------------------------------------------------------------------------------------


@triton.jit
def add_products(
    acc, x, w, r: tl.constexpr, START: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KW: tl.constexpr,
    ADJOINT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Add all products of row ``r`` of the source, whose values begin at column START, to a patch's results."""
    new = ()
    for j in tl.static_range(R):
        for v in tl.static_range(W):
            total = acc[j * W + v]
            if tap(r, j, HEIGHT, ADJOINT) >= 0:
                for kw in tl.static_range(KW):
                    if reads(v, kw, WIDTH, ADJOINT):
                        total = tl.fma(
                            x[position(v, kw, WIDTH, ADJOINT) - START], w[tap(r, j, HEIGHT, ADJOINT) * KW + kw], total
                        )
            new = new + (total,)
    return new


@triton.jit
def sum_products(
    sums, bias, x, centre, exist, r: tl.constexpr, START: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, ADJOINT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr,
    BIAS_H: tl.constexpr, BIAS_W: tl.constexpr,
):  # fmt: skip
    """Add all products of row ``r`` of the source and a patch of the centre; of its columns ``exist`` rows are there.

    What one kernel position reads is added to ``bias``, too.
    """
    new = ()
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            total = sums[kh * KW + kw]
            for j in tl.static_range(R):
                if tap(r, j, HEIGHT, ADJOINT) == kh:
                    for v in tl.static_range(W):
                        if reads(v, kw, WIDTH, ADJOINT):
                            value = x[position(v, kw, WIDTH, ADJOINT) - START]
                            if EXACT:
                                total = tl.fma(value, centre[j * W + v], total)
                            else:  # not zero times what may be infinite
                                total += tl.where(j < exist[v], value * centre[j * W + v], 0.0)
                            if kh == BIAS_H and kw == BIAS_W:
                                bias += value
            new = new + (total,)
    return new, bias


@triton.jit
def one_by_one(
    total, src, weight, n, c, d, h, w, ok, step, src_channels, src_depth, src_height, src_width, src_row_step,
    DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OF_OUTPUT: tl.constexpr, ADJOINT: tl.constexpr,
    MULTIPLIER: tl.constexpr, CHANNELS_LAST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Add the products of results to ``total``, each masked, so that nothing that is not finite meets the padding.

    A rare path, which must not take more registers than the other: nothing is unrolled, and there is no pipeline.
    OF_OUTPUT: the source is grad_output; the kernel is flipped where such a sum is not ADJOINT.
    """
    KH: tl.constexpr = HEIGHT[0]
    KW: tl.constexpr = WIDTH[0]
    ELEMENTS: tl.constexpr = DEPTH[0] * KH * KW
    for k in tl.range((MULTIPLIER if OF_OUTPUT else 1) * ELEMENTS, num_stages=1):
        cs = c * MULTIPLIER + k // ELEMENTS if OF_OUTPUT else c // MULTIPLIER
        at = k % ELEMENTS
        tap = ELEMENTS - 1 - at if OF_OUTPUT and not ADJOINT else at
        weights = load_channel(weight + tap, cs if OF_OUTPUT else c, ok, ELEMENTS, CHANNELS_LAST, V)
        ds, in_depth = meets(d, at // (KH * KW), src_depth, DEPTH[1], DEPTH[2], DEPTH[3], ADJOINT)
        hs, in_height = meets(h, at // KW % KH, src_height, HEIGHT[1], HEIGHT[2], HEIGHT[3], ADJOINT)
        ws, in_width = meets(w, at % KW, src_width, WIDTH[1], WIDTH[2], WIDTH[3], ADJOINT)
        plane = first_plane(n, cs, src_channels, src_depth, CHANNELS_LAST) + ds
        ptrs = src + (plane * src_height + hs) * src_row_step + ws * step
        ptrs, there = spread(ptrs, mask_of(ok & in_depth & in_height & in_width), CHANNELS_LAST, V)
        total += tl.where(there, tl.load(ptrs, mask=there, other=0.0).to(tl.float32) * weights, 0.0)
    return total


@triton.jit
def activated(x, given, ACTIVATION: tl.constexpr):
    """SiLU of a result (1), or its derivative there times what is given (2)."""
    s = tl.sigmoid(x)
    if ACTIVATION == 1:
        return x * s
    else:
        return s * (1 + x * (1 - s)) * given
