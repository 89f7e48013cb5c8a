# SPDX-License-Identifier: Apache-2.0
"""Caches filled with known tokens, and what attention over them must give."""

import cases
import numpy as np
import oracle
import rooftile as rt
import torch
from closeness import ATTENTION_BOUND, assert_close, to_numpy64
from rooftile import _C

ELEMENT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
KIVI = ("int4-kivi-sym", "int4-kivi")
# Every format, the compressed ones with inputs of a 16-bit and of a 32-bit type.
STORES = (
    *ELEMENT.items(),
    ("int8", "float32"),
    ("int8", "bfloat16"),
    ("int4", "float16"),
    ("int4", "float32"),
    ("int4-kivi-sym", "float32"),
    ("int4-kivi-sym", "bfloat16"),
    ("int4-kivi", "float16"),
    ("int4-kivi", "float32"),
)
FORMATS = (*ELEMENT.items(), *((f, "float32") for f in ("int8", "int4", *KIVI)))


def tokens(lengths, kv_heads, dim, dtype, *key):
    """K and V of every row: a list of (k, v), float64 [length, kv_heads, dim]. One key channel has a bias."""
    rows = []
    for row, length in enumerate(lengths):
        k, v = (cases.values((length, kv_heads, dim), dtype, side, row, *key) for side in ("k", "v"))
        k[..., dim // 2] = oracle.round_to(k[..., dim // 2] + 4.0, dtype)
        rows.append((k, v))
    return rows


def padded(rows, side, dtype):
    """[batch, longest, heads, dim], NaN past each row's tokens, and the counts."""
    longest = max((len(row[side]) for row in rows), default=0)
    batch = torch.full((len(rows), longest, *rows[0][side].shape[1:]), float("nan"), dtype=cases.torch_dtype(dtype))
    for b, row in enumerate(rows):
        batch[b, : len(row[side])] = cases.tensor(row[side], dtype)
    return batch


def filled(rows, format, dtype, capacity=None):
    """A contiguous cache whose row b holds rows[b]; what it does not use is 0xFF: NaN, or codes of -1 or 15."""
    longest = max(len(k) for k, _ in rows)
    kv_heads, dim = rows[0][0].shape[1:]
    cache = rt.KVCache(
        len(rows), max(longest, 1) if capacity is None else capacity, kv_heads, dim, format=format, dtype=dtype
    )
    poison(cache)
    append(cache, rows)
    return cache


def append(cache, rows):
    counts = [len(k) for k, _ in rows]
    if max(counts):
        cache.append(padded(rows, 0, cache.dtype), padded(rows, 1, cache.dtype), counts=counts)


def poison(cache):
    """Fills the memory of an empty cache with bytes 0xFF."""
    for name, array in cache._arrays.items():
        if name in ("pool", "k_pool", "v_pool", "ring_k", "ring_v"):
            array.fill_(255) if array.dtype == torch.uint8 else array.fill_(float("nan"))


def seen_by_decode(cache, row, count):
    """(first query, last query + 1, k, v, positions) for every run of the row's `count` queries that see the same."""
    length = cache.lengths[row]
    first = max(count - length, 0)
    step = oracle.GROUP if cache.format in KIVI else max(length, 1)
    while first < count:
        position = length - count + first
        end = min(count, first + step - position % step)
        last = length - count + end - 1
        k, v = (to_numpy64(x)[: last + 1] for x in cache.dequantize(row, at=last))
        yield first, end, k, v, np.arange(position, last + 1)
        first = end


def expect_decode(cache, q, *, rows=None, counts=None, **options):
    """What decode_attention must give for q (float64 [B, T, Hq, D]): the oracle fed with dequantize().

    Returns exact, what a naive version in the cache's dtype gives, and the exact lse.
    """
    exact, naive = np.zeros(q.shape), np.zeros(q.shape)
    exact_lse = np.full(q.shape[:-1], -np.inf)
    if "sinks" in options:
        exact_lse[:] = options["sinks"]
    for b in range(q.shape[0]):
        count = q.shape[1] if counts is None else counts[b]
        exact_lse[b, count:] = -np.inf
        for i, j, k, v, positions in seen_by_decode(cache, b if rows is None else rows[b], count):
            queries = q[b, i:j]
            exact[b, i:j], exact_lse[b, i:j] = oracle.attention_reference(
                queries, k, v, q_positions=positions, **options
            )
            naive[b, i:j], _ = oracle.attention_naive(queries, k, v, cache.dtype, q_positions=positions, **options)
    return exact, naive, exact_lse


def check(dtype, out, lse, exact, naive, exact_lse):
    assert_close(out, naive, exact, frobenius=ATTENTION_BOUND[dtype])
    check_lse(lse, exact_lse)


def check_decode(cache, q, out, lse, **options):
    check(cache.dtype, out, lse, *expect_decode(cache, q, **options))


def check_lse(lse, exact):
    got = to_numpy64(lse)
    assert got.shape == exact.shape
    hidden = np.isneginf(exact)
    assert (np.isneginf(got) == hidden).all()
    error = np.abs(np.where(hidden, 0, got) - np.where(hidden, 0, exact))
    assert error.max(initial=0) <= 1e-5 * max(1.0, np.abs(exact[~hidden]).max(initial=0)), f"lse off by {error.max()}"


class Viewed:
    """A cache made of given arrays, as an engine has them: what the ops take is its `_handle`."""

    def __init__(self, cache, *, pages, **arrays):
        names = ("pool", "k_pool", "v_pool", "block_table", "lengths", "ring_k", "ring_v", "raw_from")
        given = {**cache._arrays, **arrays}
        self.arrays = given
        self._handle = _C.KvCache(
            cache.format,
            cache.dtype,
            cache.page_size,
            cache.head_dim,
            cache.kv_heads,
            cache.max_rows,
            pages,
            *(given.get(name) for name in names),
        )


def scattered(cache, order):
    """The same tokens with page p of the pool at order[p], found by a block table whose unused entries are wild."""
    index = torch.argsort(torch.as_tensor(order))
    pools = {n: a[index].clone() for n, a in cache._arrays.items() if n in ("pool", "k_pool", "v_pool")}
    table = torch.full((cache.max_rows, cache.max_pages), 2**30, dtype=torch.int32)
    for row, length in enumerate(cache.lengths):
        for page in range(-(-length // cache.page_size)):
            table[row, page] = order[row * cache.max_pages + page]
    return Viewed(cache, pages=cache.max_pages, block_table=table, **pools)
