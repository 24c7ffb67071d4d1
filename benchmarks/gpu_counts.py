"""Instructions counted in the kernels that `gpu` would measure; no GPU is needed.

    python benchmarks/gpu_counts.py [--only mobilenet,mamba] [--out benchmarks/results/triton-counts.md]

See `convgrad.backends.triton.counting` for the model.
"""

from __future__ import annotations

import argparse
import sys

from gpu_problems import DTYPES, LAYOUTS, PROBLEMS, in_layout

from convgrad.backends.triton import counting
from convgrad.backends.triton.variants import TOGETHER
from convgrad.problem import ConvProblem


def texts(words: list[str]) -> list[str]:
    """The problems of the benchmark in every dtype and layout, as `counting` takes them."""
    found: list[str] = []
    for layout in LAYOUTS:
        for problem in map(ConvProblem.parse, PROBLEMS):
            together = TOGETHER if problem.ndim == 1 and layout == "channels_last" else ""
            if not words or any(word in problem.name for word in words):
                found += [str(in_layout(problem.replace(dtype=dtype), layout)) + together for dtype in DTYPES]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, one of which a problem's name holds")
    parser.add_argument("--out", help="also write it to this Markdown file")
    args = parser.parse_args()
    wanted = texts([word for word in args.only.split(",") if word])
    return counting.main([*wanted, *(["--out", args.out] if args.out else [])])


if __name__ == "__main__":
    sys.exit(main())
