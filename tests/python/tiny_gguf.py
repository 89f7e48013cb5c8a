# SPDX-License-Identifier: Apache-2.0
"""Small GGUF files for the loader's tests: two layers, every kind of tensor, a byte-level tokenizer."""

import gguf
import numpy as np

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, VOCAB = 256, 512, 4, 2, 2, 320
HEAD_DIM = HIDDEN // HEADS
THETA, EPS = 1000.0, 1e-5

_TYPES = gguf.GGMLQuantizationType
# one of each kind that occurs in files; rows are multiples of 256 for the K-quants
LINEAR_TYPES = {
    "attn_q": _TYPES.Q4_0,
    "attn_k": _TYPES.Q4_1,
    "attn_v": _TYPES.Q8_0,
    "attn_output": _TYPES.F16,
    "ffn_gate": _TYPES.Q4_K,
    "ffn_up": _TYPES.BF16,
    "ffn_down": _TYPES.Q4_1,
}


def byte_symbols():
    """GPT-2's printable stand-in of every byte, in the order of the bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*byte_symbols(), *("".join(m.split(" ")) for m in MERGES), "<|im_start|>", "<|im_end|>", "<think>"]
TOKENS += [f"[PAD{i}]" for i in range(len(TOKENS), VOCAB)]
BOS, EOS = TOKENS.index("<|im_start|>"), TOKENS.index("<|im_end|>")
TOKEN_TYPES = [1] * (256 + len(MERGES)) + [3, 3, 4]
TOKEN_TYPES += [5] * (VOCAB - len(TOKEN_TYPES))
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def metadata(arch):
    """key -> (value, how gguf.GGUFWriter adds it)."""
    return {
        f"{arch}.block_count": (LAYERS, "uint32"),
        f"{arch}.context_length": (512, "uint32"),
        f"{arch}.embedding_length": (HIDDEN, "uint32"),
        f"{arch}.feed_forward_length": (FFN, "uint32"),
        f"{arch}.attention.head_count": (HEADS, "uint32"),
        f"{arch}.attention.head_count_kv": (KV_HEADS, "uint32"),
        f"{arch}.attention.layer_norm_rms_epsilon": (EPS, "float32"),
        f"{arch}.rope.freq_base": (THETA, "float32"),
        "tokenizer.ggml.model": ("gpt2", "string"),
        "tokenizer.ggml.pre": ({"llama": "smollm", "qwen2": "qwen2"}.get(arch, "smollm"), "string"),
        "tokenizer.ggml.tokens": (TOKENS, "array"),
        "tokenizer.ggml.token_type": (TOKEN_TYPES, "array"),
        "tokenizer.ggml.merges": (MERGES, "array"),
        "tokenizer.ggml.bos_token_id": (BOS, "uint32"),
        "tokenizer.ggml.eos_token_id": (EOS, "uint32"),
        "tokenizer.chat_template": (CHAT_TEMPLATE, "string"),
    }


def tensors(arch, seed=0):
    """tensor name -> (bytes or values as stored, type)."""
    rng = np.random.default_rng(seed)
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    out = {"token_embd.weight": _stored(rng, (VOCAB, HIDDEN), _TYPES.Q8_0)}
    out["output_norm.weight"] = _norm(rng)
    for i in range(LAYERS):
        out[f"blk.{i}.attn_norm.weight"] = _norm(rng)
        out[f"blk.{i}.ffn_norm.weight"] = _norm(rng)
        for name, shape in shapes.items():
            out[f"blk.{i}.{name}.weight"] = _stored(rng, shape, LINEAR_TYPES[name])
        if arch == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                bias = rng.standard_normal(shapes[name][0]).astype(np.float32)
                out[f"blk.{i}.{name}.bias"] = (bias, _TYPES.F32)
    if arch == "qwen2":
        out["output.weight"] = _stored(rng, (VOCAB, HIDDEN), _TYPES.Q8_0)
    return out


def _norm(rng):
    return (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32), _TYPES.F32


def _stored(rng, shape, kind):
    values = (rng.standard_normal(shape) / 8).astype(np.float32)
    if kind == _TYPES.F16:
        return values.astype(np.float16), kind
    if kind == _TYPES.Q4_K:  # the gguf package only reads these: any bytes are codes, the two scales are set
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 144), dtype=np.uint8)
        blocks[..., :4] = np.array([3e-4, 2e-3], np.float16).view(np.uint8)
        return blocks.reshape(shape[0], -1), kind
    return gguf.quants.quantize(values, kind), kind


def write(path, arch="llama", *, meta=None, extra_meta=None, data=None):
    """Writes a file. meta, data: what metadata() and tensors() give, changed by the test. Returns the path as a str."""
    writer = gguf.GGUFWriter(path, arch)
    for key, (value, kind) in {**(meta or metadata(arch)), **(extra_meta or {})}.items():
        getattr(writer, f"add_{kind}")(key, value)
    for name, (stored, kind) in (data or tensors(arch)).items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def forward(arch, data, ids):
    """Logits [tokens, vocabulary] in float64, straight from the stored order: RoPE of llama turns neighbouring elements
    (the order GGUF keeps its rows in), that of qwen2 the two halves of a head. Shares nothing with the loader."""

    def weight(name):
        stored, kind = data[name]
        return gguf.quants.dequantize(stored, kind).astype(np.float64)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPS)) * weight(name)

    def rope(x):  # [tokens, heads, HEAD_DIM]
        half = HEAD_DIM // 2
        angle = np.arange(len(x))[:, None, None] * THETA ** (-np.arange(half) / half)
        out = np.empty_like(x)
        a, b = (slice(0, None, 2), slice(1, None, 2)) if arch == "llama" else (slice(0, half), slice(half, None))
        out[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
        out[..., b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)
        return out

    x = weight("token_embd.weight")[ids]
    tokens = len(ids)
    future = np.triu(np.ones((tokens, tokens), bool), 1)
    for i in range(LAYERS):
        h = norm(x, f"blk.{i}.attn_norm.weight")
        q, k, v = (
            (
                h @ weight(f"blk.{i}.{name}.weight").T + (weight(f"blk.{i}.{name}.bias") if arch == "qwen2" else 0)
            ).reshape(tokens, -1, HEAD_DIM)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        q, k = rope(q), rope(k)
        heads = []
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            logits = q[:, head] @ k[:, kv].T / np.sqrt(HEAD_DIM)
            logits[future] = -np.inf
            p = np.exp(logits - logits.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, kv])
        x = x + np.concatenate(heads, -1) @ weight(f"blk.{i}.attn_output.weight").T
        h = norm(x, f"blk.{i}.ffn_norm.weight")
        gate = h @ weight(f"blk.{i}.ffn_gate.weight").T
        up = h @ weight(f"blk.{i}.ffn_up.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"blk.{i}.ffn_down.weight").T
    head = "output.weight" if "output.weight" in data else "token_embd.weight"
    return norm(x, "output_norm.weight") @ weight(head).T
