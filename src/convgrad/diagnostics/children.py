"""The processes that a script starts: each writes the calls that it makes to a folder, where the first one reads them.

A forked process goes on watching. A new interpreter, as ``torchrun`` and multiprocessing start it, finds the folder on
its PYTHONPATH, and in it an entry point that PyTorch calls once it is imported. A process that is killed has written
what it computed until a second before.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import util
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._compat import profiler_enabled
from ..check import load_kernels
from ..engine import Event, observing
from ..models import accelerating, observe_aten, takeover
from .layers import layer_ranges
from .records import Usage

#: The variable of the environment that says how a child is watched, where it writes, and whose kernels it loads.
_VARIABLE = "CONVGRAD_WATCH"
#: File of the folder -> its text. At its end, the package watches the process in which it is imported.
_ENTRY_POINT = {
    "convgrad_child-0.dist-info/entry_points.txt": "[torch.backends]\nconvgrad_child = convgrad_child:watch\n",
    "convgrad_child.py": """def watch():
    try:
        import convgrad
    except ImportError as error:
        import os, sys
        print(f"convgrad run does not watch process {os.getpid()}: {error}", file=sys.stderr)
""",
}


class Watch:
    """A process whose convolutions are watched, and, of the first one, the processes that it starts."""

    def __init__(self, how: str, folder: str, usage: Usage) -> None:
        self.how, self.folder, self.usage = how, folder, usage
        self.first, self.accelerated, self.notes, self._due = True, list[str](), list[str](), 0.0

    @contextmanager
    def open(self) -> Iterator[Watch]:
        """Watch this process, and those that it forks, while the block lasts."""
        with ExitStack() as opened:
            opened.enter_context(takeover() if self.how == "takeover" else observe_aten())
            if self.how == "accelerate":
                self.accelerated = opened.enter_context(accelerating())
            opened.enter_context(layer_ranges())
            opened.enter_context(warnings.catch_warnings())  # a compiled model's, of hooks that are not the script's
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            opened.enter_context(observing(self._note))
            opened.callback(register_optimizer_step_post_hook(lambda *_: self.usage.end_step()).remove)
            _open.append(self)
            opened.callback(_open.remove, self)
            opened.callback(self.write)
            util.register_after_fork(self, Watch.write_at_exit)
            yield self

    def _note(self, event: Event) -> None:
        self.usage(event)
        if not self.first and time.monotonic() > self._due:
            self.write(ended=False)
            self._due = time.monotonic() + 1.0

    def forked(self) -> None:
        """Begin anew in a forked process."""
        self.first, self.usage, self.notes, self._due = False, Usage(), [], 0.0

    def write_at_exit(self) -> None:
        """Write what is known when multiprocessing ends this process, which it does without a word to `atexit`."""
        util.Finalize(None, self.write, exitpriority=0)

    def write(self, ended: bool = True) -> None:
        """Write what this process, which is a child, has computed."""
        if self.first or not (rows := self.usage.rows):
            return
        target = Path(self.folder, f"{os.getpid()}.calls")
        with suppress(OSError):  # the first process has ended
            target.with_suffix(".new").write_bytes(pickle.dumps((ended, rows, self.accelerated, self.notes)))
            target.with_suffix(".new").replace(target)

    def gather(self) -> tuple[int, int]:
        """Add what the children noted; return how many there are, and how many were ended before they wrote all."""
        children = [pickle.loads(path.read_bytes()) for path in sorted(Path(self.folder).glob("*.calls"))]
        for _, rows, accelerated, notes in children:
            self.usage.add(rows)
            self.accelerated += [line for line in accelerated if line not in self.accelerated]
            self.notes += notes
        return len(children), sum(not ended for ended, *_ in children)


#: The watches of this process that are open.
_open: list[Watch] = []
#: What is open until a child ends.
_rest = ExitStack()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [watch.forked() for watch in _open])


@contextmanager
def third_step(path: Path, watch: Watch) -> Iterator[None]:
    """Write the third step that an optimizer ends in this block as a Chrome trace, and note where it is."""
    rank, process = os.environ.get("RANK"), os.getpid()
    if rank is not None or not watch.first:
        path = path.with_stem(f"{path.stem}.{process if rank is None else f'rank{rank}'}")

    def write(profiler: torch.profiler.profile) -> None:
        if os.getpid() == process and profiler.step_num > 2:  # and no process that this one forked
            profiler.export_chrome_trace(str(path))
            watch.notes.append(f"the third training step, for Perfetto or chrome://tracing: {path}")

    def step(*_: object) -> None:
        if profiler.step_num > 1 or not profiler_enabled():  # one of the script's: two at once are an error
            profiler.step()

    plan = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(schedule=plan, on_trace_ready=write, record_shapes=True) as profiler:
        hook = register_optimizer_step_post_hook(step)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def watching(how: str, usage: Usage, kernels: Sequence[str] = (), trace: Path | None = None) -> Iterator[Watch]:
    """Watch this process and its children, which load the kernels, while the block lasts; ``usage`` gets the calls."""
    folder, first, before = tempfile.mkdtemp(prefix="convgrad"), os.getpid(), dict(os.environ)
    os.environ[_VARIABLE] = json.dumps([how, folder, trace and str(trace), *kernels])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before.get("PYTHONPATH"))))
    for name, text in _ENTRY_POINT.items():
        Path(folder, name).parent.mkdir(exist_ok=True)
        Path(folder, name).write_text(text)
    sys.path.append(folder)  # which multiprocessing hands on
    try:
        with Watch(how, folder, usage).open() as watch:
            yield watch
    finally:
        with suppress(ValueError):  # the script may have a path of its own by now
            sys.path.remove(folder)
        for name in (_VARIABLE, "PYTHONPATH"):
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
        if os.getpid() == first:
            shutil.rmtree(folder, ignore_errors=True)


def watch_this_process() -> None:
    """Watch this process, a child in which a new interpreter runs, until it ends."""
    how, folder, trace, *kernels = json.loads(os.environ[_VARIABLE])
    for source in kernels:
        load_kernels(source, verify=False)  # as the first process did
    watch = _rest.enter_context(Watch(how, folder, Usage()).open())
    watch.forked()
    if trace is not None:
        _rest.enter_context(third_step(Path(trace), watch))
    watch.write_at_exit()
    atexit.register(_rest.close)
