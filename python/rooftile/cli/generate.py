# SPDX-License-Identifier: Apache-2.0
"""`rooftile generate`: a model goes on with a text, token by token."""

import sys

from rooftile.cli._files import check_utf8, check_writable, read_text, write_json
from rooftile.cli._model import Model, add_model_arguments
from rooftile.errors import ArgumentError

SUMMARY = "go on with a text: a GGUF file or a folder, with rooftile's weights, caches and decode steps"


def add_arguments(parser):
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the text (default: standard input)")
    source.add_argument("--prompt-file", metavar="FILE", help="a file with the text, UTF-8")
    parser.add_argument("--json", metavar="FILE", help="write text, tokens and figures as JSON")


def run(args):
    inputs = {"MODEL": args.model, "--prompt-file": args.prompt_file}
    check_writable(args.json, "--json", **inputs)
    option, prompt = _prompt(args)

    import torch

    from rooftile._results import machine

    model = Model(args)
    ids = torch.tensor([model.tokenizer(prompt, verbose=False)["input_ids"]], dtype=torch.int64)
    if not ids.numel():
        raise ArgumentError(f"{option}: the text has no tokens")
    model.check_length(option, ids.shape[1], args.max_new_tokens)
    cache = model.new_cache()
    new, timing = model.write(ids.to(model.device), cache, args.max_new_tokens, show=True)
    print(
        f"{ids.shape[1]} tokens of prompt; {timing.words()}; {model.weight_bytes / 2**20:.1f} MiB of weights, "
        f"{cache.nbytes / 2**20:.1f} MiB of {model.format} cache",
        file=sys.stderr,
    )
    if args.json:
        report = {
            "model": str(args.model),
            "machine": machine(model.device),
            "steps": model.steps,
            "kv_cache": model.format,
            "prompt_tokens": ids[0].tolist(),
            "tokens": new.tolist(),
            "text": model.tokenizer.decode(new, skip_special_tokens=True),
            "load_seconds": model.load_seconds,
            "first_token_seconds": timing.first,
            "tokens_per_second": timing.rate,
            "weight_bytes": model.weight_bytes,
            "cache_bytes": cache.nbytes,
        }
        write_json(args.json, report, "--json")
    return 0


def _prompt(args):
    """(the option that gives it, the text)."""
    if args.prompt is not None:
        return "--prompt", check_utf8(args.prompt, "--prompt")
    if args.prompt_file is not None:
        return "--prompt-file", read_text(args.prompt_file, "--prompt-file")
    if sys.stdin is None or sys.stdin.isatty():
        raise ArgumentError("--prompt: expected a text, here, in --prompt-file or on standard input")
    try:
        return "standard input", check_utf8(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as e:
        raise ArgumentError(f"standard input: not UTF-8 text: {e.reason} at byte {e.start}") from e
