# SPDX-License-Identifier: Apache-2.0
"""Which models of transformers a RooftileCache is for, said before the first forward."""

import functools
import inspect

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.generation import GenerationMixin

from rooftile.errors import ArgumentTypeError, NotSupportedError

# What a config has where its attention does not keep one key and one value of head_dim a token and KV head.
_LATENT = ("kv_lora_rank", "index_topk", "compress_ratios")


# The names of a cache among the arguments of a forward and of generate(): transformers renamed it in 5.24.
CACHE_KEYWORDS = ("cache", "past_key_values")


def _named(function):
    return [name for name in CACHE_KEYWORDS if name in inspect.signature(function).parameters]


# The one that generate() takes; messages name it.
CACHE = _named(GenerationMixin.prepare_inputs_for_generation)[0]


def cache_keyword(model):
    """The one that the forward of `model` takes, whose code may be older than transformers; of a model, its class or
    what is called like a model. With none by name (**kwargs), transformers' own."""
    return (*_named(getattr(model, "forward", model)), CACHE)[0]


def text_config(config):
    """The config of the decoder that a RooftileCache is for. Raises NotSupportedError for models that it is not for."""
    if not hasattr(config, "get_text_config"):
        raise ArgumentTypeError(f"config: expected a model's config (model.config), got {type(config).__name__}")
    text = config.get_text_config(decoder=True)
    if reason := _reason(config, text):
        raise NotSupportedError(f"config: RooftileCache is for decoders of full and sliding attention; {reason}")
    return text


def head_dim(text):
    """Elements of a head's key, of a decoder's config: older ones leave it to be computed."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def decoder(model):
    """The part of `model` whose attention reads the cache: the model itself, or beside a vision or audio tower the text
    model, whose config is text_config(model.config)."""
    text = text_config(model.config)
    return next(part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is text)


def _reason(config, text):
    """Why a RooftileCache cannot be used, or None."""
    kind = getattr(text, "model_type", "") or type(text).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder, whose cross-attention keeps another cache"
    latent = [name for name in _LATENT if _given(text, name)]
    if latent:
        return f"{kind} keeps latent or sparse keys and values (multi-head latent attention: {', '.join(latent)})"
    if not isinstance(getattr(text, "num_hidden_layers", None), int) or not getattr(text, "num_attention_heads", None):
        return f"{kind} has no attention layers (num_hidden_layers, num_attention_heads)"
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    odd = sorted({str(layer) for layer in layer_types} - {"full_attention", "sliding_attention", "attention"})
    if odd:
        return f"{kind} has layers of other kinds: {', '.join(odd)}"
    values = getattr(text, "v_head_dim", None)
    if values and values != head_dim(text):
        return f"{kind} has values of another head_dim (v_head_dim = {values}) than its keys ({head_dim(text)})"
    if _given(text, "num_kv_shared_layers") or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        return f"{kind} has layers that share keys"
    if getattr(text, "is_causal", True) is False:
        return f"{kind} is not causal (is_causal=False)"
    model = _model_class(type(config)) or _model_class(type(text))
    return None if model is None else _no_interface(model)


def _given(text, name):
    """Whether the config, or that of a layer where layers differ, says something about `name`."""
    try:
        return bool(getattr(text, name, None))
    except RuntimeError:  # transformers: the value is that of single layers
        return any(getattr(layer, name, None) for layer in text.per_layer_config)


def check_interface(model_class):
    """Raises NotSupportedError where set_attn_implementation("rooftile") has no effect on models of this class."""
    if reason := _no_interface(model_class):
        raise NotSupportedError(f"model: {reason}")


def _no_interface(model_class):
    if model_class._supports_attention_backend and model_class._can_set_attn_implementation():
        return None
    return (
        f"{model_class.__name__} does not take its attention from transformers' AttentionInterface, so that "
        "set_attn_implementation('rooftile') has no effect on it"
    )


@functools.cache
def _model_class(config_class):
    """The causal language model of transformers with this config; None for other models."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)


def refuse_resizing(model):
    """Makes resize_token_embeddings of a model whose head is packed an error before it has changed the embedding."""
    model.resize_token_embeddings = _no_resizing


def _no_resizing(*args, **options):
    raise NotSupportedError(
        "resize_token_embeddings: this model's output head is packed in 4 or 8 bits, which cannot get more tokens; "
        "resize the model before its head is rounded (rt.accelerate(head=None), load_gguf(weights='dequantize'))"
    )
