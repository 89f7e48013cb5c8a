# SPDX-License-Identifier: Apache-2.0
"""What errors say of a wrong name and of a masked array: the whole text, and no suggestion for what is like nothing."""

import re

import numpy as np
import pytest
import rooftile as rt
import torch
from rooftile import _C, evaluate
from rooftile.loaders.gguf import open_gguf
from rooftile.nn import W4Linear, W8Linear

FORMATS = "fp32, fp16, bf16, int8, int4, int4-kivi-sym, int4-kivi, fp8, int8-kivi-sym"
X = torch.ones(4, 128)


def weight():
    return rt.W4Weight.quantize(X, group_size=32)


def view(layout):
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return rt.PagedKVCache.view(torch.zeros(1, 2, 16, 1, 8), table, lengths, format="fp32", layout=layout)


def gguf(name):
    return rt.W4Weight.from_gguf(bytes(72), name, (1, 128))


NAMES = [
    (
        lambda: rt.KVCache(1, 64, 1, 16, format="int4_kivi"),
        rt.ArgumentError,
        f'KVCache: format "int4_kivi" is not a cache format; known: {FORMATS}, did you mean "int4-kivi"?',
    ),
    (
        lambda: rt.KVCache(1, 64, 1, 16, format="zstd"),
        rt.ArgumentError,
        f'KVCache: format "zstd" is not a cache format; known: {FORMATS}',
    ),
    (
        lambda: rt.KVCache(1, 64, 1, 16, format=8),
        rt.ArgumentTypeError,
        "KVCache: format must be a string, got int",
    ),
    (  # what the binding says where no Python looked before
        lambda: _C.kv_block_bytes("int4_kivi", 32, 64),
        rt.ArgumentError,
        f'KVCache: format "int4_kivi" is not a cache format; known: {FORMATS}, did you mean "int4-kivi"?',
    ),
    (
        lambda: rt.KVCache(1, 64, 1, 16, dtype="fp16"),
        rt.ArgumentTypeError,
        "KVCache: dtype must be float32, float16, bfloat16, got 'fp16', did you mean \"float16\"?",
    ),
    (
        lambda: rt.W4Weight.quantize(X, zeros="minimum"),
        rt.ArgumentError,
        'W4Weight.quantize: zeros must be None, "symmetric" or "minima", got \'minimum\', did you mean "minima"?',
    ),
    (
        lambda: rt.W8Weight.quantize(X, zeros="minima"),
        rt.ArgumentError,
        "W8Weight.quantize: zeros must be None or \"symmetric\", got 'minima'",
    ),
    (
        lambda: rt.W4A16(zeros="symmetrik"),
        rt.ArgumentError,
        'W4A16: zeros must be "symmetric" or "minima", got \'symmetrik\', did you mean "symmetric"?',
    ),
    (
        lambda: rt.W4Weight.from_canonical(*weight().unpack()[:2], kind="int"),
        rt.ArgumentError,
        'W4Weight.from_canonical: kind must be "symmetric", "integer" or "minima", got \'int\', '
        'did you mean "integer"?',
    ),
    (
        lambda: W4Linear(128, 4, kind="Symmetric"),
        rt.ArgumentError,
        'W4Linear: kind must be "symmetric", "integer" or "minima", got \'Symmetric\', did you mean "symmetric"?',
    ),
    (
        lambda: W8Linear(128, 4, kind=8),
        rt.ArgumentError,
        'W8Linear: kind must be "symmetric" or "integer", got 8',
    ),
    (
        lambda: W4Linear(128, 4, scale_dtype="bf16"),
        rt.ArgumentTypeError,
        'W4Linear: scale_dtype must be "float16" or "bfloat16", got \'bf16\', did you mean "bfloat16"?',
    ),
    (
        lambda: view("nhd "),
        rt.ArgumentError,
        'PagedKVCache.view: layout must be "NHD" or "HND", got \'nhd \', did you mean "NHD"?',
    ),
    (
        lambda: view("NDH"),
        rt.ArgumentError,
        'PagedKVCache.view: layout must be "NHD" or "HND", got \'NDH\', did you mean "NHD"?',
    ),
    (
        lambda: gguf("Q4_K"),
        rt.NotSupportedError,
        'W4Weight.from_gguf: ggml_type must be "Q4_0" or "Q4_1", got \'Q4_K\', did you mean "Q4_0"?',
    ),
    (
        lambda: open_gguf("model.gguf", weights="w4a8"),
        rt.ArgumentError,
        'weights must be "dequantize" or "w4a16", got \'w4a8\', did you mean "w4a16"?',
    ),
    (
        lambda: open_gguf("model.gguf", dtype="fp16"),
        rt.ArgumentTypeError,
        'dtype must be "float32", "float16" or "bfloat16", got \'fp16\', did you mean "float16"?',
    ),
    (
        lambda: rt.gelu_mul(X, approximate="tan"),
        rt.ArgumentError,
        'gelu_mul: approximate must be "tanh" or "none", got "tan", did you mean "tanh"?',
    ),
    (
        lambda: rt.w4a16_matmul(X, weight(), activation="gelu_tan"),
        rt.ArgumentError,
        'w4a16_matmul: activation must be "silu", "gelu", "gelu_tanh", "silu_mul", "gelu_mul" or "gelu_tanh_mul", '
        'got "gelu_tan", did you mean "gelu_tanh"?',
    ),
    (
        lambda: rt.w4a16_matmul(X, weight(), activation="silu_mull"),
        rt.ArgumentError,
        'w4a16_matmul: activation must be "silu", "gelu", "gelu_tanh", "silu_mul", "gelu_mul" or "gelu_tanh_mul", '
        'got "silu_mull", did you mean "silu_mul"?',
    ),
]


@pytest.mark.parametrize("call, error, text", NAMES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_name(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_a_wrong_plan():
    with pytest.raises(rt.NotSupportedError, match=r'^softmax: plan "portabel" is no .*, did you mean "portable"\?$'):
        rt.softmax(X, plan="portabel")


# ---------------------------------------------------------------- masked arrays


def masked(array):
    return np.ma.masked_array(array, mask=np.zeros(array.shape, bool))


def cache():
    made = rt.KVCache(2, 64, 1, 16, format="fp32")
    made.append(np.ones((2, 3, 1, 16), np.float32), np.ones((2, 3, 1, 16), np.float32))
    return made


def ints(*values):
    return masked(np.array(values, np.int32))


def parts():
    return [None if part is None else part.numpy() for part in weight().unpack()]


KV = np.ones((1, 3, 1, 16), np.float32)
MASKED = {
    "W4Weight.from_gguf: data": lambda: rt.W4Weight.from_gguf(masked(np.zeros(72, np.uint8)), "Q4_0", (1, 128)),
    "W8Weight.from_gguf: data": lambda: rt.W8Weight.from_gguf(masked(np.zeros(136, np.uint8)), "Q8_0", (1, 128)),
    "W4Weight.quantize: weight": lambda: rt.W4Weight.quantize(masked(X.numpy())),
    "W8Weight.quantize: weight": lambda: rt.W8Weight.quantize(masked(X.numpy())),
    "W4Weight.from_canonical: codes": lambda: rt.W4Weight.from_canonical(masked(parts()[0]), parts()[1]),
    "W4Weight.from_canonical: scales": lambda: rt.W4Weight.from_canonical(parts()[0], masked(parts()[1])),
    "W4Weight.from_canonical: perm": lambda: rt.W4Weight.from_canonical(*parts()[:2], perm=ints(*range(128))),
    "select: rows": lambda: cache().select(ints(0)),
    "reorder: index": lambda: cache().reorder(ints(1, 0)),
    "truncate: rows": lambda: cache().truncate(ints(0), [1]),
    "truncate: lengths": lambda: cache().truncate([0], ints(1)),
    "reset: rows": lambda: cache().reset(ints(0)),
    "append: k": lambda: cache().append(masked(KV), KV),
    "append: rows": lambda: cache().append(KV, KV, rows=ints(0)),
    "append: counts": lambda: rt.PagedKVCache(2, 16, 1, 16, max_rows=1, format="fp32").append(KV, KV, counts=ints(1)),
    "decode_attention: rows": lambda: rt.decode_attention(np.ones((1, 1, 16), np.float32), cache(), rows=ints(0)),
    "softmax: x": lambda: rt.softmax(masked(X.numpy())),
    "split_chunks: ids": lambda: evaluate.split_chunks(ints(*range(8)), 4),
    "compare: chunks": lambda: evaluate.compare([], masked(np.zeros((2, 4), np.int64))),
}


@pytest.mark.parametrize("what", MASKED)
def test_a_masked_array_is_refused(what):
    text = f"{what} is a MaskedArray, whose mask no op reads; pass filled() or its data"
    with pytest.raises(rt.ArgumentTypeError, match=f"^{re.escape(text)}$"):
        MASKED[what]()


def test_an_array_is_told_with_dtype_shape_and_device():
    with pytest.raises(rt.ArgumentError) as caught:
        rt.linear(torch.zeros(2, 3), torch.zeros(4, 5))
    assert str(caught.value) == "linear: weight must be [N, K] with x's K = 3, got float32[4, 5] on cpu"
