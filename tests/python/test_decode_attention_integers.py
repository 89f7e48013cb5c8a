# SPDX-License-Identifier: Apache-2.0
"""Decode attention over 4-bit codes in integers (plan "amx"): a bound of its error, and what takes fp32 instead."""

import attention_checks
import cases
import closeness
import kv_caches
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch

PLAN = "amx"
FORMATS = ("int4", "int4-kivi-sym", "int4-kivi")
DTYPES = ("float16", "bfloat16")
pytestmark = pytest.mark.skipif(PLAN not in cases.PLANS, reason="a CPU without AMX")


def filled(format, dtype, lengths=(257,), dim=64, kv_heads=2):
    return attention_checks.filled(attention_checks.tokens(lengths, kv_heads, dim, dtype), format, dtype)


def queries(batch, heads, dim, dtype, tokens=1, spread=0.0):
    rng = cases.generator("integers", batch, heads, dim, dtype, tokens)
    q = rng.standard_normal((batch, tokens, heads, dim)) * 2.0 ** (spread * rng.standard_normal(dim))
    return oracle.round_to(q, dtype)


def attend(cache, q, **options):
    return rt.decode_attention(cases.tensor(q, cache.dtype), cache, **options)


def value_errors(cache, row, weights):
    """What p v may be off [Hq, D] because p times V's scales became integers: each by 1 / 32639 of its row's largest
    in a chunk of 128 tokens. weights: p [Hq, tokens]."""
    facts = cache.dump(row)
    group = len(weights) // cache.kv_heads
    code = np.abs(closeness.to_numpy64(facts["v_codes"]) - (8 if "v_min" in facts else 0)).repeat(group, 1)
    scale = closeness.to_numpy64(facts["v_scale"])[..., 0].repeat(group, 1).T  # [Hq, tokens]
    errors = np.zeros(code.shape[1:])
    for at in range(0, len(code), 128):
        part = slice(at, at + 128)
        largest = (weights[:, part] * scale[:, part]).max(axis=-1, keepdims=True)
        errors += np.maximum(largest / 32639, 2.0**-55) * code[part].sum(0)
    return errors


@pytest.mark.parametrize("spread", (0, 2))
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_values_err_by_no_more_than_their_bound(format, dtype, dim, spread):
    """Queries of 0 give all tokens the same weight, so that nothing but p v is off."""
    cache = filled(format, dtype, dim=dim)
    q = np.zeros((1, 1, 6, dim))
    exact, _, _ = attention_checks.expect_decode(cache, q)
    got = closeness.to_numpy64(attend(cache, q, plan=PLAN))
    length = cache.lengths[0]
    sums = 64 * oracle.EPS["float32"] * np.abs(exact).max()
    bound = value_errors(cache, 0, np.full((6, length), 1 / length)) + sums + oracle.quantum(exact[0, 0], dtype)
    error = np.abs(got - exact)[0, 0]
    assert (error <= bound).all(), f"{(error / bound).max():.2f} of what is allowed"


@pytest.mark.parametrize("heads, tokens", ((2, 1), (6, 1), (10, 1), (14, 3)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_logits_err_by_no_more_than_their_bound(format, dtype, heads, tokens):
    """As far as the softmax's sum shows them; channels of q differ a hundredfold."""
    lengths = (31, 64, 129, 200)
    cache = filled(format, dtype, lengths)
    q = queries(len(lengths), heads, 64, dtype, tokens, spread=2)
    attention_checks.run_and_check(cache, q, plan=PLAN)
    attention_checks.run_and_check(cache, q, plan=PLAN, window=40, softcap=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_rows_bits_are_its_own(format, dtype):
    """Next to others, among more heads' rows, and however large their numbers are."""
    cache = filled(format, dtype, (257, 90, 33))
    q = queries(3, 10, 64, dtype)
    whole = attend(cache, q, plan=PLAN)
    for row in range(3):
        one = {"rows": torch.tensor([row], dtype=torch.int32)}
        alone = attend(cache, q[row : row + 1], plan=PLAN, **one)
        closeness.assert_bits_equal(alone, whole[row : row + 1])
    louder = q.copy()
    louder[:, :, 1:5] *= 512
    others = [0, 5, 6, 7, 8, 9]
    closeness.assert_bits_equal(attend(cache, louder, plan=PLAN)[:, :, others], whole[:, :, others])


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("format", FORMATS)
def test_a_query_that_is_no_number_stays_in_its_row(format, bad):
    cache = filled(format, "bfloat16")
    q = cases.tensor(queries(1, 6, 64, "bfloat16"), "bfloat16")
    clean = rt.decode_attention(q, cache, plan=PLAN)
    q[0, 0, 4, 7] = bad
    out = rt.decode_attention(q, cache, plan=PLAN)
    assert not torch.isfinite(out[0, 0, 4]).any()
    others = [0, 1, 2, 3, 5]
    closeness.assert_bits_equal(out[:, :, others], clean[:, :, others])


def test_what_takes_fp32():
    """float32, other formats, pages of 16 tokens and heads of 96 channels: the bits of plan avx512."""
    taken = filled("int4-kivi", "bfloat16")
    q = queries(1, 6, 64, "bfloat16")
    assert not torch.equal(attend(taken, q, plan=PLAN), attend(taken, q, plan="avx512"))  # or nothing is shown here
    small_pages = kv_caches.paged("int4", "bfloat16", 2, 64, page_size=16)
    attention_checks.append(small_pages, attention_checks.tokens((99,), 2, 64, "bfloat16"))
    others = [
        small_pages,
        *(filled(format, "float32") for format in FORMATS),
        *(filled(format, "bfloat16") for format in ("bf16", "int8", "fp8", "int8-kivi-sym")),
        filled("int4", "float16", dim=96),
    ]
    for cache in others:
        q = queries(1, 6, cache.head_dim, cache.dtype)
        closeness.assert_bits_equal(attend(cache, q, plan=PLAN), attend(cache, q, plan="avx512"))
