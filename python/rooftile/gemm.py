# SPDX-License-Identifier: Apache-2.0
"""Products with 4-bit, 8-bit and 16-bit weights. Formats: docs/kernels/w4a16.md."""

import functools
import numbers
import operator
import sys

import numpy as np

from rooftile import _C
from rooftile._arrays import (
    activation_dtype,
    as_torch,
    check_flag,
    empty,
    must_be,
    numpy_dtype,
    refuse_mask,
    shape_of,
    shown,
    torch_device,
    torch_of,
    workspace,
)
from rooftile._calls import compiling, needs_torch_stream, on_stream, ran, torch_op
from rooftile._registry import OPS, Op
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError

W4_KINDS = _C.w4_kinds
ARRAYS = ("codes", "scales", "offsets", "perm")  # of a packed weight
_GGUF_BLOCK = 32
_GGUF_TYPES = {  # by bits and name: the ggml number, fp16 values before the codes, kind
    4: {"Q4_0": (2, 1, "symmetric"), "Q4_1": (3, 2, "minima")},
    8: {"Q8_0": (8, 1, "symmetric")},
}


def _dtype_name(x):
    return str(x.dtype).removeprefix("torch.")


def _copy_of(op, argument, x, k):
    """A contiguous [k] that a caller's later changes do not reach (only torch's and NumPy's change); None for None."""
    if x is None:
        return None
    _C.check_array(op, argument, x)
    if tuple(x.shape) != (k,):  # before memory is made by what it says
        raise ArgumentError(f"{op}: {argument} must be [K] = [{k}], got {list(x.shape)}")
    return _contiguous(x) if torch_of(x) else np.array(x, order="C") if isinstance(x, np.ndarray) else x


def _contiguous(x):
    torch = torch_of(x)  # clone: .contiguous() keeps odd strides of dimensions of size 1, which a view refuses
    return x.clone(memory_format=torch.contiguous_format) if torch else np.ascontiguousarray(x)


def _view(x, dtype):
    """The bytes of a contiguous array as another dtype."""
    torch = torch_of(x)
    return x.view(getattr(torch, dtype) if torch else numpy_dtype(dtype))


class _NoTensorError(NotSupportedError, AttributeError):
    """What a packed weight has not got of a tensor; hasattr() is False."""


class PackedWeight:
    """What weights of 4 and of 8 bits share: W4Weight and W8Weight say what their codes stand for."""

    BITS = None
    KINDS = ()
    # transformers' initialisers leave what says so alone: some models initialise the weights of layers below them
    _is_hf_initialized = True

    def __init__(self, codes, scales, offsets, *, shape, group_size, kind, scale_dtype, perm=None):
        """Takes packed arrays as they are (see `codes`, `scales`, `offsets`, `perm` of another weight)."""
        self._take(type(self).__name__, codes, scales, offsets, shape, group_size, kind, scale_dtype, perm)

    def _take(self, op, codes, scales, offsets, shape, group_size, kind, scale_dtype, perm):
        """op: whose name errors begin with."""
        n, k = _sizes(op, shape)
        self._check_kind(op, kind)
        self._handle = _C.W4Handle(codes, scales, offsets, perm, n, k, self.BITS, group_size, kind, scale_dtype, op)
        self._arrays = codes, scales, offsets, perm
        self._layout = {"shape": (n, k), "group_size": int(group_size), "kind": kind, "scale_dtype": scale_dtype}

    @classmethod
    def _of_module(cls, arrays, layout):
        """Over a module's own arrays, which may hold nothing yet or be traced: they are read at the first call."""
        self = cls.__new__(cls)
        self._arrays, self._layout = arrays, layout
        return self

    @functools.cached_property
    def _handle(self):
        """The arrays as kernels take them."""
        rest = (*self.shape, self.BITS, self.group_size, self.kind, self.scale_dtype, type(self).__name__)
        return _C.W4Handle(*self._arrays, *rest)

    # read-only: calls go by the handle, which another array here would not reach
    codes = property(lambda self: self._arrays[0])
    scales = property(lambda self: self._arrays[1])
    offsets = property(lambda self: self._arrays[2])
    perm = property(lambda self: self._arrays[3])
    shape = property(lambda self: self._layout["shape"])
    group_size = property(lambda self: self._layout["group_size"])
    kind = property(lambda self: self._layout["kind"])
    scale_dtype = property(lambda self: self._layout["scale_dtype"])

    def __getattr__(self, name):
        """Only asked for what is not there."""
        torch = sys.modules.get("torch")
        if torch is not None and not name.startswith("_") and hasattr(torch.Tensor, name):
            raise _NoTensorError(
                f"{type(self).__name__} of {list(self.shape)}: a packed weight is no tensor and has no '{name}', which "
                "the module around this layer asks for; leave the layer as it is: quantize_(..., skip=[its name]), "
                "RooftileConfig(skip=[its name])"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)

    def __reduce__(self):
        return _rebuild, (type(self), *self._arrays, self.layout)

    def __repr__(self):
        order = ", act-order" if self.perm is not None else ""
        return (
            f"{type(self).__name__}([{self.shape[0]}, {self.shape[1]}], {self.kind}, group_size={self.group_size}, "
            f"{self.scale_dtype} scales{order})"
        )

    @property
    def layout(self):
        """shape, group_size, kind and scale_dtype: what the packed arrays mean."""
        return dict(self._layout)

    @property
    def nbytes(self):
        """Bytes of all packed arrays, padding included."""
        return sum(int(a.nbytes) for a in self._arrays if a is not None)

    @classmethod
    def _check_kind(cls, op, kind):
        if not isinstance(kind, str) or kind not in cls.KINDS:
            raise ArgumentError(f"{op}: kind {must_be(cls.KINDS, kind)}")

    @classmethod
    def quantize(cls, weight, *, group_size=128, zeros=None):
        """Round to nearest.

        weight: [N, K] (the nn.Linear convention), float32, float16 or bfloat16, any strides. zeros: None for symmetric
        (4 bits: scale = absmax / 7, codes -7..7; 8 bits: absmax / 127, -127..127) or, of 4 bits, "minima" (scale =
        (max - min) / 15). Scales are bfloat16 for bfloat16 weights, else float16; codes are rounded to nearest even
        with the stored scale. A group of zeros (constants) has scale 0 and reads back exactly; a group with NaN or Inf
        reads back as NaN. Finite float32 values beyond what float16 scales hold (65504 * 7, of 8 bits 65504 * 127, with
        minima 65504) are clamped to that, without an error; quantize_ and convert refuse them. Raises ArgumentError for
        a group_size that is not 32, 64, 128 or K or does not divide K, ArgumentTypeError for what is no such array.
        """
        op = f"{cls.__name__}.quantize"
        allowed = [kind for kind in cls.KINDS if kind != "integer"]
        if zeros is not None and zeros not in allowed:
            raise ArgumentError(f"{op}: zeros {must_be([None, *allowed], zeros)}")
        kind = zeros or "symmetric"
        n, k = _shape2(weight, op, "weight")
        _C.w4_sizes(op, "weight", n, k, cls.BITS, group_size, kind)
        scale_dtype = "bfloat16" if _dtype_name(weight) == "bfloat16" else "float16"
        codes, scales, offsets = cls._canonical_like(op, weight, n, k, group_size, kind, scale_dtype)
        _C.w4_quantize(op, weight, cls.BITS, group_size, kind, codes, scales, offsets)
        return cls.from_canonical(codes, scales, offsets, group_size=group_size)

    @classmethod
    def from_canonical(cls, codes, scales, zeros=None, *, group_size=None, kind=None, perm=None):
        """From the exchange form, lossless.

        codes: uint8, of 4 bits [N, K/2], two codes a byte, low nibble first, of 8 bits [N, K]. scales: float16 or
        bfloat16 [N, K/group_size]. zeros: None, uint8 [N, K/group_size] (integer zeros) or, of 4 bits,
        [N, K/group_size] in scales' dtype (minima). kind: "symmetric", "integer" or "minima", default what `zeros` is;
        group_size: default what the shapes say. perm: int32 [K], act-order: column i of the codes multiplies
        x[..., perm[i]]. All of it is copied.
        """
        return cls._pack(f"{cls.__name__}.from_canonical", codes, scales, zeros, group_size, kind, perm)

    @classmethod
    def _pack(cls, op, codes, scales, zeros=None, group_size=None, kind=None, perm=None):
        """from_canonical, for the op whose name errors begin with."""
        n, row_bytes = _shape2(codes, op, "codes")
        k = row_bytes * 8 // cls.BITS
        groups = _shape2(scales, op, "scales")[1]
        if group_size is None:
            if groups == 0 or k % groups:
                raise ArgumentError(f"{op}: scales has {groups} groups a row, which do not divide K = {k}")
            group_size = k // groups
        if kind is None:
            kind = "symmetric" if zeros is None else "integer"
            if zeros is not None and "minima" in cls.KINDS and _dtype_name(zeros) != "uint8":
                kind = "minima"
        cls._check_kind(op, kind)
        sizes = _C.w4_sizes(op, "codes", n, k, cls.BITS, group_size, kind)
        if tuple(scales.shape) != (n, k // int(group_size)):  # before memory is made by what codes say
            groups = k // int(group_size)
            raise ArgumentError(f"{op}: scales must be [N, K / group_size] = [{n}, {groups}], got {list(scales.shape)}")
        flat = [
            empty(op, name, codes, (size,), "uint8")
            for name, size in zip(("codes", "scales", "offsets"), sizes, strict=True)
        ]
        if kind == "symmetric":
            flat[2] = None
        _C.w4_pack(op, codes, scales, zeros, kind, cls.BITS, group_size, *flat)
        weight = cls.__new__(cls)
        weight._take(op, *flat, (n, k), group_size, kind, _dtype_name(scales), _copy_of(op, "perm", perm, k))
        return weight

    @classmethod
    def from_gguf(cls, data, ggml_type, shape):
        """From the blocks of a GGUF tensor, lossless, group size 32: of 4 bits Q4_0 (symmetric) or Q4_1 (minima), of 8
        bits Q8_0 (symmetric).

        data: the tensor's bytes: a bytes-like object or a uint8 array of any shape (a torch tensor gives a weight in
        torch). ggml_type: the type's name, its number (2, 3, 8) or gguf.GGMLQuantizationType. shape: (N, K), rows of K.
        """
        op, types = f"{cls.__name__}.from_gguf", _GGUF_TYPES[cls.BITS]
        name = getattr(ggml_type, "name", ggml_type)
        if not isinstance(name, (str, numbers.Integral)):
            name = None
        name = next((key for key, (number, *_) in types.items() if name in (key, number)), None)
        if name is None:
            raise NotSupportedError(f"{op}: ggml_type {must_be(types, ggml_type)}")
        _, values, kind = types[name]
        n, k = _sizes(op, shape)
        if k == 0 or k % _GGUF_BLOCK:
            raise ArgumentError(
                f"{op}: K must be a positive multiple of {_GGUF_BLOCK} for {name}, got shape ({n}, {k})"
            )
        raw = _bytes_of(data, op)
        block_bytes = 2 * values + _GGUF_BLOCK * cls.BITS // 8
        expected = n * (k // _GGUF_BLOCK) * block_bytes
        if raw.size != expected:
            raise ArgumentError(f"{op}: data must have {expected} bytes for {name} [{n}, {k}], got {raw.size}")
        blocks = raw.reshape(n, k // _GGUF_BLOCK, block_bytes)
        halves = np.ascontiguousarray(blocks[..., : 2 * values]).view(np.float16)
        codes = cls._gguf_codes(blocks[..., 2 * values :]).reshape(n, k * cls.BITS // 8)
        parts = [codes, *(np.ascontiguousarray(halves[..., i]) for i in range(values))]
        torch = torch_of(data)
        if torch:
            parts = [torch.from_numpy(p) for p in parts]
        return cls._pack(op, *parts, group_size=_GGUF_BLOCK, kind=kind)

    @classmethod
    def concat(cls, weights):
        """One weight [sum of N, K] of several [N, K]: q, k and v, or gate and up, in one product. Lossless.

        weights: of the same group size, kind, scale dtype, device and act-order. Raises ArgumentError /
        ArgumentTypeError naming the one that does not go with the first.
        """
        op = f"{cls.__name__}.concat"
        try:
            weights = list(weights)
        except TypeError:
            raise ArgumentTypeError(
                f"{op}: weights must be a list of {cls.__name__}, got {type(weights).__name__}"
            ) from None
        for i, weight in enumerate(weights):
            if not isinstance(weight, cls):
                raise ArgumentTypeError(f"{op}: weights[{i}] must be a {cls.__name__}, got {type(weight).__name__}")
        if not weights:
            raise ArgumentError(f"{op}: weights must have at least one {cls.__name__}, got none")
        first = weights[0]
        for i, weight in enumerate(weights):
            for what, ours, theirs in (
                ("K", weight.shape[1], first.shape[1]),
                ("group_size", weight.group_size, first.group_size),
                ("kind", weight.kind, first.kind),
                ("scale_dtype", weight.scale_dtype, first.scale_dtype),
                ("device", _device(weight.codes), _device(first.codes)),
            ):
                if ours != theirs:
                    raise ArgumentError(f"{op}: weights[{i}] must have weights[0]'s {what} = {theirs}, got {ours}")
            same = weight.perm is first.perm
            if not same and (weight.perm is None or first.perm is None or not bool((weight.perm == first.perm).all())):
                raise ArgumentError(f"{op}: weights[{i}] must have weights[0]'s act-order (perm)")
        parts = [_concat(p) if p[0] is not None else None for p in zip(*(w.unpack() for w in weights), strict=True)]
        return cls._pack(op, *parts, first.group_size, first.kind, first.perm)

    def to(self, device):
        """This weight on a torch device ("cuda", "cpu", torch.device(...)): itself if it is there, else a copy."""

        if device is None:
            raise ArgumentTypeError(f"{type(self).__name__}.to: device must be one that torch can use, got None")
        device = torch_device(f"{type(self).__name__}.to", device)
        arrays = [None if a is None else as_torch(a).to(device) for a in self._arrays]
        if arrays[0] is self.codes:
            return self
        return type(self)(*arrays[:3], perm=arrays[3], **self.layout)

    def unpack(self):
        """The exchange form, bit for bit: (codes, scales, zeros) as `from_canonical` takes them; zeros may be None."""
        op = f"{type(self).__name__}.unpack"
        parts = self._canonical_like(op, self.codes, *self.shape, self.group_size, self.kind, self.scale_dtype)
        _C.w4_unpack(op, self._handle, *parts)
        return parts

    def dequantize(self, dtype="float32"):
        """What the codes stand for: [N, K] in `dtype` ("float32", "float16", "bfloat16" or a torch or NumPy dtype)."""
        op = f"{type(self).__name__}.dequantize"
        out = empty(op, "out", self.codes, self.shape, activation_dtype(op, dtype))
        _C.w4_dequantize(op, self._handle, out)
        return out

    @classmethod
    def _canonical_like(cls, op, like, n, k, group_size, kind, scale_dtype):
        groups = (n, k // group_size)
        offsets = None
        if kind != "symmetric":
            offsets = empty(op, kind, like, groups, "uint8" if kind == "integer" else scale_dtype)
        codes = empty(op, "codes", like, (n, k * cls.BITS // 8), "uint8")
        return codes, empty(op, "scales", like, groups, scale_dtype), offsets


class W4Weight(PackedWeight):
    """A weight [N, K] in 4 bits, in the one layout that every kernel and every number of rows reads.

    Made by `quantize`, `from_canonical`, `from_kpacked` or `from_gguf`. A stored code u is 0..15 and stands for
    `(u - 8) * scale` (kind "symmetric"), `(u - zero) * scale` ("integer") or `u * scale + minimum` ("minima"), one
    scale (and zero or minimum) for each group of `group_size` = 32, 64, 128 or K neighbours along K. K is even and a
    multiple of group_size; N and K need not be multiples of anything else.

    It lives where the arrays it is made from live, and `.to(device)` copies it. codes, scales, offsets, perm: the
    packed arrays (flat uint8; perm int32 [K] or None), which cannot be exchanged for others. They are read where they
    are at each call: torch may move their memory, and arrays that no longer fit the weight are refused. On a GPU the
    values of perm are not checked: a column outside [0, K) makes products NaN.
    """

    BITS = 4
    KINDS = W4_KINDS

    @classmethod
    def from_kpacked(cls, packed, scales):
        """From the signed form packed along K, symmetric, lossless.

        packed: int32 [K/8, N]; bits 4i .. 4i+3 of row p are the two's complement code of element 8p + i. scales:
        float16 or bfloat16 [K/group_size, N].
        """
        op = "W4Weight.from_kpacked"
        for name, array in (("packed", packed), ("scales", scales)):
            _C.check_array(op, name, array)
            _shape2(array, op, name)
        if _dtype_name(packed) != "int32":
            raise ArgumentTypeError(f"{op}: packed must be int32, got {_dtype_name(packed)}")
        if _dtype_name(scales) not in ("float16", "bfloat16"):
            raise ArgumentTypeError(f"{op}: scales must be float16 or bfloat16, got {_dtype_name(scales)}")
        (rows, n), (groups, columns) = packed.shape, scales.shape
        if columns != n:
            raise ArgumentError(f"{op}: scales must have packed's N = {n} columns, got {list(scales.shape)}")
        k = 8 * rows
        if k == 0:
            raise ArgumentError(f"{op}: packed must be [K / 8, N] with K at least 8, got {list(packed.shape)}")
        if groups == 0 or k % groups or k // groups not in (*_C.w4_group_sizes, k):  # before memory is made
            raise ArgumentError(
                f"{op}: scales must be [K / group_size, N] with packed's K = {k} and group_size 32, 64, 128 or K, "
                f"got {list(scales.shape)}"
            )
        codes = _view(_contiguous(packed.T), "uint8") ^ 0x88
        return cls._pack(op, codes, scales.T)

    def to_kpacked(self):
        """(packed, scales) as `from_kpacked` takes them. Symmetric weights whose K is a multiple of 8, no act-order."""
        op = "W4Weight.to_kpacked"
        if self.kind != "symmetric" or self.perm is not None:
            raise NotSupportedError(
                f"{op}: the signed form holds symmetric weights without act-order, this is {self!r}"
            )
        if self.shape[1] % 8:
            raise NotSupportedError(f"{op}: K must be a multiple of 8 (eight codes an int32), got K = {self.shape[1]}")
        codes, scales, _ = self.unpack()
        return _contiguous(_view(codes ^ 0x88, "int32").T), _contiguous(scales.T)

    @staticmethod
    def _gguf_codes(blocks):
        # a block's low nibbles are its elements 0..15, the high ones 16..31; ours are neighbours in a byte
        even, odd = blocks[..., 0::2], blocks[..., 1::2]
        return np.concatenate([(even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=-1)


class W8Weight(PackedWeight):
    """A weight [N, K] in 8 bits, in the one layout that every kernel and every number of rows reads.

    Made by `quantize`, `from_canonical` or `from_gguf`. A stored code u is 0..255 and stands for `(u - 128) * scale`
    (kind "symmetric") or `(u - zero) * scale` ("integer"), one scale (and zero) for each group of `group_size` = 32,
    64, 128 or K neighbours along K. K is a multiple of group_size; N and K need not be multiples of anything else.

    It lives where the arrays it is made from live, and `.to(device)` copies it. codes, scales, offsets, perm: the
    packed arrays (flat uint8; perm int32 [K] or None), which cannot be exchanged for others. They are read where they
    are at each call: torch may move their memory, and arrays that no longer fit the weight are refused. On a GPU the
    values of perm are not checked: a column outside [0, K) makes products NaN.
    """

    BITS = 8
    KINDS = tuple(kind for kind in W4_KINDS if kind != "minima")

    @staticmethod
    def _gguf_codes(blocks):
        return blocks ^ 0x80  # a block's are signed


WEIGHTS = {weight.BITS: weight for weight in (W4Weight, W8Weight)}


def _device(x):
    return str(getattr(x, "device", "cpu"))


def _concat(arrays):
    torch = torch_of(arrays[0])
    return torch.cat(arrays) if torch else np.concatenate(arrays)


def _rebuild(cls, codes, scales, offsets, perm, layout):
    return cls(codes, scales, offsets, perm=perm, **layout)


def _sizes(op, shape):
    """(N, K) as ints."""
    try:
        n, k = (operator.index(size) for size in shape)
    except (TypeError, ValueError):
        raise ArgumentError(f"{op}: shape must be (N, K), two integers, got {shown(shape)}") from None
    if not (0 <= n < 2**31 and 0 <= k < 2**31):
        raise ArgumentError(f"{op}: shape must be (N, K) with sizes in [0, 2**31), got {shown(shape)}")
    return n, k


def _shape2(x, op, argument):
    shape = shape_of(x)
    if shape is None:
        raise ArgumentTypeError(f"{op}: {argument} must be an array of two dimensions, got {type(x).__name__}")
    if len(shape) != 2:
        raise ArgumentError(f"{op}: {argument} must have two dimensions, got shape {list(shape)}")
    try:
        return operator.index(shape[0]), operator.index(shape[1])
    except TypeError:
        raise ArgumentTypeError(f"{op}: {argument} must have a shape of integers, got {shape}") from None


def _bytes_of(data, op):
    refuse_mask(op, "data", data)
    torch = torch_of(data)
    try:
        if torch:
            array = data.detach().cpu().contiguous().numpy() if data.device.type == "cpu" else None
        elif isinstance(data, np.ndarray):
            array = np.ascontiguousarray(data)
        else:
            array = np.frombuffer(data, dtype=np.uint8)
    except (TypeError, ValueError, BufferError, RuntimeError):  # the last: torch's, of a tensor that is no plain one
        array = None
    if array is None or array.dtype != np.uint8:
        raise ArgumentTypeError(f"{op}: data must be bytes or a uint8 array in host memory, got {type(data).__name__}")
    return array.reshape(-1)


# What linear takes; the products of packed weights take both.
ACTIVATIONS = _C.activations
GATED_ACTIVATIONS = _C.gated_activations


def outputs(n, activation):
    """Columns of the result of a product with N = n rows of weights."""
    return n // 2 if isinstance(activation, str) and activation in GATED_ACTIVATIONS else n


def _matmul(op, weight_type, call, x, w, bias, activation, residual, out, batch_invariant, stream, plan):
    """The op of weights of `weight_type`. call: its function of _C."""
    if stream is not None and needs_torch_stream(stream, x):
        return on_stream(_matmul, x, locals())
    if batch_invariant is not False:
        check_flag(op, "batch_invariant", batch_invariant)
    if compiling():
        form = (*w._arrays, *w.shape, w.group_size, w.kind, w.scale_dtype)
        return torch_op(op, (x, *form, bias, activation, residual, batch_invariant), (out,), stream, plan)
    if out is None:
        # what x or w lacks is named by the call below, which reads both before its output
        n = (outputs(w.shape[0], activation),) if isinstance(w, weight_type) else ()
        out = empty(op, "out", x, (*(shape_of(x) or ())[:-1], *n))
    handle = getattr(w, "_handle", w)
    ran(call(x, handle, bias, activation, residual, out, batch_invariant, workspace, stream, plan))
    return out


def w4a16_matmul(
    x,
    w,
    *,
    bias=None,
    activation=None,
    residual=None,
    out=None,
    batch_invariant=False,
    stream=None,
    plan=None,
):
    """activation(x @ w.T + bias) + residual with a 4-bit weight.

    x: [..., K], float32 (CPU), float16 or bfloat16, any strides. w: a W4Weight [N, K] on x's device. bias: [N] in x's
    dtype. activation: None, "silu", "gelu" or "gelu_tanh". residual: [..., N] in x's dtype. Returns [..., N] in x's
    dtype, written to `out` when given (which may be `residual`, and shares no memory with another input). Sums in fp32,
    rounded once.

    activation "silu_mul", "gelu_mul" or "gelu_tanh_mul": the rows of w are [gate | up] (`W4Weight.concat([gate, up])`),
    and the result, [..., N / 2] like residual, is activation(gate) * up + residual: a gated MLP's first half in one
    pass, as `silu_mul` or `gelu_mul` of the plain product but for the rounding in between (Shazeer 2020,
    arXiv 2002.05202).

    Deterministic, and a row's bits do not depend on its neighbours. They may change with the number of rows unless
    `batch_invariant=True`, which costs speed: on a GPU between up to 8, 16, 32, 64, then every further 64; on a CPU
    with AVX-512 VNNI between one row and several: one row of 16-bit x is rounded to integers, in each block of 64 by
    less than 1 / 32639 of the block's largest |x|, for most data far below the rounding of the result. With AMX, or
    AVX512-BF16 (but on Intel's CPUs), between up to 16 rows of bfloat16 and more: for more, weights are rounded to it.
    On Hopper, from 17 rows on and without batch_invariant, weights in groups of 32 or 64 or with minima are rounded to
    x's dtype before the product.
    stream: a CUDA stream's handle, default the framework's current stream. plan: what `rt.explain` returned, or
    a plan's text: a CPU kernel variant, one of `rt.env()["cpu"]["variants"]`, or on a GPU a plan that fits the call.

    Raises ArgumentError / ArgumentTypeError naming the argument.
    """
    options = (bias, activation, residual, out, batch_invariant, stream, plan)
    return _matmul("w4a16_matmul", W4Weight, _C.w4a16_matmul, x, w, *options)


def w8a16_matmul(
    x,
    w,
    *,
    bias=None,
    activation=None,
    residual=None,
    out=None,
    batch_invariant=False,
    stream=None,
    plan=None,
):
    """activation(x @ w.T + bias) + residual with an 8-bit weight.

    w: a W8Weight [N, K] on x's device. Everything else is as in `w4a16_matmul`: x [..., K] in float32 (CPU), float16 or
    bfloat16, the result [..., N] (of a gated activation [..., N / 2]) in x's dtype, the other arguments, what a row's
    bits depend on, and errors.
    """
    options = (bias, activation, residual, out, batch_invariant, stream, plan)
    return _matmul("w8a16_matmul", W8Weight, _C.w8a16_matmul, x, w, *options)


def linear(x, weight, *, bias=None, activation=None, residual=None, out=None, stream=None, plan=None):
    """activation(x @ weight.T + bias) + residual with a weight in x's own dtype.

    x: [..., K], float32 (CPU), float16 or bfloat16, any strides. weight: [N, K] (the nn.Linear convention) in x's
    dtype, any strides. bias: [N] in x's dtype. activation: None, "silu", "gelu" or "gelu_tanh". residual: [..., N] in
    x's dtype. Returns [..., N] in x's dtype, written to `out` when given (which may be `residual`, and shares no memory
    with another input). Sums in fp32, rounded once.

    Deterministic, and a row's bits do not depend on its neighbours. On the CPU they are the same at every number of
    rows too; on a GPU at every number up to 16, and beyond that wherever the same kernel runs (`rt.record_kernels`).
    stream: a CUDA stream's handle, default the framework's current stream. plan: what `rt.explain` returned, or
    a plan's text: a CPU kernel variant, one of `rt.env()["cpu"]["variants"]`, or on a GPU a plan that fits the call.

    Raises ArgumentError / ArgumentTypeError naming the argument.
    """
    if stream is not None and needs_torch_stream(stream, x):
        return on_stream(linear, x, locals())
    if compiling():
        return torch_op("linear", (x, weight, bias, activation, residual), (out,), stream, plan)
    if out is None:
        # what x or weight lacks is named by the call below, which reads both before its output
        shape, rows = shape_of(x), shape_of(weight)
        out = empty("linear", "out", x, () if shape is None or rows is None else (*shape[:-1], *rows[:1]))
    ran(_C.linear(x, weight, bias, activation, residual, out, workspace, stream, plan))
    return out


def _packed_matmul(
    weight_type,
    function,
    x,
    codes,
    scales,
    offsets,
    perm,
    n,
    k,
    group_size,
    kind,
    scale_dtype,
    bias,
    activation,
    residual,
    batch_invariant=False,
    **options,
):
    layout = {"shape": (n, k), "group_size": group_size, "kind": kind, "scale_dtype": scale_dtype}
    w = weight_type(codes, scales, offsets, perm=perm, **layout)
    options |= {"bias": bias, "activation": activation, "residual": residual, "batch_invariant": batch_invariant}
    return function(x, w, **options)


def _packed_op(weight_type, function):
    return Op(
        "Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? perm, int n, int k, int group_size, str kind, "
        "str scale_dtype, Tensor? bias, str? activation, Tensor? residual, bool batch_invariant=False",
        ("out",),
        functools.partial(_packed_matmul, weight_type, function),
        lambda x, codes, scales, offsets, perm, n, *rest: [(*x.shape[:-1], outputs(n, rest[5]))],
    )


def _linear(x, weight, bias, activation, residual, **options):
    return linear(x, weight, bias=bias, activation=activation, residual=residual, **options)


OPS["w4a16_matmul"] = _packed_op(W4Weight, w4a16_matmul)
OPS["w8a16_matmul"] = _packed_op(W8Weight, w8a16_matmul)
OPS["linear"] = Op(
    "Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor? residual",
    ("out",),
    _linear,
    lambda x, weight, *_: [(*x.shape[:-1], weight.shape[0])],
)
