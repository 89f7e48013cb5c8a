# SPDX-License-Identifier: Apache-2.0
"""More rows, heads and outputs than a grid has blocks in one direction or 32 bits count; pages far apart."""

import cases
import closeness
import oracle
import pytest
import rooftile as rt
import test_w4a16 as w4
import torch

# On a GPU both sides of what a grid has in y and z, by batch, by batch times KV heads, and far past it.
BATCHES = {"cpu": (65_536,), "cuda": (32_767, 32_768, 32_769, 65_535, 65_536, 70_001)}
on_devices = pytest.mark.parametrize(("device", "batch"), [(d, b) for d in cases.devices() for b in BATCHES[d]])
LENGTHS = (1, 17, 33, 70)


def cached_rows(format, device, heads=2, dim=64, dtype="float16"):
    """A cache of four rows, and one query for each."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 4, max(LENGTHS), heads, dim, generator=generator).to(cases.torch_dtype(dtype))
    cache = rt.KVCache(4, max(LENGTHS), heads, dim, format=format, dtype=dtype)
    cache.append(k, v, counts=list(LENGTHS))
    q = torch.randn(4, 2 * heads, dim, generator=generator).to(k.dtype)
    return cache.to(device), q.to(device)


@on_devices
@pytest.mark.parametrize("format", ["fp16", "int4-kivi"])
def test_decode_of_many_rows(format, batch, device):
    """Every row is one of four, so it has that one's bits."""
    cache, q = cached_rows(format, device)
    out, lse = rt.decode_attention(q, cache, return_lse=True)
    which = torch.arange(batch, dtype=torch.int32, device=device) % 4
    many = cases.guarded((batch, *q.shape[1:]), q.dtype, device)
    many_lse = torch.full((batch, q.shape[1]), torch.nan, device=device)
    rt.decode_attention(q[which], cache, rows=which, out=many.tensor, lse=many_lse)
    closeness.assert_bits_equal(many.tensor, out[which])
    closeness.assert_bits_equal(many_lse, lse[which])
    many.check_margins()


@pytest.mark.slow
def test_decode_past_32_bits_of_outputs(device, heads=16, dim=128):
    """On a CPU past 2^28 elements (2^29 bytes), on a GPU past 2^31: batch times heads times head_dim."""
    batch = 70_000 if device == "cpu" else 524_296
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    cache, q = cached_rows("fp16", device, heads, dim)
    which = torch.arange(batch, dtype=torch.int32, device=device) % 4
    if device == "cpu":  # equal queries in every row need no memory for each
        q = q[:1].expand_as(q)
        queries = q[:1].expand(batch, *q.shape[1:])
    else:
        queries = q[which]
    out, lse = rt.decode_attention(q, cache, window=2, return_lse=True)
    many = torch.full((batch, *q.shape[1:]), torch.nan, dtype=q.dtype, device=device)
    _, many_lse = rt.decode_attention(queries, cache, rows=which, window=2, out=many, return_lse=True)
    for begin in range(0, batch, 4096):  # a piece at a time: comparing takes memory too
        rows = which[begin : begin + 4096]
        closeness.assert_bits_equal(many[begin : begin + 4096], out[rows])
        closeness.assert_bits_equal(many_lse[begin : begin + 4096], lse[rows])


@on_devices
def test_append_to_many_rows(batch, device):
    """One token into each row: the bytes of a cache of four rows, over and over."""
    few, many = (rt.KVCache(rows, 16, 1, 64, format="int4", dtype="float16", device=device) for rows in (4, batch))
    k, v = (torch.randn(4, 1, 1, 64, device=device).half() for _ in "kv")
    which = torch.arange(batch, device=device) % 4
    few.append(k, v)
    many.append(k[which], v[which])
    assert set(many.lengths) == {1}
    pool, expected = (c._arrays["pool"].reshape(c.max_rows, -1) for c in (many, few))
    assert torch.equal(pool, expected[which])


@pytest.mark.parametrize("op", ["w4a16_matmul", "w8a16_matmul", "linear"])
def test_a_product_of_many_rows(op, device, dtype="float16"):
    """Sums of small integers, exact in any order."""
    m, n, k = 65_537, 40, 256
    if op == "linear":
        dense = cases.exact_values((n, k), "many rows")
        weight, call = cases.tensor(dense, dtype, device), rt.linear
    else:
        weight, dense = w4.both(n, k, 128, "symmetric", exact=True, bits=int(op[1]))
        weight, call = weight.to(device), getattr(rt, op)
    x = cases.exact_values((64, k), "x of many rows")
    which = torch.arange(m, device=device) % 64
    y = cases.guarded((m, n), dtype, device)
    call(cases.tensor(x, dtype, device)[which], weight, out=y.tensor)
    exact = cases.tensor(oracle.round_to(oracle.w4a16_matmul(x, dense), dtype), dtype, device)
    closeness.assert_bits_equal(y.tensor, exact[which])
    y.check_margins()


# ---------------------------------------------------------------- the last row alone lies past 32 bits


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("limit", [2**31, 2**32], ids=["31 bits", "32 bits"])
def test_the_last_token_alone_lies_far(limit, batch):
    """Where an offset overflows depends on the last token's alone, so every batch has tokens of its own distance."""
    tokens, heads, dim = 5, 2, 16
    stride = -(-limit // (batch * tokens - 1)) + 8  # the last but one stays below

    def far(t):
        strides = (tokens * stride, stride, *t.stride()[2:])
        assert (batch * tokens - 2) * stride < limit < (batch * tokens - 1) * stride
        return cases.far_apart(t.shape, t.dtype, strides).copy_(t)

    x = torch.randn(batch, tokens, heads * dim).half()
    w = rt.W4Weight.quantize(torch.randn(heads * dim // 2, heads * dim).half(), group_size=32)
    for call in (
        rt.rms_norm,
        rt.softmax,
        rt.silu_mul,
        lambda x, **o: rt.add_rms_norm(x, x, residual_out=torch.empty_like(x).contiguous(), **o)[0],
        lambda x, **o: rt.w4a16_matmul(x, w, **o),
        lambda x, **o: rt.linear(x, w.dequantize(dtype="float16"), **o),
    ):
        expected = call(x)
        out = far(torch.full_like(expected, torch.nan))
        closeness.assert_bits_equal(call(far(x), out=out), expected)

    q, k, v = (x.view(batch, tokens, heads, dim) for _ in "qkv")
    cos, sin = torch.rand(2, 8, dim // 2).half()
    positions = torch.arange(tokens).expand(batch, tokens)
    for ours, right in zip(
        rt.rope(far(q), far(k), cos, sin, positions), rt.rope(q, k, cos, sin, positions), strict=True
    ):
        closeness.assert_bits_equal(ours, right)
    expected, lse = rt.prefill_attention(q, k, v, return_lse=True)
    out = far(torch.full_like(q, torch.nan))
    rt.prefill_attention(far(q), far(k), far(v), out=out)
    closeness.assert_bits_equal(out, expected)
    closeness.assert_bits_equal(
        rt.merge_attention(far(expected), lse, far(expected), lse)[0],
        rt.merge_attention(expected, lse, expected, lse)[0],
    )
    caches = [rt.KVCache(batch, tokens, heads, dim, format="int8", dtype="float16") for _ in range(2)]
    caches[0].append(k, v)
    caches[1].append(far(k), far(v))
    assert torch.equal(*(cache._arrays["pool"] for cache in caches))
    out = far(torch.full_like(q, torch.nan))
    closeness.assert_bits_equal(rt.decode_attention(far(q), caches[1], out=out), rt.decode_attention(q, caches[0]))


@pytest.mark.parametrize("format", ["fp16", "int4-kivi"])
def test_pages_past_32_bits(format):
    """The second page lies past 2^31 elements, the third past 2^32. Pages of nobody are not written."""
    heads, dim, page, dtype = 2, 64, 32, torch.float16
    inner = (2, page, heads, dim) if format == "fp16" else (heads, oracle.block_bytes(format, page, dim))
    element = dtype if format == "fp16" else torch.uint8
    near = torch.empty(inner, dtype=element)
    pool = cases.far_apart((4, *inner), element, (2**31 + 64, *near.stride()))
    table = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32)
    sizes = {} if format == "fp16" else {"page_size": page, "head_dim": dim}
    ring = None
    if format == "int4-kivi":
        rows = torch.zeros(2, heads, 64, dim, dtype=dtype)
        ring = (rows, rows.clone(), torch.zeros(2, dtype=torch.int32))
    view = rt.PagedKVCache.view(
        pool, table, torch.zeros(2, dtype=torch.int32), format=format, dtype="float16", ring=ring, **sizes
    )
    own = rt.KVCache(2, 64, heads, dim, format=format, dtype="float16")
    k, v = torch.randn(2, 2, 40, heads, dim).half()
    view.append(k[:1, :31], v[:1, :31], rows=[0])
    assert not pool[[0, 1, 3]].any()
    view.append(k[:1, 31:], v[:1, 31:], rows=[0])
    view.append(k[1:], v[1:], rows=[1])
    own.append(k, v)
    for row in range(2):
        for ours, right in zip(view.dequantize(row), own.dequantize(row), strict=True):
            closeness.assert_bits_equal(ours, right)
    q = torch.randn(2, 3, 2 * heads, dim).half()
    closeness.assert_bits_equal(rt.decode_attention(q, view), rt.decode_attention(q, own))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_two_views_on_one_pool(format, device):
    """Each appends in turn: what the other has stored, scales too, stays."""
    heads, dim, page = 2, 64, 32
    pool = torch.zeros(3, heads, oracle.block_bytes(format, page, dim), dtype=torch.uint8, device=device)
    table = torch.tensor([[1, 2, 0]], dtype=torch.int32, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    options = {"format": format, "dtype": "float16", "page_size": page, "head_dim": dim}
    first, second = (rt.PagedKVCache.view(pool, table, lengths, **options) for _ in range(2))
    own = rt.KVCache(1, 96, heads, dim, format=format, dtype="float16", device=device)
    for i, size in enumerate((20, 1, 30, 7)):
        k, v = torch.randn(2, 1, size, heads, dim, generator=torch.Generator().manual_seed(i)).half().to(device)
        (first, second)[i % 2].append(k, v)
        own.append(k, v)
    for view in (first, second):
        for ours, right in zip(view.dequantize(0), own.dequantize(0), strict=True):
            closeness.assert_bits_equal(ours, right)
