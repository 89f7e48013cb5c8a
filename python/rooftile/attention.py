# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache (decode), over a prompt (prefill), and the merge of partial results.

Log-sum-exp values are natural logarithms. A query that sees no key gets out 0 and lse -inf.
"""

from rooftile import _C
from rooftile._arrays import check_flag, empty, shape_of, workspace
from rooftile._calls import compiling, needs_torch_stream, on_stream, ran, torch_op
from rooftile._registry import CACHE, CACHE_PARTS, OPS, Op
from rooftile.errors import NotSupportedError
from rooftile.kv_cache import ints


def _empty_lse(op, q):
    """fp32 with q's shape less head_dim. None where q has no shape: the binding refuses it."""
    shape = shape_of(q)
    return None if shape is None else empty(op, "lse", q, tuple(shape)[:-1], "float32")


def _traced(op, inputs, out, lse, return_lse, stream, plan):
    """The call as torch.compile records it; the operator always computes lse."""
    q = inputs[0]
    if out is not None or lse is not None:
        out, lse = empty(op, "out", q) if out is None else out, _empty_lse(op, q) if lse is None else lse
    out, lse = torch_op(op, inputs, (out, lse), stream, plan)
    return (out, lse) if return_lse else out


def decode_attention(
    q,
    cache,
    *,
    rows=None,
    counts=None,
    scale=None,
    window=None,
    softcap=None,
    sinks=None,
    return_lse=False,
    out=None,
    lse=None,
    stream=None,
    plan=None,
):
    """Attends the newest tokens of every row to all tokens in its cache, their own included.

    q: [B, q_heads, head_dim], or [B, T, q_heads, head_dim] for the newest T tokens of each row, which are in the cache
    already and causal among themselves; the cache's dtype, any strides. q_heads is a multiple of the cache's kv_heads.
    head_dim up to 512. T is unlimited for the formats with a scale per token; for the kivi formats at most 32.
    cache: a KVCache, PagedKVCache or view of an engine's pool. A query at position t of a kivi cache reads the groups
    of 32 tokens that were full before t as codes and its own group raw, so T tokens at once and one at a time agree.
    rows: [B], the cache row of each batch entry, default b: a list of ints, an int32 NumPy array, or an int32 tensor on
    the cache's device.
    counts: [B] likewise, how many of the row's T queries are real; query i < counts[b] stands at position
    length - counts[b] + i, the others get out 0 and lse -inf. Default T.

    The logit is scale * dot(q, k) (`scale` defaults to head_dim ** -0.5), then softcap * tanh(logit / softcap) when
    `softcap` is given; with `window` W the query at position t sees keys t - W + 1 .. t. sinks: [q_heads], q's dtype or
    float32, one more logit per head that has no value.

    Returns out with q's shape and dtype, written to `out` when given; with return_lse=True also the float32 log-sum-exp
    [B, q_heads] or [B, T, q_heads], sinks included, written to `lse` when given. Outputs share no memory with an input
    or each other. No visible key: out 0, lse -inf (the sink's logit when there are sinks). fp32 accumulation. A row's
    bits depend on its own tokens only: not on the batch, the capacity, its pages or the number of threads, nor, on the
    CPU, on T; on a GPU T queries at once and one by one agree within rounding.
    stream: a CUDA stream's handle, default the framework's current stream. plan: what `rt.explain` returned, or
    a plan's text: a CPU kernel variant, one of `rt.env()["cpu"]["variants"]`, or on a GPU a plan that fits the call.

    Raises ArgumentError / ArgumentTypeError naming the argument, NotSupportedError for T > 32 with a kivi cache.
    Split along the sequence as in Flash-Decoding (Dao et al. 2023); kivi formats: Liu et al. 2024, arXiv 2402.02750.
    """
    if stream is not None and needs_torch_stream(stream, q):
        return on_stream(decode_attention, q, locals())
    if return_lse is not False:
        check_flag("decode_attention", "return_lse", return_lse)
    if compiling():
        options = (rows, counts, scale, window, softcap, sinks)
        return _traced("decode_attention", (q, *cache._flat(), *options), out, lse, return_lse, stream, plan)
    if out is None:
        out = empty("decode_attention", "out", q)
    if lse is None and return_lse:
        lse = _empty_lse("decode_attention", q)
    if rows is not None or counts is not None:
        op, device = "decode_attention", getattr(cache, "device", "cpu")
        rows, counts = ints(op, "rows", rows, device), ints(op, "counts", counts, device)
    ran(_C.decode_attention(q, cache, out, lse, rows, counts, scale, window, softcap, sinks, workspace, stream, plan))
    return (out, lse) if return_lse else out


def prefill_attention(
    q,
    k,
    v,
    *,
    causal=True,
    scale=None,
    window=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cache=None,
    rows=None,
    counts=None,
    return_lse=False,
    out=None,
    lse=None,
    stream=None,
    plan=None,
):
    """Attends many queries to many keys, in blocks with a running softmax (Dao et al. 2022, arXiv 2205.14135).

    q: [B, S, q_heads, head_dim] with k, v [B, Sk, kv_heads, head_dim]; or packed, q [total_q, q_heads, head_dim] with
    k, v [total_k, kv_heads, head_dim] and cu_seqlens_q, cu_seqlens_k [B + 1], lists of ints or int32 arrays on the
    host: sequence b is tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1. float32, float16 or bfloat16, all three the same;
    any strides. q_heads is a multiple of kv_heads, head_dim at most 512.

    causal: query i sees keys up to i + Sk - S (aligned to the end). window W: a query at position t sees keys
    t - W + 1 .. t, without causal keys with |t - j| < W. The logit is scale * dot(q, k) (`scale` defaults to
    head_dim ** -0.5), then softcap * tanh(logit / softcap), then + alibi_slopes[head] * (j - t) for the key at
    position j (float32 [q_heads]). sinks: [q_heads], q's dtype or float32, one more logit per head that has no value.

    cache: k, v are new tokens that are not in the cache yet. They stand at positions length, length + 1, .. of their
    row, see what the row holds (a kivi cache: closed groups as codes, the open group raw) and one another raw; the
    caller appends them afterwards. Sk = S then. rows: [B], a list of ints or an int32 array on the host, the cache row
    of each sequence; default b.
    counts: [B] likewise, row b's first counts[b] tokens are real; the others are not attended, out 0, lse -inf.

    Returns out with q's shape and dtype, written to `out` when given; with return_lse=True also the float32 natural
    log-sum-exp, q's shape less head_dim, sinks included, written to `lse` when given. Outputs share no memory with
    an input or each other. No visible key: out 0, lse -inf
    (the sink's logit when there are sinks). fp32 accumulation; a row's bits do not depend on its neighbours. On a CPU
    with AVX512-BF16 (but Intel's) the weights of bfloat16 values, exp(logit - largest), are rounded to bfloat16, as
    flash attention rounds them on GPUs; over codes they are not. There numbers below 2^-126 count as 0.
    stream: a CUDA stream's handle, default the framework's current stream. plan: a CPU kernel variant by name, one of
    `rt.env()["cpu"]["variants"]`; not for a GPU.

    Raises ArgumentError / ArgumentTypeError naming the argument, NotSupportedError on a GPU.
    """
    if stream is not None and needs_torch_stream(stream, q):
        return on_stream(prefill_attention, q, locals())
    op = "prefill_attention"
    check_flag(op, "causal", causal)
    check_flag(op, "return_lse", return_lse)
    if compiling():
        if cache is not None or rows is not None or counts is not None:
            raise NotSupportedError("prefill_attention: cache, rows and counts cannot be given under torch.compile")
        options = (causal, scale, window, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
        return _traced(op, (q, k, v, *options), out, lse, return_lse, stream, plan)
    if out is None:
        out = empty(op, "out", q)
    if lse is None and return_lse:
        lse = _empty_lse(op, q)
    ran(
        _C.prefill_attention(
            q,
            k,
            v,
            out,
            lse,
            causal,
            scale,
            window,
            softcap,
            sinks,
            alibi_slopes,
            ints(op, "cu_seqlens_q", cu_seqlens_q),
            ints(op, "cu_seqlens_k", cu_seqlens_k),
            cache,
            ints(op, "rows", rows),
            ints(op, "counts", counts),
            stream,
            plan,
        )
    )
    return (out, lse) if return_lse else out


def merge_attention(out_a, lse_a, out_b, lse_b, *, out=None, lse=None, stream=None, plan=None):
    """One attention result from two over disjoint sets of keys.

    out_a, out_b: [..., heads, head_dim], the same float dtype; lse_a, lse_b: float32 [..., heads], natural logarithm;
    any strides. A side whose lse is -inf saw no key: its out is not read, the other side is returned bit for bit; two
    such sides give out 0 and lse -inf. Sinks, if any, belong to one of the two sides.

    Returns (out, lse), written to `out` and `lse` when given; they may be out_a and lse_a themselves. fp32 arithmetic.
    stream: a CUDA stream's handle, default the framework's current stream. plan: a CPU kernel variant by name, one of
    `rt.env()["cpu"]["variants"]`; not for a GPU.
    Raises ArgumentError / ArgumentTypeError naming the argument.
    """
    if stream is not None and needs_torch_stream(stream, out_a):
        return on_stream(merge_attention, out_a, locals())
    if compiling():
        return torch_op("merge_attention", (out_a, lse_a, out_b, lse_b), (out, lse), stream, plan)
    if out is None:
        out = empty("merge_attention", "out", out_a)
    if lse is None:
        lse = empty("merge_attention", "lse", lse_a)
    ran(_C.merge_attention(out_a, lse_a, out_b, lse_b, out, lse, stream, plan))
    return out, lse


def _decode_attention(q, *inputs, **options):
    cache, (rows, counts, scale, window, softcap, sinks) = inputs[:CACHE_PARTS], inputs[CACHE_PARTS:]
    options |= {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    return decode_attention(q, _C.KvCache(*cache), rows=rows, counts=counts, return_lse=True, **options)


def _prefill_attention(
    q, k, v, causal, scale, window, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, **options
):
    options |= {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    options |= {"alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return prefill_attention(q, k, v, return_lse=True, **options)


def _out_and_lse(q, *_):
    return [q.shape, q.shape[:-1]]


OPS["decode_attention"] = Op(
    f"Tensor q, {CACHE}, Tensor? rows, Tensor? counts, float? scale, int? window, float? softcap, Tensor? sinks",
    ("out", "lse"),
    _decode_attention,
    _out_and_lse,
    (None, "float32"),
)
OPS["prefill_attention"] = Op(
    "Tensor q, Tensor k, Tensor v, bool causal, float? scale, int? window, float? softcap, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k",
    ("out", "lse"),
    _prefill_attention,
    _out_and_lse,
    (None, "float32"),
)
OPS["merge_attention"] = Op(
    "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b",
    ("out", "lse"),
    merge_attention,
    lambda out_a, lse_a, *_: [out_a.shape, lse_a.shape],
    (None, "float32"),
)
