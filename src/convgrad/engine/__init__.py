"""Only what runs: the registry and the choice of backends, plans, and the look-up that every call ends in."""

from __future__ import annotations

from ..backends import built_in
from .cache import generation, plans, remember
from .choice import BY_RULE, by_rules_alone, choose
from .events import Event, observed, observers, observing, thread, unobserved
from .found import Found, record, recorded
from .linear import POINTWISE, as_pointwise, beats_matmul
from .measure import measurements, store
from .measure.measurer import check_with, fusion_gains, measure_now, steps_of
from .measure.trials import trials
from .plan import Plan, plan_for
from .registry import backends, get_backend, reasons_against, register, without
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
from .resolver import (
    checked_backward,
    checked_convolution,
    checked_grad_input,
    checked_grad_weight,
    find,
    is_eager,
    is_plain,
    layout_of,
    make,
    resolve,
)
from .rules import linear_gains
from .steps import SLOTS, Step, prepare
from .table import Table, open_table, pack

for _backend in built_in():
    _backend.source = ""
    register(_backend)
