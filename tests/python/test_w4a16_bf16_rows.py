# SPDX-License-Identifier: Apache-2.0
"""Many rows of bf16 times weights rounded to bf16 (plans "avx512bf16" and "amx", of which a CPU has one): the error has
a bound, a row's bits depend on nothing but the row, and what is not for it takes fp32."""

import cases
import closeness
import numpy as np
import oracle
import pytest
import torch
from test_w4a16 import FORMS, WEIGHT, WEIGHTS, both, matmul, with_bad_scales

PLAN = next((plan for plan in ("amx", "avx512bf16") if plan in cases.PLANS), None)
EXACT = "avx512vnni"
FROM = 17  # rows
pytestmark = pytest.mark.skipif(PLAN is None, reason="a CPU without AMX and without fast AVX512-BF16")


def rows(m, k, spread=0.0):
    """x [m, k] of bf16 values in float64. spread: standard deviation of its elements' exponents."""
    rng = cases.generator("bf16 rows", m, k)
    return oracle.round_to(rng.standard_normal((m, k)) * 2.0 ** (spread * rng.standard_normal((m, k))), "bfloat16")


def difference(x, rounded, w, **options):
    """The product less `rounded`, by way of residual: what is left of it has all bits of fp32's sum."""
    return closeness.to_numpy64(
        matmul(cases.tensor(x, "bfloat16"), w, residual=cases.tensor(-rounded, "bfloat16"), **options)
    )


def allowed(x, weights, exact):
    """What the product may err: two roundings of each pair's sum in fp32, the epilogue's, and the result's."""
    sums = oracle.EPS["float32"] / 2 * (x.shape[1] + 8) * (np.abs(x) @ np.abs(weights).T)
    return sums + oracle.quantum(exact, "bfloat16")


@pytest.mark.parametrize("m", (17, 29, 60, 340))
@pytest.mark.parametrize("spread", (0, 3))
@pytest.mark.parametrize("bits, kind", FORMS)
@pytest.mark.parametrize("n, k, group", WEIGHTS)
def test_it_is_the_product_with_rounded_weights(n, k, group, bits, kind, spread, m):
    """Against the exact product with weights in fp32 rounded to bf16 one by one: what remains is fp32's sum."""
    w, dense = both(n, k, group, kind, bits=bits)
    x, weights = rows(m, k, spread), oracle.round_to(oracle.round_to(dense, "float32"), "bfloat16")
    exact = oracle.w4a16_matmul(x, weights)
    rounded = oracle.round_to(exact, "bfloat16")
    got = difference(x, rounded, w, plan=PLAN)
    error, bound = np.abs(got - (exact - rounded)), allowed(x, weights, exact - rounded)
    assert (error <= bound).all(), f"{(error / bound).max():.2f} of what is allowed"


@pytest.mark.parametrize("threads", (1, 3))
@pytest.mark.parametrize("bits", (4, 8))
def test_a_rows_bits_depend_on_the_row_alone(bits, threads):
    """Next to other rows, NaN among them, at another place and in other numbers of rows, on any number of threads."""
    w, _ = both(100, 576, 32, "integer", bits=bits)
    x = cases.tensor(rows(700, 576), "bfloat16")
    whole = matmul(x, w, plan=PLAN)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for first, last in ((0, 17), (0, 28), (3, 32), (340, 397), (500, 700)):
            closeness.assert_bits_equal(matmul(x[first:last], w, plan=PLAN), whole[first:last])
        bad = x.clone()
        bad[::2] = float("nan")
        closeness.assert_bits_equal(matmul(bad, w, plan=PLAN)[1::2], whole[1::2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", (4, 8))
def test_a_row_that_is_left_alone(bits):
    """x is packed 16 MiB at a time: the last piece may be of one row."""
    k = 1 << 20
    codes = torch.randint(0, 256, (3, k * bits // 8), dtype=torch.uint8)
    w = WEIGHT[bits].from_canonical(
        codes, torch.rand(3, k // 128, dtype=torch.float16), kind="symmetric", group_size=128
    )
    x = cases.tensor(rows(60, k), "bfloat16")
    whole = matmul(x, w, plan=PLAN)
    for m in range(27, 32):
        closeness.assert_bits_equal(matmul(x[:m], w, plan=PLAN), whole[:m], f"{m} rows")


@pytest.mark.parametrize("bits, kind", FORMS)
def test_act_order_gated_strides_bias_and_residual(bits, kind):
    n, k, group, m = 64, 256, 32, 37
    perm = cases.generator("perm", k).permutation(k)
    w, dense = both(n, k, group, kind, bits=bits, perm=perm)
    weights = oracle.round_to(oracle.round_to(dense, "float32"), "bfloat16")
    x = rows(m, k)
    exact = oracle.w4a16_matmul(x, weights)
    rounded = oracle.round_to(exact, "bfloat16")
    got = difference(x, rounded, w, plan=PLAN)
    assert (np.abs(got - (exact - rounded)) <= allowed(x, weights, exact - rounded)).all()
    spaced = torch.zeros(m, 3 * k, dtype=torch.bfloat16)[:, ::3]
    spaced.copy_(cases.tensor(x, "bfloat16"))
    whole = matmul(cases.tensor(x, "bfloat16"), w, plan=PLAN)
    closeness.assert_bits_equal(matmul(spaced, w, plan=PLAN), whole)
    transposed = torch.empty(n, m, dtype=torch.bfloat16).T
    matmul(spaced, w, plan=PLAN, out=transposed)
    closeness.assert_bits_equal(transposed.contiguous(), whole)
    gate, up = closeness.to_numpy64(whole)[:, : n // 2], closeness.to_numpy64(whole)[:, n // 2 :]
    gated = closeness.to_numpy64(matmul(spaced, w, activation="silu_mul", plan=PLAN))
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bits", (4, 8))
def test_what_takes_fp32(bits):
    """float32, float16, fewer rows, batch_invariant: the bits of the plan without bf16."""
    w, _ = both(100, 576, 32, "integer", bits=bits)
    x = cases.tensor(rows(FROM, 576), "bfloat16")
    exact = matmul(x, w, plan=EXACT)
    assert not torch.equal(matmul(x, w, plan=PLAN), exact)  # or nothing is shown here
    closeness.assert_bits_equal(matmul(x, w, plan=PLAN, batch_invariant=True), exact)
    for these in (x.float(), x.half(), x[: FROM - 1], x[:2], x[:1]):
        closeness.assert_bits_equal(matmul(these, w, plan=PLAN), matmul(these, w, plan=EXACT))


@pytest.mark.parametrize("bits", (4, 8))
def test_what_is_no_number_stays_where_it_is(bits):
    w = with_bad_scales(bits)
    x = torch.randn(FROM, 128, dtype=torch.bfloat16)
    x[5, 100] = float("inf")
    finite = torch.isfinite(matmul(x, w, plan=PLAN))
    assert torch.equal(torch.nonzero(~finite.any(0)).flatten(), torch.tensor([3, 17]))
    finite[:, [3, 17]] = True
    assert finite.any(1).all() and torch.nonzero(~finite.all(1)).flatten().tolist() == [5]
