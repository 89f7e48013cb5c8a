# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.rooftile.<op>`: every functional op for torch.compile, torch.export and the dispatcher.

Imported when torch.compile first meets an op, or by hand. The public functions call these ops while they are traced
and the kernels directly otherwise, so eager calls do not pay for the dispatcher. Each op comes twice: `<op>`, which
returns new contiguous tensors, and `<op>_out`, which writes the tensors it is given. There is no autograd: inference
only.
"""

import functools
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from rooftile import _C, attention, fused, gemm
from rooftile._arrays import ran
from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.kv_cache import append
from rooftile.kv_pages import Pages

_library = torch.library.Library("rooftile", "DEF")


@dataclass(frozen=True)
class _Op:
    inputs: str  # schema of the arguments
    outputs: tuple  # names of the function's output arguments
    function: object  # the public function
    fake: object  # (inputs) -> one shape per output; the device is the first argument's
    dtypes: tuple = (None, None)  # of the outputs; None: the first argument's


def _like_first(count=1):
    return lambda x, *_: [x.shape] * count


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
    return _Op(
        "Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? perm, int n, int k, int group_size, str kind, "
        "str scale_dtype, Tensor? bias, str? activation, Tensor? residual, bool batch_invariant=False",
        ("out",),
        functools.partial(_packed_matmul, weight_type, function),
        lambda x, codes, scales, offsets, perm, n, *rest: [(*x.shape[:-1], gemm.outputs(n, rest[5]))],
    )


def _linear(x, weight, bias, activation, residual, **options):
    return gemm.linear(x, weight, bias=bias, activation=activation, residual=residual, **options)


_CACHE = (
    "str format, str dtype, int page_size, int head_dim, int kv_heads, int max_rows, int max_pages, Tensor? pool, "
    "Tensor? k_pool, Tensor? v_pool, Tensor? block_table, Tensor lengths, Tensor? ring_k, Tensor? ring_v, "
    "Tensor? raw_from, Tensor? fault"
)
_CACHE_PARTS = _CACHE.count(",") + 1  # Cache._flat()


# The same for ops that store: what an append writes. K and V of an element format are two views of one pool. Not the
# word of faults: what is written a graph may hand over as a clone, and the kernels' word is one place in memory. What a
# PagedKVCache gives besides, Cache._page_state, follows at the end.
_WRITTEN = ("pool", "k_pool", "v_pool", "block_table", "lengths", "ring_k", "ring_v", "raw_from")
_PAGES = "Tensor(i!)? users=None, Tensor(j!)? host_table=None, Tensor(k!)? host_lengths=None"


def _written_cache():
    parts = []
    for part in _CACHE.split(", "):
        kind, name = part.split(" ")
        if name in _WRITTEN:
            letter = "abcdefgh"[_WRITTEN.index(name)]
            kind = kind.replace("Tensor", f"Tensor({letter}!)")
        parts.append(f"{kind} {name}")
    return ", ".join(parts)


def _stored_to(inputs):
    """What follows an operator's own tensors as (cache, rows, counts), the cache a _C.KvCache or Pages."""
    flat, (rows, counts, *state) = inputs[:_CACHE_PARTS], inputs[_CACHE_PARTS:]
    handle, state = _C.KvCache(*flat), [x for x in state if x is not None]
    if not state:
        return handle, rows, counts
    # a NumPy array is sent to the device once pages are taken
    rows, counts = (x.numpy() if x is not None and x.is_cpu else x for x in (rows, counts))
    return Pages(flat, handle, *state), rows, counts


def _append(k, v, *inputs, plan=None):
    cache, rows, counts = _stored_to(inputs)
    if isinstance(cache, Pages):
        append(cache, k, v, rows, counts, None, plan)
    else:
        ran(_C.kv_append(cache, k, v, rows, counts, None, plan))


def _rope_append(q, k, v, cos, sin, positions, *inputs, plan=None):
    cache, rows, counts = _stored_to(inputs)
    return fused.rope_append(q, k, v, cos, sin, positions, cache, rows=rows, counts=counts, plan=plan)


def _decode_attention(q, *inputs, **options):
    cache, (rows, counts, scale, window, softcap, sinks) = inputs[:_CACHE_PARTS], inputs[_CACHE_PARTS:]
    options |= {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    return attention.decode_attention(q, _C.KvCache(*cache), rows=rows, counts=counts, return_lse=True, **options)


def _prefill_attention(
    q, k, v, causal, scale, window, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, **options
):
    options |= {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    options |= {"alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return attention.prefill_attention(q, k, v, return_lse=True, **options)


OPS = {
    "rms_norm": _Op("Tensor x, Tensor? weight, float eps", ("out",), fused.rms_norm, _like_first()),
    "add_rms_norm": _Op(
        "Tensor x, Tensor residual, Tensor? weight, float eps",
        ("out", "residual_out"),
        fused.add_rms_norm,
        _like_first(2),
    ),
    "layer_norm": _Op("Tensor x, Tensor? weight, Tensor? bias, float eps", ("out",), fused.layer_norm, _like_first()),
    "add_layer_norm": _Op(
        "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps",
        ("out", "residual_out"),
        fused.add_layer_norm,
        _like_first(2),
    ),
    "rope": _Op(
        "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor positions",
        ("q_out", "k_out"),
        fused.rope,
        lambda q, k, *_: [q.shape, k.shape],
    ),
    "silu_mul": _Op("Tensor gate_up", ("out",), fused.silu_mul, lambda x: [(*x.shape[:-1], x.shape[-1] // 2)]),
    "gelu_mul": _Op(
        "Tensor gate_up, str approximate",
        ("out",),
        lambda x, approximate, **options: fused.gelu_mul(x, approximate=approximate, **options),
        lambda x, _: [(*x.shape[:-1], x.shape[-1] // 2)],
    ),
    "softmax": _Op("Tensor x", ("out",), fused.softmax, _like_first()),
    "w4a16_matmul": _packed_op(gemm.W4Weight, gemm.w4a16_matmul),
    "w8a16_matmul": _packed_op(gemm.W8Weight, gemm.w8a16_matmul),
    "linear": _Op(
        "Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor? residual",
        ("out",),
        _linear,
        lambda x, weight, *_: [(*x.shape[:-1], weight.shape[0])],
    ),
    "decode_attention": _Op(
        f"Tensor q, {_CACHE}, Tensor? rows, Tensor? counts, float? scale, int? window, float? softcap, Tensor? sinks",
        ("out", "lse"),
        _decode_attention,
        lambda q, *_: [q.shape, q.shape[:-1]],
        (None, torch.float32),
    ),
    "prefill_attention": _Op(
        "Tensor q, Tensor k, Tensor v, bool causal, float? scale, int? window, float? softcap, Tensor? sinks, "
        "Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k",
        ("out", "lse"),
        _prefill_attention,
        lambda q, *_: [q.shape, q.shape[:-1]],
        (None, torch.float32),
    ),
    "merge_attention": _Op(
        "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b",
        ("out", "lse"),
        attention.merge_attention,
        lambda out_a, lse_a, *_: [out_a.shape, lse_a.shape],
        (None, torch.float32),
    ),
}


def _register(name, op):
    single = len(op.outputs) == 1
    returns = "Tensor" if single else "(" + ", ".join(["Tensor"] * len(op.outputs)) + ")"
    written = ", ".join(f"Tensor({letter}!) {out}" for letter, out in zip("abcdef", op.outputs, strict=False))
    _library.define(f"{name}({op.inputs}, *, str? plan=None) -> {returns}")
    _library.define(f"{name}_out({op.inputs}, *, {written}, str? plan=None) -> ()")

    def run(*inputs, plan=None):
        return op.function(*inputs, plan=plan)

    def run_out(*inputs, plan=None, **outputs):
        op.function(*inputs, plan=plan, **outputs)

    def fake(*inputs, plan=None):
        shapes = op.fake(*inputs)
        results = tuple(inputs[0].new_empty(s, dtype=t) for s, t in zip(shapes, op.dtypes, strict=False))
        return results[0] if single else results

    def fake_out(*inputs, plan=None, **outputs):
        return None

    for suffix, implementation, stand_in in (("", run, fake), ("_out", run_out, fake_out)):
        for key in ("CPU", "CUDA"):
            _library.impl(name + suffix, implementation, key)
        torch.library.register_fake(f"rooftile::{name}{suffix}", stand_in, lib=_library)


for _name, _op in OPS.items():
    _register(_name, _op)


# Ops that change a cache. They have no form that is given its outputs.
STORING = {
    "append": ("Tensor k, Tensor v", "()", _append, lambda *_: None),
    "rope_append": (
        "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions",
        "Tensor",
        _rope_append,
        lambda q, *_: q.new_empty(q.shape),
    ),
}


def _register_storing(name, inputs, returns, function, fake):
    _library.define(
        f"{name}({inputs}, {_written_cache()}, Tensor? rows, Tensor? counts, {_PAGES}, *, str? plan=None) -> {returns}"
    )
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"rooftile::{name}", lambda *inputs, plan=None: fake(*inputs), lib=_library)


for _name, _storing in STORING.items():
    _register_storing(_name, *_storing)


def _names(schema):
    return [part.split("=")[0].split(" ")[-1] for part in schema.split(", ")]


_NAMES = {name: [*_names(op.inputs), *op.outputs] for name, op in OPS.items()}
_NAMES |= {name: _names(inputs) for name, (inputs, *_) in STORING.items()}


def _refuse_grad(name, inputs):
    """As the bindings refuse them. A graph would detach what requires grad, and hides which tensors are dual."""
    if torch.is_grad_enabled():
        for argument, x in zip(_NAMES[name], inputs, strict=False):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise ArgumentError(
                    f"{name}: {argument} requires grad; rooftile is for inference: call it under torch.no_grad() or "
                    "inference_mode()"
                )
    if forward_ad._current_level >= 0:
        raise NotSupportedError(f"{name}: cannot be compiled inside torch.autograd.forward_ad.dual_level()")


def store(name, inputs, cache, rows, counts, stream, plan):
    """append or rope_append as Cache.append and rope_append call them while they are traced."""
    if stream is not None:
        raise NotSupportedError(f"{name}: stream cannot be given under torch.compile; it uses torch's current stream")
    _refuse_grad(name, inputs)
    return getattr(torch.ops.rooftile, name)(*inputs, *cache._flat(), rows, counts, *cache._page_state, plan=plan)


def call(name, inputs, outputs, stream, plan):
    """The op as the public function calls it while it is traced. outputs: given tensors, or None for new ones."""
    if stream is not None:
        raise NotSupportedError(f"{name}: stream cannot be given under torch.compile; it uses torch's current stream")
    _refuse_grad(name, (*inputs, *outputs))
    if all(out is None for out in outputs):
        return getattr(torch.ops.rooftile, name)(*inputs, plan=plan)
    if any(out is None for out in outputs):
        raise NotSupportedError(f"{name}: under torch.compile give all outputs or none")
    written = dict(zip(OPS[name].outputs, outputs, strict=True))
    getattr(torch.ops.rooftile, name + "_out")(*inputs, plan=plan, **written)
    return outputs[0] if len(outputs) == 1 else outputs
