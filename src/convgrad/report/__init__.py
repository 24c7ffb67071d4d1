"""What a training step, a script or a table of calls costs, as one page and as data."""

from .model import profile_model
from .profile import SCHEMA, Change, Cost, Profile, Row, Variant, changes
from .script import profile_script, profile_table

__all__ = [
    "SCHEMA", "Change", "Cost", "Profile", "Row", "Variant", "changes", "profile_model", "profile_script",
    "profile_table",
]  # fmt: skip
