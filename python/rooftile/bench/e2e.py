# SPDX-License-Identifier: Apache-2.0
"""What a token of generate() costs in a whole model: transformers as it is and with its static cache, vLLM where it is
installed, rooftile's cache and steps (rt.accelerate), compressed caches and rounded weights.

Greedy, no end of text. ms a token is the difference between a generate() of all tokens and one of half of them, so
the prompt and what generate() itself takes drop out: the median of three rounds, of fewer where a round takes long;
prompt_ms is a forward over the prompt into a new cache. A step reads every weight but the embedding (which is read
where it is the head, too) and the cache, on average three quarters of the way through the tokens: those bytes, over
the time, are held against the rate at which this machine reads memory. Of rows with steps of their own the ops of a
step are timed too (bench layer's chain): what a token takes above its step lies between two steps.

CUMULATIVE are rows of a real model, each with what the one before has; with its perplexity, over blocks of 32 tokens
and a cache that is read as token by token.
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
from rooftile import evaluate
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
    """accelerate: arguments of rt.accelerate, None for transformers or vLLM; then kv_cache: a format of set_kv_cache,
    packed: whether the layers are rounded to 4 bits. generate: further arguments of generate().
    """

    accelerate: dict | None = None
    generate: dict = dataclasses.field(default_factory=dict)
    gpu_only: bool = False
    kv_cache: str | None = None
    packed: bool = False

    @property
    def format(self):
        """Of the cache; None: transformers' own."""
        return self.kv_cache if self.accelerate is None else self.accelerate["kv_cache"]

    @property
    def has_packed_layers(self):
        return self.packed or "weights" in (self.accelerate or {})

    def applied(self, model):
        if self.accelerate is not None:
            return rt.accelerate(model, progress=False, **self.accelerate)
        if self.packed:
            rt.quantize_(model, rt.W4A16(), progress=False)
        if self.kv_cache is not None:
            rt.set_kv_cache(model, self.kv_cache)
        return model


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
CUMULATIVE = {
    "transformers": Row(),
    "+ rooftile's attention": Row(kv_cache="bf16"),
    "+ int4-kivi cache": Row(kv_cache="int4-kivi"),
    "+ W4A16": Row(kv_cache="int4-kivi", packed=True),
    "+ program, 8-bit head": ROWS["W4A16 + int4-kivi, 8-bit head"],
}
_TOP = 5  # ops of a step that the table shows
_ROUNDS = 3
_SECONDS = 15  # after so many of a row no further round begins
_READ = 1 << 30  # bytes


def _named_config(name):
    tokens = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    return transformers.LlamaConfig(**CONFIGS[name], **tokens)


def random_model(source, device, row):
    """A model of such shapes in bfloat16, its weights random, as the row has it. source: a name of CONFIGS, or a
    folder, of which config.json is read.
    """
    config = _named_config(source) if source in CONFIGS else _stored_config(source)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return row.applied(model)


def stored_model(path, device, row):
    """The model of a GGUF file or a folder as the row has it; one with 4-bit weights keeps the 4-bit codes that are
    there.
    """
    if os.path.isdir(path):
        from rooftile.loaders.folder import folder_model

        model = folder_model(path, "bfloat16", device, "--model")
    else:
        from rooftile.loaders import load_gguf

        weights = "w4a16" if row.has_packed_layers else "dequantize"
        model = load_gguf(path, weights=weights, device=device, progress=False)
    return row.applied(model)


def chunks_of(path, text, count=8, length=512):
    """A text (None: the demo's) as `count` chunks of token ids [count, length] of the model in a file or a folder."""
    from rooftile.loaders import demo_text, load_tokenizer, read_gguf
    from rooftile.loaders.folder import folder_tokenizer

    tokenizer = folder_tokenizer(path, "--model") if os.path.isdir(path) else load_tokenizer(read_gguf(path))
    ids = tokenizer(demo_text() if text is None else text, verbose=False)["input_ids"]
    if len(ids) < length:
        raise ArgumentError(f"--text: expected {length} tokens or more, got {len(ids)}")
    return evaluate.split_chunks(ids, length, min(count, len(ids) // length))


def perplexity(model, row, chunks):
    """Of a row's model, as a decode step reads its cache."""
    from rooftile.cli.ppl import cache_variant

    variant = evaluate.Variant("", model) if row.format is None else cache_variant("", model, row.format)
    (score,) = evaluate.compare([variant], chunks, progress=False)
    return score.perplexity


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


def bytes_a_step(model, format, batch, tokens):
    """(of weights, of the cache of `tokens` tokens a row) that a decode step reads. format: None is 16 bits."""
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
    pairs = batch * tokens * text.num_hidden_layers * text.num_key_value_heads * dim
    return sum(seen.values()), round(pairs * bits_per_pair(format or "bf16", text, "bfloat16") / 8)


def rows_on(device, only=(), source="", rows=ROWS):
    """Names of `rows` that run on a device (vLLM's where it is installed, for 16-bit weights) and, if `only` has texts,
    hold one of them; raises ArgumentError for a text that is in none.
    """
    has_vllm = importlib.util.find_spec(VLLM) is not None and not (
        os.path.isfile(source) or (os.path.isdir(source) and hasattr(_stored_config(source), "quantization_config"))
    )
    there = [name for name, row in rows.items() if (device != "cpu" or not row.gpu_only) and (has_vllm or name != VLLM)]
    for text in only:
        if not any(text in name for name in there):
            raise ArgumentError(f"--only: expected a part of one of {', '.join(map(repr, there))}, got {text!r}")
    return [name for name in there if not only or any(text in name for text in only)]


def measure(model, row, batch, prompt, tokens, device, read, parts=None):
    """The figures of one row. parts: as of run()."""
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
    held = prompt + tokens * 3 // 4
    weights, cache = bytes_a_step(model.shapes if vllm else model, row.format, batch, held)
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
        **({} if parts is None or row.accelerate is None else _step_figures(parts, model, row, batch, held, ms, read)),
    }


def _step_figures(parts, model, row, batch, tokens, ms, read):
    """Of a row with steps of its own: "step_us", "between_us" (two steps), and a step's "ops", the longest first."""
    step, ops = parts(model, row.format, batch, tokens)
    for op in ops:
        op["percent_of_read_rate"] = 100 * op["bytes"] / op["us"] / 1e3 / read
    return {"step_us": step, "between_us": 1e3 * ms - step, "ops": ops}


def check_length(config, tokens, options):
    """options: those that ask for so many tokens a row."""
    most = config.get_text_config(decoder=True).max_position_embeddings
    if tokens > most:
        raise ArgumentError(f"{options}: {tokens} tokens are more than the model's context of {most}")


def run(source, batches, prompt, tokens, device, rows, advance=lambda: None, *, random=False, chunks=None, parts=None):
    """(rows, how fast memory is read in GB/s). source: a name of CONFIGS, or the path of a model. rows: names of ROWS,
    with chunks, on which perplexity is measured, of CUMULATIVE. random: a path's weights are not read. parts: what
    times the ops of a step, as bench.layer's; None: nothing does.

    advance is called after each row.
    """
    make = random_model if random or source in CONFIGS else stored_model
    kinds = ROWS if chunks is None else CUMULATIVE

    def check(config):
        check_length(config, prompt + tokens, "--prompt, --tokens")

    if VLLM in rows:
        check(_named_config(source) if source in CONFIGS else _stored_config(source))
    read, found = read_gb_s(device), []

    def add_rows(model, name):
        if name != VLLM:
            check(model.config)
        quality = {} if chunks is None else {"perplexity": perplexity(model, kinds[name], chunks)}
        for batch in batches:
            figures = measure(model, kinds[name], batch, prompt, tokens, device, read, parts)
            found.append({"name": name, "batch": batch, **figures, **quality})
            advance()

    for name in rows:
        if name == VLLM:
            try:
                add_rows(vllm_model(source, max(batches), prompt + tokens), name)
            except Exception as error:  # another library's, of any kind; the figures of the other rows stay
                print(f"{VLLM} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            add_rows(make(source, device, kinds[name]), name)
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
    scored = any("perplexity" in row for row in rows)
    titles = ("batch", "ms a token", "tok/s", "prompt ms", "MB a step", "of read rate", "peak GiB")
    for title in titles + ("perplexity",) * scored:
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
            *([f"{row['perplexity']:.3f}"] if scored else []),
        )
    return shown


def table_of_steps(rows):
    """Where the steps of rows with ops go: the longest ops against the rate at which memory is read, the others, and
    what lies between two steps. A rich.table.Table, or None.
    """
    from rich import box
    from rich.table import Table

    rows = [row for row in rows if "ops" in row]
    if not rows:
        return None
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for title in ("times", "us", "of a token", "of read rate"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        token = 1e3 * row["ms_per_token"]
        shown.add_row(f"{row['name']}, batch {row['batch']}", "", f"{token:.1f}", "100 %", "")
        top, others = row["ops"][:_TOP], row["ops"][_TOP:]
        for op in top:
            rate = f"{op['percent_of_read_rate']:.0f} %" if op["bytes"] else ""
            share = f"{100 * op['us'] / token:.0f} %"
            shown.add_row(f"  {op['op']}", str(op["times"]), f"{op['us']:.1f}", share, rate)
        rest = [("other ops", sum(op["us"] for op in others)), ("between two steps", row["between_us"])]
        for what, us in rest:
            shown.add_row(f"  {what}", "", f"{us:.1f}", f"{100 * us / token:.0f} %", "")
        shown.add_section()
    return shown
