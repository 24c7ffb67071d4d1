"""Several gloo processes for tests: started once a session, kept between tests, and never waited for without a limit.

Importing torch takes seconds, so one server process imports it and every rank is a fork of that server. After a failure
all ranks of that number are killed, because those that did not fail may wait in a collective; the next test starts new
ones.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "convgrad.parallel", "pytest"])


def on(count: int, **options: float) -> Callable[[Callable[[], None]], Callable[[Processes], None]]:
    """A test whose body runs in each of ``count`` processes."""

    def test_of(body: Callable[[], None]) -> Callable[[Processes], None]:
        def test(processes: Processes) -> None:
            processes(count, body, **options)

        functools.update_wrapper(test, body)
        del test.__wrapped__  # pytest would ask it for its fixtures
        test.body = body  # pyright: ignore[reportFunctionMemberAccess]
        body.__qualname__ += ".body"  # where pickle finds it, for the name alone is the test's
        return test

    return test_of


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
            seconds: how long it may take.

        Returns:
            What each rank returned.

        Raises:
            RankError: a rank raised, died, or was not ready in time.
        """
        outcomes, failures = self.outcomes(count, function, *arguments, seconds=seconds, until=FIRST_EXCEPTION)
        if failures:
            (rank, text), *others = failures.items()
            later = f"\n(failed later: rank {', '.join(map(str, dict(others)))})" if others else ""
            raise RankError(f"rank {rank} of {count}:\n{text}{later}")
        return outcomes

    def outcomes(
        self, count: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60, until: str = ALL_COMPLETED
    ) -> tuple[list[Any], dict[int, str]]:
        """The same, for tests in which ranks shall fail: what each returned (None: it failed), and how those failed."""
        group = self._groups.pop(count, None) or _Group(count)
        futures = [rank.submit(_run, function, arguments, seconds) for rank in group.ranks]
        first = wait(futures, return_when=until).done
        wait(futures, 0.5)  # others may fail because one did
        failures: dict[int, str] = {}
        for rank in sorted(range(count), key=lambda rank: futures[rank] not in first):
            error = futures[rank].exception() if futures[rank].done() else None
            if isinstance(error, BrokenProcessPool):
                failures[rank] = f"{error}\n{group.errors[rank].read_text()}"
            elif error is not None:
                failures[rank] = str(error)
        outcomes = [None if rank in failures or not f.done() else f.result() for rank, f in enumerate(futures)]
        if failures:
            group.close()
        else:
            self._groups[count] = group
        return outcomes, failures

    def close(self) -> None:
        """End all processes."""
        while self._groups:
            self._groups.popitem()[1].close()


class _Group:
    """The ranks of one world, each a pool of one process."""

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.errors = [Path(self._folder.name, f"errors{rank}") for rank in range(count)]
        self.ranks = [
            ProcessPoolExecutor(1, _context, _join, (rank, count, errors, dict(os.environ)))
            for rank, errors in enumerate(self.errors)
        ]
        self._pids = [future.result() for future in [rank.submit(os.getpid) for rank in self.ranks]]

    def close(self) -> None:
        for process in multiprocessing.active_children():
            if process.pid in self._pids:
                process.kill()
        for rank in self.ranks:
            rank.shutdown()
        self._folder.cleanup()


def _join(rank: int, count: int, errors: Path, environment: dict[str, str]) -> None:
    """In a rank: join the world; where it stands when it ends by a signal or by the clock is written to ``errors``."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.enable(all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of this machine need not have an address
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{errors.with_name('store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    """In a rank: a function's result; or its traceback, as not every exception can be pickled."""
    import torch

    torch.manual_seed(0)
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return function(*arguments)
    except BaseException:  # SystemExit and KeyboardInterrupt are failures of the function too
        raise RankError(traceback.format_exc()) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
