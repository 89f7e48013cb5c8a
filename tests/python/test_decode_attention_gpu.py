# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of decode attention: bits, graphs, faults that kernels find, KV splits, vast pools.

Its values are checked where the CPU's are: test_decode_attention.py."""

import attention_checks as checks
import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from attention_checks import filled, tokens
from closeness import ATTENTION_BOUND, assert_bits_equal, assert_close, to_numpy64

GPUS = tuple(device for device in cases.devices() if device != "cpu")
if not GPUS:
    pytest.skip("no GPU, or a build without GPU kernels", allow_module_level=True)

# Lengths on both sides of where a row gets one KV split more, and its splits more units: 256 tokens a split up to 3072
# (with 16 packed rows up to 4096), 256 (512 in 4-bit codes) up to 8192, 512 up to 16384, 1024 after that.
LONG = (1, 33, 128, 129, 1000, 2048, 2081, 3072, 3073, 3137, 4096, 4097, 4129, 8192, 8193, 8225, 16384, 16417, 20000)
stores = pytest.mark.parametrize(("format", "dtype"), checks.GPU_STORES)


def queries(batch, t, heads, dim, dtype, *key):
    q = cases.values((batch, t, heads, dim), dtype, "q", *key)
    return q, cases.tensor(q, dtype).cuda()


@pytest.mark.parametrize("heads", [4, 16])
@stores
def test_extreme_logits(format, dtype, heads):
    """Logits of -1e5 and more beside ordinary ones: no infinity, no NaN, the right winner.

    They fill whole groups: a group with both has lost its small values when it was encoded.
    """
    rows = tokens((90, 300), 1, 64, dtype)
    for k, _ in rows:
        for begin in range(32, len(k), 64):
            k[begin : begin + 32] = oracle.round_to(-300.0 * np.abs(k[begin : begin + 32]), dtype)
    cache = filled(rows, format, dtype)
    q64 = np.abs(cases.values((2, 1, heads, 64), dtype, "positive")) * 40
    q64 = oracle.round_to(q64, dtype)
    out, lse = rt.decode_attention(cases.tensor(q64, dtype).cuda(), cache.to("cuda"), return_lse=True)
    exact, naive, exact_lse = checks.expect_decode(cache, q64)
    assert_close(out, naive, exact)
    assert torch.isfinite(lse).all() and np.allclose(to_numpy64(lse), exact_lse, rtol=2e-2)


@pytest.mark.parametrize("heads", [4, 16])
@stores
def test_logits_far_below_zero(format, dtype, heads):
    """Every logit is -96,000, so every weight is that of all others and none can be taken from a maximum of 0."""
    rows = [(np.full_like(k, -300.0), v) for k, v in tokens((33, 90, 300), 1, 64, dtype)]
    cache = filled(rows, format, dtype)
    q64 = np.full((3, 1, heads, 64), 40.0)
    out, lse = rt.decode_attention(cases.tensor(q64, dtype).cuda(), cache.to("cuda"), return_lse=True)
    exact, _, exact_lse = checks.expect_decode(cache, q64)
    assert np.abs(to_numpy64(out) - exact).max() <= {"float16": 2e-3, "bfloat16": 2e-2}[dtype]
    # a query times a kivi scale is rounded to fp16 once, here in every channel to the same side (int4-kivi: scale 0)
    rtol = 2.0**-11 if format in ("int4-kivi-sym", "int8-kivi-sym") and dtype == "float16" else 2e-6
    assert np.allclose(to_numpy64(lse), exact_lse, rtol=rtol, atol=0)


@pytest.mark.parametrize("scale", [2.0**-7, 2.0**8])
@pytest.mark.parametrize("heads", [4, 32])
@stores
def test_small_and_large_values(format, dtype, heads, scale):
    """Scales far from 1: what goes through fp16 on the way has the range for it."""
    rows = [(k, oracle.round_to(v * scale, dtype)) for k, v in tokens((70, 700), 2, 64, dtype)]
    cache = filled(rows, format, dtype)
    q64, q = queries(2, 1, heads, 64, dtype)
    out = rt.decode_attention(q, cache.to("cuda"))
    exact, naive, _ = checks.expect_decode(cache, q64)
    assert_close(out, naive, exact, frobenius=ATTENTION_BOUND[dtype])


@pytest.mark.parametrize("heads", [4, 32])
@stores
def test_values_that_grow_along_a_row(format, dtype, heads):
    """Sums of coded values count in a unit that follows the largest scale so far: here it grows again and again, also
    from tile to tile of one warp, which has several where KV splits are longer than 128 tokens."""
    rows = []
    for k, v in tokens((70, 700, 9000), 2, 64, dtype):
        growth = 2.0 ** (np.arange(len(v)) // 40 % 12 - 6)
        rows.append((k, oracle.round_to(v * growth[:, None, None], dtype)))
    cache = filled(rows, format, dtype)
    q64, q = queries(len(rows), 1, heads, 64, dtype)
    out = rt.decode_attention(q, cache.to("cuda"))
    exact, naive, _ = checks.expect_decode(cache, q64)
    assert_close(out, naive, exact, frobenius=ATTENTION_BOUND[dtype])


# ---------------------------------------------------------------- the same row, the same bits


@stores
def test_a_row_does_not_depend_on_its_neighbours(format, dtype):
    heads, kv_heads, dim = 8, 2, 128
    for n in LONG:
        (k, v), *_ = tokens((n,), kv_heads, dim, dtype, n)
        k, v = cases.tensor(k, dtype)[None].cuda(), cases.tensor(v, dtype)[None].cuda()
        _, q = queries(1, 1, heads, dim, dtype, n)
        seen = []
        # small batches of short rows are clusters, by the capacity; a larger one, of rows as long and of others, a grid
        for batch, at, others in ((1, 0, 0), (1, 0, 9000), (2, 1, n), (7, 3, 777), (64, 63, 40), (40, 0, 2000)):
            cache = rt.KVCache(batch, max(n, others) + at, kv_heads, dim, format=format, dtype=dtype, device="cuda")
            cache.append(k, v, rows=[at])
            if others:
                noise = torch.randn(1, others, kv_heads, dim, device="cuda").to(k.dtype)
                for row in range(batch):
                    if row != at:
                        cache.append(noise, noise, rows=[row])
            many = torch.randn(batch, 1, heads, dim, device="cuda").to(q.dtype)
            many[at] = q[0]
            out, lse = rt.decode_attention(many, cache, return_lse=True)
            seen.append((out[at], lse[at]))
        for out, lse in seen[1:]:
            assert_bits_equal(out, seen[0][0], f"length {n}:")
            assert_bits_equal(lse, seen[0][1], f"length {n}:")


SPLIT, MOST = 256, 3072  # tokens of a KV split, and up to how many tokens splits have that size in every format


@pytest.mark.parametrize("window", [None, 100, 3080])
@pytest.mark.parametrize(
    "length", [SPLIT - 32, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 32, MOST - 32, MOST, MOST + 1, MOST + 32]
)
@stores
def test_tokens_at_once_and_one_by_one(format, dtype, length, window):
    """The same logits, but KV splits begin elsewhere: weights are rounded around other maxima, sums in other orders.

    Either side rounds the weights that meet the values to 16 bits, by u of each or 2^-24 of the largest, and what it
    stores. The values are |v|, of a coded token (u - 8) * scale, which is at most 16 / 15 of its largest |v|. The rest
    is fp32: an exponential (2^-20) and fewer than length / 128 + 64 additions that one weight goes through, 2^-23 each.
    """
    t, heads, kv_heads, dim = 16, 8, 2, 64
    units = {"float16": 2.0**-11, "bfloat16": 2.0**-9}
    # codes meet fp16 weights whatever the cache's dtype, raw tokens weights of that dtype
    unit = units[dtype if format in ("fp16", "bf16", *checks.KIVI) else "float16"]
    fp32 = 2.0**-20 + 2.0**-23 * (length / 128 + 64)
    (k, v), *_ = tokens([length], kv_heads, dim, dtype, length)
    cache = filled([(k[: length - t], v[: length - t])], format, dtype, capacity=length)
    gpu = cache.to("cuda")
    q64, q = queries(1, t, heads, dim, dtype, length)
    singles = []
    for i in range(length - t, length):
        new = [cases.tensor(x[None, i : i + 1], dtype) for x in (k, v)]
        cache.append(*new)
        gpu.append(*(x.cuda() for x in new))
        singles.append(rt.decode_attention(q[:, i - length :][:, :1], gpu, window=window, return_lse=True))
    out, lse = (to_numpy64(x) for x in rt.decode_attention(q, gpu, window=window, return_lse=True))
    out_1, lse_1 = (to_numpy64(torch.cat(x, 1)) for x in zip(*singles, strict=True))
    spread, largest = np.zeros(out.shape), 0.0  # sum p |v|
    for i, j, seen_k, seen_v, positions in checks.seen_by_decode(cache, 0, t):
        options = {"q_positions": positions, "window": window}
        size = np.abs(seen_v)
        if format == "int4-kivi":
            size[:] = 16 / 15 * size.max(axis=-1, keepdims=True)
        spread[0, i:j], _ = oracle.attention_reference(q64[0, i:j], seen_k, size, **options)
        largest = max(largest, size.max())
    visible = min(length, window or length)
    allowed = 2 * ((unit + fp32) * spread + 2.0**-24 * visible * largest + units[dtype] * np.abs(out))
    assert (np.abs(out - out_1) <= allowed).all(), f"{(np.abs(out - out_1) / allowed).max()} of what is allowed"
    allowed = 2 * fp32 + 2.0**-22 * np.abs(lse)
    assert (np.abs(lse - lse_1) <= allowed).all(), f"{(np.abs(lse - lse_1) / allowed).max()} of what is allowed"


@pytest.mark.parametrize("dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("t", [1, 4, 16, 32])
@pytest.mark.parametrize("format", checks.KIVI)
def test_as_many_raw_tokens_as_there_can_be(format, t, dim):
    """Queries of two groups: raw are the first one's group and what the other has so far, up to 63 tokens."""
    for lengths in ((t, 32, 31 + t), (33, 32 + t, 63 + t), (127 + t, 128 + t, 159 + t, 2079 + t)):
        cache = filled(tokens(lengths, 2, dim, "float16", t, dim), format, "float16")
        checks.run_and_check(cache, queries(len(lengths), t, 4, dim, "float16", lengths[0])[0], "cuda")


@stores
def test_graph_replay_follows_lengths_and_tables(format, dtype):
    heads, kv_heads, dim, page, rows = 8, 2, 64, 32, 5
    rng = cases.generator("graph", format, dtype)
    host = rt.PagedKVCache(400, page, kv_heads, dim, max_rows=rows, max_pages_per_row=80, format=format, dtype=dtype)
    noise = torch.randn(rows, 80 * page, kv_heads, dim).to(cases.torch_dtype(dtype))
    host.append(noise, noise.flip(1))
    cache = host.to("cuda")
    _, q = queries(rows, 1, heads, dim, dtype)
    out = torch.empty_like(q)
    rt.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rt.decode_attention(q, cache, out=out)
    table, lengths = cache.block_table, cache.seq_lens
    for _ in range(100):
        new = [int(n) for n in rng.integers(0, 80 * page + 1, rows)]
        if format in checks.KIVI:  # the raw tokens in the rings are those of whole groups only
            new = [n // 32 * 32 for n in new]
            cache._arrays["raw_from"].zero_()
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        table.copy_(torch.from_numpy(rng.permutation(400).reshape(rows, 80).astype(np.int32)))
        q.normal_()
        graph.replay()
        assert_bits_equal(out, rt.decode_attention(q, cache), f"lengths {new}:")


@pytest.mark.slow
@stores
def test_pages_past_2_to_the_32_bytes(format, dtype):
    """The same tokens in the first pages of a pool and in its last: the same bytes there, the same bits, nothing else
    written."""
    heads, dim, page, n = 2, 128, 128, 300
    shape = (heads, oracle.block_bytes(format, page, dim))
    kind = torch.uint8
    if format in checks.ELEMENT:
        shape, kind = (2, page, heads, dim), cases.torch_dtype(dtype)
    page_bytes = int(np.prod(shape)) * kind.itemsize
    pages = 2**32 // page_bytes + 2**31 // page_bytes
    if torch.cuda.mem_get_info()[0] < 2 * pages * page_bytes:
        pytest.skip(f"needs {2 * pages * page_bytes / 1e9:.0f} GB of free GPU memory")
    pool = torch.empty((pages, *shape), dtype=kind, device="cuda")
    everything = pool.view(torch.uint8)
    everything.fill_(0xA5)
    table = torch.tensor([[0, 1, 2], [pages - 1, pages - 2, pages - 3]], dtype=torch.int32, device="cuda")
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    sizes = {} if format in checks.ELEMENT else {"page_size": page, "head_dim": dim}
    cache = rt.PagedKVCache.view(pool, table, lengths, format=format, dtype=dtype, **sizes)
    k, v = torch.randn(2, 1, n, heads, dim, device="cuda").to(cases.torch_dtype(dtype)).expand(2, 2, n, heads, dim)
    cache.append(k[:, :250], v[:, :250])
    for i in range(250, n):
        cache.append(k[:, i : i + 1], v[:, i : i + 1])
    q = torch.randn(1, 4, 8, dim, device="cuda").to(k.dtype).expand(2, 4, 8, dim)
    out, lse = rt.decode_attention(q, cache, return_lse=True)
    assert_bits_equal(out[1], out[0])
    assert_bits_equal(lse[1], lse[0])
    host = rt.KVCache(1, n, heads, dim, format=format, dtype=dtype)
    host.append(k[:1].cpu(), v[:1].cpu())
    exact, naive, _ = checks.expect_decode(host, to_numpy64(q)[:1])
    assert_close(out[:1], naive, exact, frobenius=ATTENTION_BOUND[dtype])
    assert torch.equal(everything[:3], everything[-3:].flip(0))
    for part in everything[3:-3].split(4096):
        assert (part == 0xA5).all()


@stores
def test_strides_and_outputs(format, dtype):
    cache = filled(tokens((70, 300), 2, 64, dtype), format, dtype).to("cuda")
    _, q = queries(2, 3, 4, 64, dtype)
    expected, expected_lse = rt.decode_attention(q, cache, return_lse=True)
    layouts = {
        "heads outermost": q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "every second element": torch.stack([q, q], -1).flatten(-2)[..., ::2],
        "odd offset": torch.cat([q.flatten()[:1], q.flatten()]).as_strided(q.shape, q.stride(), 1),
        "padded rows": torch.cat([q, q], -1)[..., :64],
    }
    for name, view in layouts.items():
        room = torch.full((2, 3, 4, 130), 7.0, dtype=q.dtype, device="cuda")
        out, lse = room[..., 1:129:2], torch.full((2, 3, 8), 7.0, device="cuda")[..., ::2]
        rt.decode_attention(view, cache, out=out, lse=lse)
        assert_bits_equal(out, expected, name)
        assert_bits_equal(lse, expected_lse, name)
        assert (room[..., 0::2] == 7).all() and (room[..., 129] == 7).all(), name


# ---------------------------------------------------------------- what cannot be


@stores
def test_what_only_the_kernels_see(format, dtype):
    """A row number, a length, a count or a page out of range: that row is left alone, and the next call says so."""
    host = filled(tokens((70, 300, 33), 2, 64, dtype), format, dtype)
    cache = host.to("cuda")
    _, q = queries(3, 2, 4, 64, dtype)
    good = rt.decode_attention(q, cache)

    def after(name, **options):
        out = torch.full_like(q, 7.0)
        rt.decode_attention(q, cache, out=out, **options)
        torch.cuda.synchronize()
        with pytest.raises(rt.ArgumentError, match=name):
            rt.decode_attention(q, cache)
        assert_bits_equal(rt.decode_attention(q, cache), good)
        return out

    out = after("rows named", rows=torch.tensor([0, 99, 2], dtype=torch.int32, device="cuda"))
    assert (out[1] == 7).all()
    assert_bits_equal(out[0::2], good[0::2])
    out = after("counts was", counts=torch.tensor([2, 2, 3], dtype=torch.int32, device="cuda"))
    assert (out[2] == 7).all()
    cache.seq_lens[1] = 10**6
    out = torch.full_like(q, 7.0)
    rt.decode_attention(q, cache, out=out)
    torch.cuda.synchronize()
    cache.seq_lens[1] = 300
    with pytest.raises(rt.ArgumentError, match="length"):
        rt.decode_attention(q, cache)
    assert (out[1] == 7).all()
    assert_bits_equal(rt.decode_attention(q, cache), good)


def test_a_page_that_is_not_there():
    cache = rt.PagedKVCache(8, 32, 1, 64, max_rows=1, format="int8", dtype="float16", device="cuda")
    k = torch.randn(1, 100, 1, 64, dtype=torch.float16, device="cuda")
    cache.append(k, k)
    q = torch.randn(1, 1, 64, dtype=torch.float16, device="cuda")
    good = rt.decode_attention(q, cache)
    table = cache.block_table.clone()
    cache.block_table[0, 1] = 8
    rt.decode_attention(q, cache)
    torch.cuda.synchronize()
    with pytest.raises(rt.ArgumentError, match="block_table"):
        rt.decode_attention(q, cache)
    cache.block_table.copy_(table)
    assert_bits_equal(rt.decode_attention(q, cache), good)


def test_what_is_not_compiled_is_named():
    cache = rt.KVCache(1, 64, 1, 80, format="int8", dtype="float16", device="cuda")
    with pytest.raises(
        rt.NotSupportedError,
        match=r"float16 int8 d80; compiled: float16 fp16, .*; head_dim 64, 96, 128, 192, 256, 512$",
    ):
        rt.decode_attention(torch.zeros(1, 2, 80, dtype=torch.float16, device="cuda"), cache)
    cache = rt.KVCache(1, 64, 1, 64, format="int8", dtype="float16", device="cuda")
    with pytest.raises(rt.ArgumentError, match="q must be on cache's device cuda:0"):
        rt.decode_attention(torch.zeros(1, 2, 64, dtype=torch.float16), cache)
    with pytest.raises(rt.NotSupportedError, match="plan"):
        rt.decode_attention(torch.zeros(1, 2, 64, dtype=torch.float16, device="cuda"), cache, plan="avx512")


def test_empty():
    cache = rt.KVCache(2, 64, 2, 64, format="int4-kivi", dtype="float16", device="cuda")
    for shape in ((0, 4, 64), (2, 0, 4, 64)):
        out, lse = rt.decode_attention(torch.zeros(shape, dtype=torch.float16, device="cuda"), cache, return_lse=True)
        assert out.shape == shape and lse.shape == shape[:-1]
    out, lse = rt.decode_attention(torch.ones(2, 4, 64, dtype=torch.float16, device="cuda"), cache, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
