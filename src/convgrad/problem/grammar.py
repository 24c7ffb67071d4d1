"""The one-line text of a `ConvProblem`: benchdnn's descriptors, with our words after them.

A descriptor is a run of fields without spaces, each a short name and a number::

    g32mb1ic32ih112oc32oh112kh3sh1ph1dh0n"a name" bfloat16 channels_last

``mb`` batch, ``g`` groups, ``ic`` / ``oc`` channels, and for the dimensions ``d``, ``h``, ``w``: ``i`` and ``o``
sizes, ``k`` kernel, ``s`` stride, ``d`` dilation minus one, ``p`` padding in front. Underscores are ignored. A
descriptor without ``w`` (or without ``h`` and ``w``) is square (cubic); without ``mb`` its batch is 2. The rules are
those of oneDNN's benchdnn (``tests/benchdnn/doc/knobs_desc.md`` and its conv and deconv drivers), so published tables
of shapes are read as they are. Ours goes further in three points: padding whose sides differ is written with both
(``ph0:1``), a negative one crops, and sizes may be 0 where a convolution allows it.

Words may follow, separated by spaces: a dtype, ``channels_last``, ``transposed``, ``bias``, or the padding mode
``circular``, ``reflect`` or ``replicate`` where it is not zeros. A transposed descriptor is a deconv descriptor of
benchdnn: ``ic`` and ``ih`` belong to the tensor that the user calls input.

Where only one side of the padding is written, an absent output size means symmetric padding. A stated one keeps
symmetric padding where that already gives it; otherwise the high side is derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from .sizes import Dimension, effective_kernel, fields_of, output_length

#: What `parse` makes of a text: this module knows only the grammar, `problem` the class.
Problem = TypeVar("Problem")

EXAMPLE: Final = "g32mb1ic32ih112oc32oh112kh3sh1ph1dh0 or mb2ic3iw100oc8kw5 bfloat16 bias"

#: Every dtype that has a plain name, and benchdnn's short names.
DTYPES: Final[dict[str, torch.dtype]] = {
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "uint8")},
    **{name: getattr(torch, name) for name in ("complex32", "complex64", "complex128")},
    **{name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64")},
    **{"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64},
    **{"s8": torch.int8, "u8": torch.uint8, "s32": torch.int32},
}
#: Padding modes other than zeros.
MODES: Final = ("circular", "reflect", "replicate")
#: Each word that may follow a descriptor: what it says, and the value.
_WORDS: Final[dict[str, tuple[str, Any]]] = {
    **{name: ("dtype", dtype) for name, dtype in DTYPES.items()},
    **{name: (name, True) for name in ("channels_last", "transposed", "bias")},
    **{mode: ("padding mode", mode) for mode in MODES},
}

_MOST_DIGITS: Final = 18
_FIELD: Final = re.compile(r"(g|mb|ic|oc|[iokspd][dhw])(-?\d+)?(?::(-?\d+))?_*")
_NAME: Final = re.compile(r'n(?:"([^"]*)"|(\S*))(?=\s|$)')


def parse(text: str, make: Callable[..., Problem], *, transposed: bool = False) -> Problem:
    """Read one descriptor and the words after it, as `ConvProblem.parse`; ``make`` makes the problem of its fields."""
    fields, name, end = _read_fields(text)
    said: dict[str, Any] = {"transposed": True} if transposed else {}
    for word in re.finditer(r"\S+", text[end:]):
        what, value = _WORDS.get(word[0], ("", None))
        if not what:
            known = f"channels_last, transposed, bias, {', '.join(MODES)}, or a dtype such as float64 or bf16"
            raise _error(text, end + word.start(), f"unknown word {word[0]!r}, expected {known}")
        if said.setdefault(what, value) != value:
            raise _error(text, end + word.start(), f"a second {what}, {word[0]!r}")

    channels_last, transposed = "channels_last" in said, "transposed" in said
    dims = _dimensions(text, fields, transposed)
    if channels_last and len(dims) == 1:
        raise _error(text, end, "channels_last needs 2 or 3 spatial dimensions, this problem has 1")
    formats = (torch.channels_last, torch.channels_last_3d)
    ic, oc = (_needed(text, fields, key, 0) for key in ("ic", "oc"))
    try:
        return make(
            batch=fields.get("mb", 2),
            in_channels=oc if transposed else ic,
            out_channels=ic if transposed else oc,
            groups=fields.get("g", 1),
            **fields_of(dims),
            dtype=said.get("dtype", torch.float32),
            memory_format=formats[len(dims) - 2] if channels_last else torch.contiguous_format,
            has_bias="bias" in said,
            origin="transposed" if transposed else "plain",
            padding_mode=said.get("padding mode", "zeros"),
            name=name,
        )
    except ValueError as e:
        raise _error(text, None, str(e)) from None


def _error(text: str, position: int | None, what: str) -> ValueError:
    """The error for a text; without a position where it is the problem as a whole, or what it lacks."""
    shown = text if len(text) <= 200 else text[:200] + "..."
    where = "in" if position is None else f"at position {position} of"
    return ValueError(f"{what}, {where} the problem {shown!r}; an example: {EXAMPLE}")


def _read_fields(text: str) -> tuple[dict[str, int], str, int]:
    """The fields, the name, and where the descriptor ends."""
    fields: dict[str, int] = {}
    at = len(text) - len(text.lstrip())
    while at < len(text) and not text[at].isspace():
        if text[at] == "n" and (found := _NAME.match(text, at)):
            return fields, found[1] if found[1] is not None else found[2], found.end()
        found = _FIELD.match(text, at)
        if found is None:
            token = text[at:].split(maxsplit=1)[0]
            raise _error(
                text, at, f"unrecognized field {token[:16]!r}, expected one of g mb ic oc n and i o k s d p + d h w"
            )
        key, value = found[1], found[2]
        if value is None:
            raise _error(text, at, f"field {key!r} has no number")
        if found[3] is not None and key[0] != "p":
            raise _error(text, at, f"field {key!r} has two numbers, and only padding has two sides")
        for name, number in ((key, value), (key + ":", found[3])):
            if number is None:
                continue
            if len(number) > _MOST_DIGITS:
                raise _error(text, at, f"field {key!r} has {len(number)} digits")
            least = {"g": 1, "s": 1}.get(key[0], 0)
            if int(number) < least and key[0] != "p":
                raise _error(text, at, f"field {key!r} must be at least {least}, got {number}")
            if fields.get(name, int(number)) != int(number):
                raise _error(text, at, f"field {key!r} is given twice, as {fields[name]} and as {number}")
            fields[name] = int(number)
        at = found.end()
    if not fields:
        raise _error(text, at, "no fields")
    return fields, "", at


def _needed(text: str, fields: dict[str, int], key: str, least: int) -> int:
    if key not in fields:
        raise _error(text, None, f"field {key!r} is missing")
    if fields[key] < least:
        raise _error(text, text.find(key), f"field {key!r} must be at least {least}, got {fields[key]}")
    return fields[key]


def _dimensions(text: str, fields: dict[str, int], transposed: bool) -> list[Dimension]:
    """The given dimensions of the plain problem, the missing ones copied from the first."""
    missing = {"s": 1}  # where all its fields have these values, or 0, a dimension is missing, as in benchdnn
    given = [a for a in "dhw" if any(fields.get(f + a, missing.get(f, 0)) != missing.get(f, 0) for f in "iokpds")]
    if given not in (["w"], ["h"], ["h", "w"], ["d"], ["d", "h", "w"]):
        if not given:
            raise _error(text, None, "no spatial dimension: at least i and k of d, h or w are needed")
        raise _error(text, None, f"the dimensions {given} do not make a problem: give w, h, h and w, d, or all three")
    dims = [_dimension(text, fields, axis, transposed) for axis in given]
    return dims * {"d": 3, "h": 2, "w": 1}[given[0]] if len(given) == 1 else dims


def _dimension(text: str, fields: dict[str, int], axis: str, transposed: bool) -> Dimension:
    least = 0 if 0 in (fields.get(key) for key in ("mb", "ic", "oc")) else 1  # without a batch or a channel
    size, kernel = _needed(text, fields, "i" + axis, 0), _needed(text, fields, "k" + axis, least)
    stride, dilation = fields.get("s" + axis, 1), fields.get("d" + axis, 0) + 1
    low, high, out = fields.get("p" + axis), fields.get(f"p{axis}:"), fields.get("o" + axis, 0)
    span = effective_kernel(kernel, dilation)
    if not out and not (transposed and "o" + axis in fields):
        low = low or 0
        other = low if high is None else high
        if transposed:
            out = (size - 1) * stride + span - low - other
        else:
            out = output_length(size, kernel, stride, low, other, dilation)
        if out < least:
            raise _error(text, text.find("i" + axis), f"field {'o' + axis!r} is absent and comes out as {out}")
    big, small = (out, size) if transposed else (size, out)
    if low is None:  # half of what is needed, rounded towards zero
        needed = (small - 1) * stride + span - big
        low = needed // 2 if needed >= 0 else -(-needed // 2)
    dim = Dimension(big, small, kernel, stride, low, high or 0, dilation)
    return dim if high is not None else dim._replace(high=dim.least_high)


def format_problem(problem: Any) -> str:
    """The canonical text, which `parse` reads back as ``problem.canonical()``."""
    p = problem.canonical()
    user_in, user_out = (p.output_size, p.input_size) if p.transposed else (p.input_size, p.output_size)
    ic, oc = (p.out_channels, p.in_channels) if p.transposed else (p.in_channels, p.out_channels)
    padding = [f"{low}" if low == high else f"{low}:{high}" for low, high in p.padding]
    columns = (user_in, user_out, p.kernel_size, p.stride, padding, [d - 1 for d in p.dilation])
    same = all(len(set(column)) == 1 for column in columns)
    axes = "dhw"[3 - p.ndim :][: 1 if same else p.ndim]

    def spatial(letter: str, column: int) -> str:
        return "".join(f"{letter}{axis}{value}" for axis, value in zip(axes, columns[column], strict=False))

    text = f"g{p.groups}mb{p.batch}ic{ic}{spatial('i', 0)}oc{oc}{spatial('o', 1)}"
    text += "".join(spatial(letter, 2 + i) for i, letter in enumerate("kspd"))
    if p.name:
        text += 'n"' + p.name.replace('"', "'").replace("\n", " ") + '"'
    dtype = str(p.dtype).removeprefix("torch.")
    words = {dtype: p.dtype != torch.float32, "channels_last": p.channels_last, "transposed": p.transposed}
    words |= {"bias": p.has_bias, p.padding_mode: p.padding_mode != "zeros"}
    return " ".join([text, *(word for word, on in words.items() if on)])


def read_problem_file(
    file: str | PathLike[str], read: Callable[[str], Problem], options: dict[str, str], within: tuple[Path, ...] = ()
) -> Iterator[tuple[int, Problem | ValueError]]:
    """Yield (line number, problem or the error) for each problem of a file, benchdnn's shape files included.

    ``#`` begins a comment. Several problems may share a line, and words apply to the problem before them. Options of
    benchdnn (``--dir=FWD_B``) say how to run a problem: those that are in force at each are in ``options``. The file
    of ``--batch=FILE`` is read in its place, beside the one that names it; ``within`` are those that are being read.

    Raises:
        OSError, ValueError: the file cannot be read, or is no text.
    """
    path = Path(file)
    for number, line in _join_continued(_lines_of(path)):
        for token in _split_line(line):
            try:
                if token.startswith("--batch="):
                    nested = path.parent / token.removeprefix("--batch=")
                    if nested.resolve() in [outer.resolve() for outer in (*within, path)]:
                        raise ValueError(f"--batch={nested} reads itself")
                    yield from read_problem_file(nested, read, options, (*within, path))
                elif token == "--reset":
                    options.clear()
                elif token.startswith("--"):
                    name, _, value = token.removeprefix("--").partition("=")
                    options[name] = value
                else:
                    yield number, read(token)
            except (ValueError, OSError) as e:
                what = f"{token} cannot be read: {e.strerror}" if isinstance(e, OSError) else e
                yield number, ValueError(f"{path}:{number}: {what}")


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None


def _join_continued(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; one that ends in a backslash goes on, without a space, in the next."""
    begun, first = "", 0
    for number, line in enumerate(lines, 1):
        whole, first = begun + line.strip(), first or number
        if whole.endswith("\\") and not line.lstrip().startswith("#"):
            begun = whole[:-1].rstrip()
            continue
        yield first, whole
        begun, first = "", 0
    if begun:
        yield first, begun


def _split_line(line: str) -> list[str]:
    """Options, and descriptors each with the words that follow it; spaces inside a quoted name do not split."""
    found: list[str] = []
    for token in re.findall(r'(?:[^\s"]|"[^"]*(?:"|$))+', line):
        if token.startswith("#"):
            break
        if token in _WORDS and found and not found[-1].startswith("--"):
            found[-1] += f" {token}"
        else:
            found.append(token)
    return found
