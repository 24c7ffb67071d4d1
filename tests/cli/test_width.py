"""What commands print for people is no wider than the terminal; only commands, paths and problems to copy may be."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")

from convgrad.cli.app import run

LONG = "mb1g12ic24id7ih9iw11oc36od7oh10ow13kd3kh4kw5sd1sh1sw1pd1ph2pw3dd0dh0dw0 float64 channels_last"
KERNELS = """
import torch, convgrad
convgrad.register("a_kernel_with_a_long_name", forward=lambda x, w, p: torch.zeros(p.output_shape, dtype=x.dtype))
"""
SCRIPT = "import torch\ntorch.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))\n"


@pytest.fixture(autouse=True)
def _no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("kernels.py").write_text(KERNELS)
    Path("script.py").write_text(SCRIPT)
    Path("shapes").write_text(LONG)


@pytest.mark.parametrize(
    "args",
    [
        ("info",),
        ("info", "--all"),
        ("explain", LONG, "--no-measure", "--all"),
        ("explain", "g96ic96ih56oc96kh7ph3 bfloat16", "-d", "h100 cudnn 9.10 bfloat16 channels_last", "--rules"),
        ("check", "shapes", "-b", "aten", "-o", "forward"),
        ("-k", "kernels.py", "check", LONG, "-b", "a_kernel_with_a_long_name", "--property", "exact"),
        ("-k", "kernels.py", "info"),
        ("bench", "g4mb2ic4ih6oc4kh3ph1", "-b", "im2col", "-b", "triton", "--seconds", "0.02", "--no-limit"),
        ("tune", "g4mb2ic4ih6oc4kh3ph1"),
        ("run", "--no-limit", "script.py"),
        ("run", "--stock", "--no-limit", "script.py"),
        *((("names", name)) for name in ("conv2d", "thnn_conv2d", "columns", "convgrad.direct", "nothing")),
        ("explain", "convnet"),
        ("check", "no/such/file"),
        *((command, "--help") for command in ("info", "explain", "check", "bench", "tune", "run", "report", "names")),
        *(("bench", command, "--help") for command in ("problems", "steps")),
        ("--help",),
    ],
    ids=" ".join,
)
def test_no_line_is_wider(args: tuple[str, ...], capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run(args)
    printed, error = capsys.readouterr()
    assert printed or error
    wide = [line for line in (printed + error).splitlines() if len(line) > 60 and "repeat: " not in line]
    assert [line for line in wide if len(line.split()) > 2 or max(map(len, line.split())) <= 30] == []


@pytest.mark.parametrize("columns", [1, 12, 30, 60, 80, 120])
def test_the_first_line_of_an_error_holds_a_path_of_any_length_whole(
    columns: int, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for length in (1, 8, 40, 70, 200):
        file = tmp_path / ("x" * length)
        file.write_text("ic2zz9")
        assert run(["check", str(file)]) == 2
        first, *rest = capsys.readouterr().err.splitlines()
        assert first.startswith(f"convgrad: {file}:1:")
        assert rest


def test_the_width_is_used(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal, a row of a table is a line."""
    lines = {}
    for columns in ("80", ""):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(["explain", "ic2ih9oc2kh3", "--no-measure", "--all"]) == 0
        lines[columns] = capsys.readouterr().out.splitlines()
    assert max(map(len, lines["80"])) <= 80 < max(map(len, lines[""]))
    assert len(lines[""]) < len(lines["80"])
