# SPDX-License-Identifier: Apache-2.0
"""The small ops between the products, and sampling behind them, against torch eager and torch.compile."""

import re

import torch
import torch.nn.functional as F

import rooftile as rt
from rooftile.bench.report import OURS
from rooftile.bench.timing import Entry, rotation
from rooftile.errors import ArgumentError

PEERS = ("torch.eager", "torch.compile")
_DTYPE = torch.bfloat16
_DEVICE = "cuda"
_TOLERANCE = 8e-3  # relative Frobenius error against float32
_HEAD_DIM = 128
_VOCABULARY = 32768  # of embedding


def _normal(*shape):
    return torch.randn(shape, dtype=_DTYPE, device=_DEVICE)


def _weight(h):
    return 1 + 0.1 * _normal(h)


def _rms(x, w):
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def _add_rms(x, residual, w):
    s = x + residual
    return _rms(s, w), s


def _qk_rms(q, k, q_weight, k_weight):
    return _rms(q, q_weight), _rms(k, k_weight)


def _heads(t, h):
    """q and k [t, heads, 128]: h elements of q, h / 4 of k."""
    heads = h // _HEAD_DIM
    return _normal(t, heads, _HEAD_DIM), _normal(t, max(heads // 4, 1), _HEAD_DIM)


def _rotate(x, cos, sin):
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _rope(q, k, cos, sin, positions):
    cos, sin = (t[positions][:, None].to(q.dtype) for t in (cos, sin))
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rope_inputs(t, h):
    angle = torch.arange(t, device=_DEVICE)[:, None] * 1e4 ** -(torch.arange(_HEAD_DIM // 2, device=_DEVICE) / 64)
    return *_heads(t, h), angle.cos(), angle.sin(), torch.arange(t, device=_DEVICE)


def _ids(t):
    return torch.randint(_VOCABULARY, (t,), device=_DEVICE)


def _merge(a, la, b, lb):
    weights = torch.softmax(torch.stack([la, lb], -1), -1)
    return (a * weights[..., :1] + b * weights[..., 1:]).to(a.dtype), torch.logaddexp(la, lb)


def _merge_inputs(t, h):
    heads = h // _HEAD_DIM
    side = lambda: (_normal(t, heads, _HEAD_DIM), torch.randn(t, heads, device=_DEVICE))  # noqa: E731
    return *side(), *side()


def _logits(t, vocabulary):
    return 2.5 * _normal(t, vocabulary)


def _kept(logits, top_k):
    """Probabilities and ids of the tokens that top_k (None: all) and top_p 0.9 leave; others have probability 0."""
    values, ids = logits.float().sort(descending=True) if top_k is None else logits.float().topk(top_k)
    p = values.softmax(-1)
    return p.masked_fill(p.cumsum(-1) - p >= 0.9, 0), ids


def _sample(top_k):
    def sampled(logits, seeds):
        p, ids = _kept(logits, top_k)
        return ids.gather(-1, torch.multinomial(p, 1))[:, 0]

    return sampled


def _error_of_sample(top_k, logits, tokens):
    """The share of rows whose token may not be drawn: tokens with the logit of one that may are equal to it."""
    p, ids = _kept(logits, top_k)
    least = logits.gather(-1, ids).float().masked_fill(p == 0, float("inf")).amin(-1)
    return float((logits.gather(-1, tokens[:, None])[:, 0].float() < least).float().mean())


# name: (inputs(tokens, hidden), ours, torch's, bytes moved per hidden element of a token)
OPS = {
    "rms_norm": (lambda t, h: (_normal(t, h), _weight(h)), lambda x, w: rt.rms_norm(x, w, 1e-6), _rms, 4),
    "add_rms_norm": (
        lambda t, h: (_normal(t, h), _normal(t, h), _weight(h)),
        lambda x, r, w: rt.add_rms_norm(x, r, w, 1e-6),
        _add_rms,
        8,
    ),
    "qk_rms_norm": (lambda t, h: (*_heads(t, h), _weight(_HEAD_DIM), _weight(_HEAD_DIM)), rt.qk_rms_norm, _qk_rms, 5),
    "embedding": (lambda t, h: (_ids(t), _normal(_VOCABULARY, h)), rt.embedding, F.embedding, 4),
    "layer_norm": (
        lambda t, h: (_normal(t, h), _weight(h), _normal(h)),
        lambda x, w, b: rt.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
        4,
    ),
    "silu_mul": (
        lambda t, h: (_normal(t, 2 * h),),
        rt.silu_mul,
        lambda x: F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
        6,
    ),
    "gelu_mul": (
        lambda t, h: (_normal(t, 2 * h),),
        rt.gelu_mul,
        lambda x: F.gelu(x[..., : x.shape[-1] // 2], approximate="tanh") * x[..., x.shape[-1] // 2 :],
        6,
    ),
    "softmax": (lambda t, h: (_normal(t, h),), rt.softmax, lambda x: x.softmax(-1), 4),
    "rope": (_rope_inputs, rt.rope, _rope, 5),
    "merge_attention": (_merge_inputs, rt.merge_attention, _merge, 6),
    "sample_greedy": (
        lambda t, v: (_logits(t, v),),
        lambda x: rt.sample(x, temperature=0),
        lambda x: x.argmax(-1),
        2,
    ),
    "sample": (
        lambda t, v: (_logits(t, v), torch.arange(t, device=_DEVICE)),
        lambda x, seeds: rt.sample(x, top_k=50, top_p=0.9, seeds=seeds),
        _sample(50),
        2,
    ),
    "sample_top_p": (
        lambda t, v: (_logits(t, v), torch.arange(t, device=_DEVICE)),
        lambda x, seeds: rt.sample(x, top_p=0.9, seeds=seeds),
        _sample(None),
        2,
    ),
}
_DRAWN = {"sample": 50, "sample_top_p": None}  # top_k
_SAMPLING = ("sample_greedy", *_DRAWN)  # hidden: the vocabulary
CASES = (
    *(f"{op}_t{t}_h4096" for op in OPS if op not in _SAMPLING for t in (1, 64, 16384)),
    *(f"{op}_t{t}_h128256" for op in _SAMPLING for t in (1, 8, 64)),
)


def parse(case):
    """(op, tokens, hidden) from a case's name."""
    found = re.fullmatch(rf"({'|'.join(OPS)})_t(\d+)_h(\d+)", case)
    if not found:
        raise ArgumentError(f"bench ops: {case!r} is no case; they look like rms_norm_t64_h4096; ops: {', '.join(OPS)}")
    return found[1], int(found[2]), int(found[3])


def opened(peers, notes):
    """A function from a case to its entries."""

    def entries(case):
        name, tokens, hidden = parse(case)
        inputs, ours, theirs, per_element = OPS[name]
        torch.manual_seed(0)
        first = inputs(tokens, hidden)
        if name == "embedding":  # copies have other ids, which read other rows of the one table
            ids, table = first
            count, l2 = rotation(ids.nbytes + tokens * hidden * table.element_size())
            copies = [first, *((_ids(tokens), table) for _ in range(count - 1))]
        else:
            count, l2 = rotation(sum(x.nbytes for x in first))
            copies = [first, *(inputs(tokens, hidden) for _ in range(count - 1))]
        expected = _flat(theirs(*(x.float() if x.is_floating_point() else x for x in first)))

        def error_of(got):
            if name in _DRAWN:
                return _error_of_sample(_DRAWN[name], first[0], *got)
            return max(float((a.float() - b).norm() / b.float().norm()) for a, b in zip(got, expected, strict=True))

        candidates = {OURS: ours}
        if "torch.eager" in peers:
            candidates["torch.eager"] = theirs
        if "torch.compile" in peers:
            torch._dynamo.reset()
            candidates["torch.compile"] = torch.compile(theirs, dynamic=False)
        found = []
        for impl, call in candidates.items():
            with notes.guarded(case, impl, "bf16"):
                with rt.record_kernels() as names:
                    got = _flat(call(*first))
                error = error_of(got)
                if not error <= _TOLERANCE:
                    raise RuntimeError(f"wrong answer, relative error {error:.2e}; it is not timed")
                calls = {names[-1] if names else impl: [lambda c=c, call=call: call(*c) for c in copies]}
                found.append(Entry(impl, "bf16", calls, per_element * tokens * hidden, 0, error, l2))
        return found

    return entries


def _flat(result):
    return result if isinstance(result, tuple) else (result,)
