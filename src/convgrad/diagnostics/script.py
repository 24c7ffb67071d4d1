"""A script run unmodified, every convolution taken over or observed; its report and its profile, also from a file."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from csv import DictReader, Error
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from ..foreign import read_json
from ..models import as_main, run_main
from ..tables import counted, wrapped
from .children import third_step, watching
from .profile import Profile, Variant
from .records import Call, Usage, limited, reasoned, together
from .savings import costs_of_rows
from .screen import shown
from .step import Stage


def run_script(
    script: str, args: Sequence[str] = (), *, stock: bool = False, accelerate: bool = False,
    csv: str | os.PathLike[str] | None = None, module: bool = False, measure: bool = True, out: TextIO | None = None,
    width: int | None = None, first: int | None = None, then: Callable[[dict[str, Any]], object] | None = None,
    usage: Usage | None = None, trace: str | os.PathLike[str] | None = None, kernels: Sequence[str] = (),
) -> int:  # fmt: skip
    """Run a script as ``python script args...`` would, and report its convolutions.

    The script is ``__main__``, sees its own ``sys.argv`` and finds modules next to itself. The report follows when it
    has ended, however it ended; if it leaves non-daemon threads running, when the interpreter ends. The processes that
    it starts are watched, too.

    Args:
        script: path of the script, or the name of a module.
        stock: take nothing over, and report what the script itself chose: PyTorch, or what it uses of convgrad.
        accelerate: do to each model that the script trains what `accelerate_` would, and take nothing else over.
        csv: also write the report there.
        module: ``script`` is a module's name, as for ``python -m``.
        measure: measure the machine's limit if it is not known yet or too low (about two seconds, at the end).
        out: where the report goes; by default standard error, because standard output belongs to the script.
        width: the longest line of the report.
        first: how many rows the report has, the most expensive ones; None for all.
        then: called after the report with the same as plain data.
        usage: gets the calls.
        trace: write the third training step there, as `torch.profiler` sees it, with a range for each layer; of each of
            several processes into a file of its own, whose name ends in its rank.
        kernels: scripts or modules that register kernels, which new interpreters load, too.

    Returns:
        The exit status of the script: what it gave to `sys.exit`, or 130 after an interrupt and 1 after any other
        exception, whose traceback is printed.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: ``stock`` and ``accelerate`` exclude each other.
    """
    if stock and accelerate:
        raise ValueError("stock and accelerate exclude each other")
    if not module and not Path(script).exists():
        raise FileNotFoundError(f"no script at {script!r}")
    # The script may go to another folder.
    target, trace_to = (None if path is None else Path(path).absolute() for path in (csv, trace))
    start, others, file = time.perf_counter(), set(threading.enumerate()), out or sys.stderr
    how = "stock" if stock else "accelerate" if accelerate else "takeover"
    with ExitStack() as opened:
        watch = opened.enter_context(watching(how, Usage() if usage is None else usage, kernels, trace_to))

        def report() -> None:
            if not watch.first:  # a process that the script forked
                return
            wall, (children, cut) = time.perf_counter() - start, watch.gather()
            if trace_to is not None and not watch.notes:
                watch.notes.append(
                    "no trace: no process came to the third step of an optimizer outside of a profiler of its own"
                )
            who = {"takeover": "convgrad's choice", "stock": "the script's own choice"}.get(how, "accelerate_")
            rank = f"rank {os.environ['RANK']}, " if "RANK" in os.environ else ""  # one of several, which all report
            calls, seconds = counted(sum(row.calls for row in watch.usage.rows), "call"), watch.usage.seconds
            rest = f" of {wall:.3f} s ({seconds / wall:.0%}) in convolutions"
            if several := _several(children, seconds > wall):
                rest = f" in convolutions, {several} added up; the script took {wall:.3f} s"
            lines = [f"\n{rank}{who}: {calls}, {seconds:.3f} s{rest}", *watch.notes, *watch.accelerated]
            if accelerate and not watch.accelerated:
                lines.append("no model was accelerated: none was trained that has a layer which convgrad computes")
            if cut:
                ended = "ended by a signal, or by os._exit: the calls of the last second may be missing"
                lines.append(f"{counted(cut, 'child process')} {ended}")
            with suppress(KeyboardInterrupt):  # the rest is known
                limited(watch.usage.rows, measure)
            with suppress(OSError, ValueError):  # the script closed it, or its reader is gone
                text, table = "\n".join(lines), watch.usage.table(width=width, first=first)
                print(text if width is None else wrapped(text, width), table, sep="\n", file=file, flush=True)
            try:
                if target is not None:
                    watch.usage.to_csv(target)
                if then is not None:
                    known = {"children": children, "children_cut": cut, "accelerated": watch.accelerated}
                    then({"wall_seconds": wall, "taken_over": how == "takeover", **known, **watch.usage.to_dict()})
            except OSError as error:
                print(f"convgrad: {error.filename!r} was not written: {error.strerror}", file=file)

        opened.callback(report)
        if trace_to is not None:
            opened.enter_context(third_step(trace_to, watch))
        opened.enter_context(as_main(script, args, module))
        status = run_main(script, module)
        if any(t not in others and not t.daemon for t in threading.enumerate()):
            atexit.register(opened.pop_all().close)  # the interpreter waits for them, and then comes to this
    if not watch.first:  # it ends where the script does
        raise SystemExit(status)
    return status


def _several(children: int, threads: bool) -> str:
    """Return what computed at the same time, where times of its parts may exceed the whole; else nothing."""
    return counted(children, "child process") if children else "threads" * threads


def profile_script(
    script: str, args: Sequence[str] = (), *, stock: bool = False, seconds: float = 10.0,
    stage: Stage = lambda _: None, kernels: Sequence[str] = (),
) -> tuple[Profile, int]:  # fmt: skip
    """Run a script unmodified, with every convolution taken over; return its profile and its exit status.

    Args:
        stock: take nothing over.
        seconds: about how long the rest may take after the script has ended.
        stage: called with a description of each stage.
        kernels: as for `run_script`.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: it computed no convolution.
    """
    usage, start, ran = Usage(), time.perf_counter(), dict[str, Any]()
    status = run_script(
        script, args, stock=stock, measure=False, out=StringIO(), usage=usage, then=ran.update, kernels=kernels
    )
    wall = time.perf_counter() - start
    seen = usage.rows
    if not seen:
        hint = "; convgrad's own options stand before the script" if status and args else ""
        raise ValueError(f"{script} computed no convolution (its exit status is {status}{hint})")
    stage("measuring what this machine can do at best")
    rows, limits = limited(seen if stock else [*map(reasoned, seen)])
    stage("timing other backends for the most expensive convolutions")
    until = time.perf_counter() + 0.9 * seconds
    tune = shlex.join(["convgrad", "tune", script, *args])
    costs, looked = costs_of_rows(rows, wall * 1e3, until, tune, layout=True, stock=stock)
    who = "the script" if stock else "convgrad"
    calls = f"{sum(row.calls for row in rows)} calls of convolutions, by {who}'s choice of kernels"
    finding = f"{shown(wall)} in all, {shown(usage.seconds)} of it ({usage.seconds / wall:.0%}) in {calls}."
    if several := _several(ran.get("children", 0), usage.seconds > wall):
        finding = f"{shown(wall)} in all; {shown(usage.seconds)} in {calls}, {several} added up."
    notes = [
        "One run tells nothing about its spread. Run it again with --stock, and compare the two with --against.",
        "A row's time for one call is the median of its last hundred calls.",
        *([f"The script's exit status was {status}."] if status else []),
    ]
    profile = Profile.of(
        rows, costs, notes, limits, rows[0].device, kind="run", what=script, finding=finding, looked=looked,
        milliseconds=wall * 1e3, variants=(Variant(who, wall * 1e3),), timeline=usage.timeline(rows),
    )  # fmt: skip
    return profile, status


def profile_table(path: str | Path) -> Profile:
    """Return the profile in a CSV file that ``convgrad run``, `convgrad.trace` or ``convgrad bench`` wrote, or in the
    JSON of ``convgrad run`` or of an earlier report.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file.
    """
    rows = read_table(path)
    if rows is None:
        return Profile.read(path)
    total, calls = sum(row.total for row in rows), sum(row.calls for row in rows)
    finding = f"{calls} calls of convolutions, {shown(total * 1e-3)} in all."
    notes = ["A table does not say what its machine can do at best, so the roofline has no roof."]
    return Profile.of(
        rows, notes=notes, kind="table", what=str(path), finding=finding,
        conditions="a machine that the file does not name",
    )  # fmt: skip


# ---- tables ------------------------------------------------------------------------------------------

#: Column -> the field of a `Call`, where it has another name.
_NAMES = {"output": "outputs", "mean ms": "milliseconds", "of limit": "of_limit", "layer": "layers",
          "pytorch_milliseconds": "pytorch"}  # fmt: skip


def read_table(path: str | Path) -> list[Call] | None:
    """Return the calls in a file that `profile_table` reads, most expensive first; None for other JSON than a run's."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # with the mark that spreadsheets write
        if str(path).endswith(".json"):
            data = read_json(text)
            if not isinstance(data, dict) or data.get("schema") != "convgrad run":
                return None
            calls = [*map(Call.from_dict, data["data"]["rows"])]
        else:
            lines = [{_NAMES.get(k, k): value for k, value in line.items()} for line in DictReader(StringIO(text))]
            if lines and not {"outputs", "backend", "milliseconds", "problem"} <= set(lines[0]):
                raise ValueError(f"it has the columns {', '.join(sorted(filter(None, lines[0])))}")
            calls = [_call(line) for line in lines if line["milliseconds"] != ""]
        if not calls:
            raise ValueError("it has no line")
        return together(calls)
    except (KeyError, TypeError, AttributeError, ValueError, Error) as error:
        writers = "convgrad run --csv or --json, trace, or bench PROBLEM --csv"
        raise ValueError(f"{str(path)!r} is no table of {writers}: {error}") from None


def _call(line: Mapping[str, Any]) -> Call:
    one, calls = float(line["milliseconds"]), int(line.get("calls") or 1)
    if calls < 1 or not 0 <= one < float("inf"):
        raise ValueError(f"{calls} calls of {one} ms")
    more: dict[str, Any] = {name: float(line[name]) for name in ("of_limit", "pytorch") if line.get(name)}
    call = Call(
        line["problem"],
        re.sub(r" \([^)]*\)", "", line["outputs"]),  # what the outputs of a transposed one are to its user
        f"{line['backend']} {line.get('kernel') or ''}".rstrip(),
        device=line.get("device") or "cpu",
        reason=line.get("reason") or "",
        milliseconds=one,
        calls=calls,
        total=one * calls,
        copied=len(copies.split(";")) if (copies := line.get("copies")) else 0,
        layers=tuple((line.get("layers") or "").split()),
        **more,
    )
    return replace(call, problem=str(call.convolution), outputs="+".join(call.passes), layout=call.convolution.layout)
