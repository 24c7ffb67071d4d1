"""Processes that do one task after the other, and are replaced when a task hangs, dies, or breaks the device.

After an illegal access a CUDA context answers every call with the same error: a process that has seen one is of no use.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from gpu_calls import short

_BROKEN = ("CUDA error", "HIP error", "illegal memory access", "misaligned address", "launch failure", "device-side")


class Worker:
    """One process, started at its first task."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def run(self, task: Callable[..., dict[str, Any]], *arguments: Any, limit: float) -> dict[str, Any]:
        """The task's answer, or ``{"error": sentence}``; after ``limit`` seconds it is given up."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
        try:
            answer = self._pool.submit(task, *arguments).result(timeout=max(1.0, limit))
            said = str(answer.get("error", "")) + " ".join(answer.get("failures", ()))
        except concurrent.futures.TimeoutError:
            answer, said = {"error": f"not done after {limit:.0f} s"}, _BROKEN[0]
        except BrokenProcessPool:
            answer, said = {"error": "the process died"}, _BROKEN[0]
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            answer = {"error": short(error)}
        if any(word in said for word in _BROKEN):
            self.stop()
        return answer

    def stop(self) -> None:
        """End the process; a next task starts another."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def run_once(task: Callable[..., dict[str, Any]], *arguments: Any, limit: float) -> dict[str, Any]:
    """A task in a process of its own."""
    worker = Worker()
    answer = worker.run(task, *arguments, limit=limit)
    worker.stop()
    return answer


def in_parallel(
    task: Callable[..., dict[str, Any]], texts: list[str], arguments: tuple[Any, ...], workers: int, until: float
) -> dict[str, Any]:
    """Run a task for every text, until the time is up: checks passed, failures, and how far it got."""
    found: dict[str, Any] = {"passed": 0, "failures": [], "done": 0, "of": len(texts)}
    waiting, lock = deque(texts), threading.Lock()

    def serve() -> None:
        worker = Worker()
        while time.monotonic() < until:
            try:
                text = waiting.popleft()
            except IndexError:
                break
            answer = worker.run(task, text, *arguments, limit=until - time.monotonic())
            late = time.monotonic() >= until and "error" in answer
            with lock:
                found["passed"] += answer.get("passed", 0)
                found["failures"] += answer.get("failures", [])
                found["done"] += not late
                if "error" in answer and not late:
                    found["failures"].append(f"{text}: {answer['error']}")
        worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(max(1, min(workers, len(texts))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
