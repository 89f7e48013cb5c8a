# SPDX-License-Identifier: Apache-2.0
"""Calls from several threads: on one cache as if one after another, on different rows with the bits of any order."""

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading

import cases
import numpy as np
import pytest
import rooftile as rt
import torch
from kv_caches import contiguous, kv, paged, row_of, tensors
from rooftile.kv_sliding import SlidingKVCache

HEADS, DIM, THREADS = 2, 64, 8


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    """And a deadlock ends the run, with every thread's stack."""
    before, cores = sys.getswitchinterval(), torch.get_num_threads()
    torch.set_num_threads(1)  # of the caller's: new threads begin with as many
    sys.setswitchinterval(1e-5)
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(before)
    torch.set_num_threads(cores)


def at_once(*bodies):
    """Runs the bodies on a thread each, which begin together; the first error is raised."""
    start, errors = threading.Barrier(len(bodies)), []

    def run(body):
        start.wait()
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def tokens(count, *key, dtype="float32", device="cpu"):
    return tensors(*kv(count, HEADS, DIM, dtype, "threads", *key), dtype, device)


def piecewise(count, *sizes):
    at = 0
    while at < count:
        for size in sizes:
            yield slice(at, min(at + size, count))
            at = min(at + size, count)


def assert_rows(cache, expected, rows):
    for row in rows:
        ours, theirs = row_of(cache, row), row_of(expected, row)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=f"row {row} {name}")


def pages_held(cache):
    table = cache.block_table.cpu()
    return table[table >= 0].tolist()


# ---------------------------------------------------------------- appends


@pytest.mark.parametrize("device", cases.devices())
@pytest.mark.parametrize("format, dtype", [("int8", "float16"), ("int4-kivi", "float16")])
@pytest.mark.parametrize("make", [contiguous, paged])
def test_rows_of_their_own(make, format, dtype, device):
    """Eight threads append to a row each, and read it: the bytes of one after another; no page goes to two rows."""
    k, v = zip(*(tokens(96, row, dtype=dtype, device=device) for row in range(THREADS)), strict=True)
    alone = make(format, dtype, HEADS, DIM, rows=THREADS, capacity=128, device=device)
    for row in range(THREADS):
        for piece in piecewise(96, 5, 1, 17):
            alone.append(k[row][:, piece], v[row][:, piece], rows=[row])
    for _ in range(4):
        cache = make(format, dtype, HEADS, DIM, rows=THREADS, capacity=128, device=device)

        def fill(row, cache=cache):
            q = k[row][:, 0].repeat_interleave(2, 1)
            for i, piece in enumerate(piecewise(96, 5, 1, 17)):
                cache.append(k[row][:, piece], v[row][:, piece], rows=[row])
                if i % 4 == row % 4:
                    rt.decode_attention(q, cache, rows=[row])

        at_once(*(lambda row=row: fill(row) for row in range(THREADS)))
        assert cache.lengths == [96] * THREADS
        assert_rows(cache, alone, range(THREADS))
        if make is paged:
            held = pages_held(cache)
            assert len(set(held)) == len(held) == THREADS * 3 and cache.free_pages == cache.num_pages - len(held)


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("format", ["fp32", "int4-kivi"])
def test_one_row_that_gets_full(make, format):
    """Two threads append to one row: what does not fit is refused, and the length is what was stored."""
    k, v = tokens(3)
    for _ in range(20):
        cache = make(format, "float32", HEADS, DIM, capacity=64)
        counts = [0, 0, 0, 0]

        def fill(i, cache=cache, counts=counts):
            for _ in range(20):
                try:
                    cache.append(k, v)
                    counts[i] += 1
                except rt.ArgumentError:
                    break

        at_once(*(lambda i=i: fill(i) for i in range(4)))
        assert sum(counts) == 21 and cache.lengths == [63]
        facts = cache.dump(0)
        assert facts["length"] == 63


def test_rope_append_is_an_append():
    cos = sin = torch.ones(64, DIM // 2)
    k, v = tokens(1)
    cache = paged("int8", "float32", HEADS, DIM, rows=4, capacity=64)

    def fill(row):
        for position in range(40):
            rt.rope_append(k, k, v, cos, sin, torch.full((1, 1), position), cache, rows=[row])

    at_once(*(lambda row=row: fill(row) for row in range(4)))
    assert cache.lengths == [40] * 4 and len(set(pages_held(cache))) == 8


# ---------------------------------------------------------------- everything at once


@pytest.mark.parametrize("format", ["int8", "int4-kivi"])
def test_pages_under_every_change(format):
    """Appends, forks, truncations, resets and reorders at once: every page is counted as often as rows hold it."""
    cache = paged(format, "float32", HEADS, DIM, rows=6, capacity=128)
    k, v = tokens(40)

    def appends():
        for i in range(60):
            if cache.lengths[i % 6] <= 80:
                try:
                    cache.append(k, v, rows=[i % 6])
                except rt.ArgumentError:  # no page was left, or another thread filled the row
                    pass

    def cuts():
        for i in range(60):
            cache.reset([i % 6]) if i % 3 else cache.truncate([i % 6], [0])

    def forks():
        for i in range(60):
            try:
                cache.fork(i % 6, (i + 1) % 6)
            except rt.OutOfPagesError:
                pass

    def reorders():
        for i in range(60):
            cache.reorder(list(np.roll(range(6), i % 3)))

    def copies():
        for _ in range(10):
            twin = pickle.loads(pickle.dumps(cache))
            table, users = twin.block_table, twin._page_state[0]
            assert users.tolist() == torch.bincount(table[table >= 0], minlength=twin.num_pages).tolist()
            assert [-(-n // 32) for n in twin.lengths] == (table >= 0).sum(1).tolist()

    at_once(appends, appends, cuts, forks, reorders, copies)
    table, users = cache.block_table, cache._page_state[0]
    assert users.tolist() == torch.bincount(table[table >= 0], minlength=cache.num_pages).tolist()
    assert [-(-n // 32) for n in cache.lengths] == (table >= 0).sum(1).tolist()


def test_readers_see_whole_calls():
    """Both rows of the cache always hold the same tokens: a reader that sees one row longer sees half an append."""
    cache = contiguous("int4-kivi", "float32", HEADS, DIM, rows=2, capacity=192)
    k, v = tensors(*kv(4, HEADS, DIM, "float32", "whole", batch=1), "float32")
    k, v = k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)
    q = torch.ones(2, HEADS, DIM)
    done = threading.Event()

    def write():
        for _ in range(40):
            cache.append(k, v)
        done.set()

    def read():
        while not done.is_set():
            first, second = cache.lengths
            assert first == second
            out = rt.decode_attention(q, cache)
            assert torch.equal(out[0], out[1])
            keys, _ = cache.dequantize()
            assert torch.equal(keys[0], keys[1])

    at_once(write, read, read)
    assert cache.lengths == [160, 160]


def test_views_on_one_pool_share_its_lock():
    """Two views whose rows are in the same pages: a copy of a row and an append that overwrites it never mix."""
    owner = contiguous("int8", "float32", HEADS, DIM, rows=2, capacity=64)
    pool, table = owner._arrays["pool"], torch.tensor([[0], [1]], dtype=torch.int32)
    options = {"format": "int8", "dtype": "float32", "page_size": 64, "head_dim": DIM}
    lengths = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    writer, reader = (rt.PagedKVCache.view(pool, table, n, **options) for n in lengths)
    values = [tuple(torch.full((1, 64, HEADS, DIM), float(n)) for _ in range(2)) for n in (1, 2)]
    writer.append(*values[0], rows=[0])
    reader.append(*values[0], rows=[0])
    done = threading.Event()

    def write():
        for i in range(200):
            with writer._handle.exclusive("test"):  # a change of two calls
                writer.reset([0])
                writer.append(*values[i % 2], rows=[0])
        done.set()

    def read():
        while not done.is_set():
            reader.fork(0, 1)
            with reader._handle.exclusive("test"):
                keys, _ = reader.dequantize(0)
            assert keys.unique().numel() == 1, keys.unique()

    at_once(write, read, read)


def test_a_view_that_leaves_a_pool_leaves_its_lock_to_the_others():
    """The first of three views is given other memory; the third one, made then, waits for the second."""
    options = {"format": "int8", "dtype": "float32", "page_size": 32, "head_dim": DIM}
    pool = torch.zeros(4, HEADS, rt._C.kv_block_bytes("int8", 32, DIM), dtype=torch.uint8)
    table = torch.zeros(1, 4, dtype=torch.int32)

    def view(tensor):
        return rt.PagedKVCache.view(tensor, table, torch.zeros(1, dtype=torch.int32), **options)

    leaving, staying = pool[:], pool[:]
    first, second = view(leaving), view(staying)
    leaving.data = torch.zeros_like(pool)
    first.reset()
    third, ended = view(staying), threading.Event()
    other = threading.Thread(target=lambda: (third.reset(), ended.set()))
    with second._handle.exclusive("test"):
        other.start()
        assert not ended.wait(0.2)
    assert ended.wait(10)
    other.join()


def waits(second, first):
    """Whether a call on the second cache waits for whoever holds the first one."""
    ended = threading.Event()
    other = threading.Thread(target=lambda: (second.lengths, ended.set()))
    with first._handle.exclusive("test"):
        other.start()
        waited = not ended.wait(0.2)
    other.join()
    return waited


def elements(pool, lengths=None):
    """A view on a pool of float32, [pages, 2, 16, HEADS, DIM], or on a pair without the dim of 2."""
    lengths = np.zeros(1, np.int32) if lengths is None else lengths
    table = np.arange(2, dtype=np.int32)[None]
    if isinstance(pool[0], torch.Tensor):
        table, lengths = torch.from_numpy(table), torch.from_numpy(lengths)
    return rt.PagedKVCache.view(pool, table, lengths, format="fp32")


def wrappings_of_one_address():
    whole = np.zeros((5, 2, 16, HEADS, DIM), np.float32)
    page = whole[0].nbytes
    bytes_of = whole.data.cast("B")
    apart = np.frombuffer(bytes_of, np.float32, offset=page).reshape(4, *whole.shape[1:])
    last_first = np.frombuffer(bytes_of, np.float32).reshape(whole.shape)[::-1]
    tensor = torch.from_numpy(whole)
    return {
        "array and buffer": (whole[1:], apart),
        "array and buffer from its end": (whole[:1], last_first[2:]),
        "tensors": (tensor[1:], torch.from_numpy(whole[1:])),
        "tensor and array": (torch.from_numpy(apart)[1:], whole[3:]),
        "other pages of an array": (whole[:2], whole[3:]),
        "pairs": ((whole[:, 0], np.zeros_like(whole[:, 0])), (np.zeros_like(whole[:, 0]), whole[:, 0])),
    }


@pytest.mark.parametrize("wrapping", wrappings_of_one_address())
def test_views_on_common_memory_share_a_lock(wrapping):
    """Whatever it is wrapped in, and whether it is K's pool or V's."""
    first, second = map(elements, wrappings_of_one_address()[wrapping])
    assert waits(second, first) and waits(first, second)
    assert not waits(elements(np.zeros((4, 2, 16, HEADS, DIM), np.float32)), first)


def test_views_on_common_lengths_share_a_lock():
    lengths = np.zeros(3, np.int32)
    first, second, third = (
        elements(np.zeros((4, 2, 16, HEADS, DIM), np.float32), lengths[i : i + 1]) for i in (0, 0, 1)
    )
    assert waits(second, first) and not waits(third, first)


def test_a_view_over_memory_of_two_takes_both_locks():
    """Before it was made the two had nothing in common, and still do not wait for each other."""
    whole = np.zeros((6, 2, 16, HEADS, DIM), np.float32)
    halves = [np.frombuffer(whole[i:].data.cast("B"), np.float32, whole[:3].size) for i in (0, 3)]
    first, second = (elements(half.reshape(3, *whole.shape[1:])) for half in halves)
    both = elements(whole)
    assert not waits(second, first)
    for one in (first, second):
        assert waits(both, one) and waits(one, both)
    k = np.ones((1, 1, HEADS, DIM), np.float32)

    def use(view):
        for _ in range(200):
            with view._handle.exclusive("test"):
                view.append(k, k)
                view.dequantize(0)
                view.reset()

    at_once(*(lambda v=v: use(v) for v in (first, both, second, both)))
    del both
    assert not waits(second, first)


def test_a_pool_that_moves_onto_anothers_memory_shares_its_lock():
    pools = [torch.zeros(4, HEADS, rt._C.kv_block_bytes("int8", 32, DIM), dtype=torch.uint8) for _ in range(2)]
    table = torch.zeros(1, 4, dtype=torch.int32)
    options = {"format": "int8", "dtype": "float32", "page_size": 32, "head_dim": DIM}
    views = [rt.PagedKVCache.view(p, table, torch.zeros(1, dtype=torch.int32), **options) for p in pools]
    assert not waits(*views)
    pools[0].data = torch.from_numpy(pools[1].numpy()[1:])
    views[0].reset()
    assert waits(*views)


def test_a_models_layers_change_together():
    model = rt.ModelKVCache(3, 2, 64, 1, 32, format="int8", dtype="float32")
    for n, layer in enumerate(model):
        for row in range(2):
            k = torch.full((1, 8 * (row + 1), 1, 32), float(row + 1))
            layer.append(k, k + n, rows=[row])

    def reorder():
        for _ in range(100):
            model.reorder([1, 0])

    at_once(reorder, reorder, reorder)
    assert [layer.lengths for layer in model] == [[8, 16]] * 3
    at_once(reorder, reorder, lambda: model.fork(0, 1))
    assert len({tuple(layer.lengths) for layer in model}) == 1


@pytest.mark.parametrize("format", ["fp32", "int4-kivi"])
def test_a_sliding_cache(format):
    """Appends that lay new tables, cuts, reorders and copies at once: readers see whole calls."""
    window = 64
    cache = SlidingKVCache(window, contiguous(format, "float32", HEADS, DIM, rows=2, capacity=64))
    k, v = tokens(16)
    k, v, q = k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), torch.ones(2, HEADS, DIM)
    done = threading.Event()

    def appends():
        for i in range(40):
            cache.append(k, v, longest=16 * 4 * (i + 1))  # of four threads, none of which is further

    def cuts():
        for _ in range(10):
            with cache._alone("test"):  # what is cut depends on what is read
                length = min(cache.lengths) // 32 * 32
                if max(cache.lengths) - length <= 16 and cache.beyond == 0:
                    cache.truncate([0, 1], [length, length])

    def reads():
        while not done.is_set():
            first, second = cache.lengths
            assert first == second
            try:
                out = rt.decode_attention(q, cache.view, window=window)
            except rt.ArgumentError as error:  # a longer table was laid between the two
                assert "cache holds length" in str(error)
                continue
            assert torch.equal(out[0], out[1])

    def copies():
        while not done.is_set():
            cache.reorder([1, 0])
            for twin in (pickle.loads(pickle.dumps(cache)), cache.select([1, 0])):
                out = rt.decode_attention(q, twin.view, window=window)
                assert torch.equal(out[0], out[1])

    def writes():
        try:
            at_once(appends, appends, appends, cuts)
        finally:
            done.set()

    at_once(writes, reads, copies)
    alone = SlidingKVCache(window, contiguous(format, "float32", HEADS, DIM, rows=2, capacity=64))
    assert cache.lengths[0] == cache.lengths[1] and cache.lengths[0] % 16 == 0
    for at in range(0, cache.lengths[0], 16):
        alone.append(k, v, longest=at + 16)
    ours, theirs = (rt.decode_attention(q, c.view, window=window) for c in (cache, alone))
    assert torch.equal(ours, theirs)


def test_compiled_appends_share_the_lock():
    from rooftile import torch_ops

    cache = paged("int8", "float32", HEADS, DIM, rows=4, capacity=96)
    k, v = tokens(1)

    def fill(row):
        rows = torch.tensor([row], dtype=torch.int32)
        for i in range(60):
            if (i + row) % 2:
                cache.append(k, v, rows=[row])
            else:
                torch_ops.store("append", (k, v), cache, rows, None, None, None)

    at_once(*(lambda row=row: fill(row) for row in range(4)))
    held = pages_held(cache)
    assert cache.lengths == [60] * 4 and len(set(held)) == len(held) == 8


# ---------------------------------------------------------------- what must not hang


def test_a_child_forked_under_the_lock():
    cache = paged("int8", "float32", HEADS, DIM)
    k, v = tokens(3)
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with cache._handle.exclusive("test"):
            inside.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits
        status = 1
        try:
            cache.append(k, v)
            status = 0 if cache.lengths == [3] else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    leave.set()
    holder.join()
    assert status == 0 and cache.lengths == [0]


OPENMP_BEFORE_A_FORK = """
import os, signal
import numpy as np, torch, rooftile as rt
torch.set_num_threads(2)
torch.relu(torch.zeros(10**6))  # starts OpenMP's threads; the child has none of them
x, weight = np.ones((4000, 1024), np.float32), np.ones(1024, np.float32)
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that waits
    out = rt.rms_norm(x, weight, 0.0)
    os._exit(0 if (out == 1).all() else 2)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_before_the_first_call():
    """The parent has used torch's OpenMP and called nothing of rooftile."""
    ran = subprocess.run([sys.executable, "-c", OPENMP_BEFORE_A_FORK], timeout=100, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_an_error_gives_the_lock_back():
    cache = paged("int8", "float32", HEADS, DIM)
    k, v = tokens(3)
    for call in (
        lambda: cache.append(k, v[:, :1]),
        lambda: cache.append(k, v, rows=[9]),
        lambda: cache.truncate([0], [5]),
        lambda: cache.fork(0, 7),
        lambda: rt.decode_attention(torch.ones(1, 3, DIM), cache),
        lambda: cache.dequantize(0, at=9),
    ):
        with pytest.raises(rt.errors.RooftileError):
            call()
        at_once(lambda: cache.append(k, v), lambda: cache.reset())  # would wait for ever
    cache.reset()
