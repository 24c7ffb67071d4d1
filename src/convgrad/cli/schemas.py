"""The data that ``--json`` prints for each command, and the JSON Schema (draft 2020-12) that is made of it.

In a shape a type is a value of it, a text is itself, a tuple means one of its members, a list is an array, a dict an
object with these fields (``"name?"`` may be missing, ``str`` is any name), and a dataclass an object with its fields.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..check import CheckResult
from ..diagnostics import Answer, Call, Limits, Profile, Variant
from ..diagnostics.aten_rules.kernel_names import Kernel, Scratch
from ..errors import UnknownNameError
from ..problem import OUTPUTS
from .app import SCHEMA_VERSION


def _of(dataclass: type, *without: str) -> dict[str, Any]:
    """Return the shape of a dataclass without some of its fields."""
    return {name: hint for name, hint in get_type_hints(dataclass).items() if name not in without}


_AMOUNT = (float, None)  # None where there is none, or it is not finite
_FINDINGS = [{"problem": str, "output": OUTPUTS, "what": str, "repeat": str}]

_EXPLANATION = {
    "problem": str, "machine": str, "flops": int, "least_bytes": int,
    "limit": ({**_of(Limits), "least_seconds": float, "bound": ("memory", "arithmetic")}, None),
    "rows": [_of(Answer, "workspace") | {"output": OUTPUTS, "workspace_bytes": int, "fraction_of_limit": _AMOUNT}],
    "warnings": [str],
}  # fmt: skip
_CALL = {
    **_of(Call, "kernel", "call", "copied"), "outputs": [str], "shown": str,
    **dict.fromkeys(("flops", "bytes", "copies"), int),
}  # fmt: skip
_CHECK = {
    **dict.fromkeys(("problems", "checked", "not_checked", "reduced"), int), "took_seconds": float, "ok": bool,
    "stopped": ("", "time was up", "interrupted"), "properties": [str],
    "results": [_of(CheckResult, "operands") | {"problem": str, "worst": _AMOUNT, "bound": _AMOUNT, "repeat?": str}],
}  # fmt: skip
_PROFILE = {**_of(Profile), "kind": ("step", "run", "table"), "rows": [_CALL], "limits": [Limits], "before": None}
_VERSIONS = dict.fromkeys(("convgrad", "torch", "python"), str)

SHAPES: dict[str, Any] = {
    "info": {
        "versions": {**_VERSIONS, "triton": (str, None), "cudnn": (str, None), "modelled_torch": [str]},
        "machine": {"here": str, "atens_rules_see": str, "limits": (Limits, None), "devices": [str]},
        "backends": {str: {
            "summary": str, "device": str, "layers": {str: {"passes": [OUTPUTS], "reasons_against": [str]}},
        }},
        "settings": {
            "threads": int, "measuring_fraction_of_time": float,
            **dict.fromkeys(("deterministic", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_tf32",
                             "mkldnn_enabled"), bool),
        },
        "pytorch_defects": [{"name": str, "what": str, "when": str}],
        "store": {"folder": (str, None), "obstacle": (str, None), "measured": {str: int}, "verified": int,
                  "defects": int},
        "paths": {"package": str},
    },
    "explain": {
        "explanations": [_EXPLANATION],
        "models": [{"machine": str, "layers": [{"names": [str], "kind": str, **_EXPLANATION}]}],
    },
    "check": (_CHECK, {"aten_findings": _FINDINGS}),
    "bench": (
        {"conditions": str, "warnings": {str: [str]}, "problems": [{
            "problem": str, "output": OUTPUTS, "backend": str, "note": str, "pytorch_layout": str, "wrong": bool,
            **dict.fromkeys(("milliseconds", "gflops_per_second", "fraction_of_limit", "pytorch_milliseconds", "speed",
                             "speed_low", "speed_high"), _AMOUNT),
        }]},
        {"conditions": str, "warnings": {str: [str]}, "steps": [{"model": str, **_of(Variant)}]},
    ),
    "tune": {
        "aten_findings?": _FINDINGS,
        "choices?": [{"outputs": [OUTPUTS], "backends": [str], "reason": str, "problem": str}],
        "not_measured?": [str], "interrupted?": bool, "script_status?": int,
        **dict.fromkeys(("removed_problems?", "imported_problems?", "imported_problems_for_this_machine?",
                         "exported_problems?", "measurements_left?"), int),
    },
    "run": {
        "taken_over": bool, "wall_seconds": float, "accelerated": [str], "children": int, "children_cut": int,
        "total_seconds": float, "rows": [_CALL | {"total_seconds": float, "fraction_of_limit": _AMOUNT}],
    },
    "report": _PROFILE | {"before": (_PROFILE, None)},
    "names": {"name": str, "direct_function?": str, "direct_functions?": [str], "functions?": Kernel,
              "scratch_tensor?": Scratch},
}  # fmt: skip
_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def schema_of_command(command: str, *, more: bool = True) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints; objects may have more fields, as a later release's may."""
    if command not in SHAPES:
        raise UnknownNameError.of("no command is called", command, SHAPES)
    envelope = {"schema": f"convgrad {command}", "arguments": [str], "versions": _VERSIONS, "data": SHAPES[command]}
    result = schema_of(envelope, more)
    result["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def schema_of(shape: Any, more: bool) -> dict[str, Any]:
    """Return the JSON Schema of a shape; no number is negative."""
    origin, args = get_origin(shape), get_args(shape)
    if isinstance(shape, type) and is_dataclass(shape):
        shape = _of(shape)
    elif origin in (Union, UnionType, Literal):
        shape = args
    elif origin in (tuple, list):
        shape = [args[0]]
    elif origin is dict:
        shape = {args[0]: args[1]}
    if isinstance(shape, dict) and str in shape:
        return {"type": "object", "additionalProperties": schema_of(shape[str], more)}
    if isinstance(shape, dict):
        found = {name.rstrip("?"): schema_of(one, more) for name, one in shape.items()}
        required = [name for name in shape if not name.endswith("?")]
        return {"type": "object", "properties": found, "required": required, "additionalProperties": more}
    if isinstance(shape, list):
        return {"type": "array", "items": schema_of(shape[0], more)}
    if isinstance(shape, tuple):
        return {"anyOf": [schema_of(one, more) for one in shape]}
    if shape in (None, type(None)):
        return {"type": "null"}
    if isinstance(shape, str):
        return {"const": shape}
    return {"type": _NAMES[shape], **({"minimum": 0} if shape in (int, float) else {})}
