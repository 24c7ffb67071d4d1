"""What is rebuilt of PyTorch's private rules, against PyTorch."""

from __future__ import annotations

import random

import torch

from convgrad._compat import suggests_channels_last


def test_suggests_channels_last_is_pytorchs_rule() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        d = rng.choice([2, 3])
        shape = [rng.choice([1, 1, 2, 3, 5]) for _ in range(d + 2)]
        order = rng.sample(range(d + 2), d + 2)
        t = torch.empty([shape[i] for i in order]).permute([order.index(i) for i in range(d + 2)])
        strides = [rng.choice([s, 0, 1, 7]) if n == 1 else s for n, s in zip(shape, t.stride(), strict=True)]
        t = t.as_strided(shape, strides)
        weight = torch.empty([2] * (d + 2))  # contiguous, so that the input alone decides
        fmt = torch._C._conv_determine_backend_memory_format(t, weight, torch._C._ConvBackend.Mkldnn)
        assert suggests_channels_last(t) == (fmt != torch.contiguous_format), (shape, strides)
    assert not suggests_channels_last(torch.empty(2, 1, 5, 5))
    assert not suggests_channels_last(torch.empty(2, 3, 5))
