# SPDX-License-Identifier: Apache-2.0
"""How rows, counts and lengths that are lists reach the kernels."""

import numpy as np
import pytest
import rooftile as rt
import torch
from rooftile.kv_cache import ints


@pytest.mark.parametrize("value", (2**31, 2**32, -(2**32), 2**63, 2**70))
def test_a_list_is_never_narrowed(value, count_bad_input):
    """NumPy below 2 wraps where it narrows: 2**32 would be row 0."""
    cache = rt.KVCache(2, 64, 1, 16, format="fp32")
    k = torch.ones(1, 1, 1, 16)
    for name, call in (
        ("rows", lambda: cache.append(k, k, rows=[value])),
        ("counts", lambda: cache.append(k, k, counts=[value])),
        ("lengths", lambda: cache.truncate([0], [value])),
    ):
        with pytest.raises(rt.ArgumentError, match=f"{name} does not fit 32 bits: \\[{value}\\]"):
            call()
    assert cache.lengths == [0, 0]
    count_bad_input(3)


def test_what_a_list_may_hold():
    class Two:
        def __index__(self):
            return 2

    for values in ([1, np.int64(7), Two()], (1, 7, 2, 1), range(3), []):
        array = ints("append", "rows", values)
        assert array.dtype == np.int32 and array.tolist() == [int(v) if not isinstance(v, Two) else 2 for v in values]
    for wrong in ([1.0], ["1"], [None], "12", 3, object(), [True], [1, np.True_], [torch.tensor(True)]):
        with pytest.raises(rt.ArgumentTypeError, match="rows must be a list of integers or an int32 array"):
            ints("append", "rows", wrong)


@pytest.mark.parametrize("rows", ([0], (0,), np.zeros(1, np.int32)))
def test_a_graph_cannot_capture_numbers_of_the_host(rows, monkeypatch):
    """A capture would keep the address of memory that is gone when the graph is replayed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(rt.ArgumentError, match="rows must be an int32 tensor on cuda:1 while a graph is captured, got"):
        ints("append", "rows", rows, "cuda:1")
    assert ints("append", "rows", None, "cuda:1") is None
    on_device = torch.zeros(1, dtype=torch.int32)  # stands for a tensor there
    assert ints("append", "rows", on_device, "cuda:1") is on_device


@pytest.mark.parametrize(
    ("index", "message"),
    (
        ([0, 2], r"index must lie in \[0, 2\), got 2"),
        ([0, -1], r"index must lie in \[0, 2\), got -1"),
        ([0], r"index must be \[rows\] = \[2\], got"),
    ),
)
def test_an_index_is_judged_before_rows_move(index, message, count_bad_input):
    """_check, which a reorder on a GPU begins with, says what reorder says."""
    cache = rt.KVCache(2, 64, 1, 16, format="fp32")
    k = torch.ones(2, 3, 1, 16)
    cache.append(k, k, counts=[1, 3])
    cache._check("reorder")
    cache._check("reorder", ints("reorder", "index", [1, 0]))
    for call in (cache.reorder, lambda index: cache._check("reorder", ints("reorder", "index", index))):
        with pytest.raises(rt.ArgumentError, match="reorder: " + message):
            call(index)
    assert cache.lengths == [1, 3]
    count_bad_input(2)


def test_rows_may_lie_in_the_lengths_that_a_call_writes():
    """They are read once, before anything changes."""
    k, x = torch.ones(1, 1, 1, 32), torch.ones(3, 2, 1, 32)
    cache = rt.PagedKVCache(4, 32, 1, 32, max_rows=2, format="fp32")
    cache.append(k, k, rows=[0])
    cache.reorder(cache.seq_lens)
    assert cache.lengths == [0, 1] and cache.block_table[:, 0].tolist() == [-1, 0] and cache.free_pages == 3
    for change in (lambda c: c.truncate(c.seq_lens, [0, 0, 0]), lambda c: c.reset(c.seq_lens)):
        for numpy in (False, True):
            cache = rt.PagedKVCache(4, 32, 1, 32, max_rows=3, format="fp32")
            cache.append(x, x, counts=[2, 0, 1])
            if numpy:
                cache._arrays["lengths"] = cache.seq_lens.numpy()
            change(cache)
            assert cache.lengths == [0, 0, 0] and cache.free_pages == 4


def test_rows_may_lie_in_the_lengths_of_a_layer():
    def fork(model):
        model.fork(model[0].seq_lens[2], 2)  # its row 2 has 1 token: row 1, which is empty

    for change, lengths in (
        (lambda model: model.reorder(model[0].seq_lens), [1, 2, 0]),
        (lambda model: model.reset(model[0].seq_lens), [0, 0, 0]),
        (lambda model: model.truncate([0, 1, 2], model[0].seq_lens.flip(0) * 0), [0, 0, 0]),
        (fork, [2, 0, 0]),
    ):
        model, x = rt.ModelKVCache(2, 3, 64, 1, 32, format="fp32"), torch.ones(3, 2, 1, 32)
        for layer in model:
            layer.append(x, x, counts=[2, 0, 1])
        change(model)
        assert [layer.lengths for layer in model] == [lengths] * 2
