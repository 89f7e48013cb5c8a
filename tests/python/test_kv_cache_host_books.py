# SPDX-License-Identifier: Apache-2.0
"""What the host does for a cache on a GPU, tried on memory of its own: copies of table and lengths that run ahead, what
is sent to the device, rows moved by gathers."""

import contextlib
import itertools
import threading
import time

import cases
import pytest
import rooftile as rt
import torch
from interrupts import Handler, interrupt
from kv_caches import PAGES, assert_same, contiguous, kv, paged, tensors
from rooftile import kv_cache, kv_pages

FAR = "cpu:0"  # where torch makes host tensors, and no name of the host for rooftile
kinds = pytest.mark.parametrize("format, dtype", (("fp16", "float16"), ("int8", "float16"), ("int4-kivi", "bfloat16")))


@pytest.fixture
def far(monkeypatch):
    """Makes a cache take the host for a GPU."""
    for module in (kv_cache, kv_pages):
        monkeypatch.setattr(module, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def move(cache):
        cache.device = FAR
        if isinstance(cache, rt.PagedKVCache):
            users, copies = cache._page_state[0], (cache.block_table.clone(), cache.seq_lens.clone())
            cache._page_state = (users, *copies)
            cache._pages = kv_pages.Pages(cache._flat(), cache._handle, *cache._page_state)
            cache._pages.device = FAR
        return cache

    return move


def check_books(cache):
    users, table, lengths = cache._page_state
    assert torch.equal(cache.block_table, table) and torch.equal(cache.seq_lens, lengths)
    assert [(row >= 0).sum().item() for row in table] == [-(-n // cache.page_size) for n in cache.lengths]
    assert users.tolist() == torch.bincount(table[table >= 0], minlength=cache.num_pages).tolist()


@kinds
@pytest.mark.parametrize("make", (contiguous, paged))
@pytest.mark.parametrize("seed", range(3))
def test_histories(format, dtype, make, seed, far):
    rng = cases.generator("far", format, seed)
    k, v = tensors(*kv(60, 2, 64, dtype, format, batch=4), dtype)
    options = {"rows": 4, "capacity": 256} | ({"page_size": PAGES[format][0]} if make is paged else {})
    near, other = (make(format, dtype, 2, 64, **options) for _ in range(2))
    other = far(other)
    for _ in range(40):
        what, row = str(rng.choice(["append", "append", "truncate", "fork", "reorder", "reset"])), int(rng.integers(4))
        if what == "append":
            rows = rng.permutation(4)[: rng.integers(1, 5)].tolist()
            counts = rng.integers(0, 61, len(rows)).tolist()
            call = lambda c: c.append(k[: len(rows)], v[: len(rows)], rows=rows, counts=counts)  # noqa: B023, E731
        elif what == "truncate":
            length = near.lengths[row] // 32 * 32
            call = lambda c: c.truncate([row], [length])  # noqa: B023, E731
        elif what == "fork":
            target = int(rng.integers(4))
            call = lambda c: c.fork(row, target)  # noqa: B023, E731
        elif what == "reorder":
            index = rng.integers(0, 4, 4).tolist()
            call = lambda c: c.reorder(index)  # noqa: B023, E731
        else:
            call = lambda c: c.reset([row])  # noqa: B023, E731
        outcomes = []
        for cache in (near, other):
            try:
                outcomes.append(call(cache))
            except rt.ArgumentError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert near.lengths == other.lengths
        for r in range(4):
            assert_same(near.dump(r), other.to("cpu").dump(r))
        if make is paged:
            check_books(other)
            assert_same({"table": near.block_table}, {"table": other.block_table})


def test_a_far_row_moves_by_gathers(far):
    """Every index of three rows, cycles and repeats among them; what is behind a row's tokens may be anything."""
    k, v = tensors(*kv(90, 2, 64, "float16", batch=3), "float16")
    for index in ([a, b, c] for a in range(3) for b in range(3) for c in range(3)):
        near = contiguous("int4-kivi", "float16", 2, 64, rows=3)
        near.append(k, v, counts=[90, 0, 33])
        other = far(near.select())
        for cache in (near, other):
            cache.reorder(index)
        assert near.lengths == other.lengths
        for row in range(3):
            assert_same(near.dump(row), other.to("cpu").dump(row))


def test_who_raises_a_fault_does_not_matter(far):
    """The word in pinned memory says that somebody raised: rows are shorter than the host counted."""
    k, v = tensors(*kv(20, 2, 64, "float16"), "float16")
    cache = far(paged("fp16", "float16", 2, 64, rows=2, capacity=64, page_size=16))
    word = torch.zeros(1, dtype=torch.int32)
    cache._pages._fault = memoryview(word.numpy())
    cache.append(k, v, rows=[0])
    cache.seq_lens[0] = 10  # as if the device had left the row alone
    word[0] = -1
    cache.fork(0, 1)
    check_books(cache)
    assert cache.lengths == [10, 10] and cache.block_table[0, 0] != cache.block_table[1, 0]
    assert word[0] == -1  # fork need not, an append clears it
    with pytest.raises(rt.ArgumentTypeError, match="v must be float16"):
        cache.append(k[:, :7], v[:, :7].float(), rows=[1])
    check_books(cache)
    assert word[0] == -1  # a graph would have lost what was settled
    cache.append(k[:, :7], v[:, :7], rows=[1])
    check_books(cache)
    assert word[0] == 0 and cache.lengths == [10, 17]


@pytest.mark.parametrize("what", ["append", "append_refused", "truncate", "fork", "reorder", "reset"])
def test_a_change_that_is_cut(what, far):
    """By a signal handler: the device's table and lengths stay those of the host, and every page somebody's."""
    k, v = tensors(*kv(20, 1, 32, "float16", "cut", batch=2), "float16")
    change = {
        "append": lambda c: c.append(k, v, rows=[0, 1]),  # row 0 writes into a page that it shares
        "append_refused": lambda c: c.append(k, v, rows=[1, 1]),
        "truncate": lambda c: c.truncate([1, 0], [32, 0]),
        "fork": lambda c: c.fork(1, 0),
        "reorder": lambda c: c.reorder([1, 0, 0]),
        "reset": lambda c: c.reset([0]),
    }[what]

    def run(cache):
        with contextlib.suppress(rt.ArgumentError):
            change(cache)

    def rows(cache):
        near = cache.to("cpu")
        return [{name: torch.as_tensor(x).tolist() for name, x in near.dump(row).items()} for row in range(3)]

    def begun():
        cache = rt.PagedKVCache(6, 32, 1, 32, max_rows=3, max_pages_per_row=2, format="int8", dtype="float16")
        cache.append(k, v, rows=[0, 1])
        cache.append(k[:1], v[:1], rows=[1])
        cache.fork(0, 2)
        cache.reorder([0, 1, 0])
        return far(cache)

    cache = begun()
    before, _ = rows(cache), run(cache)
    after = rows(cache)
    for at in itertools.count(1):
        cache = begun()
        if not Handler(interrupt, at).run(lambda: run(cache)):  # noqa: B023
            break
        check_books(cache)
        assert rows(cache) in (before, after)
    assert at > 50


@pytest.mark.parametrize("what", ["append", "truncate", "fork"])
def test_a_table_that_the_device_does_not_take(what, far):
    """An error of torch in the middle of a change: all is as it was."""
    k, v = tensors(*kv(40, 1, 32, "float16", "table"), "float16")
    cache = rt.PagedKVCache(6, 32, 1, 32, max_rows=2, format="int8", dtype="float16")
    cache.append(k, v, rows=[0])
    cache = far(cache)
    put, puts = cache.block_table.index_put_, []

    def refused_once(*arguments):
        puts.append(arguments)
        if len(puts) == 1:
            raise RuntimeError("no memory")
        return put(*arguments)

    cache.block_table.index_put_ = refused_once
    change = {
        "append": lambda: cache.append(k, v, rows=[1]),
        "truncate": lambda: cache.truncate([0], [3]),
        "fork": lambda: cache.fork(0, 1),
    }[what]
    with pytest.raises(RuntimeError, match="no memory"):
        change()
    assert cache.lengths == [40, 0] and len(puts) == 2
    check_books(cache)
    change()
    check_books(cache)


@kinds
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_a_graph_with_copies(format, dtype, backend, far, monkeypatch):
    """Rows 0 and 1 share pages; appends in a graph pass page ends, and one finds no page and changes nothing."""
    k, v = tensors(*kv(60, 2, 64, dtype, format, batch=3), dtype)
    options = {"max_rows": 3, "max_pages_per_row": 4, "format": format, "dtype": dtype}
    near, other = (rt.PagedKVCache(7, 32, 2, 64, **options) for _ in range(2))
    for cache in (near, other):
        cache.append(k[:1, :50], v[:1, :50])
        cache.fork(0, 1)
        cache.truncate([1], [32])
    near_pages = near._pages
    monkeypatch.setattr(kv_pages, "device_of", lambda array: FAR)
    other = far(other)
    torch._dynamo.reset()
    append = torch.compile(
        lambda k, v, rows, counts: other.append(k, v, rows=rows, counts=counts), fullgraph=True, backend=backend
    )
    refused = 0
    for step in range(12):
        rows, counts = (torch.tensor(x, dtype=torch.int32) for x in ([1, 2, 0], [9 + step, 5, step % 2]))
        outcomes = []
        for call in (lambda *x: near.append(*x[:2], rows=x[2], counts=x[3]), append):
            try:
                outcomes.append(call(k, v, rows, counts))
            except rt.ArgumentError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        refused += outcomes[0] is not None
        check_books(other)
        assert torch.equal(near.block_table, other.block_table) and near._pages is near_pages
        for row in range(3):
            assert_same(near.dump(row), other.to("cpu").dump(row))
    assert 0 < refused < 12


def test_other_threads_run_while_rows_move():
    """The interpreter's lock is free: on a GPU these calls wait for it, and here they copy for a while."""
    cache = rt.KVCache(2, 32768, 4, 128, format="fp32")
    k = torch.zeros(2, 32768, 4, 128)
    cache.append(k, k)
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.0005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for change in (lambda: cache.reorder([1, 0]), lambda: cache.fork(0, 1)):
            begin = time.perf_counter()
            change()
            end = time.perf_counter()
            tenth = (end - begin) / 10
            assert any(begin + tenth < at < end - tenth for at in ticks)
    finally:
        done.set()
        thread.join()
