# SPDX-License-Identifier: Apache-2.0
"""What host and GPU must agree on: who holds which page, what a graph can capture, on which stream a call runs."""

import cases
import pytest
import rooftile as rt
import torch
from kv_caches import assert_same, contiguous, kv, paged, state, tensors

GPUS = tuple(device for device in cases.devices() if device != "cpu")
if not GPUS:
    pytest.skip("no GPU, or a build without GPU kernels", allow_module_level=True)
gpus = pytest.mark.parametrize("device", GPUS)


def check_books(cache):
    """Host and device tell one story: lengths, table, and how many rows hold a page."""
    users, table, lengths = cache._page_state
    torch.cuda.synchronize()
    assert lengths.tolist() == cache.lengths
    assert torch.equal(cache.block_table.cpu(), table)
    held = [(row >= 0).sum().item() for row in table]
    assert held == [-(-length // cache.page_size) for length in cache.lengths]
    assert users.tolist() == torch.bincount(table[table >= 0], minlength=cache.num_pages).tolist()


@gpus
def test_the_host_takes_no_part_in_a_capture(device):
    k = torch.zeros(1, 1, 2, 64, dtype=torch.float16, device=device)
    positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
    tables = torch.ones(4, 32, device=device), torch.zeros(4, 32, device=device)
    one, pages = (make("int8", "float16", 2, 64, capacity=64, device=device) for make in (contiguous, paged))
    for cache in (one, pages):
        cache.append(k, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.append(k, k)
        with pytest.raises(rt.ArgumentError, match="append: rows must be an int32 tensor on cuda:0 while a graph is"):
            one.append(k, k, rows=[0])
        with pytest.raises(rt.ArgumentError, match="decode_attention: counts must be an int32 tensor on cuda:0 while"):
            rt.decode_attention(k, one, counts=[1])
        with pytest.raises(rt.NotSupportedError, match="append: a PagedKVCache takes its pages on the host"):
            pages.append(k, k)
        with pytest.raises(rt.NotSupportedError, match="rope_append: a PagedKVCache takes its pages on the host"):
            rt.rope_append(k, k, k, *tables, positions, pages)
    graph.replay()
    assert (one.lengths, pages.lengths) == ([2], [1])
    pages.append(k, k)
    check_books(pages)


@gpus
@pytest.mark.parametrize("raises", ("decode_attention", "truncate", "reset", "reorder", "fork", "append"))
@pytest.mark.parametrize("then", ("fork", "append"))
def test_whoever_raises_a_fault_the_host_learns_of_it(device, raises, then):
    """Row 0 holds 10 tokens and keeps them; the host counted 20, a whole page and a part of the next."""
    k, v = tensors(*kv(60, 2, 64, "float16"), "float16", device)
    cos, sin = torch.ones(8, 32, device=device), torch.zeros(8, 32, device=device)
    cache = paged("fp16", "float16", 2, 64, rows=3, capacity=64, page_size=16, device=device)
    cache.append(k[:, :10], v[:, :10], rows=[0])
    bad = torch.full((1, 10), 8, device=device)
    rt.rope_append(k[:, 10:20], k[:, 10:20], v[:, 10:20], cos, sin, bad, cache, rows=[0])
    torch.cuda.synchronize()
    calls = {
        "decode_attention": lambda: rt.decode_attention(k[:, :1], cache, rows=[0]),
        "truncate": lambda: cache.truncate([2], [0]),
        "reset": lambda: cache.reset([2]),
        "reorder": lambda: cache.reorder([0, 1, 2]),
        "fork": lambda: cache.fork(0, 2),
        "append": lambda: cache.append(k[:, :1], v[:, :1], rows=[2]),
    }
    with pytest.raises(rt.ArgumentError, match=f"{raises}: an earlier call on this cache left row 0 alone: positions"):
        calls[raises]()
    if then == "append":
        cache.append(k[:, 10:20], v[:, 10:20], rows=[0])
        check_books(cache)
        cache.truncate([0], [10])
    cache.fork(0, 1)
    check_books(cache)
    assert cache.block_table[0, 0] != cache.block_table[1, 0]
    cache.append(k[:, 10:30], v[:, 10:30], rows=[0])
    cache.append(k[:, 40:60], v[:, 40:60], rows=[1])
    check_books(cache)
    expected = contiguous("fp16", "float16", 2, 64, rows=2)
    for row, tokens in enumerate((range(30), [*range(10), *range(40, 60)])):
        expected.append(*(x[:, list(tokens)].cpu() for x in (k, v)), rows=[row])
        got = cache.dump(row)
        assert_same({name: x.cpu() if name != "length" else x for name, x in got.items()}, expected.dump(row))


def fault(cache, device):
    """Leaves a fault behind: a row that the cache does not have."""
    k = torch.zeros(1, 1, 2, 64, dtype=torch.float16, device=device)
    cache.append(k, k, rows=torch.tensor([99], dtype=torch.int32, device=device))
    torch.cuda.synchronize()


ROW_CHANGES = {
    "fork": lambda cache: cache.fork(0, 1),
    "reorder": lambda cache: cache.reorder([1, 0, 2]),
    "truncate": lambda cache: cache.truncate([0], [32]),
    "reset": lambda cache: cache.reset([0]),
}


@gpus
@pytest.mark.parametrize("change", ROW_CHANGES)
@pytest.mark.parametrize("format", ("int8", "int4-kivi"))
def test_a_fault_inside_a_change_of_rows_leaves_the_pages(device, change, format):
    k, v = tensors(*kv(40, 2, 64, "float16", batch=3), "float16", device)
    cache = paged(format, "float16", 2, 64, rows=3, capacity=64, device=device)
    cache.append(k, v, counts=[40, 20, 33])
    before, books = state(cache), [x.clone() for x in cache._page_state]
    fault(cache, device)
    with pytest.raises(rt.ArgumentError, match=f"{change}: an earlier call on this cache"):
        ROW_CHANGES[change](cache)
    assert_same(state(cache), before)
    assert all(torch.equal(a, b) for a, b in zip(cache._page_state, books, strict=True))
    ROW_CHANGES[change](cache)
    check_books(cache)


@gpus
@pytest.mark.parametrize("change", ROW_CHANGES)
def test_a_fault_in_one_layer_leaves_all_layers(device, change):
    k, v = tensors(*kv(40, 2, 64, "float16", batch=3), "float16", device)
    model = rt.ModelKVCache(3, 3, 64, 2, 64, dtype="float16", device=device)
    for layer in model:
        layer.append(k, v, counts=[40, 20, 33])
    before = [state(layer) for layer in model]
    fault(model[1], device)
    with pytest.raises(rt.ArgumentError, match=f"{change}: an earlier call on this cache"):
        ROW_CHANGES[change](model)
    for layer, bytes_before in zip(model, before, strict=True):
        assert_same(state(layer), bytes_before)
    ROW_CHANGES[change](model)
    assert all(layer.lengths == model.lengths for layer in model)
