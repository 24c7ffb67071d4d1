"""Several gloo processes for tests: started once a session, kept between tests, and never waited for without a limit.

Importing torch takes seconds, so one server process imports it and every rank is a fork of that server. A rank waits
for functions on a pipe, and ends when the pipe closes, however this process ended. After a failure all ranks of
that number are killed, because those that did not fail may wait in a collective; the next test starts new ones.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Failure", "Processes", "RankError"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "convgrad.parallel", "pytest"])


class Failure(NamedTuple):
    """How a rank failed: a traceback, the signal that ended it, or where it stood when the time was over."""

    rank: int
    text: str


class RankError(AssertionError):
    """A function failed in at least one process; the text is the first failure's, which the others often follow."""


class Processes:
    """Groups of processes by their number; each group is a gloo world of its own, started when first used."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def __call__(self, count: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> list[Any]:
        """Call a function in every process of a world, with the default process group ready.

        Args:
            count: the number of processes.
            function: a function at the top level of a module; a warning in it is an error, as in a test.
            arguments: what it is called with; they and the result are pickled, so tensors should be small.
            seconds: how long all of it may take.

        Returns:
            What each rank returned.

        Raises:
            RankError: a rank raised, died, or was not ready in time.
        """
        outcomes, failures = self.outcomes(count, function, *arguments, seconds=seconds, grace=0.5)
        if failures:
            said = "\n".join(f"rank {failure.rank} of {count}:\n{failure.text}" for failure in failures[:1])
            others = sorted(failure.rank for failure in failures[1:])
            raise RankError(said + (f"\n(failed later: rank {', '.join(map(str, others))})" if others else ""))
        return outcomes

    def outcomes(
        self, count: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60, grace: float | None = None
    ) -> tuple[list[Any], list[Failure]]:
        """The same, for tests in which ranks shall fail.

        Args:
            count: the number of processes.
            function: a function at the top level of a module.
            arguments: what it is called with.
            seconds: how long all of it may take.
            grace: how long the others may take after the first failure; None: until the time is over.

        Returns:
            What each rank returned (None where it failed), and the failures, the first one first.
        """
        group = self._groups.get(count)
        if group is None:
            group = self._groups[count] = _Group(count)
        outcomes, failures = group.call((function, arguments, seconds), seconds, grace)
        if failures:
            self._groups.pop(count).close()
        return outcomes, failures

    def close(self) -> None:
        """End all processes."""
        while self._groups:
            self._groups.popitem()[1].close()


class _Group:
    """The ranks of one world."""

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        folder = Path(self._folder.name)
        self._stacks = [folder / f"stack{rank}" for rank in range(count)]
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []
        for rank in range(count):
            ours, theirs = _context.Pipe()
            arguments = (theirs, rank, count, str(folder / "store"), str(self._stacks[rank]), dict(os.environ))
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)

    def call(self, request: tuple[Any, ...], seconds: float, grace: float | None) -> tuple[list[Any], list[Failure]]:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(request)
        outcomes: list[Any] = [None] * len(self._pipes)
        failures: list[Failure] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    value, error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    value, error = None, self._death(rank)
                outcomes[rank] = value
                if error is not None:
                    if not failures and grace is not None:
                        deadline = min(deadline, time.monotonic() + grace)
                    failures.append(Failure(rank, error))
        if not failures:
            failures += [Failure(rank, self._stack(rank, seconds)) for rank in waiting.values()]
        return outcomes, failures

    def _death(self, rank: int) -> str:
        self._ranks[rank].join(5)
        status = self._ranks[rank].exitcode
        how = f"killed by {signal.Signals(-status).name}" if status and status < 0 else f"ended with {status}"
        return f"{how}\n{self._stacks[rank].read_text()}".strip()

    def _stack(self, rank: int, seconds: float) -> str:
        """Where a rank stands that was not ready in time."""
        os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 2
        while time.monotonic() < end and not self._stacks[rank].stat().st_size:
            time.sleep(0.05)
        return f"no answer in {seconds:g} s; it stood at\n{self._stacks[rank].read_text()}"

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, count: int, store: str, stack: str, environment: dict[str, str]) -> None:
    """In a rank: join the world, then answer requests until the pipe closes."""
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of this machine need not have an address
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with Path(stack).open("w") as file:
        faulthandler.enable(file, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
        )
        while True:
            try:
                function, arguments, _ = pipe.recv()
            except EOFError:
                break
            try:
                torch.manual_seed(0)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    answer = function(*arguments), None
            except BaseException:  # SystemExit and KeyboardInterrupt are failures of the function too
                answer = None, traceback.format_exc()
            try:
                pipe.send(answer)
            except BrokenPipeError:
                break
        os._exit(0)  # the other ranks may be gone, and nobody waits for an orderly farewell
