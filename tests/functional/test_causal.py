"""Causal convolutions against their definition: a sum over the taps, one output after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import convgrad
from convgrad import causal_conv1d, causal_conv1d_update

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Sequences of all lengths, padding in front of, between and behind them.
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 3, -1], [5] * 12, [-1, -1, 0, 0, 0, 0, -2, 2, 2, 2, 2, 2]])


def definition(x: Tensor, w: Tensor, b: Tensor | None, ids: Tensor | None = None) -> Tensor:
    """out[n, d, t] = b[d] + sum over k of w[d, K-1-k] x[n, d, t-k], t-k in the same sequence; zero in padding."""
    rows, channels, length = x.shape
    out = torch.zeros(rows, channels, length, dtype=torch.double)
    for n in range(rows):
        for t in range(length):
            if ids is not None and ids[n, t] < 0:
                continue
            for k in range(min(w.shape[1], t + 1)):
                if ids is None or ids[n, t - k] == ids[n, t]:
                    out[n, :, t] += w[:, -1 - k].double() * x[n, :, t - k].double()
            if b is not None:
                out[n, :, t] += b.double()
    return out


def whole(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers, whose sums are exact in every dtype."""
    shapes = ((3, 5, 12), (5, width), (5,))
    x, w, b = (torch.randint(-3, 4, shape).to(dtype) for shape in shapes)
    return x, w, b


def laid_out(t: Tensor, layout: str) -> Tensor:
    return t.transpose(1, 2).contiguous() if layout == "NLC" else t


@pytest.mark.parametrize("ids", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("layout", ["NCL", "NLC"])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition(dtype: torch.dtype, width: int, layout: Any, ids: Tensor | None) -> None:
    x, w, b = whole(dtype, width)
    for bias in (None, b):
        want = laid_out(definition(x, w, bias, ids).to(dtype), layout)
        assert torch.equal(causal_conv1d(laid_out(x, layout), w, bias, layout=layout, seq_idx=ids), want)
    got = causal_conv1d(laid_out(x, layout), w, b, layout=layout, seq_idx=ids, activation="silu")
    torch.testing.assert_close(got, F.silu(laid_out(definition(x, w, b, ids).to(dtype), layout)))


def test_the_result_lies_as_x_does() -> None:
    x, w = torch.randn(2, 9, 16), torch.randn(16, 4)
    for state in (None, torch.randn(2, 16, 3)):
        assert causal_conv1d(x, w, layout="NLC", initial_state=None if state is None else state.mT).is_contiguous()
        assert causal_conv1d(x.mT, w, initial_state=state).mT.is_contiguous()
        assert causal_conv1d(x.mT.contiguous(), w, initial_state=state).is_contiguous()
    assert causal_conv1d(x[:, :2], w, layout="NLC", return_state=True)[1].is_contiguous()
    with convgrad.trace() as seen:
        causal_conv1d(x.mT, w)
    assert [record.copies for record in seen] == [()]


@pytest.mark.parametrize("layout", ["NCL", "NLC"])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_the_definition_with_a_state_before_packed_rows(width: int, layout: Any) -> None:
    """The state belongs to the sequence of a row's first input; where that is padding, to none."""
    x, w, b = whole(torch.float32, width)
    state = torch.randint(-3, 4, (3, 5, width - 1)).float()
    ids = torch.cat([PACKED[:, :1].expand(-1, width - 1), PACKED], 1)
    want = definition(torch.cat([state, x], 2), w, b, ids)[..., width - 1 :].float()
    got = causal_conv1d(laid_out(x, layout), w, b, layout=layout, initial_state=laid_out(state, layout), seq_idx=PACKED)
    assert torch.equal(laid_out(got, layout), want)


@pytest.mark.parametrize("layout", ["NCL", "NLC"])
@pytest.mark.parametrize("chunks", [[12], [5, 7], [1, 2, 9], [1] * 12])
@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_with_a_state_are_the_whole(packed: bool, width: int, chunks: list[int], layout: Any) -> None:
    """A state that is carried into another sequence is replaced by zeros."""
    ids = torch.tensor([[0] * 12, [1] * 5 + [2] * 7, [3] * 2 + [4] * 10])
    x, w, b = whole(torch.float32, width)
    state, parts, last = None, [], ids[:, 0]
    for part, its in zip(x.split(chunks, 2), ids.split(chunks, 1), strict=True):
        if state is not None and packed:
            state = state * (its[:, 0] == last)[:, None, None]
        out, state = causal_conv1d(
            laid_out(part, layout), w, b, activation="swish", layout=layout, initial_state=state,
            return_state=True, seq_idx=its if packed else None,
        )  # fmt: skip
        parts.append(laid_out(out, layout))
        last = its[:, -1]
    want = F.silu(definition(x, w, b, ids if packed else None).float())
    torch.testing.assert_close(torch.cat(parts, 2), want)
    if not packed:
        assert state is not None
        assert torch.equal(state, laid_out(F.pad(x, (width - 1, 0))[..., x.shape[2] :], layout))


@pytest.mark.parametrize("layout", ["NCL", "NLC"])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_state_after_packed_rows(with_state: bool, layout: Any) -> None:
    """Of the last sequence alone, without the padding after it; a row of padding leaves the state as it is."""
    ids = torch.tensor([[0] * 10 + [1, 1], [0] * 4 + [-1] * 8, [2, 2] + [-1] * 10, [-1] * 12, [-1] * 8 + [5] * 4])
    x, w = torch.randint(1, 9, (5, 2, 12)).float(), torch.ones(2, 4)
    x[1, :, 4:] = torch.nan
    before = torch.randint(1, 9, (5, 2, 3)).float() if with_state else torch.zeros(5, 2, 3)
    want = torch.stack([
        F.pad(x[0, :, 10:], (1, 0)), x[1, :, 1:4], torch.cat([before[2, :, 2:], x[2, :, :2]], 1), before[3],
        x[4, :, 9:],
    ])  # fmt: skip
    given = laid_out(before, layout) if with_state else None
    _, state = causal_conv1d(laid_out(x, layout), w, layout=layout, seq_idx=ids, initial_state=given, return_state=True)
    assert torch.equal(laid_out(state, layout), want)


def test_steps_after_packed_rows_are_the_whole() -> None:
    """`causal_conv1d_update` goes on where the last sequence of each row ended, padding after it or not."""
    ids = torch.tensor([[0] * 5 + [1] * 3 + [1] * 4, [0] * 2 + [1] * 6 + [1] * 4, [2] * 8 + [2] * 4])
    x, w, b = whole(torch.float32, 4)
    prefix = torch.cat([x[..., :8], torch.full((3, 5, 2), torch.nan)], 2)
    padded = F.pad(ids[:, :8], (0, 2), value=-1)
    _, state = causal_conv1d(prefix, w, b, seq_idx=padded, return_state=True)
    steps = [causal_conv1d_update(x[..., t], state, w, b) for t in range(8, 12)]
    assert torch.equal(torch.stack(steps, 2), definition(x, w, b, ids).float()[..., 8:])


@pytest.mark.parametrize("layout", ["NCL", "NLC"])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("steps", [1, 2, 9, 0])
@pytest.mark.parametrize("ring", [False, True])
def test_steps_are_the_whole(ring: bool, steps: int, more: int, layout: Any) -> None:
    """Each row is at a time of its own; zero steps: one, of a tensor (N, D)."""
    x, w, b = whole(torch.float32, 4)
    size = 3 + more
    state = laid_out(torch.zeros(3, 5, size), layout)
    seen = torch.tensor([0, 7, 100], dtype=torch.int32) if ring else None
    parts = []
    for part in x.split(max(steps, 1), 2):
        mine = part[..., 0] if steps == 0 else laid_out(part, layout)
        out = causal_conv1d_update(mine, state, w, b, "silu", seen, layout=layout)
        parts.append(out[..., None] if steps == 0 else laid_out(out, layout))
        seen = None if seen is None else seen + part.shape[2]
    torch.testing.assert_close(torch.cat(parts, 2), F.silu(definition(x, w, b).float()))
    kept = laid_out(state, layout)
    if seen is not None:  # oldest first
        kept = torch.stack([row.roll(-int(n), 1) for row, n in zip(kept, seen, strict=True)])
    assert torch.equal(kept, x[..., -size:])


@pytest.mark.parametrize("ring", [False, True])
def test_rows_of_a_larger_state(ring: bool) -> None:
    x, w, b = whole(torch.float32, 4)
    states = torch.randint(-3, 4, (8, 5, 4)).float()
    rows, seen = torch.tensor([6, -1, 2]), torch.tensor([9, 4, 1]) if ring else None
    want, apart = states.clone(), states[[6, 2]]
    out = causal_conv1d_update(x, states, w, b, None, seen, rows)
    alone = causal_conv1d_update(x[[0, 2]], apart, w, b, None, None if seen is None else seen[[0, 2]])
    assert torch.equal(out[[0, 2]], alone)
    assert not out[1].any()
    want[[6, 2]] = apart
    assert torch.equal(states, want)


# ---- derivatives -------------------------------------------------------------------------------------


IDS = torch.tensor([[0, 0, 1, -1], [3, 4, 4, 4]])


def of_state(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> Any:
    return causal_conv1d(x, w, b, initial_state=state, return_state=True, activation="silu")


def of_packed(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> Tensor:
    return causal_conv1d(x, w, b, seq_idx=IDS, activation="silu")


def of_steps(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state.clone()
    steps = [causal_conv1d_update(x[..., t], state, w, b, "silu") for t in range(x.shape[2])]
    return torch.stack(steps, 2), state


def of_ring(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state, seen = state.clone(), torch.tensor([2, 7])
    steps = [causal_conv1d_update(x[..., t], state, w, b, None, seen + t) for t in range(x.shape[2])]
    return torch.stack(steps, 2), state


def of_packed_with_state(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> Any:
    return causal_conv1d(x, w, b, initial_state=state, return_state=True, seq_idx=IDS, activation="silu")


CALLS = [of_state, of_packed, of_packed_with_state, of_steps, of_ring]


def operands() -> tuple[Tensor, ...]:
    shapes = ((2, 2, 4), (2, 3), (2,), (2, 2, 2))
    return tuple(torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("call", CALLS)
def test_derivatives_of_any_order_in_everything(call: Any) -> None:
    assert torch.autograd.gradcheck(call, operands(), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, operands(), fast_mode=True)


@pytest.mark.parametrize(("call", "dynamic"), [(of_state, True), (of_packed_with_state, True), (of_ring, False)])
def test_compiled_in_one_graph(call: Any, dynamic: bool) -> None:
    tensors = operands()
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    got, want = compiled(*tensors), call(*tensors)
    torch.testing.assert_close(got, want)
    g = torch.randn_like(want[0])
    torch.testing.assert_close(*(torch.autograd.grad(y[0], tensors, g, allow_unused=True) for y in (got, want)))


def test_packed_rows_under_vmap() -> None:
    x, w, b, _ = (t.detach() for t in operands())

    def loss(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        return causal_conv1d(x[None], w, b, seq_idx=ids[None], activation="silu").square().sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(w, x, IDS)
    for found, row, its in zip(per_sample, x, IDS, strict=True):
        leaf = w.clone().requires_grad_()
        (want,) = torch.autograd.grad(F.silu(definition(row[None], leaf, b, its[None])).square().sum(), leaf)
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("packed", [False, True])
def test_a_state_under_vmap(packed: bool) -> None:
    x, w, b, state = (t.detach() for t in operands())

    def call(x: Tensor, state: Tensor, ids: Tensor) -> Any:
        ids = ids[None] if packed else None
        return causal_conv1d(x[None], w, b, initial_state=state[None], seq_idx=ids, return_state=True)

    got = [t[:, 0] for t in vmap(call)(x, state, IDS)]
    want = causal_conv1d(x, w, b, initial_state=state, seq_idx=IDS if packed else None, return_state=True)
    torch.testing.assert_close(got, [*want])


def test_packings_under_vmap() -> None:
    """Only seq_idx is mapped, as where one batch is packed in several ways."""
    x, w, b = whole(torch.float32, 4)
    packings = torch.stack([PACKED, PACKED.flip(1)])
    want = torch.stack([definition(x, w, b, ids).float() for ids in packings])
    assert torch.equal(vmap(lambda ids: causal_conv1d(x, w, b, seq_idx=ids))(packings), want)


@pytest.mark.parametrize("ids", [None, PACKED], ids=["whole", "packed"])
def test_autocast(ids: Tensor | None) -> None:
    x, w, b = (torch.randn(3, 5, 12), torch.randn(5, 4), torch.randn(5))
    with torch.autocast("cpu", torch.bfloat16):
        got = causal_conv1d(x, w, b, seq_idx=ids)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), definition(x, w, b, ids), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_a_state_of_another_dtype_under_autocast(dtypes: Any) -> None:
    """As where the state was made by torch.zeros and x by a linear layer."""
    x, w, b = whole(torch.float32, 4)
    with torch.autocast("cpu", torch.bfloat16):
        given = x[..., :3].to(dtypes[1])
        rest, state = causal_conv1d(x[..., 3:].to(dtypes[0]), w, b, initial_state=given, return_state=True)
        assert state.dtype == dtypes[0]
        steps = [given.clone() for _ in range(3)]
        options: list[Any] = [{}, {"cache_seqlens": torch.tensor([3, 3, 3])}, {"conv_state_indices": torch.arange(3)}]
        for kept, more in zip(steps, options, strict=True):
            assert torch.equal(causal_conv1d_update(x[..., 3:].to(dtypes[0]), kept, w, b, **more), rest)
            assert kept.dtype == dtypes[1]
            assert torch.equal(kept, x[..., -3:])
    assert torch.equal(rest, definition(x, w, b)[..., 3:].bfloat16())


def test_another_sequence_may_be_infinite() -> None:
    x, w, _ = whole(torch.float32, 4)
    want = definition(x, w, None, PACKED)[:, :, 3:9].float()
    x[0, :, :3] = torch.inf
    assert torch.equal(causal_conv1d(x, w, seq_idx=PACKED)[:, :, 3:9], want)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"activation": "relu"}, ValueError, "activation is None, 'silu' or 'swish', got 'relu'"),
        ({"layout": "LND"}, ValueError, "layout is 'NCL' or 'NLC'"),
        ({"layout": "NLC"}, convgrad.ShapeError, r"Expected a weight \(D, K\) for x of 12 channels"),
        ({"return_state": 1}, TypeError, "return_state is True or False"),
        ({"seq_idx": PACKED, "initial_state": torch.zeros(3, 5, 2)}, convgrad.ShapeError, "5 channels and 3 steps"),
        ({"seq_idx": PACKED[:, 1:]}, convgrad.ShapeError, r"Expected seq_idx of size \[3, 12\]"),
        ({"seq_idx": PACKED.float()}, convgrad.ShapeError, "int32 or int64, but got"),
        ({"initial_state": torch.zeros(3, 5, 4)}, convgrad.ShapeError, "5 channels and 3 steps, but it has"),
        ({"initial_state": 0}, TypeError, "'initial_state' must be Tensor, not int"),
        ({"initial_state": torch.zeros(3, 5)}, convgrad.ShapeError, "initial_state with 3 dimensions"),
        ({"initial_state": torch.zeros(3, 5, 3).double()}, convgrad.DtypeError, "initial_state of the dtype"),
        (
            {"bias": torch.zeros(4)},
            convgrad.ShapeError,
            r"a bias \(D,\) for x of 5 channels, but got one of size \[4\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        causal_conv1d(torch.randn(3, 5, 12), torch.randn(5, 4), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"conv_state": torch.zeros(3, 5, 2)}, convgrad.ShapeError, "5 channels and at least 3 steps"),
        ({"conv_state": torch.zeros(2, 5, 3)}, convgrad.ShapeError, "3 rows"),
        ({"conv_state": torch.zeros(5, 3)}, convgrad.ShapeError, "conv_state with 3 dimensions"),
        ({"x": torch.zeros(5)}, convgrad.ShapeError, "x with 3 dimensions"),
        ({"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, convgrad.ShapeError, r"cache_seqlens of size \[3\]"),
        ({"cache_seqlens": 3}, TypeError, r"causal_conv1d_update\(\): argument 'cache_seqlens' must be Tensor"),
        ({"conv_state_indices": torch.zeros(3)}, convgrad.ShapeError, "int32 or int64"),
        ({"activation": True}, ValueError, "activation is None"),
        ({"bias": torch.zeros(5, 1)}, convgrad.ShapeError, r"a bias \(D,\) for x of 5 channels"),
    ],
)
def test_updates_that_cannot_be_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    given = {"x": torch.zeros(3, 5), "conv_state": torch.zeros(3, 5, 3), "weight": torch.randn(5, 4)}
    with pytest.raises(error, match=message):
        causal_conv1d_update(**(given | arguments))


@pytest.mark.parametrize("layout", ["NCL", "NLC"])
def test_what_lies_in_padding_reaches_no_gradient(layout: Any) -> None:
    """As where the sequences are computed one by one, without padding."""
    x, w = torch.randn(1, 2, 6), torch.randn(2, 3, requires_grad=True)
    seq_idx = torch.tensor([[0, 0, -1, 1, 1, -1]])
    x[..., [2, 5]] = torch.tensor([float("nan"), float("inf")])
    spoiled = (x if layout == "NCL" else x.mT).clone().requires_grad_()
    y = convgrad.causal_conv1d(spoiled, w, seq_idx=seq_idx, layout=layout)
    got = torch.autograd.grad(y.square().sum(), (w, spoiled))
    alone = [x[..., :2].clone().requires_grad_(), x[..., 3:5].clone().requires_grad_()]
    ys = [F.conv1d(F.pad(part, (2, 0)), w[:, None], groups=2) for part in alone]
    want = torch.autograd.grad(sum(part.square().sum() for part in ys), (w, *alone))
    torch.testing.assert_close(got[0], want[0])
    of_x = got[1] if layout == "NCL" else got[1].mT
    torch.testing.assert_close(of_x[..., [0, 1, 3, 4]], torch.cat(want[1:], -1))
    assert not of_x[..., [2, 5]].any()


def test_a_state_that_no_sequence_reads_reaches_no_gradient() -> None:
    x, w = torch.randn(2, 2, 6), torch.randn(2, 3, requires_grad=True)
    state, ids = torch.full((2, 2, 2), torch.nan), torch.tensor([[-1, 0, 0, 0, 0, 0], [-1] * 6])
    y, last = convgrad.causal_conv1d(x, w, initial_state=state, seq_idx=ids, return_state=True)
    (got,) = torch.autograd.grad(y.square().sum(), w)
    alone = F.conv1d(F.pad(x[:1, :, 1:], (2, 0)), w[:, None], groups=2)
    torch.testing.assert_close(got, torch.autograd.grad(alone.square().sum(), w)[0])
    assert torch.equal(last[0], x[0, :, -2:])
    assert last[1].isnan().all()


@pytest.mark.parametrize(("channels", "steps"), [(4, 0), (0, 5)])
def test_no_channels_or_no_steps_are_refused_in_words(channels: int, steps: int) -> None:
    x, w, state = torch.ones(2, channels, steps), torch.ones(channels, 3), torch.ones(2, channels, 2)
    message = f"Expected x of at least one channel and one step, but it has {channels} and {steps}"
    with pytest.raises(convgrad.ShapeError, match=message):
        convgrad.causal_conv1d(x, w)
    with pytest.raises(convgrad.ShapeError, match=message):
        convgrad.causal_conv1d_update(x, state, w)


def test_the_other_layout_is_named_where_it_would_fit() -> None:
    x, w = torch.randn(2, 20, 8), torch.randn(8, 4)
    with pytest.raises(convgrad.ShapeError, match=r"for x of 20 channels, .*'NLC' is"):
        causal_conv1d(x, w)
    with pytest.raises(convgrad.ShapeError) as caught:
        causal_conv1d(x, torch.randn(3, 4))
    assert "layout" not in str(caught.value)
