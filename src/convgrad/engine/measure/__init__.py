"""Measuring: a timer, the environment of a measurement, the store of results, and which backend is fastest here."""

from .environment import conditions, keep_memory, mkl_at_its_best, surroundings
from .timer import Comparison, Ratio, call_seconds, compare, empty_launch, median_interval, second_call
