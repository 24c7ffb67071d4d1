"""A process of its own for each check that may not come back, with poisoned memory.

A kernel that reads uninitialized memory is right as long as that happens to be zero. So the C library of the
child fills what it hands out: every tensor, and every buffer inside of PyTorch's libraries, begins with large numbers
(about 8e37 in float32 and bfloat16, 5e303 in float64, NaN in float16). A child that dies is an answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

#: glibc writes the complement of this number into what it hands out, and the number itself into what is freed.
POISON = 0x7E ^ 0xFF


def poisoned_environment() -> dict[str, str]:
    """This process's environment, with the variables by which C libraries poison memory."""
    glibc = {"MALLOC_PERTURB_": str(POISON), "GLIBC_TUNABLES": f"glibc.malloc.perturb={POISON}"}
    apple = {"MallocPreScribble": "1", "MallocScribble": "1"}
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, **glibc, **apple, "PYTHONPATH": path, "CONVGRAD_CACHE": "off", "OMP_NUM_THREADS": "1"}


class Child:
    """A child process that answers requests; it is started when first needed, and again when it has died.

    Args:
        module: what it runs, a module that calls `serve`.
        seconds: how long it may think about one request.
    """

    def __init__(self, module: str, seconds: float = 60.0) -> None:
        self._command = [sys.executable, "-W", "ignore", "-m", module]
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Any) -> tuple[Any, str]:
        """The answer, and how the child died where it did (the answer is None then).

        Args:
            request: anything that JSON can say.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=poisoned_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(self._seconds, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timed_out = not late.is_alive()
        late.cancel()
        if line:
            return json.loads(line), ""
        self.close()
        return None, f"no answer in {self._seconds:g} s" if timed_out else _death(process.returncode)

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            process, self._process = self._process, None
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _death(status: int) -> str:
    return f"the process died ({signal.Signals(-status).name})" if status < 0 else f"the process ended with {status}"


def serve(answer: Any) -> None:
    """In the child: read requests, one JSON text a line, and answer each.

    Args:
        answer: the function of a request; what it prints goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)
