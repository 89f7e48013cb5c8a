# SPDX-License-Identifier: Apache-2.0
"""KV caches in every format of docs/guide/cache-formats.md: contiguous, paged, and views on an engine's own pool.

A cache belongs to one attention layer; `ModelKVCache` is one for every layer of a model. One thread at a time may
change a cache.
"""

import contextlib
import operator
import sys

import numpy as np

from rooftile import _C
from rooftile._arrays import numpy_dtype, ran
from rooftile.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotSupportedError,
)

CONTIGUOUS_PAGE = 64  # tokens; a contiguous cache is a pool whose pages follow each other
KV_FORMATS = tuple(_C.kv_formats())
GROUP = 32  # tokens that become codes together in the kivi formats
RING = 64  # raw tokens a row of a kivi cache keeps

ELEMENT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
KIVI = ("int4-kivi-sym", "int4-kivi")
_ARRAYS = (
    "pool",
    "k_pool",
    "v_pool",
    "block_table",
    "lengths",
    "ring_k",
    "ring_v",
    "raw_from",
)


def check_format(op, format):
    if format not in _C.kv_formats():
        raise ArgumentError(f"{op}: format {format!r} is not a cache format; known: {', '.join(_C.kv_formats())}")
    return format


def dtype_name(format, dtype):
    """The dtype of a cache's k and v: the element format's own, else float32 unless given."""
    if dtype is None:
        return ELEMENT_DTYPES.get(format, "float32")
    return (getattr(dtype, "__name__", None) or str(dtype)).removeprefix("torch.")


def check_device(op, device):
    if device is not None and str(device).split(":")[0] != "cpu":
        raise NotSupportedError(f"{op}: device {device} has no cache kernels in this build of rooftile; it runs: cpu")


def integer(op, name, value, at_least=0):
    """A Python int from anything that is one exactly."""
    try:
        value = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{op}: {name} must be an integer, got {type(value).__name__}") from None
    if not at_least <= value < 2**31:
        raise ArgumentError(f"{op}: {name} must lie in [{at_least}, 2**31), got {value}")
    return value


def pages_for(tokens, page_size):
    return -(-tokens // page_size)


def zeros(shape, dtype):
    """torch where it is imported, else NumPy."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    return np.zeros(shape, numpy_dtype(dtype))


def ints(op, name, values):
    """A list becomes int32; an array is passed on as it is (the binding takes int32 only)."""
    if values is None or hasattr(values, "__dlpack__"):
        return values
    try:
        return np.array([operator.index(v) for v in values], np.int32)
    except OverflowError:
        raise ArgumentError(f"{op}: {name} does not fit 32 bits: {values}") from None
    except TypeError:
        raise ArgumentTypeError(f"{op}: {name} must be a list of integers or an int32 array, got {values!r}") from None


def host(array):
    """An int32 array of the cache as NumPy: the same memory."""
    return array.numpy() if hasattr(array, "numpy") else np.asarray(array)


class Cache:
    """What contiguous, paged and viewed caches have in common."""

    def __init__(self, op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays):
        self.format = format
        self.dtype = dtype
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.max_rows = max_rows
        self.max_pages = max_pages
        self._arrays = arrays
        self._handle = _C.KvCache(*self.flat(), op)
        self._lengths = host(arrays["lengths"])
        # what truncate changes: lengths, and where raw tokens begin
        self.positions = [host(arrays[name]) for name in ("lengths", "raw_from") if name in arrays]

    def flat(self):
        """The cache as plain values and arrays, as _C.KvCache and torch.ops.rooftile.decode_attention take it."""
        shape = (self.page_size, self.head_dim, self.kv_heads, self.max_rows, self.max_pages)
        return self.format, self.dtype, *shape, *(self._arrays.get(name) for name in _ARRAYS)

    @property
    def capacity(self):
        """Tokens a row can hold."""
        return self.max_pages * self.page_size

    @property
    def lengths(self):
        """Tokens stored in every row: a list of `max_rows` ints."""
        return self._lengths.tolist()

    @property
    def seq_lens(self):
        """int32 [max_rows], the lengths as the kernels read them."""
        return self._arrays["lengths"]

    @property
    def nbytes(self):
        """Bytes allocated: pool, rings, block table and lengths."""
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def nbytes_used(self):
        """Bytes the stored tokens need: codes, scales and minima of encoded tokens, the elements of raw ones."""
        return sum(self._row_bytes(tokens) for tokens in self.lengths)

    def _row_bytes(self, tokens):
        raw = tokens % GROUP if self.format in KIVI else 0
        block = _C.kv_block_bytes(self.format, self.page_size, self.head_dim)
        element = 4 if self.dtype == "float32" else 2
        return self.kv_heads * ((tokens - raw) * block // self.page_size + raw * 2 * self.head_dim * element)

    def append(self, k, v, *, rows=None, counts=None, stream=None, plan=None):
        """Stores new tokens behind those that are there.

        k, v: [batch, tokens, kv_heads, head_dim] in the cache's dtype, any strides. Entry b goes to cache row rows[b]
        (row b without `rows`) and stores its first counts[b] tokens (all without `counts`; 0 for a padding row, of
        which nothing is stored). rows, counts: [batch], lists of ints or int32 arrays. A row is written once a call.
        All arguments are checked, and pages taken, before anything is written: after an error the cache is as it was.
        Raises ArgumentError, ArgumentTypeError, or OutOfPagesError.
        """
        rows, counts = ints("append", "rows", rows), ints("append", "counts", counts)
        with self.room("append", k, rows, counts):
            ran(_C.kv_append(self._handle, k, v, rows, counts, stream, plan))

    def room(self, op, k, rows, counts):
        """A context in which the rows have the memory that appending k takes; an error inside gives it back.

        op: whose name errors begin with.
        """
        return contextlib.nullcontext()

    def truncate(self, rows, lengths):
        """Cuts rows[i] to its first lengths[i] tokens. rows, lengths: lists of ints or int32 arrays of one size.

        Per-token and element formats take any length up to the stored one. The kivi formats take any multiple of 32,
        or up to 16 tokens back: only those raw values are still there. Anything else is an ArgumentError, and no row
        is cut.
        """
        _C.kv_truncate(self._handle, ints("truncate", "rows", rows), ints("truncate", "lengths", lengths))

    def reset(self, rows=None):
        """Empties the given rows (a list of ints or an int32 array), or all."""
        _C.kv_reset(self._handle, ints("reset", "rows", rows))

    def dequantize(self, row=None, at=None):
        """K and V as the query at position `at` sees them, in float32.

        The kivi formats show such a query the groups that were full before `at` as codes, and its own group raw.
        row: one row -> k, v [tokens, kv_heads, head_dim]. Without it all rows -> [max_rows, longest, kv_heads,
        head_dim], zeros past a row's tokens. `at` (an int) defaults to each row's newest token; a row's length stands
        for the token to come. Raises ArgumentError where a kivi cache was truncated so that raw values are gone.
        """
        if row is not None:
            length = self._length("dequantize", "row", row)
            at = max(length - 1, 0) if at is None else integer("dequantize", "at", at)
            tokens = min(at + 1, length)
            k, v = (zeros((tokens, self.kv_heads, self.head_dim), "float32") for _ in range(2))
            _C.kv_dequantize(self._handle, row, at, k, v)
            return k, v
        at = None if at is None else integer("dequantize", "at", at)
        ends = [max(length - 1, 0) if at is None else at for length in self.lengths]
        tokens = [min(end + 1, length) for end, length in zip(ends, self.lengths, strict=True)]
        shape = (self.max_rows, max(tokens, default=0), self.kv_heads, self.head_dim)
        k, v = zeros(shape, "float32"), zeros(shape, "float32")
        for r, (end, n) in enumerate(zip(ends, tokens, strict=True)):
            _C.kv_dequantize(self._handle, r, end, k[r, :n], v[r, :n])
        return k, v

    def _length(self, op, name, row):
        if integer(op, name, row) >= self.max_rows:
            raise ArgumentError(f"{op}: {name} must lie in [0, {self.max_rows}), got {row}")
        return self._lengths[row].item()

    def dump(self, row):
        """What a row stores, in logical order: a dict.

        "length"; of quantised formats "k_codes", "v_codes" int8 [tokens, kv_heads, head_dim] and, in float32,
        "k_scale", "v_scale" (and "k_min", "v_min" of int4-kivi): [tokens, kv_heads, 1], or [groups, kv_heads,
        head_dim] for K of the kivi formats. "k_raw", "v_raw" [tokens, kv_heads, head_dim] in float32: the tokens kept
        as elements, all of them in an element format, the open group in a kivi format (absent from the others).
        """
        length = self._length("dump", "row", row)
        facts = {"length": length}
        kivi, heads, dim = self.format in KIVI, self.kv_heads, self.head_dim
        coded = length // GROUP * GROUP if kivi else length
        if self.format not in ELEMENT_DTYPES:
            facts["k_codes"], facts["v_codes"] = (zeros((coded, heads, dim), "int8") for _ in range(2))
            _C.kv_dump_codes(self._handle, row, facts["k_codes"], facts["v_codes"])
            for side, shape in (
                ("k", (coded // GROUP, heads, dim) if kivi else (coded, heads, 1)),
                ("v", (coded, heads, 1)),
            ):
                for kind in ("scale", "min")[: 2 if self.format == "int4-kivi" else 1]:
                    facts[f"{side}_{kind}"] = zeros(shape, "float32")
                    _C.kv_dump_scales(self._handle, row, side == "v", kind == "min", facts[f"{side}_{kind}"])
        if kivi or self.format in ELEMENT_DTYPES:
            k, v = self.dequantize(row, at=length)
            raw = coded if kivi else 0
            facts["k_raw"], facts["v_raw"] = k[raw:], v[raw:]
        return facts

    def __repr__(self):
        return (
            f"{type(self).__name__}(format={self.format!r}, dtype={self.dtype!r}, max_rows={self.max_rows}, "
            f"capacity={self.capacity}, page_size={self.page_size}, kv_heads={self.kv_heads}, head_dim={self.head_dim})"
        )


def own_arrays(format, dtype, pages, page_size, kv_heads, head_dim, max_rows):
    arrays = {
        "lengths": zeros((max_rows,), "int32"),
        **own_ring(format, dtype, kv_heads, head_dim, max_rows),
    }
    if format in ELEMENT_DTYPES:
        pool = zeros((pages, kv_heads, 2, page_size, head_dim), dtype)
        arrays["k_pool"], arrays["v_pool"] = (pool[:, :, side].swapaxes(1, 2) for side in range(2))
    else:
        arrays["pool"] = zeros((pages, kv_heads, _C.kv_block_bytes(format, page_size, head_dim)), "uint8")
    return arrays


def own_ring(format, dtype, kv_heads, head_dim, max_rows):
    if format not in KIVI:
        return {}
    shape = (max_rows, kv_heads, RING, head_dim)
    return {
        "ring_k": zeros(shape, dtype),
        "ring_v": zeros(shape, dtype),
        "raw_from": zeros((max_rows,), "int32"),
    }


class KVCache(Cache):
    """The keys and values of one layer, a fixed room for every row.

    batch: rows. capacity: tokens a row can hold, rounded up to whole pages of 64. format: "int4-kivi" (Liu et al. 2024,
    arXiv 2402.02750), "int4-kivi-sym", "int4", "int8", "fp16", "bf16" or "fp32". dtype: of k and v, "float32",
    "float16", "bfloat16" or the torch dtype of that name; default the element format's own, float32 for the quantised
    formats. Memory is torch's where torch is imported, else NumPy's.
    """

    def __init__(
        self,
        batch,
        capacity,
        kv_heads,
        head_dim,
        *,
        format="int4-kivi",
        dtype=None,
        device=None,
    ):
        op = "KVCache"
        dtype = dtype_name(check_format(op, format), dtype)
        check_device(op, device)
        batch, capacity = integer(op, "batch", batch), integer(op, "capacity", capacity)
        kv_heads, head_dim = integer(op, "kv_heads", kv_heads, 1), integer(op, "head_dim", head_dim, 1)
        pages = pages_for(capacity, CONTIGUOUS_PAGE)
        arrays = own_arrays(format, dtype, batch * pages, CONTIGUOUS_PAGE, kv_heads, head_dim, batch)
        super().__init__(op, format, dtype, CONTIGUOUS_PAGE, kv_heads, head_dim, batch, pages, arrays)

    @property
    def batch(self):
        return self.max_rows

    def reorder(self, index):
        """Row i becomes what row index[i] was (beam search). index: [batch], a list of ints or an int32 array."""
        _C.kv_reorder(self._handle, ints("reorder", "index", index), True)

    def fork(self, src, dst):
        """Row dst becomes a copy of row src."""
        _C.kv_copy_row(self._handle, src, dst, 0)

    def select(self, rows=None, *, capacity=None):
        """A new cache whose row i is a copy of row rows[i], bit for bit; all rows in order without `rows`.

        rows: list of ints or an int32 array, repeats allowed. capacity: of the new cache, default this one's.
        Raises ArgumentError for a row that is not there or does not fit.
        """
        rows = list(range(self.batch)) if rows is None else host(ints("select", "rows", rows)).tolist()
        if any(not 0 <= row < self.batch for row in rows):
            raise ArgumentError(f"select: rows must lie in [0, {self.batch}), got {rows}")
        capacity = self.capacity if capacity is None else capacity
        copy = KVCache(len(rows), capacity, self.kv_heads, self.head_dim, format=self.format, dtype=self.dtype)
        longest = max((self.lengths[row] for row in rows), default=0)
        if longest > copy.capacity:
            raise ArgumentError(f"select: capacity {capacity} is less than the {longest} tokens that a row holds")
        pages = pages_for(longest, CONTIGUOUS_PAGE)
        for name, source in self._arrays.items():
            target = copy._arrays[name]
            if name.endswith("pool"):
                source = source.reshape(self.batch, self.max_pages, *source.shape[1:])[:, :pages]
                target = target.reshape(copy.batch, copy.max_pages, *target.shape[1:])[:, :pages]
            target[:] = source[rows]
        return copy

    def __deepcopy__(self, memo):
        return self.select()
