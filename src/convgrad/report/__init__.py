"""What a training step, a script or a table of calls costs, as one page that is looked at, and as data."""

from .measured import profile_model, profile_script, profile_table
from .profile import SCHEMA, Change, Cost, Profile, Row, Variant, changes

__all__ = [
    "SCHEMA",
    "Change",
    "Cost",
    "Profile",
    "Row",
    "Variant",
    "changes",
    "profile_model",
    "profile_script",
    "profile_table",
]
