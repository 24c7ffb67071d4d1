"""What stands between PyTorch's private parts and the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from convgrad._compat import DispatchMode


def test_a_mode_around_a_compiled_function_is_not_compiled_with_it() -> None:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    mode = type("Mode", (DispatchMode,), {"__torch_dispatch__": dispatch})
    with mode():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert not _debug_get_cache_entry_list(dispatch.__code__)
