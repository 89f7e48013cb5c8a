# SPDX-License-Identifier: Apache-2.0
"""Decode attention on a GPU over what must not be there: bad pages and rows, NaN nobody sees, scales beyond fp16."""

import cases
import pytest
import rooftile as rt
import torch
from attention_checks import KIVI

if cases.devices() == ("cpu",):
    pytest.skip("no GPU, or a build without GPU kernels", allow_module_level=True)

FORMATS = (
    ("fp16", "float16"),
    ("bf16", "bfloat16"),
    ("int8", "float16"),
    ("fp8", "float16"),
    ("int4", "bfloat16"),
    ("int4-kivi", "float16"),
    ("int4-kivi", "bfloat16"),
    ("int4-kivi-sym", "float16"),
    ("int8-kivi-sym", "float16"),
)
formats = pytest.mark.parametrize(("format", "dtype"), FORMATS)
HEADS, DIM = 2, 128


def normal(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).cuda()


def paged(format, dtype, lengths, pages=128, page_size=64):
    cache = rt.PagedKVCache(
        pages, page_size, HEADS, DIM, max_rows=len(lengths), format=format, dtype=dtype, device="cuda"
    )
    for row, length in enumerate(lengths):
        k, v = (normal((1, length, HEADS, DIM), dtype, 10 * row + i) for i in (1, 2))
        cache.append(k, v, rows=[row])
    return cache


@pytest.mark.parametrize(
    ("format", "dtype", "page_size"),
    [(*f, 64) for f in FORMATS] + [(*f, 16) for f in FORMATS if f[0] not in KIVI],
)
@pytest.mark.parametrize("length", [100, 5000])
@pytest.mark.parametrize("bad", [-1, 512, 2**31 - 1])
def test_a_row_with_a_bad_page_is_left_alone(format, dtype, page_size, length, bad):
    cache = paged(format, dtype, (200, length, 333), pages=512, page_size=page_size)
    q = normal((3, 1, 4 * HEADS, DIM), dtype)
    right = rt.decode_attention(q, cache)
    entry = (length // page_size) // 2 | 1  # in the middle; of 16 tokens the second page of a tile of codes
    cache.block_table[1, entry] = bad
    out = torch.full_like(q, 7)
    rt.decode_attention(q, cache, out=out)
    torch.cuda.synchronize()
    assert (out[1] == 7).all()
    assert torch.equal(out[0], right[0]) and torch.equal(out[2], right[2])
    with pytest.raises(rt.ArgumentError, match="row 1"):
        rt.decode_attention(q, cache)


def test_a_pool_without_pages():
    pool = torch.empty(0, 2, 16, HEADS, DIM, dtype=torch.float16, device="cuda")
    table, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[0]], [16]))
    cache = rt.PagedKVCache.view(pool, table, lengths, format="fp16")
    q = normal((1, HEADS, DIM), "float16")
    out = torch.full_like(q, 7)
    rt.decode_attention(q, cache, out=out)
    torch.cuda.synchronize()
    assert (out == 7).all()
    with pytest.raises(rt.ArgumentError, match="page"):
        rt.decode_attention(q, cache)


@formats
def test_a_bad_row_is_named_by_its_place(format, dtype):
    cache = paged(format, dtype, (40, 50))
    q = normal((3, 1, HEADS, DIM), dtype)
    for bad in (-1, 2, 99):
        rows = torch.tensor([0, bad, 1], dtype=torch.int32, device="cuda")
        out = torch.full_like(q, 7)
        rt.decode_attention(q, cache, rows=rows, out=out)
        torch.cuda.synchronize()
        assert (out[1] == 7).all() and not (out[0] == 7).all() and not (out[2] == 7).all()
        with pytest.raises(rt.ArgumentError, match=r"batch entry 1\b"):
            rt.decode_attention(q, cache)


@formats
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [70, 96, 128, 161])
@pytest.mark.parametrize(("t", "group", "late"), [(7, 3, 2), (4, 2, 1), (2, 3, 1)])  # more than 8 columns, 8 and fewer
def test_what_a_later_token_holds_does_not_reach_an_earlier_query(format, dtype, what, length, t, group, late):
    k, v = (normal((1, length, HEADS, DIM), dtype, i) for i in (1, 2))
    q = normal((1, t, group * HEADS, DIM), dtype, 3)
    outs = []
    for spoilt in (False, True):
        cache = rt.KVCache(1, 256, HEADS, DIM, format=format, dtype=dtype, device="cuda")
        values = v.clone()
        if spoilt:
            values[:, -late:] = what
        cache.append(k, values)
        outs.append(rt.decode_attention(q, cache))
    clean, spoilt = outs
    assert torch.equal(spoilt[:, : t - late], clean[:, : t - late])
    assert not spoilt[:, t - late :].isfinite().any()


@pytest.mark.parametrize(("scale", "channel"), [(1e6, 1), (1e30, 1), (1e-9, 1), (1, 500), (1e30, 500), (1e-9, 500)])
def test_keys_of_a_bf16_cache_beyond_fp16(scale, channel):
    """All of K times `scale` and a channel of it times `channel` more, the query divided by as much."""
    length = 200
    k, v = (normal((1, length, HEADS, DIM), "bfloat16", i) for i in (1, 2))
    q = normal((1, 1, 2 * HEADS, DIM), "bfloat16", 3)
    k, q = k * scale, q / scale
    k[..., 5] *= channel
    q[..., 5] /= channel
    cache = rt.KVCache(1, 256, HEADS, DIM, format="int4-kivi", dtype="bfloat16", device="cuda")
    cache.append(k, v)
    keys, values = (torch.as_tensor(x).double() for x in cache.to("cpu").dequantize(0))
    got = rt.decode_attention(q, cache)[0, 0].double().cpu()
    for head in range(2 * HEADS):
        logits = keys[:, head // 2] @ q[0, 0, head].double().cpu() * DIM**-0.5
        exact = logits.softmax(0) @ values[:, head // 2]
        assert (got[head] - exact).norm() <= 0.02 * exact.norm(), head


@formats
def test_a_row_has_the_same_bits_alone_and_among_many(format, dtype):
    """Alone several blocks share it and the combine writes it; among many one block has it whole."""
    cache = paged(format, dtype, (1000,) * 48, pages=48 * 16)
    q = normal((48, 1, 4 * HEADS, DIM), dtype)
    sinks = torch.linspace(-3, 3, 4 * HEADS, device="cuda")
    with rt.record_kernels() as names:
        many, many_lse = rt.decode_attention(q, cache, sinks=sinks, return_lse=True)
        for b in (0, 17, 47):
            rows = torch.tensor([b], dtype=torch.int32, device="cuda")
            one, lse = rt.decode_attention(q[b : b + 1], cache, rows=rows, sinks=sinks, return_lse=True)
            assert torch.equal(one[0], many[b]) and torch.equal(lse[0], many_lse[b])
    name = f"cuda_{dtype}_{format}_d{DIM}"
    assert names == [name] * 4


def test_a_ring_that_starts_oddly_is_refused():
    shape = (1, HEADS, 64, DIM)
    odd = [torch.empty(HEADS * 64 * DIM + 1, dtype=torch.float16, device="cuda")[1:].view(shape) for _ in range(2)]
    block = rt._C.kv_block_bytes("int4-kivi", 32, DIM)
    pool = torch.zeros(4, HEADS, block, dtype=torch.uint8, device="cuda")
    table, lengths, raw_from = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[0, 1]], [32], [32]))
    cache = rt.PagedKVCache.view(
        pool, table, lengths, format="int4-kivi", dtype="float16", page_size=32, head_dim=DIM, ring=(*odd, raw_from)
    )
    with pytest.raises(rt.NotSupportedError, match="ring"):
        rt.decode_attention(normal((1, HEADS, DIM), "float16"), cache)


@formats
def test_queries_of_any_strides(format, dtype):
    cache = paged(format, dtype, (700,))
    q = normal((1, 2, 4 * HEADS, DIM), dtype)
    right = rt.decode_attention(q, cache)
    wide = torch.empty(1, 2, 4 * HEADS, 2 * DIM, dtype=q.dtype, device="cuda")[..., ::2]
    odd = torch.empty(2 * 4 * HEADS * DIM + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
    turned = torch.empty(1, 4 * HEADS, 2, DIM, dtype=q.dtype, device="cuda").transpose(1, 2)
    for other in (wide, odd, turned):
        other.copy_(q)
        assert torch.equal(rt.decode_attention(other, cache), right)
