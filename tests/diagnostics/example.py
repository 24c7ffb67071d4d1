"""A profile with everything that a page shows, made by hand."""

from dataclasses import replace

from convgrad.diagnostics import Limits, Moment
from convgrad.problem import ConvProblem
from convgrad.report import Call, Cost, Profile, Variant

LIMITS = Limits(2e10, 1e11, "float32", "made up")


def row(problem: str, output: str, backend: str, part: float, *layers: str, calls: int = 1) -> Call:
    """Calls that reach a part of the limit."""
    p, passes = ConvProblem.parse(problem), output.count("+") + 1
    milliseconds = passes * max(p.flops / 1e11, p.least_bytes / 2e10) * 1e3 / part
    seen = Call(
        str(p), output, backend, reason="by rule: <slow> & wide", milliseconds=milliseconds, calls=calls,
        total=calls * milliseconds, layers=layers, pytorch=2 * milliseconds,
    )  # fmt: skip
    return seen.against(LIMITS)


def example(layers: int = 14) -> Profile:
    """Two rows for each layer, more of them than a page shows at first."""
    rows = []
    for i in range(layers):
        depthwise = f"g32mb4ic32ih{90 - 2 * i}oc32kh{3 + i % 3 * 2}ph{1 + i % 3}"
        rows.append(row(depthwise, "grad_input+grad_weight", "native packed", 0.7 - 0.03 * i, f"blocks.{i}.depthwise"))
        dense = f"mb4ic{16 + 16 * i}ih{40 - i}oc64kh1"
        rows.append(row(dense, "forward", "aten Mkldnn", 0.2 + 0.04 * i, f"blocks.{i}.expand", "head", calls=2))
    rows.sort(key=lambda r: -r.total)
    return Profile(
        kind="step",
        what="nets:make_model </script><b>",
        finding="With convgrad the training step is 1.52x [1.48, 1.57] as fast: 83.1 ms instead of 126 ms. And more.",
        milliseconds=83.1,
        variants=(Variant("PyTorch", 126.3), Variant("convgrad", 83.1, 1.52, 1.48, 1.57),
         Variant("PyTorch, channels_last", 124.9, 1.01, 0.97, 1.04)),
        rows=tuple(rows),
        costs=(Cost("layout", "In channels_last the step is 1.2x [1.1, 1.3] as fast.", "model.to(...)", 13.8),
         Cost("tune", "forward of blocks.0: native is 2.00x [1.90, 2.10] as fast.", "convgrad tune x", 7.0, (1,))),
        looked="10 of 28 rows were timed.",
        timeline=(Moment(1, 0.0, 2.5), Moment(0, 4.0, 1.0), Moment(0, 30.0, 3.25)),
        notes=("A step is forward and backward.",),
        limits=(LIMITS,),
        conditions="A processor, 2 threads, torch 2.13.0",
        made="2026-11-22T11:30:00+00:00",
        convgrad="0.1.0",
    )  # fmt: skip


def slower(profile: Profile) -> Profile:
    """The same, and everything took twice as long; one convolution was not there."""
    rows = tuple(replace(r, milliseconds=2 * r.milliseconds, total=2 * r.total) for r in profile.rows[1:])
    return replace(profile, what="the run before", milliseconds=166.2, rows=rows)
