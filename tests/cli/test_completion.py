"""Completion in real shells: typer's scripts, and what this command offers."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")

from convgrad.cli.app import run

ASK = """
eval "$(_CONVGRAD_COMPLETE=source_bash convgrad)"
while IFS= read -r line; do
    IFS='|' read -ra COMP_WORDS <<< "$line"
    [[ $line == *'|' ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    COMPREPLY=()
    _convgrad_completion convgrad
    echo "${COMPREPLY[*]}"
done
"""
#: Words as bash breaks a line, the last one to be completed, and what it is offered.
OFFERED = {
    "convgrad|": "info explain check bench tune run report names",
    "convgrad|--v": "--version",
    "convgrad|explain|--no-m": "--no-measure",
    "convgrad|check|-b|na": "native native:avx2 native:amx native:winograd",
    "convgrad|check|-b|aten|:|c": "channels_last contiguous cudnn",  # bash keeps "aten:"
    "convgrad|check|-b|aten|:": "float32 channels_last contiguous padded matmul patches cudnn miopen mkldnn native",
    "convgrad|check|--backend|=|aten|:|m": "matmul miopen mkldnn",
    "convgrad|check|--property|b": "bound bias",
    "convgrad|explain|-o|grad_": "grad_input grad_weight grad_bias",
    "convgrad|explain|resnet|-d|h": "here h100 h200",
    "convgrad|explain|mob": "mobilenet_v1 mobilenet_v2",
    "convgrad|check|g32ic3i": "g32ic3id g32ic3ih g32ic3iw",
    "convgrad|check|ic3ih9o": "ic3ih9oc ic3ih9oh",
    "convgrad|check|": "",  # a file: the shell's own
    "convgrad|bench|s": "steps",
    "convgrad|bench|ic3ih9oc3kh3|-o|f": "forward",
    "convgrad|check|-b|nothing|-o|fo": "forward",
}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the command in it, first in the path."""
    program = tmp_path / "bin" / "convgrad"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m convgrad_command "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", OFFERED)
def test_what_is_offered(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    split = words.split("|")
    monkeypatch.setenv("COMP_BEFORE", "")
    monkeypatch.setenv("_CONVGRAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(split))
    monkeypatch.setenv("COMP_CWORD", str(len(split) - 1))
    with pytest.raises(SystemExit):
        run(split[1:])
    assert " ".join(capsys.readouterr().out.split()) == OFFERED[words]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.usefixtures("command")
def test_bash_is_offered_the_same() -> None:
    asked = {words: OFFERED[words] for words in ("convgrad|check|-b|aten|:|c", "convgrad|bench|s", "convgrad|check|")}
    done = subprocess.run(
        ["bash", "-c", ASK], input="\n".join(asked) + "\n", capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""
    assert dict(zip(asked, done.stdout.split("\n"), strict=False)) == asked


def typed(shell: list[str], setup: str, line: str, expected: str) -> None:
    """Type a line and a tab into an interactive shell until the expected line stands there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(PS1="> ", TERM="dumb")
        os.execvp(shell[0], shell)
    seen, end = "", time.monotonic() + 60
    try:
        os.write(terminal, f"{setup}; echo rea''dy\n".encode())
        for text, awaited in (("", "ready\r"), (f"{line}\t", expected)):
            os.write(terminal, text.encode())
            while awaited not in seen:
                assert time.monotonic() < end, seen
                if select.select([terminal], [], [], 0.5)[0]:
                    seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(terminal, 4096).decode(errors="replace"))
            seen = ""
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [
        *((shell, "convgrad check -b aten:cu", "convgrad check -b aten:cudnn ") for shell in ("bash", "zsh")),
        *((shell, "convgrad check sha", "convgrad check shapes ") for shell in ("bash", "zsh")),
        ("bash", "convgrad check --backend=im", "convgrad check --backend=im2col "),
    ],
)
def test_a_tab_in_a_terminal(command: Path, shell: str, line: str, expected: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    (command / "shapes").touch()
    options = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}[shell]
    before = "autoload -U compinit; compinit -u; " if shell == "zsh" else ""
    typed(options, f'{before}eval "$(_CONVGRAD_COMPLETE=source_{shell} convgrad)"', line, expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.usefixtures("command")
def test_what_fish_is_offered() -> None:
    code = '_CONVGRAD_COMPLETE=source_fish convgrad | source; complete --do-complete "convgrad check -b aten:c"'
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["aten:channels_last", "aten:contiguous", "aten:cudnn"]
