"""Start watching a child process of ``convgrad run`` when it imports PyTorch.

The folder of this file is the first of PYTHONPATH in such a process, so that the interpreter imports it as it starts. A
process that never imports PyTorch is left alone.
"""

import importlib.util
import os
import sys
from types import ModuleType

_loading: set[str] = set()


class _Finder:
    """Finds PyTorch and convgrad as the other finders do, and starts watching after the first of them is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in ("torch", "convgrad") or name in _loading:
            return None
        _loading.add(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _loading.discard(name)
            if not _loading:  # convgrad imports PyTorch, and is not ready while it does
                sys.meta_path.remove(finder)  # pyright: ignore[reportArgumentType]
                _watch()

        spec.loader.exec_module = exec_module
        return spec


def _watch() -> None:
    try:
        from convgrad.diagnostics.children import watch_this_process
    except ImportError as error:
        print(f"convgrad run does not watch process {os.getpid()}: {error}", file=sys.stderr)
    else:
        watch_this_process()


def _next_sitecustomize() -> None:
    """Load the module of this name that the interpreter would have imported."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        sys.modules[__name__] = this


finder = _Finder()
sys.meta_path.insert(0, finder)  # pyright: ignore[reportArgumentType]
_next_sitecustomize()
