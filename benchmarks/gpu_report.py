"""What `gpu` found, as Markdown: the bars first, each with the figure measured for it, then every row."""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import Any

Row = dict[str, Any]
_LARGE = ("k13", "k31")
#: A row is judged by bandwidth where the bar allows at least this many times the duration of an empty launch.
_LAUNCHES = 3


def best(row: Row) -> float:
    """Our better layout."""
    return min(t for key, t in row["times"].items() if key.startswith("ours"))


def gained(row: Row) -> float:
    """PyTorch's time over ours, both in NCHW."""
    return row["times"]["pytorch NCHW"] / row["times"]["ours NCHW"]


def over_best_of(row: Row) -> float:
    """PyTorch's best layout over ours."""
    theirs = [t for key, t in row["times"].items() if key.startswith("pytorch")]
    return min(theirs) / best(row) if theirs else math.nan


def used(rows: list[Row]) -> list[Row]:
    """One row for each call: the fastest of ours."""
    fastest: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = (row["text"], row["what"], row["dtype"])
        if key not in fastest or best(row) < best(fastest[key]):
            fastest[key] = row
    return list(fastest.values())


def both(row: Row) -> bool:
    """Whether ours and PyTorch's were timed in NCHW: PyTorch may refuse."""
    return {"pytorch NCHW", "ours NCHW"} <= row["times"].keys()


def mean(values: list[float]) -> float:
    return geometric_mean(values) if values else math.nan


def bars(rows: list[Row], card: dict[str, Any]) -> list[str]:
    """The bars, each with the figure that was measured for it."""
    timed = used([r for r in rows if r["times"]])
    compared = [r for r in timed if not math.isnan(over_best_of(r))]
    backward = [gained(r) for r in timed if r["what"] == "backward" and both(r)]
    over_best = [over_best_of(r) for r in compared]
    back = [over_best_of(r) for r in compared if r["what"] == "backward"]
    large = [r for r in timed if "k31" in r["problem"]]
    lines = [
        bar("backward over PyTorch's NCHW, geometric mean, at least 5x", mean(backward), 5, len(backward)),
        bar("backward over PyTorch's best layout, geometric mean, at least 1.3x", mean(back), 1.3, len(back)),
        bar("the same for every pass, at least 1.3x", mean(over_best), 1.3, len(over_best)),
    ]
    for what in ("forward", "backward"):
        some = [gained(r) for r in large if r["what"] == what and both(r)]
        lines.append(
            bar(f"31x31 {what} over nn.Conv2d, worst, at least 14x", min(some, default=math.nan), 14, len(some))
        )
    small = [r for r in timed if not any(w in r["problem"] for w in (*_LARGE, "mamba"))]
    sequences = [r for r in timed if "mamba" in r["problem"]]
    for what in ("forward", "grad_input", "grad_weight", "backward"):
        for label, share, some in (
            ("up to 7x7, 85 % of the copy bandwidth or 50 % of the float32 peak", 0.85, small),
            ("conv1d k=4, 90 % of the copy bandwidth", 0.90, sequences),
        ):
            seconds = [(allowed(r, card, share), best(r)) for r in some if r["what"] == what]
            reached = [x / t for x, t in seconds if x >= _LAUNCHES * (card.get("launch") or 0)]
            below = f"{sum(x < 1 for x in reached)} below, geometric mean {mean(reached):.2f}"
            short = f", {len(seconds) - len(reached)} too short to judge" * (len(reached) < len(seconds))
            found = f"{what} {label}, worst share of it" + f" ({below}{short})" * bool(seconds)
            lines.append(bar(found, min(reached, default=math.nan), 1, len(reached)))
    if "H100" not in card.get("device", ""):
        lines.append(f"- the bars were set for an H100; this is {card.get('device', 'an unknown device')}")
    if not card.get("float32 peak"):
        lines.append("- the float32 peak is not known here: only the copy bandwidth counted")
    return lines


def bar(label: str, value: float, wanted: float, count: int) -> str:
    verdict = f"{value:.2f} of {count} rows: {'met' if value >= wanted else 'MISSED'}"
    return f"- {label}: {'not measured' if math.isnan(value) else verdict}"


def allowed(row: Row, card: dict[str, Any], share: float) -> float:
    """Seconds that the bar allows."""
    if not card.get("copy bytes/s"):
        return math.nan
    seconds = row["bytes"] / (share * card["copy bytes/s"])
    peak = card["float32 peak"]
    return max(seconds, row["flops"] / (0.5 * peak)) if peak else seconds


_HEADS = (
    "problem", "dtype", "what", "by", "ours NCHW us", "ours c.l. us", "PyTorch NCHW us", "PyTorch c.l. us", "GB/s",
    "of copy", "of float32 peak", "over best",
)  # fmt: skip
_KEYS = ("ours NCHW", "ours channels_last", "pytorch NCHW", "pytorch channels_last")


def line(row: Row, card: dict[str, Any]) -> str:
    """One row of the table."""
    t = row["times"]
    names = [row["problem"], row["dtype"], row["what"], row["backend"]]
    if not t:
        cells = [row.get("error", "not measured").replace("|", "/"), *[""] * 7]
    else:
        rate, peak = row["bytes"] / best(row), card.get("float32 peak")
        cells = [f"{t[k] * 1e6:.1f}" if k in t else "-" for k in _KEYS]
        cells += [
            f"{rate * 1e-9:.0f}",
            f"{100 * rate / card['copy bytes/s']:.0f} %" if card.get("copy bytes/s") else "-",
            f"{100 * row['flops'] / best(row) / peak:.0f} %" if peak else "-",
            f"{over_best_of(row):.2f}x",
        ]
    return "| " + " | ".join([*names, *cells]) + " |"


def said(key: str, value: Any) -> Any:
    """Bytes and operations per second as people say them; anything else as it is."""
    if not isinstance(value, float):
        return value
    if key == "launch":
        return f"{value * 1e6:.1f} us"
    return f"{value * 1e-9:.0f} GB/s" if "bytes" in key else f"{value * 1e-12:.1f} TFLOP/s"


def steps_table(found: dict[str, Any]) -> list[str]:
    """Training steps, stock and ours."""
    if not found:
        return []
    rows = [
        f"| {key} | {step['error']} | | | |" if "error" in step else
        f"| {key} | {step['replaced']} | {step['stock'] * 1e3:.2f} | {step['ours'] * 1e3:.2f} | {step['speed']} |"
        for key, step in found.items()
    ]  # fmt: skip
    return ["| a training step, bfloat16 by autocast | convolutions replaced | stock ms | ours ms | speed |",
            "|---|---:|---:|---:|---|", *rows, ""]  # fmt: skip


def failures(found: dict[str, dict[str, Any]]) -> list[str]:
    """What failed of a stage that several workers share; an answer that is not there yet is empty."""
    errors = [f"{text}: {answer['error']}" for text, answer in found.items() if "error" in answer]
    return [failure for answer in found.values() for failure in answer.get("failures", ())] + errors


def report(state: dict[str, Any]) -> str:
    """The whole run."""
    card, rows = state["card"], state["rows"]
    lines = ["# GPU", "", *[f"**{state.get('warning')}**", ""] * bool(state.get("warning")), state["conditions"], ""]
    lines += [f"- {key}: {said(key, value)}" for key, value in {**card, **state.get("graphs", {})}.items()]
    lines += [
        f"- {text}, {outputs}: {said}"
        for text, found in state.get("verdicts", {}).items()
        for outputs, said in found.items()
    ]
    lines += [
        f"- host time, {text}: "
        + ", ".join(f"{what} {v:.1f} us" if isinstance(v, float) else f"{what} {v}" for what, v in found.items())
        for text, found in state.get("host", {}).items()
    ]
    for stage in ("conformance", "compiled", "sanitized"):
        found = state.get(stage)
        if found is None:
            lines.append(f"- {stage}: not run")
            continue
        passed, failed = sum(answer.get("passed", 0) for answer in found.values()), failures(found)
        reached = f"{sum(map(bool, found.values()))} of {len(found)} problems reached"
        lines += [f"- {stage}: {passed} passed, {len(failed)} failed, {reached}"]
        lines += [f"  - {failure}" for failure in failed[:20]]
    lines += [
        f"- rows: {sum(bool(r['times']) for r in rows)} timed of {state['wanted']}",
        "",
        *bars([] if state.get("warning") else rows, card),
        "",
    ]
    lines += steps_table(state.get("steps", {}))
    lines += ["| " + " | ".join(_HEADS) + " |", "|---" * 4 + "|---:" * (len(_HEADS) - 4) + "|"]
    lines += [line(row, card) for row in rows]
    words = ("problem", "dtype", "what", "backend")
    refused = [f"- {' '.join(r[word] for word in words)}: {r['refused']}" for r in rows if r.get("refused")]
    lines += ["", "PyTorch refused:", "", *refused] if refused else []
    return "\n".join(lines) + "\n"
