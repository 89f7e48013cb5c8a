# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of the small ops: streams, CUDA graphs, devices, errors that do not stick, sizes past 32
bits, torch's dispatcher. Their values are checked where the CPU's are: test_fused.py, test_merge_attention.py and the
contract tests.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import cases
import ops
import pytest
import rooftile as rt
import torch
from closeness import assert_bits_equal
from rooftile import _C, torch_ops

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
        "layer_norm": (rt.layer_norm, (x, w, b)),
        "add_layer_norm": (rt.add_layer_norm, (x, r, w, b)),
        "rope": (rt.rope, (make(tokens, 3, 64), make(tokens, 1, 64), cos, sin, positions)),
        "silu_mul": (rt.silu_mul, (x,)),
        "gelu_mul": (rt.gelu_mul, (x,)),
        "gelu_mul none": (lambda x: rt.gelu_mul(x, approximate="none"), (x,)),
        "softmax": (rt.softmax, (x,)),
        "merge_attention": (rt.merge_attention, (out, lse, out.flip(0), lse.flip(0))),
    }


NAMES = [
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "rope",
    "silu_mul",
    "gelu_mul",
    "gelu_mul none",
    "softmax",
    "merge_attention",
]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def assert_same(results, expected):
    for a, b in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert_bits_equal(a, b)


def test_the_list_is_complete():
    assert list(small_ops()) == NAMES
    assert {name.split()[0] for name in NAMES} <= {op.name for op in ops.OPS if op.gpu}


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_current_stream(name):
    """The inputs are made late on a side stream: a kernel on any other stream would read what was there before."""
    f, inputs = small_ops()[name]
    expected = f(*inputs)
    stream = torch.cuda.Stream()
    for _ in range(20):
        late = [torch.full_like(t, 0) for t in inputs]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY)
            for a, b in zip(late, inputs, strict=True):
                a.copy_(b)
            results = f(*late)
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


@pytest.mark.parametrize("name", NAMES)
def test_the_host_never_waits(name):
    f, inputs = small_ops()[name]
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


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_what_eager_computes(name):
    f, inputs = small_ops()[name]
    expected = f(*inputs)
    graph, results = captured(f, inputs)
    assert_same(results, expected)
    if name == "rope":
        return  # its positions and tables are not to be scaled
    for t in inputs:
        t.mul_(0.5)
    expected = f(*inputs)
    graph.replay()
    assert_same(results, expected)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "after warmup"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_call_ever_can_be_captured(name, warm):
    child = subprocess.run(
        [sys.executable, Path(__file__), "capture", json.dumps([name, warm])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout[-500:] + child.stderr[-3000:]


def capture_in_child(name, warm):
    f, inputs = small_ops()[name]
    if warm:
        rt.warmup()
    torch.cuda.synchronize()
    _, results = captured(f, inputs)
    assert_same(results, f(*inputs))


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
        run = functools.partial(getattr(rt, name.split()[0]), moved[0], out=moved[1])
    else:
        run = functools.partial(f, *moved)
    with pytest.raises(rt.ArgumentError, match=r"must be on .*'s device c"):
        run()
    f(*inputs)
    torch.cuda.synchronize()


@TWO_GPUS
@pytest.mark.parametrize("name", NAMES)
def test_the_current_device_stays(name):
    for current, other in ((0, 1), (1, 0)):
        torch.cuda.set_device(current)
        f, inputs = small_ops(device=f"cuda:{other}")[name]
        results = as_tuple(f(*inputs))
        assert torch.cuda.current_device() == current
        assert all(t.device.index == other for t in results)
        assert torch.empty(1, device="cuda").device.index == current
        f, inputs = small_ops(device=f"cuda:{current}")[name]
        assert_same(results, tuple(t.to(f"cuda:{other}") for t in as_tuple(f(*inputs))))
    torch.cuda.set_device(0)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_refused_by_name(name):
    f, inputs = small_ops(torch.float32)[name]
    with pytest.raises(
        rt.NotSupportedError, match=r"(x|q|gate_up|out_a) must be float16 or bfloat16 on a GPU, got float32"
    ):
        f(*inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_refused(name):
    f, inputs = small_ops()[name]
    function = getattr(rt, name.split()[0])
    with pytest.raises(rt.NotSupportedError, match='plan "reference"'):
        function(*inputs, plan="reference")
    f(*inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_call_leaves_nothing_behind(name):
    f, inputs = small_ops()[name]
    expected = f(*inputs)
    with pytest.raises(rt.RooftileError):
        f(inputs[0].to(torch.int32), *inputs[1:])
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


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "softmax", "silu_mul", "merge_attention"])
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
        "silu_mul": rt.silu_mul,
    }
    results = as_tuple(functions[name](x))
    for row in (0, rows - 1):
        assert_same(functions[name](x[row : row + 1]), tuple(t[row : row + 1] for t in results))


# ---------------------------------------------------------------- torch


def op_inputs(name):
    extra = {
        "rms_norm": (1e-5,),
        "add_rms_norm": (1e-5,),
        "layer_norm": (1e-5,),
        "add_layer_norm": (1e-5,),
        "gelu_mul": ("tanh",),
    }
    return (*small_ops()[name][1], *extra.get(name, ()))


@pytest.mark.parametrize("name", [name for name in NAMES if name in torch_ops.OPS])
def test_opcheck(name):
    op, out_op = getattr(torch.ops.rooftile, name).default, getattr(torch.ops.rooftile, name + "_out").default
    inputs = op_inputs(name)
    torch.library.opcheck(op, inputs)
    results = as_tuple(op(*inputs))
    written = {out: torch.zeros_like(t) for out, t in zip(torch_ops.OPS[name].outputs, results, strict=True)}
    torch.library.opcheck(out_op, inputs, written)
    out_op(*inputs, **written)
    assert_same(tuple(written.values()), results)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name):
    torch._dynamo.reset()
    f, inputs = small_ops()[name]
    assert_same(torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs), f(*inputs))


def test_a_block_compiles_into_one_graph():
    torch._dynamo.reset()
    x, r, w = small_ops()["add_rms_norm"][1]

    def block(x, r, w):
        y, s = rt.add_rms_norm(x, r, w)
        return torch.nn.functional.pad(rt.silu_mul(y), (0, 288)) + s

    explained = torch._dynamo.explain(block)(x, r, w)
    assert explained.graph_break_count == 0
    assert_same(torch.compile(block, fullgraph=True, backend="aot_eager")(x, r, w), block(x, r, w))


if __name__ == "__main__" and sys.argv[1:2] == ["capture"]:
    capture_in_child(*json.loads(sys.argv[2]))
