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
    """Run the command line, and end the process with its exit status."""
    spec = find_spec("convgrad")
    if spec is not None:
        sys.modules.setdefault("convgrad", module_from_spec(spec))
    from convgrad.__main__ import main as command

    command()


if __name__ == "__main__":
    main()
