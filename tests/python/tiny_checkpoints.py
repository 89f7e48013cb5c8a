# SPDX-License-Identifier: Apache-2.0
"""Small Llama folders in every checkpoint format, packed word by word as the formats' descriptions say."""

import dataclasses
import json

import numpy as np
import safetensors.torch
import torch
import transformers

HIDDEN, FFN, LAYERS, VOCAB = 64, 128, 2, 96
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
MODULES = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}

# Run by `python -c` with folders: reads each as somebody does who never imports rooftile, and prints what it refused.
READ_WITHOUT_ROOFTILE = """
import sys
import transformers

for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except RuntimeError as error:
        print("refused:", error)
assert "rooftile" not in sys.modules
"""


@dataclasses.dataclass
class Weight:
    """u: int64 [N, K], the codes 0..15 or 0..255 in the order of x's columns. scales: [N, G]. zeros: int64 [N, G].
    groups: int64 [K], the group of each column."""

    u: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    groups: np.ndarray
    bits: int = 4

    @property
    def dense(self):
        """float32 [N, K]: (u - zero) * scale, exact."""
        scales = self.scales.double().numpy()
        values = (self.u - self.zeros[:, self.groups]) * scales[:, self.groups]
        return torch.from_numpy(values.astype(np.float32))


def weight(name, shape, group_size=32, *, bits=4, symmetric=False, act_order=False, dtype=torch.float16, lowest=1):
    """Random codes; zeros from `lowest` to the highest code, or in the middle; a random order of groups for act_order.
    The same for one name."""
    rng = np.random.default_rng(list(name.encode()))
    n, k = shape
    size = k if group_size == -1 else group_size
    scales = torch.from_numpy(rng.uniform(0.005, 0.02, (n, k // size)) * 16 / 2**bits).to(dtype)
    zeros = np.full(scales.shape, 2**bits // 2) if symmetric else rng.integers(lowest, 2**bits, scales.shape)
    groups = np.arange(k) // size
    return Weight(
        rng.integers(0, 2**bits, shape), scales, zeros, rng.permutation(groups) if act_order else groups, bits
    )


def word(codes, bits):
    """As many codes as fit as one int32, the first in the lowest bits."""
    value = sum(int(code) << bits * i for i, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def words(rows, columns, code, bits=4):
    """int32 [rows, columns]; code(r, c, i) is what stands in bits `bits` i .. `bits` (i + 1) - 1 of word [r, c]."""
    values = [[word([code(r, c, i) for i in range(32 // bits)], bits) for c in range(columns)] for r in range(rows)]
    return torch.tensor(values, dtype=torch.int32)


def gptq(w, version="gptq", g_idx=True):
    """suffix -> tensor. Words run down K in qweight, along N in qzeros."""
    n, k = w.u.shape
    less, of_word = 1 if version == "gptq" else 0, 32 // w.bits
    out = {
        "qweight": words(k // of_word, n, lambda r, c, i: w.u[c, of_word * r + i], w.bits),
        "qzeros": words(w.zeros.shape[1], n // of_word, lambda g, c, i: w.zeros[of_word * c + i, g] - less, w.bits),
        "scales": w.scales.T.contiguous(),
    }
    return {**out, "g_idx": torch.from_numpy(w.groups).to(torch.int32)} if g_idx else out


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(w):
    """Words run along N in both; bits 4i of a word hold its column AWQ_ORDER[i]."""
    n, k = w.u.shape
    return {
        "qweight": words(k, n // 8, lambda r, c, i: w.u[8 * c + AWQ_ORDER[i], r]),
        "qzeros": words(w.zeros.shape[1], n // 8, lambda g, c, i: w.zeros[8 * c + AWQ_ORDER[i], g]),
        "scales": w.scales.T.contiguous(),
    }


def compressed_tensors(w, symmetric, g_idx=False):
    """Words run along K in weight_packed, down N in weight_zero_point; the last ones are filled with 0."""
    (n, k), of_word = w.u.shape, 32 // w.bits

    def at(array, r, c):
        return array[r, c] if r < array.shape[0] and c < array.shape[1] else 0

    out = {
        "weight_packed": words(n, -(-k // of_word), lambda r, c, i: at(w.u, r, of_word * c + i), w.bits),
        "weight_scale": w.scales.contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        rows = -(-n // of_word)
        out["weight_zero_point"] = words(
            rows, w.zeros.shape[1], lambda r, g, i: at(w.zeros, of_word * r + i, g), w.bits
        )
    return {**out, "weight_g_idx": torch.from_numpy(w.groups).to(torch.int32)} if g_idx else out


def gptq_config(**changes):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False} | changes


def awq_config(**changes):
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | changes


def compressed_tensors_config(weights=None, **changes):
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
    args |= {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "block_structure": None} | (weights or {})
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | changes


def model(dtype=torch.float16, **config):
    """A Llama with random weights and biases."""
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, **config})).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.copy_(torch.rand(parameter.shape))
    return made


def tensors(pack, weights, **config):
    """A folder's tensors: those of model(), with `weights` (module -> Weight) packed by `pack`."""
    state = dict(model(**config).state_dict())
    if config.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    for name, w in weights.items():
        del state[f"{name}.weight"]
        state.update((f"{name}.{suffix}", tensor) for suffix, tensor in pack(w).items())
    return state


def write(path, state, quantization=None, *, shards=1, **config):
    """Writes config.json, one or several safetensors files, and what lies beside them."""
    path.mkdir()
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float16", **CONFIG, **config}
    if quantization is not None:
        fields["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(fields))
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (path / "README.md").write_text("not copied")
    names = list(state)
    if shards == 1:
        safetensors.torch.save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return path
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[i::shards]}  # the tensors of a module lie in several files
        safetensors.torch.save_file(part, path / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def unalign(folder):
    """The headers of the folder's safetensors files get a length that no element's size divides, nor do two bytes."""
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + size].rstrip(b" ")
        header += b" " * (1 - len(header) % 2)
        path.unlink()  # models may still have the file mapped
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    return folder
