"""Which oneDNN primitives ran: its verbose log, read from standard output while it is being written."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile

import torch


class OneDNNLog:
    """Turns oneDNN's log on, keeps it off the user's standard output, and gives out what was added.

    The log goes to C's stdout and nowhere else, so file descriptor 1 points to a temporary file meanwhile; every
    other line found there is passed on to the real standard output.
    """

    def __init__(self) -> None:
        self._real = -1
        self._read = 0

    def start(self) -> None:
        """Begin; nothing happens where this PyTorch has no oneDNN."""
        if not torch.backends.mkldnn.is_available() or self._real >= 0:
            return
        _flush()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, closed in stop
        self._read = 0
        self._real = os.dup(1)
        os.dup2(self._file.fileno(), 1)
        torch._C._verbose.mkldnn_set_verbose(1)  # pyright: ignore[reportAttributeAccessIssue]

    def stop(self) -> None:
        """Put everything back as it was."""
        if self._real < 0:
            return
        torch._C._verbose.mkldnn_set_verbose(0)  # pyright: ignore[reportAttributeAccessIssue]
        self.take()
        os.dup2(self._real, 1)
        os.close(self._real)
        self._real = -1
        self._file.close()

    def take(self) -> tuple[str, ...]:
        """The convolutions executed since the last call, each as ``kernel (kind)``; the rest is passed on."""
        if self._real < 0:
            return ()
        _flush()
        size = os.fstat(self._file.fileno()).st_size
        text = os.pread(self._file.fileno(), size - self._read, self._read).decode(errors="replace")
        self._read = size
        kernels: list[str] = []
        rest: list[str] = []
        for line in text.splitlines(keepends=True):
            if line.startswith("onednn_verbose"):
                kernels += _kernel(line)
            else:
                rest.append(line)
        if rest:
            os.write(self._real, "".join(rest).encode())
        return tuple(kernels)


def _kernel(line: str) -> list[str]:
    """``jit_dw:avx2 (backward_weights)`` of a line that reports an executed convolution, or nothing.

    The fields: onednn_verbose,v1,primitive,exec,engine,primitive kind,implementation,propagation kind,...
    """
    fields = line.strip().split(",")
    if "exec" not in fields:
        return []
    at = fields.index("exec")
    if len(fields) < at + 5 or fields[at + 2] not in ("convolution", "deconvolution"):
        return []
    return [f"{fields[at + 3]} ({fields[at + 4]})"]


def _flush() -> None:
    """Write out what Python and C hold back, so that both arrive in the order in which they were written."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with contextlib.suppress(ValueError, OSError):
                stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
