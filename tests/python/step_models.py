# SPDX-License-Identifier: Apache-2.0
"""Configs of the families that rt.accelerate has programs for."""

import transformers

# What a small model of the family is given besides its sizes: layers of both types, soft caps that matter.
_GEMMA = {"query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_OPTIONS = {"Gemma2": _GEMMA | {"final_logit_softcapping": 3.0}, "Gemma3": _GEMMA}


def config_of(family, **options):
    """The config of a family, with heads as wide as Llama's."""
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    if family.startswith("Gemma"):
        options = {"head_dim": options["hidden_size"] // options["num_attention_heads"]} | options
    return getattr(transformers, f"{name}Config")(**_OPTIONS.get(family, {}) | options)
