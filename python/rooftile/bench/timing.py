# SPDX-License-Identifier: Apache-2.0
"""How calls are timed on a GPU, and the ceilings they are held against."""

import statistics
import time

import torch

from rooftile import _C

HARNESS = "CUDA-graph replay, rotating inputs > 3x L2, median of {rounds} replays after {rest} s of rest"
_ROUNDS = 25
_REST = 0.1  # s: behind a product that took all the power the GPU may have, the next one ran up to a sixth slower


def harness():
    return HARNESS.format(rounds=_ROUNDS, rest=_REST)


def copies_for(nbytes):
    """How many copies of an input of that size the L2 cannot hold: together over three times its size, at most 256.

    Two at least, but of an input of which the L2 holds less than a thirtieth.
    """
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1 if nbytes > 30 * l2 else 2, min(256, 1 + 3 * l2 // max(nbytes, 1)))


def time_calls(calls, at_least=20):
    """Microseconds of one call: (median, fastest, slowest) over replays of a graph that holds every call, repeated.

    calls: functions without arguments that do the same work on different copies of the inputs, so that each finds a
    cold cache. at_least: calls in the graph.
    """
    repeats = -(-at_least // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # first calls load modules and size workspaces
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    torch.cuda.synchronize()
    time.sleep(_REST)
    for _ in range(3 + _ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / (repeats * len(calls)))
    times = times[3:]
    return statistics.median(times), min(times), max(times)


_STREAM = 1 << 30  # bytes: far more than any L2


def ceilings():
    """What this machine does at most, measured: {"read_gb_s", "copy_gb_s", "bf16_tflop_s"}."""
    _product()  # idle clocks rise
    found = {"read_gb_s": _read(), "copy_gb_s": _copy(), "bf16_tflop_s": _product()}
    torch.cuda.empty_cache()
    return {name: round(value, 1) for name, value in found.items()}


def _read():
    x = torch.empty(_STREAM, dtype=torch.uint8, device="cuda").random_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    return _STREAM / time_calls([lambda: _C.read_bytes(x, sink)], 16)[0] / 1e3


def _copy():
    x = torch.empty(_STREAM, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    x, y = x.view(torch.int64), y.view(torch.int64)  # a kernel: a graph would give plain copies to a copy engine
    return 2 * _STREAM / time_calls([lambda: torch.add(x, 0, out=y)], 4)[0] / 1e3


def _product():
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * n**3 / time_calls([lambda: torch.mm(a, b)], 8)[0] / 1e6
