# SPDX-License-Identifier: Apache-2.0
"""The bindings' list of calls (_C.Calls), which are made again with the arguments of the first time."""

import functools

import cases
import pytest
import rooftile as rt
import torch
from closeness import assert_bits_equal
from rooftile import _C
from rooftile.integrations.step_products import KeptWorkspace


def norm(x, out):
    return functools.partial(_C.rms_norm, x, None, 1e-5, 0.0, out, None, None)


def test_calls_are_made_again_with_what_their_arrays_then_hold():
    x, y, z = (torch.randn(2, 64) for _ in range(3))
    calls = _C.Calls()
    assert calls.record([norm(x, y), norm(y, z)]) == [f"cpu_{cases.PLANS[0]}_float32"] * 2
    x.copy_(torch.randn(2, 64))
    calls.run()
    assert_bits_equal(y, rt.rms_norm(x, eps=1e-5))
    assert_bits_equal(z, rt.rms_norm(y, eps=1e-5))


def test_a_cache_is_looked_at_each_time():
    cache = rt.KVCache(1, 64, 2, 64, format="int8", dtype="float32")
    q, k, v = torch.randn(1, 1, 4, 64), torch.randn(1, 1, 2, 64), torch.randn(1, 1, 2, 64)
    out, one, zero = torch.empty_like(q), torch.ones(1, 32), torch.zeros(1, 32)
    positions = torch.zeros(1, 1, dtype=torch.int32)
    store = functools.partial(_C.rope_append, q, k, v, one, zero, positions, cache._handle, None, None, q, None, None)
    attend = functools.partial(_C.decode_attention, q, cache._handle, out, *[None] * 10)
    calls = _C.Calls()
    calls.record([store, attend])
    cache._arrays["pool"].data = cache._arrays["pool"].clone()
    v.mul_(2)
    calls.run()
    assert list(cache.lengths) == [2]
    assert_bits_equal(out, rt.decode_attention(q, cache))
    cache.seq_lens.fill_(64)
    with pytest.raises(rt.ArgumentError, match="k has 1 tokens for row 0, which holds 64"):
        calls.run()


def test_what_cannot_be_kept_is_refused():
    x, y = torch.randn(2, 64), torch.empty(2, 64)
    calls = _C.Calls()
    softmax = functools.partial(_C.softmax, x, y, None, None)
    for other in (softmax, functools.partial(int, 1)):
        with pytest.raises(rt.NotSupportedError, match="Calls: call 1 is none that can be kept"):
            calls.record([norm(x, y), other])
        y.fill_(7)
        calls.run()  # it kept none
        assert (y == 7).all()
    with pytest.raises(ZeroDivisionError):
        calls.record([functools.partial(divmod, 1, 0)])
    softmax()  # is not recorded any more


def test_lists_within_lists():
    x, y, z = (torch.randn(2, 64) for _ in range(3))
    inner, outer = _C.Calls(), _C.Calls()
    with pytest.raises(rt.NotSupportedError, match="call 0 is none"):
        outer.record([functools.partial(inner.record, [norm(x, y)])])
    y.fill_(7)
    inner.run()
    assert_bits_equal(y, rt.rms_norm(x, eps=1e-5))
    outer.record([norm(y, z)])
    z.fill_(7)
    outer.run()
    assert_bits_equal(z, rt.rms_norm(y, eps=1e-5))


def test_kept_workspace_grows_and_lets_none_go():
    like, space = torch.empty(0, dtype=torch.float16), KeptWorkspace()
    first = space("linear", like, 100)
    assert first.nbytes >= 100 and first.dtype == like.dtype
    first.fill_(7)
    assert space("linear", like, 40) is first
    larger = space("linear", like, 1001)
    assert larger.nbytes >= 1001 and space("linear", like, 100) is larger
    place = first.data_ptr()
    del first
    assert all(torch.empty(50, dtype=torch.float16).data_ptr() != place for _ in range(20))


@pytest.mark.skipif("cuda" in cases.devices(), reason="graphs of a GPU: test_step_graph.py")
def test_a_cuda_graph_needs_a_gpu():
    with pytest.raises(rt.RooftileError, match="CudaGraph"):
        _C.CudaGraph(0)
