"""A profile as data: written, read back, refused, compared."""

import json
import re
from dataclasses import replace

import pytest

from convgrad.report import SCHEMA, Profile, changes

from .example import example, row, slower


def test_the_data_comes_back_as_it_was(tmp_path) -> None:
    profile = example().against(slower(example()))
    path = tmp_path / "x.json"
    profile.save(path)
    assert Profile.read(path).to_dict() == profile.to_dict()
    assert Profile.read(path).rows == profile.rows
    path.write_text(json.dumps({"schema": "convgrad report", "schema_version": 1, "data": profile.to_dict()}))
    assert Profile.read(path).rows == profile.rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no number under 'schema'"),
        ('{"schema": "1"}', "no number under 'schema'"),
        ('{"schema": "convgrad report"}', "no number under 'schema'"),
        ('{"schema": 99}', f"of version 99; this convgrad reads up to {SCHEMA}"),
        ('{"schema": 1, "kind": "step"}', "not hold the data of a convgrad report: it has no list 'rows'"),
        ("[" * 100_000 + "]" * 100_000, "too deep"),
        ("<html></html>", "neither a page nor a JSON file of a convgrad report"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json") as error:
        Profile.read(path)
    assert words in str(error.value)


def test_a_field_of_a_later_version_is_left_out_and_one_that_is_missing_refused() -> None:
    data = json.loads(example().to_json())
    data["rows"][0]["color"] = data["color"] = "green"
    assert Profile.from_dict(data) == example()
    del data["rows"][0]["problem"]
    with pytest.raises(ValueError, match="problem"):
        Profile.from_dict(data)


DATA = example().against(example()).to_json()
WRONG_IN_A_ROW = {
    "problem": [7, "ic2zz"], "outputs": [["sideways"], [1], 3], "calls": ["1", 1.5, True, None],
    "milliseconds": ["1", float("inf"), None], "layers": ["x", [1]], "of_limit": ["1"], "copies": [[1]], "bound": [2],
}  # fmt: skip
WRONG = {
    "rows": [{}, [3]], "variants": [[[]]], "costs": [5], "limits": [[{"dtype": 1}]], "made": ["yesterday"],
    "before": [3, {"what": "x"}], "finding": [None], "milliseconds": ["1"], "notes": [[1]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        *(("rows", name, value) for name, values in WRONG_IN_A_ROW.items() for value in values),
        *(("before", name, value) for name, values in WRONG_IN_A_ROW.items() for value in values),
        *(("", name, value) for name, values in WRONG.items() for value in values),
    ],
)
def test_a_wrong_type_is_one_clear_error(where: str, name: str, value: object) -> None:
    data = json.loads(DATA)
    {"rows": data["rows"][1], "before": data["before"]["rows"][1], "": data}[where][name] = value
    with pytest.raises(ValueError, match="does not hold the data of a convgrad report"):
        Profile.from_dict(data)


def test_changes_are_those_of_a_direction_however_its_calls_are_split() -> None:
    p, q = "g8mb2ic8ih9oc8kh3ph1", "mb2ic8ih9oc8kh3"
    before = replace(example(), rows=(row(p, "grad_input", "aten", 0.5), row(p, "grad_weight", "aten", 0.5)))
    now = replace(
        example(),
        rows=(row(f"{p} bias", "forward", "aten", 0.5), row(p, "grad_input+grad_weight", "native", 0.5),
              row(f"{q} transposed", "grad_input", "native", 0.5)),
    )  # fmt: skip
    found = {(c.problem.split("ic")[0], c.direction): c for c in changes(now.against(before))}
    assert set(found) == {("g8mb2", "backward"), ("g8mb2", "forward"), ("g1mb2", "forward")}
    both = found["g8mb2", "backward"]
    assert both.before == pytest.approx(sum(r.total for r in before.rows))
    assert both.after == pytest.approx(now.rows[1].total)
    assert found["g8mb2", "forward"].before is None
    ordered = [abs((c.after or 0) - (c.before or 0)) for c in changes(now.against(before))]
    assert ordered == sorted(ordered, reverse=True)
    assert changes(now) == []


def test_as_text() -> None:
    text = str(example())
    assert text.startswith("With convgrad the training step is 1.52x")
    assert "convgrad tune x" in text
    assert "blocks.13.depthwise" not in text  # not among those that matter most
    assert "23 groups of equal layers more" in text
    assert "blocks.13.depthwise" in example().text(everything=True)
    beyond = replace(example(), rows=(row("ic2ih9oc2kh1", "forward", "aten", 1.2),))
    assert ("limit that is stored is too low" in str(beyond), "too low" in text) == (True, False)
    short = replace(example(), milliseconds=0.001)  # in which no call was watched
    assert max(float(part) for part in re.findall(r"([\d.]+)%", short.text())) <= 100
    for width in (80, 100):
        assert max(map(len, example().text(width).splitlines())) <= width


def test_no_compiled_kernels_is_the_first_sentence(monkeypatch) -> None:
    monkeypatch.setattr("convgrad.diagnostics.profile.why_absent", lambda: "there is no compiler")
    said = Profile.of(example().rows, kind="run", what="x", finding="1 s in all.").finding
    assert said == "No compiled kernels: there is no compiler. 1 s in all."
    assert Profile.of(example().rows, kind="table", what="x", finding="1 s in all.").finding == "1 s in all."
