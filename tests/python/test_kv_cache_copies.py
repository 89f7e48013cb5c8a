# SPDX-License-Identifier: Apache-2.0
"""Copies of caches by pickle and by copy.deepcopy: the same bytes and pages, in memory of their own."""

import copy
import pickle

import cases
import numpy as np
import pytest
import rooftile as rt
import torch
from kv_caches import KINDS, contiguous, kv, paged, state, tensors
from rooftile.kv_sliding import SlidingKVCache

WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}
HEADS, DIM = 2, 24


def filled(make, format, dtype, device="cpu"):
    cache = make(format, dtype, HEADS, DIM, rows=3, device=device)
    k, v = tensors(*kv(70, HEADS, DIM, dtype, "copies", batch=2), dtype, device)
    cache.append(k, v, rows=[0, 2], counts=[70, 33])
    return cache, k, v


def assert_twins(cache, twin, k, v):
    """The same cache, and changes of one do not reach the other."""
    assert type(twin) is type(cache) and repr(twin) == repr(cache) and twin.lengths == cache.lengths
    before = state(cache)
    for name, bytes in state(twin).items():
        np.testing.assert_array_equal(bytes, before[name], err_msg=name)
    q = k[:, -1].repeat_interleave(2, 1)
    assert torch.equal(rt.decode_attention(q, twin, rows=[0, 2]), rt.decode_attention(q, cache, rows=[0, 2]))
    twin.append(k[:, :40], v[:, :40], rows=[1, 0])
    twin.truncate([2], [32])
    for name, bytes in state(cache).items():
        np.testing.assert_array_equal(bytes, before[name], err_msg=name)
    cache.append(k[:, :40], v[:, :40], rows=[1, 0])
    cache.truncate([2], [32])
    for name, bytes in state(twin).items():
        np.testing.assert_array_equal(bytes, state(cache)[name], err_msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format, dtype", KINDS)
@pytest.mark.parametrize("make", [contiguous, paged])
def test_a_copy_is_the_cache_again(way, format, dtype, make):
    cache, k, v = filled(make, format, dtype)
    assert_twins(cache, WAYS[way](cache), k, v)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", cases.devices())
def test_shared_pages_stay_shared(way, device):
    cache, k, v = filled(paged, "int4-kivi", "float16", device)
    cache.fork(0, 1)
    cache.reorder([2, 1, 1])
    twin = WAYS[way](cache)
    assert twin.free_pages == cache.free_pages and twin.device == cache.device
    assert torch.equal(twin.block_table, cache.block_table)
    for c in (cache, twin):  # row 1 takes copies of the pages that it shares with row 2
        c.append(k[:1], v[:1], rows=[1])
        c.reset([0])
    assert twin.free_pages == cache.free_pages and twin.lengths == cache.lengths
    for name, bytes in state(twin).items():
        np.testing.assert_array_equal(bytes, state(cache)[name], err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_models_caches(way):
    model = rt.ModelKVCache(2, 2, 64, HEADS, DIM, format={"default": "int4-kivi", 0: "bf16"}, dtype="bfloat16")
    k, v = tensors(*kv(40, HEADS, DIM, "bfloat16", "model", batch=2), "bfloat16")
    for layer in model:
        layer.append(k, v)
    twin = WAYS[way](model)
    model.reset()
    assert twin.lengths == [40, 40] and [layer.format for layer in twin] == ["bf16", "int4-kivi"]
    q = k[:, -1].repeat_interleave(2, 1)
    fresh = rt.KVCache(2, 64, HEADS, DIM, format="int4-kivi", dtype="bfloat16")
    fresh.append(k, v)
    assert torch.equal(rt.decode_attention(q, twin[1]), rt.decode_attention(q, fresh))


@pytest.mark.parametrize("way", WAYS)
def test_a_view_says_why_not(way):
    cache, *_ = filled(paged, "int8", "float16")
    view = rt.PagedKVCache.view(
        cache._arrays["pool"],
        cache.block_table,
        cache.seq_lens,
        format="int8",
        dtype="float16",
        page_size=32,
        head_dim=DIM,
    )
    with pytest.raises(rt.NotSupportedError, match="its pool belongs to whoever made it"):
        WAYS[way](view)
    assert view.to("cpu").lengths == cache.lengths and copy.copy(view).lengths == cache.lengths


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format, dtype", KINDS)
def test_a_sliding_cache(way, format, dtype):
    """Its window, its ring of pages and what was taken back; the copy slides on in memory of its own."""
    k, v = tensors(*kv(500, HEADS, DIM, dtype, "sliding", batch=2), dtype)
    cache = SlidingKVCache(64, contiguous(format, dtype, HEADS, DIM, rows=2, capacity=64))
    cache.append(k[:, :400], v[:, :400], longest=400)
    cache.truncate([1], [384])
    twin = WAYS[way](cache)

    def attended(cache):
        return rt.decode_attention(k[:, 7].repeat_interleave(2, 1), cache.view, window=64)

    expected = attended(cache)
    for each in (cache, twin):
        assert (each.window, each.beyond, each.lengths) == (64, 16, [400, 384])
    assert twin.nbytes == cache.nbytes and torch.equal(attended(twin), expected)
    twin.append(k[:, 400:], v[:, 400:], longest=500)
    assert cache.lengths == [400, 384] and torch.equal(attended(cache), expected)
    cache.append(k[:, 400:], v[:, 400:], longest=500)
    assert torch.equal(attended(cache), attended(twin)) and twin.lengths == [500, 484]
    with pytest.raises(rt.ArgumentError, match="takes back 64 at most"):
        twin.truncate([0], [435])


def test_a_pickle_of_numpy_memory(monkeypatch):
    """What was made without torch is read with it, and the other way round."""
    from rooftile import kv_cache

    def numpy_zeros(shape, dtype, device="cpu"):
        return np.zeros(shape, kv_cache.numpy_dtype(dtype))

    with monkeypatch.context() as patched:
        patched.setattr(kv_cache, "zeros", numpy_zeros)
        cache, *_ = filled(contiguous, "bf16", "bfloat16")
        assert isinstance(cache.seq_lens, np.ndarray)
        data = pickle.dumps(cache)
        again = pickle.loads(data)
        assert isinstance(again.seq_lens, np.ndarray)
    with_torch = pickle.loads(data)
    assert isinstance(with_torch.seq_lens, torch.Tensor)
    for name, bytes in state(cache).items():
        np.testing.assert_array_equal(bytes, state(again)[name], err_msg=name)
        np.testing.assert_array_equal(bytes, state(with_torch)[name], err_msg=name)
