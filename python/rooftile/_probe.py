# SPDX-License-Identifier: Apache-2.0
"""What the library has kernels for, asked of the library itself by the smallest call there is."""

from rooftile.errors import NotSupportedError


def missing_kernel(format, *, q_heads=None, kv_heads, head_dim, dtype, device):
    """Why a token cannot be stored in a cache of `format` and, with q_heads, attended: the error's text, or None."""
    import torch

    import rooftile as rt

    kind = {"dtype": dtype, "device": device}
    try:
        cache = rt.KVCache(1, 1, kv_heads, head_dim, format=format, **kind)
        token = torch.zeros(1, 1, kv_heads, head_dim, **kind)
        cache.append(token, token)
        if q_heads is not None:
            rt.decode_attention(torch.zeros(1, q_heads, head_dim, **kind), cache)
    except NotSupportedError as e:
        return str(e)
    return None
