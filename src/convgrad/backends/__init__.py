"""The backends, which contract tensors: one file each, and one place in `built_in`.

ATen comes first: where no rule prefers another backend, the first one that can compute a problem is chosen.
"""

from __future__ import annotations

from . import _native_library as native_library
from ._native_library import warn_if_absent, why_absent
from .aten import ROUTES, AtenBackend, complex_product, runs_as_stated, statable_arguments
from .aten_defects import DEFECTS, INSTANCE_NORM_DEFECT, Defect, learn, reads_odd_strides, warn_of
from .aten_libraries import AtenCudnnBackend, AtenMiopenBackend, AtenMkldnnBackend, AtenNativeBackend, aten_choice
from .base import BOTH_GRADIENTS, Arithmetic, Backend, Kernel, Layout, capability, described, operand_format
from .fft import FftBackend, transform_sizes
from .im2col import Im2colBackend
from .native import (
    MOST_A_GROUP,
    NativeAmxBackend,
    NativeAvx2Backend,
    NativeBackend,
    NativeWinogradBackend,
    native_plan,
    transformed_dimensions,
)
from .native_norm import least_norm, native_norm_takes, norm_gains, normalization_gradients, normalize
from .padded_copy import COPY, PaddedCopy, padded
from .products import AtenMatmulBackend, AtenPatchesBackend, of_patches
from .reference import ReferenceBackend, wide_dtype
from .triton import LAUNCH_BYTES, TritonBackend, TritonBandedBackend


def built_in() -> list[Backend]:
    """The backends that come with the library, in the order of their registration."""
    return [
        AtenBackend(), NativeBackend(), TritonBackend(), TritonBandedBackend(), Im2colBackend(), ReferenceBackend(),
        *ROUTES, AtenMatmulBackend(), AtenPatchesBackend(), NativeAvx2Backend(), NativeAmxBackend(),
        NativeWinogradBackend(), FftBackend(), AtenCudnnBackend(), AtenMiopenBackend(), AtenMkldnnBackend(),
        AtenNativeBackend(),
    ]  # fmt: skip
