"""The example learns, streams what it computes at once, and draws its figure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

for needed in ("sklearn", "rich", "matplotlib"):
    pytest.importorskip(needed)


@pytest.fixture
def mamba(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    yield __import__("mamba")
    sys.modules.pop("mamba", None)


def test_it_learns_streams_and_draws(mamba, tmp_path):
    figure = tmp_path / "mamba.png"
    losses, difference = mamba.main(["--steps", "15", "--figure", str(figure)])
    assert losses[-1] < 0.8 * losses[0]
    assert difference < 1e-4
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_it_sees_a_stream_that_forgets(mamba, monkeypatch):
    """The comparison can fail: an update that leaves the state as it was."""
    update = mamba.convgrad.causal_conv1d_update

    def forgets(x, state, *rest, **options):
        return update(x, state.clone(), *rest, **options)

    net = mamba.Network()
    upper = torch.randint(mamba.LEVELS, (2, mamba.HALF))
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(mamba.convgrad, "causal_conv1d_update", forgets)
        drawn, streamed = mamba.completed(net, upper)
        with torch.no_grad():
            whole, _ = net(mamba.shifted(drawn), net.start(len(drawn)))
        assert (float((whole - streamed).abs().max()) > 1e-4) is broken
