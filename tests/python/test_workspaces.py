# SPDX-License-Identifier: Apache-2.0
"""Workspace and scratch memory is a call's own: what it held before, what another call leaves there and who works in
the next one change no bit of a result."""

import contextlib
import ctypes
import threading

import closeness
import ops
import pytest
import rooftile as rt
import torch

CALLS, THREADS = {"cpu": 20, "cuda": 500}, 16
_FILL = -6  # M_PERTURB of glibc's mallopt


@contextlib.contextmanager
def dirty_memory(device):
    """New memory inside the block is full of bytes that are no sensible number."""
    if device == "cuda":
        torch.cuda.empty_cache()
        blocks = [torch.full((1 << size,), 0xFF, dtype=torch.uint8, device="cuda") for size in range(9, 28)]
        del blocks  # to torch's cache, where workspaces come from
        yield
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_FILL, 0x80):  # malloc gives 0x7F, free leaves 0x80
        pytest.skip("this C library does not fill memory")
    try:
        yield
    finally:
        mallopt(_FILL, 0)


def results(call, **changes):
    call.run(**changes)
    return [t.clone() if isinstance(t, torch.Tensor) else t.copy() for t in call.written()]


def assert_same(ours, expected, what):
    for a, b in zip(ours, expected, strict=True):
        closeness.assert_bits_equal(a, b, what)


STATELESS = [op for op in ops.OPS if not op.state(op.call().kwargs) or op.name == "decode_attention"]


def test_what_lay_in_memory_before_does_not_matter(dtype, device):
    here = [op for op in ops.OPS if op.gpu or device == "cpu"]
    expected = [results(op.call(dtype, device)) for op in here]
    calls = [op.call(dtype, device) for op in here]
    with dirty_memory(device):
        for op, call, right in zip(here, calls, expected, strict=True):
            assert_same(results(call), right, op.id)


def test_what_another_op_left_does_not_matter(dtype, device):
    """Every op behind every other, over the same arguments again and again."""
    here = [op for op in STATELESS if op.gpu or device == "cpu"]
    calls = [op.call(dtype, device, op.large) for op in here]
    expected = [results(call) for call in calls]
    with dirty_memory(device):
        for first in range(len(here)):
            for second in range(len(here)):
                calls[first].run()
                calls[second].run()
            assert_same(calls[first].written(), expected[first], here[first].id)
        for op, call, right in zip(here, calls, expected, strict=True):
            assert_same(call.written(), right, f"{op.id}, behind every other op")


def by_size(device):
    """name -> (a call by its number of rows, tokens or keys, numbers on both sides of plans that differ)."""
    dtype = torch.float16
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, w = numbers(300, 4096), numbers(64, 4096)
    w4, w8 = rt.W4Weight.quantize(w), rt.W8Weight.quantize(w)
    cache = rt.KVCache(3, 4200, 2, 64, format="int4-kivi", dtype="float16")
    cache.append(*(torch.randn(2, 3, 4200, 2, 64, generator=generator).to(dtype)), counts=[4200, 1300, 31])
    cache, q = cache.to(device), numbers(3, 32, 4, 64)
    made = {
        "linear": (lambda n: rt.linear(x[:n], w), (300, 1, 17, 64, 2, 300)),
        "w4a16_matmul": (lambda n: rt.w4a16_matmul(x[:n], w4), (300, 1, 17, 64, 2, 300)),
        "w8a16_matmul": (lambda n: rt.w8a16_matmul(x[:n], w8), (300, 1, 17, 64, 2, 300)),
        "decode_attention": (lambda n: rt.decode_attention(q[:, :n].contiguous(), cache), (32, 1, 16, 2, 32)),
    }
    if device == "cpu":
        k = numbers(1, 300, 2, 64)
        made["prefill_attention"] = (
            lambda n: rt.prefill_attention(k[:, :n], k[:, :n], k[:, :n]),
            (300, 1, 64, 300),
        )
    return made


@pytest.mark.parametrize("name", list(by_size("cpu")))
def test_sizes_that_shrink_and_grow(name, device):
    if name not in by_size(device):
        pytest.skip("no GPU kernels yet")
    call, sizes = by_size(device)[name]
    expected = {n: call(n).clone() for n in sizes}
    with dirty_memory(device):
        for n in sizes:
            closeness.assert_bits_equal(call(n), expected[n], f"{name} of {n}")


def test_threads_side_by_side(device):
    """Sixteen threads, each with a size, and on a GPU a stream, of its own."""
    made = by_size(device)
    sizes = range(1, THREADS + 1) if device == "cuda" else [1 + n % 4 for n in range(THREADS)]
    expected = {(name, n): call(n).clone() for name, (call, _) in made.items() for n in sizes}
    start, wrong = threading.Barrier(THREADS), []

    def calls(n):
        try:
            stream = contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
            with stream, torch.no_grad():
                start.wait()
                differ = 0
                for i in range(CALLS[device]):
                    name = list(made)[i % len(made)]
                    differ = differ + (made[name][0](n) != expected[name, n]).any()
                if bool(differ):
                    wrong.append((n, int(differ)))
        except Exception as e:
            wrong.append((n, e))

    if device == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=calls, args=(n,)) for n in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
