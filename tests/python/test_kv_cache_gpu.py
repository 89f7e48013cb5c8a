# SPDX-License-Identifier: Apache-2.0
"""A cache on a GPU holds the bytes that one on the CPU would; what only the kernels can see is checked there."""

import cases
import layouts
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from kv_caches import PAGES, assert_same, contiguous, kinds_on, kv, paged, state, tensors

GPUS = tuple(device for device in cases.devices() if device != "cpu")
if not GPUS:
    pytest.skip("no GPU, or a build without GPU kernels", allow_module_level=True)
gpus = pytest.mark.parametrize("device", GPUS)
kinds = pytest.mark.parametrize("format, dtype", kinds_on("cuda"))
some_kinds = pytest.mark.parametrize(
    "format, dtype",
    (
        ("fp16", "float16"),
        ("int8", "bfloat16"),
        ("int4", "float16"),
        ("int4-kivi", "bfloat16"),
        ("int4-kivi-sym", "float16"),
        ("int8-kivi-sym", "float16"),
        ("int8-kivi-sym", "bfloat16"),
    ),
)
makes = pytest.mark.parametrize("make", (contiguous, paged))


def pair(make, device, *args, **options):
    return make(*args, **options), make(*args, **options, device=device)


def append_both(host, gpu, k, v, **options):
    host.append(k, v, **options)
    gpu.append(k.to(gpu.device), v.to(gpu.device), **options)


def wild(tokens, heads, dim, dtype, *key, batch=None):
    """Values with all that an encoding treats apart: NaN, infinities, zeros of both signs, tiny and huge groups."""
    k, v = kv(tokens, heads, dim, dtype, *key, batch=batch)
    rng = cases.generator("wild", *key)
    largest = oracle.LARGEST[dtype]
    for x in (k, v):
        flat = x.reshape(-1, heads, dim)
        flat[::7] = 0.0
        flat[::14, :, ::2] = -0.0
        flat[3::11] *= 2.0**-20
        flat[5::13] *= largest / 8
        for value in (np.nan, np.inf, -np.inf):
            flat[rng.integers(len(flat)), rng.integers(heads), rng.integers(dim)] = value
        finite = np.isfinite(flat)
        flat[finite] = np.clip(oracle.round_to(flat[finite], dtype), -largest, largest)
    return tensors(k, v, dtype)


@gpus
@kinds
@makes
@pytest.mark.parametrize("heads, dim", ((2, 64), (3, 111), (1, 128), (1, 256), (2, 8), (1, 130), (2, 300), (1, 512)))
def test_the_bytes_are_those_of_the_cpu(device, format, dtype, make, heads, dim):
    k, v = wild(190, heads, dim, dtype, format, dim, batch=3)
    host, gpu = pair(make, device, format, dtype, heads, dim, rows=3)
    at = 0
    for n in (1, 30, 1, 1, 64, 93):  # groups that open, close and are skipped over
        append_both(host, gpu, k[:, at : at + n], v[:, at : at + n])
        at += n
        assert_same(state(gpu), state(host))
    assert gpu.lengths == [190] * 3


@gpus
@kinds
@makes
def test_one_token_at_a_time(device, format, dtype, make):
    k, v = wild(100, 2, 64, dtype, format, batch=2)
    host, gpu = pair(make, device, format, dtype, 2, 64, rows=2)
    for i in range(100):
        append_both(host, gpu, k[:, i : i + 1], v[:, i : i + 1])
    assert_same(state(gpu), state(host))


# Tokens of 8 heads that one cluster stores in one launch at most; one more and the call is two launches.
MOST_TOGETHER = {format: 225 if format in oracle.KIVI_FORMATS else 8 for format in oracle.KV_FORMATS}


@gpus
@some_kinds
@makes
@pytest.mark.parametrize("before", (0, 31, 40))
def test_one_launch_or_two(device, format, dtype, make, before):
    for tokens in (1, 2, 3, MOST_TOGETHER[format], MOST_TOGETHER[format] + 1):
        k, v = wild(before + tokens, 8, 64, dtype, format, tokens, batch=2)
        host, gpu = pair(make, device, format, dtype, 8, 64, rows=2, capacity=320)
        if before:
            append_both(host, gpu, k[:, :before], v[:, :before], counts=[before, before - 7])
        append_both(host, gpu, k[:, before:], v[:, before:])
        assert_same(state(gpu), state(host), tokens)
        assert gpu.lengths == host.lengths


@gpus
@some_kinds
def test_entries_of_one_call_know_of_each_other(device, format, dtype):
    """Rows named twice, padding entries that name a row another one writes, rows that are none; one launch and two."""
    for tokens in (1, 2, MOST_TOGETHER[format], MOST_TOGETHER[format] + 1):
        k, v = tensors(*kv(31 + tokens, 8, 64, dtype, format, tokens, batch=7), dtype)
        host, gpu = pair(contiguous, device, format, dtype, 8, 64, rows=5, capacity=320)
        append_both(host, gpu, k[:5, :31], v[:5, :31])
        new_k, new_v = k[:, 31:], v[:, 31:]
        rows, counts = [0, 1, 1, 5, 2, 0, 4], [tokens, tokens, 1, tokens, tokens, 0, 0]
        ints = (torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, counts))
        gpu.append(new_k.to(device), new_v.to(device), **dict(zip(("rows", "counts"), ints, strict=True)))
        torch.cuda.synchronize()
        host.append(new_k[[0, 4]], new_v[[0, 4]], rows=[0, 2])
        assert_same(state(gpu), state(host), tokens)
        with pytest.raises(rt.ArgumentError, match=r"alone: rows named (it twice|a row)"):
            gpu.reset([3])


@gpus
@pytest.mark.parametrize("format, dtype", (("bf16", "bfloat16"), ("int8", "float16"), ("int4-kivi", "float16")))
def test_more_rows_than_sms(device, format, dtype):
    k, v = tensors(*kv(71, 2, 8, dtype, format, batch=300), dtype)
    host, gpu = pair(contiguous, device, format, dtype, 2, 8, rows=300, capacity=128)
    for part in (slice(0, 1), slice(1, 71)):
        append_both(host, gpu, k[:, part], v[:, part])
        assert_same(state(gpu), state(host))


@gpus
@some_kinds
@makes
def test_a_long_prompt(device, format, dtype, make):
    k, v = tensors(*kv(3001, 2, 128, dtype, format), dtype)
    host, gpu = pair(make, device, format, dtype, 2, 128, capacity=3100)
    append_both(host, gpu, k[:, :17], v[:, :17])
    append_both(host, gpu, k[:, 17:], v[:, 17:])
    assert_same(state(gpu), state(host))


@gpus
@kinds
@makes
@pytest.mark.parametrize("where", ("list", "device"))
def test_rows_and_counts(device, format, dtype, make, where):
    k, v = wild(70, 2, 80, dtype, format, batch=4)
    host, gpu = pair(make, device, format, dtype, 2, 80, rows=6)
    for rows, counts in (([5, 0, 3, 1], [3, 70, 33, 0]), ([1, 5, 1, 0], [64, 29, 0, 1])):
        host.append(k, v, rows=rows, counts=counts)
        if where == "device":
            rows, counts = (torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, counts))
        gpu.append(k.to(device), v.to(device), rows=rows, counts=counts)
        assert_same(state(gpu), state(host))
    assert gpu.lengths == host.lengths


@gpus
@pytest.mark.parametrize("format, dtype", (("int8", "float16"), ("int4-kivi", "bfloat16")))
@pytest.mark.parametrize("page_size", (16, 32, 64, 128))
def test_page_sizes(device, format, dtype, page_size):
    if page_size not in PAGES[format]:
        pytest.skip("a page holds whole groups")
    k, v = wild(200, 2, 64, dtype, format, page_size)
    host, gpu = pair(paged, device, format, dtype, 2, 64, capacity=256, page_size=page_size)
    append_both(host, gpu, k, v)
    assert_same(state(gpu), state(host))


@gpus
@some_kinds
def test_inputs_of_any_strides(device, format, dtype):
    k, v = tensors(*kv(40, 2, 64, dtype, format, batch=2), dtype, device)
    host = contiguous(format, dtype, 2, 64, rows=2)
    host.append(k.cpu(), v.cpu())
    for (name, a), (_, b) in zip(layouts.torch_layouts(k), layouts.torch_layouts(v), strict=True):
        gpu = contiguous(format, dtype, 2, 64, rows=2, device=device)
        gpu.append(a, b)
        assert_same(state(gpu), state(host), name)


@gpus
@some_kinds
@makes
@pytest.mark.parametrize("dim, pairs", ((64, 32), (64, 30), (64, 7), (512, 256), (320, 100)))
@pytest.mark.parametrize("tables", ("float32", None))
def test_rope_append(device, format, dtype, make, dim, pairs, tables):
    heads, q_heads = 2, 6
    k, v = tensors(*kv(75, heads, dim, dtype, format, batch=2), dtype)
    q = cases.tensor(cases.values((2, 75, q_heads, dim), dtype, "q", format), dtype)
    angle = np.arange(300)[:, None] / 100.0 ** (np.arange(pairs) / pairs)
    cos, sin = (torch.from_numpy(f(angle)).to(cases.torch_dtype(tables or dtype)) for f in (np.cos, np.sin))
    host, gpu = pair(make, device, format, dtype, heads, dim, rows=2)
    at = 0
    for n, index in ((40, torch.int64), (1, torch.int32), (34, torch.int64)):
        positions = torch.arange(at, at + n, dtype=index).expand(2, n) + torch.tensor([[0], [50]], dtype=index)
        inputs = [x[:, at : at + n] for x in (q, k, v)] + [cos, sin, positions]
        options = {"counts": [n, n // 2]} if n > 1 else {}
        expected = rt.rope_append(*inputs, host, **options)
        on_gpu = [x.to(device) for x in inputs]
        got = rt.rope_append(*on_gpu, gpu, **options)
        assert torch.equal(got.cpu(), expected)
        assert torch.equal(on_gpu[1].cpu(), inputs[1])
        assert_same(state(gpu), state(host))
        at += n
    q = on_gpu[0].contiguous()
    before = q.clone()
    rt.rope_append(q, *on_gpu[1:], gpu, counts=[0, 0], q_out=q)  # in place
    assert torch.equal(q, rt.rope_append(before, *on_gpu[1:], gpu, counts=[0, 0]))


@gpus
@some_kinds
@pytest.mark.parametrize("tokens", (3, 40))
def test_a_bad_entry_is_left_alone_and_reported_next_time(device, format, dtype, tokens):
    k, v = tensors(*kv(tokens, 2, 64, dtype, format, batch=3), dtype, device)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    for rows, counts, good, message in (
        (ints(0, 7, 2), None, (0, 2), "batch entry 1 alone: rows named a row that the cache does not have"),
        (ints(0, -1, 2), None, (0, 2), "batch entry 1 alone: rows"),
        (None, ints(tokens, tokens + 1, tokens), (0, 2), r"row 1 alone: counts was not in \[0, T\]"),
        (None, ints(tokens, -1, tokens), (0, 2), "row 1 alone: counts"),
        (ints(1, 1, 2), None, (2,), "row 1 alone: rows named it twice"),
    ):
        host, gpu = pair(contiguous, device, format, dtype, 2, 64, rows=3, capacity=64)
        gpu.append(k, v, rows=rows, counts=counts)
        torch.cuda.synchronize()
        for row in good:
            host.append(k[row : row + 1].cpu(), v[row : row + 1].cpu(), rows=[row])
        assert_same(state(gpu), state(host))
        with pytest.raises(rt.ArgumentError, match=message):
            gpu.append(k, v)
        assert_same(state(gpu), state(host))
        append_both(host, gpu, k[:, :3].cpu(), v[:, :3].cpu())  # and all is well
        assert_same(state(gpu), state(host))


@gpus
@some_kinds
def test_a_full_row_is_left_alone(device, format, dtype):
    k, v = tensors(*kv(40, 2, 64, dtype, format, batch=2), dtype)
    host, gpu = pair(contiguous, device, format, dtype, 2, 64, rows=2, capacity=64)
    append_both(host, gpu, k, v, counts=[40, 10])
    gpu.append(k.to(device), v.to(device))
    host.append(k[1:], v[1:], rows=[1])
    torch.cuda.synchronize()
    assert_same(state(gpu), state(host))
    with pytest.raises(rt.ArgumentError, match="row 0 alone: the new tokens did not fit"):
        gpu.truncate([0], [0])
    gpu.truncate([0], [0])
    assert gpu.lengths == [0, 50]


@gpus
@pytest.mark.parametrize("tokens", (1, 20, 40))
@pytest.mark.parametrize(
    "what, message", (("page", "row 1 alone: block_table"), ("length", "row 1 alone: the row's stored length"))
)
def test_bad_tables_and_lengths_of_a_view(device, tokens, what, message):
    pool = torch.zeros(6, 2, 16, 2, 64, dtype=torch.float16, device=device)
    table = torch.tensor([[0, 1, 2], [3, 10**6, 5]], dtype=torch.int32, device=device)
    if tokens == 1:
        table[1, 0] = -1
    lens = torch.tensor([0, 0 if what == "page" else -3], dtype=torch.int32, device=device)
    view = rt.PagedKVCache.view(pool, table, lens, format="fp16")
    k, v = tensors(*kv(tokens, 2, 64, "float16", batch=2), "float16", device)
    view.append(k, v)
    torch.cuda.synchronize()
    assert view.lengths == [tokens, lens[1].item()] and not pool[3:].any()
    torch.testing.assert_close(pool[:3, 0].flatten(0, 1)[:tokens], k[0], rtol=0, atol=0)
    with pytest.raises(rt.ArgumentError, match=message):
        view.append(k, v)


@gpus
@pytest.mark.parametrize("tokens", (1, 4, 50))
@pytest.mark.parametrize("bad", (-1, 50))
def test_a_bad_position_leaves_row_and_query_alone(device, tokens, bad):
    k, v = tensors(*kv(tokens, 2, 64, "float16", batch=2), "float16", device)
    q = k.clone()
    cos = torch.ones(50, 32, device=device)
    cache = contiguous("int8", "float16", 2, 64, rows=2, device=device)
    q_out = torch.full_like(q, 7.0)
    positions = torch.arange(tokens, device=device).repeat(2, 1)
    positions[1, -1] = bad
    rt.rope_append(q, k, v, cos, torch.zeros_like(cos), positions, cache, q_out=q_out)
    assert cache.lengths == [tokens, 0] and torch.equal(q_out[0], q[0]) and (q_out[1] == 7).all()
    with pytest.raises(rt.ArgumentError, match="row 1 alone: positions"):
        cache.append(k, v)


@gpus
@some_kinds
def test_captured_and_replayed(device, format, dtype):
    k, v = tensors(*kv(70, 2, 64, dtype, format, batch=2), dtype)
    host, gpu = pair(contiguous, device, format, dtype, 2, 64, rows=2)
    new_k, new_v = (torch.zeros_like(x[:, :1], device=device) for x in (k, v))
    gpu.append(new_k, new_v, counts=[0, 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.append(new_k, new_v)
    assert gpu.lengths == [0, 0]
    for i in range(70):
        new_k.copy_(k[:, i : i + 1])
        new_v.copy_(v[:, i : i + 1])
        graph.replay()
        host.append(k[:, i : i + 1], v[:, i : i + 1])
    assert_same(state(gpu), state(host))


@gpus
@some_kinds
@makes
def test_rows_move_as_on_the_cpu(device, format, dtype, make):
    """truncate, reorder, fork, reset, to, dump and dequantize."""
    k, v = tensors(*kv(160, 2, 64, dtype, format, batch=3), dtype)
    host, gpu = pair(make, device, format, dtype, 2, 64, rows=3)
    append_both(host, gpu, k[:, :100], v[:, :100], counts=[100, 33, 64])
    steps = (
        lambda c: c.reorder([2, 0, 1]),
        lambda c: c.truncate([1], [96]),
        lambda c: c.fork(1, 2),
        lambda c: c.append(*(x[:, 100:].to(c.device) for x in (k, v)), rows=[2, 0, 1], counts=[60, 1, 33]),
        lambda c: c.reorder([1, 1, 0]),
        lambda c: c.reset([0]),
        lambda c: c.append(*(x[:1, :5].to(c.device) for x in (k, v))),
    )
    for step in steps:
        step(host)
        step(gpu)
        assert gpu.lengths == host.lengths
        for row in range(3):
            assert_same(gpu.dump(row), host.dump(row))
    for ours, theirs in zip(gpu.dequantize(), host.dequantize(), strict=True):
        assert ours.device.type == "cuda" and torch.equal(ours.cpu(), theirs)
    assert_same(state(gpu.to("cpu")), state(gpu))
    assert_same(state(host.to(device)), state(host))
    if make is paged:
        books = (host._page_state[0], host.block_table, host.seq_lens)
        assert all(torch.equal(a, b) for a, b in zip(gpu._page_state, books, strict=True))


@gpus
def test_a_paged_cache_after_a_fault(device):
    k, v = tensors(*kv(40, 2, 64, "float16", batch=2), "float16", device)
    cache = paged("int8", "float16", 2, 64, rows=2, capacity=64, device=device)
    cache.append(k, v, counts=[40, 10])
    cache.append(k, v)
    torch.cuda.synchronize()
    with pytest.raises(rt.ArgumentError, match="row 0 alone"):
        cache.append(k[:, :1], v[:, :1])
    assert cache.lengths == [40, 50] and (cache._page_state[1] >= 0).sum(1).tolist() == [2, 2]


@gpus
def test_what_a_gpu_cache_is(device):
    assert rt.KVCache(1, 10, 1, 64, device=device).dtype == "float16"
    model = rt.ModelKVCache(2, 1, 40, 1, 64, device=device)
    assert all(layer.device == "cuda:0" for layer in model) and model.lengths == [0]
    with pytest.raises(rt.NotSupportedError, match="dtype float32"):
        rt.KVCache(1, 10, 1, 64, format="fp32", device=device)
    cache = rt.KVCache(1, 10, 1, 64, format="int8", device=device)
    x = torch.zeros(1, 1, 1, 64, dtype=torch.float16)
    with pytest.raises(rt.ArgumentError, match="k must be on the cache's device"):
        cache.append(x, x)
