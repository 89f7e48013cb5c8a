# SPDX-License-Identifier: Apache-2.0
"""One row of 16-bit x in integers (plan "avx512vnni"): its error has a bound, and what it is not for takes fp32."""

import cases
import closeness
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from test_w4a16 import FORMS, WEIGHTS, both, matmul, parts, weight, with_bad_scales

PLAN = "avx512vnni"
DTYPES = ("float16", "bfloat16")
pytestmark = pytest.mark.skipif(PLAN not in cases.PLANS, reason="a CPU without AVX-512 VNNI")


def row(k, dtype, name="integer row", spread=0.0):
    """x [1, k] in float64. spread: standard deviation of its elements' exponents."""
    rng = cases.generator(name, k, dtype)
    x = rng.standard_normal(k) * 2.0 ** (spread * rng.standard_normal(k))
    return oracle.round_to(x[None], dtype)


def allowed(x, dense, dtype, exact):
    """What the product may err, [1, n]: x's rounding, the fp32 sums, and the result's."""
    # codes are multiplied before offsets (zeros or minima) are added: both are up to twice a row's largest weight
    size = np.abs(dense) + 2 * np.abs(dense).max(1, keepdims=True)
    sums = oracle.EPS["float32"] * (x.shape[1] / 16 + 20) * (np.abs(x) @ size.T)
    return closeness.integer_row_bound(x, dense) + sums + oracle.quantum(exact, dtype)


def difference(x, w, dense, dtype, **options):
    """The product less its rounded exact value, by way of residual: what is left of it has all bits of fp32's sum."""
    exact = oracle.w4a16_matmul(x, dense)
    rounded = oracle.round_to(exact, dtype)
    y = matmul(cases.tensor(x, dtype), w, residual=cases.tensor(-rounded, dtype), **options)
    return closeness.to_numpy64(y), exact - rounded


@pytest.mark.parametrize("spread", (0, 3))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits, kind", FORMS)
@pytest.mark.parametrize("n, k, group", WEIGHTS)
def test_error_is_bounded(n, k, group, bits, kind, dtype, spread):
    w, dense = both(n, k, group, kind, bits=bits)
    x = row(k, dtype, spread=spread)
    got, expected = difference(x, w, dense, dtype, plan=PLAN)
    error, bound = np.abs(got - expected), allowed(x, dense, dtype, expected)
    assert (error <= bound).all(), f"{(error / bound).max():.2f} of what is allowed"


@pytest.mark.parametrize("kind", ("symmetric", "integer", "minima"))
def test_a_bf16_within_two_to_the_seven_of_its_blocks_largest_is_exact(kind):
    n, k = 48, 64
    w, dense = both(n, k, 64, kind, exact=True)
    rng = cases.generator("near")
    x = np.ldexp(rng.integers(128, 256, (1, k)) * rng.choice((-1, 1), (1, k)), rng.integers(-7, 0, (1, k)))
    got, expected = difference(x, w, dense, "bfloat16", plan=PLAN)
    np.testing.assert_array_equal(got, oracle.round_to(expected, "bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", (127.5, 32639, 32640, 65000, 2.0**-14))
def test_the_largest_of_a_block_keeps_to_16_bits(largest, dtype):
    codes, scales, zeros = parts(16, 128, 64, "integer")
    w, dense = weight(codes, scales / 16, zeros, "integer"), oracle.w4_decode(codes, scales / 16, "integer", zeros)
    x = row(128, dtype) * largest / 8
    x[0, [3, 70]] = largest, -largest
    x = oracle.round_to(x, dtype)
    got, expected = difference(x, w, dense, dtype, plan=PLAN)
    assert (np.abs(got - expected) <= allowed(x, dense, dtype, expected)).all()


@pytest.mark.parametrize("size", (0.0, 2.0**-20, 1.0, 2.0**40))
def test_the_range_of_bf16(size):
    """Of a row of these sizes one block is far smaller than the others, and the CPU flushes subnormal floats to 0."""
    w, dense = both(16, 192, 64, "symmetric")
    x = row(192, "bfloat16", spread=4)
    x[0, 64:128] *= 2.0**-50
    x = oracle.round_to(x * size / np.abs(x).max(), "bfloat16")
    try:
        torch.set_flush_denormal(True)
        got, expected = difference(x, w, dense, "bfloat16", plan=PLAN)
    finally:
        torch.set_flush_denormal(False)
    assert (np.abs(got - expected) <= allowed(x, dense, "bfloat16", expected)).all()
    if size:  # or nothing is shown here
        assert not np.array_equal(got, difference(x, w, dense, "bfloat16", plan="avx512")[0])


@pytest.mark.parametrize("size", (1e-40, 1e-32, 2.0**-20 * (1 - 2**-8), 2.0**40 * (1 + 2**-7), 1e38))
def test_rows_of_bf16_beyond_it_take_fp32(size):
    """There products of codes, scales and steps would overflow, or be subnormal."""
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, ::2], x[0, 1::4] = size, -size / 2
    codes = torch.full((4, 32), 0x99, dtype=torch.uint8)
    codes[:, ::3] = 0xC9
    for scale in (1.0, 2.0**-13):
        w = rt.W4Weight.from_canonical(codes, torch.full((4, 1), scale, dtype=torch.float16), group_size=64)
        closeness.assert_bits_equal(matmul(x, w, plan=PLAN), matmul(x, w, plan="avx512"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits, kind", FORMS)
def test_act_order_gated_and_strides(bits, kind, dtype):
    n, k, group = 64, 256, 32
    perm = cases.generator("perm", k).permutation(k)
    w, dense = both(n, k, group, kind, bits=bits, perm=perm)
    x = row(k, dtype)
    got, expected = difference(x, w, dense, dtype, plan=PLAN)
    assert (np.abs(got - expected) <= allowed(x, dense, dtype, expected)).all()
    spaced = torch.zeros(1, 3 * k, dtype=getattr(torch, dtype))[:, ::3]
    spaced.copy_(cases.tensor(x, dtype))
    whole = matmul(cases.tensor(x, dtype), w, plan=PLAN)
    closeness.assert_bits_equal(matmul(spaced, w, plan=PLAN), whole)
    gate, up = closeness.to_numpy64(whole)[:, : n // 2], closeness.to_numpy64(whole)[:, n // 2 :]
    gated = closeness.to_numpy64(matmul(cases.tensor(x, dtype), w, activation="silu_mul", plan=PLAN))
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("threads", (1, 3))
@pytest.mark.parametrize("bits", (4, 8))
def test_what_takes_fp32(bits, threads):
    """float32, several rows, batch_invariant, and x that is not finite: the bits of plan avx512."""
    w, _ = both(100, 576, 32, "integer", bits=bits)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = cases.tensor(row(576, "bfloat16", spread=6), "bfloat16")
        exact = matmul(x, w, plan="avx512")
        assert not torch.equal(matmul(x, w, plan=PLAN), exact)  # or nothing is shown here
        closeness.assert_bits_equal(matmul(x, w, plan=PLAN, batch_invariant=True), exact)
        for rows in (x.float(), x.expand(2, -1), x.expand(7, -1), x.expand(1, 3, -1)):
            closeness.assert_bits_equal(matmul(rows, w, plan=PLAN), matmul(rows, w, plan="avx512"))
        for value in (float("nan"), float("inf"), -float("inf")):
            for at in (0, 575):
                for dtype in (torch.bfloat16, torch.float16):
                    bad = x.clamp(-60000, 60000).to(dtype, copy=True)
                    bad[0, at] = value
                    closeness.assert_bits_equal(matmul(bad, w, plan=PLAN), matmul(bad, w, plan="avx512"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", (4, 8))
def test_a_scale_that_is_no_number_stays_in_its_output(bits):
    w = with_bad_scales(bits)
    y = matmul(torch.randn(1, 128, dtype=torch.float16), w, plan=PLAN)[0]
    assert sorted(torch.nonzero(~torch.isfinite(y)).flatten().tolist()) == [3, 17]
