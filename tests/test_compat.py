"""What is rebuilt of PyTorch's private rules, against PyTorch."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from convgrad._compat import DispatchMode, suggests_channels_last


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


def test_a_mode_around_a_compiled_function_is_not_compiled_with_it() -> None:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    mode = type("Mode", (DispatchMode,), {"__torch_dispatch__": dispatch})
    with mode():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert not _debug_get_cache_entry_list(dispatch.__code__)
