# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache as keys and values, by torch on any device and without waiting for it."""

import functools
import math

import torch

from rooftile import _C
from rooftile.kv_cache import ELEMENT_DTYPES, GROUP, KIVI, RING
from rooftile.kv_paged import PagedKVCache

_HALF = 1024  # two digits of this base, each exact in float16, name a scale's place


@functools.lru_cache(maxsize=16)
def _places(format, page_size, head_dim, device):
    """Where the codes (in codes) and the scales (in 16-bit words) of a page lie in its block, in logical order.

    Learned from dump(): every code and every scale of a block is made to say a digit of its own place.
    """
    block = _C.kv_block_bytes(format, page_size, head_dim)

    def dump(pool):
        table = torch.zeros(1, 1, dtype=torch.int32, device="cpu")
        length = torch.full((1,), page_size, dtype=torch.int32, device="cpu")
        options = {"page_size": page_size, "head_dim": head_dim, "format": format, "dtype": "float16"}
        return PagedKVCache.view(pool.view(torch.uint8).view(1, 1, block), table, length, **options).dump(0)

    bits = _C.kv_format_bits[format]
    index = torch.arange(block * 8 // bits, device="cpu")
    places = dict.fromkeys(("k_codes", "v_codes"), 0)
    for shift in range(0, math.ceil(math.log2(len(index))), bits):
        digit = ((index >> shift) & (2**bits - 1)).to(torch.uint8)
        facts = dump(digit if bits == 8 else digit[0::2] | digit[1::2] << 4)
        for name in places:
            places[name] = places[name] | (facts[name][:, 0].long() & (2**bits - 1)) << shift
    word = torch.arange(block // 2, device="cpu")
    low, high = (dump(digits.half()) for digits in (word % _HALF, word // _HALF))
    for name in low:
        if name.endswith(("_scale", "_min")):
            places[name] = (low[name] + _HALF * high[name])[:, 0].long()
    return {name: place.to(device) for name, place in places.items()}


def tokens(cache, rows, begin, end, length):
    """K and V of tokens [begin, end) of some rows that hold `length` tokens each, as the token to come sees them.

    begin: a multiple of page_size. rows: a slice. Returns two tensors [rows, kv_heads, end - begin, head_dim] in the
    cache's dtype: codes decoded, in float32, and rounded; the open group of a kivi format raw.
    """
    arrays, size = cache._arrays, cache.page_size
    first, last = begin // size, -(-end // size)
    if "block_table" in arrays:
        pages = arrays["block_table"][rows, first:last].long()
    else:
        row = torch.arange(cache.max_rows, device=cache.device)[rows]
        pages = row[:, None] * cache.max_pages + torch.arange(first, last, device=cache.device)
    coded = length // GROUP * GROUP if cache.format in KIVI else length
    sides = []
    for side in ("k", "v"):
        if cache.format in ELEMENT_DTYPES:
            x = arrays[side + "_pool"][pages].flatten(1, 2).transpose(1, 2)
        else:
            x = _decoded(cache, side, arrays["pool"][pages])
        x = x[:, :, : end - begin]
        if end > coded:
            slots = torch.arange(coded, end, device=cache.device) % RING
            x = torch.cat([x[:, :, : coded - begin], arrays["ring_" + side][rows][:, :, slots]], 2)
        sides.append(x)
    return sides


def _decoded(cache, side, blocks):
    """blocks uint8 [rows, pages, kv_heads, block] -> [rows, kv_heads, pages * page_size, head_dim]."""
    places = _places(cache.format, cache.page_size, cache.head_dim, cache.device)
    dtype = getattr(torch, cache.dtype)
    place = places[side + "_codes"]
    if _C.kv_format_bits[cache.format] == 8:
        e4m3 = _C.kv_code_formats[cache.format] == "e4m3"
        codes = blocks[..., place].view(torch.float8_e4m3fn if e4m3 else torch.int8)
    else:
        codes = blocks[..., place // 2] >> (place % 2 * 4).to(torch.uint8) & 15
        if cache.format not in _C.kv_minima_formats:
            codes = (codes ^ 8).view(torch.int8) - 8
    words = blocks.view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)

    def spread(name):  # [.., page_size, head_dim or 1]
        x = words[..., places[name]].float()
        return x.repeat_interleave(cache.page_size // x.shape[-2], -2)

    x = codes.float() * spread(side + "_scale")
    if cache.format in _C.kv_minima_formats:
        x += spread(side + "_min")
    return x.to(dtype).transpose(1, 2).flatten(2, 3)
