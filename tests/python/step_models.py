# SPDX-License-Identifier: Apache-2.0
"""Configs of the families that rt.accelerate has programs for."""

import transformers

# What a small model of the family is given besides its sizes: layers of both types, heads as wide as the others'.
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "layer_types": _LAYERS}
_OPTIONS = {"Gemma": {"head_dim": 32}, "Gemma2": _GEMMA | {"final_logit_softcapping": 3.0}, "Gemma3": _GEMMA}


def config_of(family, **options):
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    return getattr(transformers, f"{name}Config")(**_OPTIONS.get(family, {}) | options)
