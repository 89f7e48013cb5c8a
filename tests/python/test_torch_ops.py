# SPDX-License-Identifier: Apache-2.0
"""torch.ops.rooftile and torch.compile: the same bits as the eager call, honest stand-ins, few recompiles."""

import pytest
import rooftile as rt
import torch
from cases import devices
from closeness import assert_bits_equal
from rooftile import torch_ops
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad


def _weight(kind, device="cpu", weight_type=rt.W4Weight):
    weight = torch.randn(24, 64, generator=torch.manual_seed(1)).to(device)
    return weight_type.quantize(weight, group_size=32, zeros=kind)


def _cache(format, dtype, device="cpu"):
    cache = rt.KVCache(2, 128, 2, 64, format=format, dtype=dtype, device=device)
    k, v = torch.randn(2, 2, 50, 2, 64, generator=torch.manual_seed(2)).to(device, dtype)
    cache.append(k, v, counts=[50, 37])
    return cache


def cases(tokens=5, dtype=torch.bfloat16, device="cpu"):
    """name -> (function of tensors, tensors). Weights and caches are captured, as a module would hold them."""
    torch.manual_seed(0)
    make = lambda *shape, dtype=dtype: torch.randn(*shape).to(device, dtype)  # noqa: E731
    x, r, w, b = make(2, tokens, 32), make(2, tokens, 32), make(32), make(32)
    cos, sin = make(64, 8, dtype=torch.float32), make(64, 8, dtype=torch.float32)
    positions = torch.arange(tokens, device=device).repeat(2, 1)
    eight = _weight(None, device, rt.W8Weight)
    symmetric, minima, bias = _weight(None, device), _weight("minima", device), make(24)
    kivi, plain = _cache("int4-kivi", dtype, device), _cache("bf16", dtype, device)
    q, kv = make(2, tokens, 4, 64), (make(2, tokens, 2, 64), make(2, tokens, 2, 64))
    lse = make(2, tokens, 4, dtype=torch.float32)
    return {
        "rms_norm": (lambda x, w: rt.rms_norm(x, w, 1e-5), (x, w)),
        "add_rms_norm": (rt.add_rms_norm, (x, r, w)),
        "qk_rms_norm": (rt.qk_rms_norm, (make(2, tokens, 3, 16), make(2, tokens, 1, 16), w[:16], b[:16])),
        "embedding": (lambda weight, ids: rt.embedding(ids, weight, scale=2.0), (make(64, 32), positions)),
        "layer_norm": (rt.layer_norm, (x, w, b)),
        "add_layer_norm": (rt.add_layer_norm, (x, r)),
        "add_layer_norm affine": (rt.add_layer_norm, (x, r, w, b)),
        "rope": (rt.rope, (make(2, tokens, 3, 16), make(2, tokens, 1, 16), cos, sin, positions)),
        "silu_mul": (rt.silu_mul, (x,)),
        "gelu_mul": (rt.gelu_mul, (x,)),
        "gelu_mul none": (lambda x: rt.gelu_mul(x, approximate="none"), (x,)),
        "softmax": (rt.softmax, (x,)),
        "sample": (
            lambda x, ids, s, p: rt.sample(x, top_k=9, repetition_penalty=1.2, token_ids=ids, seeds=s, positions=p),
            (x, positions[..., None], positions, positions.int()),
        ),
        "sample greedy": (lambda x: rt.sample(x, temperature=0), (x,)),
        "w4a16_matmul": (lambda x: rt.w4a16_matmul(x, symmetric), (make(2, tokens, 64),)),
        "w8a16_matmul": (lambda x: rt.w8a16_matmul(x, eight), (make(2, tokens, 64),)),
        "linear": (rt.linear, (make(2, tokens, 64), make(24, 64))),
        "decode_attention": (lambda q: rt.decode_attention(q, kivi, return_lse=True), (q[:, -2:],)),
        "decode_attention plain": (lambda q: rt.decode_attention(q, plain, window=9, softcap=5.0), (q,)),
        "prefill_attention": (rt.prefill_attention, (q, *kv)),
        "merge_attention": (rt.merge_attention, (q, lse, q.flip(1), lse.flip(1))),
        "w4a16_matmul minima": (lambda x, b: rt.w4a16_matmul(x, minima, bias=b), (make(tokens, 64), bias)),
    }


def on_devices(wanted=lambda name: True):
    """(device, name) of every case that the device has kernels for."""
    names = {"cpu": [n for n in cases() if wanted(n)]}
    names["cuda"] = [n for n in names["cpu"] if n != "prefill_attention"]
    return pytest.mark.parametrize(("device", "name"), [(d, n) for d in devices() for n in names[d]])


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@on_devices()
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiled_equals_eager(name, backend, device):
    f, inputs = cases(device=device)[name]
    with rt.record_kernels() as eager_ran:
        expected = as_tuple(f(*inputs))
    with rt.record_kernels() as ran:
        got = as_tuple(torch.compile(f, fullgraph=True, backend=backend)(*inputs))
    assert ran == eager_ran and len(ran) == 1
    for a, b in zip(got, expected, strict=True):
        assert_bits_equal(a, b)
        assert a.stride() == b.stride()


@on_devices()
def test_a_growing_sequence_compiles_twice_at_most(name, device):
    compiles = CompileCounter()
    compiled = torch.compile(cases(device=device)[name][0], fullgraph=True, backend=compiles)
    for tokens in (3, 4, 5, 7, 8, 9, 16, 17, 33):
        f, inputs = cases(tokens, device=device)[name]
        for a, b in zip(as_tuple(compiled(*inputs)), as_tuple(f(*inputs)), strict=True):
            assert_bits_equal(a, b)
    assert compiles.frame_count <= 2


def _op_inputs(name, device):
    """Arguments of torch.ops.rooftile.<name>, those of `cases` with what the public function adds."""
    inputs = cases(device=device)[name][1]
    if name in ("w4a16_matmul", "w8a16_matmul"):
        w = _weight("minima", device) if name == "w4a16_matmul" else _weight(None, device, rt.W8Weight)
        form = (w.codes, w.scales, w.offsets, None, *w.shape, w.group_size, w.kind, w.scale_dtype)
        return (*inputs, *form, None, None, None)
    if name == "decode_attention":
        return (*inputs, *_cache("int4-kivi", torch.bfloat16, device)._flat(), None, None, 0.2, 40, None, None)
    extra = {
        "prefill_attention": (True, None, None, None, None, None, None, None),
        "rms_norm": (1e-5,),
        "add_rms_norm": (1e-5,),
        "qk_rms_norm": (1e-5,),
        "embedding": (2.0,),
        "layer_norm": (1e-5,),
        "add_layer_norm": (None, None, 1e-5),
        "add_layer_norm affine": (1e-5,),
        "gelu_mul": ("tanh",),
        "linear": (None, None, None),
        "sample": (1.0, 9, None, None, 1.2, "transformers"),
    }
    return (*inputs, *extra.get(name, ()))


@on_devices(lambda name: name in torch_ops.OPS or name == "add_layer_norm affine")
def test_opcheck(name, device):
    inputs, name = _op_inputs(name, device), name.split()[0]
    op, out_op = getattr(torch.ops.rooftile, name).default, getattr(torch.ops.rooftile, name + "_out").default
    torch.library.opcheck(op, inputs)
    results = as_tuple(op(*inputs))
    written = {out: torch.zeros_like(t) for out, t in zip(torch_ops.OPS[name].outputs, results, strict=True)}
    torch.library.opcheck(out_op, inputs, written)
    out_op(*inputs, **written)
    for a, b in zip(written.values(), results, strict=True):
        assert_bits_equal(a, b)


@on_devices(lambda name: name in torch_ops.OPS)
@pytest.mark.parametrize("layout", ["contiguous", "swapped", "strided", "empty"])
def test_stand_in_has_the_real_shape_and_strides(name, layout, device):
    """opcheck compares no strides on the CPU."""

    def lay_out(t):
        if layout == "swapped" and t.dim() > 2:
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "strided" and t.dim() > 1:
            return torch.stack([t, t], -1).flatten(-2)[..., ::2]
        return t[:0] if layout == "empty" and t.dim() > 2 else t

    first, *rest = _op_inputs(name, device)
    if name in ("w4a16_matmul", "w8a16_matmul"):
        inputs = (lay_out(first), *rest)
    elif name == "decode_attention":
        rows = torch.zeros(0, dtype=torch.int32, device=device) if layout == "empty" else None
        inputs = (lay_out(first), *rest[:-6], rows, *rest[-5:])
    elif name == "rope":
        q, k, cos, sin, positions = first, *rest
        inputs = (lay_out(q), lay_out(k), cos, sin, positions[:0] if layout == "empty" else positions)
    elif name == "sample":
        x, ids, seeds, positions, *settings = first, *rest
        rows = slice(0 if layout == "empty" else None)
        inputs = (lay_out(x), lay_out(ids), seeds[rows], positions[rows], *settings)
    else:
        inputs = tuple(lay_out(t) if isinstance(t, torch.Tensor) else t for t in (first, *rest))
    op = getattr(torch.ops.rooftile, name).default
    real = as_tuple(op(*inputs))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = as_tuple(op(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in inputs)))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_a_block_compiles_into_one_graph(device):
    x, r, w = cases(device=device)["add_rms_norm"][1]

    def block(x, r, w):
        y, s = rt.add_rms_norm(x, r, w)
        return torch.nn.functional.pad(rt.silu_mul(y), (0, 16)) + s

    assert torch._dynamo.explain(block)(x, r, w).graph_break_count == 0
    assert_bits_equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x, r, w), block(x, r, w))


def test_an_offset_of_the_weight_is_compiled(device):
    x, r, w = cases(device=device)["add_rms_norm"][1]

    def norms(x, r, w):
        return rt.rms_norm(x, w, weight_offset=0.5), *rt.add_rms_norm(x, r, w, weight_offset=1.0)

    compiled = torch.compile(norms, fullgraph=True, backend="aot_eager")(x, r, w)
    for ours, expected in zip(compiled, norms(x, r, w), strict=True):
        assert_bits_equal(ours, expected)
    assert_bits_equal(torch.ops.rooftile.rms_norm(x, w, 1e-6, 0.5), compiled[0])
    assert not torch.equal(compiled[0], rt.rms_norm(x, w))


def test_given_outputs_are_written_by_the_compiled_call(device):
    x, r, w = cases(device=device)["add_rms_norm"][1]
    expected = rt.add_rms_norm(x, r, w)

    def f(x, r, w, out):
        y, s = rt.add_rms_norm(x, r, w, out=out, residual_out=r)
        return y + s

    out, residual = torch.zeros_like(x), r.clone()
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(x, residual, w, out)
    assert_bits_equal(out, expected[0])
    assert_bits_equal(residual, expected[1])
    assert_bits_equal(got, expected[0] + expected[1])


def test_errors_of_a_compiled_call_name_the_argument():
    compiled = torch.compile(lambda x, w: rt.rms_norm(x, w), fullgraph=True, backend="eager")
    with pytest.raises(rt.ArgumentError, match="weight must be"):
        compiled(torch.randn(3, 8), torch.ones(7))
    assert compiled(torch.randn(3, 8), torch.ones(8)).shape == (3, 8)
    with pytest.raises(Exception, match="stream cannot be given"):
        torch.compile(lambda x: rt.rms_norm(x, stream=1), fullgraph=True, backend="eager")(torch.randn(3, 8))


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_what_needs_a_gradient_is_refused_as_in_eager(backend):
    """A graph would detach it, and the gradient would be silently gone."""
    x, w, out = torch.randn(3, 8), torch.randn(8), torch.empty(3, 8)
    for name in ("x", "w", "out"):
        inputs = {"x": x, "w": w, "out": out}
        inputs[name] = inputs[name].clone().requires_grad_()
        argument = "weight" if name == "w" else name
        for compiled in (
            torch.compile(lambda x, w, out: rt.rms_norm(x, w, out=out), backend=backend),
            torch.compile(lambda x, w, out: rt.rms_norm(x * 1, w * 1, out=out), backend=backend),
        ):
            with pytest.raises(rt.ArgumentError, match=f"rms_norm: {argument} requires grad"):
                compiled(**inputs)
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    assert_bits_equal(compiled(**inputs), rt.rms_norm(x, w))
    cache = rt.KVCache(1, 64, 1, 8, format="int8")
    k = torch.randn(1, 2, 1, 8)
    append = torch.compile(lambda k, v: cache.append(k, v), fullgraph=True, backend=backend)
    with pytest.raises(Exception, match="append: v requires grad"):
        append(k, k.clone().requires_grad_())
    assert cache.lengths == [0]


@pytest.mark.parametrize("compiled", [None, "eager", "aot_eager"])
def test_dual_tensors_are_refused(compiled):
    """No op carries on a tangent."""
    norm = rt.rms_norm if compiled is None else torch.compile(lambda x, w: rt.rms_norm(x, w), backend=compiled)
    x, w = torch.randn(3, 8), torch.randn(8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(rt.ArgumentError, match="rms_norm: x is a dual tensor"):
            norm(dual, w)
        assert_bits_equal(norm(forward_ad.unpack_dual(dual).primal, w), rt.rms_norm(x, w))
    assert_bits_equal(norm(x, w), rt.rms_norm(x, w))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@on_devices()
def test_jit_trace_is_refused(name, device):
    """It sees torch's calls alone: the function would return outputs that nothing fills."""
    f, inputs = cases(device=device)[name]
    before = as_tuple(f(*inputs))
    with pytest.raises(rt.NotSupportedError, match=rf"^{name.split()[0]}: \w+ is recorded by torch.jit.trace"):
        torch.jit.trace(f, inputs)
    for a, b in zip(before, as_tuple(f(*inputs)), strict=True):
        assert_bits_equal(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_of_a_cache_and_of_torch_ops():
    cache, k, w = rt.KVCache(1, 64, 1, 8, format="int8"), torch.randn(1, 2, 1, 8), torch.randn(8)
    with pytest.raises(rt.NotSupportedError, match=r"append: k is recorded by torch.jit.trace"):
        torch.jit.trace(lambda k: (cache.append(k, k), k)[1], (k,))
    assert cache.lengths == [0]
    norm = torch.jit.trace(lambda x: torch.ops.rooftile.rms_norm(x, w, 1e-5), (k,))
    assert_bits_equal(norm(k + 1), rt.rms_norm(k + 1, w, 1e-5))


def test_export():
    class Block(torch.nn.Module):
        def forward(self, x, w):
            return rt.silu_mul(rt.rms_norm(x, w))

    x, w = torch.randn(4, 32), torch.randn(32)
    program = torch.export.export(Block(), (x, w))
    assert_bits_equal(program.module()(x, w), Block()(x, w))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"rooftile.rms_norm.default", "rooftile.silu_mul.default"} <= targets


# -------------------------------------------- a decode step: what stores, what attends, what multiplies

STEPS = (("int8", "float16"), ("int4-kivi", "bfloat16"), ("bf16", "bfloat16"), ("fp16", "float16"))


def decode_step(cache, w, q, k, v, cos, sin, positions):
    q = rt.rope_append(q, k, v, cos, sin, positions, cache)
    first = rt.decode_attention(q, cache)
    cache.append(k, v)
    out, lse = rt.decode_attention(q, cache, return_lse=True)
    return rt.w4a16_matmul((first + out).flatten(2), w), lse


@pytest.mark.parametrize(("format", "dtype"), STEPS)
@torch.no_grad()
def test_a_decode_step_is_one_graph(format, dtype, device):
    """fullgraph: no break; the cache is changed as an eager step changes it."""
    torch.manual_seed(0)
    eager, traced = (rt.KVCache(2, 128, 2, 64, format=format, dtype=dtype, device=device) for _ in range(2))
    make = lambda *shape: torch.randn(*shape, device=device).to(getattr(torch, dtype))  # noqa: E731
    w = rt.W4Weight.quantize(make(96, 256), group_size=64)
    cos, sin = torch.randn(200, 32, device=device), torch.randn(200, 32, device=device)
    step = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    for i in range(40):
        q, k, v = make(2, 1, 4, 64), make(2, 1, 2, 64), make(2, 1, 2, 64)
        inputs = (w, q, k, v, cos, sin, torch.full((2, 1), i, device=device))
        for a, b in zip(step(traced, *inputs), decode_step(eager, *inputs), strict=True):
            assert torch.equal(a, b)
    assert traced.lengths == eager.lengths == [80, 80]
    q, k = make(2, 1, 4, 64), make(2, 1, 2, 64)
    positions = torch.zeros(2, 1, dtype=torch.int64, device=device)
    ops = torch.ops.rooftile
    torch.library.opcheck(ops.append.default, (k, k.clone(), *eager._flat(), None, None))
    torch.library.opcheck(ops.rope_append.default, (q, k, k.clone(), cos, sin, positions, *eager._flat(), None, None))
    torch.library.opcheck(ops.decode_attention.default, (q, *eager._flat(), None, None, None, None, None, None))
    form = (w.codes, w.scales, w.offsets, w.perm, *w.shape, w.group_size, w.kind, w.scale_dtype)
    torch.library.opcheck(ops.w4a16_matmul.default, (make(3, 256), *form, None, None, None))


@pytest.mark.parametrize("given", ("out", "lse", "out and lse"))
@torch.no_grad()
def test_outputs_of_attention_that_are_given_are_written_in_a_graph(given, device):
    torch.manual_seed(0)
    cache = rt.KVCache(2, 64, 2, 64, format="int8", dtype="float16", device=device)
    q, k = (torch.randn(2, 3, heads, 64, device=device).half() for heads in (4, 2))
    cache.append(k, k)
    expected = rt.decode_attention(q, cache, return_lse=True)
    outputs = {"out": torch.zeros_like(q), "lse": torch.zeros(2, 3, 4, device=device)}
    outputs = {name: t for name, t in outputs.items() if name in given.split()}

    def decode(q, **outputs):
        return rt.decode_attention(q, cache, return_lse=True, **outputs)

    got = torch.compile(decode, fullgraph=True, backend="aot_eager")(q, **outputs)
    for name, a, b in zip(("out", "lse"), got, expected, strict=True):
        assert_bits_equal(a, b)
        assert_bits_equal(outputs.get(name, a), b)


@torch.no_grad()
def test_rows_and_counts_reach_the_ops_in_a_graph(device):
    """Entries 0 and 1 of the batch are rows 2 and 0, with one token of two and both."""
    torch.manual_seed(0)
    eager, traced = (rt.KVCache(3, 64, 2, 64, format="int8", dtype="float16", device=device) for _ in range(2))
    q, k = (torch.randn(2, 2, heads, 64, device=device).half() for heads in (4, 2))
    cos, sin = torch.randn(2, 8, 32, device=device)
    positions = torch.tensor([[0, 1], [2, 3]], device=device)
    rows, counts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 0], [1, 2]))

    def step(cache, q):
        q = rt.rope_append(q, k, k, cos, sin, positions, cache, rows=rows, counts=counts)
        return rt.decode_attention(q, cache, rows=rows, counts=counts, return_lse=True)

    for a, b in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(traced, q), step(eager, q), strict=True):
        assert_bits_equal(a, b)
    assert traced.lengths == eager.lengths == [2, 0, 1]
    inputs = (q, *eager._flat(), rows, counts, None, None, None, None)
    out, lse = torch.ops.rooftile.decode_attention(*inputs)
    expected = rt.decode_attention(q, eager, rows=rows, counts=counts, return_lse=True)
    assert_bits_equal(out, expected[0])
    assert_bits_equal(lse, expected[1])


def paged_pair(format, dtype, device, rows=3, pages=24, page_size=32):
    """Two equal paged caches whose rows 0 and 1 share a full page and a part of the next."""
    options = {"max_rows": rows, "max_pages_per_row": 8, "format": format, "dtype": dtype, "device": device}
    caches = tuple(rt.PagedKVCache(pages, page_size, 2, 64, **options) for _ in range(2))
    k, v = torch.randn(2, 1, 64, 2, 64, generator=torch.manual_seed(3)).to(getattr(torch, dtype)).to(device)
    for cache in caches:
        cache.append(k, v)
        cache.fork(0, 1)
        cache.truncate([1], [48])
    return caches


def assert_same_cache(a, b):
    """The same bytes, and the same books: who holds which page, and what the host thinks."""
    for name, array in a._arrays.items():
        assert torch.equal(array, b._arrays[name]), name
    for x, y in zip(a._page_state, b._page_state, strict=True):
        assert x is y is None or torch.equal(x, y)


@pytest.mark.parametrize(("format", "dtype"), STEPS)
@torch.no_grad()
def test_a_decode_step_of_a_paged_cache_is_one_graph(format, dtype, device):
    """Rows pass page ends and write into pages they share; table, lengths and counts of users are those of eager."""
    eager, traced = paged_pair(format, dtype, device)
    make = lambda *shape: torch.randn(*shape, device=device).to(getattr(torch, dtype))  # noqa: E731
    w = rt.W4Weight.quantize(make(96, 256), group_size=64)
    cos, sin = torch.randn(200, 32, device=device), torch.randn(200, 32, device=device)
    step = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    shared = (traced.block_table[0, :2] == traced.block_table[1, :2]).tolist()
    for i in range(40):
        q, k, v = make(3, 1, 4, 64), make(3, 1, 2, 64), make(3, 1, 2, 64)
        inputs = (w, q, k, v, cos, sin, torch.full((3, 1), i, device=device))
        for a, b in zip(step(traced, *inputs), decode_step(eager, *inputs), strict=True):
            assert torch.equal(a, b)
        assert_same_cache(traced, eager)
    assert traced.lengths == [144, 128, 80] and shared == [True, True]
    assert (traced.block_table[0, :2] == traced.block_table[1, :2]).tolist() == [True, False]
    q, k = make(3, 1, 4, 64), make(3, 1, 2, 64)
    positions = torch.zeros(3, 1, dtype=torch.int64, device=device)
    ops, form = torch.ops.rooftile, (*eager._flat(), None, None, *eager._page_state)
    torch.library.opcheck(ops.append.default, (k, k.clone(), *form))
    torch.library.opcheck(ops.rope_append.default, (q, k, k.clone(), cos, sin, positions, *form))


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_rows_and_counts_of_a_paged_append_are_host_tensors(backend, device):
    eager, traced = paged_pair("int8", "float16", device)
    k = torch.randn(2, 9, 2, 64, device=device).half()
    append = torch.compile(
        lambda k, rows, counts: traced.append(k, k, rows=rows, counts=counts), fullgraph=True, backend=backend
    )
    for rows, counts in (([2, 0], [9, 1]), ([1, 2], [5, 0]), ([0, 1], [9, 9])):
        append(k, torch.tensor(rows, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))
        eager.append(k, k, rows=rows, counts=counts)
        assert_same_cache(traced, eager)


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_a_compiled_append_that_is_refused_changes_nothing(backend, device):
    """Row 0 takes the last page before row 1 finds none; then v is of another dtype."""
    before, cache = paged_pair("int8", "float16", device, pages=4)
    k = torch.randn(3, 33, 2, 64, device=device).half()
    append = torch.compile(lambda k, v: cache.append(k, v), fullgraph=True, backend=backend)
    with pytest.raises(rt.OutOfPagesError, match="append: row 1 needs another page of 32 tokens, all 4 are taken"):
        append(k, k)
    assert_same_cache(cache, before)
    with pytest.raises(rt.ArgumentTypeError, match="v must be float16"):
        append(k[:1, :32], k[:1, :32].float())
    assert_same_cache(cache, before)
    append(k[:1, :32], k[:1, :32])
    before.append(k[:1, :32], k[:1, :32])
    assert_same_cache(cache, before)


@pytest.mark.parametrize("name", torch_ops.STORING)
def test_no_graph_copies_the_word_of_faults(name):
    """What a schema calls written a graph may hand over as a clone: the kernels would report to a word nobody reads."""
    schema = getattr(torch.ops.rooftile, name).default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert {"pool", "lengths"} <= written and "fault" not in written
