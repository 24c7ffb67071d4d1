"""``convgrad run``: its own options stand before the script, everything behind belongs to the script."""

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra [cli] brings typer")

from convgrad.cli.app import run

SCRIPT = """
import sys
import torch
torch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))
print(sys.argv[1:])
sys.exit(5)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_script_gets_its_arguments_and_gives_its_status(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "store"))  # where the limit is not known
    table = tmp_path / "kernels.csv"
    options = ["--stock", "--no-limit", "--csv", str(table)]
    assert run(["run", *options, script, "--epochs", "3", "--stock", "-h", "data"]) == 5
    out, err = capsys.readouterr()
    assert out == "['--epochs', '3', '--stock', '-h', 'data']\n"
    assert "the script's own choice: 1 call," in err
    (row,) = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    assert row["output"] == "forward"
    assert row["backend"].startswith("aten ")
    assert float(row["total ms"]) == float(row["mean ms"]) > 0
    assert (float(row["share"]), row["of limit"]) == (1.0, "")


def test_without_stock_it_is_taken_over(script, capsys):
    assert run(["run", "--no-limit", script]) == 5
    assert "convgrad's choice: 1 call," in capsys.readouterr().err


def test_what_cannot_be_run_is_said(script, capsys):
    assert run(["run", "nowhere.py"]) == 2
    assert run(["run", "--csv", "no/such/folder/x.csv", script]) == 2
    assert run(["run", "--csv", ".", script]) == 2
    assert run(["run", "--stokc", script]) == 2
    assert run(["run", "--json", script, script]) == 2  # elsewhere --json takes no file
    assert run(["run", "--stock", "--accelerate", script]) == 2
    lines = capsys.readouterr().err.replace("\n  ", " ").splitlines()
    assert len(lines) == 6
    assert f"no script at 'nowhere.py' (hint: it was looked for in {Path.cwd()};" in lines[0]
    assert "no/such/folder" in lines[1]
    assert "'.' cannot be written" in lines[2]
    assert "there is no option '--stokc'" in lines[3]
    assert "script.py' is a script, and the data would be written over it" in lines[4]
    assert "--stock and --accelerate exclude each other" in lines[5]
    assert Path(script).read_text() == SCRIPT


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["run", "--no-limit", "--csv"], "x.csv"),
        (["run", "--no-limit", "--json"], "x.json"),
        (["report", "--seconds", "0.1", "-o"], "x.json"),
        (["tune", "--export"], "x.json"),
    ],
)
def test_a_script_that_goes_to_another_folder_takes_no_file_with_it(command, name, script, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    Path(script).write_text(SCRIPT.replace("import torch", "import torch, os; os.chdir('other')"))
    assert run([*command, name, script]) in (0, 5)
    assert (tmp_path / name).exists()
    assert not list((tmp_path / "other").iterdir())


def test_a_process_that_the_script_starts_has_the_kernels_of_the_command(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(
        "import sys, torch, convgrad\nassert sys.argv[1:] == ['one', 'more']\n"
        "def forward(x, w, p): return torch.nn.functional.conv1d(x, w)\n"
        "convgrad.register('mine', forward=forward, accepts=lambda p: p.ndim == 1, verify=False, prefer=True)\n"
        "sys.exit()\n"
    )
    conv = "import torch; torch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))"
    (tmp_path / "script.py").write_text(
        f"import os, subprocess, sys\nos.chdir('/')\n{conv}\n"
        f"subprocess.run([sys.executable, '-c', {conv!r}], check=True)"
    )
    monkeypatch.chdir(tmp_path)
    assert run(["--kernels", "kernels.py one more", "run", "--no-limit", "--csv", "x.csv", "script.py"]) == 0
    (row,) = csv.DictReader((tmp_path / "x.csv").read_text(encoding="utf-8").splitlines())
    assert (row["backend"], row["calls"]) == ("mine", "2")
    monkeypatch.chdir(tmp_path)
    assert run(["--kernels", "kernels.py one more", "report", "--seconds", "0.1", "-o", "x.json", "script.py"]) == 0
    (row,) = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert (row["backend"], row["calls"]) == ("mine", 2)
