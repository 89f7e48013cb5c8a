# SPDX-License-Identifier: Apache-2.0
"""Decode attention against the oracle fed with dequantize(), on every device; its bits and its errors on the CPU.

Caches are filled on the CPU and copied. What only a GPU can show is in test_decode_attention_gpu.py."""

import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from attention_checks import (
    ELEMENT,
    FORMATS,
    KIVI,
    STORES,
    Viewed,
    append,
    check,
    expect_decode,
    filled,
    on_devices,
    poison,
    run_and_check,
    scattered,
    tokens,
)
from closeness import assert_bits_equal, assert_exact, to_numpy64

LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1030)
SHAPES = {
    "cpu": ((9, 3, 64), (8, 8, 80), (8, 1, 96), (12, 2, 111), (32, 8, 128), (4, 2, 256), (5, 5, 1), (3, 1, 17)),
    "cuda": (
        (9, 3, 64),
        (8, 8, 64),
        (8, 1, 96),
        (32, 8, 128),
        (12, 2, 128),
        (5, 1, 128),
        (71, 1, 64),
        (6, 2, 192),
        (16, 2, 256),
        (6, 2, 512),
    ),
}
stores = pytest.mark.parametrize(("format", "dtype"), STORES)
formats = pytest.mark.parametrize(("format", "dtype"), FORMATS)
stores_on_devices = pytest.mark.parametrize(("device", "format", "dtype"), on_devices(STORES))
formats_on_devices = pytest.mark.parametrize(("device", "format", "dtype"), on_devices(FORMATS))


def queries(batch, t, heads, dim, dtype, *key):
    q = cases.values((batch, t, heads, dim), dtype, "q", *key)
    return q, cases.tensor(q, dtype)


def both(q, cache, **options):
    return rt.decode_attention(q, cache, return_lse=True, **options)


# ---------------------------------------------------------------- against the oracle


@pytest.mark.parametrize(
    ("device", "format", "dtype", "shape"),
    [(device, *store, shape) for device, *store in on_devices(FORMATS) for shape in SHAPES[device]],
    ids=str,
)
def test_one_token(device, format, dtype, shape):
    heads, kv_heads, dim = shape
    cache = filled(tokens(LENGTHS, kv_heads, dim, dtype, shape), format, dtype)
    q64, _ = queries(len(LENGTHS), 1, heads, dim, dtype, shape)
    run_and_check(cache, q64[:, 0], device)


@pytest.mark.parametrize("t", [2, 5, 16, 32])
@stores_on_devices
def test_several_tokens(device, format, dtype, t):
    lengths = (1, t, 31, 32, 33, 47, 64, 65, 130, 141, 257)
    cache = filled(tokens(lengths, 3, 64, dtype, t), format, dtype)
    q64, _ = queries(len(lengths), t, 9, 64, dtype, t)
    run_and_check(cache, q64, device)


@formats
def test_every_length(format, dtype):
    """Token by token; all lengths judged together, so that the naive version's luck at one of them does not decide."""
    (k, v), *_ = tokens([130], 2, 32, dtype)
    cache = filled([(k[:0], v[:0])], format, dtype, capacity=130)
    q64, q = queries(1, 130, 4, 32, dtype)
    outs, expected = [], []
    for i in range(130):
        append(cache, [(k[i : i + 1], v[i : i + 1])])
        outs.append(both(q[:, i : i + 1], cache))
        expected.append(expect_decode(cache, q64[:, i : i + 1]))
    out, lse = (torch.cat(parts, 1) for parts in zip(*outs, strict=True))
    check(dtype, out, lse, *(np.concatenate(parts, 1) for parts in zip(*expected, strict=True)))


@pytest.mark.parametrize("plan", cases.PLANS)
@formats
def test_every_variant(format, dtype, plan):
    cache = filled(tokens((0, 40, 300), 2, 40, dtype), format, dtype)
    q64, _ = queries(3, 7, 6, 40, dtype)
    run_and_check(cache, q64, plan=plan, window=190, softcap=9.0)


@pytest.mark.parametrize("t", [1, 70, 200])
@pytest.mark.parametrize(("device", "format", "dtype"), [s for s in on_devices(FORMATS) if s[1] not in KIVI])
def test_any_number_of_queries(device, format, dtype, t):
    dim = 24 if device == "cpu" else 64
    cache = filled(tokens((150, 301), 1, dim, dtype), format, dtype)
    q64, _ = queries(2, t, 2, dim, dtype)
    run_and_check(cache, q64, device)


@pytest.mark.parametrize("batch", [1, 5])
@formats_on_devices
def test_more_than_nine_chunks(device, format, dtype, batch):
    """Ends on both sides of the tenth chunk, and later. One row's chunks are tasks of their own, five rows' are not."""
    lengths = (1281, 1152, 1153, 1400, 2050)[:batch]
    cache = filled(tokens(lengths, 1, 64, dtype), format, dtype)
    q64, _ = queries(batch, 1, 2, 64, dtype)
    run_and_check(cache, q64, device)


def test_many_heads_on_one():
    cache = filled(tokens((77,), 1, 16, "float32"), "int4-kivi", "float32")
    q64, _ = queries(1, 3, 71, 16, "float32")
    run_and_check(cache, q64)


def test_head_dim_512():
    cache = filled(tokens((200,), 1, 512, "bfloat16"), "int4-kivi", "bfloat16")
    q64, _ = queries(1, 1, 2, 512, "bfloat16")
    run_and_check(cache, q64)


@pytest.mark.parametrize("ratio", [*range(1, 17), 24, 32, 64, 128])
@pytest.mark.parametrize("device", cases.devices())
def test_any_ratio_of_heads(device, ratio):
    for format, dtype in (("fp16", "float16"), ("int4-kivi", "float16")):
        cache = filled(tokens((1, 33, 130), 1, 64, dtype, ratio), format, dtype)
        run_and_check(cache, queries(3, 1, ratio, 64, dtype, ratio)[0][:, 0], device)


@stores_on_devices
def test_asking_for_lse_changes_no_bit(device, format, dtype):
    """Rows in one piece and in several: what merges them needs their sums whether or not the caller does."""
    lengths = (0, 1, 33, 300, 2500)
    cache = filled(tokens(lengths, 2, 64, dtype), format, dtype).to(device)
    for t in (1, 7):
        q = queries(len(lengths), t, 6, 64, dtype, t)[1].to(device)
        for options in ({}, {"window": 40}, {"softcap": 5.0}):
            assert_bits_equal(rt.decode_attention(q, cache, **options), both(q, cache, **options)[0], str(options))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@stores_on_devices
def test_pages_anywhere(device, format, dtype, page_size):
    if format in KIVI and page_size == 16:
        return  # a page holds whole groups
    pages = 24 if page_size == 16 else 12
    cache = rt.PagedKVCache(80, page_size, 2, 64, max_rows=4, max_pages_per_row=pages, format=format, dtype=dtype)
    poison(cache)
    for row, part in enumerate(tokens((0, 1, 100, 257), 2, 64, dtype)):  # in pieces: pages of a row lie apart
        for begin in range(0, len(part[0]), 50):
            k, v = (cases.tensor(x[begin : begin + 50], dtype)[None] for x in part)
            cache.append(k, v, rows=[row])
    q64, _ = queries(4, 2, 6, 64, dtype)
    run_and_check(cache, q64, device)


# ---------------------------------------------------------------- logits


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 5},
        {"window": 33},
        {"window": 100},
        {"window": 2**40},
        {"softcap": 2.0},
        {"softcap": 50.0},
        {"scale": 0.3},
        {"scale": -0.25},
        {"window": 33, "softcap": 1.5, "scale": 0.7},
        {"window": 65, "softcap": 1.5, "scale": 0.7},
    ],
    ids=str,
)
@formats_on_devices
def test_options(device, format, dtype, options):
    cache = filled(tokens((1, 40, 290, 1030), 2, 128, dtype), format, dtype)
    q64, _ = queries(4, 4, 8, 128, dtype)
    run_and_check(cache, q64, device, **options)


@pytest.mark.parametrize("window", [7, 33, 150])
@formats_on_devices
def test_a_window_of_many_queries(device, format, dtype, window):
    """Every one of 20 queries has a window of its own; that of the first begins a chunk before that of the last."""
    cache = filled(tokens((40, 290), 2, 64, dtype), format, dtype)
    q64, _ = queries(2, 20, 4, 64, dtype)
    run_and_check(cache, q64, device, window=window)


@formats
def test_what_lies_before_the_window_is_not_seen(format, dtype):
    """A NaN there, in K or V: its group reads back as NaN and is skipped as a whole."""
    (k, v), *_ = tokens([300], 2, 40, dtype)
    _, q = queries(1, 5, 4, 40, dtype)
    expected = both(q, filled([(k, v)], format, dtype), window=60)
    k[[20, 150], 0, 3], v[[20, 150], 1, 5] = np.nan, np.nan
    for x, y in zip(both(q, filled([(k, v)], format, dtype), window=60), expected, strict=True):
        assert_bits_equal(x, y)


@pytest.mark.parametrize("plan", cases.PLANS)
@pytest.mark.parametrize(("format", "dtype"), list(ELEMENT.items()))
def test_every_logit_minus_infinity(format, dtype, plan):
    """As no visible key: out 0, lse -inf. A row with one finite logit stands beside it."""
    k, v = np.full((140, 1, 16), -np.inf), cases.exact_values((140, 1, 16), "v")
    some = k.copy()
    some[70] = 0.0
    cache = filled([(k, v), (some, v)], format, dtype)
    out, lse = both(torch.ones(2, 1, 2, 16, dtype=cases.torch_dtype(dtype)), cache, plan=plan)
    assert_exact(out[0], np.zeros((1, 2, 16)))
    assert torch.isneginf(lse[0]).all()
    assert_exact(out[1], np.broadcast_to(v[70], (1, 2, 16)))
    assert_exact(lse[1], np.zeros((1, 2)), "float32")


@pytest.mark.parametrize("plan", cases.PLANS)
@pytest.mark.parametrize("sink_dtype", ["float32", "bfloat16"])
def test_sinks(sink_dtype, plan):
    cache = filled(tokens((0, 1, 40, 290), 2, 64, "bfloat16"), "int4-kivi", "bfloat16")
    q64, _ = queries(4, 4, 6, 64, "bfloat16")
    sinks = cases.values((6,), sink_dtype, "sinks", spread=3.0)
    run_and_check(cache, q64, sinks=sinks, sink_dtype=sink_dtype, counts=[4, 1, 3, 0], plan=plan)


@pytest.mark.parametrize("sinks_as_q", [False, True])
@stores_on_devices
def test_rows_counts_and_sinks(device, format, dtype, sinks_as_q):
    """Outputs are full of NaN before: padding queries and queries that see nothing are written too."""
    cache = filled(tokens((0, 1, 40, 290, 77), 2, 64, dtype), format, dtype)
    q64, _ = queries(4, 4, 6, 64, dtype)
    q64[1, 1:], q64[3] = np.nan, np.nan  # padding queries are not looked at
    sink_dtype = dtype if sinks_as_q else "float32"
    sinks = cases.values((6,), sink_dtype, "sinks", spread=3.0)
    options = {"rows": [3, 4, 0, 1], "counts": [4, 1, 3, 0]}
    run_and_check(cache, q64, device, sinks=sinks, sink_dtype=sink_dtype, **options)
    run_and_check(cache, q64, device, **options)


@pytest.mark.parametrize("window", [130, 131, 1000, 2**31, 2**40])
def test_a_window_past_the_row_changes_nothing(window):
    cache = filled(tokens((130,), 3, 64, "float32"), "int4-kivi", "float32")
    _, q = queries(1, 3, 9, 64, "float32")
    for a, b in zip(both(q, cache, window=window), both(q, cache), strict=True):
        assert_bits_equal(a, b)


@stores
def test_a_window_of_one_is_the_value_itself(format, dtype):
    lengths = (1, 32, 33, 200)
    cache = filled(tokens(lengths, 3, 64, dtype), format, dtype)
    _, q = queries(len(lengths), 1, 9, 64, dtype)
    out = rt.decode_attention(q, cache, window=1)
    for row, length in enumerate(lengths):
        _, v = cache.dequantize(row, at=length - 1)
        assert_exact(out[row, 0], to_numpy64(v)[-1].repeat(3, axis=0))


@pytest.mark.parametrize("bias", [-1e5, 1e5])
@pytest.mark.parametrize(("format", "dtype"), list(ELEMENT.items())[::2])
def test_large_logits(format, dtype, bias):
    """A common offset of every logit leaves the softmax alone, however far from 0 it is."""
    k = np.zeros((140, 1, 16))
    k[..., 0] = np.arange(140)[:, None] % 2
    k[..., 1] = 1
    v = cases.exact_values((140, 1, 16), "v")
    cache = filled([(k, v)], format, dtype)
    q = np.zeros((1, 1, 1, 16))
    q[..., 1] = oracle.round_to(bias, dtype)
    out, lse = both(cases.tensor(q, dtype), cache, scale=1.0)
    assert_exact(lse[0, 0, 0:1], [q[0, 0, 0, 1] + np.log(140)], "float32")
    assert np.allclose(to_numpy64(out)[0, 0], v.mean(axis=0), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------- exact data


@formats
def test_every_channel_counts(format, dtype):
    """q = e_d picks channel d of the keys: the one key that has it takes all the weight."""
    dim = 80
    k, v = np.zeros((dim, 1, dim)), cases.exact_values((dim, 1, dim), "v")
    k[np.arange(dim), 0, np.arange(dim)] = 7.0
    v[:, 0, 0], v[:, 0, 1] = 7, -8 if format == "int4-kivi" else -7  # scale 1
    cache = filled([(k, v)] * dim, format, dtype)
    q = cases.tensor(np.eye(dim)[:, None, :] * 100.0, dtype)
    out = rt.decode_attention(q, cache, scale=1.0)
    for d in range(dim):
        assert_exact(out[d], to_numpy64(cache.dequantize(0)[1])[d])


@formats
def test_equal_keys_average_small_integers(format, dtype):
    length = 64
    v = cases.exact_values((length, 3, 96), "v", largest=7)
    v[..., 0], v[..., 1] = (
        (127 if format in ("int8", "int8-kivi-sym") else 7),
        (-8 if format == "int4-kivi" else -7),
    )  # scale 1
    k = np.full((length, 3, 96), 127 / 16 if format == "int8-kivi-sym" else 7.0)  # a scale that 16 bits hold
    cache = filled([(k, v)], format, dtype)
    out = rt.decode_attention(cases.tensor(np.ones((1, 9, 96)), dtype), cache)
    seen = to_numpy64(cache.dequantize(0)[1])
    assert_exact(out[0], seen.mean(axis=0).repeat(3, axis=0))


def one_fp8_token(bits, dtype):
    """A cache of one token whose K codes are these bits, and V codes the same from behind; scale 1/2."""
    half = np.full((1, 1, 1), 0.5)
    codes = oracle.Codes(bits[None, None], bits[None, None, ::-1], half, half)
    cache = rt.KVCache(1, 64, 1, len(bits), format="fp8", dtype=dtype)
    cache._arrays["pool"][0, 0] = torch.from_numpy(oracle.encode_block(codes, 0, "fp8", dtype, 64))
    cache.seq_lens[0] = 1
    return cache


@pytest.mark.parametrize("plan", cases.PLANS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_code_of_fp8(dtype, plan):
    """q = e_d makes the only key's channel d its logit; the only value takes all the weight."""
    bits = np.arange(256, dtype=np.uint8)
    bits[[0x7F, 0xFF]] = 0
    q = cases.tensor(np.eye(256)[None], dtype)
    out, lse = both(q, one_fp8_token(bits, dtype), scale=1.0, plan=plan)
    assert_exact(lse[0], 0.5 * oracle.e4m3_values(bits))
    assert_exact(out[0], np.tile(0.5 * oracle.e4m3_values(bits[::-1]), (256, 1)))
    for nan in (0x7F, 0xFF):  # append stores neither; whoever did gets what they stand for
        bits[3] = nan
        cache = one_fp8_token(bits, dtype)
        k, v = (to_numpy64(x)[0, 0] for x in cache.dequantize(0))
        assert np.isnan(k).nonzero()[0].tolist() == [3] and np.isnan(v).nonzero()[0].tolist() == [252]
        out, lse = both(q, cache, plan=plan)
        assert torch.isnan(lse).all() and torch.isnan(out).all()


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (6, 1)], ids=str)
@stores
def test_sixteen_at_once_and_one_by_one(format, dtype, heads):
    """A query sees what stood when it was the newest, whatever came after."""
    hq, hkv = heads
    (k, v), *_ = tokens([150], hkv, 64, dtype)
    k[140], v[149] = np.inf, np.nan  # later tokens must not touch earlier queries
    cache = filled([(k[:118], v[:118])], format, dtype, capacity=150)
    _, q = queries(1, 32, hq, 64, dtype)
    outs = []
    for i in range(32):
        append(cache, [(k[118 + i : 119 + i], v[118 + i : 119 + i])])
        outs.append(both(q[:, i], cache))
    for t in (16, 32):
        out, lse = both(q[:, -t:], cache)
        for i in range(t):
            assert_bits_equal(out[:, i], outs[32 - t + i][0], f"T = {t}, query {i}")
            assert_bits_equal(lse[:, i], outs[32 - t + i][1], f"T = {t}, query {i}")


@stores
def test_a_row_stands_alone(format, dtype):
    """Not the batch, the neighbours, the capacity, the place of the row or of its pages."""
    rows = tokens((300, 0, 45, 700, 128), 3, 64, dtype)
    _, q = queries(5, 3, 9, 64, dtype)
    cache = filled(rows, format, dtype)
    out, lse = both(q, cache)
    for b, row in enumerate(rows):
        alone = filled([row], format, dtype, capacity=8 * max(len(row[0]), 1))
        for x, y in zip(both(q[b : b + 1], alone), (out[b : b + 1], lse[b : b + 1]), strict=True):
            assert_bits_equal(x, y, f"row {b}")
    picked = torch.tensor([3, 0, 3], dtype=torch.int32)
    for x, y in zip(both(q[[3, 0, 1]], cache, rows=picked), (out, lse), strict=True):
        assert_bits_equal(x[:2], y[[3, 0]])
    order = np.random.default_rng(5).permutation(cache.max_rows * cache.max_pages)
    for x, y in zip(both(q, scattered(cache, order.tolist())), (out, lse), strict=True):
        assert_bits_equal(x, y, "scattered pages")


@formats
def test_unused_memory_does_not_matter(format, dtype):
    """`filled` poisons what it does not use; zeros there must give the same bits."""
    rows = tokens((1, 37, 130, 64), 2, 40, dtype)
    _, q = queries(4, 2, 4, 40, dtype)
    clean = rt.KVCache(4, 130, 2, 40, format=format, dtype=dtype)
    append(clean, rows)
    for x, y in zip(both(q, filled(rows, format, dtype)), both(q, clean), strict=True):
        assert_bits_equal(x, y)
        assert torch.isfinite(x[0, 1]).all()


@pytest.mark.parametrize(("format", "dtype"), list(ELEMENT.items()))
def test_an_engines_pools(format, dtype):
    """K and V with different strides, tokens and heads apart, pages of 16 in any order."""
    (k, v), *_ = tokens([75], 2, 24, dtype)
    _, q = queries(1, 2, 6, 24, dtype)
    expected = both(q, filled([(k, v)], format, dtype))
    order = [4, 0, 3, 1, 2]
    k_pool = torch.full((6, 16, 2, 24), float("nan"), dtype=cases.torch_dtype(dtype))
    v_pool = torch.full((6, 16, 5, 29), float("nan"), dtype=cases.torch_dtype(dtype))[:, :, 1:3, 2:26]
    for page, place in enumerate(order):
        n = min(16, 75 - 16 * page)
        k_pool[place, :n] = cases.tensor(k[16 * page : 16 * page + n], dtype)
        v_pool[place, :n] = cases.tensor(v[16 * page : 16 * page + n], dtype)
    owner = rt.KVCache(1, 16, 2, 24, format=format, dtype=dtype)
    owner.page_size = 16
    table = torch.tensor([[*order, -7, 2**30]], dtype=torch.int32)
    lengths = torch.tensor([75], dtype=torch.int32)
    view = Viewed(owner, pages=7, k_pool=k_pool, v_pool=v_pool, block_table=table, lengths=lengths)
    for x, y in zip(both(q, view), expected, strict=True):
        assert_bits_equal(x, y)


def test_after_truncation():
    """Taken back and appended again: as if the tokens had never been there."""
    for format, dtype in FORMATS:
        (k, v), *_ = tokens([140], 2, 32, dtype)
        _, q = queries(1, 3, 4, 32, dtype)
        cache = filled([(k, v)], format, dtype)
        cache.truncate([0], [125])
        for x, y in zip(both(q, cache), both(q, filled([(k[:125], v[:125])], format, dtype)), strict=True):
            assert_bits_equal(x, y, format)


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_outputs_stay_inside_their_elements(dtype):
    cache = filled(tokens((3, 70), 2, 33, dtype), "int4-kivi", dtype)
    q64, q = queries(2, 3, 4, 33, dtype)
    for strides, lse_strides in ((None, None), ((900, 300, 40, 1), (90, 13, 2)), ((1, 2, 6, 24), (1, 2, 6))):
        out = cases.guarded((2, 3, 4, 33), dtype, strides=strides)
        lse = cases.guarded((2, 3, 4), "float32", strides=lse_strides)
        got = both(q, cache, out=out.tensor, lse=lse.tensor)
        assert got[0] is out.tensor
        assert got[1] is lse.tensor
        for guard in (out, lse):
            guard.check_margins()
            guard.check_written()
        check(dtype, *got, *expect_decode(cache, q64))


def test_queries_of_any_strides():
    cache = filled(tokens((50, 70), 3, 40, "float16"), "int8", "float16")
    _, q = queries(2, 3, 9, 40, "float16")
    expected = both(q, cache)
    for view in (
        q.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.stack([q, q], -1)[..., 1],
        q.flip(0).contiguous().flip(0),
    ):
        for x, y in zip(both(view, cache), expected, strict=True):
            assert_bits_equal(x, y)


def test_numpy():
    (k, v), *_ = tokens([70], 2, 32, "float32")
    _, q = queries(1, 1, 4, 32, "float32")
    cache = filled([(k, v)], "int4-kivi", "float32")
    out = rt.decode_attention(q.numpy(), cache)
    assert isinstance(out, np.ndarray)
    assert_bits_equal(out, rt.decode_attention(q, cache).numpy())


def test_counts(device):
    cache = filled(tokens((70, 2, 40, 33), 3, 64, "bfloat16"), "int4-kivi", "bfloat16")
    q64, _ = queries(4, 5, 9, 64, "bfloat16")
    q64[1, 4], q64[2] = np.nan, np.nan
    run_and_check(cache, q64, device, counts=[5, 4, 0, 1])


def test_nothing_to_do():
    cache = filled(tokens((3, 0), 2, 16, "float32"), "int8", "float32")
    out, lse = both(torch.empty(0, 4, 16), cache)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    assert both(torch.empty(2, 0, 4, 16), cache)[1].shape == (2, 0, 4)


# ---------------------------------------------------------------- errors

I32 = torch.int32


def wrong(cache_format="int4-kivi", **changes):
    cache = filled(tokens((70, 40), 2, 32, "float32"), cache_format, "float32")
    arguments = {"q": torch.zeros(2, 3, 4, 32), "cache": cache, **changes}
    out = torch.full((2, 3, 4, 32), 7.0)
    if "out" not in changes and tuple(arguments["q"].shape) == (2, 3, 4, 32):
        arguments["out"] = out
    q, cache = arguments.pop("q"), arguments.pop("cache")
    try:
        rt.decode_attention(q, cache, **arguments)
    finally:
        assert (out == 7).all(), "an output was written before the error"


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"q": torch.zeros(2, 33, 4, 32)}, rt.NotSupportedError, "prefill_attention"),
        ({"q": torch.zeros(2, 3, 4, 31)}, rt.ArgumentError, "q"),
        ({"q": torch.zeros(2, 3, 5, 32)}, rt.ArgumentError, "q"),
        ({"q": torch.zeros(2, 3, 0, 32)}, rt.ArgumentError, "q"),
        ({"q": torch.zeros(3, 3, 4, 32)}, rt.ArgumentError, "q"),
        ({"q": torch.zeros(4, 32)}, rt.ArgumentError, "q"),
        ({"q": torch.zeros(2, 3, 4, 32, dtype=torch.float16)}, rt.ArgumentTypeError, "q"),
        ({"q": torch.zeros(2, 3, 4, 32, dtype=I32)}, rt.ArgumentTypeError, "q"),
        ({"cache": None}, rt.ArgumentTypeError, "cache"),
        ({"cache": torch.zeros(3)}, rt.ArgumentTypeError, "cache"),
        ({"rows": torch.tensor([0, 2], dtype=I32)}, rt.ArgumentError, "rows"),
        ({"rows": torch.tensor([0, -1], dtype=I32)}, rt.ArgumentError, "rows"),
        ({"rows": torch.tensor([0], dtype=I32)}, rt.ArgumentError, "rows"),
        ({"rows": torch.tensor([0, 1])}, rt.ArgumentTypeError, "rows"),
        ({"counts": torch.tensor([0, 4], dtype=I32)}, rt.ArgumentError, "counts"),
        ({"counts": torch.tensor([0, -1], dtype=I32)}, rt.ArgumentError, "counts"),
        ({"counts": torch.tensor([[0, 1]], dtype=I32)}, rt.ArgumentError, "counts"),
        ({"window": 0}, rt.ArgumentError, "window"),
        ({"window": -3}, rt.ArgumentError, "window"),
        ({"window": 2.5}, rt.ArgumentTypeError, "window"),
        ({"softcap": 0.0}, rt.ArgumentError, "softcap"),
        ({"softcap": float("nan")}, rt.ArgumentError, "softcap"),
        ({"scale": float("inf")}, rt.ArgumentError, "scale"),
        ({"scale": "a"}, rt.ArgumentTypeError, "scale"),
        ({"sinks": torch.zeros(3)}, rt.ArgumentError, "sinks"),
        ({"sinks": torch.zeros(4, dtype=torch.float16)}, rt.ArgumentTypeError, "sinks"),
        ({"out": torch.zeros(2, 3, 4, 33)}, rt.ArgumentError, "out"),
        ({"out": torch.zeros(2, 3, 4, 32, dtype=torch.float16)}, rt.ArgumentTypeError, "out"),
        ({"out": torch.zeros(2, 3, 1, 32).expand(2, 3, 4, 32)}, rt.ArgumentError, "out"),
        ({"lse": torch.zeros(2, 3)}, rt.ArgumentError, "lse"),
        ({"lse": torch.zeros(2, 3, 4, dtype=torch.float16)}, rt.ArgumentTypeError, "lse"),
        ({"plan": "abacus"}, rt.NotSupportedError, "plan"),
    ],
    ids=lambda x: str(x)[:50] if isinstance(x, dict) else "",
)
def test_bad_arguments(changes, error, name):
    with pytest.raises(error, match=name):
        wrong(**changes)


def test_raw_tokens_that_are_gone():
    cache = filled(tokens((128,), 2, 32, "float32"), "int4-kivi", "float32")
    cache.truncate([0], [64])
    q = torch.zeros(1, 2, 4, 32)
    with pytest.raises(rt.ArgumentError, match="truncated"):
        rt.decode_attention(q, cache)
    append(cache, tokens((2,), 2, 32, "float32"))
    rt.decode_attention(q, cache)
    with pytest.raises(rt.ArgumentError, match="a query at position 63 needs the raw tokens from 32"):
        rt.decode_attention(torch.zeros(1, 3, 4, 32), cache)  # the first of three, not the last


@pytest.mark.parametrize("page", [-1, 2, 99])  # the pool has pages 0 and 1
def test_a_table_that_points_nowhere(page):
    cache = filled(tokens((70,), 2, 32, "float32"), "int8", "float32")
    assert cache.max_pages == 2
    view = scattered(cache, list(range(cache.max_pages)))
    view.arrays["block_table"][0, 1] = page
    with pytest.raises(rt.ArgumentError, match="block_table"):
        rt.decode_attention(torch.zeros(1, 4, 32), view)


def test_poison_is_what_it_says():
    cache = rt.KVCache(1, 64, 1, 32, format="bf16", dtype="bfloat16")
    poison(cache)
    assert torch.isnan(cache._arrays["k_pool"]).all()
