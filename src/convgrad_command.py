"""The command ``convgrad``, started without the package's own imports: they load PyTorch, which help need not wait for.

An installed command has to name a module, and importing any module of a package runs the package's ``__init__`` first.
So the package stands here as an empty module, from which `convgrad.cli` can be imported; a command that has something
to compute runs the real ``__init__`` in it (`convgrad.cli.app.command`). Everywhere else ``import convgrad`` is what it
always was.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

__all__ = ["main"]


def main() -> None:
    """Run the command line, and end the process with its exit status; without its packages, say how to get them."""
    spec = find_spec("convgrad")
    if spec is not None:
        sys.modules.setdefault("convgrad", module_from_spec(spec))
    try:
        try:
            import typer  # noqa: F401
        except ImportError as error:
            sys.exit(f"convgrad: the command line needs {error.name}; install it with: pip install 'convgrad[cli]'")
        from convgrad.cli.app import run

        sys.exit(run())
    except KeyboardInterrupt:  # while the imports run
        sys.exit(130)


if __name__ == "__main__":
    main()
