"""``convgrad info``: versions, device, backends with their reasons, settings in force, paths."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..tables import counted, wrapped
from .app import command, say, say_json, width
from .options import BACKENDS, AsJson

#: Everyday layers, for which each backend says whether it can compute them.
_SAMPLES = {
    "depthwise": "g32mb1ic32ih56oc32kh3ph1",
    "groups of 4 channels": "g8mb1ic32ih56oc32kh3ph1",
    "dense": "mb1ic32ih56oc32kh3ph1",
}


@command("info")
def info(
    everything: Annotated[bool, typer.Option("--all", help="Every backend's reasons, every known defect.")] = False,
    again: Annotated[bool, typer.Option("--measure", help="Measure this machine's limits first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Versions, device, backends, settings in force, paths; with --all every backend's reasons too.

    Examples:

        convgrad info

        convgrad info --all

        convgrad info --measure --json
    """
    import torch

    from ..diagnostics import Machine, limits_of, measure_limits
    from ..problem_text import DTYPES

    for kind in ["cpu", *["cuda"] * torch.cuda.is_available()] if again else []:
        device = torch.device(kind)
        known = [dtype for dtype in DTYPES.values() if limits_of(Machine.here(device), dtype)]
        for dtype in dict.fromkeys([torch.float32, *known]):
            measure_limits(dtype, device)
    data = gather()
    if as_json:
        say_json("info", data)
        return
    for name, text in _all(data) if everything else _short(data):
        if not text:
            say(name)
            continue
        room = min(20, width() // 3)
        print(wrapped(f"{name:<{room}}  {text}", width(), " " * (room + 4)))


# ---- what there is -------------------------------------------------------------------------------


def gather() -> dict[str, Any]:
    """Everything that `info` shows, as plain data."""
    from dataclasses import asdict

    import torch

    from .. import __version__, settings
    from .._compat import package_version
    from ..backends import DEFECTS
    from ..diagnostics import MODELLED_VERSIONS, Machine, limits_of
    from ..engine import backends, measurements, recorded, store
    from ..engine.measure import conditions

    machine, folder, cudnn = Machine.here(), store.folder(), torch.backends.cudnn
    limits = limits_of(machine, torch.float32)
    devices = ["cpu"] + [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    defects = [{"name": d.name, "what": d.happens, "when": d.when} for d in DEFECTS if d.here()]
    defects += [{"name": f"{f.output} of {f.problem}", "what": f.what, "when": "found here"} for f in recorded()]
    return {
        "versions": {
            "convgrad": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "triton": package_version("triton"),
            "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
            "modelled_torch": list(MODELLED_VERSIONS),
        },
        "machine": {
            "here": conditions("cpu"),
            "atens_rules_see": str(machine),
            "limits": None if limits is None else asdict(limits),
            "devices": devices,
        },
        "backends": {name: _backend(name, devices[-1].split(":")[0]) for name in backends()},
        "settings": {
            "deterministic": settings.deterministic(),
            "cudnn_enabled": cudnn.enabled,
            "cudnn_benchmark": cudnn.benchmark,
            "cudnn_deterministic": cudnn.deterministic,
            "cudnn_tf32": settings.cudnn_allows_tf32(),
            "mkldnn_enabled": settings.mkldnn(),
            "threads": settings.threads(),
            "measuring_fraction_of_time": settings.measuring_share(torch.device(devices[-1].split(":")[0])),
        },
        "pytorch_defects": defects,
        "store": {
            "folder": None if folder is None else str(folder),
            "obstacle": store.obstacle() or None,
            "measured": measurements.summary(),
            "verified": len(store.items("verified")),
            "defects": len(store.items("defect")),
        },
        "paths": {"package": str(Path(__file__).parent.parent)},
    }


def _backend(name: str, device: str) -> dict[str, Any]:
    import torch

    from ..engine import backends, reasons_against
    from ..problem import PASSES, ConvProblem

    backend, layers = backends()[name], {}
    for kind, text in _SAMPLES.items():
        problem = ConvProblem.parse(text)
        reasons = {p: reasons_against(backend, problem, (p,), torch.device(device)) for p in PASSES}
        usable = [p for p, against in reasons.items() if not against]
        layers[kind] = {"passes": usable, "reasons_against": next((r for r in reasons.values() if r), [])}
    return {"summary": backend.summary, "device": device, "layers": layers}


# ---- for people ----------------------------------------------------------------------------------


def _short(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each line, no more than a screen of them."""
    from ..backends import why_absent

    if missing := why_absent():
        yield f"NO COMPILED KERNELS: {missing}", ""
    versions, machine, store = data["versions"], data["machine"], data["store"]
    yield "versions", ", ".join(f"{name} {versions[name] or 'none'}" for name in list(versions)[:5])
    yield "machine", machine["here"]
    yield "limits", _limits(machine["limits"])
    yield "devices", ", ".join(machine["devices"])
    can = [name for name, b in data["backends"].items() if any(x["passes"] for x in b["layers"].values())]
    device = machine["devices"][-1].split(":")[0]
    yield "backends", f"on {device} for float32 layers: {', '.join(can)}"
    yield "not for these", f"{', '.join(n for n in data['backends'] if n not in can)} (why: convgrad info --all)"
    for name, backend in data["backends"].items():
        if name not in BACKENDS:
            yield f"  {name}", backend["summary"]
    settings = data["settings"]
    on = [name for name, value in settings.items() if value is True]
    share = settings["measuring_fraction_of_time"]
    measuring = f"measuring for {share:.0%} of the time" if share else "no measuring"
    yield "settings", f"{', '.join(on)}; threads {settings['threads']}; {measuring}"
    count = len(data["pytorch_defects"])
    yield "PyTorch's defects", f"{count} known here and avoided (which: convgrad info --all)"
    lost = [f"cannot be written ({store['obstacle']}): what is measured is forgotten"] * bool(store["obstacle"])
    yield "store", "; ".join([store["folder"] or "off", *lost])
    yield from (("", text) for text in _measured(store["measured"]))
    yield "package", data["paths"]["package"]


def _all(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the same with every reason and every defect; a title has no text."""
    yield "backends", ""
    for name, backend in data["backends"].items():
        yield f"  {name}", backend["summary"]
        answers: dict[str, list[str]] = {}
        for kind, layer in backend["layers"].items():
            can = ", ".join(layer["passes"]) or f"no: {'; '.join(layer['reasons_against'])}"
            answers.setdefault(can, []).append(kind)
        for can, kinds in answers.items():
            yield "", f"  {', '.join(kinds)} on {backend['device']}: {can}"
    said = {"limits": _limits(data["machine"]["limits"]), "measured": "; ".join(_measured(data["store"]["measured"]))}
    for title in ("versions", "machine", "settings", "store", "paths"):
        yield title, ""
        for name, value in data[title].items():
            text = said.get(name) or (", ".join(value) if isinstance(value, list) else value)
            yield f"  {name}", "none" if text is None else str(text)
    yield "PyTorch's kernels are wrong", ""
    for defect in data["pytorch_defects"]:
        yield f"  {defect['name']}", f"{defect['what']}: {defect['when']}"


def _limits(limits: dict[str, Any] | None) -> str:
    from ..diagnostics import Limits

    return "not measured yet (convgrad info --measure)" if limits is None else str(Limits(**limits))


def _measured(counts: dict[str, int]) -> list[str]:
    return [f"choices for {counted(count)} on {machine}" for machine, count in counts.items()] or [
        "nothing measured yet (convgrad tune)"
    ]
