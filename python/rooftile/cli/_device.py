# SPDX-License-Identifier: Apache-2.0
"""Where a command runs, and which cache formats have a decode kernel there."""

from rooftile.errors import NotSupportedError


def usable_device(name):
    """ "cpu" or "cuda:N" from what --device says. Raises NotSupportedError naming what is missing for it."""
    from rooftile.kv_cache import check_device

    return check_device("--device", name)


def missing_kernel(format, model):
    """Why a cache of `format` cannot be attended where `model` is: the error's text, or None where it can."""
    import torch

    import rooftile as rt

    config, device = model.config, model.device
    cache = rt.KVCache(
        1, 1, config.num_key_value_heads, config.head_dim, format=format, dtype=model.dtype, device=device
    )
    try:
        rt.decode_attention(
            torch.zeros(1, config.num_attention_heads, config.head_dim, dtype=model.dtype, device=device), cache
        )
    except NotSupportedError as e:
        return str(e)
    return None
