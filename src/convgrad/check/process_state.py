"""PyTorch's settings, which a kernel shares with the program that calls it and has to leave as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .._compat import fp32_precision

_mkldnn: Any = torch.backends.mkldnn
_cuda: Any = torch.backends.cuda


def _subnormal_numbers_are_zero() -> bool:
    return bool(torch.full((), 1e-40, dtype=torch.float32, device="cpu") * 1 == 0)


def _matmul_precision() -> tuple[str, str]:
    return fp32_precision("cuda", "matmul"), fp32_precision("mkldnn", "matmul")


def _set_matmul_precision(both: tuple[str, str]) -> None:
    names = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
    torch.set_float32_matmul_precision(names.get(both, "highest"))  # names exist for some combinations only
    _cuda.matmul.fp32_precision, _mkldnn.matmul.fp32_precision = both


#: The functions that read and set each one.
_SETTINGS: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "whether algorithms are deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "the precision of matrix products": (_matmul_precision, _set_matmul_precision),
    "whether oneDNN is used": (lambda: _mkldnn.enabled, lambda on: setattr(_mkldnn, "enabled", on)),
    "whether subnormal numbers become zero": (_subnormal_numbers_are_zero, torch.set_flush_denormal),
    "PyTorch's random numbers": (
        lambda: torch.get_rng_state().tolist(),
        lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
    ),
}


def settings(*, random: bool) -> dict[str, Any]:
    """Return the values of the settings.

    Args:
        random: also the state of random numbers.
    """
    return {name: get() for name, (get, _) in _SETTINGS.items() if random or "random" not in name}


def restore(before: dict[str, Any]) -> list[str]:
    """Set what is no longer as it was before, and return its names."""
    changed = [name for name, value in before.items() if _SETTINGS[name][0]() != value]
    for name in changed:
        _SETTINGS[name][1](before[name])
    return changed
