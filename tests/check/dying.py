"""A child process for `test_aten_search` that does as it is told, and dies where it is told to."""

import os
import signal
import time
from typing import Any

import torch


def answer(request: str) -> dict[str, Any]:
    if request == "die":
        signal.raise_signal(signal.SIGSEGV)
    if request == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal does
    if request == "exit":
        os._exit(3)
    if request == "sleep":
        time.sleep(60)
    return {"got": request, "poisoned": bool((torch.empty(1000) > 1e30).all())}
