# SPDX-License-Identifier: Apache-2.0
"""What must hold for any data: no reference needed."""

import cases
import closeness
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

few = settings(max_examples=25, deadline=None, derandomize=True)


def _state(cache):
    return {name: array for name, array in cache._arrays.items() if name != "block_table"}


@few
@given(st.sampled_from(oracle.KV_FORMATS), st.lists(st.integers(0, 70), min_size=1, max_size=5), st.integers(1, 70))
def test_any_split_of_the_tokens_leaves_the_same_bytes(format, parts, head_dim):
    dtype = oracle.ELEMENT_FORMATS.get(format, "float16")
    tokens = sum(parts)
    k, v = (cases.tensor(cases.values((1, tokens, 2, head_dim), dtype, "split", side), dtype) for side in "kv")
    whole, split = (rt.KVCache(1, 384, 2, head_dim, format=format, dtype=dtype) for _ in range(2))
    whole.append(k, v)
    start = 0
    for n in parts:
        split.append(k[:, start : start + n], v[:, start : start + n])
        start += n
    for name, array in _state(whole).items():
        closeness.assert_bits_equal(_state(split)[name], array, name)


@few
@given(
    st.sampled_from(oracle.KV_FORMATS),
    st.sampled_from(cases.DTYPES),
    st.sampled_from((1, 31, 32, 64, 96, 128, 140)),
    st.integers(1, 70),
)
def test_a_cache_holds_what_the_format_says(format, dtype, tokens, head_dim):
    """Codes, scales and what a query sees, bit by bit against the oracle."""
    dtype = oracle.ELEMENT_FORMATS.get(format, dtype)
    k, v = (cases.values((tokens, 2, head_dim), dtype, "holds", side, spread=3.0, mean=1.0) for side in "kv")
    cache = rt.KVCache(1, 192, 2, head_dim, format=format, dtype=dtype)
    cache.append(cases.tensor(k, dtype)[None], cases.tensor(v, dtype)[None])
    seen = cache.dequantize(0)
    for got, expected in zip(seen, oracle.visible_kv(k, v, format, dtype, tokens - 1), strict=True):
        closeness.assert_exact(got, expected)
    if format not in oracle.ELEMENT_FORMATS:
        codes, dump = oracle.encode(k, v, format, dtype), cache.dump(0)
        for name in ("k_codes", "v_codes", "k_scale", "v_scale", "k_min", "v_min"):
            expected = getattr(codes, name)
            if expected is not None:
                closeness.assert_exact(dump[name], expected, "float32")


@few
@given(st.sampled_from(["int8", "int4", "int4-kivi-sym", "int4-kivi", "fp8", "int8-kivi-sym"]), st.integers(1, 70))
def test_block_bytes_are_the_layout(format, head_dim):
    k, v = (cases.values((64, 2, head_dim), "bfloat16", "block bytes", side) for side in "kv")
    cache = rt.KVCache(1, 64, 2, head_dim, format=format, dtype="bfloat16")
    cache.append(cases.tensor(k, "bfloat16")[None], cases.tensor(v, "bfloat16")[None])
    codes = oracle.encode(k, v, format, "bfloat16")
    for head in range(2):
        block = cache._arrays["pool"][0, head].numpy()
        assert np.array_equal(block, oracle.encode_block(codes, head, format, "bfloat16", 64))


@few
@given(
    st.sampled_from([(4, "symmetric"), (4, "minima"), (8, "symmetric")]),
    st.sampled_from(cases.WEIGHTS),
    st.sampled_from(cases.DTYPES),
)
def test_weights_are_rounded_and_laid_out_as_the_format_says(form, shape, dtype):
    bits, zeros = form
    data = cases.values(shape, dtype, "weight", *shape)
    weight_type = {4: rt.W4Weight, 8: rt.W8Weight}[bits]
    weight = weight_type.quantize(cases.tensor(data, dtype), group_size=32, zeros=zeros)
    codes, scales, minima = oracle.w4_quantize(data, 32, zeros, oracle.scale_dtype(dtype), bits)
    got = weight.unpack()
    assert np.array_equal(got[0].numpy(), codes)
    closeness.assert_exact(got[1], scales)
    assert np.array_equal(weight.codes.numpy(), oracle.w4_kernel_codes(codes, bits))
    flat = weight.scales.view(cases.torch_dtype(oracle.scale_dtype(dtype)))
    closeness.assert_exact(flat, oracle.w4_kernel_scales(scales))
    if minima is not None:
        closeness.assert_exact(got[2], minima)
    closeness.assert_close(
        weight.dequantize(), oracle.round_to(oracle.w4_decode(codes, scales, zeros, minima, bits=bits), "float32"),
        oracle.w4_decode(codes, scales, zeros, minima, bits=bits),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", cases.DTYPES)
@few
@given(st.integers(1, 6), st.integers(1, 80), st.integers(-12, 12))
def test_scaling_by_a_power_of_two(dtype, rows, hidden, power):
    """Without eps a norm forgets the scale; a gate's partner carries it."""
    x = torch.from_numpy(cases.values((rows, 2 * hidden), "float32", "power")).to(cases.torch_dtype(dtype))
    if dtype == "float16":  # subnormal results have fewer bits
        x, power = x.clamp(min=2.0**-3), max(power, -6)
    closeness.assert_bits_equal(rt.rms_norm(x * 2.0**power, eps=0.0), rt.rms_norm(x, eps=0.0))
    doubled = x.clone()
    doubled[:, hidden:] *= 2
    if dtype != "float16":
        closeness.assert_bits_equal(rt.silu_mul(doubled) / 2, rt.silu_mul(x))


@few
@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 5))
def test_softmax_ignores_what_is_minus_infinity(rows, n, hidden):
    x = torch.from_numpy(cases.values((rows, n), "float32", "softmax")).float()
    padded = torch.cat([x, torch.full((rows, hidden), -torch.inf)], dim=1)
    p = rt.softmax(padded)
    assert (p[:, n:] == 0).all()
    closeness.assert_close(p[:, :n], oracle.softmax(x.numpy(), np.float32), oracle.softmax(x.numpy()))
