# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host: tiny shapes, one thread, queues that never fill. Fails at three times the promise."""

import time

import cases
import pytest
import rooftile as rt
import torch
from rooftile import _C

PUBLIC, RAW, SLACK = 10.0, 4.0, 3.0  # microseconds promised, and how much of them a busy machine may add
PATIENCE = 10.0  # seconds of rounds that other processes slow down, before a call is called slow


def microseconds(call, device, limit, calls=300):
    """What the call costs when nothing else runs: the mean of the best round, up to the first within the limit."""

    def one_round():
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.thread_time()  # what other processes take does not count; that they share the core does
        for _ in range(calls):
            call()
        return (time.thread_time() - start) / calls * 1e6

    best, end = one_round(), time.monotonic() + PATIENCE
    while best > limit and time.monotonic() < end:
        best = min(best, one_round())
    return best


def numbers(device, *shape):
    return torch.randn(shape, device=device).to(torch.float32 if device == "cpu" else torch.float16)


def add_rms_norm(device):
    x, residual, weight = numbers(device, 1, 64), numbers(device, 1, 64), numbers(device, 64)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    return (
        lambda: rt.add_rms_norm(x, residual, weight),
        lambda: _C.add_rms_norm(x, residual, weight, 1e-6, 0.0, out, residual_out, None, None),
    )


def decode_attention(device, batch=1, capacity=64):
    format, dtype, head_dim = ("fp32", "float32", 16) if device == "cpu" else ("int8", "float16", 64)
    cache = rt.KVCache(batch, capacity, 1, head_dim, format=format, dtype=dtype, device=device)
    k = numbers(device, batch, 4, 1, head_dim)
    cache.append(k, k)
    q = numbers(device, batch, 1, head_dim)
    out = torch.empty_like(q)
    return (
        lambda: rt.decode_attention(q, cache),
        lambda: _C.decode_attention(q, cache, out, *[None] * 10),
    )


def decode_attention_of_long_rows(device):
    """On a GPU two kernels: rows are cut, then their parts combined."""
    return decode_attention(device, 8, 4096)


def w4a16_matmul(device):
    w = rt.W4Weight.quantize(numbers(device, 16, 32), group_size=32)
    x, out = numbers(device, 1, 32), numbers(device, 1, 16)
    return (
        lambda: rt.w4a16_matmul(x, w),
        lambda: _C.w4a16_matmul(x, w._handle, None, None, None, out, False, None, None, None),
    )


def linear(device):
    weight, x, out = numbers(device, 16, 32), numbers(device, 1, 32), numbers(device, 1, 16)
    return (
        lambda: rt.linear(x, weight),
        lambda: _C.linear(x, weight, None, None, None, out, None, None, None),
    )


OPS = [add_rms_norm, decode_attention, decode_attention_of_long_rows, w4a16_matmul, linear]


@pytest.mark.parametrize("device", cases.devices())
@pytest.mark.parametrize("make", OPS, ids=lambda f: f.__name__)
def test_a_call_is_cheap(make, device):
    public, raw = make(device)
    promises = [("public call", public, PUBLIC), ("binding", raw, RAW)]
    with torch.no_grad():
        for what, call, promised in promises if device == "cpu" else promises[:1]:  # CUDA's launches take 2.4 us each
            cost = microseconds(call, device, SLACK * promised)
            assert cost <= SLACK * promised, f"{what} took {cost:.1f} us, promised {promised} us"
