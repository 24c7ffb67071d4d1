"""A Triton driver that compiles for a chip that is not here and starts nothing; what would have been started is kept.

Everything above the driver is Triton's own: specialization, compilation, its caches, the compiled kernel's launch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

__all__ = ["StubDriver", "install"]


class StubDriver:
    """Device 0 of an sm_90, for tensors that may lie anywhere."""

    def __init__(self, started: list[tuple[Any, ...]]) -> None:
        self.started = started
        #: Of the kernels that are loaded next; 0 for all others.
        self.spills: list[int] = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (
                1,
                name,
                32,
                self.spills.pop() if self.spills else 0,
                1024,
            ),
            unload_module=lambda *_: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
        )

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            # packed metadata, launch metadata, the two hooks of a profiler, and then the kernel's own arguments
            arguments = tuple(a.data_ptr() if hasattr(a, "data_ptr") else a for a in rest[4:])
            self.started.append((function, (x, y, z), src, arguments, metadata))

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def install(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Put the driver in; what would have been started is appended to the list that is returned."""
    started: list[tuple[Any, ...]] = []
    patch.setattr(driver, "_active", StubDriver(started))
    return started
