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
KIVI = ("int4-kivi-sym", "int4-kivi", "int8-kivi-sym")
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
    ("fp8", "float32"),
    ("fp8", "bfloat16"),
    ("int8-kivi-sym", "float16"),
    ("int8-kivi-sym", "float32"),
)
FORMATS = (*ELEMENT.items(), *((f, "float32") for f in ("int8", "int4", *KIVI, "fp8")))
# What has decode kernels on a GPU.
GPU_STORES = (
    ("fp16", "float16"),
    ("bf16", "bfloat16"),
    *((f, dtype) for f in ("int8", "int4", *KIVI, "fp8") for dtype in ("float16", "bfloat16")),
)


def on_devices(cpu_stores):
    """(device, format, dtype) of every test on the devices that are here."""
    stores = {"cpu": cpu_stores, "cuda": GPU_STORES}
    return [(device, *store) for device in cases.devices() for store in stores[device]]


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
    """A contiguous cache whose row b holds rows[b]; unused memory is 0xFF: NaN (in fp8 too), or codes of -1 or 15."""
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


def check(dtype, out, lse, exact, naive, exact_lse, lse_bound=None):
    assert_close(out, naive, exact, frobenius=ATTENTION_BOUND[dtype])
    check_lse(lse, exact_lse, lse_bound)


def lse_bound(exact):
    """Of each lse that is summed in fp32: 1e-5 of the largest."""
    return np.full(exact.shape, 1e-5 * max(1.0, np.abs(exact[~np.isneginf(exact)]).max(initial=0)))


def check_lse(lse, exact, bound=None):
    """bound: of each value; default lse_bound."""
    got = to_numpy64(lse)
    assert got.shape == exact.shape
    hidden = np.isneginf(exact)
    assert (np.isneginf(got) == hidden).all()
    error = np.abs(np.where(hidden, 0, got) - np.where(hidden, 0, exact))
    bound = lse_bound(exact) if bound is None else bound
    # negated: NaN is wrong too
    wrong = ~(error <= bound)
    assert not wrong.any(), f"lse off by {error[wrong].max()}, allowed {bound[wrong].min()}"


def run_and_check(cache, q, device="cpu", *, plan=None, sink_dtype="float32", **options):
    """decode_attention on `device` into outputs full of NaN, over what the CPU's `cache` holds, against the oracle.

    q: float64 [B, T, Hq, D] or [B, Hq, D]. rows, counts: lists; sinks: float64.
    """
    given = dict(options)
    for name in ("rows", "counts"):
        if name in options:
            given[name] = torch.tensor(options[name], dtype=torch.int32, device=device)
    if "sinks" in options:
        given["sinks"] = cases.tensor(options["sinks"], sink_dtype, device)
    tq = cases.tensor(q, cache.dtype, device)
    out, lse = torch.full_like(tq, float("nan")), torch.full(q.shape[:-1], float("nan"), device=device)
    with rt.record_kernels() as names:
        rt.decode_attention(tq, cache.to(device), out=out, lse=lse, plan=plan, **given)
    variant = f"cpu_{plan or cases.PLANS[0]}" if device == "cpu" else "cuda"
    if q.ndim == 3:
        q, out, lse = (x[:, None] for x in (q, out, lse))
    # more than 8 query heads times new tokens of a KV head go through a kernel of their own where it is compiled
    steps = device != "cpu" and cache.head_dim == 128 and q.shape[1] * q.shape[2] // cache.kv_heads > 8
    assert names == [f"{variant}_{cache.dtype}_{cache.format}_d{cache.head_dim}{'_m16' if steps else ''}"]
    exact, naive, exact_lse = expect_decode(cache, q, **options)
    bound = None
    if device != "cpu":
        bound = gpu_lse_bound(cache, q, exact_lse, **options)
    elif takes_integers(cache, plan):
        bound = lse_bound(exact_lse) + worst_logit_errors(integer_key_errors, cache, q, **options)
    check(cache.dtype, out, lse, exact, naive, exact_lse, bound)


def takes_integers(cache, plan=None):
    """Whether the CPU's decode attention multiplies this cache's codes in integers, with the plan or of itself."""
    pages = cache.page_size % oracle.GROUP == 0 and -(-cache.head_dim // 32) % 2 == 0
    return (plan or cases.PLANS[0]) == "amx" and "int4" in cache.format and cache.dtype != "float32" and pages


def gpu_lse_bound(cache, q, exact_lse, *, rows=None, **options):
    """How far each lse of a GPU's kernels may be off.

    The sum of weights and the logarithm, in fp32: 2^-22 of the lse, and 2^-22 of the sum for each of the fewer than
    length / 128 + 64 additions that one weight goes through. And as much as the visible logit that errs most:
    D * 2^-22 of sum |q_d k_d|, which is summed in fp32 by tensor cores that truncate, and what `key_errors` says.
    """
    bound = 2.0**-22 * (np.abs(np.where(np.isneginf(exact_lse), 0, exact_lse)) + 64)
    for b in range(q.shape[0]):
        bound[b] += 2.0**-22 * cache.lengths[b if rows is None else rows[b]] / 128
    return bound + worst_logit_errors(key_errors, cache, q, rows=rows, **options)


def worst_logit_errors(errors_of, cache, q, *, rows=None, counts=None, scale=None, window=None, **_):
    """By how much the visible logit that errs most may be off [B, T, Hq]; a soft cap and a sink make no error larger.

    errors_of: key_errors or integer_key_errors.
    """
    worst = np.zeros(q.shape[:-1])
    dim, per_kv = q.shape[-1], q.shape[2] // cache.kv_heads
    scale = dim**-0.5 if scale is None else scale
    for b in range(q.shape[0]):
        row = b if rows is None else rows[b]
        count = q.shape[1] if counts is None else counts[b]
        for i, j, k, _, positions in seen_by_decode(cache, row, count):
            queries = np.abs(q[b, i:j]).reshape(j - i, cache.kv_heads, per_kv, dim)
            errors = errors_of(cache, row, queries, k, oracle.GROUP * (positions[-1] // oracle.GROUP))
            keys = np.arange(len(k))
            seen = keys <= positions[:, None]
            if window is not None:
                seen &= keys > positions[:, None] - window
            most = np.where(seen[:, None, None], errors, 0).max(axis=-1, initial=0)
            worst[b, i:j] = abs(scale) * most.reshape(j - i, -1)
    return worst


def integer_key_errors(cache, row, q, k, code_end):
    """The same as key_errors where a query times K's channel scales became 16-bit integers: each of them is off by
    1 / 32639 of the query's largest in a group, or by 2^-55, and meets u - 8."""
    facts = cache.dump(row)
    kivi = cache.format in KIVI
    end = code_end if kivi else len(k)
    code = np.abs(to_numpy64(facts["k_codes"])[:end] - (8 if "k_min" in facts else 0)).sum(axis=-1)  # [keys, Hkv]
    scale = to_numpy64(facts["k_scale"])
    errors = np.zeros((*q.shape[:-1], len(k)))
    for at in range(0, end, oracle.GROUP):
        keys = slice(at, min(at + oracle.GROUP, end))
        largest = (q * scale[at // oracle.GROUP][:, None] if kivi else q).max(axis=-1)[..., None]  # [T, Hkv, G, 1]
        size = code[keys] if kivi else code[keys] * scale[keys, :, 0]
        errors[..., keys] = np.maximum(largest / 32639, 2.0**-55) * size.T[:, None]
    return errors


def key_errors(cache, row, q, k, code_end):
    """How far the product of each query, |q| [T, Hkv, G, D], and each key of a row may be off: [T, Hkv, G, keys].

    Codes meet a query divided by a power of two, at most twice its largest value, in fp16: what falls below 2^-14 of
    that is off by 2^-25 of it. A kivi key that is coded is (u - 8) * scale + (min + 8 * scale), without a minimum
    code * scale: q * scale and min + 8 * scale are rounded to fp16, 2^-11 of each product, and below 2^-14 off by
    2^-25 too.
    """
    size = np.abs(k)  # of the terms that make a key, [keys, Hkv, D]
    product = np.einsum("thgd,khd->thgk", q, size)
    largest = q.max(axis=-1, initial=0)[..., None]
    if cache.format not in KIVI:
        lost = 0 if cache.format in ELEMENT else 2.0**-24 * largest * size.sum(axis=-1).T[None, :, None]
        return k.shape[-1] * 2.0**-22 * product + lost
    facts = cache.dump(row)
    scale = to_numpy64(facts["k_scale"]).repeat(oracle.GROUP, 0)[:code_end]
    code = np.abs(to_numpy64(facts["k_codes"])[:code_end] - (8 if "k_min" in facts else 0))
    size = code * scale
    if "k_min" in facts:
        size += np.abs(to_numpy64(facts["k_min"]).repeat(oracle.GROUP, 0)[:code_end] + 8 * scale)
    coded = np.einsum("thgd,khd->thgk", q, size)
    lost = 2.0**-24 * largest * (size + code).sum(axis=-1).T[None, :, None]
    product[..., :code_end] = coded
    product *= k.shape[-1] * 2.0**-22
    product[..., :code_end] += 2.0**-11 * coded + lost
    return product


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
