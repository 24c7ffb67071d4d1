"""``python -m convgrad``; `convgrad_command` starts the command ``convgrad`` here."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its packages, say in one line how to get them."""
    try:
        try:
            import typer  # noqa: F401
        except ImportError as error:
            sys.exit(f"convgrad: the command line needs {error.name}; install it with: pip install 'convgrad[cli]'")
        from .cli.app import run

        sys.exit(run())
    except KeyboardInterrupt:  # while the imports run
        sys.exit(130)


if __name__ == "__main__":
    main()
