"""Scripts and modules that register kernels, for ``convgrad --kernels``."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

__all__ = ["load_kernels"]


def load_kernels(source: str) -> None:
    """Run a script (``path/to/file.py``) or import a module for all kernels that it registers.

    A script's ``if __name__ == "__main__"`` part is left out; each kernel is checked as its registration says.
    """
    script = source.endswith(".py")
    if script and not Path(source).is_file():
        raise FileNotFoundError(f"there is no script {source!r}")
    folder = str(Path(source).parent) if script else os.getcwd()
    sys.path.insert(0, folder)
    try:
        if script:
            runpy.run_path(source, run_name="__kernels__")
        else:
            importlib.import_module(source)
    finally:
        sys.path.remove(folder)
