# SPDX-License-Identifier: Apache-2.0
"""Outputs in the caller's framework, and the record of kernels that ran."""

import contextlib
import sys

import numpy as np

from rooftile.errors import ArgumentTypeError

_recorders = []


def torch_of(x):
    """The torch module if `x` is a torch tensor, else None. Never imports torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def empty(like, shape=None, dtype=None):
    """An uninitialised array: torch on `like`'s device if `like` is a torch tensor, else NumPy.

    dtype: a name such as "float32", default `like`'s own.
    """
    if not hasattr(like, "shape"):
        raise ArgumentTypeError(
            f"expected an array that speaks DLPack (torch, NumPy, jax, cupy), got {type(like).__name__}"
        )
    torch = torch_of(like)
    shape = like.shape if shape is None else shape
    if torch is not None:
        return like.new_empty(shape, dtype=getattr(torch, dtype) if dtype else None)
    return np.empty(shape, dtype=numpy_dtype(dtype or str(like.dtype)))


def numpy_dtype(name):
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as e:
            raise ImportError(
                "bfloat16 outside torch needs the package ml_dtypes (pip install ml_dtypes)"
            ) from e
        return ml_dtypes.bfloat16
    return np.dtype(name)


@contextlib.contextmanager
def record_kernels():
    """Collects the names of the kernels that run inside the block, in order: `with record_kernels() as names:`."""
    names = []
    _recorders.append(names)
    try:
        yield names
    finally:
        _recorders.remove(names)


def ran(kernel):
    """Called with what a binding returned: the name of the kernel that ran."""
    for names in _recorders:
        names.append(kernel)
