"""`Row`: one line of an explanation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..problem import Output

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One backend's answer for one output.

    Args:
        runs: what runs inside: ATen's own backend and function, and oneDNN's primitive where it was measured.
        workspace: bytes of scratch memory that the engine gives it.
        seconds: measured time of one call; None where nothing was measured.
    """

    output: Output
    backend: str
    chosen: bool
    reasons: tuple[str, ...]
    layout: str
    workspace: int
    runs: str = ""
    seconds: float | None = None

    def with_seconds(self, seconds: float, kernel: str = "") -> Row:
        """The same row with a measured time, and oneDNN's name of what ran."""
        return replace(self, seconds=seconds, runs=f"{self.runs}: {kernel}" if kernel else self.runs)
