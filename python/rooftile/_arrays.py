# SPDX-License-Identifier: Apache-2.0
"""Arrays in the caller's framework, and what arguments must be."""

import sys

import numpy as np

from rooftile import _C
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError, OutOfMemoryError

ACTIVATIONS = ("float32", "float16", "bfloat16")
_GPU_MEMORY = (2, 13)  # kDLCUDA, kDLCUDAManaged


def torch_of(x):
    """The torch module if `x` is a torch tensor, else None. Never imports torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def as_torch(array):
    """A torch tensor or a NumPy array as a torch tensor over its memory; torch's default device is not asked."""
    import torch

    return array if isinstance(array, torch.Tensor) else torch.as_tensor(array, device="cpu")


def aligned(tensor, element_size=None):
    """A torch tensor that begins between its elements, of element_size bytes if they are not of its dtype, as a copy;
    any other as it is.

    A part of a mapped file may: in safetensors the data begin where the header ends, at any byte.
    """
    return tensor.clone() if tensor.data_ptr() % (element_size or tensor.element_size()) else tensor


def _refuse_on_a_gpu(like, what):
    """Raises NotSupportedError where `like`, no torch tensor, lies on a GPU: nobody can be asked for memory there."""
    try:
        kind, index = type(like).__dlpack_device__(like)
    except Exception:  # no array, or one that cannot be shared: the binding refuses it by the name of its argument
        return
    if kind in _GPU_MEMORY:
        raise NotSupportedError(
            f"{type(like).__name__} on cuda:{index}: {what} is made for torch tensors only; pass "
            "torch.from_dlpack(array), which shares its memory"
        )


def copied(array):
    """A copy of a torch tensor or a NumPy array. (copy.deepcopy of a tensor turns gradients off and on again in Python:
    a signal handler that cuts it leaves them off.)"""
    return array.copy() if torch_of(array) is None else array.clone()


def shape_of(x):
    """The tuple x.shape; None where x has none or does not tell (nested tensors): the binding refuses it by name."""
    try:
        shape = x.shape
    except (AttributeError, RuntimeError):
        return None
    return shape if isinstance(shape, tuple) else None


def empty(op, argument, like, shape=None, dtype=None):
    """An uninitialised contiguous array: torch on `like`'s device if `like` is a torch tensor, else NumPy.

    dtype: a name such as "float32", default `like`'s own. None where `like` is no array that an op takes, or `shape` no
    array's: the binding reads what they come from before its outputs and refuses it by the name of its argument.
    Raises NotSupportedError for arrays on a GPU that are not torch's, and OutOfMemoryError, naming op and argument,
    where there is no memory.
    """
    torch = torch_of(like)
    if torch is not None:
        if like.layout is not torch.strided or like.is_nested:
            return None
        try:
            if shape is None and dtype is None:
                return torch.empty_like(like, memory_format=torch.contiguous_format)
            shape = like.shape if shape is None else shape
            return like.new_empty(shape, dtype=getattr(torch, dtype)) if dtype else like.new_empty(shape)
        except TypeError:
            return None
        except RuntimeError as e:  # torch.OutOfMemoryError is one
            raise _no_memory(op, argument, like, shape, dtype, e) from e
    if shape_of(like) is None:
        return None
    _refuse_on_a_gpu(like, "an output")
    try:
        dtype = numpy_dtype(dtype or str(like.dtype))
    except TypeError:
        return None
    shape = like.shape if shape is None else shape
    try:
        return np.empty(shape, dtype=dtype)
    except TypeError:
        return None
    except (MemoryError, ValueError) as e:  # ValueError: more than NumPy counts, or less than nothing
        if min(shape) < 0:
            return None
        raise _no_memory(op, argument, like, shape, dtype, e) from e


def _no_memory(op, argument, like, shape, dtype, error):
    dtype = str(dtype or like.dtype).removeprefix("torch.")
    shape, reason = list(like.shape if shape is None else shape), str(error).partition("\n")[0]
    return OutOfMemoryError(
        f"{op}: no memory for {argument}, {dtype}{shape} on {getattr(like, 'device', 'cpu')} ({reason})"
    )


def torch_device(op, device):
    """The torch.device of what a caller gives; ArgumentError where torch cannot use it."""
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as e:  # the last: torch without CUDA, asked for it
        reason = str(e).partition("\n")[0]
        raise ArgumentError(f"{op}: device must be one that torch can use, got {shown(device)} ({reason})") from None


def workspace(op, like, size):
    """Device memory for one call on `like`'s device, `size` bytes: bindings call this where they need some.

    Raises NotSupportedError for arrays on a GPU that are not torch's, OutOfMemoryError where there is none.
    """
    if torch_of(like) is None:
        _refuse_on_a_gpu(like, "the workspace of this call")
    # in its own dtype: another one costs torch 1 us more
    return empty(op, "workspace", like, (-(-size // like.element_size()),))


def activation_dtype(op, dtype):
    """ "float32", "float16" or "bfloat16" from what a caller gives as `dtype`: a name, a torch or a NumPy dtype."""
    name = getattr(dtype, "__name__", None)
    name = (name if isinstance(name, str) and name else str(dtype)).removeprefix("torch.")
    if name not in ACTIVATIONS:
        hint = _C.did_you_mean(name, *ACTIVATIONS)
        raise ArgumentTypeError(f"{op}: dtype must be {', '.join(ACTIVATIONS)}, got {shown(dtype)}{hint}")
    return name


def refuse_mask(op, argument, x):
    """Raises ArgumentTypeError for a masked array, as the bindings do: for where NumPy would drop the mask first."""
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{op}: {argument} is a {type(x).__name__}, whose mask no op reads; pass filled() or its data"
        )


def shown(value):
    """What an error says that came: its repr, of a long one the beginning in quotes and its length."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python writes, or a repr of somebody's own
        text = f"one of {type(value).__name__} that has no repr"
    return text if len(text) <= 120 else _C.quoted(value if isinstance(value, str) else text)


def must_be(values, given):
    """What the error of an argument says that is none of `values`, names and perhaps None."""
    names = ["None" if value is None else f'"{value}"' for value in values]
    listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    known = [value for value in values if value is not None]
    return f"must be {listed}, got {shown(given)}{_C.did_you_mean(given, *known) if isinstance(given, str) else ''}"


def check_flag(op, argument, value):
    """Raises ArgumentTypeError for what is neither True nor False: "no" would count as true."""
    if value is not True and value is not False:
        raise ArgumentTypeError(f"{op}: {argument} must be True or False, got {type(value).__name__}")


def numpy_dtype(name):
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as e:
            raise ImportError("bfloat16 outside torch needs the package ml_dtypes (pip install ml_dtypes)") from e
        return ml_dtypes.bfloat16
    return np.dtype(name)
