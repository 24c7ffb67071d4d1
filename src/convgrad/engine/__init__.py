"""Only what runs: the registry and the choice of backends, plans, and the look-up that every call ends in."""

from __future__ import annotations

from ..backends import built_in
from .cache import Table, generation, open_table, plans, remember
from .calls import (
    POINTWISE,
    as_pointwise,
    backward_of,
    beats_matmul,
    checked_backward,
    checked_convolution,
    checked_grad_input,
    checked_grad_weight,
    find,
    is_eager,
    layout_of,
    make,
    plan_for,
    pytorch_autograd_suffices,
    resolve,
)
from .choice import BY_RULE, choose
from .entry import pack
from .events import Event, observed, observers, observing, thread, unobserved
from .measure import measurements, store
from .measure.measurer import check_with, fusion_gains, measure_now, steps_of
from .measure.trials import trials
from .plan import SLOTS, Plan, Step, prepare
from .registry import Found, backends, get_backend, reasons_against, record, recorded, register, registered
from .request import (
    Request,
    active,
    request_for,
    requested,
    resume,
    set_default_backend,
    traced,
    unregister,
    use_backend,
)
from .rules import linear_gains

#: What is not worth measuring: the definition, and libraries that ATen itself calls where they are fast.
_NO_CANDIDATES = ("reference", "aten:cudnn", "aten:miopen", "aten:native")

for _backend in built_in():
    register(_backend, candidate=_backend.name not in _NO_CANDIDATES, source="")
