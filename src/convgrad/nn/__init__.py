"""Modules with torch's constructors, repr and state_dict, computed by convgrad; also binary, ternary, shift weights."""

# ruff: noqa: F403
from . import convert, feedback, linear, modules, norm_layers, quantized, schemes, shift
from .convert import *
from .feedback import *
from .linear import *
from .modules import *
from .norm_layers import *
from .quantized import *
from .schemes import *
from .shift import *

__all__: list[str] = []
__all__ += convert.__all__
__all__ += feedback.__all__
__all__ += linear.__all__
__all__ += modules.__all__
__all__ += norm_layers.__all__
__all__ += quantized.__all__
__all__ += schemes.__all__
__all__ += shift.__all__
