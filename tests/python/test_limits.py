# SPDX-License-Identifier: Apache-2.0
"""Sizes, addresses and processes at the edge of what a call takes: named or right, never a flood of memory."""

import ctypes
import resource
import subprocess
import sys

import numpy as np
import pytest
import rooftile as rt
from rooftile import _C

MANY = 2**33  # more sequences than a call takes; without a token no memory is behind them


def python(code):
    """Its output, from a process of its own that must end."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_size_is_counted_like_the_others():
    x = np.broadcast_to(np.float32(1), (2**31, 1))
    with pytest.raises(rt.ArgumentError, match=r"^softmax: x must have sizes of at most 2147483647, got float32\[2147"):
        rt.softmax(x, out=np.empty((1, 1), np.float32))


# ---------------------------------------------------------------- interleaved memory


@pytest.mark.parametrize("rows", (3, 10002, 300001))
def test_a_long_view_into_its_own_rows(rows):
    """in and out interleave without meeting, however many rows there are."""
    x = np.random.default_rng(0).standard_normal((rows, 4), np.float32)
    expected = rt.silu_mul(x.copy())
    np.testing.assert_array_equal(rt.silu_mul(x, out=x[:, :2]), expected)
    with pytest.raises(rt.ArgumentError, match=r"share memory|overlap"):
        rt.silu_mul(x, out=x[:, 1:3])


def test_rope_of_a_long_fused_projection():
    tokens, dim = 11000, 4
    qkv = np.random.default_rng(1).standard_normal((tokens, 4, dim), np.float32)
    cos = sin = np.full((1, dim // 2), 0.5, np.float32)
    positions = np.zeros(tokens, np.int32)
    q, k, v = qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]
    expected, values = rt.rope(q.copy(), k.copy(), cos, sin, positions), v.copy()
    got = rt.rope(q, k, cos, sin, positions, q_out=q, k_out=k)
    for ours, right in zip((*got, v), (*expected, values), strict=True):
        np.testing.assert_array_equal(ours, right)


# ---------------------------------------------------------------- more sequences than there can be


def test_prefill_of_too_many_sequences():
    q, k = np.empty((MANY, 0, 8, 64), np.float32), np.empty((MANY, 0, 2, 64), np.float32)
    for options in ({}, {"counts": np.broadcast_to(np.int32(0), MANY)}):
        with pytest.raises(rt.ArgumentError, match=r"^prefill_attention: q .*at most"):
            rt.prefill_attention(q, k, k, **options)


@pytest.mark.parametrize("name", ("rows", "counts"))
def test_decode_of_too_many_sequences(name):
    cache = rt.KVCache(1, 64, 2, 64, format="fp32")
    q, zeros = np.empty((MANY, 0, 8, 64), np.float32), np.broadcast_to(np.int32(0), MANY)
    with pytest.raises(rt.ArgumentError, match=r"^decode_attention: q .*at most"):
        rt.decode_attention(q, cache, **{"rows": zeros, name: zeros})


def test_append_of_too_many_sequences():
    cache = rt.KVCache(1, 64, 2, 64, format="fp32")
    k, zeros = np.empty((MANY, 0, 2, 64), np.float32), np.broadcast_to(np.int32(0), MANY)
    for options in ({"rows": zeros}, {"rows": zeros, "counts": zeros}, {"counts": zeros}):
        with pytest.raises(rt.ArgumentError, match=r"^append: k "):
            cache.append(k, k, **options)
    assert cache.lengths == [0]


def test_many_short_sequences_beside_a_long_one():
    """Work grows with the tokens there are, not with the longest sequence times the number of sequences."""
    short, long, heads = 100_000, 20_000, 96
    begins = np.append(np.arange(short + 1), short + long).astype(np.int32)
    q = np.ones((short + long, heads, 1), np.float32)
    k = np.arange(short + long, dtype=np.float32)[:, None, None]
    out = rt.prefill_attention(q, k, k, cu_seqlens_q=begins, cu_seqlens_k=begins, window=1)
    np.testing.assert_array_equal(out, np.broadcast_to(k, out.shape))


# ---------------------------------------------------------------- sizes past what offsets count


@pytest.mark.parametrize("n, k", ((2**31, 32), (2**62, 32), (2**63 - 1, 2), (16, 2**31), (16, 2**62)))
def test_a_weight_past_31_bits(n, k):
    empty = np.empty(0, np.uint8)
    with pytest.raises(rt.ArgumentError, match=r"^W4Weight: shape .*2\*\*31"):
        rt.W4Weight(empty, empty, None, shape=(n, k), group_size=32, kind="symmetric", scale_dtype="float16")


@pytest.mark.parametrize("head_dim", (513, 2**31 - 32, 2**31 - 1))
def test_a_cache_of_a_vast_head_dim(head_dim):
    with pytest.raises(rt.NotSupportedError, match=f"^KVCache: head_dim .*1 to 512.*got {head_dim}"):
        _C.kv_block_bytes("int8", 64, head_dim)
    for format in ("fp32", "int8"):
        with pytest.raises(rt.NotSupportedError, match=r"^KVCache: head_dim"):
            rt.KVCache(0, 0, 1, head_dim, format=format)


# ---------------------------------------------------------------- where arrays must lie


def element_cache(k_pool, v_pool):
    return _C.KvCache(
        "fp32", "float32", 16, 8, 1, 1, 2, None, k_pool, v_pool, None, np.zeros(1, np.int32), None, None, None
    )


def test_the_pools_of_a_cache_lie_apart():
    room = np.zeros((2, 16, 1, 24), np.float32)
    element_cache(room[..., :8], room[..., 8:16])
    for v_pool in (room[..., :8], room[..., 7:15]):
        with pytest.raises(rt.ArgumentError, match=r"^KVCache: v_pool must not share memory with k_pool"):
            element_cache(room[..., :8], v_pool)


class OnGpu:
    """An array that says it lies on a GPU: enough for what is checked before memory is touched."""

    class Managed(ctypes.Structure):  # DLManagedTensor
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("device", ctypes.c_int32 * 2),
            ("ndim", ctypes.c_int32),
            ("dtype", ctypes.c_uint8 * 4),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.c_void_p),
            ("byte_offset", ctypes.c_uint64),
            ("manager", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )

    def __init__(self, array):
        self.array, self.shape = array, (ctypes.c_int64 * array.ndim)(*array.shape)
        dtype = (ctypes.c_uint8 * 4)("iuf".index(array.dtype.kind), 8 * array.itemsize, 1, 0)
        self.managed = self.Managed(array.ctypes.data, (2, 0), array.ndim, dtype, self.shape)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.managed), b"dltensor", None)


def test_what_the_host_writes_lies_on_the_host():
    cache = rt.KVCache(1, 64, 1, 8, format="int8")._handle
    here, there = (kind(np.zeros((0, 1, 8), np.float32)) for kind in (np.asarray, OnGpu))
    codes, codes_there = (kind(np.zeros((0, 1, 8), np.int8)) for kind in (np.asarray, OnGpu))
    for name, call in (
        ("out_k", lambda: _C.kv_dequantize("dequantize", cache, 0, 0, there, here)),
        ("out_v", lambda: _C.kv_dequantize("dequantize", cache, 0, 0, here, there)),
        ("out_k", lambda: _C.kv_dump_codes(cache, 0, codes_there, codes)),
        ("out_v", lambda: _C.kv_dump_codes(cache, 0, codes, codes_there)),
        ("out", lambda: _C.kv_dump_scales(cache, 0, 0, 0, OnGpu(np.zeros((0, 1, 1), np.float32)))),
    ):
        with pytest.raises(rt.ArgumentError, match=f"^[a-z]+: {name} must be on the host"):
            call()


def test_a_cache_on_a_gpu_needs_where_to_put_its_faults():
    pool = OnGpu(np.zeros((1, 1, _C.kv_block_bytes("int8", 16, 32)), np.uint8))
    arrays = (pool, None, None, None, OnGpu(np.zeros(1, np.int32)), None, None, None)
    with pytest.raises(rt.ArgumentTypeError, match=r"^KVCache: fault must be given for a cache on cuda:0"):
        _C.KvCache("int8", "float16", 16, 32, 1, 1, 1, *arrays)


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("imports", ("", "import torch"), ids=("own threads", "torch"))
def test_a_forked_child_goes_on(imports):
    if imports:
        pytest.importorskip("torch")
    python(f"""
import os, signal
import numpy as np
{imports}
import rooftile as rt
x = np.ones((64, 4096), np.float32)
before = rt.softmax(x)
child = os.fork()
if child == 0:
    signal.alarm(30)   # ends a child that waits for threads it does not have
    os._exit(0 if (rt.softmax(x) == before).all() else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert (rt.softmax(x) == before).all()
""")


def test_a_forked_child_exits():
    """As Python ends, with destructors: the threads that wait for work are the parent's."""
    python("""
import os, signal, sys
import numpy as np
import rooftile as rt
x = np.ones((64, 4096), np.float32)
before = rt.softmax(x)
assert len(os.listdir("/proc/self/task")) > 1 or os.cpu_count() == 1
child = os.fork()
if child == 0:
    signal.alarm(30)
    assert (rt.softmax(x) == before).all()
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
""")


def test_a_forked_child_imports_rooftile_after_torch_was_used():
    """Torch's OpenMP has threads in the parent, where nothing of rooftile is."""
    pytest.importorskip("torch")
    python("""
import os, signal, sys
import numpy as np
import torch
torch.ones(3_000_000).exp_()
child = os.fork()
if child == 0:
    signal.alarm(30)
    import rooftile as rt
    assert (rt.softmax(np.ones((64, 4096), np.float32)) == np.float32(1 / 4096)).all()
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
""")


def test_threads_that_cannot_be_made_are_done_without():
    python(f"""
import resource
import numpy as np
import rooftile as rt
x = np.ones((64, 4096), np.float32)
with open("/proc/self/statm") as f:
    used = int(f.read().split()[0]) * {resource.getpagesize()}
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20),) * 2)   # no room for a stack of 8 MB
assert rt._C.parallel_backend() == "rooftile"
out = rt.softmax(x)
assert (out == np.float32(1 / 4096)).all()
""")
