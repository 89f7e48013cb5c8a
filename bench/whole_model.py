#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a token of generate() costs in a whole model with random weights: transformers as it is, rooftile's cache and
steps (rt.accelerate), and rounded weights.

whole_model.py [--config llama3.1-8b] [--batch 1,16] [--prompt 512] [--tokens 256] [--device cuda|cpu] [--json FILE]

Greedy, no end of text. ms a token is the difference between a generate() of all tokens and one of half of them, so the
prompt and what generate() itself takes drop out; prompt_ms is a forward over the prompt into a new cache.
"""

import argparse
import json
import statistics
import time

import rooftile as rt
import torch
import transformers
from rooftile._results import COMMIT_HELP, head, machine

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
        "num_key_value_heads": 1, "vocab_size": 256,
    },
}  # fmt: skip
ROWS = {  # name: arguments of rt.accelerate, or None
    "transformers": None,
    "16 bits": {"kv_cache": "bf16"},
    "W4A16 + int4-kivi, 8-bit head": {"weights": "w4a16", "kv_cache": "int4-kivi", "head": "w8a16"},
}
_ROUNDS = 3


def model_of(config, device):
    torch.manual_seed(0)
    options = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIGS[config], **options)).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def seconds(call, device):
    """Of a call, until what it queued on a GPU is done."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def measure(model, batch, prompt, tokens, device):
    """The figures of one row."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(2, vocabulary, (batch, prompt), device=device)
    mask = torch.ones_like(ids)

    def generate(count):
        return lambda: model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)

    @torch.inference_mode()
    def prefill():
        model(ids, use_cache=True, logits_to_keep=1)

    generate(8)()  # first calls load kernels
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rounds = [[seconds(generate(n), device) for n in (tokens, tokens // 2)] for _ in range(_ROUNDS)]
    each = [1e3 * (whole - half) / (tokens - tokens // 2) for whole, half in rounds]
    return {
        "ms_per_token": statistics.median(each),
        "ms_per_token_rounds": each,
        "tok_s": 1e3 * batch / statistics.median(each),
        "prompt_ms": 1e3 * statistics.median(seconds(prefill, device) for _ in range(_ROUNDS)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--config", choices=CONFIGS, default="llama3.1-8b")
    parser.add_argument("--batch", default="1,16", help="sizes, with commas (default 1,16)")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help=COMMIT_HELP)
    parser.add_argument("--json", help="write the results file")
    args = parser.parse_args(argv)
    if args.prompt < 1 or args.tokens < 2:
        parser.error("--prompt must be at least 1, --tokens at least 2")
    rows = []
    print(f"{args.config}, prompt {args.prompt}, {args.tokens} tokens, {machine(args.device)}")
    print(f"{'':32} {'batch':>5} {'ms a token':>10} {'tok/s':>8} {'prompt ms':>9} {'peak GiB':>8}")
    for name, options in ROWS.items():
        model = model_of(args.config, args.device)
        if options is not None:
            rt.accelerate(model, progress=False, **options)
        for batch in map(int, args.batch.split(",")):
            row = measure(model, batch, args.prompt, args.tokens, args.device)
            peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
            print(
                f"{name:32} {batch:5} {row['ms_per_token']:10.3f} {row['tok_s']:8.0f} {row['prompt_ms']:9.1f} {peak:>8}"
            )
            rows.append({"name": name, "batch": batch, **row})
        del model
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if args.json:
        run = {name: getattr(args, name) for name in ("config", "prompt", "tokens", "device")}
        result = {**head("whole_model", args.commit), "machine": machine(args.device), "run": run, "rows": rows}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
