"""``convgrad info``: versions, device, backends with their reasons, settings in force, paths."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..tables import counted, wrapped
from .app import Result, command, say, width
from .options import BACKENDS, AsJson

if TYPE_CHECKING:
    from ..backends import Backend

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
) -> Result:
    """Versions, device, backends, settings in force, paths; with --all every backend's reasons too.

    Examples:
        convgrad info
        convgrad info --all
        convgrad info --measure --json
    """
    import torch

    from ..diagnostics import Machine, limits_of, measure_limits
    from ..problem import DTYPES

    for kind in ["cpu", *["cuda"] * torch.cuda.is_available()] if again else []:
        device = torch.device(kind)
        known = [dtype for dtype in DTYPES.values() if limits_of(Machine.here(device), dtype)]
        for dtype in dict.fromkeys([torch.float32, *known]):
            measure_limits(dtype, device)
    data = gather()
    room = min(20, width() // 3)
    for name, text in _lines(data, everything):
        say(wrapped(f"{name:<{room}}  {text}", width(), " " * (room + 4)) if text else name)
    return Result(data)


def gather() -> dict[str, Any]:
    """Return everything that `info` shows, as plain data."""
    import torch

    from .. import __version__, settings
    from .._compat import package_version
    from ..backends import DEFECTS
    from ..diagnostics import MODELLED_VERSIONS, Machine, limits_of
    from ..engine import backends, measurements, reasons_against, recorded, store
    from ..engine.measure import conditions
    from ..problem import PASSES, ConvProblem

    def layer(backend: Backend, text: str) -> dict[str, Any]:
        problem, place = ConvProblem.parse(text), torch.device(kind)
        against = {p: reasons_against(backend, problem, (p,), place) for p in PASSES}
        usable = [p for p, reasons in against.items() if not reasons]
        return {"passes": usable, "reasons_against": next(filter(None, against.values()), [])}

    machine, folder, cudnn = Machine.here(), store.folder(), torch.backends.cudnn
    limits, on_gpu = limits_of(machine, torch.float32), torch.cuda.is_available()
    kind = "cuda" if on_gpu else "cpu"
    defects = [{"name": d.name, "what": d.happens, "when": d.when} for d in DEFECTS if d.here()]
    defects += [{"name": f"{f.output} of {f.problem}", "what": f.what, "when": "found here"} for f in recorded()]
    return {
        "versions": {
            "convgrad": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "triton": package_version("triton"),
            "cudnn": str(cudnn.version()) if on_gpu else None,
            "modelled_torch": list(MODELLED_VERSIONS),
        },
        "machine": {
            "here": conditions("cpu"),
            "atens_rules_see": str(machine),
            "limits": limits and vars(limits),
            "devices": [
                "cpu",
                *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())),
            ],
        },
        "backends": {
            name: {"summary": b.summary, "device": kind, "layers": {k: layer(b, text) for k, text in _SAMPLES.items()}}
            for name, b in backends().items()
        },
        "settings": {
            "deterministic": settings.deterministic(),
            "cudnn_enabled": cudnn.enabled,
            "cudnn_benchmark": cudnn.benchmark,
            "cudnn_deterministic": cudnn.deterministic,
            "cudnn_tf32": settings.cudnn_allows_tf32(),
            "mkldnn_enabled": settings.mkldnn(),
            "threads": settings.threads(),
            "measuring_fraction_of_time": settings.measuring_share(torch.device(kind)),
        },
        "pytorch_defects": defects,
        "store": {
            "folder": folder and str(folder),
            "obstacle": store.obstacle() or None,
            "measured": measurements.summary(),
            "verified": len(store.items("verified")),
            "defects": len(store.items("defect")),
        },
        "paths": {"package": str(Path(__file__).parent.parent)},
    }


def _lines(data: dict[str, Any], everything: bool) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each line: a screen of them, or with every reason and every defect."""
    from ..backends import why_absent
    from ..diagnostics import Limits

    if missing := why_absent():
        yield f"NO COMPILED KERNELS: {missing}", ""
    machine, settings, store, backends = (data[title] for title in ("machine", "settings", "store", "backends"))
    versions = dict(data["versions"])
    modelled = f"; its rules are known for {', '.join(versions.pop('modelled_torch'))}"
    yield "versions", ", ".join(f"{n} {version or 'none'}" for n, version in versions.items()) + modelled * everything
    yield "machine", machine["here"]
    limits = machine["limits"]
    yield "limits", str(Limits(**limits)) if limits else "not measured yet (convgrad info --measure)"
    yield "devices", ", ".join(machine["devices"])
    can = [name for name, b in backends.items() if any(x["passes"] for x in b["layers"].values())]
    yield "backends", f"on {backends['aten']['device']} for float32 layers: {', '.join(can)}"
    if everything:
        for name, backend in backends.items():
            yield f"  {name}", backend["summary"]
            answers: dict[str, list[str]] = {}
            for kind, layer in backend["layers"].items():
                passes = ", ".join(layer["passes"]) or f"no: {'; '.join(layer['reasons_against'])}"
                answers.setdefault(passes, []).append(kind)
            yield from (("", f"  {', '.join(kinds)} on {backend['device']}: {some}") for some, kinds in answers.items())
    else:
        yield "not for these", f"{', '.join(n for n in backends if n not in can)} (why: convgrad info --all)"
        yield from ((f"  {name}", backends[name]["summary"]) for name in backends if name not in BACKENDS)
    on = [name for name, value in settings.items() if value is True]
    off = [f"not {name}" for name, value in settings.items() if value is False]
    share = settings["measuring_fraction_of_time"]
    measuring = f"measuring for {share:.0%} of the time" if share else "no measuring"
    yield "settings", f"{', '.join(on + off * everything)}; threads {settings['threads']}; {measuring}"
    which = "" if everything else " (which: convgrad info --all)"
    yield "PyTorch's defects", f"{len(data['pytorch_defects'])} known here and avoided{which}"
    if everything:
        yield from ((f"  {d['name']}", f"{d['what']}: {d['when']}") for d in data["pytorch_defects"])
    lost = f"; cannot be written ({store['obstacle']}): what is measured is forgotten" if store["obstacle"] else ""
    yield "store", (store["folder"] or "off") + lost
    measured = [f"choices for {counted(count)} on {machine}" for machine, count in store["measured"].items()]
    yield from (("", text) for text in measured or ["nothing measured yet (convgrad tune)"])
    if everything:
        yield "", f"{store['verified']} kernels verified, {store['defects']} defects of PyTorch found here"
    yield "package", data["paths"]["package"]
