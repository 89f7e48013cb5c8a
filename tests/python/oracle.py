# SPDX-License-Identifier: Apache-2.0
"""What every op and format means, in NumPy float64, written from the specification alone.

Nothing here imports rooftile. Arrays in and out are NumPy float64 holding values that their dtype can hold; dtypes are
names ("float32", "float16", "bfloat16"). What the formats fix bit by bit (codes, scales) is computed in IEEE float32,
step by step, because the steps are part of the format.
"""

import math
from dataclasses import dataclass

import numpy as np

# ---------------------------------------------------------------- number formats

# mantissa bits with the hidden one, exponent of the smallest normal, largest finite value
_FLOATS = {
    "float32": (24, -126, (2 - 2.0**-23) * 2.0**127),
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, (2 - 2.0**-7) * 2.0**127),
}
EPS = {dtype: 2.0 ** (1 - bits) for dtype, (bits, _, _) in _FLOATS.items()}
SMALLEST = {dtype: 2.0 ** (emin + 1 - bits) for dtype, (bits, emin, _) in _FLOATS.items()}  # subnormal
LARGEST = {dtype: largest for dtype, (_, _, largest) in _FLOATS.items()}


def quantum(x, dtype):
    """The distance between neighbours of `dtype` around each x: the unit in the last place, subnormals included."""
    bits, emin, _ = _FLOATS[dtype]
    _, exponent = np.frexp(np.abs(np.asarray(x, np.float64)))  # |x| in [2^(e-1), 2^e)
    return np.ldexp(1.0, np.maximum(exponent - 1, emin) - (bits - 1))


def round_to(x, dtype):
    """x rounded once to `dtype`, to nearest even; what lies past the largest value becomes infinite."""
    x = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.where(np.isfinite(x), x, 0.0)
        q = quantum(finite, dtype)
        rounded = np.rint(finite / q) * q
        rounded = np.where(np.abs(rounded) > LARGEST[dtype], np.copysign(np.inf, rounded), rounded)
        return np.where(np.isfinite(x), np.copysign(rounded, x), x)


def bits_of(x, dtype):
    """The 16-bit patterns of values that `dtype` (float16 or bfloat16) holds exactly."""
    x = np.asarray(x, np.float64)
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits, dtype):
    bits = np.asarray(bits, np.uint16)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def scale_dtype(dtype):
    """Scales and minima are stored in the 16-bit dtype of the inputs, float16 for float32 inputs."""
    return "bfloat16" if dtype == "bfloat16" else "float16"


def e4m3_values(bits):
    """What E4M3 bits stand for: sign, 4 bits of exponent with bias 7, 3 of mantissa, S.1111.111 NaN, no infinity."""
    bits = np.asarray(bits, np.int64)
    sign, exponent, mantissa = np.where(bits >> 7, -1.0, 1.0), bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return sign * np.where((exponent == 15) & (mantissa == 7), np.nan, size)


def e4m3_bits(x):
    """The nearest finite E4M3 number of each x, halfway the one with an even mantissa; no x is NaN."""
    x = np.asarray(x, np.float64)
    numbers = e4m3_values(np.arange(127))  # those that are not negative, in order
    size = np.minimum(np.abs(x), numbers[-1])
    above = np.searchsorted(numbers, size)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - size, size - numbers[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code + np.where(np.signbit(x), 128, 0)).astype(np.uint8)


# ---------------------------------------------------------------- quantisers (4.1), float32 step by step


def _f32(x):
    return np.asarray(x, np.float32)


def _stored_scale(scale, positive, dtype, largest=None):
    """A float32 scale as stored: a positive one never rounds to 0, a large one becomes `largest` (of its type)."""
    stored = round_to(scale, dtype)
    stored = np.where(positive & (stored == 0), SMALLEST[dtype], stored)
    return np.minimum(stored, LARGEST[dtype] if largest is None else largest)


def _symmetric_steps(x, axis, largest, dtype):
    """x in steps of the stored scales, which take the largest |x| of a group to `largest`; those scales.

    A group with a NaN or an infinity: scale NaN, steps 0.
    """
    with np.errstate(all="ignore"):
        x = _f32(x)
        ok = np.isfinite(x).all(axis=axis, keepdims=True)
        absmax = np.where(ok, np.abs(x).max(axis=axis, keepdims=True), np.float32(0))
        scale = _stored_scale(_f32(absmax) / np.float32(largest), absmax > 0, dtype)
        steps = np.where(ok & (scale > 0), x / np.where(scale > 0, _f32(scale), np.float32(1)), np.float32(0))
        return steps, np.where(ok, scale, np.nan)


def quantize_symmetric(x, axis, qmax, dtype):
    """codes int8 and the stored scales (in `dtype`, `axis` kept as 1). x ~ code * scale, codes in [-qmax, qmax]."""
    steps, scale = _symmetric_steps(x, axis, qmax, dtype)
    return np.clip(np.rint(steps), -qmax, qmax).astype(np.int8), scale


def quantize_e4m3(x, axis, dtype):
    """The same with E4M3 numbers for codes: uint8, their bits. Past 448, the largest, they are 448."""
    steps, scale = _symmetric_steps(x, axis, 448, dtype)
    return e4m3_bits(steps), scale


def quantize_affine(x, axis, dtype):
    """codes 0..15 (int8), stored scales and minima. x ~ min + code * scale."""
    with np.errstate(all="ignore"):
        x = _f32(x)
        ok = np.isfinite(x).all(axis=axis, keepdims=True)
        low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
        minimum = np.clip(round_to(low, dtype), -LARGEST[dtype], LARGEST[dtype])
        largest = 17 * 2.0**120 if dtype == "bfloat16" else None  # the last bfloat16 of which 15 are finite
        scale = _stored_scale(_f32(high - low) / np.float32(15), high > low, dtype, largest)
        above = _f32(x - _f32(minimum))
        ratio = np.where(scale > 0, above / np.where(scale > 0, _f32(scale), np.float32(1)), np.float32(0))
        codes = np.where(ok, np.clip(np.rint(ratio), 0, 15), 0)
        return np.nan_to_num(codes).astype(np.int8), np.where(ok, scale, np.nan), np.where(ok, minimum, np.nan)


def dequantize(codes, scale, minimum=None):
    """float32 arithmetic without a fused multiply-add: round(code * scale), then round(+ min). uint8: E4M3 bits."""
    if np.asarray(codes).dtype == np.uint8:
        codes = e4m3_values(codes)
    with np.errstate(all="ignore"):
        value = _f32(codes) * _f32(scale)
        if minimum is not None:
            value = value + _f32(minimum)
        return value.astype(np.float64)


# ---------------------------------------------------------------- KV cache (4.1)

KV_FORMATS = ("fp32", "fp16", "bf16", "int8", "int4", "int4-kivi-sym", "int4-kivi", "fp8", "int8-kivi-sym")
ELEMENT_FORMATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
KIVI_FORMATS = ("int4-kivi-sym", "int4-kivi", "int8-kivi-sym")
BYTE_FORMATS = ("int8", "fp8", "int8-kivi-sym")  # a code is a byte; those of fp8 are uint8 here, the others int8
GROUP = 32  # tokens that share a K scale, and become codes together


@dataclass
class Codes:
    """One cache row's stored codes and scales in logical order.

    k_codes, v_codes: int8 [tokens, heads, D], of fp8 uint8. Per-token scales and minima: [tokens, heads, 1]; those of K
    in the kivi formats: [groups, heads, D]. Minima are None where the format has none. kivi formats hold whole groups
    only.
    """

    k_codes: np.ndarray
    v_codes: np.ndarray
    k_scale: np.ndarray
    v_scale: np.ndarray
    k_min: np.ndarray | None = None
    v_min: np.ndarray | None = None

    def k(self):
        if self.k_scale.shape[0] != self.k_codes.shape[0]:  # per channel: a scale serves the 32 tokens of its group
            scale = np.repeat(self.k_scale, GROUP, axis=0)
            minimum = None if self.k_min is None else np.repeat(self.k_min, GROUP, axis=0)
            return dequantize(self.k_codes, scale, minimum)
        return dequantize(self.k_codes, self.k_scale, self.k_min)

    def v(self):
        return dequantize(self.v_codes, self.v_scale, self.v_min)


def encode(k, v, format, dtype):
    """What a cache of `format` stores for one row's tokens: k, v [tokens, heads, D] -> Codes."""
    stored = scale_dtype(dtype)
    if format == "fp8":
        (k_codes, k_scale), (v_codes, v_scale) = (quantize_e4m3(x, -1, stored) for x in (k, v))
        return Codes(k_codes, v_codes, k_scale, v_scale)
    if format in ("int8", "int4"):
        qmax = 127 if format == "int8" else 7
        k_codes, k_scale = quantize_symmetric(k, -1, qmax, stored)
        v_codes, v_scale = quantize_symmetric(v, -1, qmax, stored)
        return Codes(k_codes, v_codes, k_scale, v_scale)
    if format not in KIVI_FORMATS:
        raise ValueError(f"{format} stores elements, not codes")
    tokens, heads, dim = np.shape(k)
    groups = tokens // GROUP
    grouped = np.asarray(k)[: groups * GROUP].reshape(groups, GROUP, heads, dim)
    whole_v = np.asarray(v)[: groups * GROUP]
    if format != "int4-kivi":
        qmax = 127 if format == "int8-kivi-sym" else 7
        k_codes, k_scale = quantize_symmetric(grouped, 1, qmax, stored)
        v_codes, v_scale = quantize_symmetric(whole_v, -1, qmax, stored)
        return Codes(k_codes.reshape(-1, heads, dim), v_codes, k_scale.reshape(groups, heads, dim), v_scale)
    k_codes, k_scale, k_min = quantize_affine(grouped, 1, stored)
    v_codes, v_scale, v_min = quantize_affine(whole_v, -1, stored)
    return Codes(
        k_codes.reshape(-1, heads, dim),
        v_codes,
        k_scale.reshape(groups, heads, dim),
        v_scale,
        k_min.reshape(groups, heads, dim),
        v_min,
    )


def _read(k, v, format, dtype, count, closed):
    """The first `count` tokens; for compressed formats the first `closed` of them as codes, the rest raw."""
    k, v = np.asarray(k, np.float64)[:count], np.asarray(v, np.float64)[:count]
    if format in ELEMENT_FORMATS:
        return round_to(k, ELEMENT_FORMATS[format]), round_to(v, ELEMENT_FORMATS[format])
    codes = encode(k[:closed], v[:closed], format, dtype)
    return np.concatenate([codes.k(), k[closed:]]), np.concatenate([codes.v(), v[closed:]])


def visible_kv(k, v, format, dtype, position):
    """K and V [position + 1, heads, D] as a query at `position` sees them, from all tokens k, v of its row.

    Per-token formats: everything as stored. kivi formats: groups that were full before `position` as codes, the tokens
    of its own group raw.
    """
    count = max(position + 1, 0)
    return _read(k, v, format, dtype, count, max(position, 0) // GROUP * GROUP if format in KIVI_FORMATS else count)


def cached_kv(k, v, format, dtype):
    """All tokens of a row as prefill_attention(cache=) reads them: closed groups as codes, the open group raw."""
    count = len(k)
    return _read(k, v, format, dtype, count, count // GROUP * GROUP if format in KIVI_FORMATS else count)


# ---- bytes of one (page, KV head) block: K codes | V codes | K scale | K min | V scale | V min


def _put_nibbles(codes):
    """A flat run of codes -> bytes, low nibble first; negative codes in two's complement."""
    nibbles = np.asarray(codes, np.int64) & 15
    return (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8)


def _take_nibbles(data, signed):
    nibbles = np.stack([data & 15, data >> 4], axis=1).reshape(-1).astype(np.int64)
    return np.where(nibbles > 7, nibbles - 16, nibbles) if signed else nibbles


def _v_order(format, page_size, padded_dim):
    """(token, d) of every V code of a block, in the order in which the codes lie."""
    wide = format in BYTE_FORMATS
    tile_tokens = 16 if wide or page_size == 16 else 32
    for first_token in range(0, page_size, tile_tokens):
        for first_d in range(0, padded_dim, 32):
            for d_low in range(8):
                for pair in range(4):  # one piece: what a lane reads at once
                    if wide:
                        for d_high in range(4):  # one 32-bit word
                            for t_high in range(2):
                                for t_low in range(2):
                                    yield first_token + 8 * t_high + 2 * pair + t_low, first_d + 8 * d_high + d_low
                    else:
                        for t_high in range(tile_tokens // 8):  # one 32-bit word
                            for t_low in range(2):
                                for d_high in range(4):
                                    yield first_token + 8 * t_high + 2 * pair + t_low, first_d + 8 * d_high + d_low


def _sections(format, page_size, head_dim):
    """(name, bytes) of the sections of a block of a compressed format, in order."""
    padded = -(-head_dim // 32) * 32
    code_bytes = page_size * padded if format in BYTE_FORMATS else page_size * padded // 2
    k_scales = 2 * (page_size // GROUP * padded if format in KIVI_FORMATS else page_size)
    sections = [("k_codes", code_bytes), ("v_codes", code_bytes), ("k_scale", k_scales)]
    if format == "int4-kivi":
        sections.append(("k_min", k_scales))
    sections.append(("v_scale", 2 * page_size))
    if format == "int4-kivi":
        sections.append(("v_min", 2 * page_size))
    return sections


def block_bytes(format, page_size, head_dim):
    if format in ELEMENT_FORMATS:
        return 2 * page_size * head_dim * (4 if format == "fp32" else 2)
    return sum(size for _, size in _sections(format, page_size, head_dim))


def encode_block(codes, head, format, dtype, page_size):
    """The bytes of one block from Codes that hold exactly one page's tokens; unused tokens and channels are 0."""
    tokens, _, dim = codes.k_codes.shape
    padded = -(-dim // 32) * 32
    stored = scale_dtype(dtype)
    k_page, v_page = np.zeros((2, page_size, padded), np.int64)
    k_page[:tokens, :dim] = codes.k_codes[:, head]
    v_page[:tokens, :dim] = codes.v_codes[:, head]
    v_run = np.array([v_page[token, d] for token, d in _v_order(format, page_size, padded)])
    per_channel = format in KIVI_FORMATS

    def scales(values, kind):
        if kind == "k" and per_channel:
            page = np.zeros((page_size // GROUP, padded))
            page[: values.shape[0], :dim] = values[:, head]
        else:
            page = np.zeros(page_size)
            page[:tokens] = values[:, head, 0]
        return bits_of(page, stored).reshape(-1).view(np.uint8)

    as_bytes = (lambda run: run.astype(np.uint8)) if format in BYTE_FORMATS else _put_nibbles
    parts = {
        "k_codes": as_bytes(k_page.reshape(-1)),
        "v_codes": as_bytes(v_run),
        "k_scale": scales(codes.k_scale, "k"),
        "v_scale": scales(codes.v_scale, "v"),
    }
    if format == "int4-kivi":
        parts["k_min"] = scales(codes.k_min, "k")
        parts["v_min"] = scales(codes.v_min, "v")
    sections = _sections(format, page_size, dim)
    assert all(parts[name].size == size for name, size in sections)
    return np.concatenate([parts[name] for name, _ in sections])


def decode_block(data, format, dtype, page_size, head_dim, tokens=None):
    """The Codes (one head) that a block's bytes hold; the first `tokens` of the page, default all of it."""
    tokens = page_size if tokens is None else tokens
    padded = -(-head_dim // 32) * 32
    stored = scale_dtype(dtype)
    parts, at = {}, 0
    for name, size in _sections(format, page_size, head_dim):
        parts[name] = np.asarray(data, np.uint8)[at : at + size]
        at += size
    signed = format != "int4-kivi"
    kind = np.uint8 if format == "fp8" else np.int8
    as_codes = (
        (lambda part: part.view(kind).astype(np.int64))
        if format in BYTE_FORMATS
        else (lambda part: _take_nibbles(part, signed))
    )
    k_page = as_codes(parts["k_codes"]).reshape(page_size, padded)
    v_page = np.zeros((page_size, padded), np.int64)
    for code, (token, d) in zip(as_codes(parts["v_codes"]), _v_order(format, page_size, padded), strict=True):
        v_page[token, d] = code

    def scales(name):
        if name not in parts:
            return None
        values = from_bits(parts[name].copy().view(np.uint16), stored)
        if name[0] == "k" and format in KIVI_FORMATS:
            return values.reshape(-1, padded)[: tokens // GROUP, None, :head_dim]
        return values[:tokens, None, None]

    return Codes(
        k_page[:tokens, None, :head_dim].astype(kind),
        v_page[:tokens, None, :head_dim].astype(kind),
        scales("k_scale"),
        scales("v_scale"),
        scales("k_min"),
        scales("v_min"),
    )


# ---------------------------------------------------------------- attention


def _logits(q, k, q_positions, keep, *, scale=None, causal=True, window=None, softcap=None, alibi_slopes=None):
    """[T, Hq, S] logits, -inf where a key is not visible. `keep` rounds each step (identity for the reference)."""
    heads, dim = q.shape[1:]
    per_kv = heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    s = np.stack([q[:, h] @ k[:, h // per_kv].T for h in range(heads)], axis=1)
    s = keep(keep(s) * q.dtype.type(scale))
    if softcap is not None:
        s = keep(softcap * np.tanh(s / softcap))
    distance = np.arange(k.shape[0])[None, :] - np.asarray(q_positions)[:, None]  # j - t
    if alibi_slopes is not None:
        s = keep(s + np.asarray(alibi_slopes, q.dtype)[None, :, None] * distance[:, None, :])
    hidden = np.zeros(distance.shape, bool)
    if causal:
        hidden |= distance > 0
    if window is not None:
        hidden |= np.abs(distance) >= window
    return np.where(hidden[:, None, :], -np.inf, s)


def _attend(q, k, v, dtype, keep, *, q_positions=None, sinks=None, **options):
    if q_positions is None:
        q_positions = np.arange(q.shape[0]) + k.shape[0] - q.shape[0]
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    per_kv = q.shape[1] // k.shape[1]
    with np.errstate(all="ignore"):
        s = _logits(q, k, q_positions, keep, **options)
        nothing = ~(s > -np.inf).any(axis=-1) & ~np.isnan(s).any(axis=-1)
        top = s.max(axis=-1, initial=-np.inf)
        if sinks is not None:
            top = np.maximum(top, np.asarray(sinks, dtype)[None, :])
        top = np.where(np.isneginf(top), dtype(0), top)
        e = np.exp(s - top[..., None])
        total = e.sum(axis=-1)
        if sinks is not None:
            total = total + np.exp(np.asarray(sinks, dtype)[None, :] - top)
        p = keep(e / np.where(nothing, dtype(1), total)[..., None])
        out = np.stack([p[:, h] @ v[:, h // per_kv] for h in range(q.shape[1])], axis=1)
        out = np.where(nothing[..., None], dtype(0), keep(out))
        lse = np.where(nothing, dtype(-np.inf), np.log(total) + top)
    return out.astype(np.float64), lse.astype(np.float64)


def attention_reference(q, k, v, **options):
    """One sequence in float64. q [T, Hq, D], k and v [S, Hkv, D] -> out [T, Hq, D], lse [T, Hq] (natural log).

    options: scale (D ** -0.5), causal (True), window, softcap, sinks [Hq], alibi_slopes [Hq], q_positions [T] (the last
    T of the S positions). Logit: scale * dot, then soft cap, then ALiBi slope * (j - t), then the mask. A sink is one
    more logit without a value. No visible key: out 0, lse -inf.
    """
    return _attend(q, k, v, np.float64, lambda x: x, **options)


def attention_naive(q, k, v, dtype, **options):
    """The same as a naive program in `dtype` would: products accumulated in float32, every step stored in `dtype`."""
    return _attend(q, k, v, np.float32, lambda x: round_to(x, dtype).astype(np.float32), **options)


def decode_attention(q, k, v, format, dtype, *, naive=None, count=None, **options):
    """decode_attention for one row: q [T, Hq, D] are its newest tokens, k, v [length, Hkv, D] all its tokens, raw.

    count: how many of the T queries are real (the first ones); the others get out 0 and lse -inf. naive: a dtype to
    compute the naive version in instead of the float64 reference.
    """
    tokens, heads, dim = q.shape
    count = tokens if count is None else count
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -np.inf)
    for i in range(count):
        position = k.shape[0] - count + i
        if position < 0:
            continue
        seen_k, seen_v = visible_kv(k, v, format, dtype, position)
        attend = attention_reference if naive is None else lambda *a, **o: attention_naive(*a, naive, **o)
        out[i : i + 1], lse[i : i + 1] = attend(q[i : i + 1], seen_k, seen_v, q_positions=[position], **options)
    return out, lse


def prefill_over_cache(q, k_new, v_new, k_old, v_old, format, dtype, *, naive=None, **options):
    """prefill_attention(cache=) for one row: the cached tokens as they stand (closed groups as codes, the open group
    raw), then the new tokens raw, causal among themselves. q [S, Hq, D], k_new, v_new [S, Hkv, D]."""
    seen_k, seen_v = cached_kv(k_old, v_old, format, dtype)
    k, v = np.concatenate([seen_k, k_new]), np.concatenate([seen_v, v_new])
    attend = attention_reference if naive is None else lambda *a, **o: attention_naive(*a, naive, **o)
    return attend(q, k, v, q_positions=len(k_old) + np.arange(q.shape[0]), **options)


def merge_attention(out_a, lse_a, out_b, lse_b):
    """Two partial results over disjoint keys -> out, lse. -inf stands for 'saw no key'."""
    with np.errstate(all="ignore"):
        top = np.maximum(lse_a, lse_b)
        safe = np.where(np.isneginf(top), 0.0, top)
        a, b = np.exp(lse_a - safe), np.exp(lse_b - safe)
        total = np.where(np.isneginf(top), 1.0, a + b)
        # A side that saw no key has weight 0 and adds nothing, whatever its out holds.
        part_a = np.where((a == 0)[..., None], 0.0, out_a * (a / total)[..., None])
        part_b = np.where((b == 0)[..., None], 0.0, out_b * (b / total)[..., None])
        return part_a + part_b, np.where(np.isneginf(top), -np.inf, np.log(total) + safe)


# ---------------------------------------------------------------- W4A16, W8A16 (4.2)


def w4_unpack_nibbles(codes):
    """uint8 [N, K/2], low nibble first -> int64 [N, K] of 0..15."""
    codes = np.asarray(codes).astype(np.int64)
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)


def w4_pack_nibbles(u):
    u = np.asarray(u, np.int64)
    return (u[:, 0::2] | u[:, 1::2] << 4).astype(np.uint8)


def w4_decode(codes, scales, zeros="symmetric", offsets=None, perm=None, bits=4):
    """The dense weight [N, K] of the canonical form. codes uint8 [N, K/2] ([N, K] of 8 bits), scales, offsets [N, K/G].

    zeros: "symmetric" (u - 8) * s, of 8 bits (u - 128) * s, "integer" (u - z) * s, "minima" u * s + m. perm: packed
    column i is input perm[i].
    """
    u = w4_unpack_nibbles(codes) if bits == 4 else np.asarray(codes).astype(np.int64)
    group = u.shape[1] // np.shape(scales)[1]
    s = np.repeat(np.asarray(scales, np.float64), group, axis=1)
    if zeros == "symmetric":
        w = (u - {4: 8, 8: 128}[bits]) * s
    else:
        offset = np.repeat(np.asarray(offsets, np.float64), group, axis=1)
        w = {"integer": lambda: (u - offset) * s, "minima": lambda: u * s + offset}[zeros]()
    if perm is None:
        return w
    dense = np.empty_like(w)
    dense[:, np.asarray(perm)] = w
    return dense


def w4_quantize(weight, group, zeros="symmetric", dtype="float16", bits=4):
    """Round to nearest: weight [N, K] -> (canonical codes, scales [N, K/G], minima or None), scales in `dtype`."""
    n, k = np.shape(weight)
    grouped = np.asarray(weight).reshape(n, k // group, group)
    if bits == 8:
        codes, scale = quantize_symmetric(grouped, -1, 127, dtype)
        return (codes.reshape(n, k).astype(np.int64) + 128).astype(np.uint8), scale[..., 0], None
    if zeros == "symmetric":
        codes, scale = quantize_symmetric(grouped, -1, 7, dtype)
        return w4_pack_nibbles(codes.reshape(n, k) + 8), scale[..., 0], None
    codes, scale, minimum = quantize_affine(grouped, -1, dtype)
    return w4_pack_nibbles(codes.reshape(n, k)), scale[..., 0], minimum[..., 0]


def w4_kernel_codes(codes, bits=4):
    """Canonical codes -> the kernel form's bytes, flat uint8.

    Tiles of 16 rows x 64 columns lie as [N / 16][K / 64], padded with code 0. The A fragment of mma m16n8k16 gives lane
    (g, t) = (lane / 4, lane % 4) four registers, each a pair of neighbouring k: rows g, g + 8, g, g + 8 and k 2t, 2t,
    2t + 8, 2t + 8. In 4 bits a tile is 32 lanes x 4 words, one for each k-step of 16: the even element of register r is
    nibble r of the word, the odd one nibble r + 4. In 8 bits a tile is 2 runs of 32 k, each 32 lanes x 4 words, two for
    each k-step: registers 0 and 1 are bytes 0 and 2, 1 and 3 of the first, registers 2 and 3 those of the second.
    """
    u = w4_unpack_nibbles(codes) if bits == 4 else np.asarray(codes).astype(np.int64)
    n, k = u.shape
    rows, columns = -(-n // 16) * 16, -(-k // 64) * 64
    padded = np.zeros((rows, columns), np.int64)
    padded[:n, :k] = u
    words = []
    for row in range(0, rows, 16):
        for column in range(0, columns, 64):
            for run in range(0, 64, 64 if bits == 4 else 32):
                for lane in range(32):
                    for step in range(run, run + (64 if bits == 4 else 32), 16):
                        words += _w4_words(padded[row : row + 16, column + step : column + step + 16], lane, bits)
    return np.array(words, np.uint32).view(np.uint8)


def _w4_words(step, lane, bits):
    """A lane's words of 16 rows x 16 k."""
    g, t = lane // 4, lane % 4
    pairs = [[int(step[g + row, 2 * t + column + odd]) for odd in (0, 1)] for column in (0, 8) for row in (0, 8)]
    if bits == 4:
        return [sum(even << 4 * r | odd << 4 * (r + 4) for r, (even, odd) in enumerate(pairs))]
    return [
        sum(even << 8 * r | odd << 8 * (r + 2) for r, (even, odd) in enumerate(two)) for two in (pairs[:2], pairs[2:])
    ]


def w4_kernel_scales(scales):
    """[N, K/G] -> the kernel form's flat order [N / 16][group][16 rows], padded rows 0. Any dtype."""
    scales = np.asarray(scales)
    n, groups = scales.shape
    padded = np.zeros((-(-n // 16) * 16, groups), scales.dtype)
    padded[:n] = scales
    return np.concatenate([padded[row : row + 16, g] for row in range(0, len(padded), 16) for g in range(groups)])


def w4a16_matmul(x, w, bias=None):
    """x [..., K] times the dense weight w [N, K] (already decoded), plus bias [N]."""
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    return y if bias is None else y + bias


def matmul_naive(x, w, dtype, bias=None):
    """The same with the decoded weight stored in `dtype`, float32 accumulation and a rounded result."""
    y = round_to(x, dtype).astype(np.float32) @ round_to(w, dtype).astype(np.float32).T
    y = round_to(y, dtype)
    return y if bias is None else round_to(y + bias, dtype)


# ---------------------------------------------------------------- GGUF blocks of 32 weights


def gguf_q4_0(data):
    """Q4_0 blocks uint8 [..., 18]: fp16 d, then 16 bytes; byte j has weight j (low) and j + 16 (high); (u - 8) * d."""
    data = np.ascontiguousarray(data, np.uint8)
    d = data[..., :2].copy().view(np.float16).astype(np.float64)
    u = np.concatenate([data[..., 2:] & 15, data[..., 2:] >> 4], axis=-1).astype(np.float64)
    return (u - 8) * d


def gguf_q8_0(data):
    """Q8_0 blocks uint8 [..., 34]: fp16 d, then 32 signed bytes; byte j has weight j, q * d."""
    data = np.ascontiguousarray(data)
    d = np.ascontiguousarray(data[..., :2]).view(np.float16).astype(np.float64)
    return np.ascontiguousarray(data[..., 2:]).view(np.int8) * d


def gguf_q4_1(data):
    """Q4_1 blocks uint8 [..., 20]: fp16 d, fp16 m, then 16 bytes as in Q4_0; u * d + m."""
    data = np.ascontiguousarray(data, np.uint8)
    d, m = (data[..., i : i + 2].copy().view(np.float16).astype(np.float64) for i in (0, 2))
    u = np.concatenate([data[..., 4:] & 15, data[..., 4:] >> 4], axis=-1).astype(np.float64)
    return u * d + m


# ---------------------------------------------------------------- MXFP4 (OCP Microscaling Formats 1.0)


def e2m1_values(codes):
    """Codes 0..15: a sign, two bits of exponent with bias 1, one of mantissa. No infinities, no NaN."""
    codes = np.asarray(codes, np.int64)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    magnitude = np.where(exponent == 0, mantissa * 0.5, np.ldexp(1 + mantissa / 2, exponent - 1))
    return np.where(codes & 8, -magnitude, magnitude)


def e8m0_values(codes):
    """Codes 0..255: powers of two with bias 127; 255 is NaN."""
    codes = np.asarray(codes, np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))


def mxfp4(blocks, scales):
    """blocks: uint8 [..., B, 16], two e2m1 codes a byte, the first in the low bits; scales: e8m0 [..., B]. Returns
    float64 [..., 32 B]."""
    codes = np.stack([np.asarray(blocks) & 15, np.asarray(blocks) >> 4], axis=-1).reshape(*np.shape(scales), 32)
    values = e2m1_values(codes) * e8m0_values(scales)[..., None]
    return values.reshape(*np.shape(scales)[:-1], -1)


# ---------------------------------------------------------------- small ops


def _eps(eps):
    return float(np.float32(eps))  # the ops take eps in float32


# dtype=np.float32 makes them naive: what a plain float32 program computes.


def _as(dtype, *arrays):
    return (None if a is None else np.asarray(a).astype(dtype) for a in arrays)


def rms_norm(x, weight=None, eps=1e-6, dtype=np.float64):
    x, weight = _as(dtype, x, weight)
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + dtype(_eps(eps)))
    return y if weight is None else y * weight


def layer_norm(x, weight=None, bias=None, eps=1e-5, dtype=np.float64):
    x, weight, bias = _as(dtype, x, weight, bias)
    centred = x - x.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + dtype(_eps(eps)))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def add_rms_norm(x, residual, weight, eps, dtype):
    """(y, res): res = x + residual rounded to dtype, y the norm of that."""
    res = round_to(np.asarray(x, np.float64) + residual, dtype)
    return rms_norm(res, weight, eps), res


def add_layer_norm(x, residual, weight, bias, eps, dtype):
    res = round_to(np.asarray(x, np.float64) + residual, dtype)
    return layer_norm(res, weight, bias, eps), res


def rope(x, cos, sin, positions):
    """Half-split rotary embedding: x [..., H, D]; cos, sin [max_position, R]; positions with x's leading shape.

    Dimensions i and i + R turn together for i < R; what lies past 2R is copied.
    """
    x = np.asarray(x, np.float64)
    half = cos.shape[-1]
    c = np.asarray(cos, np.float64)[positions][..., None, :]
    s = np.asarray(sin, np.float64)[positions][..., None, :]
    y = x.copy()
    first, second = x[..., :half], x[..., half : 2 * half]
    y[..., :half] = first * c - second * s
    y[..., half : 2 * half] = second * c + first * s
    return y


def silu_mul(x, dtype=np.float64):
    gate, up = np.split(np.asarray(x).astype(dtype), 2, axis=-1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def gelu_mul(x, approximate="tanh"):
    """1 + tanh(z) as 2 / (1 + exp(-2 z)), and 1 + erf(z) as erfc(-z): neither cancels where the gate is negative."""
    gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
    if approximate == "tanh":
        with np.errstate(over="ignore"):
            return gate / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return 0.5 * gate * np.vectorize(math.erfc, otypes=[np.float64])(-gate / math.sqrt(2)) * up


def softmax(x, dtype=np.float64):
    x = np.asarray(x).astype(dtype)
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------- sampling


def philox(key, counter):
    """The first two words of Philox4x32-10 (Salmon et al. 2011) as one integer; all words lie low to high."""
    words = [counter >> bits & 0xFFFFFFFF for bits in (0, 32, 64, 96)]
    keys = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(right >> 32) ^ words[1] ^ keys[0], right % 2**32, (left >> 32) ^ words[3] ^ keys[1], left % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return words[0] | words[1] << 32


def kept_tokens(key, mass, top_k=None, top_p=None, min_p=None, order="transformers"):
    """Which tokens of one row may be drawn. key: distance from the likeliest token, mass: probability, unscaled."""
    kept = np.ones(len(key), bool)
    likely = np.ones(len(key), bool) if not min_p else key <= -math.log(min_p) * 2**26
    if top_k is not None and top_k < len(key):
        kept &= key <= np.sort(key)[top_k - 1]
    if order == "vllm":
        kept &= likely
    if top_p is not None and top_p < 1:
        ranked = sorted(np.flatnonzero(kept), key=lambda token: (key[token], token))
        total, before = sum(int(mass[token]) for token in ranked), 0
        for token in ranked:
            kept[token] = before < max(1, math.ceil(total * top_p))
            before += int(mass[token])
    return kept & likely


def sample(logits, temperature=1.0, repetition_penalty=1.0, token_ids=None, seeds=None, positions=None, **settings):
    """The token of each row [rows, vocabulary] by the definition in rooftile.sample's docstring and docs/kernels."""
    tokens = []
    for row, values in enumerate(np.asarray(logits)):
        x = values.astype(np.float32)
        if token_ids is not None:
            for token in {int(token) for token in token_ids[row]} & set(range(len(x))):
                penalty = np.float32(repetition_penalty)
                x[token] = x[token] * penalty if x[token] < 0 else x[token] / penalty
        if temperature == 0:
            tokens.append(int(np.argmax(x)))
            continue
        if np.isnan(x).any() or not np.isfinite(x.max()):
            tokens.append(-1)
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            distance = (x.max() - x) * np.float32(2**26 / temperature)
        key = np.where(distance < 2**31, distance, 2**31 - 1).astype(np.int64)
        mass = np.floor(np.exp(-(key.astype(np.longdouble) / 2**26)) * 2**40).astype(np.int64)
        mass[key >= 41 * math.log(2) * 2**26] = 0
        ends = np.cumsum(np.where(kept_tokens(key, mass, **settings), mass, 0))
        place = philox(int(seeds[row]), 0 if positions is None else int(positions[row])) * int(ends[-1]) >> 64
        tokens.append(int(np.searchsorted(ends, place, side="right")))
    return np.array(tokens)
