# SPDX-License-Identifier: Apache-2.0
"""The same values in many memory layouts. An op must read (and write) each of them like the contiguous one."""

import cases
import numpy as np
import torch

ODD_STRIDE = 99_990_001  # what a dimension of size 1 may carry


def _inside(t, buffer, view):
    """Copies t into `view` of a poisoned `buffer` and returns the view."""
    view.copy_(t)
    return view


def _poisoned(shape, like):
    buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
    buffer.view(torch.uint8).fill_(0xFF)
    return buffer


def contiguous(t):
    return t.clone(memory_format=torch.contiguous_format)


def offset_1(t):
    """Starts one element into its storage: aligned to an element, to nothing else."""
    buffer = _poisoned((t.numel() + 1,), t)
    return _inside(t, buffer, buffer[1:].view(t.shape))


def offset_3(t):
    buffer = _poisoned((t.numel() + 7,), t)
    return _inside(t, buffer, buffer[3:-4].view(t.shape))


def last_step_2(t):
    buffer = _poisoned((*t.shape[:-1], t.shape[-1] * 2), t)
    return _inside(t, buffer, buffer[..., ::2])


def last_step_3(t):
    buffer = _poisoned((*t.shape[:-1], t.shape[-1] * 3 + 1), t)
    return _inside(t, buffer, buffer[..., 1 : 1 + 3 * t.shape[-1] : 3])


def padded_rows(t):
    buffer = _poisoned((*t.shape[:-1], t.shape[-1] + 5), t)
    return _inside(t, buffer, buffer[..., : t.shape[-1]])


def inner_columns(t):
    buffer = _poisoned((*t.shape[:-1], t.shape[-1] + 8), t)
    return _inside(t, buffer, buffer[..., 3:-5])


def first_step_2(t):
    buffer = _poisoned((t.shape[0] * 2, *t.shape[1:]), t)
    return _inside(t, buffer, buffer[1::2])


def first_padded(t):
    buffer = _poisoned((t.shape[0] + 3, *t.shape[1:]), t)
    return _inside(t, buffer, buffer[2:-1])


def last_first(t):
    """The last dimension outermost in memory."""
    return contiguous(t.movedim(-1, 0)).movedim(0, -1)


def reversed_dims(t):
    """Column major."""
    return contiguous(t.permute(*reversed(range(t.ndim)))).permute(*reversed(range(t.ndim)))


def swapped_last(t):
    return contiguous(t.transpose(-1, -2)).transpose(-1, -2)


def swapped_first(t):
    return contiguous(t.transpose(0, 1)).transpose(0, 1)


def swapped_middle(t):
    """Dimensions 1 and 2 swapped in memory: [B, T, H, D] stored as [B, H, T, D]."""
    return contiguous(t.transpose(1, 2)).transpose(1, 2)


def middle_padded(t):
    buffer = _poisoned((t.shape[0], t.shape[1] + 2, *t.shape[2:]), t)
    return _inside(t, buffer, buffer[:, 1:-1])


def size_1_odd_strides(t):
    """Dimensions of size 1 carry a stride that leads nowhere."""
    strides = [ODD_STRIDE if n == 1 else s for n, s in zip(t.shape, contiguous(t).stride(), strict=True)]
    return contiguous(t).as_strided(t.shape, strides)


def interleaved(t):
    """Half of a buffer whose other half belongs to somebody else: stack of two along a new last-but-one dimension."""
    buffer = _poisoned((*t.shape[:-1], 2, t.shape[-1]), t)
    return _inside(t, buffer, buffer[..., 1, :])


def first_far(t):
    """The first dimension's second entry lies past 2^31 elements, a third one past 2^32."""
    if t.is_cuda:
        return contiguous(t)
    strides = (2**31 + 8, *contiguous(t).stride()[1:])
    return cases.far_apart(t.shape, t.dtype, strides).copy_(t)


# Layouts for tensors that are read or written, with the number of dimensions each needs.
TORCH = {
    "contiguous": (contiguous, 0),
    "offset 1": (offset_1, 0),
    "offset 3": (offset_3, 0),
    "last step 2": (last_step_2, 1),
    "last step 3": (last_step_3, 1),
    "padded rows": (padded_rows, 2),
    "inner columns": (inner_columns, 2),
    "first step 2": (first_step_2, 2),
    "first padded": (first_padded, 2),
    "last first": (last_first, 2),
    "reversed dims": (reversed_dims, 2),
    "swapped last": (swapped_last, 2),
    "swapped first": (swapped_first, 2),
    "swapped middle": (swapped_middle, 3),
    "middle padded": (middle_padded, 3),
    "interleaved": (interleaved, 1),
    "size-1 odd strides": (size_1_odd_strides, 1),
    "first far": (first_far, 2),
}


def torch_layouts(t):
    """(name, tensor) of the same values in every layout that t's number of dimensions allows, and for expanded
    tensors (all rows equal along a dimension) nothing: see `expanded`."""
    for name, (make, ndim) in TORCH.items():
        if t.ndim >= ndim and t.numel():
            yield name, make(t)


def expanded(t, dim):
    """t with everything along `dim` equal to its first slice: (materialised, stride 0)."""
    one = contiguous(t.narrow(dim, 0, 1)).expand_as(t)
    return contiguous(one), one


# NumPy has what torch has not: negative strides, read-only inputs. (Unaligned data is refused: test_dlpack.py.)


def _reversed_memory(a, axis):
    return np.flip(np.ascontiguousarray(np.flip(a, axis)), axis)


def _read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


NUMPY = {
    "contiguous": (lambda a: a.copy(order="C"), 0),
    "Fortran": (lambda a: np.asfortranarray(a), 2),
    "last reversed": (lambda a: _reversed_memory(a, -1), 1),
    "first reversed": (lambda a: _reversed_memory(a, 0), 1),
    "all reversed": (lambda a: _reversed_memory(a, None), 1),
    "read only": (_read_only, 0),
}
WRITABLE_NUMPY = tuple(name for name in NUMPY if name != "read only")


def numpy_layouts(a, written=False):
    for name, (make, ndim) in NUMPY.items():
        if a.ndim >= ndim and a.size and not (written and name == "read only"):
            yield name, make(a)
