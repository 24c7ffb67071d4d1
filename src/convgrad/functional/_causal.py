"""Causal depthwise convolutions of sequences: whole, with a state carried from call to call, packed, step by step.

The functions of the package ``causal-conv1d`` (Dao-AILab), which Mamba's layers call, on any device and dtype and for
any kernel width, differentiable in every tensor. What a sequence carries are its last ``K - 1`` inputs. Everything is
computed as images of one row (see `as_images`), so that a sequence is read as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from .._compat import is_batched
from ..errors import DtypeError, ShapeError
from ..ops import autocast_is_on
from ..problem import require_bool
from ._arguments import of_tensors
from ._convolution import Layout, conv2d, require_layout
from ._silu import silu_of_rows

Activation = Literal["silu", "swish"] | None


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: Layout = "NCL",
    initial_state: Tensor | None = None, return_state: Literal[False] = False, seq_idx: Tensor | None = None,
    activation: Activation = None,
) -> Tensor: ...  # fmt: skip
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: Layout = "NCL",
    initial_state: Tensor | None = None, return_state: Literal[True], seq_idx: Tensor | None = None,
    activation: Activation = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@of_tensors("x", "weight", "bias", "initial_state", "seq_idx")
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: Layout = "NCL",
    initial_state: Tensor | None = None, return_state: bool = False, seq_idx: Tensor | None = None,
    activation: Activation = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """A depthwise convolution in which no output depends on a later input: ``causal_conv1d_fn`` of causal-conv1d.

    Args:
        layout: the order of the dimensions of x, of the states and of the result. The result has the memory layout of
            x; a transposed view, as Mamba's layers pass it, is not copied.
        initial_state: the last K - 1 inputs before x; zeros where there is none. With seq_idx they belong to the
            sequence of each row's first input: zeros where a row begins a new one.
        return_state: return (result, state), the state being the last K - 1 inputs, for the next call. With seq_idx it
            is that of each row's last sequence, with zeros for what is not its; padding after it is passed over.
        seq_idx: to which sequence each input belongs, if several are packed into a row: an output sums inputs of its
            own sequence only. A negative index marks padding, which is not read and whose output is zero.
        activation: ``"silu"`` (also called ``"swish"``), applied to the result.

    Shape:
        - x and result: (N, D, L); with ``layout="NLC"`` (N, L, D)
        - weight: (D, K), bias: (D,); seq_idx: (N, L), integers
        - initial_state and state: (N, D, K - 1); with ``layout="NLC"`` (N, K - 1, D)

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError).
        ValueError: another layout or activation.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 6, 9), torch.randn(6, 4)
        >>> y = torch.nn.functional.conv1d(torch.nn.functional.pad(x, (3, 0)), w[:, None], groups=6)
        >>> torch.allclose(convgrad.causal_conv1d(x, w), y, atol=1e-5)
        True
        >>> first, state = convgrad.causal_conv1d(x[..., :5], w, return_state=True)
        >>> second = convgrad.causal_conv1d(x[..., 5:], w, initial_state=state)
        >>> torch.allclose(torch.cat([first, second], -1), y, atol=1e-5)
        True
    """
    require_bool("return_state", return_state)
    sequence, carried = _checked(x, weight, bias, activation, layout)  # [N, D, L], K - 1
    state = read = output = None
    if initial_state is not None:
        state = read = _state(
            "initial_state", _sequence("initial_state", initial_state, layout), sequence, carried, True
        )
    if seq_idx is not None:
        _check_integers("seq_idx", seq_idx, (sequence.shape[0], sequence.shape[2]))
        # Not read: a NaN there, times the gradient 0 of its output, would be one of the weight.
        padding = (seq_idx < 0).unsqueeze(1)
        sequence = sequence.masked_fill(padding, 0)
        read = None if state is None else state.masked_fill(padding[..., :1], 0)
    joined, before = (sequence, carried) if read is None else (_joined(read, sequence), 0)
    if activation is not None and seq_idx is None:
        output = silu_of_rows(joined.unsqueeze(2), _taps(weight), bias, before)
    activation = activation if output is None else None
    output = _filtered(joined, weight, bias, before) if output is None else output
    if seq_idx is None:
        last = F.pad(joined, (carried - joined.shape[2], 0)) if return_state else None
    else:
        first = seq_idx[:, :1] if state is not None else torch.full_like(seq_idx[:, :1], -1)
        ids = torch.cat([first.expand(-1, carried), seq_idx], 1)  # [N, K - 1 + L], of the state's inputs too
        output = _separated(output, joined, weight, bias, ids)
        kept = sequence if state is None else _joined(state, sequence)
        last = _last_of_packed(kept, ids, carried) if return_state else None
    result = _finished(output, activation, layout)
    return result if last is None else (result, _laid_out(last, layout))


@of_tensors("x", "conv_state", "weight", "bias", "cache_seqlens", "conv_state_indices")
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = None,
    cache_seqlens: Tensor | None = None, conv_state_indices: Tensor | None = None, *, layout: Layout = "NCL",
) -> Tensor:  # fmt: skip
    """The next step, or steps, of `causal_conv1d`, which updates conv_state: ``causal_conv1d_update`` of causal-conv1d.

    Autograd records the change of conv_state, so gradients flow back through earlier steps. To generate, use
    ``torch.no_grad()`` or detach the state.

    Args:
        conv_state: the last S inputs, oldest first, changed in place.
        cache_seqlens: how many inputs each sequence has had. conv_state is then a ring buffer, in which the input of
            time t is at ``t % S``.
        conv_state_indices: the row of conv_state for each row of x; negative: no row, and the result is zero.
        activation, layout: as in `causal_conv1d`, and so are the errors.

    Shape:
        - x and result: (N, D) or (N, D, L); with ``layout="NLC"`` (N, D) or (N, L, D)
        - conv_state: (N, D, S) with S >= K - 1; with ``layout="NLC"`` (N, S, D); N may differ with conv_state_indices
        - weight: (D, K), bias: (D,); cache_seqlens, conv_state_indices: (N,), integers

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 6, 9), torch.randn(6, 4)
        >>> state = torch.zeros(2, 6, 3)
        >>> steps = [convgrad.causal_conv1d_update(x[..., t], state, w) for t in range(9)]
        >>> torch.allclose(torch.stack(steps, -1), convgrad.causal_conv1d(x, w), atol=1e-5)
        True
        >>> torch.equal(state, x[..., -3:])
        True
    """
    one_step = x.dim() == 2
    whole, order = (x.unsqueeze(2), "NCL") if one_step else (x, layout)
    sequence, carried = _checked(whole, weight, bias, activation, order)
    state, inputs, seen = _sequence("conv_state", conv_state, layout), sequence, cache_seqlens  # [.., D, S], [N, D, L]
    old = _state("conv_state", state, sequence, carried, own_rows=conv_state_indices is not None)
    for name, counts in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        _check_integers(name, counts, x.shape[:1])
    rows = mine = None
    if conv_state_indices is not None:
        (rows,) = (conv_state_indices >= 0).nonzero(as_tuple=True)
        mine = conv_state_indices[rows].long()
        old, inputs, seen = old[mine], sequence[rows], None if seen is None else seen[rows]
    if seen is None:
        both = _joined(old, inputs)
        window, new = both[..., old.shape[2] - carried :], both[..., inputs.shape[2] :]
    else:
        window, new = _turned(old, inputs, carried, seen)
    output = _filtered(window, weight, bias, 0)  # [.., D, 1, L]
    if rows is None or mine is None:
        state.copy_(new)
    else:
        state.index_copy_(0, mine, new.to(state.dtype))
        output = output.new_zeros(x.shape[0], *output.shape[1:]).index_copy(0, rows, output)
    return _finished(output, activation, layout, one_step)


# ---- computing -----------------------------------------------------------------------------------


def _filtered(sequence: Tensor, weight: Tensor, bias: Tensor | None, before: int) -> Tensor:
    """[N, D, L] -> [N, D, 1, before + L - K + 1], laid out as the sequence, with zeros before it."""
    return conv2d(sequence.unsqueeze(2), _taps(weight), bias, 1, (0, 0, before, 0), 1, weight.shape[0])


def _taps(weight: Tensor) -> Tensor:
    return weight.unsqueeze(1).unsqueeze(1)  # [D, 1, 1, K]


def _joined(state: Tensor, sequence: Tensor) -> Tensor:
    """[N, D, S] before [N, D, L], laid out as the latter."""
    if sequence.stride(2) == 1:
        return torch.cat([state, sequence], 2)
    return torch.cat([state.transpose(1, 2), sequence.transpose(1, 2)], 1).transpose(1, 2)


def _inputs(sequence: Tensor, ids: Tensor, row: Tensor, at: Tensor, own: Tensor) -> Tensor:
    """Return the inputs at some positions of ``ids``, which may begin before the sequence; zero where not ``own``."""
    at = at - (ids.shape[1] - sequence.shape[2])
    return torch.where(own[..., None], sequence.transpose(1, 2)[row, at.clamp(min=0)], 0)


def _separated(output: Tensor, sequence: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Compute the windows that reach into another sequence again, without its inputs; ``ids`` begin K - 1 earlier."""
    width = weight.shape[1]
    seq_idx = ids[:, width - 1 :]
    own = (ids.unfold(1, width, 1) == seq_idx[..., None]) & (seq_idx >= 0)[..., None]  # [N, L, K]
    batched = is_batched(ids)  # by vmap: the number of windows to compute may differ, so all are
    again = torch.ones(seq_idx.shape, device=ids.device) if batched else (~own).any(2)
    n, t = again.nonzero(as_tuple=True)  # [P], [P]
    exact = torch.promote_types(output.dtype, torch.float32)
    at = t[:, None] + torch.arange(width, device=t.device)  # [P, K]
    windows = _inputs(sequence, ids, n[:, None], at, own[n, t]).to(exact)  # [P, K, D]
    values = (windows * weight.t().to(exact)).sum(1)  # [P, D]
    if bias is not None:
        values = values + bias
    values = torch.where((seq_idx[n, t] >= 0)[:, None], values, 0).to(output.dtype)
    channels = torch.arange(weight.shape[0], device=t.device)
    where = (n[:, None], channels, torch.zeros_like(channels), t[:, None])
    return output.index_put(where, values) if batched else output.index_put_(where, values)


def _last_of_packed(sequence: Tensor, ids: Tensor, carried: int) -> Tensor:
    """Return the last K - 1 inputs of each row's last sequence, [N, D, K - 1]; of a row of padding, its state."""
    rows, steps, device = len(ids), ids.shape[1] - carried, ids.device
    ends = ((ids[:, carried:] >= 0) * torch.arange(1, steps + 1, device=device)).amax(1, keepdim=True)
    row, at = torch.arange(rows, device=device)[:, None], ends + torch.arange(carried, device=device)  # [N, K - 1]
    own = ids[row, at] == ids[row, ends + carried - 1]
    return _inputs(sequence, ids, row, at, own).transpose(1, 2)


def _turned(state: Tensor, inputs: Tensor, carried: int, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the joined inputs and the new state of a ring buffer: the input of time t is at t % S."""
    (rows, _, size), length = state.shape, inputs.shape[2]
    row, kept = torch.arange(rows, device=seen.device)[:, None], min(length, size)

    def places(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return row, (seen[:, None] + torch.arange(start, stop, device=seen.device)) % size

    ring = state.transpose(1, 2)  # [N, S, D]
    new = ring.index_put(places(length - kept, length), inputs[..., length - kept :].transpose(1, 2))
    return _joined(ring[places(-carried, 0)].transpose(1, 2), inputs), new.transpose(1, 2)


def _finished(output: Tensor, activation: str | None, layout: Layout, one_step: bool = False) -> Tensor:
    """[N, D, 1, L] -> what the user gets."""
    sequence = output.squeeze(2)
    sequence = sequence if activation is None else F.silu(sequence)
    return sequence.squeeze(2) if one_step else _laid_out(sequence, layout)


def _laid_out(sequence: Tensor, layout: Layout) -> Tensor:
    return sequence.transpose(1, 2).contiguous() if layout == "NLC" else sequence


# ---- checking ------------------------------------------------------------------------------------


def _sequence(name: str, t: Tensor, layout: Layout) -> Tensor:
    """[N, D, L], as it lies in memory."""
    require_layout(layout)
    if t.dim() != 3:
        raise ShapeError(f"Expected {name} with 3 dimensions, layout={layout!r}, but got one of size {list(t.shape)}")
    return t.transpose(1, 2) if layout == "NLC" else t


def _checked(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: object, layout: Layout
) -> tuple[Tensor, int]:  # fmt: skip
    """Return x as [N, D, L], and K - 1."""
    sequence = _sequence("x", x, layout)
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation is None, 'silu' or 'swish', got {activation!r}")
    _, channels, steps = sequence.shape
    if not (channels and steps):
        raise ShapeError(f"Expected x of at least one channel and one step, but it has {channels} and {steps}")
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        turned = weight.dim() == 2 and weight.shape[0] == steps
        hint = "; try the other layout: 'NCL' is (N, D, L), and 'NLC' is (N, L, D)" if turned else ""
        size = list(weight.shape)
        raise ShapeError(f"Expected a weight (D, K) for x of {channels} channels, but got one of size {size}{hint}")
    if bias is not None and bias.shape != (channels,):
        raise ShapeError(f"Expected a bias (D,) for x of {channels} channels, but got one of size {list(bias.shape)}")
    return sequence, weight.shape[1] - 1


def _state(
    name: str, state: Tensor, sequence: Tensor, carried: int, exactly: bool = False, own_rows: bool = False
) -> Tensor:
    """Check a state [N, D, S]; return it in the dtype of x, which may be another one under autocast."""
    if autocast_is_on(sequence.device.type):
        state = state.to(sequence.dtype)
    steps, (rows, channels, _) = state.shape[2], sequence.shape
    fits = steps == carried if exactly else steps >= carried
    if not fits or state.shape[1] != channels or (not own_rows and state.shape[0] != rows):
        wanted = f"{carried} steps" if exactly else f"at least {carried} steps"
        batch = "any number of rows" if own_rows else f"{rows} rows"
        raise ShapeError(
            f"Expected {name} of {batch}, {channels} channels and {wanted}, but it has {state.shape[0]} rows, "
            f"{state.shape[1]} channels and {steps} steps"
        )
    if state.dtype != sequence.dtype or state.device != sequence.device:
        raise DtypeError(
            f"Expected {name} of the dtype and on the device of x, {sequence.dtype} on {sequence.device}, "
            f"but got {state.dtype} on {state.device}"
        )
    return state


def _check_integers(name: str, t: Tensor | None, size: Sequence[int]) -> None:
    if t is not None and (t.dtype not in (torch.int32, torch.int64) or t.shape != tuple(size)):
        raise ShapeError(f"Expected {name} of size {list(size)}, int32 or int64, but got {list(t.shape)}, {t.dtype}")
