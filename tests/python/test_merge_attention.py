# SPDX-License-Identifier: Apache-2.0
import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from attention_checks import check_lse
from closeness import assert_bits_equal, assert_close, to_numpy64

INF = float("inf")


def parts(dtype, *lead, dim=64, device="cpu"):
    """Two partial results, some of whose sides saw nothing, as float64 and as tensors."""
    out = [cases.values((*lead, dim), dtype, side, *lead) for side in "ab"]
    lse = [cases.values(lead, "float32", "lse", side, *lead, spread=4.0) for side in "ab"]
    pick = cases.generator("empty", *lead).integers(0, 6, lead)
    for side in range(2):
        lse[side][(pick == side) | (pick == 2)] = -INF
    given = [
        cases.tensor(out[0], dtype, device),
        cases.tensor(lse[0], "float32", device),
        cases.tensor(out[1], dtype, device),
        cases.tensor(lse[1], "float32", device),
    ]
    return (out[0], lse[0], out[1], lse[1]), given


@pytest.mark.parametrize("lead", [(1,), (70,), (3, 9), (2, 5, 4), (2, 1, 3, 2)], ids=str)
def test_against_the_oracle(dtype, lead, plan, device):
    exact_parts, given = parts(dtype, *lead, device=device)
    with rt.record_kernels() as names:
        out, lse = rt.merge_attention(*given, plan=plan)
    assert names == [f"cuda_{dtype}" if device == "cuda" else f"cpu_{plan}_{dtype}_d64"]
    exact, exact_lse = oracle.merge_attention(*exact_parts)
    assert_close(out, oracle.round_to(exact, dtype), exact, slack=3)
    check_lse(lse, exact_lse)


def test_sides_far_apart(dtype, plan, device):
    """e to the difference of the two is beyond fp32."""
    exact_parts, given = parts(dtype, 6, 3, device=device)
    for side, lse in ((1, [-300, 300, -1e4, 0, 1e30, -1e30]), (3, [300, -300, 0, 1e4, -1e30, 1e30])):
        exact_parts[side][:] = np.array(lse)[:, None]
        given[side][:] = torch.tensor(lse)[:, None]
    out, lse = rt.merge_attention(*given, plan=plan)
    exact = np.where((exact_parts[1] > exact_parts[3])[..., None], exact_parts[0], exact_parts[2])
    assert_bits_equal(out, cases.tensor(exact, dtype, device))
    assert_bits_equal(lse, torch.maximum(given[1], given[3]))


@pytest.mark.parametrize("garbage", [float("nan"), INF, 3.0])
def test_a_side_that_saw_nothing_is_ignored(dtype, garbage, plan, device):
    _, (out_a, lse_a, out_b, lse_b) = parts(dtype, 5, 9, dim=33, device=device)
    lse_a[:], lse_b[:] = torch.randn(5, 9).to(device), -INF
    out_b[:] = garbage
    for a, b in (((out_a, lse_a), (out_b, lse_b)), ((out_b, lse_b), (out_a, lse_a))):
        out, lse = rt.merge_attention(*a, *b, plan=plan)
        assert_bits_equal(out, out_a)
        assert_bits_equal(lse, lse_a)
    out, lse = rt.merge_attention(out_b, lse_b, out_b, lse_b, plan=plan)
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_in_place_and_inside_margins(dtype, device):
    _, given = parts(dtype, 4, 6, dim=40, device=device)
    expected = rt.merge_attention(*given)
    out = cases.guarded((4, 6, 40), dtype, device, strides=(300, 47, 1), values=given[0])
    lse = cases.guarded((4, 6), "float32", device, strides=(1, 9), values=given[1])
    got = rt.merge_attention(out.tensor, lse.tensor, given[2], given[3], out=out.tensor, lse=lse.tensor)
    out.check_margins()
    lse.check_margins()
    for x, y in zip(got, expected, strict=True):
        assert_bits_equal(x, y)


def test_every_operand_has_strides_of_its_own(device):
    _, given = parts("float16", 3, 5, 4, dim=24, device=device)
    expected = rt.merge_attention(*given)
    order = [(2, 0, 1, 3), (1, 2, 0), (0, 3, 1, 2), (2, 1, 0)]
    views = [x.permute(p).contiguous().permute(np.argsort(p).tolist()) for x, p in zip(given, order, strict=True)]
    out = torch.empty(24, 4, 5, 3, dtype=torch.float16, device=device).permute(3, 2, 1, 0)
    lse = torch.empty(4, 3, 5, device=device).permute(1, 2, 0)
    for x, y in zip(rt.merge_attention(*views, out=out, lse=lse), expected, strict=True):
        assert_bits_equal(x, y)


@pytest.mark.parametrize("split", [1, 31, 64, 100, 199])
def test_any_split_is_the_whole(split):
    q, k, v = (
        torch.from_numpy(cases.values((2, 200, h, 64), "float32", n)).float() for n, h in (("q", 9), ("k", 3), ("v", 3))
    )
    whole, whole_lse = rt.prefill_attention(q, k, v, causal=False, return_lse=True)
    a = rt.prefill_attention(q, k[:, :split], v[:, :split], causal=False, return_lse=True)
    b = rt.prefill_attention(q, k[:, split:], v[:, split:], causal=False, return_lse=True)
    out, lse = rt.merge_attention(*a, *b)
    assert np.abs(to_numpy64(out) - to_numpy64(whole)).max() < 1e-6
    check_lse(lse, to_numpy64(whole_lse))


def test_nothing_to_do():
    out, lse = rt.merge_attention(torch.empty(0, 4, 8), torch.empty(0, 4), torch.empty(0, 4, 8), torch.empty(0, 4))
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("index", "changed", "error", "name"),
    [
        (0, torch.zeros(8), rt.ArgumentError, "out_a"),
        (0, torch.zeros(3, 4, 8, dtype=torch.int32), rt.ArgumentTypeError, "out_a"),
        (0, torch.zeros(3, 4, 0), rt.ArgumentError, "out_a must have a head_dim"),
        (1, torch.zeros(3, 5), rt.ArgumentError, "lse_a"),
        (1, torch.zeros(3, 4, dtype=torch.float16), rt.ArgumentTypeError, "lse_a"),
        (2, torch.zeros(3, 4, 9), rt.ArgumentError, "out_b"),
        (2, torch.zeros(3, 4, 8, dtype=torch.bfloat16), rt.ArgumentTypeError, "out_b"),
        (3, torch.zeros(3), rt.ArgumentError, "lse_b"),
        (3, None, rt.ArgumentTypeError, "lse_b"),
        ("out", torch.zeros(3, 4), rt.ArgumentError, "out"),
        ("lse", torch.zeros(3, 1).expand(3, 4), rt.ArgumentError, "lse"),
        ("plan", "abacus", rt.NotSupportedError, "plan"),
    ],
)
def test_bad_arguments(index, changed, error, name):
    given = [torch.zeros(3, 4, 8), torch.zeros(3, 4), torch.zeros(3, 4, 8), torch.zeros(3, 4)]
    options = {}
    if isinstance(index, int):
        given[index] = changed
    else:
        options[index] = changed
    with pytest.raises(error, match=name):
        rt.merge_attention(*given, **options)
