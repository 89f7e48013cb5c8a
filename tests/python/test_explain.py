# SPDX-License-Identifier: Apache-2.0
"""rt.explain: what it says is what runs, plan= takes it back, and plans of GPUs are seen without one."""

import inspect
import json
import math
import re
import tracemalloc

import cases
import numpy as np
import ops
import oracle
import pytest
import rooftile as rt
import torch
from kv_caches import assert_same, state
from rooftile import _C
from rooftile.explain import _OPS, _seen_by

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
EXPLAINED = [op for op in ops.OPS if op.name in _OPS]


def explain_call(op, call, **more):
    return rt.explain(op.name, **call.kwargs, **more)


@pytest.mark.parametrize("plan", [None, *cases.PLANS])
@pytest.mark.parametrize("op", EXPLAINED, ids=lambda op: op.id)
def test_a_cpu_call_runs_what_is_explained(op, plan):
    call = op.call()
    said = explain_call(op, call, plan=plan)
    with rt.record_kernels() as names:
        call.run(plan=said)
    assert names == [said.kernel]
    assert said.plan in said.kernel
    assert said.plan == plan or plan is None
    assert said.device == "cpu" and said.bytes > 0 and said.bound in ("memory", "compute", "latency")


def test_every_public_op_with_a_plan_is_explained():
    functions = {name: getattr(rt, name) for name in rt.__all__ if inspect.isfunction(getattr(rt, name))}
    takes_plan = [name for name, function in functions.items() if "plan" in inspect.signature(function).parameters]
    assert {*takes_plan, "append"} == set(_OPS)


def product(name, m, n, k, **options):
    if name == "linear":
        return rt.explain(name, (m, k), (n, k), **options)
    weight = {key: options.pop(key) for key in ("group_size", "kind", "scale_dtype", "perm") if key in options}
    return rt.explain(name, (m, k), {"shape": (n, k), **weight}, **options)


def test_plans_of_a_gpu_that_is_not_there():
    said = product("linear", 1, 4096, 4096, device="sm_90a", sms=132)
    assert said.plan == "tma config=0 tma_rows=64 cluster=2 stages=6"
    assert said.kernel == "cuda_float16_linear_tma8_split2"
    said = product("linear", 128, 4096, 14336, device="sm_90a", sms=132)
    assert said.plan == "collective config=0 splits=2"
    assert said.kernel == "cuda_float16_linear_tile64x128_split2" and said.workspace_bytes == 2 * 128 * 4096 * 4
    assert product("linear", 1, 4096, 4096, device="sm_80", sms=132).plan.startswith("stream ")
    assert product("linear", 300, 4096, 4096, device="sm_80").plan == "multistage"
    assert product("linear", 3, 100, 30, device="sm_90a").plan.startswith("stream ")  # rows of 60 bytes
    said = product("w4a16_matmul", 1, 4096, 4096, device="sm_90a", dtype="bfloat16")
    assert re.fullmatch(r"stream config=0 splits=\d+ cluster=\d", said.plan)
    assert said.kernel.startswith("cuda_bfloat16_w4g128_symmetric_t8_split")
    said = product("w8a16_matmul", 700, 4096, 4096, device="sm_90a")
    assert said.plan.startswith("wgmma ") and said.kernel.startswith("cuda_float16_w8g128_symmetric_tile128")
    cache = {"kv_heads": 8, "capacity": 8192, "format": "int4-kivi"}
    said = rt.explain(rt.decode_attention, (1, 32, 128), cache, device="sm_90a", sms=132)
    assert said.plan == "split_kv block_m=8 ctas=264 ctas_per_sm=2 cluster_size=1"
    assert said.kernel == "cuda_float16_int4-kivi_d128" and said.workspace_bytes > 0
    assert "block_m=16" in rt.explain("decode_attention", (1, 4, 32, 128), cache, device="sm_90a").plan


def test_formats_without_clusters_are_planned_without():
    """One row of one KV head: where the kernel of a format has clusters, its row is one."""
    for format, head_dim, clusters in (
        ("int8-kivi-sym", 96, True),
        ("int8-kivi-sym", 128, True),
        ("int8-kivi-sym", 192, False),
        ("int8", 128, True),
        ("int8", 192, False),
    ):
        cache = {"kv_heads": 1, "capacity": 1024, "format": format}
        for device in ("sm_90a", "sm_80"):
            plan = rt.explain("decode_attention", (1, 4, head_dim), cache, device=device, sms=132).plan
            alone = plan.endswith("cluster_size=1")
            assert alone == (not clusters or device == "sm_80"), (format, head_dim, device, plan)


def test_a_gate_needs_an_even_number_of_rows():
    for n in (63, 65):
        with pytest.raises(rt.ArgumentError, match=rf"rows \[gate \| up\], an even number N, got N = {n}"):
            product("w4a16_matmul", 1, n, 128, device="sm_90a", activation="silu_mul")


def test_bytes_flops_and_bound():
    said = product("linear", 4, 512, 256, device="sm_90a")
    assert said.bytes == 2 * (4 * 256 + 512 * 256 + 4 * 512) and said.flops == 2 * 4 * 512 * 256
    assert said.intensity == said.flops / said.bytes and said.bound == "latency"
    assert product("linear", 1, 28672, 8192, device="sm_90a").bound == "memory"
    assert product("linear", 8192, 28672, 8192, device="sm_90a").bound == "compute"
    assert product("linear", 1, 28672, 8192, device="sm_90a", roof=(1e9, 1e-6)).bound == "compute"
    said = product("w4a16_matmul", 1, 4096, 4096, device="sm_90a")
    assert said.bytes == 4096 * 4096 // 2 + 2 * 4096 * 32 + 2 * (4096 + 4096)
    gated = rt.explain("w4a16_matmul", (1, 64), {"shape": (64, 64), "group_size": 32}, activation="silu_mul")
    assert gated.bytes == 64 * 32 + 2 * 64 * 2 + 4 * (64 + 32)
    # two rows of a cache, one token each: a byte a code and two scales of two bytes a token
    cache = {"kv_heads": 2, "capacity": 100, "length": 100, "format": "int8"}
    said = rt.explain("decode_attention", (2, 4, 64), cache, device="sm_90a")
    assert said.bytes == 2 * 2 * (2 * 4 * 64) + 2 * 100 * 2 * (2 * 64 + 4)
    assert said.flops == 4 * 4 * 64 * 2 * 100
    assert rt.explain("decode_attention", (2, 4, 64), cache, device="sm_90a", window=10).flops == 4 * 4 * 64 * 2 * 10
    prefill = rt.explain("prefill_attention", (1, 5, 4, 64), (1, 5, 2, 64), (1, 5, 2, 64))
    assert prefill.flops == 4 * 4 * 64 * 15 and prefill.bytes == 4 * 5 * 64 * (4 + 4 + 2 + 2)
    packed = rt.explain(
        "prefill_attention", (5, 4, 64), (7, 2, 64), (7, 2, 64), cu_seqlens_q=[0, 2, 5], cu_seqlens_k=[0, 4, 7]
    )
    assert packed.flops == 4 * 4 * 64 * (3 + 4 + 1 + 2 + 3)
    assert rt.explain("add_rms_norm", (3, 8), (3, 8)).bytes == 4 * 4 * 24
    assert rt.explain("silu_mul", (3, 16)).bytes == 4 * (48 + 24)


def test_the_keys_that_queries_see():
    for queries in range(5):
        for first in range(6):
            for window in (1, 2, 3, 100):
                expected = sum(min(first + i, window) for i in range(queries))
                assert _seen_by(queries, first, window) == expected, (queries, first, window)


def test_a_cache_and_a_weight_are_read():
    cache = rt.KVCache(2, 128, 2, 64, format="int4")
    k = np.zeros((2, 3, 2, 64), np.float32)
    said = rt.explain(cache.append, k, k)
    assert said == rt.explain(rt.KVCache.append, cache, k, k) == rt.explain("append", cache, k, k)
    assert said.kernel == "cpu_" + said.plan + "_append_float32_int4"
    cache.append(k, k)
    q = np.zeros((2, 4, 64), np.float32)
    assert rt.explain("decode_attention", q, cache).flops == 4 * 4 * 64 * 2 * 3
    assert rt.explain("decode_attention", q[:1], cache, rows=[1]).flops == 4 * 4 * 64 * 3
    w = rt.W4Weight.quantize(np.zeros((8, 64), np.float32), group_size=32)
    described = {"shape": (8, 64), "group_size": 32}
    x = np.zeros((2, 64), np.float32)
    assert rt.explain("w4a16_matmul", x, w) == rt.explain("w4a16_matmul", x.shape, described)
    meta = torch.empty(2, 64, dtype=torch.float16, device="meta")
    assert rt.explain("w4a16_matmul", meta, w, device="sm_80").kernel.startswith("cuda_float16_w4g32_symmetric_")


def test_it_is_readable_and_json():
    said = product("w4a16_matmul", 64, 28672, 4096, device="sm_90a")
    lines = str(said).splitlines()
    assert len(lines) == 5 and said.kernel in lines[0] and said.plan in lines[1] and said.why in lines[2]
    assert max(map(len, lines)) <= 120
    facts = json.loads(json.dumps(said.as_dict()))
    assert facts["plan"] == said.plan and facts["intensity"] == said.intensity and facts["roof"] == list(said.roof)


@pytest.mark.parametrize("sms", [1, 46, 132])
@pytest.mark.parametrize("device", ["sm_80", "sm_86", "sm_89", "sm_90a"])
@pytest.mark.parametrize("name", ["linear", "w4a16_matmul", "w8a16_matmul"])
def test_a_plan_is_taken_back(name, device, sms):
    for m in (1, 8, 9, 17, 64, 65, 700):
        for n, k in ((17, 96), (4096, 4096), (1024, 576)):
            more = {} if name == "linear" else {"group_size": 32}
            said = product(name, m, n, k, device=device, sms=sms, **more)
            forced = product(name, m, n, k, device=device, sms=sms, plan=said, **more)
            assert forced.why == "forced by plan="
            facts = {"plan", "kernel", "workspace_bytes", "bytes", "flops"}
            assert all(getattr(forced, fact) == getattr(said, fact) for fact in facts)


def test_every_path_is_reached():
    """At one shape: more than the heuristic would take there."""
    plans = {
        "linear": [
            "stream config=0 row_tiles=1 slices_log2=3 splits=2",
            "tma config=3 tma_rows=128 cluster=1 stages=3",
            *(f"collective config={config} splits=1" for config in range(5)),
            *(f"collective config={config} splits=4" for config in (0, 2)),
        ],
        "w4a16_matmul": [
            "stream config=3 splits=1 cluster=1",
            "stream config=0 splits=2 cluster=2",
            "wgmma config=0 splits=1 cluster=1 m_group=1 stream_k_ranges=0 expand_rows=0",
            "wgmma config=2 splits=4 cluster=2 m_group=8 stream_k_ranges=0 expand_rows=0",
            "wgmma config=1 splits=1 cluster=2 m_group=1 stream_k_ranges=3 expand_rows=0",
        ],
    }
    kernels = {product(name, 1, 4096, 4096, device="sm_90a", plan=p).kernel for name in plans for p in plans[name]}
    assert len(kernels) == sum(map(len, plans.values()))
    cache = {"kv_heads": 8, "capacity": 1024}
    for plan in (
        "split_kv block_m=8 ctas=1 ctas_per_sm=1 cluster_size=1",
        "split_kv block_m=16 ctas=200 ctas_per_sm=2 cluster_size=1",
        "split_kv block_m=8 ctas=32 ctas_per_sm=1 cluster_size=4",
    ):
        said = rt.explain("decode_attention", (1, 32, 128), cache, device="sm_90a", plan=plan)
        assert said.plan == plan and said.kernel.endswith("_m16") == ("block_m=16" in plan)


class NamedByAList:
    __name__ = [1]  # noqa: RUF012  # no list that anyone shares

    def __call__(self):
        pass

    def __repr__(self):
        return "NamedByAList"


class PlanRaises:
    @property
    def plan(self):
        raise OSError("of whoever made it")


ROOFS = ("12", ("4800", "989"), (1, 2, 3), {0: 1, 1: 2}, (True, 1), [1])
X, W, W4 = (1, 4096), (4096, 4096), {"shape": (4096, 4096)}
CACHE = {"kv_heads": 8, "capacity": 4096}
WRONG = [
    ({"op": "conv"}, rt.ArgumentError, "op"),
    ({"args": ((1.0, 64), W)}, rt.ArgumentTypeError, "x must be a tensor or a shape of integers, got (1.0, 64)"),
    ({"args": ((True, 4096), W)}, rt.ArgumentTypeError, "x must be a tensor or a shape of integers, got (True, 4096)"),
    ({"sms": True}, rt.ArgumentTypeError, "sms must be an integer, got bool"),
    ({"dtype": NamedByAList()}, rt.ArgumentTypeError, "dtype must be"),
    ({"device": "cuda:" + "9" * 5000}, rt.ArgumentError, "device must be"),
    *(({"roof": roof}, rt.ArgumentTypeError, "roof must be (GB/s, TFLOP/s), two numbers, got") for roof in ROOFS),
    ({"op": "merge_attention", "args": ((), (), (), ())}, rt.ArgumentError, "out_a must have 2 to 6 dimensions"),
    ({"op": "w4a16_matmul", "args": (X, {**W4, "scale_dtype": np.array(["a", "b"])})}, rt.ArgumentError, "scale_dtype"),
    ({"op": "w4a16_matmul", "args": (X, {**W4, "group_size": True})}, rt.ArgumentTypeError, "w's group_size must be"),
    ({"op": "w4a16_matmul", "args": (X, {"shape": (True, 4096)})}, rt.ArgumentTypeError, "w's shape must be"),
    *(
        ({"op": "decode_attention", "args": ((1, 32, 128), {**CACHE, **cache}), **more}, rt.ArgumentTypeError, says)
        for cache, more, says in (
            ({}, {"window": True}, "window must be an integer, got bool"),
            ({"length": True}, {}, "cache's length must be an integer, got bool"),
            ({"kv_heads": True}, {}, "cache's kv_heads must be an integer, got bool"),
            ({}, {"rows": [True]}, "rows must be an integer, got bool"),
            ({}, {"return_lse": "no"}, "return_lse must be True or False, got str"),
        )
    ),
    (
        {"op": "decode_attention", "args": ((1, 32, 128), {**CACHE, "capacity": 2**31 - 1})},
        rt.ArgumentError,
        f"cache's capacity must be at most {2**31 - 64}, whole pages of 64 tokens, got {2**31 - 1}",
    ),
    *(
        ({"op": op, "args": args}, rt.NotSupportedError, f"{op}: {name} has head_dim 513; supported are 1 to 512")
        for op, name, args in (
            ("decode_attention", "q", ((1, 32, 513), CACHE)),
            ("append", "k", (CACHE, (1, 1, 8, 513), (1, 1, 8, 513))),
        )
    ),
    ({"op": "append", "args": ({**CACHE, "length": 4096}, *((1, 1, 8, 128),) * 2)}, rt.ArgumentError, "do not fit"),
    ({"op": "append", "args": (CACHE, *((1, 4097, 8, 128),) * 2)}, rt.ArgumentError, "do not fit"),
    (
        {"op": "decode_attention", "args": ((1, 32, 128), CACHE), "rows": [0, 1]},
        rt.ArgumentError,
        "rows must be [batch]",
    ),
    ({"op": 3}, rt.ArgumentError, "op"),
    ({"args": ()}, rt.ArgumentTypeError, "linear: missing a required argument: 'x'"),
    ({"args": (X, W), "colour": 1}, rt.ArgumentTypeError, "colour"),
    ({"args": (3, W)}, rt.ArgumentTypeError, "x"),
    ({"args": (X, (4096, 4096, 1))}, rt.ArgumentError, "weight"),
    ({"args": (X, (4096, 64))}, rt.ArgumentError, "weight"),
    ({"args": ((-1, 4096), W)}, rt.ArgumentError, "x"),
    ({"args": (("a", 4096), W)}, rt.ArgumentTypeError, "x"),
    ({"device": "sm_75"}, rt.ArgumentError, "device"),
    ({"device": "cuda:99"}, (rt.NotSupportedError, rt.ArgumentError), "device cuda:99 is not there"),
    ({"device": "cpu", "sms": 3}, rt.ArgumentError, "sms"),
    ({"sms": 0}, rt.ArgumentError, "sms"),
    ({"sms": 1.5}, rt.ArgumentTypeError, "sms"),
    ({"sms": 10**9}, rt.ArgumentError, "sms"),
    ({"dtype": "int8"}, rt.ArgumentTypeError, "dtype"),
    ({"dtype": "float32"}, rt.NotSupportedError, "float32"),
    ({"roof": 3}, rt.ArgumentTypeError, "roof"),
    ({"roof": (0, 1)}, rt.ArgumentError, "roof"),
    ({"roof": (10**400, 1)}, rt.ArgumentTypeError, "roof"),
    ({"op": NamedByAList()}, rt.ArgumentError, "op"),
    ({"args": ({}, W)}, rt.ArgumentTypeError, "x must be a tensor or a shape, got dict"),
    ({"op": "softmax", "args": ((2**31 - 1,) * 40,)}, rt.ArgumentError, "less than 2**60 elements"),
    ({"plan": 3}, rt.ArgumentTypeError, "plan"),
    ({"plan": "avx512"}, rt.NotSupportedError, "plan"),
    ({"plan": "tma config=0 tma_rows=64 cluster=2"}, rt.ArgumentError, "got no stages"),
    ({"plan": "tma config=0 tma_rows=65 cluster=2 stages=4"}, rt.ArgumentError, "tma_rows must"),
    ({"plan": "stream config=0 row_tiles=1 slices_log2=3 splits=2", "device": "cpu"}, rt.NotSupportedError, "plan"),
    ({"op": "rms_norm", "args": (X,), "plan": "tma"}, rt.NotSupportedError, "plan"),
    ({"op": "prefill_attention", "args": ((1, 2, 2, 8),) * 3}, rt.NotSupportedError, "CPU"),
    ({"op": "w4a16_matmul", "args": (X, 3)}, rt.ArgumentTypeError, "w "),
    ({"op": "w4a16_matmul", "args": (X, {})}, rt.ArgumentTypeError, "shape"),
    ({"op": "w4a16_matmul", "args": (X, {**W4, "colour": 1})}, rt.ArgumentError, "colour"),
    ({"op": "w4a16_matmul", "args": (X, {**W4, "group_size": 48})}, rt.ArgumentError, "group_size"),
    ({"op": "w4a16_matmul", "args": (X, {**W4, "kind": "odd"})}, rt.ArgumentError, "w's kind must be"),
    ({"op": "w8a16_matmul", "args": (X, {**W4, "kind": "minima"})}, rt.ArgumentError, "w's kind must be"),
    ({"op": "w4a16_matmul", "args": (X, {**W4, "scale_dtype": "float32"})}, rt.ArgumentError, "scale_dtype"),
    ({"op": "w4a16_matmul", "args": (X, {**W4, "perm": torch.ones(3)})}, rt.ArgumentTypeError, "w's perm"),
    ({"op": "w4a16_matmul", "args": (X, W4), "batch_invariant": 1}, rt.ArgumentTypeError, "batch_invariant"),
    ({"op": "w4a16_matmul", "args": ((1, 64), W4)}, rt.ArgumentError, "x"),
    ({"op": "w4a16_matmul", "args": (X, W4), "activation": "tan"}, rt.ArgumentError, "activation"),
    ({"op": "decode_attention", "args": ((1, 32, 128), 3)}, rt.ArgumentTypeError, "cache"),
    ({"op": "decode_attention", "args": ((1, 32, 128), {})}, rt.ArgumentTypeError, "kv_heads"),
    ({"op": "decode_attention", "args": ((1, 32, 128), {**CACHE, "format": "int3"})}, rt.ArgumentError, "format"),
    ({"op": "decode_attention", "args": ((1, 32, 128), {**CACHE, "page_size": 16})}, rt.ArgumentError, "page_size"),
    ({"op": "decode_attention", "args": ((1, 32, 128), {**CACHE, "length": 5000})}, rt.ArgumentError, "length"),
    ({"op": "decode_attention", "args": ((1, 31, 128), CACHE)}, rt.ArgumentError, "q "),
    ({"op": "decode_attention", "args": ((1, 33, 32, 128), CACHE)}, rt.NotSupportedError, "at most 32"),
    ({"op": "decode_attention", "args": ((1, 32, 100), CACHE)}, rt.NotSupportedError, "no GPU kernel"),
    ({"op": "decode_attention", "args": ((32, 128), CACHE)}, rt.ArgumentError, "q "),
    ({"op": "decode_attention", "args": ((1, 32, 128), CACHE), "window": 0}, rt.ArgumentError, "window"),
    (
        {
            "op": "decode_attention",
            "args": ((1, 32, 64), CACHE),
            "plan": "split_kv block_m=16 ctas=8 ctas_per_sm=1 cluster_size=1",
        },
        rt.ArgumentError,
        "block_m must",
    ),
]


@pytest.mark.parametrize(("change", "error", "says"), WRONG, ids=lambda x: str(x)[:60])
def test_what_is_wrong_is_a_typed_error(change, error, says):
    call = {"op": "linear", "args": (X, W), "device": "sm_90a", **change}
    op, args = call.pop("op"), call.pop("args")
    with pytest.raises(error, match=re.escape(says)):
        rt.explain(op, *args, **call)


@pytest.mark.parametrize("activation", ["foo", "silu_mull", [], 3, "silu_mul"])
@pytest.mark.parametrize("device", ["cpu", "sm_90a"])
def test_an_activation_is_refused_as_by_the_call(activation, device):
    x, weight = torch.randn(4, 64, dtype=torch.float16), torch.randn(64, 64, dtype=torch.float16)
    packed = rt.W4Weight.quantize(weight, group_size=32)
    for op, w in ((rt.linear, weight), (rt.w4a16_matmul, packed)):
        if op is rt.w4a16_matmul and activation == "silu_mul":
            continue
        with pytest.raises((rt.ArgumentError, rt.ArgumentTypeError)) as call:
            op(x, w, activation=activation)
        with pytest.raises((rt.ArgumentError, rt.ArgumentTypeError)) as explained:
            rt.explain(op, x, w, activation=activation, device=device)
        assert type(explained.value) is type(call.value)
        assert str(explained.value).replace("'", '"') == str(call.value)


@pytest.mark.parametrize("device", ["cpu", "sm_90a"])
def test_a_plan_that_is_none_is_no_plan(device):
    said = rt.explain("softmax", (3, 4), device=device)
    assert rt.explain("softmax", (3, 4), device=device, plan=said._replace(plan=None)).plan == said.plan
    x = torch.zeros(3, 4)
    assert torch.equal(rt.softmax(x, plan=said._replace(plan=None)), rt.softmax(x))
    said = rt.explain("softmax", (3, 4), device="sm_90a")
    assert said.plan is None
    assert torch.equal(rt.softmax(x, plan=said), rt.softmax(x))


@pytest.mark.parametrize("wrong", [3, PlanRaises(), object(), [], b"avx2"], ids=lambda x: type(x).__name__)
def test_what_is_no_plan_is_refused_as_by_the_call(wrong):
    for call in (rt.softmax, lambda x, plan: rt.explain("softmax", x, plan=plan)):
        with pytest.raises(rt.ArgumentTypeError, match=f"^softmax: plan must be a string, got {type(wrong).__name__}$"):
            call(torch.zeros(3, 4), plan=wrong)
    with pytest.raises(rt.ArgumentTypeError, match=r"^softmax: plan must be a string"):
        rt.explain("softmax", (3, 4), plan=wrong, device="sm_90a")


HALF, INT = torch.float16, torch.int32
KV = torch.zeros(1, 1, 2, 64)


def full_cache():
    cache = rt.KVCache(1, 64, 2, 64, format="fp32")
    cache.append(*(torch.zeros(1, 63, 2, 64),) * 2)
    return cache


# op, arguments, options: what the op refuses
REFUSED = [
    ("decode_attention", (torch.zeros(1, 4, 64, dtype=HALF), rt.KVCache(1, 64, 2, 64, format="bf16")), {}),
    ("decode_attention", (torch.zeros(1, 4, 64), rt.KVCache(2, 64, 2, 64)), {"rows": [0, 1]}),
    ("decode_attention", (torch.zeros(1, 4, 64), rt.KVCache(2, 64, 2, 64)), {"rows": [2]}),
    ("decode_attention", (torch.zeros(3, 4, 64), rt.KVCache(2, 64, 2, 64)), {}),
    ("decode_attention", (torch.zeros(1, 0, 64), rt.KVCache(1, 64, 2, 64)), {}),
    ("decode_attention", (torch.zeros(1, 4, 64), rt.KVCache(1, 64, 2, 64)), {"return_lse": "no"}),
    ("decode_attention", (torch.zeros(1, 4, 32), rt.KVCache(1, 64, 2, 64)), {}),
    ("prefill_attention", (torch.zeros(1, 2, 2, 128), torch.zeros(1, 2, 2, 128), torch.zeros(1, 2, 2, 64)), {}),
    ("prefill_attention", (torch.zeros(1, 2, 2, 64), torch.zeros(1, 2, 2, 64), torch.zeros(1, 3, 2, 64)), {}),
    ("prefill_attention", (torch.zeros(1, 2, 2, 64),) * 3, {"causal": "no"}),
    ("prefill_attention", (torch.zeros(1, 2, 2, 64),) * 3, {"return_lse": 1}),
    ("prefill_attention", (torch.zeros(1, 2, 2, 64),) * 3, {"rows": [0]}),
    ("prefill_attention", (torch.zeros(1, 2, 0, 64), *(torch.zeros(1, 2, 2, 64),) * 2), {}),
    ("prefill_attention", (torch.zeros(1, 1, 4, 64), *(torch.zeros(1, 2, 2, 64),) * 2), {"cache": full_cache()}),
    ("append", (full_cache(), *(torch.zeros(1, 2, 2, 64),) * 2), {}),
    ("append", (full_cache(), KV, KV.half()), {}),
    ("append", (full_cache(), KV.half(), KV.half()), {}),
    ("append", (rt.KVCache(2, 64, 2, 64), *(torch.zeros(2, 1, 2, 64),) * 2), {"rows": [1, 1]}),
    ("append", (full_cache(), KV, KV), {"counts": [2]}),
    ("silu_mul", (torch.zeros(3, 7),), {}),
    ("rms_norm", (torch.zeros(()),), {}),
    ("rms_norm", (torch.zeros(2, 0),), {}),
    ("rms_norm", (torch.zeros(2, 8, dtype=INT),), {}),
    ("rms_norm", (torch.zeros(2, 8, dtype=torch.float64),), {}),
    ("rms_norm", (torch.zeros(2, 8), torch.zeros(8, dtype=HALF)), {}),
    ("rms_norm", (torch.zeros(2, 8), torch.zeros(7)), {}),
    ("add_rms_norm", (torch.zeros(2, 8), torch.zeros(2, 7)), {}),
    ("qk_rms_norm", (torch.zeros(2, 8),) * 2 + (torch.zeros(7),), {}),
    ("qk_rms_norm", (torch.zeros(2, 8), torch.zeros(2, 8, dtype=HALF)), {}),
    ("qk_rms_norm", (torch.zeros(1, 2, 8), torch.zeros(2, 2, 8)), {}),
    ("qk_rms_norm", (torch.zeros(2, 8), torch.zeros(2, 4)), {}),
    ("qk_rms_norm", (torch.zeros(2, 0),) * 2, {}),
    ("qk_rms_norm", (torch.zeros(8),) * 2, {}),
    ("qk_rms_norm", (torch.zeros(1, 1025),) * 2, {}),
    ("embedding", (torch.zeros(2), torch.zeros(3, 8)), {}),
    ("embedding", (torch.zeros(2, dtype=INT), torch.zeros(3, 8, dtype=INT)), {}),
    ("embedding", (torch.zeros(2, dtype=INT), torch.zeros(3)), {}),
    ("embedding", (torch.zeros(2, dtype=INT), torch.zeros(3, 2, 8)), {}),
    ("softmax", (torch.zeros(1, 1, 1, 1, 1, 1, 2),), {}),
    ("softmax", (torch.zeros(2, 8, dtype=INT),), {}),
    ("sample", (torch.zeros(()),), {"temperature": 0}),
    ("sample", (torch.zeros(2, 8),), {"seeds": torch.zeros(3, dtype=torch.int64)}),
    ("sample", (torch.zeros(2, 8),), {"seeds": torch.zeros(2, dtype=INT)}),
    ("linear", (torch.zeros(2, 8), torch.zeros(4, 8, dtype=HALF)), {}),
    ("linear", (torch.zeros(2, 8, dtype=INT), torch.zeros(4, 8)), {}),
    ("linear", (torch.zeros(2, 8), torch.zeros(4, 8)), {"bias": torch.zeros(5)}),
    ("linear", (torch.zeros(2, 8), torch.zeros(4, 8)), {"residual": torch.zeros(2, 5)}),
    ("merge_attention", (torch.zeros(2, 64), torch.zeros(3), torch.zeros(2, 64), torch.zeros(2)), {}),
    ("merge_attention", (torch.zeros(2, 64), torch.zeros(2), torch.zeros(2, 32), torch.zeros(2)), {}),
    *(
        ("rope", [{**ROPE, **change}[name] for name in ROPE], {})
        for ROPE in [dict(zip("qkcsp", (torch.zeros(2, 3, 8),) * 2 + (torch.zeros(9, 4),) * 2, strict=False))]
        for ROPE in [{**ROPE, "p": torch.zeros(2, dtype=INT)}]
        for change in (
            {"q": torch.zeros(8)},
            {"k": torch.zeros(3, 3, 8)},
            {"k": torch.zeros(2, 3, 6)},
            {"c": torch.zeros(9, 5), "s": torch.zeros(9, 5)},
            {"c": torch.zeros(9)},
            {"s": torch.zeros(8, 4)},
            {"s": torch.zeros(9, 4, dtype=HALF)},
            {"p": torch.zeros(3, dtype=INT)},
            {"p": torch.zeros(2)},
        )
    ),
]


@pytest.mark.parametrize(("op", "args", "options"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_a_call_refuses_is_refused_with_its_words(op, args, options):
    """The same kind of error of the same argument, as far as "got": what came is the same but for how much is said."""
    function = rt.KVCache.append if op == "append" else getattr(rt, op)
    with pytest.raises(rt.RooftileError) as call:
        function(*args, **options)
    with pytest.raises(rt.RooftileError) as explained:
        rt.explain(op, *args, **options)
    assert type(explained.value) is type(call.value), (explained.value, call.value)
    word = r"^\w+: '?(\w+)"
    assert re.match(word, str(explained.value))[0] == re.match(word, str(call.value))[0], (explained.value, call.value)


def test_rows_of_a_batch_are_not_walked():
    cache = {"kv_heads": 8, "capacity": 1024, "format": "int8"}
    one = rt.explain("decode_attention", (1, 8, 128), cache)
    many = rt.explain("decode_attention", (30_000_000, 8, 128), cache)  # a list of so many rows takes seconds
    assert many.bytes == 30_000_000 * one.bytes and many.flops == 30_000_000 * one.flops
    k, of_one = (30_000_000, 1, 8, 128), (1, 1, 8, 128)
    one = rt.explain("append", cache, of_one, of_one)
    assert rt.explain("append", cache, k, k).bytes == 30_000_000 * one.bytes
    one = rt.explain("prefill_attention", of_one, of_one, of_one, cache=cache)
    assert rt.explain("prefill_attention", k, k, k, cache=cache).flops == 30_000_000 * one.flops
    tracemalloc.start()
    rt.explain("decode_attention", (30_000_000, 8, 128), cache)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("device", ["cpu", "sm_90a"])
def test_long_texts_are_cut(device):
    text = "x" * 10**6
    plan = "split_kv block_m=8 ctas=1 ctas_per_sm=1 cluster_size=3" + " " * 10**6
    for call in (
        lambda: rt.explain(text),
        lambda: rt.explain("softmax", (3, 4), device=text),
        lambda: rt.explain("softmax", (3, 4), device=device, plan=text),
        lambda: rt.explain("softmax", (3, 4), dtype=text),
        lambda: rt.explain("softmax", (3, 4), roof=text),
        lambda: rt.explain("linear", (3, 4), (5, 4), activation=text, device=device),
        lambda: rt.explain("decode_attention", (1, 8, 128), CACHE, device=device, plan=plan),
        lambda: rt.linear(torch.zeros(3, 4), torch.zeros(5, 4), activation=text),
        lambda: rt.gelu_mul(torch.zeros(3, 4), approximate=text),
        lambda: rt.sample(torch.zeros(3, 4), temperature=0, order=text),
        lambda: rt.KVCache(1, 1, 1, 1, device=text),
        lambda: rt.KVCache(1, 1, 1, 1, dtype=text),
        lambda: rt.softmax(torch.zeros(3, 4), plan=text),
        lambda: rt.KVCache(10**5000, 1, 1, 1),  # of more digits than Python writes
        lambda: rt.KVCache(1, 1, 1, 1).reset([10**5000]),
        lambda: rt.explain("softmax", (10**5000, 4), device=device),
        lambda: rt.explain("softmax", (3, 4), device="sm_90a", sms=10**5000),
    ):
        with pytest.raises(rt.RooftileError) as caught:
            call()
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("block_m", [-8, 0])
def test_a_block_m_that_cannot_be_is_named_as_it_came(block_m):
    plan = f"split_kv block_m={block_m} ctas=1 ctas_per_sm=1 cluster_size=1"
    with pytest.raises(rt.ArgumentError, match=rf"decode_attention: plan .* block_m must .*, got {block_m}$"):
        rt.explain("decode_attention", (1, 8, 128), CACHE, device="sm_90a", plan=plan)


def test_why_there_is_no_plan_is_true():
    for op in ("rms_norm", "softmax"):
        said = rt.explain(op, X, device="sm_90a")
        assert said.plan is None and said.why.startswith("no plan to choose: ")


class Raises:
    def __getattr__(self, name):
        raise RuntimeError(name)


def test_an_argument_whose_attributes_raise_is_refused_as_by_the_call():
    for call in (rt.softmax, lambda x: rt.explain("softmax", x)):
        with pytest.raises(rt.ArgumentTypeError, match=r"^softmax: x must be"):
            call(Raises())


def test_rows_and_counts_are_judged_as_by_the_call():
    cache, k = rt.KVCache(2, 64, 2, 64), torch.zeros(2, 1, 2, 64)
    for name in ("rows", "counts"):
        wrong = np.array([0, 1])
        with pytest.raises(rt.ArgumentTypeError) as call:
            cache.append(k, k, **{name: wrong})
        with pytest.raises(rt.ArgumentTypeError) as explained:
            rt.explain(cache.append, k, k, **{name: wrong})
        assert str(call.value) == str(explained.value) == f"append: {name} must be int32, got int64[2] on cpu"
    with pytest.raises(rt.ArgumentError, match="append: rows names row 1 twice"):
        rt.explain(cache.append, k, k, rows=(row for row in (1, 1)))
    with pytest.raises(rt.ArgumentError, match=r"append: cache's kv_heads must lie in \[1, 65536\], got 65537"):
        rt.explain("append", {"kv_heads": 65537, "capacity": 64}, *((1, 1, 65537, 1),) * 2)


@pytest.mark.parametrize("window", [2**31, 2**62, 2**63 - 1, 2**63])
def test_a_window_is_as_long_as_the_call_takes(window):
    cache, q = full_cache(), torch.zeros(1, 2, 64)
    if window == 2**63:
        for call in (rt.decode_attention, lambda *args, **options: rt.explain("decode_attention", *args, **options)):
            with pytest.raises((rt.ArgumentError, rt.ArgumentTypeError), match="decode_attention: window "):
                call(q, cache, window=window)
        return
    rt.decode_attention(q, cache, window=window)
    said = rt.explain("decode_attention", q, cache, window=window)
    assert said.bytes == rt.explain("decode_attention", q, cache).bytes


def test_a_plan_of_append_stays_within_the_grid():
    rows = 4194304
    cache, k = {**CACHE, "format": "int8"}, ((rows, 1, 8, 128),) * 2
    with pytest.raises(rt.ArgumentError, match=r"append: plan .* entry_ctas must be 1 to 511, got 1024"):
        rt.explain("append", cache, *k, device="sm_90a", plan="append entry_ctas=1024 cluster_size=1")
    assert rt.explain("append", cache, *k, device="sm_90a").why.startswith("one CTA an entry")


def test_plans_of_append():
    cache = {**CACHE, "format": "int8"}

    def explained(op, tokens, device="sm_90a", **options):
        q, kv, tables = (4, tokens, 32, 128), (4, tokens, 8, 128), (4096, 64)
        args = (q, kv, kv, tables, tables, (4, tokens), cache) if op == "rope_append" else (cache, kv, kv)
        return rt.explain(op, *args, device=device, sms=132, **options)

    step, prompt = explained("append", 1), explained("append", 2048)
    assert step.plan == "append entry_ctas=2 cluster_size=2" and "cluster" in step.why
    assert prompt.plan == "append entry_ctas=256 cluster_size=1" and "second kernel" in prompt.why
    assert explained("append", 1, "sm_80").plan == "append entry_ctas=1 cluster_size=1"
    assert explained("rope_append", 1).plan == "append entry_ctas=4 cluster_size=4"
    assert explained("rope_append", 1).kernel == "cuda_rope_append_float16_int8"
    said = explained("append", 1, plan=prompt)
    assert said.plan == prompt.plan and said.why == "forced by plan="
    with pytest.raises(rt.ArgumentError, match=r"append: plan .* cluster_size must be 1 or entry_ctas = 4, got 2"):
        explained("append", 1, plan="append entry_ctas=4 cluster_size=2")
    with pytest.raises(rt.NotSupportedError, match=r"append: plan \"avx2\" is no plan of the GPU kernels"):
        explained("append", 1, plan="avx2")


def test_a_gpu_samples_from_float32():
    assert rt.explain("sample", (4, 1000), dtype="float32", device="sm_90a").kernel == "cuda_float32"


def test_another_op_of_the_same_name_is_refused():
    for op in (torch.nn.functional.linear, torch.nn.functional.rms_norm):
        with pytest.raises(rt.ArgumentError, match="explain: op must be"):
            rt.explain(op, (4, 64), (64, 64))


def test_a_nested_tensor_has_no_shape():
    nested = torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)])
    with pytest.raises(rt.ArgumentTypeError, match="linear: x must be a tensor or a shape"):
        rt.explain("linear", nested, (64, 64))


def test_lists_of_rows_are_numbers():
    cache = rt.KVCache(2, 64, 1, 64, format="int4")
    for rows, says in ((3, "numbers"), ("ab", "an integer"), ([None], "an integer"), ([0, 0.5], "an integer")):
        with pytest.raises(rt.ArgumentTypeError, match=f"decode_attention: rows must be {says}"):
            rt.explain("decode_attention", (2, 8, 64), cache, rows=rows)
    packed = ((4, 8, 64),) * 3
    for begins in (3, ["a", 4]):
        with pytest.raises(rt.ArgumentTypeError, match="prefill_attention: cu_seqlens_q must be"):
            rt.explain("prefill_attention", *packed, cu_seqlens_q=begins, cu_seqlens_k=[0, 4])
    begins = torch.tensor([0, 4], dtype=torch.int32)
    assert "float32" in rt.explain("prefill_attention", *packed, cu_seqlens_q=begins, cu_seqlens_k=[0, 4]).kernel


def test_a_gpu_plan_does_not_run_on_the_cpu():
    x, w = torch.ones(1, 64), torch.ones(8, 64)
    with pytest.raises(rt.NotSupportedError, match=r"linear: plan .* is no CPU variant"):
        rt.linear(x, w, plan=rt.explain("linear", (1, 64), (8, 64), device="sm_90a"))


def test_constants_are_those_of_the_extension():
    assert rt.KV_FORMATS == oracle.KV_FORMATS
    assert _C.kv_kivi_formats == oracle.KIVI_FORMATS and _C.kv_minima_formats == ("int4-kivi",)
    assert _C.kv_element_formats == {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    assert list(_C.kv_code_formats) == [f for f in rt.KV_FORMATS if f not in _C.kv_element_formats]
    assert {f for f, code in _C.kv_code_formats.items() if code == "e4m3"} == {"fp8"}
    assert {f for f, bits in _C.kv_format_bits.items() if bits == 8} == set(oracle.BYTE_FORMATS)
    assert (_C.kv_group, _C.kv_ring, _C.kv_step_back, _C.max_head_dim, _C.w4_tile_rows) == (32, 64, 16, 512, 16)
    assert _C.kv_page_sizes == (16, 32, 64, 128) and _C.w4_group_sizes == (128, 64, 32)
    assert _C.w4_kinds == ("symmetric", "integer", "minima")
    assert _C.activations == ("silu", "gelu", "gelu_tanh")
    assert _C.gated_activations == ("silu_mul", "gelu_mul", "gelu_tanh_mul")
    assert (_C.max_heads, _C.max_vocabulary, _C.max_ndim) == (65536, 2**22, 6)


# ---- on a GPU: every plan at every shape gives what the chosen one gives, in a graph too

LINEAR_PLANS = [
    *(
        f"stream config={c} row_tiles={r} slices_log2={s} splits={splits}"
        for c in (0, 1)
        for r, s in ((1, 0), (1, 3), (2, 2), (3, 1), (8, 0))
        for splits in (1, 2, 3)
    ),
    *(
        f"tma config={c} tma_rows={r} cluster={cl} stages={st}"
        for c in range(4)
        for r, cl, st in ((16, 1, 6), (48, 2, 4), (128, 1, 3), (128, 2, 4))
    ),
    *(f"collective config={c} splits={s}" for c in range(5) for s in (1, 2, 3, 8)),
    "multistage",
]
PACKED_PLANS = [
    *(
        f"stream config={c} splits={s} cluster={cl}"
        for c in range(4)
        for s, cl in ((1, 1), (2, 1), (2, 2), (3, 1), (8, 1))
    ),
    *(
        f"wgmma config={c} splits={s} cluster={cl} m_group={g} stream_k_ranges={ranges} expand_rows={rows}"
        for c in range(3)
        for s, cl, g, ranges, rows in (
            (1, 1, 1, 0, 0),
            (2, 1, 8, 0, 0),
            (4, 2, 2, 0, 0),
            (1, 2, 1, 1, 0),
            (1, 2, 1, 3, 0),
            (1, 1, 1, 5, 0),
            (1, 1, 1, 0, 256),
        )
    ),
]


def fits(call, plan):
    """Whether explain takes the plan; a refusal is a typed error that names the plan."""
    try:
        return rt.explain(*call[0], **call[1], plan=plan)
    except (rt.ArgumentError, rt.NotSupportedError) as e:
        assert "plan" in str(e)
        return None


def check_plans(function, args, options, plans, tolerance):
    """Runs all plans that fit, eagerly and in a graph, against the chosen one; the call refuses the others."""
    expected, ran = function(*args, **options).double(), 0
    call = (function, *args), options
    for plan in plans:
        said = fits(call, plan)
        if said is None:
            with pytest.raises((rt.ArgumentError, rt.NotSupportedError), match="plan"):
                function(*args, **options, plan=plan)
            continue
        ran += 1
        with rt.record_kernels() as names:
            out = function(*args, **options, plan=said)
        assert names == [said.kernel], plan
        error = (out.double() - expected).norm() / expected.norm()
        assert error <= tolerance, f"{plan}: {error}"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = function(*args, **options, plan=plan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, out), plan
    return ran


EPS = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


@GPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(17, 100), (512, 576), (1000, 4096)])
@pytest.mark.parametrize("m", [1, 8, 9, 17, 64, 65, 300])
def test_linear_runs_every_plan(m, n, k, dtype):
    torch.manual_seed(0)
    x, w = (torch.randn(rows, k, device="cuda", dtype=dtype) for rows in (m, n))
    rt.warmup()
    # both results are rounded once from fp32 sums
    ran = check_plans(rt.linear, (x, w), {}, LINEAR_PLANS, 2 * EPS[dtype])
    assert ran >= 5


@GPU
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (512, 640), (1024, 4096)])
@pytest.mark.parametrize("m", [1, 8, 9, 17, 64, 65, 300])
def test_packed_weights_run_every_plan(m, n, k, group, bits):
    torch.manual_seed(0)
    dtype = torch.float16
    weight_type, function = ((rt.W4Weight, rt.w4a16_matmul), (rt.W8Weight, rt.w8a16_matmul))[bits == 8]
    w = weight_type.quantize(torch.randn(n, k, device="cuda", dtype=dtype), group_size=group)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    rt.warmup()
    # results are rounded once; weights of small groups also, on wgmma, each by half a unit at most
    assert check_plans(function, (x, w), {}, PACKED_PLANS, 4 * EPS[dtype]) >= 1


@GPU
@pytest.mark.parametrize("format", ["fp16", "int8", "int4-kivi"])
@pytest.mark.parametrize(("batch", "tokens", "length"), [(1, 1, 100), (1, 4, 2000), (3, 2, 5000), (9, 1, 700)])
def test_decode_runs_every_plan(format, batch, tokens, length):
    torch.manual_seed(0)
    cache = rt.KVCache(batch, length, 2, 128, format=format, dtype="float16", device="cuda")
    k, v = (torch.randn(batch, length, 2, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    cache.append(k, v)
    q = torch.randn(batch, tokens, 8, 128, device="cuda", dtype=torch.float16)
    rt.warmup()
    plans = [
        f"split_kv block_m={b} ctas={c} ctas_per_sm={s} cluster_size={cluster}"
        for b in (8, 16)
        for c, s, cluster in (
            *((c, 1, 1) for c in (1, 2, 3, 7, 16, 64, 131, 200)),
            (2, 2, 1),
            (200, 2, 1),
            *((2 * batch * -(-4 * tokens // b) * size, 1, size) for size in (2, 4, 8)),
        )
    ]
    # a row's bits do not depend on the CTAs; the two variants differ by the rounding of fp16 weights and results
    assert check_plans(rt.decode_attention, (q, cache), {}, plans, 4 * EPS[torch.float16]) >= 6


@GPU
@pytest.mark.parametrize("format", rt.KV_FORMATS[1:])
@pytest.mark.parametrize("op", ["append", "rope_append"])
@pytest.mark.parametrize(("batch", "tokens", "length"), [(1, 1, 31), (3, 1, 100), (2, 33, 40), (1, 300, 0)])
def test_append_runs_every_plan(batch, tokens, length, op, format):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if format == "bf16" else torch.float16

    def randn(tokens, heads):
        return torch.randn(batch, tokens, heads, 64, device="cuda", dtype=dtype)

    old, new, q = (randn(length, 3), randn(length, 3)), (randn(tokens, 3), randn(tokens, 3)), randn(tokens, 6)
    tables = [torch.randn(512, 32, device="cuda", dtype=dtype) for _ in range(2)]
    positions = torch.arange(tokens, device="cuda").expand(batch, tokens)

    def appended(plan, captured=False):
        """Every byte of a cache, and q rotated or None."""
        cache = rt.KVCache(batch, length + tokens, 3, 64, format=format, dtype=dtype, device="cuda")
        cache.append(*old)
        args = (cache, *new) if op == "append" else (q, *new, *tables, positions, cache)
        said = rt.explain(op, *args, plan=plan)
        function = rt.KVCache.append if op == "append" else rt.rope_append

        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                rotated = function(*args, plan=plan)
            graph.replay()
        else:
            with rt.record_kernels() as names:
                rotated = function(*args, plan=plan)
            assert names == [said.kernel], plan
            ran.append(plan)
        torch.cuda.synchronize()
        return state(cache), rotated

    rt.warmup()
    ran = []
    expected, q_out = appended(None)
    clusters = torch.cuda.get_device_capability() == (9, 0)
    for ctas, cluster in [(1, 1), *((n, size) for n in (2, 4, 8) for size in (1, n)), (16, 1), (128, 1)]:
        plan = f"append entry_ctas={ctas} cluster_size={cluster}"
        if cluster > 1 and not clusters:
            with pytest.raises(rt.ArgumentError, match="cluster_size must be 1 to 1"):
                appended(plan)
            continue
        for captured in (False, True):
            got, rotated = appended(plan, captured)
            assert_same(got, expected, plan)
            assert q_out is None or torch.equal(rotated, q_out), plan
    assert len(ran) >= 6


@GPU
def test_a_plan_of_another_size_is_refused_before_a_launch():
    x, w = (
        torch.ones(300, 64, device="cuda", dtype=torch.float16),
        torch.ones(16, 64, device="cuda", dtype=torch.float16),
    )
    plan = rt.explain(rt.linear, x[:1], w, device="sm_80")
    with pytest.raises(rt.ArgumentError, match=r"linear: plan .* does not fit this call: config must be 1"):
        rt.linear(x, w, plan=plan)
    assert math.isclose(rt.linear(x, w)[0, 0].item(), 64)
