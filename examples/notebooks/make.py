"""Makes the notebooks of this folder from the scripts beside it, and runs them.

    python examples/notebooks/make.py [name ...]

A script is the source, in jupytext's percent format: its docstring and its Markdown cells become text. A cell tagged
``active-py`` is left to the script, and one tagged ``active-ipynb`` is a comment there and code here.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

#: The notebooks, and what the environment must say when they run; without a GPU, Triton's interpreter runs its kernels.
NOTEBOOKS: dict[str, dict[str, str]] = {
    "accelerate": {},
    "autoencoder": {},
    "custom_kernel": {},
    "gradient_penalty": {},
    "mamba": {},
    "numba_kernel": {},
    "private_training": {},
    "quantized_digits": {},
    "triton_kernel": {"TRITON_INTERPRET": "1"},
}
HERE = Path(__file__).parent
KEPT = ("text/plain", "image/png")


def from_script(name: str) -> NotebookNode:
    """The notebook without outputs; the same script gives the same notebook."""
    notebook = jupytext.read(HERE.parent / f"{name}.py")
    notebook.cells = [cell for cell in notebook.cells if "active-py" not in cell.metadata.get("tags", ())]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    notebook.cells[0].source = f"# {notebook.cells[0].source}"  # the docstring's sentence
    return notebook


def run(notebook: NotebookNode, **environment: str) -> None:
    """Fill in the outputs: what is printed, and pictures; no progress bars, and nothing that the next run changes."""
    with TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=600, startup_timeout=300, coalesce_streams=True, resources=resources)
        quiet = {"PYTHONWARNINGS": 'ignore:install "ipywidgets"', "CONVGRAD_CACHE": folder}
        client.execute(env=os.environ | quiet | environment)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata = {}
        cell.get("outputs", [])[:] = [kept for output in cell.get("outputs", []) if (kept := trimmed(output))]


def trimmed(output: NotebookNode) -> NotebookNode | None:
    """An output without what is of no use in a file; None where nothing is left."""
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    widget = "application/vnd.jupyter.widget-view+json" in output.data
    output.data = NotebookNode({kind: output.data[kind] for kind in KEPT if output.data.get(kind, "").strip()})
    output.metadata = NotebookNode()
    if "image/png" in output.data:
        output.data["image/png"] = smaller(output.data["image/png"])
    return output if output.data and not widget else None


def smaller(png: str) -> str:
    """The same picture in 64 colors, in a fifth of the bytes."""
    written = BytesIO()
    picture = Image.open(BytesIO(b64decode(png))).convert("RGB")
    picture.quantize(64, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return b64encode(written.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        notebook = from_script(name)
        run(notebook, **NOTEBOOKS[name])
        nbformat.write(notebook, HERE / f"{name}.ipynb")
        print(HERE / f"{name}.ipynb")
