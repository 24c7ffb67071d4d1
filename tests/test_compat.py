"""What stands between PyTorch's private parts and the rest."""

import sys
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._prims_common import suggest_memory_format

from convgrad._compat import DispatchMode, suggested_format


@pytest.mark.parametrize("loaded", [True, False])
def test_a_mode_around_a_compiled_function_is_not_compiled_with_it(
    loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 0.1.0 it was where Dynamo was loaded after the mode."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    with monkeypatch.context() as patch:
        if not loaded:
            patch.delitem(sys.modules, "torch._dynamo")
        mode = type("Mode", (DispatchMode,), {"__torch_dispatch__": dispatch})
    with mode():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert not _debug_get_cache_entry_list(dispatch.__code__)


def test_the_suggested_layout_is_pytorchs() -> None:
    shapes = [shape for ndim in range(5) for shape in product((0, 1, 2), repeat=ndim)] + [*product((1, 2), repeat=5)]
    turned = [torch.empty(shape).permute(order) for shape in shapes for order in permutations(range(len(shape)))]
    turned += [t.expand_as(torch.empty([n + (n == 1) for n in t.shape])) for t in turned]
    assert [suggested_format(t) for t in turned] == [suggest_memory_format(t) for t in turned]
    assert suggested_format(torch.eye(3).to_sparse()) is torch.contiguous_format
