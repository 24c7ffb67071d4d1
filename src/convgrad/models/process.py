"""`takeover`: every convolution of the process through convgrad, for as long as a block lasts.

The kernels of aten::convolution and aten::convolution_backward are exchanged at the dispatch keys of the devices, below
autograd, autocast, functorch and every mode (`ops/pytorch_operators.py`), so whatever ends in these two is caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..ops import exchanged


@contextmanager
def takeover() -> Iterator[None]:
    """Compute every convolution of this process with convgrad inside this block; its end undoes it exactly.

    It affects all threads, because PyTorch has one table of kernels. Blocks may be nested and open in several threads;
    the last one to close undoes it. PyTorch's own kernel runs where it is the best choice, and for what convgrad does
    not compute: quantized, sparse, mkldnn, meta and complex tensors. If other code has registered a kernel of its own
    for these operators before, that kernel runs where PyTorch's would. Not covered: jit-traced models, AOTInductor
    packages and other processes.

    Raises:
        BackendError: a requested backend (`use_backend`) cannot compute a convolution.
        ShapeError: the sizes of a gradient do not belong to input and weight, which PyTorch does not check.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
        >>> with convgrad.takeover(), convgrad.use_backend("reference"):
        ...     torch.nn.functional.conv2d(x, w).item()
        9.0
    """
    with exchanged("takeover"):
        yield


@contextmanager
def observe_aten() -> Iterator[None]:
    """Report PyTorch's own convolutions to `convgrad.trace` and `Usage` inside this block, and change nothing.

    An open `takeover` takes precedence.
    """
    with exchanged("observe_aten"):
        yield
