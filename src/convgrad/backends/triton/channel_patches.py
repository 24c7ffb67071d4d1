"""Results of a sliding sum in patches: `forward` and `grad_input` where channels are neighbours in memory.

The idea. A thread computes a patch of R rows and W columns for V channels, which one instruction loads or stores (16
bytes at most). It goes over the rows of the source that the patch reads; each value of a row is loaded and converted
once for all of its up to KH * KW products, and the weights of the V channels are loaded once for a patch.

As in `patches`, whose way of counting rows and columns this is, strides, dilation and padding are constants of the
compiled kernel, and a patch holds all phases of a `grad_input` with a stride. Rows and columns of the source that are
inside for every patch (INSIDE, counted from the patch's first one) are loaded without a mask, so only the border of a
patch pays for padding. Threads without a patch of their own compute a neighbour's and store nothing.

Lanes are numbered over vectors of channels, however many there are, and then over patches: see `place`.

A sequence of strides (L*C, 1, C) has its positions as rows. TRANSPOSED: its result is contiguous instead, and a thread
stores TOGETHER positions of each of its channels with one instruction.

Limits: `channel_tiles` chooses R, W and V and refuses what would not fit into registers; one output channel per input
channel.
"""

# ruff: noqa: N803, N806, PLR0915, RUF005, SIM108
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

from .kernels import mask_of, within
from .patches import NARROW, add_row, first_read, last_read, place_patches, store_row, unpack

#: Sizes and strides that must not select another compiled kernel: all but these, which are 1 where there is no such
#: dimension and then cost nothing.
LENGTHS = ("depth", "width")
UNSPECIALIZED = (
    *("batch", "vectors", "height", "src_depth", "src_height", "src_width", "period", "parts"),
    *(f"{operand}_{axis}" for operand in ("src", "centre", "out") for axis in "ncdhw"),
)


@triton.constexpr_function
def is_read(position, results, K, S, D, P, ADJOINT):
    """Whether a patch of so many results reads a position of the source at all; a dilated kernel leaves some out."""
    pairs = [(q, k) for q in range(results) for k in range(K)]
    if ADJOINT:
        return any(position * S == q + P - k * D for q, k in pairs)
    return any(position == q * S + k * D - P for q, k in pairs)


@triton.jit
def place(block, tile, vectors, items, period, LINE: tl.constexpr, B: tl.constexpr):
    """Vector of channels and patch of each lane of a program, and whether it is there.

    Of the vectors of ``period`` patches, one patch after the other, a program takes LINE neighbours, and the same ones
    of the next patches: so no lane is idle, and a lane has the same vector in every tile.
    """
    lane = tl.arange(0, B)
    first = block * LINE + lane % LINE
    item = (tile * (B // LINE) + lane // LINE) * period + first // vectors
    return first % vectors, tl.minimum(item, items - 1), item < items


@triton.jit
def load_vector(ptrs, ok, MASKED: tl.constexpr, ACC: tl.constexpr, V: tl.constexpr):
    """V channels of each lane; zero where a masked one is not there."""
    # A bfloat16 is the high half of a float32: pairs are loaded as they lie and taken apart by one instruction a value.
    PAIRS: tl.constexpr = ptrs.dtype.element_ty == tl.bfloat16 and V > 1
    if PAIRS:
        ptrs = ptrs.to(tl.pointer_type(tl.int32), bitcast=True)
    at = ptrs[:, None] + tl.arange(0, V // 2 if PAIRS else V)[None, :]
    if MASKED:
        x = tl.load(at, mask=mask_of(ok)[:, None], other=0)
    else:
        x = tl.load(at)
    if PAIRS:
        low = (x << 16).to(tl.float32, bitcast=True)
        high = (x & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), (ptrs.shape[0], V))
    else:
        return x.to(ACC)


@triton.jit
def load_strip(
    ptrs, step, at, width, ok, MASKED: tl.constexpr, ACC: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, INSIDE: tl.constexpr, W: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, ADJOINT: tl.constexpr,
):  # fmt: skip
    """The columns ``at + FIRST`` to ``at + LAST`` of a row, of which those from 0 to INSIDE are known to be there."""
    found = ()
    for s in tl.static_range(FIRST, LAST + 1):
        if not is_read(s, W, K, S, D, P, ADJOINT):
            found = found + (0,)
        elif s >= 0 and s < INSIDE:
            found = found + (load_vector(ptrs + s * step, ok, MASKED, ACC, V),)
        else:
            found = found + (load_vector(ptrs + s * step, ok & within(at + s, width), True, ACC, V),)
    return found


@triton.jit
def load_weights(ptrs, vectors, FIRST: tl.constexpr, LAST: tl.constexpr, ACC: tl.constexpr, V: tl.constexpr):
    """The weights of each lane's channels at the kernel positions from FIRST to LAST, the latter not included."""
    found = ()
    for k in tl.static_range(FIRST, LAST):
        found = found + (load_vector(ptrs + k * vectors * V, True, False, ACC, V),)
    return found


@triton.jit
def store_patch(
    ptrs, row_step, column_step, values, ok, rows, columns, EXACT: tl.constexpr, EXACT_W: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Store a patch whose channels are neighbours; not EXACT, not EXACT_W: some patches have fewer rows, or columns."""
    for j in tl.static_range(R):
        for v in tl.static_range(W):
            there = ok
            if not EXACT:
                there = there & (j < rows)
            if not EXACT_W:
                there = there & (v < columns)
            at = (ptrs + j * row_step + v * column_step)[:, None] + tl.arange(0, V)[None, :]
            tl.store(at, values[j * W + v].to(ptrs.dtype.element_ty), mask=mask_of(there)[:, None])


@triton.jit
def store_positions(
    ptrs, channel_step, values, ok, rows, R: tl.constexpr, B: tl.constexpr, V: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Store R positions of V channels, some of them together; those of a channel are neighbours."""
    apart = ()
    for j in tl.static_range(R):
        apart = apart + (unpack(values[j], B, V),)
    for v in tl.static_range(V):
        for first in tl.static_range(0, R, TOGETHER):
            some = ()
            for j in tl.static_range(TOGETHER):
                some = some + (apart[first + j][v],)
            store_row(ptrs + v * channel_step + first, some, ok & (first < rows), B, TOGETHER, 0)


@triton.jit(
    do_not_specialize=[name for name in UNSPECIALIZED if name != "parts" and "centre" not in name],
    do_not_specialize_on_alignment=LENGTHS,
)
def correlate_channels(
    src, weight, bias, out, batch, vectors, depth, height, width, src_depth, src_height, src_width, period,
    src_n, src_d, src_h, src_w, out_n, out_c, out_d, out_h, out_w, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, PAD: tl.constexpr, ADJOINT: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
    HAS_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, INSIDE_D: tl.constexpr,
    INSIDE_H: tl.constexpr, INSIDE_W: tl.constexpr, EXACT: tl.constexpr, EXACT_W: tl.constexpr, W: tl.constexpr,
    V: tl.constexpr, TOGETHER: tl.constexpr, LINE: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[n, c, q] = bias[c] + sum over taps of source * weight, for a patch of R rows, W columns, V channels a thread.

    Strides are given in vectors of V values, those of a TRANSPOSED result in vectors of TOGETHER: so the compiler knows
    what is aligned. The host launches (lines of a period) x (patches) programs, in this order from the fastest.
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
    # From one patch to the next.
    STEP_H: tl.constexpr = R // SH if ADJOINT else R * SH
    STEP_W: tl.constexpr = W // SW if ADJOINT else W * SW

    strips = (width + W - 1) // W
    groups = (height + R - 1) // R
    blocks = vectors * period // LINE
    pid = tl.program_id(0)
    vector, item, ok = place(pid % blocks, pid // blocks, vectors, batch * depth * groups * strips, period, LINE, B)
    strip, group, d, n = place_patches(item, strips, groups, depth, NARROW, True)
    if WIDE:
        n, vector, d, group, strip = (
            n.to(tl.int64), vector.to(tl.int64), d.to(tl.int64), group.to(tl.int64), strip.to(tl.int64)
        )  # fmt: skip
        src_h, out_h, src_w, out_w = src_h.to(tl.int64), out_h.to(tl.int64), src_w.to(tl.int64), out_w.to(tl.int64)
        out_c = out_c.to(tl.int64)
    row = group * STEP_H
    left = strip * STEP_W

    acc = ()
    for _ in tl.static_range(R * W):
        acc = acc + (tl.zeros((B, V), ACC),)
    base = src + (n * src_n + row * src_h + left * src_w + vector) * V
    for kd in range(KD):
        if ADJOINT:
            ds = (d + PAD[0] - kd * DILATION[0]) // SD
        else:
            ds = d * SD + kd * DILATION[0] - PAD[0]
        in_depth = within(ds, src_depth)
        w = load_weights(weight + (kd * (KH * KW) * vectors + vector) * V, vectors, 0, KH * KW, ACC, V)
        plane = base + ds * src_d * V
        for r in tl.static_range(TOP, BOTTOM + 1):
            if is_read(r, R, KH, SH, DH, PH, ADJOINT):
                x = load_strip(
                    plane + r * src_h * V, src_w * V, left, src_width, in_depth & within(row + r, src_height),
                    INSIDE_D == 0 or r < 0 or r >= INSIDE_H, ACC, V, FIRST, LAST, INSIDE_W, W, KW, SW, DW, PW, ADJOINT,
                )  # fmt: skip
                acc = add_row(acc, x, w, r, KH, KW, SH, SW, DH, DW, PH, PW, ADJOINT, R, W, FIRST, NARROW)

    if HAS_BIAS:
        added = load_vector(bias + vector * V, True, False, ACC, V)
        new = ()
        for i in tl.static_range(R * W):
            new = new + (acc[i] + added,)
        acc = new
    rows = height - group * R
    if TRANSPOSED:
        target = out + (n * out_n + vector * V * out_c + group * (R // TOGETHER)) * TOGETHER
        store_positions(target, out_c * TOGETHER, acc, ok, rows, R, B, V, TOGETHER)
    else:
        target = out + (n * out_n + d * out_d + group * R * out_h + strip * W * out_w + vector) * V
        store_patch(target, out_h * V, out_w * V, acc, ok, rows, width - strip * W, EXACT, EXACT_W, R, W, B, V)
