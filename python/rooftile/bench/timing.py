# SPDX-License-Identifier: Apache-2.0
"""How calls are timed on a GPU, and the ceilings they are held against."""

import ctypes
import dataclasses
import math
import statistics
import time

import torch

from rooftile import _C

_DEVICE = "cuda"
_WARM_UP, _ROUNDS = 3, 21
_REST = 3  # times as long as a replay took: at full load the power limit takes over within some 0.1 s
_SHORTEST = 250.0  # us a replay lasts at least, up to _CALLS calls
_CALLS = 20
_HEAD_START = 200_000  # cycles, some 0.1 ms: the host queues the graph before the GPU starts the clock
HARNESS = (
    f"CUDA-graph replay, rotating inputs > 3x L2 but where rows say warm, median of {_ROUNDS} rounds in which ours and "
    f"peers take turns, {_REST} times as much rest as work"
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One way to do the work of a case, its answer checked.

    choices: {kernel: calls}. calls are functions without arguments that do the same work on different copies of the
    inputs; of several choices the fastest is timed. nbytes: what a call moves through memory at least; flops: what it
    computes. l2: "cold" where the copies exceed the L2.
    """

    impl: str
    variant: str
    choices: dict
    nbytes: int
    flops: int
    error: float
    l2: str = "cold"


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one call over all rounds, and the SM clock (MHz) and board power (W) while it ran, or None."""

    median: float
    fastest: float
    slowest: float
    p10: float
    p90: float
    mhz: int | None = None
    watts: int | None = None


def rotation(nbytes):
    """(copies, "cold") of an input of that size, so many that they exceed three times the L2 together.

    Two at least, but one of an input of which the L2 holds less than a thirtieth. An input that is too small for that
    is few copies and "warm".
    """
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    copies = 1 if nbytes > 30 * l2 else max(2, 1 + 3 * l2 // max(nbytes, 1))
    return (copies, "cold") if copies <= 512 else (8, "warm")


class Meter:
    """SM clock and board power of one GPU, as NVML reads them. uuid: as torch names the GPU."""

    _SM_CLOCK, _POWER_INSTANT = 1, 186  # NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT

    class _Field(ctypes.Structure):  # nvmlFieldValue_t
        _fields_ = (
            ("field", ctypes.c_uint),
            ("scope", ctypes.c_uint),
            ("timestamp", ctypes.c_longlong),
            ("latency", ctypes.c_longlong),
            ("kind", ctypes.c_uint),
            ("status", ctypes.c_uint),
            ("value", ctypes.c_ulonglong),
        )

    def __init__(self, uuid, load=ctypes.CDLL):
        self._handle = ctypes.c_void_p()
        try:
            self._nvml = load("libnvidia-ml.so.1")
        except OSError:
            self._nvml = None
            return
        by_uuid = self._nvml.nvmlDeviceGetHandleByUUID
        if self._nvml.nvmlInit_v2() or by_uuid(f"GPU-{uuid}".encode(), ctypes.byref(self._handle)):
            self._nvml = None

    def read(self):
        """(MHz, W); None for what NVML does not say."""
        if self._nvml is None:
            return None, None
        clock, power = ctypes.c_uint(), self._Field(field=self._POWER_INSTANT)
        silent = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._SM_CLOCK, ctypes.byref(clock))
        dark = self._nvml.nvmlDeviceGetFieldValues(self._handle, 1, ctypes.byref(power)) or power.status
        return None if silent else clock.value, None if dark else round(power.value / 1000)


class GpuTimer:
    """CUDA graphs and events. Tests have a timer of their own with the same methods."""

    def __init__(self):
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._meter = Meter(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def capture(self, calls, repeats):
        """A graph that holds every call, `repeats` times."""
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
        return graph

    def replay(self, graph):
        """Microseconds of a replay; then the GPU rests."""
        torch.cuda._sleep(_HEAD_START)
        self._begin.record()
        graph.replay()
        self._end.record()
        self._end.synchronize()
        us = 1e3 * self._begin.elapsed_time(self._end)
        time.sleep(_REST * us / 1e6)
        return us

    def under_load(self, graph, us):
        """(MHz, W) while the graph, which takes `us`, is replayed for some 20 ms, 64 times at most."""
        replays = max(2, min(64, round(20_000 / us)))
        for _ in range(replays):
            graph.replay()
        time.sleep(0.8 * replays * us / 1e6)
        read = self._meter.read()
        torch.cuda.synchronize()
        return read

    def sustained(self, graph, seconds=2.0):
        """(microseconds of a replay, MHz, W) after so many seconds without rest."""
        end, replays = time.monotonic() + seconds, 8
        while time.monotonic() < end:
            graph.replay()
            torch.cuda.synchronize()
        self._begin.record()
        for _ in range(replays):
            graph.replay()
        self._end.record()
        read = self._meter.read()
        self._end.synchronize()
        return 1e3 * self._begin.elapsed_time(self._end) / replays, *read


def compare(entries, timer, ceiling, left_out):
    """[(entry, kernel, Times)]: in every round each entry takes its turn, in every second one in reverse order.

    left_out(entry, error) is told of an entry that cannot be captured; the others are timed.
    """
    ready = []
    for entry in entries:
        try:
            ready.append((entry, *_fastest(entry, timer, ceiling), []))
        except Exception as e:  # whatever a peer raises, the others still run
            left_out(entry, e)
    for i in range(_WARM_UP + _ROUNDS):
        for _, _, calls, graph, times in ready if i % 2 == 0 else reversed(ready):
            us = timer.replay(graph)
            if i >= _WARM_UP:
                times.append(us / calls)
    return [(entry, kernel, _times(us, *timer.under_load(g, us[0] * n))) for entry, kernel, n, g, us in ready]


def _fastest(entry, timer, ceiling):
    """(kernel, number of calls, graph) of the entry's fastest choice; a choice that fails is none, unless all do."""
    least = max(1.0, entry.nbytes / ceiling["read_gb_s"] / 1e3, entry.flops / ceiling["bf16_burst_tflop_s"] / 1e6)
    found, failed = [], None
    for kernel, calls in entry.choices.items():
        repeats = -(-min(_CALLS, math.ceil(_SHORTEST / least)) // len(calls))
        try:
            graph = timer.capture(calls, repeats)
            us = min(timer.replay(graph) for _ in range(4)) if len(entry.choices) > 1 else 0.0
        except Exception as e:
            failed = e
            continue
        found.append((us, len(found), kernel, repeats * len(calls), graph))
    if not found:
        raise failed
    return min(found)[2:]


def _times(us, mhz, watts):
    tenths = statistics.quantiles(us, n=10, method="inclusive")
    return Times(statistics.median(us), min(us), max(us), tenths[0], tenths[-1], mhz, watts)


_STREAM = 1 << 30  # bytes: far more than any L2
_PRODUCTS = ((8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336), (1024, 4096, 14336))  # M, N, K


def ceilings(timer):
    """What this machine does at most, measured.

    read_gb_s, copy_gb_s; bf16_burst_tflop_s: the fastest of single products, with rest between them;
    bf16_sustained_tflop_s: the same product for two seconds without rest, when the GPU is held to its power limit, and
    sustained_sm_clock_mhz and sustained_power_w then.
    """
    found = {"read_gb_s": read_gb_s(timer), "copy_gb_s": _copy(timer)}
    found |= _products(timer)
    torch.cuda.empty_cache()
    time.sleep(1.0)  # the first case finds the GPU as the later ones do
    return {name: value if value is None else round(value, 1) for name, value in found.items()}


def _best(timer, calls):
    """Microseconds of the fastest call."""
    graph = timer.capture(calls, 1)
    return min(timer.replay(graph) for _ in range(_WARM_UP + _ROUNDS)) / len(calls)


def read_gb_s(timer):
    """How fast a kernel reads memory."""
    x = torch.empty(_STREAM, dtype=torch.uint8, device=_DEVICE).random_()
    sink = torch.zeros(1, dtype=torch.int32, device=_DEVICE)
    return _STREAM / _best(timer, [lambda: _C.read_bytes(x, sink)] * 8) / 1e3


def _copy(timer):
    x = torch.empty(_STREAM, dtype=torch.uint8, device=_DEVICE).random_()
    y = torch.empty_like(x)
    x, y = x.view(torch.int64), y.view(torch.int64)  # a kernel: a graph would give plain copies to a copy engine
    return 2 * _STREAM / _best(timer, [lambda: torch.add(x, 0, out=y)] * 4) / 1e3


def _products(timer):
    burst = 0.0
    for m, n, k in reversed(_PRODUCTS):
        a, b = (torch.randn(shape, dtype=torch.bfloat16, device=_DEVICE) for shape in ((m, k), (n, k)))
        y, work = torch.empty(m, n, dtype=torch.bfloat16, device=_DEVICE), 2 * m * n * k
        product = lambda a=a, b=b, y=y: torch.mm(a, b.T, out=y)  # noqa: E731
        burst = max(burst, work / _best(timer, [product]) / 1e6)
    us, mhz, watts = timer.sustained(timer.capture([product], 8))  # the last one, the largest
    return {
        "bf16_burst_tflop_s": burst,
        "bf16_sustained_tflop_s": 8 * work / us / 1e6,
        "sustained_sm_clock_mhz": mhz,
        "sustained_power_w": watts,
    }
