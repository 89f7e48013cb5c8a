# SPDX-License-Identifier: Apache-2.0
"""What a token of generate() costs in a whole model: transformers as it is and with its static cache, vLLM where it is
installed, rooftile's cache and steps (rt.accelerate), compressed caches and rounded weights.

Greedy, no end of text. ms a token is the difference between a generate() of all tokens and one of half of them, so
the prompt and what generate() itself takes drop out: the median of three rounds, of fewer where a round takes long;
prompt_ms is a forward over the prompt into a new cache. A step reads every weight but the embedding (which is read
where it is the head, too) and the cache, on average three quarters of the way through the tokens: those bytes, over
the time, are held against the rate at which this machine reads memory.
"""

import dataclasses
import functools
import gc
import importlib.util
import os
import statistics
import sys
import time

import torch
import transformers
from transformers.generation import BaseStreamer

import rooftile as rt
from rooftile.bench.vllm_model import VllmModel
from rooftile.errors import ArgumentError

_LLAMA = {"rope_theta": 500000.0, "max_position_embeddings": 131072}
CONFIGS = {
    "llama3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, **_LLAMA,
    },
    "llama3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True, **_LLAMA,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 512,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """accelerate: arguments of rt.accelerate, None for transformers or vLLM. generate: further ones of generate()."""

    accelerate: dict | None = None
    generate: dict = dataclasses.field(default_factory=dict)
    gpu_only: bool = False


VLLM = "vllm"  # its row, and its package
ROWS = {
    "hf.eager": Row(),
    "hf.static": Row(generate={"cache_implementation": "static"}, gpu_only=True),  # transformers compiles it there
    "16 bits": Row({"kv_cache": "bf16"}),
    "16 bits + int4-kivi": Row({"kv_cache": "int4-kivi"}),
    "W4A16, 8-bit head": Row({"weights": "w4a16", "kv_cache": "bf16", "head": "w8a16"}),
    "W4A16 + int4-kivi, 8-bit head": Row({"weights": "w4a16", "kv_cache": "int4-kivi", "head": "w8a16"}),
    VLLM: Row(gpu_only=True),  # the last one: vLLM does not give back all memory
}
_ROUNDS = 3
_SECONDS = 15  # after so many of a row no further round begins
_READ = 1 << 30  # bytes


def _named_config(name):
    tokens = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    return transformers.LlamaConfig(**CONFIGS[name], **tokens)


def random_model(config, device, options):
    """A Llama of such shapes in bfloat16, its weights random, with what rt.accelerate makes of it."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = transformers.LlamaForCausalLM(_named_config(config)).eval()
        finally:
            torch.set_default_dtype(torch.float32)
    return model if options is None else rt.accelerate(model, progress=False, **options)


def stored_model(path, device, options):
    """The model of a GGUF file or a folder; a row with 4-bit weights keeps the 4-bit codes that are there."""
    packed = options is not None and "weights" in options
    if os.path.isdir(path):
        from rooftile.loaders.folder import folder_model

        model = folder_model(path, "bfloat16", device, "--model")
    else:
        from rooftile.loaders import load_gguf

        model = load_gguf(path, weights="w4a16" if packed else "dequantize", device=device, progress=False)
    return model if options is None else rt.accelerate(model, progress=False, **options)


def vllm_model(source, rows, tokens):
    """A VllmModel of `source`, as run() takes it: a named config's shapes, or what a folder holds."""
    if source in CONFIGS:
        return VllmModel(_named_config(source), None, rows, tokens)
    return VllmModel(_stored_config(source), source, rows, tokens)


def _stored_config(folder):
    from rooftile.loaders.folder import folder_config

    return folder_config(folder, "--model")


class Clock(BaseStreamer):
    """Notes when generate() hands over each token, in seconds from its making."""

    def __init__(self):
        self.begin, self.at = time.perf_counter(), []

    def put(self, tokens=None):
        self.at.append(time.perf_counter() - self.begin)

    def end(self):
        pass


def seconds(call, device):
    """Of a call, until what it queued on a GPU is done."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def read_gb_s(device):
    """How fast this machine reads memory."""
    if device != "cpu":
        from rooftile.bench import timing

        return timing.read_gb_s(timing.GpuTimer())
    x = torch.zeros(_READ // 8, dtype=torch.int64)
    return _READ / min(seconds(x.sum, device) for _ in range(5)) / 1e9


def bytes_a_step(model, options, batch, tokens):
    """(of weights, of the cache of `tokens` tokens a row) that a decode step reads."""
    from rooftile.cli.ppl import bits_per_pair
    from rooftile.integrations._models import head_dim

    def place(tensor):
        return tensor.data_ptr() or id(tensor)  # on the meta device there is no memory

    text = model.config.get_text_config(decoder=True)
    embedding = model.get_input_embeddings().weight
    tied = embedding is getattr(model.get_output_embeddings(), "weight", None)
    seen = {place(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    if not tied:
        del seen[place(embedding)]
    dim = head_dim(text)
    format = "bf16" if options is None else options["kv_cache"]
    pairs = batch * tokens * text.num_hidden_layers * text.num_key_value_heads * dim
    return sum(seen.values()), round(pairs * bits_per_pair(format, text, "bfloat16") / 8)


def rows_on(device, only=(), source=""):
    """Names of ROWS that run on a device (vLLM's where it is installed, for 16-bit weights) and, if `only` has texts,
    hold one of them; raises ArgumentError for a text that is in none.
    """
    has_vllm = importlib.util.find_spec(VLLM) is not None and not (
        os.path.isfile(source) or (os.path.isdir(source) and hasattr(_stored_config(source), "quantization_config"))
    )
    there = [name for name, row in ROWS.items() if (device != "cpu" or not row.gpu_only) and (has_vllm or name != VLLM)]
    for text in only:
        if not any(text in name for name in there):
            raise ArgumentError(f"--only: expected a part of one of {', '.join(map(repr, there))}, got {text!r}")
    return [name for name in there if not only or any(text in name for text in only)]


def measure(model, row, batch, prompt, tokens, device, read):
    """The figures of one row."""
    ids = torch.randint(2, model.config.vocab_size, (batch, prompt), device=device)
    mask = torch.ones_like(ids)
    ending = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate(count):
        return lambda: model.generate(ids, attention_mask=mask, max_new_tokens=count, **ending, **row.generate)

    @torch.inference_mode()
    def prefill():
        model(ids, use_cache=True, logits_to_keep=1)

    # load kernels; static caches compile for each length
    for count in (tokens, tokens // 2) if row.generate else (min(8, tokens),):
        generate(count)()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    rounds, begin = [], time.perf_counter()
    while not rounds or (len(rounds) < _ROUNDS and time.perf_counter() - begin < _SECONDS):
        rounds.append([seconds(generate(n), device) for n in (tokens, tokens // 2)])
    each = [1e3 * (whole - half) / (tokens - tokens // 2) for whole, half in rounds]
    ms = statistics.median(each)
    vllm = isinstance(model, VllmModel)
    weights, cache = bytes_a_step(model.shapes if vllm else model, row.accelerate, batch, prompt + tokens * 3 // 4)
    rate = (weights + cache) / ms / 1e6
    return {
        "ms_per_token": ms,
        "ms_per_token_rounds": each,
        "tok_s": 1e3 * batch / ms,
        "prompt_ms": 1e3 * statistics.median(seconds(prefill, device) for _ in range(_ROUNDS)),
        "weight_bytes_a_step": weights,
        "cache_bytes_a_step": cache,
        "gb_s": rate,
        "percent_of_read_rate": 100 * rate / read,
        # vLLM takes what it is given, for its cache
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" and not vllm else None,
    }


def check_length(config, tokens, options):
    """options: those that ask for so many tokens a row."""
    most = config.get_text_config(decoder=True).max_position_embeddings
    if tokens > most:
        raise ArgumentError(f"{options}: {tokens} tokens are more than the model's context of {most}")


def run(source, batches, prompt, tokens, device, rows, advance=lambda: None):
    """(rows, how fast memory is read in GB/s). source: a name of CONFIGS, or the path of a model. rows: names of ROWS.

    advance is called after each row.
    """
    make = random_model if source in CONFIGS else stored_model

    def check(config):
        check_length(config, prompt + tokens, "--prompt, --tokens")

    if VLLM in rows:
        check(_named_config(source) if source in CONFIGS else _stored_config(source))
    read, found = read_gb_s(device), []

    def add_rows(model, name):
        if name != VLLM:
            check(model.config)
        for batch in batches:
            figures = measure(model, ROWS[name], batch, prompt, tokens, device, read)
            found.append({"name": name, "batch": batch, **figures})
            advance()

    for name in rows:
        if name == VLLM:
            try:
                add_rows(vllm_model(source, max(batches), prompt + tokens), name)
            except Exception as error:  # another library's, of any kind; the figures of the other rows stay
                print(f"{VLLM} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            add_rows(make(source, device, ROWS[name].accelerate), name)
        gc.collect()  # an accelerated model's forward holds the model
        if device != "cpu":
            torch.cuda.empty_cache()
    return found, read


def table(rows):
    """What the terminal shows, a rich.table.Table."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("", no_wrap=True)
    add = functools.partial(shown.add_column, justify="right", no_wrap=True)
    for title in ("batch", "ms a token", "tok/s", "prompt ms", "MB a step", "of read rate", "peak GiB"):
        add(title)
    for row in rows:
        read = row["weight_bytes_a_step"] + row["cache_bytes_a_step"]
        shown.add_row(
            row["name"],
            str(row["batch"]),
            f"{row['ms_per_token']:.3f}",
            f"{row['tok_s']:.0f}",
            f"{row['prompt_ms']:.1f}",
            f"{read / 1e6:.1f}",
            f"{row['percent_of_read_rate']:.0f} %",
            "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
        )
    return shown
