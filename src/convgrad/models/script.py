"""Running somebody's script unmodified, with every convolution taken over or watched, and what it did at the end."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

from .process import takeover, watch_stock
from .usage import Usage

__all__ = ["run_script"]


def run_script(
    script: str,
    args: Sequence[str] = (),
    *,
    stock: bool = False,
    csv: str | os.PathLike[str] | None = None,
    module: bool = False,
    measure: bool = True,
    out: TextIO | None = None,
) -> int:
    """Run a script as ``python script args...`` would, and report its convolutions.

    The script is ``__main__``, sees its own ``sys.argv`` and finds modules next to itself. The report follows when it
    has ended, however it ended.

    Args:
        script: path of the script, or the name of a module.
        stock: let PyTorch's own kernels compute, and report them.
        csv: also write the report there.
        module: ``script`` is a module's name, as for ``python -m``.
        measure: measure the machine's limit where it is not known yet (about two seconds, at the end).
        out: where the report goes; standard error by default, for standard output belongs to the script.

    Returns:
        The exit status of the script: what it gave to `sys.exit`, 1 after an exception, whose traceback is printed.

    Raises:
        FileNotFoundError: there is no such script.
    """
    if not module and not Path(script).exists():
        raise FileNotFoundError(f"no script at {script!r}")
    usage, start = Usage(), time.perf_counter()
    taken = watch_stock() if stock else takeover()
    try:
        with _as_main(script, args, module), usage, taken:
            status = _run(script, module)
    finally:
        wall = time.perf_counter() - start
        _report(usage, wall, stock, csv, measure, out or sys.stderr)
    return status


@contextmanager
def _as_main(script: str, args: Sequence[str], module: bool) -> Iterator[None]:
    """The argument list and the module path that the script would see; afterwards as before."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv[:] = [script, *args]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


def _run(script: str, module: bool) -> int:
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        return _status(stop.code)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        tb = _from_the_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(tb), tb)
        return 1
    return 0


def _status(code: object) -> int:
    """What the interpreter makes of the argument of `sys.exit`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _from_the_script(tb: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of those who started the script."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in ours:
        tb = tb.tb_next
    return tb


def _report(
    usage: Usage, wall: float, stock: bool, csv: str | os.PathLike[str] | None, measure: bool, out: TextIO
) -> None:
    who = "PyTorch's own choice" if stock else "convgrad's choice"
    share = usage.seconds / wall if wall else 0.0
    calls = sum(r.calls for r in usage.rows)
    times = "1 call" if calls == 1 else f"{calls} calls"
    print(f"\n{who}: {times}, {usage.seconds:.3f} s of {wall:.3f} s ({share:.0%}) in convolutions", file=out)
    print(usage.table(measure=measure), file=out)
    if csv is not None:
        Path(csv).write_text(usage.to_csv(measure=measure), encoding="utf-8")
