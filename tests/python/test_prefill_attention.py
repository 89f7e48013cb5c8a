# SPDX-License-Identifier: Apache-2.0
import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from attention_checks import FORMATS, append, check, filled, tokens
from closeness import assert_bits_equal, assert_exact, to_numpy64

SHAPES = ((9, 3, 64), (4, 4, 80), (8, 1, 96), (6, 2, 111), (8, 2, 128), (2, 1, 256), (5, 5, 1), (3, 1, 17))


def inputs(batch, s, sk, heads, kv_heads, dim, dtype, *key):
    """q, k, v in float64 and as tensors."""
    shapes = ((batch, s, heads, dim), (batch, sk, kv_heads, dim), (batch, sk, kv_heads, dim))
    exact = [cases.values(shape, dtype, name, *key) for name, shape in zip("qkv", shapes, strict=True)]
    return exact, [cases.tensor(x, dtype) for x in exact]


def both(q, k, v, **options):
    return rt.prefill_attention(q, k, v, return_lse=True, **options)


def expect(exact, dtype, counts=None, sinks=None, **options):
    """exact, naive and lse for q, k, v (float64 [B, S, ...])."""
    q, k, v = exact
    out, naive, lse = np.zeros(q.shape), np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    if sinks is not None:
        lse[:] = sinks
    for b in range(q.shape[0]):
        n, m = (q.shape[1], k.shape[1]) if counts is None else (counts[b], counts[b])
        lse[b, n:] = -np.inf
        if n == 0 or m == 0:
            continue
        row = (q[b, :n], k[b, :m], v[b, :m])
        out[b, :n], seen = oracle.attention_reference(*row, sinks=sinks, **options)
        lse[b, :n] = np.where(np.isneginf(seen), lse[b, :n], seen)
        naive[b, :n], _ = oracle.attention_naive(*row, dtype, sinks=sinks, **options)
    return out, naive, lse


# ---------------------------------------------------------------- against the oracle


@pytest.mark.parametrize("s", [1, 2, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, s):
    for dtype in cases.DTYPES:
        exact, given = inputs(2, s, s, *shape, dtype, s, shape)
        check(dtype, *both(*given), *expect(exact, dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_long_prompt(dtype):
    exact, given = inputs(1, 520, 520, 9, 3, 64, dtype)
    check(dtype, *both(*given), *expect(exact, dtype))


@pytest.mark.parametrize("s", [1, 31, 32, 33, 65, 97])
def test_one_head_of_keys_for_all(s):
    """KV heads at stride 0 read like copies of the one."""
    _, (q, k, v) = inputs(2, s, s, 6, 1, 40, "float16", s)
    wide = [x.expand(2, s, 3, 40) for x in (k, v)]
    assert_bits_equal(rt.prefill_attention(q, *wide), rt.prefill_attention(q, *(x.clone() for x in wide)))


@pytest.mark.parametrize("s", [1, 17, 300])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_asking_for_lse_changes_no_bit(dtype, s):
    _, given = inputs(2, s, s, 6, 2, 40, dtype, s)
    for options in ({}, {"window": 9}, {"softcap": 5.0}):
        assert_bits_equal(rt.prefill_attention(*given, **options), both(*given, **options)[0], str(options))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("s", "sk"), [(1, 1), (1, 130), (3, 1), (17, 15), (17, 16), (17, 18), (17, 147), (70, 3), (5, 0)]
)
def test_lengths_that_differ(s, sk, causal):
    exact, given = inputs(2, s, sk, 6, 2, 40, "float32", s, sk)
    check("float32", *both(*given, causal=causal), *expect(exact, "float32", causal=causal))


SINKS = cases.values((6,), "float32", "sinks", spread=3.0)
SLOPES = np.array([0.5, 0.25, 0.125, 1.0, 0.0, -0.25])


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 16},
        {"window": 63},
        {"window": 64},
        {"window": 65},
        {"window": 500},
        {"softcap": 1.5},
        {"softcap": 30.0},
        {"scale": 0.5},
        {"scale": -0.25},
        {"sinks": SINKS},
        {"alibi_slopes": SLOPES},
        {"window": 40, "softcap": 3.0, "sinks": SINKS, "alibi_slopes": SLOPES, "scale": 0.4},
    ],
    ids=lambda o: ",".join(o),
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("s", "sk"), [(150, 150), (20, 150), (150, 130)])
def test_options(s, sk, causal, options):
    exact, given = inputs(2, s, sk, 6, 2, 64, "float32", s, sk)
    tensors = {n: cases.tensor(x, "float32") if isinstance(x, np.ndarray) else x for n, x in options.items()}
    got = both(*given, causal=causal, **tensors)
    check("float32", *got, *expect(exact, "float32", causal=causal, **options))


@pytest.mark.parametrize("plan", cases.PLANS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_variant(dtype, plan):
    exact, given = inputs(2, 90, 100, 6, 2, 40, dtype)
    for causal in (True, False):
        options = {"causal": causal, "window": 50, "softcap": 9.0}
        with rt.record_kernels() as names:
            check(dtype, *both(*given, plan=plan, **options), *expect(exact, dtype, **options))
        assert names == [f"cpu_{plan}_{dtype}_d40"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_packed_sequences(dtype, causal):
    lengths_q, lengths_k = [3, 0, 70, 1, 130], [5, 7, 70, 0, 140]
    parts = [inputs(1, n, m, 9, 3, 64, dtype, n, m) for n, m in zip(lengths_q, lengths_k, strict=True)]
    q, k, v = (torch.cat([p[1][i][0] for p in parts]) for i in range(3))
    begins = [torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (lengths_q, lengths_k)]
    out, lse = both(q, k, v, causal=causal, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1])
    expected = [expect(p[0], dtype, causal=causal) for p in parts]
    check(dtype, out, lse, *(np.concatenate([e[i][0] for e in expected]) for i in range(3)))
    for b, p in enumerate(parts):  # and bit for bit what the sequence alone gives
        alone = both(*p[1], causal=causal)
        span = slice(begins[0][b], begins[0][b + 1])
        assert_bits_equal(out[span], alone[0][0])
        assert_bits_equal(lse[span], alone[1][0])


def test_counts():
    exact, given = inputs(4, 70, 70, 6, 2, 64, "bfloat16")
    counts = [70, 0, 33, 1]
    for b, n in enumerate(counts):
        for x in given:
            x[b, n:] = float("nan")
    for options in ({}, {"causal": False}):
        got = both(*given, counts=torch.tensor(counts, dtype=torch.int32), **options)
        check("bfloat16", *got, *expect(exact, "bfloat16", counts=counts, **options))


# ---------------------------------------------------------------- over a cache


@pytest.mark.parametrize("s", [1, 16, 75])
@pytest.mark.parametrize(("format", "dtype"), [*FORMATS, ("int4-kivi", "bfloat16"), ("int8", "float16")])
def test_over_a_cache(format, dtype, s):
    """The row as it stands (open group raw), then the new tokens raw."""
    lengths = (0, 1, 31, 32, 45, 64, 150)
    cache = filled(tokens(lengths, 3, 64, dtype), format, dtype, capacity=300)
    exact, given = inputs(len(lengths), s, s, 9, 3, 64, dtype, s)
    counts = [s, s, 0, s, max(s - 1, 1), 1, s]
    for options in ({}, {"window": 40, "softcap": 5.0}):
        got = both(*given, cache=cache, counts=torch.tensor(counts, dtype=torch.int32), **options)
        q, k, v = exact
        out, naive, lse = np.zeros(q.shape), np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
        for b, (n, length) in enumerate(zip(counts, lengths, strict=True)):
            if n == 0:
                continue
            old = [to_numpy64(x) for x in cache.dequantize(b, at=length)]
            row = (q[b, :n], *(np.concatenate([o[:length], x[b, :n]]) for o, x in zip(old, (k, v), strict=True)))
            out[b, :n], lse[b, :n] = oracle.attention_reference(*row, **options)
            naive[b, :n], _ = oracle.attention_naive(*row, dtype, **options)
        check(dtype, *got, out, naive, lse)


@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_rows_of_a_cache_and_packed_sequences(format, dtype):
    cache = filled(tokens((40, 70, 33), 3, 64, dtype), format, dtype)
    _, (q, k, v) = inputs(3, 20, 20, 9, 3, 64, dtype)
    expected = both(q, k, v, cache=cache)
    rows = torch.tensor([2, 0], dtype=torch.int32)
    begins = torch.tensor([0, 20, 40], dtype=torch.int32)
    packed = [x[[2, 0]].reshape(40, *x.shape[2:]) for x in (q, k, v)]
    got = both(*packed, cache=cache, rows=rows, cu_seqlens_q=begins, cu_seqlens_k=begins)
    for x, y in zip(got, expected, strict=True):
        assert_bits_equal(x.reshape(2, 20, *x.shape[1:]), y[[2, 0]])


def test_over_a_cache_without_codes_is_the_whole_prompt():
    """With a format that loses nothing, a prompt in two parts is the prompt, up to rounding."""
    exact, (q, k, v) = inputs(2, 150, 150, 9, 3, 64, "float32")
    cache = rt.KVCache(2, 150, 3, 64, format="fp32", dtype="float32")
    outs = []
    for part in (slice(0, 90), slice(90, 150)):
        outs.append(both(q[:, part], k[:, part], v[:, part], cache=cache))
        cache.append(k[:, part], v[:, part])
    out, lse = (torch.cat(x, 1) for x in zip(*outs, strict=True))
    check("float32", out, lse, *expect(exact, "float32"))


# ---------------------------------------------------------------- exact data, the same bits


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_equal_keys_average_small_integers(dtype):
    v = cases.exact_values((1, 128, 2, 64), "v")
    k, q = np.ones((1, 128, 2, 64)), np.ones((1, 128, 6, 64))
    out = rt.prefill_attention(*(cases.tensor(x, dtype) for x in (q, k, v)))
    mean = np.cumsum(v, axis=1) / np.arange(1, 129)[None, :, None, None]
    assert_exact(out, mean.astype(np.float32).repeat(3, axis=2))


def test_a_window_of_one_is_the_value_itself():
    _, (q, k, v) = inputs(2, 150, 150, 9, 3, 64, "float32")
    assert_bits_equal(rt.prefill_attention(q, k, v, window=1), v.repeat_interleave(3, dim=2))
    assert_bits_equal(rt.prefill_attention(q, k, v, window=1, causal=False), v.repeat_interleave(3, dim=2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_a_query_sees_its_own_keys_only(where, bad):
    """What is wrong with a later token, in K or V, does not reach an earlier query; nor does one behind the window."""
    _, (q, k, v) = inputs(1, 200, 200, 9, 3, 64, "float32")
    options = {"window": 50}
    expected = both(q, k, v, **options)
    spoilt = [k.clone(), v.clone()]
    spoilt[where][:, 101] = bad
    out, lse = both(q, *spoilt, **options)
    for span in (slice(0, 101), slice(151, 200)):
        assert_bits_equal(out[:, span], expected[0][:, span])
        assert_bits_equal(lse[:, span], expected[1][:, span])
    assert torch.isnan(out[:, 101:151]).any(-1).all() or bad == float("inf")


@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_what_lies_before_the_window_of_a_cache_is_not_seen(format, dtype):
    """A NaN among cached tokens of the same block of keys, and among new ones, in K or V."""
    rows = tokens((100,), 3, 64, dtype)
    _, (q, k, v) = inputs(1, 40, 40, 9, 3, 64, dtype)
    options = {"window": 30}
    expected = both(q, k, v, cache=filled(rows, format, dtype), **options)
    (old_k, old_v), *_ = rows
    old_k[20, 0, 3], old_v[66, 1, 5] = np.nan, np.nan  # windows begin at 71 and later
    k[:, 3], v[:, 3] = float("nan"), float("nan")
    out, lse = both(q, k, v, cache=filled(rows, format, dtype), **options)
    seen = [i for i in range(40) if not i - 30 < 3 <= i]
    assert_bits_equal(out[:, seen], expected[0][:, seen])
    assert_bits_equal(lse[:, seen], expected[1][:, seen])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_logit_minus_infinity(dtype):
    """As no visible key: out 0, lse -inf."""
    q, k = torch.ones(1, 40, 2, 16), torch.full((1, 40, 1, 16), -float("inf"))
    out, lse = both(*(x.to(cases.torch_dtype(dtype)) for x in (q, k, torch.ones(1, 40, 1, 16))))
    assert_exact(out, np.zeros(out.shape))
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_row_stands_alone(dtype):
    _, (q, k, v) = inputs(3, 130, 130, 9, 3, 64, dtype)
    out, lse = both(q, k, v)
    for b in range(3):
        for x, y in zip(both(q[b : b + 1], k[b : b + 1], v[b : b + 1]), (out, lse), strict=True):
            assert_bits_equal(x[0], y[b])
    for first in (1, 31, 100):  # the last queries alone: in other tiles
        for x, y in zip(both(q[:, first:], k, v), (out, lse), strict=True):
            assert_bits_equal(x, y[:, first:])


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_outputs_stay_inside_their_elements(dtype):
    exact, given = inputs(2, 5, 5, 4, 2, 33, dtype)
    for strides, lse_strides in ((None, None), ((1500, 300, 40, 1), (90, 13, 2)), ((1, 2, 10, 40), (1, 2, 10))):
        out = cases.guarded((2, 5, 4, 33), dtype, strides=strides)
        lse = cases.guarded((2, 5, 4), "float32", strides=lse_strides)
        got = both(*given, out=out.tensor, lse=lse.tensor)
        for guard in (out, lse):
            guard.check_margins()
            guard.check_written()
        check(dtype, *got, *expect(exact, dtype))


def test_inputs_of_any_strides():
    _, (q, k, v) = inputs(2, 70, 70, 6, 2, 40, "float16")
    expected = both(q, k, v)
    fused = torch.cat([q, k, v], dim=2)  # what a fused QKV projection leaves
    views = fused.split([6, 2, 2], dim=2)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    odd = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in (q, k, v)]
    for given in (views, heads_first, odd, (q, heads_first[1], odd[2]), (odd[0], k, views[2])):
        for x, y in zip(both(*given), expected, strict=True):
            assert_bits_equal(x, y)


def test_nothing_to_do():
    for b, s in ((0, 4), (2, 0)):
        out, lse = both(torch.empty(b, s, 4, 8), torch.empty(b, s, 2, 8), torch.empty(b, s, 2, 8))
        assert out.shape == (b, s, 4, 8)
        assert lse.shape == (b, s, 4)


# ---------------------------------------------------------------- errors

I32 = torch.int32
CU = {"q": torch.zeros(9, 4, 32), "k": torch.zeros(9, 2, 32), "v": torch.zeros(9, 2, 32)}


def cu(*values):
    return torch.tensor(values, dtype=I32)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"q": torch.zeros(2, 3, 32)}, rt.ArgumentError, "q"),
        ({"q": torch.zeros(2, 3, 5, 32)}, rt.ArgumentError, "q"),
        (
            {"q": torch.zeros(2, 3, 4, 513), "k": torch.zeros(2, 3, 2, 513), "v": torch.zeros(2, 3, 2, 513)},
            rt.NotSupportedError,
            "q",
        ),
        ({"q": torch.zeros(2, 3, 4, 32, dtype=I32)}, rt.ArgumentTypeError, "q"),
        ({"k": torch.zeros(3, 3, 2, 32)}, rt.ArgumentError, "k"),
        ({"k": torch.zeros(2, 3, 2, 31)}, rt.ArgumentError, "[kv]"),
        ({"k": torch.zeros(2, 3, 2, 32, dtype=torch.float16)}, rt.ArgumentTypeError, "k"),
        ({"v": torch.zeros(2, 3, 1, 32)}, rt.ArgumentError, "v"),
        ({"v": torch.zeros(2, 3, 2, 32, dtype=torch.float16)}, rt.ArgumentTypeError, "v"),
        ({"causal": 1}, rt.ArgumentTypeError, "causal"),
        ({"window": 0}, rt.ArgumentError, "window"),
        ({"softcap": -1.0}, rt.ArgumentError, "softcap"),
        ({"scale": float("nan")}, rt.ArgumentError, "scale"),
        ({"sinks": torch.zeros(2)}, rt.ArgumentError, "sinks"),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.float16)}, rt.ArgumentTypeError, "alibi_slopes"),
        ({"alibi_slopes": torch.zeros(4, 1)}, rt.ArgumentError, "alibi_slopes"),
        ({"rows": cu(0, 1)}, rt.ArgumentError, "rows"),
        ({"counts": cu(0, 4)}, rt.ArgumentError, "counts"),
        ({"counts": cu(0)}, rt.ArgumentError, "counts"),
        (
            {"k": torch.zeros(2, 4, 2, 32), "v": torch.zeros(2, 4, 2, 32), "counts": cu(0, 3)},
            rt.ArgumentError,
            "k must have as many tokens as q when counts is given, got 4 and 3 in sequence 0$",
        ),
        ({"cu_seqlens_q": cu(0, 9)}, rt.ArgumentError, "q"),
        ({**CU, "cu_seqlens_q": cu(0, 9)}, rt.ArgumentTypeError, "cu_seqlens_k"),
        ({**CU, "cu_seqlens_q": cu(0, 9), "cu_seqlens_k": cu(0, 4, 9)}, rt.ArgumentError, "cu_seqlens_k"),
        ({**CU, "cu_seqlens_q": cu(0, 8), "cu_seqlens_k": cu(0, 9)}, rt.ArgumentError, "cu_seqlens_q"),
        (
            {**CU, "cu_seqlens_q": cu(1, 9), "cu_seqlens_k": cu(0, 9)},
            rt.ArgumentError,
            r"cu_seqlens_q must be \[batch \+ 1\] and start with 0, got int32\[2\] on cpu starting with 1$",
        ),
        (
            {**CU, "cu_seqlens_q": cu(0, 7, 3, 9), "cu_seqlens_k": cu(0, 1, 2, 9)},
            rt.ArgumentError,
            "cu_seqlens_q must not decrease, got 3 after 7 at index 2",
        ),
        ({**CU, "cu_seqlens_q": cu(), "cu_seqlens_k": cu()}, rt.ArgumentError, "cu_seqlens_q"),
        ({**CU, "cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": cu(0, 9)}, rt.ArgumentTypeError, "cu_seqlens_q"),
        ({"out": torch.zeros(2, 3, 4)}, rt.ArgumentError, "out"),
        ({"lse": torch.zeros(2, 4, 3)}, rt.ArgumentError, "lse"),
        ({"plan": "abacus"}, rt.NotSupportedError, "plan"),
    ],
)
def test_bad_arguments(changes, error, name):
    given = {"q": torch.zeros(2, 3, 4, 32), "k": torch.zeros(2, 3, 2, 32), "v": torch.zeros(2, 3, 2, 32), **changes}
    with pytest.raises(error, match=name):
        rt.prefill_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"cache": 3}, rt.ArgumentTypeError, "cache"),
        ({"rows": cu(0, 5)}, rt.ArgumentError, "rows"),
        ({"rows": cu(0)}, rt.ArgumentError, "rows"),
        (
            {"k": torch.zeros(2, 4, 2, 32), "v": torch.zeros(2, 4, 2, 32)},
            rt.ArgumentError,
            "k must have as many tokens as q when cache is given, got 4 and 3 in sequence 0$",
        ),
        ({"k": torch.zeros(2, 3, 4, 32), "v": torch.zeros(2, 3, 4, 32)}, rt.ArgumentError, "k"),
        (
            {n: torch.zeros(2, 3, h, 32, dtype=torch.float16) for n, h in (("q", 4), ("k", 2), ("v", 2))},
            rt.ArgumentTypeError,
            "q",
        ),
        ({n: torch.zeros(2, 3, h, 64) for n, h in (("q", 4), ("k", 2), ("v", 2))}, rt.ArgumentError, "q"),
        ({n: torch.zeros(4, 3, h, 32) for n, h in (("q", 4), ("k", 2), ("v", 2))}, rt.ArgumentError, "q"),
    ],
)
def test_bad_arguments_with_a_cache(changes, error, name):
    cache = filled(tokens((40, 50, 3), 2, 32, "float32"), "int4-kivi", "float32")
    given = {
        "q": torch.zeros(2, 3, 4, 32),
        "k": torch.zeros(2, 3, 2, 32),
        "v": torch.zeros(2, 3, 2, 32),
        "cache": cache,
        **changes,
    }
    with pytest.raises(error, match=name):
        rt.prefill_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_the_cache_is_only_read():
    cache = filled(tokens((40,), 2, 32, "float32"), "int4-kivi", "float32")
    before = {n: a.clone() for n, a in cache._arrays.items()}
    _, given = inputs(1, 30, 30, 4, 2, 32, "float32")
    rt.prefill_attention(*given, cache=cache)
    append(cache, [(np.zeros((0, 2, 32)),) * 2])
    for name, array in cache._arrays.items():
        assert_bits_equal(array, before[name], name)


def test_rows_that_the_cache_does_not_have_are_told_with_those_it_has():
    cache = filled(tokens((40, 50), 2, 32, "float32"), "int8", "float32")
    x = torch.zeros(1, 3, 2, 32)
    for row in (-1, 2):
        with pytest.raises(rt.ArgumentError, match=rf"rows\[0\] is {row}, the cache has rows 0 to 1$"):
            rt.prefill_attention(x, x, x, cache=cache, rows=cu(row))


def test_a_row_whose_raw_tokens_are_gone_is_refused():
    """Somebody writes a shorter length into the tensor that the kernels read: those tokens are codes by now."""
    cache = filled(tokens((190,), 2, 32, "float32"), "int4-kivi", "float32")
    cache.truncate([0], [174])
    x = torch.zeros(1, 3, 2, 32)
    cache.seq_lens[0] = 40
    words = "row 0 was truncated: a query at position 40 needs the raw tokens from 32, the row still has them from 126"
    with pytest.raises(rt.ArgumentError, match=words):
        rt.prefill_attention(x, x, x, cache=cache)


def test_a_batch_of_more_sequences_than_any_kernel_takes():
    q = torch.zeros(1, 1, 1, 1).expand(2**24 + 1, 1, 1, 1)
    out = torch.empty(2**24 + 1, 1, 1, 1)
    with pytest.raises(
        rt.ArgumentError, match=r"q must have a batch of at most 16777216, got float32\[16777217, 1, 1, 1\]"
    ):
        rt.prefill_attention(q, q, q, out=out)


@pytest.mark.skipif("avx512bf16" not in cases.PLANS, reason="a CPU without fast AVX512-BF16")
def test_what_bf16_products_are_for():
    """Of bf16 the weights of values are rounded to it. Codes, float16 and float32 keep the bits of the plan without."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 70, heads, 64) for heads in (6, 2, 2))
    for dtype, same in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, False)):
        given = [x.to(dtype) for x in (q, k, v)]
        both = [rt.prefill_attention(*given, plan=plan) for plan in ("avx512bf16", "avx512")]
        assert torch.equal(*both) == same, dtype
    cache = rt.KVCache(1, 256, 2, 64, format="int8", dtype=torch.bfloat16)
    cache.append(*(torch.randn(1, 128, 2, 64, dtype=torch.bfloat16) for _ in range(2)))
    given = [x[:, :1].to(torch.bfloat16) for x in (q, k, v)]
    given[1].zero_()
    given[2].zero_()
    window = {"window": 60}  # 59 tokens in codes, and the new one
    both = [rt.prefill_attention(*given, cache=cache, plan=plan, **window) for plan in ("avx512bf16", "avx512")]
    assert torch.equal(*both)


@pytest.mark.parametrize("window", (None, 5))
def test_values_that_are_not_finite_reach_the_rows_that_see_them_alone(window, plan):
    """Next to them every row has the bits that it has without them."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 75, heads, 64).to(torch.bfloat16) for heads in (4, 2, 2))
    clean = rt.prefill_attention(q, k, v, window=window, plan=plan)
    for token in (0, 1, 37, 38, 63, 64, 74):
        bad = v.clone()
        bad[0, token, :, ::3] = float("nan")
        got = rt.prefill_attention(q, k, bad, window=window, plan=plan)
        sees = torch.arange(75) >= token
        if window:
            sees &= torch.arange(75) < token + window
        assert torch.isnan(got[0, sees][..., ::3]).all()
        assert_bits_equal(got[0, ~sees], clean[0, ~sees])
        assert_bits_equal(got[0, sees][..., 1::3], clean[0, sees][..., 1::3])
