# SPDX-License-Identifier: Apache-2.0
"""The small ops between the products. Results are rounded once to the output's dtype.

Common to all of them: tensors are float16, bfloat16 or, on the CPU, float32, of any strides; an output is contiguous
unless it is given, and may be the input it is computed from; `stream` is a device stream handle for frameworks that
have no current stream; `plan` forces a variant of the CPU kernels by name, in rope_append also a plan on a GPU, as
rt.explain returns it. Mistakes raise ArgumentError or ArgumentTypeError naming the argument.
"""

from rooftile import _C
from rooftile._arrays import empty, shape_of
from rooftile._calls import compiling, needs_torch_stream, on_stream, ran, torch_op, torch_store
from rooftile._registry import OPS, STORING, Op, StoringOp, like_first
from rooftile.errors import NotSupportedError
from rooftile.kv_cache import Cache, ints
from rooftile.kv_pages import Pages, stored_to


def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, out=None, stream=None, plan=None):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    x: [..., hidden]. weight: [hidden], x's dtype or float32, or None. weight_offset: added to the weight in float32;
    Gemma's weights are stored less 1.
    Returns [..., hidden] in x's dtype, written to `out` when given.
    """
    if stream is not None and needs_torch_stream(stream, x):
        return on_stream(rms_norm, x, locals())
    if compiling():
        return torch_op("rms_norm", (x, weight, eps, weight_offset), (out,), stream, plan)
    if out is None:
        out = empty("rms_norm", "out", x)
    ran(_C.rms_norm(x, weight, eps, weight_offset, out, stream, plan))
    return out


def add_rms_norm(
    x, residual, weight=None, eps=1e-6, *, weight_offset=0.0, out=None, residual_out=None, stream=None, plan=None
):
    """rms_norm of x + residual, and the sum itself: the next block's residual.

    x, residual: [..., hidden] of one dtype; the sum is rounded to it first and the norm is of the rounded sum.
    weight: [hidden], x's dtype or float32, or None; weight_offset is added to it in float32.
    Returns (y, x + residual), both [..., hidden] in x's dtype, written to `out` and `residual_out` when given
    (`residual_out` may be `residual`, `out` may be `x`).
    """
    if stream is not None and needs_torch_stream(stream, x):
        return on_stream(add_rms_norm, x, locals())
    if compiling():
        return torch_op("add_rms_norm", (x, residual, weight, eps, weight_offset), (out, residual_out), stream, plan)
    if out is None:
        out = empty("add_rms_norm", "out", x)
    if residual_out is None:
        residual_out = empty("add_rms_norm", "residual_out", x)
    ran(_C.add_rms_norm(x, residual, weight, eps, weight_offset, out, residual_out, stream, plan))
    return out, residual_out


def qk_rms_norm(
    q, k, q_weight=None, k_weight=None, eps=1e-6, *, weight_offset=0.0, q_out=None, k_out=None, stream=None, plan=None
):
    """rms_norm of every head of q and of k, as Qwen3 and Gemma 3 have it before RoPE: on a GPU one kernel.

    q: [..., q_heads, D] and k: [..., kv_heads, D], D <= 1024; the head counts may differ. q_weight, k_weight: [D], q's
    dtype or float32, or None; weight_offset is added to them in float32.
    Returns (q, k) normed, in q's dtype, written to `q_out` and `k_out` when given (they may be q and k).
    """
    if stream is not None and needs_torch_stream(stream, q):
        return on_stream(qk_rms_norm, q, locals())
    if compiling():
        return torch_op("qk_rms_norm", (q, k, q_weight, k_weight, eps, weight_offset), (q_out, k_out), stream, plan)
    if q_out is None:
        q_out = empty("qk_rms_norm", "q_out", q)
    if k_out is None:
        k_out = empty("qk_rms_norm", "k_out", k)
    ran(_C.qk_rms_norm(q, k, q_weight, k_weight, eps, weight_offset, q_out, k_out, stream, plan))
    return q_out, k_out


def embedding(ids, weight, *, scale=1.0, out=None, stream=None, plan=None):
    """scale * weight[ids], the rows of a table that token ids name.

    ids: [...], int32 or int64, each in [0, vocabulary); on a GPU, where the host does not read them, the row of another
    id is NaN. weight: [vocabulary, hidden]. scale: multiplied in float32, as Gemma and Granite scale embeddings; with 1
    rows are copied bit for bit.
    Returns [..., hidden] in weight's dtype, written to `out` when given.
    """
    if stream is not None and needs_torch_stream(stream, ids):
        return on_stream(embedding, ids, locals())
    if compiling():
        return torch_op("embedding", (weight, ids, scale), (out,), stream, plan)
    if out is None:
        out = _rows(ids, weight)
    ran(_C.embedding(ids, weight, scale, out, stream, plan))
    return out


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, out=None, stream=None, plan=None):
    """(x - mean) * rsqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016, arXiv 1607.06450).

    x: [..., hidden]; var is the biased variance. weight, bias: [hidden], x's dtype or float32, or None.
    Returns [..., hidden] in x's dtype, written to `out` when given.
    """
    if stream is not None and needs_torch_stream(stream, x):
        return on_stream(layer_norm, x, locals())
    if compiling():
        return torch_op("layer_norm", (x, weight, bias, eps), (out,), stream, plan)
    if out is None:
        out = empty("layer_norm", "out", x)
    ran(_C.layer_norm(x, weight, bias, eps, out, stream, plan))
    return out


def add_layer_norm(
    x, residual, weight=None, bias=None, eps=1e-5, *, out=None, residual_out=None, stream=None, plan=None
):
    """layer_norm of x + residual, and the sum itself. Shapes and outputs as add_rms_norm; bias: [hidden] or None."""
    if stream is not None and needs_torch_stream(stream, x):
        return on_stream(add_layer_norm, x, locals())
    if compiling():
        return torch_op("add_layer_norm", (x, residual, weight, bias, eps), (out, residual_out), stream, plan)
    if out is None:
        out = empty("add_layer_norm", "out", x)
    if residual_out is None:
        residual_out = empty("add_layer_norm", "residual_out", x)
    ran(_C.add_layer_norm(x, residual, weight, bias, eps, out, residual_out, stream, plan))
    return out, residual_out


def rope(q, k, cos, sin, positions, *, q_out=None, k_out=None, stream=None, plan=None):
    """Rotary position embedding of q and k, half-split as in GPT-NeoX and Llama (Su et al. 2021, arXiv 2104.09864).

    q: [..., q_heads, D] and k: [..., kv_heads, D], usually [B, T, heads, D] or [tokens, heads, D]; the head counts may
    differ. positions: int32 or int64 with q's leading dimensions, each in [0, max_position); on a GPU, where the host
    does not read them, a token whose position is outside gets NaN.
    cos, sin: [max_position, R], R <= D / 2, q's dtype or float32: one column a pair, not the doubled tables of
    transformers. Dims i and i + R of a head turn together by row positions[...] of the tables; dims from 2R on are
    copied.
    Returns (q, k) rotated, in q's dtype, written to `q_out` and `k_out` when given (they may be q and k).
    """
    if stream is not None and needs_torch_stream(stream, q):
        return on_stream(rope, q, locals())
    if compiling():
        return torch_op("rope", (q, k, cos, sin, positions), (q_out, k_out), stream, plan)
    if q_out is None:
        q_out = empty("rope", "q_out", q)
    if k_out is None:
        k_out = empty("rope", "k_out", k)
    ran(_C.rope(q, k, cos, sin, positions, q_out, k_out, stream, plan))
    return q_out, k_out


def rope_append(q, k, v, cos, sin, positions, cache, *, rows=None, counts=None, q_out=None, stream=None, plan=None):
    """rope on q and k, then cache.append(k, v): what a layer does before its decode attention, in one call.

    q: [B, T, q_heads, D]; k, v: [B, T, kv_heads, D] in the cache's dtype; cos, sin, positions [B, T] as in rope
    (padding tokens need a valid position too); rows, counts: [B] as in KVCache.append. k itself is not changed.
    Returns q rotated, written to `q_out` when given (it may be q). After an error the cache and q_out are as they were.
    On a GPU as KVCache.append: an entry with a position that is not in the tables is left alone, its q_out included.
    """
    if stream is not None and needs_torch_stream(stream, q):
        return on_stream(rope_append, q, locals())
    if compiling():
        if q_out is not None:
            raise NotSupportedError("rope_append: q_out cannot be given under torch.compile")
        return torch_store("rope_append", (q, k, v, cos, sin, positions), cache, rows, counts, stream, plan)
    if q_out is None:
        q_out = empty("rope_append", "q_out", q)
    op = "rope_append"
    rows, counts = ints(op, "rows", rows), ints(op, "counts", counts)

    def kernel(cache, rows, counts):
        return _C.rope_append, (q, k, v, cos, sin, positions, cache, rows, counts, q_out, stream, plan)

    if isinstance(cache, (Cache, Pages)):
        ran(cache._store(op, k, rows, counts, kernel))
    else:
        function, arguments = kernel(cache, rows, counts)
        ran(function(*arguments))
    return q_out


def silu_mul(gate_up, *, out=None, stream=None, plan=None):
    """silu(gate) * up with gate_up = [gate | up] (SwiGLU: Shazeer 2020, arXiv 2002.05202).

    gate_up: [..., 2 * hidden]. Returns [..., hidden] in its dtype, written to `out` when given (`out` may be the gate
    half of gate_up). A gate of -inf gives NaN, as in torch.
    """
    if stream is not None and needs_torch_stream(stream, gate_up):
        return on_stream(silu_mul, gate_up, locals())
    if compiling():
        return torch_op("silu_mul", (gate_up,), (out,), stream, plan)
    if out is None:
        out = _half("silu_mul", gate_up)
    ran(_C.silu_mul(gate_up, out, stream, plan))
    return out


def gelu_mul(gate_up, *, approximate="tanh", out=None, stream=None, plan=None):
    """gelu(gate) * up with gate_up = [gate | up] (GELU: Hendrycks and Gimpel 2016, arXiv 1606.08415).

    approximate: "tanh", or "none" for the form with erf, as in torch. Shapes as silu_mul.
    """
    if stream is not None and needs_torch_stream(stream, gate_up):
        return on_stream(gelu_mul, gate_up, locals())
    if compiling():
        return torch_op("gelu_mul", (gate_up, approximate), (out,), stream, plan)
    if out is None:
        out = _half("gelu_mul", gate_up)
    ran(_C.gelu_mul(gate_up, approximate, out, stream, plan))
    return out


def softmax(x, *, out=None, stream=None, plan=None):
    """exp(x - max) / sum over the last dimension.

    x: [..., n]. Returns [..., n] in x's dtype, written to `out` when given. As in torch, a row of -inf only, or one
    that holds +inf or NaN, is NaN throughout.
    """
    if stream is not None and needs_torch_stream(stream, x):
        return on_stream(softmax, x, locals())
    if compiling():
        return torch_op("softmax", (x,), (out,), stream, plan)
    if out is None:
        out = empty("softmax", "out", x)
    ran(_C.softmax(x, out, stream, plan))
    return out


def _half(op, gate_up):
    shape = shape_of(gate_up)
    if not shape:
        return None
    try:
        return empty(op, "out", gate_up, (*shape[:-1], shape[-1] // 2))
    except TypeError:  # no number: the binding reads gate_up before its output
        return None


def _rows(ids, weight):
    """An output of embedding, or None for what the binding refuses before it reads its output."""
    shape, of_ids = shape_of(weight), shape_of(ids)
    if of_ids is None or shape is None:
        return None
    return empty("embedding", "out", weight, (*of_ids, *shape[1:2]))  # a weight of other dimensions is refused first


def _halves(x, *_):
    return [(*x.shape[:-1], x.shape[-1] // 2)]


def _rope_append(q, k, v, cos, sin, positions, *inputs, plan=None):
    cache, rows, counts = stored_to(inputs)
    return rope_append(q, k, v, cos, sin, positions, cache, rows=rows, counts=counts, plan=plan)


OPS["rms_norm"] = Op(
    "Tensor x, Tensor? weight, float eps, float weight_offset=0.0",
    ("out",),
    lambda x, weight, eps, offset=0.0, **options: rms_norm(x, weight, eps, weight_offset=offset, **options),
    like_first(),
)
OPS["add_rms_norm"] = Op(
    "Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0",
    ("out", "residual_out"),
    lambda x, residual, weight, eps, offset=0.0, **options: add_rms_norm(
        x, residual, weight, eps, weight_offset=offset, **options
    ),
    like_first(2),
)
OPS["qk_rms_norm"] = Op(
    "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, float eps, float weight_offset=0.0",
    ("q_out", "k_out"),
    lambda q, k, q_weight, k_weight, eps, offset=0.0, **options: qk_rms_norm(
        q, k, q_weight, k_weight, eps, weight_offset=offset, **options
    ),
    lambda q, k, *_: [q.shape, k.shape],
)
OPS["embedding"] = Op(
    "Tensor weight, Tensor ids, float scale",  # in aten's order: the output is weight's kind
    ("out",),
    lambda weight, ids, scale, **options: embedding(ids, weight, scale=scale, **options),
    lambda weight, ids, *_: [(*ids.shape, weight.shape[1])],
)
OPS["layer_norm"] = Op("Tensor x, Tensor? weight, Tensor? bias, float eps", ("out",), layer_norm, like_first())
OPS["add_layer_norm"] = Op(
    "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps",
    ("out", "residual_out"),
    add_layer_norm,
    like_first(2),
)
OPS["rope"] = Op(
    "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor positions",
    ("q_out", "k_out"),
    rope,
    lambda q, k, *_: [q.shape, k.shape],
)
OPS["silu_mul"] = Op("Tensor gate_up", ("out",), silu_mul, _halves)
OPS["gelu_mul"] = Op(
    "Tensor gate_up, str approximate",
    ("out",),
    lambda x, approximate, **options: gelu_mul(x, approximate=approximate, **options),
    _halves,
)
OPS["softmax"] = Op("Tensor x", ("out",), softmax, like_first())
STORING["rope_append"] = StoringOp(
    "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions",
    "Tensor",
    _rope_append,
    lambda q, *_: q.new_empty(q.shape),
)
