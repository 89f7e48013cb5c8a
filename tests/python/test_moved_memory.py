# SPDX-License-Identifier: Apache-2.0
"""Weights, caches and views read their arrays where they are at the call.

Right numbers or a typed error, whatever torch (or NumPy) did to them since the last one.
"""

import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import cases
import numpy as np
import pytest
import rooftile as rt
import torch
import torch.multiprocessing  # teaches ForkingPickler tensors
from kv_caches import contiguous, kv, paged, state, tensors
from moved_memory import SUBJECTS
from rooftile.nn import W4Linear

X = cases.tensor(cases.values((3, 128), "float32", "moved x"), "float32")


def weight(*key, perm=None, numpy=False):
    w = rt.W4Weight.quantize(cases.tensor(cases.values((48, 128), "float32", *key), "float32"), group_size=32)
    parts = w.unpack()
    if numpy:
        parts = [None if part is None else part.numpy() for part in parts]
    return rt.W4Weight.from_canonical(*parts, perm=perm)


WEIGHTS = [name for name in SUBJECTS if name.startswith("W")]
VIEWS = [name for name in SUBJECTS if name.startswith("view")]


@pytest.mark.parametrize(
    "arguments, least",
    [(WEIGHTS, 100), (VIEWS, 100), (["--no-table", "W8Weight", "view-int8"], 50)],
    ids=["weights", "views", "no exchange table"],
)
def test_every_array_moved_in_every_way(arguments, least):
    script = Path(__file__).with_name("moved_memory.py")
    child = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert child.returncode == 0, f"{child.returncode}: {child.stderr[-2000:]}"
    assert int(child.stdout) >= least


@pytest.mark.parametrize("move", [lambda m: m.share_memory(), ForkingPickler.dumps, lambda m: m.to(torch.float64)])
def test_a_module_after_its_memory_went_elsewhere(move):
    """Sending a module to another process moves the sender's memory."""
    module, other = (W4Linear.from_weight(weight(key, perm=torch.randperm(128).int())) for key in "ab")
    assert not torch.equal(module(X), other(X))
    move(module)
    for name, array in module.state_dict().items():
        if name in ("codes", "scales", "perm"):
            array.copy_(other.state_dict()[name])
    assert torch.equal(module(X), other(X))


def test_a_module_lets_go_of_arrays_that_it_replaced():
    module = W4Linear.from_weight(weight("free"))
    module(X)
    held = torch.multiprocessing.reductions.StorageWeakRef(module.codes.untyped_storage())
    module.to("meta")
    assert held.expired()


# ---------------------------------------------------------------- act-order


def test_the_callers_perm_is_copied():
    perm = torch.randperm(128, dtype=torch.int32)
    w = weight("perm", perm=perm)
    expected = rt.w4a16_matmul(X, w)
    perm.fill_(10**6)
    assert torch.equal(rt.w4a16_matmul(X, w), expected)
    perm = np.arange(128, dtype=np.int32)[::-1].copy()
    w = weight("perm", perm=perm, numpy=True)
    expected = rt.w4a16_matmul(X.numpy(), w)
    perm[:] = -1
    np.testing.assert_array_equal(rt.w4a16_matmul(X.numpy(), w), expected)


def load(module, perm):
    module.load_state_dict(module.state_dict() | {"perm": perm})


def copy(module, perm):
    module.perm.copy_(perm)


def unseen(module, perm):
    module.perm.data[:] = perm  # torch does not count it as a change


@pytest.mark.parametrize("change", [load, copy, unseen])
@pytest.mark.parametrize("bad", [2**31 - 1, -(2**31), 128, -1, "twice"])
def test_a_changed_perm_is_checked(change, bad):
    module = W4Linear.from_weight(weight("order", perm=torch.randperm(128).int()))
    expected = module(X)
    good = module.perm.clone()
    perm = good.clone()
    perm[77] = perm[78] if bad == "twice" else bad
    change(module, perm)
    if bad == "twice" and change is unseen:
        return  # inside the row: each product reads the column that it is told
    for call in (lambda: module(X), lambda: module.weight.dequantize()):
        with pytest.raises(rt.ArgumentError, match="perm"):
            call()
    change(module, good)
    assert torch.equal(module(X), expected)


def test_a_changed_numpy_perm_is_checked():
    w = weight("order", perm=np.arange(128, dtype=np.int32), numpy=True)
    w.perm[5] = 1 << 30
    with pytest.raises(rt.ArgumentError, match=r"w4a16_matmul: perm\[5\] = 1073741824 is outside \[0, 128\)"):
        rt.w4a16_matmul(X.numpy(), w)


def test_inference_tensors_count_no_changes():
    with torch.inference_mode():
        w = weight("inference", perm=torch.randperm(128).int())
        expected = rt.w4a16_matmul(X, w)
        assert torch.equal(rt.w4a16_matmul(X, w), expected)
        w.perm[3] = 500
        with pytest.raises(rt.ArgumentError, match="perm"):
            rt.w4a16_matmul(X, w)


# ---------------------------------------------------------------- NumPy


def test_numpy_arrays_that_were_resized():
    w = weight("numpy", numpy=True)
    expected = rt.w4a16_matmul(X.numpy(), w)
    saved = w.codes.copy()
    for size in (0, 16, saved.size - 16, saved.size + 1 << 16):
        w.codes.resize(size, refcheck=False)
        with pytest.raises(rt.ArgumentError, match="w4a16_matmul: codes"):
            rt.w4a16_matmul(X.numpy(), w)
    w.codes.resize(saved.size, refcheck=False)
    w.codes[:] = saved
    np.testing.assert_array_equal(rt.w4a16_matmul(X.numpy(), w), expected)


# ---------------------------------------------------------------- caches of their own memory


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("format, dtype", [("int4-kivi", "float32"), ("fp16", "float16")])
def test_a_cache_whose_lengths_and_table_moved(make, format, dtype):
    k, v = tensors(*kv(100, 2, 32, dtype, "moved", batch=2), dtype)
    caches = [make(format, dtype, 2, 32, rows=2, capacity=128) for _ in range(2)]
    for i, cache in enumerate(caches):
        cache.append(k[:, :30], v[:, :30])
        if i:
            cache.seq_lens.share_memory_()
            if make is paged:
                cache.block_table.share_memory_()
        cache.append(k[:, 30:60], v[:, 30:60])
        cache.fork(0, 1)
        cache.append(k[:, 60:], v[:, 60:])
        cache.truncate([1], [96])
        cache.reorder([1, 0])
    for name, bytes in state(caches[0]).items():
        np.testing.assert_array_equal(bytes, state(caches[1])[name], err_msg=name)
    assert caches[0].lengths == caches[1].lengths == [96, 100]


MOVES = {
    "data": lambda pool, new: setattr(pool, "data", new),
    "set_": lambda pool, new: pool.set_(new),
    "share_memory_": lambda pool, new: pool.share_memory_().copy_(new),
    "resize_": lambda pool, new: (pool.untyped_storage().resize_(2 * pool.nbytes), pool.copy_(new)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("layout, pair", [("NHD", False), ("HND", False), ("HND", True)])
def test_a_compiled_view_follows_its_pool(move, layout, pair):
    """An element format, of which K and V are views of the pool: the graph attends and appends to the pool as it is."""
    shape = (4, 32, 2, 16) if layout == "NHD" else (4, 2, 32, 16)
    pool = [torch.zeros(shape) for _ in range(2)] if pair else torch.zeros(4, 2, *shape[1:])
    table, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([40], dtype=torch.int32)

    def view():
        return rt.PagedKVCache.view(pool, table, lengths, format="fp32", layout=layout)

    old = view()
    k, q = cases.tensor(cases.values((1, 1, 2, 16), "float32", "follows"), "float32"), torch.ones(1, 2, 16)
    torch._dynamo.reset()
    attend = torch.compile(lambda q: rt.decode_attention(q, old), fullgraph=True, backend="aot_eager")
    append = torch.compile(lambda k: old.append(k, k), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(attend(q), rt.decode_attention(q, old))
        append(k)
        for i, side in enumerate(pool if pair else [pool]):
            MOVES[move](side, cases.tensor(cases.values(tuple(side.shape), "float32", "new pool", i), "float32"))
        assert torch.equal(attend(q), rt.decode_attention(q, view()))
        append(k)
        assert lengths.tolist() == [42]
        keys, values = view().dequantize(0)
        assert torch.equal(keys[41], k[0, 0]) and torch.equal(values[41], k[0, 0])


def arrays_within_reach(thing):
    """What its attributes give without an underscore, and what calls without arguments return."""
    for name in dir(thing):
        if not name.startswith("_") and name != "reset":
            value = getattr(thing, name)
            try:
                value = value() if callable(value) else value
            except (TypeError, NotImplementedError):  # it takes arguments
                continue
            parts = list(value.values()) if isinstance(value, dict) else value
            yield from ((name, x) for x in (parts if isinstance(parts, (list, tuple)) else [parts]))


@pytest.mark.parametrize("format, dtype", [("int4-kivi", "float32"), ("fp16", "float16"), ("int8", "float32")])
@pytest.mark.parametrize("make", [contiguous, paged])
def test_nobody_reaches_what_a_cache_does_not_watch(make, format, dtype):
    """Of its own memory a cache asks lengths and table, no more: all other arrays that it gives away are copies."""
    cache = make(format, dtype, 2, 32)
    cache.append(*tensors(*kv(40, 2, 32, dtype, "reach"), dtype))
    watched = [cache._arrays[name] for name in cache._shared]
    own = {x.untyped_storage().data_ptr() for x in [*cache._arrays.values(), *cache._page_state]}
    found = [(name, x) for name, x in arrays_within_reach(cache) if isinstance(x, (torch.Tensor, np.ndarray))]
    assert {"seq_lens", "dequantize"} <= {name for name, _ in found}
    for name, x in found:
        memory = torch.as_tensor(x).untyped_storage().data_ptr()
        assert any(x is array for array in watched) or memory not in own, name


def test_a_paged_cache_whose_lengths_are_gone():
    cache = paged("int8", "float32", 2, 32)
    k, v = tensors(*kv(8, 2, 32, "float32", "gone"), "float32")
    cache.append(k, v)
    cache.seq_lens.resize_(0)
    for call in (
        lambda: cache.append(k, v),
        lambda: cache.lengths,
        lambda: cache.dump(0),
        lambda: cache.truncate([0], [1]),
    ):
        with pytest.raises(rt.ArgumentError, match=r"seq_lens must be \[max_rows\]"):
            call()
    cache.seq_lens.resize_(1)
    cache.append(k, v)
    assert cache.lengths == [16]


class Frees:
    """A foreign array that frees memory while it is read."""

    def __init__(self, array, of):
        self.array, self.of = array, of

    shape = property(lambda self: tuple(self.array.shape))
    dtype = property(lambda self: self.array.dtype)

    def __dlpack__(self, **options):
        self.of.untyped_storage().resize_(0)
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_an_argument_that_frees_the_weight():
    w = rt.W4Weight.quantize(torch.randn(64, 256), group_size=64)
    with pytest.raises(rt.ArgumentError, match="codes"):
        rt.w4a16_matmul(torch.randn(2, 256), w, bias=Frees(torch.randn(64), w.codes))


@pytest.mark.parametrize("array", ["pool", "block_table", "lengths"])
def test_an_argument_that_frees_the_cache(array):
    arrays, _, make, _ = SUBJECTS["view-int8"]()
    arrays = {name: a.clone() for name, a in arrays.items()}  # of memory that can be given back
    cache = make(**arrays)
    k = torch.randn(2, 1, 2, 32).half()
    cache.append(k, k)
    with pytest.raises(rt.ArgumentError, match=r"append: (seq_lens|block_table|pool) has no memory behind it"):
        cache.append(Frees(k, arrays[array]), k)
