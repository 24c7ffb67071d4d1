"""Why: what ran, for what reason, how fast, and how far from the limit of the machine; PyTorch's own rules as data.

One record of a call (`Call`), one observer (`Trace`), one table; what would run (`explain`), what a step or a script
costs (`profile_model`, `profile_script`) with a page and pictures. Nothing on the path of a call imports this room.
"""

from .aten_rules import MACHINES, MODELLED_VERSIONS, Machine, kernel_of, named, select_conv_backend
from .calls import Call, Trace, Usage, kernel_of_event, limited, trace
from .capture import Running, module_names
from .costs import compared
from .explain import explain, explain_problem
from .explanation import Answer, Explanation, Layer, ModelExplanation, Transfer
from .measure import measured
from .pictures import Point, by_pytorch, draw_roofline, svg
from .profile import SCHEMA, Change, Cost, Profile, Variant, changes
from .roofline import BEYOND, TOO_LOW, Limits, least_work, limits_of, measure_limits
from .script import profile_script, profile_table, run_script
from .step import profile_model

__all__ = [
    "BEYOND", "MACHINES", "MODELLED_VERSIONS", "SCHEMA", "TOO_LOW", "Answer", "Call", "Change", "Cost", "Explanation",
    "Layer", "Limits", "Machine", "ModelExplanation", "Point", "Profile", "Running", "Trace", "Transfer", "Usage",
    "Variant", "by_pytorch", "changes", "compared", "draw_roofline", "explain", "explain_problem", "kernel_of",
    "kernel_of_event", "least_work", "limited", "limits_of", "measure_limits", "measured", "module_names", "named",
    "profile_model", "profile_script", "profile_table", "run_script", "select_conv_backend", "svg", "trace",
]  # fmt: skip
