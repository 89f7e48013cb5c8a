# SPDX-License-Identifier: Apache-2.0
"""stream=: what a call allocates, sends and frees belongs to the stream that its kernels run on."""

import inspect
import sys

import cases
import numpy as np
import pytest
import rooftile as rt
import torch
from kv_caches import contiguous, kv, paged, tensors
from rooftile import _calls

GPUS = tuple(device for device in cases.devices() if device != "cpu")
gpus = pytest.mark.parametrize("device", GPUS)
DELAY = 200_000_000  # cycles, about a tenth of a second


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda, device = True, "cuda:1"


@pytest.fixture
def streams(monkeypatch):
    """torch's current streams, innermost last."""
    current = []

    class Stream:
        def __init__(self, handle, device):
            self.named = (handle, device)

        def __enter__(self):
            current.append(self.named)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return current


def current_and_given(x, streams, *, stream=None):
    """torch's current streams as an op finds them, and the stream that it gives to its binding."""
    if stream is not None and _calls.needs_torch_stream(stream, x):
        return _calls.on_stream(current_and_given, x, locals())
    return list(streams), stream


def test_a_given_stream_is_the_current_one_during_the_call(streams):
    """Only where the first tensor is torch's on a GPU; otherwise the binding judges it."""
    call, far, near = current_and_given, torch.zeros(2).as_subclass(OnGpu), torch.zeros(2)
    given = call(far, streams, stream=7), call(x=far, streams=streams, stream=np.uint64(7))
    assert given[0] == given[1] == ([(7, "cuda:1")], None)
    assert call(far, streams) == ([], None)
    assert call(near, streams, stream=7) == call(np.zeros(2), streams, stream=7) == ([], 7)
    for wrong in ("7", 1.5, 2**70, -1):
        assert call(far, streams, stream=wrong) == ([], wrong)
    assert streams == []


@pytest.mark.parametrize("wrong", [-1, -2, -(2**63), np.int64(-1)])
def test_negative_handles_are_refused(wrong):
    """Handles are 0, CUDA's 1 and 2, and addresses."""
    x, k = torch.ones(2, 32), torch.ones(1, 1, 1, 64, dtype=torch.float16)
    w4 = rt.W4Weight.quantize(torch.ones(8, 32), group_size=32)
    for call in (
        lambda stream: rt.rms_norm(x, stream=stream),
        lambda stream: rt.rms_norm(x.numpy(), stream=stream),
        lambda stream: rt.w4a16_matmul(x, w4, stream=stream),
        lambda stream: rt.KVCache(1, 64, 1, 64, dtype="float16").append(k, k, stream=stream),
    ):
        with pytest.raises(rt.ArgumentError, match=f": stream must be a stream's handle, 0 or more.*, got {wrong}"):
            call(wrong)
        for right in (0, 1, 2, 2**47, None):
            call(right)


CACHE = rt.KVCache(1, 64, 1, 64, dtype="float16")
TAKEN = [f for f in vars(rt).values() if inspect.isfunction(f) and "stream" in inspect.signature(f).parameters]


@pytest.mark.parametrize("function", [*TAKEN, CACHE.append], ids=lambda f: f.__name__)
def test_every_function_with_a_stream_does_so(function, monkeypatch):
    """Before it looks at anything else: it is called again on that stream, with all that was given."""
    far, again = torch.zeros(2, 2).as_subclass(OnGpu), []
    module = sys.modules[function.__module__]
    monkeypatch.setattr(module, "on_stream", lambda *call: again.append(call))
    names = list(inspect.signature(function).parameters)
    options = {name: object() for name in names} | {names[0]: far, "stream": 7}
    assert function(**options) is None
    [(_, like, arguments)] = again
    assert like is far and all(arguments[name] is value for name, value in options.items())


@gpus
def test_pages_are_published_on_the_stream(device):
    """The current stream is busy; the table must not wait there while the kernel runs elsewhere."""
    k, v = tensors(*kv(40, 2, 64, "float16", batch=2), "float16", device)
    cos, sin = torch.ones(80, 32, device=device), torch.zeros(80, 32, device=device)
    positions = torch.arange(40, device=device).expand(2, 40)
    cache = paged("int8", "float16", 2, 64, rows=3, capacity=96, device=device)
    host = paged("int8", "float16", 2, 64, rows=3, capacity=96)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)
    cache.append(k, v, rows=[2, 0], counts=[40, 33], stream=side.cuda_stream)
    rt.rope_append(k, k, v, cos, sin, positions, cache, rows=[0, 2], stream=side.cuda_stream)
    side.synchronize()
    torch.cuda.synchronize()
    for rows, counts in (([2, 0], [40, 33]), ([0, 2], [40, 40])):
        host.append(k.cpu(), v.cpu(), rows=rows, counts=counts)
    assert cache.lengths == host.lengths == [73, 0, 80]
    for ours, theirs in zip(cache.dequantize(), host.dequantize(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@gpus
def test_memory_of_a_call_belongs_to_the_stream(device, monkeypatch):
    """Its workspace is free again when the call returns: on its own stream, not on the current one."""
    k, v = tensors(*kv(60, 2, 64, "float16"), "float16", device)
    cache = contiguous("fp16", "float16", 2, 64, device=device)
    cache.append(k, v)
    x, dense = torch.randn(3, 256, device=device).half(), torch.randn(64, 256, device=device).half()
    w = rt.W4Weight.quantize(dense)
    calls = {
        "decode": lambda **o: rt.decode_attention(k[:, :1], cache, **o),
        "w4a16": lambda **o: rt.w4a16_matmul(x, w, **o),
        "linear": lambda **o: rt.linear(x, dense, **o),
        "norm": lambda **o: rt.rms_norm(x, **o),
    }
    side = torch.cuda.Stream()
    seen = []
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def spied(make):
        def call(*args, **options):
            seen.append(torch.cuda.current_stream().cuda_stream)
            return make(*args, **options)

        return call

    for name, call in calls.items():
        expected = call()
        torch.cuda.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", spied(new_empty))
            patch.setattr(torch, "empty_like", spied(empty_like))
            got = call(stream=side.cuda_stream)
        assert seen and set(seen) == {side.cuda_stream}, name
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        side.synchronize()
        assert torch.equal(got, expected), name
        seen.clear()
