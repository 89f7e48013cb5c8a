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
from rooftile.nn import W4Linear

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
    with open("/proc/self/statm", encoding="utf-8") as f:
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


TENSOR = (  # DLTensor
    ("data", ctypes.c_void_p),
    ("device", ctypes.c_int32 * 2),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.c_void_p),
    ("strides", ctypes.c_void_p),
    ("byte_offset", ctypes.c_uint64),
)
OWNER = (("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = (*TENSOR, *OWNER)


class Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), *OWNER, ("flags", ctypes.c_uint64), *TENSOR)


class Producer:
    """A [3, 40] float32 array of our own: counts its capsules and how often each was given back.

    fields: of its DLTensor, where they are others; sizes and steps: lists behind shape and strides. With major (minor,
    flags) its capsules are versioned.
    """

    def __init__(self, *, sizes=(3, 40), steps=None, **fields):
        self.values = X.numpy().copy()
        self.shape, self.dtype, self.fields = self.values.shape, self.values.dtype, fields
        self.sizes = (ctypes.c_int64 * len(sizes))(*sizes)
        self.steps = steps and (ctypes.c_int64 * len(steps))(*steps)
        self.made, self.given_back = 0, collections.Counter()
        self.alive = {}  # address -> (struct, the memory it points to), as long as somebody may read it
        self.deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)

    def _delete(self, address):
        self.given_back[address] += 1
        self.alive.pop(address)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        values, versioned = self.values.copy(), "major" in self.fields
        fields = {
            "data": values.ctypes.data,
            "device": (1, 0),
            "ndim": len(self.sizes),
            "code": 2,
            "bits": 32,
            "lanes": 1,
            "shape": ctypes.addressof(self.sizes),
            "strides": self.steps and ctypes.addressof(self.steps),
            "deleter": ctypes.cast(self.deleter, ctypes.c_void_p),
        }
        managed = (Versioned if versioned else Managed)(**fields | self.fields)
        self.made += 1
        self.alive[ctypes.addressof(managed)] = managed, values
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(managed), b"dltensor_versioned" if versioned else b"dltensor", None)

    def check_all_given_back(self):
        assert self.made == sum(self.given_back.values()) > 0
        assert not self.alive


@pytest.mark.parametrize("versioned", [{}, {"major": 1, "minor": 3}], ids=["unversioned", "versioned"])
@pytest.mark.parametrize(
    "steps, fields", [(None, {}), ((40, 1), {}), ((40, 1), {"byte_offset": 4}), ((1, 3), {}), (None, {"deleter": None})]
)
def test_producers_of_any_kind_are_read(versioned, steps, fields):
    memory = np.resize(X.numpy(), 121)
    start = fields.get("byte_offset", 0) // 4
    rows = np.lib.stride_tricks.as_strided(memory[start:], (3, 40), [4 * s for s in steps or (40, 1)])
    producer = Producer(steps=steps, **fields, **versioned)
    producer.values = memory
    producer.shape = (3, 40)
    np.testing.assert_array_equal(rt.rms_norm(producer, W.numpy()), rt.rms_norm(rows, W.numpy()))
    if "deleter" not in fields:
        producer.check_all_given_back()


WRONG = {  # of a producer -> what the error says
    "no shape": ({"shape": None}, "has 2 dimensions and no shape"),
    "no shape, strides": ({"shape": None, "steps": (40, 1)}, "has 2 dimensions and no shape"),
    "no data": ({"data": None}, "no memory behind it"),
    "no data, an offset": ({"data": None, "byte_offset": 4}, "no memory behind it"),
    "offset 2^57": ({"byte_offset": 2**57}, "byte_offset that leads out of any memory .144115188075855872"),
    "offset 2^63": ({"byte_offset": 2**63}, "byte_offset that leads out of any memory .9223372036854775808"),
    "offset 2^64 - 4": ({"byte_offset": 2**64 - 4}, "byte_offset that leads out of any memory"),
    "offset and span": ({"byte_offset": 2**57 - 4, "steps": (40, 1)}, "out of any memory"),
    "offset of what is empty": ({"byte_offset": 2**63, "sizes": (0, 40)}, "byte_offset that leads out of any memory"),
    "strides 2^61": ({"steps": (2**61, 1)}, "strides that lead out of any memory"),
    "strides -2^63": ({"steps": (-(2**63), 1)}, "strides that lead out of any memory"),
    "negative size": ({"sizes": (-3, 40)}, "negative size in dimension 0"),
    "smallest size": ({"sizes": (3, -(2**63))}, "negative size in dimension 1"),
    "vast size": ({"sizes": (2**62, 40)}, ""),
    "vast sizes": ({"sizes": (2**62, 2**62)}, ""),
    "-1 dimensions": ({"ndim": -1}, "has -1 dimensions, 0 to 6"),
    "-2^31 dimensions": ({"ndim": -(2**31)}, "has -2147483648 dimensions, 0 to 6"),
    "2^31 - 1 dimensions": ({"ndim": 2**31 - 1}, "has 2147483647 dimensions, 0 to 6"),
    "no lanes": ({"lanes": 0}, "float32 in 0 lanes"),
    "two lanes": ({"lanes": 2}, "float32 in 2 lanes"),
    "65535 lanes": ({"lanes": 65535}, "float32 in 65535 lanes"),
    "no bits": ({"bits": 0}, "dtype float0"),
    "7 bits": ({"bits": 7}, "dtype float7"),
    "type code 9": ({"code": 9}, "DLPack type code 9, 32"),
    "device 0": ({"device": (0, 0)}, "DLPack device type 0"),
    "device 99": ({"device": (99, 0)}, "DLPack device type 99"),
    "device -1": ({"device": (-1, -5)}, "DLPack device type -1"),
    "version 99": ({"major": 99, "minor": 7}, "is a tensor of DLPack 99.7, expected version 1"),
    "version 0": ({"major": 0, "minor": 9}, "is a tensor of DLPack 0.9, expected version 1"),
    "version 2^32 - 1": ({"major": 2**32 - 1}, "is a tensor of DLPack 4294967295.[03], expected version 1"),
    "version 2, pointers astray": (
        {"major": 2, "data": 8, "shape": 8, "strides": 8, "ndim": 2**31 - 1, "flags": 2**64 - 1},
        "is a tensor of DLPack 2.[03], expected version 1",
    ),
}


@pytest.mark.parametrize("versioned", [{}, {"major": 1, "minor": 3}], ids=["unversioned", "versioned"])
@pytest.mark.parametrize("wrong, words", WRONG.values(), ids=WRONG)
def test_wrong_producers_are_refused_and_given_back(versioned, wrong, words):
    producer = Producer(**versioned | wrong)
    check_refused(producer, match=words)
    producer.check_all_given_back()


@pytest.mark.parametrize("shape", [("a", 40), ("a",), (3, None), (3, 4, 10), (2**40, 40), (-3, 40), (3, 40.5), ()])
def test_what_python_and_dlpack_say_is_the_same_shape(shape):
    producer = Producer()
    producer.shape = shape
    x, w = X.numpy(), W.numpy()
    calls = {
        "rms_norm: x": lambda: rt.rms_norm(producer, w),
        "linear: x": lambda: rt.linear(producer, np.ones((8, 40), np.float32)),
        "linear: weight": lambda: rt.linear(x, producer),
        "silu_mul: gate_up": lambda: rt.silu_mul(producer),
        "softmax: x": lambda: rt.softmax(producer),
        "W4Weight.quantize: weight": lambda: rt.W4Weight.quantize(producer, group_size=8),
    }
    for name, call in calls.items():
        with pytest.raises(rt.RooftileError, match=name.partition(":")[0]) as e:
            call()
        assert isinstance(e.value, (*ERRORS, rt.OutOfMemoryError)), (name, e.value)
        assert str(e.value).startswith(name) or isinstance(e.value, rt.OutOfMemoryError), (name, e.value)
    check_refused(producer, match="says that its shape is", arguments=("weight", "out"))


@pytest.mark.parametrize(
    "given, words",
    [
        (lambda **_: None, "gave a NoneType, expected a capsule"),
        (lambda **_: X.numpy(), "gave a ndarray, expected a capsule"),
        (lambda **_: 1 // 0, "raised ZeroDivisionError: "),
        (lambda: X.numpy().__dlpack__(stream=5), "raised BufferError|raised RuntimeError|raised ValueError"),
    ],
)
def test_what_gives_no_capsule_is_refused(given, words):
    class Producer:
        shape, dtype = (3, 40), np.dtype("float32")

        def __dlpack__(self, **options):
            return given(**options)

    check_refused(Producer(), rt.ArgumentTypeError, f"must be an array that speaks DLPack.*, whose __dlpack__ {words}")


def test_an_interrupt_inside_a_producer_is_one():
    class Producer:
        shape, dtype = (3, 40), np.dtype("float32")

        def __dlpack__(self, **_):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rt.rms_norm(Producer(), W.numpy())
    check_good_call()


def test_versioned_capsules_say_what_is_read_only():
    read_only = Producer(major=1, flags=1)
    np.testing.assert_array_equal(rt.rms_norm(read_only, W.numpy()), EXPECTED.numpy())
    check_refused(read_only, rt.ArgumentError, "is read-only and would be written", ("out",))
    read_only.check_all_given_back()


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
    assert producer.made >= calls
    producer.check_all_given_back()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_stays_flat_over_many_shapes():
    """Two hundred thousand calls with ten thousand shapes: nothing is kept by shape."""
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

    def growth(shapes):
        before = resident_bytes()
        calls(shapes)
        gc.collect()
        return resident_bytes() - before

    growth(range(10_000))
    # What is kept by shape grows in every round; an allocator takes another page in some.
    rounds = [growth(range(first, first + 10_000)) for first in (10_000, 20_000, 30_000)]
    assert min(rounds) <= 50 * 1024, rounds  # 1 KiB for each thousand calls


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor", "ignore:.*nested tensors")
def test_tensors_without_memory_of_their_own():
    """The true reason comes first: most of these are of layout torch.strided."""
    weight, x = torch.ones(64), torch.ones(3, 64)
    for tensor, what in (
        (x.to_sparse(), r"it has layout torch\.sparse_coo; expected torch\.strided"),
        (x.to_sparse_csr(), r"it has layout torch\.sparse_csr; expected torch\.strided"),
        (x.to("meta"), "it is on the meta device, which has no memory"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"it is quantized by torch \(torch\.qint8\)"),
        (torch.nested.nested_tensor([x, x[:2]]), "it is a nested tensor"),
    ):
        with pytest.raises(rt.ArgumentTypeError, match=f"^rms_norm: x cannot be read: {what}"):
            rt.rms_norm(tensor, weight, out=torch.empty(3, 64))
    for transformed in (torch.vmap, torch.func.vmap):
        with pytest.raises(rt.ArgumentTypeError, match=r"x cannot be read: it stands for others in torch\.vmap"):
            transformed(lambda x: rt.rms_norm(x, weight, out=torch.empty(64)))(x)
    with pytest.raises(rt.ArgumentTypeError, match=r"^W4Weight: codes cannot be read: it is on the meta device"):
        W4Linear(64, 48, group_size=32, device="meta")(x)
