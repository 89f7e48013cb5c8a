# SPDX-License-Identifier: Apache-2.0
"""What the tests of the KV cache share: the formats, caches of every kind, and all bytes of one."""

import cases
import numpy as np
import oracle
import rooftile as rt
import torch

QUANTISED = tuple(f for f in oracle.KV_FORMATS if f not in oracle.ELEMENT_FORMATS)
# every (format, dtype of k and v) there is
KINDS = tuple(
    (format, dtype)
    for format in oracle.KV_FORMATS
    for dtype in cases.DTYPES
    if oracle.ELEMENT_FORMATS.get(format, dtype) == dtype
)
PAGES = {f: (32, 64, 128) if f in oracle.KIVI_FORMATS else (16, 32, 64, 128) for f in oracle.KV_FORMATS}


def kv(tokens, heads, dim, dtype, *key, batch=None):
    """k, v as float64 arrays that `dtype` holds: [tokens, heads, dim], or [batch, ...]."""
    shape = (tokens, heads, dim) if batch is None else (batch, tokens, heads, dim)
    return cases.values(shape, dtype, "k", *key, mean=0.3), cases.values(shape, dtype, "v", *key)


def kinds_on(device):
    """The kinds a device takes."""
    return KINDS if device == "cpu" else tuple(kind for kind in KINDS if kind[1] != "float32")


def tensors(k, v, dtype, device="cpu"):
    """As append takes them; one row gets its batch dimension."""
    return tuple(cases.tensor(x if x.ndim == 4 else x[None], dtype, device) for x in (k, v))


def contiguous(format, dtype, heads, dim, rows=1, capacity=200, device="cpu"):
    return rt.KVCache(rows, capacity, heads, dim, format=format, dtype=dtype, device=device)


def paged(format, dtype, heads, dim, rows=1, capacity=200, page_size=32, device="cpu"):
    pages = -(-capacity // page_size)
    options = {"max_rows": rows, "max_pages_per_row": pages, "format": format, "dtype": dtype, "device": device}
    return rt.PagedKVCache(rows * pages, page_size, heads, dim, **options)


def state(cache):
    """A copy of every byte of a cache, by name."""
    return {name: np.array(as_bytes(array)) for name, array in cache._arrays.items() if name != "fault"}


def row_of(cache, row):
    """What cache.dump(row) gives, on the host as NumPy."""
    return {name: x if name == "length" else x.cpu().numpy() for name, x in cache.dump(row).items()}


def as_bytes(array):
    if isinstance(array, torch.Tensor):
        return array.cpu().contiguous().view(torch.uint8).numpy()
    return array.view(np.uint8)


def assert_same(a, b, what=""):
    assert a.keys() == b.keys()
    for name in a:
        left, right = (x[name].cpu() if isinstance(x[name], torch.Tensor) else x[name] for x in (a, b))
        left, right = np.asarray(left), np.asarray(right)
        np.testing.assert_array_equal(left, right, err_msg=f"{what} {name}")
