# SPDX-License-Identifier: Apache-2.0
"""What a call will run, before it runs: plan, reason, bytes, flops and what bounds it."""

import inspect
import itertools
import math
import operator
import re
import sys
from typing import NamedTuple

from rooftile import _C, attention, fused, gemm, sampling
from rooftile._arrays import activation_dtype, check_flag, must_be, shape_of
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.kv_cache import CONTIGUOUS_PAGE, ELEMENT_DTYPES, KIVI, Cache, check_format, integer, row_bytes

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
    kv_heads, capacity and, if they are not the defaults, format ("int4-kivi"), length (tokens a row, default capacity)
    and page_size (64). w: a weight, or a dict with shape (N, K) and, if they are not the defaults, group_size (128),
    kind ("symmetric"), scale_dtype ("float16") and perm (True: act-order). plan= is judged as the call would.
    device: "cpu", "cuda" or "cuda:1" (that GPU), or the architecture of one that need not be there: "sm_80", "sm_86",
    "sm_89", "sm_90a"; default: where the tensors are, else the CPU. sms: how many SMs it has, default those of an A100,
    RTX 3090, RTX 4090 or H200. dtype: of tensors that are shapes, default float16 on a GPU, float32 on the CPU.
    roof: (GB/s, TFLOP/s) of the device, as `rooftile roofline` measures them; default its data sheet's, on the CPU a
    rough guess.

    Returns an Explanation. bytes and flops are what the op has to move and compute, whatever the kernel does.
    Raises ArgumentError and ArgumentTypeError for what no plan can be made of, and NotSupportedError where the device
    has no kernel. The call looks at more: that out, bias and weights fit, scalars such as eps, top_k or softcap, and at
    what tensors hold. Source: the plans of cpp/kernels/*/plan.cpp; roofline: Williams et al. 2009.
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
        self.plan = getattr(self.given["plan"], "plan", self.given["plan"])
        cache = self.given.get("cache")
        tensors = [x for x in self.given.values() if shape_of(x) is not None and hasattr(x, "dtype")]
        self._take_device(device, sms, [*tensors, *([cache] if isinstance(cache, Cache) else [])])
        self._take_roof(roof)
        if dtype is not None:
            self.dtype = activation_dtype("explain", dtype)
        elif isinstance(cache, Cache):
            self.dtype = cache.dtype
        elif given := [x for x in tensors if "int" not in str(x.dtype)]:  # neither rows nor positions
            self.dtype = activation_dtype(op, given[0].dtype)
        else:
            self.dtype = "float16" if self.gpu else "float32"
        if self.gpu and self.dtype == "float32":
            raise NotSupportedError(f"{op}: tensors must be float16 or bfloat16 on a GPU, got float32")
        self.size = 4 if self.dtype == "float32" else 2

    def _take_device(self, device, sms, tensors):
        """gpu: (major, minor, sms, whether code for sm_90a runs), or None for the CPU."""
        if device is None:
            device = next((str(x.device) for x in tensors if getattr(x, "device", None) is not None), "cpu")
            device = "cpu" if device == "meta" else device
        device = str(device)
        self.gpu = None
        if re.fullmatch(r"cpu(:\d+)?", device):
            self.device, self.arch = "cpu", None
        elif re.fullmatch(r"cuda(:\d+)?", device):
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
                raise ArgumentError(f'explain: device must be "cpu", "cuda" or {", ".join(_GPUS)}, got {device!r}')
            number = int(device.removeprefix("sm_").removesuffix("a"))
            self.gpu = number // 10, number % 10, _GPUS[device][0], device == "sm_90a"
            self.arch = device
        if sms is not None:
            if self.gpu is None:
                raise ArgumentError("explain: sms is of a GPU, but device is the CPU")
            sms = integer("explain", "sms", sms, 1)
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
            self.roof = float(roof[0]), float(roof[1])
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            raise ArgumentTypeError(f"explain: roof must be (GB/s, TFLOP/s), two numbers, got {roof!r}") from None
        if not all(0 < x < math.inf for x in self.roof):
            raise ArgumentError(f"explain: roof must be (GB/s, TFLOP/s), both positive, got {roof!r}")

    def __getitem__(self, name):
        return self.given[name]

    def shape(self, name, *ndims):
        """Of a tensor argument, as a tuple of ints."""
        x = self.given[name]
        shape = shape_of(x)
        try:
            if shape is None:
                shape = x
            if isinstance(shape, dict | set | frozenset):
                raise TypeError
            shape = tuple(operator.index(size) for size in shape)
        except (TypeError, RuntimeError):  # RuntimeError: a nested tensor, which has none
            raise ArgumentTypeError(f"{self.op}: {name} must be a tensor or a shape, got {type(x).__name__}") from None
        if any(not 0 <= size < 2**31 for size in shape):
            raise ArgumentError(f"{self.op}: {name} must have sizes in [0, 2**31), got {shape}")
        if math.prod(shape) >= 2**60:
            raise ArgumentError(f"{self.op}: {name} must have less than 2**60 elements, got {shape}")
        if ndims and len(shape) not in ndims:
            names = " or ".join(map(str, ndims))
            raise ArgumentError(f"{self.op}: {name} must have {names} dimensions, got {list(shape)}")
        return shape

    def bytes(self, *names):
        """Of tensors in the call's dtype; None counts as none."""
        return sum(self.size * math.prod(self.shape(name)) for name in names if self.given[name] is not None)

    def described(self, name):
        """A tensor as the binding takes it: itself where it has memory to look at, else its shape."""
        x = self.given[name]
        if x is None:
            return None
        shape = self.shape(name)
        has_memory = hasattr(x, "__dlpack__") and str(getattr(x, "device", "cpu")) != "meta"
        return x if has_memory and str(x.dtype).removeprefix("torch.") == self.dtype else shape

    def result(self, nbytes, flops, kernel="", facts=None):
        """facts: (plan, why, kernel, bytes of workspace) on a GPU; without them there is one kernel and no plan."""
        if self.gpu is None:
            variant = _C.explain_cpu(self.op, self.plan)
            why = "the fastest variant that this CPU runs" if self.plan is None else "forced by plan="
            facts = variant, why, f"cpu_{variant}_{kernel}", 0
        elif facts is None:
            if self.plan is not None:
                raise NotSupportedError(
                    f'{self.op}: plan "{self.plan}" is no variant of the GPU kernels; leave plan out'
                )
            facts = None, "one kernel for every shape", f"cuda_{kernel}", 0
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
    nbytes = weight_bytes + call.size * m * (k + outputs) + call.bytes("bias", "residual")
    return call.result(nbytes, 2 * m * n * k, kernel, facts)


def _output(call, n):
    """out as the binding takes it."""
    if call["out"] is not None:
        return call.described("out")
    return *call.shape("x")[:-1], gemm.outputs(n, call.given["activation"])


def _check_activation(call, known):
    activation = call["activation"]
    if activation is not None and not isinstance(activation, str):
        raise ArgumentTypeError(f"{call.op}: activation must be a string, got {type(activation).__name__}")
    if activation is not None and activation not in known:
        raise ArgumentError(f"{call.op}: activation {must_be(known, activation)}")


def _linear(call):
    _check_activation(call, gemm.ACTIVATIONS)
    n, k = call.shape("weight", 2)
    x, facts = call.shape("x"), None
    if not x or x[-1] != k:
        raise ArgumentError(f"linear: weight must be [N, K] with x's K = {x[-1] if x else 1}, got {[n, k]}")
    if call.gpu:
        tensors = call.described("x"), call.described("weight"), _output(call, n)
        options = call.described("bias"), call.described("residual")
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
    n, k = gemm._sizes(call.op, w["shape"])
    facts = {key: w.get(key, default) for key, default in known.items()}
    if facts["scale_dtype"] not in ("float16", "bfloat16"):
        raise ArgumentError(f"{call.op}: w's scale_dtype {must_be(('float16', 'bfloat16'), facts['scale_dtype'])}")
    check_flag(call.op, "w's perm", facts["perm"])
    return n, k, *facts.values()


def _check_keys(op, argument, given, needed, known):
    for key in given:
        if key not in (*needed, *known):
            raise ArgumentError(f"{op}: {argument} has the key {key!r}; known: {', '.join((*needed, *known))}")
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
        x, facts = call.shape("x"), None
        if not x or x[-1] != k:
            raise ArgumentError(f"{call.op}: x must have a last dimension of K = {k}, got {list(x)}")
        if call.gpu:
            weight = n, k, weight_type.BITS, group, kind, scale_dtype, perm
            tensors = call.described("x"), weight, _output(call, n), call.described("bias"), call.described("residual")
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
    lengths: list  # of the rows that the call is about

    def row_bytes(self, dtype, head_dim, tokens):
        return row_bytes(self.format, dtype, self.page_size, self.kv_heads, head_dim, tokens)


def _cache(call, batch, head_dim):
    """The cache of a call on `batch` rows."""
    cache = call["cache"]
    if isinstance(cache, Cache):
        rows, lengths = call.given.get("rows"), cache.lengths
        rows = range(batch) if rows is None else _integers(call, "rows")
        if any(not 0 <= row < len(lengths) for row in rows):
            raise ArgumentError(f"{call.op}: rows must be rows of the cache, 0 to {len(lengths) - 1}")
        if cache.head_dim != head_dim:
            raise ArgumentError(f"{call.op}: q or k must have the cache's head_dim {cache.head_dim}, got {head_dim}")
        lengths = [lengths[row] for row in rows]
        return _CacheFacts(cache.format, cache.page_size, cache.kv_heads, cache.capacity, lengths)
    if not isinstance(cache, dict):
        raise ArgumentTypeError(f"{call.op}: cache must be a rooftile cache or a dict, got {type(cache).__name__}")
    known = {"format": "int4-kivi", "length": None, "page_size": CONTIGUOUS_PAGE}
    _check_keys(call.op, "cache", cache, ("kv_heads", "capacity"), known)
    format = check_format(call.op, cache.get("format", "int4-kivi"))
    if ELEMENT_DTYPES.get(format, call.dtype) != call.dtype:
        raise ArgumentTypeError(
            f"{call.op}: dtype must be the cache format's {ELEMENT_DTYPES[format]}, not {call.dtype}"
        )
    number = {key: integer(call.op, f"cache's {key}", cache[key], 1) for key in ("kv_heads", "capacity")}
    page_size = integer(call.op, "cache's page_size", cache.get("page_size", CONTIGUOUS_PAGE), 1)
    sizes = [size for size in _C.kv_page_sizes if format not in KIVI or size % _C.kv_group == 0]
    if page_size not in sizes:
        raise ArgumentError(f"{call.op}: cache's page_size must be one of {sizes}, got {page_size}")
    capacity = -(-number["capacity"] // page_size) * page_size
    length = cache.get("length")
    length = capacity if length is None else integer(call.op, "cache's length", length)
    if length > capacity:
        raise ArgumentError(f"{call.op}: cache's length must be at most its capacity {capacity}, got {length}")
    return _CacheFacts(format, page_size, number["kv_heads"], capacity, [length] * batch)


def _integers(call, argument):
    """A list of numbers, or an array."""
    try:
        values = list(call[argument])
    except TypeError:
        raise ArgumentTypeError(f"{call.op}: {argument} must be numbers, got {call[argument]!r}") from None
    return [integer(call.op, argument, value) for value in values]


def _seen_by(queries, first, window):
    """Keys that `queries` queries see together: query i sees the newest `window` of first + i."""
    growing = min(max(window - first, 0), queries)  # queries that see all before them
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * min(window, first + queries)


def _window(call):
    window = call["window"]
    return 2**62 if window is None else integer(call.op, "window", window, 1)


def _decode(call):
    *batch_tokens, q_heads, head_dim = call.shape("q", 3, 4)
    batch, tokens = (*batch_tokens, 1)[:2]
    cache, window = _cache(call, batch, head_dim), _window(call)
    if q_heads % max(cache.kv_heads, 1):
        raise ArgumentError(f"{call.op}: q must have a multiple of the {cache.kv_heads} KV heads, got {q_heads}")
    if cache.format in KIVI and tokens > _C.kv_group:
        raise NotSupportedError(
            f"{call.op}: q has {tokens} new tokens, with a {cache.format} cache at most {_C.kv_group}"
        )
    pairs = sum(_seen_by(tokens, max(length - tokens + 1, 0), window) for length in cache.lengths)
    nbytes = 2 * call.bytes("q") + sum(
        cache.row_bytes(call.dtype, head_dim, min(length, window + tokens - 1)) for length in cache.lengths
    )
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
    if call.gpu:
        raise NotSupportedError(f"{call.op}: this op has CPU kernels only")
    packed = call["cu_seqlens_q"] is not None or call["cu_seqlens_k"] is not None
    q, k = (call.shape(name, 3 if packed else 4) for name in ("q", "k"))
    if q[-1] != k[-1] or k[-2] < 1 or q[-2] % k[-2]:
        raise ArgumentError(f"{call.op}: k must have q's head_dim and a divisor of its heads, got {list(q)}, {list(k)}")
    if packed and (call["cu_seqlens_q"] is None or call["cu_seqlens_k"] is None):
        raise ArgumentError(f"{call.op}: cu_seqlens_q and cu_seqlens_k must be given together")
    queries = _sequences(call, "cu_seqlens_q", q[0]) if packed else [q[1]] * q[0]
    keys = _sequences(call, "cu_seqlens_k", k[0]) if packed else [k[1]] * k[0]
    if len(queries) != len(keys):
        raise ArgumentError(f"{call.op}: k must have q's batch of {len(queries)}, got {len(keys)}")
    cache = None if call["cache"] is None else _cache(call, len(queries), q[-1])
    cached, window, pairs = cache.lengths if cache else [0] * len(keys), _window(call), 0
    for s, own, before in zip(queries, keys, cached, strict=True):
        if call["causal"]:
            hidden = max(s - own - before, 0)  # queries before every key
            pairs += _seen_by(s - hidden, max(own + before - s, 0) + 1, window)
        else:
            pairs += s * min(own + before, 2 * window - 1)
    nbytes = 2 * call.bytes("q") + call.bytes("k", "v")
    if cache:
        nbytes += sum(cache.row_bytes(call.dtype, q[-1], length) for length in cached)
    format = f"_{cache.format}" if cache else ""
    return call.result(nbytes, 4 * q[-2] * q[-1] * pairs, f"{call.dtype}{format}_d{q[-1]}")


def _stored(call):
    """The cache of a call that stores k and v, and the bytes it reads and writes."""
    batch, tokens, heads, head_dim = call.shape("k", 4)
    if call.shape("v", 4) != call.shape("k"):
        raise ArgumentError(f"{call.op}: v must have k's shape {list(call.shape('k'))}, got {list(call.shape('v'))}")
    cache = _cache(call, batch, head_dim)
    if heads != cache.kv_heads:
        raise ArgumentError(f"{call.op}: k must have the cache's {cache.kv_heads} KV heads, got {heads}")
    stored = batch * tokens * heads
    nbytes = (
        call.bytes("k", "v") + stored * _C.kv_block_bytes(cache.format, cache.page_size, head_dim) // cache.page_size
    )
    if cache.format in KIVI:  # the ring's raw tokens
        nbytes += call.bytes("k", "v")
    return cache, nbytes, 0 if cache.format in ELEMENT_DTYPES else 6 * stored * head_dim


def _append(call):
    cache, nbytes, flops = _stored(call)
    return call.result(nbytes, flops, f"append_{call.dtype}_{cache.format}")


def _rope(call):
    cache, nbytes, flops = _stored(call) if call.op == "rope_append" else (None, 2 * call.bytes("k"), 0)
    q, k, pairs = call.shape("q"), call.shape("k"), call.shape("cos", 2)[1]
    tokens = math.prod(q[:-2])
    nbytes += 2 * call.bytes("q") + tokens * (2 * pairs * call.size + 4)
    flops += 6 * pairs * (math.prod(q[:-1]) + math.prod(k[:-1]))
    if cache:
        kernel = f"{call.dtype}_{cache.format}"
        return call.result(nbytes, flops, f"rope_append_{kernel}" if call.gpu else kernel)
    return call.result(nbytes, flops, call.dtype)


def _small(tensors, flops, weights=()):
    """An op of `tensors` like x, outputs included, and `flops` for each element of x. weights: arguments beside x."""

    def explained(call):
        x = next(iter(call.given))
        given = [name for name in weights if call[name] is not None]
        elements = math.prod(call.shape(x))
        return call.result(tensors * call.bytes(x) + call.bytes(*given), flops * elements, call.dtype)

    return explained


def _merge(call):
    out, heads = call.bytes("out_a"), 4 * math.prod(call.shape("out_a")[:-1])
    head_dim = f"_d{call.shape('out_a')[-1]}" if call.gpu is None else ""
    return call.result(3 * (out + heads), 3 * out // call.size, call.dtype + head_dim)


def _sample(call):
    rows, optional = math.prod(call.shape("logits")[:-1]), ("token_ids", "seeds", "positions")
    given = [name for name in optional if call[name] is not None]
    return call.result(call.bytes("logits", *given) + 8 * rows, 3 * math.prod(call.shape("logits")), call.dtype)


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
            fused.gelu_mul,
            fused.layer_norm,
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
    "gelu_mul": _small(1.5, 5),
    "layer_norm": _small(2, 7, ("weight", "bias")),
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
