"""Names of the oneDNN primitives that ran: its verbose log, read from standard output while it is written."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import IO

import torch

_OURS = b"onednn_verbose"
#: An executed convolution: onednn_verbose,v1,primitive,exec,engine,primitive kind,implementation,propagation kind,...
_CONVOLUTION = re.compile(_OURS + rb".*,exec,[^,]*,(?:de)?convolution,([^,]*),([^,\s]*)")


@contextmanager
def onednn_log() -> Generator[Callable[[], tuple[str, ...]], None, None]:
    """In this block oneDNN's log is on, and off the user's standard output.

    Yield a function that returns the convolutions executed since its last call: ``jit_dw:avx2 (backward_weights)``.
    The log goes to C's stdout and nowhere else, so file descriptor 1 points to a temporary file meanwhile; every
    other line found there is passed on to the real standard output.
    """
    if not torch.backends.mkldnn.is_available():
        yield tuple
        return
    with tempfile.TemporaryFile() as file, redirected(1, file) as real:
        read = 0

        def take() -> tuple[str, ...]:
            nonlocal read
            _flush()
            lines = os.pread(file.fileno(), os.fstat(file.fileno()).st_size - read, read).splitlines(keepends=True)
            read += sum(map(len, lines))
            with suppress(OSError):  # the process has closed its standard output, or its reader is gone
                os.write(real, b"".join(line for line in lines if not line.startswith(_OURS)))
            return tuple(f"{m[1].decode()} ({m[2].decode()})" for m in map(_CONVOLUTION.match, lines) if m)

        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                yield take
        finally:
            take()


@contextmanager
def redirected(descriptor: int, file: IO[bytes]) -> Generator[int, None, None]:
    """Let a file descriptor of this process be that of a file in this block; yield a copy of what it was."""
    _flush()
    real = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield real
    finally:
        _flush()
        os.dup2(real, descriptor)
        os.close(real)


def _flush() -> None:
    """Write out what Python and C hold back, so that both arrive in the order in which they were written."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with suppress(ValueError, OSError):
                stream.flush()
    with suppress(OSError, AttributeError, TypeError):  # the last on Windows
        ctypes.CDLL(None).fflush(None)
