# SPDX-License-Identifier: Apache-2.0
"""Bad arguments, generated for every argument of an op and every class of fault."""

import itertools
import warnings

import cases
import numpy as np
import ops
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ALL_DTYPES = (
    "float32 float16 bfloat16 float64 int8 uint8 int16 int32 int64 bool complex64 float8_e4m3fn float8_e5m2".split()
)
STRANGE_NUMPY = (">f4", "U4", "O", "M8[s]", "i8,f4", "g", "c16")


class Fault:
    """label: what is wrong. value: the bad argument. relational: right alone, wrong beside the others, so that an error
    may name either side when the argument is the one that others are measured against. beside: other arguments that
    change with it. memory: a tensor that the refused call must leave as it is."""

    def __init__(self, label, value, relational=False, beside=None, memory=None):
        self.label, self.value, self.relational, self.beside = label, value, relational, beside or {}
        self.memory, self.before = memory, None if memory is None else memory.clone()

    def check_untouched(self):
        assert self.memory is None or torch.equal(self.memory, self.before), "shared memory was written"


class Unexpected:
    """An object of a type no op knows."""

    def __repr__(self):
        return "Unexpected()"


def _not_tensors(t):
    yield Fault("list", t.tolist() if t.numel() < 10_000 else [1.0])
    yield Fault("tuple", tuple(t.shape))
    yield Fault("int", 3)
    yield Fault("float", 0.5)
    yield Fault("bool", True)
    yield Fault("string", "x")
    yield Fault("bytes", b"xxxx")
    yield Fault("dict", {"data": t})
    yield Fault("type", type(t))
    yield Fault("object", Unexpected())
    yield Fault("function", len)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch's
        nested = torch.nested.nested_tensor([torch.zeros(t.shape)])
    yield Fault("nested", nested)
    yield Fault("shape only", type("Shaped", (), {"shape": tuple(t.shape), "dtype": t.dtype})())


def _wrong_dtypes(argument, t):
    for name in ALL_DTYPES:
        dtype = getattr(torch, name)
        if dtype != t.dtype:
            value = torch.zeros(t.shape, dtype=dtype, device=t.device)
            if name not in argument.dtypes:
                yield Fault(f"dtype {name}", value)
    for name in STRANGE_NUMPY:
        yield Fault(f"NumPy dtype {name}", np.zeros(tuple(t.shape), dtype=name))


def _wrong_shapes(argument, t):
    def like(shape):
        value = torch.zeros(shape, dtype=t.dtype, device=t.device)
        return value + t.reshape(-1)[0] if t.numel() and value.numel() and not t.dtype.is_floating_point else value

    shape = tuple(t.shape)
    yield Fault("rank 0", like(()), relational=True)
    yield Fault("rank + 1 in front", like((1, *shape)), relational=True)
    yield Fault("rank + 1 behind", like((*shape, 1)), relational=True)
    yield Fault("rank 7", like((1,) * (7 - len(shape)) + shape))
    if len(shape) > 1:
        yield Fault("rank - 1 (first gone)", like(shape[1:]), relational=True)
        yield Fault("rank - 1 (last gone)", like(shape[:-1]), relational=True)
        yield Fault("flat", like((t.numel(),)), relational=True)
        if shape != shape[::-1] and not argument.free_dims:
            yield Fault("transposed", like(shape[::-1]), relational=True)
    for dim, size in enumerate(shape):
        if dim in argument.free_dims:
            continue
        for wrong in {size + 1, size - 1, 2 * size, 0, 1, size + 2**20} - {size, -1}:
            resized = [*shape]
            resized[dim] = wrong
            value = like(resized) if wrong < 2**20 else like([1] * len(shape)).expand(resized)
            yield Fault(f"dimension {dim} is {wrong}, not {size}", value, relational=True)


def _huge(argument, t):
    """Views of shapes whose element or byte count overflows 32 or 64 bits, over a few bytes."""
    base = torch.zeros(1, dtype=t.dtype, device=t.device)
    ndim = max(t.ndim, 1)
    for size in (2**31 - 1, 2**31, 2**32 + 1, 2**61, 2**62, 2**63 - 1):
        for dims in {(ndim - 1,), (0,), tuple(range(ndim))}:
            if set(dims) <= set(argument.free_dims):
                continue  # a right call, of some terabytes
            shape = [size if d in dims else (t.shape[d] if t.ndim else 1) for d in range(ndim)]
            try:
                value = base.as_strided(shape, [0] * ndim)
            except RuntimeError:  # torch itself refuses it
                continue
            yield Fault(f"shape {shape}", value, relational=True)


def _wrong_places(argument, t):
    others = ["cpu", *(f"cuda:{i}" for i in range(2 if "cuda" in cases.devices() else 0))]
    for device in others[: 1 + torch.cuda.device_count()]:
        if device != str(t.device) and not argument.any_device:
            yield Fault(f"on {device}", t.to(device), relational=True)
    yield Fault("meta device", torch.empty(t.shape, dtype=t.dtype, device="meta"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(t.detach().clone())  # not yielded inside: the mode would stay on
    yield Fault("fake tensor", fake)
    yield Fault("subclass", t.as_subclass(type("Wrapped", (torch.Tensor,), {})))
    gone = t.clone(memory_format=torch.contiguous_format)
    if gone.numel():
        gone.untyped_storage().resize_(0)
        yield Fault("storage freed", gone)
    if t.dtype.is_floating_point:
        yield Fault("requires grad", t.detach().clone().requires_grad_())
        yield Fault("parameter that requires grad", torch.nn.Parameter(t.detach().clone()))
        yield Fault("result that requires grad", t.detach().clone().requires_grad_() * 1)
    if t.dtype == torch.float32:
        yield Fault("lazily negated", torch.complex(t, t).conj().imag)
    if t.ndim >= 1 and t.dtype.is_floating_point:
        yield Fault("sparse COO", t.to_sparse())
    if t.ndim == 2 and t.dtype.is_floating_point:
        yield Fault("sparse CSR", t.to_sparse_csr())
    if t.dtype == torch.float32 and 1 <= t.ndim <= 5 and not t.is_cuda:
        yield Fault("MKL-DNN layout", t.contiguous().to_mkldnn())


def _unwritable(t):
    for dim, size in enumerate(t.shape):
        if size > 1:
            yield Fault(f"expanded in dimension {dim}", t.clone().narrow(dim, 0, 1).expand(t.shape))
    if t.ndim >= 2 and t.shape[-2] > 1 and t.shape[-1] > 1:
        strides = list(t.clone().stride())
        strides[-2] = 1
        yield Fault("rows overlap", t.clone().as_strided(t.shape, strides))
        strides[-2] = t.shape[-1] - 1
        yield Fault("rows overlap by one", t.clone().as_strided(t.shape, strides))
    if t.dtype != torch.bfloat16 and not t.is_cuda:
        array = t.numpy().copy()
        array.flags.writeable = False
        yield Fault("read-only NumPy", array)
        yield Fault("read-only broadcast", np.broadcast_to(array[(0,) * array.ndim], array.shape))


def _bad_values(argument, t):
    """Index tensors: one bad element in the last place, where a check that stops early would miss it."""
    if t.is_cuda:
        return  # the host does not look
    for bad in argument.bad_values:
        for place in {0, t.numel() - 1}:
            value = t.clone(memory_format=torch.contiguous_format)
            value.view(-1)[place] = bad
            yield Fault(f"value {bad} at {place}", value)


def overlap_faults(op, name, call):
    """The output `name` shares a part of its memory with each other tensor of the call: from its middle on, and in its
    first element alone."""
    out = call.kwargs[name]
    size = out.numel() * out.element_size()
    for other, argument in op.arguments.items():
        t = call.kwargs.get(other)
        if other == name or not isinstance(argument, ops.Tensor) or t is None:
            continue
        other_size, middle = t.numel() * t.element_size(), size // 2 // 8 * 8
        for label, begin in {"from its middle on": middle, "at its start": t.element_size() - other_size}.items():
            base = -(-other_size // 64) * 64  # of the output: no element of either is misaligned
            memory = torch.zeros(base + size + other_size, dtype=torch.uint8, device=out.device)
            value, neighbour = (
                memory[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
                for start, x in ((base, out), (base + begin, t))
            )
            if not argument.written:
                neighbour.copy_(t)
            yield Fault(f"shares memory with {other} {label}", value, beside={other: neighbour}, memory=memory)


def _placed(t, memory, begin):
    """A contiguous tensor of t's shape and dtype whose bytes begin there."""
    return memory[begin : begin + t.numel() * t.element_size()].view(t.dtype).view(t.shape)


def memory_faults(op, name, call):
    """The argument `name` shares memory with each array behind a cache or a weight of the call: with its last element
    alone, and with all but the first half of the argument. Of what the op only reads, the outputs; of what it stores
    into, every tensor."""
    for holder, argument in op.arguments.items():
        if not isinstance(argument, ops.Object) or call.kwargs.get(holder) is None:
            continue
        t = call.kwargs[name]
        if not (op.arguments[name].written or argument.stored):
            continue
        size = t.numel() * t.element_size()
        for part, array in argument.arrays(call.kwargs[holder]).items():
            bytes_of = array.numel() * array.element_size()
            middle = size // 2 // t.element_size() * t.element_size()
            for label, behind in {"last element": bytes_of - t.element_size(), "first element": -middle}.items():
                base = -(-size // 64) * 64  # of the array, aligned like one of its own
                memory = torch.zeros(base + bytes_of + size, dtype=torch.uint8, device=t.device)
                value, placed = _placed(t, memory, base + behind), _placed(array, memory, base)
                if not op.arguments[name].written:
                    value.copy_(t)
                placed.copy_(array)  # last: the object is a good one
                other = argument.replaced(call.kwargs[holder], {part: placed})
                beside = {holder: other}
                yield Fault(f"shares memory with {part} of {holder}, its {label}", value, beside=beside, memory=memory)


def tensor_faults(argument, t):
    if not argument.optional:
        yield Fault("None", None)
    yield from (fault for fault in _not_tensors(t) if not (argument.lists and fault.label in ("list", "tuple")))
    yield from _wrong_dtypes(argument, t)
    yield from _wrong_shapes(argument, t)
    yield from _huge(argument, t)
    yield from _wrong_places(argument, t)
    if argument.written:
        yield from _unwritable(t)
    yield from _bad_values(argument, t)


def scalar_faults(argument, good=None):
    if not argument.optional:
        yield Fault("None", None)
    for value in argument.bad:
        yield Fault(f"value {value!r}", value)
    objects = {
        "list": [1],
        "tuple": (1, 2),
        "dict": {},
        "object": Unexpected(),
        "type": int,
        "function": len,
        "bytes": b"1",
    }
    if argument.kind is bool:
        others = {"int": 1, "float": 0.0, "string": "no", "NumPy bool array": np.ones(1, bool)}
        yield from (Fault(label, value) for label, value in (objects | others).items())
        return
    if argument.kind is str:
        yield from (Fault(label, value) for label, value in objects.items())
        yield from (
            Fault(label, v)
            for label, v in {"int": 1, "float": 0.5, "empty": "", "unknown": "no such", "bool": True}.items()
        )
        yield Fault("half of a surrogate pair", "\ud800")
        yield Fault("null character", f"{good or 'x'}\0")
        return
    for label, value in {
        **objects,
        "string": "1",
        "complex": 1 + 1j,
        "array": np.ones(2),
        "tensor": torch.ones(2),
    }.items():
        yield Fault(label, value)
    if argument.kind is int:
        too_wide = (2**31, -(2**31) - 1) if argument.bits == 32 else ()
        for value in (0.5, float("nan"), float("inf"), 2**64, -(2**63) - 1, 2**200, *too_wide):
            yield Fault(f"value {value}", value)


def object_faults(argument, value):
    yield Fault("None", None)
    for label, other in {
        "tensor": torch.ones(2),
        "string": "int4",
        "int": 3,
        "object": Unexpected(),
        "list": [1.0],
    }.items():
        yield Fault(label, other)
    yield Fault("its type", type(value))
    for label, other in argument.wrong(value).items():
        yield Fault(label, other, relational=True)


def faults(op, name, call):
    argument = op.arguments[name]
    if isinstance(argument, ops.Object):
        return object_faults(argument, call.kwargs[name])
    if isinstance(argument, ops.Tensor):
        overlaps = overlap_faults(op, name, call) if argument.written else ()
        return itertools.chain(tensor_faults(argument, call.kwargs[name]), overlaps, memory_faults(op, name, call))
    return scalar_faults(argument, call.kwargs.get(name))
