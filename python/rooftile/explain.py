# SPDX-License-Identifier: Apache-2.0
"""What a call will run, before it runs: plan, reason, bytes, flops and what bounds it."""

import collections.abc
import inspect
import itertools
import math
import numbers
import operator
import re
import sys
from typing import NamedTuple

from rooftile import _C, attention, fused, gemm, sampling
from rooftile._arrays import ACTIVATIONS, activation_dtype, check_flag, must_be, shape_of, shown
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.kv_cache import (
    CONTIGUOUS_PAGE,
    ELEMENT_DTYPES,
    KIVI,
    Cache,
    check_format,
    integer,
    is_bool,
    pages_for,
    row_bytes,
)

# SMs, GB/s of memory and dense fp16 TFLOP/s with fp32 sums, from the data sheets of A100 80GB, RTX 3090, RTX 4090 and
# H200: what a named device is taken for.
_GPUS = {
    "sm_80": (108, 2039.0, 312.0),
    "sm_86": (82, 936.0, 71.0),
    "sm_89": (128, 1008.0, 165.0),
    "sm_90a": (132, 4800.0, 989.0),
}
_CPU = (10.0, 0.1)  # GB/s and fp32 TFLOP/s of one core, roughly
# What is lost to launches, first waits and threads; a call whose roof is lower is bound by it. GPU: one kernel of a
# graph (docs/kernels/fused.md: 2 to 3 us at 1 token); CPU: waking the threads.
_FIXED_US = {"gpu": 2.0, "cpu": 5.0}


class Explanation(NamedTuple):
    """What `rt.explain` returns. str() is a few lines, as_dict() plain values for JSON; plan= takes it back."""

    op: str
    device: str  # "cpu", "sm_90a x 132"
    plan: str | None  # what plan= takes; None where there is nothing to choose
    why: str
    kernel: str  # as rt.record_kernels gives it
    bytes: int  # that move through memory at least: every input and output once
    flops: int  # additions, multiplications, and as one each divisions and exponentials
    workspace_bytes: int
    bound: str  # "memory", "compute" or "latency"
    roof_us: float  # bytes / roof[0] or flops / roof[1], whichever takes longer
    roof: tuple  # GB/s, TFLOP/s

    @property
    def intensity(self):
        """flops / bytes."""
        return self.flops / max(self.bytes, 1)

    def as_dict(self):
        return {**self._asdict(), "roof": list(self.roof), "intensity": self.intensity}

    def __str__(self):
        workspace = f", workspace {_count(self.workspace_bytes, 'B')}" if self.workspace_bytes else ""
        return (
            f"{self.op} on {self.device}: {self.kernel}\n"
            f"  plan   {self.plan or 'none to choose'}\n"
            f"  why    {self.why}\n"
            f"  moves  {_count(self.bytes, 'B')}, {_count(self.flops, 'flop')}: {self.intensity:.3g} flop a byte"
            f"{workspace}\n"
            f"  bound  {self.bound}: {self.roof_us:.3g} us at {self.roof[0]:.0f} GB/s and {self.roof[1]:.3g} TFLOP/s"
        )


def _count(value, unit):
    power = min(int(math.log10(value) // 3), 4) if value >= 1 else 0
    return f"{value / 1000**power:.3g} {' kMGT'[power].strip()}{unit}"


def explain(op, /, *args, device=None, sms=None, dtype=None, roof=None, **kwargs):
    """What the call op(*args, **kwargs) runs and what bounds it; nothing is run, and no GPU is needed.

    op: a public op or its name ("decode_attention", "KVCache.append" as "append"). args, kwargs: those of the call.
    A tensor may be its shape alone, a tuple: it counts as contiguous and aligned. cache: a cache, or a dict with
    kv_heads, capacity and, if they are not the defaults, format ("int4-kivi"), length (tokens a row, default as many as
    fit) and page_size (64). w: a weight, or a dict with shape (N, K) and, if they are not the defaults, group_size
    (128), kind ("symmetric"), scale_dtype ("float16") and perm (True: act-order). plan= is judged as the call would.
    device: "cpu", "cuda" or "cuda:1" (that GPU), or the architecture of one that need not be there: "sm_80", "sm_86",
    "sm_89", "sm_90a"; default: where the tensors are, else the CPU. sms: how many SMs it has, default those of an A100,
    RTX 3090, RTX 4090 or H200. dtype: of tensors that are shapes, default float16 on a GPU, float32 on the CPU.
    roof: (GB/s, TFLOP/s) of the device, as `rooftile bench linear` measures them; default its data sheet's, on the CPU
    a rough guess.

    Returns an Explanation. bytes and flops are what the op has to move and compute, whatever the kernel does.
    Raises ArgumentError and ArgumentTypeError for what no plan can be made of, and NotSupportedError where the device
    has no kernel. The call looks at more: at outputs, on which devices and in which memory tensors lie, at scalars such
    as eps, top_k, seeds or softcap, at sinks, alibi_slopes and what other tensors hold, in attention at counts, and at
    how many pages a pool has left.
    Source: the plans of cpp/kernels/*/plan.cpp; roofline: Williams et al. 2009.
    """
    name = _name(op)
    if inspect.ismethod(op):  # cache.append
        args = (op.__self__, *args)
    return _OPS[name](_Call(name, args, kwargs, device, sms, dtype, roof))


def _name(op):
    name = op
    if callable(op):  # one of ours, not another's of the same name
        ours = inspect.ismethod(op) and isinstance(op.__self__, Cache) and op.__name__ == "append"
        name = "append" if ours else next((n for n, function in _FUNCTIONS.items() if function is op), op)
    if not isinstance(name, str) or name not in _OPS:
        raise ArgumentError(f"explain: op {must_be(_OPS, name)}")
    return name


class _Call:
    """The arguments of one call, and where it runs."""

    def __init__(self, op, args, kwargs, device, sms, dtype, roof):
        self.op = op
        try:
            bound = inspect.signature(_FUNCTIONS[op]).bind(*args, **kwargs)
        except TypeError as e:
            raise ArgumentTypeError(f"{op}: {e}") from None
        bound.apply_defaults()
        self.given = {"cache" if name == "self" else name: x for name, x in bound.arguments.items()}
        self.plan = self._plan()
        cache = self.given.get("cache")
        for name in ("rows", "counts"):  # what may be read once alone
            if isinstance(self.given.get(name), collections.abc.Iterator):
                self.given[name] = list(self.given[name])
        tensors = [x for x in self.given.values() if shape_of(x) is not None and _has(x, "dtype")]
        self._take_device(device, sms, [*tensors, *([cache] if isinstance(cache, Cache) else [])])
        self._take_roof(roof)
        if dtype is not None:
            self.dtype = activation_dtype("explain", dtype)
        elif isinstance(cache, Cache):
            self.dtype = cache.dtype
        else:
            self.dtype = self._dtype_of_tensors()
        if self.gpu and self.dtype == "float32" and op != "sample":
            raise NotSupportedError(f"{op}: tensors must be float16 or bfloat16 on a GPU, got float32")
        self.size = 4 if self.dtype == "float32" else 2

    def _plan(self):
        """The text of plan= as the bindings read it: of what rt.explain returned its own, which may be None."""
        plan = self.given["plan"]
        if not isinstance(plan, str):
            try:
                plan = getattr(plan, "plan", plan)
            except Exception:  # a property of whoever made it: no plan, as for the call
                pass
        if plan is not None and not isinstance(plan, str):
            raise ArgumentTypeError(f"{self.op}: plan must be a string, got {type(plan).__name__}")
        return plan

    def _dtype_of_tensors(self):
        """That of the first tensor of the dtype that a call has."""
        self.dtype = "float16" if self.gpu else "float32"
        for name in _OF_ONE_DTYPE:
            if name in self.given and _has(self.given[name], "dtype"):
                self._check_dtype(name, ACTIVATIONS)
                return _dtype(self.given[name])
        return self.dtype

    def _check_dtype(self, name, allowed):
        if _has(self.given[name], "dtype") and _dtype(self.given[name]) not in allowed:
            raise ArgumentTypeError(f"{self.op}: {name} must be {' or '.join(allowed)}, got {self.described(name)}")

    def _allowed(self, name):
        """dtypes that the tensor may have."""
        if name in ("lse_a", "lse_b"):
            return ("float32",)
        if name in ("ids", "positions", "token_ids", "seeds"):
            return ("int64",) if name == "seeds" else ("int32", "int64")
        if name in ("cos", "sin") or (name.endswith(("weight", "bias")) and self.op.endswith("norm")):
            return tuple(dict.fromkeys((self.dtype, "float32")))
        return (self.dtype,)

    def _take_device(self, device, sms, tensors):
        """gpu: (major, minor, sms, whether code for sm_90a runs), or None for the CPU."""
        if device is None:
            device = next((str(x.device) for x in tensors if getattr(x, "device", None) is not None), "cpu")
            device = "cpu" if device == "meta" else device
        device = str(device)
        self.gpu = None
        if re.fullmatch(r"cpu(:\d{1,9})?", device):
            self.device, self.arch = "cpu", None
        elif re.fullmatch(r"cuda(:\d{1,9})?", device):
            torch = sys.modules.get("torch")
            if torch is None or not torch.cuda.is_available():
                raise NotSupportedError(f'explain: device {device} is not there; name an architecture, as "sm_90a"')
            index = int(device.partition(":")[2] or torch.cuda.current_device())
            if index >= torch.cuda.device_count():
                raise ArgumentError(
                    f"explain: device {device} is not there; there are {torch.cuda.device_count()} GPUs"
                )
            facts = torch.cuda.get_device_properties(index)
            hopper = facts.major == 9 and "90a" in _C.gpu_backend()
            self.gpu = facts.major, facts.minor, facts.multi_processor_count, hopper
            self.arch = "sm_90a" if hopper else f"sm_{facts.major}{facts.minor}"
        else:
            if device not in _GPUS:
                raise ArgumentError(f'explain: device must be "cpu", "cuda" or {", ".join(_GPUS)}, got {shown(device)}')
            number = int(device.removeprefix("sm_").removesuffix("a"))
            self.gpu = number // 10, number % 10, _GPUS[device][0], device == "sm_90a"
            self.arch = device
        if sms is not None:
            if self.gpu is None:
                raise ArgumentError("explain: sms is of a GPU, but device is the CPU")
            sms = _integer("explain", "sms", sms, 1)
            if sms > 1024:
                raise ArgumentError(f"explain: sms must be at most 1024, got {sms}")
            self.gpu = (*self.gpu[:2], sms, self.gpu[3])
        if self.gpu:
            self.device = f"{self.arch} x {self.gpu[2]}"

    def _take_roof(self, roof):
        if roof is None:
            threads = _C.parallel_threads()
            # a GPU that is none of the table: an H200
            self.roof = _GPUS.get(self.arch, _GPUS["sm_90a"])[1:] if self.gpu else tuple(threads * x for x in _CPU)
            return
        try:
            if not (isinstance(roof, tuple | list) and len(roof) == 2 and all(map(_is_number, roof))):
                raise TypeError
            self.roof = float(roof[0]), float(roof[1])
        except (TypeError, OverflowError):
            raise ArgumentTypeError(f"explain: roof must be (GB/s, TFLOP/s), two numbers, got {shown(roof)}") from None
        if not all(0 < x < math.inf for x in self.roof):
            raise ArgumentError(f"explain: roof must be (GB/s, TFLOP/s), both positive, got {shown(roof)}")

    def __getitem__(self, name):
        return self.given[name]

    def shape(self, name, least=0, most=_C.max_ndim):
        """Of a tensor argument, as a tuple of ints: `least` to `most` of them."""
        shape = self._sizes(name)
        if any(not 0 <= size < 2**31 for size in shape):
            raise ArgumentError(f"{self.op}: {name} must have sizes in [0, 2**31), got {shown(shape)}")
        if math.prod(shape) >= 2**60:
            raise ArgumentError(f"{self.op}: {name} must have less than 2**60 elements, got {shown(shape)}")
        self._check_dtype(name, self._allowed(name))
        if not least <= len(shape) <= most:
            ndims = least if least == most else f"{least} to {most}"
            raise ArgumentError(f"{self.op}: {name} must have {ndims} dimensions, got {self.described(name)}")
        return shape

    def _sizes(self, name):
        x = self.given[name]
        shape = shape_of(x)
        if shape is None and isinstance(x, tuple | list):
            shape = x
        try:
            if any(map(is_bool, shape)):
                raise TypeError
            return tuple(map(operator.index, shape))
        except TypeError:
            got = f" of integers, got {shown(x)}" if isinstance(x, tuple | list) else f", got {type(x).__name__}"
            raise ArgumentTypeError(f"{self.op}: {name} must be a tensor or a shape{got}") from None

    def must_have(self, name, shape, what):
        """Raises ArgumentError for a tensor of another shape. what: what the shape is, "[hidden] = [8]"."""
        if self.given[name] is not None and self.shape(name) != tuple(shape):
            raise ArgumentError(f"{self.op}: {name} must {what}, got {self.described(name)}")

    def like(self, name, other):
        """Raises ArgumentError for a tensor of another shape than that of `other`."""
        shape = self.shape(other)
        self.must_have(name, shape, f"have {other}'s shape {list(shape)}")

    def refuse_shape(self, name, what):
        raise ArgumentError(f"{self.op}: {name} must {what}, got {self.described(name)}")

    def described(self, name):
        """A tensor as errors give it: "float32[2, 8] on cpu"."""
        dtype = getattr(self.given[name], "dtype", None)
        dtype = self._allowed(name)[0] if dtype is None else _dtype(self.given[name])
        return f"{dtype}{list(self._sizes(name))} on {self.arch or 'cpu'}"

    def bytes(self, *names):
        """Of tensors in the call's dtype; None counts as none."""
        return sum(self.size * math.prod(self.shape(name)) for name in names if self.given[name] is not None)

    def bound(self, name):
        """A tensor as the binding takes it: itself where it has memory to look at, else its shape."""
        x = self.given[name]
        if x is None:
            return None
        shape = self.shape(name)
        has_memory = _has(x, "__dlpack__") and str(getattr(x, "device", "cpu")) != "meta"
        return x if has_memory and str(x.dtype).removeprefix("torch.") == self.dtype else shape

    def result(self, nbytes, flops, kernel="", facts=None):
        """facts: (plan, why, kernel, bytes of workspace) on a GPU; without them there is no plan."""
        if self.gpu is None:
            variant = _C.explain_cpu(self.op, self.plan)
            why = "the fastest variant that this CPU runs" if self.plan is None else "forced by plan="
            facts = variant, why, f"cpu_{variant}_{kernel}", 0
        elif facts is None:
            if self.plan is not None:
                raise NotSupportedError(
                    f"{self.op}: plan {_C.quoted(self.plan)} is no variant of the GPU kernels; leave plan out"
                )
            facts = None, _NO_PLAN, f"cuda_{kernel}", 0
        memory, compute = nbytes / self.roof[0] / 1e3, flops / self.roof[1] / 1e6
        fixed = _FIXED_US["gpu" if self.gpu else "cpu"]
        bound = "latency" if max(memory, compute) < fixed else "memory" if memory >= compute else "compute"
        plan, why, kernel, workspace = facts
        return Explanation(
            self.op,
            self.device,
            plan,
            why,
            kernel,
            int(nbytes),
            int(flops),
            workspace,
            bound,
            max(memory, compute),
            self.roof,
        )


def _product(call, n, k, weight_bytes, kernel, facts):
    x = call.shape("x")
    m, outputs = math.prod(x[:-1]), gemm.outputs(n, call["activation"])
    call.must_have("bias", (n,), f"be [N] = [{n}]")
    call.must_have("residual", (*x[:-1], outputs), f"be x's shape with {outputs} last, {[*x[:-1], outputs]}")
    nbytes = weight_bytes + call.size * m * (k + outputs) + call.bytes("bias", "residual")
    return call.result(nbytes, 2 * m * n * k, kernel, facts)


def _output(call, n):
    """out as the binding takes it."""
    if call["out"] is not None:
        return call.bound("out")
    return *call.shape("x")[:-1], gemm.outputs(n, call.given["activation"])


def _check_activation(call, known):
    activation = call["activation"]
    if activation is not None and not isinstance(activation, str):
        raise ArgumentTypeError(f"{call.op}: activation must be a string, got {type(activation).__name__}")
    if activation is not None and activation not in known:
        raise ArgumentError(f"{call.op}: activation {must_be(known, activation)}")


def _linear(call):
    _check_activation(call, gemm.ACTIVATIONS)
    x, (n, k), facts = call.shape("x", 1), call.shape("weight", 2, 2), None
    if x[-1] != k:
        call.refuse_shape("weight", f"be [N, K] with x's K = {x[-1]}")
    if call.gpu:
        tensors = call.bound("x"), call.bound("weight"), _output(call, n)
        options = call.bound("bias"), call.bound("residual")
        facts = _C.explain_linear(call.gpu, call.dtype, *tensors, *options, call.plan)
    return _product(call, n, k, call.bytes("weight"), f"{call.dtype}_linear", facts)


def _weight(call, weight_type):
    """(N, K, group size, kind, dtype of scales, act-order) of the argument w."""
    w = call["w"]
    if isinstance(w, weight_type):
        return *w.shape, w.group_size, w.kind, w.scale_dtype, w.perm is not None
    if not isinstance(w, dict):
        raise ArgumentTypeError(f"{call.op}: w must be a {weight_type.__name__} or a dict, got {type(w).__name__}")
    known = {"group_size": 128, "kind": "symmetric", "scale_dtype": "float16", "perm": False}
    _check_keys(call.op, "w", w, ("shape",), known)
    if isinstance(w["shape"], tuple | list) and any(map(is_bool, w["shape"])):
        raise ArgumentTypeError(f"{call.op}: w's shape must be (N, K), two integers, got {shown(w['shape'])}")
    n, k = gemm._sizes(call.op, w["shape"])
    facts = {key: w.get(key, default) for key, default in known.items()}
    _integer(call.op, "w's group_size", facts["group_size"])
    if not isinstance(facts["scale_dtype"], str) or facts["scale_dtype"] not in ("float16", "bfloat16"):
        raise ArgumentError(f"{call.op}: w's scale_dtype {must_be(('float16', 'bfloat16'), facts['scale_dtype'])}")
    check_flag(call.op, "w's perm", facts["perm"])
    return n, k, *facts.values()


def _check_keys(op, argument, given, needed, known):
    for key in given:
        if key not in (*needed, *known):
            raise ArgumentError(f"{op}: {argument} has the key {shown(key)}; known: {', '.join((*needed, *known))}")
    for key in needed:
        if key not in given:
            raise ArgumentTypeError(f"{op}: {argument} must have the key {key!r}")


def _packed(weight_type):
    def explained(call):
        _check_activation(call, gemm.ACTIVATIONS + gemm.GATED_ACTIVATIONS)
        n, k, group, kind, scale_dtype, perm = _weight(call, weight_type)
        check_flag(call.op, "batch_invariant", call["batch_invariant"])
        if not isinstance(kind, str) or kind not in weight_type.KINDS:
            raise ArgumentError(f"{call.op}: w's kind {must_be(weight_type.KINDS, kind)}")
        sizes = _C.w4_sizes(call.op, "w", n, k, weight_type.BITS, group, kind)
        x, facts = call.shape("x", 1), None
        if x[-1] != k:
            call.refuse_shape("x", f"have a last dimension of K = {k}")
        if call.gpu:
            weight = n, k, weight_type.BITS, group, kind, scale_dtype, perm
            tensors = call.bound("x"), weight, _output(call, n), call.bound("bias"), call.bound("residual")
            options = call["activation"], call["batch_invariant"], call.plan
            facts = _C.explain_w4a16(call.op, call.gpu, call.dtype, *tensors, *options)
        kernel = f"{call.dtype}_w{weight_type.BITS}g{group}_{kind}"
        return _product(call, n, k, sum(sizes) + (4 * k if perm else 0), kernel, facts)

    return explained


class _CacheFacts(NamedTuple):
    format: str
    page_size: int
    kv_heads: int
    capacity: int
    lengths: list  # (tokens, rows) of the rows that the call is about, in order: so many rows of so many tokens

    def row_bytes(self, dtype, head_dim, tokens):
        return row_bytes(self.format, dtype, self.page_size, self.kv_heads, head_dim, tokens)


def _cache(call, name, batch, head_dim, new=0):
    """The cache of a call on `batch` rows. name: of the tensor that has them; new: tokens that the call stores."""
    cache, rows = call["cache"], call["rows"]
    if rows is not None:
        rows = _integers(call, "rows")
        if len(rows) != batch:
            raise ArgumentError(f"{call.op}: rows must be [batch] = [{batch}], got {len(rows)} of them")
    if isinstance(cache, Cache):
        if cache.dtype != call.dtype:
            raise ArgumentTypeError(f"{call.op}: dtype must be the cache's {cache.dtype}, not {call.dtype}")
        lengths = cache.lengths
        if rows is None and batch > len(lengths):
            raise ArgumentError(f"{call.op}: {name} has a batch of {batch}, the cache has {len(lengths)} rows")
        for row in rows or ():
            if not 0 <= row < len(lengths):
                raise ArgumentError(f"{call.op}: rows must be rows of the cache, 0 to {len(lengths) - 1}, got {row}")
        if cache.head_dim != head_dim:
            call.refuse_shape(name, f"have the cache's head_dim {cache.head_dim}")
        lengths = [(lengths[row], 1) for row in (range(batch) if rows is None else rows)]
        return _CacheFacts(cache.format, cache.page_size, cache.kv_heads, cache.capacity, lengths)
    if not isinstance(cache, dict):
        raise ArgumentTypeError(f"{call.op}: cache must be a rooftile cache or a dict, got {type(cache).__name__}")
    _check_head_dim(call, name, head_dim)
    known = {"format": "int4-kivi", "length": None, "page_size": CONTIGUOUS_PAGE}
    _check_keys(call.op, "cache", cache, ("kv_heads", "capacity"), known)
    format = check_format(call.op, cache.get("format", "int4-kivi"))
    if ELEMENT_DTYPES.get(format, call.dtype) != call.dtype:
        raise ArgumentTypeError(
            f"{call.op}: dtype must be the cache format's {ELEMENT_DTYPES[format]}, not {call.dtype}"
        )
    number = {key: _integer(call.op, f"cache's {key}", cache[key], 1) for key in ("kv_heads", "capacity")}
    if number["kv_heads"] > _C.max_heads:
        raise ArgumentError(f"{call.op}: cache's kv_heads must lie in [1, {_C.max_heads}], got {number['kv_heads']}")
    page_size = _integer(call.op, "cache's page_size", cache.get("page_size", CONTIGUOUS_PAGE), 1)
    sizes = [size for size in _C.kv_page_sizes if format not in KIVI or size % _C.kv_group == 0]
    if page_size not in sizes:
        raise ArgumentError(f"{call.op}: cache's page_size must be one of {sizes}, got {page_size}")
    capacity = pages_for(number["capacity"], page_size) * page_size
    if capacity >= 2**31:
        raise ArgumentError(
            f"{call.op}: cache's capacity must be at most {2**31 - page_size}, whole pages of {page_size} tokens, "
            f"got {number['capacity']}"
        )
    length = cache.get("length")
    length = max(capacity - new, 0) if length is None else _integer(call.op, "cache's length", length)
    if length > capacity:
        raise ArgumentError(f"{call.op}: cache's length must be at most its capacity {capacity}, got {length}")
    return _CacheFacts(format, page_size, number["kv_heads"], capacity, [(length, batch)])


def _integer(op, name, value, at_least=0, bits=31):
    """An int that is no truth value: True would count as 1."""
    if is_bool(value):
        raise ArgumentTypeError(f"{op}: {name} must be an integer, got {type(value).__name__}")
    return integer(op, name, value, at_least, bits)


def _is_number(value):
    return isinstance(value, numbers.Real) and not is_bool(value)


def _has(x, name):
    """hasattr() of any object: a property may raise what it likes."""
    try:
        return hasattr(x, name)
    except Exception:
        return False


def _integers(call, argument):
    """A list of numbers, or an int32 array."""
    if shape_of(call[argument]) is not None and _has(call[argument], "dtype") and _dtype(call[argument]) != "int32":
        raise ArgumentTypeError(f"{call.op}: {argument} must be int32, got {call.described(argument)}")
    try:
        values = list(call[argument])
    except TypeError:
        raise ArgumentTypeError(f"{call.op}: {argument} must be numbers, got {shown(call[argument])}") from None
    return [_integer(call.op, argument, value) for value in values]


def _check_head_dim(call, name, head_dim):
    if not 1 <= head_dim <= _C.max_head_dim:
        raise NotSupportedError(f"{call.op}: {name} has head_dim {head_dim}; supported are 1 to {_C.max_head_dim}")


def _check_q(call, kv_heads):
    *_, heads, head_dim = call.shape("q")
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ArgumentError(
            f"{call.op}: q must have a multiple of the {kv_heads} KV heads, got {heads} query heads in "
            f"{call.described('q')}"
        )
    if heads > _C.max_heads:
        raise NotSupportedError(f"{call.op}: q must have at most {_C.max_heads} heads, got {call.described('q')}")
    _check_head_dim(call, "q", head_dim)


def _seen_by(queries, first, window):
    """Keys that `queries` queries see together: query i sees the newest `window` of first + i."""
    growing = min(max(window - first, 0), queries)  # queries that see all before them
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * min(window, first + queries)


def _window(call):
    window = call["window"]
    return 2**62 if window is None else min(2**62, _integer(call.op, "window", window, 1, bits=63))


def _decode(call):
    check_flag(call.op, "return_lse", call["return_lse"])
    *batch_tokens, q_heads, head_dim = call.shape("q", 3, 4)
    batch, tokens = (*batch_tokens, 1)[:2]
    cache, window = _cache(call, "q", batch, head_dim), _window(call)
    _check_q(call, cache.kv_heads)
    if cache.format in KIVI and tokens > _C.kv_group:
        raise NotSupportedError(
            f"{call.op}: q has {tokens} new tokens, with a {cache.format} cache at most {_C.kv_group}"
        )
    pairs, nbytes = 0, 2 * call.bytes("q")
    for length, rows in cache.lengths:
        pairs += rows * _seen_by(tokens, max(length - tokens + 1, 0), window)
        nbytes += rows * cache.row_bytes(call.dtype, head_dim, min(length, window + tokens - 1))
    facts = None
    if call.gpu:
        sizes = batch, tokens, q_heads, cache.kv_heads, head_dim, cache.capacity, window if window < 2**31 else 0
        facts = _C.explain_decode(call.gpu, call.dtype, cache.format, sizes, call.plan)
    return call.result(nbytes, 4 * q_heads * head_dim * pairs, f"{call.dtype}_{cache.format}_d{head_dim}", facts)


def _sequences(call, argument, tokens):
    """Lengths of packed sequences."""
    begins = _integers(call, argument)
    if not begins or begins[0] != 0 or begins != sorted(begins) or begins[-1] != tokens:
        raise ArgumentError(f"{call.op}: {argument} must start with 0, not decrease and end with {tokens}")
    return [b - a for a, b in itertools.pairwise(begins)]


def _prefill(call):
    for flag in ("causal", "return_lse"):
        check_flag(call.op, flag, call[flag])
    if call.gpu:
        raise NotSupportedError(f"{call.op}: this op has CPU kernels only")
    packed = call["cu_seqlens_q"] is not None or call["cu_seqlens_k"] is not None
    ndim = 3 if packed else 4
    q, k = call.shape("q", ndim, ndim), call.shape("k", ndim, ndim)
    call.like("v", "k")
    if q[-1] != k[-1]:
        call.refuse_shape("k", f"have q's head_dim {q[-1]}")
    _check_q(call, k[-2])
    if packed and (call["cu_seqlens_q"] is None or call["cu_seqlens_k"] is None):
        raise ArgumentError(f"{call.op}: cu_seqlens_q and cu_seqlens_k must be given together")
    if packed:  # (queries, keys, sequences): so many sequences of so many of both
        queries, keys = _sequences(call, "cu_seqlens_q", q[0]), _sequences(call, "cu_seqlens_k", k[0])
        if len(queries) != len(keys):
            raise ArgumentError(
                f"{call.op}: cu_seqlens_k must have cu_seqlens_q's length {len(queries) + 1}, got {len(keys) + 1}"
            )
        batch, sequences = len(queries), [(s, own, 1) for s, own in zip(queries, keys, strict=True)]
    else:
        if q[0] != k[0]:
            call.refuse_shape("k", f"have q's batch of {q[0]}")
        batch, sequences = q[0], [(q[1], k[1], q[0])]
    cache = None if call["cache"] is None else _cache(call, "q", batch, q[-1])
    if cache and k[-2] != cache.kv_heads:
        call.refuse_shape("k", f"have the cache's {cache.kv_heads} KV heads")
    if cache is None and call["rows"] is not None:
        raise ArgumentError(f"{call.op}: rows picks rows of a cache, but cache is None")
    if cache or call["counts"] is not None:
        for s, own, _ in sequences:
            if s != own:
                given = "cache" if cache else "counts"
                raise ArgumentError(
                    f"{call.op}: k must have as many tokens as q when {given} is given, got {own} and {s}"
                )
    window, pairs = _window(call), 0
    for s, own, before, rows in _with_lengths(sequences, cache.lengths if cache else [(0, batch)]):
        if call["causal"]:
            hidden = max(s - own - before, 0)  # queries before every key
            pairs += rows * _seen_by(s - hidden, max(own + before - s, 0) + 1, window)
        else:
            pairs += rows * s * min(own + before, 2 * window - 1)
    nbytes = 2 * call.bytes("q") + call.bytes("k", "v")
    if cache:
        nbytes += sum(rows * cache.row_bytes(call.dtype, q[-1], length) for length, rows in cache.lengths)
    format = f"_{cache.format}" if cache else ""
    return call.result(nbytes, 4 * q[-2] * q[-1] * pairs, f"{call.dtype}{format}_d{q[-1]}")


def _with_lengths(sequences, lengths):
    """(queries, keys, tokens in the cache, rows): one of the two lists has one entry, or both have one for each row."""
    if len(lengths) == 1:
        return [(s, own, lengths[0][0], rows) for s, own, rows in sequences]
    if len(sequences) == 1:
        return [(*sequences[0][:2], length, rows) for length, rows in lengths]
    return [(s, own, length, 1) for (s, own, _), (length, _) in zip(sequences, lengths, strict=True)]


def _stored(call):
    """The cache of a call that stores k and v, and the bytes it reads and writes."""
    batch, tokens, heads, head_dim = call.shape("k", 4, 4)
    call.like("v", "k")
    cache = _cache(call, "k", batch, head_dim, tokens)
    if heads != cache.kv_heads:
        call.refuse_shape("k", f"have the cache's {cache.kv_heads} KV heads")
    _check_room(call, cache, batch, tokens)
    stored = batch * tokens * heads
    nbytes = (
        call.bytes("k", "v") + stored * _C.kv_block_bytes(cache.format, cache.page_size, head_dim) // cache.page_size
    )
    if cache.format in KIVI:  # the ring's raw tokens
        nbytes += call.bytes("k", "v")
    return cache, nbytes, 0 if cache.format in ELEMENT_DTYPES else 6 * stored * head_dim


def _check_room(call, cache, batch, tokens):
    """Raises ArgumentError where a row has no room for its new tokens, or is named twice."""
    rows, counts = (None if call[name] is None else _integers(call, name) for name in ("rows", "counts"))
    if counts is not None and len(counts) != batch:
        raise ArgumentError(f"{call.op}: counts must be [batch] = [{batch}], got {len(counts)} of them")
    for n in counts or ():
        if n > tokens:
            raise ArgumentError(f"{call.op}: counts must lie in [0, {tokens}], got {n}")
    one_length = len(cache.lengths) == 1
    news = [max(counts or [0]) if counts is not None else tokens] if one_length else counts or [tokens] * batch
    for (length, _), n in zip(cache.lengths, news, strict=True):
        if batch and length + n > cache.capacity:
            raise ArgumentError(
                f"{call.op}: {'k' if counts is None else 'counts'} has {n} tokens for a row that holds {length} and "
                f"has room for {cache.capacity}; they do not fit"
            )
    written = sorted(row for row, n in zip(rows or (), counts or itertools.repeat(tokens), strict=False) if n)
    for row, following in itertools.pairwise(written):
        if row == following:
            raise ArgumentError(f"{call.op}: rows names row {row} twice")


def _append(call):
    cache, nbytes, flops = _stored(call)
    return call.result(nbytes, flops, f"append_{call.dtype}_{cache.format}", _append_facts(call, cache, 0))


def _append_facts(call, cache, q_heads):
    """q_heads: 0 without RoPE."""
    if not call.gpu:
        return None
    batch, tokens, kv_heads, head_dim = call.shape("k")
    sizes = batch, tokens, q_heads, kv_heads, head_dim
    return _C.explain_append(call.op, call.gpu, call.dtype, cache.format, sizes, call.plan)


def _check_rope(call):
    q = call.shape("q", *((4, 4) if call.op == "rope_append" else (2,)))
    _, pairs = call.shape("cos", 2, 2)
    call.like("sin", "cos")
    for name in ("q", "k"):
        x = call.shape(name, 2)
        if x[:-2] != q[:-2]:
            call.refuse_shape(name, f"have q's leading dimensions {list(q[:-2])}")
        if 2 * pairs > x[-1]:
            raise ArgumentError(
                f"{call.op}: cos has {pairs} columns, so {name} needs head_dim >= {2 * pairs}, "
                f"got {call.described(name)}"
            )
    call.must_have("positions", q[:-2], f"have q's leading dimensions {list(q[:-2])}")


def _rope(call):
    _check_rope(call)
    cache, nbytes, flops = _stored(call) if call.op == "rope_append" else (None, 2 * call.bytes("k"), 0)
    q, k, pairs = call.shape("q"), call.shape("k"), call.shape("cos")[1]
    if cache and not 1 <= q[2] <= _C.max_heads:
        raise NotSupportedError(f"{call.op}: q must have 1 to {_C.max_heads} heads, got {call.described('q')}")
    if cache and q[-1] != k[-1]:
        call.refuse_shape("q", f"have the cache's head_dim {k[-1]}")
    tokens = math.prod(q[:-2])
    nbytes += 2 * call.bytes("q") + tokens * (2 * pairs * call.size + 4)
    flops += 6 * pairs * (math.prod(q[:-1]) + math.prod(k[:-1]))
    if cache:
        return call.result(nbytes, flops, f"{call.dtype}_{cache.format}", _append_facts(call, cache, q[2]))
    return call.result(nbytes, flops, call.dtype)


def _small(tensors, flops, weights=()):
    """An op of `tensors` like x, outputs included, and `flops` for each element of x. weights: arguments beside x."""

    def explained(call):
        name = next(iter(call.given))
        x = call.shape(name, 1)
        if call.op.endswith("norm") and x[-1] < 1:
            call.refuse_shape(name, "have a last dimension of at least 1")
        if call.op.endswith("_mul") and x[-1] % 2:
            call.refuse_shape(name, "have an even last dimension [gate | up]")
        if "residual" in call.given:
            call.like("residual", name)
        for weight in weights:
            call.must_have(weight, x[-1:], f"be [hidden] = {list(x[-1:])}")
        given = [weight for weight in weights if call[weight] is not None]
        return call.result(tensors * call.bytes(name) + call.bytes(*given), flops * math.prod(x), call.dtype)

    return explained


def _qk_rms_norm(call):
    q, k, weights = call.shape("q", 2), call.shape("k", 2), ("q_weight", "k_weight")
    if q[-1] < 1:
        call.refuse_shape("q", "have a last dimension of at least 1")
    if (*k[:-2], k[-1]) != (*q[:-2], q[-1]):
        call.refuse_shape("k", f"have q's shape {list(q)} but for its number of heads")
    if q[-1] > _C.max_head_norm:
        raise NotSupportedError(
            f"{call.op}: q must have heads of at most {_C.max_head_norm} elements, got {call.described('q')}"
        )
    for weight in weights:
        call.must_have(weight, q[-1:], f"be [hidden] = {list(q[-1:])}")
    given = [weight for weight in weights if call[weight] is not None]
    return call.result(2 * call.bytes("q", "k") + call.bytes(*given), 4 * (math.prod(q) + math.prod(k)), call.dtype)


def _embedding(call):
    ids, (_, hidden) = call.shape("ids"), call.shape("weight", 2, 2)
    out = math.prod(ids) * hidden
    return call.result(2 * out * call.size + 4 * math.prod(ids), out if call["scale"] != 1 else 0, call.dtype)


def _merge(call):
    shape = call.shape("out_a", 2)
    if shape[-1] < 1:
        call.refuse_shape("out_a", "have a head_dim of at least 1")
    call.like("out_b", "out_a")
    for name in ("lse_a", "lse_b"):
        call.must_have(name, shape[:-1], f"have the shape of out_a without head_dim, {list(shape[:-1])}")
    out, heads = call.bytes("out_a"), 4 * math.prod(shape[:-1])
    head_dim = f"_d{shape[-1]}" if call.gpu is None else ""
    return call.result(3 * (out + heads), 3 * out // call.size, call.dtype + head_dim)


def _sample(call):
    logits = call.shape("logits", 1)
    if not 1 <= logits[-1] <= _C.max_vocabulary:
        call.refuse_shape("logits", f"have a last dimension of 1 to {_C.max_vocabulary}")
    rows, optional = logits[:-1], ("token_ids", "seeds", "positions")
    for name in ("seeds", "positions"):
        call.must_have(name, rows, f"have logits' leading dimensions {list(rows)}")
    if call["token_ids"] is not None and call.shape("token_ids", len(logits), len(logits))[:-1] != rows:
        call.refuse_shape("token_ids", f"have logits' leading dimensions {list(rows)}")
    given = [name for name in optional if call[name] is not None]
    return call.result(call.bytes("logits", *given) + 8 * math.prod(rows), 3 * math.prod(logits), call.dtype)


def _dtype(tensor):
    return str(tensor.dtype).removeprefix("torch.")


# Tensors whose dtype is that of the call, in the order in which they say it where some are shapes.
_OF_ONE_DTYPE = ("x", "q", "gate_up", "logits", "out_a", "k", "v", "residual", "out_b", "weight", "bias")
_NO_PLAN = "no plan to choose: shapes, alignment and SMs say which kernel runs, and on how many CTAs"

_FUNCTIONS = {
    "append": Cache.append,
    **{
        function.__name__: function
        for function in (
            attention.decode_attention,
            attention.merge_attention,
            attention.prefill_attention,
            fused.add_layer_norm,
            fused.add_rms_norm,
            fused.embedding,
            fused.gelu_mul,
            fused.layer_norm,
            fused.qk_rms_norm,
            fused.rms_norm,
            fused.rope,
            fused.rope_append,
            fused.silu_mul,
            fused.softmax,
            gemm.linear,
            gemm.w4a16_matmul,
            gemm.w8a16_matmul,
            sampling.sample,
        )
    },
}
_OPS = {
    "append": _append,
    "decode_attention": _decode,
    "merge_attention": _merge,
    "prefill_attention": _prefill,
    "add_layer_norm": _small(4, 8, ("weight", "bias")),
    "add_rms_norm": _small(4, 5, ("weight",)),
    "embedding": _embedding,
    "gelu_mul": _small(1.5, 5),
    "layer_norm": _small(2, 7, ("weight", "bias")),
    "qk_rms_norm": _qk_rms_norm,
    "rms_norm": _small(2, 4, ("weight",)),
    "rope": _rope,
    "rope_append": _rope,
    "silu_mul": _small(1.5, 2.5),
    "sample": _sample,
    "softmax": _small(2, 4),
    "linear": _linear,
    "w4a16_matmul": _packed(gemm.W4Weight),
    "w8a16_matmul": _packed(gemm.W8Weight),
}
