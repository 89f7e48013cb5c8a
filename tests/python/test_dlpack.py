# SPDX-License-Identifier: Apache-2.0
"""What an array argument may be, and what is refused: every framework, every view, every stand-in without memory.

rms_norm stands for all ops: they share one conversion (python/src/tensor_caster.cpp). A refused call names the
argument, and the next good call is right.
"""

import collections
import ctypes
import gc
import os
import resource

import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from closeness import assert_bits_equal, assert_close, to_numpy64

ERRORS = (rt.ArgumentError, rt.ArgumentTypeError)
X = cases.tensor(cases.values((3, 40), "float32", "x"), "float32")
W = cases.tensor(cases.values((40,), "float32", "w"), "float32")
EXPECTED = rt.rms_norm(X, W)


def check_good_call():
    assert_bits_equal(rt.rms_norm(X, W), EXPECTED)


def check_refused(bad, error=ERRORS, match="", arguments=("x", "weight", "out")):
    for argument in arguments:
        with pytest.raises(error, match=f"rms_norm: {argument} .*{match}"):
            rt.rms_norm(**{"x": X, "weight": W, "out": torch.empty_like(X), argument: bad})
        check_good_call()


# ---------------------------------------------------------------- what is no array


@pytest.mark.parametrize(
    "bad", [[1.0, 2.0], (1.0,), 1, 1.5, "x", b"x", {}, object(), torch.float32, np.float32, torch, X.shape, range(3)]
)
def test_what_is_no_array_is_refused(bad):
    check_refused(bad, rt.ArgumentTypeError, "must be an array that speaks DLPack")


def test_none_is_refused_where_a_tensor_is_needed():
    with pytest.raises(rt.ArgumentTypeError, match="rms_norm: x "):
        rt.rms_norm(None, W)
    check_good_call()


@pytest.mark.parametrize("dtype", ["float64", "bool", "complex64", "int16", "uint16", "float8_e5m2"])
def test_unknown_dtypes_are_refused_by_name(dtype):
    check_refused(torch.zeros(3, 40).to(getattr(torch, dtype)), rt.ArgumentTypeError, "dtype")


@pytest.mark.parametrize(
    "dtype", ["float64", "bool", "complex64", "int16", ">f4", "U4", "O", "datetime64[s]", "longdouble"]
)
def test_unknown_numpy_dtypes_are_refused(dtype):
    with np.errstate(all="ignore"):
        bad = np.zeros((3, 40), dtype)
    check_refused(bad, rt.ArgumentTypeError)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8"])
def test_integers_are_refused_where_floats_are_needed(dtype):
    check_refused(torch.zeros(3, 40, dtype=getattr(torch, dtype)), rt.ArgumentTypeError, "", ("x", "out"))
    check_refused(torch.zeros(40, dtype=getattr(torch, dtype)), rt.ArgumentTypeError, dtype, ("weight",))


# ---------------------------------------------------------------- torch tensors without memory of their own kind


def test_fake_tensors_are_refused():
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    check_refused(fake, rt.ArgumentTypeError, "is a FakeTensor")


def test_subclasses_are_refused():
    class Mine(torch.Tensor):
        pass

    check_refused(X.as_subclass(Mine), rt.ArgumentTypeError, "is a Mine")


def test_dtensor_is_refused(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        distributed = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Replicate()])
        check_refused(distributed, rt.ArgumentTypeError, "is a DTensor")
    finally:
        torch.distributed.destroy_process_group()


def test_meta_and_sparse_tensors_are_refused():
    check_refused(torch.empty(3, 40, device="meta"))
    check_refused(X.to_sparse())
    check_refused(X.to_sparse_csr())
    check_refused(torch.empty(3, 40, device="meta").as_subclass(torch.nn.Parameter))


def test_tensors_inside_vmap_and_functional_transforms_are_refused():
    with pytest.raises(ERRORS, match="rms_norm: x"):
        torch.vmap(lambda row: rt.rms_norm(row, W))(X)
    with pytest.raises(ERRORS, match="rms_norm: x"):
        torch.func.grad(lambda x: rt.rms_norm(x, W).sum())(X)
    check_good_call()


def test_freed_storage_is_refused():
    freed = X.clone()
    freed.untyped_storage().resize_(0)
    check_refused(freed, rt.ArgumentError, "no memory")


# ---------------------------------------------------------------- torch views and flags


def test_what_requires_grad_is_refused_while_gradients_are_recorded():
    check_refused(X.clone().requires_grad_(), rt.ArgumentError, "requires grad.*no_grad")
    parameter = torch.nn.Parameter(W.clone())
    check_refused(parameter, rt.ArgumentError, "requires grad", ("weight",))
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert_bits_equal(rt.rms_norm(X.clone().requires_grad_(), parameter), EXPECTED)
    assert_bits_equal(rt.rms_norm(X, torch.nn.Parameter(W.clone(), requires_grad=False)), EXPECTED)
    assert not rt.rms_norm(X, W).requires_grad


def test_inference_tensors_are_taken():
    with torch.inference_mode():
        x = X.clone()
    assert_bits_equal(rt.rms_norm(x, W), EXPECTED)


def test_conjugated_and_negated_views_are_refused():
    pairs = torch.complex(X, X)
    check_refused(pairs.conj(), rt.ArgumentTypeError, "complex")
    negated = pairs.conj().imag
    assert negated.is_neg()
    check_refused(negated, rt.ArgumentError, "resolve_neg")
    check_refused(torch._neg_view(X), rt.ArgumentError, "resolve_neg")
    assert_bits_equal(rt.rms_norm(negated.resolve_neg(), W), rt.rms_norm(-X, W))


@pytest.mark.parametrize("offset", [1, 3, 5])
def test_views_that_start_inside_their_storage(offset, dtype):
    x, w = X.to(cases.torch_dtype(dtype)), W.to(cases.torch_dtype(dtype))
    buffer = torch.zeros(offset + x.numel() + 2, dtype=x.dtype)
    view = buffer[offset : offset + x.numel()].view(x.shape)
    view.copy_(x)
    w_buffer = torch.cat([torch.zeros(offset, dtype=w.dtype), w])
    expected = rt.rms_norm(x, w)
    assert_bits_equal(rt.rms_norm(view, w_buffer[offset:]), expected)
    rt.rms_norm(view, w_buffer[offset:], out=view)
    assert_bits_equal(view, expected)
    assert (buffer[:offset] == 0).all() and (buffer[-2:] == 0).all()


def test_dimensions():
    check_refused(torch.zeros(1, 1, 1, 1, 1, 3, 40), rt.ArgumentError, "7 dimensions")
    check_refused(torch.tensor(1.0), rt.ArgumentError, "")
    assert_bits_equal(rt.rms_norm(X.view(1, 1, 1, 1, 3, 40), W).view(3, 40), EXPECTED)
    assert_bits_equal(rt.rms_norm(X[0], W), EXPECTED[0])


def test_expanded_tensors_are_read_but_not_written():
    assert_bits_equal(rt.rms_norm(X[:1].expand(5, 40), W), EXPECTED[:1].expand(5, 40).contiguous())
    with pytest.raises(rt.ArgumentError, match="out"):
        rt.rms_norm(X, W, out=X[:1].clone().expand(3, 40))
    check_good_call()


# ---------------------------------------------------------------- NumPy


def numpy_case(dtype):
    x, w = cases.values((3, 40), dtype, "x"), cases.values((40,), dtype, "w")
    return (
        cases.numpy_array(x, dtype),
        cases.numpy_array(w, dtype),
        rt.rms_norm(cases.tensor(x, dtype), cases.tensor(w, dtype)),
    )


def test_numpy_in_numpy_out(dtype):
    x, w, expected = numpy_case(dtype)
    y = rt.rms_norm(x, w)
    assert type(y) is np.ndarray and y.dtype == x.dtype
    assert_bits_equal(torch.from_numpy(y.view(np.uint8)), expected.view(torch.uint8))
    out = np.zeros_like(x)
    assert rt.rms_norm(x, w, out=out) is out
    assert (out.view(np.uint8) == y.view(np.uint8)).all()


def test_numpy_views(dtype):
    x, w, expected = numpy_case(dtype)
    backwards = np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    assert backwards.strides[0] < 0 and backwards.strides[1] < 0
    shifted = np.frombuffer(b"\0\0\0\0" + x.tobytes(), np.uint8)[4:].view(x.dtype).reshape(x.shape)
    for view in (backwards, np.asfortranarray(x), np.repeat(x, 3, axis=1)[:, 1::3], shifted):
        y = rt.rms_norm(view, w)
        assert (y.view(np.uint8) == expected.view(torch.uint8).numpy()).all()
    out = np.zeros_like(x)
    rt.rms_norm(x, w, out=out[::-1, ::-1])
    assert (np.ascontiguousarray(out[::-1, ::-1]).view(np.uint8) == expected.view(torch.uint8).numpy()).all()


def test_read_only_numpy_is_read_but_not_written(dtype):
    x, w, expected = numpy_case(dtype)
    x.flags.writeable = w.flags.writeable = False
    y = rt.rms_norm(x, w)
    assert (y.view(np.uint8) == expected.view(torch.uint8).numpy()).all()
    before = x.tobytes()
    with pytest.raises(rt.ArgumentError, match="rms_norm: out is read-only"):
        rt.rms_norm(np.array(x), w, out=x)
    assert x.tobytes() == before


def test_numpy_oddities_are_refused():
    x = X.numpy()
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    check_refused(unaligned, rt.ArgumentError, "align")
    check_refused(np.zeros((3, 41), np.float32)[:, 1:].astype(">f4"), rt.ArgumentTypeError)
    fields = np.zeros((3, 40), [("a", np.float32), ("b", np.uint8)])["a"]  # strides of 5 bytes
    check_refused(fields, ERRORS)


def test_frameworks_mix():
    y = rt.rms_norm(X.numpy(), W, out=(out := torch.zeros_like(X)))
    assert y is out
    assert_bits_equal(out, EXPECTED)
    y = rt.rms_norm(X, W.numpy())
    assert_bits_equal(y, EXPECTED)


# ---------------------------------------------------------------- jax


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jax_arrays_are_read(dtype):
    jax = pytest.importorskip("jax")
    x, w, expected = numpy_case(dtype)
    y = rt.rms_norm(*(jax.device_put(a, jax.devices("cpu")[0]) for a in (x, w)))
    assert type(y) is np.ndarray and str(y.dtype) == dtype
    assert (y.view(np.uint8) == expected.view(torch.uint8).numpy()).all()
    naive, exact = (oracle.rms_norm(x, w, dtype=f) for f in (np.float32, np.float64))
    assert_close(y, naive, exact, dtype=dtype)


def test_jax_arrays_are_never_written():
    jax = pytest.importorskip("jax")
    x = jax.device_put(X.numpy(), jax.devices("cpu")[0])
    before = np.array(x)
    with pytest.raises(rt.ArgumentError, match="rms_norm: out is read-only"):
        rt.rms_norm(X.numpy(), W.numpy(), out=x)
    assert (np.asarray(x) == before).all()


# ---------------------------------------------------------------- lifetime


def test_arguments_may_die_right_after_the_call():
    for _ in range(200):
        y = rt.rms_norm(X.clone(), W.clone())
        z = rt.rms_norm(X.numpy().copy(), W.numpy().copy())
    gc.collect()
    assert_bits_equal(y, EXPECTED)
    assert (z == to_numpy64(EXPECTED).astype(np.float32)).all()


def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_stays_flat():
    def calls(n):
        for _ in range(n):
            rt.rms_norm(X, W)
            rt.rms_norm(X.numpy(), W.numpy())
            with pytest.raises(ERRORS):
                rt.rms_norm(X, W[:7])
            with pytest.raises(ERRORS):
                rt.rms_norm([1], W)

    calls(300)
    before = resident_bytes()
    calls(3000)
    assert resident_bytes() - before < 1 << 20


class Producer:
    """A [3, 40] float32 array of our own: counts its capsules and how often each was given back."""

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

    def __init__(self):
        self.values = X.numpy().copy()
        self.sizes = (ctypes.c_int64 * 2)(*self.values.shape)
        self.made, self.given_back = 0, collections.Counter()
        self.alive = {}  # address -> (struct, the memory it points to), as long as somebody may read it
        self.deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)

    def _delete(self, address):
        self.given_back[address] += 1
        self.alive.pop(address)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        values = self.values.copy()
        managed = self.Managed(
            values.ctypes.data,
            (1, 0),
            2,
            (ctypes.c_uint8 * 4)(2, 32, 1, 0),
            self.sizes,
            deleter=ctypes.cast(self.deleter, ctypes.c_void_p),
        )
        self.made += 1
        self.alive[ctypes.addressof(managed)] = managed, values
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(managed), b"dltensor", None)


def test_every_capsule_is_given_back_once():
    """Of calls that succeed and of calls that are refused, whichever argument it is."""
    producer, calls = Producer(), 20_000
    out, w = np.empty((3, 40), np.float32), W.numpy()
    expected = EXPECTED.numpy()
    for i in range(calls):
        if i % 4 == 3:
            with pytest.raises(ERRORS):
                rt.rms_norm(producer, w[:7], out=out)
        else:
            rt.rms_norm(producer, w, out=out)
    np.testing.assert_array_equal(out, expected)
    assert producer.made == sum(producer.given_back.values()) >= calls
    assert not producer.alive


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_stays_flat_over_many_shapes():
    """A hundred thousand calls with ten thousand shapes: nothing is kept by shape."""
    w4 = rt.W4Weight.quantize(torch.randn(16, 64), group_size=32)
    cache = rt.KVCache(1, 128, 1, 8, format="int8", dtype="float32")
    cache.append(torch.randn(1, 100, 1, 8), torch.randn(1, 100, 1, 8))
    memory = torch.randn(1 << 20)

    def calls(shapes):
        for i in shapes:
            rows, columns = 1 + i % 100, 1 + i // 100 % 100
            x = memory[: rows * columns].view(rows, columns)
            rt.rms_norm(x)
            rt.softmax(x)
            rt.w4a16_matmul(memory[: rows * 64].view(rows, 64), w4)
            rt.linear(x, memory[: 3 * columns].view(3, columns))
            rt.decode_attention(memory[: rows * 8].view(1, 1, rows, 8), cache, window=columns)

    calls(range(10_000))
    gc.collect()
    before = resident_bytes()
    calls(range(10_000, 30_000))
    gc.collect()
    assert resident_bytes() - before <= 100 * 1024  # 1 KiB for each thousand calls
