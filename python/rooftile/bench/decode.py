# SPDX-License-Identifier: Apache-2.0
"""Decode attention over every cache format with GPU kernels, append, and the 16-bit attention of the peers."""

import functools
import random
import re

import torch

import rooftile as rt
from rooftile import _C
from rooftile._probe import missing_kernel
from rooftile.bench import attention_peers
from rooftile.bench.report import OURS
from rooftile.bench.runner import checked, installed
from rooftile.bench.timing import Entry, rotation
from rooftile.errors import ArgumentError
from rooftile.kv_cache import ELEMENT_DTYPES, KIVI

CASES = (
    *(f"b{b}_kv{n}" for b in (1, 8, 64) for n in (1024, 4096, 32768)),
    "b1_kv131072",
    "ragged64",
    "b8_kv4096_paged16",
    "b8_kv4096_paged64",
    "b64_kv4096_paged64_shared",
    "b8_kv4096_t4",
    "b8_kv4096_hq9_hkv3_d64",
    "b8_kv4096_hq64_hkv8_d128",
    "b8_kv4096_hq32_hkv32_d128",
    "b8_kv4096_hq32_hkv1_d128",
    "b8_kv4096_hq16_hkv2_d256",
    "b8_kv4096_hq16_hkv8_d256_w1024",
    "append_b64_t1",
)
PEERS = attention_peers.NAMES
# What a cache of a dtype can be. Which of them have kernels the library is asked.
FORMATS = {
    dtype: tuple(f for f in rt.KV_FORMATS if ELEMENT_DTYPES.get(f, dtype) == dtype) for dtype in ("float16", "bfloat16")
}
# Relative Frobenius error against float32 on the values the cache stands for.
_TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 8e-3}
_DEVICE = "cuda"
_SHORTEST, _LONGEST = 128, 32768  # rows of a ragged batch


def parse(case):
    """{"b", "kv", "hq", "hkv", "d", "t", "paged", "w", "ragged", "append", "shared", "dtype"} from a case's name.

    kv: tokens of a row, of the longest in a ragged batch. w: the window, 0 without one. shared: rows are forks of the
    first one, so all have its pages. dtype: torch's, float16 without _bf16.
    """
    found = re.fullmatch(
        r"(?:b(?P<b>N)_kv(?P<kv>N)(?:_(?:hq|hkv|d|t|paged|w)N)*(?P<shared>_pagedN_shared)?"
        r"|ragged(?P<rb>N)(?:_(?:hq|hkv|d|t|paged|w)N)*"
        r"|append_b(?P<ab>N)(?:_(?:hkv|d)N|_t1)*)(?P<bf16>_bf16)?".replace("N", r"[1-9]\d*"),
        case,
    )
    if not found:
        raise ArgumentError(
            f"bench decode: {case!r} is no case; they look like b8_kv4096, b8_kv4096_t4_w1024, b8_kv4096_bf16, "
            "ragged64, append_b64_t1"
        )
    shape = {"hq": 32, "hkv": 8, "d": 128, "t": 1, "paged": 0, "w": 0}
    shape |= {name: int(value) for name, value in re.findall(r"_(hq|hkv|d|t|paged|w)(\d+)", case)}
    shape |= {"b": int(found["b"] or found["rb"] or found["ab"]), "kv": int(found["kv"] or 4096)}
    shape |= {"ragged": bool(found["rb"]), "append": bool(found["ab"]), "shared": bool(found["shared"])}
    shape["dtype"] = torch.bfloat16 if found["bf16"] else torch.float16
    return shape | {"kv": max(lengths(shape))}


def dtype_name(shape):
    """ "float16" or "bfloat16", of a case's tensors."""
    return str(shape["dtype"]).removeprefix("torch.")


def lengths(shape):
    """Tokens of every row: of a ragged batch spread evenly over their logarithm, the same ones every time."""
    if not shape["ragged"]:
        return [shape["kv"]] * shape["b"]
    rng = random.Random(0)
    return [round(_SHORTEST * (_LONGEST / _SHORTEST) ** rng.random()) for _ in range(shape["b"])]


def _seen(shape):
    """Tokens of every row that some of its queries see."""
    return [min(n, shape["w"] + shape["t"] - 1) if shape["w"] else n for n in lengths(shape)]


def opened(peers, notes):
    """A function from a case to its entries."""
    peers = installed(peers, attention_peers.MODULES, notes)
    refused = set()

    def formats(shape):
        """The formats that have kernels for this case; the others are noted once each."""
        for format in FORMATS[dtype_name(shape)]:
            reason = missing_kernel(
                format,
                q_heads=None if shape["append"] else shape["hq"],
                kv_heads=shape["hkv"],
                head_dim=shape["d"],
                dtype=shape["dtype"],
                device=_DEVICE,
            )
            if reason and reason not in refused:
                notes.leave_out(f"head_dim {shape['d']}", OURS, format, reason)
                refused.add(reason)
            # pages of a kivi format hold whole groups of 32
            if not (reason or (format in KIVI and shape["paged"] == 16)):
                yield format

    def entries(case):
        shape = parse(case)
        if reason := _too_large(shape):
            notes.leave_out(case, OURS, "", reason)
            return []
        found = []
        if shape["append"]:
            for format in formats(shape):
                with notes.guarded(case, OURS, format):
                    found.append(_append(shape, format))
            return found
        q, k, v = _tensors(shape)
        for format in formats(shape):
            with notes.guarded(case, OURS, format):
                found.append(_ours(shape, format, q, k, v))
        return found + _peers(case, shape, q, k, v, peers, notes)

    return entries


def _too_large(shape):
    """Why memory is too small for K and V, caches of them in all formats and what peers need; None if it is not."""
    needed, free = 7 * 4 * shape["b"] * shape["kv"] * shape["hkv"] * shape["d"], torch.cuda.mem_get_info()[0]
    return f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free" if needed > free else None


def _filled(shape, format, rows):
    """rows: k and v [1, tokens, Hkv, D] of every row."""
    heads = (shape["hkv"], shape["d"])
    kind = {"format": format, "dtype": dtype_name(shape), "device": _DEVICE}
    longest = max(k.shape[1] for k, _ in rows)
    if shape["paged"]:
        pages = [-(-k.shape[1] // shape["paged"]) for k, _ in rows]
        cache = rt.PagedKVCache(
            pages[0] + len(rows) - 1 if shape["shared"] else sum(pages),  # a fork has a last page of its own
            shape["paged"],
            *heads,
            max_rows=len(rows),
            max_pages_per_row=max(pages),
            **kind,
        )
    else:
        cache = rt.KVCache(len(rows), longest, *heads, **kind)
    for b, (k, v) in enumerate(rows):
        if b > 0 and shape["shared"]:
            cache.fork(0, b)
        else:
            cache.append(k, v, rows=[b])
    return cache


def _tensors(shape):
    """q [B, T, Hq, D]; k and v [B, tokens, Hkv, D], of a ragged batch [1, tokens of all rows, Hkv, D]."""
    torch.manual_seed(0)
    tokens = (1, sum(lengths(shape))) if shape["ragged"] else (1 if shape["shared"] else shape["b"], shape["kv"])
    k, v = (torch.randn(*tokens, shape["hkv"], shape["d"], dtype=shape["dtype"], device=_DEVICE) for _ in range(2))
    if shape["shared"]:
        k, v = (x.expand(shape["b"], -1, -1, -1) for x in (k, v))
    return torch.randn(shape["b"], shape["t"], shape["hq"], shape["d"], dtype=shape["dtype"], device=_DEVICE), k, v


def _rows(shape, *tensors):
    """The tensors' parts of every row, [1, tokens, Hkv, D] each."""
    return list(zip(*(x.split(lengths(shape), 1) if shape["ragged"] else x.split(1) for x in tensors), strict=True))


def exact(q, k, v, window=0):
    """float32 causal attention of the newest T tokens; q [B, T, Hq, D], k, v [B, N, Hkv, D]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    visible = attention_peers.visible(*scores.shape[-2:], window, q.device)
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def _error(got, expected):
    error = float((got.float() - expected).norm() / expected.norm())
    if not error <= _TOLERANCES[got.dtype]:
        raise RuntimeError(f"wrong answer, relative error {error:.2e}; it is not timed")
    return error


def _ends(tokens):
    """Numbers of a shortest and a longest row."""
    return sorted({tokens.index(min(tokens)), tokens.index(max(tokens))})


def _flops(shape):
    return 4 * shape["t"] * shape["hq"] * shape["d"] * sum(_seen(shape))


def _ours(shape, format, q, k, v):
    rows = _rows(shape, k, v)
    cache = _filled(shape, format, rows)
    attend = functools.partial(rt.decode_attention, q, window=shape["w"] or None)
    with rt.record_kernels() as names:
        out = attend(cache)
    # a shortest and a longest row against what its cache stands for, as its newest query sees it
    steps = shape["t"] if format not in KIVI else 1  # an older query sees its own group otherwise
    tokens, error = lengths(shape), 0.0
    for b in _ends(tokens):
        seen = [x[None].to(_DEVICE) for x in _filled(shape, format, rows[b : b + 1]).to("cpu").dequantize(0)]
        expected = exact(q[b : b + 1, -steps:], *seen, shape["w"])
        error = max(error, _error(out[b : b + 1, -steps:], expected))
    nbytes = cache.nbytes_used * sum(_seen(shape)) // sum(tokens)
    count, l2 = rotation(nbytes)
    caches = [cache] + [cache.to(_DEVICE) for _ in range(count - 1)]
    calls = {names[-1]: [lambda c=c: attend(c, out=out) for c in caches]}
    return Entry(OURS, format, calls, nbytes, _flops(shape), error, l2)


def _peers(case, shape, q, k, v, peers, notes):
    """Entries of the peers that take this case: torch's attention rows without pages, the others pages too.

    Given a window, they are handed the tokens that some query sees and no others.
    """
    tokens = _seen(shape)
    rows = [(a[:, -n:], b[:, -n:]) for (a, b), n in zip(_rows(shape, k, v), tokens, strict=True)]
    page = shape["paged"] or (64 if shape["ragged"] or tokens[0] % 64 == 0 else tokens[0])
    pool = attention_peers.Pool.of(rows, page, shared=shape["shared"])
    problem = attention_peers.Problem(q, tokens, pool.table, page, shape["hkv"], shape["w"])
    expected = {b: exact(q[b : b + 1], *rows[b], shape["w"]) for b in _ends(tokens)}
    del rows
    found = []
    for name in PEERS:
        if name not in peers or not attention_peers.takes(name, problem, plain=not (shape["paged"] or shape["ragged"])):
            continue
        with notes.guarded(case, name):
            found.append(_peer(name, problem, pool, expected, _flops(shape)))
    return found


def _peer(name, problem, pool, expected, flops):
    variant, copies, calls, truth = attention_peers.prepare(name, problem, pool)

    def check(call):
        out, error = call(copies[0]), 0.0
        for b, exactly in expected.items():
            if truth is not None:  # what its own cache stands for
                exactly = exact(problem.q[b : b + 1], *truth(b), problem.window)
            error = max(error, _error(out[b : b + 1], exactly))
        return error

    calls, error = checked(calls, check)
    choices = {kernel: [lambda c=c, call=call: call(c) for c in copies] for kernel, call in calls.items()}
    nbytes = sum(x.nbytes for x in copies[0]) * pool.tokens // pool.capacity
    return Entry(name, variant, choices, nbytes, flops, error, pool.l2)


def _append(shape, format):
    """The mean over 32 consecutive steps, so that a group of a kivi cache closes once."""
    steps = 32
    cache = rt.KVCache(
        shape["b"], 4096, shape["hkv"], shape["d"], format=format, dtype=dtype_name(shape), device=_DEVICE
    )
    k, v = (
        torch.randn(shape["b"], 1, shape["hkv"], shape["d"], dtype=shape["dtype"], device=_DEVICE) for _ in range(2)
    )
    twin = rt.KVCache(shape["b"], 64, shape["hkv"], shape["d"], format=format, dtype=dtype_name(shape))
    with rt.record_kernels() as names:
        cache.append(k, v)
    twin.append(k.cpu(), v.cpu())
    same = cache.to("cpu").dump(0)
    if any(
        not torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(same.values(), twin.dump(0).values(), strict=True)
    ):
        raise RuntimeError("wrong bytes; it is not timed")
    nbytes = 2 * k.nbytes + 2 * k.numel() * _C.kv_format_bits[format] // 8
    return Entry(OURS, format, {names[-1]: [lambda: cache.append(k, v)] * steps}, nbytes, 0, 0.0, "warm")
