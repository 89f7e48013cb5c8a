# SPDX-License-Identifier: Apache-2.0
"""What host and GPU must agree on: who holds which page, what a graph can capture, on which stream a call runs."""

import cases
import pytest
import rooftile as rt
import torch
from kv_caches import contiguous, paged

GPUS = tuple(device for device in cases.devices() if device != "cpu")
if not GPUS:
    pytest.skip("no GPU, or a build without GPU kernels", allow_module_level=True)
gpus = pytest.mark.parametrize("device", GPUS)


def check_books(cache):
    """Host and device tell one story: lengths, table, and how many rows hold a page."""
    users, table, lengths = cache.page_state
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
