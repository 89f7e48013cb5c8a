# SPDX-License-Identifier: Apache-2.0
"""Where a command runs, and which cache formats have a decode kernel there."""

from rooftile import _probe


def usable_device(name):
    """ "cpu" or "cuda:N" from what --device says. Raises NotSupportedError naming what is missing for it."""
    from rooftile.kv_cache import check_device

    return check_device("--device", name)


def missing_kernel(format, model):
    """Why `model`, where it is, cannot use a cache of `format`: the error's text, or None where it can."""
    from rooftile.integrations._models import head_dim

    config = model.config.get_text_config(decoder=True)
    return _probe.missing_kernel(
        format,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        dtype=model.dtype,
        device=model.device,
    )
