# SPDX-License-Identifier: Apache-2.0
"""What a call costs before any arithmetic: tiny shapes, one thread. Fails at three times the promise."""

import time

import pytest
import rooftile as rt
import torch
from rooftile import _C

PUBLIC, RAW, SLACK = 10.0, 4.0, 3.0  # microseconds promised, and how much of them a busy machine may add


def microseconds(call, calls=300, rounds=20):
    """The best round's mean: what the call costs when nothing else runs."""

    def one_round():
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6

    return min(one_round() for _ in range(rounds))


def add_rms_norm():
    x, residual, weight = torch.randn(1, 64), torch.randn(1, 64), torch.randn(64)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    return (
        lambda: rt.add_rms_norm(x, residual, weight),
        lambda: _C.add_rms_norm(x, residual, weight, 1e-6, out, residual_out, None, None),
    )


def decode_attention():
    cache = rt.KVCache(1, 64, 1, 16, format="fp32")
    cache.append(torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16))
    q, out = torch.randn(1, 1, 16), torch.empty(1, 1, 16)
    return lambda: rt.decode_attention(q, cache), lambda: _C.decode_attention(q, cache, out, *[None] * 10)


def w4a16_matmul():
    w = rt.W4Weight.quantize(torch.randn(16, 32), group_size=32)
    x, out = torch.randn(1, 32), torch.empty(1, 16)
    return lambda: rt.w4a16_matmul(x, w), lambda: _C.w4a16_matmul(
        x, w._handle, None, None, None, out, False, *[None] * 3
    )


def linear():
    weight, x, out = torch.randn(16, 32), torch.randn(1, 32), torch.empty(1, 16)
    return lambda: rt.linear(x, weight), lambda: _C.linear(x, weight, None, None, None, out, *[None] * 3)


@pytest.mark.parametrize("make", [add_rms_norm, decode_attention, w4a16_matmul, linear], ids=lambda f: f.__name__)
def test_a_call_is_cheap(make):
    public, raw = make()
    with torch.no_grad():
        for what, call, promised in (("public call", public, PUBLIC), ("binding", raw, RAW)):
            cost = microseconds(call)
            assert cost <= SLACK * promised, f"{what} took {cost:.1f} us, promised {promised} us"
