# SPDX-License-Identifier: Apache-2.0
"""GGUF files as transformers models: Llama and Qwen2, dequantised or with their own 4-bit codes."""

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import os

import numpy as np

from rooftile._arrays import check_flag, must_be, torch_device
from rooftile._progress import progress_bar
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.loaders.gguf_file import GGUFFile, describe, read_gguf

_CHUNK_ELEMENTS = 1 << 20  # dequantised at a time: the temporaries stay in the cache, the peak memory small


@dataclasses.dataclass(frozen=True)
class _Architecture:
    config: str  # class names in transformers
    model: str
    permuted_qk: bool  # the rows of Q and K lie in the order of interleaved RoPE
    qkv_bias: bool


_ARCHITECTURES = {
    "llama": _Architecture("LlamaConfig", "LlamaForCausalLM", permuted_qk=True, qkv_bias=False),
    "qwen2": _Architecture("Qwen2Config", "Qwen2ForCausalLM", permuted_qk=False, qkv_bias=True),
}

# keys under "<architecture>." that are read here, and those that change nothing in the forward pass
_READ_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
}
_INERT_KEYS = {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
_DTYPES = ("float32", "float16", "bfloat16")
_WEIGHTS = ("dequantize", "w4a16")
_KEPT_TYPES = ("Q4_0", "Q4_1")  # of layers: what W4Weight.from_gguf takes without loss
_KEPT_HEAD_TYPES = ("Q8_0",)  # of the head: what W8Weight.from_gguf takes


def load_gguf(path, *, dtype="bfloat16", weights="dequantize", device="cpu", progress=True):
    """The causal language model of a GGUF file, as a transformers model in eval mode, without gradients.

    path: a GGUF file of version 2 or 3; architecture llama or qwen2 (with its QKV bias); any mix of the tensor types
    the `gguf` package dequantises. dtype: of the weights and activations: float32, float16 or bfloat16, a torch.dtype
    or its name. weights: "dequantize" makes every linear layer an nn.Linear; "w4a16" keeps the codes, scales and
    minima of layers stored as Q4_0 and Q4_1 as they are (rooftile.nn.W4Linear), and of a head stored as Q8_0
    (rooftile.nn.W8Linear): lossless. It dequantises the rest. A head that is the embedding's tensor is then a module of
    its own; the embedding is always dequantised, which is what a lookup of its codes would round to. save_pretrained
    writes a folder to load. device: where the model goes, tensor by tensor: "cpu", "cuda", "cuda:1" or a torch.device.
    progress: a bar on stderr, or lines where that is no terminal.

    Raises ArgumentError naming the file and the key or tensor for a truncated, corrupt or inconsistent file, and
    NotSupportedError for what is sound but not mapped (another architecture, RoPE scaling other than linear, experts).
    """
    check_flag("load_gguf", "progress", progress)
    device = torch_device("load_gguf", device)
    model, parameters = open_gguf(path, dtype=dtype, weights=weights)
    if weights == "w4a16":
        parameters = _with_kept_head(model, parameters)
    # a buffer made on the meta device holds nothing: make it again
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    _fill(model, parameters, device, progress)
    if weights == "w4a16":
        from rooftile.integrations._models import refuse_resizing
        from rooftile.integrations.quantizer import RooftileConfig
        from rooftile.nn import PackedLinear

        if isinstance(model.get_output_embeddings(), PackedLinear):
            refuse_resizing(model)
        model.config.quantization_config = RooftileConfig.of(model)
    return model


@dataclasses.dataclass(frozen=True)
class GGUFParameter:
    """One parameter of the model: its name there, and the tensor of the file that it is.

    keeps_codes: whether `read` gives a W4Linear or W8Linear for the whole layer, without its bias, instead of a tensor.
    """

    name: str
    tensor: str
    file: GGUFFile
    heads: int  # of its permuted rows, or None
    dtype: object  # torch.dtype
    keeps_codes: bool

    @property
    def type(self):
        """The name of the GGUF type, such as "Q4_0"."""
        return self.file.tensors[self.tensor].type.name

    @property
    def shape(self):
        return self.file.tensors[self.tensor].shape

    @property
    def nbytes(self):
        """In the file."""
        return self.file.tensors[self.tensor].nbytes

    def read(self, dtype=None):
        """The W4Linear or W8Linear, or the tensor in `dtype` (a name; default self.dtype)."""
        if self.keeps_codes:
            return _read_codes(self.file, self.tensor, self.heads)
        return _read_parameter(self.file, self.tensor, self.heads, _torch_dtype(dtype or self.dtype))


def open_gguf(path, *, dtype="bfloat16", weights="dequantize"):
    """(model, [GGUFParameter]): load_gguf's model on the meta device, and what fills it. Its arguments and errors."""
    dtype = _torch_dtype(dtype)
    if weights not in _WEIGHTS:
        raise ArgumentError(f"weights {must_be(_WEIGHTS, weights)}")
    file = read_gguf(path)
    plan = _Plan(file)

    def parameter(name, tensor, heads):
        in_blocks = name.startswith("model.layers.") and name.endswith("_proj.weight")
        keeps_codes = weights == "w4a16" and in_blocks and file.tensors[tensor].type.name in _KEPT_TYPES
        return GGUFParameter(name, tensor, file, heads, dtype, keeps_codes)

    parameters = [parameter(name, tensor, heads) for name, (tensor, _, heads) in plan.parameters.items()]
    return plan.empty_model(dtype), parameters


def _with_kept_head(model, parameters):
    """The parameters with those of a head that keeps its codes; `model` then has a head apart from its embedding."""
    named = {p.name: p for p in parameters}
    head = named.get("lm_head.weight", named["model.embed_tokens.weight"])
    if head.type not in _KEPT_HEAD_TYPES:
        return parameters
    model.config.tie_word_embeddings = False
    kept = dataclasses.replace(head, name="lm_head.weight", keeps_codes=True)
    return [*(p for p in parameters if p.name != kept.name), kept]


def gguf_config(file):
    """The transformers configuration of `file` (a GGUFFile). Raises as load_gguf does."""
    return _Plan(file).config


def _torch_dtype(dtype):
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ArgumentTypeError(f"dtype {must_be(_DTYPES, dtype)}")
    return getattr(torch, name)


class _Plan:
    """Everything decided from the header: the configuration, and for every tensor its place in the model."""

    def __init__(self, file):
        self.file = file
        name = file.get("general.architecture", str)
        if name not in _ARCHITECTURES:
            raise NotSupportedError(
                f"{file.path}: architecture '{name}' is not supported; supported: {', '.join(_ARCHITECTURES)}"
            )
        self.name = name
        self.architecture = _ARCHITECTURES[name]
        self.refuse_unknown_keys()
        self.layers = self.size("block_count")
        self.hidden = self.size("embedding_length")
        self.ffn = self.size("feed_forward_length")
        self.heads = self.size("attention.head_count")
        self.kv_heads = self.size("attention.head_count_kv", self.heads)
        if self.hidden % self.heads:
            self.fail("attention.head_count", f"{self.heads} does not divide embedding_length {self.hidden}")
        if self.heads % self.kv_heads:
            self.fail("attention.head_count_kv", f"{self.kv_heads} does not divide attention.head_count {self.heads}")
        self.head_dim = self.size("attention.key_length", self.hidden // self.heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.size(key, self.head_dim) != self.head_dim:
                raise NotSupportedError(
                    f"{file.path}: metadata key '{name}.{key}' is {self.size(key)}, "
                    f"only the head dimension {self.head_dim} is supported"
                )
        if self.head_dim % 2:
            self.fail("attention.key_length", f"the head dimension {self.head_dim} must be even")
        self.tied = "output.weight" not in file.tensors
        self.parameters = self.map_tensors()
        self.config = self.make_config()

    def refuse_unknown_keys(self):
        for key in self.file.metadata:
            short = key.removeprefix(self.name + ".")
            if short != key and short not in _READ_KEYS | _INERT_KEYS:
                if (
                    short in ("expert_count", "expert_used_count", "attention.sliding_window")
                    and self.get(short, int) == 0
                ):
                    continue
                raise NotSupportedError(
                    f"{self.file.path}: metadata key '{key}' = {describe(self.file.metadata[key])} is not mapped; "
                    f"mapped: {', '.join(sorted(_READ_KEYS))}"
                )

    def get(self, key, kind, default=None):
        return self.file.get(f"{self.name}.{key}", kind, default)

    def size(self, key, default=None):
        full = f"{self.name}.{key}"
        if isinstance(self.file.metadata.get(full), list):
            raise NotSupportedError(f"{self.file.path}: metadata key '{full}' differs by layer, which is not supported")
        value = self.get(key, int, default)
        if not 0 < value < 2**31:
            self.fail(key, f"must be from 1 to 2^31 - 1, got {value}")
        return value

    def positive(self, key, default=None):
        value = self.get(key, float, default)
        if not (math.isfinite(value) and value > 0):
            self.fail(key, f"must be positive, got {value}")
        return value

    def fail(self, key, text):
        raise ArgumentError(f"{self.file.path}: metadata key '{self.name}.{key}': {text}")

    def map_tensors(self):
        """parameter name -> (tensor name, shape, heads of its permuted rows or None), checked against the directory."""
        file, arch = self.file, self.architecture
        if self.layers > len(file.tensors):
            self.fail("block_count", f"{self.layers} layers, but the file has {len(file.tensors)} tensors")
        if "token_embd.weight" not in file.tensors:
            raise ArgumentError(f"{file.path}: tensor 'token_embd.weight' is missing")
        self.vocab = file.tensors["token_embd.weight"].shape[0]
        if self.size("vocab_size", self.vocab) != self.vocab:
            self.fail("vocab_size", f"is {self.size('vocab_size')}, but 'token_embd.weight' has {self.vocab} rows")

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        table = {
            "model.embed_tokens.weight": ("token_embd.weight", (self.vocab, self.hidden), None),
            "model.norm.weight": ("output_norm.weight", (self.hidden,), None),
        }
        if not self.tied:
            table["lm_head.weight"] = ("output.weight", (self.vocab, self.hidden), None)
        permuted = (self.heads, self.kv_heads) if arch.permuted_qk else (None, None)
        for i in range(self.layers):
            layer = {
                "input_layernorm.weight": ("attn_norm.weight", (self.hidden,), None),
                "self_attn.q_proj.weight": ("attn_q.weight", (q, self.hidden), permuted[0]),
                "self_attn.k_proj.weight": ("attn_k.weight", (kv, self.hidden), permuted[1]),
                "self_attn.v_proj.weight": ("attn_v.weight", (kv, self.hidden), None),
                "self_attn.o_proj.weight": ("attn_output.weight", (self.hidden, q), None),
                "post_attention_layernorm.weight": ("ffn_norm.weight", (self.hidden,), None),
                "mlp.gate_proj.weight": ("ffn_gate.weight", (self.ffn, self.hidden), None),
                "mlp.up_proj.weight": ("ffn_up.weight", (self.ffn, self.hidden), None),
                "mlp.down_proj.weight": ("ffn_down.weight", (self.hidden, self.ffn), None),
            }
            if arch.qkv_bias:
                layer["self_attn.q_proj.bias"] = ("attn_q.bias", (q,), None)
                layer["self_attn.k_proj.bias"] = ("attn_k.bias", (kv,), None)
                layer["self_attn.v_proj.bias"] = ("attn_v.bias", (kv,), None)
            for parameter, (tensor, shape, heads) in layer.items():
                table[f"model.layers.{i}.{parameter}"] = (f"blk.{i}.{tensor}", shape, heads)

        for tensor, shape, _ in table.values():
            if tensor not in file.tensors:
                raise ArgumentError(f"{file.path}: tensor '{tensor}' is missing (architecture {self.name})")
            if file.tensors[tensor].shape != shape:
                came = list(file.tensors[tensor].shape)
                raise ArgumentError(f"{file.path}: tensor '{tensor}' has shape {came}, expected {list(shape)}")
        extra = file.tensors.keys() - {tensor for tensor, _, _ in table.values()}
        if extra:
            raise NotSupportedError(
                f"{file.path}: tensor '{min(extra)}' has no place in architecture {self.name} "
                f"({len(extra)} such tensors); leaving it out would change the model"
            )
        return table

    def make_config(self):
        import transformers

        special = {}
        for ours, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
            key = f"tokenizer.ggml.{key}_token_id"
            special[ours] = self.file.get(key, int) if key in self.file.metadata else None
            if special[ours] is not None and not 0 <= special[ours] < self.vocab:
                raise ArgumentError(
                    f"{self.file.path}: metadata key '{key}' is {special[ours]}, expected a token below {self.vocab}"
                )
        return getattr(transformers, self.architecture.config)(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.size("context_length"),
            rms_norm_eps=self.positive("attention.layer_norm_rms_epsilon"),
            rope_parameters=self.rope_parameters(),
            tie_word_embeddings=self.tied,
            **special,
        )

    def rope_parameters(self):
        rope = {"rope_type": "default", "rope_theta": self.positive("rope.freq_base", 10000.0)}
        scaled = self.get("rope.scaling.factor", float, 0.0) != 0
        scaling = self.get("rope.scaling.type", str, "linear" if scaled else "none")
        if scaling == "linear":
            rope.update(rope_type="linear", factor=self.positive("rope.scaling.factor"))
        elif scaling != "none":
            raise NotSupportedError(
                f"{self.file.path}: metadata key '{self.name}.rope.scaling.type' = '{scaling}' is not mapped; "
                "mapped: none, linear"
            )
        return rope

    def empty_model(self, dtype):
        """The model with every parameter on the meta device: nothing is allocated or initialised yet."""
        import torch
        import transformers

        with torch.device("meta"):
            model = getattr(transformers, self.architecture.model)(self.config)
        model.config.dtype = dtype
        model.config.name_or_path = os.path.basename(self.file.path)
        return model.requires_grad_(False).eval()


def _fill(model, parameters, device, progress):
    """Gives every parameter of `model` its tensor, and puts what keeps codes in the place of its linear layer."""
    total = sum(p.nbytes for p in parameters)
    what = f"Loading {os.path.basename(parameters[0].file.path)}"
    workers = min(4, os.cpu_count() or 1)  # NumPy and torch release the GIL; more threads would only wait for memory
    with (
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
        progress_bar(what, total, unit="bytes", show=progress) as advance,
    ):
        todo = ((p, pool.submit(p.read)) for p in parameters)
        jobs = collections.deque(itertools.islice(todo, 2 * workers))  # all that waits in host memory for its device
        try:
            while jobs:
                parameter, job = jobs.popleft()
                _place(model, parameter.name, job.result().to(device))
                jobs.extend(itertools.islice(todo, 1))
                advance(parameter.nbytes)
        finally:
            pool.shutdown(cancel_futures=True)
    model.tie_weights()


def _place(model, parameter, value):
    """Makes `value` the parameter; a module replaces the linear layer whose weight it is (a bias is placed later)."""
    import torch

    module, _, name = parameter.rpartition(".")
    if isinstance(value, torch.nn.Module):
        model.set_submodule(module, value)
    else:
        setattr(model.get_submodule(module), name, torch.nn.Parameter(value, requires_grad=False))


def _rows(file, tensor, heads):
    """The tensor as stored, uint8 [rows, bytes of a row]; with `heads`, its rows in the order of half-split RoPE."""
    data = file.read(tensor).reshape(math.prod(file.tensors[tensor].shape[:-1]), -1)
    return data if heads is None else data[half_split_rows(len(data), heads)]


def _read_parameter(file, tensor, heads, dtype):
    info = file.tensors[tensor]
    return _dequantize(file, info, _rows(file, tensor, heads), dtype).reshape(info.shape)


def _read_codes(file, tensor, heads):
    import torch

    from rooftile.gemm import W4Weight, W8Weight
    from rooftile.nn import linear_of

    info = file.tensors[tensor]
    data = torch.from_numpy(_rows(file, tensor, heads))
    kind = W4Weight if info.type.name in _KEPT_TYPES else W8Weight
    return linear_of(kind.from_gguf(data, info.type.name, info.shape)).eval()


def half_split_rows(rows, heads):
    """The row of a GGUF llama Q or K tensor that is row i of the transformers one, for every i: int64 [rows].

    GGUF keeps the two halves of a head interleaved (x0 y0 x1 y1 ...), transformers one after the other.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _dequantize(file, info, data, dtype):
    import gguf
    import torch

    out = torch.empty(len(data), info.shape[-1], dtype=dtype, device="cpu")
    step = max(1, _CHUNK_ELEMENTS // info.shape[-1])
    for i in range(0, len(data), step):
        try:
            # a corrupt scale may be inf or nan: it becomes a weight that shows, not a warning
            with np.errstate(all="ignore"):
                values = gguf.quants.dequantize(data[i : i + step], info.type)
        except NotImplementedError:
            raise NotSupportedError(
                f"{file.path}: tensor '{info.name}' has type {info.type.name}, "
                "which the gguf package does not dequantise"
            ) from None
        out[i : i + step] = torch.from_numpy(values)
    return out
