# SPDX-License-Identifier: Apache-2.0
"""Decode attention over every cache format with GPU kernels, append, and the 16-bit attention of the peers."""

import re

import torch
import torch.nn.functional as F

import rooftile as rt
from rooftile.bench.report import left_out, row
from rooftile.bench.timing import copies_for, time_calls
from rooftile.errors import ArgumentError

CASES = (
    *(f"b{b}_kv{n}" for b in (1, 8) for n in (1024, 4096, 32768)),
    "b1_kv131072",
    "b64_kv4096",
    "b8_kv4096_paged16",
    "b8_kv4096_paged64",
    "b8_kv4096_t4",
    "b8_kv4096_hq9_hkv3_d64",
    "b8_kv4096_hq64_hkv8_d128",
    "append_b64_t1",
)
FORMATS = ("fp16", "int8", "int4-kivi")
_TOLERANCE = 2e-3  # relative Frobenius error against float32 on the values the cache stands for
_DTYPE = torch.float16


def parse(case):
    """{"b", "kv", "hq", "hkv", "d", "t", "paged", "append"} from a case's name."""
    found = re.fullmatch(
        r"(?:b(?P<b>\d+)_kv(?P<kv>\d+)(?:_(?:hq|hkv|d|t|paged)\d+)*|append_b(?P<ab>\d+)(?:_(?:hkv|d)\d+|_t1)*)", case
    )
    if not found:
        raise ArgumentError(f"bench decode: {case!r} is no case; they look like b8_kv4096, b8_kv4096_t4, append_b64_t1")
    shape = {"hq": 32, "hkv": 8, "d": 128, "t": 1, "paged": 0}
    shape |= {name: int(value) for name, value in re.findall(r"_(hq|hkv|d|t|paged)(\d+)", case)}
    return shape | {"b": int(found["b"] or found["ab"]), "kv": int(found["kv"] or 4096), "append": bool(found["ab"])}


def steps(cases):
    """How often run() calls advance()."""
    return len(cases) * len(FORMATS)


def run(cases, peers, ceiling, advance):
    """(rows, names of peers without one). advance(): once a case and format."""
    rows = []
    for case in cases:
        shape = parse(case)
        if shape["append"]:
            for format in FORMATS:
                rows.append(_append(case, shape, format, ceiling))
                advance()
            continue
        for format in FORMATS:
            if not (format == "int4-kivi" and shape["paged"] == 16):  # its pages hold whole groups of 32
                rows.append(_ours(case, shape, format, ceiling))
            torch.cuda.empty_cache()
            advance()
        if peers and not shape["paged"]:
            rows += _peers(case, shape, ceiling)
            torch.cuda.empty_cache()
    return rows, {"flashinfer"} - {r["impl"] for r in rows} if peers else set()


def _filled(shape, format, k, v):
    heads = (shape["hkv"], shape["d"])
    if shape["paged"]:
        per_row = -(-shape["kv"] // shape["paged"])
        cache = rt.PagedKVCache(
            shape["b"] * per_row,
            shape["paged"],
            *heads,
            max_rows=shape["b"],
            max_pages_per_row=per_row,
            format=format,
            dtype="float16",
            device="cuda",
        )
    else:
        cache = rt.KVCache(shape["b"], shape["kv"], *heads, format=format, dtype="float16", device="cuda")
    for b in range(shape["b"]):
        cache.append(k[b : b + 1], v[b : b + 1], rows=[b])
    return cache


def _tensors(shape):
    torch.manual_seed(0)
    kv = (shape["b"], shape["kv"], shape["hkv"], shape["d"])
    k, v = (torch.randn(kv, dtype=_DTYPE, device="cuda") for _ in range(2))
    return torch.randn(shape["b"], shape["t"], shape["hq"], shape["d"], dtype=_DTYPE, device="cuda"), k, v


def exact(q, k, v):
    """float32 causal attention of the newest T tokens; q [B, T, Hq, D], k, v [B, N, Hkv, D]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    tokens, keys = scores.shape[-2:]
    future = torch.arange(keys, device=q.device) > torch.arange(keys - tokens, keys, device=q.device)[:, None]
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def _error(name, got, expected):
    error = float((got.float() - expected).norm() / expected.norm())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"{name}: wrong answer, relative error {error:.2e}; it is not timed")
    return error


def _flops(shape):
    return 4 * shape["b"] * shape["t"] * shape["hq"] * shape["d"] * shape["kv"]


def _ours(case, shape, format, ceiling):
    q, k, v = _tensors(shape)
    cache = _filled(shape, format, k, v)
    with rt.record_kernels() as names:
        out = rt.decode_attention(q, cache)
    # the first row against what its cache stands for, as its newest query sees it
    one = _filled({**shape, "b": 1}, format, k[:1], v[:1])
    seen = [x[None].to("cuda") for x in one.to("cpu").dequantize(0)]
    steps = shape["t"] if format != "int4-kivi" else 1  # an older query sees its own group otherwise
    error = _error(f"{case} {format}", out[:1, -steps:], exact(q[:1, -steps:], *seen))
    nbytes = cache.nbytes_used
    del k, v, one, seen
    caches = [cache] + [cache.to("cuda") for _ in range(copies_for(nbytes) - 1)]
    times = time_calls([lambda c=c: rt.decode_attention(q, c, out=out) for c in caches])
    return row(case, "rooftile", format, names[-1], times, nbytes, _flops(shape), error, ceiling)


def _peers(case, shape, ceiling):
    q, k, v = _tensors(shape)
    expected = exact(q[:1], k[:1], v[:1])
    nbytes = k.nbytes + v.nbytes
    copies = [(k.transpose(1, 2), v.transpose(1, 2))]
    copies += [(k.clone().transpose(1, 2), v.clone().transpose(1, 2)) for _ in range(copies_for(nbytes) - 1)]
    queries = q.transpose(1, 2)
    causal = {"attn_mask": _tail_mask(shape)} if shape["t"] > 1 else {}

    def sdpa(backend):
        def call(k, v):
            with torch.nn.attention.sdpa_kernel(backend):
                return F.scaled_dot_product_attention(queries, k, v, enable_gqa=True, **causal)

        return call

    def eager(k, v):
        group = shape["hq"] // shape["hkv"]
        grouped = queries.reshape(shape["b"], shape["hkv"], group * shape["t"], shape["d"])
        scores = grouped @ k.transpose(-1, -2) * shape["d"] ** -0.5
        if causal:
            scores = scores + torch.zeros_like(scores).masked_fill_(
                ~causal["attn_mask"].repeat(group, 1), float("-inf")
            )
        return (scores.softmax(-1, dtype=torch.float32).to(_DTYPE) @ v).reshape_as(queries)

    backends = torch.nn.attention.SDPBackend
    candidates = [("torch.sdpa.cudnn", sdpa(backends.CUDNN_ATTENTION)), ("torch.eager", eager)]
    if not causal:
        candidates.insert(1, ("torch.sdpa.flash", sdpa(backends.FLASH_ATTENTION)))
    if shape["t"] == 1 and (flashinfer := _flashinfer(shape, q)) is not None:
        candidates.append(("flashinfer", flashinfer))
    rows = []
    for name, call in candidates:
        try:
            error = _error("checked", call(*copies[0]).transpose(1, 2)[:1], expected)
        except RuntimeError as e:  # it refuses the shape, needs more memory than there is, or is wrong
            left_out(f"{case} {name}", e)
            continue
        times = time_calls([lambda c=c, call=call: call(*c) for c in copies])
        rows.append(row(case, name, "fp16", name, times, nbytes, _flops(shape), error, ceiling))
    return rows


def _tail_mask(shape):
    keys = torch.arange(shape["kv"], device="cuda")
    return keys <= torch.arange(shape["kv"] - shape["t"], shape["kv"], device="cuda")[:, None]


def _flashinfer(shape, q):
    """A call of its paged decode kernel; None if it is not installed, or refuses these arguments."""
    try:
        import flashinfer
    except ImportError:
        return None
    page = 16
    pages = shape["kv"] // page
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    starts = torch.arange(shape["b"] + 1, dtype=torch.int32, device="cuda") * pages
    last = torch.full((shape["b"],), page, dtype=torch.int32, device="cuda")
    table = torch.arange(shape["b"] * pages, dtype=torch.int32, device="cuda")
    try:
        wrapper.plan(starts, table, last, shape["hq"], shape["hkv"], shape["d"], page, q_data_type=_DTYPE)
    except (RuntimeError, TypeError, ValueError) as e:
        left_out("flashinfer", e)
        return None

    def call(k, v):
        paged = [x.transpose(1, 2).reshape(-1, page, shape["hkv"], shape["d"]) for x in (k, v)]
        return wrapper.run(q[:, 0], tuple(paged))[:, :, None]

    return call


def _append(case, shape, format, ceiling):
    """The mean over 32 consecutive steps, so that a group of a kivi cache closes once."""
    steps = 32
    cache = rt.KVCache(shape["b"], 4096, shape["hkv"], shape["d"], format=format, dtype="float16", device="cuda")
    k, v = (torch.randn(shape["b"], 1, shape["hkv"], shape["d"], dtype=_DTYPE, device="cuda") for _ in range(2))
    twin = rt.KVCache(shape["b"], 64, shape["hkv"], shape["d"], format=format, dtype="float16")
    with rt.record_kernels() as names:
        cache.append(k, v)
    twin.append(k.cpu(), v.cpu())
    same = cache.to("cpu").dump(0)
    if any(
        not torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(same.values(), twin.dump(0).values(), strict=True)
    ):
        raise RuntimeError(f"{case} {format}: wrong bytes; it is not timed")
    nbytes = 2 * k.nbytes + 2 * k.numel() * {"fp16": 16, "int8": 8, "int4-kivi": 4}[format] // 8
    times = time_calls([lambda: cache.append(k, v)] * steps, steps)
    return row(case, "rooftile", format, names[-1], times, nbytes, 0, 0.0, ceiling, l2="warm")
