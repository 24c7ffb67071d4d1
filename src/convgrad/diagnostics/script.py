"""A script run unmodified, every convolution taken over or observed; its report and its profile."""

from __future__ import annotations

import atexit
import builtins
import io
import os
import runpy
import shlex
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

from ..models import observe_aten, takeover
from ..tables import counted, wrapped
from .calls import Usage, limited, reasoned, rounded
from .costs import costs_of_rows
from .files import read_table
from .page import shown
from .profile import Profile, Variant
from .step import Stage, quiet

#: Whose frames stand above the script's in a traceback.
_STARTERS = {__file__, runpy.__file__, "<frozen runpy>"}
_PROCESS = sys.modules[takeover.__module__].__file__


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
        if frame.tb_next.tb_next is None and frame.tb_next.tb_frame.f_code.co_filename == _PROCESS:
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
    rows = usage.rows
    calls = counted(sum(row.calls for row in rows), "call")
    head = f"\n{who}: {calls}, {usage.seconds:.3f} s of {wall:.3f} s ({usage.seconds / wall:.0%}) in convolutions"
    with suppress(KeyboardInterrupt):  # the rest is known
        limited(rows, measure)
    with suppress(OSError, ValueError):  # the script closed it, or its reader is gone
        print(head if width is None else wrapped(head, width), usage.table(width=width), sep="\n", file=out, flush=True)
    try:
        if csv is not None:
            csv.write_text(usage.to_csv(), encoding="utf-8")
        if then is not None:
            then({"wall_seconds": wall, "taken_over": not stock, **usage.to_dict()})
    except OSError as error:
        print(f"convgrad: {error.filename!r} was not written: {error.strerror}", file=out)


# ---- profiles ----------------------------------------------------------------------------------------


def profile_script(
    script: str, args: Sequence[str] = (), *, stock: bool = False, seconds: float = 10.0, stage: Stage = quiet
) -> tuple[Profile, int]:
    """Run a script unmodified, with every convolution taken over; return its profile and its exit status.

    Args:
        stock: take nothing over.
        seconds: about how long the rest may take after the script has ended.
        stage: called with a description of each stage.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: it computed no convolution.
    """
    usage, start = Usage(), time.perf_counter()
    with usage:
        status = run_script(script, args, stock=stock, measure=False, out=io.StringIO())
    wall = time.perf_counter() - start
    seen = usage.rows
    if not seen:
        hint = "; convgrad's own options stand before the script" if status and args else ""
        raise ValueError(f"{script} computed no convolution (its exit status is {status}{hint})")
    stage("measuring what this machine can do at best")
    seen, limits = limited(seen if stock else [*map(reasoned, seen)])
    rows = [call.normal() for call in seen]
    stage("timing other backends for the most expensive convolutions")
    until = time.perf_counter() + 0.9 * seconds
    tune = shlex.join(["convgrad", "tune", script, *args])
    costs, looked = costs_of_rows(rows, wall * 1e3, until, tune, layout=True, stock=stock)
    who = "the script" if stock else "convgrad"
    finding = (
        f"{shown(wall)} in all, {shown(usage.seconds)} of it ({usage.seconds / wall:.0%}) in "
        f"{sum(row.calls for row in rows)} calls of convolutions, by {who}'s choice of kernels."
    )
    notes = [
        "One run tells nothing about its spread. Run it again with --stock, and compare the two with --against.",
        "A row's time for one call is the median of its last hundred calls.",
        *([f"The script's exit status was {status}."] if status else []),
    ]
    ms = rounded(wall * 1e3)
    profile = Profile.of(
        rows, costs, notes, limits, rows[0].device, kind="run", what=script, finding=finding, looked=looked,
        milliseconds=ms, variants=(Variant(who, ms),),
    )  # fmt: skip
    return profile, status


def profile_table(path: str | Path) -> Profile:
    """Return the profile in a CSV file that ``convgrad run``, `convgrad.trace` or ``convgrad bench`` wrote, or in the
    JSON of ``convgrad run`` or of an earlier report.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file.
    """
    try:
        return Profile.read(path)
    except ValueError as error:
        if "no number under 'schema'" not in str(error) and "neither a page" not in str(error):
            raise
    rows = read_table(path)
    total, calls = sum(row.total for row in rows), sum(row.calls for row in rows)
    finding = f"{calls} calls of convolutions, {shown(total * 1e-3)} in all."
    notes = ["A table does not say what its machine can do at best, so the roofline has no roof."]
    return Profile.of(rows, (), notes, kind="table", what=str(path), finding=finding, conditions="not in the file")
