# SPDX-License-Identifier: Apache-2.0
"""rooftile: LLM-inference kernels made of CuTe tiles, with a CPU twin for every one of them."""

from rooftile import _C
from rooftile._calls import record_kernels
from rooftile.accelerate import accelerate
from rooftile.attention import decode_attention, merge_attention, prefill_attention
from rooftile.env import env, warmup
from rooftile.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    FetchError,
    NotSupportedError,
    OutOfMemoryError,
    OutOfPagesError,
    RooftileError,
)
from rooftile.explain import Explanation, explain
from rooftile.fused import (
    add_layer_norm,
    add_rms_norm,
    embedding,
    gelu_mul,
    layer_norm,
    qk_rms_norm,
    rms_norm,
    rope,
    rope_append,
    silu_mul,
    softmax,
)
from rooftile.gemm import W4Weight, W8Weight, linear, w4a16_matmul, w8a16_matmul
from rooftile.kv_cache import KV_FORMATS, KVCache
from rooftile.kv_model import ModelKVCache, set_kv_cache
from rooftile.kv_paged import PagedKVCache
from rooftile.quantize import W4A16, W8A16, quantize_
from rooftile.sampling import sample

__version__ = _C.version

__all__ = [
    "KV_FORMATS",
    "W4A16",
    "W8A16",
    "ArgumentError",
    "ArgumentTypeError",
    "DeviceError",
    "Explanation",
    "FetchError",
    "KVCache",
    "ModelKVCache",
    "NotSupportedError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PagedKVCache",
    "RooftileError",
    "W4Weight",
    "W8Weight",
    "accelerate",
    "add_layer_norm",
    "add_rms_norm",
    "decode_attention",
    "embedding",
    "env",
    "explain",
    "gelu_mul",
    "layer_norm",
    "linear",
    "merge_attention",
    "prefill_attention",
    "qk_rms_norm",
    "quantize_",
    "record_kernels",
    "rms_norm",
    "rope",
    "rope_append",
    "sample",
    "set_kv_cache",
    "silu_mul",
    "softmax",
    "w4a16_matmul",
    "w8a16_matmul",
    "warmup",
]
