# SPDX-License-Identifier: Apache-2.0
"""Attention by torch, for what rooftile's kernels do not read: other caches, and prompts on a GPU."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import rooftile as rt
from rooftile.errors import NotSupportedError
from rooftile.integrations import _dequantize


def prompt(q, k, v, counts, *, scale, window, softcap, sinks):
    """Causal self-attention: q [B, T, Hq, D], k, v [B, T, Hkv, D], of each row its first counts[b] tokens."""
    for name, value in (("softcap", softcap), ("sinks", sinks)):
        if value is not None:
            raise NotSupportedError(
                f"{name}: on a GPU prompts run on torch's scaled_dot_product_attention, which has none; "
                "RooftileCache(..., stepwise=True) reads them with the decode kernels instead"
            )
    length = q.shape[1]
    position = torch.arange(length, device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # a row's tokens come first, so that the causal mask hides its padding
    if window is None or window >= length:
        seen = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
    else:
        distance = position[:, None] - position
        seen = {"attn_mask": (distance >= 0) & (distance < window)}
        k, v = (repeat_heads(x, q) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, scale=scale, **seen).transpose(1, 2)
    return out if counts is None else out.masked_fill((position >= counts[:, None])[:, :, None, None], 0)


def masked(q, k, v, mask, *, scale, softcap, sinks):
    """q [B, Hq, T, D] over k, v [B, Hkv, S, D] of any source: [B, T, Hq, D], 0 where a query sees no key.

    mask: [B, 1, T, S], True where a query sees a key, or numbers that are added to the logits. None: all keys.
    """
    seen = mask is not None and mask.dtype == torch.bool
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        logits = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf) if seen else logits + mask
        if sinks is not None:  # one more logit per head, which has no value
            sink = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        out = (logits.softmax(-1)[..., : k.shape[2]] @ v.float()).to(q.dtype)
    if seen:
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0)
    return out.transpose(1, 2)


def repeat_heads(x, q):
    """x [B, Hkv, S, D] with the heads of q [B, Hq, T, D]."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def causal(queries, keys, window, device):
    """The mask [1, 1, queries, keys] of a causal window, aligned to the end."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    return (seen if window is None else seen & (distance < window))[None, None]


# Tokens of all rows together that are decoded at once.
_SCRATCH = 8192


def reads_behind(q, softcap, sinks):
    """Whether behind() can attend q."""
    return softcap is None and sinks is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def behind(q, k, v, cache, lengths, counts, *, scale, window):
    """rt.prefill_attention(q, k, v, cache=cache, counts=counts) by torch, which reads the cache once for all queries.

    q [B, T, Hq, D], k, v [B, T, Hkv, D]: new tokens behind a filled cache, not yet in it. lengths: tokens in the cache,
    a list of ints. What the cache holds is decoded into a scratch of bounded size. Never waits for a GPU.
    """
    same = len(set(lengths)) == 1
    parts = [(slice(None), lengths[0])] if same else [(slice(b, b + 1), n) for b, n in enumerate(lengths)]
    if window is None or window >= max(lengths) + q.shape[1]:
        out = _merged(q, k, v, cache, parts, scale)
    else:
        outs = [_windowed(q[rows], k[rows], v[rows], cache, rows, n, scale, window) for rows, n in parts]
        out = outs[0] if same else torch.cat(outs)
    if counts is None:
        return out
    position = torch.arange(q.shape[1], device=q.device)
    return out.masked_fill((position >= counts[:, None])[:, :, None, None], 0)


def _windowed(q, k, v, cache, rows, length, scale, window):
    """The same for rows of one length and a window: [B, T, Hq, D]. The window and the new tokens are the scratch."""
    begin = max(length - window + 1, 0) // cache.page_size * cache.page_size
    past = _dequantize.tokens(cache, rows, begin, length, length)
    k, v = (torch.cat([old, new.transpose(1, 2)], 2) for old, new in zip(past, (k, v), strict=True))
    seen = causal(q.shape[1], k.shape[2], window, q.device)
    return masked(q.transpose(1, 2), k, v, seen, scale=scale, softcap=None, sinks=None)


def _merged(q, k, v, cache, parts, scale):
    """The same without a window. parts: (slice of rows, their length)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _, heads, length, dim = q.shape
    out, lse = (x.transpose(1, 2) for x in _flash(q, repeat_heads(k, q), repeat_heads(v, q), True, scale))
    for rows, past in parts:
        # the query heads of a KV head are queries of one head: all of them see all that the cache holds
        folded = q[rows].reshape(-1, k.shape[1], heads // k.shape[1] * length, dim)
        step = max(_SCRATCH // folded.shape[0] // cache.page_size, 1) * cache.page_size
        for begin in range(0, past, step):
            keys, values = _dequantize.tokens(cache, rows, begin, min(begin + step, past), past)
            part, part_lse = _flash(folded, keys, values, False, scale)
            part, part_lse = part.reshape(-1, heads, length, dim), part_lse.reshape(-1, heads, length)
            rt.merge_attention(
                out[rows], lse[rows], part.transpose(1, 2), part_lse.transpose(1, 2), out=out[rows], lse=lse[rows]
            )
    return out


def _flash(q, k, v, is_causal, scale):
    """torch's flash attention with its log-sum-exp: q [B, H, T, D] -> [B, H, T, D], float32 [B, H, T]."""
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)[:2]
