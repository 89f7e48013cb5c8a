# SPDX-License-Identifier: Apache-2.0
"""The table of public ops that the contract tests walk: how to make a good call, and what each argument may be.

A new op joins bad input, layouts, poison, empty input and row independence by one entry here.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import cases
import numpy as np
import oracle
import rooftile as rt
import torch
from rooftile.kv_paged import KVCacheView

ACTIVATIONS = frozenset(cases.DTYPES)
INDICES = frozenset(["int32", "int64"])
EVERYWHERE, ON_GPU = frozenset(["cpu", "cuda"]), frozenset(["cuda"])


@dataclass(frozen=True)
class Tensor:
    """One tensor argument. dtypes: those that can be right in some call; a dtype outside is always refused."""

    dtypes: frozenset = ACTIVATIONS
    optional: bool = False
    written: bool = False
    primary: bool = False  # others are measured against it: an error may name them instead
    free_dims: tuple = ()  # dimensions that no other argument is tied to
    bad_values: tuple = ()  # of index tensors: out of range
    expandable: tuple = ()  # dimensions along which a stride of 0 is a legal input
    rows: int | None = None  # the dimension that counts independent rows
    lists: bool = False  # a list of numbers is welcome as well
    contiguous: frozenset = frozenset()  # devices on which any other layout is refused by name
    any_device: bool = False  # it may lie elsewhere than the others


@dataclass(frozen=True)
class Scalar:
    """A number, a choice or a flag. bad: values of the right type that are out of range."""

    kind: type = float
    optional: bool = False
    bad: tuple = ()
    bits: int = 32


@dataclass(frozen=True)
class Object:
    """A cache or a weight. wrong: the good one -> {label: one of the right type that does not fit the call}.

    moved: (object, place) -> the same with every array a through place(a).
    arrays: object -> {name: array}, the memory behind it. replaced: (object, {name: array}) -> the same with those
    arrays instead. stored: the op writes that memory.
    """

    wrong: Callable = lambda value: {}
    moved: Callable = lambda value, place: value
    arrays: Callable = lambda value: {}
    replaced: Callable = lambda value, arrays: value
    stored: bool = False


@dataclass(frozen=True)
class Absent:
    """An argument that must not be given in this call."""


@dataclass(frozen=True)
class Self(Object):
    """The cache whose method the op is: it has memory that other arguments may share, and no bad value."""


@dataclass
class Call:
    """A good call: its arguments, and the guarded memory behind every tensor of it."""

    op: "Op"
    kwargs: dict
    guards: list
    before: list = field(default_factory=list)
    returned: object = None

    def __post_init__(self):
        self.before = [t.clone() for t in self.op.state(self.kwargs)]
        for guard in self.guards:  # making a cache on guarded memory filled it
            guard.before = guard.bytes.clone()

    def guard(self, name):
        return next(g for g in self.guards if g.tensor is self.kwargs[name])

    def run(self, /, plan=None, **changes):  # "self" may be a change, of the cache whose method the op is
        """plan: passed on to ops that take one; those that take none run once, under the first name."""
        if "plan" in self.op.arguments:
            changes |= {} if plan is None else {"plan": plan}
        else:
            assert plan in (None, cases.PLANS[0]), f"{self.op.id} takes no plan, so {plan!r} repeats a call"
        self.returned = self.op.function(**{**self.kwargs, **changes})
        return self.returned

    def written(self):
        """What the good call before left behind: every tensor it wrote or made, and the state of what it changed."""
        outputs = [self.kwargs[name] for name in self.op.tensors(written=True) if self.kwargs.get(name) is not None]
        return outputs + self.op.made(self.returned) + self.op.state(self.kwargs)

    def check_untouched(self):
        for guard in self.guards:
            guard.check_untouched("an argument")
        self.check_state()

    def check_state(self):
        for before, now in zip(self.before, self.op.state(self.kwargs), strict=True):
            assert torch.equal(before.view(torch.uint8), now.view(torch.uint8)), "the cache was written"


@dataclass(frozen=True)
class Op:
    name: str
    function: Callable
    arguments: dict  # name -> Tensor, Scalar or Object, every argument of the function
    build: Callable  # (Make) -> kwargs
    empties: tuple = ()  # further builds, with dimensions of size 0
    large: Callable | None = None  # a build that is worth splitting over threads
    state: Callable = lambda kwargs: []  # tensors behind objects that the op changes
    made: Callable = lambda returned: []  # arrays that the op makes itself, out of what it returns
    case: str = ""  # where one op has several entries
    gpu: bool = False  # has GPU kernels, and a build that makes its arguments there

    @property
    def id(self):
        return f"{self.name} {self.case}" if self.case else self.name

    def call(self, dtype="float32", device="cpu", build=None):
        make = Make(self, dtype, device)
        return Call(self, (build or self.build)(make), make.guards)

    def tensors(self, written=None):
        return [n for n, a in self.arguments.items() if isinstance(a, Tensor) and written in (None, a.written)]


class Make:
    """Makes the arguments of one call. Every tensor lies between poisoned margins."""

    def __init__(self, op, dtype, device):
        self.op, self.dtype, self.device, self.guards = op, dtype, device, []
        self.head_dim = HEAD_DIM[device]

    def cache(self, format, **options):
        return kv_cache(format, self.dtype, head_dim=self.head_dim, make=self, device=self.device, **options)

    def input(self, *shape, dtype=None, spread=1.0, mean=0.0):
        dtype = dtype or self.dtype
        data = cases.values(shape, dtype, self.op.name, len(self.guards), *shape, spread=spread, mean=mean)
        return self.given(torch.from_numpy(data).to(cases.torch_dtype(dtype)))

    def index(self, values, dtype="int32"):
        return self.given(torch.as_tensor(values, dtype=cases.torch_dtype(dtype)))

    def given(self, values):
        return self._guard(tuple(values.shape), values.dtype, values)

    def output(self, *shape, dtype=None):
        return self._guard(shape, dtype or self.dtype)

    def _guard(self, shape, dtype, values=None):
        guard = cases.guarded(shape, dtype, self.device, values=values)
        self.guards.append(guard)
        return guard.tensor


PLAN = Scalar(str, optional=True)
STREAM = Scalar(int, optional=True, bits=64)
FLAG = Scalar(bool)
CONTEXT = {"stream": STREAM, "plan": PLAN}
EPS = Scalar(bad=(-1.0, -1e-30, float("nan"), float("inf"), 1e300))
WEIGHT = Tensor(optional=True)
OUT = Tensor(written=True, optional=True, rows=0)
ROWS = Tensor(primary=True, expandable=(0, 1), rows=0)


HIDDEN = 37  # a full vector, and a tail of every width


def _norm(*lead, bias=False, adds=False):
    def build(m):
        kwargs = {"x": m.input(*lead, HIDDEN), "weight": m.input(HIDDEN, mean=1.0), "eps": 1e-5}
        if bias:
            kwargs["bias"] = m.input(HIDDEN)
        else:
            kwargs["weight_offset"] = 0.0
        if adds:
            kwargs |= {"residual": m.input(*lead, HIDDEN), "residual_out": m.output(*lead, HIDDEN)}
        return kwargs | {"out": m.output(*lead, HIDDEN)}

    return build


def _norm_op(function, bias=False, adds=False):
    arguments = {"x": ROWS, "weight": WEIGHT, "eps": EPS, "out": OUT, **CONTEXT}
    if bias:
        arguments["bias"] = WEIGHT
    else:
        arguments["weight_offset"] = Scalar(bad=(float("nan"), float("inf"), 1e300))
    if adds:
        arguments |= {"residual": Tensor(expandable=(0, 1), rows=0), "residual_out": OUT}

    def norm(*lead):
        return _norm(*lead, bias=bias, adds=adds)

    return Op(
        function.__name__,
        function,
        arguments,
        norm(2, 3),
        empties=(norm(0, 3), norm(2, 0), norm(0)),
        large=norm(67, 9),
        gpu=True,
    )


def _qk_norm(batch, tokens, heads=3, kv_heads=1, dim=37):
    def build(m):
        return {
            "q": m.input(batch, tokens, heads, dim),
            "k": m.input(batch, tokens, kv_heads, dim),
            "q_weight": m.input(dim, mean=1.0),
            "k_weight": m.input(dim, mean=1.0),
            "eps": 1e-5,
            "weight_offset": 0.0,
            "q_out": m.output(batch, tokens, heads, dim),
            "k_out": m.output(batch, tokens, kv_heads, dim),
        }

    return build


def _embedding(*lead, index="int64"):
    return lambda m: {
        "ids": m.index(cases.generator("ids").integers(0, 50, lead), index),
        "weight": m.input(50, HIDDEN),
        "scale": 1.5,
        "out": m.output(*lead, HIDDEN),
    }


def _rope(batch, tokens, heads=3, kv_heads=1, dim=22, pairs=9, index="int64"):
    """Fewer pairs than half the dimensions: what lies past them is copied."""

    def build(m):
        positions = cases.generator("positions").integers(0, 50, (batch, tokens))
        return {
            "q": m.input(batch, tokens, heads, dim),
            "k": m.input(batch, tokens, kv_heads, dim),
            "cos": m.input(50, pairs),
            "sin": m.input(50, pairs),
            "positions": m.index(positions, index),
            "q_out": m.output(batch, tokens, heads, dim),
            "k_out": m.output(batch, tokens, kv_heads, dim),
        }

    return build


def _gated(*lead, **more):
    return lambda m: {"gate_up": m.input(*lead, 2 * HIDDEN, spread=3.0), "out": m.output(*lead, HIDDEN), **more}


def _softmax(*lead):
    return lambda m: {"x": m.input(*lead, HIDDEN, spread=3.0), "out": m.output(*lead, HIDDEN)}


def _sample(*lead):
    def build(m):
        rng = cases.generator("sample", *lead)
        return {
            "logits": m.input(*lead, HIDDEN, spread=3.0),
            "temperature": 2.0,
            "top_k": 20,
            "top_p": 0.8,
            "min_p": 0.05,
            "repetition_penalty": 1.2,
            "token_ids": m.index(rng.integers(-1, HIDDEN, (*lead, 5))),
            "seeds": m.index(rng.integers(0, 2**62, lead), "int64"),
            "positions": m.index(rng.integers(0, 50, lead)),
            "order": "transformers",
            "out": m.output(*lead, dtype="int64"),
        }

    return build


# ---- W4A16

W4_N, W4_K, W4_GROUP = 19, 96, 32  # no multiple of a tile in either direction


def _w4_parts(kind, n=W4_N, k=W4_K, group=W4_GROUP, scale_dtype="float16", bits=4):
    """Canonical codes, scales and zeros of a weight."""
    rng = cases.generator("w4", kind, n, k)
    codes = torch.from_numpy(rng.integers(0, 256, (n, k * bits // 8), dtype=np.uint8))
    dtype = cases.torch_dtype(scale_dtype)
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, (n, k // group)) / 2 ** (bits - 4)).to(dtype)
    zeros = {
        "symmetric": None,
        "integer": torch.from_numpy(rng.integers(0, 2**bits, (n, k // group), dtype=np.uint8)),
        "minima": torch.from_numpy(rng.uniform(-0.5, 0.0, (n, k // group))).to(dtype),
    }[kind]
    return codes, scales, zeros


W4_TYPES = {4: rt.W4Weight, 8: rt.W8Weight}


def w4_weight(kind="symmetric", n=W4_N, k=W4_K, act_order=False, device="cpu", bits=4):
    codes, scales, zeros = _w4_parts(kind, n, k, bits=bits)
    perm = torch.from_numpy(cases.generator("perm").permutation(k).astype(np.int32)) if act_order else None
    return W4_TYPES[bits].from_canonical(codes, scales, zeros, perm=perm).to(device)


def _other_weights(w):
    here = functools.partial(w4_weight, device=w.codes.device, bits=w.BITS)
    shapes = {"K larger": here(k=128), "K smaller": here(k=32), "N larger": here(n=W4_N + 1)}
    return shapes | ({"on the CPU": w.to("cpu")} if w.codes.is_cuda else {})


def w4_arrays(w):
    return [a for a in (w.codes, w.scales, w.offsets, w.perm) if a is not None]


def _w4_moved(w, place):
    parts = [None if a is None else place(a) for a in (w.codes, w.scales, w.offsets)]
    return type(w)(*parts, perm=None if w.perm is None else place(w.perm), **w.layout)


W4_ARRAYS = ("codes", "scales", "offsets", "perm")


def _w4_parts_of(w):
    return {name: getattr(w, name) for name in W4_ARRAYS if getattr(w, name) is not None}


def _w4_replaced(w, arrays):
    parts = {name: getattr(w, name) for name in W4_ARRAYS} | arrays
    return type(w)(**parts, **w.layout)


W4 = Object(_other_weights, _w4_moved, _w4_parts_of, _w4_replaced)


def _w4a16(kind, *lead, act_order=False, bits=4):
    return lambda m: {
        "x": m.input(*lead, W4_K),
        "w": w4_weight(kind, act_order=act_order, device=m.device, bits=bits),
        "bias": m.input(W4_N),
        "residual": m.input(*lead, W4_N),
        "out": m.output(*lead, W4_N),
    }


def _w4a16_op(kind, **more):
    op = f"w{more.get('bits', 4)}a16_matmul"
    return Op(
        op,
        getattr(rt, op),
        {
            "x": ROWS,
            "w": W4,
            "bias": WEIGHT,
            "activation": Scalar(str, optional=True, bad=("relu6",)),
            "residual": Tensor(optional=True, expandable=(0, 1), rows=0),
            "out": OUT,
            "batch_invariant": FLAG,
            **CONTEXT,
        },
        _w4a16(kind, 2, 3, **more),
        empties=(_w4a16(kind, 0, 3, **more), _w4a16(kind, 2, 0, **more)),
        large=_w4a16(kind, 5, 9, **more),
        case=" ".join([kind, *(name for name in more if name != "bits")]),
        gpu=True,
    )


def _from_canonical(kind, act_order=False, bits=4):
    def build(m):
        codes, scales, zeros = _w4_parts(kind, bits=bits)
        perm = cases.generator("perm").permutation(W4_K)
        return {
            "codes": m.given(codes),
            "scales": m.given(scales),
            "zeros": None if zeros is None else m.given(zeros),
            "group_size": W4_GROUP,
            "kind": kind,
            "perm": m.index(perm) if act_order else None,
        }

    return build


SCALES = frozenset(["float16", "bfloat16"])


def _linear(*lead):
    return lambda m: {
        "x": m.input(*lead, W4_K),
        "weight": m.input(W4_N, W4_K),
        "bias": m.input(W4_N),
        "residual": m.input(*lead, W4_N),
        "out": m.output(*lead, W4_N),
    }


LINEAR = Op(
    "linear",
    rt.linear,
    {
        "x": ROWS,
        "weight": Tensor(primary=True, expandable=(0, 1)),
        "bias": WEIGHT,
        "activation": Scalar(str, optional=True, bad=("relu6",)),
        "residual": Tensor(optional=True, expandable=(0, 1), rows=0),
        "out": OUT,
        **CONTEXT,
    },
    _linear(2, 3),
    empties=(_linear(0, 3), _linear(2, 0)),
    large=_linear(5, 9),
    gpu=True,
)


GROUP_SIZE = Scalar(int, optional=True, bad=(0, -1, -32, 16, 33, 48, 64, 2**31 - 1))


def _from_canonical_op(kind, zeros_dtypes, act_order=False, bits=4):
    arguments = {
        "codes": Tensor(frozenset(["uint8"]), primary=True),
        "scales": Tensor(SCALES, primary=True),
        "zeros": Tensor(zeros_dtypes),
        "group_size": GROUP_SIZE,
        "kind": Scalar(str, optional=True),
        "perm": Tensor(frozenset(["int32"]), bad_values=(-1, W4_K, 2**31 - 1), optional=True),
    }
    absent = [n for n, given in (("zeros", kind != "symmetric"), ("perm", act_order)) if not given]
    return Op(
        f"W{bits}Weight.from_canonical",
        W4_TYPES[bits].from_canonical,
        {n: Absent() if n in absent else a for n, a in arguments.items()},
        _from_canonical(kind, act_order, bits),
        made=w4_arrays,
        case=kind,
        gpu=True,
    )


def _from_kpacked(m):
    codes, scales, _ = _w4_parts("symmetric")
    packed = codes.view(torch.int32).T ^ -0x77777778  # two's complement nibbles
    return {"packed": m.given(packed), "scales": m.given(scales.T)}


W4_OPS = [
    Op(
        "W4Weight.from_kpacked",
        rt.W4Weight.from_kpacked,
        {  # any K and any group size are right somewhere
            "packed": Tensor(frozenset(["int32"]), primary=True, free_dims=(0,)),
            "scales": Tensor(SCALES, primary=True, free_dims=(0,)),
        },
        _from_kpacked,
        made=w4_arrays,
        gpu=True,
    ),
    _w4a16_op("symmetric"),
    _w4a16_op("integer"),
    _w4a16_op("minima", act_order=True),
    _from_canonical_op("symmetric", frozenset()),
    _from_canonical_op("integer", frozenset(["uint8"])),
    _from_canonical_op("minima", SCALES, act_order=True),
    _w4a16_op("integer", bits=8, act_order=True),
    _from_canonical_op("integer", frozenset(["uint8"]), act_order=True, bits=8),
    *(
        Op(
            f"W{bits}Weight.quantize",
            W4_TYPES[bits].quantize,
            {
                "weight": Tensor(free_dims=(0, 1), any_device=True),
                "group_size": Scalar(int, bad=GROUP_SIZE.bad),
                "zeros": Scalar(str, optional=True, bad=("integer",)),
            },
            lambda m, zeros=zeros: {"weight": m.input(W4_N, W4_K), "group_size": W4_GROUP, "zeros": zeros},
            made=w4_arrays,
            case=zeros,
            gpu=True,
        )
        for bits, zeros in ((4, "symmetric"), (4, "minima"), (8, "symmetric"))
    ),
]

# ---- KV cache

KV_HEADS, CACHE_ROWS = 2, 3
HEAD_DIM = {"cpu": 40, "cuda": 64}  # the kernels of a GPU take few
STORED = 30  # tokens a row holds before the call: the append closes a group


PAGE = 32
PAGES = ((7, 2, 9), (0, 4, 5), (3, 8, 1))  # of the rows of a paged cache; page 6 is nobody's
NO_PAGE = 10**6  # what stands in a table where nothing may look


def kv_cache(format, dtype, head_dim, kv_heads=KV_HEADS, stored=STORED, kind="contiguous", make=None, device="cpu"):
    """kind: "contiguous", "paged", or "view", whose arrays are an engine's: out of `make`'s guarded memory."""
    element = oracle.ELEMENT_FORMATS.get(format, dtype)
    options = {"format": format, "dtype": element, "device": device}
    if kind == "contiguous":
        cache = rt.KVCache(CACHE_ROWS, 128, kv_heads, head_dim, **options)
    elif kind == "paged":
        cache = rt.PagedKVCache(13, PAGE, kv_heads, head_dim, max_rows=CACHE_ROWS, max_pages_per_row=4, **options)
    else:
        inner = (kv_heads, oracle.block_bytes(format, PAGE, head_dim))
        pool = torch.zeros((10, *inner), dtype=torch.uint8)
        if format in oracle.ELEMENT_FORMATS:
            pool = torch.zeros((10, 2, PAGE, kv_heads, head_dim), dtype=cases.torch_dtype(element))
        table = torch.tensor([[*pages, NO_PAGE] for pages in PAGES], dtype=torch.int32)
        none = torch.zeros(CACHE_ROWS, dtype=torch.int32)
        parts = [make.given(t) for t in (pool, table, none)]
        raw = torch.zeros((CACHE_ROWS, kv_heads, 64, head_dim), dtype=cases.torch_dtype(element))
        ring = tuple(make.given(t) for t in (raw, raw, none)) if format in oracle.KIVI_FORMATS else None
        cache = kv_view(format, element, head_dim, parts, ring)
    if stored:
        shape = (CACHE_ROWS, stored, kv_heads, head_dim)
        k, v = (cases.tensor(cases.values(shape, element, "stored", side), element, device) for side in "kv")
        cache.append(k, v)
    return cache


def kv_view(format, element, head_dim, parts, ring):
    sizes = {} if format in oracle.ELEMENT_FORMATS else {"page_size": PAGE, "head_dim": head_dim}
    return rt.PagedKVCache.view(*parts, format=format, dtype=element, ring=ring, **sizes)


def _cache_moved(cache, place):
    """Views on an engine's memory: the same with every array in another place."""
    if "pool" not in cache._arrays or isinstance(cache, rt.KVCache | rt.PagedKVCache):
        return cache
    parts = [place(cache._arrays[n]) for n in ("pool", "block_table", "lengths")]
    ring = tuple(place(cache._arrays[n]) for n in ("ring_k", "ring_v", "raw_from") if n in cache._arrays)
    return kv_view(cache.format, cache.dtype, cache.head_dim, parts, ring or None)


def _cache_arrays(cache):
    return {name: a for name, a in cache._arrays.items() if name != "fault"}


def _cache_replaced(cache, arrays):
    """The same cache on other memory, with its allocator's books."""
    twin = copy.copy(cache)
    twin._sources = ()  # of a view in 16 bits: the pool that its arrays no longer lie in
    twin._hold_arrays("a test", cache._arrays | arrays)
    for theirs, ours in zip(twin._page_state, cache._page_state, strict=True):
        theirs.copy_(ours)
    return twin


def cache_state(cache):
    """All arrays of a cache; of one with an allocator also who holds which page."""
    return [*cache._arrays.values(), *getattr(cache, "_page_state", ())]


def _cache_state(kwargs):
    return cache_state(kwargs["self"])


def _append(format, batch=2, tokens=5, counts=(5, 3), kind="contiguous"):
    def build(m):
        shape = (batch, tokens, KV_HEADS, m.head_dim)
        element = oracle.ELEMENT_FORMATS.get(format, m.dtype)
        return {
            "self": m.cache(format, kind=kind),
            "k": m.input(*shape, dtype=element),
            "v": m.input(*shape, dtype=element),
            "rows": m.index([2, 0][:batch]),
            "counts": m.index(counts[:batch]),
        }

    return build


# Of what the host reads, on any device: no layout and no place is refused.
READ_ROWS = Tensor(frozenset(["int32"]), bad_values=(-1, CACHE_ROWS, 2**31 - 1, -(2**31)), lists=True, any_device=True)
ROW_INDEX = replace(READ_ROWS, optional=True, any_device=False, contiguous=ON_GPU)
COUNT = replace(ROW_INDEX, bad_values=(-1, 6, 2**31 - 1, -(2**31)))
NEW_TOKENS = Tensor(primary=True)
_BEHIND = {"arrays": _cache_arrays, "replaced": _cache_replaced}  # of a cache
APPENDED = Self(**_BEHIND, stored=True)

# (format, kind of cache): every kind with a format of each family
CACHES = [
    ("bf16", "contiguous"),
    ("int8", "contiguous"),
    ("int4-kivi", "contiguous"),
    ("int8", "paged"),
    ("int4-kivi", "paged"),
    ("fp32", "view"),
    ("fp16", "view"),
    ("int8", "view"),
    ("int4-kivi", "view"),
]
GPU_FORMATS = tuple(f for f in oracle.KV_FORMATS if f != "fp32")
CLASSES = {"contiguous": rt.KVCache, "paged": rt.PagedKVCache, "view": KVCacheView}


def _case(format, kind):
    return format if kind == "contiguous" else f"{kind} {format}"


def _change(format, kind, make=lambda m: {}, **scalars):
    """A call of a method that takes index tensors and plain values; every row holds STORED tokens."""
    return lambda m: {"self": m.cache(format, kind=kind), **make(m), **scalars}


def _on_rows(rows, **values):
    return lambda m: {n: m.index(v) for n, v in {"rows": rows, **values}.items()}


def _kv_ops(format, kind):
    """Everything that changes or reads a cache but append, which has its own number of rows and tokens."""
    cls = CLASSES[kind]
    lengths = replace(READ_ROWS, bad_values=(-1, STORED + 1, 2**31 - 1, -(2**31)))
    row = Scalar(int, bad=(-1, CACHE_ROWS, 2**31 - 1))

    def op(name, arguments, call, empties=(), **more):
        return Op(
            name,
            getattr(cls, name),
            {"self": Absent(), **arguments},
            _change(format, kind, call) if callable(call) else _change(format, kind, **call),
            empties=tuple(_change(format, kind, e) for e in empties),
            state=_cache_state,
            case=_case(format, kind),
            gpu=format in GPU_FORMATS,
            **more,
        )

    return [
        op(
            "truncate",
            {"rows": replace(READ_ROWS, primary=True), "lengths": lengths},
            _on_rows([2, 0], lengths=[STORED - 11, 0]),
            empties=(_on_rows([], lengths=[]),),
        ),
        op("reorder", {"index": READ_ROWS}, lambda m: {"index": m.index([1, 2, 0])}),
        op("fork", {"src": row, "dst": row}, {"src": 2, "dst": 0}),
        op(
            "reset",
            {"rows": replace(READ_ROWS, optional=True, free_dims=(0,))},
            _on_rows([2, 0]),
            empties=(_on_rows([]), lambda m: {"rows": None}),
        ),
        op(
            "dequantize",
            {
                "row": Scalar(int, optional=True, bad=row.bad),
                "at": Scalar(int, optional=True, bad=(-1, STORED + 1, 2**31 - 1)),
            },
            {"row": 1, "at": STORED - 1},
            made=list,
        ),
    ]


KV_OPS = [
    *(
        Op(
            "append",
            CLASSES[kind].append,
            {"self": APPENDED, "k": NEW_TOKENS, "v": NEW_TOKENS, "rows": ROW_INDEX, "counts": COUNT, **CONTEXT},
            _append(format, kind=kind),
            empties=(
                _append(format, batch=0, kind=kind),
                _append(format, tokens=0, counts=(0, 0), kind=kind),
                _append(format, counts=(0, 0), kind=kind),
            ),
            state=_cache_state,
            case=_case(format, kind),
            gpu=format in GPU_FORMATS,
        )
        for format, kind in CACHES
    ),
    *(
        op
        for kind, format in (("contiguous", "int4-kivi"), ("paged", "int8"), ("view", "int4-kivi"))
        for op in _kv_ops(format, kind)
    ),
]

# ---- attention

Q_HEADS = 2 * KV_HEADS
FLOAT32 = frozenset(["float32"])
LSE = Tensor(FLOAT32, written=True, optional=True, rows=0)
HEAD_VALUES = Tensor(optional=True)
LOGITS = {
    "scale": Scalar(optional=True, bad=(float("nan"), float("inf"), 1e300)),
    "window": Scalar(int, optional=True, bad=(0, -1, -(2**31)), bits=64),
    "softcap": Scalar(optional=True, bad=(0.0, -1.0, float("nan"), float("inf"), 1e300)),
    "sinks": HEAD_VALUES,
    "return_lse": Scalar(bool),
}


def _other_caches(cache):
    dim, other = cache.head_dim, "bfloat16" if cache.dtype == "float16" else "float16"
    here = functools.partial(kv_cache, "int8", device=cache.device)
    wrong = {
        "of another dtype": here(other, dim),
        "of another head_dim": here(cache.dtype, dim + 8),
        "of another number of heads": here(cache.dtype, dim, kv_heads=3),
    }
    return wrong | ({"on the CPU": cache.to("cpu")} if cache.device != "cpu" else {})


def _decode(format, batch=2, tokens=5, stored=STORED, kind="contiguous"):
    def build(m):
        shape, dtype = (batch, tokens, Q_HEADS), oracle.ELEMENT_FORMATS.get(format, m.dtype)
        return {
            "q": m.input(*shape, m.head_dim, dtype=dtype),
            "cache": m.cache(format, stored=stored, kind=kind),
            "rows": m.index([2, 0][:batch]),
            "counts": m.index([5, 3][:batch]) if tokens == 5 else None,
            "window": 20,
            "sinks": m.input(Q_HEADS, dtype=dtype),
            "out": m.output(*shape, m.head_dim, dtype=dtype),
            "lse": m.output(*shape, dtype="float32"),
        }

    return build


def _prefill(batch=2, tokens=5, keys=7, format=None):
    def build(m):
        shape = (batch, tokens, Q_HEADS)
        cached = {"cache": m.cache(format), "rows": m.index([2, 0][:batch])} if format else {}
        return {
            "q": m.input(*shape, m.head_dim),
            **{n: m.input(batch, tokens if format else keys, KV_HEADS, m.head_dim) for n in "kv"},
            "counts": m.index([5, 3][:batch]) if format and tokens == 5 else None,
            "sinks": m.input(Q_HEADS),
            "alibi_slopes": m.input(Q_HEADS, dtype="float32"),
            "out": m.output(*shape, m.head_dim),
            "lse": m.output(*shape, dtype="float32"),
            **cached,
        }

    return build


def _packed(m):
    return {
        "q": m.input(9, Q_HEADS, m.head_dim),
        **{n: m.input(12, KV_HEADS, m.head_dim) for n in "kv"},
        "cu_seqlens_q": m.index([0, 4, 4, 9]),
        "cu_seqlens_k": m.index([0, 5, 7, 12]),
        "sinks": m.input(Q_HEADS),
        "alibi_slopes": m.input(Q_HEADS, dtype="float32"),
        "out": m.output(9, Q_HEADS, m.head_dim),
        "lse": m.output(9, Q_HEADS, dtype="float32"),
    }


def _merge(*lead):
    def build(m):
        parts = (("out", (HEAD_DIM["cpu"],), None), ("lse", (), "float32"))
        sides = {f"{n}_{s}": m.input(*lead, *d, dtype=t) for s in "ab" for n, d, t in parts}
        return sides | {n: m.output(*lead, *d, dtype=t) for n, d, t in parts}

    return build


_PICKED, _COUNTED = replace(ROW_INDEX, rows=0), replace(COUNT, rows=0)
_BEGINS = Tensor(frozenset(["int32"]), optional=True, primary=True, bad_values=(-1, 50, 2**31 - 1), lists=True)
_PREFILL = {
    "q": ROWS,
    "k": Tensor(primary=True, expandable=(0, 1), rows=0),
    "v": Tensor(primary=True, expandable=(0, 1), rows=0),
    "causal": Scalar(bool),
    "alibi_slopes": Tensor(FLOAT32, optional=True),
    "out": OUT,
    "lse": LSE,
    **LOGITS,
    **CONTEXT,
}
_UNPACKED = {"cu_seqlens_q": Absent(), "cu_seqlens_k": Absent()}

ATTENTION_OPS = [
    *(
        Op(
            "decode_attention",
            rt.decode_attention,
            {
                "q": ROWS,
                "cache": Object(_other_caches, _cache_moved, **_BEHIND),
                "rows": _PICKED,
                "counts": _COUNTED,
                "out": OUT,
                "lse": LSE,
                **LOGITS,
                **CONTEXT,
            },
            _decode(format, kind=kind),
            empties=tuple(_decode(format, kind=kind, **e) for e in ({"batch": 0}, {"tokens": 0}, {"stored": 0})),
            state=lambda kwargs: cache_state(kwargs["cache"]),
            case=_case(format, kind),
            gpu=format in GPU_FORMATS,
        )
        for format, kind in CACHES
        if format != "bf16"
    ),
    Op(
        "prefill_attention",
        rt.prefill_attention,
        {**_PREFILL, **_UNPACKED, "cache": Absent(), "rows": Absent(), "counts": Absent()},
        _prefill(),
        empties=(_prefill(batch=0), _prefill(tokens=0), _prefill(keys=0)),
        large=_prefill(tokens=70, keys=90),
    ),
    Op(
        "prefill_attention",
        rt.prefill_attention,
        {
            **_PREFILL,
            **_UNPACKED,
            "cache": Object(_other_caches, **_BEHIND),
            "rows": _PICKED,
            "counts": _COUNTED,
        },
        _prefill(format="int4-kivi"),
        empties=(_prefill(batch=0, format="int4-kivi"), _prefill(tokens=0, format="int4-kivi")),
        case="cache",
    ),
    Op(
        "prefill_attention",
        rt.prefill_attention,
        {
            n: Tensor(a.dtypes, a.optional, a.written, a.primary) if isinstance(a, Tensor) else a
            for n, a in _PREFILL.items()
        }
        | {"cu_seqlens_q": _BEGINS, "cu_seqlens_k": _BEGINS}
        | {"cache": Absent(), "rows": Absent(), "counts": Absent()},
        _packed,
        case="packed",
    ),
    Op(
        "merge_attention",
        rt.merge_attention,
        {
            "out_a": ROWS,
            "lse_a": Tensor(FLOAT32, expandable=(0, 1), rows=0),
            "out_b": ROWS,
            "lse_b": Tensor(FLOAT32, expandable=(0, 1), rows=0),
            "out": OUT,
            "lse": LSE,
            **CONTEXT,
        },
        _merge(2, 3),
        empties=(_merge(0, 3), _merge(2, 0)),
        large=_merge(67, 9),
        gpu=True,
    ),
]


def _rope_append(batch=2, tokens=5):
    def build(m):
        return {
            "q": m.input(batch, tokens, Q_HEADS, m.head_dim),
            **{n: m.input(batch, tokens, KV_HEADS, m.head_dim) for n in "kv"},
            "cos": m.input(50, m.head_dim // 2),
            "sin": m.input(50, m.head_dim // 2),
            "positions": m.index(torch.arange(30, 30 + tokens).expand(batch, tokens)),
            "cache": m.cache("int4-kivi"),
            "rows": m.index([2, 0][:batch]),
            "counts": m.index([5, 3][:batch]) if tokens == 5 else None,
            "q_out": m.output(batch, tokens, Q_HEADS, m.head_dim),
        }

    return build


TABLE = Tensor(primary=True)
POSITIONS = Tensor(INDICES, bad_values=(-1, 50, 2**31 - 1, -(2**31)), expandable=(0, 1), rows=0)

OPS = [
    _norm_op(rt.rms_norm),
    _norm_op(rt.add_rms_norm, adds=True),
    _norm_op(rt.layer_norm, bias=True),
    _norm_op(rt.add_layer_norm, bias=True, adds=True),
    Op(
        "qk_rms_norm",
        rt.qk_rms_norm,
        {
            "q": ROWS,
            "k": ROWS,
            "q_weight": WEIGHT,
            "k_weight": WEIGHT,
            "eps": EPS,
            "weight_offset": Scalar(bad=(float("nan"), float("inf"), 1e300)),
            "q_out": OUT,
            "k_out": OUT,
            **CONTEXT,
        },
        _qk_norm(2, 3),
        empties=(_qk_norm(0, 3), _qk_norm(2, 0), _qk_norm(2, 3, kv_heads=0)),
        large=_qk_norm(17, 33),
        gpu=True,
    ),
    Op(
        "embedding",
        rt.embedding,
        {
            "ids": Tensor(INDICES, bad_values=(-1, 50, 2**31 - 1, -(2**31)), expandable=(0, 1), rows=0),
            "weight": Tensor(primary=True, free_dims=(0,), expandable=(0, 1)),
            "scale": Scalar(bad=(float("nan"), float("inf"), 1e300)),
            "out": OUT,
            **CONTEXT,
        },
        _embedding(2, 3),
        empties=(_embedding(0, 3), _embedding(2, 0), _embedding(0)),
        large=_embedding(67, 9, index="int32"),
        gpu=True,
    ),
    Op(
        "rope",
        rt.rope,
        {
            "q": ROWS,
            "k": ROWS,
            "cos": TABLE,
            "sin": TABLE,
            "positions": POSITIONS,
            "q_out": OUT,
            "k_out": OUT,
            **CONTEXT,
        },
        _rope(2, 3),
        empties=(_rope(0, 3), _rope(2, 0)),
        large=_rope(17, 33, index="int32"),
        gpu=True,
    ),
    Op(
        "rope_append",
        rt.rope_append,
        {
            "q": NEW_TOKENS,
            "k": NEW_TOKENS,
            "v": NEW_TOKENS,
            "cos": TABLE,
            "sin": TABLE,
            "positions": Tensor(INDICES, bad_values=POSITIONS.bad_values),
            "cache": Object(_other_caches, **_BEHIND, stored=True),
            "rows": ROW_INDEX,
            "counts": COUNT,
            "q_out": Tensor(written=True, optional=True),
            **CONTEXT,
        },
        _rope_append(),
        empties=(_rope_append(batch=0), _rope_append(tokens=0)),
        state=lambda kwargs: cache_state(kwargs["cache"]),
        gpu=True,
    ),
    Op(
        "silu_mul",
        rt.silu_mul,
        {"gate_up": ROWS, "out": OUT, **CONTEXT},
        _gated(2, 3),
        empties=(_gated(0, 3), _gated(2, 0), _gated(0)),
        large=_gated(67, 9),
        gpu=True,
    ),
    Op(
        "gelu_mul",
        rt.gelu_mul,
        {"gate_up": ROWS, "approximate": Scalar(str, bad=("erf", "TANH")), "out": OUT, **CONTEXT},
        _gated(2, 3, approximate="tanh"),
        empties=(_gated(0, 3, approximate="none"), _gated(2, 0, approximate="tanh")),
        large=_gated(67, 9, approximate="none"),
        gpu=True,
    ),
    Op(
        "softmax",
        rt.softmax,
        {"x": ROWS, "out": OUT, **CONTEXT},
        _softmax(2, 3),
        empties=(_softmax(0, 3), _softmax(2, 0), _softmax(0)),
        large=_softmax(67, 9),
        gpu=True,
    ),
    Op(
        "sample",
        rt.sample,
        {
            "logits": Tensor(primary=True, free_dims=(2,), expandable=(0, 1), rows=0),
            "temperature": Scalar(bad=(-1.0, 1e-7, 101.0, float("nan"), float("inf"))),
            "top_k": Scalar(int, optional=True, bad=(0, -1), bits=64),
            "top_p": Scalar(optional=True, bad=(-0.1, 1.1, float("nan"))),
            "min_p": Scalar(optional=True, bad=(-0.1, 1.1, float("nan"))),
            "repetition_penalty": Scalar(optional=True, bad=(0.0, -1.0, 1e39, float("nan"), float("inf"))),
            "token_ids": Tensor(INDICES, free_dims=(2,), expandable=(0, 1, 2), rows=0),
            "seeds": Tensor(frozenset(["int64"]), expandable=(0, 1), rows=0),
            "positions": Tensor(INDICES, optional=True, expandable=(0, 1), rows=0),
            "order": Scalar(str, bad=("vLLM", "hf")),
            "out": Tensor(INDICES, written=True, optional=True, rows=0),
            **CONTEXT,
        },
        _sample(2, 3),
        empties=(_sample(0, 3), _sample(2, 0)),
        large=_sample(67, 9),
        gpu=True,
    ),
    LINEAR,
    *W4_OPS,
    *KV_OPS,
    *ATTENTION_OPS,
]
