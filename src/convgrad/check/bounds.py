"""The one error bound that every backend is held to.

Every element of a result is an inner product of n terms, summed in some order. With unit roundoff u, in any order, with
or without fused multiply-adds, its error is at most ``n * u * sum |a_i| |b_i|`` (Jeannerod and Rump, "Improved error
bounds for inner products in floating-point arithmetic", SIAM J. Matrix Anal. Appl. 34(2), 2013; it is Higham's gamma_n,
"Accuracy and Stability of Numerical Algorithms", section 3.1, without the denominator). Storing it adds one rounding to
the storage dtype. The reference, in float64, is off by the same formula, which matters for float64 only.
"""

from __future__ import annotations

from math import prod, sqrt

import torch
from torch import Tensor

from ..backends import Arithmetic
from ..problem import ConvProblem, Output

#: Winograd's F(2x2, 3x3) multiplies the norms of its three transforms, 3 * 1.5 * 2 a dimension (Lavin and Gray, "Fast
#: Algorithms for Convolutional Neural Networks", 2016, section 4.1; that errors grow by this product: Barabasz et al.,
#: "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks", 2020).
_TRANSFORM_NORM = 9


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next larger number."""
    return torch.finfo(dtype).eps / 2


def reduction_length(problem: ConvProblem, output: Output) -> int:
    """Return the largest number of products, or for a bias of terms, that one element of an output sums."""
    p = problem
    if output in ("grad_weight", "grad_bias"):
        return p.batch * prod(p.shape_of(p.bias_slot if output == "grad_bias" else "grad_output")[2:])
    return (p.in_channels if output == "forward" else p.out_channels) // p.groups * prod(p.kernel_size)


def error_bound(arithmetic: Arithmetic, dtype: torch.dtype, length: int, exact: Tensor, magnitude: Tensor) -> Tensor:
    """Return how far each element may be from the ``exact`` result, which is in float64 (complex128, int64).

    ``length`` is `reduction_length`, one more where a bias is added; ``magnitude`` the same pass of absolute values.
    """
    if not (dtype.is_floating_point or dtype.is_complex):  # exact, or too large, and then undefined
        return torch.zeros_like(magnitude).masked_fill_(magnitude > torch.iinfo(dtype).max, float("inf"))
    store = unit_roundoff(dtype)
    if arithmetic == "low-precision accumulation":
        u = store
    elif store == unit_roundoff(torch.float64):
        u = 2 * store  # the backend's and the reference's
    elif store == unit_roundoff(torch.float32) and arithmetic != "tf32":
        u = store
    else:
        u = unit_roundoff(torch.float32) * 2  # tensor cores cut where others round (Fasi et al., PeerJ CS 2021)
    terms = length * (2 * sqrt(2) if dtype.is_complex else 1)  # a complex product is two sums of two real ones
    relative = terms * u
    if arithmetic == "tf32":
        relative += 2 * 2**-10 + 2**-20  # both operands cut to 10 bits
    if arithmetic == "transform":  # errors spread over a tile: bounded by the norm, not element by element
        dims = exact.dim() - 2
        relative = terms * max(u, store) * _TRANSFORM_NORM**dims
        magnitude = magnitude.amax().expand_as(magnitude)
    error = relative * magnitude
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return error + store * (exact.abs() + error) + smallest
