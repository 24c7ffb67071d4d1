"""Why: what ran, for what reason, and how far from the limit of the machine; PyTorch's own rules written out.

Nothing on the path of a call imports this room; `convgrad.explain` and `convgrad.trace` load it when first used.
"""

from .aten_rules import MODELLED_VERSIONS, Machine, kernel_of, named, select_conv_backend
from .capture import Running, module_names
from .explain import explain, explain_problem
from .explanation import Answer, Explanation, Layer, ModelExplanation, Transfer
from .measure import measured
from .pictures import Point, by_pytorch, draw_roofline, svg
from .roofline import BEYOND, TOO_LOW, Limits, least_work, limits_of, measure_limits
from .trace import Record, Trace, kernel_of_event, trace

__all__ = [
    "BEYOND", "MODELLED_VERSIONS", "TOO_LOW", "Answer", "Explanation", "Layer", "Limits", "Machine", "ModelExplanation",
    "Point", "Record", "Running", "Trace", "Transfer", "by_pytorch", "draw_roofline", "explain", "explain_problem",
    "kernel_of", "kernel_of_event", "least_work", "limits_of", "measure_limits", "measured", "module_names", "named",
    "select_conv_backend", "svg", "trace",
]  # fmt: skip
