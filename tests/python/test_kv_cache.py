# SPDX-License-Identifier: Apache-2.0
"""What a KV cache stores, to the byte, and what append, truncate, reorder and fork leave behind."""

import cases
import layouts
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from closeness import assert_bits_equal
from kv_caches import KINDS, PAGES, QUANTISED, as_bytes, assert_same, contiguous, kv, paged, state, tensors

kinds = pytest.mark.parametrize("format, dtype", KINDS)
# the same without most dtypes, for what does not depend on them
some_kinds = pytest.mark.parametrize(
    "format, dtype",
    [k for k in KINDS if k[0] not in QUANTISED]
    + [("int8", "float16"), ("int4", "bfloat16"), ("int4-kivi-sym", "float32"), ("int4-kivi", "bfloat16")]
    + [("fp8", "float16"), ("int8-kivi-sym", "bfloat16")],
)
quantised_kinds = pytest.mark.parametrize("format, dtype", [kind for kind in KINDS if kind[0] in QUANTISED])
HEAD_DIMS = (1, 64, 80, 96, 111, 128, 256)


def block_codes(codes, format, first, count):
    """The oracle's codes of tokens [first, first + count)."""
    per_channel = format in oracle.KIVI_FORMATS
    groups = slice(first // 32, (first + count) // 32) if per_channel else slice(first, first + count)
    tokens = slice(first, first + count)
    cut = {name: value[tokens] for name, value in vars(codes).items() if value is not None}
    cut |= {
        name: value[groups] for name, value in vars(codes).items() if value is not None and name in ("k_scale", "k_min")
    }
    return oracle.Codes(**cut)


@quantised_kinds
@pytest.mark.parametrize("page_size", (16, 32, 64, 128))
def test_bytes_are_the_specified_ones(format, dtype, page_size):
    if page_size not in PAGES[format]:
        pytest.skip("a page holds whole groups")
    heads, dim, tokens = 3, {16: 64, 32: 80, 64: 96, 128: 111}[page_size], 165
    k, v = kv(tokens, heads, dim, dtype, format)
    cache = paged(format, dtype, heads, dim, page_size=page_size, capacity=256)
    cache.append(*tensors(k, v, dtype))
    codes = oracle.encode(k, v, format, dtype)
    stored = len(codes.k_codes)
    pool = cache._arrays["pool"].numpy()
    assert pool.shape[2] == oracle.block_bytes(format, page_size, dim)
    for i, page in enumerate(cache.block_table[0].tolist()):
        count = min(max(stored - i * page_size, 0), page_size)
        if page < 0:
            continue
        for head in range(heads):
            expected = oracle.encode_block(
                block_codes(codes, format, i * page_size, count), head, format, dtype, page_size
            )
            np.testing.assert_array_equal(pool[page, head], expected)
    if format in oracle.KIVI_FORMATS:
        for name, x in (("ring_k", k), ("ring_v", v)):
            ring = cache._arrays[name][0].double().numpy()
            for p in range(tokens - 64, tokens):
                np.testing.assert_array_equal(ring[:, p % 64], x[p])


@kinds
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_variant_stores_the_same_bytes(format, dtype, dim):
    k, v = kv(75, 3, dim, dtype, format, dim, batch=2)
    states = {}
    for plan in cases.PLANS:
        cache = contiguous(format, dtype, 3, dim, rows=2)
        with rt.record_kernels() as ran:
            cache.append(*tensors(k, v, dtype), counts=[75, 40], plan=plan)
        assert ran == [f"cpu_{plan}_append_{dtype}_{format}"]
        states[plan] = state(cache)
    for plan in cases.PLANS:
        assert_same(states[plan], states["reference"])


@kinds
@pytest.mark.parametrize("dim, heads", ((64, 1), (111, 3), (256, 1)))
def test_dequantize_is_what_a_query_sees(format, dtype, dim, heads):
    k, v = kv(140, heads, dim, dtype, format, dim)
    cache = contiguous(format, dtype, heads, dim)
    for length in (1, 31, 32, 33, 64, 65, 96, 140):
        have = cache.lengths[0]
        cache.append(*tensors(k[have:length], v[have:length], dtype))
        oldest = 0 if format not in oracle.KIVI_FORMATS else max(length - 64 + 31, 0) // 32 * 32
        for at in {oldest, length - 1, max(length - 2, oldest), length // 32 * 32 if length % 32 else length - 1}:
            for ours, exact in zip(cache.dequantize(0, at), oracle.visible_kv(k, v, format, dtype, at), strict=True):
                np.testing.assert_array_equal(ours.double().numpy(), exact)
        for ours, exact in zip(
            cache.dequantize(0, length), oracle.cached_kv(k[:length], v[:length], format, dtype), strict=True
        ):
            np.testing.assert_array_equal(ours.double().numpy(), exact)


def test_dequantize_of_all_rows_pads_with_zeros():
    k, v = kv(50, 2, 64, "float32", batch=3)
    cache = contiguous("int8", "float32", 2, 64, rows=3)
    cache.append(*tensors(k, v, "float32"), counts=[50, 0, 7])
    all_k, all_v = cache.dequantize()
    assert all_k.shape == all_v.shape == (3, 50, 2, 64)
    for row, n in enumerate((50, 0, 7)):
        for whole, one in zip((all_k, all_v), cache.dequantize(row), strict=True):
            torch.testing.assert_close(whole[row, :n], one, rtol=0, atol=0)
            assert not whole[row, n:].any()


def test_dequantize_refuses_what_is_gone():
    k, v = kv(200, 1, 64, "float32")
    cache = contiguous("int4-kivi", "float32", 1, 64)
    cache.append(*tensors(k, v, "float32"))
    with pytest.raises(rt.ArgumentError, match="position 100 of row 0 sees raw tokens from position 96"):
        cache.dequantize(0, 100)
    cache.truncate([0], [32])
    with pytest.raises(rt.ArgumentError, match="position 31"):
        cache.dequantize(0)
    cache.dequantize(0, 32)  # the token to come needs no raw value


@some_kinds
@pytest.mark.parametrize("make", (contiguous, paged))
def test_any_way_of_splitting_leaves_the_same_bytes(format, dtype, make):
    heads, dim, tokens = 3, 80, 150
    k, v = tensors(*kv(tokens, heads, dim, dtype, format), dtype)
    whole = make(format, dtype, heads, dim)
    whole.append(k, v)
    rng = cases.generator("split", format)
    splits = [[1] * tokens, [32] * 5, [31, 1, 33, 85], [0, 64, 0, 64, 22]]
    splits += [np.diff([0, *sorted(rng.integers(0, tokens, 6)), tokens]).tolist() for _ in range(3)]
    for split in splits:
        cache, at = make(format, dtype, heads, dim), 0
        for i, n in enumerate(split):
            n = min(n, tokens - at)
            if i % 2:  # padded behind
                padded = torch.full((1, n + 3, heads, dim), float("nan"), dtype=k.dtype)
                both = [padded.clone(), padded.clone()]
                both[0][:, :n], both[1][:, :n] = k[:, at : at + n], v[:, at : at + n]
                cache.append(*both, counts=[n], plan=cases.PLANS[i % len(cases.PLANS)])
            else:
                cache.append(k[:, at : at + n], v[:, at : at + n])
            at += n
        assert_same(state(cache), state(whole))


@some_kinds
def test_capacity_and_neighbours_change_nothing(format, dtype):
    k, v = tensors(*kv(70, 2, 64, dtype, format, batch=4), dtype)
    small = contiguous(format, dtype, 2, 64, capacity=70)
    small.append(k[2:3], v[2:3])
    for make, capacity in ((contiguous, 2000), (paged, 300)):
        large = make(format, dtype, 2, 64, rows=6, capacity=capacity)
        large.append(k, v, rows=[5, 0, 3, 1], counts=[3, 70, 70, 0])
        assert_same(large.dump(3), small.dump(0))
        assert large.lengths == [70, 0, 0, 70, 0, 3]


@some_kinds
def test_padding_rows_write_nothing(format, dtype):
    heads, dim, pages = 2, 80, 8
    k, v = tensors(*kv(64, heads, dim, dtype, format, batch=3), dtype)
    block = oracle.block_bytes(format, 64, dim)
    guards = {"lengths": cases.Guarded((3,), torch.int32, values=torch.zeros(3, dtype=torch.int32))}
    if format in oracle.ELEMENT_FORMATS:
        guards["pool"] = cases.Guarded((pages, 2, 64, heads, dim), dtype)
    else:
        guards["pool"] = cases.Guarded(
            (pages, heads, block), torch.uint8, strides=(heads * (block + 16) + 32, block + 16, 1)
        )
    ring = None
    if format in oracle.KIVI_FORMATS:
        for name in ("ring_k", "ring_v"):
            guards[name] = cases.Guarded((3, heads, 64, dim), dtype)
        guards["raw_from"] = cases.Guarded((3,), torch.int32, values=torch.zeros(3, dtype=torch.int32))
        ring = tuple(guards[name].tensor for name in ("ring_k", "ring_v", "raw_from"))
    table = torch.tensor([[6, -1], [1, 2**30], [3, -7]], dtype=torch.int32)
    view = rt.PagedKVCache.view(
        guards["pool"].tensor,
        table,
        guards["lengths"].tensor,
        format=format,
        dtype=dtype,
        page_size=64,
        head_dim=dim,
        ring=ring,
    )
    view.append(k, v, counts=[0, 0, 0])
    for name, guard in guards.items():
        guard.check_untouched(name)
    view.append(k, v, counts=[0, 64, 0])
    for name, guard in guards.items():
        guard.check_margins(name)
    for page in set(range(pages)) - {1}:  # NaN everywhere else still
        assert (as_bytes(guards["pool"].tensor[page]) == 0xFF).all()
    if ring:
        assert (as_bytes(ring[0][[0, 2]]) == 0xFF).all() and (as_bytes(ring[1][[0, 2]]) == 0xFF).all()
    own = contiguous(format, dtype, heads, dim)
    own.append(k[1:2], v[1:2])
    assert_same(view.dump(1), own.dump(0))


@some_kinds
@pytest.mark.parametrize("make", (contiguous, paged))
def test_truncated_is_never_appended(format, dtype, make):
    k, v = tensors(*kv(190, 2, 64, dtype, format), dtype)
    kivi = format in oracle.KIVI_FORMATS
    for start, cuts in (
        (150, (134,)),
        (150, (128, 64)),
        (160, (144,)),
        (161, (160, 145, 129)),
        (190, (0,)),
        (70, (70, 64)),
    ):
        cache = make(format, dtype, 2, 64)
        cache.append(k[:, :start], v[:, :start])
        for cut in cuts:
            cache.truncate([0], [cut])
            fresh = make(format, dtype, 2, 64)
            fresh.append(k[:, :cut], v[:, :cut])
            assert_same(cache.dump(0), fresh.dump(0))
        for end in (cut + 1, cut + 17, min(cut + 60, 190)):
            have = cache.lengths[0]
            for c in (cache, fresh):
                c.append(k[:, have:end] * 2, v[:, have:end] * 2)
            assert_same(cache.dump(0), fresh.dump(0))
            for ours, theirs in zip(cache.dequantize(), fresh.dequantize(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    if not kivi:
        cache.truncate([0], [3])
        assert cache.lengths == [3]


@pytest.mark.parametrize("make", (contiguous, paged))
def test_kivi_refuses_cuts_it_cannot_make(make):
    k, v = tensors(*kv(190, 1, 64, "float32", batch=2), "float32")
    cache = make("int4-kivi", "float32", 1, 64, rows=2)
    cache.append(k, v)
    before = state(cache)
    for lengths in ([190, 173], [64, 65], [190, 191], [190, -1], [1, 0]):
        with pytest.raises(rt.ArgumentError, match="lengths"):
            cache.truncate([0, 1], lengths)
        assert_same(state(cache), before)
    cache.truncate([1], [174])
    cache.truncate([1], [158])
    cache.truncate([1], [142])  # the ring held 126 .. 189: the group from 128 on is whole
    with pytest.raises(rt.ArgumentError, match="raw tokens from position 126"):
        cache.truncate([1], [128 - 1])
    cache.truncate([1], [128])
    assert cache.lengths == [190, 128]


@some_kinds
@pytest.mark.parametrize("make", (contiguous, paged))
@pytest.mark.parametrize(
    "index", ([0, 1, 2, 3, 4], [1, 2, 3, 4, 0], [1, 0, 2, 4, 3], [2, 2, 2, 0, 0], [4, 4, 1, 2, 3], [0, 0, 3, 2, 2])
)
def test_reorder(format, dtype, make, index):
    k, v = tensors(*kv(100, 2, 64, dtype, format, batch=5), dtype)
    cache = make(format, dtype, 2, 64, rows=5)
    cache.append(k, v, counts=[100, 0, 33, 64, 97])
    before = [cache.dump(row) for row in range(5)]
    cache.reorder(index)
    for row, source in enumerate(index):
        assert_same(cache.dump(row), before[source])
    lengths = cache.lengths
    cache.append(k[:, :40] * 3, v[:, :40] * 3)  # every row goes its own way
    for row, source in enumerate(index):
        fresh = make(format, dtype, 2, 64)
        fresh.append(k[source : source + 1, : lengths[row]], v[source : source + 1, : lengths[row]])
        fresh.append(k[row : row + 1, :40] * 3, v[row : row + 1, :40] * 3)
        assert_same(cache.dump(row), fresh.dump(0))


@some_kinds
@pytest.mark.parametrize("make", (contiguous, paged))
@pytest.mark.parametrize("length", (0, 20, 64, 75))
def test_forked_rows_go_their_own_ways(format, dtype, make, length):
    k, v = tensors(*kv(160, 2, 64, dtype, format, batch=3), dtype)
    cache = make(format, dtype, 2, 64, rows=3)
    cache.append(k[:, :length], v[:, :length], counts=[length, length // 2, 0])
    cache.fork(0, 1)
    assert_same(cache.dump(1), cache.dump(0))
    cache.append(k[1:, length:] * 2, v[1:, length:] * 2, rows=[1, 0])
    for row, tail in ((1, 1), (0, 2)):
        fresh = make(format, dtype, 2, 64)
        fresh.append(k[:1, :length], v[:1, :length])
        fresh.append(k[tail : tail + 1, length:] * 2, v[tail : tail + 1, length:] * 2)
        assert_same(cache.dump(row), fresh.dump(0))
    cache.reset([0])
    assert cache.lengths == [0, 160, 0]
    cache.append(k[:1, :32], v[:1, :32])
    fresh = make(format, dtype, 2, 64)
    fresh.append(k[:1, :32], v[:1, :32])
    assert_same(cache.dump(0), fresh.dump(0))
    cache.reset()
    assert cache.lengths == [0, 0, 0]


@some_kinds
def test_inputs_of_any_strides(format, dtype):
    k, v = tensors(*kv(40, 2, 64, dtype, format, batch=2), dtype)
    plain = contiguous(format, dtype, 2, 64, rows=2)
    plain.append(k, v)
    expected = state(plain)
    pairs = [(name, a, b) for (name, a), (_, b) in zip(layouts.torch_layouts(k), layouts.torch_layouts(v), strict=True)]
    if dtype != "bfloat16":
        pairs += [
            (name, a, b)
            for (name, a), (_, b) in zip(
                layouts.numpy_layouts(k.numpy()), layouts.numpy_layouts(v.numpy()), strict=True
            )
        ]
    for name, a, b in pairs:
        for plan in ("reference", None):
            cache = contiguous(format, dtype, 2, 64, rows=2)
            cache.append(a, b, plan=plan)
            assert_same(state(cache), expected, name)
    one_head = k[:, :, :1].expand(-1, -1, 2, -1), v[:, :, :1].expand(-1, -1, 2, -1)
    cache, copied = contiguous(format, dtype, 2, 64, rows=2), contiguous(format, dtype, 2, 64, rows=2)
    cache.append(*one_head)
    copied.append(*(x.contiguous() for x in one_head))
    assert_same(state(cache), state(copied))


@quantised_kinds
def test_nan_and_infinity_read_back_as_nan(format, dtype, plan):
    k, v = kv(96, 2, 64, dtype, format)
    k[5, 0, 7], k[40, 1, 3], v[33, 0, 9], v[70, 1, 63] = np.nan, np.inf, -np.inf, np.nan
    cache = contiguous(format, dtype, 2, 64)
    cache.append(*tensors(k, v, dtype), plan=plan)
    dump = {name: np.asarray(value) for name, value in cache.dump(0).items()}
    codes = oracle.encode(k, v, format, dtype)
    for name, exact in vars(codes).items():
        if exact is not None:
            np.testing.assert_array_equal(dump[name].astype(np.float64), exact, err_msg=name)
    ours = cache.dequantize(0, at=96)
    for got, exact in zip(ours, (codes.k(), codes.v()), strict=True):
        np.testing.assert_array_equal(got.double().numpy(), exact)
    for got, x in zip(ours, (k, v), strict=True):
        assert np.isnan(got.numpy()[~np.isfinite(x)]).all()
        assert np.isfinite(got.numpy()).mean() > 0.5


@quantised_kinds
@pytest.mark.parametrize("value", (0.0, -0.0, 1e-8, 3.0, -3.0, 6e4))
def test_constant_groups(format, dtype, plan, value):
    value = oracle.round_to(value, dtype)
    x = np.full((32, 1, 64), value)
    cache = contiguous(format, dtype, 1, 64)
    cache.append(*tensors(x, x, dtype), plan=plan)
    ulp = oracle.quantum(value, oracle.scale_dtype(dtype))
    for got in cache.dequantize(0, at=32):
        assert (np.abs(got.double().numpy() - value) <= ulp).all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_minimum_of_minus_zero_is_stored_as_zero(dtype, plan):
    """The smallest value of a group is a zero of either sign, whichever comes first: the bytes are the same."""
    for zeros in ([0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]):
        x = np.ones((32, 1, 64))
        x[:2, 0, :], x[:, 0, :2] = np.array(zeros)[:, None], zeros
        cache = contiguous("int4-kivi", dtype, 1, 64)
        cache.append(*tensors(x, x, dtype), plan=plan)
        dump = cache.dump(0)
        for name in ("k_min", "v_min"):
            minimum = np.asarray(dump[name]).astype(np.float64)
            assert (minimum == 0).all() and not np.signbit(minimum).any(), (name, zeros)


@quantised_kinds
def test_extreme_ranges(format, dtype, plan):
    """Scales past the largest and below the smallest value of their type: stored as those, codes follow."""
    k, v = kv(64, 1, 64, dtype, format)
    largest = oracle.LARGEST[dtype]
    for x in (k, v):
        x[:32, :, :8] *= largest / 8
        x[32:, :, 8:16] *= 2.0**-20
        x[40] *= oracle.SMALLEST[oracle.scale_dtype(dtype)]
        x[:2, 0, 0] = x[2, 0, :2] = -0.9 * largest, 0.9 * largest  # further apart than the largest value
        x[:] = np.clip(oracle.round_to(x, dtype), -largest, largest)
    cache = contiguous(format, dtype, 1, 64)
    cache.append(*tensors(k, v, dtype), plan=plan)
    dump = {name: np.asarray(value) for name, value in cache.dump(0).items()}
    for name, exact in vars(oracle.encode(k, v, format, dtype)).items():
        if exact is not None:
            np.testing.assert_array_equal(dump[name].astype(np.float64), exact, err_msg=name)
    assert all(torch.isfinite(x).all() for x in cache.dequantize(0, at=64))


@pytest.mark.parametrize("format, dtype", [kind for kind in KINDS if kind[0] in QUANTISED and kind[0] != "fp8"])
def test_every_code_occurs_and_comes_back(format, dtype, plan):
    of_8_bits, of_4_bits = (-127, 127), (-7, 7)
    low, high = {
        "int8": of_8_bits,
        "int8-kivi-sym": of_8_bits,
        "int4": of_4_bits,
        "int4-kivi-sym": of_4_bits,
        "int4-kivi": (0, 15),
    }[format]
    per_token = np.resize(np.arange(low, high + 1), 32 * 256).reshape(32, 1, 256).astype(np.float64)
    per_channel = per_token.copy()
    per_channel[0], per_channel[1] = low, high  # every group spans the whole range
    per_token[:, :, 0], per_token[:, :, 1] = low, high
    k_codes = per_channel if format in oracle.KIVI_FORMATS else per_token
    k, v = (x * 0.5 - (1 if format == "int4-kivi" else 0) for x in (k_codes, per_token))
    cache = contiguous(format, dtype, 1, 256)
    k, v = tensors(k, v, dtype)
    cache.append(k, v, plan=plan)
    dump = cache.dump(0)
    assert set(np.unique(dump["v_codes"])) == set(range(low, high + 1)) == set(np.unique(dump["k_codes"]))
    np.testing.assert_array_equal(dump["k_codes"].numpy(), k_codes)
    np.testing.assert_array_equal(dump["v_codes"].numpy(), per_token)
    for got, x in zip(cache.dequantize(0, at=32), (k, v), strict=True):
        torch.testing.assert_close(got, x[0].float(), rtol=0, atol=0)


def test_every_number_of_fp8_comes_back(dtype, plan):
    numbers = [b for b in range(256) if b & 0x7F != 0x7F]  # the others are NaN and never stored
    x = 0.5 * oracle.e4m3_values(np.resize(numbers, 32 * 256).reshape(32, 1, 256))
    x[:, :, 0] = 224.0  # scale 0.5
    cache = contiguous("fp8", dtype, 1, 256)
    given = tensors(x, x[::-1], dtype)
    cache.append(*given, plan=plan)
    for (side, got), sent in zip(zip("kv", cache.dequantize(0), strict=True), given, strict=True):
        codes = cache.dump(0)[f"{side}_codes"]
        assert codes.dtype == torch.uint8 and set(np.unique(codes)) == set(numbers)
        assert_bits_equal(got, sent[0].float())  # -0 too
        torch.testing.assert_close(codes.view(torch.float8_e4m3fn).float() * 0.5, got, rtol=0, atol=0)


def test_halfway_between_two_numbers_of_fp8(dtype, plan):
    """To the even code, and past it to the nearer: values and scale are exact in every dtype."""
    numbers = oracle.e4m3_values(np.arange(127))
    x = np.zeros((1, 1, 256))
    x[0, 0, 0], x[0, 0, 2:254:2] = 448.0, -(numbers[1:] + numbers[:-1]) / 2
    x[0, 0, 1:253:2] = (numbers[1:] + numbers[:-1]) / 2
    cache = contiguous("fp8", dtype, 1, 256)
    cache.append(*tensors(x, x, dtype), plan=plan)
    codes = np.asarray(cache.dump(0)["k_codes"])[0, 0]
    even = [b + b % 2 for b in range(126)]
    assert codes[1:253:2].tolist() == even and codes[2:254:2].tolist() == [128 + b for b in even]


@pytest.mark.parametrize(
    "format, promised",
    (
        ("int8", 38.0),
        ("int4", 13.0),
        ("int4-kivi-sym", 14.0),
        ("int4-kivi", 18.0),
        ("fp8", 31.0),
        ("int8-kivi-sym", 38.0),
    ),
)
def test_signal_to_noise_on_normal_data(format, promised, dtype):
    k, v = kv(256, 2, 128, dtype, "sqnr")
    k, v = oracle.round_to(k - 0.3, dtype), v
    cache = contiguous(format, dtype, 2, 128, capacity=256)
    cache.append(*tensors(k, v, dtype))
    for got, x in zip(cache.dequantize(0, at=256), (k, v), strict=True):
        noise = got.double().numpy() - x
        assert 10 * np.log10((x**2).mean() / (noise**2).mean()) >= promised


def test_bytes_are_counted():
    cache = rt.KVCache(2, 100, 3, 64, format="int4-kivi", dtype="float16")
    assert cache.capacity == 128 and cache.batch == 2
    ring = 2 * 2 * 3 * 64 * 64 * 2
    assert cache.nbytes == 4 * 3 * oracle.block_bytes("int4-kivi", 64, 64) + ring + 2 * 4 + 2 * 4
    assert cache.nbytes_used == 0
    k = torch.zeros(2, 40, 3, 64, dtype=torch.float16)
    cache.append(k, k, counts=[40, 1])
    assert cache.nbytes_used == 3 * (oracle.block_bytes("int4-kivi", 64, 64) // 2 + 9 * 2 * 64 * 2)


def test_numpy_alone():
    k, v = (x[None].astype(np.float32) for x in kv(50, 2, 64, "float32"))
    for index in ([0], np.array([0], np.int32), torch.tensor([0], dtype=torch.int32)):
        cache = rt.KVCache(1, 64, 2, 64, format="int8")
        cache.append(k, v, rows=index, counts=index)
        cache.append(k, v, rows=index)
        assert cache.lengths == [50] and cache.dtype == "float32"


GOOD = {"k": (2, 4, 3, 64), "v": (2, 4, 3, 64), "rows": [0, 1], "counts": [4, 4]}
BAD_APPENDS = {
    "k is not an array": ({"k": 3.0}, rt.ArgumentTypeError, "k "),
    "k is None": ({"k": None}, rt.ArgumentTypeError, "k "),
    "v of another shape": ({"v": (2, 5, 3, 64)}, rt.ArgumentError, "v must have k's shape"),
    "three dimensions": ({"k": (2, 3, 64), "v": (2, 3, 64)}, rt.ArgumentError, "k must have 4 dimensions"),
    "other heads": ({"k": (2, 4, 2, 64), "v": (2, 4, 2, 64)}, rt.ArgumentError, "k must be .*kv_heads"),
    "other head_dim": ({"k": (2, 4, 3, 65), "v": (2, 4, 3, 65)}, rt.ArgumentError, "k must be .*head_dim"),
    "another dtype": ({"k": torch.zeros(2, 4, 3, 64).half()}, rt.ArgumentTypeError, "k must be float32"),
    "v of another dtype": ({"v": torch.zeros(2, 4, 3, 64).bfloat16()}, rt.ArgumentTypeError, "v must be float32"),
    "rows past the end": ({"rows": [0, 3]}, rt.ArgumentError, "rows must lie in"),
    "rows negative": ({"rows": [-1, 0]}, rt.ArgumentError, "rows must lie in"),
    "rows twice": ({"rows": [1, 1]}, rt.ArgumentError, "rows names row 1 twice"),
    "rows too few": ({"rows": [1]}, rt.ArgumentError, "rows must be"),
    "rows int64": ({"rows": torch.tensor([0, 1])}, rt.ArgumentTypeError, "rows must be int32"),
    "rows of floats": ({"rows": [0.0, 1.0]}, rt.ArgumentTypeError, "rows must be"),
    "rows past 32 bits": ({"rows": [0, 2**40]}, rt.ArgumentError, "rows"),
    "rows a number": ({"rows": 1}, rt.ArgumentTypeError, "rows"),
    "counts negative": ({"counts": [-1, 2]}, rt.ArgumentError, "counts must lie in"),
    "counts past T": ({"counts": [2, 5]}, rt.ArgumentError, "counts must lie in"),
    "counts two-dimensional": ({"counts": np.zeros((2, 1), np.int32)}, rt.ArgumentError, "counts must be"),
    "more rows than there are": (
        {"k": (4, 4, 3, 64), "v": (4, 4, 3, 64), "rows": None, "counts": None},
        rt.ArgumentError,
        "batch 4",
    ),
    "past the capacity": (
        {"k": (2, 63, 3, 64), "v": (2, 63, 3, 64), "counts": [1, 63]},
        rt.ArgumentError,
        "do not fit",
    ),
    "unknown plan": ({"plan": "sse9"}, rt.NotSupportedError, "plan"),
}


@pytest.mark.parametrize("make", (contiguous, paged))
@pytest.mark.parametrize("format", ("fp32", "int8", "int4-kivi"))
@pytest.mark.parametrize("fault", BAD_APPENDS)
def test_bad_append_changes_nothing(make, format, fault, count_bad_input):
    changes, error, message = BAD_APPENDS[fault]
    cache = make(format, "float32", 3, 64, rows=3, capacity=64)
    first = torch.ones(3, 2, 3, 64)
    cache.append(first, first)
    before = state(cache)
    call = {name: torch.ones(x) if isinstance(x, tuple) else x for name, x in (GOOD | changes).items()}
    with pytest.raises(error, match=message):
        cache.append(call.pop("k"), call.pop("v"), **call)
    assert_same(state(cache), before)
    cache.append(torch.ones(2, 4, 3, 64), torch.ones(2, 4, 3, 64))
    assert cache.lengths == [6, 6, 2]
    count_bad_input(1)


BAD_CACHES = {
    "unknown format": ({"format": "int3"}, rt.ArgumentError, "format.*int4-kivi"),
    "format None": ({"format": None}, rt.ArgumentTypeError, "format must be a string"),
    "dtype of another kind": ({"dtype": "int8"}, rt.ArgumentTypeError, "dtype must be float32"),
    "fp16 of float32": ({"format": "fp16", "dtype": "float32"}, rt.ArgumentTypeError, "format fp16"),
    "device without a name": ({"device": ""}, rt.NotSupportedError, "device '' has no cache kernels"),
    "no such device": ({"device": "xpu"}, rt.NotSupportedError, "device"),
    "negative batch": ({"batch": -1}, rt.ArgumentError, "batch"),
    "fractional capacity": ({"capacity": 1.5}, rt.ArgumentTypeError, "capacity"),
    "no heads": ({"kv_heads": 0}, rt.ArgumentError, "kv_heads"),
    "head_dim 0": ({"head_dim": 0}, rt.ArgumentError, "head_dim"),
}


@pytest.mark.parametrize("fault", BAD_CACHES)
def test_bad_cache(fault, count_bad_input):
    changes, error, message = BAD_CACHES[fault]
    call = {"batch": 1, "capacity": 64, "kv_heads": 2, "head_dim": 64, "format": "int8"} | changes
    with pytest.raises(error, match=message):
        rt.KVCache(call.pop("batch"), call.pop("capacity"), call.pop("kv_heads"), call.pop("head_dim"), **call)
    count_bad_input(1)


def test_nothing_at_all():
    empty = rt.KVCache(0, 0, 2, 64)
    empty.append(torch.zeros(0, 3, 2, 64), torch.zeros(0, 3, 2, 64))
    empty.reorder([])
    empty.reset()
    assert empty.lengths == [] and empty.dequantize()[0].shape == (0, 0, 2, 64)
    cache = rt.KVCache(2, 10, 2, 64)
    cache.append(torch.zeros(2, 0, 2, 64), torch.zeros(2, 0, 2, 64))
    assert cache.lengths == [0, 0] and cache.dequantize(1)[0].shape == (0, 2, 64) and cache.dump(0)["length"] == 0


def test_bad_rows_of_the_other_methods():
    cache = contiguous("int4-kivi", "float32", 1, 64, rows=2)
    cache.append(*(torch.ones(2, 40, 1, 64) for _ in range(2)))
    before = state(cache)
    for call, message in (
        (lambda: cache.truncate([2], [0]), "rows"),
        (lambda: cache.truncate([0, 0], [32, 32]), "twice"),
        (lambda: cache.truncate([0], [32, 32]), "lengths"),
        (lambda: cache.reset([5]), "rows"),
        (lambda: cache.reorder([0]), "index"),
        (lambda: cache.reorder([0, 2]), "index"),
        (lambda: cache.fork(0, 2), "dst"),
        (lambda: cache.fork(-1, 0), "src"),
        (lambda: cache.dequantize(2), "row"),
        (lambda: cache.dequantize(-1), "row"),
        (lambda: cache.dequantize(0, 41), "at"),
        (lambda: cache.dump(2), "row"),
        (lambda: cache.select([2]), "rows"),
        (lambda: cache.select(capacity=1) if cache.capacity < 40 else cache.truncate([0], [41]), "lengths"),
    ):
        with pytest.raises(rt.ArgumentError, match=message):
            call()
        assert_same(state(cache), before)


def test_select_needs_room_for_the_longest_row():
    cache = rt.KVCache(2, 256, 1, 32)
    cache.append(*torch.randn(2, 2, 200, 1, 32), counts=[200, 40])
    with pytest.raises(rt.ArgumentError, match=r"^select: capacity 64 is less than the 200 tokens that a row holds"):
        cache.select([1, 0], capacity=64)
    assert cache.select([1, 1], capacity=64).lengths == [40, 40]


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_select_refuses_more_rows_than_there_is_memory_for():
    """An array that repeats one row: nothing of its length is made before the sizes are judged."""
    cache = rt.KVCache(1, 64, 1, 32, format="fp32")
    rows = np.broadcast_to(np.zeros(1, np.int32), 2**31)
    with pytest.raises((rt.ArgumentError, rt.OutOfMemoryError), match="KVCache"):
        cache.select(rows)
    with pytest.raises(rt.ArgumentError, match=r"select: rows must lie in \[0, 1\), got 1"):
        cache.select(np.broadcast_to(np.ones(1, np.int32), 2**31))


def test_select_refuses_rows_that_cannot_be_read():
    with pytest.raises(rt.ArgumentTypeError, match=r"^select: rows cannot be read: it is a nested tensor"):
        rt.KVCache(2, 64, 1, 32).select(torch.nested.nested_tensor([torch.zeros(2, dtype=torch.int32)]))


@some_kinds
def test_select_copies_rows(format, dtype):
    k, v = tensors(*kv(70, 2, 64, dtype, format, batch=3), dtype)
    cache = contiguous(format, dtype, 2, 64, rows=3)
    cache.append(k, v, counts=[70, 33, 0])
    grown = cache.select([1, 0, 0, 2], capacity=500)
    assert grown.lengths == [33, 70, 70, 0] and grown.capacity == 512
    for row, source in enumerate([1, 0, 0, 2]):
        assert_same(grown.dump(row), cache.dump(source))
    grown.append(k[:, :1], v[:, :1])
    assert cache.lengths == [70, 33, 0]


def test_a_model_changes_all_layers_or_none():
    model = rt.ModelKVCache(4, 2, 100, 2, 64, format={"default": "int8", 1: "fp32", -1: "int4-kivi"})
    assert [layer.format for layer in model] == ["int8", "fp32", "int8", "int4-kivi"] and len(model) == 4
    k = torch.randn(2, 80, 2, 64)
    for layer in model:
        layer.append(k, k, counts=[80, 40])
    with pytest.raises(rt.ArgumentError, match="multiple of 32"):
        model.truncate([0, 1], [40, 30])
    assert [layer.lengths for layer in model] == [[80, 40]] * 4
    model.truncate([0], [64])
    model.reorder([1, 0])
    model.fork(1, 0)
    assert [layer.lengths for layer in model] == [[64, 64]] * 4 and model.lengths == [64, 64]
    assert model.nbytes == sum(layer.nbytes for layer in model) > model.nbytes_used
    model.reset([0])
    assert model[3].lengths == [0, 64]
    for wrong in ({0: "int8"}, {"default": "int8", 4: "fp32"}):
        with pytest.raises(rt.ArgumentError, match="format"):
            rt.ModelKVCache(4, 1, 10, 1, 64, format=wrong)


@pytest.mark.parametrize("name", ("rows", "counts"))
def test_lists_do_not_lie_in_the_lengths_that_a_call_writes(name):
    cache = rt.KVCache(2, 64, 1, 8, format="fp32")
    k = torch.arange(16.0).reshape(2, 1, 1, 8)
    cache.append(k[:1], k[:1], rows=[0])
    with pytest.raises(rt.ArgumentError, match=f"{name} must not share memory with the cache's lengths"):
        cache.append(k, k, **{name: cache.seq_lens})  # of a GPU's threads some would read what others have written
    assert cache.lengths == [1, 0]


def test_more_rows_than_the_cache_has_are_refused_unread():
    cache, rows = rt.KVCache(2, 64, 1, 8), torch.zeros(1, dtype=torch.int32).expand(2**40)
    for op, call in (("reset", cache.reset), ("truncate", lambda rows: cache.truncate(rows, rows))):
        with pytest.raises(rt.ArgumentError, match=f"^{op}: rows must have at most 2 entries"):
            call(rows)


@pytest.mark.skipif(len(cases.devices()) > 1, reason="there is a GPU")
def test_no_gpu_says_so():
    with pytest.raises(rt.NotSupportedError, match="device 'cuda'"):
        rt.KVCache(1, 10, 1, 64, device="cuda")


@pytest.mark.parametrize("format, dtype", (("bf16", "bfloat16"), ("int4-kivi", "float32"), ("int8", "float16")))
@pytest.mark.parametrize("make", (contiguous, paged))
def test_a_copy_on_the_same_device(format, dtype, make):
    k, v = tensors(*kv(50, 2, 64, dtype, format), dtype)
    cache = make(format, dtype, 2, 64)
    cache.append(k, v)
    before, twin = state(cache), cache.to("cpu")
    assert_same(state(twin), before)
    twin.append(k, v)
    assert_same(state(cache), before)
    assert (cache.lengths, twin.lengths) == ([50], [100])
