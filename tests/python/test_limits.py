# SPDX-License-Identifier: Apache-2.0
"""Sizes, addresses and processes at the edge of what a call takes: named or right, never a flood of memory."""

import numpy as np
import pytest
import rooftile as rt

MANY = 2**33  # more sequences than a call takes; without a token no memory is behind them


# ---------------------------------------------------------------- interleaved memory


@pytest.mark.parametrize("rows", (3, 10002, 300001))
def test_a_long_view_into_its_own_rows(rows):
    """in and out interleave without meeting, however many rows there are."""
    x = np.random.default_rng(0).standard_normal((rows, 4), np.float32)
    expected = rt.silu_mul(x.copy())
    np.testing.assert_array_equal(rt.silu_mul(x, out=x[:, :2]), expected)
    with pytest.raises(rt.ArgumentError, match=r"share memory|overlap"):
        rt.silu_mul(x, out=x[:, 1:3])


def test_rope_of_a_long_fused_projection():
    tokens, dim = 11000, 4
    qkv = np.random.default_rng(1).standard_normal((tokens, 4, dim), np.float32)
    cos = sin = np.full((1, dim // 2), 0.5, np.float32)
    positions = np.zeros(tokens, np.int32)
    q, k, v = qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]
    expected, values = rt.rope(q.copy(), k.copy(), cos, sin, positions), v.copy()
    got = rt.rope(q, k, cos, sin, positions, q_out=q, k_out=k)
    for ours, right in zip((*got, v), (*expected, values), strict=True):
        np.testing.assert_array_equal(ours, right)


# ---------------------------------------------------------------- more sequences than there can be


def test_prefill_of_too_many_sequences():
    q, k = np.empty((MANY, 0, 8, 64), np.float32), np.empty((MANY, 0, 2, 64), np.float32)
    for options in ({}, {"counts": np.broadcast_to(np.int32(0), MANY)}):
        with pytest.raises(rt.ArgumentError, match=r"^prefill_attention: q .*at most"):
            rt.prefill_attention(q, k, k, **options)


@pytest.mark.parametrize("name", ("rows", "counts"))
def test_decode_of_too_many_sequences(name):
    cache = rt.KVCache(1, 64, 2, 64, format="fp32")
    q, zeros = np.empty((MANY, 0, 8, 64), np.float32), np.broadcast_to(np.int32(0), MANY)
    with pytest.raises(rt.ArgumentError, match=r"^decode_attention: q .*at most"):
        rt.decode_attention(q, cache, **{"rows": zeros, name: zeros})


def test_append_of_too_many_sequences():
    cache = rt.KVCache(1, 64, 2, 64, format="fp32")
    k, zeros = np.empty((MANY, 0, 2, 64), np.float32), np.broadcast_to(np.int32(0), MANY)
    for options in ({"rows": zeros}, {"rows": zeros, "counts": zeros}, {"counts": zeros}):
        with pytest.raises(rt.ArgumentError, match=r"^append: k "):
            cache.append(k, k, **options)
    assert cache.lengths == [0]


# ---------------------------------------------------------------- sizes past what offsets count


@pytest.mark.parametrize("n, k", ((2**31, 32), (2**62, 32), (2**63 - 1, 2), (16, 2**31), (16, 2**62)))
def test_a_weight_past_31_bits(n, k):
    empty = np.empty(0, np.uint8)
    for group in (32, k):
        with pytest.raises(rt.ArgumentError, match=r"^W4Weight: .*[NK].*2147483647"):
            rt.W4Weight(empty, empty, None, shape=(n, k), group_size=group, kind="symmetric", scale_dtype="float16")
