"""``convgrad tune``: measure the convolutions of a model, a script or a list ahead of time; take choices elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..tables import Table, counted
from . import options
from .app import BeforeAScript, Result, command, device_here, fail, loaded_kernels, progress, say, width
from .check import search_and_record
from .models import MODELS
from .options import OfModel, kind_of

if TYPE_CHECKING:
    import torch

    from ..problem import ConvProblem, Outputs


class Job(NamedTuple):
    """A problem and the outputs of one call: the output, or both gradients."""

    problem: ConvProblem
    outputs: Outputs

    def count(self, device: torch.device) -> int:
        """Return how often exactly this was measured here."""
        from ..engine import measurements

        measurements.reload()
        result = measurements.find(self.problem, self.outputs, device)
        return result.count if result is not None and result.same and result.complete else 0


@command("tune", cls=BeforeAScript)
def tune(
    what: Annotated[str, options.what("[MODEL|SCRIPT|FILE|PROBLEM]", "What to measure.", *MODELS)] = "",
    args: options.ScriptArgs = None,
    device: options.Device = "cpu",
    shape: options.Input = "",
    dtype: options.Dtype = "",
    channels_last: options.ChannelsLast = False,
    threads: options.Threads = 0,
    export: Annotated[Path | None, options.file("--export", help="Write all choices to this file, as JSON.")] = None,
    import_: Annotated[Path | None, typer.Option("--import", help="Read choices that were exported.")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="First remove all stored choices.")] = False,
    aten: Annotated[float, typer.Option("--aten", min=0, help="First run check --aten for so many seconds.")] = 0.0,
    as_json: options.AsJson = False,
) -> Result:
    """Measure ahead of time which backend is fastest for each convolution, and remember it on this machine.

    It measures a model's convolutions and large linear layers, a script's convolutions, a file of problems, or one
    problem: each forward and backward, three times. It can be interrupted; the same command continues from there. A
    script runs unmodified, to its end or until it is interrupted; then what it computed is measured. Options go before
    a script.

    Examples:
        convgrad tune --input 32x3x224x224 mobilenet_v2
        convgrad tune --aten 60 train.py --epochs 1
        convgrad tune --export choices.json
        convgrad tune --import choices.json
    """
    from .. import __version__
    from ..engine import measurements, store
    from ..foreign import read_json
    from ..settings import determinism_demanded

    if not (what or export or import_ or forget or aten > 0):
        raise fail("there is nothing to do", "name a model, a script, a file or a problem; or --export, --import")
    place, data = device_here(device), dict[str, Any]()
    jobs = _jobs_of(what, args or [], place, OfModel(shape, dtype, channels_last)) if what else []
    if forget:
        data["removed_problems"] = measurements.forget()
        say(f"choices for {counted(data['removed_problems'])} removed")
    if import_ is not None:
        try:
            read, here = measurements.imported(read_json(import_.read_text(encoding="utf-8-sig"))["choices"])
        except (ValueError, KeyError, TypeError) as error:
            raise fail(f"{import_} holds no exported choices: {error}", "a file that tune --export wrote") from None
        data["imported_problems"], data["imported_problems_for_this_machine"] = read, here
        say(f"choices for {counted(read)} read, {here} of them for this kind of machine")
    if aten > 0:
        data["aten_findings"], ended = search_and_record(aten, seed=0)
        if not ended:
            data["interrupted"] = True
    if what and not jobs and not data.get("interrupted"):  # a script
        jobs, data["script_status"] = _jobs_of_script(what, args or [])
        if determinism_demanded(place):
            raise fail(f"{what!r} demands deterministic algorithms, and then no measurement is used")
    if jobs and not data.get("interrupted"):
        data |= _tune(jobs, place)
    if export is not None:
        choices = measurements.exported()
        export.write_text(json.dumps({"convgrad": __version__, "choices": choices}, indent=1) + "\n", encoding="utf-8")
        data["exported_problems"] = sum(measurements.summary().values())
        say(f"choices for {counted(data['exported_problems'])} written to {export}")
    lost = store.unwritten(measurements.KIND)
    if lost:
        say("convgrad: choices could not be stored and end with this command; see convgrad info", sys.stderr)
    failed = data.get("script_status") or int(bool(lost) and export is None)
    return Result(data, 130 if data.get("interrupted") else failed)


def _jobs_of(what: str, args: Sequence[str], place: torch.device, of: OfModel) -> list[Job]:
    """Return the calls that training makes of what the command line names; none of a script, which has to run first."""
    from .problem_arguments import read_problems

    if kind_of(what) == "script":
        of.only_for(False, what)
        return []
    if args:
        raise fail(f"only a script takes arguments, got {args[0]!r}")
    jobs = [*dict.fromkeys(jobs_of(read_problems([what], models=(place, of), linear=True)[0]))]
    if not jobs:
        raise fail(f"{what!r} holds nothing to measure", "a problem of which no size is 0")
    return jobs


def _jobs_of_script(script: str, args: Sequence[str]) -> tuple[list[Job], int]:
    """Return the calls that a script makes, and its exit status."""
    from ..diagnostics import Usage, run_script

    seen = Usage()
    status = run_script(script, args, measure=False, width=width(), usage=seen, kernels=loaded_kernels)
    calls = ((row.direction == "forward", jobs_of([row.convolution])) for row in seen.rows)
    jobs = [job for forward, jobs in calls for job in jobs if (len(job.outputs) == 1) == forward]
    if not jobs:
        raise fail(f"{script} computed no convolution (its exit status is {status})")
    return [*dict.fromkeys(jobs)], status


def jobs_of(problems: Iterable[ConvProblem]) -> Iterator[Job]:
    """Yield the calls that training makes of some problems; measuring both gradients measures each alone, too.

    For a problem with a padding mode, the choice is looked up for its padded copy.
    """
    from ..backends import padded
    from ..problem import gradient_outputs

    for problem in problems:
        if not problem.empty:
            plain = (problem if problem.padding_mode == "zeros" else padded(problem)).replace(name="")
            yield Job(plain, (problem.bias_pass,))
            yield Job(plain.replace(has_bias=False), gradient_outputs(problem.transposed, (True, True, False)))


def measure_all(jobs: Collection[Job], device: torch.device, moved: Callable[..., object] = lambda **_: None) -> None:
    """Measure what was not measured often enough, the whole list again and again: a busy moment spoils one round."""
    from ..engine import measure_now, measurements

    for done in range(measurements.SETTLED):
        for job in jobs:
            if job.count(device) <= done:  # another process may have measured it meanwhile
                measure_now(job.problem, job.outputs, device, force=True)
            moved(advance=1)


def _tune(jobs: list[Job], device: torch.device) -> dict[str, Any]:
    """Measure, and show what is chosen."""
    from ..engine import choose, measurements

    rounds, interrupted = measurements.SETTLED, False
    with progress("measuring", len(jobs) * rounds) as moved:
        try:
            measure_all(jobs, device, moved)
        except KeyboardInterrupt:
            interrupted = True
    counts = {job: min(job.count(device), rounds) for job in jobs}
    choices = []
    for problem, outputs in (job for job in jobs if counts[job] or not interrupted):
        steps = choose(problem, outputs, device)
        choices.append({"outputs": list(outputs), "backends": [step.backend.name for step in steps],
                        "reason": steps[0].reason, "problem": str(problem)})  # fmt: skip
    if choices:
        say(Table(choices, {
            "output": (lambda c: "+".join(c["outputs"]), ""),
            "backend": (lambda c: ", ".join(c["backends"]), ""),
            "why": (itemgetter("reason"), ""),
            "problem": (itemgetter("problem"), ""),
        }))  # fmt: skip
    unmeasured = [f"{'+'.join(job.outputs)} of {job.problem}" for job in jobs if not (counts[job] or interrupted)]
    for name in unmeasured:
        say(f"not measured: {name} (no memory for it, or another process measures)")
    left = len(jobs) * rounds - sum(counts.values())
    if interrupted:
        of = f"{left} of {len(jobs) * rounds} measurements are left"
        say(f"convgrad: interrupted; {of}, the same command goes on", sys.stderr)
    return {"choices": choices, "not_measured": unmeasured, "interrupted": interrupted, "measurements_left": left}
