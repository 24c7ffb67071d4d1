"""Run a script unmodified, with every convolution taken over or observed, and report them at the end."""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from zipfile import is_zipfile

from ..tables import counted, wrapped
from . import process
from .process import observe_aten, takeover
from .usage import Usage, known_limits

#: Whose frames stand above the script's in a traceback.
_STARTERS = {__file__, runpy.__file__, "<frozen runpy>"}


def run_script(
    script: str,
    args: Sequence[str] = (),
    *,
    stock: bool = False,
    csv: str | os.PathLike[str] | None = None,
    module: bool = False,
    measure: bool = True,
    out: TextIO | None = None,
    width: int | None = None,
    then: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Run a script as ``python script args...`` would, and report its convolutions.

    The script is ``__main__``, sees its own ``sys.argv`` and finds modules next to itself. The report follows when it
    has ended, however it ended; if it leaves non-daemon threads running, when the interpreter ends.

    Args:
        script: path of the script, or the name of a module.
        stock: take nothing over, and report what the script itself chose: PyTorch, or what it uses of convgrad.
        csv: also write the report there.
        module: ``script`` is a module's name, as for ``python -m``.
        measure: measure the machine's limit if it is not known yet or too low (about two seconds, at the end).
        out: where the report goes; by default standard error, because standard output belongs to the script.
        width: the longest line of the report.
        then: called after the report with the same as plain data.

    Returns:
        The exit status of the script: what it gave to `sys.exit`, or 130 after an interrupt and 1 after any other
        exception, whose traceback is printed.

    Raises:
        FileNotFoundError: there is no such script.
    """
    if not module and not Path(script).exists():
        raise FileNotFoundError(f"no script at {script!r}")
    target = None if csv is None else Path(csv).absolute()  # the script may go to another folder
    usage, start, others = Usage(), time.perf_counter(), set(threading.enumerate())
    with ExitStack() as opened:
        where = (target, out or sys.stderr, width, then)
        opened.callback(lambda: _report(usage, time.perf_counter() - start, stock, measure, *where))
        opened.enter_context(observe_aten() if stock else takeover())
        opened.enter_context(usage)
        opened.enter_context(_as_main(script, args, module))
        status = _run(script, module)
        if any(t not in others and not t.daemon for t in threading.enumerate()):
            atexit.register(opened.pop_all().close)  # the interpreter waits for them, and then comes to this
    return status


@contextmanager
def _as_main(script: str, args: Sequence[str], module: bool) -> Iterator[None]:
    """The argument list, the module path and the place of ``__main__`` that the script would see; then as before."""
    argv, path, mains = sys.argv[:], sys.path[:], {name: sys.modules[name] for name in ("__main__", "__mp_main__")}
    # A process that multiprocessing spawns or forks from a server calls the script's module so.
    sys.modules["__mp_main__"] = alias = ModuleType("__mp_main__")
    vars(alias)["__getattr__"] = lambda name: getattr(sys.modules["__main__"], name)
    sys.argv[:] = [script, *args]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        sys.modules.update(mains)


def _run(script: str, module: bool) -> int:
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif Path(script).is_dir() or script.endswith(".pyc") or is_zipfile(script):
            runpy.run_path(script, run_name="__main__")
        else:
            _run_file(os.path.abspath(script))
    except SystemExit as stop:
        return _status(stop.code)
    except BaseException as error:
        _show(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(path: str) -> None:
    """What the interpreter does with a file: runpy's ``__main__`` knows neither its absolute path nor its loader."""
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def _status(code: object) -> int:
    """What the interpreter makes of the argument of `sys.exit`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """The traceback that the interpreter would print: the script's frames, none of ours around them."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in _STARTERS:
        tb = tb.tb_next
    if tb is None and isinstance(error, ImportError):  # of runpy: there is no such module
        print(f"convgrad: {error}", file=sys.stderr)
        return
    frame = tb
    while frame is not None and frame.tb_next is not None:
        if frame.tb_next.tb_next is None and frame.tb_next.tb_frame.f_code.co_filename == process.__file__:
            frame.tb_next = None  # PyTorch's own error, met on the way through an exchanged kernel
        else:
            frame = frame.tb_next
    sys.excepthook(type(error), error.with_traceback(tb), tb)


def _report(
    usage: Usage,
    wall: float,
    stock: bool,
    measure: bool,
    csv: Path | None,
    out: TextIO,
    width: int | None,
    then: Callable[[dict[str, Any]], None] | None,
) -> None:
    who = "the script's own choice" if stock else "convgrad's choice"
    calls = counted(sum(r.calls for r in usage.rows), "call")
    head = f"\n{who}: {calls}, {usage.seconds:.3f} s of {wall:.3f} s ({usage.seconds / wall:.0%}) in convolutions"
    with suppress(KeyboardInterrupt):  # the rest is known
        known_limits(usage.rows, measure)
    with suppress(OSError, ValueError):  # the script closed it, or its reader is gone
        print(head if width is None else wrapped(head, width), usage.table(width=width), sep="\n", file=out, flush=True)
    try:
        if csv is not None:
            csv.write_text(usage.to_csv(), encoding="utf-8")
        if then is not None:
            then({"wall_seconds": wall, "taken_over": not stock, **usage.to_dict()})
    except OSError as error:
        print(f"convgrad: {error.filename!r} was not written: {error.strerror}", file=out)
