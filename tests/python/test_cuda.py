# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of every op: streams, CUDA graphs, devices; of the small ones also errors that do not stick
and sizes past 32 bits. Values are checked where the CPU's are: test_fused.py, test_decode_attention.py and others.
"""

import functools
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cases
import kv_caches
import ops
import pytest
import rooftile as rt
import torch
from attention_checks import GPU_STORES
from closeness import assert_bits_equal
from rooftile import _C

if "cuda" not in cases.devices():
    why = _C.gpu_backend() if _C.gpu_backend().startswith("none") else "torch sees no GPU"
    pytest.skip(f"no GPU to test on: {why}", allow_module_level=True)

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DELAY = 20_000_000  # cycles: some 10 ms, longer than any call here takes


def small_ops(dtype=torch.bfloat16, device="cuda", tokens=6):
    """name -> (function of tensors, tensors): every op that has GPU kernels and takes only tensors."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, r, w, b = make(tokens, 576), make(tokens, 576), make(576), make(576)
    cos, sin = make(64, 24, dtype=torch.float32), make(64, 24, dtype=torch.float32)
    positions = torch.arange(tokens, device=device)
    out, lse = make(tokens, 4, 64), make(tokens, 4, dtype=torch.float32)
    return {
        "rms_norm": (lambda x, w: rt.rms_norm(x, w, 1e-5), (x, w)),
        "add_rms_norm": (rt.add_rms_norm, (x, r, w)),
        "qk_rms_norm": (rt.qk_rms_norm, (make(tokens, 3, 64), make(tokens, 1, 64), w[:64], b[:64])),
        "embedding": (rt.embedding, (positions.flip(0) % 50, make(50, 576))),
        "layer_norm": (rt.layer_norm, (x, w, b)),
        "add_layer_norm": (rt.add_layer_norm, (x, r, w, b)),
        "rope": (rt.rope, (make(tokens, 3, 64), make(tokens, 1, 64), cos, sin, positions)),
        "silu_mul": (rt.silu_mul, (x,)),
        "gelu_mul": (rt.gelu_mul, (x,)),
        "gelu_mul none": (lambda x: rt.gelu_mul(x, approximate="none"), (x,)),
        "softmax": (rt.softmax, (x,)),
        "sample": (
            lambda x, s, p, **more: rt.sample(x, top_k=50, top_p=0.9, seeds=s, positions=p, **more),
            (x, positions, positions),
        ),
        "sample greedy": (lambda x, **more: rt.sample(x, temperature=0, **more), (x,)),
        "merge_attention": (rt.merge_attention, (out, lse, out.flip(0), lse.flip(0))),
    }


NAMES = [
    "rms_norm",
    "add_rms_norm",
    "qk_rms_norm",
    "embedding",
    "layer_norm",
    "add_layer_norm",
    "rope",
    "silu_mul",
    "gelu_mul",
    "gelu_mul none",
    "softmax",
    "sample",
    "sample greedy",
    "merge_attention",
]
SAMPLING = ("sample", "sample greedy")


CACHE_FORMATS = ("fp16", "int8", "fp8", "int4", "int4-kivi", "int4-kivi-sym", "int8-kivi-sym")


def cache_ops(device="cuda"):
    """The same for what works on a cache or a weight, whose memory is among the tensors: what a call changes of it is
    returned as well. Made on the CPU and copied: no kernel of the library has run."""
    generator = torch.Generator().manual_seed(1)

    def make(*shape, dtype=torch.float16):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def filled(format):
        cache = rt.KVCache(3, 400, 2, 64, format=format, dtype="float16")
        k, v = torch.randn(2, 3, 300, 2, 64, generator=generator).half()
        cache.append(k, v, counts=[300, 31, 0])  # one more closes a group
        cache = cache.to(device)
        return cache, [array for name, array in cache._arrays.items() if name != "fault"]

    def decode(cache, q, *_):
        return rt.decode_attention(q, cache, return_lse=True)

    def append(cache, k, v, *memory):
        cache.append(k, v)
        return tuple(array.clone() for array in memory)

    def rope_append(cache, q, k, v, cos, sin, positions, *memory):
        q_out = rt.rope_append(q, k, v, cos, sin, positions, cache)
        return (q_out, *(array.clone() for array in memory))

    q, k, v = make(3, 1, 8, 64), make(3, 1, 2, 64), make(3, 1, 2, 64)
    tables = make(400, 32, dtype=torch.float32), make(400, 32, dtype=torch.float32)
    positions = torch.tensor([[300], [31], [0]], device=device)
    inputs = {decode: (q,), append: (k, v), rope_append: (q, k, v, *tables, positions)}
    made = {}
    for f, name in ((decode, "decode_attention"), (append, "append"), (rope_append, "rope_append")):
        for format in CACHE_FORMATS:
            cache, memory = filled(format)
            made[f"{name} {format}"] = (functools.partial(f, cache), (*(t.clone() for t in inputs[f]), *memory))
    for op, weight_type, zeros in ((rt.w4a16_matmul, rt.W4Weight, "minima"), (rt.w8a16_matmul, rt.W8Weight, None)):
        for case, (m, n, k) in {"split": (3, 64, 4096), "whole": (40, 96, 64)}.items():
            dense = torch.randn(n, k, generator=generator).half()
            w = weight_type.quantize(dense, group_size=64, zeros=zeros).to(device)
            tensors = (make(m, k), *(t for t in (w.codes, w.scales, w.offsets) if t is not None))
            made[f"{op.__name__} {case}"] = (lambda x, *_, op=op, w=w: op(x, w), tensors)
    for case, (m, n, k) in {
        "split": (3, 64, 16380),
        "whole": (12, 96, 60),
        "boxes": (40, 96, 64),
        "tiles": (100, 96, 64),
    }.items():
        made[f"linear {case}"] = (rt.linear, (make(m, k), make(n, k)))
    return made


CACHE_NAMES = [
    *(f"{op} {format}" for op in ("decode_attention", "append", "rope_append") for format in CACHE_FORMATS),
    "w4a16_matmul split",
    "w4a16_matmul whole",
    "w8a16_matmul split",
    "w8a16_matmul whole",
    "linear split",
    "linear whole",
    "linear boxes",
    "linear tiles",
]
ALL_NAMES = [*NAMES, *CACHE_NAMES]


def case(name, device="cuda"):
    """(function, its tensors, copies of what is in them)"""
    f, inputs = (small_ops if name in NAMES else cache_ops)(device=device)[name]
    return f, inputs, [t.clone() for t in inputs]


def fill(tensors, values):
    for t, value in zip(tensors, values, strict=True):
        t.copy_(value)


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def assert_same(results, expected):
    for a, b in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert_bits_equal(a, b)


def test_the_list_is_complete():
    assert list(small_ops()) == NAMES and list(cache_ops()) == CACHE_NAMES
    with_streams = {op.name for op in ops.OPS if op.gpu and "stream" in op.arguments}
    assert {name.split()[0] for name in ALL_NAMES} == with_streams


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("name", ALL_NAMES)
def test_runs_on_the_current_stream(name):
    """The inputs come late, on a side stream: a kernel on any other stream would read zeros."""
    f, inputs, values = case(name)
    expected, stream = f(*inputs), torch.cuda.Stream()
    for _ in range(20):
        for t in inputs:
            t.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY)
            fill(inputs, values)
            results = f(*inputs)
        stream.synchronize()
        assert_same(results, expected)


def test_a_stream_can_be_given():
    x = torch.randn(6, 576, device="cuda", dtype=torch.float16)
    expected, stream = rt.rms_norm(x), torch.cuda.Stream()
    late, out = torch.zeros_like(x), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        late.copy_(x)
    rt.rms_norm(late, out=out, stream=stream.cuda_stream)
    stream.synchronize()
    assert_bits_equal(out, expected)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_host_never_waits(name):
    f, inputs, _ = case(name)
    torch.cuda.set_sync_debug_mode("error")
    try:
        f(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * DELAY)
    ended = torch.cuda.Event()
    f(*inputs)
    ended.record()
    assert not ended.query(), "the call waited for what was before it on the stream"
    torch.cuda.synchronize()


# ---------------------------------------------------------------- CUDA graphs


def captured(f, inputs):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = f(*inputs)
    for t in as_tuple(results):
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return graph, results


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_graph_replays_what_eager_computes(name):
    f, inputs, values = case(name)
    expected = f(*inputs)
    fill(inputs, values)
    graph, results = captured(f, inputs)
    assert_same(results, expected)
    values = [0.5 * t if t.is_floating_point() else t for t in values]
    fill(inputs, values)
    expected = f(*inputs)
    fill(inputs, values)
    graph.replay()
    assert_same(results, expected)


@pytest.mark.parametrize("before", ["memcpy", "memset", "fork"])
@pytest.mark.parametrize(("format", "dtype"), GPU_STORES)
def test_decode_waits_for_the_node_before_it(format, dtype, before):
    """That node writes `rows`, which the kernels read first and which name no row until then: a fault, were it read."""
    rng = cases.generator("nodes", format, dtype, before)
    past = torch.randn(2, 5, 2080, 2, 64).to(cases.torch_dtype(dtype))
    host = rt.KVCache(5, 2080, 2, 64, format=format, dtype=dtype)
    host.append(*past)
    cache = host.to("cuda")
    if "raw_from" in cache._arrays:
        cache._arrays["raw_from"].zero_()  # rings are read as they are, at whatever length
    source = torch.randn(5, 8, 64, device="cuda").to(past.dtype)
    q, out, second, after = (torch.zeros_like(source) for _ in range(4))
    lse = torch.zeros(5, 8, device="cuda")
    rows, chosen = (torch.zeros(5, dtype=torch.int32, device="cuda") for _ in range(2))
    rt.warmup()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        if before == "fork":
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(DELAY // 20)
                rows.copy_(chosen)
        q.copy_(source)
        if before == "fork":
            main.wait_stream(side)
        elif before == "memset":
            rows.zero_()
        else:
            rows.copy_(chosen)
        rt.decode_attention(q, cache, rows=rows, out=out, lse=lse)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            after.copy_(out)
        rt.decode_attention(q, cache, rows=rows, out=second)  # beside the copy
        main.wait_stream(side)
    for _ in range(30):
        source.normal_()
        cache.seq_lens.copy_(torch.from_numpy(32 * rng.integers(0, 66, 5)))
        chosen.copy_(torch.from_numpy(rng.integers(0, 5, 5)))
        rows.fill_(10**6)
        for t in (q, out, lse, second, after):
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        named = torch.zeros_like(chosen) if before == "memset" else chosen
        expected, expected_lse = rt.decode_attention(source, cache, rows=named, return_lse=True)
        for name, t in {"out": out, "the second out": second, "a copy of out": after}.items():
            assert_bits_equal(t, expected, name)
        assert_bits_equal(lse, expected_lse)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "after warmup"])
@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_first_call_ever_can_be_captured(name, warm):
    child = subprocess.run(
        [sys.executable, Path(__file__), "capture", json.dumps([name, warm])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout[-500:] + child.stderr[-3000:]


def capture_in_child(name, warm):
    f, inputs, values = case(name)
    if warm:
        rt.warmup()
    torch.cuda.synchronize()
    _, results = captured(f, inputs)
    fill(inputs, values)
    assert_same(results, f(*inputs))


def test_two_threads_with_one_kernel():
    """Which needs more shared memory in one thread than in the other."""
    w = rt.W4Weight.quantize(torch.randn(128, 4096, device="cuda").half())
    xs = [torch.randn(m, 4096, device="cuda").half() for m in (1, 8)]
    expected = [rt.w4a16_matmul(x, w) for x in xs]
    start = threading.Barrier(2)

    def calls(x):
        start.wait()
        for _ in range(20_000):
            y = rt.w4a16_matmul(x, w)
        torch.cuda.synchronize()
        return y

    with ThreadPoolExecutor(2) as pool:
        for y, alone in zip(pool.map(calls, xs), expected, strict=True):
            assert torch.equal(y, alone)


@pytest.mark.parametrize("name", ["decode_attention int8", "w4a16_matmul split", "linear split", "w8a16_matmul split"])
def test_two_streams_with_one_op(name):
    """Each call has a workspace of its own, whatever runs on the other stream."""
    f, inputs, _ = case(name)
    expected, streams, differ = f(*inputs), [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(500):
        for stream in streams:
            with torch.cuda.stream(stream):
                for ours, right in zip(as_tuple(f(*inputs)), as_tuple(expected), strict=True):
                    differ.append((ours != right).any())
    torch.cuda.synchronize()
    assert not torch.stack(differ).any()


@pytest.mark.parametrize("name", ["w4a16_matmul split", "w8a16_matmul split", "linear split", "decode_attention int8"])
def test_products_beside_copies(name):
    """Two streams copy between pinned memory and the GPU all the while."""
    f, inputs, _ = case(name)
    expected, copies = f(*inputs), [torch.cuda.Stream() for _ in range(2)]
    host = [torch.empty(1 << 24, dtype=torch.uint8, pin_memory=True) for _ in copies]
    there = [torch.empty_like(h, device="cuda") for h in host]
    differ = []
    for i in range(200):
        for stream, h, t in zip(copies, host, there, strict=True):
            with torch.cuda.stream(stream):
                (t if i % 2 else h).copy_(h if i % 2 else t, non_blocking=True)
        for ours, right in zip(as_tuple(f(*inputs)), as_tuple(expected), strict=True):
            differ.append((ours != right).any())
    torch.cuda.synchronize()
    assert not torch.stack(differ).any()


def test_warmup_takes_what_names_a_device():
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), "cpu"):
        rt.warmup(device)
    for device in ("gpu", "cuda:x", "meta", -1):
        with pytest.raises(rt.ArgumentError, match="device"):
            rt.warmup(device)
    with pytest.raises(rt.DeviceError, match="warmup"):
        rt.warmup(torch.cuda.device_count())
    assert_bits_equal(rt.rms_norm(torch.ones(2, 8, device="cuda").half()).cpu(), torch.ones(2, 8).half())


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(5))
def test_a_tensor_on_another_device_is_refused_by_name(name, index):
    f, inputs = small_ops()[name]
    if index >= len(inputs):
        return
    moved = [t.cpu() if i == index else t for i, t in enumerate(inputs)]
    if len(inputs) == 1:
        moved.append(torch.empty_like(f(*inputs)))
        run = functools.partial(f if name in SAMPLING else getattr(rt, name.split()[0]), moved[0], out=moved[1])
    else:
        run = functools.partial(f, *moved)
    with pytest.raises(rt.ArgumentError, match=r"must be on .*'s device c"):
        run()
    f(*inputs)
    torch.cuda.synchronize()


@TWO_GPUS
@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_current_device_stays(name):
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            f, inputs, _ = case(name, f"cuda:{other}")
            results = as_tuple(f(*inputs))
            assert torch.cuda.current_device() == current
            assert all(t.device.index == other for t in results)
            assert torch.empty(1, device="cuda").device.index == current
            f, inputs, _ = case(name, f"cuda:{current}")
            assert_same(results, f(*inputs))


@TWO_GPUS
@pytest.mark.parametrize("name", ALL_NAMES)
def test_streams_and_graphs_of_another_device_than_the_current_one(name):
    f, inputs, values = case(name, "cuda:1")
    expected = f(*inputs)
    with torch.cuda.device(1):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for _ in range(5):
        for t in inputs:
            t.zero_()
        torch.cuda.synchronize(1)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY)
            with torch.cuda.device(0):
                fill(inputs, values)
                results = f(*inputs)
                assert torch.cuda.current_device() == 0
        stream.synchronize()
        assert_same(results, expected)
    fill(inputs, values)
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):
        results = f(*inputs)
        assert torch.cuda.current_device() == 0
    for t in as_tuple(results):
        t.zero_()
    torch.cuda.synchronize(1)
    graph.replay()
    torch.cuda.synchronize(1)
    assert_same(results, expected)
    assert torch.cuda.current_device() == 0


@TWO_GPUS
@pytest.mark.parametrize("make", [kv_caches.contiguous, kv_caches.paged])
@pytest.mark.parametrize(("format", "dtype"), GPU_STORES)
def test_caches_on_another_device_than_the_current_one(format, dtype, make):
    k, v = kv_caches.tensors(*kv_caches.kv(100, 2, 64, dtype, "devices", batch=3), dtype)
    first, second = (make(format, dtype, 2, 64, rows=3, device=f"cuda:{i}") for i in range(2))
    steps = (
        lambda c: c.append(k.to(c.device), v.to(c.device), counts=[100, 33, 64]),
        lambda c: c.reorder([2, 0, 1]),
        lambda c: c.truncate([1], [96]),
        lambda c: c.fork(1, 2),
        lambda c: c.reset([0]),
    )
    for step in steps:
        for cache in (first, second):
            step(cache)
            assert torch.cuda.current_device() == 0
        assert second.device == "cuda:1" and second.lengths == first.lengths
        kv_caches.assert_same(kv_caches.state(second), kv_caches.state(first))
    kv_caches.assert_same(kv_caches.state(first.to("cuda:1")), kv_caches.state(second))
    assert torch.cuda.current_device() == 0


@TWO_GPUS
@pytest.mark.parametrize("zeros", [None, "minima"])
def test_weights_on_another_device_than_the_current_one(zeros):
    rt.warmup("cuda:1")
    x = torch.randn(33, 576).half()
    first, second = (rt.W4Weight.quantize(x.to(f"cuda:{i}"), group_size=64, zeros=zeros) for i in range(2))
    for a, b in zip((*first.unpack(), first.dequantize()), (*second.unpack(), second.dequantize()), strict=True):
        assert a is b or (b.device.index == 1 and assert_bits_equal(a, b) is None)  # None: no zeros
    assert torch.equal(first.to("cuda:1").codes, second.codes)
    assert torch.cuda.current_device() == 0


@TWO_GPUS
def test_nothing_is_made_on_a_gpu_that_nobody_names():
    """Import, warmup and calls on the second GPU: no context, so no byte, on the first."""
    code = f"""
import sys, ctypes
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, rooftile as rt
torch.cuda.set_device(1)
rt.warmup("cuda:1")
x, w = torch.randn(3, 4096, device="cuda:1").half(), torch.randn(64, 4096, device="cuda:1").half()
rt.rms_norm(x), rt.linear(x, w), rt.w4a16_matmul(x, rt.W4Weight.quantize(w))
cache = rt.KVCache(2, 64, 1, 64, format="int4-kivi", dtype="float16", device="cuda:1")
k = torch.randn(2, 40, 1, 64, device="cuda:1").half()
cache.append(k, k)
rt.decode_attention(k[:, :1], cache)
torch.cuda.synchronize(1)
driver, active, flags = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1), ctypes.c_uint()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print(active.value)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert child.stdout.strip() == "0", child.stdout + child.stderr[-3000:]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_refused_by_name(name):
    f, inputs = small_ops(torch.float32)[name]
    if name in SAMPLING:  # logits may be float32
        f(*inputs)
        return
    with pytest.raises(
        rt.NotSupportedError, match=r"(x|q|gate_up|out_a|weight) must be float16 or bfloat16 on a GPU, got float32"
    ):
        f(*inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_refused(name):
    f, inputs = small_ops()[name]
    function = f if name in SAMPLING else getattr(rt, name.split()[0])
    with pytest.raises(rt.NotSupportedError, match='plan "reference"'):
        function(*inputs, plan="reference")
    f(*inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_call_leaves_nothing_behind(name):
    f, inputs = small_ops()[name]
    expected = f(*inputs)
    with pytest.raises(rt.RooftileError):
        f(inputs[0].to(torch.int32 if inputs[0].is_floating_point() else torch.float32), *inputs[1:])
    assert_same(f(*inputs), expected)
    torch.cuda.synchronize()


def test_a_position_outside_the_tables_gives_nan_to_its_token():
    q, k, cos, sin, _ = small_ops(tokens=8)["rope"][1]
    good = torch.tensor([0, 63, 5, 5, 0, 1, 2, 3], device="cuda")
    bad = good.clone()
    bad[1], bad[4], bad[6] = -1, 64, 2**40
    expected, got = rt.rope(q, k, cos, sin, good), rt.rope(q, k, cos, sin, bad)
    outside = torch.tensor([1, 4, 6], device="cuda")
    inside = torch.tensor([0, 2, 3, 5, 7], device="cuda")
    for a, b in zip(got, expected, strict=True):
        assert a[outside].isnan().all()
        assert_bits_equal(a[inside], b[inside])
    for value in (-1, -(2**31), 64, 2**31 - 1):
        assert rt.rope(q, k, cos, sin, good.int() * 0 + value)[0].isnan().all()


# ---------------------------------------------------------------- sizes


HIDDEN = (1, 7, 8, 16, 17, 72, 128, 256, 264, 512, 513, 1024, 1032, 2048, 4096, 8192, 8200, 16384, 16385, 16392, 40000)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_bits_do_not_depend_on_the_layout(hidden, dtype):
    """16-byte accesses, and element by element: an offset of one, padded rows, columns."""
    if dtype == "float32":
        return
    make = functools.partial(torch.randn, dtype=cases.torch_dtype(dtype), device="cuda")
    x, r, w, b = make(5, 2 * hidden), make(5, 2 * hidden), make(2 * hidden), make(2 * hidden)
    layouts = {
        "offset": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t),
        "padded": lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 3)[..., :-3].copy_(t),
        "step": lambda t: t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t),
        "columns": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    }
    for f, tensors in (
        (rt.rms_norm, (x, w)),
        (rt.rms_norm, (x, w.float())),
        (rt.add_layer_norm, (x, r, w, b)),
        (rt.silu_mul, (x,)),
        (rt.softmax, (x,)),
        (lambda x: rt.sample(x, seeds=torch.arange(5, device="cuda"), top_p=0.9), (x,)),
    ):
        expected = f(*tensors)
        for make_layout in layouts.values():
            assert_same(f(*(make_layout(t) for t in tensors)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_seventy_thousand_rows(name):
    """More than a grid has in y or z, and no multiple of anything."""
    f, inputs = small_ops(tokens=70_001)[name] if name != "rope" else small_ops(tokens=64)["rope"]
    if name == "rope":
        turn = torch.arange(70_001, device="cuda") % 64
        inputs = (inputs[0][turn], inputs[1][turn], inputs[2], inputs[3], turn)
    whole = as_tuple(f(*inputs))
    for row in (0, 35_000, 70_000):
        alone = [t[row : row + 1] if t.shape[0] == 70_001 else t for t in inputs]
        assert_same(f(*alone), tuple(t[row : row + 1] for t in whole))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "softmax", "sample", "silu_mul", "merge_attention"])
def test_past_two_to_the_31_elements(name):
    # 2.15e9 elements, 4.3 GB a tensor; rows that are held in registers and rows that are not
    rows, n = (65_600, 32_776) if name in ("rms_norm", "add_rms_norm") else (2_084_000, 1_032)
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    if name == "merge_attention":
        x = torch.zeros(16_800_000, 1, 128, dtype=torch.float16, device="cuda")
        x[-1] = torch.randn(1, 128)
        lse = torch.zeros(x.shape[:2], device="cuda")
        out, _ = rt.merge_attention(x, lse, x, lse + 1)
        assert_bits_equal(out[-1:], rt.merge_attention(x[-1:], lse[-1:], x[-1:], lse[-1:] + 1)[0])
        return
    x = torch.zeros(rows, n, dtype=torch.float16, device="cuda")
    x[-1], x[0] = torch.randn(n), torch.randn(n)
    functions = {
        "rms_norm": rt.rms_norm,
        "add_rms_norm": lambda x: rt.add_rms_norm(x, x),
        "softmax": rt.softmax,
        "sample": lambda x: rt.sample(x, seeds=torch.zeros(len(x), dtype=torch.int64, device="cuda"), top_p=0.5),
        "silu_mul": rt.silu_mul,
    }
    results = as_tuple(functions[name](x))
    for row in (0, rows - 1):
        assert_same(functions[name](x[row : row + 1]), tuple(t[row : row + 1] for t in results))


if __name__ == "__main__" and sys.argv[1:2] == ["capture"]:
    capture_in_child(*json.loads(sys.argv[2]))
