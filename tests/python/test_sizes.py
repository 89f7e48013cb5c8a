# SPDX-License-Identifier: Apache-2.0
"""Sizes and strides that no memory has: a typed error, or the right result where there is no element; never a crash.

Tensors cost no memory: they are expanded, or have no element, or their memory is reserved and never touched. A crash
would take the tests with it, so ops are walked in a process of their own.
"""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import ops
import pytest
import rooftile as rt
import torch

GIANT = (2**16, 2**30, 2**31, 2**32 + 1, 2**61, 2**63 - 1)


def _resized(t, sizes):
    """A tensor like t whose dimensions of a size in `sizes` have the size that it is mapped to; stride 0, or empty."""
    shape = [sizes.get(n, n) for n in t.shape]
    return t.reshape(-1)[:1].clone().as_strided(shape, [0] * t.ndim) if 0 not in shape else t.new_empty(shape)


def walk(op):
    """Replaces every size of the good call by every giant one in all tensors at once: with outputs to be made, for
    which there is no memory, and with outputs without an element, another size being 0. Returns the number of calls."""
    good = op.call()
    tensors = {n: t for n, t in good.kwargs.items() if n in op.tensors() and t is not None}
    sizes = sorted({n for t in tensors.values() for n in t.shape})
    tried = 0
    for size in sizes:
        for giant in GIANT:
            for none in (None, *(s for s in sizes if s != size)):
                try:
                    resized = {n: _resized(t, {size: giant, none: 0}) for n, t in tensors.items()}
                except RuntimeError:  # torch itself refuses it
                    continue
                outputs = {n: resized[n] for n in op.tensors(written=True) if n in resized}
                if none is None:
                    if giant < 2**61 or not all(giant in t.shape for t in outputs.values()):
                        continue  # there may be the memory, and the time
                    resized |= dict.fromkeys(outputs)
                tried += 1
                begun = time.monotonic()
                try:
                    op.function(**{**good.kwargs, **resized})
                except rt.RooftileError as e:
                    assert str(e).startswith(f"{op.name}: "), e
                assert time.monotonic() - begun < 10, (op.id, size, giant, none)
    return tried


def in_a_child(code):
    """Runs Python code beside the tests. Its output; an assertion error where it fails or dies of a signal."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-500:]}{done.stderr[-3000:]}"
    return done.stdout


def test_giant_sizes_of_every_op():
    # of the checks a case's kind or format changes nothing; prefill's cases differ in their arguments
    first = {op.name: op.id for op in reversed(ops.OPS)}
    walked = [op.id for op in ops.OPS if op.tensors() and (op.id == first[op.name] or op.name == "prefill_attention")]
    code = (
        "import ops, test_sizes\n"
        "table = {op.id: op for op in ops.OPS}\n"
        f"for name in {walked!r}:\n"
        "    print(name, test_sizes.walk(table[name]), flush=True)\n"
    )
    lines = in_a_child(code).splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == walked
    assert all(int(line.rpartition(" ")[2]) > 0 for line in lines), lines


def reserved(shape, dtype):
    """A tensor in address space that no memory is behind until it is touched."""
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


def merge_wide(dim):
    """A merge of one row of `dim` channels, of which the last ones are looked at."""
    out_a, out_b = (torch.full((1,), x, dtype=torch.bfloat16).expand(1, 1, dim) for x in (1.0, 3.0))
    out = reserved((1, 1, dim), torch.bfloat16)
    got, lse = rt.merge_attention(out_a, torch.zeros(1, 1), out_b, torch.zeros(1, 1), out=out)
    assert got is out and (out[..., -5:] == 2.0).all() and (out[..., 510:520] == 2.0).all()
    assert lse.item() == pytest.approx(np.log(2.0))


@pytest.mark.parametrize("dim", [511, 512, 513, 1029])
def test_merge_of_any_head_dim(dim):
    merge_wide(dim)


def test_merge_of_a_giant_head_dim():
    """Three times 2^30 channels were once counted in 32 bits. More than those are refused before they are touched."""
    in_a_child(
        "import torch, rooftile as rt, test_sizes\n"
        "out = test_sizes.reserved((1, 1, 2**31 + 64), torch.bfloat16)\n"
        "wide, lse = torch.ones(1, dtype=torch.bfloat16).expand(out.shape), torch.zeros(1, 1)\n"
        "try:\n"
        "    rt.merge_attention(wide, lse, wide, lse, out=out)\n"
        "except rt.ArgumentError as e:\n"
        "    assert 'merge_attention: out_a must have sizes of at most' in str(e), e\n"
        "else:\n"
        "    raise AssertionError('accepted')\n"
        "test_sizes.merge_wide(2**24 + 3)\n"
    )


# --------------------------------------------------------------------------- what a producer may say


def says(shape, strides):
    """An array of 64 floats whose producer says any shape and strides."""
    return np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), shape, [4 * stride for stride in strides])


@pytest.mark.parametrize("stride", [2**60, -(2**60), 2**58, 2**55])
@pytest.mark.parametrize("name", ["x", "out"])
def test_strides_that_lead_out_of_memory(name, stride):
    x = np.ones((3, 8), np.float32)
    wild = says((3, 8), (stride, 1))
    with pytest.raises(rt.ArgumentError, match=f"rms_norm: {name} has strides that lead out of any memory"):
        rt.rms_norm(**{"x": x, "out": np.empty_like(x), name: wild})


def test_strides_of_no_element_and_of_one_mean_nothing():
    for shape in ((0, 8), (8, 0, 8), (0, 2**30, 8)):
        empty = says(shape, [2**58 + 1] * len(shape))
        assert rt.rms_norm(empty, out=np.empty(shape, np.float32)).shape == shape
    one = says((1, 8), (2**60, 1))
    one[...] = 2.0
    assert rt.rms_norm(one).tolist() == rt.rms_norm(np.full((1, 8), 2.0, np.float32)).tolist()


def test_wild_lengths_of_a_view_are_refused_before_memory_is_made():
    pool = torch.zeros(4, 2, 32, 2, 8)
    lengths = torch.zeros(2, dtype=torch.int32)
    view = rt.PagedKVCache.view(pool, torch.zeros(2, 2, dtype=torch.int32), lengths, format="fp32")
    for length in (2**31 - 1, 65, -1, -(2**31)):
        lengths[1] = length
        for call in (
            lambda: view.dump(1),
            lambda: view.dequantize(1),
            lambda: view.dequantize(),
            lambda: view.dequantize(1, at=2**31 - 2),
        ):
            with pytest.raises(rt.ArgumentError, match=rf"cache lengths\[1\] must lie in \[0, 64\], got {length}"):
                call()


# --------------------------------------------------------------------------- outputs that cannot be made


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_an_output_that_cannot_be_allocated_is_named(framework):
    x = torch.ones(1).expand(2**22, 2**30)
    if framework == "numpy":
        x = np.broadcast_to(np.float32(1), x.shape)
    with pytest.raises(rt.OutOfMemoryError, match="softmax: no memory for out, float32") as caught:
        rt.softmax(x)
    assert isinstance(caught.value, MemoryError | rt.DeviceError) and caught.value.__cause__ is not None


def test_an_output_of_prefill_attention_that_cannot_be_allocated_is_named():
    q, k = (torch.ones(1, 1, 1, 1).expand(1, n, 2**16, 2**8) for n in (2**22, 1))  # more than 47 bits address
    with pytest.raises(rt.OutOfMemoryError, match="prefill_attention: no memory for out, float32"):
        rt.prefill_attention(q, k, k)


def test_a_cache_that_cannot_be_allocated_is_named():
    with pytest.raises(rt.OutOfMemoryError, match="KVCache: no memory on cpu"):
        rt.KVCache(2**20, 2**20, 64, 512, format="fp16")
