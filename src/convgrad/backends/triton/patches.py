"""Results of a sliding sum in patches: `forward` and `grad_input` where columns are neighbours in memory.

The idea. A thread computes a patch of R rows and V columns, V values that one instruction stores (16 bytes where the
rows' alignment allows it). For each row of the source it loads the vectors of U values that the patch reads, takes
them apart in registers, and adds every product that a value takes part in. So a value is loaded, masked and converted
once for all of its up to KH * KW products, and a mask covers a vector. Vectors beside the patch's own come from L1.

Where a value goes is known when the kernel is compiled: strides, dilation and padding are constants. With a stride,
`grad_input` needs no phases: a patch holds all of them.

WHOLE rows: where the alignment allows one value or two and rows are short, a patch is as wide as a row. The threads of
a warp load neighbouring values, in tiles [B, U] whose rows are patches, and `unpack` has Triton exchange them so that
each thread holds rows of its own: padding beside the image and, with all rows, above it is then known to the compiler.

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


#: WHOLE of patches that are not as wide as a row; see `correlate_patches`.
NARROW = tl.constexpr((0, 0, 0, 0))


@triton.constexpr_function
def kernel_row(r, j, KH, SH, DH, PH, ADJOINT):
    """The row of the kernel through which row j of a patch reads row r of the source, or -1."""
    distance = j + PH - r * SH if ADJOINT else r + PH - j * SH
    return distance // DH if distance % DH == 0 and 0 <= distance < KH * DH else -1


@triton.constexpr_function
def first_read(K, S, D, P, ADJOINT, sources=0):
    """The first position of the source that a patch reads in one dimension, from where its own would begin.

    Args:
        sources: of all that there are, or 0 where a patch may lie anywhere.
    """
    first = -(((K - 1) * D - P) // S) if ADJOINT else -P
    return max(first, 0) if sources else first


@triton.constexpr_function
def last_read(results, K, S, D, P, ADJOINT, sources=0):
    """The last one, of a patch of so many results."""
    last = (results - 1 + P) // S if ADJOINT else (results - 1) * S + (K - 1) * D - P
    return min(last, sources - 1) if sources else last


@triton.constexpr_function
def reads(v, kw, SW, DW, PW, ADJOINT, results, sources):
    """Whether column v of a patch reads the source at all through column kw of the kernel.

    Args:
        results, sources: columns of a whole row, where a patch is as wide, or 0.
    """
    if ADJOINT and (v + PW - kw * DW) % SW != 0:
        return False
    at = (v + PW - kw * DW) // SW if ADJOINT else v * SW + kw * DW - PW
    return not results or (v < results and 0 <= at < sources)


@triton.constexpr_function
def column(v, kw, SW, DW, PW, ADJOINT):
    """The column of the source that column v of a patch then reads."""
    return (v + PW - kw * DW) // SW if ADJOINT else v * SW + kw * DW - PW


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
def load_vectors(
    ptrs, vector, vectors, ok, U: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LENGTH: tl.constexpr
):
    """A row from its vector ``vector + FIRST`` to ``vector + LAST``, each [B, U]; what lies outside is zero.

    Args:
        LENGTH: of a row that is taken as one vector, or 0.
    """
    found = ()
    for u in tl.static_range(FIRST, LAST + 1):
        at = ptrs[:, None] + (u * U + tl.arange(0, U))[None, :]
        if LENGTH:
            mask = mask_of(ok)[:, None] & (tl.arange(0, U) < LENGTH)[None, :]
        else:
            mask = mask_of(ok & within(vector + u, vectors))[:, None]
        found = found + (tl.load(at, mask=mask, other=0.0),)
    return found


@triton.jit
def load_row(
    plane, r: tl.constexpr, row, stride, rows, vector, vectors, src_vectors, ok, B: tl.constexpr, U: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, STEP_W: tl.constexpr, SEQUENCE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The vectors of row ``r`` of the source, counted from a patch's row ``row``."""
    if SEQUENCE:
        ptrs, at = plane + r * (B * STEP_W * U), (vector + r * B) * STEP_W
        inside = ok & (vector + r * B < vectors)
    else:
        ptrs, at = plane + r * stride, vector * STEP_W
        inside = ok
        if WHOLE[2] == 0:
            inside = ok & within(row + r, rows)
    return load_vectors(ptrs, at, src_vectors, inside, U, FIRST, LAST, WHOLE[1])


@triton.jit
def opened(vectors, ACC: tl.constexpr, B: tl.constexpr, U: tl.constexpr):
    """The values of a row, each [B]."""
    found = ()
    for u in tl.static_range(len(vectors)):
        values = unpack(vectors[u], B, U)
        for i in tl.static_range(U):
            found = found + (values[i].to(ACC),)
    return found


@triton.jit
def store_row(ptrs, values, ok, B: tl.constexpr, V: tl.constexpr, LENGTH: tl.constexpr):
    """Store V columns, or the LENGTH of a row, in the type that the pointers point to."""
    cast = ()
    for i in tl.static_range(V):
        cast = cast + (values[i].to(ptrs.dtype.element_ty),)
    mask = mask_of(ok)[:, None]
    if LENGTH:
        mask = mask & (tl.arange(0, V) < LENGTH)[None, :]
    tl.store(ptrs[:, None] + tl.arange(0, V)[None, :], pack(cast, B, V), mask=mask)


@triton.jit
def place_patches(lane, vectors, groups, depths, WHOLE: tl.constexpr, DEEP: tl.constexpr):
    """Vector, row group, depth of numbered patches, and what is left of the number."""
    vector = lane * 0
    group = vector
    if WHOLE[0] == 0:
        vector = lane % vectors
        lane = lane // vectors
    if WHOLE[3] > 1:  # a constant, which needs no division
        group = lane % WHOLE[3]
        lane = lane // WHOLE[3]
    elif WHOLE[3] == 0:
        group = lane % groups
        lane = lane // groups
    d = lane * 0
    if WHOLE[0] == 0 or DEEP:
        d = lane % depths
        lane = lane // depths
    return vector, group, d, lane


@triton.jit
def add_row(
    acc, x, w, r: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ADJOINT: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, START: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add all products of row ``r`` of the source, whose values begin at column START, to a patch's results."""
    new = ()
    for j in tl.static_range(R):
        for v in tl.static_range(V):
            total = acc[j * V + v]
            if kernel_row(r, j, KH, SH, DH, PH, ADJOINT) >= 0:
                for kw in tl.static_range(KW):
                    if reads(v, kw, SW, DW, PW, ADJOINT, WHOLE[0], WHOLE[1]):
                        value = x[column(v, kw, SW, DW, PW, ADJOINT) - START]
                        total += value * w[kernel_row(r, j, KH, SH, DH, PH, ADJOINT) * KW + kw]
            new = new + (total,)
    return new


@triton.jit(do_not_specialize=[name for name in UNSPECIALIZED if name != "parts" and "centre" not in name])
def correlate_patches(
    src, weight, bias, out, batch, channels, depth, height, vectors, src_depth, src_height, src_vectors, src_n,
    src_c, src_d, src_h, out_n, out_c, out_d, out_h, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, PAD: tl.constexpr, ADJOINT: tl.constexpr, MULTIPLIER: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, HAS_BIAS: tl.constexpr, SEQUENCE: tl.constexpr, WHOLE: tl.constexpr, UNITS: tl.constexpr,
    AHEAD: tl.constexpr, DEEP: tl.constexpr, FULL: tl.constexpr, DENSE: tl.constexpr, R: tl.constexpr,
    V: tl.constexpr, U: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[n, c, q] = bias[c] + sum over taps of source * weight.

    Strides of the source and of the result are given in UNITS of values, so that the compiler knows what is aligned:
    vectors of U and of V, but where a patch is as wide as a row. Then WHOLE has the columns of a result's row, those of
    a source's row, the source's rows where a patch has them all, and the patches of a plane; and zeros where not. Its
    rows are loaded AHEAD of use; FULL: every lane has a patch; DENSE: rows and planes lie one behind the other.
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
        lane = pid * B + tl.arange(0, B)
        vector, group, d, image = place_patches(lane, vectors, (height + R - 1) // R, depth, WHOLE, DEEP)
        n = image // channels
        c = image % channels
        ok = tl.full((B,), 1, tl.int1) if FULL else n < batch
    if WIDE:
        n, c, d, group = n.to(tl.int64), c.to(tl.int64), d.to(tl.int64), group.to(tl.int64)
        src_h, out_h = src_h.to(tl.int64), out_h.to(tl.int64)
        if DENSE:
            image = image.to(tl.int64)
    row = group * STEP_H
    src_pitch = WHOLE[1] if DENSE else src_h * UNITS[0]
    out_pitch = WHOLE[0] if DENSE else out_h * UNITS[1]

    acc = ()
    for _ in tl.static_range(R * V):
        acc = acc + (tl.zeros((B,), ACC),)
    for m in range(MODULATED):
        cs = c * MULTIPLIER + m if ADJOINT else c // MULTIPLIER
        weights = weight + (cs if ADJOINT else c) * (KD * KH * KW)
        if DENSE and MULTIPLIER == 1:
            base = src + image * src_c * UNITS[0] + row * src_pitch
        else:
            base = src + (n * src_n + cs * src_c + row * src_h + vector * STEP_W) * UNITS[0]
        for kd in range(KD):
            if ADJOINT and (WHOLE[0] == 0 or DEEP):
                ds = (d + PAD[0] - kd * DILATION[0]) // SD
                there = ok & within(ds, src_depth) & (ds * SD == d + PAD[0] - kd * DILATION[0])
            else:
                ds = d * SD + kd * DILATION[0] - PAD[0]
                there = ok & within(ds, src_depth) if WHOLE[0] == 0 or DEEP else ok
            w = ()
            for k in tl.static_range(KH * KW):
                w = w + (tl.load(weights + (kd * (KH * KW) + k), mask=mask_of(ok), other=0.0).to(ACC),)
            plane = base + ds * src_d * UNITS[0]
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
                    acc = add_row(acc, x, w, r - AHEAD, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT, R, V, FIRST * U, WHOLE)

    if HAS_BIAS:
        added = tl.load(bias + c, mask=mask_of(ok), other=0.0).to(ACC)
        new = ()
        for i in tl.static_range(R * V):
            new = new + (acc[i] + added,)
        acc = new
    if DENSE:
        target = out + (image * out_c + d * out_d) * UNITS[1] + group * (R * WHOLE[0])
    else:
        target = out + (n * out_n + c * out_c + d * out_d + group * R * out_h + vector) * UNITS[1]
    for j in tl.static_range(R):
        values = ()
        for v in tl.static_range(V):
            values = values + (acc[j * V + v],)
        if SEQUENCE:
            store_row(target + j * (B * V), values, ok & (vector + j * B < vectors), B, V, WHOLE[0])
        else:
            there = ok if WHOLE[2] else ok & (group * R + j < height)
            store_row(target + j * out_pitch, values, there, B, V, WHOLE[0])
