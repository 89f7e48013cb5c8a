# SPDX-License-Identifier: Apache-2.0
"""Copies of caches, and rows that were cut: each goes on as a cache that never was anything else."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rooftile as rt  # noqa: E402

HEADS, DIM = 2, 32


def tokens(count, batch=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, count, HEADS, DIM, generator=draw) for _ in range(3)]


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize("format", ["int4-kivi", "int4-kivi-sym", "int8-kivi-sym", "int8"])
@pytest.mark.parametrize("new", [2, 5, 16, 31])
@pytest.mark.parametrize(("length", "back"), [(40, 10), (40, 8), (64, 16), (70, 7), (97, 1), (100, 16)])
def test_new_tokens_after_a_cut_replace_the_old_ones(format, length, back, new):
    """T > 1: each query sees the new tokens before it, none of those that were taken back."""
    cut, fresh = (rt.KVCache(1, 192, HEADS, DIM, format=format) for _ in range(2))
    _, k, v = tokens(length)
    q, more_k, more_v = tokens(new, seed=1)
    cut.append(k, v)
    cut.truncate([0], [length - back])
    fresh.append(k[:, : length - back], v[:, : length - back])
    for cache in (cut, fresh):
        cache.append(more_k, more_v)
    assert torch.equal(rt.decode_attention(q, cut), rt.decode_attention(q, fresh))
    same(cut.dump(0), fresh.dump(0))
    _, k, v = tokens(33, seed=2)  # which closes the group that the cut opened
    for cache in (cut, fresh):
        cache.append(k, v)
    same(cut.dump(0), fresh.dump(0))


@pytest.mark.parametrize("format", ["int4-kivi", "int8", "fp32"])
def test_a_paged_copy_hands_out_its_own_pages(format):
    cache = rt.PagedKVCache(8, 32, HEADS, DIM, max_rows=3, format=format)
    _, k, v = tokens(40, batch=2)
    cache.append(k, v, rows=[0, 1])
    cache.reorder([0, 0, 1])  # rows 0 and 1 share two pages
    before = [cache.dump(row) for row in range(3)]
    twin = cache.to("cpu")
    assert twin.free_pages == cache.free_pages == 4 and twin.lengths == cache.lengths == [40, 40, 40]
    assert twin.nbytes_used == cache.nbytes_used
    _, k, v = tokens(30, seed=3)
    twin.append(k, v, rows=[1])  # into the shared page, which is copied, and a page of its own
    assert twin.lengths == [40, 70, 40] and cache.lengths == [40, 40, 40]
    assert cache.free_pages == 4 and twin.free_pages == 2
    for row in range(3):
        same(cache.dump(row), before[row])
    for row in (0, 2):
        same(twin.dump(row), before[row])
    plain = rt.KVCache(1, 96, HEADS, DIM, format=format)
    for count, seed in ((40, 0), (30, 3)):
        _, k, v = tokens(count, batch=2 if seed == 0 else 1, seed=seed)
        plain.append(k[:1], v[:1])
    same(twin.dump(1), plain.dump(0))
    twin.reset()
    assert twin.free_pages == 8 and cache.free_pages == 4


@pytest.mark.parametrize("format", ["int4-kivi", "int8", "fp32"])
def test_select_copies_all_that_belongs_to_a_row(format):
    cache = rt.KVCache(3, 128, HEADS, DIM, format=format)
    _, k, v = tokens(70, batch=3)
    cache.append(k, v, counts=[70, 50, 0])
    cache.truncate([0], [64])
    cache.truncate([0], [32 if format == "int4-kivi" else 40])  # a kivi row has raw tokens from 6 on
    chosen = cache.select([1, 0, 0, 2], capacity=200)
    assert chosen.capacity == 256 and chosen.lengths == [cache.lengths[row] for row in (1, 0, 0, 2)]
    for row, source in enumerate((1, 0, 0, 2)):
        same(chosen.dump(row), cache.dump(source))
    if format == "int4-kivi":
        for each, row in ((cache, 0), (chosen, 1)):
            each.append(*(x[:1, :10] for x in (k, v)), rows=[row])
            with pytest.raises(rt.ArgumentError, match="raw tokens from position 6 on"):
                each.truncate([row], [30])
    _, k, v = tokens(20, batch=4, seed=5)
    before = [cache.dump(row) for row in range(3)]
    chosen.append(k, v)
    for row in range(3):
        same(cache.dump(row), before[row])
    assert cache.select([2], capacity=0).capacity == 0


@pytest.mark.parametrize("format", ["int8", "int4-kivi", "fp32"])
def test_full_rows_are_reordered_without_their_neighbours(format):
    cache = rt.KVCache(3, 64, HEADS, DIM, format=format)
    _, k, v = tokens(64, batch=3)
    cache.append(k, v)
    before = [cache.dump(row) for row in range(3)]
    cache.reorder([0, 0, 2])
    for row, source in enumerate((0, 0, 2)):
        same(cache.dump(row), before[source])


def test_dump_gives_raw_tokens_of_the_open_group_alone():
    _, k, v = tokens(40, batch=1)
    for format, first in (("int4-kivi", 32), ("fp32", 0)):
        cache = rt.KVCache(1, 64, HEADS, DIM, format=format)
        cache.append(k, v)
        facts = cache.dump(0)
        for side, x in (("k_raw", k), ("v_raw", v)):
            assert torch.equal(torch.as_tensor(facts[side]), torch.as_tensor(x)[0, first:].to(torch.float32)), format
