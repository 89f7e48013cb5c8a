# SPDX-License-Identifier: Apache-2.0
"""The small ops against the float64 oracle: values to 1 ulp, strides, in-place outputs, edges of the number formats."""

import functools
import math

import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from closeness import assert_bits_equal, assert_close, assert_ulp, dtype_name, to_numpy64, ulp_error

HIDDEN = (*cases.HIDDEN, 4099, 20000)
ROTARY = ((64, 32), (64, 3), (128, 24), (96, 40), (80, 40), (59, 29), (48, 0), (1, 0), (256, 48))  # head_dim, pairs


def data(device, shape, dtype, *key, **kw):
    array = cases.values(shape, dtype, *key, **kw)
    return array, cases.tensor(array, dtype, device)


def assert_right(y, op, *args, terms=0.0, frobenius=1e-6, **options):
    """Against op, an oracle function: 16-bit results to a unit, since float32 arithmetic leaves them only their own
    rounding; float32 results at most twice as wrong as a plain float32 program."""
    exact = op(*args, **options)
    if dtype_name(y) == "float32":
        assert_close(y, op(*args, **options, dtype=np.float32), exact, frobenius=frobenius)
    else:
        assert_ulp(y, exact, terms=terms)


def gelu(x, approximate, dtype=np.float64):
    """oracle.gelu_mul; naive in float32 as the formulas stand."""
    if dtype is np.float64:
        return oracle.gelu_mul(x, approximate)
    gate, up = np.split(np.asarray(x).astype(dtype), 2, axis=-1)
    inner = np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    if approximate == "none":
        inner = np.vectorize(math.erf, otypes=[dtype])(gate / np.sqrt(dtype(2)))
    return dtype(0.5) * gate * (1 + inner).astype(dtype) * up


def near(x, device):
    """The size of a normalised mean, against which values near it cancel. Sums in double lose nothing there."""
    return 0.0 if device == "cpu" else np.abs(x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)


def angles(positions, pairs, dtype):
    angle = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(pairs) / max(pairs, 1))
    return tuple(oracle.round_to(f(angle), dtype) for f in (np.cos, np.sin))


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("hidden", HIDDEN)
def test_norms(hidden, dtype, device, plan):
    x, tx = data(device, (3, hidden), dtype, "x", hidden, spread=3.0, mean=0.5)
    r, tr = data(device, (3, hidden), dtype, "r", hidden)
    w, tw = data(device, (hidden,), dtype, "w", hidden, mean=1.0)
    b, tb = data(device, (hidden,), "float32", "b", hidden)
    assert_right(rt.rms_norm(tx, plan=plan), oracle.rms_norm, x)
    assert_right(rt.rms_norm(tx, tw, 1e-5, plan=plan), oracle.rms_norm, x, w, 1e-5)
    y, s = rt.add_rms_norm(tx, tr, tw, plan=plan)
    total = oracle.round_to(x + r, dtype)
    assert_right(y, oracle.rms_norm, total, w)
    assert (to_numpy64(s) == total).all()
    assert_right(rt.layer_norm(tx, plan=plan), oracle.layer_norm, x, terms=near(x, device))
    biased = np.maximum(np.abs(b), near(x, device) * np.abs(w))
    assert_right(rt.layer_norm(tx, tw, tb, 1e-6, plan=plan), oracle.layer_norm, x, w, b, 1e-6, terms=biased)
    y, s = rt.add_layer_norm(tx, tr, tw, tb, plan=plan)
    biased = np.maximum(np.abs(b), near(total, device) * np.abs(w))
    assert_right(y, oracle.layer_norm, total, w, b, terms=biased)
    assert (to_numpy64(s) == total).all()


@pytest.mark.parametrize("hidden", [1, 33, 640, 4096, 20000])
def test_an_offset_of_the_weight(hidden, dtype, device, plan):
    x, tx = data(device, (3, hidden), dtype, "x", hidden)
    r, tr = data(device, (3, hidden), dtype, "r", hidden)
    total = oracle.round_to(x + r, dtype)
    for kind in {dtype, "float32"}:
        w, tw = data(device, (hidden,), kind, "w", hidden, spread=0.1)
        assert_right(rt.rms_norm(tx, tw, weight_offset=1.0, plan=plan), oracle.rms_norm, x, w + 1)
        y, s = rt.add_rms_norm(tx, tr, tw, weight_offset=-0.5, plan=plan)
        assert_right(y, oracle.rms_norm, total, w - 0.5)
        assert (to_numpy64(s) == total).all()
    for norm in (rt.rms_norm, functools.partial(rt.add_rms_norm, residual=tr)):
        with pytest.raises(rt.ArgumentError, match="rms_norm: weight_offset needs a weight, got none and 1"):
            norm(tx, weight_offset=1.0, plan=plan)
        with pytest.raises(rt.ArgumentError, match="rms_norm: weight_offset must be finite, got nan"):
            norm(tx, weight=tw, weight_offset=math.nan, plan=plan)


@pytest.mark.parametrize("dim", [1, 9, 64, 96, 128, 256, 512, 520, 1024])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 1, 1), (5, 6, 2), (3, 2, 7), (70, 32, 8)])
def test_heads_of_q_and_k(dim, tokens, heads, kv_heads, dtype, device, plan):
    """As rms_norm of each, bit for bit: also of views of one tensor, in place."""
    if plan == "reference" and tokens > 5:
        pytest.skip("plain loops over 70 tokens")
    _, both = data(device, (tokens, heads + kv_heads, dim), dtype, "qk", dim, spread=3.0)
    q, k = both.split([heads, kv_heads], 1)
    _, q_weight = data(device, (dim,), dtype, "wq", dim, mean=1.0)
    for kind in {dtype, "float32"}:
        _, k_weight = data(device, (dim,), kind, "wk", dim, mean=1.0)
        expected = rt.rms_norm(q, q_weight, 1e-5, plan=plan), rt.rms_norm(k, k_weight, 1e-5, plan=plan)
        for got, right in zip(rt.qk_rms_norm(q, k, q_weight, k_weight, 1e-5, plan=plan), expected, strict=True):
            assert_bits_equal(got, right)
    got = rt.qk_rms_norm(q, k, q_weight, None, 1e-5, plan=plan)
    assert_bits_equal(got[1], rt.rms_norm(k, None, 1e-5, plan=plan))
    expected = [rt.rms_norm(x, q_weight, 1e-5, weight_offset=1.0, plan=plan) for x in (q, k)]
    got = rt.qk_rms_norm(q, k, q_weight, q_weight, 1e-5, weight_offset=1.0, q_out=q, k_out=k, plan=plan)
    for mine, right in zip(got, expected, strict=True):
        assert_bits_equal(mine, right)


def test_heads_of_q_and_k_that_do_not_fit(device):
    x = torch.zeros(2, 3, 64, device=device, dtype=torch.bfloat16)
    for k in (x[:1], x[..., :32], x[0], x[None]):
        with pytest.raises(
            rt.ArgumentError, match=r"qk_rms_norm: k must have q's shape .* but for its number of heads"
        ):
            rt.qk_rms_norm(x, k)
    with pytest.raises(rt.NotSupportedError, match="qk_rms_norm: q must have heads of at most 1024 elements"):
        rt.qk_rms_norm(*(torch.zeros(2, 1, 1025, device=device, dtype=torch.bfloat16),) * 2)
    with pytest.raises(rt.ArgumentError, match="qk_rms_norm: weight_offset needs a k_weight, got none and 1"):
        rt.qk_rms_norm(x, x, x[0, 0], weight_offset=1.0)


@pytest.mark.parametrize("hidden", [1, 8, 37, 576, 4096])
@pytest.mark.parametrize("ids", [(), (1,), (7,), (3, 130)])
def test_embedding(ids, hidden, dtype, device, plan):
    """Rows of tables of any strides, copied bit for bit, -0 too; scaled, one rounding."""
    _, weight = data(device, (50, hidden), dtype, "table", hidden, spread=3.0)
    chosen = cases.generator("ids", *ids).integers(0, 50, ids)
    index = torch.as_tensor(chosen, device=device)
    weight[chosen.flat[0] if chosen.size else 0, 0] = -0.0
    for table in (weight, weight.T.contiguous().T, torch.cat([weight, weight], 1)[:, :hidden]):
        for kind in (torch.int32, torch.int64):
            assert_bits_equal(rt.embedding(index.to(kind), table, plan=plan), weight[index.long()])
    got = rt.embedding(index, weight, scale=math.sqrt(576), plan=plan)
    assert_ulp(got, 24.0 * to_numpy64(weight)[chosen])
    got = rt.embedding(index, weight, scale=0.1, plan=plan)
    assert_ulp(got, float(np.float32(0.1)) * to_numpy64(weight)[chosen])


def test_ids_outside_the_table(device):
    weight = torch.ones(50, 40, device=device, dtype=torch.bfloat16)
    for bad in (-1, 50, 2**31, 2**40):
        ids = torch.tensor([3, bad, 49], device=device)
        if device == "cpu":
            with pytest.raises(rt.ArgumentError, match=rf"embedding: ids must lie in \[0, 50\).* got {bad} at index 1"):
                rt.embedding(ids, weight)
        else:
            got = rt.embedding(ids, weight)
            assert got[1].isnan().all() and (got[[0, 2]] == 1).all()
    with pytest.raises(rt.ArgumentError, match="embedding: out must have ids' dimensions and hidden = 40"):
        rt.embedding(torch.zeros(3, dtype=torch.int32, device=device), weight, out=weight.new_zeros(3, 41))


def test_norms_of_any_multiple_of_a_vector(device):
    """Widths of real models among them, whose number of warps is no power of two."""
    widths = {3584, 5120, 7168, *(8 * cases.generator("widths").integers(1, 1025, 40 if device == "cpu" else 200))}
    for hidden in sorted(int(width) for width in widths):
        x, tx = data(device, (2, hidden), "float16", "x", hidden, mean=0.5)
        w, tw = data(device, (hidden,), "float16", "w", hidden)
        assert_right(rt.rms_norm(tx, tw, 1e-5), oracle.rms_norm, x, w, 1e-5)
        assert_right(
            rt.layer_norm(tx, tw, None, 1e-5), oracle.layer_norm, x, w, None, 1e-5, terms=near(x, device) * np.abs(w)
        )


@pytest.mark.parametrize("size", [300.0, 6e4])
def test_large_values_do_not_overflow(size, dtype, device, plan):
    x = oracle.round_to(size * np.sign(cases.values((2, 576), "float32", size)), dtype)
    assert_right(rt.rms_norm(cases.tensor(x, dtype, device), plan=plan), oracle.rms_norm, x)
    assert_right(rt.layer_norm(cases.tensor(x, dtype, device), plan=plan), oracle.layer_norm, x)


@pytest.mark.parametrize("mean_square", [1e-7, 1e-6, 1e-5, 1e-4])
def test_eps_is_neither_raised_nor_dropped(mean_square, dtype, device, plan):
    x, tx = data(device, (4, 640), dtype, mean_square, spread=math.sqrt(mean_square))
    y = rt.rms_norm(tx, eps=1e-6, plan=plan)
    assert_right(y, oracle.rms_norm, x)
    assert dtype == "float32" or ulp_error(y, oracle.rms_norm(x), dtype).max() <= 1


def test_layer_norm_of_values_far_from_zero(dtype, device, plan):
    x, tx = data(device, (3, 1000), dtype, "far", mean=1000.0, spread=1.0)
    assert_right(rt.layer_norm(tx, plan=plan), oracle.layer_norm, x, frobenius=None)  # most of x cancels


def test_constant_and_zero_rows(dtype, device, plan):
    zero = torch.zeros(2, 33, dtype=cases.torch_dtype(dtype), device=device)
    assert (rt.rms_norm(zero, plan=plan) == 0).all()
    assert (rt.layer_norm(zero + 3, plan=plan) == 0).all()
    assert rt.rms_norm(zero, eps=0.0, plan=plan).isnan().all()


def test_norms_in_place(dtype, device, plan):
    _, x = data(device, (3, 100), dtype, "x")
    _, r = data(device, (3, 100), dtype, "r")
    _, w = data(device, (100,), dtype, "w")
    y, s = rt.add_rms_norm(x, r, w, plan=plan)
    x_, r_ = x.clone(), r.clone()
    got = rt.add_rms_norm(x_, r_, w, out=x_, residual_out=r_, plan=plan)
    assert got[0] is x_ and got[1] is r_
    assert_bits_equal(x_, y)
    assert_bits_equal(r_, s)
    x_, r_ = x.clone(), r.clone()  # crosswise
    rt.add_rms_norm(x_, r_, w, out=r_, residual_out=x_, plan=plan)
    assert_bits_equal(r_, y)
    assert_bits_equal(x_, s)


def test_an_output_that_overlaps_is_refused():
    buffer = torch.randn(8, 64)
    x, w = buffer[:, :32], torch.ones(32)
    before = buffer.clone()
    for out in (buffer[:, 1:33], buffer[:, 8:40], buffer[:, 0:64:2]):
        with pytest.raises(rt.ArgumentError, match="out overlaps x"):
            rt.rms_norm(x, w, out=out)
    with pytest.raises(rt.ArgumentError, match="residual_out must not share memory with out"):
        rt.add_rms_norm(x, x, w, out=buffer[:, 32:], residual_out=buffer[:, 32:])
    with pytest.raises(rt.ArgumentError, match="out must not share memory with weight"):
        rt.rms_norm(x[0], w, out=w)
    assert torch.equal(buffer, before)
    rt.rms_norm(x, w, out=buffer[:, 32:])  # the other half of the same rows lies apart
    assert_right(buffer[:, 32:], oracle.rms_norm, to_numpy64(before[:, :32]))


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize("dim,pairs", ROTARY)
@pytest.mark.parametrize("table", ["float32", "own"])
def test_rope(dim, pairs, table, dtype, device, plan):
    table = dtype if table == "own" else table
    q, tq = data(device, (2, 5, 3, dim), dtype, "q", dim)
    k, tk = data(device, (2, 5, 1, dim), dtype, "k", dim)
    cos, sin = angles(40, pairs, table)
    positions = cases.generator("p", dim).integers(0, 40, (2, 5))
    got = rt.rope(
        tq,
        tk,
        cases.tensor(cos, table, device),
        cases.tensor(sin, table, device),
        torch.from_numpy(positions).int().to(device),
        plan=plan,
    )
    for x, y in zip((q, k), got, strict=True):
        exact = oracle.rope(x, cos, sin, positions)
        assert_ulp(y, exact)
        assert (to_numpy64(y)[..., 2 * pairs :] == exact[..., 2 * pairs :]).all()


@pytest.mark.parametrize("dim,pairs", ROTARY)
def test_rope_in_place_leaves_the_rest_alone(dim, pairs, dtype, device, plan):
    """A NaN pattern in the columns that do not turn comes back bit for bit, and nothing beside the heads is touched."""
    cos, sin = (cases.tensor(t, "float32", device) for t in angles(40, pairs, "float32"))
    positions = torch.tensor([39, 0, 7], device=device)
    words = torch.int32 if dtype == "float32" else torch.int16
    whole = cases.tensor(cases.values((3, 6, dim), dtype, "in place", dim), dtype, device)
    nan = {"float32": 0x7FC12345, "float16": 0x7E55, "bfloat16": 0x7FD5}[dtype]
    whole.view(words)[..., 2 * pairs :] = nan
    expected = rt.rope(whole[:, 1:3], whole[:, 4:5], cos, sin, positions, plan=plan)
    inplace = whole.clone()
    rt.rope(
        inplace[:, 1:3], inplace[:, 4:5], cos, sin, positions, q_out=inplace[:, 1:3], k_out=inplace[:, 4:5], plan=plan
    )
    reference = whole.clone()
    reference[:, 1:3], reference[:, 4:5] = expected
    assert_bits_equal(inplace, reference)
    assert (inplace.view(words)[..., 2 * pairs :] == nan).all()


def test_rope_refuses_positions_outside_the_tables():
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    cos = sin = torch.ones(5, 4)
    for bad in (-1, 5, 2**31 - 1, -(2**31)):
        positions = torch.zeros(2, 3, dtype=torch.int32)
        positions[1, 2] = bad
        before = q.clone()
        with pytest.raises(rt.ArgumentError, match=r"positions must lie in \[0, 5\)"):
            rt.rope(q, k, cos, sin, positions, q_out=q)
        assert torch.equal(q, before)
    with pytest.raises(rt.ArgumentError, match="positions"):
        rt.rope(q, k, cos, sin, torch.full((2, 3), 2**40))
    for shape in ((2,), (3, 2), (2, 3, 1), ()):
        with pytest.raises(rt.ArgumentError, match="positions must have q's leading dimensions"):
            rt.rope(q, k, cos, sin, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(rt.ArgumentError, match="head_dim >= 8"):
        rt.rope(q[..., :6], k, cos, sin, torch.zeros(2, 3, dtype=torch.int64))
    rt.rope(q, k, cos, sin, torch.zeros(2, 3, dtype=torch.int64))


def test_rope_takes_one_token_and_flat_tokens():
    cos, sin = (cases.tensor(t, "float32") for t in angles(9, 4, "float32"))
    q, k = torch.randn(6, 3, 8), torch.randn(6, 2, 8)
    positions = torch.tensor([8, 0, 3, 3, 1, 2])
    flat = rt.rope(q, k, cos, sin, positions)
    square = rt.rope(q.view(2, 3, 3, 8), k.view(2, 3, 2, 8), cos, sin, positions.view(2, 3).int())
    for a, b in zip(flat, square, strict=True):
        assert_bits_equal(a, b.view(a.shape))
    one = rt.rope(q[2], k[2], cos, sin, positions[2])
    for a, b in zip(one, flat, strict=True):
        assert_bits_equal(a, b[2])


@pytest.mark.parametrize("paged", [False, True])
def test_rope_append_is_rope_then_append(paged, dtype, plan):
    format = {"float32": "fp32", "float16": "int8", "bfloat16": "int4-kivi"}[dtype]

    def make():
        if paged:
            return rt.PagedKVCache(5, 32, 2, 64, max_rows=3, format=format, dtype=dtype)
        return rt.KVCache(3, 128, 2, 64, format=format, dtype=dtype)

    together, apart = make(), make()
    cos, sin = (cases.tensor(t, "float32") for t in angles(90, 20, "float32"))
    rows, counts = [2, 0], [37, 12]
    for step in range(2):
        q, k, v = (data("cpu", (2, 40, h, 64), dtype, step, i)[1] for i, h in enumerate((6, 2, 2)))
        positions = (torch.arange(40) + torch.tensor([[37 * step], [12 * step]])).int()
        before = k.clone()
        got = rt.rope_append(q, k, v, cos, sin, positions, together, rows=rows, counts=counts, plan=plan)
        assert_bits_equal(k, before)
        q_turned, k_turned = rt.rope(q, k, cos, sin, positions, plan=plan)
        assert_bits_equal(got, q_turned)
        apart.append(k_turned, v, rows=rows, counts=counts, plan=plan)
    assert together.lengths == apart.lengths == [24, 0, 74]
    for row in (0, 2):
        for ours, theirs in zip(together.dequantize(row), apart.dequantize(row), strict=True):
            assert_bits_equal(ours, theirs)


def test_rope_append_without_pages_left_gives_back_what_it_took():
    cache = rt.PagedKVCache(3, 32, 2, 16, max_rows=2, format="fp32")
    q, k = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16)
    cos = sin = torch.ones(64, 8)
    positions = torch.arange(40).repeat(2, 1)
    with pytest.raises(rt.OutOfPagesError):
        rt.rope_append(q, k, k, cos, sin, positions, cache)
    assert cache.lengths == [0, 0] and cache.free_pages == 3
    rt.rope_append(q, k, k, cos, sin, positions, cache, counts=[40, 32])
    assert cache.lengths == [40, 32] and cache.free_pages == 0


def test_rope_append_that_fails_writes_nothing():
    cache = rt.KVCache(1, 64, 2, 16, format="fp32")
    q, k, v = torch.randn(1, 60, 4, 16), torch.randn(1, 60, 2, 16), torch.randn(1, 60, 2, 16)
    cos = sin = torch.ones(200, 8)
    positions = torch.arange(60)[None]
    rt.rope_append(q, k, v, cos, sin, positions, cache)
    before, stored = q.clone(), cache.dequantize(0)[0]
    bad = positions.clone()
    bad[0, 59] = 200
    for changes, match in (
        ({"positions": positions}, "room for 64"),
        ({"positions": bad}, "positions must lie in"),
        ({"v": v[:, :59]}, "v must have"),
        ({"k": k[..., :1]}, "head_dim >= 16"),
        ({name: torch.randn(1, 60, 4, 32) for name in ("q", "q_out")}, "q must have the cache's head_dim 16"),
        ({"counts": [61]}, "counts must lie in"),
        ({"cache": None}, "cache"),
        ({"q_out": q[:, :, :2]}, "q_out must have q's shape"),
    ):
        arguments = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "positions": positions, "cache": cache, "q_out": q}
        with pytest.raises((rt.ArgumentError, rt.ArgumentTypeError), match=match):
            rt.rope_append(**{**arguments, **changes})
        assert torch.equal(q, before) and cache.lengths == [60] and torch.equal(cache.dequantize(0)[0], stored)
    rt.rope_append(q[:, :4], k[:, :4], v[:, :4], cos, sin, positions[:, :4], cache)
    assert cache.lengths == [64]


# ---------------------------------------------------------------- gated activations


@pytest.mark.parametrize("norm", [rt.rms_norm, rt.layer_norm])
def test_a_norm_of_nothing_is_refused(norm):
    with pytest.raises(rt.ArgumentError, match=r"x must have a last dimension of at least 1, got .*\[2, 0\]"):
        norm(np.zeros((2, 0), np.float32))


@pytest.mark.parametrize("hidden", [0, 1, 7, 8, 9, 17, 576, 1536, 10007])
def test_gated(hidden, dtype, device, plan):
    x, tx = data(device, (3, 2 * hidden), dtype, "gated", hidden, spread=3.0)
    assert_right(rt.silu_mul(tx, plan=plan), oracle.silu_mul, x)
    for approximate in ("tanh", "none"):
        assert_right(rt.gelu_mul(tx, approximate=approximate, plan=plan), gelu, x, approximate)


def test_gated_over_the_whole_range(dtype, device, plan):
    """Every binade of both signs, up to where the result underflows or overflows.

    float32: 4 roundings, and those of the exponent, which are relative to its size; what is near the smallest normal
    number loses digits on its way through the subnormal ones.
    """

    def check(y, exact):
        if dtype == "float32":
            with np.errstate(divide="ignore"):
                size = np.abs(np.log(np.abs(np.where(exact == 0, 1, exact))))
            bound = oracle.EPS[dtype] / 2 * np.abs(exact) * (8 + 4 * size) + 2.0**-140
            assert (np.abs(to_numpy64(y) - exact) <= bound).all()
        else:
            assert_ulp(y, exact)

    edges = np.concatenate([np.linspace(-120, 120, 4001), np.ldexp(1.0, np.arange(-40, 16)), [0.0]])
    gate = oracle.round_to(np.concatenate([edges, -edges]), dtype)
    x = cases.tensor(np.concatenate([gate, np.ones_like(gate)]), dtype, device)
    both = np.concatenate([gate, np.ones_like(gate)])
    check(rt.silu_mul(x, plan=plan), oracle.silu_mul(both))
    for approximate in ("tanh", "none"):
        check(rt.gelu_mul(x, approximate=approximate, plan=plan), oracle.gelu_mul(both, approximate))


def test_gated_special_values(dtype, device, plan):
    inf, nan = math.inf, math.nan
    gate = torch.tensor([inf, -inf, nan, 1, 1, 0, -0.0], dtype=cases.torch_dtype(dtype), device=device)
    up = torch.tensor([1, 1, 1, inf, nan, inf, 1], dtype=gate.dtype, device=device)
    expected = torch.tensor([inf, nan, nan, inf, nan, nan, -0.0], dtype=gate.dtype, device=device)
    x = torch.cat([gate, up])
    largest = torch.tensor([torch.finfo(gate.dtype).max, 1], dtype=gate.dtype, device=device)
    for f in (rt.silu_mul, rt.gelu_mul, lambda x, plan: rt.gelu_mul(x, approximate="none", plan=plan)):
        torch.testing.assert_close(f(x, plan=plan), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.signbit(f(x, plan=plan))[6]
        assert f(largest, plan=plan) == largest[0]


def test_gated_into_its_own_gate(dtype, device, plan):
    _, x = data(device, (4, 50), dtype, "gate")
    expected = rt.silu_mul(x, plan=plan)
    up = x[:, 25:].clone()
    rt.silu_mul(x, out=x[:, :25], plan=plan)
    assert_bits_equal(x[:, :25].contiguous(), expected)
    assert_bits_equal(x[:, 25:].contiguous(), up)
    with pytest.raises(rt.ArgumentError, match="out must not share memory with the up half"):
        rt.silu_mul(x, out=x[:, 25:])
    with pytest.raises(rt.ArgumentError, match="out overlaps the gate half"):
        rt.silu_mul(x, out=x[:, 1:26])
    every_other = torch.zeros(4, 150, dtype=x.dtype, device=device)[:, ::2]
    with pytest.raises(rt.ArgumentError, match="out must not share memory with the up half"):
        rt.silu_mul(every_other[:, :50], out=every_other[:, 40:65])


def test_gelu_names_its_forms():
    x = torch.randn(2, 8)
    for bad in ("erf", "", "Tanh"):
        with pytest.raises(rt.ArgumentError, match='approximate must be "tanh" or "none"'):
            rt.gelu_mul(x, approximate=bad)
    for bad in (None, 1, True):
        with pytest.raises(rt.ArgumentTypeError, match="approximate"):
            rt.gelu_mul(x, approximate=bad)
    with pytest.raises(rt.ArgumentError, match="even last dimension"):
        rt.gelu_mul(torch.randn(2, 7))


# ---------------------------------------------------------------- softmax


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 31, 49, 577, 4099, 50000])
def test_softmax(n, dtype, device, plan):
    x, tx = data(device, (3, n), dtype, "softmax", n, spread=4.0)
    y = rt.softmax(tx, plan=plan)
    if n:
        assert_right(y, oracle.softmax, x)
    else:
        assert tuple(y.shape) == (3, 0)


def test_softmax_of_one_dimension_is_that_of_a_row(dtype, device, plan):
    _, x = data(device, (3, 49), dtype, "softmax", 49, spread=4.0)
    assert_bits_equal(rt.softmax(x[1], plan=plan), rt.softmax(x, plan=plan)[1])


def test_softmax_of_large_and_masked_logits(dtype, device, plan):
    x = cases.values((4, 300), dtype, "masked", spread=2.0)
    x[0] += 40000.0  # e^x alone would overflow
    x[1, 7:] = -np.inf
    x[2, :299] = -np.inf
    x = oracle.round_to(x, dtype)
    y = rt.softmax(cases.tensor(x, dtype, device), plan=plan)
    assert_right(y, oracle.softmax, x)
    assert (y[1, 7:] == 0).all() and y[2, 299] == 1


def test_softmax_without_a_finite_maximum_is_nan_as_in_torch(dtype, device, plan):
    x = torch.randn(5, 40).to(device, cases.torch_dtype(dtype))
    x[0] = -math.inf
    x[1, 39] = math.inf
    x[2, 0] = math.nan
    x[3, 39] = math.nan
    y = rt.softmax(x, plan=plan)
    assert torch.equal(y.isnan(), x.softmax(-1).isnan())
    assert y[:4].isnan().all() and not y[4].isnan().any()


# ---------------------------------------------------------------- all of them


def functional(plan=None, device="cpu"):
    """name -> the op as a function of one tensor [2, 3, 5, 34]."""
    cos, sin = (cases.tensor(t, "float32", device) for t in angles(40, 10, "float32"))
    positions = torch.arange(6, device=device).view(2, 3)
    return {
        "rms_norm": lambda x, out=None: rt.rms_norm(x, out=out, plan=plan),
        "layer_norm": lambda x, out=None: rt.layer_norm(x, out=out, plan=plan),
        "add_rms_norm": lambda x, out=None: rt.add_rms_norm(x, x, out=out, plan=plan)[0],
        "rope": lambda x, out=None: rt.rope(x, x[:, :, :1], cos, sin, positions, q_out=out, plan=plan)[0],
        "silu_mul": lambda x, out=None: rt.silu_mul(x, out=out, plan=plan),
        "gelu_mul": lambda x, out=None: rt.gelu_mul(x, out=out, plan=plan),
        "softmax": lambda x, out=None: rt.softmax(x, out=out, plan=plan),
    }


@pytest.mark.parametrize("name", functional())
def test_any_strides_in_and_out(name, dtype, device, plan):
    f = functional(plan, device)[name]
    x = cases.tensor(cases.values((2, 3, 5, 34), dtype, name), dtype, device)
    expected = f(x)
    wide = torch.zeros(2, 3, 5, 80, dtype=x.dtype, device=device)
    wide[..., 3:71:2] = x
    swapped = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for view in (wide[..., 3:71:2], swapped):
        assert_bits_equal(f(view), expected)
    lead, last = expected.shape[:-1], expected.shape[-1]
    for base, take in (
        (torch.full((*lead, 2 * last + 5), 7.0, dtype=x.dtype, device=device), lambda t: t[..., 4:-1:2]),
        (torch.full((last + 2, *lead), 7.0, dtype=x.dtype, device=device), lambda t: t[1:-1].permute(1, 2, 3, 0)),
    ):
        reference = base.clone()
        take(reference).copy_(expected)
        f(x, take(base))
        assert_bits_equal(base, reference)


@pytest.mark.parametrize("name", [name for name in functional() if name != "rope"])  # its rows have positions
def test_many_rows_equal_one_row_at_a_time(name, dtype, device):
    """Enough rows to go over several threads; a row's bits do not depend on its neighbours."""
    x = cases.tensor(cases.values((500, 130), dtype, name), dtype, device)
    f = functional(device=device)[name]
    together = f(x)
    for row in (0, 1, 250, 499):
        assert_bits_equal(f(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("hidden", [128, 1024, 4096, 16384])  # 2 or 4 vectors a lane of a warp, or a thread of a CTA
def test_norms_of_few_and_of_many_rows_have_the_same_bits(hidden, dtype, device):
    """On a GPU few rows (at most a CTA an SM) have kernels of their own, which load weights and biases with the row."""
    x, residual = (cases.tensor(cases.values((3, hidden), dtype, key, hidden), dtype, device) for key in ("x", "r"))
    weight, bias = (cases.tensor(cases.values((hidden,), dtype, key, hidden), dtype, device) for key in ("w", "b"))
    times = 900 if hidden <= 1024 else 70  # a CTA holds up to 16 rows
    for norm in (
        lambda x, r: [rt.rms_norm(x, weight)],
        lambda x, r: [rt.layer_norm(x, weight, bias)],
        lambda x, r: rt.add_rms_norm(x, r, weight),
        lambda x, r: rt.add_layer_norm(x, r, weight, bias),
    ):
        for few, many in zip(norm(x, residual), norm(x.repeat(times, 1), residual.repeat(times, 1)), strict=True):
            assert_bits_equal(many, few.repeat(times, 1))


@pytest.mark.parametrize("tokens", [1, 3, 200])
@pytest.mark.parametrize("hidden", [128, 768, 4096, 20000])  # a row: lanes of a warp, a warp, a CTA, a CTA in passes
def test_a_chain_waits_for_each_call(tokens, hidden, dtype, device):
    """Every call reads what the one before wrote, without a pause between them; on Hopper kernels start early (PDL)."""
    x, weight, bias = (
        cases.tensor(cases.values(shape, dtype, "chain", hidden), dtype, device)
        for shape in ((tokens, hidden), (hidden,), (hidden,))
    )
    cos, sin = (cases.tensor(t, "float32", device) for t in angles(tokens, 16, "float32"))
    positions = torch.arange(tokens, device=device)
    a, gate_up, h = x.clone(), torch.zeros_like(torch.cat([x, x], -1)), torch.zeros_like(x)
    heads = h.view(tokens, hidden // 32, 32)
    # rope's own k and its output are there before: between two calls stands no kernel of torch's, which would wait
    k, k_out = heads[:, :1].clone(), heads[:, :1].clone()

    def chain(pause):
        a.copy_(x)
        for call in 3 * (
            lambda: rt.rms_norm(a, weight, out=gate_up[:, :hidden]),
            lambda: rt.layer_norm(a, weight, bias, out=gate_up[:, hidden:]),
            lambda: rt.silu_mul(gate_up, out=h),
            lambda: rt.rope(heads, k, cos, sin, positions, q_out=heads, k_out=k_out),
            lambda: rt.add_rms_norm(a, h, weight, out=h, residual_out=a),
            lambda: rt.gelu_mul(gate_up, out=gate_up[:, :hidden]),
            lambda: rt.softmax(h, out=h),
            lambda: rt.add_layer_norm(a, h, weight, bias, out=h, residual_out=a),
        ):
            call()
            pause()
        return a.clone(), gate_up.clone(), h.clone()

    paused = chain(torch.cuda.synchronize if device != "cpu" else lambda: None)
    for _ in range(1 if device == "cpu" else 20):
        for got, expected in zip(chain(lambda: None), paused, strict=True):
            assert_bits_equal(got, expected)


@pytest.mark.parametrize("name", functional())
def test_variants_agree(name, dtype):
    x = cases.tensor(cases.values((2, 3, 5, 34), dtype, name), dtype)
    reference = to_numpy64(functional("reference")[name](x))
    for plan in cases.PLANS:
        with rt.record_kernels() as ran:
            y = functional(plan)[name](x)
        if dtype == "float32":  # the reference computes in double
            assert_close(y, reference, reference, slack=0, frobenius=1e-6)
        else:
            assert_ulp(y, reference)
        assert ran == [f"cpu_{plan}_{dtype}"]
