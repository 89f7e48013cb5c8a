# SPDX-License-Identifier: Apache-2.0
"""Pages: who holds them, who shares them, when they are copied, what happens when there are none; and foreign pools."""

import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from kv_caches import PAGES, as_bytes, assert_same, contiguous, kv, paged, state, tensors

formats = pytest.mark.parametrize(
    "format, dtype", (("fp32", "float32"), ("int8", "float16"), ("int4-kivi", "bfloat16"))
)


def check_pages(cache):
    """The table, the lengths and the counts of users tell one story."""
    table, users = cache.block_table.numpy(), [0] * cache.num_pages
    for row, length in enumerate(cache.lengths):
        pages = -(-length // cache.page_size)
        assert (table[row, :pages] >= 0).all() and (table[row, pages:] == -1).all()
        for page in table[row, :pages]:
            users[page] += 1
    assert users == cache._page_state[0].tolist()
    assert cache.free_pages == users.count(0)


class Model:
    """What a paged cache must be equal to: for every row the list of tokens appended and not cut."""

    def __init__(self, cache, k, v):
        self.cache, self.k, self.v = cache, k, v
        self.rows = [[] for _ in range(cache.max_rows)]

    def check(self):
        check_pages(self.cache)
        for row, tokens in enumerate(self.rows):
            fresh = contiguous(
                self.cache.format, self.cache.dtype, self.cache.kv_heads, self.cache.head_dim, capacity=400
            )
            if tokens:
                fresh.append(self.k[:, tokens], self.v[:, tokens])
            assert_same(self.cache.dump(row), fresh.dump(0))


@formats
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(format, dtype, seed):
    """append, truncate, fork, reorder and reset in any order: rows never touch each other, no page is lost."""
    rng = cases.generator("history", format, seed)
    page_size = PAGES[format][seed % len(PAGES[format])]
    k, v = tensors(*kv(300, 2, 64, dtype, format), dtype)
    cache = rt.PagedKVCache(
        640 // page_size, page_size, 2, 64, max_rows=4, max_pages_per_row=256 // page_size, format=format, dtype=dtype
    )
    model = Model(cache, k, v)
    for _ in range(40):
        what, row = (
            rng.choice(["append", "append", "append", "truncate", "fork", "reorder", "reset"]),
            int(rng.integers(4)),
        )
        free, before = cache.free_pages, state(cache)
        if what == "append":
            rows = rng.permutation(4)[: rng.integers(1, 5)].tolist()
            new = [rng.integers(0, 300, rng.integers(0, 90)).tolist() for _ in rows]
            width = max(len(tokens) for tokens in new)
            index = [tokens + [0] * (width - len(tokens)) for tokens in new]
            try:
                cache.append(k[0, index], v[0, index], rows=rows, counts=[len(tokens) for tokens in new])
            except rt.ArgumentError:  # too long or out of pages: nothing but the contents of free pages may differ
                assert free == cache.free_pages
                for name in before.keys() - {"pool", "k_pool", "v_pool"}:
                    np.testing.assert_array_equal(state(cache)[name], before[name])
            else:
                for r, tokens in zip(rows, new, strict=True):
                    model.rows[r] += tokens
        elif what == "truncate":
            length = len(model.rows[row])
            length = (
                int(rng.integers(length // 32 + 1)) * 32
                if format in oracle.KIVI_FORMATS
                else int(rng.integers(length + 1))
            )
            cache.truncate([row], [length])
            del model.rows[row][length:]
        elif what == "fork":
            other = int(rng.integers(4))
            try:
                cache.fork(row, other)
            except rt.OutOfPagesError:
                assert_same(state(cache), before)
            else:
                model.rows[other] = list(model.rows[row])
        elif what == "reorder":
            index = rng.integers(0, 4, 4).tolist()
            cache.reorder(index)
            model.rows = [list(model.rows[i]) for i in index]
        else:
            cache.reset([row])
            model.rows[row] = []
        model.check()
    cache.reset()
    assert cache.free_pages == cache.num_pages


@formats
def test_a_shared_page_is_copied_when_it_would_be_written(format, dtype):
    k, v = tensors(*kv(128, 1, 64, dtype, format), dtype)
    cache = rt.PagedKVCache(8, 64, 1, 64, max_rows=2, format=format, dtype=dtype)
    cache.append(k, v)
    cache.fork(0, 1)
    assert cache.block_table[0, :2].tolist() == cache.block_table[1, :2].tolist() == [0, 1]
    first = cache.dump(0)
    cache.truncate([1], [112])  # back into the shared page
    assert cache.free_pages == 6
    cache.append(k[:, :15] * 2, v[:, :15] * 2, rows=[1])  # kivi: the open group lies in the ring alone
    written = format not in oracle.KIVI_FORMATS
    assert cache.free_pages == 6 - written
    cache.append(k[:, :1], v[:, :1], rows=[1])  # closes the group again
    assert cache.free_pages == 5 and cache.block_table[1, 1] != cache.block_table[0, 1]
    assert_same(cache.dump(0), first)
    check_pages(cache)


def test_out_of_pages():
    k = torch.ones(2, 200, 1, 64)
    cache = rt.PagedKVCache(5, 32, 1, 64, max_rows=3, format="int8")
    cache.append(k[:, :64], k[:, :64], counts=[64, 40])
    before = state(cache)
    with pytest.raises(rt.OutOfPagesError, match="row 0 needs another page of 32 tokens, all 5 are taken"):
        cache.append(k[:, :33], k[:, :33])
    assert_same(state(cache), before)
    check_pages(cache)
    cache.append(k[:, :24], k[:, :24], rows=[1, 2], counts=[24, 10])
    with pytest.raises(rt.OutOfPagesError):
        cache.fork(2, 0) if cache.free_pages else cache.append(k[:1, :1], k[:1, :1])
    cache.reset([0])
    cache.append(k[:1, :64], k[:1, :64], rows=[2], counts=[64])
    assert cache.lengths == [0, 64, 74] and cache.free_pages == 0
    with pytest.raises(rt.OutOfPagesError, match="fork: row 0"):
        cache.fork(2, 0)
    cache.fork(2, 1)  # its own pages come back first
    assert cache.lengths == [0, 74, 74]
    check_pages(cache)
    assert issubclass(rt.OutOfPagesError, rt.ArgumentError)


def test_a_refused_append_gives_its_pages_back():
    cache = rt.PagedKVCache(6, 32, 1, 64, max_rows=2, format="int8")
    k = torch.ones(2, 40, 1, 64)
    cache.append(k[:1], k[:1])
    cache.fork(0, 1)
    before = state(cache)
    with pytest.raises(rt.ArgumentTypeError, match="v must be float32"):
        cache.append(k, k.half())
    assert_same(state(cache), before)
    check_pages(cache)


def test_bytes_of_pages():
    cache = rt.PagedKVCache(6, 32, 2, 64, max_rows=2, format="int8")
    k = torch.ones(1, 40, 2, 64)
    cache.append(k, k)
    assert cache.nbytes_used == 2 * 2 * oracle.block_bytes("int8", 32, 64)
    cache.fork(0, 1)  # one page shared, one copied
    assert cache.nbytes_used == 3 * 2 * oracle.block_bytes("int8", 32, 64)
    assert cache.nbytes == 6 * 2 * oracle.block_bytes("int8", 32, 64) + 2 * 6 * 4 + 2 * 4


def test_bytes_of_open_groups():
    """int4-kivi keeps the tokens of an open group raw beside its pages: 8 of 40, 1 of 1, none of 64."""
    cache = rt.PagedKVCache(6, 32, 2, 64, max_rows=3, format="int4-kivi", dtype="float16")
    k = torch.ones(3, 64, 2, 64, dtype=torch.float16)
    cache.append(k, k, counts=[40, 1, 64])
    raw = (8 + 1) * 2 * 2 * 64 * 2  # tokens, K and V, heads, channels, bytes
    assert cache.nbytes_used == (2 + 1 + 2) * 2 * oracle.block_bytes("int4-kivi", 32, 64) + raw


# ---- an engine's pool ----


@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("pair", (False, True))
@pytest.mark.parametrize("format", oracle.ELEMENT_FORMATS)
def test_view_of_an_element_pool(format, pair, layout):
    dtype, heads, dim, page_size = oracle.ELEMENT_FORMATS[format], 3, 80, 16
    inner = (page_size, heads, dim) if layout == "NHD" else (heads, page_size, dim)
    if pair:  # K and V of different outer strides
        guards = [
            cases.Guarded((7, *inner), dtype),
            cases.Guarded((7, *inner), dtype, strides=(inner[0] * inner[1] * dim + 64, inner[1] * dim, dim, 1)),
        ]
        pool = tuple(g.tensor for g in guards)
    else:
        guards = [cases.Guarded((7, 2, *inner), dtype)]
        pool = guards[0].tensor
    table = torch.full((2, 4), 10**6, dtype=torch.int32)
    table[0, :3], table[1, :2] = torch.tensor([5, 0, 2]), torch.tensor([3, 1])
    lens = torch.zeros(2, dtype=torch.int32)
    view = rt.PagedKVCache.view(pool, table, lens, format=format, layout=layout)
    assert (view.page_size, view.kv_heads, view.head_dim, view.capacity) == (page_size, heads, dim, 64)
    k, v = kv(40, heads, dim, dtype, format, batch=2)
    view.append(*tensors(k, v, dtype), counts=[40, 17])
    assert lens.tolist() == view.lengths == [40, 17]
    for guard in guards:
        guard.check_margins("pool")
    sides = pool if pair else (pool[:, 0], pool[:, 1])
    for side, x in zip(sides, (k, v), strict=True):
        side = side if layout == "NHD" else side.transpose(1, 2)
        for row, length in ((0, 40), (1, 17)):
            for p in range(length):
                np.testing.assert_array_equal(side[table[row, p // 16], p % 16].double().numpy(), x[row, p])
        assert (as_bytes(side[[4, 6]]) == 0xFF).all()
    with pytest.raises(rt.ArgumentError, match=r"block_table\[1, 2\] must be a page in \[0, 7\), got 1000000"):
        view.append(*tensors(k, v, dtype), counts=[8, 16])
    assert lens.tolist() == [40, 17]


@pytest.mark.parametrize("format", ("int8", "int4", "int4-kivi-sym", "int4-kivi", "fp8", "int8-kivi-sym"))
def test_view_of_a_quantised_pool(format):
    heads, dim, page_size = 2, 80, 32
    block = oracle.block_bytes(format, page_size, dim)
    guard = cases.Guarded((6, heads, block), torch.uint8, strides=(4096 * 8, 4096 * 4, 1))
    table = torch.tensor([[4, 2, -5], [1, 10**9, 3]], dtype=torch.int32)
    lens = torch.zeros(2, dtype=torch.int32)
    view = rt.PagedKVCache.view(
        guard.tensor, table, lens, format=format, dtype="bfloat16", page_size=page_size, head_dim=dim
    )
    k, v = tensors(*kv(64, heads, dim, "bfloat16", format), "bfloat16")
    view.append(k, v, rows=[0])
    view.append(k[:, :30], v[:, :30], rows=[1])
    guard.check_margins("pool")
    own = contiguous(format, "bfloat16", heads, dim, rows=2)
    own.append(k, v, rows=[0])
    own.append(k[:, :30], v[:, :30], rows=[1])
    for row in range(2):
        assert_same(view.dump(row), own.dump(row))
    with pytest.raises(rt.ArgumentError, match=r"block_table\[0, 2\]"):
        view.append(k[:, :1], v[:, :1], rows=[0])
    with pytest.raises(rt.ArgumentError, match=r"block_table\[1, 1\]"):
        view.append(k, v, rows=[1])
    view.truncate([0], [32])
    view.fork(0, 1)
    assert_same(view.dump(1), view.dump(0))
    view.reset()
    assert lens.tolist() == [0, 0]


@pytest.mark.parametrize("page", [-1, 6, 10**6])  # the pool has pages 0 to 5
def test_a_view_does_not_touch_pages_that_are_none(page):
    """append and fork check the entries that they use, src's and dst's, before anything is written."""
    pool, lens = torch.zeros(6, 2, 16, 2, 8), torch.zeros(2, dtype=torch.int32)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    view = rt.PagedKVCache.view(pool, table, lens, format="fp32")
    k, v = tensors(*kv(40, 2, 8, "float32"), "float32")
    table[0, 1] = page
    with pytest.raises(rt.ArgumentError, match=rf"append: block_table\[0, 1\] must be a page in \[0, 6\), got {page}"):
        view.append(k, v, rows=[0])
    lens[0] = 20
    for call in (view.dump, view.dequantize):
        with pytest.raises(rt.ArgumentError, match=rf"^{call.__name__}: block_table\[0, 1\] .* got {page}"):
            call(0)
    lens[0] = 0
    assert not pool.any() and view.lengths == [0, 0]
    table[0, 1] = 1
    view.append(k, v, rows=[0])
    before = pool.clone()
    for row, src, dst in ((0, 0, 1), (1, 0, 1)):
        good, table[row, 1] = table[row, 1].item(), page
        with pytest.raises(rt.ArgumentError, match=rf"fork: block_table\[{row}, 1\] must be a page in \[0, 6\)"):
            view.fork(src, dst)
        table[row, 1] = good
    assert torch.equal(pool, before) and view.lengths == [40, 0]
    table[1, 2] = page
    view.truncate([0], [32])
    view.fork(0, 1)  # an entry behind the tokens is not read
    torch.testing.assert_close(view.dequantize(1)[0], k[0, :32], rtol=0, atol=0)


def test_view_keeps_its_arrays_alive():
    def make():
        lens = torch.zeros(1, dtype=torch.int32)
        return rt.PagedKVCache.view(
            torch.zeros(50, 2, 16, 2, 64), torch.arange(50, dtype=torch.int32)[None], lens, format="fp32"
        )

    view = make()
    k, v = tensors(*kv(800, 2, 64, "float32"), "float32")
    [torch.full((50, 2, 16, 2, 64), 7.0) for _ in range(3)]  # takes freed memory, if any was freed
    view.append(k, v)
    torch.testing.assert_close(view.dequantize(0)[0], k[0], rtol=0, atol=0)


@pytest.mark.parametrize("pair", [False, True])
def test_a_numpy_pool_that_has_shrunk_is_refused(pair):
    """ndarray.resize gives memory back under the halves of a pool, which keep their shape."""
    pools = [np.ones((512, *([] if pair else [2]), 64, 2, 64), np.float16) for _ in range(2 if pair else 1)]
    table, lengths = np.arange(500, 512, dtype=np.int32)[None], np.full(1, 700, np.int32)
    cache = rt.PagedKVCache.view(tuple(pools) if pair else pools[0], table, lengths, format="fp16")
    q = np.ones((1, 2, 64), np.float16)
    rt.decode_attention(q, cache)
    pools[-1].resize((1, *pools[-1].shape[1:]), refcheck=False)
    with pytest.raises(rt.ArgumentError, match=r"pool has other memory|v_pool must be"):
        rt.decode_attention(q, cache)


def test_kivi_view_needs_the_ring_of_an_open_group():
    block = oracle.block_bytes("int4-kivi", 32, 64)
    call = {"format": "int4-kivi", "page_size": 32, "head_dim": 64}
    pool, table = torch.zeros(4, 2, block, dtype=torch.uint8), torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    for length in (1, 16, 33, 80):
        with pytest.raises(rt.ArgumentError, match="ring is needed"):
            rt.PagedKVCache.view(pool, table, torch.tensor([length], dtype=torch.int32), **call)
    k, v = tensors(*kv(70, 2, 64, "float32"), "float32")
    ring = (torch.zeros(1, 2, 64, 64), torch.zeros(1, 2, 64, 64), torch.zeros(1, dtype=torch.int32))
    lens = torch.zeros(1, dtype=torch.int32)
    rt.PagedKVCache.view(pool, table, lens, ring=ring, **call).append(k[:, :40], v[:, :40])
    again = rt.PagedKVCache.view(pool, table, lens, ring=ring, **call)  # a new view, the same rows
    again.append(k[:, 40:], v[:, 40:])
    own = contiguous("int4-kivi", "float32", 2, 64)
    own.append(k, v)
    assert_same(again.dump(0), own.dump(0))
    aligned = rt.PagedKVCache.view(pool, table, torch.tensor([64], dtype=torch.int32), **call)
    with pytest.raises(rt.ArgumentError, match="position 64"):
        aligned.dequantize(0)  # its newest token's group was never in this ring
    assert aligned.dequantize(0, at=64)[0].shape == (64, 2, 64)


BAD_VIEWS = {
    "pool of another dtype": (
        {"pool": torch.zeros(4, 2, 16, 2, 64).half()},
        rt.ArgumentTypeError,
        "k_pool must be float32",
    ),
    "pool of four dimensions": ({"pool": torch.zeros(4, 16, 2, 64)}, rt.ArgumentError, "pool must have 5"),
    "three sides": ({"pool": torch.zeros(4, 3, 16, 2, 64)}, rt.ArgumentError, "pool must hold K and V"),
    "inner dimension strided": ({"pool": torch.zeros(4, 2, 16, 2, 128)[..., ::2]}, rt.ArgumentError, "neighbouring"),
    "expanded pool": ({"pool": torch.zeros(1, 2, 16, 2, 64).expand(4, -1, -1, -1, -1)}, rt.ArgumentError, "expanded"),
    "v_pool of another shape": (
        {"pool": (torch.zeros(4, 16, 2, 64), torch.zeros(3, 16, 2, 64))},
        rt.ArgumentError,
        "v_pool",
    ),
    "page of 24": ({"pool": torch.zeros(4, 2, 24, 2, 64)}, rt.ArgumentError, "page_size must be 16, 32, 64 or 128"),
    "pool is a list": ({"pool": [1, 2, 3]}, rt.ArgumentTypeError, "pool"),
    "table int64": (
        {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
        rt.ArgumentTypeError,
        "block_table must be int32",
    ),
    "table of one dimension": ({"block_table": torch.zeros(2, dtype=torch.int32)}, rt.ArgumentError, "block_table"),
    "table transposed": ({"block_table": torch.zeros(2, 2, dtype=torch.int32).T}, rt.ArgumentError, "block_table"),
    "lengths of another size": (
        {"seq_lens": torch.zeros(3, dtype=torch.int32)},
        rt.ArgumentError,
        "view: seq_lens must be",
    ),
    "lengths int64": (
        {"seq_lens": torch.zeros(2, dtype=torch.int64)},
        rt.ArgumentTypeError,
        "view: seq_lens must be int32",
    ),
    "layout": ({"layout": "DHN"}, rt.ArgumentError, "layout"),
    "ring without need": ({"ring": (1, 2, 3)}, rt.ArgumentError, "ring"),
    "ring is no tuple": (
        {
            "ring": 5,
            "format": "int4-kivi",
            "page_size": 32,
            "head_dim": 64,
            "pool": torch.zeros(4, 2, 5000, dtype=torch.uint8),
        },
        rt.ArgumentTypeError,
        "ring must be",
    ),
    "page_size missing": (
        {"format": "int8", "pool": torch.zeros(4, 2, 64, dtype=torch.uint8)},
        rt.ArgumentTypeError,
        "page_size and",
    ),
    "block of another size": (
        {"format": "int8", "pool": torch.zeros(4, 2, 64, dtype=torch.uint8), "page_size": 16, "head_dim": 64},
        rt.ArgumentError,
        "pool must be",
    ),
    "kivi page of 16": (
        {"format": "int4-kivi", "pool": torch.zeros(4, 2, 64, dtype=torch.uint8), "page_size": 16, "head_dim": 64},
        rt.ArgumentError,
        "page_size must be 32",
    ),
    "misaligned pool": (
        {
            "format": "int8",
            "page_size": 16,
            "head_dim": 64,
            "pool": torch.zeros(8 + 4 * 2112, dtype=torch.uint8)[8:].view(4, 1, 2112),
        },
        rt.ArgumentError,
        "16 bytes",
    ),
}


@pytest.mark.parametrize("fault", BAD_VIEWS)
def test_bad_view(fault, count_bad_input):
    changes, error, message = BAD_VIEWS[fault]
    call = {
        "pool": torch.zeros(4, 2, 16, 2, 64), "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32), "format": "fp32",
    } | changes  # fmt: skip
    with pytest.raises(error, match=message):
        rt.PagedKVCache.view(call.pop("pool"), call.pop("block_table"), call.pop("seq_lens"), **call)
    count_bad_input(1)


def test_corrupt_lengths_are_refused():
    lens = torch.zeros(1, dtype=torch.int32)
    view = rt.PagedKVCache.view(torch.zeros(4, 2, 16, 2, 64), torch.zeros(1, 2, dtype=torch.int32), lens, format="fp32")
    for bad in (-1, 33, 2**31 - 1):
        lens[0] = bad
        with pytest.raises(rt.ArgumentError, match=r"lengths\[0\] must lie in \[0, 32\]"):
            view.append(torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64))


def test_lengths_and_pages_that_others_wrote_are_refused():
    k = torch.ones(1, 1, 1, 32)

    def damaged(length=1, page=0):
        cache = rt.PagedKVCache(4, 32, 1, 32, max_rows=2, format="fp32")
        cache.append(k, k, rows=[0])
        cache.seq_lens[0], cache.block_table[0, 0] = length, page
        return cache

    for length in (-1, -(2**31), 2**31 - 1):
        with pytest.raises(rt.ArgumentError, match=r"append: cache lengths\[0\] must lie in \[0, 128\]"):
            damaged(length).append(k, k)
    for op, call in (
        ("append", lambda cache: cache.append(k, k)),
        ("reset", lambda cache: cache.reset([0])),
        ("reset", lambda cache: cache.reset()),
        ("truncate", lambda cache: cache.truncate([0], [0])),
        ("fork", lambda cache: cache.fork(0, 1)),
        ("fork", lambda cache: cache.fork(1, 0)),
        ("reorder", lambda cache: cache.reorder([1, 0])),
    ):
        for page in (-1, 4, 1000, 2**31 - 1):
            cache = damaged(page=page)
            with pytest.raises(
                rt.ArgumentError, match=rf"{op}: block_table\[0, 0\] must be a page in \[0, 4\), got {page}"
            ):
                call(cache)
            assert cache.lengths == [1, 0] and cache.block_table[:, 0].tolist() == [page, -1] and cache.free_pages == 3


def test_a_page_that_one_call_would_write_twice_is_refused():
    table = torch.tensor([[0, 1], [0, 2], [3, 3]], dtype=torch.int32)
    lengths = torch.zeros(3, dtype=torch.int32)
    view = rt.PagedKVCache.view(torch.zeros(6, 2, 32, 2, 64), table, lengths, format="fp32")
    k = torch.randn(2, 3, 2, 64)
    says = r"append: block_table\[1, 0\] must be a page that this call writes for no other tokens, got 0, which "
    with pytest.raises(rt.ArgumentError, match=says + r"block_table\[0, 0\] is too"):
        view.append(k, k, rows=[0, 1])
    with pytest.raises(
        rt.ArgumentError, match=r"append: block_table\[2, 1\] must be .* got 3, which .*\[2, 0\] is too"
    ):
        view.append(*(torch.randn(1, 33, 2, 64),) * 2, rows=[2])
    assert lengths.tolist() == [0, 0, 0] and not view._sources[0].any()
    view.append(k, k, rows=[0, 1], counts=[3, 0])  # a padding row writes nothing
    view.append(*(torch.randn(1, 29, 2, 64),) * 2, rows=[0])
    lengths[1] = 32  # a prefix that both rows have
    view.append(k, k, rows=[0, 1])
    assert lengths.tolist() == [35, 35, 0]


def test_an_open_group_lies_in_no_page():
    """Two rows of a kivi cache share a page until one of them closes a group in it."""
    block = rt._C.kv_block_bytes("int4-kivi", 64, 64)
    table = torch.zeros(2, 1, dtype=torch.int32)
    lengths = torch.full((2,), 32, dtype=torch.int32)
    view = rt.PagedKVCache.view(
        torch.zeros(1, 2, block, dtype=torch.uint8), table, lengths, format="int4-kivi", page_size=64, head_dim=64
    )
    k = torch.randn(2, 31, 2, 64)
    view.append(k, k)
    with pytest.raises(rt.ArgumentError, match=r"append: block_table\[1, 0\] must be a page that this call writes"):
        view.append(k[:, :1], k[:, :1])
    assert lengths.tolist() == [63, 63]


def test_only_a_cache_is_a_cache():
    from rooftile import _C

    k = torch.zeros(1, 1, 1, 32)
    for wrong in (None, 3, torch.zeros(3), "cache"):
        with pytest.raises(rt.ArgumentTypeError, match="append: cache must be a rooftile KVCache"):
            _C.kv_append(wrong, k, k, None, None, None, None)


def test_page_size_of_the_kivi_formats():
    with pytest.raises(rt.ArgumentError, match="page_size must be 32, 64 or 128, got 16"):
        paged("int4-kivi", "float32", 1, 64, page_size=16)


def test_a_table_that_no_memory_holds():
    with pytest.raises(rt.OutOfMemoryError, match="PagedKVCache: no memory on cpu for 1048576 rows"):
        rt.PagedKVCache(1, 16, 1, 64, max_rows=2**20, max_pages_per_row=2**27 - 1, format="fp32")
