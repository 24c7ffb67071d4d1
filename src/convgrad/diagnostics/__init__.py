"""Why: what ran, for what reason, how fast, and how far from the limit of the machine; PyTorch's own rules as data.

One record of a call (`Call`), one observer (`Trace`), one table; what would run (`explain`), what a step or a script
costs (`profile_model`, `profile_script`) with a page and pictures. Nothing on the path of a call imports this room.
"""

from .aten_rules import MACHINES, MODELLED_VERSIONS, Machine, kernel_of, named, select_conv_backend
from .children import watch_this_process
from .explain import explain, explain_problem
from .explanation import Answer, Explanation, Layer, ModelExplanation, Transfer
from .layers import layer_ranges, running
from .measure import Load, compared, measured, requested
from .onednn_log import redirected
from .pictures import by_pytorch, draw_roofline, svg
from .profile import SCHEMA, Change, Cost, Profile, Variant, changes
from .records import Call, Moment, Trace, Usage, limited, trace, without_figures
from .roofline import BEYOND, TOO_LOW, Limits, least_work, limits_of, measure_limits
from .script import profile_script, profile_table, run_script
from .step import profile_model

__all__ = [
    "BEYOND", "MACHINES", "MODELLED_VERSIONS", "SCHEMA", "TOO_LOW", "Answer", "Call", "Change", "Cost", "Explanation",
    "Layer", "Limits", "Load", "Machine", "ModelExplanation", "Moment", "Profile", "Trace", "Transfer",
    "Usage", "Variant", "by_pytorch", "changes", "compared", "draw_roofline", "explain",
    "explain_problem", "kernel_of", "layer_ranges", "least_work", "limited", "limits_of",
    "measure_limits", "measured", "named", "profile_model", "profile_script", "profile_table",
    "redirected", "requested", "run_script", "running", "select_conv_backend", "svg", "trace", "watch_this_process",
    "without_figures",
]  # fmt: skip
