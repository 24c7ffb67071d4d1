"""The one-line text: benchdnn's rules, our words, one error for each mistake, and an exact round trip."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from convgrad.problem import ConvProblem
from convgrad.problem.grammar import format_problem, read_problem_file
from convgrad.testing import problems

parse = ConvProblem.parse
ALL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.complex64)


@given(problems(dtypes=ALL_DTYPES))
@settings(max_examples=200)
def test_canonical_problems_round_trip(problem: ConvProblem) -> None:
    assert parse(format_problem(problem)) == problem


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ic3ih112oc4oh56kh3sh2", "ph0:1"),
        ("ic3ih112oc4kh3sh2ph0:1", "ph0:1"),
        ("ic3ih112oc4kh3sh2ph1:1", "ph1"),
        ("ic3ih9iw9oc4kh3kw3ph1pw0:2", "ph1pw0:2"),
        ("ic3iw5oc4kw3pw-1:2", "pw-1:2"),
        ("ic3iw5oc4kw3pw2:-1", "pw2:-1"),
        ("ic3ih9oc4kh3ph0:1 transposed", "ph0:1"),
    ],
)
def test_padding_that_differs_between_its_sides_is_written(text: str, shown: str) -> None:
    problem = parse(text)
    written = str(problem)
    assert shown + "d" in written
    assert parse(written) == problem
    assert parse(re.sub(r":-?\d+", "", written)) == problem  # as it was once written


def test_another_spelling_is_printed_and_read_as_its_canonical_form() -> None:
    canonical = ConvProblem(1, 1, 1, 1, (8,), (3,), (3,), ((2, -1),), (1,), (3,))
    for high in (0, 1):
        other = canonical.replace(padding=((2, high),))
        assert str(other) == str(other.canonical())
        assert parse(str(other)) == other.canonical() == parse(str(canonical))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # square from h alone, batch 2, output from symmetric padding
        ("ic3ih9oc4kh3", ConvProblem(2, 3, 4, 1, (9, 9), (3, 3), (1, 1), ((0, 0),) * 2, (1, 1), (7, 7))),
        # cubic from d alone; stride, padding and dilation are copied too
        (
            "mb1ic1id7oc1kd3sd2pd1dd1",
            ConvProblem(1, 1, 1, 1, (7,) * 3, (3,) * 3, (2,) * 3, ((1, 1),) * 3, (2,) * 3, (3,) * 3),
        ),
        # with h and w given, an absent stride of w is 1 and not that of h
        (
            "mb1ic1ih8iw8oc1kh3kw3sh2ph1",
            ConvProblem(1, 1, 1, 1, (8, 8), (3, 3), (2, 1), ((1, 1), (0, 0)), (1, 1), (4, 6)),
        ),
        # padding from the output size: half of what is missing in front, the rest behind
        ("mb1ic1iw5oc1ow5kw4", ConvProblem(1, 1, 1, 1, (5,), (4,), (1,), ((1, 2),), (1,), (5,))),
        # an output smaller than the kernel gives: the half is rounded towards zero, the rest is a crop
        ("mb1ic1iw8oc1ow5kw3", ConvProblem(1, 1, 1, 1, (8,), (3,), (1,), ((0, -1),), (1,), (5,))),
        # symmetric padding already gives the stated size, although the last column is not read
        ("mb1ic1iw8oc1ow4kw3sw2pw1", ConvProblem(1, 1, 1, 1, (8,), (3,), (2,), ((1, 1),), (1,), (4,))),
        # it does not: causal
        ("mb1ic1iw8oc1ow8kw3pw2", ConvProblem(1, 1, 1, 1, (8,), (3,), (1,), ((2, 0),), (1,), (8,))),
        # a crop on both sides
        ("mb1ic1iw8oc1kw3pw-1", ConvProblem(1, 1, 1, 1, (8,), (3,), (1,), ((-1, -1),), (1,), (4,))),
        # underscores; zeros in unused dimensions
        (
            "g2_mb1_ic4oc6_iw5kw1_sw1pd0ph0pw0_dd0dh0dw0",
            ConvProblem(1, 4, 6, 2, (5,), (1,), (1,), ((0, 0),), (1,), (5,)),
        ),
    ],
)
def test_rules_of_benchdnn(text: str, expected: ConvProblem) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "shape", "output_padding"),
    [
        ("mb1ic8ih5oc4kh4sh2ph1", (1, 4, 10, 10), [0, 0]),
        ("mb1ic8ih5oc4oh11kh4sh2ph1", (1, 4, 11, 11), [1, 1]),
        ("mb3g2ic4iw6oc6ow14kw3sw2pw0", (3, 6, 14), [1]),
        ("g1mb256oc3oh227ow227ic96ih55iw55kh11kw11sh4sw4ph0pw0", (256, 3, 227, 227), [0, 0]),
    ],
)
def test_a_transposed_descriptor_is_that_of_what_the_user_calls(
    text: str, shape: tuple[int, ...], output_padding: list[int]
) -> None:
    problem = parse(text, transposed=True)
    assert problem == parse(text + " transposed")
    assert problem.input_shape == shape  # the slot "input" is the user's output
    user_input = torch.empty(problem.output_shape, device="meta")
    weight = torch.empty(problem.weight_shape, device="meta")
    padding = [low for low, _ in problem.padding]
    found = torch.convolution(
        user_input, weight, None, problem.stride, padding, problem.dilation, True, output_padding, problem.groups
    )
    assert tuple(found.shape) == shape


@pytest.mark.parametrize("text", ["ic4iw1oc3kw2pw1", "ic4iw1oc3ow0kw2pw2", "ic4ih1iw5oc3oh0ow4kh2kw2ph1pw1"])
def test_a_transposed_problem_whose_result_has_size_zero(text: str) -> None:
    """It is one only where there is no batch, as in PyTorch."""
    with pytest.raises(ValueError, match=r"comes out as 0|0 only without a batch"):
        parse(text, transposed=True)
    problem = parse("mb0" + text, transposed=True)
    assert problem.input_size[0] == 0
    assert problem.empty
    assert parse(str(problem)) == problem
    with pytest.raises(ValueError, match="absent and comes out as"):
        parse("mb0" + text.replace("pw", "pw9").replace("ow0", "").replace("ow4", ""), transposed=True)


@pytest.mark.parametrize("text", ["mb0ic3iw2oc4kw0", "ic0iw0oc4kw2pw1", "mb0ic3iw0oc4ow0kw2sw2 transposed"])
def test_sizes_of_zero_where_nothing_is_computed(text: str) -> None:
    assert parse(text).empty
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("short", "long"), [("bf16", "bfloat16"), ("f16", "float16"), ("f64", "float64"), ("f32", "float32")]
)
def test_words(short: str, long: str) -> None:
    text = "ic3ih9oc4kh3"
    assert parse(f"{text} {short}") == parse(f"{text} {long}")
    assert parse(f"{text} {long}").dtype == getattr(torch, long)
    every = parse(f'{text}n"a name" channels_last transposed {short} bias')
    assert every.channels_last
    assert every.transposed
    assert every.has_bias
    assert every.name == "a name"
    assert str(parse(text)).endswith("dh0")  # float32 is not written
    assert parse("ic3id9oc4kd3 channels_last").memory_format == torch.channels_last_3d


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no fields", "position 0"]),
        ("ic3", ["no spatial dimension"]),
        ("mb1ic3ihoc3", ["'ih' has no number", "position 6"]),
        ("ic3ih3oc4", ["'kh' is missing, in the problem"]),
        ("ic3kh3oc4", ["'ih' is missing"]),
        ("ih3kh3oc4", ["'ic' is missing"]),
        ("ic3ih3oc4kh0", ["'kh'", "at least 1", "got 0", "position 9"]),
        ("ic3ih3oc4kh1sh0", ["'sh'", "at least 1", "position 12"]),
        ("mb-2ic3ih3oc4kh1", ["'mb'", "at least 0", "got -2", "position 0"]),
        ("g0ic3ih3oc4kh1", ["'g'", "at least 1"]),
        ("ic3ih3oc4kh5", ["'oh' is absent and comes out as -1", "position 3"]),
        ("ic3id3kd1ih3kh1oc4", ["['d', 'h']"]),
        ("ic3ih3oc4kh1q7", ["'q7'", "position 12"]),
        ("ic3ih3:3oc4kh1", ["'ih' has two numbers", "position 3"]),
        ("ic3ih3oc4kh1ph0:1ph0:2", ["'ph' is given twice, as 1 and as 2", "position 17"]),
        ("ic3ih3oc4kh1ph0:1oh9", ["does not follow from input_size=3"]),
        ("ic3ih3oc4kh1 float", ["'float'", "position 13"]),
        ("ic3iw3oc4kw1 channels_last", ["2 or 3 spatial dimensions"]),
        ("g2ic3ih3oc4kh1", ["groups=2", "in the problem 'g2"]),
        ("ic3ih3oc4kh1ih5", ["'ih' is given twice, as 3 and as 5", "position 12"]),
        ("ic3ih3oc4kh1 f16 float32", ["a second dtype, 'float32'", "position 17"]),
        ("ic3ih3oc4kh1 reflect circular", ["a second padding mode, 'circular'", "position 21"]),
        ("ic3ih" + "9" * 5000, ["'ih' has 5000 digits", "position 3"]),
    ],
)
def test_an_error_names_the_field_and_the_position(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="an example: g32mb1") as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="reads a text, got NoneType"):
        parse(None)  # pyright: ignore[reportArgumentType]


def test_reading_a_file_of_shapes(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text('# a comment\n\nic1iw5oc1kw3n"one"\n')
    (tmp_path / "outer").write_text(
        "--reset --dt=f32\n"
        "--dir=FWD_B --batch=inner # as it stands\n"
        "--dir=BWD_D ic2iw5oc1kw3 bias ic3iw5oc1kw3\n"
        "--attr-post-ops=relu,\\\n"
        'sum ic4iw5oc1kw3n"two words" f64\n'
        "ic5iw2oc1kw3\n"
        "--batch=outer\n"
        "--batch=nowhere\n"
    )
    options: dict[str, str] = {}
    found = list(read_problem_file(tmp_path / "outer", parse, options))
    assert options == {"dt": "f32", "dir": "BWD_D", "attr-post-ops": "relu,sum"}
    assert [(p.name, p.dtype) for _, p in found if isinstance(p, ConvProblem)][3] == ("two words", torch.float64)
    good = [(line, p.in_channels, p.has_bias) for line, p in found if isinstance(p, ConvProblem)]
    assert good == [(3, 1, False), (3, 2, True), (3, 3, False), (4, 4, False)]
    bad = [(line, str(p)) for line, p in found if isinstance(p, ValueError)]
    assert [line for line, _ in bad] == [6, 7, 8]
    assert "outer:6" in bad[0][1]
    assert "'ow' is absent and comes out as 0" in bad[0][1]
    assert "reads itself" in bad[1][1]
    assert "cannot be read" in bad[2][1]


def test_a_file_with_a_mark_of_its_encoding_and_one_of_no_text(tmp_path: Path) -> None:
    (tmp_path / "marked").write_text("ic1iw5oc1kw3\n", encoding="utf-8-sig")
    assert list(read_problem_file(tmp_path / "marked", parse, {})) == [(1, parse("ic1iw5oc1kw3"))]
    (tmp_path / "raw").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="raw is no text"):
        list(read_problem_file(tmp_path / "raw", parse, {}))
