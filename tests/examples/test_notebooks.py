"""The notebooks say what the scripts say, and run."""

import runpy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupytext")
pytest.importorskip("nbclient")

EXAMPLES = Path(__file__).parents[2] / "examples"
MAKE = runpy.run_path(str(EXAMPLES / "notebooks" / "make.py"))
NOTEBOOKS = MAKE["NOTEBOOKS"]
#: A display for the terminal, and what it shares with others.
SCRIPTS_ONLY = {"demo", "digits", "sharded_unet"}  # the last one is started by torchrun


def test_every_example_is_a_notebook_too():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == NOTEBOOKS.keys() | SCRIPTS_ONLY
    assert {path.stem for path in (EXAMPLES / "notebooks").glob("*.ipynb")} == NOTEBOOKS.keys()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_its_script_with_small_outputs(name):
    path = EXAMPLES / "notebooks" / f"{name}.ipynb"
    made, written = MAKE["from_script"](name), nbformat.read(path, as_version=4)
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (made, written)]
    assert cells[0] == cells[1], "the script has changed: `make notebooks`"
    assert any(cell.get("outputs") for cell in written.cells)
    assert path.stat().st_size < 100_000
    assert "site-packages" not in path.read_text(encoding="utf-8")  # a warning of somebody else's


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name):
    if "triton" in name:
        pytest.importorskip("triton")
    if "numba" in name:
        pytest.importorskip("numba")
    notebook = MAKE["from_script"](name)
    MAKE["run"](notebook, **NOTEBOOKS[name])  # an exception in a cell comes out here
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = sum("image/png" in output.get("data", {}) for output in outputs)
    assert outputs
    assert shown == sum("Image(" in cell.source for cell in notebook.cells)
