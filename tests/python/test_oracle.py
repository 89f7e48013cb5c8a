# SPDX-License-Identifier: Apache-2.0
"""The oracle against numbers worked by hand and, where torch is an independent implementation, against torch."""

import closeness
import gguf
import mpmath
import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import exact_values, generator, torch_dtype, values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_round_to_is_numpys_and_torchs_rounding(dtype):
    rng = generator("round", dtype)
    x = np.ldexp(rng.standard_normal(20000), rng.integers(-160, 126, 20000))
    x = np.concatenate(
        [x, rng.standard_normal(20000), [0.0, -0.0, np.inf, -np.inf, 65519.99, 65520.0, 65504.0, 2.0**-25]]
    )
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":  # torch goes through float32 on the way: compare where that rounds nothing
            x = x.astype(np.float32).astype(np.float64)
            expected = torch.from_numpy(x).float().bfloat16().double().numpy()
        else:
            expected = x.astype(dtype).astype(np.float64)
    got = oracle.round_to(x, dtype)
    assert np.array_equal(got, expected) and np.array_equal(np.signbit(got), np.signbit(expected))


def test_round_to_ties_by_hand():
    eps = 2.0**-10  # of float16 at 1
    assert oracle.round_to([1 + eps / 2, 1 + 1.5 * eps, 1 + 0.51 * eps], "float16").tolist() == [
        1,
        1 + 2 * eps,
        1 + eps,
    ]
    assert oracle.round_to([2.0**-25, 2.0**-25 * 1.01, 3 * 2.0**-25], "float16").tolist() == [0, 2.0**-24, 2 * 2.0**-24]
    assert oracle.round_to([1 + 2.0**-8, 1 + 3 * 2.0**-8], "bfloat16").tolist() == [1, 1 + 2.0**-6]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bits_come_back(dtype):
    bits = np.arange(65536, dtype=np.uint16)
    x = oracle.from_bits(bits, dtype)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch_dtype(dtype)).double().numpy()
    assert np.array_equal(x, expected, equal_nan=True)
    numbers = ~np.isnan(x)
    assert np.array_equal(oracle.bits_of(x[numbers], dtype), bits[numbers])


def test_e4m3_by_hand():
    numbers = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x0F: 15 * 2.0**-9, 0x38: 1.0, 0x39: 1.125,
               0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}  # fmt: skip
    assert oracle.e4m3_values(list(numbers)).tolist() == list(numbers.values())
    assert np.signbit(oracle.e4m3_values(0x80)) and np.isnan(oracle.e4m3_values([0x7F, 0xFF])).all()
    # 17 lies between 16 and 18, whose mantissas are 0 and 1; 19 between 1 and 2 of them; so it goes below 2^-6
    x = [17.0, 17.01, 19.0, -19.0, 2.0**-10, 1.01 * 2.0**-10, 3 * 2.0**-10, 15 * 2.0**-10, 448.0, 463.9, 1e9, -0.0]
    expected = [16, 18, 20, -20, 0, 2.0**-9, 2.0**-8, 2.0**-6, 448, 448, 448, 0]
    got = oracle.e4m3_bits(x)
    assert oracle.e4m3_values(got).tolist() == expected and got[-1] == 0x80


def test_e4m3_is_torchs():
    bits = np.arange(256, dtype=np.uint8)
    x = oracle.e4m3_values(bits)
    expected = torch.from_numpy(bits).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(x, expected, equal_nan=True) and np.array_equal(np.signbit(x[:-1]), np.signbit(expected[:-1]))
    numbers = np.sort(x[np.isfinite(x)])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, halfway, *(np.nextafter(np.float32(halfway), np.float32(s)) for s in (-500, 500))])
    expected = torch.from_numpy(x).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(oracle.e4m3_bits(x), expected)


# ---- quantisers


def test_symmetric_by_hand():
    # absmax 7 -> scale 1: codes are the values, ties to even, clamped.
    codes, scale = oracle.quantize_symmetric([[-7.0, 0.5, 1.5, 2.5, 6.6, 0.0]], -1, 7, "float16")
    assert scale.tolist() == [[1.0]] and codes.tolist() == [[-7, 0, 2, 2, 7, 0]]
    # absmax 127 * 2^-3 -> scale 0.125.
    codes, scale = oracle.quantize_symmetric([[15.875, -15.875, 0.0625]], -1, 127, "bfloat16")
    assert scale.tolist() == [[0.125]] and codes.tolist() == [[127, -127, 0]]


def test_symmetric_uses_the_stored_scale():
    # 1/7 in float16 is 0.14282227 (below 1/7): 1 / that = 7.0017 -> 7 after rounding; 0.5 -> 3.5009 -> 4, not the tie.
    codes, scale = oracle.quantize_symmetric([[1.0, 0.5]], -1, 7, "float16")
    assert scale[0, 0] == 0.142822265625 and codes.tolist() == [[7, 4]]


def test_e4m3_groups_by_hand():
    # absmax 448 * 2^-3 -> scale 0.125: 2.125 is 17 steps, a tie
    codes, scale = oracle.quantize_e4m3([[56.0, -56.0, 2.125, -0.0]], -1, "bfloat16")
    assert scale.tolist() == [[0.125]] and codes.tolist() == [[0x7E, 0xFE, 0x58, 0x80]]
    rows = [[0.0, -0.0], [1e-9, 0.0], [1e38, -1e38], [np.nan, 1.0], [-np.inf, 1.0]]
    codes, scale = oracle.quantize_e4m3(rows, -1, "float16")
    assert scale[:3, 0].tolist() == [0.0, 2.0**-24, 65504.0] and np.isnan(scale[3:, 0]).all()
    assert codes.tolist() == [[0, 0], [0x09, 0], [0x7E, 0xFE], [0, 0], [0, 0]]  # 1e-9 is 8.6 steps of 2^-33
    assert np.isnan(oracle.dequantize(codes, scale)[3:]).all()


def test_special_groups():
    rows = [[0.0, -0.0], [1e-9, 0.0], [1e38, -1e38], [np.nan, 1.0], [np.inf, 1.0]]
    codes, scale = oracle.quantize_symmetric(rows, -1, 7, "float16")
    assert scale[:3, 0].tolist() == [0.0, 2.0**-24, 65504.0] and np.isnan(scale[3:, 0]).all()
    assert codes.tolist() == [[0, 0], [0, 0], [7, -7], [0, 0], [0, 0]]
    assert np.isnan(oracle.dequantize(codes, scale)[3:]).all()
    rows = [[3.0, 3.0], [0.0, 1e-9], [-1e38, 1e38], [np.nan, 1.0], [-np.inf, 1.0]]
    codes, scale, minimum = oracle.quantize_affine(rows, -1, "float16")
    assert scale[:3, 0].tolist() == [0.0, 2.0**-24, 65504.0] and minimum[:3, 0].tolist() == [3.0, 0.0, -65504.0]
    # -1e38 lies below the stored minimum: code 0; 1e38 above 15 steps: code 15.
    assert codes.tolist() == [[0, 0], [0, 0], [0, 15], [0, 0], [0, 0]]
    assert oracle.dequantize(codes, scale, minimum)[0].tolist() == [3.0, 3.0]
    assert np.isnan(oracle.dequantize(codes, scale, minimum)[3:]).all()


def test_affine_by_hand():
    # 1 .. 16 in steps of 1: min 1, scale 1, codes 0..15.
    codes, scale, minimum = oracle.quantize_affine([np.arange(1.0, 17.0)], -1, "bfloat16")
    assert scale.tolist() == [[1.0]] and minimum.tolist() == [[1.0]] and codes[0].tolist() == list(range(16))


@pytest.mark.parametrize(
    "format, db",
    [("int8", 40), ("int4", 15), ("int4-kivi-sym", 15), ("int4-kivi", 18), ("fp8", 30), ("int8-kivi-sym", 40)],
)
def test_formats_keep_their_signal(format, db):
    """Normal data: what so many levels, or so many bits of mantissa, keep (a swapped axis or sign loses it all)."""
    k = values((64, 2, 64), "float16", "signal")
    v = values((64, 2, 64), "float16", "signal v")
    codes = oracle.encode(k, v, format, "float16")
    for stored, x in ((codes.k(), k), (codes.v(), v)):
        assert 10 * np.log10((x * x).sum() / ((stored - x) ** 2).sum()) >= db


def test_kivi_axes():
    # One loud channel: per channel it costs its neighbours nothing; V per token does not mix tokens.
    k, v = np.ones((2, 32, 1, 32))
    k[:, 0, 5], v[7] = 1000.0, 1000.0
    codes = oracle.encode(k, v, "int4-kivi-sym", "float16")
    assert codes.k_scale.shape == (1, 1, 32) and codes.v_scale.shape == (32, 1, 1)
    assert np.abs(codes.k()[:, 0, :5] - 1).max() < 1e-3 and np.abs(codes.v()[:7] - 1).max() < 1e-3


def test_visibility_rule():
    k, v = values((70, 1, 32), "float16", "visible"), values((70, 1, 32), "float16", "visible v")
    codes = oracle.encode(k, v, "int4-kivi", "float16")
    for position, closed in ((0, 0), (31, 0), (32, 32), (63, 32), (64, 64), (69, 64)):
        seen_k, seen_v = oracle.visible_kv(k, v, "int4-kivi", "float16", position)
        assert len(seen_k) == len(seen_v) == position + 1
        assert np.array_equal(seen_k[:closed], codes.k()[:closed]) and np.array_equal(
            seen_k[closed:], k[closed : position + 1]
        )
        assert np.array_equal(seen_v[:closed], codes.v()[:closed]) and np.array_equal(
            seen_v[closed:], v[closed : position + 1]
        )
    assert len(oracle.visible_kv(k, v, "int4-kivi", "float16", -1)[0]) == 0
    assert np.array_equal(oracle.cached_kv(k[:64], v[:64], "int4-kivi", "float16")[0], codes.k()[:64])


# ---- block bytes


@pytest.mark.parametrize("format, page, dim, size", [
    ("int8", 16, 32, 2 * 16 * 32 + 2 * 16 * 2),
    ("fp8", 32, 40, 2 * 32 * 64 + 2 * 32 * 2),
    ("int4", 64, 128, 2 * 64 * 64 + 2 * 64 * 2),
    ("int4-kivi-sym", 32, 128, 2 * 32 * 64 + 128 * 2 + 32 * 2),
    ("int4-kivi", 64, 128, 2 * 64 * 64 + 2 * 2 * 128 * 2 + 2 * 64 * 2),
    ("int8-kivi-sym", 32, 128, 2 * 32 * 128 + 128 * 2 + 32 * 2),
    ("fp32", 16, 40, 2 * 16 * 40 * 4),
    ("bf16", 16, 40, 2 * 16 * 40 * 2),
])  # fmt: skip
def test_block_size_by_hand(format, page, dim, size):
    assert oracle.block_bytes(format, page, dim) == size


@pytest.mark.parametrize("format", ["int8", "int4", "int4-kivi-sym", "int4-kivi", "fp8", "int8-kivi-sym"])
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("dim", [32, 40, 128])
def test_blocks_come_back(format, page, dim):
    if page == 16 and format in oracle.KIVI_FORMATS:
        page = 128
    k, v = values((page, 2, dim), "bfloat16", "block"), values((page, 2, dim), "bfloat16", "block v")
    codes = oracle.encode(k, v, format, "bfloat16")
    for head in range(2):
        data = oracle.encode_block(codes, head, format, "bfloat16", page)
        assert data.size == oracle.block_bytes(format, page, dim)
        back = oracle.decode_block(data, format, "bfloat16", page, dim)
        assert np.array_equal(back.k(), codes.k()[:, head : head + 1])
        assert np.array_equal(back.v(), codes.v()[:, head : head + 1])
        assert np.array_equal(back.k_codes[:, 0], codes.k_codes[:, head])


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("page", [16, 64])
def test_v_order_visits_every_code_once(format, page):
    assert sorted(oracle._v_order(format, page, 64)) == [(t, d) for t in range(page) for d in range(64)]


def test_v_order_by_hand():
    # int4, one tile of 32 tokens: the first word is tokens 0 and 1 of d 0, 8, 16, 24; the next tokens 8 and 9.
    order = list(oracle._v_order("int4", 32, 32))
    assert order[:8] == [(0, 0), (0, 8), (0, 16), (0, 24), (1, 0), (1, 8), (1, 16), (1, 24)]
    assert order[8] == (8, 0) and order[32] == (2, 0) and order[128] == (0, 1)
    # int8: the first word is tokens 0, 1, 8, 9 of d 0, the next the same of d 8; the second piece starts at token 2.
    order = list(oracle._v_order("int8", 32, 64))
    assert order[:5] == [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8)]
    assert order[16] == (2, 0) and order[512] == (0, 32) and order[1024] == (16, 0)
    assert list(oracle._v_order("fp8", 32, 64)) == order


# ---- attention


def torch_attention(q, k, v, mask=None, **options):
    out = F.scaled_dot_product_attention(
        *(torch.from_numpy(x.copy()).transpose(0, 1) for x in (q, k, v)), attn_mask=mask, enable_gqa=True, **options
    )
    return out.transpose(0, 1).numpy()


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (9, 3), (5, 1)])
def test_attention_is_torchs(heads, kv_heads):
    q, k, v = (values((n, h, 24), "float32", "sdpa", n, h) for n, h in ((7, heads), (20, kv_heads), (20, kv_heads)))
    out, lse = oracle.attention_reference(q, k, v, causal=False)
    assert np.allclose(out, torch_attention(q, k, v), rtol=1e-12, atol=1e-12)
    logits = np.einsum("thd,shd->ths", q, np.repeat(k, heads // kv_heads, axis=1)) / np.sqrt(24)
    assert np.allclose(lse, torch.from_numpy(logits).logsumexp(-1).numpy(), rtol=1e-12, atol=1e-12)
    visible = torch.ones(7, 20).tril(13).bool()  # aligned to the end
    out, _ = oracle.attention_reference(q, k, v, scale=0.3)
    assert np.allclose(out, torch_attention(q, k, v, visible, scale=0.3), rtol=1e-12, atol=1e-12)
    window = visible & torch.ones(7, 20).triu(13 - 4).bool()  # 5 keys, itself included
    out, _ = oracle.attention_reference(q, k, v, window=5)
    assert np.allclose(out, torch_attention(q, k, v, window), rtol=1e-12, atol=1e-12)


def test_attention_by_hand():
    q, k, v = np.ones((1, 1, 1)), np.array([[[0.0]], [[np.log(3.0)]]]), np.array([[[4.0]], [[8.0]]])
    out, lse = oracle.attention_reference(q, k, v, scale=1.0)  # weights 1/4 and 3/4
    assert np.allclose(out, 7.0) and np.allclose(lse, np.log(4.0))
    out, lse = oracle.attention_reference(q, k, v, scale=1.0, sinks=[np.log(4.0)])  # total 8
    assert np.allclose(out, 3.5) and np.allclose(lse, np.log(8.0))
    out, lse = oracle.attention_reference(q, k, v, scale=1.0, window=1)
    assert np.allclose(out, 8.0) and np.allclose(lse, np.log(3.0))
    out, _ = oracle.attention_reference(q, k, v, scale=1.0, alibi_slopes=[np.log(3.0)])  # logits -log 3, log 3
    assert np.allclose(out, (4 / 3 + 8 * 3) / (1 / 3 + 3))
    out, _ = oracle.attention_reference(q, k, v, scale=1.0, softcap=1.0)
    w = np.exp(np.tanh(np.log(3.0)))
    assert np.allclose(out, (4 + 8 * w) / (1 + w))
    out, lse = oracle.attention_reference(q, k, v, q_positions=[-1])
    assert out.item() == 0 and np.isneginf(lse.item())
    out, lse = oracle.attention_reference(q, k[:0], v[:0], causal=False, sinks=[1.0])
    assert out.item() == 0 and np.isneginf(lse.item())


@pytest.mark.parametrize("format", oracle.KV_FORMATS)
def test_decode_of_t_tokens_is_t_decodes(format):
    k, v, q = (values((40, h, 32), "float16", "decode", h) for h in (1, 1, 2))
    out, lse = oracle.decode_attention(q[:16], k, v, format, "float16")
    for i in range(16):
        one, one_lse = oracle.decode_attention(q[i : i + 1], k[: 25 + i], v[: 25 + i], format, "float16")
        assert np.array_equal(out[i], one[0]) and np.array_equal(lse[i], one_lse[0])
    padded, padded_lse = oracle.decode_attention(q[:16], k, v, format, "float16", count=3)
    assert (padded[3:] == 0).all() and np.isneginf(padded_lse[3:]).all()
    assert np.array_equal(padded[2], oracle.decode_attention(q[2:3], k, v, format, "float16")[0][0])


def test_merge_is_the_whole():
    q, k, v = (values((n, 2, 8), "float32", "merge", n) for n in (3, 30, 30))
    whole, whole_lse = oracle.attention_reference(q, k, v, causal=False)
    a = oracle.attention_reference(q, k[:11], v[:11], causal=False)
    b = oracle.attention_reference(q, k[11:], v[11:], causal=False)
    out, lse = oracle.merge_attention(*a, *b)
    assert np.allclose(out, whole, rtol=1e-13) and np.allclose(lse, whole_lse, rtol=1e-13)
    nothing = oracle.attention_reference(q, k[:0], v[:0], causal=False)
    out, lse = oracle.merge_attention(*a, *nothing)
    assert np.array_equal(out, a[0]) and np.array_equal(lse, a[1])
    out, lse = oracle.merge_attention(*nothing, *nothing)
    assert (out == 0).all() and np.isneginf(lse).all()


def test_naive_errs_like_its_dtype():
    q, k, v = (values((n, 2, 64), "float16", "naive", n) for n in (4, 100, 100))
    exact, _ = oracle.attention_reference(q, k, v)
    for dtype, low, high in (("float32", 1e-9, 1e-6), ("float16", 1e-5, 2e-3), ("bfloat16", 1e-4, 2e-2)):
        naive, _ = oracle.attention_naive(q, k, v, dtype)
        assert low < np.linalg.norm(naive - exact) / np.linalg.norm(exact) < high


# ---- W4A16 and GGUF


def test_w4_decode_by_hand():
    codes = np.array([[0x10, 0xF8]], np.uint8)  # nibbles 0, 1, 8, 15
    assert oracle.w4_decode(codes, [[0.5]]).tolist() == [[-4, -3.5, 0, 3.5]]
    assert oracle.w4_decode(codes, [[0.5, 2.0]], "integer", [[1, 8]]).tolist() == [[-0.5, 0, 0, 14]]
    assert oracle.w4_decode(codes, [[0.5, 2.0]], "minima", [[-1.0, 3.0]]).tolist() == [[-1, -0.5, 19, 33]]
    assert oracle.w4_decode(codes, [[1.0]], perm=[2, 0, 3, 1]).tolist() == [[-7, 7, -8, 0]]
    codes = np.array([[0, 1, 128, 255]], np.uint8)
    assert oracle.w4_decode(codes, [[0.5]], bits=8).tolist() == [[-64, -63.5, 0, 63.5]]
    assert oracle.w4_decode(codes, [[0.5, 2.0]], "integer", [[1, 255]], bits=8).tolist() == [[-0.5, 0, -254, 0]]


def test_w4_quantize_by_hand():
    codes, scales, minima = oracle.w4_quantize([[-7.0, 7.0, 2.5, 0.0]], 4)
    assert codes.tolist() == [[0xF1, 0x8A]] and scales.tolist() == [[1.0]] and minima is None
    codes, scales, minima = oracle.w4_quantize([[-127.0, 127.0, 2.5, 0.0]], 4, bits=8)
    assert codes.tolist() == [[1, 255, 130, 128]] and scales.tolist() == [[1.0]] and minima is None
    codes, scales, minima = oracle.w4_quantize([[1.0, 16.0, 3.0, 2.0]], 4, "minima")
    assert codes.tolist() == [[0xF0, 0x12]] and scales.tolist() == [[1.0]] and minima.tolist() == [[1.0]]


def test_w4_kernel_codes_by_hand():
    u = np.zeros((16, 64), np.int64)
    for row, column, value in ((0, 0, 1), (8, 0, 2), (0, 8, 3), (8, 8, 4), (0, 1, 5), (8, 1, 6), (0, 9, 7), (8, 9, 8)):
        u[row, column] = value
    data = oracle.w4_kernel_codes(oracle.w4_pack_nibbles(u))
    assert data.size == 512 and data[:4].tolist() == [0x21, 0x43, 0x65, 0x87] and not data[4:].any()
    for (row, column), byte in (((0, 16), 4), ((0, 2), 16), ((1, 0), 64), ((7, 6), 31 * 16), ((3, 50), 13 * 16 + 12)):
        u[:] = 0
        u[row, column] = 15
        data = oracle.w4_kernel_codes(oracle.w4_pack_nibbles(u))
        assert data[byte] == 15 and data.sum() == 15, (row, column)


def test_w8_kernel_codes_by_hand():
    u = np.zeros((16, 64), np.uint8)
    for row, column, value in ((0, 0, 1), (8, 0, 2), (0, 8, 3), (8, 8, 4), (0, 1, 5), (8, 1, 6), (0, 9, 7), (8, 9, 8)):
        u[row, column] = value
    data = oracle.w4_kernel_codes(u, 8)
    assert data.size == 1024 and data[:8].tolist() == [1, 2, 5, 6, 3, 4, 7, 8] and not data[8:].any()
    places = ((0, 16), 8), ((0, 2), 16), ((1, 0), 64), ((7, 6), 31 * 16), ((0, 32), 512), ((3, 50), 512 + 13 * 16 + 8)
    for (row, column), byte in places:
        u[:] = 0
        u[row, column] = 200
        data = oracle.w4_kernel_codes(u, 8)
        assert data[byte] == 200 and data.astype(int).sum() == 200, (row, column)


def test_w4_kernel_form_has_every_code_once():
    u = generator("w4 kernel").integers(0, 16, (33, 96))
    data = oracle.w4_kernel_codes(oracle.w4_pack_nibbles(u))
    assert data.size == 3 * 2 * 512
    counts = np.bincount(np.concatenate([data & 15, data >> 4]), minlength=16)
    assert np.array_equal(counts[1:], np.bincount(u.reshape(-1), minlength=16)[1:])
    scales = np.arange(33.0 * 3).reshape(33, 3) + 1
    flat = oracle.w4_kernel_scales(scales)
    assert (
        flat.size == 48 * 3
        and flat[:17].tolist() == [*(3.0 * np.arange(16) + 1), 2.0]
        and flat[96] == 97.0
        and flat[97] == 0
    )


@pytest.mark.parametrize(
    "kind, decode", [("Q4_0", oracle.gguf_q4_0), ("Q4_1", oracle.gguf_q4_1), ("Q8_0", oracle.gguf_q8_0)]
)
def test_gguf_blocks_are_the_gguf_packages(kind, decode):
    quant = getattr(gguf.GGMLQuantizationType, kind)
    weights = generator("gguf", kind).standard_normal((3, 64)).astype(np.float32)
    data = gguf.quants.quantize(weights, quant)
    expected = gguf.quants.dequantize(data, quant)
    got = decode(data.reshape(-1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind])).reshape(3, 64)
    assert np.allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_mxfp4_by_hand():
    """The table of values of the specification, 5.3.3; scales of 1, 2^-127 and 2^127, and NaN."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    got = oracle.e2m1_values(np.arange(16))
    assert got.tolist() == table + [-v for v in table] and np.signbit(got[8])
    assert oracle.e8m0_values([0, 126, 127, 128, 254]).tolist() == [2.0**-127, 0.5, 1, 2, 2.0**127]
    assert np.isnan(oracle.e8m0_values(255))
    blocks = np.zeros((2, 16), np.uint8)
    blocks[0, 0], blocks[0, 15], blocks[1, 1] = 0x21, 0xF0, 0x7A  # the first code of a byte is the low one
    got = oracle.mxfp4(blocks, np.array([127, 130]))
    assert {i: v for i, v in enumerate(got) if v} == {0: 0.5, 1: 1, 31: -6, 34: -8, 35: 48}


def test_mxfp4_is_the_gguf_packages():
    """GGUF holds the same numbers in blocks of 17 bytes: the scale, then byte j has weights j (low) and j + 16."""
    rng = generator("mxfp4")
    codes, scales = rng.integers(0, 16, (5, 32)), rng.integers(100, 150, (5, 1))
    data = np.concatenate([scales, codes[:, :16] | codes[:, 16:] << 4], axis=1).astype(np.uint8)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    got = oracle.mxfp4((codes[:, 0::2] | codes[:, 1::2] << 4)[:, None], scales)
    assert np.array_equal(got, expected)


def test_matmul_exact_on_integers():
    x, w = exact_values((5, 96), "mm x"), exact_values((7, 96), "mm w")
    assert np.array_equal(oracle.w4a16_matmul(x, w), np.einsum("mk,nk->mn", x, w))
    assert np.array_equal(oracle.matmul_naive(x, w, "float16"), oracle.w4a16_matmul(x, w))


# ---- small ops


def doubles(*arrays):
    return [torch.from_numpy(np.array(a)) for a in arrays]


def test_norms_are_torchs():
    x, r, w, b = (values(s, "float32", "norm", i) for i, s in enumerate([(4, 33), (4, 33), (33,), (33,)]))
    tx, tw, tb = doubles(x, w, b)
    eps = float(np.float32(1e-6))
    assert np.allclose(oracle.rms_norm(x, w, 1e-6), F.rms_norm(tx, (33,), tw, eps).numpy(), rtol=1e-13)
    assert np.allclose(oracle.layer_norm(x, w, b, 1e-6), F.layer_norm(tx, (33,), tw, tb, eps).numpy(), rtol=1e-12)
    y, res = oracle.add_rms_norm(x, r, w, 1e-6, "bfloat16")
    expected = (torch.from_numpy(x) + torch.from_numpy(r)).float().bfloat16().double().numpy()
    assert np.array_equal(res, expected) and np.array_equal(y, oracle.rms_norm(expected, w, 1e-6))


def test_activations_are_torchs():
    x = values((4, 34), "float32", "act", spread=4)
    gate, up = doubles(*np.split(x, 2, axis=-1))
    assert np.allclose(oracle.silu_mul(x), (F.silu(gate) * up).numpy(), rtol=1e-13)
    for approximate in ("tanh", "none"):
        expected = (F.gelu(gate, approximate=approximate) * up).numpy()
        assert np.allclose(oracle.gelu_mul(x, approximate), expected, rtol=1e-11, atol=1e-14)
    assert np.allclose(oracle.softmax(x), torch.from_numpy(x).softmax(-1).numpy(), rtol=1e-13)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_keeps_its_digits_in_the_tail(approximate):
    """Against the definition in 700 digits: in float64, 1 + tanh and 1 + erf cancel for gates below -5."""
    gates = np.concatenate([np.linspace(-37, 12, 197), -np.ldexp(1.0, np.arange(-60, 5)), [-21.0, -26.5]])
    with mpmath.workdps(700):
        root, cubic = mpmath.sqrt(2 / mpmath.pi), mpmath.mpf("0.044715")
        inner = {
            "tanh": lambda g: mpmath.tanh(root * (g + cubic * g**3)),
            "none": lambda g: mpmath.erf(g / mpmath.sqrt(2)),
        }[approximate]
        exact = np.array([float(g / 2 * (1 + inner(g)) * 3) for g in map(mpmath.mpf, gates)])
    normal = np.abs(exact) > 1e-300
    assert gates[normal].min() < -20
    got = oracle.gelu_mul(np.stack([gates, np.full_like(gates, 3.0)]).reshape(1, -1), approximate)[0]
    # erfc and exp turn an argument's half unit into as many units as the argument squared
    assert np.allclose(got[normal], exact[normal], rtol=1e-12, atol=0)
    assert np.allclose(got, exact, rtol=1e-12, atol=1e-300)


def test_rope_is_a_rotation():
    """Pair (i, i + R) as a complex number turns by its angle; the rest is copied."""
    x = values((2, 3, 4, 10), "float32", "rope")
    angles = generator("angles").uniform(-3, 3, (7, 4))
    positions = np.array([[0, 6, 2], [1, 1, 5]])
    y = oracle.rope(x, np.cos(angles), np.sin(angles), positions)
    turned = (x[..., :4] + 1j * x[..., 4:8]) * np.exp(1j * angles[positions])[:, :, None, :]
    assert np.allclose(y[..., :4], turned.real) and np.allclose(y[..., 4:8], turned.imag)
    assert np.array_equal(y[..., 8:], x[..., 8:])


# ---- the closeness measures must be able to fail


def test_closeness_sees_faults():
    exact = values((4, 64), "float32", "closeness")
    naive = oracle.round_to(exact * (1 + 2.0**-11), "float16")
    good = torch.from_numpy(oracle.round_to(exact, "float16")).half()
    closeness.assert_close(good, naive, exact, frobenius=1e-3)
    closeness.assert_ulp(good, exact)
    closeness.assert_exact(good, exact)
    closeness.assert_bits_equal(good, good.clone())
    for factor in (1.01, 0.0, -1.0, np.nan, np.inf):
        bad = good.clone()
        bad.view(-1)[bad.abs().argmax()] *= factor
        for check in (
            lambda b: closeness.assert_close(b, naive, exact),
            lambda b: closeness.assert_ulp(b, exact),
            lambda b: closeness.assert_exact(b, exact),
            lambda b: closeness.assert_bits_equal(b, good),
        ):
            with pytest.raises(AssertionError):
                check(bad)
    with pytest.raises(AssertionError, match="Frobenius"):  # small everywhere, large together
        closeness.assert_close(good, np.zeros_like(exact), exact, frobenius=1e-6)
    with pytest.raises(AssertionError, match="bits"):
        closeness.assert_bits_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
