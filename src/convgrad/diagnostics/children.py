"""The processes that a script starts: each writes the calls that it makes to a folder, where the first one reads them.

A forked process goes on watching. A new interpreter, as ``torchrun`` and multiprocessing start it, finds the folder
``child`` on its PYTHONPATH, and watches from its import of PyTorch on. A process that is killed has written what it
computed until a second before.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import util
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from ..check import load_kernels
from ..engine import Event, observing
from ..models import accelerating, observe_aten, takeover
from .calls import Call, Usage
from .layers import layer_ranges

#: The variable of the environment that says how a child is watched, where it writes, and whose kernels it loads.
_VARIABLE = "CONVGRAD_WATCH"
_CHILD = str(Path(__file__).parent / "child")


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
        self.first, self.usage, self._due = False, Usage(), 0.0

    def write_at_exit(self) -> None:
        """Write what is known when multiprocessing ends this process, which it does without a word to `atexit`."""
        util.Finalize(None, self.write, exitpriority=0)

    def write(self, ended: bool = True) -> None:
        """Write what this process, which is a child, has computed."""
        if self.first or not (rows := self.usage.rows):
            return
        data = {"ended": ended, "rows": [row.to_dict() for row in rows], "accelerated": self.accelerated}
        target = Path(self.folder, f"{os.getpid()}.json")
        with suppress(OSError):  # the first process has ended
            target.with_suffix(".new").write_text(json.dumps(data))
            target.with_suffix(".new").replace(target)

    def gather(self) -> tuple[int, int]:
        """Add what the children have computed to `usage` and `accelerated`; return how many computed a convolution.

        The second number is that of those which were ended before they could write their last calls.
        """
        files = [json.loads(path.read_text()) for path in sorted(Path(self.folder).glob("*.json"))]
        for one in files:
            self.usage.add([*map(Call.from_dict, one["rows"])])
            self.accelerated += [line for line in one["accelerated"] if line not in self.accelerated]
        return len(files), sum(not one["ended"] for one in files)


#: The watches of this process that are open.
_open: list[Watch] = []
#: What is open until a child ends.
_rest = ExitStack()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [watch.forked() for watch in _open])


@contextmanager
def watching(how: str, usage: Usage, kernels: Sequence[str] = ()) -> Iterator[Watch]:
    """Watch this process and its children, which load the kernels, while the block lasts; ``usage`` gets the calls."""
    folder, first, before = tempfile.mkdtemp(prefix="convgrad"), os.getpid(), dict(os.environ)
    os.environ[_VARIABLE] = json.dumps([how, folder, *kernels])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_CHILD, before.get("PYTHONPATH"))))
    try:
        with Watch(how, folder, usage).open() as watch:
            yield watch
    finally:
        for name in (_VARIABLE, "PYTHONPATH"):
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
        if os.getpid() == first:
            shutil.rmtree(folder, ignore_errors=True)


def watch_this_process() -> None:
    """Watch this process, a child in which a new interpreter runs, until it ends."""
    if _VARIABLE not in os.environ:
        return
    how, folder, *kernels = json.loads(os.environ[_VARIABLE])
    for source in kernels:
        load_kernels(source, verify=False)  # as the first process did
    watch = _rest.enter_context(Watch(how, folder, Usage()).open())
    watch.forked()
    watch.write_at_exit()
    atexit.register(_rest.close)
