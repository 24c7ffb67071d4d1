"""The ranges, against all pairs of an input and an output position that couple, found one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convgrad.errors import ShapeError
from convgrad.parallel.geometry import Exchange, Line, chunks
from convgrad.problem.sizes import output_length

small = st.integers(1, 4)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    kernel, stride, dilation = draw(small), draw(small), draw(small)
    low, high = draw(st.integers(-2, 6)), draw(st.integers(-2, 6))
    needed = dilation * (kernel - 1) + 1
    length = draw(st.integers(max(1, needed - low - high), 24))
    return Line(length, output_length(length, kernel, stride, low, high, dilation), kernel, stride, low, dilation)


def pairs(line: Line) -> set[tuple[int, int]]:
    """Every (input, output) that couples, by the definition of a convolution."""
    found = set()
    for o in range(line.output):
        for t in range(line.kernel):
            i = o * line.stride - line.low + line.dilation * t
            if 0 <= i < line.input:
                found.add((i, o))
    return found


def hull(positions: set[int]) -> tuple[int, int]:
    return (min(positions), max(positions) + 1) if positions else (0, 0)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_torchs(length, parts):
    ours = [b - a for a, b in chunks(length, parts)]
    theirs = [len(c) for c in torch.arange(length).chunk(parts)] if length else []
    assert ours == theirs + [0] * (parts - len(theirs))


@given(lines(), st.integers(1, 5))
def test_a_shard_needs_the_hull_of_what_its_positions_couple_with(line, parts):
    coupled = pairs(line)
    for shard in chunks(line.output, parts):
        assert line.inputs_of(shard) == hull({i for i, o in coupled if shard[0] <= o < shard[1]})
    for shard in chunks(line.input, parts):
        assert line.outputs_of(shard) == hull({o for i, o in coupled if shard[0] <= i < shard[1]})


@given(lines(), st.integers(1, 5), st.sampled_from(["input", "output"]))
def test_the_convolutions_of_the_shards_compute_every_pair_once(line, parts, moves):
    exchange = line.exchange(moves, parts)
    found = []
    staying = chunks(line.output if moves == "input" else line.input, parts)
    for stays, extended in zip(staying, exchange.want, strict=True):
        inputs, outputs = (extended, stays) if moves == "input" else (stays, extended)
        if inputs[0] == inputs[1] or outputs[0] == outputs[1]:
            continue
        low, high = line.local(inputs, outputs)
        n, m = inputs[1] - inputs[0], outputs[1] - outputs[0]
        assert output_length(n, line.kernel, line.stride, low, high, line.dilation) == m
        local = pairs(line._replace(input=n, output=m, low=low))
        found += [(i + inputs[0], o + outputs[0]) for i, o in local]
    assert sorted(found) == sorted(pairs(line))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(-1, 7), st.integers(0, 7), st.booleans())
def test_pieces_are_what_lies_there(sizes, before, after, circular):
    whole = torch.arange(1, sum(sizes) + 1)
    if any(s + before + after < 0 for s in sizes) or (circular and not len(whole) and before + after):
        with pytest.raises(ShapeError):
            Exchange.of_halo(sizes, before, after, circular)
        return
    exchange = Exchange.of_halo(sizes, before, after, circular)
    shards, moved = whole.split(sizes), 0
    for rank, (start, stop) in enumerate(exchange.want):
        inside = [p % len(whole) if circular else p for p in range(start, stop)]
        expected = [int(whole[p]) if 0 <= p < len(whole) else 0 for p in inside]
        got = []
        route = exchange.route(rank)
        for owner, a, b, at in route.pieces:
            assert at == len(got)
            first = exchange.have[owner][0]
            got += shards[owner][a - first : b - first].tolist()
            if owner != rank:
                assert (owner, a, b, at) in exchange.route(owner).sent[rank]
        low, high = route.zeros
        got = [0] * low + got + [0] * high
        assert got == expected
        own = range(*exchange.have[rank])
        foreign = [p for p in inside if 0 <= p < len(whole) and p not in own]
        assert route.received == len(foreign)
        moved += len(foreign)
    sent = sum(p.stop - p.start for s in range(len(sizes)) for to in exchange.route(s).sent for p in to)
    assert exchange.moved == sent == moved


def test_what_moves_is_stated_by_hand():
    """A 3-wide kernel on 12 positions over 4 shards: one position each way over each of the three borders."""
    line = Line(12, 12, 3, low=1)
    assert line.exchange("input", 4).moved == line.exchange("output", 4).moved == 6
    assert Line(12, 6, 2, stride=2).exchange("input", 3).moved == 0
    # A kernel of 9 over shards of 2 positions: each needs four on either side, as far as there are any.
    assert Line(8, 8, 9, low=4).exchange("input", 4).moved == 4 + 6 + 6 + 4


@pytest.mark.parametrize(
    ("sizes", "before", "after", "circular", "message"),
    [
        ([2, 1], 0, -2, False, "shard 1 of 1 positions cannot be extended by 0 and -2"),
        ([2, 1], [1], 0, False, "expected before to be one number or one for each of 2 shards"),
        ([0, 0], 1, 0, True, "a dimension without positions has no other end"),
    ],
)
def test_what_cannot_be_is_refused(sizes, before, after, circular, message):
    with pytest.raises(ShapeError, match=message):
        Exchange.of_halo(sizes, before, after, circular)
