"""``convgrad info``: versions, device, backends with their reasons, settings in force, paths."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import __version__, settings
from ..diagnostics import MODELLED_VERSIONS, Machine, limits_of, measure_limits
from ..engine import backends, measurements, reasons_against, store
from ..engine.ab_timer import conditions
from ..problem import PASSES, ConvProblem
from ..tables import wrapped
from .app import app, say, width
from .aten import defects_here

__all__ = ["gather", "info"]

#: Everyday layers, for which each backend says whether it can compute them.
_SAMPLES = {
    "depthwise": "g32mb1ic32ih56oc32kh3ph1",
    "groups of 4 channels": "g8mb1ic32ih56oc32kh3ph1",
    "dense": "mb1ic32ih56oc32kh3ph1",
}


def gather() -> dict[str, Any]:
    """Everything that `info` shows, as plain data."""
    machine = Machine.here()
    devices = ["cpu"] + [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    flags = settings.current()
    return {
        "versions": {
            "convgrad": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "triton": _version("triton"),
            "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else "none",
            "ATen's rules model torch": f"{MODELLED_VERSIONS[0]} to {MODELLED_VERSIONS[-1]}"
            + ("" if machine.modelled else f"; {machine.torch_version} is unknown to them"),
        },
        "machine": {
            "here": conditions("cpu"),
            "ATen's rules see": str(machine),
            "limits": str(limits_of(machine, torch.float32) or "not measured yet (convgrad info --measure)"),
            "devices": devices,
        },
        "backends": {name: _backend(name, devices) for name in backends()},
        "settings": {
            **{name: bool(value) for name, value in flags._asdict().items()},
            "threads": flags.threads,
            "measure": f"{flags.measuring_share:.0%} of the time" if flags.measuring_share else "no",
        },
        "PyTorch's kernels are wrong": defects_here(),
        "store": _store(),
        "paths": {"package": str(Path(__file__).parent.parent)},
    }


def _backend(name: str, devices: list[str]) -> dict[str, Any]:
    backend = backends()[name]
    place = torch.device(devices[-1].split(":")[0])
    flags = settings.current()
    found = {}
    for kind, text in _SAMPLES.items():
        problem = ConvProblem.parse(text)
        reasons = {p: reasons_against(backend, problem, (p,), place, flags) for p in PASSES}
        usable = [p for p, against in reasons.items() if not against]
        first = next((against for against in reasons.values() if against), [])
        found[f"{kind} on {place.type}"] = ", ".join(usable) or f"no: {'; '.join(first)}"
    return {"summary": backend.summary, **found}


def _store() -> dict[str, Any]:
    where = store.folder()
    counts = measurements.summary()
    return {
        "folder": "off" if where is None else str(where),
        "measured": [f"{count} on {machine}" for machine, count in counts.items()] or "nothing yet (convgrad tune)",
        "verified": str(len(store.items("verified"))),
        "defects": str(len(store.items("defect"))),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False,
    again: Annotated[bool, typer.Option("--measure", help="Measure this machine's limits first.")] = False,
) -> None:
    """Versions, device, backends with their reasons, settings in force, paths.

    Examples:

        convgrad info

        convgrad info --json

        convgrad info --measure
    """
    if again:
        measure_limits(torch.float32)
    data = gather()
    if as_json:
        print(json.dumps(data, indent=2))
        return
    for title, part in data.items():
        say(title)
        room = max(len(name) for name in part)
        for name, value in part.items():
            if isinstance(value, dict):
                _say_entry(name, room, value.pop("summary"))
                for what, answer in value.items():
                    _say_entry("", room, f"  {what}: {answer}")
            else:
                _say_entry(name, room, ", ".join(value) if isinstance(value, list) else str(value))


def _say_entry(name: str, room: int, text: str) -> None:
    """A name and its value beside it, continued under itself; names take a third of a terminal at most."""
    room = min(room, width() // 3)
    print(wrapped(f"  {name:<{room}}  {text}", width(), " " * (room + 6)))
