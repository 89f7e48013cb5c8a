# SPDX-License-Identifier: Apache-2.0
"""The small ops between the products. Statistics in fp32, results rounded once."""

from rooftile import _C
from rooftile._arrays import empty, ran


def rms_norm(x, weight=None, eps=1e-6, *, out=None, stream=None, plan=None):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    x: [..., hidden], float32 (CPU), float16 or bfloat16, any strides. weight: [hidden], x's dtype or float32, or None.
    Returns [..., hidden] in x's dtype, written to `out` when given (`out` may be x). Statistics in fp32.
    Raises ArgumentError / ArgumentTypeError naming the argument.
    """
    if out is None:
        out = empty(x)
    ran(_C.rms_norm(x, weight, eps, out, stream, plan))
    return out
