"""Processes that do one task after the other, and are replaced when a task hangs, dies, or breaks the device.

After an illegal access a CUDA context answers every call with the same error: a process that has seen one is of no use.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from gpu_calls import short

from convgrad.backends import TritonBackend
from convgrad.check.child import Child, Lost, NoChild
from convgrad.engine.registry import backends

Task = Callable[..., dict[str, Any]]
_BROKEN = ("CUDA error", "HIP error", "illegal memory access", "misaligned address", "launch failure", "device-side")


def _answer(request: tuple[Any, ...]) -> dict[str, Any]:
    """In the child: what a task answers, and whether the process is of no use any more."""
    task, *arguments = request
    try:
        with warnings.catch_warnings():  # the graph would be of PyTorch's kernels
            warnings.filterwarnings("error", "a CUDA graph is captured before")
            answer = task(*arguments)
        said = " ".join((answer.get("error", ""), *answer.get("failures", ())))
    except Exception as error:
        answer, said = {"error": short(error)}, str(error)
    if found := banned():  # PyTorch's kernels have computed since, whose results are right
        kept = {key: value for key, value in answer.items() if key in ("passed", "failures", "error")}
        return {"answer": {"error": "; ".join(found), **kept}, "broken": True}
    return {"answer": answer, "broken": any(words in said for words in _BROKEN)}


def banned() -> list[str]:
    """Why backends of this process do not compute any more."""
    ours = (backend for backend in backends().values() if isinstance(backend, TritonBackend))
    return [f"{backend.name!r} was banned: {why}" for backend in ours for why in backend._banned.values()]


class Worker(Child):
    """One process, started at its first task."""

    def __init__(self) -> None:
        super().__init__(_answer)

    def run(self, task: Task, *arguments: Any, limit: float) -> dict[str, Any]:
        """The task's answer, or ``{"error": sentence}``; after ``limit`` seconds it is given up."""
        try:
            found = self.ask((task, *arguments), seconds=max(1.0, limit))
        except (Lost, NoChild) as lost:
            return {"error": str(lost)}
        if found["broken"]:
            self.close()
        return found["answer"]


def run_once(task: Task, *arguments: Any, limit: float) -> dict[str, Any]:
    """A task in a process of its own."""
    with Worker() as worker:
        return worker.run(task, *arguments, limit=limit)


def in_parallel(
    task: Task, texts: list[str], arguments: tuple[Any, ...], workers: int, until: float,
    keep: Callable[[str, dict[str, Any]], object],
) -> None:  # fmt: skip
    """Run a task for every text, until the time is up; ``keep`` gets each text with its answer, one after the other."""
    rest, one, count = iter(texts), Lock(), min(workers, len(texts))

    def serve(_: int) -> None:
        with Worker() as worker:
            for text in rest:
                answer = worker.run(task, text, *arguments, limit=until - time.monotonic())
                if time.monotonic() >= until and "error" in answer:
                    break
                with one:
                    keep(text, answer)

    with ThreadPoolExecutor(count or 1) as pool:
        list(pool.map(serve, range(count)))
