"""The old direct names: cuDNN, MIOpen, oneDNN and THNN called by name, with their flags and argument order.

PyTorch removed most of these functions, or hid them behind ``convolution_backward``. Here each is forced onto its
library, differentiable to any order on the same library, and refused with the reasons where the library is not. The
flags ``benchmark``, ``deterministic`` and ``allow_tf32`` hold for the call and touch no global.

    >>> import torch
    >>> from convgrad import direct
    >>> x = torch.randn(1, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    >>> w = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    >>> torch.autograd.gradcheck(lambda x: direct.slow_conv2d(x, w, 3, None, 1, 1), x)
    True
"""

from __future__ import annotations

from . import cudnn, extension, miopen, miopen_depthwise, mkldnn, thnn
from .cudnn import *  # noqa: F403
from .extension import *  # noqa: F403
from .miopen import *  # noqa: F403
from .miopen_depthwise import *  # noqa: F403
from .mkldnn import *  # noqa: F403
from .thnn import *  # noqa: F403

__all__: list[str] = []
__all__ += cudnn.__all__
__all__ += miopen.__all__
__all__ += miopen_depthwise.__all__
__all__ += mkldnn.__all__
__all__ += thnn.__all__
__all__ += extension.__all__
