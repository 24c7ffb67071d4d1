"""``python -m convgrad.custom FILE PROBLEM --backend NAME``: check the kernel that a script registers."""

from __future__ import annotations

import argparse
import sys

from ..problem import PASSES
from .origin import load
from .verify import repeat


def main(argv: list[str] | None = None) -> int:
    """Print every property of the check; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m convgrad.custom", description=__doc__)
    parser.add_argument("source", help="a script (.py), run up to the registration, or the name of a module")
    parser.add_argument("problem", help="such as g32mb1ic32ih112oc32kh3ph1")
    parser.add_argument("--backend", required=True, help="the name under which the kernel is registered")
    parser.add_argument("--output", choices=PASSES, default="forward")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    backend = load(given.source, given.backend)
    return not repeat(backend, given.problem, given.output, given.device, given.seed)


if __name__ == "__main__":
    sys.exit(main())
